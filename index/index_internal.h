/* SPDX-License-Identifier: Apache-2.0
 *
 * index_internal: what the files of index/ share: the environment, its tables, and the envelope of every value.
 *
 *   value   u16 key_len | key | body | u64 XXH3-64 of all before it, seeded with the table's number
 *
 *   table     key                              body
 *   meta      "store"                          u32 version | store id (16)
 *             "next"                           u64 number of the next commit
 *   commits   manifest digest (32)             u64 number | u8 state
 *   numbers   be64 number                      manifest digest (32) | u64 entry | u64 places | run
 *   packs     be64 number | be32 n             name of the commit's pack n
 *   places    object digest (32)               u64 number | u64 offset | u64 checks | u64 raw_len | u64 stored_len
 *             | u32 n | u16 codec | u8 kind | u8 0
 *   shadows   be64 number | be64 older         (nothing): `number` took places over that `older` had
 *
 * Numbers only grow, so the order of `numbers` is the order of last use. A place whose number has no row in `numbers`
 * is dead: never found, swept with the next eviction. */
#ifndef INDEX_INDEX_INTERNAL_H
#define INDEX_INDEX_INTERNAL_H

#include <lmdb.h>
#include <pthread.h>
#include <sys/types.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "index/index.h"

#define INDEX_VERSION 1u
#define INDEX_READERS 1024u
#define INDEX_RUN_MAX 128u
#define INDEX_PACK_MAX 127u
#define INDEX_KEY_MAX 32u
#define INDEX_BODY_MAX 256u
#define INDEX_VALUE_MAX (2 + INDEX_KEY_MAX + INDEX_BODY_MAX + 8)
#define INDEX_PLACE_BODY_BYTES 48u
#define INDEX_PLACE_BYTES 200u /* of the file, for one place in a tree that is filled at random: for estimates */

enum index_table { INDEX_META, INDEX_COMMITS, INDEX_NUMBERS, INDEX_PACKS, INDEX_PLACES, INDEX_SHADOWS, INDEX_TABLES };
/* State of a known commit. Incomplete: places of it went with a removed commit that had taken them over; it is to be
 * added again. */
enum { INDEX_HELD = 0, INDEX_EVICTED = 1, INDEX_INCOMPLETE = 2 };

struct index {
	MDB_env *env;
	MDB_dbi dbi[INDEX_TABLES];
	/* Held shared by every transaction, exclusively while the map is resized: LMDB forbids that under a
	 * transaction. */
	pthread_rwlock_t resize;
	uint64_t max_bytes;
	unsigned flags;
	struct index_open_dir *dir; /* in the process-wide table of open directories */
};

struct index_body { uint8_t bytes[INDEX_BODY_MAX]; size_t len; };

int index_error(int rc); /* LMDB's codes and errno -> negative errno */

/* A fresh environment; 0 or LMDB's code. The caller closes *ret_env, also after a failure where it is not NULL. */
int index_env_open(const char *dir, unsigned flags, uint64_t map_bytes, MDB_env **ret_env);
int index_tables_open(MDB_txn *txn, bool create, MDB_dbi dbi[INDEX_TABLES]);
/* Is `dir` one that an index may lie in: a directory, no link, on a local filesystem, its files regular. Takes a lock
 * of the directory that opening and deleting share (close *ret_fd to let it go); -EBUSY when somebody keeps it for
 * long. */
int index_dir_lock(const char *dir, int *ret_fd);

/* Transactions that cope with a map that another process has grown and with slots that dead readers keep. End with
 * index_end. */
int index_begin(struct index *i, unsigned flags, MDB_txn **ret_txn);
/* commits when rc is 0 and aborts else; returns rc or the error of the commit */
int index_end(struct index *i, MDB_txn *txn, int rc);

/* The envelope. A value that is not right is MDB_NOTFOUND to index_get. */
int index_get(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], enum index_table t, const void *key, size_t key_len,
	struct index_body *ret_body);
int index_put(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], enum index_table t, const void *key, size_t key_len,
	const void *body, size_t body_len);
/* ret_body may be NULL */
bool index_value_ok(enum index_table t, const void *key, size_t key_len, const void *value, size_t value_len,
	struct index_body *ret_body);
bool index_meta_ok(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], const uint8_t store_id[16]);

static inline void index_be64(uint8_t *p, uint64_t v) { v = htobe64(v); memcpy(p, &v, 8); }
static inline uint64_t index_get_be64(const void *p) { uint64_t v; memcpy(&v, p, 8); return be64toh(v); }
uint64_t index_used_bytes(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES]); /* of pages that the tables hold */

/* check.c's second look: every page that the snapshot `txnid` reaches, read through `fd` (pages.c). 0 or
 * -BASE_EDAMAGED, -ENOMEM. */
int index_pages_check(int fd, uint64_t txnid);

#endif
