/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest: from announcements to the record that a commit entry names, and back (docs/format/manifest.md).
 * Deterministic: two committers of one attempt write the same bytes. */
#ifndef CORE_STEP_MANIFEST_H
#define CORE_STEP_MANIFEST_H

#include "core/step/store.h"

/* From the announcements of all ranks, ascending. Checks that they agree (run, attempt, step, world, attributes);
 * encodes into ret_body. */
int store_manifest_make(const struct proto_announcement *const *all, uint32_t n, struct base_buf *ret_body,
	struct base_digest *ret_digest, struct base_error *err);
/* The part of the future manifest that follows from one rank's announcement: only this rank's line, its layout, and the
 * packs of its part, with the live bytes that this rank reaches; no attributes, no headers. */
int store_manifest_excerpt(const struct proto_announcement *a, struct proto_manifest *ret_m, struct base_error *err);
/* runs/<run>/manifests/<digest>, put as a record; durable. */
int store_manifest_put(struct store *s, const char *run, const struct base_buf *body, const struct base_digest *digest,
	struct base_error *err);
/* Read, checked against the digest (tree digest of the body). */
int store_manifest_get(struct store *s, const char *run, const struct base_digest *digest, struct proto_manifest *ret_m,
	struct base_error *err);
/* An object that a manifest itself refers to (a layout, a header, a part), into fresh memory, re-hashed. */
int store_manifest_object(struct store *s, const struct proto_manifest *m, const struct proto_ref *from, uint64_t max,
	void **ret_bytes, struct base_error *err);
int store_manifest_path(const char *run, const struct base_digest *digest, char path[static STORAGE_NAME_MAX]);

/* Invariant 2: every pack that is named exists and has the named size, also those of the step's own attempt. */
int store_manifest_check_packs(struct store *s, const struct proto_manifest *m, struct base_error *err);

#endif
