/* SPDX-License-Identifier: Apache-2.0
 *
 * list_internal: what list.c (reading, putting) and list_replay.c (the rules) share. */
#ifndef CORE_STORE_LIST_INTERNAL_H
#define CORE_STORE_LIST_INTERNAL_H

#include <time.h>

#include "core/store/list.h"

/* A decoded entry, kept while a visible step's strings lie in it. */
struct list_hold {
	struct proto_entry entry;
	size_t users;
};

struct list_attempt {
	char name[PROTO_ATTEMPT_MAX];
	enum store_attempt_state state;  /* never UNDECIDED */
	uint64_t entry;                  /* the one that decided it */
	char *reason;                    /* of an abort; may be NULL */
};

struct list_launch {
	char launch[17];
	uint64_t entry, newest_step;
};

struct list_commit_key { uint64_t entry, step; };

struct store_list {
	struct store *store;
	char run[PROTO_RUN_MAX + 1];
	uint64_t next;                   /* entries below it were read (or stood for by a snapshot) */
	uint64_t synced;                 /* entries below it are known to be durable */
	uint64_t damaged;
	bool unsafe;                     /* a sync failed with EIO: no later one can be believed, so nothing is told */
	bool gap;                        /* an entry was skipped since the last snapshot: what is visible is not sure */

	struct store_list_step *steps;   /* visible, by ascending step */
	struct list_hold **holds;        /* holds[i] owns the strings of steps[i] */
	size_t nsteps, steps_size;

	struct list_commit_key *commits; /* every commit that ever counted here, by ascending entry */
	size_t ncommits, commits_size;

	struct list_attempt *attempts;   /* decided ones, in order of decision */
	size_t nattempts, attempts_size;
	uint32_t *slots;                 /* open addressing: 1 + index into attempts; 0: empty */
	size_t nslots;                   /* power of two, at least twice nattempts; or 0 */

	struct list_launch *launches;    /* in order of first entry */
	size_t nlaunches, launches_size;
};

/* The rules. Takes `e` over (its arena, too), whatever it returns: 0 or -ENOMEM. */
int list_apply(struct store_list *l, uint64_t n, struct proto_entry *e);
/* Starts from a snapshot: nothing was applied before. Takes `e` over. */
int list_adopt(struct store_list *l, struct proto_entry *e);
void list_state_release(struct store_list *l);
/* Fills the body of a snapshot of what is visible. *ret_live is malloc'ed; commits are borrowed. */
int list_snapshot(const struct store_list *l, struct proto_live **ret_live, size_t *ret_n);

/* Like store_list_open, from the snapshot before the newest one: knows the 64 to 127 newest entries each by itself. */
int store_list_open_earlier(struct store *s, const char *run, struct store_list **ret_l, struct base_error *err);

/* Makes durable what was read (invariant 6). After EIO every later call fails, too: the kernel tells of lost pages
 * once, so a second fsync that succeeds says nothing of them. */
int store_list_sync(struct store_list *l, struct base_error *err);

static inline int64_t store_time_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
