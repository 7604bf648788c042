/* SPDX-License-Identifier: Apache-2.0
 *
 * index: an LMDB database derived from manifests and parts: deleting it loses nothing. The only user of lmdb.
 *
 * Tables: `commits` (manifest digest -> number and state), `numbers` (number -> manifest digest, entry, run), `places`
 * (piece or blob digest -> where a live commit keeps it), and others (docs/index.md). Every value repeats its key and
 * has an XXH3-64 of itself; a miss or a mismatch is "not found". Damage can make LMDB end the process (an assertion,
 * SIGBUS), so the file ends with a seal, a check of all its bytes, which index_open verifies first. A sealed file never
 * changes: a writer makes a new file from it, and index_publish puts that in its place. A reader keeps the file that it
 * opened. A process of its own writes (`vckpt index`), and if it dies, only what it would have added is lost. The size
 * is bounded: whole commits are evicted, those that were added, or added again, longest ago. There is no index on
 * network filesystems (by statfs magic): -EOPNOTSUPP. Readers: any thread. A writer: one thread, and one writer for a
 * directory, while others wait. Not across fork. */
#ifndef INDEX_INDEX_H
#define INDEX_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/digest.h"
#include "core/base/error.h"

#define INDEX_MAX_BYTES (UINT64_C(1) << 30)

struct index_place {
	struct base_digest digest;      /* of the object */
	uint64_t offset, checks, raw_len, stored_len;
	uint16_t codec; uint8_t kind;
	char pack[128];                 /* name */
	/* a commit that is known to reach it */
	char run[129];
	bool own;                       /* it was added by the writer of that commit, and is trusted */
	uint64_t entry; struct base_digest manifest;
};

enum index_flag {
	INDEX_READ_ONLY = 1 << 0,
	INDEX_ANEW = 1 << 1,            /* a writer starts with an empty index, even if there is one */
	INDEX_BRIEFLY = 1 << 2,         /* a writer waits a second for another writer, not a minute */
	INDEX_AT_ONCE = 1 << 3,         /* or not at all */
	/* another file of the directory, which has rows: of steps, sets and layouts; of digests of tensors */
	INDEX_STEPS = 1 << 4,
	INDEX_DIGESTS = 1 << 5,
};
struct index;
/* The index's directory is the last part of `dir` in `parent`, a descriptor (O_PATH will do), so that a user who can
 * change directories above it cannot redirect it. `parent` -1: `dir` is its path. Reads the whole file once (a writer
 * copies it). -ENOENT: there is no index for a reader. -BASE_EDAMAGED: the file is damaged, is a copy that vckpt did
 * not make, or is another user's or another store's index. -EBUSY: another writer has been at work for a minute
 * (INDEX_BRIEFLY: a second; INDEX_AT_ONCE: is at work). -EPERM: the directory, or the file that a writer made, is
 * another user's, or others may write in the directory. -ENOSYS: there is no /proc, through which LMDB opens the same
 * file that was checked. */
int index_open(int parent, const char *dir, const uint8_t store_id[16], uint64_t max_bytes, unsigned flags,
	struct index **ret_i, struct base_error *err);
/* Seals what a writer made and puts it in the place of the old index, durably. Afterwards only index_close may be
 * called. After an error the old index is still in place, or, if only the last fsync of the directory failed, the new
 * one. -ESTALE: another file was put in the place of the one that this writer made. */
int index_publish(struct index *i);
void index_close(struct index *i);  /* NULL-safe. Drops what was not published. */
/* Removes what a dead writer left in the directory. Does nothing while a writer is at work; never waits. */
void index_tidy(int parent, const char *dir);

/* These answer "no" on any failure; the caller then looks into the parts. */
int index_find(struct index *i, const struct base_digest *digest, struct index_place *ret_place); /* 0, -ENOENT */
/* true: it was added before, even if it was evicted since; false: it should be added */
bool index_has_commit(struct index *i, const struct base_digest *manifest);
/* Were all places of the commit added as own ones? */
bool index_has_own(struct index *i, const struct base_digest *manifest);
/* Adds a commit and its places (places that were known already now name this commit). Evicts other commits as a whole
 * if the bound is exceeded: those that were added, or added again, longest ago. There is one transaction for each batch
 * of 32,768 places, and the commit counts once all are in. A commit larger than the bound is only recorded as known. */
int index_add_commit(struct index *i, const char *run, uint64_t entry, const struct base_digest *manifest,
	const struct index_place *places, uint64_t n);
/* Commits whose places it had taken over should then be added again (index_has_commit). -ENOENT. */
int index_remove_commit(struct index *i, const struct base_digest *manifest);
/* Calls f for every known commit, including evicted ones, until f returns something other than 0, which is returned. f
 * must not call functions of the index. */
int index_each_commit(struct index *i, int (*f)(void *arg, const struct base_digest *manifest), void *arg);
/* held commits; places, dead ones included; bytes of pages in use */
struct index_stats { uint64_t commits, places, bytes; };
int index_stat(struct index *i, struct index_stats *ret_s);

/* ---- rows.c: a file of INDEX_STEPS or INDEX_DIGESTS. One thread. ---- */

/* What rows there are: docs/index.md. Those of INDEX_DIGESTS are in the table INDEX_OF_STEP, too. */
enum index_rows { INDEX_OF_STEP = 1, INDEX_OF_SET, INDEX_OF_LAYOUT };
/* Borrowed until the next put, drop or close, and of any alignment. NULL: there is none, or it is not valid. */
const uint8_t *index_row(struct index *i, enum index_rows rows, const struct base_digest *key, size_t *ret_len);
/* -ENOSPC: the file's bound would be exceeded. */
int index_row_put(struct index *i, enum index_rows rows, const struct base_digest *key, const void *bytes, size_t len);
/* Drops those for which f returns true; f must not call functions of the index. */
int index_rows_drop(struct index *i, enum index_rows rows, bool (*f)(void *arg, const struct base_digest *key),
	void *arg);

#endif
