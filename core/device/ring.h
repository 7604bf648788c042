/* SPDX-License-Identifier: Apache-2.0
 *
 * ring: the staging memory of a saver: one mapping, allocated once, out of which slots are taken in order and to which
 * they are given back in any order. A slot is contiguous, begins at a page, and belongs to whoever took it until it is
 * given back; what lies behind it is reused only when all slots before it were given back too. Never blocks, never
 * grows. Any thread. */
#ifndef CORE_DEVICE_RING_H
#define CORE_DEVICE_RING_H

#include <stdint.h>

#include "core/base/error.h"

enum device_pin { DEVICE_PIN_AUTO, DEVICE_PIN_NO, DEVICE_PIN_YES };
enum device_memory { DEVICE_MEMORY_PAGEABLE, DEVICE_MEMORY_LOCKED, DEVICE_MEMORY_PINNED };
struct device_fence;
struct device_ring;
/* Resident at return. With a fence: registered with the CUDA driver in its context (portable: for every context), where
 * pin allows; any thread. AUTO takes what it can get, YES fails (-EPERM, -ENOMEM, the driver's sentence). */
int device_ring_new(uint64_t bytes, enum device_pin pin, const struct device_fence *fence, struct device_ring **ret_r,
	struct base_error *err);
/* A ring that was made without a fence, and now meets device memory: registered as by new; slots may be taken. Tried
 * once where pin is AUTO; nothing to do where it is done. From one thread at a time. */
int device_ring_register(struct device_ring *r, const struct device_fence *fence, struct base_error *err);
void device_ring_free(struct device_ring *r); /* NULL-safe; slots that were not given back are lost with it */
uint64_t device_ring_bytes(const struct device_ring *r);
enum device_memory device_ring_memory(const struct device_ring *r);
/* NULL: no room now (or never: bytes > device_ring_bytes). bytes 0 takes a page. */
void *device_ring_take(struct device_ring *r, uint64_t bytes);
int device_ring_give(struct device_ring *r, void *slot); /* -EINVAL: not a slot that is taken */
uint64_t device_ring_used(const struct device_ring *r); /* bytes that are not free */
uint64_t device_free_memory(void); /* of this machine and its cgroup, in bytes: what could be allocated now */

#endif
