/* SPDX-License-Identifier: Apache-2.0
 *
 * A file that is read once is served by the server and not assembled: copying a whole tree costs nothing extra. A file
 * is assembled when it is opened again after half of it was read. A loader reads all of a large file in an order of its
 * own and gains from processors that decode ahead of it: the file is assembled as soon as its reads show that it is a
 * loader, and the work is given up if the loader closes the file before it has read half.
 *
 * There is a record for each file that is open, was read lately, or is in memory:
 *
 *   COUNTING  served by the server; `served` grows with what is read
 *   QUEUED    the thread will assemble it
 *   FILLING   it is being assembled; the server answers reads from its memory as far as that is filled
 *   READY     the kernel has its memory under `id`; the memory is freed when the id is closed and no descriptor is left
 *   REFUSED   it could not be assembled, because of damage for instance: the server goes on serving it, with errors for
 *             the damaged parts alone
 *
 * backing_records.c has the records, and decides which files stay in memory; backing_assemble.c assembles one;
 * backing_thread.c is the thread; here files are opened, read and closed.
 *
 * Invariants: (1) cached_opens and passthrough_opens are never both above 0, because the kernel refuses that with EIO:
 * both count an open from before the kernel learns of it until after the kernel has forgotten it; while one is above 0,
 * no record leaves or enters READY for the other. (2) A record that is being opened, open, QUEUED, FILLING or collapsed
 * is kept. (3) The memfds of READY and FILLING records together have at most max_bytes. (4) The lock is not held across
 * a read, nor across a question that the keeper answers. */
#include "fs/backing_internal.h"

#include <string.h>
#include <time.h>

#include "core/base/clock.h"

#define LEAST_BYTES (UINT64_C(64) << 10) /* smaller files are left to the kernel's page cache */
#define WAIT_MS 50
#define LONG_BYTES (UINT64_C(256) << 10) /* a read of this size may wait for bytes that are about to be there, ... */
#define LONG_MS 1000                     /* ... and no longer than this */

/* ---- opening and closing ---- */

/* With the lock: waits until it is neither QUEUED nor FILLING. */
static int wait_filled(struct fs_backings *all, const struct fs_backing *b)
{
	while (b->state == QUEUED || b->state == FILLING) {
		struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, WAIT_MS);

		pthread_cond_timedwait(&all->changed, &all->lock, &until);
		if (fs_request_abandoned())
			return -EINTR;
	}
	return 0;
}

/* With the lock; b is being opened. Decides whether to assemble it now, later, or not at all. */
static int consider(struct fs_backings *all, struct fs_backing *b, struct fs_handle *h)
{
	bool now = all->tier == FS_TIER_PASSTHROUGH || b->size <= BACKING_NOW_BYTES;
	bool again = b->served >= b->size / 2;
	int r;

	if (!backing_can_assemble(all) || b->commit->gone)
		return 0;
	r = now ? wait_filled(all, b) : 0;
	if (r || b->state != COUNTING || !b->size || !(again || all->tier == FS_TIER_PASSTHROUGH))
		return r;
	if (now && !b->cached_opens)
		backing_assemble(all, b, h->file);
	b->wanted = !now;
	return 0;
}

/* With the lock: it is opened; a new use begins unless it is open already. */
static void use(struct fs_backings *all, struct fs_backing *b, const struct view_file *file)
{
	if (b->opening || b->cached_opens || b->passthrough_opens) {
		fs_loader_opened(&b->loader, b->served - b->served_before);
		return;
	}
	memmove(b->uses + 1, b->uses, sizeof b->uses - sizeof *b->uses);
	b->uses[0] = ++all->clock;
	b->served_before = b->served;
	b->loader = (struct fs_loader){0};
	/* a small file is read before assembling would help; a loader reads many tensors */
	b->watched = all->tier == FS_TIER_AUTO && b->size > BACKING_NOW_BYTES &&
		view_file_tensor(file, b->size - 1) > 0;
}

int fs_backing_open(struct fs_backings *all, uint64_t node, struct fs_handle *h)
{
	struct fs_backing *b;
	int r;

	/* such a file is never passed through, so nothing is counted */
	if (all->tier == FS_TIER_CACHED || (all->tier == FS_TIER_AUTO && view_file_size(h->file) < LEAST_BYTES))
		return 0;
	pthread_mutex_lock(&all->lock);
	b = backing_find(all, node);
	if (!b)
		b = backing_make(all, node, h);
	if (!b) {
		backing_unlock(all);
		return -ENOMEM;
	}
	use(all, b, h->file);
	b->opening++;
	backing_settle(all, b);
	r = consider(all, b, h);
	b->opening--;
	if (r == 0) {
		h->passthrough = b->state == READY && !b->cached_opens;
		h->backing = b;
		*(h->passthrough ? &b->passthrough_opens : &b->cached_opens) += 1;
		*(h->passthrough ? &all->stats.open_passthrough : &all->stats.open_cached) += 1;
		all->stats.opens_passthrough += h->passthrough;
		r = h->passthrough ? b->id : 0;
		b->owed = h->passthrough ? 0 : b->owed;
		b->pages = !h->passthrough; /* the kernel drops them itself at a passed-through open */
		b->held++;
	}
	backing_settle(all, b);
	backing_unlock(all);
	return r;
}

/* With the lock. Counts once for each descriptor that the kernel had or was to get. */
static void let_go(struct fs_backing *b, struct fs_handle *h)
{
	if (h->released)
		return;
	h->released = true;
	if (--b->held == 0 && b->early && b->served < b->size / 2)
		b->stop = true;
}

/* A large file that is wanted is assembled after its last close: earlier, that would take processors from its readers,
 * and would help no reader but a loader. */
void fs_backing_release(struct fs_backings *all, struct fs_handle *h)
{
	struct fs_backing *b = h->backing;

	if (!b)
		return;
	pthread_mutex_lock(&all->lock);
	let_go(b, h);
	if (!b->held && b->wanted && b->state == COUNTING)
		backing_queue(all, b, h, false);
	backing_unlock(all);
}

void fs_backing_closed(struct fs_backings *all, struct fs_handle *h)
{
	struct fs_backing *b = h->backing;

	if (!b)
		return;
	pthread_mutex_lock(&all->lock);
	let_go(b, h);
	--*(h->passthrough ? &b->passthrough_opens : &b->cached_opens);
	--*(h->passthrough ? &all->stats.open_passthrough : &all->stats.open_cached);
	b->left = all->clock;
	if (!all->stats.open_cached && (all->nsmall || all->reserve.bytes < all->reserve_most))
		pthread_cond_broadcast(&all->changed);
	backing_settle(all, b);
	backing_unlock(all);
}

/* ---- reading ---- */

/* Are the bytes among the first n, in the order in which it is filled? */
static bool is_among(const struct fs_backing *b, uint64_t n, uint64_t offset, uint64_t len)
{
	uint64_t at = offset >= b->from ? offset - b->from : offset + b->size - b->from;

	return n >= b->size || at + len <= n;
}

/* Is it in the stretch that is filled now, or in the next one? A long read waits for it: decoding the same bytes once
 * more would take the processors from the filling, and would not be done sooner. */
static bool is_coming(const struct fs_backing *b, uint64_t offset, uint64_t len)
{
	uint64_t filling = b->filling, ready = b->ready;

	return len >= LONG_BYTES && is_among(b, filling + (filling - base_min(ready, filling)), offset, len);
}

/* With the lock. */
static void wait_coming(struct fs_backings *all, const struct fs_backing *b, uint64_t offset, uint64_t len)
{
	struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, LONG_MS);

	while (b->state == FILLING && !is_among(b, b->ready, offset, len) && !fs_request_abandoned() &&
			pthread_cond_timedwait(&all->changed, &all->lock, &until) == 0)
		;
}

const void *fs_backing_look(struct fs_backings *all, struct fs_handle *h, uint64_t offset, size_t len)
{
	struct fs_backing *b = h->backing;
	bool there;

	if (!b || h->passthrough || b->fd < 0)
		return NULL;
	if (!is_among(b, b->ready, offset, len) && !is_coming(b, offset, len))
		return NULL;
	pthread_mutex_lock(&all->lock);
	wait_coming(all, b, offset, len);
	there = (b->state == FILLING || b->state == READY) && !b->sealing && b->map.bytes &&
		is_among(b, b->ready, offset, len);
	b->reading += there;
	backing_unlock(all);
	return there ? b->map.bytes + offset : NULL;
}

void fs_backing_looked(struct fs_backings *all, struct fs_handle *h, size_t len)
{
	struct fs_backing *b = h->backing;

	pthread_mutex_lock(&all->lock);
	b->reading--;
	all->stats.read_bytes += len;
	b->owed -= base_min(b->owed, len);
	if (b->sealing)
		pthread_cond_broadcast(&all->changed);
	backing_settle_memory(all, b);
	backing_unlock(all);
}

void fs_backing_served(struct fs_backings *all, struct fs_handle *h, uint64_t offset, uint64_t len)
{
	struct fs_backing *b = h->backing;

	if (!b)
		return;
	atomic_fetch_add_explicit(&b->served, len, memory_order_relaxed);
	if (!b->watched)
		return;
	pthread_mutex_lock(&all->lock);
	if (b->state == COUNTING && b->watched && fs_loader_read(&b->loader, h->file, offset, len)) {
		b->watched = false;
		b->from = fs_loader_from(h->file, offset, b->served - b->served_before);
		backing_queue(all, b, h, true);
	}
	backing_unlock(all);
}
