/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda: copies out of CUDA device memory, through the driver API (libcuda.so.1), loaded at run time and never linked.
 * Nothing here allocates on the device. Driver errors are translated to errnos, with the driver's own name in the
 * sentence.
 *
 * Calls are made in the context that the memory is of, whatever the thread's is, and in the relaxed mode of stream
 * capture: a thread of the program may capture a graph meanwhile, and is not disturbed. Streams are our own and
 * non-blocking; one thread uses one at a time. A mark says when copies given so far are done.
 *
 * The library is the one that dlopen(3) finds as libcuda.so.1, or that the environment variable VCKPT_LIBCUDA names by
 * its path (for tests; ignored in set-user-ID programs). */
#ifndef CORE_DEVICE_CUDA_H
#define CORE_DEVICE_CUDA_H

#include <stdbool.h>

#include "core/base/error.h"
#include "core/device/gather.h"

enum device_pin { DEVICE_PIN_AUTO, DEVICE_PIN_NO, DEVICE_PIN_YES, DEVICE_PIN_ALLOCATE };

/* 0, or -ENOENT (no driver, or no device): the sentence says why. Loads once; any thread. */
int device_cuda_load(struct base_error *err);

/* What has to be done before device memory may be read, and the contexts that the memory is of, called its places. A
 * save's: made empty, told of every tensor, set, then waited for by streams of its places. */
struct device_fence;
int device_fence_new(struct device_fence **ret_f, struct base_error *err); /* loads the driver */
/* The context that the memory at `address` is of (NULL: the calling thread's). -EINVAL: no context is to be found. */
int device_fence_place(struct device_fence *f, const void *address, unsigned *ret_place, struct base_error *err);
/* Records an event on each stream (NULL: the default stream of every place); in places that no stream is of, on the
 * default stream. Once. -EBUSY: a stream is being captured into a graph (nothing was done to it). */
int device_fence_set(struct device_fence *f, void *const *streams, size_t n, struct base_error *err);
void device_fence_free(struct device_fence *f); /* NULL-safe; any thread */

/* Host memory that is page-locked for all contexts (cuMemHostRegister, portable), by way of the fence's first place. */
struct device_registration;
int device_registration_new(const struct device_fence *f, void *memory, size_t bytes,
	struct device_registration **ret_r, struct base_error *err);
/* Memory of the driver instead (cuMemHostAlloc): it goes with the registration, and with its context. */
int device_registration_allocate(const struct device_fence *f, size_t bytes, void **ret_memory,
	struct device_registration **ret_r, struct base_error *err);
void device_registration_free(struct device_registration *r); /* before the memory goes; NULL-safe; any thread */

struct device_stream;
/* In the context of a place of the fence. What it turns (fetch.h) comes by way of 4 MiB of its own, allocated when they
 * are first needed: pinned, unless pin is NO, or the driver has none and pin is not YES. */
int device_stream_new(const struct device_fence *f, unsigned place, enum device_pin pin,
	struct device_stream **ret_s, struct base_error *err);
void device_stream_free(struct device_stream *s); /* waits for its copies; NULL-safe */
bool device_stream_fits(const struct device_stream *s, const struct device_fence *f, unsigned place); /* its context */
int device_stream_wait(struct device_stream *s, const struct device_fence *f, struct base_error *err);
/* `to` (pinned, or pageable and then slower) is filled when a later mark was waited for, by the driver or by whoever
 * waits. Long calls wait for parts of their own copies, others for none. */
int device_stream_gather(struct device_stream *s, void *to, const struct device_gather *g, struct base_error *err);

struct device_mark;                     /* of a stream, whose thread's it is, and which it does not outlive */
int device_mark_new(struct device_stream *s, struct device_mark **ret_m, struct base_error *err); /* reusable */
void device_mark_free(struct device_mark *m); /* NULL-safe */
int device_mark_set(struct device_mark *m, struct base_error *err); /* after the copies given to its stream so far */
int device_mark_wait(struct device_mark *m, struct base_error *err); /* blocks until they are done; a copy's
	                                                                       error */

#endif
