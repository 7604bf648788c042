/* SPDX-License-Identifier: Apache-2.0
 *
 * driver: the functions of the CUDA driver API that a saver uses (docs.nvidia.com/cuda/cuda-driver-api), stricter
 * than the real one where that is allowed to be strict: every call on a stream or event wants that one's context
 * current, and a copy wants a stream of the context that the memory is of. A copy to pageable memory stays
 * asynchronous here. In a child of the process that called cuInit nothing works. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DRIVER_PITCH_MAX 2147483647ul

typedef struct {
	size_t srcXInBytes, srcY;
	CUmemorytype srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	void *srcArray;
	size_t srcPitch;
	size_t dstXInBytes, dstY;
	CUmemorytype dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	void *dstArray;
	size_t dstPitch;
	size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;
typedef struct {
	size_t srcXInBytes, srcY, srcZ, srcLOD;
	CUmemorytype srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	void *srcArray, *reserved0;
	size_t srcPitch, srcHeight;
	size_t dstXInBytes, dstY, dstZ, dstLOD;
	CUmemorytype dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	void *dstArray, *reserved1;
	size_t dstPitch, dstHeight;
	size_t WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D;

CUresult cuInit(unsigned flags);
CUresult cuDeviceGetCount(int *count);
CUresult cuGetErrorName(CUresult error, const char **name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventQuery(CUevent event);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream);
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copy, CUstream stream);

static pid_t driver_pid;
static struct standin_event *driver_events;

/* ---- what every call does ---- */

/* 0: the lock is held. */
CUresult driver_begin(const char *function)
{
	CUresult r;

	if (driver_pid != getpid())
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&standin_lock);
	r = standin_called(function);
	if (r)
		pthread_mutex_unlock(&standin_lock);
	return r;
}

CUresult driver_end(CUresult r)
{
	pthread_mutex_unlock(&standin_lock);
	return r;
}

CUresult driver_fault(enum standin_fault fault, CUresult r)
{
	standin_counts[fault]++;
	return r;
}

/* A call that wants a context. 0: the lock is held. */
CUresult driver_begin_in_context(const char *function)
{
	CUresult r = driver_begin(function);

	if (r)
		return r;
	if (!standin_current())
		return driver_end(driver_fault(STANDIN_CONTEXT, CUDA_ERROR_INVALID_CONTEXT));
	return CUDA_SUCCESS;
}

/* Likewise, a call that may be unsafe while somebody captures. */
CUresult driver_begin_unsafe(const char *function)
{
	CUresult r = driver_begin_in_context(function);

	if (r)
		return r;
	r = standin_capture_allows();
	return r ? driver_end(r) : r;
}

/* The lock stays held. NULL and the two names of default streams are the context's own. */
CUresult driver_find_stream(CUstream handle, struct standin_stream **ret_s)
{
	struct standin_context *current = standin_current();
	struct standin_stream *s = standin_stream_list();

	if ((uintptr_t)handle <= 2)
		handle = current->standard;
	while (s && s != handle)
		s = s->next;
	if (!s)
		return driver_fault(STANDIN_FOREIGN, CUDA_ERROR_INVALID_HANDLE);
	if (s->destroyed)
		return driver_fault(STANDIN_DESTROYED, CUDA_ERROR_INVALID_HANDLE);
	if (s->context != current)
		return driver_fault(STANDIN_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
	*ret_s = s;
	return CUDA_SUCCESS;
}

static CUresult driver_find_any_event(CUevent handle)
{
	struct standin_event *e = driver_events;

	while (e && e != handle)
		e = e->next;
	if (!e)
		return driver_fault(STANDIN_FOREIGN, CUDA_ERROR_INVALID_HANDLE);
	return e->destroyed ? driver_fault(STANDIN_DESTROYED, CUDA_ERROR_INVALID_HANDLE) : CUDA_SUCCESS;
}

static CUresult driver_find_event(CUevent handle)
{
	CUresult r = driver_find_any_event(handle);

	if (r == CUDA_SUCCESS && handle->context != standin_current())
		return driver_fault(STANDIN_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
	return r;
}

static struct standin_work *driver_work(enum standin_kind kind, size_t bytes)
{
	struct standin_work *w = calloc(1, sizeof *w + bytes);

	if (!w)
		abort();
	w->kind = kind;
	return w;
}

/* ---- the driver ---- */

CUresult cuInit(unsigned flags)
{
	if (driver_pid && driver_pid != getpid())
		return CUDA_ERROR_NOT_INITIALIZED;
	driver_pid = getpid();
	return flags ? CUDA_ERROR_INVALID_VALUE : standin_device_count() < 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
	CUresult r = driver_begin("cuDeviceGetCount");

	if (r)
		return r;
	*count = standin_device_count();
	return driver_end(CUDA_SUCCESS);
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
#define NAME(word) case word: *name = #word; return CUDA_SUCCESS;
	switch (error) {
	NAME(CUDA_SUCCESS) NAME(CUDA_ERROR_INVALID_VALUE) NAME(CUDA_ERROR_OUT_OF_MEMORY)
	NAME(CUDA_ERROR_NOT_INITIALIZED) NAME(CUDA_ERROR_NO_DEVICE) NAME(CUDA_ERROR_INVALID_CONTEXT)
	NAME(CUDA_ERROR_INVALID_HANDLE) NAME(CUDA_ERROR_ILLEGAL_ADDRESS) NAME(CUDA_ERROR_CONTEXT_IS_DESTROYED)
	NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
	NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) NAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
	NAME(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED) NAME(CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
	NAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) NAME(CUDA_ERROR_CAPTURED_EVENT)
	NAME(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) NAME(CUDA_ERROR_NOT_READY)
	}
#undef NAME
	*name = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
	CUresult r = driver_begin_unsafe("cuStreamCreate");

	if (r)
		return r;
	if (flags > 1)
		return driver_end(CUDA_ERROR_INVALID_VALUE);
	*stream = standin_stream_start(standin_current());
	if (*stream)
		(*stream)->blocking = flags == 0;
	standin_counts[STANDIN_STREAMS] += *stream != NULL;
	return driver_end(*stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
	CUresult r = driver_begin_unsafe("cuStreamDestroy");
	struct standin_stream *s = NULL;

	if (r)
		return r;
	r = driver_find_stream(stream, &s);
	if (r)
		return driver_end(r);
	standin_stream_end(s);
	standin_counts[STANDIN_STREAMS]--;
	return driver_end(s->context->sticky);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
	CUresult r = driver_begin_in_context("cuStreamWaitEvent");
	struct standin_stream *s = NULL;
	struct standin_work *w;
	bool captured = false;

	if (r)
		return r;
	r = driver_find_stream(stream, &s);
	r = r ? r : driver_find_any_event(event);
	r = r ? r : flags ? CUDA_ERROR_INVALID_VALUE : s->context->sticky;
	r = r ? r : standin_capture_work(s, &captured);
	if (r == CUDA_SUCCESS && event->captured && !captured)
		r = driver_fault(STANDIN_CAPTURED, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	if (r || captured || standin_forgotten("cuStreamWaitEvent"))
		return driver_end(r);
	w = driver_work(STANDIN_WAIT, 0);
	w->event = event;
	w->nth = event->recorded;
	standin_order_merge(&s->clock, &event->clock);
	standin_stream_queue(s, w);
	return driver_end(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream stream)
{
	CUresult r = driver_begin_unsafe("cuStreamSynchronize");
	struct standin_stream *s = NULL;
	struct standin_clock seen;
	bool captured = false;

	if (r)
		return r;
	r = driver_find_stream(stream, &s);
	r = r ? r : standin_capture_work(s, &captured);
	if (r == CUDA_SUCCESS && captured)
		r = driver_fault(STANDIN_CAPTURED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (r)
		return driver_end(r);
	seen = s->clock;
	standin_stream_drain(s);
	standin_order_host(&seen);
	return driver_end(s->context->sticky);
}

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
	CUresult r = driver_begin_unsafe("cuEventCreate");
	struct standin_event *e;

	if (r)
		return r;
	if (flags > 3)
		return driver_end(CUDA_ERROR_INVALID_VALUE);
	e = calloc(1, sizeof *e);
	if (!e)
		return driver_end(CUDA_ERROR_OUT_OF_MEMORY);
	e->context = standin_current();
	e->next = driver_events;
	*event = driver_events = e;
	standin_counts[STANDIN_EVENTS]++;
	return driver_end(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
	CUresult r = driver_begin_in_context("cuEventRecord");
	struct standin_stream *s = NULL;
	struct standin_work *w;
	bool captured = false;

	if (r)
		return r;
	r = driver_find_event(event);
	r = r ? r : driver_find_stream(stream, &s);
	r = r ? r : s->context->sticky;
	r = r ? r : standin_capture_work(s, &captured);
	if (r)
		return driver_end(r);
	event->captured = captured;
	if (captured)
		return driver_end(CUDA_SUCCESS);
	w = driver_work(STANDIN_RECORD, 0);
	w->event = event;
	w->nth = ++event->recorded;
	event->clock = s->clock;
	standin_stream_queue(s, w);
	return driver_end(CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent event)
{
	CUresult r = driver_begin_unsafe("cuEventSynchronize");
	struct standin_clock seen;
	uint64_t nth;

	if (r)
		return r;
	r = driver_find_event(event);
	if (r == CUDA_SUCCESS && event->captured)
		r = driver_fault(STANDIN_CAPTURED, CUDA_ERROR_CAPTURED_EVENT);
	if (r || standin_forgotten("cuEventSynchronize"))
		return driver_end(r);
	nth = event->recorded;
	seen = event->clock;
	while (event->done < nth)
		pthread_cond_wait(&standin_changed, &standin_lock);
	standin_order_host(&seen);
	return driver_end(event->context->sticky);
}

CUresult cuEventQuery(CUevent event)
{
	CUresult r = driver_begin_unsafe("cuEventQuery");
	struct standin_clock seen;

	if (r)
		return r;
	r = driver_find_event(event);
	if (r == CUDA_SUCCESS && event->captured)
		r = driver_fault(STANDIN_CAPTURED, CUDA_ERROR_CAPTURED_EVENT);
	if (r == CUDA_SUCCESS && event->done < event->recorded)
		r = CUDA_ERROR_NOT_READY;
	if (r)
		return driver_end(r);
	seen = event->clock;
	standin_order_host(&seen);
	return driver_end(event->context->sticky);
}

CUresult cuEventDestroy_v2(CUevent event)
{
	CUresult r = driver_begin_unsafe("cuEventDestroy");

	if (r)
		return r;
	r = driver_find_event(event);
	if (r)
		return driver_end(r);
	event->destroyed = true;
	standin_counts[STANDIN_EVENTS]--;
	return driver_end(CUDA_SUCCESS);
}

void standin_events_reset(void)
{
	for (struct standin_event *e; (e = driver_events); free(e))
		driver_events = e->next;
}

/* ---- copies, and the program's kernels ---- */

static CUresult driver_copy_called(CUresult r, const void *host)
{
	struct standin_rows first = {(char *)host, 1, 1, 1};

	standin_counts[STANDIN_PAGEABLE] += r == CUDA_SUCCESS && !standin_host_registered(&first);
	return driver_end(r);
}

/* out: to the device. */
static CUresult driver_copy(CUstream stream, struct standin_rows host, struct standin_rows device, bool out)
{
	struct standin_stream *s = NULL;
	CUresult r = driver_find_stream(stream, &s);
	struct standin_memory m;
	struct standin_work *w;
	bool captured = false;

	r = r ? r : s->context->sticky;
	r = r ? r : standin_capture_work(s, &captured);
	if (r || captured || host.width == 0 || host.height == 0)
		return r;
	if (!standin_memory_holds(&device) || !standin_memory_find(device.at, &m))
		return driver_fault(STANDIN_FOREIGN, CUDA_ERROR_INVALID_VALUE);
	if (m.context ? m.context != s->context : m.device != s->context->device)
		return driver_fault(STANDIN_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
	w = driver_work(STANDIN_COPY, 0);
	w->device = device;
	w->flight = calloc(1, sizeof *w->flight);
	if (!w->flight)
		abort();
	w->flight->host = host;
	w->flight->out = out;
	standin_counts[STANDIN_BYTES] += host.width * host.height;
	standin_order_copy(s, &device, w->flight);
	standin_stream_queue(s, w);
	return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	CUresult r = driver_begin_in_context("cuMemcpyDtoHAsync");

	if (r)
		return r;
	standin_counts[STANDIN_COPIES]++;
	return driver_copy_called(driver_copy(stream, (struct standin_rows){to, bytes, 1, bytes},
		(struct standin_rows){(char *)(uintptr_t)from, bytes, 1, bytes}, false), to);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
	CUresult r = driver_begin_in_context("cuMemcpyHtoDAsync");

	if (r)
		return r;
	standin_counts[STANDIN_COPIES]++;
	return driver_copy_called(driver_copy(stream, (struct standin_rows){(char *)from, bytes, 1, bytes},
		(struct standin_rows){(char *)(uintptr_t)to, bytes, 1, bytes}, true), from);
}

/* From the host to a device, or back; nothing else. */
static bool driver_direction(CUmemorytype src, CUmemorytype dst, bool *ret_out)
{
	*ret_out = src == CU_MEMORYTYPE_HOST;
	return (src == CU_MEMORYTYPE_HOST && dst == CU_MEMORYTYPE_DEVICE)
		|| (src == CU_MEMORYTYPE_DEVICE && dst == CU_MEMORYTYPE_HOST);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream stream)
{
	CUresult r = driver_begin_in_context("cuMemcpy2DAsync");
	struct standin_rows src, dst;
	bool out;

	if (r)
		return r;
	if (!driver_direction(c->srcMemoryType, c->dstMemoryType, &out) ||
	    c->srcPitch < c->WidthInBytes + c->srcXInBytes || c->dstPitch < c->WidthInBytes + c->dstXInBytes ||
	    c->srcPitch > DRIVER_PITCH_MAX || c->dstPitch > DRIVER_PITCH_MAX)
		return driver_end(CUDA_ERROR_INVALID_VALUE);
	src = (struct standin_rows){(out ? (char *)c->srcHost : (char *)(uintptr_t)c->srcDevice)
		+ c->srcY * c->srcPitch + c->srcXInBytes, c->WidthInBytes, c->Height, c->srcPitch};
	dst = (struct standin_rows){(out ? (char *)(uintptr_t)c->dstDevice : (char *)c->dstHost)
		+ c->dstY * c->dstPitch + c->dstXInBytes, c->WidthInBytes, c->Height, c->dstPitch};
	standin_counts[STANDIN_COPIES_2D]++;
	return driver_copy_called(driver_copy(stream, out ? src : dst, out ? dst : src, out), out ? src.at : dst.at);
}

/* Every plane is a copy of its own, one after another. */
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *c, CUstream stream)
{
	CUresult r = driver_begin_in_context("cuMemcpy3DAsync");
	bool out;

	if (r)
		return r;
	standin_counts[STANDIN_COPIES_3D]++;
	if (!driver_direction(c->srcMemoryType, c->dstMemoryType, &out) ||
	    c->srcPitch < c->WidthInBytes + c->srcXInBytes || c->dstPitch < c->WidthInBytes + c->dstXInBytes ||
	    c->srcHeight < c->Height + c->srcY || c->dstHeight < c->Height + c->dstY || c->srcLOD || c->dstLOD ||
	    c->reserved0 || c->reserved1 || c->srcPitch > DRIVER_PITCH_MAX || c->dstPitch > DRIVER_PITCH_MAX)
		return driver_end(CUDA_ERROR_INVALID_VALUE);
	for (size_t z = 0; z < c->Depth && r == CUDA_SUCCESS; z++) {
		size_t from = ((c->srcZ + z) * c->srcHeight + c->srcY) * c->srcPitch + c->srcXInBytes;
		size_t to = ((c->dstZ + z) * c->dstHeight + c->dstY) * c->dstPitch + c->dstXInBytes;
		struct standin_rows src = {(out ? (char *)c->srcHost : (char *)(uintptr_t)c->srcDevice) + from,
			c->WidthInBytes, c->Height, c->srcPitch};
		struct standin_rows dst = {(out ? (char *)(uintptr_t)c->dstDevice : (char *)c->dstHost) + to,
			c->WidthInBytes, c->Height, c->dstPitch};

		r = driver_copy(stream, out ? src : dst, out ? dst : src, out);
	}
	return driver_copy_called(r, out ? c->srcHost : c->dstHost);
}

int standin_write(struct standin_stream *stream, void *to, const void *bytes, size_t n, unsigned delay_us)
{
	struct standin_rows rows = {to, n, 1, n};
	struct standin_stream *s = NULL;
	struct standin_work *w;
	bool captured = false;
	int r = -1;

	if (n == 0)
		return 0;
	pthread_mutex_lock(&standin_lock);
	if (standin_current() && driver_find_stream(stream, &s) == CUDA_SUCCESS && standin_memory_holds(&rows) &&
	    standin_capture_work(s, &captured) == CUDA_SUCCESS)
		r = 0;
	if (r == 0 && !captured) {
		w = driver_work(STANDIN_WRITE, n);
		w->to = rows;
		w->delay_us = delay_us;
		memcpy(w->bytes, bytes, n);
		standin_order_write(s, &rows);
		standin_stream_queue(s, w);
	}
	pthread_mutex_unlock(&standin_lock);
	return r;
}
