/* SPDX-License-Identifier: Apache-2.0
 *
 * saver: opening and closing: the launch, the threads, what all flights share. Threads start at open, once; the ring is
 * made when the first flight says how large it should be. Closing waits until every flight is decided: the persister
 * ends when the queue is empty, the workers after it.
 *
 * A process that was forked has this memory, but neither the threads nor the locks in a known state: every call looks
 * at the process id first, and the child leaves everything as it is. */
#include <stdio.h>
#include <unistd.h>

#include "core/base/machine.h"
#include "core/base/pool.h"
#include "core/save/saver/saver_internal.h"

bool save_saver_is_child(const struct save_saver *s) { return s->pid != getpid(); }

static int saver_set_mesh(struct save_saver *s, const struct tensor_mesh *mesh, struct base_error *err)
{
	const char *rank = "rank";
	struct tensor_mesh *all = NULL;
	int r = mesh ? 0 : tensor_mesh_new(1, &rank, &s->options.world, NULL, 0, &all, err);

	s->mesh = r == 0 ? saver_mesh(s, mesh ? mesh : all, err) : NULL;
	tensor_mesh_free(all);
	s->options.mesh = NULL;
	return r < 0 || s->mesh ? r : -ENOMEM;
}

static void saver_release(struct save_saver *s)
{
	commit_launch_close(s->launch);
	save_engine_release(&s->engine);
	save_past_release(&s->past);
	for (size_t i = 0; i < s->nmeshes; i++)
		tensor_mesh_free(s->meshes[i]);
	device_ring_free(s->ring);
	saver_pieces_give(s->pieces);
	save_plan_cache_free(s->plans);
	pthread_cond_destroy(&s->work);
	pthread_cond_destroy(&s->ready);
	pthread_cond_destroy(&s->callers);
	pthread_mutex_destroy(&s->lock);
	pthread_mutex_destroy(&s->meshes_lock);
	free(s->meshes);
	saver_keep_release(&s->keep);
	free(s->workers);
	free(s->run);
	free(s);
}

static void saver_init_locks(struct save_saver *s)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_mutex_init(&s->lock, NULL);
	pthread_mutex_init(&s->meshes_lock, NULL);
	pthread_cond_init(&s->work, &attr);
	pthread_cond_init(&s->ready, NULL);
	pthread_cond_init(&s->callers, &attr);
	pthread_condattr_destroy(&attr);
}

static int saver_start(struct save_saver *s, struct base_error *err)
{
	unsigned threads;

	s->node_ranks = base_machine_node_ranks(s->options.world);
	s->threads = threads = saver_node_threads(s->options.threads, s->node_ranks);
	s->nworkers = s->options.low_priority ? 2 * threads : threads;
	s->workers = calloc(s->nworkers, sizeof *s->workers);
	if (!s->workers || save_engine_init(&s->engine, threads, &s->lock, &s->ready, &s->work) < 0)
		return base_no_memory(err);
	for (unsigned i = 0; i < s->nworkers; i++) {
		s->workers[i].s = s;
		s->workers[i].copies = i < threads;
		s->workers[i].digests = !s->options.low_priority || i >= threads;
		s->workers[i].started = base_thread_start(&s->workers[i].thread, saver_worker_main,
			&s->workers[i]) == 0;
		if (!s->workers[i].started)
			return base_error_set(err, -EAGAIN, "no more threads can be made");
	}
	s->persister_started = base_thread_start(&s->persister, saver_persister_main, s) == 0;
	return s->persister_started ? 0 : base_error_set(err, -EAGAIN, "no more threads can be made");
}

static void saver_stop(struct save_saver *s)
{
	pthread_mutex_lock(&s->lock);
	s->closing = true;
	pthread_cond_broadcast(&s->ready);
	pthread_mutex_unlock(&s->lock);
	if (s->persister_started)
		pthread_join(s->persister, NULL);
	s->persister_started = false;
	pthread_mutex_lock(&s->lock);
	s->stop = true;
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
	for (unsigned i = 0; s->workers && i < s->nworkers; i++) {
		if (s->workers[i].started)
			pthread_join(s->workers[i].thread, NULL);
		s->workers[i].started = false;
	}
}

static int saver_launch(struct save_saver *s, const char *id, struct base_error *err)
{
	struct commit_launch_options o = {.run = s->run, .id = id, .rank = s->options.rank, .world = s->options.world,
		.heartbeat_ms = s->options.heartbeat_ms, .start_ms = s->options.start_ms,
		.deadline_ms = s->options.deadline_ms};

	return commit_launch_open(s->store, &o, &s->launch, err);
}

int save_saver_open(const struct save_saver_options *o, struct save_saver **ret_s, struct base_error *err)
{
	struct save_saver *s = calloc(1, sizeof *s);
	int r = 0;

	if (!s)
		return base_no_memory(err);
	saver_init_locks(s);
	s->pid = getpid();
	s->store = o->store;
	s->options = *o;
	s->space.warn_free = o->warn_free;
	s->run = strdup(o->run ? o->run : "");
	s->plans = save_plan_cache_new();
	if (!s->run || !s->plans)
		r = base_no_memory(err);
	if (r == 0 && (o->world == 0 || o->rank >= o->world))
		r = base_error_set(err, -EINVAL, "there is no rank %u in a world of %u", o->rank, o->world);
	if (r == 0)
		r = saver_keep_init(&s->keep, o->keep, o->nkeep, err);
	if (r == 0)
		r = saver_set_mesh(s, o->mesh, err);
	if (r == 0)
		r = saver_launch(s, o->launch_id, err);
	if (r == 0)
		r = saver_start(s, err);
	s->options.run = s->options.launch_id = NULL;
	s->options.keep = NULL;
	if (r < 0) {
		saver_stop(s);
		saver_release(s);
		return r;
	}
	*ret_s = s;
	return 0;
}

int save_saver_close(struct save_saver *s, struct base_error *err)
{
	int r = saver_check(s, err);
	bool first;

	if (r < 0)
		return r;
	pthread_mutex_lock(&s->lock);
	first = !s->closing;
	s->closing = true;
	while (!first && !s->closed) /* another thread is at it */
		pthread_cond_wait(&s->callers, &s->lock);
	pthread_mutex_unlock(&s->lock);
	if (!first)
		return 0;
	saver_stop(s);
	commit_launch_close(base_steal(s->launch));
	device_ring_free(base_steal(s->ring)); /* nothing is in it; a handle may live on for long */
	pthread_mutex_lock(&s->lock);
	s->closed = true;
	pthread_cond_broadcast(&s->callers);
	r = s->first_r;
	if (r < 0 && err)
		*err = s->first_err;
	if (s->unseen && (r == 0 || s->unseen->number < s->first_failed)) {
		r = s->unseen->r;
		if (err)
			*err = s->unseen->err;
	}
	pthread_mutex_unlock(&s->lock);
	return r;
}

void save_saver_free(struct save_saver *s)
{
	if (!s || save_saver_is_child(s))
		return;
	save_saver_close(s, NULL);
	saver_release(s);
}
