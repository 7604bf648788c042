/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes: lists of boxes of one tensor: their exact cover, and an index that finds the boxes that overlap another
 * without looking at all of them. Boxes are packed as (offset, size) for each dimension, as a part's chunks store them;
 * the box of a 0-d tensor has no numbers. Everything counts items, not bytes. Memory grows only with the number of
 * boxes. Coordinates end at 2^64 - 1; nothing wraps. One list belongs to one thread; an index may be used by any once
 * it is made. Nothing here blocks. */
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
/* The intersection of two boxes; false: it is empty. In 0 dimensions it is the whole tensor. */
bool tensor_box_intersect(uint32_t ndim, const struct tensor_box *a, const struct tensor_box *b,
	struct tensor_box *ret_box);
bool tensor_box_empty(uint32_t ndim, const struct tensor_box *b);       /* some size is 0 */
/* "[0:4, 8:16]" into `text`, cut where it is full; "[]" in 0 dimensions; "7:+9" where the end is beyond 2^64 - 1. */
void tensor_box_text(uint32_t ndim, const struct tensor_box *b, char *text, size_t room);

/* An index over boxes: building takes n log n, a question about log n plus what it finds. It keeps a pointer to `b`,
 * which must not change meanwhile. Boxes of size 0 are never found. -EINVAL: over 16 dimensions; -BASE_ELIMIT: 2^32
 * boxes; -ENOMEM. */
struct tensor_box_index;
int tensor_box_index_new(const struct tensor_boxes *b, struct tensor_box_index **ret_i);
void tensor_box_index_free(struct tensor_box_index *i);                 /* NULL-safe */
/* Calls f with the number of each box that overlaps the window, in no order; what it returns, if not 0, ends the
 * walk. */
int tensor_box_index_find(const struct tensor_box_index *i, const struct tensor_box *window,
	int (*f)(void *arg, size_t box), void *arg);

/* Do the boxes cover the tensor exactly? 0: yes; -ERANGE: box number `a`, copied to `box`, is not inside the tensor;
 * -EEXIST: boxes number a < b overlap in `box`; -ENOENT: `box` is a gap as wide as possible (a and b are 0). Of several
 * faults the first in this order is reported; of overlaps the one whose later box has the lowest offset; of gaps the
 * one that begins at the first missing item in row-major order. -EINVAL: dimensions differ, or over 16; -EOVERFLOW: the
 * tensor is longer than 2^62 items; -ENOMEM. Empty boxes are ignored; a tensor without items is covered by none. About
 * n log n. */
struct tensor_cover { struct tensor_box box; size_t a, b; };
int tensor_boxes_cover(const struct tensor_shape *s, const struct tensor_boxes *b, struct tensor_cover *ret_fault);

#endif
