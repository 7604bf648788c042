/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda: copies out of CUDA device memory, through the driver API (libcuda.so.1), loaded at run time and never linked.
 * Nothing here allocates on the device. Driver errors are translated to errnos, with the driver's own name in the
 * sentence.
 *
 * A fence is recorded on the caller's stream by the caller's thread (its context current): what was given to that
 * stream before is done before any copy that waits for the fence. A stream is our own, non-blocking, in the fence's
 * context; one thread uses it at a time. A mark says when copies given so far are done.
 *
 * The library is the one that dlopen(3) finds as libcuda.so.1, or that the environment variable VCKPT_LIBCUDA names by
 * its path (for tests; ignored in set-user-ID programs). */
#ifndef CORE_DEVICE_CUDA_H
#define CORE_DEVICE_CUDA_H

#include <stdbool.h>

#include "core/base/error.h"
#include "core/device/gather.h"

/* 0, or -ENOENT (no driver, or no device): the sentence says why. Loads once; any thread. */
int device_cuda_load(struct base_error *err);

struct device_fence;
int device_fence_new(void *stream, struct device_fence **ret_f, struct base_error *err); /* -EINVAL: no context */
void device_fence_free(struct device_fence *f); /* NULL-safe; any thread */

/* Host memory that is page-locked for all contexts (cuMemHostRegister, portable), by way of the fence's. */
struct device_registration;
int device_registration_new(const struct device_fence *f, void *memory, size_t bytes,
	struct device_registration **ret_r, struct base_error *err);
void device_registration_free(struct device_registration *r); /* before the memory goes; NULL-safe; any thread */

struct device_stream;
/* In the context of the fence. */
int device_stream_new(const struct device_fence *f, struct device_stream **ret_s, struct base_error *err);
void device_stream_free(struct device_stream *s); /* waits for its copies; NULL-safe */
bool device_stream_fits(const struct device_stream *s, const struct device_fence *f); /* the same context */
int device_stream_wait(struct device_stream *s, const struct device_fence *f, struct base_error *err);
/* Asynchronous: `to` (pinned, or pageable and then slower) is filled when a later mark is done. */
int device_stream_gather(struct device_stream *s, void *to, const struct device_gather *g, struct base_error *err);

struct device_mark;
int device_mark_new(struct device_stream *s, struct device_mark **ret_m, struct base_error *err); /* reusable */
void device_mark_free(struct device_mark *m); /* NULL-safe */
int device_mark_set(struct device_mark *m, struct base_error *err); /* after the copies given to its stream so far */
int device_mark_wait(struct device_mark *m, struct base_error *err); /* blocks until they are done; a copy's error */

#endif
