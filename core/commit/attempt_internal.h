/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_internal: the attempt itself, which attempt.c and the files of a job's ranks (attempt_ranks.c,
 * attempt_outcome.c, attempt_tries.c, attempt_passed.c) share. */
#ifndef CORE_COMMIT_ATTEMPT_INTERNAL_H
#define CORE_COMMIT_ATTEMPT_INTERNAL_H

#include <pthread.h>

#include "core/commit/attempt.h"
#include "core/commit/incoming.h"
#include "core/commit/launch.h"
#include "core/commit/list_internal.h"

struct attempt_base {
	char run[PROTO_RUN_MAX + 1];
	uint64_t entry;
	struct base_digest manifest;
	bool gone;
};

struct store_attempt {
	struct store *store;
	char launch[17], name[PROTO_ATTEMPT_MAX], run[PROTO_RUN_MAX + 1];
	uint64_t step;
	bool unnumbered;                /* a job's: its caller named no step */
	bool replace;
	uint64_t replaces;              /* the entry that was visible at begin; PROTO_NONE */
	struct store_heartbeat *heartbeat; /* alone; a job's is the launch's */
	pthread_mutex_t lock;           /* base is called by many threads, the rest by one */
	struct store_list *list;        /* of `run`, since before begin; a job's is the launch's, under its lock */
	struct attempt_base *bases; size_t nbases;
	uint32_t next_base;             /* number of the next base.<n> to try */
	struct store_list **lists; size_t nlists; /* of runs that bases are in */
	bool begun, announced, decided;
	bool open; /* the commit entry was put with an outcome that nobody knows, and so was an abort */
	/* that this attempt has opened, and so may delete */
	struct attempt_pack { char name[STORE_PACK_NAME_MAX]; const struct store_pack_writer *w; } *packs;
	size_t npacks;

	/* of a job's rank (attempt_ranks.c) */
	struct store_launch *job;       /* NULL: alone */
	const struct store_commons *commons; /* what this rank holds that others must hold alike; NULL: nothing */
	uint64_t announced_ms;          /* monotonic */
	uint64_t commit_ns;             /* spent in committing */
	struct proto_announcement *parts; /* [world], as they were read; arena NULL: not yet. Who commits has them */
	uint32_t nparts, cursor;        /* how many were read; where to look next */
	uint64_t try, order;            /* of the step, by this launch; among what this rank has begun */
	uint64_t judge_ns;              /* monotonic: when those that are missing are judged again */
	uint64_t passed_ms;             /* monotonic: when it is looked for those that have gone on without it */
	bool warned;                    /* of those that live and are missing */
	uint64_t failing_ms;            /* monotonic: since when waiting only fails; 0: it does not */
	bool failing_told;
};

/* attempt.c, for attempt_ranks.c. */
void store_attempt_packs_delete(struct store_attempt *a);
int store_attempt_put(struct store_attempt *a, const char *last, enum store_record_kind kind,
	const struct base_buf *body, struct base_error *err);
/* Checks and puts the commit entry, deciding an outcome that is left open; the list is the caller's alone meanwhile. */
int store_attempt_commit_entry(struct store_attempt *a, const struct proto_commit *what, uint64_t *ret_entry,
	struct base_error *err);
/* attempt_ranks.c, for attempt.c: what abort, free and base do for a job's rank. */
void store_attempt_job_abort(struct store_attempt *a, const char *reason);
void store_attempt_job_free(struct store_attempt *a);
int store_attempt_job_base(struct store_attempt *a, const struct attempt_base *b, bool *ret_gone,
	struct base_error *err);
int store_attempt_base_list(struct store_attempt *a, const char *run, struct store_list **ret_l,
	struct base_error *err);
bool store_attempt_base_live(const struct store_list *l, uint64_t entry, const struct base_digest *manifest);

#endif
