/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_resume: takes over the packs of an earlier copy of this step that was killed, or whose network or disk failed.
 * The attempt of that copy is named after the step, as this one's is (docs/copy.md).
 *
 *   its writer is dead      by its heartbeat, as the collector judges (gc.c)
 *   abort                   by the collector's rules. From that entry on no one needs the packs, and no one ever will:
 *                           a writer that was only silent finds the entry, and its step stays invisible
 *   packs                   each is moved to a name of this attempt, whose pack it is then (storage.h, take). So
 *                           collections, other copies and that writer find it, or find it gone, as after a collection
 *
 * All ranks' packs are taken before anything is written: if this copy is killed, too, the next one finds them with its
 * packs. What is in them is found by their footers, and hashed before it is used (core/save/write/taken.c).
 *
 * That the attempt never committed has to be certain: another step may have the packs of one that did. So its folder
 * is there, this user's own; the list was read from its begin on; and no other file says that the list lost its end.
 * And as the collector does, it leaves a pack that a visible step of any run names, or one that a base has, whatever
 * the lists say of its attempt: a store may be a stranger's. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/incoming/incoming.h"
#include "core/copy/copy_internal.h"
#include "core/upkeep/lost.h"
#include "core/upkeep/usage.h"

#define RESUME_SILENT_MS 20000u /* a heartbeat of another host that does not move for so long has stopped */
#define RESUME_LOOK_NS 250000000

struct resume {
	struct copy_work *k;
	struct commit_launch_info *first; size_t nfirst; /* heartbeats, as they were when it began */
	uint64_t end_ms;                /* until then each of another host has to move */
	bool waits;                     /* that was said */
	struct upkeep_usage usage; bool known; /* known: it was read, since attempts were aborted */
};

static bool resume_cancelled(const struct copy_work *k)
{
	return k->c->options->cancelled && k->c->options->cancelled();
}

/* ---- the attempt ---- */

/* Of this step, by another copy of it? */
static bool resume_is_of(const struct copy_work *k, const char *attempt)
{
	const char *own = commit_attempt_name(k->attempt);

	return strlen(attempt) > 16 && strcmp(attempt + 16, own + 16) == 0 && strcmp(attempt, own) != 0;
}

static int resume_look(void *arg, const struct storage_entry *e)
{
	return !e->foreign && resume_is_of(arg, strrchr(e->name, '/') + 1);
}

static const struct commit_launch_info *launch_among(const struct commit_launch_info *all, size_t n,
	const char *attempt)
{
	for (size_t i = 0; i < n; i++)
		if (strncmp(all[i].launch, attempt, 16) == 0)
			return &all[i];
	return NULL;
}

/* By another look, since a listing may miss a heartbeat that is between two numbers: 1: dead; 0: not; -EAGAIN: it is
 * another host's, or of this one before it was started anew, and has not moved yet. */
static int launch_dead(const struct resume *x, const char *attempt)
{
	const struct commit_launch_info *before = launch_among(x->first, x->nfirst, attempt), *now;
	base_cleanup_free struct commit_launch_info *all = NULL;
	size_t n;

	if (commit_launches(x->k->c->to, &all, &n, NULL) < 0)
		return 0;
	now = launch_among(all, n, attempt);
	if (!now || now->state != COMMIT_UNKNOWN)
		return now ? now->state == COMMIT_DEAD : !before || before->state == COMMIT_DEAD;
	if (!before || before->number != now->number)
		return 0;
	return base_monotonic_ms() >= x->end_ms ? 1 : -EAGAIN;
}

static bool resume_dead(struct resume *x, const char *attempt)
{
	const struct timespec pause = {.tv_nsec = RESUME_LOOK_NS};
	int r;

	while ((r = launch_dead(x, attempt)) == -EAGAIN && !resume_cancelled(x->k)) {
		if (!x->waits)
			base_info("%s/%" PRIu64 ": waits %u s for a heartbeat of attempt %s, an earlier copy of it",
				x->k->c->run, x->k->step->step, RESUME_SILENT_MS / 1000, attempt);
		x->waits = true;
		nanosleep(&pause, NULL);
	}
	return r == 1;
}

static bool resume_may(struct resume *resume, const struct commit_incoming *x)
{
	const struct copy_work *k = resume->k;
	struct storage *s = k->c->to->storage;
	struct storage_owner owner;
	char begin[STORAGE_NAME_MAX];

	snprintf(begin, sizeof begin, "incoming/%s/%s/begin", x->run, x->attempt);
	return strcmp(x->run, k->c->run) == 0 && resume_is_of(k, x->attempt) && x->begun && x->begin.alone &&
		x->begin.step == k->step->step && x->state != COMMIT_ALIVE &&
		s->ops->owner(s, begin, &owner) == 0 && owner.uid == geteuid() &&
		resume_dead(resume, x->attempt);
}

static void resume_lost(void *arg, const char *file, const char *run, const char *text)
{
	(void)file;
	(void)run;
	(void)text;
	*(bool *)arg = true;
}

/* true: it is aborted, durably, and never committed. */
static bool resume_abort(const struct copy_work *k, const struct commit_incoming *x, struct base_error *err)
{
	struct store *s = k->c->to;
	struct commit_list *l = NULL;
	bool lost = false;
	struct upkeep_lost_question q = {s, &l, 1, x->run, resume_lost, &lost};
	int r = commit_list_open(s, x->run, true, &l, err);

	if (r == 0)
		r = upkeep_lost_find(&q, err);
	if (r == 0 && (lost || commit_list_damaged(l) || commit_list_newer(l, NULL, err) < 0 ||
		commit_list_first(l) > x->begin.position))
		r = -EALREADY;
	if (r == 0)
		r = commit_list_abort(l, x->attempt, 0, "its writer's heartbeat has stopped; another copy goes on with "
			"what it has written", err);
	if (r >= 0)
		r = commit_list_sync(l, err);
	commit_list_close(l);
	return r == 0;
}

/* ---- its packs ---- */

static int resume_keep(struct copy_work *k, uint32_t line, const char *pack)
{
	if (base_array_more(k->taken, k->ntaken) < 0)
		return -ENOMEM;
	k->taken[k->ntaken].line = line;
	memccpy(k->taken[k->ntaken++].pack, pack, 0, PACK_NAME_MAX);
	return 0;
}

/* What is in records is little, and written again. */
static int resume_pack(struct copy_work *k, const char *attempt, const struct upkeep_usage_file *f)
{
	char pack[PACK_NAME_MAX];
	struct pack_name name;
	int r;

	if (!f->pack || f->steps || f->base || pack_name_parse(f->name, &name) < 0 ||
		strcmp(name.attempt, attempt) != 0 || strcmp(name.class, "meta") == 0)
		return 0;
	r = commit_attempt_pack_take(k->attempt, f->name, pack);
	return r == 0 ? resume_keep(k, name.rank % k->m.world, pack) : r == -ENOENT ? 0 : r;
}

static int resume_from(struct resume *x, const struct commit_incoming *from, struct base_error *err)
{
	const struct upkeep_usage_question q = {.store = x->k->c->to};
	int r = 0;

	if (!x->known)
		r = upkeep_usage_read(&q, &x->usage, err);
	x->known = true;
	for (uint32_t i = 0; r == 0 && i < x->usage.nfiles; i++)
		r = resume_cancelled(x->k) ? -EINTR : resume_pack(x->k, from->attempt, &x->usage.files[i]);
	if (r == 0)
		commit_folder_delete(x->k->c->to, from->run, from->attempt, NULL);
	return r;
}

static int resume_all(struct resume *x)
{
	struct store *s = x->k->c->to;
	struct commit_incoming *all;
	struct base_error why = {0};
	size_t n;
	int r = commit_launches(s, &x->first, &x->nfirst, &why);

	x->end_ms = base_monotonic_ms() + RESUME_SILENT_MS;
	if (r == 0)
		r = commit_incoming_read(s, &all, &n, &why);
	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++)
		if (resume_may(x, &all[i]) && resume_abort(x->k, &all[i], &why))
			r = resume_from(x, &all[i], &why);
	commit_incoming_free(all, n);
	return r;
}

int copy_resume(struct copy_work *k, struct base_error *err)
{
	struct storage *s = k->c->to->storage;
	struct resume x = {.k = k};
	char dir[STORAGE_NAME_MAX];
	int r;

	snprintf(dir, sizeof dir, "incoming/%s", k->c->run);
	r = k->c->options->plain ? 0 : storage_list_dirs(s, dir, resume_look, k);
	if (r > 0)
		r = resume_all(&x);
	upkeep_usage_release(&x.usage);
	free(x.first);
	if (k->ntaken)
		base_info("%s/%" PRIu64 ": an earlier copy of it was not finished: this one goes on with its %zu %s",
			k->c->run, k->step->step, k->ntaken, k->ntaken == 1 ? "pack" : "packs");
	if (resume_cancelled(k))
		return base_error_set(err, -EINTR, "interrupted");
	return r == -ENOMEM ? base_no_memory(err) : 0;
}
