/* SPDX-License-Identifier: Apache-2.0
 *
 * backing_records: which files there are records of, and which of them may be in memory.
 *
 * When more files are read repeatedly than fit into memory, assembling each in turn, always in place of the one that is
 * needed next, would never end. So a file replaces another only if that one is not open and has served as many bytes as
 * it cost to assemble. A file that was replaced once comes back only after it was used twice since the last use of the
 * file that it replaces. A file that never paid for itself is replaced after BACKING_USES_MOST uses of another one. See
 * may_replace. */
#include "fs/backing_internal.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/table.h"

#define IDLE_RECORDS 4096u
#define QUIET_MS 30000

static void drop(struct fs_backings *all, struct fs_backing *b);

/* ---- records; with the lock ---- */

static struct bucket *bucket(struct fs_backings *all, uint64_t node)
{
	return &all->buckets[base_table_hash_number(node) & (BACKING_BUCKETS - 1)];
}

struct fs_backing *backing_find(struct fs_backings *all, uint64_t node)
{
	struct fs_backing *b;

	LIST_FOREACH(b, bucket(all, node), by_node)
		if (b->node == node)
			break;
	return b;
}

static void list_remove(struct fs_backing *b)
{
	if (!b->list)
		return;
	TAILQ_REMOVE(&b->list->items, b, by_use);
	b->list->n--;
	b->list = NULL;
}

static void list_add(struct backing_list *l, struct fs_backing *b)
{
	TAILQ_INSERT_TAIL(&l->items, b, by_use);
	b->list = l;
	l->n++;
}

static void forget(struct fs_backing *b)
{
	LIST_REMOVE(b, by_node);
	list_remove(b);
	free(b);
}

static void give_back(struct fs_memfd_map *map)
{
	fs_memfd_unmap(map);
	close(map->fd);
}

/* Gives back the server's hold on the memory once nothing here needs it: no reader, no collapse of its pages. The
 * kernel has a hold of its own, under the id. */
void backing_settle_memory(struct fs_backings *all, struct fs_backing *b)
{
	if (b->fd < 0 || b->reading || b->state == FILLING || (b->state == READY && (b->cached_opens || b->small)))
		return;
	if (all->nclosing < BASE_COUNT(all->closing))
		all->closing[all->nclosing++] = b->map;
	else
		give_back(&b->map);
	b->map.bytes = NULL;
	b->fd = -1;
	b->ready = b->filling = 0;
}

/* Has the thread drop the kernel's pages of the file: the next passed-through open would wait for that. */
static void settle_pages(struct fs_backings *all, struct fs_backing *b)
{
	if (!b->pages || base_array_room(all->stale, all->stale_room, all->nstale + 1) < 0)
		return;
	all->stale[all->nstale++] = b->node;
	b->pages = false;
	pthread_cond_broadcast(&all->changed);
}

void backing_unlock(struct fs_backings *all)
{
	struct fs_memfd_map maps[BASE_COUNT(all->closing)];
	unsigned n = all->nclosing;

	memcpy(maps, all->closing, n * sizeof *maps);
	all->nclosing = 0;
	pthread_mutex_unlock(&all->lock);
	for (unsigned i = 0; i < n; i++)
		give_back(&maps[i]);
}

void backing_settle(struct fs_backings *all, struct fs_backing *b)
{
	bool used = b->opening || b->cached_opens || b->passthrough_opens || b->collapsing;

	list_remove(b);
	backing_settle_memory(all, b);
	if (used || b->state == QUEUED || b->state == FILLING)
		return;
	list_add(b->state == READY ? &all->ready : &all->idle, b);
	if (b->state == READY)
		settle_pages(all, b);
	if (b->state == READY && b->commit->gone)
		drop(all, b);
	if (all->idle.n > IDLE_RECORDS)
		forget(TAILQ_FIRST(&all->idle.items));
}

/* b is not open, so the kernel frees its memory when the id is closed. */
static void drop(struct fs_backings *all, struct fs_backing *b)
{
	if (!all->m->session || fs_broker_close(all->broker, fuse_session_fd(all->m->session), b->id) < 0)
		return;                  /* no keeper: the kernel still has the file, and later opens get it */
	b->state = COUNTING;
	b->small = false;
	all->stats.files--;
	all->stats.bytes -= b->size;
	all->stats.dropped++;
	backing_settle(all, b);
}

struct fs_backing *backing_make(struct fs_backings *all, uint64_t node, const struct fs_handle *h)
{
	struct fs_backing *b = calloc(1, sizeof *b);

	if (!b)
		return NULL;
	b->node = node;
	b->size = view_file_size(h->file);
	b->commit = h->node.commit;
	b->fd = -1;
	LIST_INSERT_HEAD(bucket(all, node), b, by_node);
	return b;
}

/* ---- memory; with the lock ---- */

/* Was b used often enough since the last use of `old` to take its place? */
static bool may_replace(const struct fs_backing *b, const struct fs_backing *old)
{
	unsigned uses = old->owed ? BACKING_USES_MOST : b->replaced ? 2 : 1;

	return b->uses[uses - 1] > old->left;
}

bool backing_room(struct fs_backings *all, const struct fs_backing *b)
{
	uint64_t most = all->stats.max_bytes, bytes = all->stats.bytes;
	struct fs_backing *old, *next;

	if (b->size > most || base_monotonic_ms() < all->quiet_until_ms)
		return false;
	most -= b->size;
	TAILQ_FOREACH(old, &all->ready.items, by_use)
		bytes -= bytes > most && may_replace(b, old) ? old->size : 0;
	if (bytes > most)
		return false;
	for (old = TAILQ_FIRST(&all->ready.items); old && all->stats.bytes > most; old = next) {
		next = TAILQ_NEXT(old, by_use);
		if (may_replace(b, old)) {
			old->replaced = true;
			drop(all, old);
		}
	}
	return all->stats.bytes <= most;
}

/* ---- all of them ---- */

struct fs_backings *fs_backings_new(struct fs_mount *m, enum fs_tier tier, uint64_t max_bytes)
{
	struct fs_backings *all = calloc(1, sizeof *all);
	pthread_condattr_t attributes;

	if (!all)
		return NULL;
	all->m = m;
	all->tier = tier;
	all->stats.max_bytes = max_bytes;
	pthread_mutex_init(&all->lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&all->changed, &attributes);
	pthread_condattr_destroy(&attributes);
	TAILQ_INIT(&all->idle.items);
	TAILQ_INIT(&all->ready.items);
	fs_reserve_init(&all->reserve);
	return all;
}

void fs_backings_free(struct fs_backings *all)
{
	if (!all)
		return;
	for (size_t i = 0; i < BACKING_BUCKETS; i++)
		for (struct fs_backing *b = LIST_FIRST(&all->buckets[i]), *next; b; b = next) {
			next = LIST_NEXT(b, by_node);
			if (b->fd >= 0)
				give_back(&b->map);
			forget(b);
		}
	free(all->queue);
	free(all->stale);
	free(all->small);
	fs_reserve_release(&all->reserve);
	fs_broker_free(all->broker);
	pthread_cond_destroy(&all->changed);
	pthread_mutex_destroy(&all->lock);
	free(all);
}

void fs_backings_give_back(struct fs_backings *all)
{
	pthread_mutex_lock(&all->lock);
	all->quiet_until_ms = base_monotonic_ms() + QUIET_MS;
	for (struct fs_backing *b = TAILQ_FIRST(&all->ready.items), *next; b; b = next) {
		next = TAILQ_NEXT(b, by_use);
		b->served = 0;           /* by the time another half was read there may be memory */
		drop(all, b);
	}
	backing_unlock(all);
	fs_reserve_drop(&all->reserve);
}

void fs_backings_gone(struct fs_backings *all, const struct fs_commit *commit)
{
	pthread_mutex_lock(&all->lock);
	for (struct fs_backing *b = TAILQ_FIRST(&all->ready.items), *next; b; b = next) {
		next = TAILQ_NEXT(b, by_use);
		if (b->commit == commit)
			drop(all, b);
	}
	backing_unlock(all);
}

bool fs_backing_ready(struct fs_backings *all, uint64_t node)
{
	const struct fs_backing *b;
	bool ready;

	pthread_mutex_lock(&all->lock);
	b = backing_find(all, node);
	ready = b && b->state == READY;
	backing_unlock(all);
	return ready;
}

void fs_backings_stat(struct fs_backings *all, struct fs_backings_stats *ret_s)
{
	pthread_mutex_lock(&all->lock);
	*ret_s = all->stats;
	ret_s->reserve_bytes = all->reserve.bytes;
	backing_unlock(all);
}
