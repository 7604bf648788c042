/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes_cover: exact cover of a tensor by boxes.
 *
 *   1. every box is inside the tensor
 *   2. no two of them overlap
 *   3. then they cover the tensor if and only if their volumes add up to its own
 *
 * Step 2 takes the boxes apart along lines that no box crosses: sorted by their offset in one dimension, a box that
 * begins at or after the end of all before it starts another cluster; boxes of different clusters cannot overlap, and
 * each cluster goes on with the next dimension. Every placement that a mesh can make (splits, nested splits, flat
 * ranges) comes apart in this way, so the cost is n log n a dimension. A cluster that the lines of no dimension split
 * well (a pinwheel, an onion, or boxes that do overlap) is given an index, and each of its boxes asks for one before it
 * that it overlaps. Where some overlap, all are asked once more in the order of their offsets: the first is reported.
 *
 * A gap is looked for only after step 2, when volumes say which regions are not full. Dimension by dimension, the
 * outermost first, its index is found by bisection: the lowest for which what comes before, it included, is not full.
 * That is the first item, in row-major order, that no box has; it is widened as far as no box is in the way. */
#include "core/tensor/boxes_internal.h"

#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"

typedef const uint64_t *cover_box;      /* packed, of the list that is checked */

struct cover {
	const struct tensor_boxes *boxes;
	uint32_t ndim;
	struct tensor_cover *fault;
};

/* Of boxes inside of the tensor: no wrap. */
static uint64_t pairs_end(const uint64_t *b, unsigned d) { return b[2 * d] + b[2 * d + 1]; }

static uint64_t pairs_volume(const struct cover *c, const uint64_t *pairs)
{
	uint64_t v = 1;

	for (unsigned d = 0; d < c->ndim; d++)
		v *= pairs[2 * d + 1];
	return v;
}

/* ---- overlap ---- */

static int cover_overlap(const struct cover *c, cover_box a, cover_box b)
{
	size_t i = (size_t)(a - c->boxes->pairs) / (2 * c->ndim), j = (size_t)(b - c->boxes->pairs) / (2 * c->ndim);
	struct tensor_box first, second;

	c->fault->a = base_min(i, j);
	c->fault->b = base_max(i, j);
	tensor_boxes_get(c->boxes, i, &first);
	tensor_boxes_get(c->boxes, j, &second);
	tensor_box_intersect(c->ndim, &first, &second, &c->fault->box);
	return -EEXIST;
}

static int offset_order(const void *pa, const void *pb, void *arg)
{
	uint64_t a = (*(const cover_box *)pa)[2 * *(const unsigned *)arg],
		 b = (*(const cover_box *)pb)[2 * *(const unsigned *)arg];

	return (a > b) - (a < b);
}

static int pairs_order(const void *pa, const void *pb, void *arg)
{
	cover_box a = *(const cover_box *)pa, b = *(const cover_box *)pb;

	for (uint32_t d = 0; d < *(const uint32_t *)arg; d++)
		if (a[2 * d] != b[2 * d])
			return a[2 * d] < b[2 * d] ? -1 : 1;
	return (a > b) - (a < b);
}

/* Checks a list that no line divides. Of several overlaps it reports the one whose later box comes first. */
static int cover_tangle(const struct cover *c, cover_box *list, size_t n)
{
	base_cleanup(tensor_boxes_release) struct tensor_boxes boxes = {.ndim = c->ndim};
	base_cleanup(tensor_box_index_free_p) struct tensor_box_index *index = NULL;
	size_t other;
	int r = 0;

	for (size_t i = 0; i < n && r == 0; i++)
		r = tensor_boxes_push(&boxes, list[i]);
	if (r == 0)
		r = tensor_box_index_new(&boxes, &index);
	for (size_t i = 1; i < n && r == 0; i++)
		if (tensor_box_index_first(index, list[i], i, &other))
			r = cover_overlap(c, list[other], list[i]);
	return r;
}

/* One past the end of the cluster that begins at list[from]; the list is sorted by offset in d. */
static size_t cluster_end(cover_box *list, size_t n, size_t from, unsigned d)
{
	uint64_t end = pairs_end(list[from], d);
	size_t i;

	for (i = from + 1; i < n && list[i][2 * d] < end; i++)
		end = base_max(end, pairs_end(list[i], d));
	return i;
}

/* Recurses into all clusters but the largest, which it goes on with: the depth stays logarithmic. */
static int cover_disjoint(const struct cover *c, cover_box *list, size_t n, unsigned d)
{
	unsigned poor = 0; /* rounds in a row that left most boxes together */
	int r;

	for (; n > 1; d = (d + 1) % c->ndim) {
		size_t best = 0, best_n = 0, end;

		if (poor == 2 * c->ndim)
			return cover_tangle(c, list, n);
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
			r = from == best ? 0 : cover_disjoint(c, list + from, end - from, (d + 1) % c->ndim);
			if (r < 0)
				return r;
		}
		poor = 4 * best_n > 3 * n ? poor + 1 : 0;
		list += best;
		n = best_n;
	}
	return 0;
}

/* ---- gap ---- */

/* Volume of what disjoint boxes hold of `region`. */
static uint64_t region_volume(const struct cover *c, const uint64_t *region, const cover_box *list, size_t n)
{
	uint64_t volume = 0;

	for (size_t i = 0; i < n; i++) {
		uint64_t v = 1;

		for (unsigned d = 0; d < c->ndim; d++) {
			uint64_t from = base_max(region[2 * d], list[i][2 * d]);
			uint64_t end = base_min(pairs_end(region, d), pairs_end(list[i], d));

			v *= end > from ? end - from : 0;
		}
		volume += v;
	}
	return volume;
}

/* Moves the boxes that overlap `region` to the front. Returns how many. */
static size_t region_boxes(const struct cover *c, const uint64_t *region, cover_box *list, size_t n)
{
	size_t count = 0;

	for (size_t i = 0; i < n; i++) {
		cover_box b = list[i];

		if (!boxes_overlap(c->ndim, b, region))
			continue;
		list[i] = list[count];
		list[count++] = b;
	}
	return count;
}

/* Widens `gap` until a box of the list or the end of the tensor is in the way, the last dimension first. */
static void gap_grow(const struct cover *c, const struct tensor_shape *s, const cover_box *list, size_t n,
	uint64_t *gap)
{
	for (unsigned d = c->ndim; d-- > 0;) {
		uint64_t low = 0, high = s->dim[d], first = gap[2 * d], end = pairs_end(gap, d);

		gap[2 * d] = 0;
		gap[2 * d + 1] = high;
		for (size_t i = 0; i < n; i++) {
			if (!boxes_overlap(c->ndim, list[i], gap))
				continue;
			if (pairs_end(list[i], d) <= first)
				low = base_max(low, pairs_end(list[i], d));
			else if (list[i][2 * d] >= end)
				high = base_min(high, list[i][2 * d]);
		}
		gap[2 * d] = low;
		gap[2 * d + 1] = high - low;
	}
}

/* Shrinks `region`, the whole tensor, which disjoint boxes do not fill, to the first item that is in none of them, and
 * widens that to a box. */
static void cover_gap(const struct cover *c, const struct tensor_shape *s, cover_box *list, size_t all,
	uint64_t *region)
{
	size_t n = all;

	for (unsigned d = 0; d < c->ndim; d++) {
		uint64_t low = 0, high = s->dim[d] - 1; /* the index looked for is in [low, high] */

		while (low < high) {
			uint64_t middle = low + (high - low) / 2;

			region[2 * d + 1] = middle + 1;
			if (region_volume(c, region, list, n) < pairs_volume(c, region))
				high = middle;
			else
				low = middle + 1;
		}
		region[2 * d] = low;
		region[2 * d + 1] = 1;
		n = region_boxes(c, region, list, n);
	}
	gap_grow(c, s, list, all, region);
}

static int cover_volume(const struct cover *c, const struct tensor_shape *s, cover_box *list, size_t n)
{
	uint64_t region[2 * TENSOR_MAX_DIMS] = {0}, sum = 0;

	for (unsigned d = 0; d < c->ndim; d++)
		region[2 * d + 1] = s->dim[d];
	for (size_t i = 0; i < n; i++)
		sum += pairs_volume(c, list[i]); /* disjoint and inside: no more than the tensor */
	if (sum == pairs_volume(c, region))
		return 0;
	cover_gap(c, s, list, n, region);
	for (unsigned d = 0; d < c->ndim; d++) {
		c->fault->box.offset[d] = region[2 * d];
		c->fault->box.size[d] = region[2 * d + 1];
	}
	return -ENOENT;
}

/* ---- the whole ---- */

static int cover_scalar(const struct tensor_boxes *b, struct tensor_cover *ret_fault)
{
	ret_fault->b = b->n > 1;
	return b->n == 0 ? -ENOENT : b->n == 1 ? 0 : -EEXIST;
}

int tensor_boxes_cover(const struct tensor_shape *s, const struct tensor_boxes *b, struct tensor_cover *ret_fault)
{
	base_cleanup_free cover_box *list = NULL;
	struct cover c = {b, s->ndim, ret_fault};
	uint64_t items;
	size_t n = 0;
	int r;

	memset(ret_fault, 0, sizeof *ret_fault);
	r = tensor_shape_items(s, 1, &items);
	if (r < 0 || b->ndim != s->ndim)
		return r < 0 ? r : -EINVAL;
	if (s->ndim == 0)
		return cover_scalar(b, ret_fault);
	list = calloc(b->n + 1, sizeof *list);
	if (!list)
		return -ENOMEM;
	for (size_t i = 0; i < b->n; i++) {
		if (boxes_empty(s->ndim, boxes_at(b, i)))
			continue;
		tensor_boxes_get(b, i, &ret_fault->box);
		if (!tensor_box_inside(s, &ret_fault->box)) {
			ret_fault->a = i;
			return -ERANGE;
		}
		list[n++] = boxes_at(b, i);
	}
	memset(&ret_fault->box, 0, sizeof ret_fault->box);
	r = cover_disjoint(&c, list, n, 0);
	if (r == -EEXIST) { /* there are some: which comes first? */
		qsort_r(list, n, sizeof *list, pairs_order, &c.ndim);
		r = cover_tangle(&c, list, n);
	}
	return r < 0 ? r : cover_volume(&c, s, list, n);
}
