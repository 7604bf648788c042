/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_wants: from the needs of a fill to the list that the other ranks get; and, once it is known what is shared,
 * which needs stay with the fill.
 *
 * Each rank reads for itself, and does not list: pieces that a row holds inline, objects that are more than
 * FILL_GROUP_NEEDS pieces (mostly zeros: little to read, much to copy), and with LOAD_FILL_REHASH those longer than a
 * bucket, which are read as a whole. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/load/exchange/exchange_internal.h"

/* ---- what this rank wants ---- */

struct listing {
	struct load_exchange *x;
	struct exchange_key last;
	struct fill_worker w;            /* for fill_wanted_runs */
	struct exchange_run *runs; size_t runs_room;
	uint32_t nruns;
};

static struct exchange_key need_key(const struct load_fill *f, const struct fill_need *need)
{
	const struct pack_object_ref *ref = need_ref(f, need);
	uint8_t rest[BASE_DIGEST_BYTES + 24];

	memcpy(rest, ref->digest.bytes, BASE_DIGEST_BYTES);
	base_put64(rest + BASE_DIGEST_BYTES, ref->stored_len);
	base_put64(rest + BASE_DIGEST_BYTES + 8, ref->checks);
	base_put64(rest + BASE_DIGEST_BYTES + 16, ref->codec);
	return (struct exchange_key){.pack = need->pack, .offset = need->offset, .raw_len = ref->raw_len,
		.hash = base_xxh64_of(0, rest, sizeof rest)};
}

static int listing_run(void *arg, uint64_t first, uint64_t n)
{
	struct listing *l = arg;

	if (base_array_room(l->runs, l->runs_room, (size_t)l->nruns + 1) < 0)
		return -ENOMEM;
	l->runs[l->nruns++] = (struct exchange_run){(uint32_t)first, (uint32_t)n};
	return 0;
}

/* The blocks that needs [first, end) want of their object, as runs. */
static int listing_runs(struct listing *l, size_t first, size_t end, uint64_t raw_len)
{
	l->nruns = 0;
	if (l->x->f->flags & LOAD_FILL_REHASH || fill_group_is_whole(l->x->f, first, end))
		return listing_run(l, 0, base_block_count(raw_len));
	return fill_wanted_runs(&l->w, first, end, listing_run, l);
}

static int listing_add(struct listing *l, size_t first, size_t end, const struct exchange_key *key)
{
	struct load_exchange *x = l->x;
	uint32_t blocks = 0;

	if (listing_runs(l, first, end, key->raw_len) < 0 ||
		base_array_room(x->mine, x->mine_room, x->nmine + 1) < 0)
		return -ENOMEM;
	for (uint32_t i = 0; i < l->nruns; i++)
		blocks += l->runs[i].n;
	x->mine[x->nmine] = (struct exchange_mine){.first = first, .end = end};
	atomic_init(&x->mine[x->nmine].left, blocks);
	atomic_init(&x->mine[x->nmine++].lost, false);
	exchange_list_add(&x->list, &l->last, key, l->runs, l->nruns);
	return x->list.error;
}

/* Can it be shared? Its place must not be that of the last one that was listed. */
static bool key_shares(const struct listing *l, const struct exchange_key *key, size_t needs)
{
	const struct load_exchange *x = l->x;

	if (key->pack == FILL_INLINE || key->raw_len == 0 || key->raw_len > STORE_OBJECT_MAX_BYTES / 2)
		return false;
	if (x->f->flags & LOAD_FILL_REHASH && key->raw_len > EXCHANGE_BUCKET_BYTES)
		return false;
	return needs <= FILL_GROUP_NEEDS && (x->nmine == 0 || key->pack != l->last.pack ||
		key->offset != l->last.offset);
}

int exchange_wants(struct load_exchange *x)
{
	struct load_fill *f = x->f;
	struct listing l = {.x = x, .w.f = f};
	int r = 0;

	x->needs = f->needs;
	for (size_t i = 0, end; r == 0 && i < f->nneeds; i = end) {
		struct exchange_key key = {.pack = FILL_INLINE}, next;

		end = i + 1;
		if (f->needs[i].pack == FILL_INLINE)
			continue;
		for (key = need_key(f, &f->needs[i]); end < f->nneeds; end++) {
			if (f->needs[end].pack != key.pack || f->needs[end].offset != key.offset)
				break;
			next = need_key(f, &f->needs[end]);
			if (exchange_key_compare(&key, &next) != 0)
				break;
		}
		if (key_shares(&l, &key, end - i))
			r = listing_add(&l, i, end, &key);
	}
	fill_worker_release(&l.w);
	free(l.runs);
	return r;
}

/* ---- what is split off from the fill's own tasks ---- */

/* The number in this rank's list of the object of a segment, if this rank wants the segment; else EXCHANGE_NONE. */
static uint32_t segment_mine(const struct load_exchange *x, const struct exchange_segment *s)
{
	const struct exchange_group *g = &x->plan.groups[s->group];

	for (uint32_t i = 0; i < g->n; i++)
		if (g->ranks[i] == x->comm->rank)
			return x->plan.objects[s->object].mine;
	return EXCHANGE_NONE;
}

/* Marks the objects of which buckets [0, n) have something for this rank. */
static uint8_t *mine_marked(const struct load_exchange *x, size_t n)
{
	uint8_t *marked = calloc(x->nmine + 1, 1);

	for (size_t i = 0; marked && i < n; i++)
		for (uint32_t k = 0; k < x->plan.buckets[i].nsegments; k++) {
			uint32_t mine = segment_mine(x, &x->plan.segments[x->plan.buckets[i].first + k]);

			if (mine != EXCHANGE_NONE)
				marked[mine] = 1;
		}
	return marked;
}

/* This rank reads alone what the buckets from n on would have brought of the objects that are split off. */
static int alone_rest(struct load_exchange *x, const uint8_t *marked, size_t n)
{
	struct exchange_plan *p = &x->plan;
	size_t kept = 0;

	for (size_t i = 0; i < p->nalone; i++)
		if (marked[p->alone[i].mine])
			p->alone[kept++] = p->alone[i];
	p->nalone = kept;
	for (size_t i = n; i < p->nbuckets; i++)
		for (uint32_t k = 0; k < p->buckets[i].nsegments; k++) {
			const struct exchange_segment *s = &p->segments[p->buckets[i].first + k];
			uint32_t mine = segment_mine(x, s);

			if (mine == EXCHANGE_NONE || !marked[mine])
				continue;
			if (base_array_room(p->alone, p->alone_room, p->nalone + 1) < 0)
				return -ENOMEM;
			p->alone[p->nalone++] = (struct exchange_alone){mine, s->first, s->n};
		}
	return 0;
}

int exchange_split(struct load_exchange *x, size_t n)
{
	struct load_fill *f = x->f;
	base_cleanup_free uint8_t *marked = mine_marked(x, n);
	size_t kept = 0, at = 0;

	x->split = malloc((f->nneeds + 1) * sizeof *x->split);
	if (!marked || !x->split || alone_rest(x, marked, n) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < x->nmine; i++) {
		struct exchange_mine *m = &x->mine[i];

		for (; at < m->first; at++)
			f->needs[kept++] = f->needs[at];
		if (!marked[i])
			continue;
		m->first = x->nsplit;
		for (; at < m->end; at++)
			x->split[x->nsplit++] = f->needs[at];
		m->end = x->nsplit;
	}
	for (; at < f->nneeds; at++)
		f->needs[kept++] = f->needs[at];
	f->nneeds = kept;
	x->needs = x->split;
	return fill_plan_tasks(f);
}
