/* SPDX-License-Identifier: Apache-2.0
 *
 * chunk_cache: decoded chunks of a step's parts, the latest used ones up to a bound of bytes. A chunk is loaded,
 * re-hashed and checked once; its rows are then taken out of private memory for as long as it stays: ten thousand small
 * tensors that share a few chunks cost a few chunks.
 *
 * A chunk that is held is never freed; one that is thrown out while held goes with its last holder. No lock is held
 * while a chunk is read: two threads that miss the same one both read it, and the second finds the first's. Entries are
 * few (CACHE_CHUNKS), so they are searched one after another. */
#include <pthread.h>
#include <stdlib.h>

#include "core/step/chunk_internal.h"

#define CACHE_CHUNKS 64u

struct store_chunk_held {
	struct store_chunk_cache *cache; /* NULL: belongs to nobody's cache */
	const struct store_layout *layout;
	uint32_t npacks;
	struct base_digest digest;
	struct store_chunk *chunk;
	size_t bytes;
	uint64_t used;                  /* when; the clock of the cache */
	unsigned holders;
	bool out;                       /* thrown out: goes with its last holder */
};

struct store_chunk_cache {
	pthread_mutex_t lock;           /* protects all below, and what changes in entries */
	struct store_chunk_held *all[CACHE_CHUNKS];
	unsigned n;
	size_t bytes, max_bytes;
	uint64_t clock;
};

static void held_free(struct store_chunk_held *h)
{
	store_chunk_free(h->chunk);
	free(h);
}

struct store_chunk_cache *store_chunk_cache_new(size_t max_bytes)
{
	struct store_chunk_cache *c = calloc(1, sizeof *c);

	if (!c)
		return NULL;
	pthread_mutex_init(&c->lock, NULL);
	c->max_bytes = max_bytes;
	return c;
}

void store_chunk_cache_free(struct store_chunk_cache *c)
{
	if (!c)
		return;
	for (unsigned i = 0; i < c->n; i++)
		held_free(c->all[i]);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

/* Under the lock. */
static struct store_chunk_held *cache_find(struct store_chunk_cache *c, const struct store_layout *l, uint32_t npacks,
	const struct base_digest *digest)
{
	for (unsigned i = 0; i < c->n; i++) {
		struct store_chunk_held *h = c->all[i];

		if (h->layout == l && h->npacks == npacks && base_digest_equal(&h->digest, digest)) {
			h->used = ++c->clock;
			h->holders++;
			return h;
		}
	}
	return NULL;
}

/* Under the lock: the one that was used the longest ago goes, held or not. */
static void cache_throw_out(struct store_chunk_cache *c)
{
	struct store_chunk_held *h;
	unsigned oldest = 0;

	for (unsigned i = 1; i < c->n; i++)
		if (c->all[i]->used < c->all[oldest]->used)
			oldest = i;
	h = c->all[oldest];
	c->all[oldest] = c->all[--c->n];
	c->bytes -= h->bytes;
	h->out = true;
	if (h->holders == 0)
		held_free(h);
}

struct store_chunk_held *store_chunk_cache_take(struct store_chunk_cache *c, const struct store_layout *l,
	uint32_t npacks, const struct base_digest *digest)
{
	struct store_chunk_held *h;

	if (!c)
		return NULL;
	pthread_mutex_lock(&c->lock);
	h = cache_find(c, l, npacks, digest);
	pthread_mutex_unlock(&c->lock);
	return h;
}

struct store_chunk_held *store_chunk_cache_add(struct store_chunk_cache *c, const struct store_layout *l,
	uint32_t npacks, const struct base_digest *digest, struct store_chunk *chunk, size_t bytes)
{
	struct store_chunk_held *h = calloc(1, sizeof *h), *there = NULL;

	if (!h) {
		store_chunk_free(chunk);
		return NULL;
	}
	*h = (struct store_chunk_held){.cache = c, .layout = l, .npacks = npacks, .digest = *digest, .chunk = chunk,
		.bytes = bytes, .holders = 1, .out = true};
	if (!c)
		return h;
	pthread_mutex_lock(&c->lock);
	there = cache_find(c, l, npacks, digest);
	if (!there && bytes <= c->max_bytes) {
		while (c->n == CACHE_CHUNKS || c->bytes + bytes > c->max_bytes)
			cache_throw_out(c);
		h->out = false;
		h->used = ++c->clock;
		c->all[c->n++] = h;
		c->bytes += bytes;
	}
	pthread_mutex_unlock(&c->lock);
	if (there)
		held_free(h);
	return there ? there : h;
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
