/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_merge: the lists of all ranks side by side, object after object: which blocks do the same ranks want?
 *
 * Every list is read once, from its beginning to its end, and only the current object of it is kept. What one rank
 * alone wants leaves only its number of bytes; what several want becomes a segment of their group. Groups are numbered
 * in the order in which they are found, so all ranks give them the same numbers. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/table.h"
#include "core/load/exchange/exchange_internal.h"

#define MERGE_DISTINCT_MAX (UINT64_C(1) << 46) /* so that no sum overflows, and a plan takes at most a few 100 MiB */

struct merge {
	const struct exchange_list *lists;
	const struct exchange_terms *terms;
	struct exchange_plan *p;
	struct exchange_cursor *cursors; /* one a list */
	uint32_t *heap, nheap;           /* lists, the one with the first object at the top */
	uint32_t own, own_object;        /* this rank's list, and the number of its current object */
	uint32_t *at, nat;               /* lists that have the current object, ascending */
	uint32_t *run;                   /* of each of these: the run that is not over */
	uint32_t *set, nset;             /* of these, those that want the current blocks */
	uint32_t *bounds; size_t nbounds, bounds_room; /* blocks of the object where something begins or ends */
	struct base_table table;         /* groups by their lists */
	uint32_t **sets, *nsets; uint32_t sets_room, nsets_room; /* of each group: its lists */
};

/* ---- the lists that come first ---- */

static bool heap_before(const struct merge *m, uint32_t a, uint32_t b)
{
	int c = exchange_key_compare(&m->cursors[a].key, &m->cursors[b].key);

	return c ? c < 0 : a < b;
}

static void heap_sink(struct merge *m, uint32_t i)
{
	for (uint32_t child; (child = 2 * i + 1) < m->nheap; i = child) {
		uint32_t moved = m->heap[i];

		if (child + 1 < m->nheap && heap_before(m, m->heap[child + 1], m->heap[child]))
			child++;
		if (!heap_before(m, m->heap[child], moved))
			return;
		m->heap[i] = m->heap[child];
		m->heap[child] = moved;
	}
}

static int list_bad(const struct merge *m, uint32_t list, int r, struct base_error *err)
{
	if (r == -ENOMEM)
		return base_no_memory_for(err, "the plan of an exchange");
	return base_error_set(err, r, "rank %u sent a list of what it wants that breaks its format",
		m->lists[list].ranks[0]);
}

/* ---- groups ---- */

static int group_new(struct merge *m, uint32_t hash, uint32_t *ret_group)
{
	struct exchange_plan *p = m->p;
	struct exchange_group g = {0};
	uint32_t *set, n = 0;

	for (uint32_t i = 0; i < m->nset; i++)
		n += m->lists[m->set[i]].nranks;
	if (base_array_room(p->groups, p->groups_room, (size_t)p->ngroups + 1) < 0 ||
		base_array_room(m->sets, m->sets_room, (size_t)p->ngroups + 1) < 0 ||
		base_array_room(m->nsets, m->nsets_room, (size_t)p->ngroups + 1) < 0 ||
		base_table_reserve(&m->table, 1) < 0)
		return -ENOMEM;
	set = malloc(m->nset * sizeof *set);
	g.ranks = malloc(n * sizeof *g.ranks);
	if (!set || !g.ranks) {
		free(set);
		free(g.ranks);
		return -ENOMEM;
	}
	memcpy(set, m->set, m->nset * sizeof *set);
	for (uint32_t i = 0; i < m->nset; i++) {
		const struct exchange_list *l = &m->lists[m->set[i]];

		for (uint32_t k = 0; k < l->nranks; k++) { /* both are ascending */
			uint32_t to = g.n++;

			for (; to > 0 && g.ranks[to - 1] > l->ranks[k]; to--)
				g.ranks[to] = g.ranks[to - 1];
			g.ranks[to] = l->ranks[k];
		}
	}
	m->sets[p->ngroups] = set;
	m->nsets[p->ngroups] = m->nset;
	p->groups[p->ngroups] = g;
	base_table_add(&m->table, hash, p->ngroups);
	*ret_group = p->ngroups++;
	return 0;
}

/* The group of the ranks that want the current blocks. */
static int group_find(struct merge *m, uint32_t *ret_group)
{
	uint32_t hash = base_table_hash(m->set, m->nset * sizeof *m->set), i;
	size_t at = 0;

	while ((i = base_table_next(&m->table, hash, &at)) != BASE_TABLE_NONE)
		if (m->nsets[i] == m->nset && memcmp(m->sets[i], m->set, m->nset * sizeof *m->set) == 0) {
			*ret_group = i;
			return 0;
		}
	return group_new(m, hash, ret_group);
}

/* ---- one object ---- */

static int object_bounds(struct merge *m)
{
	size_t n = 0;

	for (uint32_t i = 0; i < m->nat; i++)
		n += 2 * (size_t)m->cursors[m->at[i]].nruns;
	if (base_array_room(m->bounds, m->bounds_room, n) < 0)
		return -ENOMEM;
	n = 0;
	for (uint32_t i = 0; i < m->nat; i++) {
		const struct exchange_cursor *c = &m->cursors[m->at[i]];

		for (uint32_t k = 0; k < c->nruns; k++) {
			m->bounds[n++] = c->runs[k].first;
			m->bounds[n++] = c->runs[k].first + c->runs[k].n;
		}
	}
	m->nbounds = base_array_unique(m->bounds, n, sizeof *m->bounds, base_compare_32);
	return 0;
}

/* Finds the lists that want the blocks from `first` on. Returns how many ranks these are. */
static uint32_t object_set(struct merge *m, uint32_t first)
{
	uint32_t ranks = 0;

	m->nset = 0;
	for (uint32_t i = 0; i < m->nat; i++) {
		const struct exchange_cursor *c = &m->cursors[m->at[i]];
		uint32_t *run = &m->run[i];

		while (*run < c->nruns && c->runs[*run].first + c->runs[*run].n <= first)
			++*run;
		if (*run < c->nruns && c->runs[*run].first <= first) {
			m->set[m->nset++] = m->at[i];
			ranks += m->lists[m->at[i]].nranks;
		}
	}
	return ranks;
}

static int segment_add(struct merge *m, uint64_t raw_len, uint32_t first, uint32_t n)
{
	struct exchange_plan *p = m->p;
	uint64_t bytes = exchange_bytes(raw_len, first, n);
	uint32_t group;

	if (p->distinct + bytes > MERGE_DISTINCT_MAX)
		return -BASE_ELIMIT;
	if (group_find(m, &group) < 0 || base_array_room(p->segments, p->segments_room, p->nsegments + 1) < 0)
		return -ENOMEM;
	p->segments[p->nsegments++] = (struct exchange_segment){.object = (uint32_t)p->nobjects, .first = first, .n = n,
		.group = group};
	p->groups[group].bytes += bytes;
	p->groups[group].objects++;
	p->distinct += bytes;
	p->wanted += bytes * p->groups[group].n;
	return 0;
}

static int alone_add(struct merge *m, uint64_t raw_len, uint32_t first, uint32_t n)
{
	struct exchange_plan *p = m->p;

	p->reads[m->lists[m->set[0]].ranks[0]] += exchange_bytes(raw_len, first, n);
	if (m->set[0] != m->own)
		return 0;
	if (base_array_room(p->alone, p->alone_room, p->nalone + 1) < 0)
		return -ENOMEM;
	p->alone[p->nalone++] = (struct exchange_alone){m->own_object, first, n};
	return 0;
}

static int object_merge(struct merge *m, const struct exchange_key *key)
{
	struct exchange_plan *p = m->p;
	size_t segments = p->nsegments, alone = p->nalone;
	uint32_t mine = EXCHANGE_NONE;
	int r = object_bounds(m);

	for (uint32_t i = 0; i < m->nat; i++) {
		m->run[i] = 0;
		if (m->at[i] == m->own)
			mine = m->own_object;
	}
	for (size_t i = 0; r == 0 && i + 1 < m->nbounds; i++) {
		uint32_t first = m->bounds[i], n = m->bounds[i + 1] - first, ranks = object_set(m, first);

		if (ranks == 1)
			r = alone_add(m, key->raw_len, first, n);
		else if (ranks > 1)
			r = segment_add(m, key->raw_len, first, n);
	}
	if (r < 0)
		return r;
	if (p->nsegments == segments) { /* it is read like all that no other rank wants */
		p->nalone = alone;
		return 0;
	}
	if (p->nobjects == UINT32_MAX - 1 || base_array_room(p->objects, p->objects_room, p->nobjects + 1) < 0)
		return -ENOMEM;
	p->objects[p->nobjects++] = (struct exchange_object){*key, mine};
	return 0;
}

/* ---- all of them ---- */

static int list_next(struct merge *m, uint32_t list, bool *ret_more, struct base_error *err)
{
	struct exchange_cursor *c = &m->cursors[list];
	int r = exchange_cursor_next(c);

	if (r > 0 && m->terms->whole && (c->nruns != 1 || c->runs[0].n != base_block_count(c->key.raw_len)))
		r = -BASE_EFORMAT;
	*ret_more = r > 0;
	return r < 0 ? list_bad(m, list, r, err) : 0;
}

/* Takes the lists that have the first object from the heap, and puts them back at their next one. */
static int merge_step(struct merge *m, struct base_error *err)
{
	struct exchange_key key = m->cursors[m->heap[0]].key;
	bool more;
	int r;

	for (m->nat = 0; m->nheap && exchange_key_compare(&m->cursors[m->heap[0]].key, &key) == 0;) {
		m->at[m->nat++] = m->heap[0];
		m->heap[0] = m->heap[--m->nheap];
		heap_sink(m, 0);
	}
	r = object_merge(m, &key);
	if (r == -BASE_ELIMIT)
		return base_error_set(err, r, "several ranks want more than %llu TiB",
			(unsigned long long)(MERGE_DISTINCT_MAX >> 40));
	if (r < 0)
		return base_no_memory_for(err, "the plan of an exchange");
	for (uint32_t i = 0; i < m->nat; i++) {
		m->own_object += m->at[i] == m->own;
		r = list_next(m, m->at[i], &more, err);
		if (r < 0)
			return r;
		if (!more)
			continue;
		m->heap[m->nheap] = m->at[i];
		for (uint32_t k = m->nheap++; k > 0 && heap_before(m, m->heap[k], m->heap[(k - 1) / 2]);
			k = (k - 1) / 2) {
			uint32_t moved = m->heap[k];

			m->heap[k] = m->heap[(k - 1) / 2];
			m->heap[(k - 1) / 2] = moved;
		}
	}
	return 0;
}

static int merge_begin(struct merge *m, uint32_t nlists, struct base_error *err)
{
	m->cursors = calloc((size_t)nlists + 1, sizeof *m->cursors);
	m->heap = calloc((size_t)nlists + 1, sizeof *m->heap);
	m->at = calloc((size_t)nlists + 1, sizeof *m->at);
	m->run = calloc((size_t)nlists + 1, sizeof *m->run);
	m->set = calloc((size_t)nlists + 1, sizeof *m->set);
	m->p->reads = calloc(m->terms->size, sizeof *m->p->reads);
	if (!m->cursors || !m->heap || !m->at || !m->run || !m->set || !m->p->reads)
		return base_no_memory_for(err, "the plan of an exchange");
	m->own = EXCHANGE_NONE;
	for (uint32_t i = 0; i < nlists; i++) {
		bool more;
		int r;

		exchange_cursor_init(&m->cursors[i], m->lists[i].bytes, m->lists[i].len, m->terms->npacks);
		for (uint32_t k = 0; k < m->lists[i].nranks; k++)
			if (m->lists[i].ranks[k] == m->terms->rank)
				m->own = i;
		r = list_next(m, i, &more, err);
		if (r < 0)
			return r;
		if (more)
			m->heap[m->nheap++] = i;
	}
	for (uint32_t i = m->nheap / 2; i-- > 0;)
		heap_sink(m, i);
	return 0;
}

int exchange_merge(const struct exchange_list *lists, uint32_t nlists, const struct exchange_terms *terms,
	struct exchange_plan *p, struct base_error *err)
{
	struct merge m = {.lists = lists, .terms = terms, .p = p};
	int r = merge_begin(&m, nlists, err);

	while (r == 0 && m.nheap)
		r = merge_step(&m, err);
	for (uint32_t i = 0; m.cursors && i < nlists; i++)
		exchange_cursor_release(&m.cursors[i]);
	for (uint32_t i = 0; i < p->ngroups && m.sets; i++)
		free(m.sets[i]);
	free(m.cursors);
	free(m.heap);
	free(m.at);
	free(m.run);
	free(m.set);
	free(m.bounds);
	free(m.sets);
	free(m.nsets);
	base_table_release(&m.table);
	return r;
}
