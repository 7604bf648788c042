/* SPDX-License-Identifier: Apache-2.0
 *
 * store_packs: the cache of open packs.
 *
 * It keeps open every pack that is in use, and unused ones as long as there is room: all caches of the process together
 * have at most a quarter of its descriptors (RLIMIT_NOFILE), because the rest belongs to the program (half, if packs
 * are read past the page cache too: each then has a second descriptor). Beyond that the least recently used pack is
 * closed first. So a step that is read tensor by tensor opens each of its packs once if the limit has room for those of
 * one tensor, else once a tensor.
 *
 * An open descriptor keeps the disk space of a file that a collection has deleted. So all unused packs are closed a
 * second after the last use of any of them: a mount, a saver or an open step that is idle has none. While the cache is
 * in use, each pack that is unused at the moment is looked at once a second, however recently it was used, and closed
 * if its file has lost its name: it was deleted, or mended. A thread does both: it is started when a pack becomes
 * unused, and ends when none is left, so an idle process has neither the thread nor its wake-ups. If no thread can be
 * started, a pack is closed at once.
 *
 * A pack that was closed and is opened again costs one open and no read: its head was checked, and `heads` remembers
 * that, by name and size. If two names share a slot, one is forgotten, and its head is read again. (Only mending
 * changes a pack, and makes a whole one; and each block that is read has its own check.)
 *
 * Nodes are in a hash by name and in a list by last use. A pack is opened, looked at and closed outside the lock, so
 * that a slow storage delays only threads that wait for that pack; two threads may open the same pack at once, and the
 * second one closes its own. A pack that could not be opened leaves no node behind: the next caller tries again and
 * gets the same sentence.
 *
 * Memory: 400 bytes an open pack, of which the process has at most CACHE_MOST; 1 MiB for `heads`, of which only what
 * is used is touched. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>
#include <sys/resource.h>

#include "core/base/clock.h"
#include "core/base/pool.h"
#include "core/base/table.h"
#include "core/step/store_internal.h"

#define CACHE_BUCKETS 2048u
#define CACHE_LEAST 4u                         /* packs that stay open, however few descriptors there are */
#define CACHE_MOST 32768u
#define CACHE_IDLE_MS 1000u
#define CACHE_HEADS 65536u
#define CACHE_LOOKS 64u                        /* packs that are looked at in one go */

struct cache_node {
	struct pack *pack;
	uint32_t hash;
	unsigned users;                        /* 0: unused */
	uint64_t looked_ms;                    /* when it was opened, or looked at last, on the monotonic clock */
	LIST_ENTRY(cache_node) by_name;        /* same bucket */
	TAILQ_ENTRY(cache_node) by_use;
};

struct cache_head { uint64_t name, size; };    /* hash of the name; size 0: none */

struct store_pack_cache {
	pthread_mutex_t lock;                  /* protects all below */
	LIST_HEAD(cache_bucket, cache_node) bucket[CACHE_BUCKETS];
	TAILQ_HEAD(cache_uses, cache_node) uses; /* all nodes, by last use: the oldest first */
	unsigned unused;
	uint64_t used_ms, looked_ms;           /* the last use of any pack; the last look at unused ones */
	struct cache_head *heads;
	pthread_t closer;
	bool closing;                          /* `closer` runs; it ends by itself */
	bool started;                          /* `closer` is to be joined */
	bool ending;
	pthread_cond_t ended;                  /* `ending` was set */
};

static atomic_uint open_packs;                 /* of all caches of the process */

static bool cache_full(void)
{
	struct rlimit limit;
	rlim_t most = CACHE_MOST;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
		most = base_max(CACHE_LEAST, base_min(most, limit.rlim_cur / 4));
	return atomic_load_explicit(&open_packs, memory_order_relaxed) > most;
}

/* ---- nodes; under the lock ---- */

static struct cache_node *cache_find(struct store_pack_cache *c, uint32_t hash, const char *name)
{
	struct cache_node *n;

	LIST_FOREACH(n, &c->bucket[hash % CACHE_BUCKETS], by_name)
		if (n->hash == hash && strcmp(pack_name(n->pack), name) == 0)
			break;
	return n;
}

static void cache_add(struct store_pack_cache *c, struct cache_node *n)
{
	n->users = 1;
	LIST_INSERT_HEAD(&c->bucket[n->hash % CACHE_BUCKETS], n, by_name);
	TAILQ_INSERT_TAIL(&c->uses, n, by_use);
	n->looked_ms = c->used_ms = base_monotonic_ms();
}

/* An unused node; the caller closes it without the lock. */
static struct cache_node *cache_remove(struct store_pack_cache *c, struct cache_node *n)
{
	LIST_REMOVE(n, by_name);
	TAILQ_REMOVE(&c->uses, n, by_use);
	c->unused--;
	return n;
}

/* Takes out the least recently used one; NULL: all are in use. */
static struct cache_node *cache_oldest(struct store_pack_cache *c)
{
	struct cache_node *n = TAILQ_FIRST(&c->uses);

	while (c->unused && n->users) /* passes at most one a reading thread */
		n = TAILQ_NEXT(n, by_use);
	return c->unused ? cache_remove(c, n) : NULL;
}

static void cache_node_free(struct cache_node *n)
{
	if (!n)
		return;
	if (n->pack)
		atomic_fetch_sub_explicit(&open_packs, 1, memory_order_relaxed);
	pack_close(n->pack);
	free(n);
}

static struct pack *cache_use(struct store_pack_cache *c, uint32_t hash, const char *name)
{
	struct cache_node *n = cache_find(c, hash, name);

	if (!n)
		return NULL;
	c->unused -= n->users++ == 0;
	c->used_ms = base_monotonic_ms();
	return n->pack;
}

/* ---- heads that were checked; under the lock ---- */

static struct cache_head *cache_head(struct store_pack_cache *c, const char *name, uint64_t *ret_hash)
{
	*ret_hash = base_xxh64_of(0, name, strlen(name));
	return &c->heads[*ret_hash % CACHE_HEADS];
}

/* The size of the pack whose head was checked; 0: it was not. */
static uint64_t head_known(struct store_pack_cache *c, const char *name)
{
	uint64_t hash;
	const struct cache_head *h = cache_head(c, name, &hash);

	return h->name == hash ? h->size : 0;
}

static void head_keep(struct store_pack_cache *c, const struct pack *p)
{
	uint64_t hash;
	struct cache_head *h = cache_head(c, pack_name(p), &hash);

	*h = (struct cache_head){hash, pack_size(p)};
}

/* ---- packs that are not in use ---- */

/* Closes the least recently used one. false: none is unused. */
static bool close_oldest(struct store_pack_cache *c)
{
	struct cache_node *n;

	pthread_mutex_lock(&c->lock);
	n = cache_oldest(c);
	pthread_mutex_unlock(&c->lock);
	cache_node_free(n);
	return n != NULL;
}

/* Takes unused nodes of the buckets from *bucket on: they count as used meanwhile. */
static unsigned look_take(struct store_pack_cache *c, unsigned *bucket, struct cache_node *taken[static CACHE_LOOKS])
{
	uint64_t now = base_monotonic_ms();
	struct cache_node *at;
	unsigned n = 0;

	for (; *bucket < CACHE_BUCKETS; (*bucket)++)
		LIST_FOREACH(at, &c->bucket[*bucket], by_name) {
			if (at->users || now - at->looked_ms < CACHE_IDLE_MS)
				continue;
			if (n == CACHE_LOOKS)
				return n; /* the rest of this bucket is next */
			c->unused--;
			at->users++;
			at->looked_ms = now;
			taken[n++] = at;
		}
	return n;
}

/* Closes packs whose file has lost its name. The lock is held before and after. */
static void closer_look(struct store_pack_cache *c)
{
	struct cache_node *taken[CACHE_LOOKS];
	bool gone[CACHE_LOOKS];

	for (unsigned bucket = 0; bucket < CACHE_BUCKETS && !c->ending;) {
		unsigned n = look_take(c, &bucket, taken), out = 0;

		if (n == 0)
			break;
		pthread_mutex_unlock(&c->lock);
		for (unsigned i = 0; i < n; i++)
			gone[i] = pack_gone(taken[i]->pack);
		pthread_mutex_lock(&c->lock);
		for (unsigned i = 0; i < n; i++) {
			if (--taken[i]->users)
				continue;
			c->unused++;
			if (gone[i])
				taken[out++] = cache_remove(c, taken[i]);
		}
		pthread_mutex_unlock(&c->lock);
		while (out)
			cache_node_free(taken[--out]);
		pthread_mutex_lock(&c->lock);
	}
	c->looked_ms = base_monotonic_ms();
}

static void *closer_main(void *arg)
{
	struct store_pack_cache *c = arg;

	pthread_mutex_lock(&c->lock);
	c->looked_ms = base_monotonic_ms();
	while (c->unused && !c->ending) {
		uint64_t now = base_monotonic_ms(), due = base_min(c->used_ms, c->looked_ms) + CACHE_IDLE_MS;

		if (now < due) {
			struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, (int64_t)(due - now));

			pthread_cond_timedwait(&c->ended, &c->lock, &until);
		} else if (now < c->used_ms + CACHE_IDLE_MS) {
			closer_look(c);
		} else {
			struct cache_node *n = cache_oldest(c);

			pthread_mutex_unlock(&c->lock);
			cache_node_free(n);
			pthread_mutex_lock(&c->lock);
		}
	}
	c->closing = false;
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

/* Under the lock, which a closer that has ended does not take again. false: there is none. */
static bool closer_start(struct store_pack_cache *c)
{
	if (c->closing)
		return true;
	if (c->started)
		pthread_join(c->closer, NULL);
	c->started = c->closing = base_thread_start(&c->closer, closer_main, c) == 0;
	return c->closing;
}

void store_pack_cache_relieve(void *arg)
{
	while (close_oldest(arg))
		;
}

/* ---- use ---- */

int store_pack_get(struct store *s, const char *pack, struct pack **ret_p, struct base_error *err)
{
	struct store_pack_cache *c = s->packs;
	uint32_t hash = base_table_hash(pack, strlen(pack));
	struct cache_node *n;
	uint64_t known;
	int r;

	pthread_mutex_lock(&c->lock);
	*ret_p = cache_use(c, hash, pack);
	known = head_known(c, pack);
	pthread_mutex_unlock(&c->lock);
	if (*ret_p)
		return 0;
	n = calloc(1, sizeof *n);
	if (!n)
		return base_no_memory_for(err, "pack %s", pack);
	n->hash = hash;
	r = pack_open(s->storage, s->info.id, pack, known, &n->pack, err);
	if (r < 0) {
		free(n);
		store_no_directory(s, r, err);
		return r;
	}
	atomic_fetch_add_explicit(&open_packs, 1, memory_order_relaxed);
	while (cache_full() && close_oldest(c))
		;
	pthread_mutex_lock(&c->lock);
	head_keep(c, n->pack);
	*ret_p = cache_use(c, hash, pack);
	if (!*ret_p) {
		cache_add(c, n);
		*ret_p = base_steal(n)->pack;
	}
	pthread_mutex_unlock(&c->lock);
	cache_node_free(n);
	return 0;
}

void store_pack_put(struct store *s, struct pack *p)
{
	struct store_pack_cache *c = s->packs;
	struct cache_node *n, *out = NULL;

	if (!p)
		return;
	pthread_mutex_lock(&c->lock);
	n = cache_find(c, base_table_hash(pack_name(p), strlen(pack_name(p))), pack_name(p));
	TAILQ_REMOVE(&c->uses, n, by_use);
	TAILQ_INSERT_TAIL(&c->uses, n, by_use);
	c->used_ms = base_monotonic_ms();
	if (--n->users == 0) {
		c->unused++;
		if (!closer_start(c))
			out = cache_remove(c, n);
	}
	pthread_mutex_unlock(&c->lock);
	cache_node_free(out);
}

struct store_pack_cache *store_pack_cache_new(void)
{
	struct store_pack_cache *c = calloc(1, sizeof *c);
	pthread_condattr_t attributes;

	if (c)
		c->heads = calloc(CACHE_HEADS, sizeof *c->heads);
	if (!c || !c->heads) {
		free(c);
		return NULL;
	}
	TAILQ_INIT(&c->uses);
	pthread_mutex_init(&c->lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&c->ended, &attributes);
	pthread_condattr_destroy(&attributes);
	return c;
}

void store_pack_cache_free(struct store_pack_cache *c)
{
	struct cache_node *n;

	if (!c)
		return;
	pthread_mutex_lock(&c->lock);
	c->ending = true;
	pthread_cond_signal(&c->ended);
	pthread_mutex_unlock(&c->lock);
	if (c->started)
		pthread_join(c->closer, NULL);
	while ((n = TAILQ_FIRST(&c->uses))) {
		TAILQ_REMOVE(&c->uses, n, by_use);
		cache_node_free(n);
	}
	pthread_cond_destroy(&c->ended);
	pthread_mutex_destroy(&c->lock);
	free(c->heads);
	free(c);
}

int store_object_load(struct store *s, const char *pack, const struct pack_object_ref *ref, uint64_t max,
	void **ret_bytes, struct base_error *err)
{
	struct pack *p;
	int r = store_pack_get(s, pack, &p, err);

	if (r < 0)
		return r;
	r = pack_object_load(p, ref, max, ret_bytes, err);
	store_pack_put(s, p);
	return r;
}
