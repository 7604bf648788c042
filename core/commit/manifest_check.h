/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest_check: what has to be true of a manifest before a commit entry may name it, and what the announcements that
 * it is made from have to agree in. verify asks the same of steps that are there. */
#ifndef CORE_COMMIT_MANIFEST_CHECK_H
#define CORE_COMMIT_MANIFEST_CHECK_H

#include "core/step/manifest.h"

/* Invariant 4: loads the layouts and all rows of all parts and checks that the boxes of every tensor cover it exactly
 * (identical boxes of several writers count once and must have equal digests). A manifest of one rank whose rows are
 * all WHOLE needs only its row table. -BASE_EFORMAT names tensor, box, ranks. ret_tensors (NULL: not asked): how many
 * there are, those that several layouts list counted once. */
int store_manifest_check_cover(struct store *s, const struct proto_manifest *m, uint64_t *ret_tensors,
	struct base_error *err);
/* The first thing that it does: do layouts that list the same tensor say the same of it? -BASE_EFORMAT names tensor,
 * ranks and what each said. */
int store_manifest_check_layouts(struct store *s, const struct proto_manifest *m, struct base_error *err);
/* Of the announcements of all ranks, ascending: do those of a group of replicas say the same
 * (core/save/plan/replica.h)? Where not, two parts are read: -BASE_EFORMAT names the first tensor that differs, ranks,
 * and what can be done. -ENOMEM. */
int store_manifest_check_replicas(struct store *s, const struct proto_announcement *const *all, uint32_t n,
	struct base_error *err);
#endif
