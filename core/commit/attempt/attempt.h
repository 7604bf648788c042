/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt: one try at saving a step (docs/format/incoming.md): begin, bases, packs, announcement; then wait for what
 * the list says, or abort. A job's rank begins with commit_attempt_begin, a writer alone (an import) with
 * commit_attempt_begin_alone; all that follows is the same.
 *
 * Order, each step durable before the next (invariants 2, 5, 6): heartbeat -> begin -> packs -> part.<rank> -> manifest
 * -> packs looked at again -> commit entry -> the attempt's folder deleted (best effort). */
#ifndef CORE_COMMIT_ATTEMPT_ATTEMPT_H
#define CORE_COMMIT_ATTEMPT_ATTEMPT_H

#include "core/commit/check/commons.h"
#include "core/commit/launch/launch.h"
#include "core/commit/list/list.h"
#include "core/step/manifest.h"

struct commit_attempt;
struct commit_attempt_save {
	/* at most 2^44 - 1. PROTO_NONE: the one after the newest at the launch's start and all that the launch took
	 * since; -EINVAL where the world is larger than one: ranks have to say which step they mean. Of a writer alone:
	 * at most 2^63 - 1. PROTO_NONE: the one after the newest, or 0; -BASE_EBUSY while a launch is alive in the run
	 */
	uint64_t step;
	bool replace;           /* a visible step of that number is replaced, naming the entry seen now */
	struct base_digest mesh; /* of the world's mesh; zeros: none */
	const struct check_commons *commons; /* finished; NULL: none; lives as long as the attempt */
	/* Of a writer alone, in a store with the word list-4: the facts of the step from its commit on. NULL:
	 * nothing; lives as long as the attempt. */
	const struct proto_step_facts *facts;
	/* instead: the facts of the step that is replaced, when it is; so alone a pinned one may be replaced */
	bool keep_facts;
	/* Of a writer alone: components that the step has lost since it was saved, sorted; as long as the attempt */
	const char *const *thinned; uint32_t nthinned;
	/* Of a writer alone: it announces the parts of so many ranks, one after another (0: its own); the number behind
	 * its random name; when the step was first committed, in ns since the epoch (0: now). */
	uint32_t world;
	uint64_t count;
	int64_t time_ns;
	/* Of a writer alone: of that run, just read on, and no one else's as long as the attempt, which reads it on and
	 * puts into it; NULL: it opens one. So of many attempts each reads what is new. */
	struct commit_list *list;
};
/* The next save of this rank. An attempt is a try at a step: the first rank to come puts `begin`; a rank that finds
 * other values there than its own aborts the attempt, and both learn which rank said what. -EEXIST: the step is
 * visible. -BASE_EABORTED: another rank gave this try up before. Any failure here aborts the attempt. If ranks save
 * other steps than the rest, the saves in which they part fail, and they meet again at the next step that all of them
 * save. One rank's attempts are announced in the order in which it began them. */
int commit_attempt_begin(struct commit_launch *l, const struct commit_attempt_save *o, struct commit_attempt **ret_a,
	struct base_error *err);

/* A writer alone: a launch of one rank with a random name and a heartbeat, that no list names; begin.
 * commit_attempt_step returns the step that was taken. -EEXIST: the step is visible. */
int commit_attempt_begin_alone(struct store *s, const char *run, const struct commit_attempt_save *o,
	struct commit_attempt **ret_a, struct base_error *err);
/* Packs and the announcement that come next are of this rank, below its world. */
void commit_attempt_rank(struct commit_attempt *a, uint32_t rank);
const char *commit_attempt_name(const struct commit_attempt *a);  /* "<16 hex>-<decimal>" */
uint64_t commit_attempt_step(const struct commit_attempt *a);
/* Names a commit as base: puts base.<n>, then reads its run's list again. 0: its data may be used. -ESTALE: it is
 * gone. A commit named before costs nothing. Any thread; the other calls of an attempt are one thread's at a time. */
int commit_attempt_base(struct commit_attempt *a, const char *run, uint64_t entry, const struct base_digest *manifest,
	struct base_error *err);
/* Fills in run, attempt, step, rank, world, host and commons, and puts part.<rank>. A failure aborts the attempt.
 * -BASE_EUNDECIDED: the abort cannot be written, and the announcement may have landed: commit_attempt_wait finds
 * out. */
int commit_attempt_announce(struct commit_attempt *a, struct proto_announcement *announcement, struct base_error *err);
/* Waits until the list decides the attempt; commits it where that falls to this rank. 0: the step is visible and
 * durable, *ret_entry its number. -BASE_EABORTED: it never will be; the sentence says which rank, on which host, why.
 * -ETIMEDOUT (timeout_ms < 0: never): not decided, call again. -BASE_EUNDECIDED: not decided, because the store fails,
 * and has for as long as a rank may be missing at the start (a writer alone: 3 s); call again. Another error: it is
 * aborted, for that reason. */
int commit_attempt_wait(struct commit_attempt *a, int64_t timeout_ms, uint64_t *ret_entry, struct base_error *err);
/* commit_attempt_announce, and commit_attempt_wait without a time-out. */
int commit_attempt_commit(struct commit_attempt *a, struct proto_announcement *announcement, uint64_t *ret_entry,
	struct base_error *err);

/* A step that is there, written anew by a writer alone in the name of all its ranks: what the manifest says of each. */
struct commit_attempt_rewrite {
	/* Of all ranks, ascending; run, attempt, step, world are set. One that was announced is taken as it was, with
	 * the host that is given here. */
	struct proto_announcement *all; uint32_t n;
	uint64_t replaces;                      /* the entry that was seen; it has to be the step's still */
	const char *const *thinned; uint32_t nthinned; /* components that it lacks now; sorted */
	bool loses;                             /* one of these just now: not of a pinned step */
};
/* Commits it, with all facts of the step then. 0; -ESTALE: the step was removed or replaced since;
 * -BASE_EPINNED: it is pinned, and would lose a component; else as commit_attempt_commit. */
int commit_attempt_rewrite(struct commit_attempt *a, const struct commit_attempt_rewrite *w, uint64_t *ret_entry,
	struct base_error *err);
/* The number in the name of an attempt that rewrites a step, and saves nothing. */
#define COMMIT_ATTEMPT_REWRITES (UINT64_C(1) << 63)
/* Is it the name of such an attempt? */
bool commit_attempt_rewritten(const char *attempt);

bool commit_attempt_announced(const struct commit_attempt *a); /* or tried to: it may have landed */
bool commit_attempt_undecided(const struct commit_attempt *a); /* as far as this rank has read the list */
uint64_t commit_attempt_commit_ns(const struct commit_attempt *a); /* that this rank spent committing; 0: another did */

/* Opens the writer of a pack of this attempt and rank, by its class; a further one of the same class is that of rank +
 * world, then of rank + 2 world, ... An attempt never deletes a pack that it has not
 * opened itself, whatever its name. -EINVAL: no such class can be; -EEXIST: another writer has a pack of that name. */
int commit_attempt_pack_open(struct commit_attempt *a, const char *class, char name[static PACK_NAME_MAX],
	struct pack_writer **ret_w);
int commit_attempt_pack_seal(struct commit_attempt *a, struct pack_writer *w, uint64_t *ret_size); /* frees w */
/* Makes a sealed pack of an aborted attempt a further one of this attempt: of the same class, and of the same rank of
 * the world. -ENOENT: it is not there (any more), or cannot be taken. */
int commit_attempt_pack_take(struct commit_attempt *a, const char *from, char name[static PACK_NAME_MAX]);
/* Ends the attempt: appends `abort` to the list, unless it is decided or a writer alone has announced nothing. On a
 * full disk the reserve is given up for that. Returns what the list says: -BASE_EABORTED, with a sentence: the step
 * will never be visible; the packs of this attempt and rank are deleted. 0: the step is visible, because the commit
 * came first; *ret_entry (may be NULL) is its number. -BASE_EUNDECIDED: it is not known yet, because what was announced
 * may still be committed; nothing is deleted, and the abort is tried again until the launch is closed. -BASE_EFORKED:
 * nothing was done. reason: for the list; NULL: that the list could not be read or written in time. */
int commit_attempt_abort(struct commit_attempt *a, const char *reason, uint64_t *ret_entry, struct base_error *err);
/* Aborts a job's attempt that was not announced. A writer alone: what was neither committed nor aborted stays for the
 * collector; the heartbeat ends. NULL-safe. */
void commit_attempt_free(struct commit_attempt *a);

/* vckpt abort: ends an attempt by an entry of the list, even if ranks are at work on it; they find that entry, delete
 * their packs and say so. Deletes its folder. `l`: read whole. 0; 1: it was aborted before. -EALREADY: it has
 * committed. *ret_entry: the entry that says so. -BASE_EUNDECIDED: the entry could not be put, but it may have landed,
 * or may land yet. */
int commit_attempt_stop(struct store *s, struct commit_list *l, const char *attempt, const char *reason,
	uint64_t *ret_entry, struct base_error *err);

#endif
