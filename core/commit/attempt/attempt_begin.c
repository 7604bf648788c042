/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_begin: how an attempt begins: its step and name, the list, and the file `begin`, which the first rank to come
 * puts. The others read it, and compare it with what their caller wants to save. */
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/commit/attempt/attempt_internal.h"
#include "core/commit/list/list_facts.h"

#define MEET_TRIES 16u

/* ---- step and name, of a job ---- */

static uint64_t step_after(uint64_t step) { return step == PROTO_NONE ? 0 : base_min(step, COMMIT_JOB_STEP_MAX) + 1; }

/* Of a job of one rank, the last step taken, in the order of the saves: by a commit, by an unnumbered save that was
 * aborted (maybe because another writer has its step), and by one that is not decided. */
static uint64_t last_step(struct commit_launch *l)
{
	uint64_t last = l->last_step;
	bool settled = true;
	size_t left = 0;

	for (size_t i = 0; i < l->nbegun; i++) {
		struct launch_begun b = l->begun[i];
		char name[PROTO_ATTEMPT_MAX];
		enum commit_attempt_state state;

		attempt_name_make(l->name, b.step, b.try, name);
		state = commit_list_attempt(l->list, name, NULL, NULL);
		if (state != COMMIT_ATTEMPT_ABORTED || b.unnumbered)
			last = last == PROTO_NONE ? b.step : base_max(last, b.step);
		settled &= state != COMMIT_ATTEMPT_UNDECIDED || b.position < commit_list_first(l->list); /* collected */
		if (settled)
			l->last_step = last;
		else
			l->begun[left++] = b;
	}
	l->nbegun = left;
	return last;
}

/* Its step, its name and its place among this rank's saves. */
static int job_name(struct commit_attempt *a, uint64_t wanted, struct base_error *err)
{
	struct commit_launch *l = a->launch;
	int r;

	a->unnumbered = wanted == PROTO_NONE;
	a->step = a->unnumbered ? step_after(last_step(l)) : wanted;
	if (a->step > COMMIT_JOB_STEP_MAX)
		return base_error_set(err, -EINVAL, "run %s: a job's steps go from 0 to 2^44-1", a->run);
	if (l->world == 1 && base_array_room(l->begun, l->begun_room, l->nbegun + 1) < 0)
		return base_no_memory_for(err, "run %s", a->run);
	r = attempt_try_take(a, err);
	if (l->world == 1 && a->name[0])
		l->begun[l->nbegun++] = (struct launch_begun){a->step, a->try, commit_list_next(l->list),
			a->unnumbered};
	return r;
}

/* ---- begin ---- */

/* Against the newest state: not aborted yet, and the step free or to be replaced. */
static int begin_check(struct commit_attempt *a, uint64_t wanted, struct base_error *err)
{
	const struct commit_list_step *now;
	int read = commit_list_refresh(a->list, err), r;

	/* also where it cannot be read: it is a try */
	r = (a->launch->alone ? attempt_alone_name : job_name)(a, wanted, read < 0 ? NULL : err);
	if (read < 0)
		return read;
	if (r == 0)
		r = attempt_outcome_known(a, NULL, err);
	if (r == 0)
		r = commit_list_know_step(a->list, a->step, err);
	if (r == 0)
		r = commit_list_sync(a->list, err);
	if (r)
		return r < 0 ? r : base_error_set(err, -EEXIST, "%s: attempt %s is committed already", a->run, a->name);
	now = commit_list_find(a->list, a->step);
	if (now && !a->replace)
		return base_error_set(err, -EEXIST, "%s has a step %llu already, and replace was not asked for", a->run,
			(unsigned long long)a->step);
	if (now && !a->keep_facts && (r = commit_list_unpinned(a->list, now, "replaced", err)) < 0)
		return r;
	a->replaces = now ? now->entry : PROTO_NONE;
	a->position = commit_list_next(a->list);
	return 0;
}

static int begin_put(struct commit_attempt *a, const struct base_digest *mesh, struct base_error *err)
{
	uint32_t ncommons = a->commons ? a->commons->ngroups : 0;
	base_cleanup_free struct proto_common *commons = calloc(ncommons + 1, sizeof *commons);
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct proto_begin begin = {.run = a->run, .attempt = a->name, .step = a->step, .mesh = *mesh,
		.world = a->launch->world, .alone = a->launch->alone, .commons = commons, .ncommons = ncommons};
	int r = commons ? 0 : -ENOMEM;

	if (a->launch->alone || a->store->info.list_3)
		begin.position = a->position;
	if (!a->launch->alone) {
		begin.replace = a->replace;
		begin.replaces = a->replaces;
		begin.rank = a->launch->rank;
		begin.host = store_hostname();
		begin.time_ns = base_realtime_ns();
	}
	if (r == 0 && ncommons)
		check_commons_bounded(a->commons, commons);
	if (r == 0)
		r = proto_begin_encode(&begin, &body);
	if (r < 0)
		return base_error_set(err, r, "run %s: the file begin cannot be encoded: %s", a->run,
			base_error_name(r));
	return commit_attempt_put(a, "begin", STORE_RECORD_BEGIN, &body, err);
}

/* A rank that finds another value than its own says which rank said what. */
static int begin_compare(struct commit_attempt *a, const struct proto_begin *m, const struct base_digest *mesh,
	struct base_error *err)
{
	const char *host = m->host && m->host[0] ? m->host : "?";

	if (m->world != a->launch->world)
		return base_error_set(err, -EINVAL,
			"this rank was started with world size %u, rank %u on %s with %u", a->launch->world, m->rank,
			host, m->world);
	if (m->step != a->step)
		return base_error_set(err, -EINVAL, "this rank saves step %llu, rank %u on %s saves step %llu",
			(unsigned long long)a->step, m->rank, host, (unsigned long long)m->step);
	if (!base_digest_equal(&m->mesh, mesh))
		return base_error_set(err, -EINVAL, "this rank's mesh differs from that of rank %u on %s", m->rank,
			host);
	if (m->alone)
		return base_error_set(err, -EINVAL, "a writer alone on %s has begun an attempt of this name", host);
	if (m->replace != a->replace)
		return base_error_set(err, -EINVAL,
			m->replace ? "rank %u on %s asked to replace an existing step, this rank did not"
				   : "this rank asked to replace an existing step, rank %u on %s did not",
			m->rank, host);
	a->replaces = m->replaces; /* what the first rank to come saw counts for all */
	return check_commons_compare(a->commons, m->commons, m->ncommons, m->rank, host, err);
}

/* Reads this rank's list anew if it began behind what the first rank to come had read: a decision may be between. */
static int begin_position(struct commit_attempt *a, const struct proto_begin *m, struct base_error *err)
{
	int r = 0;

	if (!a->store->info.list_3)
		return 0;
	a->position = m->position;
	pthread_mutex_lock(&a->launch->lock);
	if (commit_list_first(a->list) > a->position)
		r = commit_list_reopen(a->list, err);
	pthread_mutex_unlock(&a->launch->lock);
	return r;
}

/* 1: read and the same. 0: there is none. */
static int begin_read(struct commit_attempt *a, const struct base_digest *mesh, struct base_error *err)
{
	struct proto_begin begin = {0};
	char name[STORAGE_NAME_MAX];
	int r;

	snprintf(name, sizeof name, "incoming/%s/%s/begin", a->run, a->name);
	r = store_record_load(a->store, name, STORE_RECORD_BEGIN, proto_begin_decode, &begin, name, err);
	if (r == -ENOENT)
		return 0;
	if (r < 0 && r != -BASE_EVERSION && !store_no_directory(a->store, r, err))
		base_error_set(err, r, "%s: %s", name, base_error_name(r));
	if (r == 0)
		r = begin_compare(a, &begin, mesh, err);
	if (r == 0)
		r = begin_position(a, &begin, err);
	if (r == 0)
		r = attempt_folder_sync(a, err);
	proto_begin_release(&begin);
	return r < 0 ? r : 1;
}

/* model: begin. The first to come puts, all others read; a folder that goes meanwhile was of a decided attempt. */
static int begin_meet(struct commit_attempt *a, const struct base_digest *mesh, struct base_error *err)
{
	for (unsigned i = 0; i < MEET_TRIES; i++) {
		int r = a->launch->alone ? 0 : begin_read(a, mesh, err);

		if (r)
			return r < 0 ? r : 0;
		r = begin_put(a, mesh, err);
		if (r != -EEXIST)
			return r;
		if (a->launch->alone) {
			a->begun = false; /* the folder is another writer's */
			return r;
		}
	}
	return base_error_set(err, -EIO, "incoming/%s/%s/begin exists and cannot be read", a->run, a->name);
}

/* model: come */
static int begin_start(struct commit_attempt *a, const struct commit_attempt_save *o, struct base_error *err)
{
	struct commit_launch *l = a->launch;
	int r;

	pthread_mutex_lock(&l->lock);
	commit_launch_aborts_put(l); /* what cannot be written yet is kept on */
	r = begin_check(a, o->step, err);
	pthread_mutex_unlock(&l->lock);
	a->begun = a->name[0] != 0;
	return r == 0 ? begin_meet(a, &o->mesh, err) : r;
}

/* Gives up what has begun. Returns why: another rank's reason, if that came first. */
static int begin_fail(struct commit_attempt *a, int r, const struct base_error *why, struct base_error *err)
{
	int ended = r == -BASE_EABORTED || !a->begun ? 1 : attempt_give_up_own(a, r, why->text, NULL, err);

	a->decided = true; /* as far as this rank can */
	return ended < 0 ? ended : base_error_set(err, r, "%s", why->text);
}

int commit_attempt_begin(struct commit_launch *l, const struct commit_attempt_save *o, struct commit_attempt **ret_a,
	struct base_error *err)
{
	struct base_error why = {0};
	struct commit_attempt *a;
	int r = commit_launch_check(l, err);

	if (r < 0)
		return r;
	if (o->step == PROTO_NONE && l->world > 1)
		return base_error_set(err, -EINVAL,
			"run %s: a save of %u ranks needs the number of its step (the trainer's count of iterations), "
			"so that all ranks mean the same one", l->run, l->world);
	if (o->facts && !l->store->info.list_4)
		return base_error_set(err, -ENOTSUP, "%s: an earlier vckpt made this store: its lists have no pins, "
			"tags, or attributes that are set later (the word list-4); " STORE_COPY_ADVICE, l->store->path);
	a = commit_launch_abort_room(l) < 0 ? NULL : calloc(1, sizeof *a);
	if (!a)
		return base_no_memory_for(err, "run %s", l->run);
	pthread_mutex_init(&a->lock, NULL);
	a->store = l->store;
	a->launch = l;
	a->list = l->list;
	a->position = PROTO_NONE;
	a->replace = o->replace;
	a->facts = o->facts;
	a->keep_facts = o->keep_facts;
	a->thinned = o->thinned;
	a->nthinned = o->nthinned;
	a->rank = l->rank;
	a->world = l->alone && o->world ? o->world : l->world;
	a->count = o->count;
	a->time_ns = o->time_ns;
	a->commons = l->world > 1 ? o->commons : NULL;
	snprintf(a->run, sizeof a->run, "%s", l->run);
	commit_launch_attempt_begins(l);
	r = begin_start(a, o, &why);
	if (r < 0) {
		r = begin_fail(a, r, &why, err);
		commit_attempt_free(a);
		return r;
	}
	*ret_a = a;
	return 0;
}
