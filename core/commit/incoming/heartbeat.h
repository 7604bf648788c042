/* SPDX-License-Identifier: Apache-2.0
 *
 * heartbeat: a launch's sign of life while a save is under way (docs/format/incoming.md). */
#ifndef CORE_COMMIT_INCOMING_HEARTBEAT_H
#define CORE_COMMIT_INCOMING_HEARTBEAT_H

#include "core/commit/incoming/incoming.h"

#define COMMIT_HEARTBEAT_EVERY_S 5u
#define COMMIT_HEARTBEAT_QUICK_MS 250u

struct commit_heartbeat;
struct commit_heartbeat_options {
	const char *launch, *run;
	bool job;               /* a rank of a job: its file has a name of its own, so that ranks can share a host */
	uint32_t rank;
	uint64_t every_ms;      /* 0: 5 s */
	uint64_t quick_ms;      /* this long after the start it beats every COMMIT_HEARTBEAT_QUICK_MS; 0: never */
	const uint8_t *nonce;   /* 16 bytes, that it shows; NULL: none */
	/* Called by the heartbeat's thread before each beat but the first; false: this one is left out. *ret_idle_ms, 0
	 * before, becomes how long quick beats have been of no use. May be NULL */
	bool (*tend)(void *arg, uint64_t *ret_idle_ms);
	void *tend_arg;
};
/* Puts number 0 (durable on return); then a thread of its own puts n + 1 every 5 s and deletes n. The later ones need
 * not be durable: after a power loss an observer finds a process that is gone, or a number that no longer grows.
 * -EEXIST: another writer has a heartbeat of that name, which stays. */
int commit_heartbeat_start(struct store *s, const struct commit_heartbeat_options *o, struct commit_heartbeat **ret_h,
	struct base_error *err);
/* The pause after a beat, which the beat itself states: every_ms until the writer has been idle for twice that, then as
 * long as it has been idle, up to twelve times every_ms. */
uint64_t commit_heartbeat_period_ms(uint64_t every_ms, uint64_t idle_ms);
/* The writer is not idle any more: the next beat comes at once, if the last one stated more than every_ms. */
void commit_heartbeat_wake(struct commit_heartbeat *h);
/* How long an observer waits for a heartbeat of another host to move. period_ms: what it states; 0: nothing. */
uint64_t commit_heartbeat_limit_ms(uint64_t timeout_ms, uint64_t period_ms);
/* How long its last beat took, or the one under way has taken so far. */
uint64_t commit_heartbeat_slow_ms(const struct commit_heartbeat *h);
/* Is that file this heartbeat's? host: as commit_heartbeat_each passes it. */
bool commit_heartbeat_own(const struct commit_heartbeat *h, const char *host, uint64_t number);
void commit_heartbeat_stop(struct commit_heartbeat *h); /* joins, deletes the file; NULL-safe */

/* "<launch>.<host>.<number>", the last part of a name under hosts/. */
bool commit_heartbeat_name_parse(const char *base, char launch[static 17], char host[static 65], uint64_t *ret_number);

/* One rank of a job, as its file says. */
struct commit_heartbeat_rank {
	char host[PROTO_HOST_MAX];
	bool here;              /* of this machine: commit_process_lives can check it */
	uint64_t pid, start_time;
	uint8_t nonce[PROTO_NONCE_BYTES]; /* zeros: it shows none */
	uint32_t period_ms;     /* 0: it states none */
};
/* Lists the heartbeats of one launch's ranks, in no order; for a moment a rank has two. host: as the file's name says,
 * cut at 52 bytes. */
typedef void (*commit_heartbeat_func)(void *arg, uint32_t rank, uint64_t number, const char *host, const char *file);
int commit_heartbeat_each(struct store *s, const char *launch, commit_heartbeat_func f, void *arg);
void commit_heartbeat_name(const char *launch, uint32_t rank, const char *host, uint64_t number,
	char name[static STORAGE_NAME_MAX]); /* the file of a job's rank; host: as above */
/* -ENOENT: moved on */
int commit_heartbeat_look(struct store *s, const char *file, struct commit_heartbeat_rank *ret_r);
bool commit_heartbeat_may_be_here(const char *host); /* by the name alone */
bool commit_process_lives(uint64_t pid, uint64_t start_time);

#endif
