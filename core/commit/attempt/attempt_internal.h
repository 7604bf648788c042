/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_internal: the attempt itself, which the files attempt*.c share. It belongs to a launch (launch_work.h),
 * whose list, heartbeat and lock it uses. */
#ifndef CORE_COMMIT_ATTEMPT_ATTEMPT_INTERNAL_H
#define CORE_COMMIT_ATTEMPT_ATTEMPT_INTERNAL_H

#include <pthread.h>

#include "core/base/table.h"
#include "core/commit/attempt/attempt.h"
#include "core/commit/incoming/incoming.h"
#include "core/commit/launch/launch_work.h"

struct attempt_base {
	char run[PROTO_RUN_MAX + 1];
	uint64_t entry;
	struct base_digest manifest;
	bool gone;
};

struct commit_attempt {
	struct store *store;
	struct commit_launch *launch;
	bool owns_launch;               /* a writer alone: the launch is closed with its one attempt */
	struct commit_list *list;        /* the launch's, used under its lock */
	char name[PROTO_ATTEMPT_MAX], run[PROTO_RUN_MAX + 1];
	uint64_t step;
	uint32_t rank, world;           /* the launch's; of a writer alone, the rank that it writes for, and how many */
	int64_t time_ns;                /* of the commit; 0: when it is put */
	bool unnumbered;                /* its caller named no step */
	bool replace;
	const struct commit_attempt_rewrite *rewrite; /* under way */
	const struct proto_step_facts *facts; bool keep_facts;
	const char *const *thinned; uint32_t nthinned; /* the caller's */
	uint64_t replaces;              /* the entry that was visible at begin; PROTO_NONE */
	uint64_t position;              /* as `begin` says: entries that were read before it; PROTO_NONE: not begun */
	pthread_mutex_t lock;           /* protects bases and lists, which many threads use; the rest is one thread's */
	struct attempt_base *bases; size_t nbases;
	uint32_t next_base;             /* number of the next base.<n> to try */
	struct commit_list **lists; size_t nlists; /* of other runs that bases are in */
	bool begun;                     /* its folder may have a file of ours */
	bool announced;                 /* part.<rank> was put, or may have been; of one rank: it is kept */
	bool decided;                   /* by the list */
	/* that this attempt has opened, and so may delete */
	struct attempt_pack { char name[PACK_NAME_MAX]; const struct pack_writer *w; } *packs;
	size_t npacks;
	struct base_table pack_names;   /* of `packs`, by name */
	const struct check_commons *commons; /* what this rank must hold as others do; NULL: nothing */
	uint64_t try, order;            /* of the step, by this launch; among what this rank has begun */
	uint64_t count;                 /* of a writer alone: in its name */

	/* from the announcement on */
	uint64_t announced_ms;          /* monotonic */
	uint64_t commit_ns;             /* spent in committing */
	/* [world], as they were read; arena NULL: not yet. Only a committing rank reads them; a launch of one rank has
	 * what it announced */
	struct proto_announcement *announcements;
	uint32_t nannouncements, cursor; /* how many were read; where to look next */
	uint64_t judge_ns;              /* monotonic: when those that are missing are judged again */
	uint64_t passed_ms;             /* monotonic: when to look again for ranks that have gone on without it */
	bool warned;                    /* of ranks that live and are missing */
	uint64_t failing_ms;            /* monotonic: since when waiting only fails; 0: it does not */
	bool failing_warned;
};

/* ---- attempt.c ---- */

void commit_attempt_packs_delete(struct commit_attempt *a);
/* Puts incoming/<run>/<attempt>/<last>. -EEXIST: another file has that name. */
int commit_attempt_put(struct commit_attempt *a, const char *last, enum store_record_kind kind,
	const struct base_buf *body, struct base_error *err);
int attempt_folder_sync(struct commit_attempt *a, struct base_error *err);
/* Best effort, once. The attempt is decided, or nothing of it was announced. */
void attempt_folder_delete(struct commit_attempt *a);

/* ---- attempt_alone.c ---- */

/* Step and name of the attempt of a writer alone. wanted: a step, or PROTO_NONE. The launch's lock is held, and the
 * list was read as far as it can be. */
int attempt_alone_name(struct commit_attempt *a, uint64_t wanted, struct base_error *err);

/* ---- attempt_outcome.c ---- */

/* 1 committed, 0 undecided, -BASE_EABORTED; any other error leaves it undecided. The launch's lock is held. No outcome
 * is returned before its entry is durable (invariants 5 and 6). */
int attempt_outcome_known(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err);
/* Is it undecided here because entries since its begin were collected before this writer read them? */
bool attempt_overtaken(const struct commit_attempt *a);
/* The same after reading on; takes the lock. */
int attempt_outcome(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err);
/* What an abort entry says: `why`, and of a job the rank and host (empty: not known) at fault. */
void attempt_reason(const struct commit_attempt *a, uint32_t rank, const char *host, const char *why,
	char reason[static PROTO_REASON_MAX]);
/* Aborts the attempt in the name of a rank: 1: it was committed nevertheless, -BASE_EABORTED; else undecided: the abort
 * of this rank's own is kept then, and written later. */
int attempt_give_up(struct commit_attempt *a, uint32_t rank, const char *host, const char *why, uint64_t *ret_entry,
	struct base_error *err);
/* In this rank's own name, for an error of its own: `code` where that is why the attempt is aborted. -BASE_EUNDECIDED:
 * it was announced, and the list does not say yet. */
int attempt_give_up_own(struct commit_attempt *a, int code, const char *why, uint64_t *ret_entry,
	struct base_error *err);
int attempt_give_up_again(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err);

/* ---- attempt_commit.c ---- */

/* Of all announcements, which were read: 1: the step is committed, by this rank or another; or an error. */
int attempt_commit_all(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err);
/* 1: read. 0: not there. */
int attempt_announcement_read(struct commit_attempt *a, uint32_t rank, struct base_error *err);
/* Commits, or gives up, or nothing yet: 1 it is committed, 0 it goes on, or an error as attempt_outcome has them.
 * *ret_new: another announcement was read. */
int attempt_lead(struct commit_attempt *a, bool *ret_new, uint64_t *ret_entry, struct base_error *err);
/* Can what failed be asked for once more? */
bool attempt_try_again(const struct commit_attempt *a, int r);

/* ---- attempt_missing.c ---- */

/* Gives the attempt up if a missing rank will not come, or is over the deadline; 0: none is. */
int attempt_missing_judge(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err);

/* ---- attempt_passed.c ---- */

/* Ranks that have gone on without this attempt, and attempts that this rank has gone on without: the former end this
 * attempt, the latter are ended by this rank. 0: nothing; 1 and errors as attempt_give_up. Looks when that is due. */
int attempt_passed(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err);

/* ---- attempt_tries.c ---- */

#define COMMIT_JOB_STEP_BITS 44u
#define COMMIT_JOB_STEP_MAX ((UINT64_C(1) << COMMIT_JOB_STEP_BITS) - 1)

/* Names the attempt by its step, which is at most COMMIT_JOB_STEP_MAX, and the first try of it that this rank has not
 * begun. -BASE_EABORTED: others have ended that one, and maybe some after it. This rank fails with that once, and its
 * next try is the first that is not decided. The launch's lock is held, and the list was read as far as it can be. */
int attempt_try_take(struct commit_attempt *a, struct base_error *err);
void attempt_name_make(const char *launch, uint64_t step, uint64_t try, char name[static PROTO_ATTEMPT_MAX]);
/* The step and try of a name of this launch; false: it is not one. */
bool attempt_name_take(const struct commit_launch *l, const char *name, uint64_t *ret_step, uint64_t *ret_try);
/* Has this rank begun that attempt? When, among those that it has begun: 0 is before all that are known. */
bool attempt_try_begun(const struct commit_launch *l, uint64_t step, uint64_t try, uint64_t *ret_order);

#endif
