/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda fence: what memory belongs to, and what has to be done before it is read.
 *
 * The context is the memory's, never the thread's: a fresh thread has none, and a thread that works with one device
 * may hand over tensors of another. The driver knows it by the pointer. Memory that was mapped (expandable segments)
 * or comes out of a pool belongs to a device and to no context: then it is the device's primary one, held while the
 * fence is. What the driver does not know at all is left to the thread's context; the copy will say what is wrong
 * with it.
 *
 * An event is recorded on each of the caller's streams; where none of them is of a context, on the default
 * stream there, which is where work goes that names no stream. Each copy waits for all of them.
 *
 * A stream that is being captured runs nothing: an event recorded on it would be the graph's, and a wait for it would
 * draw our stream into the capture. So it is asked first, and refused. */
#include <stdint.h>
#include <stdlib.h>

#include "core/base/array.h"
#include "core/base/le.h"
#include "core/device/cuda.h"
#include "core/device/cuda_internal.h"

#define FENCE_SPECIAL_STREAM 2u          /* NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD: those of a context */

int device_fence_new(struct device_fence **ret_f, struct base_error *err)
{
	int r = device_cuda_load(err);
	struct device_fence *f;

	if (r < 0)
		return r;
	f = calloc(1, sizeof *f);
	if (!f)
		return base_no_memory(err);
	*ret_f = f;
	return 0;
}

void device_fence_free(struct device_fence *f)
{
	if (!f)
		return;
	for (unsigned i = 0; i < f->npoints; i++)
		cuda_event_free(f->points[i].context, f->points[i].event);
	for (unsigned i = 0; i < f->nowners; i++)
		if (f->owners[i].device >= 0)
			cuda_driver.primary_release(f->owners[i].device);
	free(f->points);
	free(f);
}

/* ---- contexts ---- */

/* Whose it is; a context of NULL: not known. `device` is set where its primary context was retained. */
static int fence_ask(const void *address, struct cuda_owner *p, struct base_error *err)
{
	int what[] = {CUDA_POINTER_CONTEXT, CUDA_POINTER_MEMORY_TYPE, CUDA_POINTER_DEVICE, CUDA_POINTER_START,
		CUDA_POINTER_SIZE};
	unsigned type = 0;
	int device = -1;
	size_t bytes = 0;
	cuda_address start = 0;
	void *found[] = {&p->context, &type, &device, &start, &bytes};
	cuda_result r;

	*p = (struct cuda_owner){.device = -1};
	r = cuda_driver.pointer_attributes(BASE_COUNT(found), what, found, (uintptr_t)address);
	if (r == CUDA_INVALID_CONTEXT || r == CUDA_INVALID_VALUE || (r == CUDA_SUCCESS && type == 0))
		return 0;
	if (r == CUDA_SUCCESS && !p->context && device >= 0) {
		r = cuda_driver.primary_retain(&p->context, device);
		if (r != CUDA_SUCCESS)
			return cuda_translate(r, "cuDevicePrimaryCtxRetain", err);
		p->device = device;
	}
	p->start = start;
	p->bytes = bytes;
	return cuda_translate(r, "cuPointerGetAttributes", err);
}

/* The number of that context; the first that is added holds the primary one. */
static int fence_add(struct device_fence *f, struct cuda_owner *p, unsigned *ret_number, struct base_error *err)
{
	unsigned i = 0;

	while (i < f->nowners && f->owners[i].context != p->context)
		i++;
	if (i < f->nowners || i == CUDA_OWNERS_MAX) {
		if (p->device >= 0)
			cuda_driver.primary_release(p->device);
		p->device = i < f->nowners ? f->owners[i].device : -1;
	}
	if (i == CUDA_OWNERS_MAX)
		return base_error_set(err, -EOPNOTSUPP, "the tensors are in more than %u CUDA contexts",
			CUDA_OWNERS_MAX);
	f->owners[i] = *p;
	f->nowners = i == f->nowners ? i + 1 : f->nowners;
	*ret_number = i;
	return 0;
}

int device_fence_context(struct device_fence *f, const void *address, unsigned *ret_number, struct base_error *err)
{
	struct cuda_owner p = {.device = -1};
	int r = 0;

	for (unsigned i = 0; i < f->nowners && address; i++)
		if ((uintptr_t)address - f->owners[i].start < f->owners[i].bytes) {
			*ret_number = i;
			return 0;
		}
	r = cuda_relax(err);
	if (r < 0)
		return r;
	r = address ? fence_ask(address, &p, err) : 0;
	if (r == 0 && !p.context)
		r = cuda_translate(cuda_driver.context_current(&p.context), "cuCtxGetCurrent", err);
	cuda_restore();
	if (r < 0)
		return r;
	if (!p.context)
		return base_error_set(err, -EINVAL, "the CUDA driver does not know the memory at %p, and the thread "
			"that calls has no CUDA context", address);
	return fence_add(f, &p, ret_number, err);
}

/* ---- points ---- */

/* Called with the stream's context current. */
static int fence_check_capture(void *stream, struct base_error *err)
{
	int status = 0;
	cuda_result r = cuda_driver.stream_is_capturing(stream, &status);

	if (r == CUDA_CAPTURE_IMPLICIT)
		return base_error_set(err, -EBUSY, "the default stream cannot be used while another stream of its "
			"context is being captured into a CUDA graph: call again when the capture has ended, or name "
			"the stream that the memory is ready on");
	if (r == CUDA_SUCCESS && status != CUDA_NOT_CAPTURING)
		return base_error_set(err, -EBUSY, "the stream that the memory is ready on is being captured into a "
			"CUDA graph, whose work has not run: call again when the capture has ended");
	return cuda_translate(r, "cuStreamIsCapturing", err);
}

static int fence_record(struct device_fence *f, cuda_context context, void *stream, struct base_error *err)
{
	cuda_event event;
	int r;

	if (base_array_more(f->points, f->npoints) < 0)
		return base_no_memory(err);
	r = cuda_enter(context, err);
	if (r < 0)
		return r;
	r = fence_check_capture(stream, err);
	if (r == 0)
		r = cuda_event_new(&event, err);
	if (r == 0) {
		f->points[f->npoints++] = (struct cuda_point){context, event};
		r = cuda_translate(cuda_driver.event_record(event, stream), "cuEventRecord on the caller's stream",
			err);
	}
	cuda_leave();
	return r;
}

static bool fence_has_point(const struct device_fence *f, cuda_context context)
{
	for (unsigned i = 0; i < f->npoints; i++)
		if (f->points[i].context == context)
			return true;
	return false;
}

int device_fence_set(struct device_fence *f, void *const *streams, size_t n, struct base_error *err)
{
	cuda_context context;
	int r = 0;

	for (size_t i = 0; i < n && r == 0; i++) {
		if ((uintptr_t)streams[i] <= FENCE_SPECIAL_STREAM) {
			for (unsigned k = 0; k < f->nowners && r == 0; k++)
				r = fence_record(f, f->owners[k].context, streams[i], err);
			continue;
		}
		r = cuda_translate(cuda_driver.stream_context(streams[i], &context), "cuStreamGetCtx", err);
		if (r == 0)
			r = fence_record(f, context, streams[i], err);
	}
	for (unsigned k = 0; k < f->nowners && r == 0; k++)
		if (!fence_has_point(f, f->owners[k].context))
			r = fence_record(f, f->owners[k].context, NULL, err);
	return r;
}
