/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_plan: which rank reads what several want, and in which buckets it passes it on.
 *
 * What a group of n ranks wants is cut into n spans of equal bytes, one for each rank, at the blocks of longer objects
 * and between short ones. What a group wants that has less than a megabyte a rank is given, 256 KiB at a time, to the
 * rank of the group that reads least so far; so many small groups are shared evenly as well. Then each owner's segments
 * are packed into buckets of one group each. An owner passes its buckets on in the order of the packs, and the owners
 * take turns.
 *
 * Everything is computed from the lists alone, in integers, so that all ranks make the same plan; they compare
 * `sum`. */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/load/exchange/exchange_internal.h"

#define PLAN_CUT_BYTES (128u << 10)      /* shorter objects are not cut: each part costs a read */
#define PLAN_SPAN_BYTES (1u << 20)       /* of each rank, for a group to be cut into spans */
#define PLAN_CHUNK_BYTES (256u << 10)
#define PLAN_PROBE_PARTS 16u             /* an owner has at least so many buckets, if there is a probe */
#define PLAN_PROBE_BYTES (128u << 10)    /* but none is smaller for that */

struct segments { struct exchange_segment *at; size_t n, room; };
struct span { uint64_t at; uint32_t rank; bool begun; }; /* of a group: bytes so far; whose span this is (an index) */

static int segments_add(struct segments *s, const struct exchange_segment *from, uint32_t first, uint32_t n,
	uint32_t owner)
{
	if (base_array_room(s->at, s->room, s->n + 1) < 0)
		return -ENOMEM;
	s->at[s->n] = *from;
	s->at[s->n].first = first;
	s->at[s->n].n = n;
	s->at[s->n++].owner = owner;
	return 0;
}

static bool group_is_large(const struct exchange_group *g) { return g->bytes / g->n >= PLAN_SPAN_BYTES; }

static uint64_t span_end(const struct exchange_group *g, uint32_t i)
{
	return g->bytes / g->n * (i + 1) + g->bytes % g->n * (i + 1) / g->n;
}

/* Cuts one segment among the spans of its group. */
static int segment_span(struct exchange_plan *p, const struct exchange_segment *s, bool whole, struct span *span,
	struct segments *out)
{
	const struct exchange_group *g = &p->groups[s->group];
	uint64_t raw_len = p->objects[s->object].key.raw_len;
	uint32_t first = s->first, end = s->first + s->n;

	while (first < end) {
		uint64_t left = span_end(g, span->rank) - span->at, bytes = exchange_bytes(raw_len, first, end - first);
		uint32_t n = end - first;

		if (span->rank + 1 < g->n && bytes > left) {
			if (whole || raw_len <= PLAN_CUT_BYTES)
				n = left >= bytes / 2 ? n : 0;
			else
				n = (uint32_t)base_min(n, (left + BASE_BLOCK_BYTES / 2) / BASE_BLOCK_BYTES);
			if (n == 0) {
				span->rank++;
				continue;
			}
		}
		bytes = exchange_bytes(raw_len, first, n);
		if (segments_add(out, s, first, n, g->ranks[span->rank]) < 0)
			return -ENOMEM;
		p->reads[g->ranks[span->rank]] += bytes;
		span->at += bytes;
		while (span->rank + 1 < g->n && span->at >= span_end(g, span->rank))
			span->rank++;
		first += n;
	}
	return 0;
}

/* Gives a segment of a small group to the current rank; to the one that reads least, if that has its chunk. */
static int segment_give(struct exchange_plan *p, const struct exchange_segment *s, struct span *span,
	struct segments *out)
{
	const struct exchange_group *g = &p->groups[s->group];
	uint64_t bytes = exchange_bytes(p->objects[s->object].key.raw_len, s->first, s->n);

	if (!span->begun || span->at >= PLAN_CHUNK_BYTES) {
		span->begun = true;
		span->at = 0;
		span->rank = 0;
		for (uint32_t i = 1; i < g->n; i++)
			if (p->reads[g->ranks[i]] < p->reads[g->ranks[span->rank]])
				span->rank = i;
	}
	span->at += bytes;
	p->reads[g->ranks[span->rank]] += bytes;
	return segments_add(out, s, s->first, s->n, g->ranks[span->rank]);
}

static int plan_owners(struct exchange_plan *p, bool whole)
{
	struct span *spans = calloc((size_t)p->ngroups + 1, sizeof *spans);
	struct segments out = {0};
	int r = spans ? 0 : -ENOMEM;

	for (size_t i = 0; r == 0 && i < p->nsegments; i++)
		if (group_is_large(&p->groups[p->segments[i].group]))
			r = segment_span(p, &p->segments[i], whole, &spans[p->segments[i].group], &out);
	for (size_t i = 0; r == 0 && i < p->nsegments; i++)
		if (!group_is_large(&p->groups[p->segments[i].group]))
			r = segment_give(p, &p->segments[i], &spans[p->segments[i].group], &out);
	free(spans);
	free(p->segments);
	p->segments = out.at;
	p->nsegments = out.n;
	p->segments_room = out.room;
	return r;
}

/* ---- buckets ---- */

static int segment_compare(const void *a, const void *b)
{
	const struct exchange_segment *x = a, *y = b;

	if (x->owner != y->owner)
		return x->owner < y->owner ? -1 : 1;
	if (x->group != y->group)
		return x->group < y->group ? -1 : 1;
	if (x->object != y->object)
		return x->object < y->object ? -1 : 1;
	return (x->first > y->first) - (x->first < y->first);
}

struct packing {
	struct exchange_plan *p;
	struct segments out;
	struct exchange_bucket *open;    /* the last one; NULL: none yet */
	uint64_t room;                   /* bytes of a bucket of this owner */
	bool whole;
};

static int bucket_begin(struct packing *k, const struct exchange_segment *s)
{
	struct exchange_plan *p = k->p;

	if (p->nbuckets == UINT32_MAX || base_array_room(p->buckets, p->buckets_room, p->nbuckets + 1) < 0)
		return -ENOMEM;
	k->open = &p->buckets[p->nbuckets++];
	*k->open = (struct exchange_bucket){.owner = s->owner, .group = s->group, .first = k->out.n};
	return 0;
}

static bool bucket_takes(const struct packing *k, const struct exchange_segment *s)
{
	return k->open && k->open->owner == s->owner && k->open->group == s->group &&
		k->open->nsegments < EXCHANGE_BUCKET_SEGMENTS && k->open->bytes < k->room;
}

static int segment_pack(struct packing *k, const struct exchange_segment *s)
{
	uint64_t raw_len = k->p->objects[s->object].key.raw_len, bytes;
	uint32_t first = s->first, end = s->first + s->n, n;
	int r = 0;

	for (; r == 0 && first < end; first += n) {
		uint64_t left = bucket_takes(k, s) ? k->room - k->open->bytes : 0;

		n = end - first;
		bytes = exchange_bytes(raw_len, first, n);
		/* a segment that does not fit is cut if half of the bucket is free; else it begins a new bucket */
		if (bytes > left && (left < k->room / 2 || k->whole || raw_len <= PLAN_CUT_BYTES)) {
			r = bucket_begin(k, s);
			left = k->whole ? EXCHANGE_BUCKET_BYTES : k->room;
		}
		if (bytes > left)
			n = (uint32_t)(left / BASE_BLOCK_BYTES);
		if (r == 0)
			r = segments_add(&k->out, s, first, n, s->owner);
		if (r == 0) {
			k->open->nsegments++;
			k->open->bytes += exchange_bytes(raw_len, first, n);
		}
	}
	return r;
}

static uint64_t packing_room(const struct exchange_terms *t, uint64_t owned)
{
	if (!t->small)
		return EXCHANGE_BUCKET_BYTES;
	return base_min(base_max(owned / PLAN_PROBE_PARTS / BASE_BLOCK_BYTES * BASE_BLOCK_BYTES, PLAN_PROBE_BYTES),
		EXCHANGE_BUCKET_BYTES);
}

static int plan_pack(struct exchange_plan *p, const struct exchange_terms *terms)
{
	struct packing k = {.p = p, .whole = terms->whole};
	int r = 0;

	if (p->nsegments)
		qsort(p->segments, p->nsegments, sizeof *p->segments, segment_compare);
	for (size_t i = 0, end; r == 0 && i < p->nsegments; i = end) {
		uint64_t owned = 0;

		for (end = i; end < p->nsegments && p->segments[end].owner == p->segments[i].owner; end++)
			owned += exchange_bytes(p->objects[p->segments[end].object].key.raw_len, p->segments[end].first,
				p->segments[end].n);
		k.room = packing_room(terms, owned);
		for (size_t s = i; r == 0 && s < end; s++)
			r = segment_pack(&k, &p->segments[s]);
	}
	free(p->segments);
	p->segments = k.out.at;
	p->nsegments = k.out.n;
	p->segments_room = k.out.room;
	return r;
}

/* ---- their order ---- */

/* An owner's buckets, by where they begin in the packs: `own` has that object while this is sorted. */
static int bucket_compare_place(const void *a, const void *b)
{
	const struct exchange_bucket *x = a, *y = b;

	if (x->owner != y->owner)
		return x->owner < y->owner ? -1 : 1;
	if (x->own != y->own)
		return x->own < y->own ? -1 : 1;
	return (x->first > y->first) - (x->first < y->first);
}

static int bucket_compare_turn(const void *a, const void *b)
{
	const struct exchange_bucket *x = a, *y = b;

	if (x->own != y->own)
		return x->own < y->own ? -1 : 1;
	return (x->owner > y->owner) - (x->owner < y->owner);
}

static void plan_order(struct exchange_plan *p)
{
	uint32_t own = 0;

	if (p->nbuckets == 0)
		return;
	for (size_t i = 0; i < p->nbuckets; i++)
		p->buckets[i].own = p->segments[p->buckets[i].first].object;
	qsort(p->buckets, p->nbuckets, sizeof *p->buckets, bucket_compare_place);
	for (size_t i = 0; i < p->nbuckets; i++) {
		own = i && p->buckets[i].owner == p->buckets[i - 1].owner ? own + 1 : 0;
		p->buckets[i].own = own;
	}
	qsort(p->buckets, p->nbuckets, sizeof *p->buckets, bucket_compare_turn);
}

/* The structs that are summed have no padding. */
_Static_assert(sizeof(struct exchange_segment) == 20 && sizeof(struct exchange_bucket) == 32, "no padding");

static uint64_t plan_sum(const struct exchange_plan *p)
{
	uint64_t sum = base_xxh64_of(p->nobjects, "", 0);

	for (uint32_t i = 0; i < p->ngroups; i++)
		sum = base_xxh64_of(sum, p->groups[i].ranks, p->groups[i].n * sizeof *p->groups[i].ranks);
	if (p->nsegments)
		sum = base_xxh64_of(sum, p->segments, p->nsegments * sizeof *p->segments);
	return p->nbuckets ? base_xxh64_of(sum, p->buckets, p->nbuckets * sizeof *p->buckets) : sum;
}

void exchange_plan_release(struct exchange_plan *p)
{
	for (uint32_t i = 0; i < p->ngroups; i++)
		free(p->groups[i].ranks);
	free(p->groups);
	free(p->objects);
	free(p->segments);
	free(p->buckets);
	free(p->alone);
	free(p->reads);
	*p = (struct exchange_plan){0};
}

int exchange_plan_make(const struct exchange_list *lists, uint32_t nlists, const struct exchange_terms *terms,
	struct exchange_plan *ret_plan, struct base_error *err)
{
	struct exchange_plan *p = ret_plan;
	int r;

	*p = (struct exchange_plan){0};
	r = exchange_merge(lists, nlists, terms, p, err);
	if (r < 0)
		return r;
	r = plan_owners(p, terms->whole);
	if (r == 0)
		r = plan_pack(p, terms);
	if (r < 0)
		return base_no_memory_for(err, "the plan of an exchange");
	plan_order(p);
	p->sum = plan_sum(p);
	return 0;
}
