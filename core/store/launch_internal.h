/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_internal: what launch.c, launch_watch.c and attempt_ranks.c share. */
#ifndef CORE_STORE_LAUNCH_INTERNAL_H
#define CORE_STORE_LAUNCH_INTERNAL_H

#include "core/store/attempt_internal.h"
#include "core/store/heartbeat_internal.h"

struct store_watch;

struct store_launch {
	struct store *store;
	pid_t pid;                      /* of who opened it: after a fork the child is another */
	char name[17], run[PROTO_RUN_MAX + 1];
	uint32_t rank, world;
	uint64_t heartbeat_ms, start_ms, deadline_ms;
	struct store_heartbeat *heartbeat;
	struct store_watch *watch;      /* has a lock of its own, never taken together with the one below */
	pthread_mutex_t lock;           /* protects all below; held over calls to the store */
	struct store_list *list;        /* every entry since the launch entry */
	uint64_t count;                 /* saves begun */
	uint64_t last_step;             /* as of saves before `begun`; PROTO_NONE */
	struct launch_begun { uint64_t count, step; bool unnumbered; } *begun; /* ascending; not settled */
	size_t nbegun, begun_room;
};
int store_launch_check(const struct store_launch *l, struct base_error *err); /* -EPERM after a fork */

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
/* since: by store_monotonic_ms, from when on a rank that does not move, or come, is held against it: every attempt
 * gives the time-outs anew. host: PROTO_HOST_MAX bytes, empty where it is not known. */
enum store_rank_state store_watch_judge(struct store_watch *w, uint32_t rank, uint64_t since, char *host);

#endif
