/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda: copies out of CUDA device memory, and into it, through the driver API (libcuda.so.1), loaded at run time and
 * never linked.
 * Nothing here allocates on the device. Driver errors are translated to errnos, with the driver's own name in the
 * sentence.
 *
 * Calls are made in the context to which the memory belongs, whatever context the thread has, and in the relaxed mode
 * of stream capture, so a thread of the program that captures a graph meanwhile is not disturbed. Streams are the
 * library's own and non-blocking; one thread uses one at a time. An event is reached when the copies given so far are
 * done.
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

/* What has to be finished before device memory may be read, and the contexts to which the memory belongs, by number. A
 * save makes an empty one, asks it for the context of every tensor, and sets it; then the streams of its contexts wait
 * for it. */
struct device_fence;
int device_fence_new(struct device_fence **ret_f, struct base_error *err); /* loads the driver */
/* The number of the context to which the memory at `address` belongs (NULL: the calling thread's). -EINVAL: it finds
 * none. */
int device_fence_context(struct device_fence *f, const void *address, unsigned *ret_number, struct base_error *err);
/* Records an event on each stream (NULL: the default stream of every context), and on the default stream of each
 * context to which none of the streams belongs. Call it once. -EBUSY: a stream is being captured into a graph (nothing
 * was done to it). */
int device_fence_set(struct device_fence *f, void *const *streams, size_t n, struct base_error *err);
void device_fence_free(struct device_fence *f); /* NULL-safe; any thread */

/* Page-locks host memory for all contexts (cuMemHostRegister, portable), in the fence's first context.
 * *memory NULL: the driver allocates it (cuMemHostAlloc); then it ends with the registration, and with its context. */
struct device_registration;
int device_registration_new(const struct device_fence *f, void **memory, size_t bytes,
	struct device_registration **ret_r, struct base_error *err);
void device_registration_free(struct device_registration *registration); /* before the memory; NULL-safe; any thread */

struct device_stream;
/* A stream in a context of the fence. Bytes that it reorders (fetch.h) go through 4 MiB of its own, which it allocates
 * at first need. They are pinned, unless pin is NO, or the driver has no such memory and pin is not YES. */
int device_stream_new(const struct device_fence *f, unsigned number, enum device_pin pin,
	struct device_stream **ret_s, struct base_error *err);
void device_stream_free(struct device_stream *s); /* waits for its copies; NULL-safe */
bool device_stream_fits(const struct device_stream *s, const struct device_fence *f, unsigned number); /* its context */
/* Between these two, calls of other libraries (NCCL) are made in its context, as ours are; do not nest them. */
int device_stream_enter(struct device_stream *s, struct base_error *err);
void device_stream_leave(struct device_stream *s);
void *device_stream_handle(struct device_stream *s); /* the driver's CUstream */
int device_stream_wait(struct device_stream *s, const struct device_fence *f, struct base_error *err);
/* `to` (pinned, or pageable and then slower) is filled once a later event was waited for; the driver or the waiting
 * thread fills it. Long calls wait for some of their own copies, others do not wait. */
int device_stream_gather(struct device_stream *s, void *to, const struct device_gather *g, struct base_error *err);
/* The reverse: contiguous row-major bytes at `from` go to the items of g, whose g->from is in device memory and
 * written. Strides are positive, and no two items share a byte. `from` must stay as it is until a later event was
 * waited for. Does not wait. */
int device_stream_scatter(struct device_stream *s, const void *from, const struct device_gather *g,
	struct base_error *err);

struct device_event;                    /* belongs to a stream and its thread, and does not outlive the stream */
int device_event_new(struct device_stream *s, struct device_event **ret_e, struct base_error *err); /* reusable */
void device_event_free(struct device_event *e); /* NULL-safe */
int device_event_set(struct device_event *e, struct base_error *err); /* after the copies given to its stream so far */
/* Of an event whose stream makes no copies of ours: 1: what was before it is done, 0: not yet; or an error of it. */
int device_event_done(struct device_event *e, struct base_error *err);
int device_event_wait(struct device_event *e, struct base_error *err); /* blocks until they are done; a copy's
	                                                                       error */

#endif
