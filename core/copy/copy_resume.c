/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_resume: what an earlier copy of this step has written, which was killed, or whose network or disk failed. Its
 * attempt is named after the step, as this one's is (docs/copy.md).
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
 * is there, this user's own; the list was read from its begin on; and no other file says that the list lost its end. */
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

#define RESUME_SILENT_MS 20000u /* a heartbeat of another host that does not move for so long has stopped */
#define RESUME_LOOK_NS 250000000

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

/* The number of the launch's heartbeat; false: it has none. */
static bool launch_beats(const struct copy_work *k, const char *attempt, uint64_t *ret_number)
{
	base_cleanup_free struct commit_launch_info *all = NULL;
	bool found = false;
	size_t n;

	if (commit_launches(k->c->to, &all, &n, NULL) < 0)
		return false;
	for (size_t i = 0; i < n; i++)
		if (strncmp(all[i].launch, attempt, 16) == 0) {
			*ret_number = all[i].number;
			found = true;
		}
	return found;
}

/* Another host's, or of this one before it was started anew: its number has to stand still. */
static bool launch_stopped(const struct copy_work *k, const char *attempt)
{
	uint64_t first, now, end = base_monotonic_ms() + RESUME_SILENT_MS;
	const struct timespec pause = {.tv_nsec = RESUME_LOOK_NS};

	if (!launch_beats(k, attempt, &first))
		return false;
	base_info("waiting for %u s whether the copy %s is dead", RESUME_SILENT_MS / 1000, attempt);
	while (base_monotonic_ms() < end && !resume_cancelled(k)) {
		nanosleep(&pause, NULL);
		if (!launch_beats(k, attempt, &now) || now != first)
			return false;
	}
	return !resume_cancelled(k);
}

static bool resume_may(const struct copy_work *k, const struct commit_incoming *x)
{
	struct storage *s = k->c->to->storage;
	struct storage_owner owner;
	char begin[STORAGE_NAME_MAX];

	snprintf(begin, sizeof begin, "incoming/%s/%s/begin", x->run, x->attempt);
	return strcmp(x->run, k->c->run) == 0 && resume_is_of(k, x->attempt) && x->begun && x->begin.alone &&
		x->begin.step == k->step->step && x->begin.world == k->m.world &&
		s->ops->owner(s, begin, &owner) == 0 && owner.uid == geteuid() &&
		(x->state == COMMIT_DEAD || (x->state == COMMIT_UNKNOWN && launch_stopped(k, x->attempt)));
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

/* A further one of that rank and class has the next number that is the rank's (commit_attempt_pack_open). The first may
 * be missing: it is sealed last where it was begun anew. 0: it is there. */
static int resume_pack(const struct copy_work *k, const char *attempt, uint32_t line, const char *class,
	uint64_t number, char pack[static PACK_NAME_MAX])
{
	uint64_t rank = line + number * k->m.world, size;
	char path[STORAGE_NAME_MAX];
	int r = rank > UINT32_MAX ? -ENOENT : pack_name_make(attempt, (uint32_t)rank, class, pack);

	if (r == 0)
		r = pack_path(pack, path);
	return r < 0 ? r : storage_size(k->c->to->storage, path, &size);
}

/* The last one first: if this copy is killed meanwhile, those that are left have the lowest numbers. */
static int resume_class(struct copy_work *k, const char *attempt, uint32_t line, const char *class)
{
	char from[PACK_NAME_MAX], name[PACK_NAME_MAX];
	uint64_t n = 1;
	int r = 0;

	while (resume_pack(k, attempt, line, class, n, from) == 0)
		n++;
	while (r == 0 && n-- > 0) {
		r = resume_pack(k, attempt, line, class, n, from);
		if (r == 0)
			r = commit_attempt_pack_take(k->attempt, from, class, name);
		r = r == 0 ? resume_keep(k, line, name) : r == -ENOENT ? 0 : r;
	}
	return r;
}

static int resume_ranks(struct copy_work *k, const char *attempt, const char *class)
{
	int r = 0;

	for (uint32_t line = 0; r == 0 && line < k->m.nranks; line++) {
		commit_attempt_rank(k->attempt, line);
		r = resume_cancelled(k) ? -EINTR : resume_class(k, attempt, line, class);
	}
	return r;
}

/* Classes are those of the source's packs; what is in records is little, and written again. */
static int resume_from(struct copy_work *k, const struct commit_incoming *x)
{
	struct pack_name name, before;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < k->m.npacks; i++) {
		bool seen = pack_name_parse(k->m.packs[i].pack, &name) < 0 || strcmp(name.class, "meta") == 0;

		for (uint32_t j = 0; !seen && j < i; j++)
			seen = pack_name_parse(k->m.packs[j].pack, &before) == 0 &&
				strcmp(before.class, name.class) == 0;
		if (!seen)
			r = resume_ranks(k, x->attempt, name.class);
	}
	if (r == 0)
		commit_folder_delete(k->c->to, x->run, x->attempt, NULL);
	return r;
}

static int resume_all(struct copy_work *k)
{
	struct commit_incoming *all;
	struct base_error why = {0};
	size_t n;
	int r = commit_incoming_read(k->c->to, &all, &n, &why);

	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++)
		if (resume_may(k, &all[i]) && resume_abort(k, &all[i], &why))
			r = resume_from(k, &all[i]);
	commit_incoming_free(all, n);
	return r;
}

int copy_resume(struct copy_work *k, struct base_error *err)
{
	struct storage *s = k->c->to->storage;
	char dir[STORAGE_NAME_MAX];
	int r;

	snprintf(dir, sizeof dir, "incoming/%s", k->c->run);
	r = k->c->options->plain ? 0 : storage_list_dirs(s, dir, resume_look, k);
	if (r > 0)
		r = resume_all(k);
	if (k->ntaken)
		base_info("goes on with %zu packs that an earlier copy of the step has left", k->ntaken);
	if (resume_cancelled(k))
		return base_error_set(err, -EINTR, "interrupted");
	return r == -ENOMEM ? base_no_memory(err) : 0;
}
