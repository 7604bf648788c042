/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_internal: what launch.c, launch_watch.c and attempt_ranks.c share. */
#ifndef CORE_COMMIT_LAUNCH_INTERNAL_H
#define CORE_COMMIT_LAUNCH_INTERNAL_H

#include "core/commit/attempt_internal.h"
#include "core/commit/heartbeat.h"

#define STORE_LAUNCH_QUICK_MS 15000u    /* for so long ranks of other hosts are looking out for rank 0 */

struct store_watch;

struct store_launch {
	struct store *store;
	pid_t pid;                      /* of who opened it: after a fork the child is another */
	char name[17], run[PROTO_RUN_MAX + 1];
	uint32_t rank, world;
	uint8_t nonce[PROTO_NONCE_BYTES]; /* of this opening, by rank 0 */
	uint64_t heartbeat_ms, start_ms, deadline_ms;
	struct store_heartbeat *heartbeat;
	struct store_watch *watch;      /* has a lock of its own, never taken together with the one below */
	pthread_mutex_t lock;           /* protects all below; held over calls to the store */
	struct store_list *list;        /* every entry since the launch entry */
	uint64_t last_step;             /* as of saves before `begun`; PROTO_NONE */
	struct launch_begun { uint64_t step, try; bool unnumbered; } *begun; /* in order; not settled */
	size_t nbegun, begun_room;
	struct launch_tries { uint64_t step, next, order; } *tries; /* by step: the next try; when the last was begun */
	size_t ntries, tries_room;
	uint64_t order;                 /* of the next attempt among those that this rank begins */
	struct launch_abort *aborts;    /* of this rank's attempts, that could not be written: attempt_outcome.c */
	struct launch_abort *spare;     /* room for one more: where memory is short an abort is kept all the same */
	uint64_t aborts_ms;             /* monotonic: since when there are some */
	bool rests;                     /* its heartbeat stands still for that */
};
int store_launch_check(const struct store_launch *l, struct base_error *err); /* -BASE_EFORKED after a fork */

/* ---- launch_meet.c ---- */

/* Waits until a rank 0 that shows this nonce is seen to live, unless the launch entry is `fresh`: it came while this
 * rank looked for it. -EEXIST: there is none, so that the entry is of another start; or another process is this
 * rank. */
int store_launch_meet(struct store_launch *l, const uint8_t nonce[static PROTO_NONCE_BYTES], bool fresh,
	struct base_error *err);

/* ---- attempt_tries.c ---- */

#define STORE_JOB_STEP_BITS 44u
#define STORE_JOB_STEP_MAX ((UINT64_C(1) << STORE_JOB_STEP_BITS) - 1)

/* Names the attempt by its step, which is at most STORE_JOB_STEP_MAX, and the first try of it that this rank has not
 * begun. -BASE_EABORTED: others have ended that one, and maybe some after it: this rank is told, once, and its next
 * try is the first that is not decided. The launch's lock is held, and the list was read as far as it can be. */
int attempt_try_take(struct store_attempt *a, struct base_error *err);
void attempt_name_make(const char *launch, uint64_t step, uint64_t try, char name[static PROTO_ATTEMPT_MAX]);
/* The step and try of a name of this launch; false: it is not one. */
bool attempt_name_take(const struct store_launch *l, const char *name, uint64_t *ret_step, uint64_t *ret_try);
/* Has this rank begun that attempt? When, among those that it has begun: 0 is before all that are known. */
bool attempt_try_begun(const struct store_launch *l, uint64_t step, uint64_t try, uint64_t *ret_order);

/* ---- attempt_passed.c ---- */

/* Ranks that have gone on without this attempt, and attempts that this rank has gone on without: the former end this
 * attempt, the latter are ended by this rank. 0: nothing; 1 and errors as attempt_give_up. Looks when that is due. */
int attempt_passed(struct store_attempt *a, uint64_t *ret_entry, struct base_error *err);
int attempt_part_read(struct store_attempt *a, uint32_t rank, struct base_error *err); /* attempt_ranks.c */

/* ---- attempt_outcome.c ---- */

/* Appends the aborts that could not be written so far; 0: there is none any more. The lock is held. */
int store_launch_aborts_put(struct store_launch *l);
/* The same, by the heartbeat's thread. false: it has not been possible for so long that nobody should wait for this
 * rank. */
bool store_launch_tend(void *l);
void store_launch_aborts_drop(struct store_launch *l); /* after a last try */
/* Before an attempt begins: room to keep its abort. -ENOMEM. */
int store_launch_abort_room(struct store_launch *l);

/* 1 committed, 0 undecided, -BASE_EABORTED; any other error leaves it undecided. The launch's lock is held. Nothing is
 * told before the entry that says so is durable (invariants 5 and 6). */
int attempt_outcome_known(struct store_attempt *a, uint64_t *ret_entry, struct base_error *err);
/* The same after reading on; takes the lock. */
int attempt_outcome(struct store_attempt *a, uint64_t *ret_entry, struct base_error *err);
/* Aborts the attempt in the name of a rank: 1 it is committed for all that, -BASE_EABORTED; else undecided: the abort
 * of this rank's own is kept then, and written later. */
int attempt_give_up(struct store_attempt *a, uint32_t rank, const char *host, const char *why, uint64_t *ret_entry,
	struct base_error *err);
int attempt_give_up_own(struct store_attempt *a, int code, const char *why, uint64_t *ret_entry,
	struct base_error *err);
int attempt_give_up_again(struct store_attempt *a, uint64_t *ret_entry, struct base_error *err);

/* The ranks of a launch as who commits sees them. */
enum store_rank_state {
	STORE_RANK_FINE,                /* its heartbeat is there, and moves */
	STORE_RANK_AWAITED,             /* shows none, but not for long enough yet */
	STORE_RANK_NEVER,               /* has shown no heartbeat for the start time-out, or took it away */
	STORE_RANK_DIED,                /* on this machine; its process is gone */
	STORE_RANK_STOPPED,             /* its heartbeat does not move */
	STORE_RANK_LATE,                /* fine, and the deadline is over */
};
int store_watch_new(const struct store_launch *l, struct store_watch **ret_w); /* copies what it needs */
void store_watch_free(struct store_watch *w); /* NULL-safe */
/* Lists the heartbeats if that is due. */
int store_watch_look(struct store_watch *w);
/* since: by base_monotonic_ms, from when on a rank that does not move, or come, is held against it: every attempt
 * gives the time-outs anew. host: PROTO_HOST_MAX bytes, empty where it is not known. */
enum store_rank_state store_watch_judge(struct store_watch *w, uint32_t rank, uint64_t since, char *host);

#endif
