/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_write: how files come to stand under their names.
 *
 *   temp_open      a file without a name (O_TMPFILE), or named `<name>.tmp.<16 hex>` where there is no such thing
 *   write, fsync   so that what gets a name is durable first
 *   temp_publish   link(2) to the final name, or renameat2(RENAME_NOREPLACE): fails if the name is taken
 *   fsync          of the directory
 *
 * Invariants: 1. a final name never stands for a file that is not whole and durable; 2. nothing is ever replaced;
 * 3. no function says "done" before the directory is fsynced; 4. a failed or killed writer leaves at most a named
 * temporary. A publish of unknown outcome (a lost answer of a network filesystem) is settled by looking: put compares
 * the bytes, a pack the inode.
 *
 * A pack goes out in large writes straight from the caller's memory; only small appends are gathered, in one buffer
 * a writer. Its pages are handed to write-back every 16 MiB and waited for 32 MiB later, so that the fsync at the end
 * finds little to do, and they stay in the page cache, where the next reader wants them. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "core/base/cleanup.h"
#include "core/base/digest.h"
#include "core/base/le.h"
#include "core/store/storage_posix_internal.h"

enum {
	WRITER_BUFFER_BYTES = 1 << 20,
	WRITER_BUFFER_ALIGN = 4096,
	WRITER_DIRECT_BYTES = 128 << 10, /* appends from here on are not copied */
	PUT_TRIES = 16,
};
#define WRITER_SYNC_BYTES (UINT64_C(16) << 20)
#define WRITER_BEHIND_BYTES (2 * WRITER_SYNC_BYTES)

struct temp {
	int fd;
	char name[256]; /* empty: has none */
};

struct store_storage_writer {
	struct posix_storage *storage;
	int dir;
	struct temp temp;
	uint64_t written, synced; /* bytes written; of these, handed to write-back */
	uint64_t settled;         /* and waited for */
	int error;                /* sticky */
	size_t used;
	uint8_t *buffer;          /* WRITER_BUFFER_BYTES */
	char last[256];
};

/* ---- temporaries ---- */

static bool has_proc_link(int fd)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	return faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

static int temp_open_unnamed(struct posix_storage *p, int dir, struct temp *t)
{
	t->name[0] = '\0';
	do
		t->fd = openat(dir, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0644);
	while (t->fd < 0 && errno == EINTR);
	if (t->fd >= 0 && has_proc_link(t->fd))
		return 0;
	if (t->fd >= 0)
		close(t->fd);
	else if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOSYS)
		return -errno;
	atomic_store(&p->named_temps, true);
	return -EOPNOTSUPP;
}

static int temp_open(struct posix_storage *p, int dir, const char *last, struct temp *t)
{
	if (strlen(last) + STORE_TEMP_SUFFIX_LEN > 255)
		return -ENAMETOOLONG;
	if (!atomic_load(&p->named_temps)) {
		int r = temp_open_unnamed(p, dir, t);
		if (r != -EOPNOTSUPP)
			return r;
	}
	for (;;) {
		uint64_t random;
		base_random(&random, sizeof random);
		snprintf(t->name, sizeof t->name, "%s.tmp.%016llx", last, (unsigned long long)random);
		t->fd = openat(dir, t->name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
		if (t->fd >= 0)
			return 0;
		if (errno != EINTR && errno != EEXIST)
			return -errno;
	}
}

/* Closes the temporary and takes its name away if it still has one. */
static void temp_drop(int dir, struct temp *t)
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

/* Gives the file its final name: 0, -EEXIST, or an error of unknown outcome. Not yet durable. */
static int temp_publish(struct posix_storage *p, int dir, struct temp *t, const char *last)
{
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
	int r = rename_sparing(dir, t->name, last);
	if (r == 0)
		t->name[0] = '\0';
	return r;
}

/* Whether `last` is this very file: the answer to a publish got lost, or was given twice. */
static bool temp_is_published(int dir, const struct temp *t, const char *last)
{
	struct stat mine, there;
	return fstat(t->fd, &mine) == 0 && fstatat(dir, last, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
	       mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

int posix_probe(struct posix_storage *p)
{
	struct temp t;
	char last[64];
	uint64_t random;
	base_random(&random, sizeof random);
	snprintf(last, sizeof last, "probe.tmp.%016llx", (unsigned long long)random);
	int r = temp_open(p, p->root, last, &t);
	if (r < 0)
		return r;
	r = temp_publish(p, p->root, &t, last);
	temp_drop(p->root, &t);
	unlinkat(p->root, last, 0);
	return r;
}

/* ---- writing ---- */

static int write_vector(int fd, uint64_t offset, struct iovec *iov, int n)
{
	while (n > 0) {
		if (iov->iov_len == 0) {
			iov++, n--;
			continue;
		}
		ssize_t done = pwritev(fd, iov, n, (off_t)offset);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return done < 0 ? -errno : -EIO;
		offset += (uint64_t)done;
		while (done > 0) {
			size_t step = base_min((uint64_t)done, iov->iov_len);
			iov->iov_base = (uint8_t *)iov->iov_base + step;
			iov->iov_len -= step;
			done -= (ssize_t)step;
			if (iov->iov_len == 0)
				iov++, n--;
		}
	}
	return 0;
}

/* ---- put ---- */

/* Compares what stands under the name; durable on return. */
static int put_compare(struct posix_storage *p, int dir, const char *name, const void *bytes, size_t len)
{
	uint64_t size;
	base_cleanup_close int fd = posix_open_regular(p, name, &size);
	if (fd < 0)
		return fd;
	int answer = size == len ? STORE_PUT_MINE : STORE_PUT_OTHER;
	static const size_t step_bytes = 256 << 10;
	base_cleanup_free uint8_t *there = malloc(step_bytes);
	if (!there)
		return -ENOMEM;
	for (size_t at = 0; answer == STORE_PUT_MINE && at < len;) {
		size_t step = base_min(len - at, step_bytes);
		int r = posix_read_at(fd, at, there, step);
		if (r < 0)
			return r;
		if (memcmp(there, (const uint8_t *)bytes + at, step) != 0)
			answer = STORE_PUT_OTHER;
		at += step;
	}
	int r = posix_sync(fd);
	if (r == 0)
		r = posix_sync(dir);
	return r < 0 ? r : answer;
}

static int put_try(struct posix_storage *p, int dir, const char *name, const char *last, const void *bytes, size_t len)
{
	struct temp t;
	int r = temp_open(p, dir, last, &t);
	if (r < 0)
		return r == -ENOENT ? -EAGAIN : r; /* somebody took the directory for a leftover: it is made anew */
	struct iovec iov = { (void *)bytes, len };
	r = write_vector(t.fd, 0, &iov, 1);
	if (r == 0)
		r = posix_sync(t.fd);
	if (r < 0) {
		temp_drop(dir, &t);
		return r;
	}
	r = temp_publish(p, dir, &t, last);
	temp_drop(dir, &t);
	if (r == 0) {
		r = posix_sync(dir);
		return r < 0 ? r : STORE_PUT_MINE;
	}
	if (r == -EOPNOTSUPP || r == -ENOSPC || r == -EDQUOT)
		return r;
	int found = put_compare(p, dir, name, bytes, len);
	if (found == -ENOENT) /* the file was removed meanwhile, or the directory */
		return r == -EEXIST || r == -ENOENT ? -EAGAIN : r;
	return found;
}

int posix_put(struct store_storage *s, const char *name, const void *bytes, size_t len)
{
	struct posix_storage *p = posix_of(s);
	if (p->flags & STORE_STORAGE_READ_ONLY)
		return -EROFS;
	if (!store_name_valid(name) || store_name_temporary(name))
		return -EINVAL;
	int r = -EAGAIN;
	for (int i = 0; i < PUT_TRIES && r == -EAGAIN; i++) {
		const char *last;
		base_cleanup_close int dir = posix_open_parent(p, name, true, &last);
		r = dir < 0 ? dir : put_try(p, dir, name, last, bytes, len);
	}
	return r;
}

/* ---- packs ---- */

static void writer_free(struct store_storage_writer *w)
{
	temp_drop(w->dir, &w->temp);
	if (w->dir >= 0)
		close(w->dir);
	free(w->buffer);
	free(w);
}

int posix_writer_open(struct store_storage *s, const char *name, struct store_storage_writer **ret_writer)
{
	struct posix_storage *p = posix_of(s);
	if (p->flags & STORE_STORAGE_READ_ONLY)
		return -EROFS;
	if (!store_name_valid(name) || store_name_temporary(name))
		return -EINVAL;
	struct store_storage_writer *w = calloc(1, sizeof *w);
	if (!w)
		return -ENOMEM;
	w->storage = p;
	w->temp.fd = -1;
	/* From a page on: 16 bytes behind one, as malloc gives it, the kernel's copy into the page cache takes three to
	 * five times as long on some processors (rep movsb). */
	w->buffer = aligned_alloc(WRITER_BUFFER_ALIGN, WRITER_BUFFER_BYTES);
	const char *last;
	w->dir = w->buffer ? posix_open_parent(p, name, true, &last) : -ENOMEM;
	int r = w->dir;
	struct stat st;
	if (r >= 0)
		r = fstatat(w->dir, last, &st, AT_SYMLINK_NOFOLLOW) == 0 ? -EEXIST : 0;
	if (r >= 0)
		r = temp_open(p, w->dir, last, &w->temp);
	if (r < 0) {
		writer_free(w);
		return r;
	}
	snprintf(w->last, sizeof w->last, "%s", last);
	*ret_writer = w;
	return 0;
}

/* Has the disk begin with what was written, and waits for what it was given two steps ago: so it is busy from the
 * beginning, and there is never so much unwritten that the kernel slows the writer down, which on a fast disk costs a
 * third to a half of its rate. The wait takes an error away from the fsync at the end, so it has to be told here;
 * where a file system knows neither, the fsync does all. */
static int writer_start(struct store_storage_writer *w)
{
	uint64_t upto = w->written & ~UINT64_C(4095); /* the last page may still grow */
	uint64_t before = w->synced, n;

	(void)sync_file_range(w->temp.fd, (off_t)before, (off_t)(upto - before), SYNC_FILE_RANGE_WRITE);
	w->synced = upto;
	if (before - w->settled <= WRITER_BEHIND_BYTES)
		return 0;
	n = before - w->settled - WRITER_BEHIND_BYTES;
	if (sync_file_range(w->temp.fd, (off_t)w->settled, (off_t)n, SYNC_FILE_RANGE_WAIT_BEFORE
			| SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER) < 0
		&& (errno == EIO || errno == ENOSPC || errno == EDQUOT))
		return -errno;
	w->settled += n;
	return 0;
}

/* Writes the buffer and then `bytes`. */
static int writer_flush(struct store_storage_writer *w, const void *bytes, size_t len)
{
	struct iovec iov[2] = { { w->buffer, w->used }, { (void *)bytes, len } };
	uint64_t end;
	if (base_add_overflows(w->written, (uint64_t)w->used + len, &end) || end > INT64_MAX)
		return -EFBIG;
	int r = write_vector(w->temp.fd, w->written, iov, 2);
	if (r < 0)
		return r;
	w->written = end;
	w->used = 0;
	return w->written - w->synced >= WRITER_SYNC_BYTES ? writer_start(w) : 0;
}

int posix_writer_append(struct store_storage_writer *w, const void *bytes, size_t len)
{
	if (w->error < 0)
		return w->error;
	if (len >= WRITER_DIRECT_BYTES)
		return w->error = writer_flush(w, bytes, len);
	size_t head = base_min(len, WRITER_BUFFER_BYTES - w->used);
	if (len > 0)
		memcpy(w->buffer + w->used, bytes, head);
	w->used += head;
	if (w->used < WRITER_BUFFER_BYTES)
		return 0;
	w->error = writer_flush(w, NULL, 0);
	if (w->error == 0 && len > head) {
		memcpy(w->buffer, (const uint8_t *)bytes + head, len - head);
		w->used = len - head;
	}
	return w->error;
}

int posix_writer_seal(struct store_storage_writer *w)
{
	int r = w->error;
	if (r == 0)
		r = writer_flush(w, NULL, 0);
	if (r == 0)
		r = posix_sync(w->temp.fd);
	if (r == 0) {
		r = temp_publish(w->storage, w->dir, &w->temp, w->last);
		if (r < 0 && temp_is_published(w->dir, &w->temp, w->last))
			r = 0;
	}
	if (r == 0) {
		if (w->temp.name[0] != '\0' && unlinkat(w->dir, w->temp.name, 0) == 0)
			w->temp.name[0] = '\0';
		r = posix_sync(w->dir);
	}
	writer_free(w);
	return r;
}

void posix_writer_abandon(struct store_storage_writer *w)
{
	if (w)
		writer_free(w);
}
