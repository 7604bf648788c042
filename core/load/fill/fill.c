/* SPDX-License-Identifier: Apache-2.0
 *
 * fill: what is to be filled, and the threads that do it.
 *
 * load_fill_run plans on the caller's thread (several parts are opened at once). Then the threads, the caller's among
 * them, take the tasks in order; so at any time the packs are read in a few places near each other. A piece that fails
 * ends the run, unless damage is to be skipped: pieces after it are left out, those before it are still read. Tasks
 * before its own have all been taken, so this takes a thread no longer than one task; and if several pieces fail, the
 * error is always that of the first by pack and offset.
 *
 * Memory: 32 bytes a piece, the opened tensors, and one piece for each thread; place_device.c has that for devices. */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/pool.h"
#include "core/load/fill/fill_work.h"
#include "core/load/fill/place.h"
#include "core/tensor/convert.h"

#define FILL_THREADS_MAX 256u
#define FILL_PAST_THREADS 4u              /* so many times as many, if they wait for the disk */

struct load_fill *load_fill_new(struct load_step *step, unsigned threads, unsigned flags)
{
	struct load_fill *f = calloc(1, sizeof *f);

	if (!f)
		return NULL;
	pthread_mutex_init(&f->lock, NULL);
	f->step = load_step_ref(step);
	f->threads = base_min(threads ? threads : base_cpu_count(), FILL_THREADS_MAX);
	f->flags = flags;
	atomic_init(&f->failed, SIZE_MAX);
	return f;
}

void load_fill_free(struct load_fill *f)
{
	if (!f)
		return;
	for (uint32_t i = 0; i < f->nobjects; i++)
		load_wanted_release(&f->objects[i]);
	for (size_t i = 0; i < f->nlost; i++)
		free((char *)(uintptr_t)f->lost[i].why); /* ours, shown as const */
	place_device_end(f); /* where it never ran */
	free(f->boxes);
	free(f->zeros);
	free(f->objects);
	free(f->needs);
	free(f->tasks);
	free(f->lost);
	free(f->crew);
	load_step_unref(f->step);
	pthread_mutex_destroy(&f->lock);
	free(f);
}

int load_fill_add(struct load_fill *f, uint32_t tensor, const struct tensor_box *box, void *data,
	const uint64_t *stride, struct base_error *err)
{
	const struct load_fill_memory memory = {.data = data, .stride = stride};

	return load_fill_add_to(f, tensor, box, &memory, err);
}

static void box_init(struct fill_box *b, uint32_t tensor, uint32_t ndim, const struct load_fill_memory *memory)
{
	*b = (struct fill_box){.tensor = tensor, .ndim = ndim, .data = memory->data, .dtype = memory->dtype,
		.device = memory->device, .destination = memory->destination};
	memcpy(b->stride, memory->stride, ndim * sizeof *memory->stride);
}

int load_fill_zero(struct load_fill *f, uint32_t tensor, const struct tensor_shape *size,
	const struct load_fill_memory *memory)
{
	struct fill_box *z;

	if (base_array_room(f->zeros, f->zeros_room, f->nzeros + 1) < 0)
		return -ENOMEM;
	z = &f->zeros[f->nzeros++];
	box_init(z, tensor, size->ndim, memory);
	memcpy(z->box.size, size->dim, size->ndim * sizeof *size->dim);
	f->device_bytes += z->device; /* not nothing */
	return 0;
}

int load_fill_add_to(struct load_fill *f, uint32_t tensor, const struct tensor_box *box,
	const struct load_fill_memory *memory, struct base_error *err)
{
	enum tensor_dtype dtype = memory->dtype;
	const struct load_step_info *step = load_step_info(f->step);
	struct load_tensor_info info;
	struct fill_box *b;
	uint64_t bytes;
	int r = 0;

	if (tensor >= load_step_tensor_count(f->step))
		return base_error_set(err, -ENOENT, "%s/%llu: there is no tensor %u", step->run,
			(unsigned long long)step->step, tensor);
	load_step_tensor_info(f->step, tensor, &info);
	if (!tensor_box_inside(&info.shape, box))
		r = base_error_set(err, -EINVAL, "the box is not inside the tensor");
	else if (dtype && !tensor_convert_possible(info.dtype, dtype))
		r = base_error_set(err, -EINVAL, "%s cannot be converted to %s", tensor_dtype_name(info.dtype),
			tensor_dtype_name(dtype));
	if (r < 0)
		return load_step_tensor_failed(f->step, tensor, r, err);
	if (tensor_box_empty(info.shape.ndim, box))
		return 0;
	if (f->nboxes == UINT32_MAX || base_array_room(f->boxes, f->boxes_room, f->nboxes + 1) < 0)
		return base_no_memory(err);
	b = &f->boxes[f->nboxes++];
	box_init(b, tensor, info.shape.ndim, memory);
	b->box = *box;
	b->dtype = dtype == info.dtype ? 0 : dtype;
	bytes = tensor_box_items(&info.shape, box) * tensor_dtype_bytes(info.dtype);
	f->wanted += bytes;
	f->device_bytes += b->device ? bytes : 0;
	return 0;
}

struct load_fill_mark load_fill_mark(const struct load_fill *f)
{
	return (struct load_fill_mark){f->nboxes, f->nzeros, f->wanted, f->device_bytes};
}

void load_fill_cut(struct load_fill *f, const struct load_fill_mark *mark)
{
	f->nboxes = mark->nboxes;
	f->nzeros = mark->nzeros;
	f->wanted = mark->wanted;
	f->device_bytes = mark->device_bytes;
}

void load_fill_past_cache(struct load_fill *f) { f->past_cache = true; }

void load_fill_stop(struct load_fill *f)
{
	atomic_store(&f->stopped, true);
}

int fill_lose(struct load_fill *f, size_t box, const struct tensor_box *part, int code, const char *why)
{
	char *copy = strdup(why);
	int r = -ENOMEM;

	pthread_mutex_lock(&f->lock);
	if (copy && base_array_room(f->lost, f->lost_room, f->nlost + 1) == 0) {
		f->lost[f->nlost++] = (struct load_fill_lost){box, f->boxes[box].tensor, *part, code,
			base_steal(copy)};
		r = 0;
	}
	pthread_mutex_unlock(&f->lock);
	free(copy);
	return r;
}

bool fill_skips(const struct load_fill *f, int r)
{
	return f->flags & LOAD_FILL_SKIP_DAMAGED && r != -ENOMEM && r != -EMFILE && r != -ENFILE && r != -ECANCELED;
}

/* The piece of these needs failed with r. */
static int fill_failed(struct load_fill *f, struct fill_worker *w, size_t first, size_t end, int r)
{
	if (fill_skips(f, r)) {
		for (r = 0; r == 0 && first < end; first++) {
			struct tensor_box piece, part;

			fill_need_boxes(f, &f->needs[first], &piece, &part);
			r = fill_lose(f, f->needs[first].box, &part, w->err.code, w->err.text);
		}
		if (r == 0)
			return 0;
		base_no_memory(&w->err);
	}
	pthread_mutex_lock(&f->lock);
	if (!f->fatal && first < atomic_load(&f->failed)) {
		atomic_store(&f->failed, first);
		f->error = w->err;
		f->error.code = r;
	}
	pthread_mutex_unlock(&f->lock);
	return r;
}

void fill_fatal(struct load_fill *f, int r, const struct base_error *err)
{
	pthread_mutex_lock(&f->lock);
	if (!f->fatal) {
		f->fatal = true;
		f->error = *err;
		f->error.code = r;
		atomic_store(&f->failed, 0);
	}
	pthread_mutex_unlock(&f->lock);
}

static bool fill_goes_on(const struct load_fill *f, size_t need)
{
	return !atomic_load_explicit(&f->stopped, memory_order_relaxed)
		&& need < atomic_load_explicit(&f->failed, memory_order_relaxed);
}

static void fill_task(struct fill_worker *w, size_t task)
{
	struct load_fill *f = w->f;
	size_t end = f->tasks[task + 1], next;

	for (size_t i = f->tasks[task]; i < end; i = next) {
		int r;

		if (!fill_goes_on(f, i))
			return;
		next = fill_burst(w, i, end);
		if (next > i)
			continue;
		next = fill_group_end(f, i);
		w->err = (struct base_error){0};
		r = fill_piece(w, i, next);
		if (r < 0 && fill_failed(f, w, i, next, r) < 0)
			return;
	}
}

bool fill_take(struct fill_worker *w)
{
	struct load_fill *f = w->f;
	uint64_t read_before = pack_bytes_read();
	size_t task = atomic_fetch_add(&f->next, 1);

	if (task >= f->ntasks || !fill_goes_on(f, f->tasks[task]))
		return false;
	fill_task(w, task);
	atomic_fetch_add_explicit(&f->read, pack_bytes_read() - read_before, memory_order_relaxed);
	return true;
}

static void *fill_main(void *arg)
{
	struct fill_worker w = {.f = arg};

	while (fill_take(&w))
		;
	fill_worker_release(&w);
	return NULL;
}

/* Starts one more thread, if there may be so many. While others run, only a thread of the crew calls it. */
static bool crew_start(struct load_fill *f, unsigned most)
{
	bool started = false;

	pthread_mutex_lock(&f->lock);
	if (f->ncrew < f->crew_room && f->ncrew < most)
		started = base_thread_start(&f->crew[f->ncrew], fill_main, f) == 0;
	f->ncrew += started;
	pthread_mutex_unlock(&f->lock);
	return started;
}

void fill_crew_grow(struct load_fill *f)
{
	size_t tasks = f->ntasks - base_min(atomic_load(&f->next), f->ntasks); /* that no thread has taken */

	crew_start(f, (unsigned)base_min(FILL_PAST_THREADS * f->threads, tasks));
}

/* The next thread of the crew to be joined: the crew may grow until its last thread has ended. */
static bool crew_next(struct load_fill *f, unsigned joined, pthread_t *ret_thread)
{
	bool more;

	pthread_mutex_lock(&f->lock);
	more = joined < f->ncrew;
	if (more)
		*ret_thread = f->crew[joined];
	pthread_mutex_unlock(&f->lock);
	return more;
}

/* The caller's thread is one of them. If no more can be started, those that run do all. */
static void fill_threads(struct load_fill *f)
{
	unsigned room = (f->past_cache ? FILL_PAST_THREADS : 1) * f->threads;
	unsigned want = (unsigned)base_min(f->threads, f->ntasks);
	pthread_t thread;

	f->crew = calloc(room, sizeof *f->crew);
	f->crew_room = f->crew ? room - 1 : 0; /* without memory this thread does all */
	while (want > 1 && crew_start(f, want - 1))
		;
	fill_main(f);
	for (unsigned joined = 0; crew_next(f, joined, &thread); joined++)
		pthread_join(thread, NULL);
	f->times.threads = f->ncrew + 1;
}

int fill_check(struct load_fill *f, struct base_error *err)
{
	const struct load_step_info *step = load_step_info(f->step);
	uint64_t placed = atomic_load(&f->placed);
	size_t lost;

	if (atomic_load(&f->stopped) || atomic_load(&f->failed) != SIZE_MAX)
		return 0;
	pthread_mutex_lock(&f->lock);
	lost = f->nlost;
	pthread_mutex_unlock(&f->lock);
	if (placed == f->wanted || (lost && placed < f->wanted))
		return 0;
	return base_error_set(err, -BASE_EFORMAT, "%s/%llu: the load placed %llu bytes, and %llu were wanted: do not "
		"use what it loaded", step->run, (unsigned long long)step->step, (unsigned long long)placed,
		(unsigned long long)f->wanted);
}

int fill_begin(struct load_fill *f, struct base_error *err)
{
	int r = fill_plan(f, err);

	if (r == 0)
		r = place_device_begin(f, err);
	f->begun_ns = base_monotonic_ns();
	if (r == 0)
		place_zeros(f);
	return r;
}

void fill_end(struct load_fill *f)
{
	place_device_end(f);
	f->times.read_ns = base_monotonic_ns() - f->begun_ns;
}

int load_fill_run(struct load_fill *f, struct base_error *err)
{
	int r = fill_begin(f, err);

	if (r == 0)
		fill_threads(f);
	fill_end(f);
	if (r < 0)
		return r;
	if (f->error.code)
		return base_error_set(err, f->error.code, "%s", f->error.text);
	return atomic_load(&f->stopped) ? base_error_set(err, -ECANCELED, "the load was stopped") : fill_check(f, err);
}

size_t load_fill_lost_count(const struct load_fill *f) { return f->nlost; }
const struct load_fill_lost *load_fill_lost(const struct load_fill *f, size_t i) { return &f->lost[i]; }

void load_fill_progress(const struct load_fill *f, struct load_fill_progress *ret_progress)
{
	*ret_progress = (struct load_fill_progress){.wanted = f->wanted, .placed = atomic_load(&f->placed),
		.read = atomic_load(&f->read), .pieces = atomic_load(&f->pieces)};
}

void load_fill_times(const struct load_fill *f, struct load_fill_times *ret_times) { *ret_times = f->times; }
