/* SPDX-License-Identifier: Apache-2.0
 *
 * index: opening, publishing, and the questions that readers ask. Every answer is copied out inside its transaction:
 * LMDB's pointers end with it. */
#include "index/index_internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Opens all tables in one transaction; they are never closed. Writes the identity into a new index. */
static int tables(struct index *i, const uint8_t store_id[16])
{
	bool writes = !(i->flags & INDEX_READ_ONLY);
	MDB_txn *txn;
	int r = mdb_txn_begin(i->env, NULL, writes ? 0 : MDB_RDONLY, &txn);
	MDB_stat st;

	if (r != 0)
		return r;
	r = index_tables_open(txn, i->format, writes, i->dbi);
	if (r == 0)
		r = mdb_stat(txn, i->dbi[INDEX_META], &st);
	if (r == 0 && st.ms_entries == 0 && writes) {
		uint8_t body[20];
		base_put32(body, INDEX_VERSION);
		memcpy(body + 4, store_id, 16);
		r = index_put(txn, i->dbi, INDEX_META, "store", 5, body, sizeof body);
		base_put64(body, 1);
		if (r == 0)
			r = index_put(txn, i->dbi, INDEX_META, "next", 4, body, 8);
	}
	if (r == 0 && !index_meta_ok(txn, i->dbi, store_id))
		r = MDB_INCOMPATIBLE;
	return index_end(txn, r);
}

/* Does not follow a link or wait for a pipe. */
static int file_open(const struct index *i)
{
	int fd = openat(i->dir, i->format->file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	return fd >= 0 ? fd : errno == ELOOP ? -BASE_EDAMAGED : -errno;
}

/* The file that a writer works on: a copy of the index, or an empty one. */
static int new_file(struct index *i)
{
	base_cleanup_close int from = i->flags & INDEX_ANEW ? -ENOENT : file_open(i);
	uint64_t number;
	int r;

	if (from < 0 && from != -ENOENT)
		return from;
	if (unlinkat(i->dir, i->format->new_file, 0) < 0 && errno != ENOENT) /* of a writer that died */
		return -errno;
	i->fd = openat(i->dir, i->format->new_file, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	if (i->fd < 0)
		return -errno;
	r = index_identity(i->fd, &number); /* -EPERM: the file system gives all files to one user */
	return r == 0 && from >= 0 ? index_copy(from, i->fd) : r;
}

static int sealed_file(struct index *i)
{
	int fd = file_open(i);
	if (fd < 0)
		return fd;
	i->fd = fd;
	return index_copy(fd, -1);
}

static int open_in(struct index *i, int parent, const char *dir, const uint8_t store_id[16])
{
	bool writes = !(i->flags & INDEX_READ_ONLY);
	int r = index_dir_open(parent, dir, i->flags, &i->dir);
	if (r == 0)
		r = writes ? new_file(i) : sealed_file(i);
	if (r < 0)
		return r;
	r = index_env_open(i);
	r = r == 0 ? tables(i, store_id) : r;
	return writes ? index_write_error(i, r) : index_error(r);
}

/* A collection of a store that a group shares lists this directory, too, so this user's umask must not keep the group
 * out. Only this user may write in it. */
static int dir_make(int parent, const char *dir)
{
	const char *name = index_dir_name(parent, dir);
	struct stat st;
	base_cleanup_close int fd = -1;

	if (mkdirat(parent >= 0 ? parent : AT_FDCWD, name, 0755) < 0)
		return errno == EEXIST ? 0 : -errno;
	if (parent < 0 || fstat(parent, &st) < 0 || !(st.st_mode & S_IWGRP))
		return 0;
	fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (fchown(fd, (uid_t)-1, st.st_gid) == 0) /* else the group's collections report what keeps them out */
		(void)fchmod(fd, st.st_mode & (0755 | S_ISGID));
	return 0;
}

int index_open(int parent, const char *dir, const uint8_t store_id[16], uint64_t max_bytes, unsigned flags,
	struct index **ret_i, struct base_error *err)
{
	int r;
	struct index *i;

	if (max_bytes == 0 || max_bytes > UINT64_C(1) << 40)
		max_bytes = INDEX_MAX_BYTES;
	r = flags & INDEX_READ_ONLY ? 0 : dir_make(parent, dir);
	if (r < 0)
		return base_error_set(err, r, "the index %s cannot be made: %s", dir, base_error_name(r));
	i = calloc(1, sizeof *i);
	if (!i)
		return base_no_memory(err);
	i->max_bytes = max_bytes;
	i->flags = flags;
	i->format = index_format(flags);
	i->dir = i->fd = -1;
	r = open_in(i, parent, dir, store_id);
	if (r < 0)
		index_close(i);
	if (r == -EOPNOTSUPP)
		return base_error_set(err, r, "%s is on a network filesystem: no index there", dir);
	if (r == -ENOSYS)
		return base_error_set(err, r, "the index %s cannot be opened without /proc/self/fd", dir);
	if (r < 0)
		return base_error_set(err, r, "the index %s cannot be opened: %s", dir, base_error_name(r));
	*ret_i = i;
	return 0;
}

/* -ESTALE: the name of the file that the writer made now has another file, which was not checked. */
static int still_ours(const struct index *i)
{
	struct stat named, made;
	if (fstat(i->fd, &made) < 0 || fstatat(i->dir, i->format->new_file, &named, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT ? -ESTALE : -errno;
	return named.st_dev == made.st_dev && named.st_ino == made.st_ino ? 0 : -ESTALE;
}

int index_publish(struct index *i)
{
	int r;

	if (i->flags & INDEX_READ_ONLY)
		return -EROFS;
	r = index_rows_end(i);
	mdb_env_close(i->env);
	i->env = NULL;
	if (r == 0)
		r = index_seal(i->fd);
	if (r == 0)
		r = still_ours(i);
	if (r == 0 && renameat(i->dir, i->format->new_file, i->dir, i->format->file) < 0)
		r = -errno;
	if (r < 0)
		return r;
	/* An index from before there were seals had these names. Its writers change it in place, so it is another file.
	 */
	unlinkat(i->dir, "data.mdb", 0);
	unlinkat(i->dir, "lock.mdb", 0);
	return fsync(i->dir) < 0 ? -errno : 0;
}

void index_close(struct index *i)
{
	if (!i)
		return;
	if (i->txn)
		mdb_txn_abort(i->txn);
	if (i->env)
		mdb_env_close(i->env);
	if (i->dir >= 0 && !(i->flags & INDEX_READ_ONLY))
		unlinkat(i->dir, i->format->new_file, 0); /* still locked, so it is this writer's */
	if (i->fd >= 0)
		close(i->fd);
	if (i->dir >= 0)
		close(i->dir);
	free(i);
}

void index_tidy(int parent, const char *dir)
{
	static const unsigned files[] = {0, INDEX_STEPS, INDEX_DIGESTS};
	base_cleanup_close int fd = -1;
	struct stat st;

	for (unsigned n = 0; n < BASE_COUNT(files); n++) {
		const char *left = index_format(files[n])->new_file;

		if ((fd >= 0 || index_dir_open(parent, dir, INDEX_READ_ONLY, &fd) == 0) &&
			fstatat(fd, left, &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_uid == geteuid() &&
			flock(fd, LOCK_EX | LOCK_NB) == 0)
			unlinkat(fd, left, 0);
	}
}

static int find_pack(struct index *i, MDB_txn *txn, uint64_t number, uint32_t n, struct index_place *ret_place)
{
	uint8_t key[12];
	struct index_body b;
	int r;

	index_pack_key(key, number, n);
	r = index_get(txn, i->dbi, INDEX_PACKS, key, sizeof key, &b);
	if (r != 0)
		return r;
	if (b.len == 0 || b.len > INDEX_PACK_MAX || memchr(b.bytes, 0, b.len))
		return MDB_NOTFOUND;
	memcpy(ret_place->pack, b.bytes, b.len);
	return 0;
}

static int find_commit(struct index *i, MDB_txn *txn, uint64_t number, struct index_place *ret_place)
{
	uint8_t key[8];
	struct index_body b;
	int r;

	index_be64(key, number);
	r = index_get(txn, i->dbi, INDEX_NUMBERS, key, sizeof key, &b);
	if (r != 0)
		return r;
	if (b.len <= 48 || b.len > 48 + INDEX_RUN_MAX || memchr(b.bytes + 48, 0, b.len - 48))
		return MDB_NOTFOUND;
	memcpy(ret_place->manifest.bytes, b.bytes, 32);
	ret_place->entry = base_get64(b.bytes + 32);
	memcpy(ret_place->run, b.bytes + 48, b.len - 48);
	return 0;
}

int index_find(struct index *i, const struct base_digest *digest, struct index_place *ret_place)
{
	struct index_place p = {.digest = *digest};
	struct index_body b;
	MDB_txn *txn;
	int r;

	if (mdb_txn_begin(i->env, NULL, MDB_RDONLY, &txn) != 0)
		return -ENOENT;
	r = index_get(txn, i->dbi, INDEX_PLACES, digest->bytes, sizeof digest->bytes, &b);
	if (r == 0 && b.len != INDEX_PLACE_BODY_BYTES)
		r = MDB_NOTFOUND;
	if (r == 0) {
		p.offset = base_get64(b.bytes + 8);
		p.checks = base_get64(b.bytes + 16);
		p.raw_len = base_get64(b.bytes + 24);
		p.stored_len = base_get64(b.bytes + 32);
		p.codec = base_get16(b.bytes + 44);
		p.kind = b.bytes[46];
		p.own = b.bytes[47];
		r = find_commit(i, txn, base_get64(b.bytes), &p);
	}
	if (r == 0)
		r = find_pack(i, txn, base_get64(b.bytes), base_get32(b.bytes + 40), &p);
	mdb_txn_abort(txn);
	if (r != 0)
		return -ENOENT; /* for any reason: the caller looks into the parts */
	*ret_place = p;
	return 0;
}

static bool get_commit(struct index *i, const struct base_digest *manifest, uint8_t *ret_byte)
{
	struct index_body b;
	MDB_txn *txn;
	int r;

	if (mdb_txn_begin(i->env, NULL, MDB_RDONLY, &txn) != 0)
		return false;
	r = index_get(txn, i->dbi, INDEX_COMMITS, manifest->bytes, sizeof manifest->bytes, &b);
	mdb_txn_abort(txn);
	if (r != 0 || b.len != 9)
		return false;
	*ret_byte = b.bytes[8];
	return true;
}

bool index_has_commit(struct index *i, const struct base_digest *manifest)
{
	uint8_t byte;
	return get_commit(i, manifest, &byte) && index_state(byte) != INDEX_INCOMPLETE;
}

bool index_has_own(struct index *i, const struct base_digest *manifest)
{
	uint8_t byte;
	return get_commit(i, manifest, &byte) && byte & INDEX_OWN;
}

int index_stat(struct index *i, struct index_stats *ret_s)
{
	MDB_stat numbers, places;
	MDB_txn *txn;
	int r = mdb_txn_begin(i->env, NULL, MDB_RDONLY, &txn);
	if (r != 0)
		return index_error(r);
	r = mdb_stat(txn, i->dbi[INDEX_NUMBERS], &numbers);
	if (r == 0)
		r = mdb_stat(txn, i->dbi[INDEX_PLACES], &places);
	if (r == 0)
		*ret_s = (struct index_stats){numbers.ms_entries, places.ms_entries, index_used_bytes(txn, i->dbi)};
	mdb_txn_abort(txn);
	return index_error(r);
}

int index_each_commit(struct index *i, int (*f)(void *arg, const struct base_digest *manifest), void *arg)
{
	MDB_cursor *c;
	MDB_txn *txn;
	int said = 0, r = mdb_txn_begin(i->env, NULL, MDB_RDONLY, &txn);
	if (r != 0)
		return index_error(r);
	r = mdb_cursor_open(txn, i->dbi[INDEX_COMMITS], &c);
	if (r == 0) {
		struct base_digest manifest;
		MDB_val k, v;
		for (r = mdb_cursor_get(c, &k, &v, MDB_FIRST); r == 0 && said == 0;
			r = mdb_cursor_get(c, &k, &v, MDB_NEXT)) {
			if (k.mv_size != sizeof manifest)
				continue;
			memcpy(&manifest, k.mv_data, sizeof manifest);
			said = f(arg, &manifest);
		}
		mdb_cursor_close(c);
	}
	mdb_txn_abort(txn);
	return said != 0 ? said : r == MDB_NOTFOUND || r == 0 ? 0 : index_error(r);
}
