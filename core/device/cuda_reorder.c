/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda reorder: boxes whose items the host puts in order. Their bytes come, as they lie in the source, into memory of
 * the stream: two halves, of which one is filled by the device while the other is reordered. A box that does not fit is
 * cut.
 *
 * Jobs are in a queue in the order of their copies. Those of a half are done, at the latest, before it is filled
 * again (after its event, recorded behind its copies), else when a thread waits for a device_event that was set after
 * them. So many small boxes cost one wait together, and a large one is reordered while the rest of it still comes.
 *
 * After an error the stream is only good to be freed; what was not reordered by then never is. */
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/base/log.h"
#include "core/device/cuda.h"
#include "core/device/cuda_internal.h"
#include "core/device/fetch.h"

#define REORDER_HALF_JOBS 32u
#define REORDER_JOBS (2 * REORDER_HALF_JOBS)
#define REORDER_ALIGN 64u

struct reorder_job { char *to; uint64_t to_stride[DEVICE_GATHER_DIMS]; struct device_gather reorder; };

struct cuda_reorder {
	char *memory;
	bool pinned;
	cuda_event event[2];             /* behind a half's copies, recorded when the other half is begun */
	uint64_t end[2];                 /* one more than the number of the half's last job */
	unsigned half;                   /* being filled; its bytes and jobs so far */
	uint64_t used, jobs_used;
	uint64_t given, done;            /* numbers of jobs */
	struct reorder_job jobs[REORDER_JOBS]; /* number n at n % REORDER_JOBS */
};

/* ---- memory ---- */

static int reorder_allocate(struct cuda_reorder *t, enum device_pin pin, struct base_error *err)
{
	struct base_error why = {0};
	int r = -EOPNOTSUPP;

	if (pin != DEVICE_PIN_NO)
		r = cuda_translate(cuda_driver.host_alloc((void **)&t->memory, 2 * CUDA_REORDER_BYTES,
			CUDA_HOST_PORTABLE), "cuMemHostAlloc", &why);
	t->pinned = r == 0;
	if (r < 0 && pin == DEVICE_PIN_YES)
		return base_error_set(err, r, "%s", why.text);
	if (r < 0 && pin != DEVICE_PIN_NO)
		base_debug("memory to reorder tensors in is not pinned: %s", why.text);
	if (r < 0)
		t->memory = aligned_alloc(4096, 2 * CUDA_REORDER_BYTES);
	return t->memory ? 0 : base_no_memory(err);
}

void cuda_reorder_free(struct cuda_reorder *t, bool context)
{
	if (!t)
		return;
	for (unsigned i = 0; i < 2 && context; i++)
		if (t->event[i])
			cuda_driver.event_destroy(t->event[i]);
	if (t->pinned && context)
		cuda_driver.host_free(t->memory);
	else if (!t->pinned)
		free(t->memory);
	free(t);
}

static int reorder_prepare(struct device_stream *s, struct base_error *err)
{
	struct cuda_reorder *t = s->reorder ? NULL : calloc(1, sizeof *t);
	int r = 0;

	if (s->reorder)
		return 0;
	if (!t)
		return base_no_memory(err);
	r = reorder_allocate(t, s->pin, err);
	for (unsigned i = 0; i < 2 && r == 0; i++)
		r = cuda_event_new(&t->event[i], err);
	if (r < 0)
		cuda_reorder_free(t, true);
	else
		s->reorder = t;
	return r;
}

/* ---- jobs ---- */

uint64_t cuda_reorders_given(const struct device_stream *s) { return s->reorder ? s->reorder->given : 0; }

void cuda_reorder_all(struct device_stream *s, uint64_t end)
{
	struct cuda_reorder *t = s->reorder;

	for (; t && t->done < end; t->done++) {
		const struct reorder_job *j = &t->jobs[t->done % REORDER_JOBS];

		device_gather_part(j->to, j->to_stride, &j->reorder);
	}
	if (t && t->done == t->given) /* as by a device_event: the host knows that all copies are done */
		t->used = t->jobs_used = 0;
}

void cuda_reorder_none(struct device_stream *s)
{
	if (s->reorder)
		s->reorder->done = s->reorder->given;
}

static int reorder_other_half(struct device_stream *s, struct base_error *err)
{
	struct cuda_reorder *t = s->reorder;
	int r = cuda_translate(cuda_driver.event_record(t->event[t->half], s->stream), "cuEventRecord", err);

	if (r < 0)
		return r;
	t->end[t->half] = t->given;
	t->half ^= 1;
	if (t->done < t->end[t->half]) {
		r = cuda_translate(cuda_driver.event_synchronize(t->event[t->half]), CUDA_COPIES, err);
		if (r < 0)
			return r;
		cuda_reorder_all(s, t->end[t->half]);
	}
	t->used = t->jobs_used = 0;
	return 0;
}

static int reorder_give(struct device_stream *s, char *to, const uint64_t *to_stride, const struct device_reorder *box,
	struct base_error *err)
{
	struct cuda_reorder *t = s->reorder;
	struct reorder_job *j;
	char *room;
	int r = 0;

	if (t->used + box->bytes > CUDA_REORDER_BYTES || t->jobs_used == REORDER_HALF_JOBS)
		r = reorder_other_half(s, err);
	room = t->memory + t->half * CUDA_REORDER_BYTES + t->used;
	if (r == 0)
		r = cuda_copy(s->stream, room, &box->copy, err);
	if (r < 0)
		return r;
	j = &t->jobs[t->given++ % REORDER_JOBS];
	j->to = to;
	j->reorder = box->reorder;
	j->reorder.from = room + (uintptr_t)box->reorder.from;
	for (uint32_t i = 0; i < box->reorder.ndim; i++)
		j->to_stride[i] = to_stride[i];
	t->used += base_align(box->bytes, REORDER_ALIGN);
	t->jobs_used++;
	return 0;
}

static int reorder_box(struct device_stream *s, char *to, const uint64_t *to_stride, const struct device_gather *g,
	struct base_error *err)
{
	struct device_gather part = *g;
	struct device_reorder box;
	uint64_t n;
	uint32_t dim;
	int r = 0;

	device_fetch_reorder(g, &box);
	if (box.bytes <= CUDA_REORDER_BYTES)
		return reorder_give(s, to, to_stride, &box, err);
	dim = device_fetch_cut(g, CUDA_REORDER_BYTES, &n);
	for (uint64_t at = 0; at < g->size[dim] && r == 0; at += n) {
		part.size[dim] = base_min(n, g->size[dim] - at);
		part.from = (const char *)g->from + (int64_t)at * g->stride[dim];
		r = reorder_box(s, to + at * to_stride[dim], to_stride, &part, err);
	}
	return r;
}

int cuda_reorder(struct device_stream *s, void *to, const struct device_gather *g, struct base_error *err)
{
	uint64_t to_stride[DEVICE_GATHER_DIMS];
	int r = reorder_prepare(s, err);

	device_gather_strides(g, to_stride);
	return r == 0 ? reorder_box(s, to, to_stride, g, err) : r;
}
