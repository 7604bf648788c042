/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt: one try at saving a step: begin, bases, announcement, abort, commit; and heartbeats
 * (docs/format/incoming.md). A writer alone (an import) begins with store_attempt_begin_alone and ends with
 * store_attempt_commit; a job's rank begins with store_launch_begin (core/commit/launch.h), announces and waits.
 *
 * Order, each step durable before the next (invariants 2, 5, 6): heartbeat -> begin -> packs -> part.<rank> -> manifest
 * -> packs looked at again -> commit entry -> the attempt's folder deleted (best effort). */
#ifndef CORE_COMMIT_ATTEMPT_H
#define CORE_COMMIT_ATTEMPT_H

#include "core/commit/list.h"
#include "core/step/manifest.h"

struct store_attempt;
struct store_attempt_options {
	const char *run;
	/* or PROTO_NONE: the next free step (newest + 1, or 0); refused (-BASE_EBUSY) while a launch is alive in the
	 * run */
	uint64_t step;
	bool replace;                   /* a visible step of that number is replaced, naming the entry seen now */
};
/* A writer alone: random launch id, heartbeat thread, begin. The step taken is told by store_attempt_step. -EEXIST:
 * the step is visible. */
int store_attempt_begin_alone(struct store *s, const struct store_attempt_options *o, struct store_attempt **ret_a,
	struct base_error *err);
const char *store_attempt_name(const struct store_attempt *a);  /* "<16 hex>-0" */
uint64_t store_attempt_step(const struct store_attempt *a);
/* Names a commit as base: puts base.<n>, then reads its run's list again. 0: its data may be used. -ESTALE: it is
 * gone. A commit named before costs nothing. Any thread. */
int store_attempt_base(struct store_attempt *a, const char *run, uint64_t entry, const struct base_digest *manifest,
	struct base_error *err);
/* Announces (fills in run, attempt, step, rank 0, world 1, host), makes and puts the manifest, checks packs and cover,
 * appends the commit entry. On success the step is visible and durable; ret_entry its number. -BASE_EUNDECIDED: the
 * entry may have landed, or may land yet. After another failure nothing is visible. Call store_attempt_abort. */
int store_attempt_commit(struct store_attempt *a, struct proto_announcement *announcement, uint64_t *ret_entry,
	struct base_error *err);

/* ---- a job's rank: one thread at a time calls these, for each attempt ---- */

/* Fills in run, attempt, step, rank, world, host and puts part.<rank>. A failure aborts the attempt, unless the
 * sentence says that it is undecided: then wait tells. */
int store_attempt_announce(struct store_attempt *a, struct proto_announcement *announcement, struct base_error *err);
/* Waits until the list decides the attempt; commits it where that falls to this rank. 0: the step is visible and
 * durable, *ret_entry its number. -BASE_EABORTED: it never will be; the sentence says which rank, on which host, why.
 * -ETIMEDOUT (timeout_ms < 0: never): not decided, call again. Another error is undecided where the sentence says so
 * (call again), else the attempt is aborted. */
int store_attempt_wait(struct store_attempt *a, int64_t timeout_ms, uint64_t *ret_entry, struct base_error *err);

bool store_attempt_announced(const struct store_attempt *a); /* or tried to: it may have landed */
bool store_attempt_undecided(const struct store_attempt *a); /* as far as this rank has read the list */
uint64_t store_attempt_commit_ns(const struct store_attempt *a); /* that this rank spent committing; 0: another did */

/* ---- both ---- */

/* Opens the writer of a pack of this attempt and rank, by its class. What this attempt has not opened itself it never
 * deletes, whatever it is called. -EINVAL: no such class can be; -EEXIST: there is a pack of that name, of somebody
 * else. */
int store_attempt_pack_open(struct store_attempt *a, const char *class, char name[static STORE_PACK_NAME_MAX],
	struct store_pack_writer **ret_w);
int store_attempt_pack_seal(struct store_attempt *a, struct store_pack_writer *w, uint64_t *ret_size); /* frees w */
/* Deletes the attempt's own packs when nothing was announced, else appends `abort` first; gives the reserve up on a
 * full disk; deletes the folder. Best effort. */
void store_attempt_abort(struct store_attempt *a, const char *reason);
/* Stops the heartbeat of a writer alone and deletes it; aborts a job's attempt that was not announced. NULL-safe. */
void store_attempt_free(struct store_attempt *a);

/* vckpt abort: ends an attempt by an entry of the list, whoever is at work there: its ranks find that entry, delete
 * their packs and say so. Deletes its folder. `l`: read from entry 0. 0; 1: it was aborted before. -EALREADY: it has
 * committed. *ret_entry: the entry that says so. */
int store_attempt_stop(struct store_list *l, const char *attempt, const char *reason, uint64_t *ret_entry,
	struct base_error *err);

/* store_attempt_abort_put, naming the rank that is at fault. 1: it was aborted before. */
int store_attempt_abort_put_rank(struct store_list *l, const char *attempt, uint32_t rank, const char *reason,
	struct base_error *err);
/* Appends `abort` after everything that was read of the list says "undecided". 0: aborted, now or before. -EALREADY:
 * committed. */
int store_attempt_abort_put(struct store_list *l, const char *attempt, const char *reason, struct base_error *err);

#endif
