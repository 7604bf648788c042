/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes_index: a tree over boxes, in one piece of memory.
 *
 * The boxes are halved by the median of their centres along the dimension in which these lie widest apart, the halves
 * likewise, down to leaves of at most 8. A node knows the bounds of its boxes (first and last coordinate inside, in
 * each dimension) and the lowest of their numbers; a search enters only nodes whose bounds overlap the window.
 *
 * Nodes are numbered as in a heap: the root is 1, the halves of m are 2m and 2m + 1. Which boxes a node has follows
 * from its number: of 2^l nodes of a level, node j has the range [n*j >> l, n*(j+1) >> l) of `order`. So there are
 * neither pointers nor counts, all leaves are on one level, and a node's halves are just what the next level says.
 *
 * A search for one box only (what the cover asks) goes first where bounds and window have most in common: of many boxes
 * over one place it takes a large one, so that little is left to be asked again. */
#include "core/tensor/boxes_internal.h"

#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"

#define LEAF_BOXES 8u
#define STACK_NODES 64u         /* a search leaves one node a level behind: 32 levels at most */

struct tensor_box_index {
	const struct tensor_boxes *boxes;
	uint32_t n, level;              /* boxes that are not empty; level of the leaves */
	uint64_t *bounds;               /* node m: (first, last) a dimension at 2 * ndim * m */
	uint32_t *lowest;               /* node m: the lowest number of its boxes; UINT32_MAX: it has none */
	uint32_t *order;                /* numbers of boxes */
};

struct index_item { uint64_t key; uint32_t box; };
struct index_build { struct tensor_box_index *index; struct index_item *items; };

/* The level of node m, and its range of `order`. */
static uint32_t node_range(const struct tensor_box_index *x, uint32_t m, size_t *ret_from, size_t *ret_end)
{
	uint32_t level = 31 - (uint32_t)__builtin_clz(m);
	uint64_t j = m - (UINT32_C(1) << level);

	*ret_from = (uint64_t)x->n * j >> level;
	*ret_end = (uint64_t)x->n * (j + 1) >> level;
	return level;
}

/* ---- building ---- */

static int item_order(const void *pa, const void *pb)
{
	const struct index_item *a = pa, *b = pb;

	return (a->key > b->key) - (a->key < b->key);
}

static uint64_t key_middle(uint64_t a, uint64_t b, uint64_t c)
{
	return base_max(base_min(a, b), base_min(base_max(a, b), c));
}

/* Moves the k smallest to the front, by parting around a middle value. After many bad values it sorts. */
static void items_select(struct index_item *items, int64_t n, int64_t k)
{
	int64_t low = 0, high = n - 1;

	for (unsigned turns = 0; low < high; turns++) {
		uint64_t pivot = key_middle(items[low].key, items[low + (high - low) / 2].key, items[high].key);
		int64_t i = low, j = high;

		if (turns == 40) {
			qsort(items + low, (size_t)(high - low + 1), sizeof *items, item_order);
			return;
		}
		while (i <= j) {
			while (items[i].key < pivot)
				i++;
			while (items[j].key > pivot)
				j--;
			if (i <= j) {
				struct index_item t = items[i];

				items[i++] = items[j];
				items[j--] = t;
			}
		}
		if (k <= j)
			high = j;
		else if (k >= i)
			low = i;
		else
			return;
	}
}

static uint64_t box_centre(const uint64_t *pairs, uint32_t d)
{
	return pairs[2 * d] + (boxes_last(pairs[2 * d], pairs[2 * d + 1]) - pairs[2 * d]) / 2;
}

/* Bounds and lowest number of node m; returns the dimension in which its centres lie widest apart, or ndim: nowhere. */
static uint32_t node_bounds(struct index_build *w, uint32_t m, size_t from, size_t end)
{
	struct tensor_box_index *x = w->index;
	uint32_t ndim = x->boxes->ndim, best = ndim;
	uint64_t *bounds = x->bounds + (size_t)2 * ndim * m, widest = 0;
	uint64_t low[TENSOR_MAX_DIMS], high[TENSOR_MAX_DIMS];

	x->lowest[m] = UINT32_MAX;
	for (uint32_t d = 0; d < ndim; d++) {
		bounds[2 * d] = low[d] = UINT64_MAX;
		bounds[2 * d + 1] = high[d] = 0;
	}
	for (size_t i = from; i < end; i++) {
		const uint64_t *pairs = boxes_at(x->boxes, w->items[i].box);

		x->lowest[m] = (uint32_t)base_min(x->lowest[m], w->items[i].box);
		for (uint32_t d = 0; d < ndim; d++) {
			uint64_t centre = box_centre(pairs, d);

			bounds[2 * d] = base_min(bounds[2 * d], pairs[2 * d]);
			bounds[2 * d + 1] = base_max(bounds[2 * d + 1], boxes_last(pairs[2 * d], pairs[2 * d + 1]));
			low[d] = base_min(low[d], centre);
			high[d] = base_max(high[d], centre);
		}
	}
	for (uint32_t d = 0; d < ndim && from < end; d++)
		if (high[d] - low[d] > widest) {
			widest = high[d] - low[d];
			best = d;
		}
	return best;
}

static void node_build(struct index_build *w, uint32_t m)
{
	struct tensor_box_index *x = w->index;
	size_t from, end, middle, rest;
	uint32_t level = node_range(x, m, &from, &end), d = node_bounds(w, m, from, end);

	if (level == x->level)
		return;
	if (d < x->boxes->ndim) {
		for (size_t i = from; i < end; i++)
			w->items[i].key = box_centre(boxes_at(x->boxes, w->items[i].box), d);
		node_range(x, 2 * m, &rest, &middle);
		items_select(w->items + from, (int64_t)(end - from), (int64_t)(middle - from));
	}
	node_build(w, 2 * m);
	node_build(w, 2 * m + 1);
}

int tensor_box_index_new(const struct tensor_boxes *b, struct tensor_box_index **ret_i)
{
	base_cleanup_free struct index_item *items = NULL;
	struct tensor_box_index *x;
	uint32_t n = 0, level = 0;
	size_t nodes, bounds;

	if (b->ndim > TENSOR_MAX_DIMS)
		return -EINVAL;
	if (b->n >= BOXES_MAX)
		return -BASE_ELIMIT;
	items = calloc(b->n + 1, sizeof *items);
	if (!items)
		return -ENOMEM;
	for (size_t i = 0; i < b->n; i++)
		if (!boxes_empty(b->ndim, boxes_at(b, i)))
			items[n++].box = (uint32_t)i;
	while ((uint64_t)n > (uint64_t)LEAF_BOXES << level)
		level++;
	nodes = (size_t)2 << level;
	bounds = nodes * 2 * b->ndim * sizeof *x->bounds;
	x = malloc(sizeof *x + bounds + (nodes + n) * sizeof(uint32_t));
	if (!x)
		return -ENOMEM;
	*x = (struct tensor_box_index){.boxes = b, .n = n, .level = level, .bounds = (uint64_t *)(x + 1)};
	x->lowest = (uint32_t *)((uint8_t *)(x + 1) + bounds);
	x->order = x->lowest + nodes;
	node_build(&(struct index_build){x, items}, 1);
	for (uint32_t i = 0; i < n; i++)
		x->order[i] = items[i].box;
	*ret_i = x;
	return 0;
}

void tensor_box_index_free(struct tensor_box_index *i) { free(i); }

/* ---- asking ---- */

static bool node_overlaps(const struct tensor_box_index *x, uint32_t m, const uint64_t *window)
{
	const uint64_t *bounds = x->bounds + (size_t)2 * x->boxes->ndim * m;

	if (x->lowest[m] == UINT32_MAX)
		return false;
	for (uint32_t i = 0; i < 2 * x->boxes->ndim; i += 2)
		if (bounds[i + 1] < window[i] || bounds[i] > boxes_last(window[i], window[i + 1]))
			return false;
	return true;
}

int tensor_box_index_find(const struct tensor_box_index *i, const struct tensor_box *window,
	int (*f)(void *arg, size_t box), void *arg)
{
	uint32_t ndim = i->boxes->ndim, stack[STACK_NODES] = {1}, depth = 1;
	uint64_t pairs[2 * TENSOR_MAX_DIMS];

	if (tensor_box_empty(ndim, window))
		return 0;
	for (uint32_t d = 0; d < ndim; d++) {
		pairs[2 * d] = window->offset[d];
		pairs[2 * d + 1] = window->size[d];
	}
	while (depth > 0) {
		uint32_t m = stack[--depth];
		size_t from, end;

		if (!node_overlaps(i, m, pairs))
			continue;
		if (node_range(i, m, &from, &end) < i->level) {
			stack[depth++] = 2 * m + 1;
			stack[depth++] = 2 * m;
			continue;
		}
		for (; from < end; from++) {
			uint32_t box = i->order[from];
			int r = boxes_overlap(ndim, boxes_at(i->boxes, box), pairs) ? f(arg, box) : 0;

			if (r != 0)
				return r;
		}
	}
	return 0;
}

/* About how much [first, last] a dimension, `step` apart, has in common with the window: only to compare. */
static double common_volume(uint32_t ndim, const uint64_t *window, const uint64_t *bounds)
{
	double v = 1;

	for (uint32_t i = 0; i < 2 * ndim; i += 2) {
		uint64_t low = base_max(window[i], bounds[i]);
		uint64_t high = base_min(boxes_last(window[i], window[i + 1]), bounds[i + 1]);

		v = high < low ? 0 : v * ((double)(high - low) + 1);
	}
	return v;
}

/* Of the boxes of a leaf the one that has most in common with the window. */
static bool leaf_first(const struct tensor_box_index *x, uint32_t m, const uint64_t *window, size_t below,
	size_t *ret_box)
{
	uint32_t ndim = x->boxes->ndim;
	double most = 0;
	size_t from, end;

	for (node_range(x, m, &from, &end); from < end; from++) {
		const uint64_t *box = boxes_at(x->boxes, x->order[from]);
		uint64_t bounds[2 * TENSOR_MAX_DIMS];
		double v;

		if (x->order[from] >= below || !boxes_overlap(ndim, box, window))
			continue;
		for (uint32_t d = 0; d < ndim; d++) {
			bounds[2 * d] = box[2 * d];
			bounds[2 * d + 1] = boxes_last(box[2 * d], box[2 * d + 1]);
		}
		v = common_volume(ndim, window, bounds);
		if (v > most) {
			most = v;
			*ret_box = x->order[from];
		}
	}
	return most > 0;
}

bool tensor_box_index_first(const struct tensor_box_index *i, const uint64_t *window, size_t below, size_t *ret_box)
{
	uint32_t ndim = i->boxes->ndim, stack[STACK_NODES] = {1}, depth = 1;
	size_t from, end;

	while (depth > 0) {
		uint32_t m = stack[--depth];
		bool left;

		if (i->lowest[m] >= below || !node_overlaps(i, m, window))
			continue;
		if (node_range(i, m, &from, &end) == i->level) {
			if (leaf_first(i, m, window, below, ret_box))
				return true;
			continue;
		}
		left = common_volume(ndim, window, i->bounds + (size_t)2 * ndim * 2 * m) >=
			common_volume(ndim, window, i->bounds + (size_t)2 * ndim * (2 * m + 1));
		stack[depth++] = left ? 2 * m + 1 : 2 * m;
		stack[depth++] = left ? 2 * m : 2 * m + 1;
	}
	return false;
}
