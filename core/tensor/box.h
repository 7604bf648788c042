/* SPDX-License-Identifier: Apache-2.0
 *
 * box: shapes and boxes, in items (of tensor_dtype_bytes each), row-major. Pure functions, any thread. */
#ifndef CORE_TENSOR_BOX_H
#define CORE_TENSOR_BOX_H

#include <stdbool.h>
#include <stdint.h>

#define TENSOR_MAX_DIMS 16u
#define TENSOR_MAX_BYTES (UINT64_C(1) << 62) /* of one tensor; larger products are refused */

struct tensor_shape {
	uint32_t ndim;                  /* 0 = scalar: one item */
	uint64_t dim[TENSOR_MAX_DIMS];  /* zero allowed; unused ones are 0 */
};

struct tensor_box {
	uint64_t offset[TENSOR_MAX_DIMS], size[TENSOR_MAX_DIMS]; /* the first ndim of the tensor count */
};

/* Items of a shape: 0 or -EOVERFLOW (product, even of a shape with a zero in it, beyond TENSOR_MAX_BYTES / item_bytes;
 * ndim > TENSOR_MAX_DIMS is -EINVAL). */
int tensor_shape_items(const struct tensor_shape *s, unsigned item_bytes, uint64_t *ret_items);
bool tensor_shape_empty(const struct tensor_shape *s); /* a dimension is 0 */
bool tensor_shape_equal(const struct tensor_shape *a, const struct tensor_shape *b);
void tensor_box_whole(const struct tensor_shape *s, struct tensor_box *ret_box);
uint64_t tensor_box_items(const struct tensor_shape *s, const struct tensor_box *b); /* of a box inside a valid shape */
/* The longest box whose items are items [at, n) of the flattened shape, n at most `end`; at < end. Returns n - at: from
 * the innermost dimension outward as long as what is left fills whole units. */
uint64_t tensor_box_run(const struct tensor_shape *s, uint64_t at, uint64_t end, struct tensor_box *ret_box);
bool tensor_box_inside(const struct tensor_shape *s, const struct tensor_box *b);    /* offset + size <= dim, no wrap */

#endif
