/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix: a store in a directory of a POSIX filesystem.
 *
 * A file is written without a name (O_TMPFILE) or, where the filesystem cannot, as `<name>.tmp.<16 hex>` beside its
 * final name; it is fsynced, then linked to its final name, which fails if that exists, then its directory is
 * fsynced. So a file that has its final name is whole and durable, at whatever moment a writer is killed. It is never
 * opened for writing again.
 *
 * Threads: the object is shared by all; a writer belongs to one thread at a time. Blocking calls throughout. */
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <dirent.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/storage/storage_posix_internal.h"

struct storage_file {
	int fd;
	struct posix_direct direct;
};

int posix_read_at(int fd, uint64_t offset, void *bytes, size_t len)
{
	uint8_t *at = bytes;
	uint64_t end;
	if (base_add_overflows(offset, len, &end) || end > INT64_MAX)
		return -ENODATA;
	while (len > 0) {
		ssize_t n = pread(fd, at, len < (1u << 30) ? len : 1u << 30, (off_t)offset);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return -ENODATA;
		at += n;
		offset += (uint64_t)n;
		len -= (size_t)n;
	}
	return 0;
}

static int posix_read_whole(struct storage *s, const char *name, size_t max, void **ret_bytes, size_t *ret_len)
{
	uint64_t size;
	base_cleanup_close int fd = posix_open_regular(posix_of(s), name, &size);
	base_cleanup_free void *bytes = NULL;
	int r;

	if (fd < 0)
		return fd;
	if (size > max)
		return -EFBIG;
	bytes = malloc(size ? size : 1);
	if (!bytes)
		return -ENOMEM;
	r = posix_read_at(fd, 0, bytes, size);
	if (r < 0)
		return r;
	*ret_bytes = base_steal(bytes);
	*ret_len = size;
	return 0;
}

static int posix_size(struct storage *s, const char *name, uint64_t *ret_size)
{
	base_cleanup_close int fd = posix_open_beneath(posix_of(s), name, O_PATH);
	struct stat st;
	int r;

	if (fd < 0)
		return fd;
	if (TEMP_FAILURE_RETRY(fstat(fd, &st)) < 0)
		return -errno;
	r = posix_not_regular(&st);
	if (r == 0)
		*ret_size = (uint64_t)st.st_size;
	return r;
}

static int remove_any(struct storage *s, const char *name, int flags)
{
	struct posix_storage *p = posix_of(s);
	const char *last;
	base_cleanup_close int dir = -1;

	if (p->flags & STORAGE_READ_ONLY)
		return -EROFS;
	dir = posix_open_parent(p, name, POSIX_FIND, &last);
	if (dir < 0)
		return posix_denied(p, name, dir);
	return unlinkat(dir, last, flags) < 0 ? posix_denied(p, name, -errno) : 0;
}

static int posix_remove(struct storage *s, const char *name)
{
	return remove_any(s, name, 0);
}

static int posix_remove_dir(struct storage *s, const char *name)
{
	return remove_any(s, name, AT_REMOVEDIR);
}

static int posix_sync_dir(struct storage *s, const char *dir)
{
	base_cleanup_close int fd = posix_open_beneath(posix_of(s), dir, O_RDONLY | O_DIRECTORY);
	if (fd < 0)
		return fd;
	return posix_sync_names(posix_of(s), fd);
}

static int posix_file_open(
	struct storage *s, const char *name, struct storage_file **ret_file, uint64_t *ret_size)
{
	base_cleanup_close int fd = posix_open_regular(posix_of(s), name, ret_size);
	struct storage_file *f;

	if (fd < 0)
		return fd;
	f = malloc(sizeof *f);
	if (!f)
		return -ENOMEM;
	f->fd = base_steal_fd(&fd);
	posix_direct_init(&f->direct);
	*ret_file = f;
	return 0;
}

static int posix_file_read(struct storage_file *f, uint64_t offset, void *bytes, size_t len)
{
	return posix_read_at(f->fd, offset, bytes, len);
}

static int posix_file_readv(struct storage_file *f, uint64_t offset, const struct iovec *iov, unsigned n)
{
	ssize_t got = preadv(f->fd, iov, (int)n, (off_t)offset);

	if (got < 0 && errno != EINTR)
		return -errno;
	/* one by one what a short read left */
	for (uint64_t at = 0, read = got < 0 ? 0 : (uint64_t)got; n > 0; at += iov->iov_len, iov++, n--) {
		uint64_t have = base_min(read - base_min(at, read), iov->iov_len);
		int r = posix_read_at(f->fd, offset + at + have, (uint8_t *)iov->iov_base + have, iov->iov_len - have);

		if (r < 0)
			return r;
	}
	return 0;
}

static int posix_file_read_past(struct storage_file *f, uint64_t offset, size_t len, void *room,
	const uint8_t **ret_bytes)
{
	return posix_read_past(&f->direct, f->fd, offset, len, room, ret_bytes);
}

static bool posix_file_gone(struct storage_file *f)
{
	struct stat st;

	/* a file that another host has deleted or replaced may be stale here */
	return TEMP_FAILURE_RETRY(fstat(f->fd, &st)) < 0 || st.st_nlink == 0;
}

static void posix_file_close(struct storage_file *f)
{
	if (!f)
		return;
	posix_direct_release(&f->direct);
	close(f->fd);
	free(f);
}

static bool filesystem_among(uint32_t magic, const uint32_t *some, size_t n)
{
	while (n > 0 && some[n - 1] != magic)
		n--;
	return n > 0;
}

/* Filesystems that other hosts change too, or whose changes inotify does not see. */
static bool filesystem_shared(uint32_t magic)
{
	static const uint32_t shared[] = {
		NFS_SUPER_MAGIC,
		SMB_SUPER_MAGIC,
		CIFS_SUPER_MAGIC,
		SMB2_SUPER_MAGIC,
		FUSE_SUPER_MAGIC,
		CEPH_SUPER_MAGIC,
		AFS_SUPER_MAGIC,
		AFS_FS_MAGIC,
		CODA_SUPER_MAGIC,
		V9FS_MAGIC,
		OCFS2_SUPER_MAGIC,
		0x0BD00BD0 /* Lustre */,
		0x47504653 /* GPFS */,
		0x19830326 /* BeeGFS */,
		0x01161970 /* GFS2 */,
	};
	return filesystem_among(magic, shared, BASE_COUNT(shared));
}

/* Filesystems that are known to have hard links; the others are tried. */
static bool filesystem_links(uint32_t magic)
{
	static const uint32_t known[] = { EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC, TMPFS_MAGIC,
		NFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, 0x2FC12FC1 /* ZFS */, 0xCA451A4E /* bcachefs */ };
	return filesystem_among(magic, known, BASE_COUNT(known));
}

/* No other host can use its files. There are more cluster filesystems than can be listed, so one that is in neither
 * list may be shared. */
static bool filesystem_alone(uint32_t magic)
{
	return filesystem_links(magic) && !filesystem_shared(magic);
}

static int posix_stat(struct storage *s, struct storage_stat *ret_stat)
{
	struct statvfs v;
	struct statfs f;
	if (fstatvfs(posix_of(s)->root, &v) < 0 || fstatfs(posix_of(s)->root, &f) < 0)
		return -errno;
	*ret_stat = (struct storage_stat){
		.block_bytes = v.f_frsize ? v.f_frsize : v.f_bsize,
		.blocks = v.f_blocks, .blocks_free = v.f_bfree, .blocks_available = v.f_bavail,
		.files = v.f_files, .files_free = v.f_ffree,
		.local = !filesystem_shared((uint32_t)f.f_type),
	};
	return 0;
}

int posix_owner(struct storage *s, const char *name, struct storage_owner *ret_owner)
{
	base_cleanup_close int fd = posix_open_beneath(posix_of(s), name, O_PATH);
	struct statx st;
	if (fd < 0)
		return fd;
	if (TEMP_FAILURE_RETRY(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &st)) < 0)
		return -errno;
	*ret_owner = (struct storage_owner){.uid = st.stx_uid, .gid = st.stx_gid, .mode = st.stx_mode & 07777,
		.kind = st.stx_mode & S_IFMT,
		.fixed = st.stx_attributes & (STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND),
		.ctime_ns = st.stx_ctime.tv_sec * INT64_C(1000000000) + st.stx_ctime.tv_nsec,
		.device = makedev(st.stx_dev_major, st.stx_dev_minor), .number = st.stx_ino};
	return 0;
}

static int posix_watch(struct storage *s, const char *const *dirs, size_t n, int *ret_fd)
{
	struct storage_stat medium;
	int r = posix_stat(s, &medium);
	base_cleanup_close int fd = -1;

	if (r < 0)
		return r;
	if (!medium.local)
		return -EOPNOTSUPP;
	fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	if (fd < 0)
		return -errno;
	for (size_t i = 0; i < n; i++) {
		/* through the descriptor: what was resolved beneath the root is watched */
		base_cleanup_close int dir = posix_open_beneath(posix_of(s), dirs[i], O_RDONLY | O_DIRECTORY);
		char path[64];

		if (dir < 0)
			return dir;
		snprintf(path, sizeof path, "/proc/self/fd/%d", dir);
		if (inotify_add_watch(fd, path,
			    IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_DELETE_SELF | IN_ONLYDIR) < 0)
			return -errno;
	}
	*ret_fd = base_steal_fd(&fd);
	return 0;
}

static void posix_close(struct storage *s)
{
	struct posix_storage *p;

	if (!s)
		return;
	p = posix_of(s);
	if (p->root >= 0)
		close(p->root);
	pthread_mutex_destroy(&p->lock);
	free(p->durable);
	free(p);
}

static const struct storage_ops posix_ops = {
	.put = posix_put,
	.put_fleeting = posix_put_fleeting,
	.put_passing = posix_put_passing,
	.replace = posix_replace,
	.replace_by_name = posix_replace_by_name,
	.take = posix_take,
	.read_whole = posix_read_whole,
	.size = posix_size,
	.list = posix_list,
	.list_dirs = posix_list_dirs,
	.remove = posix_remove,
	.remove_dir = posix_remove_dir,
	.sync_dir = posix_sync_dir,
	.file_open = posix_file_open,
	.file_read = posix_file_read,
	.file_close = posix_file_close,
	.file_readv = posix_file_readv,
	.file_read_past = posix_file_read_past,
	.file_gone = posix_file_gone,
	.writer_open = posix_writer_open,
	.writer_reopen = posix_writer_reopen,
	.writer_append = posix_writer_append,
	.writer_append_lent = posix_writer_append_lent,
	.writer_keep = posix_writer_keep,
	.writer_seal = posix_writer_seal,
	.writer_seal_over = posix_writer_seal_over,
	.writer_abandon = posix_writer_abandon,
	.stat = posix_stat,
	.owner = posix_owner,
	.denied = posix_denied_where,
	.watch = posix_watch,
	.close = posix_close,
};

int posix_directory_empty(int dir)
{
	base_cleanup_close int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *d = fd < 0 ? NULL : fdopendir(fd);
	int r = 0;

	if (!d)
		return -errno;
	base_steal_fd(&fd);
	errno = 0;
	for (struct dirent *e; r == 0 && (e = readdir(d)); errno = 0)
		if (!posix_name_passed(e->d_name, true))
			r = -ENOTEMPTY;
	if (r == 0 && errno != 0)
		r = -errno;
	closedir(d);
	return r;
}

/* Makes the directory and its own entry durable. */
static int create_root(const char *path)
{
	char up[4096];
	base_cleanup_close int fd = -1;

	if (mkdir(path, 0755) < 0)
		return errno == EEXIST ? 0 : -errno;
	if ((size_t)snprintf(up, sizeof up, "%s/..", path) >= sizeof up)
		return -ENAMETOOLONG;
	fd = open(up, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? -errno : posix_sync(fd);
}

static int open_root(struct posix_storage *p, const char *path, struct base_error *err)
{
	int r;

	if (p->flags & STORAGE_CREATE) {
		r = create_root(path);
		if (r < 0)
			return base_error_set(err, r, "%s: cannot make the directory: %s", path, base_error_name(r));
	}
	p->root = TEMP_FAILURE_RETRY(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	if (p->root < 0)
		return base_error_set(err, -errno, "%s: cannot open the directory: %s", path, base_error_name(-errno));
	if (p->flags & STORAGE_CREATE) {
		r = posix_directory_empty(p->root);
		if (r < 0)
			return base_error_set(err, r, "%s: %s", path,
				r == -ENOTEMPTY ? "the directory is not empty" : base_error_name(r));
	}
	r = posix_modes_read(p);
	return r < 0 ? base_error_set(err, r, "%s: %s", path, base_error_name(r)) : 0;
}

int storage_open_posix(const char *path, unsigned flags, struct storage **ret_s, struct base_error *err)
{
	struct posix_storage *p = calloc(1, sizeof *p);
	int r;
	struct statfs f;
	bool known;

	if (!p)
		return base_no_memory_for(err, "%s", path);
	p->base.ops = &posix_ops;
	p->root = -1;
	p->flags = flags;
	atomic_init(&p->named_temps, flags & STORAGE_NAMED_TEMPS);
	pthread_mutex_init(&p->lock, NULL);
	r = open_root(p, path, err);
	known = r == 0 && fstatfs(p->root, &f) == 0;
	p->shared = known && filesystem_shared((uint32_t)f.f_type);
	p->alone = known && filesystem_alone((uint32_t)f.f_type);
	if (known && !(flags & STORAGE_READ_ONLY) &&
	    (flags & STORAGE_CREATE || !filesystem_links((uint32_t)f.f_type))) {
		r = posix_probe(p);
		if (r == -EOPNOTSUPP)
			base_error_set(err, r,
				"%s: this filesystem has neither hard links nor renameat2(RENAME_NOREPLACE), so a "
				"store cannot be on it: choose another filesystem",
				path);
		else if (r == -EROFS && !(flags & STORAGE_CREATE))
			r = 0; /* to be read */
		else if (r < 0)
			base_error_set(err, r, "%s: cannot make a file in it: %s", path, base_error_name(r));
	}
	if (r < 0) {
		posix_close(&p->base);
		return r;
	}
	*ret_s = &p->base;
	return 0;
}
