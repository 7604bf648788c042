/* SPDX-License-Identifier: Apache-2.0
 *
 * fetch: the best way to copy a strided box out of device memory, by arithmetic alone (nothing here touches memory or
 * calls a driver). A box is copied straight to where it belongs, by copies of one, two or three dimensions; or it is
 * reordered: the bytes are copied as they are in the source, in few long copies, and the host puts the items in order.
 * Any thread. */
#ifndef CORE_DEVICE_FETCH_H
#define CORE_DEVICE_FETCH_H

#include <stdbool.h>

#include "core/device/gather.h"

/* The dimensions that one copy call spans: rows of item_bytes along `rows`, planes of rows along `planes`; ndim:
 * none. */
struct device_copy_dims { uint32_t rows, planes; };
/* The pair of dimensions that needs the fewest calls; returns how many calls that are (saturated). g is folded. */
uint64_t device_fetch_dims(const struct device_gather *g, const uint64_t *to_stride, struct device_copy_dims *ret_d);

/* A box that is reordered. `copy` reads the device, in the order of the source, into `bytes` contiguous bytes;
 * `reorder` is the box in them: its `from` counts from their first byte. */
struct device_reorder {
	struct device_gather copy, reorder;
	uint64_t bytes;
	double cost;                    /* in bytes of one long copy */
};
/* False: straight is better, or the only way. g is folded; items larger than `room` are not reordered. */
bool device_fetch_reorders(const struct device_gather *g, uint64_t room);
void device_fetch_reorder(const struct device_gather *g, struct device_reorder *ret_t);
/* For a reordered box of more than `room` bytes: the dimension along which it is best cut into parts, and how many
 * indices of it a part has (at least 1, fewer than all; a part may still be too large). */
uint32_t device_fetch_cut(const struct device_gather *g, uint64_t room, uint64_t *ret_n);

#endif
