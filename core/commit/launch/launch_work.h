/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_work: the launch itself, as its files and its attempts (attempt_internal.h) share it. */
#ifndef CORE_COMMIT_LAUNCH_LAUNCH_WORK_H
#define CORE_COMMIT_LAUNCH_LAUNCH_WORK_H

#include <pthread.h>

#include "core/commit/incoming/heartbeat.h"
#include "core/commit/launch/launch.h"
#include "core/commit/list/list_writer.h"

#define COMMIT_LAUNCH_QUICK_MS 15000u    /* how long ranks of other hosts look for rank 0 */

struct launch_watch;

struct commit_launch {
	/* A job's launch has an entry in the list, and its ranks meet in each other's attempts: an abort entry ends
	 * each attempt that has begun, and names the rank that is at fault. A writer alone (an import) has a launch of
	 * one rank without an entry, for one attempt, in which no one else ever acts. So its attempt needs an abort
	 * entry only once it was announced; one that is freed before is left to the collector. */
	bool alone;
	struct store *store;
	pid_t pid;                      /* of the process that opened it: after a fork the child is another */
	char name[17], run[PROTO_RUN_MAX + 1];
	uint32_t rank, world;
	uint8_t nonce[PROTO_NONCE_BYTES]; /* of this opening, by rank 0 */
	uint64_t heartbeat_ms, start_ms, deadline_ms;
	struct commit_heartbeat *heartbeat;
	struct launch_watch *watch;      /* has a lock of its own, never taken together with the one below */
	pthread_mutex_t lock;            /* protects all below; held over calls to the store */
	struct commit_list *list;        /* every entry since the launch entry; alone: since before `begin` */
	bool lent;                       /* it is the caller's */
	uint64_t last_step;              /* as of saves before `begun`; PROTO_NONE */
	struct launch_begun { uint64_t step, try, position; bool unnumbered; } *begun; /* in order; not settled */
	size_t nbegun, begun_room;
	struct launch_tries { uint64_t step, next, order; } *tries; /* by step: the next try; when the last was begun */
	size_t ntries, tries_room;
	uint64_t order;                 /* of the next attempt among those that this rank begins */
	struct launch_abort *aborts;    /* of this rank's attempts, that could not be written: launch_aborts.c */
	struct launch_abort *spare;     /* room for one more: where memory is short an abort is kept all the same */
	uint64_t aborts_ms;             /* monotonic: since when there are some */
	bool rests;                     /* its heartbeat has stopped for that */
	uint32_t nattempts;             /* that this rank has under way */
	uint64_t idle_ms;               /* monotonic: since when there are none */
	struct launch_heeds { bool known, all; uint64_t next_ms; } heeds; /* of the heartbeat's thread: launch_idle.c */
};
int commit_launch_check(const struct commit_launch *l, struct base_error *err); /* -BASE_EFORKED after a fork */

/* ---- launch.c ---- */

uint64_t commit_launch_every_ms(const struct commit_launch *l); /* the usual period of its heartbeat */

/* Of a writer alone: shows the heartbeat, and opens the list; lent: takes this one until it is closed (NULL: none). */
int commit_launch_open_alone(struct store *s, const char *run, struct commit_list *lent, struct commit_launch **ret_l,
	struct base_error *err);

#define COMMIT_LAUNCH_LEADERS 8u
/* The ranks that commit, in the order of their turns; how many. */
unsigned commit_launch_leaders(uint32_t world, uint32_t ranks[static COMMIT_LAUNCH_LEADERS]);

/* ---- launch_meet.c ---- */

/* Waits until a rank 0 that shows this nonce is seen to live, unless the launch entry is `fresh`: it came while this
 * rank looked for it. -EEXIST: there is none, so that the entry is of another start; or another process is this
 * rank. */
int commit_launch_meet(struct commit_launch *l, const uint8_t nonce[static PROTO_NONCE_BYTES], bool fresh,
	struct base_error *err);

/* ---- launch_aborts.c ---- */

/* The abort of an attempt of this rank could not be written: it is kept, with its reason, and tried again. The lock is
 * held. */
void commit_launch_abort_keep(struct commit_launch *l, const char *attempt, const char *reason);
bool commit_launch_abort_kept(const struct commit_launch *l, const char *attempt); /* the lock is held */

/* Appends the aborts that could not be written so far; 0: there is none any more. The lock is held. */
int commit_launch_aborts_put(struct commit_launch *l);
/* The same, by the heartbeat's thread. false: it has failed for too long, and no one should wait for this rank any
 * more. *ret_idle_ms: how long this rank has not needed quick beats. */
bool commit_launch_tend(void *l, uint64_t *ret_idle_ms);
void commit_launch_aborts_drop(struct commit_launch *l); /* after a last try */
/* Before an attempt begins: room to keep its abort. -ENOMEM. */
int commit_launch_abort_room(struct commit_launch *l);

/* ---- launch_idle.c ---- */

/* An attempt of this rank begins, or ends. The lock is not held. */
void commit_launch_attempt_begins(struct commit_launch *l);
void commit_launch_attempt_ends(struct commit_launch *l);
/* How long this rank has had no attempt under way; 0: its beats are to be quick all the same. The lock is held. */
uint64_t commit_launch_idle_ms(const struct commit_launch *l);
/* Do all ranks that may commit heed the period that a heartbeat states? By the heartbeat's thread alone; idle_ms: how
 * long this rank has been idle. The lock is not held. */
bool commit_launch_heeded(struct commit_launch *l, uint64_t idle_ms);

/* ---- launch_watch.c ---- */

/* The ranks of a launch as a committing rank sees them. */
enum launch_rank_state {
	LAUNCH_RANK_FINE,                /* its heartbeat is there, and moves */
	LAUNCH_RANK_AWAITED,             /* shows none, or one that does not move, but not for long enough yet */
	LAUNCH_RANK_NEVER,               /* has shown no heartbeat for the start time-out, or took it away */
	LAUNCH_RANK_DIED,                /* on this machine; its process is gone */
	LAUNCH_RANK_STOPPED,             /* its heartbeat does not move */
	LAUNCH_RANK_LATE,                /* fine, and the deadline is over */
};
int launch_watch_new(const struct commit_launch *l, struct launch_watch **ret_w); /* of l, which outlives it */
void launch_watch_free(struct launch_watch *w); /* NULL-safe */
/* Lists the heartbeats if that is due. */
int launch_watch_look(struct launch_watch *w);
/* since: by base_monotonic_ms, when the time-outs of a rank that does not move, or come, begin: every attempt grants
 * them anew. host: PROTO_HOST_MAX bytes, empty where it is not known. */
enum launch_rank_state launch_watch_judge(struct launch_watch *w, uint32_t rank, uint64_t since, char *host);
uint64_t launch_watch_limit_ms(struct launch_watch *w, uint32_t rank); /* how long its heartbeat may not move */
uint64_t launch_watch_still_ms(struct launch_watch *w, uint32_t rank); /* how long it has not, as far as was seen */

#endif
