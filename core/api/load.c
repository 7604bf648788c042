/* SPDX-License-Identifier: Apache-2.0
 *
 * load: the loading part of vckpt.h over core/load/fill/fill.h: a handle, and one thread that runs the fill.
 *
 * A load is open, reads, and is over, in this order (enum load_state). Open: one thread of the caller's declares what
 * it wants; nothing is read. start hands all of it to a fill and starts the thread. The thread writes result, lost
 * boxes and error, and then, with the lock, says that the load is over: whoever has seen that may read them without it.
 *
 * A stop is remembered, so that it counts whenever it comes. The process that began a load is remembered as well: in a
 * child after a fork there is no such thread, and the memory may be shared, so all calls refuse. */
#include <stdlib.h>
#include <string.h>

#include "core/api/api_load_internal.h"
#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/base/machine.h"
#include "core/base/pool.h"
#include "core/save/write/rank.h"

_Static_assert((int)VCKPT_LOAD_REHASH == (int)LOAD_FILL_REHASH
	&& (int)VCKPT_LOAD_SKIP_DAMAGED == (int)LOAD_FILL_SKIP_DAMAGED
	&& (int)VCKPT_EXCHANGE_AUTO == (int)LOAD_EXCHANGE_AUTO
	&& (int)VCKPT_EXCHANGE_NEVER == (int)LOAD_EXCHANGE_NEVER
	&& (int)VCKPT_EXCHANGE_ALWAYS == (int)LOAD_EXCHANGE_ALWAYS, "handed through");

#define LOAD_THREADS_MAX 256u
#define LOAD_DIRECT_BYTES (UINT64_C(1) << 30) /* less is soon read again, or soon read anyway */

static int load_alive(const struct vckpt_load *load, struct base_error *err)
{
	if (!load)
		return base_error_set(err, -EINVAL, "no load is given");
	if (load->pid != getpid())
		return base_error_set(err, -BASE_EFORKED,
			"the load was begun before this process was forked: begin one of its own");
	return 0;
}

static int load_is_open(struct vckpt_load *load, struct base_error *err)
{
	int r = load_alive(load, err);
	bool open;

	if (r < 0)
		return r;
	pthread_mutex_lock(&load->lock);
	open = load->state == LOAD_OPEN;
	pthread_mutex_unlock(&load->lock);
	return open ? 0 : base_error_set(err, -EINVAL,
		"the load has begun to read: nothing can be declared or started any more");
}

/* ---- begin and free ---- */

static void load_destroy(struct vckpt_load *load)
{
	for (size_t i = 0; i < load->nlost; i++)
		free((uint64_t *)(uintptr_t)load->lost[i].box); /* ours, shown as const; the name is in it too */
	free(load->lost);
	load_exchange_free(load->shared);
	load_fill_free(load->fill);
	load_names_cut(&load->lacking, 0);
	load_names_cut(&load->missing, 0);
	load_names_cut(&load->unexpected, 0);
	free(load->lacking.all);
	free(load->missing.all);
	free(load->unexpected.all);
	load_renames_release(&load->renames);
	free(load->streams);
	free(load->tensors);
	free(load->expected);
	free(load->tape);
	tensor_mesh_free(load->alone);
	pthread_cond_destroy(&load->changed);
	pthread_mutex_destroy(&load->lock);
	free(load);
}

static struct vckpt_load *load_new(struct vckpt_step *step)
{
	struct vckpt_load *load = calloc(1, sizeof *load);
	pthread_condattr_t monotonic;

	if (!load)
		return NULL;
	load->step = step;
	load->pid = getpid();
	pthread_mutex_init(&load->lock, NULL);
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&load->changed, &monotonic);
	pthread_condattr_destroy(&monotonic);
	load->expected = calloc((size_t)load_step_component_count(step->step) + 1, sizeof *load->expected);
	if (load->expected)
		return load;
	load_destroy(load);
	return NULL;
}

static int load_options_check(const struct vckpt_load_options *o, struct base_error *err)
{
	const uint32_t paths = VCKPT_LOAD_DIRECT | VCKPT_LOAD_CACHED;
	const uint32_t known = VCKPT_LOAD_REHASH | VCKPT_LOAD_SKIP_DAMAGED | VCKPT_LOAD_NOT_STRICT | paths;

	int r = api_size_check(o->size, sizeof *o, "vckpt_load_options", err);

	if (r == 0)
		r = api_reserved_check(o->reserved, "vckpt_load_options", err);
	if (r < 0)
		return r;
	if (o->exchange > VCKPT_EXCHANGE_ALWAYS)
		return base_error_set(err, -EINVAL, "exchange of the load is %u: it is one of VCKPT_EXCHANGE_AUTO to "
			"VCKPT_EXCHANGE_ALWAYS, %d to %d", o->exchange, VCKPT_EXCHANGE_AUTO, VCKPT_EXCHANGE_ALWAYS);
	if (o->comm && api_comm_alive(o->comm, err) < 0)
		return -BASE_EFORKED;
	if ((o->flags & paths) == paths)
		return base_error_set(err, -EINVAL, "VCKPT_LOAD_DIRECT and VCKPT_LOAD_CACHED exclude each other");
	if (o->threads > LOAD_THREADS_MAX)
		return base_error_set(err, -EINVAL, "a load of %u threads: at most %u are possible", o->threads,
			LOAD_THREADS_MAX);
	return api_flags_check(o->flags, known, "the load", "VCKPT_LOAD_...", err);
}

static unsigned load_threads(const struct vckpt_load_options *o, unsigned node_ranks)
{
	return o->threads ? o->threads : base_max(base_cpu_count() / node_ranks, 1);
}

int vckpt_load_begin(struct vckpt_step *step, const struct vckpt_load_options *o, struct vckpt_load **ret_load,
	struct vckpt_error *err)
{
	static const struct vckpt_load_options defaults = {.size = sizeof defaults};
	static const char *const name = "rank";
	const uint32_t size = 1;
	struct base_error *e = api_error(err);
	struct vckpt_load *load;
	unsigned node_ranks;
	int r = api_step_alive(step, e);

	if (!o)
		o = &defaults;
	if (r == 0 && !ret_load)
		r = base_error_set(e, -EINVAL, "no place for the load is given");
	if (r == 0)
		r = load_options_check(o, e);
	if (r < 0)
		return r;
	load = load_new(step);
	if (!load)
		return base_no_memory(e);
	load->rank = o->rank;
	node_ranks = base_max(base_machine_node_ranks(base_max(o->world, 1)), 1);
	load->threads = load_threads(o, node_ranks);
	load->alone_on_node = node_ranks == 1;
	load->flags = o->flags;
	load->comm = o->comm;
	load->exchange = o->exchange;
	r = tensor_mesh_new(1, &name, &size, &load->rank, 1, &load->alone, e);
	if (r < 0)
		load_destroy(load);
	else
		*ret_load = load;
	return api_result(r, e);
}

void vckpt_load_free(struct vckpt_load *load)
{
	if (!load || load->pid != getpid())
		return;
	vckpt_load_stop(load);
	if (load->fill) /* there since it started */
		pthread_join(load->thread, NULL);
	else
		vckpt_comm_abort(load->comm, "it gave up its load before this had begun");
	pthread_mutex_lock(&load->lock);
	while (load->waiters)
		pthread_cond_wait(&load->changed, &load->lock);
	pthread_mutex_unlock(&load->lock);
	load_destroy(load);
}

/* ---- what is wanted ---- */

/* Declares all, or none. `targets` or `tensors` is given. */
static int load_declare_all(struct vckpt_load *load, const struct vckpt_target *targets,
	const struct vckpt_tensor *tensors, size_t n, struct base_error *err)
{
	size_t tape = load->ntape, lacking = load->lacking.n;
	int r = 0;

	for (size_t i = 0; r == 0 && i < n; i++) {
		const struct vckpt_target same = {.size = sizeof same, .to = tensors ? &tensors[i] : NULL};

		r = load_declare(load, targets ? &targets[i] : &same, i, err);
	}
	if (r < 0) {
		load->ntape = tape;
		load_names_cut(&load->lacking, lacking);
	}
	return r;
}

int vckpt_load_tensors(struct vckpt_load *load, const struct vckpt_tensor *tensors, size_t n, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = load_is_open(load, e);

	if (r == 0 && n && !tensors)
		r = base_error_set(e, -EINVAL, "no tensors are given");
	return r < 0 ? r : api_result(load_declare_all(load, NULL, tensors, n, e), e);
}

int vckpt_load_targets(struct vckpt_load *load, const struct vckpt_target *targets, size_t n, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = load_is_open(load, e);

	if (r == 0 && n && !targets)
		r = base_error_set(e, -EINVAL, "no targets are given");
	return r < 0 ? r : api_result(load_declare_all(load, targets, NULL, n, e), e);
}

int vckpt_load_rename(struct vckpt_load *load, const struct vckpt_rename *rules, size_t n, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = load_is_open(load, e);

	if (r == 0 && n && !rules)
		r = base_error_set(e, -EINVAL, "no rules are given");
	return r < 0 ? r : api_result(load_rename_add(load, rules, n, e), e);
}

int vckpt_load_rename_by(struct vckpt_load *load,
	int (*f)(void *arg, const char *component, const char *name, char *ret_name, size_t room), void *arg,
	struct vckpt_error *err)
{
	int r = load_is_open(load, api_error(err));

	if (r == 0) {
		load->renames.function = f;
		load->renames.arg = arg;
	}
	return r;
}

int vckpt_load_stream(struct vckpt_load *load, void *stream, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = load_is_open(load, e);

	if (r < 0)
		return r;
	if (base_array_room(load->streams, load->streams_room, load->nstreams + 1) < 0)
		return base_no_memory(e);
	load->streams[load->nstreams++] = stream;
	return 0;
}

int vckpt_load_expect(struct vckpt_load *load, const char *component, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = load_is_open(load, e);
	uint32_t first, end;

	if (r == 0 && !component)
		r = base_error_set(e, -EINVAL, "no component is given");
	if (r < 0)
		return r;
	for (uint32_t c = 0; c < load_step_component_count(load->step->step); c++)
		if (strcmp(load_step_component(load->step->step, c, &first, &end), component) == 0)
			load->expected[c] = true;
	return 0;
}

/* ---- the thread ---- */

/* Copies what did not arrive, with names: a name and a box in one piece of memory each. */
static int load_lose(struct vckpt_load *load)
{
	size_t n = load_fill_lost_count(load->fill);

	load->lost = calloc(n + 1, sizeof *load->lost);
	if (!load->lost)
		return -ENOMEM;
	for (; load->nlost < n; load->nlost++) {
		const struct load_fill_lost *from = load_fill_lost(load->fill, load->nlost);
		struct load_tensor_info info;
		uint64_t *box;
		size_t pairs;

		load_step_tensor_info(load->step->step, load->tensors[from->added], &info);
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
		load->lost[load->nlost] = (struct vckpt_load_lost){.component = info.component,
			.name = (char *)(box + pairs), .box = box, .ndim = info.shape.ndim, .code = from->code,
			.why = from->why};
	}
	return 0;
}

static void *load_main(void *arg)
{
	struct vckpt_load *load = arg;
	int r = load->shared ? load_exchange_run(load->shared, &load->error) : load_fill_run(load->fill, &load->error);

	if (load_lose(load) < 0 && r == 0)
		r = base_no_memory(&load->error);
	/* A wait answers -ETIMEDOUT while the load goes on; a caller that got it from a load that is over would wait
	 * again for ever. */
	if (r == -ETIMEDOUT)
		load->error.code = r = load->comm ? -BASE_EABORTED : -EIO;
	if (load->comm)
		comm_give(load->comm->comm);
	pthread_mutex_lock(&load->lock);
	load->r = api_result(r, &load->error);
	load->state = LOAD_OVER;
	pthread_cond_broadcast(&load->changed);
	pthread_mutex_unlock(&load->lock);
	return NULL;
}

/* Whether large reads go past the page cache. Where ranks of one node read the same bytes, the cache reads them from
 * the disk once. */
static bool load_direct(struct vckpt_load *load)
{
	struct load_fill_progress p;

	load_fill_progress(load->fill, &p);
	if (load->flags & (VCKPT_LOAD_DIRECT | VCKPT_LOAD_CACHED))
		return load->flags & VCKPT_LOAD_DIRECT;
	return load->alone_on_node && p.wanted >= LOAD_DIRECT_BYTES;
}

static int load_take_comm(struct vckpt_load *load, struct base_error *err)
{
	load->shared = load_exchange_new(load->fill, load->comm->comm, (enum load_exchange_mode)load->exchange);
	if (!load->shared)
		return base_no_memory(err);
	return api_comm_take(load->comm, err);
}

/* Hands all that was declared to a fill of its own. */
static int load_fill_make(struct vckpt_load *load, struct base_error *err)
{
	int r;

	load->fill = load_fill_new(load->step->step, load->threads,
		load->flags & (VCKPT_LOAD_REHASH | VCKPT_LOAD_SKIP_DAMAGED));
	if (!load->fill)
		return base_no_memory(err);
	free(base_steal(load->tensors)); /* of an earlier start that failed */
	r = load_fill_tape(load, err);
	if (r == 0)
		r = load_fill_devices(load->fill, load->streams, load->nstreams, err);
	if (r == 0 && load->comm)
		r = load_take_comm(load, err);
	if (load_direct(load))
		load_fill_past_cache(load->fill);
	if (r == 0 && load->stopped)
		load_fill_stop(load->fill);
	if (r == 0) {
		r = base_thread_start(&load->thread, load_main, load);
		if (r < 0)
			base_error_set(err, r, "no thread can be started for the load: %s", base_error_name(r));
		if (r < 0 && load->comm)
			comm_give(load->comm->comm);
	}
	if (r < 0) {
		load_exchange_free(base_steal(load->shared));
		load_fill_free(base_steal(load->fill));
	}
	return r;
}

int vckpt_load_start(struct vckpt_load *load, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	const struct load_step_info *info;
	int r = load_is_open(load, e);

	if (r == 0)
		r = load_names_compare(load, e);
	if (r == 0)
		r = load_overlap_check(load, e);
	if (r < 0)
		return api_result(r, e);
	pthread_mutex_lock(&load->lock);
	r = load_fill_make(load, e);
	if (r == 0)
		load->state = LOAD_READING; /* the thread says that it is over with the lock, so later */
	pthread_mutex_unlock(&load->lock);
	if (r < 0)
		return api_result(r, e);
	free(base_steal(load->tape));
	load->ntape = load->tape_room = 0;
	info = load_step_info(load->step->step);
	save_past_loaded(load_step_store(load->step->step), info->run, info->step, info->entry);
	return 0;
}

/* ---- while it reads, and after ---- */

/* With the lock: until the load is over. */
static int load_await(struct vckpt_load *load, int64_t timeout_ms, struct base_error *err)
{
	const struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, timeout_ms);
	int late = 0;

	if (load->state == LOAD_OPEN)
		return base_error_set(err, -EINVAL, "the load does not read yet: vckpt_load_start comes first");
	load->waiters++;
	while (load->state != LOAD_OVER && !late)
		late = timeout_ms < 0 ? pthread_cond_wait(&load->changed, &load->lock)
			: pthread_cond_timedwait(&load->changed, &load->lock, &until);
	if (--load->waiters == 0)
		pthread_cond_broadcast(&load->changed);
	if (load->state != LOAD_OVER)
		return base_error_set(err, -ETIMEDOUT, "the load is not over yet");
	return load->r < 0 ? base_error_set(err, load->r, "%s", load->error.text) : 0;
}

int vckpt_load_wait(struct vckpt_load *load, int64_t timeout_ms, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = load_alive(load, e);

	if (r < 0)
		return r;
	pthread_mutex_lock(&load->lock);
	r = load_await(load, timeout_ms, e);
	pthread_mutex_unlock(&load->lock);
	return api_result(r, e);
}

int vckpt_load_run(struct vckpt_load *load, struct vckpt_error *err)
{
	int r = vckpt_load_start(load, err);

	return r < 0 ? r : vckpt_load_wait(load, -1, err);
}

void vckpt_load_stop(struct vckpt_load *load)
{
	if (load_alive(load, NULL) < 0)
		return;
	pthread_mutex_lock(&load->lock);
	load->stopped = true;
	if (load->fill)
		load_fill_stop(load->fill);
	pthread_mutex_unlock(&load->lock);
}

int vckpt_load_progress(struct vckpt_load *load, struct vckpt_load_progress *ret_progress)
{
	struct load_fill_progress p = {0};
	struct load_fill_times times = {0};
	int r = ret_progress ? load_alive(load, NULL) : -EINVAL;
	bool over;

	if (r < 0)
		return r;
	if (ret_progress->size != sizeof *ret_progress)
		return -EINVAL;
	pthread_mutex_lock(&load->lock);
	over = load->state == LOAD_OVER;
	if (load->fill)
		load_fill_progress(load->fill, &p);
	if (over)
		load_fill_times(load->fill, &times);
	pthread_mutex_unlock(&load->lock);
	*ret_progress = (struct vckpt_load_progress){.size = sizeof *ret_progress, .bytes_wanted = p.wanted,
		.bytes_placed = p.placed, .bytes_read = p.read, .pieces = p.pieces,
		.open_ns = times.open_ns, .plan_ns = times.plan_ns,
		.read_ns = times.read_ns, .threads = times.threads, .over = over};
	return 0;
}

int vckpt_load_exchanged(struct vckpt_load *load, struct vckpt_load_exchange *ret_exchange)
{
	struct load_exchange_result x = {.why = ""};
	int r = ret_exchange ? load_alive(load, NULL) : -EINVAL;

	if (r < 0)
		return r;
	if (ret_exchange->size != sizeof *ret_exchange)
		return -EINVAL;
	pthread_mutex_lock(&load->lock);
	if (load->state == LOAD_OVER && load->shared)
		load_exchange_result(load->shared, &x);
	pthread_mutex_unlock(&load->lock);
	*ret_exchange = (struct vckpt_load_exchange){.size = sizeof *ret_exchange, .chosen = x.chosen, .ranks = x.ranks,
		.bytes_sent = x.sent, .bytes_got = x.got, .bytes_shared = x.shared, .bytes_wanted = x.wanted,
		.why = x.why};
	return 0;
}

/* ---- lists ---- */

static size_t names_show(const struct load_names *names, const char *const **ret_names)
{
	if (ret_names)
		*ret_names = (const char *const *)names->all;
	return names->n;
}

size_t vckpt_load_missing(const struct vckpt_load *load, const char *const **ret_names)
{
	return load ? names_show(&load->missing, ret_names) : 0;
}

size_t vckpt_load_unexpected(const struct vckpt_load *load, const char *const **ret_names)
{
	return load ? names_show(&load->unexpected, ret_names) : 0;
}

size_t vckpt_load_lost_count(const struct vckpt_load *load)
{
	struct vckpt_load_progress p = {.size = sizeof p};

	/* the lock is no part of what the caller holds const */
	return vckpt_load_progress((struct vckpt_load *)(uintptr_t)load, &p) == 0 && p.over ? load->nlost : 0;
}

int vckpt_load_lost(const struct vckpt_load *load, size_t i, struct vckpt_load_lost *ret_lost)
{
	if (!ret_lost)
		return -EINVAL;
	if (i >= vckpt_load_lost_count(load))
		return -ENOENT;
	*ret_lost = load->lost[i];
	return 0;
}
