/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_write: how files get their names.
 *
 *   posix_temp_open      a file without a name (O_TMPFILE), or `<name>.tmp.<16 hex>` where that is not supported
 *   write, fsync         so that the file is durable before it gets its name
 *   posix_temp_publish   link(2) to the final name, or renameat2(RENAME_NOREPLACE): fails if the name is taken
 *   fsync                of the directory
 *
 * Invariants: 1. a file with a final name is whole and durable; 2. nothing is ever replaced;
 * 3. no function says "done" before the directory is fsynced; 4. a failed or killed writer leaves at most a named
 * temporary. A publish of unknown outcome (a lost answer of a network filesystem) is settled by looking: put compares
 * the bytes, a pack the inode. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/cleanup.h"
#include "core/base/digest.h"
#include "core/base/le.h"
#include "core/storage/storage_posix_internal.h"

enum { PUT_TRIES = 16 };

/* ---- temporaries ---- */

static bool has_proc_link(int fd)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	return faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

/* ext4 answers EPERM when a file without a name is to be made in a removed directory. */
static bool directory_gone(int dir)
{
	struct stat st;
	return fstat(dir, &st) == 0 && st.st_nlink == 0;
}

static int temp_open_unnamed(struct posix_storage *p, int dir, struct posix_temp *t)
{
	t->name[0] = '\0';
	do
		t->fd = openat(dir, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, p->modes.file);
	while (t->fd < 0 && errno == EINTR);
	if (t->fd >= 0 && has_proc_link(t->fd))
		return 0;
	if (t->fd >= 0)
		close(t->fd);
	else if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOSYS)
		return errno == EPERM && directory_gone(dir) ? -ENOENT : -errno;
	atomic_store(&p->named_temps, true);
	return -EOPNOTSUPP;
}

int posix_random_name(const char *last, char name[static POSIX_TEMP_NAME_MAX])
{
	uint64_t random;
	int r = base_random(&random, sizeof random);

	if (r < 0)
		return r;
	snprintf(name, POSIX_TEMP_NAME_MAX, "%s.tmp.%016llx", last, (unsigned long long)random);
	return 0;
}

static int temp_open_any(struct posix_storage *p, int dir, const char *last, struct posix_temp *t)
{
	if (strlen(last) + STORAGE_TEMP_SUFFIX_LEN > 255)
		return -ENAMETOOLONG;
	if (!atomic_load(&p->named_temps)) {
		int r = temp_open_unnamed(p, dir, t);
		if (r != -EOPNOTSUPP)
			return r;
	}
	for (;;) {
		int r = posix_random_name(last, t->name);
		if (r < 0)
			return r;
		t->fd = openat(dir, t->name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, p->modes.file);
		if (t->fd >= 0)
			return 0;
		if (errno != EINTR && errno != EEXIST)
			return -errno;
	}
}

int posix_temp_open(struct posix_storage *p, int dir, const char *last, struct posix_temp *t)
{
	int r = temp_open_any(p, dir, last, t);

	if (posix_relieved(p, r))
		r = temp_open_any(p, dir, last, t);
	if (r < 0)
		return r;
	r = posix_modes_give(p, t->fd, p->modes.file);
	if (r < 0)
		posix_temp_drop(dir, t);
	return r;
}

void posix_temp_drop(int dir, struct posix_temp *t)
{
	if (t->fd >= 0)
		close(t->fd);
	if (t->name[0] != '\0')
		unlinkat(dir, t->name, 0);
	t->fd = -1;
	t->name[0] = '\0';
}

static int rename_sparing(int dir, const char *from, const char *to)
{
	if (renameat2(dir, from, dir, to, RENAME_NOREPLACE) == 0)
		return 0;
	return errno == EINVAL || errno == ENOSYS ? -EOPNOTSUPP : -errno;
}

int posix_temp_publish(struct posix_storage *p, int dir, struct posix_temp *t, const char *last)
{
	int r;

	if (t->name[0] == '\0') {
		char path[64];
		snprintf(path, sizeof path, "/proc/self/fd/%d", t->fd);
		return linkat(AT_FDCWD, path, dir, last, AT_SYMLINK_FOLLOW) < 0 ? -errno : 0;
	}
	if (!atomic_load(&p->no_links)) {
		if (linkat(dir, t->name, dir, last, 0) == 0)
			return 0;
		if (errno != EPERM && errno != EOPNOTSUPP && errno != ENOSYS && errno != EMLINK)
			return -errno;
		atomic_store(&p->no_links, true);
	}
	r = rename_sparing(dir, t->name, last);
	if (r == 0)
		t->name[0] = '\0';
	return r;
}

int posix_probe(struct posix_storage *p)
{
	struct posix_temp t;
	char last[POSIX_TEMP_NAME_MAX];
	int r = posix_random_name("probe", last);
	if (r < 0)
		return r;
	r = posix_temp_open(p, p->root, last, &t);
	if (r < 0)
		return r;
	r = posix_temp_publish(p, p->root, &t, last);
	posix_temp_drop(p->root, &t);
	unlinkat(p->root, last, 0);
	return r;
}

/* ---- writing ---- */

int posix_write_at(int fd, uint64_t offset, const void *bytes, size_t len)
{
	const uint8_t *from = bytes;

	while (len > 0) {
		ssize_t done = pwrite(fd, from, len, (off_t)offset);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return done < 0 ? -errno : -EIO;
		from += done;
		offset += (uint64_t)done;
		len -= (size_t)done;
	}
	return 0;
}

/* ---- put ---- */

/* synced: its bytes are durable before it gets the name; named: its name is durable, too, before put returns. */
struct put { const char *name, *last; const void *bytes; size_t len; bool synced, named; };

/* Compares the bytes with those of the file under the name, and makes that file as durable as asked. */
static int put_compare(struct posix_storage *p, int dir, const struct put *f)
{
	static const size_t step_bytes = 256 << 10;
	uint64_t size;
	base_cleanup_close int fd = posix_open_regular(p, f->name, &size);
	base_cleanup_free uint8_t *there = NULL;
	int answer, r;

	if (fd < 0)
		return fd;
	answer = size == f->len ? STORAGE_PUT_MINE : STORAGE_PUT_OTHER;
	there = malloc(step_bytes);
	if (!there)
		return -ENOMEM;
	for (size_t at = 0; answer == STORAGE_PUT_MINE && at < f->len;) {
		size_t step = base_min(f->len - at, step_bytes);
		r = posix_read_at(fd, at, there, step);
		if (r < 0)
			return r;
		if (memcmp(there, (const uint8_t *)f->bytes + at, step) != 0)
			answer = STORAGE_PUT_OTHER;
		at += step;
	}
	r = f->synced ? posix_sync(fd) : 0;
	if (r == 0 && f->named)
		r = posix_sync_names(p, dir);
	return r < 0 ? r : answer;
}

/* -ENOENT: another process removed the directory as a leftover, and it is to be made again. A directory that is being
 * removed can be opened until its name is gone, and nothing can be put into it. */
static int put_try(struct posix_storage *p, int dir, const struct put *f)
{
	struct posix_temp t;
	int r = posix_temp_open(p, dir, f->last, &t);
	int found;

	if (r < 0)
		return r;
	r = posix_write_at(t.fd, 0, f->bytes, f->len);
	if (r == 0 && f->synced)
		r = posix_sync(t.fd);
	if (r < 0) {
		posix_temp_drop(dir, &t);
		return r;
	}
	r = posix_temp_publish(p, dir, &t, f->last);
	posix_temp_drop(dir, &t);
	if (r == 0) {
		r = f->named ? posix_sync_names(p, dir) : 0;
		return r < 0 ? r : STORAGE_PUT_MINE;
	}
	if (r == -EOPNOTSUPP || r == -ENOSPC || r == -EDQUOT)
		return r;
	found = put_compare(p, dir, f);
	if (found == -ENOENT) /* the file was removed meanwhile, or the directory */
		return r == -EEXIST ? -ENOENT : r;
	return found;
}

static int put_file(struct storage *s, struct put *f)
{
	struct posix_storage *p = posix_of(s);
	int r = -ENOENT;

	if (p->flags & STORAGE_READ_ONLY)
		return -EROFS;
	if (!storage_name_valid(f->name) || storage_name_temporary(f->name))
		return -EINVAL;
	for (int i = 0; i < PUT_TRIES && r == -ENOENT; i++) {
		base_cleanup_close int dir = -1;

		if (i > 1)
			usleep(1u << i); /* 65 ms in all: rmdir(2) leaves a directory under its name for a moment */
		dir = posix_open_parent(p, f->name, f->named ? POSIX_DURABLE : POSIX_MAKE, &f->last);
		r = dir < 0 ? dir : put_try(p, dir, f);
	}
	return posix_denied(p, f->name, r);
}

int posix_put(struct storage *s, const char *name, const void *bytes, size_t len)
{
	return put_file(s, &(struct put){.name = name, .bytes = bytes, .len = len, .synced = true, .named = true});
}

int posix_put_fleeting(struct storage *s, const char *name, const void *bytes, size_t len)
{
	return put_file(s, &(struct put){.name = name, .bytes = bytes, .len = len});
}

int posix_put_passing(struct storage *s, const char *name, const void *bytes, size_t len)
{
	return put_file(s, &(struct put){.name = name, .bytes = bytes, .len = len, .synced = true,
		.named = !posix_of(s)->alone});
}
