/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_pack: a pack while it is being made (the rules of storage_posix_write hold for it too).
 *
 *   append   copies into a buffer of 4 MiB, or only notes where lent bytes are; a full one is the threads', append
 *            waits while there is no other
 *   threads  write the full buffers, taken in order, so that append never waits for a disk that keeps up
 *   seal     waits for the threads, writes what is left, fsyncs, publishes
 *
 * Where the file system can (STATX_DIOALIGN: local ones), full buffers go to the disk past the page cache. That costs
 * half of the processor time or less; the cache keeps what the node's jobs have in it; and no memory is taken for pages
 * that may never be read: on a machine that has to free that memory first, it slows a buffered writer down to a
 * fraction (docs/decisions.md has the figures). Elsewhere, and for STORAGE_KEEP_CACHED, pages are given to
 * write-back every 16 MiB and waited for 48 MiB later, so that the fsync at the end finds little to do. A pack of less
 * than one buffer has no thread and one write.
 *
 * How many buffers are written at once is measured (storage_posix_pace.c). A writer begins with one, or with half of
 * what the storage's last writer found best. Past the page cache a file that grows takes one write at a time (ext4,
 * XFS), so with several at once its blocks are allocated ahead; seal cuts what was too much.
 *
 * Locking: `lock` protects everything from `slots` on. A buffer belongs to a thread while its number is in [done,
 * taken), else to the caller. While there are threads, only they write. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/base/pool.h"
#include "core/storage/storage_posix_internal.h"

enum {
	WRITER_SPARE = 2,       /* buffers besides those that are written: one is filled, one waits */
	WRITER_BUFFERS = POSIX_PACE_MAX + WRITER_SPARE,
};
#define WRITER_SYNC_BYTES (UINT64_C(16) << 20)
#define WRITER_BEHIND_BYTES (2 * WRITER_SYNC_BYTES)
#define WRITER_AHEAD_MIN_BYTES (UINT64_C(64) << 20) /* allocated at once: as much as there is, within these bounds */
#define WRITER_AHEAD_MAX_BYTES (UINT64_C(256) << 20)
#define WRITER_AHEAD_FREE 16u   /* only where so many times that is free */

struct storage_writer {
	struct posix_storage *storage;
	int dir;
	struct posix_temp temp;
	struct posix_buffer *buffer; /* being filled */
	size_t used;
	size_t lent_align;        /* lent memory that does not begin at a multiple is copied; 0: not known yet */
	int failed;               /* the caller's copy of the error */
	pthread_t threads[POSIX_PACE_MAX];
	unsigned nthreads;        /* the caller's, too */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct { struct posix_buffer *buffer; bool written; } slots[WRITER_BUFFERS]; /* by number: full ones */
	struct posix_buffer *spare[WRITER_BUFFERS];
	unsigned nspare, nbuffers;
	uint64_t filled, taken, done; /* numbers of the first buffer not yet full, not yet taken, not yet written */
	struct posix_pace pace;   /* how many writes at once */
	bool direct;              /* the descriptor has O_DIRECT */
	bool syncing;             /* a thread hands pages to write-back */
	uint64_t synced, settled; /* of the bytes written: handed to write-back; and waited for */
	uint64_t ahead;           /* blocks are allocated up to here; 0: none ahead, UINT64_MAX: it cannot be done */
	bool stop;                /* the threads end when all full buffers are written */
	int error;                /* sticky */
	char last[256];
	char folder[STORAGE_NAME_MAX]; /* with a slash at its end, or empty */
};

/* ---- the disk's side ---- */

/* Has the disk begin with what was written, [before, written), and waits for what it was given three steps ago. So the
 * disk is busy from the beginning, and there is never so much unwritten that the kernel slows the writer down, which on
 * a fast disk costs a third to a half of its rate. The wait consumes an error that fsync would otherwise return at the
 * end, so it has to be returned here. If a file system supports neither call, the fsync does everything. Called by the
 * thread that has `syncing`, which alone changes `settled`. */
static int writer_start(struct storage_writer *w, uint64_t before, uint64_t written)
{
	uint64_t n;

	(void)sync_file_range(w->temp.fd, (off_t)before, (off_t)(written - before), SYNC_FILE_RANGE_WRITE);
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

static bool writer_past_cache(const struct storage_writer *w)
{
	return !(w->storage->flags & STORAGE_KEEP_CACHED) && posix_direct_align(w->temp.fd) > 0;
}

/* Allocates blocks for the buffers from `at` on, unless free space is short: others may need it. */
static bool writer_allocate(struct storage_writer *w, uint64_t at, uint64_t len)
{
	struct statvfs v;

	return fstatvfs(w->temp.fd, &v) == 0 && v.f_bavail * v.f_frsize / WRITER_AHEAD_FREE >= len &&
	       fallocate(w->temp.fd, 0, (off_t)at, (off_t)len) == 0;
}

/* How far blocks are to be allocated before buffer `number` is written; 0: they are. The lock is held. */
static uint64_t writer_ahead(struct storage_writer *w, uint64_t number)
{
	uint64_t at = number * POSIX_BUFFER_BYTES;

	if (!w->direct || w->pace.width == 1 || w->ahead >= at + POSIX_BUFFER_BYTES)
		return 0;
	w->ahead = at + base_min(base_max(at, WRITER_AHEAD_MIN_BYTES), WRITER_AHEAD_MAX_BYTES);
	return w->ahead;
}

/* Writes the full buffer `number`; the lock is held before and after. */
static int write_full(struct storage_writer *w, uint64_t number)
{
	struct posix_buffer *b = w->slots[number % WRITER_BUFFERS].buffer;
	uint64_t at = number * POSIX_BUFFER_BYTES, ahead = writer_ahead(w, number);
	bool direct = w->direct, allocated = true;
	int r;

	pthread_mutex_unlock(&w->lock);
	if (ahead)
		allocated = writer_allocate(w, at, ahead - at);
	r = posix_buffer_write(b, w->temp.fd, at, POSIX_BUFFER_BYTES);
	/* a short write left an odd rest, the file system promised too much, or lent memory belongs to a driver */
	if ((r == -EINVAL || r == -EFAULT) && direct) {
		direct = !set_direct(w->temp.fd, false);
		r = posix_buffer_write(b, w->temp.fd, at, POSIX_BUFFER_BYTES);
	}
	posix_buffer_return(b);
	pthread_mutex_lock(&w->lock);
	if (!allocated)
		w->ahead = UINT64_MAX;
	if (w->direct && !direct) {
		w->direct = false;
		w->synced = w->settled = w->done * POSIX_BUFFER_BYTES;
	}
	return r;
}

/* Buffer `number` was written, or never will be. The lock is held. */
static void writer_written(struct storage_writer *w, uint64_t number, int r)
{
	if (w->error == 0)
		w->error = r;
	w->slots[number % WRITER_BUFFERS].written = true;
	for (; w->done < w->taken && w->slots[w->done % WRITER_BUFFERS].written; w->done++) {
		struct posix_buffer *b = w->slots[w->done % WRITER_BUFFERS].buffer;

		w->slots[w->done % WRITER_BUFFERS].buffer = NULL;
		if (w->nbuffers <= w->pace.width + WRITER_SPARE) {
			w->spare[w->nspare++] = b;
			continue;
		}
		posix_buffer_free(b);
		w->nbuffers--;
	}
	if (w->error == 0 && posix_pace_note(&w->pace, w->taken < w->filled, base_monotonic_ns()))
		atomic_store(&w->storage->writes_at_once, w->pace.best);
	pthread_cond_broadcast(&w->changed);
}

/* Hands pages to write-back, if that is due. The lock is held, but for the calls. */
static void writer_write_back(struct storage_writer *w)
{
	uint64_t before = w->synced, end = w->done * POSIX_BUFFER_BYTES;
	int r;

	if (w->direct || w->error < 0 || w->syncing || end - before < WRITER_SYNC_BYTES)
		return;
	w->syncing = true;
	w->synced = end;
	pthread_mutex_unlock(&w->lock);
	r = writer_start(w, before, end);
	pthread_mutex_lock(&w->lock);
	w->syncing = false;
	if (w->error == 0)
		w->error = r;
	pthread_cond_broadcast(&w->changed);
}

/* May a thread take the next full buffer? While one waits for pages, others take only as much as it will hand over
 * next. */
static bool writer_takes(const struct storage_writer *w)
{
	uint64_t behind = w->taken * POSIX_BUFFER_BYTES - w->synced;

	return w->taken < w->filled &&
	       (w->error < 0 || (w->taken - w->done < w->pace.width && !(w->syncing && behind >= WRITER_SYNC_BYTES)));
}

static void *writer_main(void *arg)
{
	struct storage_writer *w = arg;

	pthread_mutex_lock(&w->lock);
	while (w->taken < w->filled || !w->stop) {
		uint64_t number;

		if (!writer_takes(w)) {
			pthread_cond_wait(&w->changed, &w->lock);
			continue;
		}
		number = w->taken++;

		w->slots[number % WRITER_BUFFERS].written = false;
		writer_written(w, number, w->error < 0 ? w->error : write_full(w, number));
		writer_write_back(w);
	}
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

/* ---- the caller's side ---- */

/* One more thread, if there are fewer than there may be writes at once. Only the first has to start. */
static int writer_start_thread(struct storage_writer *w, unsigned width)
{
	int r;

	if (w->nthreads >= width)
		return 0;
	if (w->nthreads == 0)
		w->direct = writer_past_cache(w) && set_direct(w->temp.fd, true);
	r = base_thread_start(&w->threads[w->nthreads], writer_main, w);
	w->nthreads += r == 0;
	return w->nthreads ? 0 : r;
}

/* The next buffer to fill; waits until there is one. If there is no memory for another, it does with those that there
 * are. NULL: they are too few. */
static struct posix_buffer *writer_buffer(struct storage_writer *w)
{
	struct posix_buffer *b = NULL;

	pthread_mutex_lock(&w->lock);
	while (!b) {
		if (w->nspare) {
			b = w->spare[--w->nspare];
		} else if (w->nbuffers >= w->pace.width + WRITER_SPARE) {
			pthread_cond_wait(&w->changed, &w->lock);
		} else if ((b = posix_buffer_new())) {
			w->nbuffers++;
		} else if (w->nbuffers > WRITER_SPARE) {
			posix_pace_bound(&w->pace, w->nbuffers - WRITER_SPARE);
		} else {
			break;
		}
	}
	pthread_mutex_unlock(&w->lock);
	return b;
}

/* Hands the buffer over, which is full, and waits until there is another one. */
static int writer_hand_over(struct storage_writer *w)
{
	uint64_t begin = base_monotonic_ns();
	unsigned width;
	int r;

	pthread_mutex_lock(&w->lock);
	w->slots[w->filled % WRITER_BUFFERS].buffer = w->buffer;
	w->filled++;
	width = w->pace.width;
	pthread_cond_broadcast(&w->changed);
	pthread_mutex_unlock(&w->lock);
	w->buffer = NULL;
	w->used = 0;
	r = writer_start_thread(w, width);
	if (r == 0 && !(w->buffer = writer_buffer(w)))
		r = -ENOMEM;
	atomic_fetch_add(&w->storage->base.write_wait_ns, base_monotonic_ns() - begin);
	pthread_mutex_lock(&w->lock);
	if (w->error == 0)
		w->error = r;
	r = w->error;
	pthread_mutex_unlock(&w->lock);
	return r;
}

/* Waits for what was handed over, or with `drop` only for the writes under way. */
static int writer_settle(struct storage_writer *w, bool drop)
{
	pthread_mutex_lock(&w->lock);
	w->stop = true;
	if (drop && w->error == 0)
		w->error = -ECANCELED;
	pthread_cond_broadcast(&w->changed);
	pthread_mutex_unlock(&w->lock);
	for (; w->nthreads; w->nthreads--)
		pthread_join(w->threads[w->nthreads - 1], NULL);
	return w->error;
}

static void writer_free(struct storage_writer *w)
{
	writer_settle(w, true);
	posix_temp_drop(w->dir, &w->temp);
	if (w->dir >= 0)
		close(w->dir);
	for (size_t i = 0; i < WRITER_BUFFERS; i++)
		posix_buffer_free(w->slots[i].buffer); /* where no thread could be started */
	while (w->nspare)
		posix_buffer_free(w->spare[--w->nspare]);
	posix_buffer_free(w->buffer);
	pthread_cond_destroy(&w->changed);
	pthread_mutex_destroy(&w->lock);
	free(w);
}

static int writer_new(struct storage *s, const char *name, bool over, struct storage_writer **ret_writer)
{
	struct posix_storage *p = posix_of(s);
	struct storage_writer *w;
	const char *last;
	int r;
	struct stat st;

	if (p->flags & STORAGE_READ_ONLY)
		return -EROFS;
	if (!storage_name_valid(name) || storage_name_temporary(name))
		return -EINVAL;
	w = calloc(1, sizeof *w);
	if (!w)
		return -ENOMEM;
	w->storage = p;
	w->temp.fd = -1;
	posix_pace_init(&w->pace, atomic_load(&p->writes_at_once) / 2);
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->changed, NULL);
	w->buffer = writer_buffer(w);
	w->dir = w->buffer ? posix_open_parent(p, name, POSIX_DURABLE, &last) : -ENOMEM;
	r = w->dir;
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

int posix_writer_open(struct storage *s, const char *name, struct storage_writer **ret_writer)
{
	return writer_new(s, name, false, ret_writer);
}

int posix_writer_reopen(struct storage *s, const char *name, struct storage_writer **ret_writer)
{
	return writer_new(s, name, true, ret_writer);
}

int posix_writer_append(struct storage_writer *w, const void *bytes, size_t len)
{
	const uint8_t *from = bytes;

	while (len > 0 && w->failed == 0) {
		size_t step = base_min(len, POSIX_BUFFER_BYTES - w->used);
		memcpy(w->buffer->bytes + w->used, from, step);
		w->used += step;
		from += step;
		len -= step;
		if (w->used == POSIX_BUFFER_BYTES)
			w->failed = writer_hand_over(w);
	}
	return w->failed;
}

/* How many of the bytes may be written from where they are, as far as the buffer goes. It is a whole number of pages at
 * a page of the buffer, so that the buffer's own memory around them is aligned as O_DIRECT wants it, too. */
static size_t writer_lends(struct storage_writer *w, const uint8_t *bytes, size_t len)
{
	if (w->lent_align == 0)
		w->lent_align = writer_past_cache(w) ? posix_direct_align(w->temp.fd) : 1;
	if (w->used % POSIX_BUFFER_ALIGN != 0 || (uintptr_t)bytes % w->lent_align != 0)
		return 0;
	len = base_min(len, POSIX_BUFFER_BYTES - w->used) / POSIX_BUFFER_ALIGN * POSIX_BUFFER_ALIGN;
	return len < POSIX_BUFFER_PART ? 0 : len;
}

int posix_writer_append_lent(struct storage_writer *w, const void *bytes, size_t len, struct storage_lent *lent)
{
	const uint8_t *from = bytes;

	while (len > 0 && w->failed == 0) {
		size_t step = writer_lends(w, from, len);

		if (step == 0 || !posix_buffer_lend(w->buffer, w->used, from, step, lent)) {
			step = base_min(len, POSIX_BUFFER_BYTES - w->used);
			posix_writer_append(w, from, step);
		} else {
			w->used += step;
			if (w->used == POSIX_BUFFER_BYTES)
				w->failed = writer_hand_over(w);
		}
		from += step;
		len -= step;
	}
	return w->failed;
}

void posix_writer_keep(struct storage_writer *w)
{
	if (w->buffer)
		posix_buffer_keep(w->buffer);
}

/* Is `last` this very file? Then the answer to a publish was lost, or a network filesystem ran it twice. */
static bool temp_is_published(int dir, const struct posix_temp *t, const char *last)
{
	struct stat mine, there;
	return fstat(t->fd, &mine) == 0 && fstatat(dir, last, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
	       mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

static int writer_publish(struct storage_writer *w)
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
static int writer_finish(struct storage_writer *w)
{
	uint64_t begin = base_monotonic_ns(), end = w->filled * POSIX_BUFFER_BYTES;
	int r = writer_settle(w, false);

	if (r == 0 && w->direct && !set_direct(w->temp.fd, false))
		r = -errno;
	if (r == 0)
		r = posix_buffer_write(w->buffer, w->temp.fd, end, w->used);
	if (r == 0 && w->ahead && ftruncate(w->temp.fd, (off_t)(end + w->used)) < 0)
		r = -errno;
	if (r == 0)
		r = posix_sync(w->temp.fd);
	atomic_fetch_add(&w->storage->base.write_wait_ns, base_monotonic_ns() - begin);
	return r;
}

int posix_writer_seal(struct storage_writer *w)
{
	int r = writer_finish(w);

	if (r == 0)
		r = writer_publish(w);
	writer_free(w);
	return r;
}

int posix_writer_seal_over(struct storage_writer *w, int (*check)(void *arg, const char *name), void *arg)
{
	char name[STORAGE_NAME_MAX];
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

void posix_writer_abandon(struct storage_writer *w)
{
	if (w)
		writer_free(w);
}
