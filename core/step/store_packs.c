/* SPDX-License-Identifier: Apache-2.0
 *
 * store_packs: the cache of open packs.
 *
 * It keeps every pack that is in use and, of those not in use, the 64 used last, each for a second at most. An open
 * descriptor keeps the disk space of a file that a collection has deleted, so a mount, a saver or an open step that is
 * idle must have none. A thread closes them: it is started when a pack becomes unused, and ends when none is left, so
 * an idle process has neither the thread nor its wake-ups. Where no thread can be started a pack is closed at once.
 *
 * Nodes are in a hash by name; the idle ones also in a list, longest unused first. A pack is opened outside the lock,
 * so that a slow storage stops only those that wait for that pack; two threads may open the same pack at once, and the
 * second one closes its own. A pack that could not be opened leaves no node behind: the next caller tries again and
 * gets the same sentence. */
#include <pthread.h>

#include "core/base/clock.h"
#include "core/base/pool.h"
#include "core/base/table.h"
#include "core/step/store_internal.h"

#define CACHE_BUCKETS 256u
#define CACHE_IDLE_MAX 64u
#define CACHE_IDLE_MS 1000u

struct cache_node {
	struct store_pack *pack;
	unsigned users;                        /* 0: in the idle list */
	uint64_t idle_ms;                      /* since when, on the monotonic clock */
	struct cache_node *next;               /* same bucket */
	struct cache_node *newer, *older;      /* idle list */
};

struct store_pack_cache {
	pthread_mutex_t lock;                  /* protects all below */
	struct cache_node *bucket[CACHE_BUCKETS];
	struct cache_node *oldest, *newest;    /* idle packs */
	unsigned idle;
	pthread_t closer;
	bool closing;                          /* `closer` runs; it ends by itself */
	bool started;                          /* `closer` is to be joined */
	bool ending;
	pthread_cond_t ended;                  /* `ending` was set */
};

static unsigned cache_bucket(const char *name)
{
	return base_table_hash(name, strlen(name)) % CACHE_BUCKETS;
}

static struct cache_node *cache_find(struct store_pack_cache *c, const char *name)
{
	struct cache_node *n = c->bucket[cache_bucket(name)];

	while (n && strcmp(store_pack_name(n->pack), name) != 0)
		n = n->next;
	return n;
}

static void cache_idle_add(struct store_pack_cache *c, struct cache_node *n)
{
	n->idle_ms = base_monotonic_ms();
	n->older = c->newest;
	n->newer = NULL;
	*(c->newest ? &c->newest->newer : &c->oldest) = n;
	c->newest = n;
	c->idle++;
}

static void cache_idle_remove(struct store_pack_cache *c, struct cache_node *n)
{
	*(n->older ? &n->older->newer : &c->oldest) = n->newer;
	*(n->newer ? &n->newer->older : &c->newest) = n->older;
	n->newer = n->older = NULL;
	c->idle--;
}

/* Takes the longest unused node out when there are too many; the caller closes it without the lock. */
static struct cache_node *cache_evict(struct store_pack_cache *c, unsigned most)
{
	struct cache_node *n = c->oldest, **at;

	if (c->idle <= most)
		return NULL;
	cache_idle_remove(c, n);
	for (at = &c->bucket[cache_bucket(store_pack_name(n->pack))]; *at != n; at = &(*at)->next)
		;
	*at = n->next;
	return n;
}

static void cache_node_free(struct cache_node *n)
{
	if (!n)
		return;
	store_pack_close(n->pack);
	free(n);
}

static struct store_pack *cache_use(struct store_pack_cache *c, const char *name)
{
	struct cache_node *n = cache_find(c, name);

	if (!n)
		return NULL;
	if (n->users++ == 0)
		cache_idle_remove(c, n);
	return n->pack;
}

/* ---- packs that are not in use ---- */

static void *closer_main(void *arg)
{
	struct store_pack_cache *c = arg;

	pthread_mutex_lock(&c->lock);
	while (c->oldest && !c->ending) {
		uint64_t now = base_monotonic_ms(), due = c->oldest->idle_ms + CACHE_IDLE_MS;

		if (now < due) {
			struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, (int64_t)(due - now));

			pthread_cond_timedwait(&c->ended, &c->lock, &until);
			continue;
		}
		struct cache_node *n = cache_evict(c, 0);

		pthread_mutex_unlock(&c->lock);
		cache_node_free(n);
		pthread_mutex_lock(&c->lock);
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
	struct store_pack_cache *c = arg;
	struct cache_node *n;

	do {
		pthread_mutex_lock(&c->lock);
		n = cache_evict(c, 0);
		pthread_mutex_unlock(&c->lock);
		cache_node_free(n);
	} while (n);
}

/* ---- use ---- */

int store_pack_get(struct store *s, const char *pack, struct store_pack **ret_p, struct base_error *err)
{
	struct store_pack_cache *c = s->packs;
	struct cache_node *n;
	struct store_pack *p;
	int r;

	pthread_mutex_lock(&c->lock);
	*ret_p = cache_use(c, pack);
	pthread_mutex_unlock(&c->lock);
	if (*ret_p)
		return 0;
	n = calloc(1, sizeof *n);
	if (!n)
		return base_no_memory_for(err, "pack %s", pack);
	r = store_pack_open(s->storage, s->info.id, pack, &n->pack, err);
	if (r < 0) {
		free(n);
		store_no_directory(s, r, err);
		return r;
	}
	pthread_mutex_lock(&c->lock);
	p = cache_use(c, pack);
	if (!p) {
		struct cache_node **bucket = &c->bucket[cache_bucket(pack)];

		n->users = 1;
		n->next = *bucket;
		*bucket = n;
		p = n->pack;
		n = NULL;
	}
	pthread_mutex_unlock(&c->lock);
	cache_node_free(n);
	*ret_p = p;
	return 0;
}

void store_pack_put(struct store *s, struct store_pack *p)
{
	struct store_pack_cache *c = s->packs;
	struct cache_node *n, *out = NULL;

	if (!p)
		return;
	pthread_mutex_lock(&c->lock);
	n = cache_find(c, store_pack_name(p));
	if (n && --n->users == 0) {
		cache_idle_add(c, n);
		out = cache_evict(c, closer_start(c) ? CACHE_IDLE_MAX : 0);
	}
	pthread_mutex_unlock(&c->lock);
	cache_node_free(out);
}

struct store_pack_cache *store_pack_cache_new(void)
{
	struct store_pack_cache *c = calloc(1, sizeof *c);
	pthread_condattr_t attributes;

	if (!c)
		return NULL;
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
	for (unsigned i = 0; i < CACHE_BUCKETS; i++)
		while ((n = c->bucket[i])) {
			c->bucket[i] = n->next;
			cache_node_free(n);
		}
	pthread_cond_destroy(&c->ended);
	pthread_mutex_destroy(&c->lock);
	free(c);
}
