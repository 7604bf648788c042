/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda: order between the caller's stream and ours is made by two events and nothing else. The fence's event is
 * recorded on the caller's stream; our stream waits for it on the device, so neither thread blocks. A mark's event is
 * recorded on our stream behind the copies, and whoever needs their bytes sleeps until it is done (blocking sync: no
 * thread spins on a core that trains). Events take no times, which makes them cheaper.
 *
 * Calls come from threads that have no context or another one: each call that the driver ties to a context is made with
 * the fence's context pushed, and popped after. Contexts are the program's; a call into one that is gone fails with the
 * driver's word for it, and frees are silent then.
 *
 * Copies: after folding, the run that lies together is a row. Many rows at one distance are one 2-d copy, which the
 * copy engine walks by itself. Of the dimensions that a 2-d copy can express (distance not negative, not smaller than
 * the row, not above the driver's limit for a pitch) the longest one becomes its height, so that the calls are fewest;
 * the rest are loops. */
#include <stdint.h>
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/device/cuda.h"
#include "core/device/cuda_internal.h"

/* CU_DEVICE_ATTRIBUTE_MAX_PITCH is 2^31 - 1 on all devices that there are; this is well below it. */
#define CUDA_PITCH_MAX (UINT64_C(1) << 30)

struct device_fence { cuda_context context; cuda_event event; };
struct device_registration { cuda_context context; void *memory; }; /* undoing it wants a context, too */
struct device_stream { cuda_context context; cuda_stream stream; };
struct device_mark { cuda_context context; cuda_stream stream; cuda_event event; };

static int cuda_enter(cuda_context c, struct base_error *err)
{
	return cuda_translate(cuda_driver.context_push(c), "cuCtxPushCurrent", err);
}

static void cuda_leave(void)
{
	cuda_context c;

	cuda_driver.context_pop(&c);
}

static int cuda_event_new(cuda_event *ret_e, struct base_error *err)
{
	return cuda_translate(cuda_driver.event_create(ret_e, CUDA_EVENT_BLOCKING_SYNC | CUDA_EVENT_DISABLE_TIMING),
		"cuEventCreate", err);
}

static void cuda_event_free(cuda_context c, cuda_event e)
{
	if (cuda_driver.context_push(c) != CUDA_SUCCESS)
		return;
	cuda_driver.event_destroy(e);
	cuda_leave();
}

/* ---- fences ---- */

int device_fence_new(void *stream, struct device_fence **ret_f, struct base_error *err)
{
	base_cleanup_free struct device_fence *f = calloc(1, sizeof *f);
	int rc = device_cuda_load(err);

	if (rc < 0)
		return rc;
	if (!f)
		return base_error_set(err, -ENOMEM, "out of memory");
	rc = cuda_translate(cuda_driver.context_current(&f->context), "cuCtxGetCurrent", err);
	if (rc < 0)
		return rc;
	if (!f->context)
		return base_error_set(err, -EINVAL, "device memory was given by a thread that has no CUDA context");
	rc = cuda_event_new(&f->event, err);
	if (rc < 0)
		return rc;
	rc = cuda_translate(cuda_driver.event_record(f->event, stream), "cuEventRecord on the caller's stream", err);
	if (rc < 0) {
		cuda_driver.event_destroy(f->event);
		return rc;
	}
	*ret_f = base_steal(f);
	return 0;
}

void device_fence_free(struct device_fence *f)
{
	if (!f)
		return;
	cuda_event_free(f->context, f->event);
	free(f);
}

/* ---- host memory ---- */

int device_registration_new(const struct device_fence *f, void *memory, size_t bytes,
	struct device_registration **ret_r, struct base_error *err)
{
	base_cleanup_free struct device_registration *r = calloc(1, sizeof *r);
	int rc;

	if (!r)
		return base_error_set(err, -ENOMEM, "out of memory");
	rc = cuda_enter(f->context, err);
	if (rc < 0)
		return rc;
	rc = cuda_translate(cuda_driver.host_register(memory, bytes, CUDA_HOST_REGISTER_PORTABLE), "cuMemHostRegister",
		err);
	cuda_leave();
	if (rc < 0)
		return rc;
	*r = (struct device_registration){f->context, memory};
	*ret_r = base_steal(r);
	return 0;
}

/* Where the context is gone, so is the registration: nothing is to be told to anybody. */
void device_registration_free(struct device_registration *r)
{
	if (!r)
		return;
	if (cuda_driver.context_push(r->context) == CUDA_SUCCESS) {
		cuda_driver.host_unregister(r->memory);
		cuda_leave();
	}
	free(r);
}

/* ---- streams ---- */

int device_stream_new(const struct device_fence *f, struct device_stream **ret_s, struct base_error *err)
{
	base_cleanup_free struct device_stream *s = calloc(1, sizeof *s);
	int rc;

	if (!s)
		return base_error_set(err, -ENOMEM, "out of memory");
	rc = cuda_enter(f->context, err);
	if (rc < 0)
		return rc;
	s->context = f->context;
	rc = cuda_translate(cuda_driver.stream_create(&s->stream, CUDA_STREAM_NON_BLOCKING), "cuStreamCreate", err);
	cuda_leave();
	if (rc < 0)
		return rc;
	*ret_s = base_steal(s);
	return 0;
}

void device_stream_free(struct device_stream *s)
{
	if (!s)
		return;
	if (cuda_driver.context_push(s->context) == CUDA_SUCCESS) {
		cuda_driver.stream_synchronize(s->stream); /* destroy alone would let copies land in freed memory */
		cuda_driver.stream_destroy(s->stream);
		cuda_leave();
	}
	free(s);
}

bool device_stream_fits(const struct device_stream *s, const struct device_fence *f)
{
	return s->context == f->context;
}

int device_stream_wait(struct device_stream *s, const struct device_fence *f, struct base_error *err)
{
	int rc = cuda_enter(s->context, err);

	if (rc < 0)
		return rc;
	rc = cuda_translate(cuda_driver.stream_wait(s->stream, f->event, 0), "cuStreamWaitEvent", err);
	cuda_leave();
	return rc;
}

/* ---- copies ---- */

struct cuda_walk {
	const struct device_gather *g;   /* folded */
	cuda_stream stream;
	uint32_t rows;                   /* the dimension that 2-d copies run along; ndim: none can */
	uint64_t to_stride[DEVICE_GATHER_DIMS];
};

static uint32_t cuda_choose_rows(const struct cuda_walk *w)
{
	const struct device_gather *g = w->g;
	uint32_t best = g->ndim;

	for (uint32_t i = 0; i < g->ndim; i++)
		if (g->stride[i] >= 0 && (uint64_t)g->stride[i] >= g->item_bytes &&
		    (uint64_t)g->stride[i] <= CUDA_PITCH_MAX && w->to_stride[i] <= CUDA_PITCH_MAX &&
		    (best == g->ndim || g->size[i] > g->size[best]))
			best = i;
	return best;
}

static cuda_result cuda_copy_rows(const struct cuda_walk *w, char *to, cuda_address from)
{
	struct cuda_copy_2d copy = {
		.src_type = CUDA_MEMORY_DEVICE, .src_device = from, .src_pitch = (size_t)w->g->stride[w->rows],
		.dst_type = CUDA_MEMORY_HOST, .dst_host = to, .dst_pitch = w->to_stride[w->rows],
		.width_bytes = w->g->item_bytes, .height = w->g->size[w->rows],
	};

	return cuda_driver.copy_2d(&copy, w->stream);
}

static cuda_result cuda_copy_dim(const struct cuda_walk *w, uint32_t dim, char *to, cuda_address from)
{
	const struct device_gather *g = w->g;
	cuda_result rc = CUDA_SUCCESS;

	if (dim == w->rows)
		return cuda_copy_dim(w, dim + 1, to, from);
	if (dim >= g->ndim)
		return w->rows < g->ndim ? cuda_copy_rows(w, to, from) :
			cuda_driver.copy_to_host(to, from, g->item_bytes, w->stream);
	for (uint64_t i = 0; i < g->size[dim] && rc == CUDA_SUCCESS; i++)
		rc = cuda_copy_dim(w, dim + 1, to + i * w->to_stride[dim], from + i * (uint64_t)g->stride[dim]);
	return rc;
}

int device_stream_gather(struct device_stream *s, void *to, const struct device_gather *source, struct base_error *err)
{
	struct device_gather g = *source;
	struct cuda_walk w = {.g = &g, .stream = s->stream};
	uint64_t bytes;
	int rc;

	device_gather_fold(&g);
	if (g.item_bytes == 0)
		return 0;
	bytes = g.item_bytes;
	for (uint32_t i = g.ndim; i-- > 0; bytes *= g.size[i])
		w.to_stride[i] = bytes;
	w.rows = cuda_choose_rows(&w);
	rc = cuda_enter(s->context, err);
	if (rc < 0)
		return rc;
	rc = cuda_translate(cuda_copy_dim(&w, 0, to, (uintptr_t)g.from), "copy from device memory", err);
	cuda_leave();
	return rc;
}

/* ---- marks ---- */

int device_mark_new(struct device_stream *s, struct device_mark **ret_m, struct base_error *err)
{
	base_cleanup_free struct device_mark *m = calloc(1, sizeof *m);
	int rc;

	if (!m)
		return base_error_set(err, -ENOMEM, "out of memory");
	rc = cuda_enter(s->context, err);
	if (rc < 0)
		return rc;
	m->context = s->context;
	m->stream = s->stream;
	rc = cuda_event_new(&m->event, err);
	cuda_leave();
	if (rc < 0)
		return rc;
	*ret_m = base_steal(m);
	return 0;
}

void device_mark_free(struct device_mark *m)
{
	if (!m)
		return;
	cuda_event_free(m->context, m->event);
	free(m);
}

int device_mark_set(struct device_mark *m, struct base_error *err)
{
	int rc = cuda_enter(m->context, err);

	if (rc < 0)
		return rc;
	rc = cuda_translate(cuda_driver.event_record(m->event, m->stream), "cuEventRecord", err);
	cuda_leave();
	return rc;
}

int device_mark_wait(struct device_mark *m, struct base_error *err)
{
	int rc = cuda_enter(m->context, err);

	if (rc < 0)
		return rc;
	rc = cuda_translate(cuda_driver.event_synchronize(m->event), "copies from device memory", err);
	cuda_leave();
	return rc;
}
