/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/copy share. */
#ifndef CORE_COPY_COPY_INTERNAL_H
#define CORE_COPY_COPY_INTERNAL_H

#include <stdatomic.h>

#include "core/copy/copy.h"
#include "core/save/write/rank.h"

struct copy {
	struct store *from, *to;
	const struct copy_options *options; /* borrowed */
	struct index *index;            /* of the other store; NULL: there is none */
	struct save_past past;          /* of `run` there: what its steps have */
	char run[PROTO_RUN_MAX + 1];
	struct commit_list *there;      /* of that run, open for the newest steps; NULL: not opened yet */
	uint64_t done_bytes;            /* for progress */
	struct base_digest *parts;      /* of the last step */
	bool no_facts;                  /* the other store has none; that was said */
	atomic_uint_fast64_t read_bytes;
	pthread_mutex_t pace_lock;      /* protects what follows */
	uint64_t pace_ns;               /* when the next bytes may be read, CLOCK_MONOTONIC */
};

struct copy_rank;

/* A step on its way. */
struct copy_work {
	struct copy *c;
	const struct commit_list *list;
	const struct commit_list_step *step;
	struct proto_manifest m;        /* the source's */
	struct commit_attempt *attempt;
	struct copy_taken { uint32_t line; char pack[PACK_NAME_MAX]; } *taken; size_t ntaken;
	struct copy_rank *rank;         /* whose rows are being read; NULL: none */
	struct copy_result *result;
	struct base_error *err;         /* why copy_rank_row or copy_rank failed */
};

/* copy_facts.c: can the other store have them? Warns once if it cannot. */
bool copy_facts_able(struct copy *c);
/* copy_resume.c: takes over the packs that earlier copies of the step have left. What cannot be had is left: -EINTR or
 * -ENOMEM. */
int copy_resume(struct copy_work *k, struct base_error *err);
/* copy_rank.c: a row of the rank whose part is being read; then what it stored, as far as its announcement. Calls of
 * upkeep_records_walk; arg: the work. */
int copy_rank_row(void *arg, const struct store_layout *l, const struct store_row *row);
int copy_rank(void *arg, uint32_t line, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs);
void copy_rank_free(struct copy_rank *rk); /* NULL-safe */
/* copy_fetch.c: reads pieces of the source's packs as save_given (band.h) wants it; packs: by number. */
int copy_fetch(struct copy *c, const char *const *packs, struct save_band *b, struct save_piece *const *pieces,
	unsigned n);
/* Bytes of a blob, of any store; ref->raw_len of them in all. offset: of a block. */
int copy_read_blob(struct store *s, const char *pack, const struct pack_object_ref *ref, uint64_t offset, void *bytes,
	size_t len, struct base_error *err);
/* The same of the source, at its pace, and counted. */
int copy_fetch_blob(struct copy *c, const char *pack, const struct pack_object_ref *ref, uint64_t offset, void *bytes,
	size_t len, struct base_error *err);

#endif
