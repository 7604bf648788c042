/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes: lists of boxes, and sets of items made of them.
 *
 * All three sets rest on one step, to carve: what of a box do others not hold? The index names one of the others that
 * meets it; what is left around that one is at most two slabs a dimension, the first dimension's as long as they can be
 * (rows stay together in memory); each slab is asked again, and what meets nothing is a result. So a box that meets
 * nobody stays whole, no two boxes are compared that lie apart, and none of the others is looked at twice in one place.
 *
 *   made disjoint   from large to small (equal ones as they come), each box carved by those before it: the largest of
 *                   some stays whole, of replicas one stays, and what lies inside another vanishes
 *   union           both lists made disjoint together
 *   difference      a made disjoint, each box carved by all of b
 *   intersection    both made disjoint; of each box of a what it has in common with those of b that meet it
 *
 * In 0 dimensions a box is everything: it meets every other, and nothing is left around it.
 *
 * Union, difference and intersection are for the load; no product code calls them yet. */
#include "core/tensor/boxes_internal.h"

#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"

/* ---- lists ---- */

void tensor_boxes_release(struct tensor_boxes *b)
{
	if (!b)
		return;
	free(b->pairs);
	b->pairs = NULL;
	b->n = b->room = 0;
}

int tensor_boxes_push(struct tensor_boxes *b, const uint64_t *pairs)
{
	size_t row = 2 * (size_t)b->ndim * sizeof *pairs;

	if (row && b->n == b->room) {
		uint64_t *more = base_array_grow(b->pairs, &b->room, b->n + 1, row, SIZE_MAX);

		if (!more)
			return -ENOMEM;
		b->pairs = more;
	}
	if (row)
		memcpy(b->pairs + 2 * b->ndim * b->n, pairs, row);
	b->n++;
	return 0;
}

int tensor_boxes_add(struct tensor_boxes *b, const struct tensor_box *box)
{
	uint64_t pairs[2 * TENSOR_MAX_DIMS];

	if (b->ndim > TENSOR_MAX_DIMS)
		return -EINVAL;
	for (uint32_t d = 0; d < b->ndim; d++) {
		pairs[2 * d] = box->offset[d];
		pairs[2 * d + 1] = box->size[d];
	}
	return tensor_boxes_push(b, pairs);
}

void tensor_boxes_get(const struct tensor_boxes *b, size_t i, struct tensor_box *ret_box)
{
	const uint64_t *pairs = boxes_at(b, i);

	memset(ret_box, 0, sizeof *ret_box);
	for (uint32_t d = 0; d < b->ndim; d++) {
		ret_box->offset[d] = pairs[2 * d];
		ret_box->size[d] = pairs[2 * d + 1];
	}
}

/* ---- single boxes ---- */

bool tensor_box_empty(uint32_t ndim, const struct tensor_box *b)
{
	for (uint32_t d = 0; d < ndim; d++)
		if (b->size[d] == 0)
			return true;
	return false;
}

bool tensor_box_intersect(uint32_t ndim, const struct tensor_box *a, const struct tensor_box *b,
	struct tensor_box *ret_box)
{
	for (uint32_t d = 0; d < ndim; d++) {
		uint64_t low = base_max(a->offset[d], b->offset[d]), last;

		if (a->size[d] == 0 || b->size[d] == 0)
			return false;
		last = base_min(boxes_last(a->offset[d], a->size[d]), boxes_last(b->offset[d], b->size[d]));
		if (last < low)
			return false;
		ret_box->offset[d] = low;
		ret_box->size[d] = last - low + 1;
	}
	return true;
}

void tensor_box_text(uint32_t ndim, const struct tensor_box *b, char *text, size_t room)
{
	size_t at = 0;

	if (room == 0)
		return;
	for (uint32_t d = 0; d < ndim && at < room; d++) {
		uint64_t end;
		bool beyond = base_add_overflows(b->offset[d], b->size[d], &end);

		at += (size_t)snprintf(text + at, room - at, "%s%llu:%s%llu", d ? ", " : "[",
			(unsigned long long)b->offset[d], beyond ? "+" : "",
			(unsigned long long)(beyond ? b->size[d] : end));
	}
	if (at < room)
		snprintf(text + at, room - at, ndim ? "]" : "[]");
}

/* ---- sets ---- */

/* Of boxes that are disjoint: no two begin at one place. */
static int offset_order(const void *pa, const void *pb, void *arg)
{
	const uint64_t *a = pa, *b = pb;

	for (uint32_t i = 0; i < 2 * *(uint32_t *)arg; i += 2)
		if (a[i] != b[i])
			return a[i] < b[i] ? -1 : 1;
	return 0;
}

static void boxes_sort(struct tensor_boxes *b)
{
	if (b->ndim && b->n > 1)
		qsort_r(b->pairs, b->n, 2 * b->ndim * sizeof *b->pairs, offset_order, &b->ndim);
}

static double pairs_volume(uint32_t ndim, const uint64_t *pairs)
{
	double v = 1;

	for (uint32_t d = 0; d < ndim; d++)
		v *= (double)pairs[2 * d + 1];
	return v;
}

struct boxes_place { double volume; size_t box; };

/* From large to small; equal ones as they come. */
static int volume_order(const void *pa, const void *pb)
{
	const struct boxes_place *a = pa, *b = pb;

	return a->volume != b->volume ? (a->volume < b->volume) - (a->volume > b->volume)
				      : (a->box > b->box) - (a->box < b->box);
}

/* Appends the boxes of `b` to `ret` from large to small. */
static int boxes_by_volume(const struct tensor_boxes *b, struct tensor_boxes *ret)
{
	base_cleanup_free struct boxes_place *places = calloc(b->n + 1, sizeof *places);
	int r = places ? 0 : -ENOMEM;

	for (size_t i = 0; i < b->n && r == 0; i++)
		places[i] = (struct boxes_place){pairs_volume(b->ndim, boxes_at(b, i)), i};
	if (r == 0)
		qsort(places, b->n, sizeof *places, volume_order);
	for (size_t i = 0; i < b->n && r == 0; i++)
		r = tensor_boxes_push(ret, boxes_at(b, places[i].box));
	return r;
}

static int result_add(struct tensor_boxes *b, const uint64_t *pairs)
{
	return b->n >= BOXES_MAX ? -BASE_ELIMIT : tensor_boxes_push(b, pairs);
}

/* Appends to `rest` the parts of `box` outside of `hole`, which meets it. */
static int box_split(struct tensor_boxes *rest, const uint64_t *box, const uint64_t *hole)
{
	uint64_t middle[2 * TENSOR_MAX_DIMS] = {0}; /* cut to the hole in the dimensions done */
	uint32_t ndim = rest->ndim;
	int r = 0;

	memcpy(middle, box, ndim * 2 * sizeof *box);
	for (uint32_t i = 0; i < 2 * ndim && r == 0; i += 2) {
		uint64_t first = middle[i], last = boxes_last(first, middle[i + 1]);
		uint64_t low = base_max(first, hole[i]), high = base_min(last, boxes_last(hole[i], hole[i + 1]));

		if (high < last) {
			middle[i] = high + 1;
			middle[i + 1] = last - high;
			r = tensor_boxes_push(rest, middle);
		}
		if (low > first && r == 0) {
			middle[i] = first;
			middle[i + 1] = low - first;
			r = tensor_boxes_push(rest, middle);
		}
		middle[i] = low;
		middle[i + 1] = high - low + 1;
	}
	return r;
}

/* Appends to `ret` the parts of `box` that none of the boxes numbered below `below` holds. `rest` is empty scratch
 * memory. */
static int box_carve(const struct tensor_box_index *index, const struct tensor_boxes *boxes, size_t below,
	const uint64_t *box, struct tensor_boxes *rest, struct tensor_boxes *ret)
{
	int r = tensor_boxes_push(rest, box);

	while (r == 0 && rest->n > 0) {
		uint64_t part[2 * TENSOR_MAX_DIMS] = {0};
		size_t hole;

		rest->n--;
		if (rest->ndim)
			memcpy(part, boxes_at(rest, rest->n), rest->ndim * sizeof part[0] * 2);
		r = tensor_box_index_first(index, part, below, &hole) ? box_split(rest, part, boxes_at(boxes, hole))
								      : result_add(ret, part);
	}
	return r;
}

/* Appends the boxes of b that are not empty, cut where coordinates end. */
static int boxes_append(struct tensor_boxes *to, const struct tensor_boxes *b)
{
	int r = 0;

	for (size_t i = 0; i < b->n && r == 0; i++) {
		uint64_t pairs[2 * TENSOR_MAX_DIMS];

		if (boxes_empty(b->ndim, boxes_at(b, i)))
			continue;
		for (uint32_t d = 0; d < b->ndim; d++) {
			pairs[2 * d] = boxes_at(b, i)[2 * d];
			pairs[2 * d + 1] = boxes_last(pairs[2 * d], boxes_at(b, i)[2 * d + 1]) - pairs[2 * d] + 1;
		}
		r = result_add(to, pairs);
	}
	return r;
}

/* The items of a and b (NULL: none), each once, in no order. */
static int boxes_disjoint(const struct tensor_boxes *a, const struct tensor_boxes *b, struct tensor_boxes *ret)
{
	base_cleanup(tensor_boxes_release) struct tensor_boxes all = {.ndim = a->ndim}, sorted = {.ndim = a->ndim},
		rest = {.ndim = a->ndim};
	base_cleanup(tensor_box_index_free_p) struct tensor_box_index *index = NULL;
	int r = boxes_append(&all, a);

	if (r == 0 && b)
		r = boxes_append(&all, b);
	if (r < 0)
		return r;
	r = boxes_by_volume(&all, &sorted);
	tensor_boxes_release(&all);
	if (r == 0)
		r = tensor_box_index_new(&sorted, &index);
	for (size_t i = 0; i < sorted.n && r == 0; i++)
		r = box_carve(index, &sorted, i, boxes_at(&sorted, i), &rest, ret);
	return r;
}

static int sets_check(const struct tensor_boxes *a, const struct tensor_boxes *b, const struct tensor_boxes *ret)
{
	return a->ndim > TENSOR_MAX_DIMS || b->ndim != a->ndim || ret->ndim != a->ndim ? -EINVAL : 0;
}

int tensor_boxes_union(const struct tensor_boxes *a, const struct tensor_boxes *b, struct tensor_boxes *ret)
{
	int r = sets_check(a, b, ret);

	if (r == 0)
		r = boxes_disjoint(a, b, ret);
	if (r == 0)
		boxes_sort(ret);
	return r;
}

int tensor_boxes_difference(const struct tensor_boxes *a, const struct tensor_boxes *b, struct tensor_boxes *ret)
{
	base_cleanup(tensor_boxes_release) struct tensor_boxes from = {.ndim = a->ndim}, rest = {.ndim = a->ndim};
	base_cleanup(tensor_box_index_free_p) struct tensor_box_index *index = NULL;
	int r = sets_check(a, b, ret);

	if (r == 0)
		r = boxes_disjoint(a, NULL, &from);
	if (r == 0)
		r = tensor_box_index_new(b, &index);
	for (size_t i = 0; i < from.n && r == 0; i++)
		r = box_carve(index, b, SIZE_MAX, boxes_at(&from, i), &rest, ret);
	if (r == 0)
		boxes_sort(ret);
	return r;
}

struct common { const struct tensor_boxes *boxes; struct tensor_box window; struct tensor_boxes *ret; };

static int common_add(void *arg, size_t box)
{
	const struct common *c = arg;
	struct tensor_box other;

	if (c->ret->n >= BOXES_MAX)
		return -BASE_ELIMIT;
	tensor_boxes_get(c->boxes, box, &other);
	tensor_box_intersect(c->ret->ndim, &other, &c->window, &other);
	return tensor_boxes_add(c->ret, &other);
}

int tensor_boxes_intersection(const struct tensor_boxes *a, const struct tensor_boxes *b, struct tensor_boxes *ret)
{
	base_cleanup(tensor_boxes_release) struct tensor_boxes first = {.ndim = a->ndim}, second = {.ndim = a->ndim};
	base_cleanup(tensor_box_index_free_p) struct tensor_box_index *index = NULL;
	struct common c = {.boxes = &second, .ret = ret};
	int r = sets_check(a, b, ret);

	if (r == 0)
		r = boxes_disjoint(a, NULL, &first);
	if (r == 0)
		r = boxes_disjoint(b, NULL, &second);
	if (r == 0)
		r = tensor_box_index_new(&second, &index);
	for (size_t i = 0; i < first.n && r == 0; i++) {
		tensor_boxes_get(&first, i, &c.window);
		r = tensor_box_index_find(index, &c.window, common_add, &c);
	}
	if (r == 0)
		boxes_sort(ret);
	return r;
}
