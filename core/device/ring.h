/* SPDX-License-Identifier: Apache-2.0
 *
 * ring: the staging memory of a saver: one mapping, allocated once, out of which slots are taken in order and to which
 * they are given back in any order. A slot is contiguous, begins at a page, and belongs to its taker until it is given
 * back. Its memory is reused only when all slots that were taken before it have been given back too. Never blocks,
 * never grows. Any thread. */
#ifndef CORE_DEVICE_RING_H
#define CORE_DEVICE_RING_H

#include <stdint.h>

#include "core/device/cuda.h"

enum device_memory { DEVICE_MEMORY_PAGEABLE, DEVICE_MEMORY_LOCKED, DEVICE_MEMORY_PINNED };
struct device_ring;
/* Its memory is resident on return. With a fence it is also pinned for all CUDA contexts, if `pin` allows: registered
 * with the driver, or if the driver refuses that, allocated by it (ALLOCATE: the other way round). If neither works,
 * AUTO and ALLOCATE take what they can get, and YES fails (-EPERM, -ENOMEM, the driver's sentences). Any thread. */
int device_ring_new(uint64_t bytes, enum device_pin pin, const struct device_fence *fence, struct device_ring **ret_r,
	struct base_error *err);
/* For a ring that was made without a fence and now has to take device memory: registers it as device_ring_new does,
 * unless pin is NO; slots may be taken. 1: it stays unpinned, but the driver might allocate a new ring; every later
 * call says the same. One thread at a time. */
int device_ring_register(struct device_ring *ring, const struct device_fence *fence);
/* Why it is not pinned; "" if the driver was not asked. For the thread that registers. */
const char *device_ring_why(const struct device_ring *ring);
uint64_t device_ring_register_ns(const struct device_ring *ring); /* how long the driver took for it; likewise */
void device_ring_free(struct device_ring *ring); /* NULL-safe; slots that were not given back are lost with it */
uint64_t device_ring_bytes(const struct device_ring *ring);
enum device_memory device_ring_memory(const struct device_ring *ring);
/* NULL: no room now (or never: bytes > device_ring_bytes). bytes 0 takes a page. */
void *device_ring_take(struct device_ring *ring, uint64_t bytes);
int device_ring_give(struct device_ring *ring, void *slot); /* -EINVAL: not a slot that is taken */
uint64_t device_ring_used(const struct device_ring *ring); /* bytes that are not free */

#endif
