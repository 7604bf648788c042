/* SPDX-License-Identifier: Apache-2.0
 *
 * copy: the course of a step.
 *
 *   is it there already?       a copy of this manifest, or compared by what the records of both say: equal, or
 *                              refused, or replaced
 *   an attempt of one writer   begun for the world of the source
 *   the source's records       read in one pass, and checked as vckpt verify checks them (upkeep_records_walk); each
 *                              rank's part is copied when it has been read (copy_rank.c)
 *   the commit                 the manifest is made of these parts and checked as that of any save, cover included
 *
 * The attempt is a writer's alone, so a copy disturbs no job that saves into the run. If it is killed, the next copy of
 * the step goes on with what it has written (copy_resume.c), or the collector finds it; steps that were done before are
 * done. Of two copies of a step that run at once the first to commit wins, and the other one compares its step with
 * that. */
#include "core/copy/copy_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/le.h"
#include "core/base/log.h"
#include "core/commit/list/list_facts.h"
#include "core/commit/notes/stats.h"
#include "core/save/write/catalog.h"
#include "core/step/manifest.h"

#define ORIGIN_BITS 31u
#define ORIGIN_COPY (UINT64_C(1) << (2 * ORIGIN_BITS))

/* ---- where a step came from ---- */

static uint64_t origin_of(const struct store *from, const char *run)
{
	struct base_digest digest;
	char text[16 + PROTO_RUN_MAX + 1];

	memcpy(text, from->info.id, 16);
	memccpy(text + 16, run, 0, PROTO_RUN_MAX);
	base_sha256(text, 16 + strnlen(run, PROTO_RUN_MAX), &digest);
	return base_get64(digest.bytes) >> (64 - ORIGIN_BITS);
}

static uint64_t copy_origin(const struct store *from, const char *run, const struct base_digest *manifest)
{
	return ORIGIN_COPY | origin_of(from, run) << ORIGIN_BITS |
		base_get64(manifest->bytes) >> (64 - ORIGIN_BITS);
}

bool copy_is_from(const char *attempt, const struct store *from, const char *run, const struct base_digest *manifest)
{
	static const struct base_digest any;
	uint64_t count = strlen(attempt) > 17 ? strtoull(attempt + 17, NULL, 10) : 0;
	uint64_t copy = copy_origin(from, run, manifest ? manifest : &any);

	return manifest ? count == copy : count >> ORIGIN_BITS == copy >> ORIGIN_BITS;
}

/* ---- the session ---- */

int copy_open(struct store *from, struct store *to, const struct copy_options *o, struct copy **ret_c,
	struct base_error *err)
{
	struct base_error why = {0};
	struct copy *c;

	if (memcmp(from->info.id, to->info.id, sizeof from->info.id) == 0)
		return base_error_set(err, -EINVAL, "%s and %s are the same store, or one is a copy of the other's "
			"files", from->path, to->path);
	c = calloc(1, sizeof *c);
	if (!c)
		return base_no_memory(err);
	pthread_mutex_init(&c->pace_lock, NULL);
	c->from = from;
	c->to = to;
	c->options = o;
	if (save_index_open(to, &c->index, &why) < 0) {
		c->index = NULL;
		base_debug("copying without an index: %s", why.text);
	}
	*ret_c = c;
	return 0;
}

void copy_close(struct copy *c)
{
	if (!c)
		return;
	free(c->parts);
	save_past_release(&c->past);
	commit_list_close(c->there);
	index_close(c->index);
	pthread_mutex_destroy(&c->pace_lock);
	free(c);
}

static void copy_turn_to(struct copy *c, const char *run)
{
	if (strcmp(c->run, run) == 0)
		return;
	save_past_release(&c->past);
	c->past = (struct save_past){0};
	commit_list_close(base_steal(c->there));
	snprintf(c->run, sizeof c->run, "%s", run);
}

/* ---- a step that is there ---- */

/* Reads the run's list there to its end, and what is visible under the step. NULL in *ret_there: nothing. */
static int copy_look(struct copy *c, uint64_t step, const struct commit_list_step **ret_there, struct base_error *err)
{
	int r = c->there ? commit_list_refresh(c->there, err) : commit_list_open_newest(c->to, c->run, &c->there, err);

	if (r >= 0)
		r = commit_list_know_step(c->there, step, err);
	*ret_there = r >= 0 ? commit_list_find(c->there, step) : NULL;
	return r < 0 ? r : 0;
}

/* 1: an equal step is there, which *ret_r then describes; 0: none, or one that is to be replaced; -EEXIST: another;
 * -BASE_EPINNED: one that is pinned there, whatever its facts are here. */
static int copy_is_there(struct copy *c, const struct commit_list *list, const struct commit_list_step *step,
	bool replace, struct copy_result *ret_r, struct base_error *err)
{
	const struct commit_list_step *there;
	const char *run = commit_list_run(list);
	int r = copy_look(c, step->step, &there, err);

	if (r < 0 || !there)
		return r;
	r = copy_is_from(there->commit.attempt, c->from, run, &step->commit.manifest) ? 1
		: copy_same(c->from, run, step, c->to, c->run, there, err);
	if (r == 0 && replace)
		return commit_list_unpinned(c->there, there, "replaced", err);
	if (r == 0)
		return base_error_set(err, -EEXIST, "%s has a step %" PRIu64 " of run %s that differs (--replace "
			"replaces it)", c->to->path, step->step, c->run);
	if (r < 0)
		return r;
	ret_r->outcome = COPY_EQUAL;
	ret_r->entry = there->entry;
	snprintf(ret_r->attempt, sizeof ret_r->attempt, "%s", there->commit.attempt);
	r = copy_facts(c, list, step, c->there, there, false, err);
	return r < 0 ? r : 1;
}

/* ---- the course ---- */

static int copy_ranks(struct copy_work *k, uint64_t *ret_entry, struct base_error *err)
{
	const struct upkeep_records calls = {.header = k->c->options->header, .row = copy_rank_row, .rank = copy_rank,
		.arg = k};
	struct base_error why = {0};
	int r;

	free(k->c->parts);
	k->result->parts = k->c->parts = calloc(k->m.nranks, sizeof *k->c->parts);
	if (!k->c->parts)
		return base_no_memory(err);
	k->err = err;
	r = upkeep_records_walk(k->c->from, commit_list_run(k->list), k->step, &calls, &why);
	if (r < 0 && !err->code)
		*err = why;
	if (r == 0 && k->c->options->cancelled && k->c->options->cancelled())
		r = base_error_set(err, -EINTR, "interrupted");
	return r < 0 ? r : commit_attempt_wait(k->attempt, -1, ret_entry, err);
}

/* As save_writer_commit: what the list says counts, whatever failed. */
static int copy_failed(struct copy_work *k, int r, struct base_error *why)
{
	struct base_error outcome = {0};
	int decided;

	if (r == -ENOSPC || r == -EDQUOT)
		base_error_set(why, r, "%s is full; nothing of this step is kept", k->c->to->path);
	/* -ESTALE: it is not shown any more, so there is no next copy */
	if (((commit_error_passes(r) && r != -ENOMEM && r != -ESTALE) || (r == -EINTR && k->c->options->leaves &&
		k->c->options->leaves())) && !commit_attempt_announced(k->attempt))
		return r; /* as if it was killed: the next copy goes on with what was written */
	decided = commit_attempt_abort(k->attempt, r == -BASE_EUNDECIDED ? NULL : why->text, &k->result->entry,
		&outcome);
	if (decided == 0 || r == -BASE_EUNDECIDED) {
		*why = outcome;
		return decided;
	}
	return r;
}

/* Is it what the source shows, now that the attempt has begun? Else it may replace a copy of a later one. */
static int copy_still_shown(const struct copy_work *k, struct base_error *err)
{
	struct commit_list *l = NULL;
	int r = commit_list_open_newest(k->c->from, commit_list_run(k->list), &l, err);

	if (r == 0)
		r = commit_list_know_step(l, k->step->step, err);
	if (r >= 0 && !commit_list_entry_live(l, k->step->entry))
		r = base_error_set(err, -ESTALE, "it was removed or replaced while it was copied");
	commit_list_close(l);
	return r < 0 ? r : 0;
}

static int copy_write(struct copy_work *k, bool replace, struct base_error *err)
{
	const struct commit_list_step *step = k->step;
	const struct proto_step_facts *said = commit_list_facts(k->list, step->entry);
	struct proto_step_facts facts = said ? *said : (struct proto_step_facts){0};
	struct commit_attempt_save o = {.step = step->step, .replace = replace, .world = k->m.world,
		.count = k->c->options->plain ? 0
			: copy_origin(k->c->from, commit_list_run(k->list), &step->commit.manifest),
		.time_ns = step->commit.time_ns, .thinned = k->m.thinned, .nthinned = k->m.nthinned,
		.list = k->c->there};
	struct base_error why = {0};
	int r;

	facts.entry = PROTO_NONE;
	o.facts = said && !proto_facts_empty(said) && copy_facts_able(k->c) ? &facts : NULL;
	r = commit_attempt_begin_alone(k->c->to, k->c->run, &o, &k->attempt, err);
	if (r == -ENOSPC || r == -EDQUOT)
		return base_error_set(err, r, "%s is full", k->c->to->path);
	if (r < 0)
		return r;
	snprintf(k->result->attempt, sizeof k->result->attempt, "%s", commit_attempt_name(k->attempt));
	r = replace ? copy_still_shown(k, &why) : 0;
	if (r == 0)
		r = copy_resume(k, &why);
	if (r == 0)
		r = copy_ranks(k, &k->result->entry, &why);
	if (r < 0)
		r = copy_failed(k, r, &why);
	commit_attempt_free(k->attempt);
	if (r < 0 && err)
		*err = why;
	return r;
}

/* What the ranks measured when they saved the step: for people, so a failure is not one of the copy. */
static void copy_stats(const struct copy_work *k)
{
	struct proto_stats *all;
	uint32_t n;

	if (commit_stats_read(k->c->from, commit_list_run(k->list), k->step->step, k->step->entry, &all, &n, NULL,
		NULL) < 0)
		return;
	for (uint32_t i = 0; i < n; i++) {
		struct proto_stats m = all[i];

		m.run = k->c->run;
		m.attempt = k->result->attempt;
		commit_stats_put(k->c->to, &m, k->result->entry, NULL);
	}
	commit_stats_free(all, n);
}

static void work_release(struct copy_work *k)
{
	free(k->taken);
	copy_rank_free(k->rank);
	proto_manifest_release(&k->m);
}

static int copy_new(struct copy *c, const struct commit_list *list, const struct commit_list_step *step, bool replace,
	struct copy_result *ret_r, struct base_error *err)
{
	base_cleanup(work_release) struct copy_work k = {.c = c, .list = list, .step = step, .result = ret_r};
	int r = store_manifest_get(c->from, commit_list_run(list), &step->commit.manifest, &k.m, err);

	if (r < 0)
		return r;
	r = copy_write(&k, replace, err);
	if (r == 0)
		copy_stats(&k);
	return r;
}

int copy_step(struct copy *c, const struct commit_list *list, const struct commit_list_step *step, const char *as,
	bool replace, struct copy_result *ret_r, struct base_error *err)
{
	uint64_t read = atomic_load(&c->read_bytes), done = c->done_bytes;
	struct base_error own = {0};
	int r;

	err = err ? err : &own;
	*ret_r = (struct copy_result){.step = step->step, .bytes = step->commit.bytes};
	copy_turn_to(c, as);
	r = copy_is_there(c, list, step, replace, ret_r, err);
	if (r == 0) {
		r = copy_new(c, list, step, replace, ret_r, err);
		if (r == -EEXIST) { /* another writer was faster; or it was removed again */
			r = copy_is_there(c, list, step, false, ret_r, err);
			r = r == 0 ? -EEXIST : r;
		}
	}
	ret_r->read_bytes = atomic_load(&c->read_bytes) - read;
	c->done_bytes = done + step->commit.bytes;
	if (r < 0)
		return base_error_prefix(err, r, "%s: %s/%" PRIu64, c->from->path, commit_list_run(list), step->step);
	return 0;
}
