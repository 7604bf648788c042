/* SPDX-License-Identifier: Apache-2.0
 *
 * gather: a box of a strided array into contiguous row-major memory. Strides are in bytes, of any sign; a size of 0 in
 * any dimension copies nothing. Runs that lie together are copied together. Any thread. */
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
/* Dimensions of size 1 dropped, neighbours that lie together merged, the innermost contiguous run folded into
 * item_bytes (so ndim 0 means one memcpy of item_bytes). Equal bytes in equal order. */
void device_gather_fold(struct device_gather *g);
void device_gather_host(void *to, const struct device_gather *g);
/* A part of a larger row-major array: its items lie to_stride apart, those of the last dimension one behind another.
 * Dimensions as they are given; no size is 0. */
void device_gather_part(void *to, const uint64_t *to_stride, const struct device_gather *g);

/* memcpy of what nobody will read soon, past the caches where the processor can: the destination is not read first, and
 * throws nothing out. Another thread may read it after device_copy_past_end by the thread that copied. */
void device_copy_past(void *to, const void *from, size_t len);
void device_copy_past_end(void);

#endif
