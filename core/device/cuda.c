/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda: order between the caller's streams and ours is made by events and nothing else. A fence's are recorded on the
 * caller's streams (cuda_fence.c); ours wait for them on the device, so no thread blocks. An event of ours is recorded
 * on our stream behind the copies, and a thread that needs their bytes sleeps until it is done (blocking sync: no
 * thread spins on a core that trains). Events take no times, which makes them cheaper.
 *
 * Calls come from threads that have no context or another one: each call that the driver ties to a context is made
 * with the memory's context pushed, and popped after. Contexts are the program's; a call into one that is gone fails
 * with the driver's word for it, and frees are silent then.
 *
 * The program may capture a stream into a graph at any time, in any thread. While it does, the driver forbids calls
 * that may be unsafe for it (allocate, register, wait ...) and, worse, invalidates its capture when they are made.
 * Ours never touch what it captures: each is made with the thread's mode relaxed, which is the way that the driver
 * offers. */
#include <stdint.h>
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/device/cuda.h"
#include "core/device/cuda_internal.h"

/* Undoing it wants a context, too. */
struct device_registration { cuda_context context; void *memory; bool allocated; };
struct device_event { struct device_stream *stream; cuda_event event; uint64_t reorders; /* given when it was set */ };

static __thread int cuda_mode_before;

int cuda_relax(struct base_error *err)
{
	int mode = CUDA_CAPTURE_RELAXED;
	cuda_result r = cuda_driver.capture_mode(&mode);

	cuda_mode_before = mode;
	return cuda_translate(r, "cuThreadExchangeStreamCaptureMode", err);
}

void cuda_restore(void)
{
	cuda_driver.capture_mode(&cuda_mode_before);
}

int cuda_enter(cuda_context c, struct base_error *err)
{
	int r = cuda_relax(err);

	if (r < 0)
		return r;
	r = cuda_translate(cuda_driver.context_push(c), "cuCtxPushCurrent", err);
	if (r < 0)
		cuda_restore();
	return r;
}

void cuda_leave(void)
{
	cuda_context c;

	cuda_driver.context_pop(&c);
	cuda_restore();
}

int cuda_event_new(cuda_event *ret_e, struct base_error *err)
{
	return cuda_translate(cuda_driver.event_create(ret_e, CUDA_EVENT_BLOCKING_SYNC | CUDA_EVENT_DISABLE_TIMING),
		"cuEventCreate", err);
}

void cuda_event_free(cuda_context c, cuda_event e)
{
	if (cuda_enter(c, NULL) < 0)
		return;
	cuda_driver.event_destroy(e);
	cuda_leave();
}

/* ---- host memory ---- */

int device_registration_new(const struct device_fence *f, void **memory, size_t bytes,
	struct device_registration **ret_r, struct base_error *err)
{
	bool allocated = !*memory;
	struct device_registration *registration = calloc(1, sizeof *registration);
	cuda_context context = f->owners[0].context;
	int r;

	if (!registration)
		return base_no_memory(err);
	r = cuda_within(context, err, allocated
		? cuda_translate(cuda_driver.host_alloc(memory, bytes, CUDA_HOST_PORTABLE), "cuMemHostAlloc", err)
		: cuda_translate(cuda_driver.host_register(*memory, bytes, CUDA_HOST_PORTABLE), "cuMemHostRegister",
			err));
	if (r < 0) {
		free(registration);
		return r;
	}
	*registration = (struct device_registration){context, *memory, allocated};
	*ret_r = registration;
	return 0;
}

/* If the context is gone, so is the registration, and there is nothing to report. */
void device_registration_free(struct device_registration *registration)
{
	if (!registration)
		return;
	if (cuda_enter(registration->context, NULL) == 0) {
		if (registration->allocated)
			cuda_driver.host_free(registration->memory);
		else
			cuda_driver.host_unregister(registration->memory);
		cuda_leave();
	}
	free(registration);
}

/* ---- streams ---- */

int device_stream_new(const struct device_fence *f, unsigned number, enum device_pin pin, struct device_stream **ret_s,
	struct base_error *err)
{
	base_cleanup_free struct device_stream *s = calloc(1, sizeof *s);
	int r;

	if (!s)
		return base_no_memory(err);
	s->context = f->owners[number].context;
	s->pin = pin;
	r = cuda_within(s->context, err, cuda_translate(
		cuda_driver.stream_create(&s->stream, CUDA_STREAM_NON_BLOCKING), "cuStreamCreate", err));
	if (r == 0)
		*ret_s = base_steal(s);
	return r;
}

void device_stream_free(struct device_stream *s)
{
	if (!s)
		return;
	if (cuda_enter(s->context, NULL) == 0) {
		cuda_driver.stream_synchronize(s->stream); /* destroy alone would let copies land in freed memory */
		cuda_driver.stream_destroy(s->stream);
		cuda_reorder_free(s->reorder, true);
		cuda_leave();
	} else {
		cuda_reorder_free(s->reorder, false);
	}
	free(s);
}

bool device_stream_fits(const struct device_stream *s, const struct device_fence *f, unsigned number)
{
	return s->context == f->owners[number].context;
}

int device_stream_wait(struct device_stream *s, const struct device_fence *f, struct base_error *err)
{
	int r = cuda_enter(s->context, err);

	if (r < 0)
		return r;
	for (unsigned i = 0; i < f->npoints && r == 0; i++)
		r = cuda_translate(cuda_driver.stream_wait(s->stream, f->points[i].event, 0), "cuStreamWaitEvent",
			err);
	cuda_leave();
	return r;
}

int device_stream_enter(struct device_stream *s, struct base_error *err)
{
	return cuda_enter(s->context, err);
}

void device_stream_leave(struct device_stream *s)
{
	(void)s;
	cuda_leave();
}

void *device_stream_handle(struct device_stream *s)
{
	return s->stream;
}

/* ---- events ---- */

int device_event_new(struct device_stream *s, struct device_event **ret_e, struct base_error *err)
{
	base_cleanup_free struct device_event *e = calloc(1, sizeof *e);
	int r;

	if (!e)
		return base_no_memory(err);
	e->stream = s;
	r = cuda_within(s->context, err, cuda_event_new(&e->event, err));
	if (r == 0)
		*ret_e = base_steal(e);
	return r;
}

void device_event_free(struct device_event *e)
{
	if (!e)
		return;
	cuda_event_free(e->stream->context, e->event);
	free(e);
}

int device_event_set(struct device_event *e, struct base_error *err)
{
	e->reorders = cuda_reorders_given(e->stream);
	return cuda_within(e->stream->context, err,
		cuda_translate(cuda_driver.event_record(e->event, e->stream->stream), "cuEventRecord", err));
}

int device_event_done(struct device_event *e, struct base_error *err)
{
	cuda_result answer = CUDA_SUCCESS;
	int r = cuda_within(e->stream->context, err, (answer = cuda_driver.event_query(e->event)) == CUDA_NOT_READY
		? 0 : cuda_translate(answer, "cuEventQuery", err));

	return r < 0 ? r : answer == CUDA_SUCCESS;
}

int device_event_wait(struct device_event *e, struct base_error *err)
{
	int r = cuda_within(e->stream->context, err, cuda_translate(cuda_driver.event_synchronize(e->event),
		e->stream->back ? CUDA_COPIES_BACK : CUDA_COPIES, err));

	if (r == 0)
		cuda_reorder_all(e->stream, e->reorders);
	else
		cuda_reorder_none(e->stream);
	return r;
}
