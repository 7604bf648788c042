/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_commit: what a committing rank does, in order, each durable before the next; in brackets what the model
 * (tests/model) calls it:
 *
 *     all announced; manifest [com]           commit_manifest         checked before it is put, its packs after that
 *     check, commit entry [chk, PUT]          commit_entry            commit_check, commit_list_put
 *     an outcome that is left open [open]     commit_settle
 *
 * A failed put of the commit entry leaves its outcome open: the entry may have landed, or may land yet. An `abort` is
 * appended, and whichever of the two comes first in the list is what happened. If not even that can be written, the
 * attempt stays undecided, nothing is deleted, and the next round of attempt_wait tries to commit again.
 *
 * A committing rank reads each announcement once, several at a time (spread.c), and looks in vain for about 16 of them
 * a poll. */
#include <stdio.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/commit/attempt/attempt_internal.h"
#include "core/commit/check/manifest_check.h"
#include "core/commit/list/list_facts.h"
#include "core/storage/spread.h"

#define LOOK_AHEAD 16u          /* announcements asked for in vain, a poll, about */
#define READ_BATCH 256u         /* announcements asked for at once */

/* ---- announcements ---- */

int attempt_announcement_read(struct commit_attempt *a, uint32_t rank, struct base_error *err)
{
	struct proto_announcement m = {0};
	char name[STORAGE_NAME_MAX];
	int r;

	snprintf(name, sizeof name, "incoming/%s/%s/part.%u", a->run, a->name, rank);
	r = store_record_load(a->store, name, STORE_RECORD_ANNOUNCEMENT, proto_announcement_decode, &m,
		"its announcement", err);
	if (r == -ENOENT || r == -BASE_EVERSION)
		return r == -ENOENT ? 0 : r;
	if (r < 0)
		return base_error_set(err, r, "its announcement cannot be read: %s", base_error_name(r));
	a->announcements[rank] = m;
	return 1;
}

struct read_batch { struct commit_attempt *a; uint32_t ranks[READ_BATCH]; uint32_t n; int found[READ_BATCH]; };

/* Never fails: an error of an announcement is kept with its rank. */
static int batch_read(void *arg, uint32_t i, struct base_error *err)
{
	struct read_batch *b = arg;

	b->found[i] = attempt_announcement_read(b->a, b->ranks[i], err);
	return b->found[i];
}

/* The next that were not read yet, from where the last batch ended; `left` of the ranks are still to be looked at. */
static void batch_fill(struct read_batch *b, uint32_t most, uint32_t *left)
{
	uint32_t world = b->a->world;

	for (b->n = 0; *left && b->n < most; --*left) {
		uint32_t rank = b->a->cursor;

		b->a->cursor = rank + 1 < world ? rank + 1 : 0;
		if (!b->a->announcements[rank].arena) {
			b->found[b->n] = 0;
			b->ranks[b->n++] = rank;
		}
	}
}

/* Those that were not read yet, several at once; ends where 16 of a batch are not there. A batch of those that may all
 * be missing has 16, one after a batch that was all there READ_BATCH. */
static int announcements_read(struct commit_attempt *a, bool *ret_new, uint32_t *ret_rank, struct base_error *err)
{
	uint32_t left = a->world, most = LOOK_AHEAD, missing = 0;
	struct read_batch b = {.a = a};

	if (!a->announcements && !(a->announcements = calloc(left, sizeof *a->announcements)))
		return base_no_memory(err);
	while (left && a->nannouncements < a->world && missing < LOOK_AHEAD) {
		uint32_t before = missing;
		int r;

		batch_fill(&b, most, &left);
		r = storage_spread(b.n, batch_read, &b, err);
		for (uint32_t i = b.n; i-- > 0;) { /* of those that failed, report the first */
			a->nannouncements += b.found[i] == 1;
			*ret_new |= b.found[i] == 1;
			missing += b.found[i] == 0;
			*ret_rank = b.found[i] < 0 ? b.ranks[i] : *ret_rank;
		}
		if (r < 0)
			return r;
		most = missing == before ? READ_BATCH : LOOK_AHEAD;
	}
	return 0;
}

/* ---- manifest ---- */

/* Checks what ranks hold alike, replicas, and cover (invariant 4), which completes the manifest. If ranks differ in
 * what a tensor is, their replicas differ too; the first check says more about it. */
static int commit_check_parts(struct commit_attempt *a, const struct proto_announcement **all, struct proto_manifest *m,
	struct base_buf *ret_body, struct base_digest *ret_digest, struct base_error *err)
{
	struct base_error why = {0};
	int r = check_commons_announced(all, a->nannouncements, err);

	if (r < 0)
		return r;
	r = check_manifest_replicas(a->store, all, a->nannouncements, err);
	if (r == 0)
		return check_manifest_finish(a->store, m, ret_body, ret_digest, err);
	if (check_manifest_layouts(a->store, m, &why) == -BASE_EFORMAT)
		return base_error_set(err, -BASE_EFORMAT, "%s", why.text);
	return r;
}

/* model: com. Checked, then the manifest durable, then every pack that it names looked at again (invariant 2). The same
 * for all committing ranks: before the check the manifest's count of tensors is only about right. */
static int commit_manifest(struct commit_attempt *a, struct proto_manifest *ret_m, struct base_digest *ret_digest,
	struct base_error *err)
{
	base_cleanup_free const struct proto_announcement **all = calloc(a->nannouncements, sizeof *all);
	base_cleanup_buf struct base_buf made = BASE_BUF_INIT, body = BASE_BUF_INIT;
	int r = all ? 0 : base_no_memory(err);

	for (uint32_t i = 0; all && i < a->nannouncements; i++)
		all[i] = &a->announcements[i];
	if (r == 0)
		r = store_manifest_make(all, a->nannouncements, &made, ret_digest, err);
	if (r < 0)
		return r;
	r = proto_manifest_decode(made.data, made.len, ret_m);
	if (r < 0)
		return base_error_set(err, r, "the manifest cannot be made: %s", base_error_name(r));
	ret_m->thinned = a->rewrite ? a->rewrite->thinned : a->thinned;
	ret_m->nthinned = a->rewrite ? a->rewrite->nthinned : a->nthinned;
	r = commit_check_parts(a, all, ret_m, &body, ret_digest, err);
	if (r < 0)
		return r;
	r = store_manifest_put(a->store, a->run, &body, ret_digest, err);
	return r < 0 ? r : store_manifest_check_packs(a->store, ret_m, err);
}

/* ---- commit entry ---- */

struct commit_state {
	struct commit_attempt *a;
	struct proto_entry *e;
	struct proto_step_facts kept;
	struct base_error *err;
};

/* The facts of the step from its commit on; whether it may take the place of `now`. */
static int commit_facts(struct commit_state *c, const struct commit_list *l, const struct commit_list_step *now)
{
	const struct proto_step_facts *f = c->a->keep_facts && now ? commit_list_facts(l, now->entry) : NULL;

	c->e->commit.facts = c->a->facts;
	if (f) {
		c->kept = *f;
		c->kept.entry = PROTO_NONE;
		c->e->commit.facts = &c->kept;
	}
	if (!now || (f && f->pinned)) /* written anew, pin and all */
		return 0;
	return commit_list_unpinned(l, now, "replaced", c->err);
}

/* model: chk. Decided already? then whether the step is free, or still what this attempt set out to replace. */
static int commit_check(void *arg, struct commit_list *l)
{
	struct commit_state *c = arg;
	const struct commit_list_step *now;
	int r = commit_list_know_step(l, c->a->step, c->err);

	if (r < 0)
		return r;
	now = commit_list_find(l, c->a->step);
	switch (commit_list_attempt(l, c->a->name, NULL, NULL)) {
	case COMMIT_ATTEMPT_COMMITTED: return -EALREADY;
	case COMMIT_ATTEMPT_ABORTED: return -BASE_EABORTED;
	case COMMIT_ATTEMPT_UNDECIDED: break;
	}
	if (attempt_overtaken(c->a))
		return -BASE_EABORTED; /* attempt_outcome_known makes sure of it */
	if (c->a->rewrite && (!now || now->entry != c->a->rewrite->replaces))
		return base_error_set(c->err, -EEXIST,
			"%s: step %llu was removed or replaced by another writer just now", c->a->run,
			(unsigned long long)c->a->step);
	if (now && (!c->a->replace || now->entry != c->a->replaces))
		return base_error_set(c->err, -EEXIST,
			"%s has a step %llu already: another writer committed it meanwhile", c->a->run,
			(unsigned long long)c->a->step);
	c->e->commit.replaces = now ? now->entry : PROTO_NONE;
	r = c->a->rewrite && c->a->rewrite->loses ? commit_list_unpinned(l, now, "thinned", c->err) : 0;
	return r < 0 ? r : commit_facts(c, l, now);
}

/* model: open. After a put whose outcome is open. 0: committed. Otherwise `r`: aborted, or (not decided) undecided. */
static int commit_settle(struct commit_attempt *a, int r, struct base_error *err)
{
	char why[128], reason[PROTO_REASON_MAX];
	int s;

	snprintf(why, sizeof why, "the commit entry could not be written (%s)", base_error_name(r));
	attempt_reason(a, a->launch->rank, store_hostname(), why, reason);
	s = commit_list_abort(a->list, a->name, a->launch->rank, reason, NULL);
	if (s == -EALREADY)
		return 0;
	if (s < 0)
		return base_error_prefix(err, r, "%s: step %llu: undecided", a->run, (unsigned long long)a->step);
	a->decided = true;
	return r;
}

/* Checks and puts the commit entry, deciding an outcome that is left open. The launch's lock is held. */
static int commit_entry(struct commit_attempt *a, const struct proto_commit *what, uint64_t *ret_entry,
	struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_COMMIT, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.commit = *what};
	struct commit_state c = {.a = a, .e = &e, .err = err};
	int64_t n;
	int r;

	e.commit.step = a->step;
	e.commit.attempt = a->name;
	e.commit.time_ns = a->time_ns ? a->time_ns : e.time_ns;
	e.commit.replaces = PROTO_NONE;
	n = commit_list_put(a->list, &e, commit_check, &c, err);
	r = n < 0 ? (int)n : 0;
	if (r < 0 && r != -EALREADY && r != -EEXIST && r != -BASE_EPINNED && r != -BASE_EABORTED &&
		r != -BASE_EDAMAGED)
		r = commit_settle(a, r, err);
	if (r == -BASE_EDAMAGED) /* nothing can be put, so nothing is decided by this writer */
		return base_error_prefix(err, r, "%s: step %llu: undecided", a->run, (unsigned long long)a->step);
	if (r < 0 && r != -EALREADY)
		return r;
	a->decided = true;
	if (commit_list_attempt(a->list, a->name, NULL, ret_entry) != COMMIT_ATTEMPT_COMMITTED)
		return base_error_set(err, -EIO,
			"%s: step %llu: the list has a commit entry of this attempt, but by its rules it is void",
			a->run, (unsigned long long)a->step);
	return 0;
}

/* 1: committed, by us or another rank. */
static int commit_put(struct commit_attempt *a, const struct proto_commit *what, uint64_t *ret_entry,
	struct base_error *err)
{
	int r;

	pthread_mutex_lock(&a->launch->lock);
	r = commit_entry(a, what, ret_entry, err);
	pthread_mutex_unlock(&a->launch->lock);
	if (r == -EEXIST || r == -BASE_EPINNED) { /* the step was taken or pinned meanwhile */
		struct base_error why = *err;

		return attempt_give_up_own(a, r, why.text, ret_entry, err);
	}
	if (r == -BASE_EABORTED)
		return attempt_outcome(a, ret_entry, err);
	if (a->decided) /* by this rank's entry: the others leave the folder alone */
		attempt_folder_delete(a);
	return r < 0 ? r : 1;
}

/* The manifest of an attempt that is aborted is no one's. If it was put after the abort, the entry that says so may be
 * collected before a collection sees the manifest, and one that no entry explains shows a lost entry
 * (core/upkeep/lost.c). */
static void commit_manifest_drop(struct commit_attempt *a, const struct base_digest *digest)
{
	const struct commit_list_step *now;
	char path[STORAGE_NAME_MAX];
	bool goes;

	pthread_mutex_lock(&a->launch->lock);
	goes = commit_list_refresh(a->list, NULL) >= 0 && commit_list_know_step(a->list, a->step, NULL) >= 0 &&
		commit_list_attempt(a->list, a->name, NULL, NULL) == COMMIT_ATTEMPT_ABORTED;
	now = commit_list_find(a->list, a->step); /* vckpt mend may have committed it anew, as another attempt */
	goes &= !now || !base_digest_equal(&now->commit.manifest, digest);
	pthread_mutex_unlock(&a->launch->lock);
	if (goes && store_manifest_path(a->run, digest, path) == 0)
		storage_remove(a->store->storage, path);
}

int attempt_commit_all(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	struct proto_manifest m = {0};
	struct proto_commit what = {0};
	struct base_error why = {0};
	int r = commit_manifest(a, &m, &what.manifest, &why);

	if (r == 0) {
		what.tensors = m.tensors;
		what.bytes = m.bytes;
		what.new_bytes = m.new_bytes;
		what.attributes = m.attributes;
		what.nattributes = m.nattributes;
		r = commit_put(a, &what, ret_entry, err);
	} else {
		/* Another committer may have been done, and the data removed and collected since. */
		r = attempt_give_up_own(a, r, why.text, ret_entry, err);
	}
	if (r < 0)
		commit_manifest_drop(a, &what.manifest);
	proto_manifest_release(&m);
	return r;
}

/* ---- the committing rank ---- */

/* An error of the storage says nothing about the rank whose file was asked for. The committing rank waits for the
 * storage for half of the time that a rank may be missing at the start. */
bool attempt_try_again(const struct commit_attempt *a, int r)
{
	/* other ranks wait for this one for as long as start_ms */
	uint64_t patience = !a->launch->alone ? a->launch->start_ms / 2 : a->launch->start_ms;

	return commit_error_passes(r) && r != -ENOMEM
		&& (!a->failing_ms || base_monotonic_ms() - a->failing_ms < patience);
}

int attempt_lead(struct commit_attempt *a, bool *ret_new, uint64_t *ret_entry, struct base_error *err)
{
	uint32_t rank = a->launch->rank;
	struct base_error why = {0};
	int r = announcements_read(a, ret_new, &rank, &why);

	if (r == -ENOMEM)
		return attempt_give_up_own(a, r, why.text, ret_entry, err);
	if (attempt_try_again(a, r))
		return base_error_set(err, r, "%s: step %llu: undecided: %s", a->run, (unsigned long long)a->step,
			why.text);
	if (r < 0)
		return attempt_give_up(a, rank, "", why.text, ret_entry, err);
	if (a->nannouncements == a->world) {
		uint64_t begin = base_monotonic_ns();

		r = attempt_commit_all(a, ret_entry, err);
		a->commit_ns += base_monotonic_ns() - begin;
		return r;
	}
	return attempt_missing_judge(a, ret_entry, err);
}
