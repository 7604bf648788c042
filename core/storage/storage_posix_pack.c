/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_pack: a pack while it is being made (the rules of storage_posix_write hold for it too).
 *
 *   append   copies into a buffer of 4 MiB; a full one is the thread's, append waits while all are
 *   thread   writes the full buffers in order, so that whoever makes the bytes never waits for a disk that keeps up
 *   seal     waits for the thread, writes what is left, fsyncs, publishes
 *
 * Where the file system can (STATX_DIOALIGN: local ones), full buffers go to the disk past the page cache. That costs
 * half of the processor time or less; the cache keeps what the node's jobs have in it; and no memory is taken for pages
 * that nobody may read, which slows a buffered writer down to a fraction on a machine that has to find that memory
 * first (docs/decisions.md has the figures). Elsewhere, and for STORE_STORAGE_KEEP_CACHED, pages are handed to
 * write-back every 16 MiB and waited for 48 MiB later, so that the fsync at the end finds little to do. A pack of less
 * than one buffer has no thread and one write.
 *
 * Locking: `lock` protects filled, done, stop, error; a buffer belongs to the thread while its number is in
 * [done, filled), else to the caller. Only the thread writes while there is one. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/le.h"
#include "core/base/pool.h"
#include "core/storage/storage_posix_internal.h"

enum {
	WRITER_BUFFER_BYTES = 4 << 20,
	WRITER_BUFFER_ALIGN = 4096, /* what O_DIRECT asks for; and the kernel copies faster from a page on */
	WRITER_BUFFERS = 3,
};
#define WRITER_SYNC_BYTES (UINT64_C(16) << 20)
#define WRITER_BEHIND_BYTES (2 * WRITER_SYNC_BYTES)

struct store_storage_writer {
	struct posix_storage *storage;
	int dir;
	struct posix_temp temp;
	bool direct;              /* the descriptor has O_DIRECT */
	uint64_t synced, settled; /* of the bytes written: handed to write-back; and waited for */
	size_t used;              /* of the buffer being filled */
	uint8_t *buffers[WRITER_BUFFERS];
	pthread_t thread;
	bool has_thread;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	uint64_t filled, done;    /* numbers of the first buffer not yet full, not yet written */
	bool stop;                /* the thread ends when all full buffers are written */
	int error;                /* sticky */
	int told;                 /* the caller's copy */
	char last[256];
	char folder[STORE_NAME_MAX]; /* with a slash at its end, or empty */
};

/* ---- the disk's side ---- */

/* Tells the disk to begin with what was written, and waits for what it was given three steps ago. So the disk is busy
 * from the beginning, and there is never so much unwritten that the kernel slows the writer down, which on a fast disk
 * costs a third to a half of its rate. The wait consumes an error that fsync would otherwise return at the end, so it
 * has to be returned here. If a file system supports neither call, the fsync does everything. */
static int writer_start(struct store_storage_writer *w, uint64_t written)
{
	uint64_t before = w->synced, n;

	(void)sync_file_range(w->temp.fd, (off_t)before, (off_t)(written - before), SYNC_FILE_RANGE_WRITE);
	w->synced = written;
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

static bool set_direct(int fd, bool on)
{
	int flags = fcntl(fd, F_GETFL);
	return flags >= 0 && fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

static bool start_direct(int fd)
{
#ifdef STATX_DIOALIGN
	struct statx st;
	return statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && st.stx_mask & STATX_DIOALIGN &&
	       st.stx_dio_mem_align > 0 && WRITER_BUFFER_ALIGN % st.stx_dio_mem_align == 0 &&
	       st.stx_dio_offset_align > 0 && WRITER_BUFFER_BYTES % st.stx_dio_offset_align == 0 &&
	       set_direct(fd, true);
#else
	(void)fd;
	return false;
#endif
}

/* Writes buffer `number`, a full one. */
static int write_full(struct store_storage_writer *w, uint64_t number)
{
	const uint8_t *bytes = w->buffers[number % WRITER_BUFFERS];
	uint64_t at = number * WRITER_BUFFER_BYTES, end = at + WRITER_BUFFER_BYTES;

	int r = posix_write_at(w->temp.fd, at, bytes, WRITER_BUFFER_BYTES);
	if (r == -EINVAL && w->direct) { /* a short write left an odd rest, or this file system promised too much */
		w->direct = !set_direct(w->temp.fd, false);
		w->synced = w->settled = at;
		r = posix_write_at(w->temp.fd, at, bytes, WRITER_BUFFER_BYTES);
	}
	return r == 0 && !w->direct && end - w->synced >= WRITER_SYNC_BYTES ? writer_start(w, end) : r;
}

static void *writer_main(void *arg)
{
	struct store_storage_writer *w = arg;

	w->direct = !(w->storage->flags & STORE_STORAGE_KEEP_CACHED) && start_direct(w->temp.fd);
	pthread_mutex_lock(&w->lock);
	while (w->done < w->filled || !w->stop) {
		if (w->done == w->filled) {
			pthread_cond_wait(&w->changed, &w->lock);
			continue;
		}
		uint64_t number = w->done;
		int r = w->error;
		pthread_mutex_unlock(&w->lock);
		if (r == 0)
			r = write_full(w, number);
		pthread_mutex_lock(&w->lock);
		if (w->error == 0)
			w->error = r;
		w->done = number + 1;
		pthread_cond_signal(&w->changed);
	}
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

/* ---- the caller's side ---- */

static int writer_start_thread(struct store_storage_writer *w)
{
	for (size_t i = 1; i < WRITER_BUFFERS; i++) {
		w->buffers[i] = aligned_alloc(WRITER_BUFFER_ALIGN, WRITER_BUFFER_BYTES);
		if (!w->buffers[i])
			return -ENOMEM;
	}
	int r = base_thread_start(&w->thread, writer_main, w);
	w->has_thread = r == 0;
	return r;
}

/* Hands the buffer over, which is full, and waits until there is another one. */
static int writer_hand_over(struct store_storage_writer *w)
{
	if (!w->has_thread) {
		if (w->error == 0)
			w->error = writer_start_thread(w);
		if (w->error < 0)
			return w->error;
	}
	pthread_mutex_lock(&w->lock);
	w->filled++;
	pthread_cond_signal(&w->changed);
	while (w->filled - w->done == WRITER_BUFFERS)
		pthread_cond_wait(&w->changed, &w->lock);
	int r = w->error;
	pthread_mutex_unlock(&w->lock);
	w->used = 0;
	return r;
}

/* Waits for what was handed over, or with `drop` only for the write under way. */
static int writer_settle(struct store_storage_writer *w, bool drop)
{
	if (w->has_thread) {
		pthread_mutex_lock(&w->lock);
		w->stop = true;
		if (drop && w->error == 0)
			w->error = -ECANCELED;
		pthread_cond_signal(&w->changed);
		pthread_mutex_unlock(&w->lock);
		pthread_join(w->thread, NULL);
		w->has_thread = false;
	}
	return w->error;
}

static void writer_free(struct store_storage_writer *w)
{
	writer_settle(w, true);
	posix_temp_drop(w->dir, &w->temp);
	if (w->dir >= 0)
		close(w->dir);
	for (size_t i = 0; i < WRITER_BUFFERS; i++)
		free(w->buffers[i]);
	pthread_cond_destroy(&w->changed);
	pthread_mutex_destroy(&w->lock);
	free(w);
}

static int writer_new(struct store_storage *s, const char *name, bool over, struct store_storage_writer **ret_writer)
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
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->changed, NULL);
	w->buffers[0] = aligned_alloc(WRITER_BUFFER_ALIGN, WRITER_BUFFER_BYTES);
	const char *last;
	w->dir = w->buffers[0] ? posix_open_parent(p, name, POSIX_DURABLE, &last) : -ENOMEM;
	int r = w->dir;
	struct stat st;
	if (r >= 0 && !over)
		r = fstatat(w->dir, last, &st, AT_SYMLINK_NOFOLLOW) == 0 ? -EEXIST : 0;
	if (r >= 0)
		r = posix_temp_open(p, w->dir, last, &w->temp);
	if (r < 0) {
		writer_free(w);
		return posix_denied(p, name, r);
	}
	snprintf(w->last, sizeof w->last, "%s", last);
	snprintf(w->folder, sizeof w->folder, "%.*s", (int)(strlen(name) - strlen(last)), name);
	*ret_writer = w;
	return 0;
}

int posix_writer_open(struct store_storage *s, const char *name, struct store_storage_writer **ret_writer)
{
	return writer_new(s, name, false, ret_writer);
}

int posix_writer_reopen(struct store_storage *s, const char *name, struct store_storage_writer **ret_writer)
{
	return writer_new(s, name, true, ret_writer);
}

int posix_writer_append(struct store_storage_writer *w, const void *bytes, size_t len)
{
	const uint8_t *from = bytes;

	while (len > 0 && w->told == 0) {
		size_t step = base_min(len, WRITER_BUFFER_BYTES - w->used);
		memcpy(w->buffers[w->filled % WRITER_BUFFERS] + w->used, from, step);
		w->used += step;
		from += step;
		len -= step;
		if (w->used == WRITER_BUFFER_BYTES)
			w->told = writer_hand_over(w);
	}
	return w->told;
}

/* Whether `last` is this very file: the answer to a publish got lost, or was given twice. */
static bool temp_is_published(int dir, const struct posix_temp *t, const char *last)
{
	struct stat mine, there;
	return fstat(t->fd, &mine) == 0 && fstatat(dir, last, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
	       mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

static int writer_publish(struct store_storage_writer *w)
{
	int r = posix_temp_publish(w->storage, w->dir, &w->temp, w->last);
	if (r < 0 && temp_is_published(w->dir, &w->temp, w->last))
		r = 0;
	if (r < 0)
		return r;
	if (w->temp.name[0] != '\0' && unlinkat(w->dir, w->temp.name, 0) == 0)
		w->temp.name[0] = '\0';
	return posix_sync_names(w->storage, w->dir);
}

/* Everything that was handed over is durable. */
static int writer_finish(struct store_storage_writer *w)
{
	int r = writer_settle(w, false);
	if (r == 0 && w->direct && !set_direct(w->temp.fd, false))
		r = -errno;
	if (r == 0)
		r = posix_write_at(w->temp.fd, w->filled * WRITER_BUFFER_BYTES, w->buffers[w->filled % WRITER_BUFFERS],
			w->used);
	return r < 0 ? r : posix_sync(w->temp.fd);
}

int posix_writer_seal(struct store_storage_writer *w)
{
	int r = writer_finish(w);

	if (r == 0)
		r = writer_publish(w);
	writer_free(w);
	return r;
}

int posix_writer_seal_over(struct store_storage_writer *w, int (*check)(void *arg, const char *name), void *arg)
{
	char name[STORE_NAME_MAX];
	int r = writer_finish(w);

	if (r == 0)
		r = posix_temp_name(w->dir, &w->temp, w->last);
	if (r == 0 && snprintf(name, sizeof name, "%s%s", w->folder, w->temp.name) >= (int)sizeof name)
		r = -ENAMETOOLONG;
	if (r == 0)
		r = check(arg, name);
	if (r == 0)
		r = posix_denied(w->storage, name, posix_temp_replace(w->dir, &w->temp, w->last));
	if (r == 0)
		r = posix_sync_names(w->storage, w->dir);
	writer_free(w);
	return r;
}

void posix_writer_abandon(struct store_storage_writer *w)
{
	if (w)
		writer_free(w);
}
