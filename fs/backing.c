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
 * When more files are read repeatedly than fit into memory, assembling each in turn, always in place of the one that is
 * needed next, would never end. So a file replaces another only if that one is not open and has served as many bytes as
 * it cost to assemble; and a file that was replaced once comes back only after it was used twice since the last use of
 * the file that it replaces. A file that never paid for itself is replaced after USES_MOST uses of another one. See
 * may_replace.
 *
 * Invariants: (1) cached_opens and passthrough_opens are never both above 0, because the kernel refuses that with EIO:
 * both count an open from before the kernel learns of it until after the kernel has forgotten it; while one is above 0,
 * no record leaves or enters READY for the other. (2) A record that is being opened, open, QUEUED, FILLING or collapsed
 * is kept. (3) The memfds of READY and FILLING records together have at most max_bytes. (4) The lock is not held across
 * a read, nor across a question that the keeper answers. */
#include "fs/backing.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/table.h"
#include "fs/broker.h"
#include "fs/loader.h"
#include "fs/memfd.h"
#include "fs/mount.h"
#include "fs/reserve.h"

#define LEAST_BYTES (UINT64_C(64) << 10) /* smaller files are left to the kernel's page cache */
#define NOW_BYTES (UINT64_C(16) << 20)   /* up to this size a file is assembled during the open */
#define MEMORY_SHARE 2                   /* a file takes at most half of what could be allocated */
#define FLOOR_SHARE 4                    /* a quarter of what was free at the start stays free, whatever is open */
#define IDLE_RECORDS 4096u
#define QUIET_MS 30000
#define STOP_MS 2000
#define BUCKETS 4096u
#define USES_MOST 4u                     /* uses of which the times are kept */
#define WAIT_MS 50
#define LONG_BYTES (UINT64_C(256) << 10) /* a read of this size may wait for bytes that are about to be there, ... */
#define LONG_MS 1000                     /* ... and no longer than this */
#define HUGE_NS UINT64_C(700000)         /* processor time for 1 MiB when the kernel has huge pages at hand */
#define COLLAPSE_BYTES (UINT64_C(32) << 20) /* at a time */
#define RESERVE_SHARE 4                  /* at most a quarter of the memory for files is kept at hand, ... */
#define RESERVE_MS 120000                /* ... until this long after the last file was assembled */

enum state { COUNTING, QUEUED, FILLING, READY, REFUSED };

struct fs_backing {
	uint64_t node;
	uint64_t size;
	const struct fs_commit *commit;  /* of its step */
	LIST_ENTRY(fs_backing) by_node;
	struct backing_list *list;       /* that it is in while no one has it open, or NULL */
	TAILQ_ENTRY(fs_backing) by_use;
	bool wanted;                     /* COUNTING: it was opened again */
	uint64_t uses[USES_MOST];        /* times of opens while it was not open, the newest first; 0: none */
	uint64_t left;                   /* time of the last close */
	uint64_t owed;                   /* in memory: bytes that it still has to serve to pay for itself */
	bool replaced;                   /* another file has taken its place once */
	enum state state;
	_Atomic uint64_t served;
	uint64_t served_before;          /* this use of it */
	_Atomic bool watched;            /* COUNTING: its reads are shown to `loader` */
	struct fs_loader loader;
	bool early;                      /* QUEUED, FILLING: for a loader */
	_Atomic bool stop;               /* its loader is gone */
	bool pages;                      /* the kernel may have pages of it */
	unsigned opening, cached_opens, passthrough_opens;
	unsigned held;                   /* of these, the kernel's: others are kept by what is at work with them */
	int id;                          /* READY */
	/* FILLING, and READY while the server has readers of it: its memory, else -1. So many bytes of it are there,
	 * from `from` to its end and then from its beginning; so many reads are under way, without the lock. */
	_Atomic int fd;
	struct fs_memfd_map map;         /* of it; of the thread that assembles, but for its bytes */
	_Atomic uint64_t from, ready, filling; /* filling: so many there will be soon */
	unsigned reading;
	bool sealing;                    /* no read begins: the kernel seals no memory that one is using */
	bool small, collapsing;          /* its memory has small pages, and is kept until they were made huge */
};

struct backing_list { TAILQ_HEAD(fs_backing_list, fs_backing) items; unsigned n; }; /* the oldest first */

struct fs_backings {
	struct fs_mount *m;
	enum fs_tier tier;
	struct fs_broker *broker;        /* NULL: nothing is passed through */
	pthread_t thread;
	bool running;
	_Atomic bool ending;
	pthread_mutex_t lock;            /* protects what follows */
	pthread_cond_t changed;          /* the queue, or a record left FILLING */
	LIST_HEAD(bucket, fs_backing) buckets[BUCKETS];
	struct backing_list idle, ready; /* records that are not open: COUNTING and REFUSED; READY */
	struct fs_handle **queue; size_t nqueue, queue_room; /* references */
	uint64_t *stale; size_t nstale, stale_room; /* nodes whose pages the kernel is to drop */
	uint64_t *small; size_t nsmall, small_room; /* nodes whose pages are to be made huge, */
	uint64_t collapsed;              /* and how many bytes of the first one's were */
	uint64_t reserve_most;           /* bytes to keep at hand, if there is room */
	uint64_t reserve_until_ms;
	struct fs_memfd_map closing[8]; unsigned nclosing; /* memory: unlock gives it back, which may take long */
	bool gave_up;                    /* on the keeper, and has said so */
	uint64_t clock;                  /* counts uses of files */
	uint64_t quiet_until_ms;         /* nothing is assembled before */
	uint64_t floor_bytes;            /* of free memory, never taken; set by start */
	struct fs_backings_stats stats;
	struct fs_reserve reserve;       /* has a lock of its own */
};

/* ---- records; all under the lock ---- */

static struct bucket *bucket(struct fs_backings *all, uint64_t node)
{
	return &all->buckets[base_table_hash_number(node) & (BUCKETS - 1)];
}

static struct fs_backing *find(struct fs_backings *all, uint64_t node)
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

static void settle(struct fs_backings *all, struct fs_backing *b);

/* b is not open, so the kernel frees its memory with the id. */
static void drop(struct fs_backings *all, struct fs_backing *b)
{
	if (!all->m->session || fs_broker_close(all->broker, fuse_session_fd(all->m->session), b->id) < 0)
		return;                  /* the keeper was not asked: the kernel still has it, and later opens get it */
	b->state = COUNTING;
	b->small = false;
	all->stats.files--;
	all->stats.bytes -= b->size;
	all->stats.dropped++;
	settle(all, b);
}

static void forget(struct fs_backing *b)
{
	LIST_REMOVE(b, by_node);
	list_remove(b);
	free(b);
}

static bool stands_in_memory(const struct fs_backing *b)
{
	return b->state == FILLING || b->state == READY;
}

static void give_back(struct fs_memfd_map *map)
{
	fs_memfd_unmap(map);
	close(map->fd);
}

/* The kernel has the memory by its id, if at all; the server needs it for readers of its own, and to collapse it. */
static void settle_memory(struct fs_backings *all, struct fs_backing *b)
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

/* The next passed-through open would wait for the kernel to drop the pages that it had before. */
static void settle_pages(struct fs_backings *all, struct fs_backing *b)
{
	if (!b->pages || base_array_room(all->stale, all->stale_room, all->nstale + 1) < 0)
		return;
	all->stale[all->nstale++] = b->node;
	b->pages = false;
	pthread_cond_broadcast(&all->changed);
}

static void unlock(struct fs_backings *all)
{
	struct fs_memfd_map maps[BASE_COUNT(all->closing)];
	unsigned n = all->nclosing;

	memcpy(maps, all->closing, n * sizeof *maps);
	all->nclosing = 0;
	pthread_mutex_unlock(&all->lock);
	for (unsigned i = 0; i < n; i++)
		give_back(&maps[i]);
}

/* After a change of its descriptors or its state. Files in memory are bounded by their bytes, in room(). */
static void settle(struct fs_backings *all, struct fs_backing *b)
{
	bool used = b->opening || b->cached_opens || b->passthrough_opens || b->collapsing;

	list_remove(b);
	settle_memory(all, b);
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

static struct fs_backing *make(struct fs_backings *all, uint64_t node, const struct fs_handle *h)
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

/* ---- memory; under the lock ---- */

/* Was b used often enough since the last use of `old` to take its place? */
static bool may_replace(const struct fs_backing *b, const struct fs_backing *old)
{
	unsigned uses = old->owed ? USES_MOST : b->replaced ? 2 : 1;

	return b->uses[uses - 1] > old->left;
}

/* Makes room for the file by dropping files that it may replace, those unused for longest first. Drops none if that
 * does not suffice. */
static bool room(struct fs_backings *all, const struct fs_backing *b)
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

/* The file's bytes count from here on. */
static bool fill_begin(struct fs_backings *all, struct fs_backing *b)
{
	if (b->fd >= 0 || !room(all, b)) { /* fd: a read of an attempt that was given up may still be under way */
		all->stats.refused++;
		b->state = COUNTING;
		return false;
	}
	b->state = FILLING;
	b->owed = b->size;
	all->stats.files++;
	all->stats.bytes += b->size;
	return true;
}

/* Not the file's fault: it may be assembled another time. */
static bool is_passing(int r)
{
	return r == -ENOMEM || r == -ENOSPC || r == -EMFILE || r == -ENFILE || r == -EPIPE || r == -ETIMEDOUT
		|| r == -EBUSY || r == -ECANCELED;
}

/* r: the id, or the error. */
static void fill_end(struct fs_backings *all, struct fs_backing *b, int r, uint64_t ns)
{
	if (r > 0) {
		b->state = READY;
		b->id = r;
		b->small = b->small && base_array_room(all->small, all->small_room, all->nsmall + 1) == 0;
		if (b->small)
			all->small[all->nsmall++] = b->node;
		all->stats.assembled++;
		all->stats.assembled_bytes += b->size;
		all->stats.assembled_ns += ns;
		all->reserve_most = base_min(b->size, all->stats.max_bytes / RESERVE_SHARE);
		all->reserve_until_ms = base_monotonic_ms() + RESERVE_MS;
	} else {
		b->state = is_passing(r) ? COUNTING : REFUSED;
		b->served = 0;
		all->stats.files--;
		all->stats.bytes -= b->size;
		*(r == -ECANCELED ? &all->stats.given_up : &all->stats.failed) += 1;
	}
	settle(all, b);
	pthread_cond_broadcast(&all->changed);
}

/* ---- assembling; without the lock ---- */

struct assembly {
	struct fs_backings *all;
	struct fs_backing *b;
	bool slow;                       /* the kernel has no huge pages at hand: the rest has small ones */
};

static int no_memory(const struct fs_backing *b, int r, struct base_error *err)
{
	return base_error_set(err, r, "no memory for a file of %llu bytes: %s", (unsigned long long)b->size,
		strerror(-r));
}

static bool is_given_up(const struct assembly *a) { return a->b->stop || a->all->ending; }

/* Processor time of this thread, in which the kernel makes huge pages: it does not depend on other load. */
static uint64_t processor_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Huge pages, but where a loader would wait for the kernel to make them. */
static int take_memory(struct assembly *a, uint64_t at, uint64_t end)
{
	uint64_t start = processor_ns();
	int64_t taken = fs_memfd_take(&a->b->map, at, end, !a->slow);

	if (taken > 0 && a->b->early && !a->slow)
		a->slow = processor_ns() - start > ((uint64_t)taken >> 20) * HUGE_NS;
	return taken < 0 ? (int)taken : 0;
}

/* Readers that wait for what is there now get it, and may wait for so much more. */
static void fill_reaches(struct assembly *a, uint64_t more)
{
	pthread_mutex_lock(&a->all->lock);
	a->b->filling = a->b->ready + more;
	pthread_cond_broadcast(&a->all->changed);
	unlock(a->all);
}

static int fill_stretch(void *arg, uint64_t at, uint64_t end, struct base_error *err)
{
	struct assembly *a = arg;

	if (is_given_up(a))
		return base_error_set(err, -ECANCELED, "no one reads it any more");
	fill_reaches(a, end - at);
	int r = take_memory(a, at, end);
	return r < 0 ? no_memory(a->b, r, err) : 0;
}

static int fill(struct fs_backings *all, struct fs_backing *b, int fd, struct view_file *file, struct base_error *err)
{
	struct assembly a = {.all = all, .b = b};
	int r = fs_memfd_map(fd, b->size, true, &b->map);

	if (r < 0)
		return no_memory(b, r, err);
	r = view_file_fill(file, all->m->cache, &(struct view_filling){.to = b->map.bytes, .from = b->from,
		.ready = &b->ready, .begin = fill_stretch, .arg = &a}, err);
	if (r == 0)
		fill_reaches(&a, 0);
	b->small = a.slow;
	return r;
}

/* Readers go on with a mapping that nobody can write to. */
static int seal(struct fs_backings *all, struct fs_backing *b, int fd)
{
	pthread_mutex_lock(&all->lock);
	b->sealing = true;
	while (b->reading)
		pthread_cond_wait(&all->changed, &all->lock);
	unlock(all);
	fs_memfd_unmap(&b->map);
	int r = fs_memfd_seal(fd);
	if (r == 0)
		r = fs_memfd_map(fd, b->size, false, &b->map);
	pthread_mutex_lock(&all->lock);
	b->sealing = false;
	unlock(all);
	return r;
}

/* The id of a backing file with all bytes of the file, or a negative errno. */
static int assemble(struct fs_backings *all, struct fs_backing *b, struct view_file *file, struct base_error *err)
{
	uint64_t free_bytes = fs_broker_memory(all->broker);
	bool large = b->size > NOW_BYTES; /* only large files use the reserve */

	if (large && free_bytes)
		free_bytes += all->reserve.bytes;
	if (view_file_size(file) != b->size)
		return base_error_set(err, -BASE_EFORMAT, "its size has changed since it was first opened");
	if (!fs_broker_works(all->broker))
		return base_error_set(err, -EPIPE, "the keeper did not answer");
	if (free_bytes && (b->size > free_bytes / MEMORY_SHARE || free_bytes - b->size < all->floor_bytes))
		return base_error_set(err, -ENOMEM, "it has %llu bytes, and %llu bytes of memory are available",
			(unsigned long long)b->size, (unsigned long long)free_bytes);
	int fd = large ? fs_reserve_memfd(&all->reserve, b->size) : fs_memfd_new(b->size);
	if (fd < 0)
		return base_error_set(err, fd, "no memory file of %llu bytes: %s", (unsigned long long)b->size,
			strerror(-fd));
	b->from = b->early ? b->from : 0;
	b->map = (struct fs_memfd_map){.fd = fd};
	b->fd = fd;              /* settle_memory closes it: not before b has left FILLING */
	int r = fill(all, b, fd, file, err);
	if (r < 0)
		return r;
	r = seal(all, b, fd);
	if (r < 0)
		return base_error_set(err, r, "the memory file cannot be sealed: %s", strerror(-r));
	r = fs_broker_open(all->broker, fuse_session_fd(all->m->session), fd);
	return r < 0 ? base_error_set(err, r, "no backing file: %s", strerror(-r)) : r;
}

/* With the lock, which it releases meanwhile; b is FILLING. */
static void assemble_locked(struct fs_backings *all, struct fs_backing *b, struct view_file *file)
{
	struct base_error err = {0};
	uint64_t start = base_monotonic_ns();

	unlock(all);
	int id = assemble(all, b, file, &err);
	if (id < 0)
		base_info("a file is not assembled: %s", err.text);
	pthread_mutex_lock(&all->lock);
	fill_end(all, b, id, base_monotonic_ns() - start);
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
	} else if (fill_begin(all, b)) {
		all->stats.early += b->early;
		assemble_locked(all, b, h->file);
	}
	unlock(all);
	fs_handle_unref(all->m, h);
	pthread_mutex_lock(&all->lock);
}

static void do_stale(struct fs_backings *all)
{
	uint64_t node = all->stale[--all->nstale];

	unlock(all);
	int r = fuse_lowlevel_notify_inval_inode(all->m->session, node, 0, 0);
	pthread_mutex_lock(&all->lock);
	all->stats.pages_dropped += r == 0;
}

/* A loader that would have waited for huge pages went on without them: they are made when no one reads through the
 * server, because readers need the processors. false: there is nothing to do. */
static bool do_collapse(struct fs_backings *all)
{
	struct fs_backing *b = all->nsmall && !all->stats.open_cached ? find(all, all->small[0]) : NULL;
	uint64_t from = all->collapsed;

	if (!all->nsmall || all->stats.open_cached)
		return false;
	if (b && b->small && from < b->size) {
		all->collapsed = base_min(from + COLLAPSE_BYTES, b->size);
		b->collapsing = true;
		settle(all, b);
		unlock(all);
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
		settle(all, b);
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
	unlock(all);
	if (have > most) {
		fs_reserve_drop(&all->reserve);
	} else {
		uint64_t free_bytes = fs_broker_memory(all->broker);
		more = free_bytes > MEMORY_SHARE * most && free_bytes - most >= all->floor_bytes &&
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
			struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, RESERVE_MS);

			if (all->reserve.bytes)
				pthread_cond_timedwait(&all->changed, &all->lock, &until);
			else
				pthread_cond_wait(&all->changed, &all->lock);
		}
	}
	unlock(all);
	return NULL;
}

/* ---- the whole ---- */

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
	for (size_t i = 0; i < BUCKETS; i++)
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

/* Files may be opened meanwhile: they see the broker only once everything works. */
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
		unlock(all);
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
	unlock(all);
	if (pthread_clockjoin_np(all->thread, NULL, CLOCK_MONOTONIC, &until) != 0)
		return false;
	all->running = false;
	while (all->nqueue)
		fs_handle_unref(all->m, all->queue[--all->nqueue]);
	return true;
}

/* ---- opening and reading ---- */

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

/* With the lock. A keeper that once failed to answer is not asked again. */
static bool can_assemble(struct fs_backings *all)
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

/* With the lock; b is being opened. Decides whether to assemble it now, later, or not at all. */
static int consider(struct fs_backings *all, struct fs_backing *b, struct fs_handle *h)
{
	bool now = all->tier == FS_TIER_PASSTHROUGH || b->size <= NOW_BYTES;
	bool again = b->served >= b->size / 2;

	if (!can_assemble(all) || b->commit->gone)
		return 0;
	int r = now ? wait_filled(all, b) : 0;

	if (r || b->state != COUNTING || !b->size || !(again || all->tier == FS_TIER_PASSTHROUGH))
		return r;
	if (now && !b->cached_opens && fill_begin(all, b))
		assemble_locked(all, b, h->file);
	b->wanted = !now;
	return 0;
}

/* With the lock. Gives it to the thread; `early`: before all others. false: it will not be assembled. */
static bool queue(struct fs_backings *all, struct fs_backing *b, struct fs_handle *h, bool early)
{
	if (b->commit->gone || !can_assemble(all) ||
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
	b->watched = all->tier == FS_TIER_AUTO && b->size > NOW_BYTES && view_file_tensor(file, b->size - 1) > 0;
}

int fs_backing_open(struct fs_backings *all, uint64_t node, struct fs_handle *h)
{
	/* such files are never passed through, so there is nothing to count */
	if (all->tier == FS_TIER_CACHED || (all->tier == FS_TIER_AUTO && view_file_size(h->file) < LEAST_BYTES))
		return 0;
	pthread_mutex_lock(&all->lock);
	struct fs_backing *b = find(all, node);
	if (!b)
		b = make(all, node, h);
	if (!b) {
		unlock(all);
		return -ENOMEM;
	}
	use(all, b, h->file);
	b->opening++;
	settle(all, b);
	int r = consider(all, b, h);
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
	settle(all, b);
	unlock(all);
	return r;
}

/* With the lock, once for each descriptor that the kernel had or was to get. */
static void let_go(struct fs_backing *b, struct fs_handle *h)
{
	if (h->released)
		return;
	h->released = true;
	if (--b->held == 0 && b->early && b->served < b->size / 2)
		b->stop = true;
}

/* A large file that is wanted is assembled after its last close: earlier, that would take processors from its readers
 * and help none of them but a loader. */
void fs_backing_release(struct fs_backings *all, struct fs_handle *h)
{
	struct fs_backing *b = h->backing;

	if (!b)
		return;
	pthread_mutex_lock(&all->lock);
	let_go(b, h);
	if (!b->held && b->wanted && b->state == COUNTING)
		queue(all, b, h, false);
	unlock(all);
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
	settle(all, b);
	unlock(all);
}

/* Are the bytes among the first n, in the order in which it is filled? */
static bool is_among(const struct fs_backing *b, uint64_t n, uint64_t offset, uint64_t len)
{
	uint64_t at = offset >= b->from ? offset - b->from : offset + b->size - b->from;

	return n >= b->size || at + len <= n;
}

/* Is it in the stretch that is filled now, or in the next one? A reader of much waits for it, instead of taking the
 * processors away from that to decode the same once more: it comes no later than if it had to do all by itself. */
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

	if (!b || h->passthrough || b->fd < 0)
		return NULL;
	if (!is_among(b, b->ready, offset, len) && !is_coming(b, offset, len))
		return NULL;
	pthread_mutex_lock(&all->lock);
	wait_coming(all, b, offset, len);
	bool there = stands_in_memory(b) && !b->sealing && b->map.bytes && is_among(b, b->ready, offset, len);
	b->reading += there;
	unlock(all);
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
	settle_memory(all, b);
	unlock(all);
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
		queue(all, b, h, true);
	}
	unlock(all);
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
	unlock(all);
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
	unlock(all);
}

bool fs_backing_ready(struct fs_backings *all, uint64_t node)
{
	pthread_mutex_lock(&all->lock);
	const struct fs_backing *b = find(all, node);
	bool ready = b && b->state == READY;
	unlock(all);
	return ready;
}

void fs_backings_stat(struct fs_backings *all, struct fs_backings_stats *ret_s)
{
	pthread_mutex_lock(&all->lock);
	*ret_s = all->stats;
	ret_s->reserve_bytes = all->reserve.bytes;
	unlock(all);
}
