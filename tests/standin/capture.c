/* SPDX-License-Identifier: Apache-2.0
 *
 * capture: streams whose work a graph takes (cuStreamBeginCapture). The rules are those of cuda.h's comment on
 * cuThreadExchangeStreamCaptureMode: a call that may be unsafe is forbidden to a thread whose mode is not relaxed,
 * while it captures itself (and not in the relaxed mode), or, in the global mode, while anybody captures in the
 * global mode. Whoever makes it all the same invalidates that capture: as rude as the driver is, and counted. Which
 * calls are unsafe the driver's documentation leaves open; here all are that allocate, free, create, destroy or wait.
 *
 * The default stream may not be used while a blocking stream of its context captures. Work given to a capturing
 * stream is taken and never done. */
#include "internal.h"

CUresult cuThreadExchangeStreamCaptureMode(int *mode);
CUresult cuStreamIsCapturing(CUstream stream, int *status);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, void **graph);

static __thread int capture_mode = STANDIN_GLOBAL;

static bool capture_forbids(const struct standin_stream *s)
{
	bool own = pthread_equal(s->capturer, pthread_self());

	if (s->capture == STANDIN_NO_CAPTURE || capture_mode == STANDIN_RELAXED)
		return false;
	return (own && s->capture_mode != STANDIN_RELAXED)
		|| (capture_mode == STANDIN_GLOBAL && s->capture_mode == STANDIN_GLOBAL);
}

CUresult standin_capture_allows(void)
{
	CUresult r = CUDA_SUCCESS;

	for (struct standin_stream *s = standin_stream_list(); s; s = s->next)
		if (capture_forbids(s)) {
			s->capture = STANDIN_INVALIDATED;
			r = driver_fault(STANDIN_CAPTURED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
		}
	return r;
}

/* A blocking stream that captures, and with it makes this default stream unusable. */
static struct standin_stream *capture_implied(const struct standin_stream *s)
{
	struct standin_stream *other = standin_stream_list();

	if (s != s->context->standard)
		return NULL;
	while (other && !(other->capture && other->blocking && other->context == s->context))
		other = other->next;
	return other;
}

CUresult standin_capture_work(struct standin_stream *s, bool *ret_captured)
{
	struct standin_stream *other = capture_implied(s);

	if (other) {
		other->capture = STANDIN_INVALIDATED;
		return driver_fault(STANDIN_CAPTURED, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	}
	*ret_captured = s->capture == STANDIN_CAPTURING;
	return s->capture == STANDIN_INVALIDATED ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
	CUresult r = driver_begin("cuThreadExchangeStreamCaptureMode");
	int before = capture_mode;

	if (r)
		return r;
	if (*mode < STANDIN_GLOBAL || *mode > STANDIN_RELAXED)
		return driver_end(CUDA_ERROR_INVALID_VALUE);
	capture_mode = *mode;
	*mode = before;
	return driver_end(CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
	CUresult r = driver_begin_in_context("cuStreamIsCapturing");
	struct standin_stream *s;

	if (r)
		return r;
	r = driver_find_stream(stream, &s);
	if (r == CUDA_SUCCESS && capture_implied(s))
		r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	if (r == CUDA_SUCCESS)
		*status = s->capture;
	return driver_end(r);
}

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
	CUresult r = driver_begin_in_context("cuStreamBeginCapture");
	struct standin_stream *s;

	if (r)
		return r;
	r = driver_find_stream(stream, &s);
	if (r == CUDA_SUCCESS && (s == s->context->standard || s->capture || mode < 0 || mode > STANDIN_RELAXED))
		r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (r)
		return driver_end(r);
	s->capture = STANDIN_CAPTURING;
	s->capture_mode = mode;
	s->capturer = pthread_self();
	return driver_end(CUDA_SUCCESS);
}

/* There are no graphs here: *graph is the stream. */
CUresult cuStreamEndCapture(CUstream stream, void **graph)
{
	CUresult r = driver_begin_in_context("cuStreamEndCapture");
	struct standin_stream *s;
	bool invalidated;

	if (r)
		return r;
	r = driver_find_stream(stream, &s);
	if (r == CUDA_SUCCESS && s->capture == STANDIN_NO_CAPTURE)
		r = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
	if (r == CUDA_SUCCESS && s->capture_mode != STANDIN_RELAXED && !pthread_equal(s->capturer, pthread_self()))
		r = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	if (r)
		return driver_end(r);
	invalidated = s->capture == STANDIN_INVALIDATED;
	s->capture = STANDIN_NO_CAPTURE;
	*graph = invalidated ? NULL : s;
	return driver_end(invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
}
