/* SPDX-License-Identifier: Apache-2.0
 *
 * chunk_cache: decoded chunks of a step's parts, the most recently used ones up to a bound of bytes. A chunk is loaded,
 * re-hashed and checked once; while it is kept, its rows come from this memory: ten thousand small tensors that share a
 * few chunks cost a few chunks.
 *
 * A tensor of many writers needs a chunk of each of them, and the next tensor needs the same chunks again. So each part
 * has a share of the bound: of a chunk that is longer than a share only some rows are kept, from the wanted one on, as
 * many as fit. When tensors are read in order, a chunk is loaded once for so many of them, however many writers there
 * are.
 *
 * Chunks are in a hash by digest and in a list by last use. One that is held is never freed; one that is thrown out
 * while held goes with its last holder. No lock is held while a chunk is read. Threads that open tensors beside each
 * other want the same chunks: the first one reads, the others wait for it. Where it fails, the next one tries. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "core/base/table.h"
#include "core/step/chunk_internal.h"

#define CACHE_BUCKETS_MIN 64u

struct store_chunk_held {
	struct store_chunk_cache *cache; /* NULL: it is in none */
	struct chunk_key key;            /* tensor: the first of those that it has or lacks, up to `last` */
	uint32_t last;
	struct base_digest digest;
	struct store_chunk *chunk;
	size_t bytes;
	unsigned holders;
	bool out;                       /* thrown out, or never in: the last holder frees it */
	LIST_ENTRY(store_chunk_held) by_digest; /* same bucket */
	TAILQ_ENTRY(store_chunk_held) by_use;
};

struct store_chunk_cache {
	pthread_mutex_t lock;           /* protects all below, and what changes in entries */
	pthread_cond_t read;            /* one of `reading` has gone */
	struct chunk_reading *reading;
	LIST_HEAD(chunk_bucket, store_chunk_held) *buckets;
	size_t nbuckets;                /* a power of two */
	TAILQ_HEAD(chunk_uses, store_chunk_held) uses; /* by last use: the oldest first */
	size_t bytes, max_bytes, share_bytes;
};

static void held_free(struct store_chunk_held *h)
{
	store_chunk_free(h->chunk);
	free(h);
}

struct store_chunk_cache *store_chunk_cache_new(size_t max_bytes, uint32_t parts)
{
	struct store_chunk_cache *c = calloc(1, sizeof *c);

	if (!c)
		return NULL;
	for (c->nbuckets = CACHE_BUCKETS_MIN; c->nbuckets < parts;)
		c->nbuckets *= 2;
	c->buckets = calloc(c->nbuckets, sizeof *c->buckets);
	if (!c->buckets) {
		free(c);
		return NULL;
	}
	TAILQ_INIT(&c->uses);
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->read, NULL);
	c->max_bytes = max_bytes;
	c->share_bytes = max_bytes / base_max(parts, 1u);
	return c;
}

void store_chunk_cache_free(struct store_chunk_cache *c)
{
	struct store_chunk_held *h;

	if (!c)
		return;
	while ((h = TAILQ_FIRST(&c->uses))) {
		TAILQ_REMOVE(&c->uses, h, by_use);
		held_free(h);
	}
	pthread_cond_destroy(&c->read);
	pthread_mutex_destroy(&c->lock);
	free(c->buckets);
	free(c);
}

/* ---- under the lock ---- */

static struct chunk_bucket *cache_bucket(struct store_chunk_cache *c, const struct chunk_key *key)
{
	return &c->buckets[base_table_hash(key->digest, sizeof *key->digest) & (c->nbuckets - 1)];
}

static struct store_chunk_held *cache_find(struct store_chunk_cache *c, const struct chunk_key *key)
{
	struct store_chunk_held *h;

	LIST_FOREACH(h, cache_bucket(c, key), by_digest)
		if (key->tensor >= h->key.tensor && key->tensor <= h->last && h->key.layout == key->layout &&
			h->key.npacks == key->npacks && base_digest_equal(&h->digest, key->digest)) {
			TAILQ_REMOVE(&c->uses, h, by_use);
			TAILQ_INSERT_TAIL(&c->uses, h, by_use);
			h->holders++;
			break;
		}
	return h;
}

/* Throws out the least recently used one, held or not. */
static void cache_throw_out(struct store_chunk_cache *c)
{
	struct store_chunk_held *h = TAILQ_FIRST(&c->uses);

	LIST_REMOVE(h, by_digest);
	TAILQ_REMOVE(&c->uses, h, by_use);
	c->bytes -= h->bytes;
	h->out = true;
	if (h->holders == 0)
		held_free(h);
}

static void cache_put(struct store_chunk_cache *c, struct store_chunk_held *h)
{
	while (c->bytes + h->bytes > c->max_bytes)
		cache_throw_out(c);
	LIST_INSERT_HEAD(cache_bucket(c, &h->key), h, by_digest);
	TAILQ_INSERT_TAIL(&c->uses, h, by_use);
	h->out = false;
	c->bytes += h->bytes;
}

/* ---- use ---- */

static bool is_read(const struct store_chunk_cache *c, const struct base_digest *digest)
{
	const struct chunk_reading *at = c->reading;

	while (at && !base_digest_equal(at->digest, digest))
		at = at->next;
	return at;
}

struct store_chunk_held *store_chunk_cache_take(struct store_chunk_cache *c, const struct chunk_key *key,
	struct chunk_reading *mine)
{
	struct store_chunk_held *h;

	if (!c)
		return NULL;
	pthread_mutex_lock(&c->lock);
	while (!(h = cache_find(c, key)) && is_read(c, key->digest))
		pthread_cond_wait(&c->read, &c->lock);
	if (!h) {
		*mine = (struct chunk_reading){key->digest, c->reading};
		c->reading = mine;
	}
	pthread_mutex_unlock(&c->lock);
	return h;
}

void store_chunk_cache_read(struct store_chunk_cache *c, struct chunk_reading *mine)
{
	struct chunk_reading **at;

	if (!c)
		return;
	pthread_mutex_lock(&c->lock);
	for (at = &c->reading; *at != mine;)
		at = &(*at)->next;
	*at = mine->next;
	pthread_cond_broadcast(&c->read);
	pthread_mutex_unlock(&c->lock);
}

/* If all rows are more than a share, keeps only those from the wanted tensor on. */
static void held_cut(struct store_chunk_held *h, const struct store_chunk_cache *c, uint32_t tensor)
{
	uint32_t first = store_chunk_after(h->chunk, tensor), after;
	struct store_chunk *some;

	if (h->bytes <= c->share_bytes || first == store_chunk_rows(h->chunk))
		return;
	some = store_chunk_some(h->chunk, first, c->share_bytes - base_min(c->share_bytes, sizeof *h));
	if (!some)
		return; /* all of it does as well */
	after = first + store_chunk_rows(some);
	if (after < store_chunk_rows(h->chunk))
		h->last = store_chunk_tensor(h->chunk, after) - 1;
	h->key.tensor = tensor;
	store_chunk_free(h->chunk);
	h->chunk = some;
	h->bytes = sizeof *h + store_chunk_memory(some);
}

struct store_chunk_held *store_chunk_cache_add(struct store_chunk_cache *c, const struct chunk_key *key, uint32_t first,
	uint32_t last, struct store_chunk *chunk)
{
	struct store_chunk_held *h = calloc(1, sizeof *h);

	if (!h) {
		store_chunk_free(chunk);
		return NULL;
	}
	*h = (struct store_chunk_held){.cache = c, .key = *key, .digest = *key->digest, .last = last, .chunk = chunk,
		.bytes = sizeof *h + store_chunk_memory(chunk), .holders = 1, .out = true};
	h->key.digest = &h->digest;
	h->key.tensor = first;
	if (!c)
		return h;
	held_cut(h, c, key->tensor);
	pthread_mutex_lock(&c->lock);
	if (h->bytes <= c->max_bytes)
		cache_put(c, h);
	pthread_mutex_unlock(&c->lock);
	return h;
}

const struct store_chunk *store_chunk_held_chunk(const struct store_chunk_held *h)
{
	return h->chunk;
}

void store_chunk_release(struct store_chunk_held *h)
{
	struct store_chunk_cache *c = h->cache;
	bool last;

	if (c)
		pthread_mutex_lock(&c->lock);
	last = --h->holders == 0 && h->out;
	if (c)
		pthread_mutex_unlock(&c->lock);
	if (last)
		held_free(h);
}
