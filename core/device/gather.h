/* SPDX-License-Identifier: Apache-2.0
 *
 * gather: a box of a strided array into contiguous row-major memory. Strides are in bytes, of any sign; a size of 0 in
 * any dimension copies nothing. Bytes that lie together are copied together. Any thread. */
#ifndef CORE_DEVICE_GATHER_H
#define CORE_DEVICE_GATHER_H

#include <stddef.h>
#include <stdint.h>

#define DEVICE_GATHER_DIMS 16u

struct device_gather {
	const void *from;               /* the box's first item */
	uint64_t item_bytes;
	uint32_t ndim;
	uint64_t size[DEVICE_GATHER_DIMS];
	int64_t stride[DEVICE_GATHER_DIMS];
};
/* Drops dimensions of size 1, merges neighbouring dimensions that lie together, and folds an innermost contiguous
 * dimension into item_bytes (so ndim 0 means one memcpy of item_bytes). The bytes and their order stay the same. */
void device_gather_fold(struct device_gather *g);
void device_gather_host(void *to, const struct device_gather *g);
/* Row-major strides of what a gather makes, saturated. */
void device_gather_strides(const struct device_gather *g, uint64_t *ret_to_stride);
static inline uint64_t device_gather_abs(int64_t v) { return v < 0 ? -(uint64_t)v : (uint64_t)v; }
/* Writes into a larger row-major array: items lie to_stride apart, those of the last dimension one after another. The
 * dimensions are not folded; no size is 0. */
void device_gather_part(void *to, const uint64_t *to_stride, const struct device_gather *g);

#endif
