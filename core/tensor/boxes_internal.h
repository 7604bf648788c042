/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes_internal: packed boxes, shared by the files of boxes.h. A packed box is (offset, size) for each dimension.
 * Pure functions, any thread.
 *
 * Coordinates end at 2^64 - 1; what a box has beyond that does not count. So the end of a box is its last coordinate,
 * which always fits. An empty box has no last coordinate; do not ask for it. */
#ifndef CORE_TENSOR_BOXES_INTERNAL_H
#define CORE_TENSOR_BOXES_INTERNAL_H

#include "core/base/cleanup.h"
#include "core/tensor/boxes.h"

#define BOXES_MAX UINT32_MAX    /* of a set, and of an index */

static inline const uint64_t *boxes_at(const struct tensor_boxes *b, size_t i)
{
	return b->ndim ? b->pairs + 2 * b->ndim * i : NULL;
}
static inline uint64_t boxes_last(uint64_t offset, uint64_t size)
{
	return size - 1 > UINT64_MAX - offset ? UINT64_MAX : offset + (size - 1);
}
/* Both not empty. */
static inline bool boxes_overlap(uint32_t ndim, const uint64_t *a, const uint64_t *b)
{
	for (uint32_t i = 0; i < 2 * ndim; i += 2)
		if (a[i] <= b[i] ? a[i + 1] <= b[i] - a[i] : b[i + 1] <= a[i] - b[i])
			return false;
	return true;
}
static inline bool boxes_empty(uint32_t ndim, const uint64_t *a)
{
	for (uint32_t d = 0; d < ndim; d++)
		if (a[2 * d + 1] == 0)
			return true;
	return false;
}

/* Appends a packed box; -ENOMEM. */
int tensor_boxes_push(struct tensor_boxes *b, const uint64_t *pairs);

/* One of the boxes numbered below `below` that overlap `window` (packed, not empty): one whose intersection is large,
 * not always the largest. False: there is none. */
bool tensor_box_index_first(const struct tensor_box_index *i, const uint64_t *window, size_t below, size_t *ret_box);

BASE_CLEANUP_DEFINE(struct tensor_box_index *, tensor_box_index_free)

#endif
