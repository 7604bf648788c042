/* SPDX-License-Identifier: Apache-2.0
 *
 * rows: the files of the index that questions about steps are answered from. Keys are digests, and a row says of its
 * key what never changes, so no row goes out of date: those of steps that are gone are dropped by a later writer.
 *
 * A value may be longer than those of the other tables: LMDB gives it pages of its own. A reader has one transaction
 * for as long as it is open, and its rows are in LMDB's pages: the file is sealed and never changes. A writer commits
 * before a transaction is so large that LMDB would spill it (update.c says why). */
#include "index/index_internal.h"

#include <sys/stat.h>

#include "core/base/array.h"

#define BATCH_BYTES (16u << 20)
#define ROW_EXTRA_BYTES (2u + BASE_DIGEST_BYTES + 8u)
#define ROW_SEED 16u /* with the number of the table: of the value's check */

/* The transaction that all calls use, begun if there is none. NULL: it cannot be. */
static MDB_txn *rows_txn(struct index *i)
{
	struct stat st;

	if (i->txn)
		return i->txn;
	if (!(i->flags & (INDEX_STEPS | INDEX_DIGESTS)) || !i->env)
		return NULL;
	if (i->file_bytes == 0 && fstat(i->fd, &st) == 0)
		i->file_bytes = (uint64_t)st.st_size;
	if (mdb_txn_begin(i->env, NULL, i->flags & INDEX_READ_ONLY ? MDB_RDONLY : 0, &i->txn) != 0)
		i->txn = NULL;
	i->batch_bytes = 0;
	return i->txn;
}

int index_rows_end(struct index *i)
{
	MDB_txn *txn = base_steal(i->txn);

	return txn ? index_write_error(i, mdb_txn_commit(txn)) : 0;
}

const uint8_t *index_row(struct index *i, enum index_rows rows, const struct base_digest *key, size_t *ret_len)
{
	MDB_txn *txn = rows_txn(i);
	MDB_val k = {BASE_DIGEST_BYTES, (void *)key->bytes}, v;
	const uint8_t *at;

	if (!txn || rows >= i->format->ntables || mdb_get(txn, i->dbi[rows], &k, &v) != 0)
		return NULL;
	at = v.mv_data;
	if (v.mv_size < ROW_EXTRA_BYTES || base_get16(at) != BASE_DIGEST_BYTES ||
		memcmp(at + 2, key->bytes, BASE_DIGEST_BYTES) != 0 ||
		base_get64(at + v.mv_size - 8) != base_xxh64_of(ROW_SEED + rows, at, v.mv_size - 8))
		return NULL;
	*ret_len = v.mv_size - ROW_EXTRA_BYTES;
	return at + 2 + BASE_DIGEST_BYTES;
}

int index_row_put(struct index *i, enum index_rows rows, const struct base_digest *key, const void *bytes, size_t len)
{
	base_cleanup_free uint8_t *value = malloc(len + ROW_EXTRA_BYTES);
	MDB_txn *txn = rows_txn(i);
	MDB_val k = {BASE_DIGEST_BYTES, (void *)key->bytes}, v = {len + ROW_EXTRA_BYTES, value};
	int r;

	if (!value)
		return -ENOMEM;
	if (!txn || i->flags & INDEX_READ_ONLY || rows >= i->format->ntables)
		return -EROFS;
	if (len > i->max_bytes || i->file_bytes > i->max_bytes - len)
		return -ENOSPC;
	base_put16(value, BASE_DIGEST_BYTES);
	memcpy(value + 2, key->bytes, BASE_DIGEST_BYTES);
	memcpy(value + 2 + BASE_DIGEST_BYTES, bytes, len);
	base_put64(value + v.mv_size - 8, base_xxh64_of(ROW_SEED + rows, value, v.mv_size - 8));
	r = mdb_put(txn, i->dbi[rows], &k, &v, 0);
	i->batch_bytes += v.mv_size;
	i->file_bytes += v.mv_size;
	if (r == 0 && i->batch_bytes > BATCH_BYTES)
		return index_rows_end(i);
	return index_write_error(i, r);
}

int index_rows_drop(struct index *i, enum index_rows rows, bool (*f)(void *arg, const struct base_digest *key),
	void *arg)
{
	base_cleanup_free struct base_digest *gone = NULL;
	size_t n = 0, room = 0;
	MDB_txn *txn = rows_txn(i);
	MDB_cursor *c;
	MDB_val k, v;
	int r = txn ? mdb_cursor_open(txn, i->dbi[rows], &c) : EROFS;

	if (r != 0)
		return index_write_error(i, r);
	for (r = mdb_cursor_get(c, &k, &v, MDB_FIRST); r == 0; r = mdb_cursor_get(c, &k, &v, MDB_NEXT)) {
		struct base_digest key;

		if (k.mv_size != sizeof key)
			continue;
		memcpy(&key, k.mv_data, sizeof key);
		if (f(arg, &key) && (r = base_array_room(gone, room, n + 1) < 0 ? ENOMEM : 0) == 0)
			gone[n++] = key;
		if (r != 0)
			break;
	}
	mdb_cursor_close(c);
	r = r == MDB_NOTFOUND ? 0 : r;
	for (size_t at = 0; r == 0 && at < n; at++) {
		k = (MDB_val){sizeof gone[at], gone[at].bytes};
		r = mdb_del(txn, i->dbi[rows], &k, NULL);
	}
	return index_write_error(i, r);
}
