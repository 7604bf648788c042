/* SPDX-License-Identifier: Apache-2.0
 *
 * index_internal: what the files of index/ share: the environment, its tables, and the format of values.
 *
 *   value   u16 key_len | key | body | u64 XXH3-64 of all before it, seeded with the table's number
 *
 *   table     key                              body
 *   meta      "store"                          u32 version | store id (16)
 *             "next"                           u64 number of the next commit
 *   commits   manifest digest (32)             u64 number | u8 state, with INDEX_OWN
 *   numbers   be64 number                      manifest digest (32) | u64 entry | u64 places | run
 *   packs     be64 number | be32 n             name of the commit's pack n
 *   places    object digest (32)               u64 number | u64 offset | u64 checks | u64 raw_len | u64 stored_len
 *             | u32 n | u16 codec | u8 kind | u8 own
 *   shadows   be64 number | be64 older         (empty): `number` took over places that `older` had
 *
 * The files of rows (rows.c) have `meta` and tables of rows, whose value may be longer:
 *
 *   steps.mdb     steps     manifest digest (32)     id of the set (32) that the step's tensors are
 *                 sets      id (32)                  digests of the layouts (32 each)
 *                 layouts   digest of a layout (32)  the layout object
 *   digests.mdb   digests   manifest digest (32)     digest of each tensor (32 each), in the order of the set's layouts
 *
 * Numbers only grow, so the order of `numbers` is the order in which commits were added, or added again. A place whose
 * number has no row in `numbers` is dead: it is never found, and the next eviction removes it. */
#ifndef INDEX_INDEX_INTERNAL_H
#define INDEX_INDEX_INTERNAL_H

#include <lmdb.h>
#include <sys/types.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "index/index.h"

#define INDEX_VERSION 1u
#define INDEX_RUN_MAX 128u
#define INDEX_PACK_MAX 127u
#define INDEX_KEY_MAX 32u
#define INDEX_BODY_MAX 256u
#define INDEX_VALUE_MAX (2 + INDEX_KEY_MAX + INDEX_BODY_MAX + 8)
#define INDEX_PLACE_BODY_BYTES 48u
#define INDEX_PLACE_BYTES 200u /* an estimate of the file's bytes for a place, in a tree with random keys */

enum index_table { INDEX_META, INDEX_COMMITS, INDEX_NUMBERS, INDEX_PACKS, INDEX_PLACES, INDEX_SHADOWS, INDEX_TABLES };
#define INDEX_FILE "index.mdb"
#define INDEX_NEW_FILE "index.mdb.new"
/* A file in the directory of an index: its name, that of the file that a writer is making, and its tables, of which
 * `meta` is the first. */
struct index_format { const char *file, *new_file; unsigned ntables; const char *tables[INDEX_TABLES]; };
const struct index_format *index_format(unsigned flags); /* of enum index_flag */
/* State of a known commit. Incomplete: it lost places with a removed commit that had taken them over, and should be
 * added again. */
enum { INDEX_HELD = 0, INDEX_EVICTED = 1, INDEX_INCOMPLETE = 2 };
/* A flag of the state: all places are own ones, and stay so when the commit is added again. */
#define INDEX_OWN 0x80u
static inline unsigned index_state(uint8_t byte) { return byte & ~INDEX_OWN; }

struct index {
	MDB_env *env;
	MDB_dbi dbi[INDEX_TABLES];
	const struct index_format *format;
	MDB_txn *txn;               /* rows.c: the reader's only one, or the writer's current one; NULL */
	uint64_t batch_bytes, file_bytes; /* rows.c: put in it; and in all, with what the file had */
	uint64_t max_bytes;
	unsigned flags;
	int dir;                    /* locked by a writer until it is closed */
	int fd;                     /* the file that was checked or made, which is also LMDB's */
};

struct index_body { uint8_t bytes[INDEX_BODY_MAX]; size_t len; };

int index_error(int r); /* LMDB's codes and errno -> negative errno */
/* The same for a writer's calls. LMDB reports EIO if the file system had no room for all of a write: this returns
 * -ENOSPC or -EDQUOT then. The file is useless afterwards. */
int index_write_error(const struct index *i, int r);

/* Opens the environment of the file i->fd. 0 or LMDB's code; ENOSYS: there is no /proc. The caller closes i->env, also
 * after a failure. */
int index_env_open(struct index *i);
int index_tables_open(MDB_txn *txn, const struct index_format *format, bool create, MDB_dbi dbi[INDEX_TABLES]);
/* Opens a directory for an index: not a link, on a local filesystem, and writable by this user alone (else -EPERM). All
 * files in it are reached through this descriptor. A writer locks it: -EBUSY if another writer keeps the lock for long.
 */
int index_dir_open(int parent, const char *dir, unsigned flags, int *ret_fd);
/* The directory's name in its parent if that is open; else its path. */
const char *index_dir_name(int parent, const char *dir);
/* Commits if r is 0, else aborts. Returns r, or the error of the commit. */
int index_end(MDB_txn *txn, int r);

/* Reads all of a sealed file, and copies LMDB's bytes to `to` unless that is -1. -BASE_EDAMAGED: its seal does not
 * match. */
int index_copy(int fd, int to);
/* A number that identifies the file on this file system, also after a rename; a copy has another one. Without birth
 * times it depends on the inode number and the owner alone. -EPERM: another user's file. */
int index_identity(int fd, uint64_t *ret_number);
int index_seal(int fd); /* appends the seal, durably */

/* Commits what a writer has put since the last batch. 0 or a negative errno. */
int index_rows_end(struct index *i);

/* Values with key and check. For index_get a value that is not valid is MDB_NOTFOUND. */
int index_get(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], enum index_table t, const void *key, size_t key_len,
	struct index_body *ret_body);
int index_put(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], enum index_table t, const void *key, size_t key_len,
	const void *body, size_t body_len);
/* ret_body may be NULL */
bool index_value_ok(enum index_table t, const void *key, size_t key_len, const void *value, size_t value_len,
	struct index_body *ret_body);
bool index_meta_ok(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], const uint8_t store_id[16]);

static inline void index_be64(uint8_t *p, uint64_t v) { v = htobe64(v); memcpy(p, &v, 8); }
/* Key of a commit's pack n. */
static inline void index_pack_key(uint8_t key[static 12], uint64_t number, uint32_t n)
{
	n = htobe32(n);
	index_be64(key, number);
	memcpy(key + 8, &n, 4);
}
static inline uint64_t index_get_be64(const void *p) { uint64_t v; memcpy(&v, p, 8); return be64toh(v); }
uint64_t index_used_bytes(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES]); /* of pages that the tables hold */

#endif
