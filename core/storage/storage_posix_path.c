/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_path: names are resolved beneath the root's descriptor and no link is ever followed: by openat2 where
 * the kernel has it, else part by part with O_NOFOLLOW.
 *
 * Durable directories. A file is durable only when every directory entry above it is. So its directories come first:
 * for each one that this process has not yet seen durable the parent is fsynced, also when another process made it
 * (which may not have come to its fsync). A directory is known by its name, inode number and birth time: one that was
 * removed and made again is another one.
 *
 * A directory whose fsync failed is suspect from then on: the kernel reports once that it could not write something,
 * and the next fsync, which finds nothing left to write, may answer 0. So the names in it, whichever process made them,
 * count as durable again only when a later change of the same directory was made durable: file systems commit changes
 * of names in order (journal, log, transaction, a server that answers), and one that has given up its journal takes no
 * change. -EROFS is such a failure: after ext4 aborted its journal, it answers -EROFS for what it has not written. Only
 * a store that was opened for reading may take it for "nothing to do".
 *
 * An answer of 0 is not enough either. In ext4 fsync waits for the current transaction. If that transaction has ended
 * because the journal could not be written, and another process had waited for it, fsync does not know, and answers 0
 * until the next change finds that the journal was given up. So after an fsync of a directory this process begins a
 * change of its own, which changes nothing: a journal that takes it has lost nothing before. */
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/digest.h"
#include "core/storage/storage_posix_internal.h"

static atomic_bool openat2_missing; /* of the process: the kernel's answer never changes */

int posix_sync(int fd)
{
	while (fsync(fd) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

static int open_retry(int dir, const char *name, int flags)
{
	for (;;) {
		int fd = openat(dir, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
		if (fd >= 0 || errno != EINTR)
			return fd >= 0 ? fd : -errno;
	}
}

/* The way for kernels without openat2. */
static int open_by_parts(int root, const char *name, int flags)
{
	base_cleanup_close int dir = -1;
	char part[256];
	for (;;) {
		size_t len = strcspn(name, "/");
		int at, fd;

		if (!storage_name_part_valid(name, len))
			return -EINVAL;
		memcpy(part, name, len);
		part[len] = '\0';
		at = dir >= 0 ? dir : root;
		if (name[len] == '\0')
			return open_retry(at, part, flags);
		fd = open_retry(at, part, O_PATH | O_DIRECTORY);
		if (fd < 0)
			return fd;
		if (dir >= 0)
			close(dir);
		dir = fd;
		name += len + 1;
	}
}

bool posix_relieved(struct posix_storage *p, int r)
{
	if ((r != -EMFILE && r != -ENFILE) || !p->base.relieve)
		return false;
	p->base.relieve(p->base.relieve_arg);
	return true;
}

static int open_beneath(struct posix_storage *p, const char *name, int flags)
{
	bool path_only, missing = false;
	struct open_how how;
	long fd;

	if (name[0] == '\0')
		return open_retry(p->root, ".", flags);
	if (!storage_name_valid(name))
		return strnlen(name, STORAGE_NAME_MAX) >= STORAGE_NAME_MAX ? -ENAMETOOLONG : -EINVAL;
	if (atomic_load_explicit(&openat2_missing, memory_order_relaxed))
		return open_by_parts(p->root, name, flags);
	path_only = flags & O_PATH;
	how = (struct open_how){
		.flags = (uint64_t)(unsigned)(flags | O_CLOEXEC | O_NOFOLLOW | (path_only ? 0 : O_NONBLOCK | O_NOCTTY)),
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
	};
	for (int again = 0; again < 64 && !missing;) {
		fd = syscall(SYS_openat2, p->root, name, &how, sizeof how);
		if (fd >= 0)
			return (int)fd;
		if (errno == EINTR)
			continue;
		if (errno == ENOSYS || errno == EPERM) /* EPERM: perhaps a sandbox that does not know the call */
			missing = true;
		else if (errno != EAGAIN) /* EAGAIN: something was renamed while the kernel looked */
			return -errno;
		again++;
	}
	fd = open_by_parts(p->root, name, flags);
	if (missing && fd >= 0)
		atomic_store_explicit(&openat2_missing, true, memory_order_relaxed);
	return fd;
}

/* The kernel's ELOOP may be about any part of the name, and its ENXIO about more than a socket. */
int posix_open_beneath(struct posix_storage *p, const char *name, int flags)
{
	const char *slash = strrchr(name, '/');
	size_t up = slash ? (size_t)(slash - name) : 0, len = flags & O_DIRECTORY ? strlen(name) : up;
	char dir[STORAGE_NAME_MAX];
	struct stat st;
	int fd = open_beneath(p, name, flags);
	base_cleanup_close int parent = -1;

	if (posix_relieved(p, fd))
		fd = open_beneath(p, name, flags);
	if (fd == -ENOTDIR || (fd == -ELOOP && flags & O_DIRECTORY))
		return posix_denied_in(p, name, len, -ENOTDIR);
	if (fd != -ELOOP && fd != -ENXIO)
		return fd;
	memcpy(dir, name, up);
	dir[up] = '\0';
	parent = open_beneath(p, dir, O_PATH | O_DIRECTORY);
	if (parent < 0)
		return parent == -ELOOP || parent == -ENOTDIR ? posix_denied_in(p, name, up, -ENOTDIR) : parent;
	if (TEMP_FAILURE_RETRY(fstatat(parent, slash ? slash + 1 : name, &st, AT_SYMLINK_NOFOLLOW)) < 0)
		return -errno;
	return posix_not_regular(&st) ? fd : -EIO;
}

int posix_not_regular(const struct stat *st)
{
	return S_ISREG(st->st_mode) ? 0 : S_ISDIR(st->st_mode) ? -EISDIR : S_ISLNK(st->st_mode) ? -ELOOP : -ENXIO;
}

int posix_open_regular(struct posix_storage *p, const char *name, uint64_t *ret_size)
{
	base_cleanup_close int fd = posix_open_beneath(p, name, O_RDONLY);
	struct stat st;
	int r;

	if (fd < 0)
		return fd;
	if (TEMP_FAILURE_RETRY(fstat(fd, &st)) < 0)
		return -errno;
	r = posix_not_regular(&st);
	if (r < 0)
		return r;
	if (ret_size)
		*ret_size = (uint64_t)st.st_size;
	return base_steal_fd(&fd);
}

/* ---- names made durable ---- */

/* The place of an inode among the suspect ones; suspect_count: it is not suspect. The lock is held. */
static size_t suspect_find(const struct posix_storage *p, const struct stat *st)
{
	size_t i = 0;

	while (i < p->suspect_count && (p->suspect[i].dev != st->st_dev || p->suspect[i].ino != st->st_ino))
		i++;
	return i;
}

static bool suspect_is(struct posix_storage *p, const struct stat *st)
{
	bool is;

	pthread_mutex_lock(&p->lock);
	is = p->suspect_all || suspect_find(p, st) < p->suspect_count;
	pthread_mutex_unlock(&p->lock);
	return is;
}

static void suspect_set(struct posix_storage *p, const struct stat *st, bool on)
{
	size_t i;

	pthread_mutex_lock(&p->lock);
	i = suspect_find(p, st);
	if (on && i == p->suspect_count && i == POSIX_SUSPECT_MAX)
		p->suspect_all = true; /* such a bad storage gets a little more work from then on */
	else if (on && i == p->suspect_count)
		p->suspect[p->suspect_count++] = (struct posix_inode){ st->st_dev, st->st_ino };
	else if (!on && i < p->suspect_count)
		p->suspect[i] = p->suspect[--p->suspect_count];
	pthread_mutex_unlock(&p->lock);
}

/* Makes a name and removes it. */
static int touch_directory(int dir)
{
	char name[POSIX_TEMP_NAME_MAX];
	int r = posix_random_name("touch", name);
	int fd;

	if (r < 0)
		return r;
	fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
	if (fd < 0)
		return -errno;
	close(fd);
	return unlinkat(dir, name, 0) < 0 ? -errno : 0;
}

/* Removes an attribute that no directory has. Filesystems without attributes say nothing about their journal. */
static int journal_lives(int dir)
{
	if (fremovexattr(dir, "user.vckpt.none") == 0)
		return 0;
	return errno == EROFS || errno == EIO || errno == ESHUTDOWN ? -errno : 0;
}

static bool medium_read_only(int fd)
{
	struct statvfs v;

	return fstatvfs(fd, &v) == 0 && v.f_flag & ST_RDONLY;
}

int posix_sync_names(struct posix_storage *p, int dir)
{
	struct stat st;
	bool suspect;
	int r;

	if (TEMP_FAILURE_RETRY(fstat(dir, &st)) < 0)
		return -errno;
	if (p->flags & STORAGE_READ_ONLY) {
		r = posix_sync(dir);
		return r == -EROFS || r == -EINVAL ? 0 : r; /* nothing was written here */
	}
	suspect = suspect_is(p, &st);
	r = suspect ? touch_directory(dir) : 0;
	if (r == 0)
		r = posix_sync(dir);
	if (r == -EINVAL && medium_read_only(dir)) /* says squashfs, among others */
		r = -EROFS;
	if (r == 0 && !p->shared)
		r = journal_lives(dir);
	if (suspect != (r < 0))
		suspect_set(p, &st, r < 0);
	return r;
}

/* ---- directories ---- */

static uint64_t directory_key(int fd, const char *name)
{
	struct statx stx;
	uint64_t id[3] = {0};

	if (TEMP_FAILURE_RETRY(statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &stx)) < 0)
		return 0;
	id[0] = stx.stx_ino;
	if (stx.stx_mask & STATX_BTIME) {
		id[1] = (uint64_t)stx.stx_btime.tv_sec;
		id[2] = stx.stx_btime.tv_nsec;
	}
	return base_xxh64_of(base_xxh64_of(0, name, strlen(name)), id, sizeof id);
}

/* The position of `key`, or the one where it would be. The lock is held. */
static size_t durable_find(const struct posix_storage *p, uint64_t key)
{
	return base_bisect(i, 0, p->durable_count, p->durable[i] < key);
}

static bool durable_known(struct posix_storage *p, uint64_t key)
{
	size_t i;
	bool known;

	pthread_mutex_lock(&p->lock);
	i = durable_find(p, key);
	known = i < p->durable_count && p->durable[i] == key;
	pthread_mutex_unlock(&p->lock);
	return known;
}

static void durable_add(struct posix_storage *p, uint64_t key)
{
	pthread_mutex_lock(&p->lock);
	if (!p->durable)
		p->durable = malloc(POSIX_DURABLE_MAX * sizeof *p->durable);
	if (p->durable) {
		size_t i;

		if (p->durable_count == POSIX_DURABLE_MAX)
			p->durable_count = 0;
		i = durable_find(p, key);
		if (i == p->durable_count || p->durable[i] != key) {
			memmove(p->durable + i + 1, p->durable + i, (p->durable_count - i) * sizeof *p->durable);
			p->durable[i] = key;
			p->durable_count++;
		}
	}
	pthread_mutex_unlock(&p->lock);
}

/* Opens one directory of `at`, makes it if it is missing, and makes its entry durable if asked. */
static int make_directory(struct posix_storage *p, int at, const char *part, const char *name, enum posix_make make)
{
	base_cleanup_close int fd = open_retry(at, part, O_RDONLY | O_DIRECTORY);
	uint64_t key;

	if (fd == -ENOENT) {
		int r = posix_directory_make(p, at, part);
		if (r < 0 && r != -EEXIST)
			return r;
		fd = open_retry(at, part, O_RDONLY | O_DIRECTORY);
	}
	if (fd < 0)
		return fd;
	key = make == POSIX_DURABLE ? directory_key(fd, name) : 0;
	if (make == POSIX_DURABLE && !durable_known(p, key)) {
		int r = posix_sync_names(p, at);
		if (r < 0)
			return r;
		if (key != 0)
			durable_add(p, key);
	}
	return base_steal_fd(&fd);
}

static int make_directories(struct posix_storage *p, const char *dir, enum posix_make make)
{
	base_cleanup_close int at = posix_open_beneath(p, "", O_RDONLY | O_DIRECTORY);
	char name[STORAGE_NAME_MAX], part[256];

	if (at < 0)
		return at;
	for (size_t done = 0;;) {
		size_t len = strcspn(dir + done, "/");
		int fd;

		memcpy(part, dir + done, len);
		part[len] = '\0';
		memcpy(name, dir, done + len);
		name[done + len] = '\0';
		fd = make_directory(p, at, part, name, make);
		if (fd < 0)
			return fd;
		close(at);
		at = fd;
		if (dir[done + len] == '\0')
			return base_steal_fd(&at);
		done += len + 1;
	}
}

int posix_open_parent(struct posix_storage *p, const char *name, enum posix_make make, const char **ret_last)
{
	const char *slash;
	char dir[STORAGE_NAME_MAX];
	base_cleanup_close int fd = -1;
	int r;

	if (!storage_name_valid(name))
		return strnlen(name, STORAGE_NAME_MAX) >= STORAGE_NAME_MAX ? -ENAMETOOLONG : -EINVAL;
	slash = strrchr(name, '/');
	*ret_last = slash ? slash + 1 : name;
	if (!slash)
		return posix_open_beneath(p, "", O_RDONLY | O_DIRECTORY);
	memcpy(dir, name, (size_t)(slash - name));
	dir[slash - name] = '\0';
	fd = posix_open_beneath(p, dir, O_RDONLY | O_DIRECTORY);
	if (fd >= 0 && (make != POSIX_DURABLE || durable_known(p, directory_key(fd, dir))))
		return base_steal_fd(&fd);
	if (fd < 0 && (make == POSIX_FIND || fd != -ENOENT))
		return fd;
	r = make_directories(p, dir, make);
	return posix_relieved(p, r) ? make_directories(p, dir, make) : r;
}
