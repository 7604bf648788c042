/* SPDX-License-Identifier: Apache-2.0
 *
 * cover: exact cover of a tensor by boxes.
 *
 *   1. sort; identical boxes fold into one, if their digests are equal
 *   2. no two of the rest overlap
 *   3. then they cover the tensor if and only if their volumes add up to its own
 *
 * Step 2 takes the boxes apart along lines that no box crosses: sorted by their offset in one dimension, a box that
 * begins at or after the end of all before it starts another cluster; boxes of different clusters cannot overlap, and
 * each cluster goes on with the next dimension. Every placement that a mesh can make (splits, nested splits, flat
 * ranges) comes apart in this way, so the cost is n log n a dimension. A cluster that no dimension splits is compared
 * pair by pair: quadratic, exact, and met only in pictures that no placement draws (a pinwheel), or where boxes do
 * overlap.
 *
 * A gap is found only after step 2, by halving: of a region whose boxes do not fill it, one side of a box does not. */
#include "core/store/cover.h"

#include <stdio.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"

typedef const struct store_cover_box *cover_box;
struct cover { const struct tensor_shape *shape; const char *tensor; struct base_error *err; };

static uint64_t box_offset(cover_box b, unsigned d) { return b->pairs[2 * d]; }
static uint64_t box_end(cover_box b, unsigned d) { return b->pairs[2 * d] + b->pairs[2 * d + 1]; }

static void box_text(const struct cover *c, const uint64_t *pairs, char *text, size_t room)
{
	size_t at = (size_t)snprintf(text, room, "[");

	for (unsigned d = 0; d < c->shape->ndim && at < room; d++)
		at += (size_t)snprintf(text + at, room - at, "%s%llu:%llu", d ? ", " : "",
			(unsigned long long)pairs[2 * d], (unsigned long long)(pairs[2 * d] + pairs[2 * d + 1]));
	if (at < room)
		snprintf(text + at, room - at, "]");
}

static int box_order(const void *pa, const void *pb, void *arg)
{
	const struct store_cover_box *a = pa, *b = pb;
	const struct tensor_shape *s = arg;

	for (unsigned i = 0; i < 2 * s->ndim; i++)
		if (a->pairs[i] != b->pairs[i])
			return a->pairs[i] < b->pairs[i] ? -1 : 1;
	return (a->rank > b->rank) - (a->rank < b->rank);
}

static int offset_order(const void *pa, const void *pb, void *arg)
{
	uint64_t a = box_offset(*(const cover_box *)pa, *(const unsigned *)arg),
		 b = box_offset(*(const cover_box *)pb, *(const unsigned *)arg);

	return (a > b) - (a < b);
}

static int cover_overlap(const struct cover *c, cover_box a, cover_box b)
{
	char first[300], second[300];

	box_text(c, a->pairs, first, sizeof first);
	box_text(c, b->pairs, second, sizeof second);
	return base_error_set(c->err, -BASE_EFORMAT, "tensor \"%s\": box %s of rank %u and box %s of rank %u overlap",
		c->tensor, first, a->rank, second, b->rank);
}

/* Distinct boxes, in order. Returns how many, or an error. */
static int64_t cover_fold(const struct cover *c, struct store_cover_box *boxes, size_t n, cover_box *list)
{
	size_t count = 0, len = c->shape->ndim * 2 * sizeof(uint64_t);
	char text[300];

	qsort_r(boxes, n, sizeof *boxes, box_order, (void *)c->shape);
	for (size_t i = 0; i < n; i++) {
		cover_box last = count ? list[count - 1] : NULL;

		if (!last || (len && memcmp(last->pairs, boxes[i].pairs, len) != 0)) {
			list[count++] = &boxes[i];
			continue;
		}
		if (base_digest_equal(&last->digest, &boxes[i].digest))
			continue;
		box_text(c, last->pairs, text, sizeof text);
		return base_error_set(c->err, -BASE_EFORMAT,
			"tensor \"%s\": ranks %u and %u stored different bytes for box %s", c->tensor, last->rank,
			boxes[i].rank, text);
	}
	return (int64_t)count;
}

static bool boxes_overlap(const struct cover *c, cover_box a, cover_box b)
{
	for (unsigned d = 0; d < c->shape->ndim; d++)
		if (box_end(a, d) <= box_offset(b, d) || box_end(b, d) <= box_offset(a, d))
			return false;
	return true;
}

static int cover_pairs(const struct cover *c, cover_box *list, size_t n)
{
	unsigned d = 0;

	qsort_r(list, n, sizeof *list, offset_order, &d);
	for (size_t i = 0; i < n; i++)
		for (size_t j = i + 1; j < n && box_offset(list[j], 0) < box_end(list[i], 0); j++)
			if (boxes_overlap(c, list[i], list[j]))
				return cover_overlap(c, list[i], list[j]);
	return 0;
}

/* One past the end of the cluster that begins at list[from]; the list is sorted by offset in d. */
static size_t cluster_end(cover_box *list, size_t n, size_t from, unsigned d)
{
	uint64_t end = box_end(list[from], d);
	size_t i;

	for (i = from + 1; i < n && box_offset(list[i], d) < end; i++)
		end = base_max(end, box_end(list[i], d));
	return i;
}

/* Recurses into all clusters but the largest, which it goes on with: the depth stays logarithmic. */
static int cover_disjoint(const struct cover *c, cover_box *list, size_t n, unsigned d)
{
	unsigned ndim = c->shape->ndim, tried = 0;
	int r;

	for (; n > 1; d = (d + 1) % ndim) {
		size_t best = 0, best_n = 0, end;

		if (tried == ndim)
			return cover_pairs(c, list, n);
		qsort_r(list, n, sizeof *list, offset_order, &d);
		for (size_t from = 0; from < n; from = end) {
			end = cluster_end(list, n, from, d);
			if (end - from > best_n) {
				best = from;
				best_n = end - from;
			}
		}
		for (size_t from = 0; from < n; from = end) {
			end = cluster_end(list, n, from, d);
			r = from == best ? 0 : cover_disjoint(c, list + from, end - from, (d + 1) % ndim);
			if (r < 0)
				return r;
		}
		tried = best_n == n ? tried + 1 : 0;
		list += best;
		n = best_n;
	}
	return 0;
}

static uint64_t pairs_volume(const struct cover *c, const uint64_t *pairs)
{
	uint64_t v = 1;

	for (unsigned d = 0; d < c->shape->ndim; d++)
		v *= pairs[2 * d + 1];
	return v;
}

/* The part of `b` inside `region`; false: none. */
static bool pairs_cut(const struct cover *c, const uint64_t *region, const uint64_t *b, uint64_t *ret_cut)
{
	for (unsigned d = 0; d < c->shape->ndim; d++) {
		uint64_t from = base_max(region[2 * d], b[2 * d]);
		uint64_t end = base_min(region[2 * d] + region[2 * d + 1], b[2 * d] + b[2 * d + 1]);

		if (from >= end)
			return false;
		ret_cut[2 * d] = from;
		ret_cut[2 * d + 1] = end - from;
	}
	return true;
}

/* Moves the boxes that meet `region` to the front; returns how many, and their volume inside of it. */
static size_t region_boxes(const struct cover *c, const uint64_t *region, cover_box *list, size_t n,
	uint64_t *ret_volume)
{
	uint64_t cut[2 * TENSOR_MAX_DIMS];
	size_t count = 0;

	*ret_volume = 0;
	for (size_t i = 0; i < n; i++) {
		cover_box b = list[i];

		if (!pairs_cut(c, region, b->pairs, cut))
			continue;
		*ret_volume += pairs_volume(c, cut);
		list[i] = list[count];
		list[count++] = b;
	}
	return count;
}

/* Shrinks `region`, which disjoint boxes do not fill, to a box that nobody stored. Each turn takes the box in the
 * middle and keeps the first of the slabs around it that is not filled. */
static void cover_gap(const struct cover *c, cover_box *list, size_t n, uint64_t *region)
{
	uint64_t cut[2 * TENSOR_MAX_DIMS], slab[2 * TENSOR_MAX_DIMS], volume;
	size_t len = c->shape->ndim * 2 * sizeof(uint64_t);

	while ((n = region_boxes(c, region, list, n, &volume)) > 0) {
		bool found = false;

		pairs_cut(c, region, list[n / 2]->pairs, cut);
		for (unsigned i = 0; i < 2 * c->shape->ndim && !found; i++) {
			unsigned d = i / 2;
			uint64_t end = region[2 * d] + region[2 * d + 1], cut_end = cut[2 * d] + cut[2 * d + 1];

			memcpy(slab, region, len);
			slab[2 * d] = i % 2 ? cut_end : region[2 * d];
			slab[2 * d + 1] = i % 2 ? end - cut_end : cut[2 * d] - region[2 * d];
			if (slab[2 * d + 1]) {
				region_boxes(c, slab, list, n, &volume);
				found = volume < pairs_volume(c, slab);
			}
			if (!found && i % 2) { /* both sides are full: only the middle is left in this dimension */
				region[2 * d] = cut[2 * d];
				region[2 * d + 1] = cut[2 * d + 1];
			}
		}
		if (!found)
			return;
		memcpy(region, slab, len);
	}
}

static int cover_volume(const struct cover *c, cover_box *list, size_t n)
{
	uint64_t region[2 * TENSOR_MAX_DIMS] = {0}, sum = 0;
	char text[300];

	for (unsigned d = 0; d < c->shape->ndim; d++)
		region[2 * d + 1] = c->shape->dim[d];
	for (size_t i = 0; i < n; i++)
		sum += pairs_volume(c, list[i]->pairs); /* disjoint and inside: no more than the tensor */
	if (sum == pairs_volume(c, region) && n > 0)
		return 0;
	cover_gap(c, list, n, region);
	box_text(c, region, text, sizeof text);
	return base_error_set(c->err, -BASE_EFORMAT, "tensor \"%s\": no rank stored box %s", c->tensor, text);
}

int store_cover_check(const struct tensor_shape *s, const char *tensor, struct store_cover_box *boxes, size_t n,
	struct base_error *err)
{
	base_cleanup_free cover_box *list = calloc(n + 1, sizeof *list);
	struct cover c = {s, tensor, err};
	int64_t count;
	int r;

	if (!list)
		return base_error_set(err, -ENOMEM, "out of memory");
	count = cover_fold(&c, boxes, n, list);
	if (count < 0)
		return (int)count;
	r = cover_disjoint(&c, list, (size_t)count, 0);
	return r < 0 ? r : cover_volume(&c, list, (size_t)count);
}
