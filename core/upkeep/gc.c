/* SPDX-License-Identifier: Apache-2.0
 *
 * gc: the order of a collection. docs/gc.md explains on one page why it is safe.
 *
 *     lost         ends of lists that other files refer to: then nothing is collected     gc_lost_check
 *     watch        heartbeats of other hosts, for heartbeat_s by our own clock            gc_watch
 *     abort        undecided attempts whose launch is dead: `abort` entry first           gc_abort_dead     [dead]
 *     candidates   packs, manifests, marks, temporaries are listed                        commit_files_list  [cands]
 *     heartbeats   again: a pack listed above had a heartbeat before it                   gc_watch
 *     lists        of all runs, made durable (invariant 6)                                gc_lists_read     [top]
 *     incoming     folders and bases                                                      commit_folders_read [inc]
 *     lists        again                                                                  gc_lists_read     [again]
 *     plan         a sweep that changes nothing, where the caller wants to hear of it first    gc_plan
 *     sweep        marks what nothing reaches, deletes what was marked a grace period ago gc_sweep [mark, sweep]
 *     entries      of lists, that later snapshots cover                                   gc_entries
 *
 * It keeps what is reached at either of the two readings, or by a base that an undecided attempt named (invariant 7);
 * and what belongs to an attempt that was undecided at the first reading, unless the attempt has neither folder nor
 * heartbeat. A writer of a pack has both until its attempt is decided: heartbeat and begin are durable before the first
 * pack, and are deleted after the decision. Attempts that the first pass aborted are decided when the main pass reads
 * the lists.
 *
 * A collection that was stopped leaves marks and half-deleted folders, which the next one finds. Two collections at
 * once do no harm, because each follows the rules by itself. */
#include "core/upkeep/gc.h"

#include <stdio.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/upkeep/gc_internal.h"
#include "core/upkeep/lost.h"

void gc_progress(struct gc *g)
{
	if (g->done < g->total)
		g->done++;
	if (g->o->progress)
		g->o->progress(g->o->arg, g->done, g->total);
}

void gc_report(struct gc *g, const char *what, const char *name, uint64_t bytes, const char *detail)
{
	if (g->o->report)
		g->o->report(g->o->arg, what, name, bytes, detail ? detail : "");
}

void gc_reason(struct gc *g, const char *what, const char *why, uint64_t files, uint64_t bytes, int64_t due_ns)
{
	struct upkeep_gc_result *all = &g->result;
	struct upkeep_gc_reason *x = all->reasons;

	while (x < all->reasons + all->nreasons && (strcmp(x->what, what) != 0 || strcmp(x->why, why) != 0))
		x++;
	if (x == all->reasons + UPKEEP_GC_REASONS)
		x--;
	if (x == all->reasons + all->nreasons) {
		*x = (struct upkeep_gc_reason){.what = what, .due_ns = due_ns};
		snprintf(x->why, sizeof x->why, "%s", why);
		all->nreasons++;
	}
	x->files += files;
	x->bytes += bytes;
	x->due_ns = x->due_ns > due_ns ? x->due_ns : due_ns;
}

/* ---- heartbeats ---- */

bool gc_launch_alive(const struct gc *g, const char *launch)
{
	for (size_t i = 0; i < g->launches.n; i++)
		if (strncmp(g->launches.all[i].launch, launch, 16) == 0 && g->launches.all[i].state == COMMIT_ALIVE)
			return true;
	return false;
}

/* Not inlined: with sanitizers and -O3 gcc 12 takes the inlined comparison for one of no bytes, and warns. */
static __attribute__((noinline)) bool launch_same(const struct commit_launch_info *a,
	const struct commit_launch_info *b)
{
	return strcmp(a->launch, b->launch) == 0 && strcmp(a->host, b->host) == 0;
}

static const struct commit_launch_info *launch_find(const struct gc_launches *l, const struct commit_launch_info *like)
{
	for (size_t i = 0; i < l->n; i++)
		if (launch_same(&l->all[i], like))
			return &l->all[i];
	return NULL;
}

/* Is there an undecided attempt without any heartbeat? A listing may have missed a heartbeat that was between two
 * numbers: such a launch is watched, too. */
static bool folder_needs_look(struct gc *g)
{
	for (size_t i = 0; i < g->folders.n; i++) {
		struct commit_folder *f = &g->folders.all[i];
		bool seen = false;

		for (size_t k = 0; k < g->launches.n; k++)
			seen |= strcmp(g->launches.all[k].launch, f->launch) == 0;
		if (!seen && !gc_decided(g, f->info.attempt, false))
			return true;
	}
	return false;
}

/* An attempt may have ended since its folder was seen; then its heartbeat and its folder are deleted, in any order. */
static int folders_refresh(struct gc *g)
{
	int r;

	if (!folder_needs_look(g))
		return 0;
	commit_folders_release(&g->folders);
	r = commit_folders_read(g->store, &g->folders, g->err);
	return r < 0 ? r : gc_lists_read(g, true);
}

/* The state of a launch, from this look at its heartbeat and the look before. */
static enum commit_liveness watch_judge(const struct commit_launch_info *before, const struct commit_launch_info *now)
{
	if (now->state != COMMIT_UNKNOWN)
		return now->state;
	return before && before->number == now->number ? before->state : COMMIT_ALIVE;
}

/* If one rank of a launch is alive, its other ranks are not waited for: idle ranks beat seldom. `all` is sorted by
 * launch. */
static void watch_launches(struct commit_launch_info *all, size_t n)
{
	for (size_t i = 0, end; i < n; i = end) {
		bool alive = false;

		for (end = i; end < n && strcmp(all[end].launch, all[i].launch) == 0; end++)
			alive |= all[end].state == COMMIT_ALIVE;
		for (size_t k = i; alive && k < end; k++)
			if (all[k].state == COMMIT_UNKNOWN)
				all[k].state = COMMIT_ALIVE;
	}
}

int gc_launches_look(struct store *s, bool again, struct gc_launches *l, bool *ret_unknown, struct base_error *err)
{
	struct gc_launches now;
	int r = commit_launches(s, &now.all, &now.n, err);

	if (r < 0)
		return r;
	for (size_t i = 0; again && i < now.n; i++)
		now.all[i].state = watch_judge(launch_find(l, &now.all[i]), &now.all[i]);
	watch_launches(now.all, now.n);
	*ret_unknown = false;
	for (size_t i = 0; i < now.n; i++)
		*ret_unknown |= now.all[i].state == COMMIT_UNKNOWN;
	free(l->all);
	*l = now;
	return 0;
}

/* Judges every launch: those of this machine at once; a heartbeat of another host has heartbeat_s to move. One that did
 * not move the first time is not waited for again. */
static int gc_watch(struct gc *g, bool again)
{
	uint64_t end = base_monotonic_ms() + base_min(g->o->heartbeat_s, 86400) * 1000, now, wait = 10;
	bool unknown;
	int r = gc_launches_look(g->store, again, &g->launches, &unknown, g->err);

	while (r == 0 && (unknown || folder_needs_look(g)) && (now = base_monotonic_ms()) < end) {
		usleep((useconds_t)base_min(end - now, wait) * 1000);
		wait = base_min(2 * wait, 250);
		if (!again)
			r = folders_refresh(g);
		if (r == 0)
			r = gc_launches_look(g->store, true, &g->launches, &unknown, g->err);
	}
	for (size_t i = 0; r == 0 && i < g->launches.n; i++)
		if (g->launches.all[i].state == COMMIT_UNKNOWN)
			g->launches.all[i].state = COMMIT_DEAD; /* its heartbeat has not moved */
	return r;
}

/* ---- the dead ---- */

/* model: dead */
static int abort_folder(struct gc *g, const struct commit_folder *f)
{
	char name[STORAGE_NAME_MAX], reason[160];
	struct commit_list *l = upkeep_list_among(g->lists, g->nlists, f->info.run);
	int r = 0;

	snprintf(name, sizeof name, "%s/%s", f->info.run, f->info.attempt);
	snprintf(reason, sizeof reason, "its writer's heartbeat has stopped, says the collector on %s",
		store_hostname());
	if (g->o->dry_run) {
		r = gc_names_add(&g->aborted, f->info.attempt);
	} else {
		if (!l)
			r = commit_list_open(g->store, f->info.run, true, &l, g->err);
		if (r == 0)
			r = commit_list_abort(l, f->info.attempt, 0, reason, g->err);
		if (l && l != upkeep_list_among(g->lists, g->nlists, f->info.run))
			commit_list_close(l);
	}
	if (r == -EALREADY)
		return 0; /* committed meanwhile */
	if (r < 0)
		return base_error_prefix(g->err, r, "attempt %s cannot be aborted", name);
	g->result.aborted++;
	gc_report(g, "abort", name, 0, reason);
	return 0;
}

/* ---- ends of lists that are lost ---- */

struct lost { struct gc *g; char run[PROTO_RUN_MAX + 1], file[STORAGE_NAME_MAX], text[400]; };

static void lost_found(void *arg, const char *file, const char *run, const char *text)
{
	struct lost *l = arg;

	gc_report(l->g, "damage", file, 0, text);
	if (l->run[0])
		return;
	snprintf(l->run, sizeof l->run, "%s", run);
	snprintf(l->file, sizeof l->file, "%s", file);
	snprintf(l->text, sizeof l->text, "%s", text);
}

/* A commit that was lost with the end of its list is not seen there, and its packs would seem to be unneeded. This
 * check comes before the first entry is put, because that entry would take the place of a lost one. */
static int gc_lost_check(struct gc *g)
{
	struct lost l = {.g = g};
	struct upkeep_lost_question q = {g->store, g->lists, g->nlists, NULL, lost_found, &l};
	int r = upkeep_lost_find(&q, g->err);

	if (r < 0 || !l.run[0])
		return r < 0 && !g->err->code ? base_error_set(g->err, r, "%s", base_error_name(r)) : r;
	return base_error_set(g->err, -BASE_EDAMAGED,
		"run %s: %s: %s. What the lost entries need is not known, so nothing was deleted. vckpt mend --from "
		"COPY brings the entries back from a copy of the store; without a copy vckpt mend lets the run go on",
		l.run, l.file, l.text);
}

/* model: dead. Nothing that was announced is deleted before the list says `abort`. */
static int gc_abort_dead(struct gc *g)
{
	int r = gc_lists_read(g, true);

	if (r == 0)
		r = gc_lost_check(g);
	if (r == 0)
		r = commit_folders_read(g->store, &g->folders, g->err);
	if (r == 0)
		r = gc_watch(g, false);
	if (r == 0)
		r = gc_lists_read(g, true); /* attempts may have been decided while we watched */
	for (size_t i = 0; r == 0 && i < g->folders.n; i++)
		if (!gc_decided(g, g->folders.all[i].info.attempt, false) &&
			!gc_launch_alive(g, g->folders.all[i].launch))
			r = abort_folder(g, &g->folders.all[i]);
	commit_folders_release(&g->folders);
	return r;
}

/* ---- main pass ---- */

/* model: none */
static int gc_writers_none(struct gc *g)
{
	for (size_t i = 0; g->o->grace_s == 0 && i < g->launches.n; i++)
		if (g->launches.all[i].state == COMMIT_ALIVE)
			return base_error_set(g->err, -BASE_EBUSY,
				"gc --grace 0 refused: host %s is saving run %s. Try again when it has ended, or "
				"give a grace period",
				g->launches.all[i].host, g->launches.all[i].run[0] ? g->launches.all[i].run : "?");
	return 0;
}

/* model: cands, top, again */
static int gc_read(struct gc *g)
{
	int r;

	for (size_t i = 0; i < g->nlists; i++)
		g->known[i].before = commit_list_next(g->lists[i]);
	r = commit_files_list(g->store, "", &g->files, g->err);
	if (r == 0)
		r = gc_watch(g, true);
	if (r == 0)
		r = gc_writers_none(g);
	if (r == 0)
		r = gc_lists_read(g, true);
	g->total = g->files.n;
	for (size_t i = 0; i < g->nlists; i++)
		g->total += commit_list_count(g->lists[i]);
	if (r == 0)
		r = gc_reach_commits(g);
	if (r == 0)
		r = commit_folders_read(g->store, &g->folders, g->err);
	if (r == 0)
		r = gc_lists_read(g, false);
	if (r == 0)
		r = gc_reach_commits(g);
	if (r == 0)
		r = gc_reach_bases(g);
	return r;
}

static void gc_release(struct gc *g)
{
	commit_files_release(&g->files);
	for (size_t i = 0; i < g->nlists; i++)
		commit_list_close(g->lists[i]);
	free(g->lists);
	free(g->known);
	free(g->launches.all);
	commit_folders_release(&g->folders);
	gc_names_release(&g->packs_kept);
	gc_names_release(&g->manifests_kept);
	gc_names_release(&g->manifests_gone);
	gc_names_release(&g->aborted);
}

/* What the sweep will do, found by a sweep that changes nothing. */
static void gc_plan(struct gc *g)
{
	const struct upkeep_gc_options *o = g->o;
	struct upkeep_gc_options dry = *o;
	uint64_t aborted = g->result.aborted;

	dry.dry_run = true;
	dry.report = NULL;
	dry.progress = NULL;
	g->o = &dry;
	gc_sweep(g);
	gc_entries(g);
	o->plan(o->arg, &g->result);
	g->o = o;
	g->fault = 0;
	*g->err = (struct base_error){0};
	g->result = (struct upkeep_gc_result){.aborted = aborted};
	gc_names_release(&g->manifests_gone);
}

int upkeep_gc(struct store *s, const struct upkeep_gc_options *o, struct upkeep_gc_result *ret_r,
	struct base_error *err)
{
	struct base_error own = {0};
	struct gc g = {.store = s, .o = o, .err = err ? err : &own, .now_ns = base_realtime_ns()};
	int r = gc_abort_dead(&g);

	if (r == 0)
		r = gc_read(&g);
	if (r == 0 && o->plan)
		gc_plan(&g);
	if (r == 0) {
		gc_sweep(&g);
		gc_entries(&g);
		r = g.fault;
	}
	if (!o->dry_run)
		store_reserve_restore(s);
	if (ret_r)
		*ret_r = g.result;
	gc_release(&g);
	return r;
}
