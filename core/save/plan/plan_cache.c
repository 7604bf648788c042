/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_cache: an entry is freed when it is neither kept nor in use: a newer one may push it out while a save still
 * reads it. Where two threads come with the same key, the first stays. */
#include "core/save/plan/plan_cache.h"

#include <pthread.h>
#include <string.h>

struct plan_entry {
	struct save_planned planned;    /* first: what callers hold is a pointer to it */
	struct base_digest key;
	uint32_t users;
	bool kept;
	uint64_t used;                  /* the cache's count of uses, when it was last used */
};

struct save_plan_cache {
	pthread_mutex_t lock;           /* protects all below, and what entries say of their use */
	struct plan_entry *kept[SAVE_PLAN_CACHE_KEPT];
	uint64_t uses;
	struct save_plan_cache_stats stats;
};

struct save_plan_cache *save_plan_cache_new(void)
{
	struct save_plan_cache *c = calloc(1, sizeof *c);

	if (c)
		pthread_mutex_init(&c->lock, NULL);
	return c;
}

static void entry_free(struct plan_entry *e)
{
	save_planned_release(&e->planned);
	free(e);
}

void save_plan_cache_free(struct save_plan_cache *c)
{
	if (!c)
		return;
	for (unsigned i = 0; i < SAVE_PLAN_CACHE_KEPT; i++)
		if (c->kept[i])
			entry_free(c->kept[i]);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

/* The lock is held. */
static struct plan_entry *entry_use(struct save_plan_cache *c, const struct base_digest *key)
{
	for (unsigned i = 0; i < SAVE_PLAN_CACHE_KEPT; i++) {
		struct plan_entry *e = c->kept[i];

		if (!e || !base_digest_equal(&e->key, key))
			continue;
		e->users++;
		e->used = ++c->uses;
		return e;
	}
	return NULL;
}

/* Takes the place of what was not used for the longest time. The lock is held. */
static void entry_keep(struct save_plan_cache *c, struct plan_entry *e)
{
	unsigned at = 0;

	for (unsigned i = 1; i < SAVE_PLAN_CACHE_KEPT && c->kept[at]; i++)
		if (!c->kept[i] || c->kept[i]->used < c->kept[at]->used)
			at = i;
	if (c->kept[at]) {
		c->kept[at]->kept = false;
		if (c->kept[at]->users == 0)
			entry_free(c->kept[at]);
	}
	e->kept = true;
	e->users = 1;
	e->used = ++c->uses;
	c->kept[at] = e;
}

struct save_planned *save_plan_cache_get(struct save_plan_cache *c, const struct base_digest *key)
{
	struct plan_entry *e;

	pthread_mutex_lock(&c->lock);
	e = entry_use(c, key);
	c->stats.hits += e != NULL;
	c->stats.misses += e == NULL;
	pthread_mutex_unlock(&c->lock);
	return e ? &e->planned : NULL;
}

struct save_planned *save_plan_cache_put(struct save_plan_cache *c, const struct base_digest *key,
	struct save_planned *made)
{
	struct plan_entry *e = calloc(1, sizeof *e), *there;

	if (!e)
		return NULL;
	e->planned = *made;
	e->key = *key;
	*made = (struct save_planned){0};
	pthread_mutex_lock(&c->lock);
	there = entry_use(c, key);
	if (!there)
		entry_keep(c, e);
	pthread_mutex_unlock(&c->lock);
	if (!there)
		return &e->planned;
	entry_free(e);
	return &there->planned;
}

void save_plan_cache_give(struct save_plan_cache *c, struct save_planned *p)
{
	struct plan_entry *e = (struct plan_entry *)p;
	bool last;

	if (!e)
		return;
	pthread_mutex_lock(&c->lock);
	last = --e->users == 0 && !e->kept;
	pthread_mutex_unlock(&c->lock);
	if (last)
		entry_free(e);
}

void save_plan_cache_stats(struct save_plan_cache *c, struct save_plan_cache_stats *ret_stats)
{
	pthread_mutex_lock(&c->lock);
	*ret_stats = c->stats;
	pthread_mutex_unlock(&c->lock);
}
