/* SPDX-License-Identifier: Apache-2.0
 *
 * loader: a handle, and one thread that runs the fill, or the exchange that has it.
 *
 * A load is open, reads, and is over, in this order (enum loader_state). While it is open, one thread of the caller's
 * declares what it wants, and the boxes go to the fill at once; nothing is read. loader_start begins the thread. The
 * thread writes result, lost boxes and error, and then, with the lock, sets the state: a caller that has seen
 * LOADER_OVER may read them without the lock.
 *
 * The process that made a load is remembered: in a child after a fork there is no such thread, and the memory may be
 * shared, so all calls refuse. */
#include "core/load/loader/loader.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/machine.h"
#include "core/base/pool.h"
#include "core/load/loader/loader_internal.h"
#include "core/save/write/rank.h"

#define LOADER_DIRECT_BYTES (UINT64_C(1) << 30) /* less is soon read again, or soon read anyway */

static int loader_alive(const struct loader *l, struct base_error *err)
{
	return l->pid == getpid() ? 0 : base_error_set(err, -BASE_EFORKED,
		"the load was begun before this process was forked: begin one of its own");
}

static bool loader_is(struct loader *l, enum loader_state state)
{
	bool is;

	pthread_mutex_lock(&l->lock);
	is = l->state == state;
	pthread_mutex_unlock(&l->lock);
	return is;
}

const struct load_step_info *loader_step(const struct loader *l) { return load_step_info(l->step); }

/* ---- new and free ---- */

static void names_release(struct loader_names *names)
{
	names_cut(names, 0);
	free(names->all);
}

static void loader_destroy(struct loader *l)
{
	for (size_t i = 0; i < l->nlost; i++)
		free((uint64_t *)(uintptr_t)l->lost[i].box); /* ours, shown as const; the name is in it too */
	free(l->lost);
	load_exchange_free(l->exchange);
	load_fill_free(l->fill);
	names_release(&l->lacking);
	names_release(&l->missing);
	names_release(&l->unexpected);
	rename_cut(l, 0);
	free(l->rules);
	free(l->renamed);
	free(l->streams);
	free(l->declared);
	free(l->expected);
	tensor_mesh_free(l->alone);
	pthread_cond_destroy(&l->changed);
	pthread_mutex_destroy(&l->lock);
	free(l);
}

int loader_new(struct load_step *step, const struct loader_options *o, struct loader **ret_l, struct base_error *err)
{
	static const char *const name = "rank";
	const uint32_t size = 1;
	struct loader *l = calloc(1, sizeof *l);
	unsigned node_ranks = base_max(base_machine_node_ranks(base_max(o->world, 1)), 1);
	pthread_condattr_t monotonic;
	int r;

	if (!l)
		return base_no_memory(err);
	l->step = step;
	l->pid = getpid();
	l->options = *o;
	l->alone_on_node = node_ranks == 1;
	pthread_mutex_init(&l->lock, NULL);
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&l->changed, &monotonic);
	pthread_condattr_destroy(&monotonic);
	l->expected = calloc((size_t)load_step_component_count(step) + 1, sizeof *l->expected);
	l->fill = load_fill_new(step, o->threads ? o->threads : base_max(base_cpu_count() / node_ranks, 1),
		o->flags & (LOAD_FILL_REHASH | LOAD_FILL_SKIP_DAMAGED));
	r = l->expected && l->fill ? 0 : base_no_memory(err);
	if (r == 0)
		r = tensor_mesh_new(1, &name, &size, &l->options.rank, 1, &l->alone, err);
	if (r < 0)
		loader_destroy(l);
	else
		*ret_l = l;
	return r;
}

void loader_free(struct loader *l)
{
	if (!l || l->pid != getpid())
		return;
	loader_stop(l);
	if (!loader_is(l, LOADER_OPEN))
		pthread_join(l->thread, NULL);
	else if (l->options.comm)
		comm_abort(l->options.comm, "it gave up its load before this had begun");
	pthread_mutex_lock(&l->lock);
	while (l->waiters)
		pthread_cond_wait(&l->changed, &l->lock);
	pthread_mutex_unlock(&l->lock);
	loader_destroy(l);
}

/* ---- what is wanted ---- */

int loader_mark(struct loader *l, struct loader_mark *ret_mark, struct base_error *err)
{
	int r = loader_alive(l, err);

	if (r == 0 && !loader_is(l, LOADER_OPEN))
		r = base_error_set(err, -EINVAL,
			"the load has begun to read: nothing can be declared or started any more");
	if (r == 0)
		*ret_mark = (struct loader_mark){load_fill_mark(l->fill), l->ndeclared, l->lacking.n, l->nrules};
	return r;
}

void loader_cut(struct loader *l, const struct loader_mark *mark)
{
	load_fill_cut(l->fill, &mark->fill);
	l->ndeclared = mark->ndeclared;
	names_cut(&l->lacking, mark->nlacking);
	rename_cut(l, mark->nrules);
}

int loader_stream(struct loader *l, void *stream, struct base_error *err)
{
	if (base_array_room(l->streams, l->streams_room, l->nstreams + 1) < 0)
		return base_no_memory(err);
	l->streams[l->nstreams++] = stream;
	return 0;
}

void loader_expect(struct loader *l, const char *component)
{
	uint32_t first, end;

	for (uint32_t c = 0; c < load_step_component_count(l->step); c++)
		if (strcmp(load_step_component(l->step, c, &first, &end), component) == 0)
			l->expected[c] = true;
}

/* ---- the thread ---- */

/* Copies what did not arrive, with names: a box and a name in one piece of memory each. */
static int loader_lose(struct loader *l)
{
	size_t n = load_fill_lost_count(l->fill);

	l->lost = calloc(n + 1, sizeof *l->lost);
	if (!l->lost)
		return -ENOMEM;
	for (; l->nlost < n; l->nlost++) {
		const struct load_fill_lost *from = load_fill_lost(l->fill, l->nlost);
		struct load_tensor_info info;
		uint64_t *box;
		size_t pairs;

		load_step_tensor_info(l->step, from->tensor, &info);
		pairs = 2 * (size_t)info.shape.ndim;
		box = malloc(pairs * sizeof *box + info.name_len + 1);
		if (!box)
			return -ENOMEM;
		for (uint32_t d = 0; d < info.shape.ndim; d++) {
			box[2 * d] = from->box.offset[d];
			box[2 * d + 1] = from->box.size[d];
		}
		memcpy(box + pairs, info.name, info.name_len);
		((char *)(box + pairs))[info.name_len] = 0;
		l->lost[l->nlost] = (struct loader_lost){.component = info.component, .name = (char *)(box + pairs),
			.box = box, .ndim = info.shape.ndim, .code = from->code, .why = from->why};
	}
	return 0;
}

static void *loader_main(void *arg)
{
	struct loader *l = arg;
	struct comm *comm = l->options.comm;
	int r = l->exchange ? load_exchange_run(l->exchange, &l->error) : load_fill_run(l->fill, &l->error);

	if (loader_lose(l) < 0 && r == 0)
		r = base_no_memory(&l->error);
	/* A wait returns -ETIMEDOUT while the load goes on; a caller that got it from a load that is over would wait
	 * again for ever. */
	if (r == -ETIMEDOUT)
		l->error.code = r = comm ? -BASE_EABORTED : -EIO;
	if (r < 0 && !l->error.code)
		base_error_set(&l->error, r, "%s", base_error_name(r));
	if (comm)
		comm_give(comm);
	pthread_mutex_lock(&l->lock);
	l->r = r;
	l->state = LOADER_OVER;
	pthread_cond_broadcast(&l->changed);
	pthread_mutex_unlock(&l->lock);
	return NULL;
}

/* Whether large reads go past the page cache. Where ranks of one node read the same bytes, the cache reads them from
 * the disk once. */
static bool loader_direct(const struct loader *l)
{
	struct load_fill_progress p;

	if (l->options.flags & (LOADER_DIRECT | LOADER_CACHED))
		return l->options.flags & LOADER_DIRECT;
	load_fill_progress(l->fill, &p);
	return l->alone_on_node && p.wanted >= LOADER_DIRECT_BYTES;
}

static int loader_share(struct loader *l, struct base_error *err)
{
	l->exchange = load_exchange_new(l->fill, l->options.comm, l->options.exchange);
	return l->exchange ? comm_take(l->options.comm, err) : base_no_memory(err);
}

/* With the lock. After an error it may be called again. */
static int loader_begin(struct loader *l, struct base_error *err)
{
	struct comm *comm = l->options.comm;
	int r = load_fill_devices(l->fill, l->streams, l->nstreams, err);

	if (r == 0 && comm)
		r = loader_share(l, err);
	if (loader_direct(l))
		load_fill_past_cache(l->fill);
	if (r == 0) {
		r = base_thread_start(&l->thread, loader_main, l);
		if (r < 0)
			base_error_set(err, r, "no thread can be started for the load: %s", base_error_name(r));
		if (r < 0 && comm)
			comm_give(comm);
	}
	if (r < 0)
		load_exchange_free(base_steal(l->exchange));
	else
		l->state = LOADER_READING;
	return r;
}

int loader_start(struct loader *l, struct base_error *err)
{
	const struct load_step_info *info = load_step_info(l->step);
	struct loader_mark mark;
	int r = loader_mark(l, &mark, err);

	if (r == 0)
		r = names_compare(l, err);
	if (r == 0)
		r = load_fill_overlap(l->fill, err);
	if (r < 0)
		return r;
	pthread_mutex_lock(&l->lock); /* the thread ends with the lock, so after this */
	r = loader_begin(l, err);
	pthread_mutex_unlock(&l->lock);
	if (r == 0)
		save_past_loaded(load_step_store(l->step), info->run, info->step, info->entry);
	return r;
}

/* ---- while it reads, and after ---- */

/* With the lock: until the load is over. */
static int loader_await(struct loader *l, int64_t timeout_ms, struct base_error *err)
{
	const struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, timeout_ms);
	int late = 0;

	if (l->state == LOADER_OPEN)
		return base_error_set(err, -EINVAL, "the load does not read yet: vckpt_load_start comes first");
	l->waiters++;
	while (l->state != LOADER_OVER && !late)
		late = timeout_ms < 0 ? pthread_cond_wait(&l->changed, &l->lock)
			: pthread_cond_timedwait(&l->changed, &l->lock, &until);
	if (--l->waiters == 0)
		pthread_cond_broadcast(&l->changed);
	if (l->state != LOADER_OVER)
		return base_error_set(err, -ETIMEDOUT, "the load is not over yet");
	return l->r < 0 ? base_error_set(err, l->r, "%s", l->error.text) : 0;
}

int loader_wait(struct loader *l, int64_t timeout_ms, struct base_error *err)
{
	int r = loader_alive(l, err);

	if (r < 0)
		return r;
	pthread_mutex_lock(&l->lock);
	r = loader_await(l, timeout_ms, err);
	pthread_mutex_unlock(&l->lock);
	return r;
}

void loader_stop(struct loader *l)
{
	if (l && l->pid == getpid())
		load_fill_stop(l->fill);
}

int loader_progress(struct loader *l, struct loader_progress *ret_progress)
{
	int r = loader_alive(l, NULL);

	if (r < 0)
		return r;
	*ret_progress = (struct loader_progress){0};
	pthread_mutex_lock(&l->lock);
	ret_progress->over = l->state == LOADER_OVER;
	if (l->state != LOADER_OPEN)
		load_fill_progress(l->fill, &ret_progress->bytes);
	if (ret_progress->over)
		load_fill_times(l->fill, &ret_progress->times);
	pthread_mutex_unlock(&l->lock);
	return 0;
}

int loader_exchanged(struct loader *l, struct load_exchange_result *ret_result)
{
	int r = loader_alive(l, NULL);

	if (r < 0)
		return r;
	*ret_result = (struct load_exchange_result){.why = ""};
	if (loader_is(l, LOADER_OVER) && l->exchange)
		load_exchange_result(l->exchange, ret_result);
	return 0;
}

const struct loader_names *loader_missing(const struct loader *l) { return &l->missing; }
const struct loader_names *loader_unexpected(const struct loader *l) { return &l->unexpected; }

size_t loader_lost(struct loader *l, const struct loader_lost **ret_lost)
{
	*ret_lost = l->lost;
	return loader_alive(l, NULL) == 0 && loader_is(l, LOADER_OVER) ? l->nlost : 0;
}
