/* SPDX-License-Identifier: Apache-2.0
 *
 * backing_thread: what is done while no one waits for it, in this order: large files are assembled, the kernel's pages
 * of files that it will read from memory are dropped, small pages are made huge, and the reserve grows. */
#include "fs/backing_internal.h"

#include <string.h>
#include <unistd.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/log.h"

#define FLOOR_SHARE 4                    /* a quarter of what was free at the start stays free, whatever is open */
#define STOP_MS 2000
#define COLLAPSE_BYTES (UINT64_C(32) << 20) /* at a time */

bool backing_can_assemble(struct fs_backings *all)
{
	if (!all->broker || all->ending)
		return false;
	if (fs_broker_works(all->broker))
		return true;
	if (!all->gave_up) {
		all->gave_up = true;
		fs_mount_feature(all->m, "passthrough", false, "the keeper did not answer");
		base_warning("the keeper did not answer: no more files are assembled");
	}
	return false;
}

bool backing_queue(struct fs_backings *all, struct fs_backing *b, struct fs_handle *h, bool early)
{
	if (b->commit->gone || !backing_can_assemble(all) ||
			base_array_room(all->queue, all->queue_room, all->nqueue + 1) < 0)
		return false;
	fs_handle_ref(h);
	if (early)
		memmove(all->queue + 1, all->queue, all->nqueue * sizeof *all->queue);
	all->queue[early ? 0 : all->nqueue] = h;
	all->nqueue++;
	b->state = QUEUED;
	b->early = early;
	b->stop = b->wanted = false;
	pthread_cond_broadcast(&all->changed);
	return true;
}

/* ---- the thread: each with the lock, which it releases meanwhile ---- */

static void do_queued(struct fs_backings *all)
{
	struct fs_handle *h = all->queue[0];
	struct fs_backing *b = h->backing;

	memmove(all->queue, all->queue + 1, --all->nqueue * sizeof *all->queue);
	if (b->stop) {
		b->state = COUNTING;
		all->stats.given_up++;
	} else {
		backing_assemble(all, b, h->file);
	}
	backing_unlock(all);
	fs_handle_unref(all->m, h);
	pthread_mutex_lock(&all->lock);
}

static void do_stale(struct fs_backings *all)
{
	uint64_t node = all->stale[--all->nstale];
	int r;

	backing_unlock(all);
	r = fuse_lowlevel_notify_inval_inode(all->m->session, node, 0, 0);
	pthread_mutex_lock(&all->lock);
	all->stats.pages_dropped += r == 0;
}

/* A loader that would have waited for huge pages went on without them. They are made while no one reads through the
 * server, because readers need the processors. false: there is nothing to do. */
static bool do_collapse(struct fs_backings *all)
{
	struct fs_backing *b = all->nsmall && !all->stats.open_cached ? backing_find(all, all->small[0]) : NULL;
	uint64_t from = all->collapsed;

	if (!all->nsmall || all->stats.open_cached)
		return false;
	if (b && b->small && from < b->size) {
		all->collapsed = base_min(from + COLLAPSE_BYTES, b->size);
		b->collapsing = true;
		backing_settle(all, b);
		backing_unlock(all);
		fs_memfd_collapse(&b->map, from, base_min(from + COLLAPSE_BYTES, b->size));
		pthread_mutex_lock(&all->lock);
		b->collapsing = false;
	} else {
		memmove(all->small, all->small + 1, --all->nsmall * sizeof *all->small);
		all->collapsed = 0;
		if (b)
			b->small = false;
	}
	if (b)
		backing_settle(all, b);
	return true;
}

/* Bytes to keep at hand: the size of the last file, while files are being assembled, within the room that is left. */
static uint64_t reserve_most(const struct fs_backings *all)
{
	uint64_t now = base_monotonic_ms();

	if (now >= all->reserve_until_ms || now < all->quiet_until_ms)
		return 0;
	return base_min(all->reserve_most, all->stats.max_bytes - base_min(all->stats.bytes, all->stats.max_bytes));
}

/* Grows the reserve only while the server has no readers, which need the processors. false: there is nothing to do. */
static bool do_reserve(struct fs_backings *all)
{
	uint64_t most = reserve_most(all), have = all->reserve.bytes;
	bool more = true;

	if (have == most || (have < most && all->stats.open_cached))
		return false;
	backing_unlock(all);
	if (have > most) {
		fs_reserve_drop(&all->reserve);
	} else {
		uint64_t free_bytes = fs_broker_memory(all->broker);
		more = free_bytes > BACKING_MEMORY_SHARE * most && free_bytes - most >= all->floor_bytes &&
			fs_reserve_grow(&all->reserve, most);
	}
	pthread_mutex_lock(&all->lock);
	if (!more)
		all->reserve_most = all->reserve.bytes; /* no more memory is available */
	return true;
}

static void *backings_main(void *arg)
{
	struct fs_backings *all = arg;

	pthread_mutex_lock(&all->lock);
	while (!all->ending) {
		if (all->nqueue)
			do_queued(all);
		else if (all->nstale)
			do_stale(all);
		else if (!do_collapse(all) && !do_reserve(all)) {
			struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, BACKING_RESERVE_MS);

			if (all->reserve.bytes)
				pthread_cond_timedwait(&all->changed, &all->lock, &until);
			else
				pthread_cond_wait(&all->changed, &all->lock);
		}
	}
	backing_unlock(all);
	return NULL;
}

/* ---- starting and ending it ---- */

/* A backing file of one byte, made and closed again. */
static int probe(const struct fs_backings *all, struct fs_broker *broker)
{
	base_cleanup_close int fd = fs_memfd_new(1);
	int r = fd < 0 ? fd : fs_memfd_seal(fd);

	if (!r)
		r = fs_broker_open(broker, fuse_session_fd(all->m->session), fd);
	if (r > 0)
		fs_broker_close(broker, fuse_session_fd(all->m->session), r);
	return r < 0 ? r : 0;
}

/* Files may be opened meanwhile: `all` gets the broker only once everything works. */
static void start(struct fs_backings *all, struct fs_broker *broker)
{
	int r = probe(all, broker);
	if (r == 0)
		r = -pthread_create(&all->thread, NULL, backings_main, all);
	if (r == 0) {
		uint64_t free_bytes = fs_broker_memory(broker);
		pthread_mutex_lock(&all->lock);
		all->broker = broker;
		all->floor_bytes = free_bytes / FLOOR_SHARE;
		all->running = true;
		backing_unlock(all);
		fs_mount_feature(all->m, "passthrough", true, "up to %llu bytes of files in memory",
			(unsigned long long)all->stats.max_bytes);
		return;
	}
	fs_broker_free(broker);
	fs_mount_feature(all->m, "passthrough", false, "%s", r != -EPERM ? strerror(-r) : geteuid()
		? "only root may" : "the kernel refuses it (it takes Linux 6.9, and root outside of a container)");
}

void fs_backings_start(struct fs_backings *all, struct fs_broker *broker)
{
	const char *why = all->tier == FS_TIER_CACHED ? "tier=cached was asked for" : !all->stats.max_bytes
		? "cache= leaves no memory for whole files" : !broker ? "the keeper cannot be asked" : NULL;

	if (!why) {
		start(all, broker);
		return;
	}
	fs_broker_free(broker);
	fs_mount_feature(all->m, "passthrough", false, "%s", why);
}

bool fs_backings_stop(struct fs_backings *all)
{
	struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, STOP_MS);

	if (!all || !all->running)
		return true;
	pthread_mutex_lock(&all->lock);
	all->ending = true;
	pthread_cond_broadcast(&all->changed);
	backing_unlock(all);
	if (pthread_clockjoin_np(all->thread, NULL, CLOCK_MONOTONIC, &until) != 0)
		return false;
	all->running = false;
	while (all->nqueue)
		fs_handle_unref(all->m, all->queue[--all->nqueue]);
	return true;
}
