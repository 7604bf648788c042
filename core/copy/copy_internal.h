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
	struct copy_options options;
	struct index *index;            /* of the other store; NULL: there is none */
	struct save_past past;          /* of `run` there: what its steps have */
	char run[PROTO_RUN_MAX + 1];
	uint64_t done_bytes;            /* for progress */
	struct base_digest *parts;      /* of the last step */
	atomic_uint_fast64_t read_bytes;
	pthread_mutex_t pace_lock;      /* protects what follows */
	uint64_t pace_ns;               /* when the next bytes may be read, CLOCK_MONOTONIC */
};

/* A step on its way. */
struct copy_work {
	struct copy *c;
	const struct commit_list_step *step;
	struct proto_manifest m;        /* the source's */
	struct store_layout **layouts;  /* by number in it; NULL: not needed yet */
	struct commit_attempt *attempt;
	struct copy_result *result;
};

/* copy_rank.c: what rank line `line` of the manifest stored, as far as its announcement. */
int copy_rank(struct copy_work *k, uint32_t line, struct base_error *err);
/* copy_fetch.c: reads a piece of the source's pack as save_given (band.h) wants it. */
int copy_fetch(struct copy *c, const char *pack, const struct pack_object_ref *ref, struct save_band *b,
	struct save_piece *p);
/* Bytes of a blob; ref->raw_len of them in all. offset: of a block. */
int copy_fetch_blob(struct copy *c, const char *pack, const struct pack_object_ref *ref, uint64_t offset, void *bytes,
	size_t len, struct base_error *err);

#endif
