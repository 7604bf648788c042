/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes: lists of packed boxes, and what two boxes have in common. The index over a list is boxes_index.c, the exact
 * cover boxes_cover.c. */
#include "core/tensor/boxes_internal.h"

#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
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
