/* SPDX-License-Identifier: Apache-2.0
 *
 * index: LMDB, derived from manifests and parts: deleting it loses nothing. The only user of lmdb.
 *
 * Tables: `commits` (manifest digest -> number and state), `numbers` (number -> manifest digest, entry, run), `places`
 * (piece or blob digest -> where a live commit keeps it), and others (docs/index.md). Every value repeats its key and
 * carries an XXH3-64 of itself; a miss or a mismatch is "not found". Damage can make LMDB end the process (an
 * assertion, SIGBUS). So the file has a seal, a check of all its bytes, which index_open looks at first. A sealed file
 * never changes: a writer makes a new one from it, and index_publish puts that in its place. A reader keeps the file
 * that it opened. A process of its own writes (`vckpt index`), whose death costs only what it would have added.
 * Bounded: whole commits are evicted, those that were added, or added again, the longest ago. Not on network
 * filesystems (statfs magic): then no index (-EOPNOTSUPP). Readers: any thread. A writer: one thread; one a directory,
 * others wait. Not across fork. */
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
	/* the commit that is known to reach it */
	char run[129];
	bool own;                       /* and who added it wrote what says so: it is believed */
	uint64_t entry; struct base_digest manifest;
};

enum index_flag {
	INDEX_READ_ONLY = 1 << 0,
	INDEX_ANEW = 1 << 1,            /* a writer starts from nothing, whatever stands there */
	INDEX_BRIEFLY = 1 << 2,         /* a writer waits a second for another one, not a minute */
};
struct index;
/* The index's directory is the last part of `dir` in `parent`, which is open (O_PATH will do): so nobody who can change
 * what the other parts name has a say in where it is. `parent` -1: `dir` is its path.
 * Reads the whole file once (a writer copies it). -ENOENT: a reader finds no index. -BASE_EDAMAGED: the file is
 * damaged, is a copy that vckpt has not made, or is another user's or another store's index. -EBUSY: another writer has
 * been at work for a minute (INDEX_BRIEFLY: a second). -EPERM: the directory, or the file that a writer made, is
 * another user's, or others may write in the directory. -ENOSYS: there is no /proc, through which LMDB gets the very
 * file that was checked. */
int index_open(int parent, const char *dir, const uint8_t store_id[16], uint64_t max_bytes, unsigned flags,
	struct index **ret_i, struct base_error *err);
/* Seals what a writer made and puts it in the place of the old index, durably. Afterwards only index_close. On an error
 * the old index stands as it was, or, if only the last fsync of the directory failed, the new one. -ESTALE: somebody
 * put another file in the place of the one that was made. */
int index_publish(struct index *i);
void index_close(struct index *i);  /* NULL-safe. What was not published is gone. */
/* Removes what a writer that died has left in the directory. Nothing while a writer is at work; never waits. */
void index_tidy(int parent, const char *dir);

/* Both answer "no" if anything goes wrong; parts answer then. */
int index_find(struct index *i, const struct base_digest *digest, struct index_place *ret_place); /* 0, -ENOENT */
/* known: added before, even if evicted since; false: to be added */
bool index_has_commit(struct index *i, const struct base_digest *manifest);
/* A commit all of whose places were added as own ones. */
bool index_has_own(struct index *i, const struct base_digest *manifest);
/* Adds a commit and its places (those known already now name this commit), evicts whole others over the bound: those
 * that were added, or added again, the longest ago. One transaction a batch of 32,768 places; the commit counts once
 * all are in. One larger than the bound is only made known. */
int index_add_commit(struct index *i, const char *run, uint64_t entry, const struct base_digest *manifest,
	const struct index_place *places, uint64_t n);
/* The commits whose places it had taken over are "to be added" again (index_has_commit). -ENOENT. */
int index_remove_commit(struct index *i, const struct base_digest *manifest);
/* Calls f with every commit that is known, evicted ones too, until it returns something else than 0, which is
 * returned. f calls nothing of the index. */
int index_each_commit(struct index *i, int (*f)(void *arg, const struct base_digest *manifest), void *arg);
/* held commits; places, dead ones included; bytes of pages in use */
struct index_stats { uint64_t commits, places, bytes; };
int index_stat(struct index *i, struct index_stats *ret_s);

#endif
