/* SPDX-License-Identifier: Apache-2.0
 *
 * env: the LMDB environment, its tables, transactions and the format of values.
 *
 * How LMDB is used, and why:
 * - No MDB_WRITEMAP: a full disk would be SIGBUS, and a stray write of the process would reach the file.
 * - MDB_NOLOCK: a sealed file never changes, and a file that is being made has one thread. So there is no lock file, no
 *   slot of a dead reader and no map that another process has grown.
 * - MDB_NOSYNC: a file without a seal does not count; the seal is made durable together with all before it.
 * - MDB_NOTLS: reader slots belong to transactions, not to threads, which come and go.
 * - The map is reserved larger than the bound (address space only). */
#include "index/index_internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

enum { LOCK_TRIES = 6000, LOCK_TRIES_BRIEFLY = 100 }; /* of 10 ms */

const struct index_format *index_format(unsigned flags)
{
	static const struct index_format
		places = {INDEX_FILE, INDEX_NEW_FILE, INDEX_TABLES,
			{"meta", "commits", "numbers", "packs", "places", "shadows"}},
		steps = {"steps.mdb", "steps.mdb.new", 4, {"meta", "steps", "sets", "layouts"}},
		digests = {"digests.mdb", "digests.mdb.new", 2, {"meta", "digests"}};

	return flags & INDEX_STEPS ? &steps : flags & INDEX_DIGESTS ? &digests : &places;
}

int index_error(int r)
{
	switch (r) {
	case 0: return 0;
	case MDB_NOTFOUND: return -ENOENT;
	case MDB_MAP_FULL: return -ENOSPC;
	case MDB_READERS_FULL: case MDB_MAP_RESIZED: return -EBUSY;
	case MDB_PAGE_NOTFOUND:
	case MDB_CORRUPTED:
	case MDB_PANIC:
	case MDB_VERSION_MISMATCH:
	case MDB_INVALID:
	case MDB_INCOMPATIBLE:
	case MDB_BAD_TXN: case MDB_CURSOR_FULL: case MDB_PAGE_FULL: case MDB_BAD_DBI: return -BASE_EDAMAGED;
	}
	return r > 0 ? -r : -EIO;
}

int index_write_error(const struct index *i, int r)
{
	static const uint8_t page[4096];
	struct stat st;
	ssize_t n = 0;

	r = index_error(r);
	if (r != -EIO)
		return r;
	do /* LMDB has used up the room; less than a page may be left */
		n = fstat(i->fd, &st) == 0 ? pwrite(i->fd, page, sizeof page, st.st_size) : -1;
	while (n > 0 && n < (ssize_t)sizeof page);
	return n < 0 && (errno == ENOSPC || errno == EDQUOT) ? -errno : r;
}

int index_env_open(struct index *i)
{
	bool reads = i->flags & INDEX_READ_ONLY;
	char path[40];
	int r = mdb_env_create(&i->env);
	if (r == 0)
		r = mdb_env_set_maxdbs(i->env, INDEX_TABLES);
	if (r == 0)
		r = mdb_env_set_mapsize(i->env, i->max_bytes * 2 + (UINT64_C(64) << 20));
	/* LMDB takes only a path. Another file may have the name by now; this path is the file of the descriptor. */
	snprintf(path, sizeof path, "/proc/self/fd/%d", i->fd);
	if (r == 0)
		r = mdb_env_open(i->env, path,
			MDB_NOSUBDIR | MDB_NOLOCK | MDB_NOTLS | (reads ? MDB_RDONLY : MDB_NOSYNC), 0644);
	return r == ENOENT ? ENOSYS : r;
}

int index_tables_open(MDB_txn *txn, const struct index_format *format, bool create, MDB_dbi dbi[INDEX_TABLES])
{
	for (unsigned t = 0; t < format->ntables; t++) {
		int r = mdb_dbi_open(txn, format->tables[t], create ? MDB_CREATE : 0, &dbi[t]);
		if (r != 0)
			return r;
	}
	return 0;
}

/* Filesystems where mmap and locks of several hosts are not coherent. FUSE may be anything, so it is refused, too. */
static bool network_filesystem(int fd)
{
	static const uint32_t magics[] = {0x6969 /* NFS */, 0x517B /* SMB */, 0xFF534D42 /* CIFS */,
		0xFE534D42 /* SMB2 */, 0x0BD00BD0 /* Lustre */, 0x00C36400 /* Ceph */, 0x47504653 /* GPFS */,
		0x65735546 /* FUSE */, 0x5346414F /* AFS */, 0x6B414653 /* kAFS */, 0x73757245 /* Coda */,
		0xAAD7AAEA /* PanFS */, 0x19830326 /* BeeGFS */, 0x7461636F /* OCFS2 */, 0x01161970 /* GFS2 */,
		0x20030528 /* OrangeFS */};
	struct statfs f;
	if (fstatfs(fd, &f) < 0)
		return true;
	for (size_t n = 0; n < BASE_COUNT(magics); n++)
		if ((uint32_t)f.f_type == magics[n])
			return true;
	return false;
}

const char *index_dir_name(int parent, const char *dir)
{
	const char *last = parent >= 0 ? strrchr(dir, '/') : NULL;
	return last ? last + 1 : dir;
}

int index_dir_open(int parent, const char *dir, unsigned flags, int *ret_fd)
{
	int most = flags & INDEX_AT_ONCE ? 0 : flags & INDEX_BRIEFLY ? LOCK_TRIES_BRIEFLY : LOCK_TRIES;
	bool lock = !(flags & INDEX_READ_ONLY);
	base_cleanup_close int fd = openat(parent >= 0 ? parent : AT_FDCWD, index_dir_name(parent, dir),
		O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;
	if (fd < 0)
		return -errno;
	if (network_filesystem(fd))
		return -EOPNOTSUPP;
	/* Root could write in another user's directory, but would replace that user's index. If others can write in it,
	 * they can put another file or a link in the place of any name. */
	if (fstat(fd, &st) < 0 || st.st_uid != geteuid() || st.st_mode & 022)
		return -EPERM;
	for (int tries = 0; lock && flock(fd, LOCK_EX | LOCK_NB) < 0; tries++) {
		if (errno != EWOULDBLOCK && errno != EINTR)
			return -errno;
		if (tries == most)
			return -EBUSY;
		nanosleep(&(struct timespec){0, 10 * 1000 * 1000}, NULL);
	}
	*ret_fd = base_steal_fd(&fd);
	return 0;
}

int index_end(MDB_txn *txn, int r)
{
	if (r == 0)
		return mdb_txn_commit(txn);
	mdb_txn_abort(txn);
	return r;
}

bool index_value_ok(enum index_table t, const void *key, size_t key_len, const void *value, size_t value_len,
	struct index_body *ret_body)
{
	const uint8_t *v = value;
	size_t body_len;

	if (key_len > INDEX_KEY_MAX || value_len < 2 + key_len + 8 || value_len > INDEX_VALUE_MAX)
		return false;
	if (base_get16(v) != key_len || memcmp(v + 2, key, key_len) != 0)
		return false;
	if (base_get64(v + value_len - 8) != base_xxh64_of(t, v, value_len - 8))
		return false;
	body_len = value_len - 2 - key_len - 8;
	if (body_len > INDEX_BODY_MAX)
		return false;
	if (ret_body) {
		memcpy(ret_body->bytes, v + 2 + key_len, body_len);
		ret_body->len = body_len;
	}
	return true;
}

int index_get(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], enum index_table t, const void *key, size_t key_len,
	struct index_body *ret_body)
{
	MDB_val k = {key_len, (void *)key}, v;
	int r = mdb_get(txn, dbi[t], &k, &v);
	if (r != 0)
		return r;
	return index_value_ok(t, key, key_len, v.mv_data, v.mv_size, ret_body) ? 0 : MDB_NOTFOUND;
}

int index_put(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], enum index_table t, const void *key, size_t key_len,
	const void *body, size_t body_len)
{
	uint8_t value[INDEX_VALUE_MAX];
	size_t len;
	MDB_val k, v;

	if (key_len > INDEX_KEY_MAX || body_len > INDEX_BODY_MAX)
		return EINVAL;
	base_put16(value, key_len);
	memcpy(value + 2, key, key_len);
	if (body_len > 0)
		memcpy(value + 2 + key_len, body, body_len);
	len = 2 + key_len + body_len;
	base_put64(value + len, base_xxh64_of(t, value, len));
	k = (MDB_val){key_len, (void *)key};
	v = (MDB_val){len + 8, value};
	return mdb_put(txn, dbi[t], &k, &v, 0);
}

bool index_meta_ok(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES], const uint8_t store_id[16])
{
	struct index_body b;
	if (index_get(txn, dbi, INDEX_META, "store", 5, &b) != 0 || b.len != 20)
		return false;
	return base_get32(b.bytes) == INDEX_VERSION && memcmp(b.bytes + 4, store_id, 16) == 0;
}

uint64_t index_used_bytes(MDB_txn *txn, const MDB_dbi dbi[INDEX_TABLES])
{
	uint64_t bytes = 0;
	for (int t = 0; t < INDEX_TABLES; t++) {
		MDB_stat st;
		if (mdb_stat(txn, dbi[t], &st) == 0)
			bytes += (st.ms_branch_pages + st.ms_leaf_pages + st.ms_overflow_pages) * (uint64_t)st.ms_psize;
	}
	return bytes;
}
