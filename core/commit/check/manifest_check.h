/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest_check: what has to be true of a manifest before a commit entry may name it, and what the announcements that
 * it is made from have to agree in. verify checks the same of existing steps. */
#ifndef CORE_COMMIT_CHECK_MANIFEST_CHECK_H
#define CORE_COMMIT_CHECK_MANIFEST_CHECK_H

#include <pthread.h>

#include "core/step/manifest.h"

/* Which ranks' parts have which blobs (manifest_blobs.c). Names and ranges belong to it. */
struct check_blob_names {
	pthread_mutex_t lock;           /* protects all below while parts are added */
	struct base_buf text;           /* names, each with its NUL */
	struct check_blob_row *rows; size_t nrows, room;
	bool many;                      /* too many to name */
	struct proto_blob_name *names; uint32_t nnames;
	struct proto_rank_range *ranges; size_t nranges;
	size_t text_bytes;
};
void check_blob_names_init(struct check_blob_names *b);
void check_blob_names_release(struct check_blob_names *b);
int check_blob_names_add(struct check_blob_names *b, const struct proto_part *part); /* any thread; -ENOMEM */
/* After all parts: sets the blobs of the manifest, or leaves them out where they would be long. -ENOMEM */
int check_blob_names_set(struct check_blob_names *b, struct proto_manifest *m);
/* The first name of which the two manifests say different ranks; NULL: none. */
const char *check_blob_names_differ(const struct proto_manifest *a, const struct proto_manifest *b);

/* Invariant 4: loads the layouts and all rows of all parts and checks that the boxes of every tensor cover it exactly
 * (identical boxes of several writers count once and must have equal digests). A manifest of one rank whose rows are
 * all WHOLE needs only its row table. -BASE_EFORMAT names tensor, box, ranks. ret_tensors (may be NULL): how many there
 * are; a tensor that several layouts list counts once. */
int check_manifest_cover(struct store *s, const struct proto_manifest *m, uint64_t *ret_tensors,
	struct base_error *err);
/* Of a manifest that was made of announcements (store_manifest_make) and decoded: checks its parts, and makes the body
 * anew with what they say: how many tensors there are, and in a store that has the word list-2 which blobs. */
int check_manifest_finish(struct store *s, struct proto_manifest *m, struct base_buf *ret_body,
	struct base_digest *ret_digest, struct base_error *err);
/* Its first check: do layouts that list the same tensor agree about it? -BASE_EFORMAT names tensor, ranks and what each
 * said. */
int check_manifest_layouts(struct store *s, const struct proto_manifest *m, struct base_error *err);
/* Of the announcements of all ranks, ascending: do those of a group of replicas say the same
 * (core/save/plan/replica.h)? If not, two parts are read: -BASE_EFORMAT names the first tensor that differs, ranks, and
 * what can be done. -ENOMEM. */
int check_manifest_replicas(struct store *s, const struct proto_announcement *const *all, uint32_t n,
	struct base_error *err);
#endif
