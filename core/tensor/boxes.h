/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes: lists of boxes of one tensor as sets of items: union, intersection, difference, exact cover, and an index that
 * finds the boxes which meet another without looking at all of them. Boxes are packed, (offset, size) for each
 * dimension, as chunks store them; a 0-d tensor's box is no numbers at all. Everything counts items, not bytes.
 * Sets are disjoint unless they come from a caller. Memory grows with the boxes given and made only. Coordinates end at
 * 2^64 - 1; nothing wraps. One list belongs to one thread; an index, once made, to any. Nothing here blocks. */
#ifndef CORE_TENSOR_BOXES_H
#define CORE_TENSOR_BOXES_H

#include <stddef.h>

#include "core/base/error.h"
#include "core/tensor/box.h"

struct tensor_boxes {           /* zero-initialise, with ndim */
	uint32_t ndim;
	size_t n, room;
	uint64_t *pairs;        /* n * ndim pairs; malloc'ed */
};
void tensor_boxes_release(struct tensor_boxes *b);                      /* NULL-safe */
int tensor_boxes_add(struct tensor_boxes *b, const struct tensor_box *box); /* -ENOMEM; -EINVAL: over 16 dimensions */
void tensor_boxes_get(const struct tensor_boxes *b, size_t i, struct tensor_box *ret_box);
/* What two boxes have in common; false: nothing. In 0 dimensions all of it. */
bool tensor_box_intersect(uint32_t ndim, const struct tensor_box *a, const struct tensor_box *b,
	struct tensor_box *ret_box);
bool tensor_box_empty(uint32_t ndim, const struct tensor_box *b);       /* some size is 0 */
/* "[0:4, 8:16]" into `text`, cut where it is full; "[]" in 0 dimensions; "7:+9" where the end is beyond 2^64 - 1. */
void tensor_box_text(uint32_t ndim, const struct tensor_box *b, char *text, size_t room);

/* An index over boxes: built in n log n, asked in about log n + what is found. It keeps a pointer to `b`, which must
 * not change meanwhile. Boxes of size 0 are never found. -EINVAL: over 16 dimensions; -BASE_ELIMIT: 2^32 boxes;
 * -ENOMEM. */
struct tensor_box_index;
int tensor_box_index_new(const struct tensor_boxes *b, struct tensor_box_index **ret_i);
void tensor_box_index_free(struct tensor_box_index *i);                 /* NULL-safe */
/* Calls f with the number of each box that meets the window, in no order; what it returns, if not 0, ends the walk. */
int tensor_box_index_find(const struct tensor_box_index *i, const struct tensor_box *window,
	int (*f)(void *arg, size_t box), void *arg);

/* Sets. No product code calls these three yet: they are for the load (what of a tensor is there, what is missing).
 * `a` and `b` may overlap themselves and each other; what is appended to `ret` (empty before) is disjoint, has no
 * empty boxes, and is ordered by offset, first dimension first. A box that meets no other stays whole; of boxes that
 * overlap the largest does, of equally large ones the first (those of `a` before those of `b`). In 0 dimensions the
 * result is one box or none. -EINVAL: dimensions differ, or over 16; -BASE_ELIMIT: 2^32 boxes; -ENOMEM. After an error
 * `ret` holds a part of the result. */
int tensor_boxes_union(const struct tensor_boxes *a, const struct tensor_boxes *b, struct tensor_boxes *ret);
int tensor_boxes_intersection(const struct tensor_boxes *a, const struct tensor_boxes *b, struct tensor_boxes *ret);
int tensor_boxes_difference(const struct tensor_boxes *a, const struct tensor_boxes *b, struct tensor_boxes *ret);

/* Do the boxes cover the tensor exactly? 0: yes; -ERANGE: box `a`, told in `box`, is not inside the tensor; -EEXIST:
 * boxes a < b overlap, in `box`; -ENOENT: nobody has `box`, and it cannot be widened (a and b are 0). Of several faults
 * those come first in this order; of overlaps the one whose later box has the lowest offset, of gaps the one that
 * begins at the first item, row-major, that nobody has. -EINVAL: dimensions differ, or over 16; -EOVERFLOW: the tensor
 * is longer than 2^62 items; -ENOMEM. Empty boxes are ignored; a tensor without items is covered by none. About
 * n log n. */
struct tensor_cover { struct tensor_box box; size_t a, b; };
int tensor_boxes_cover(const struct tensor_shape *s, const struct tensor_boxes *b, struct tensor_cover *ret_fault);

#endif
