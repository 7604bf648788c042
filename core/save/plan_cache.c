/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_cache: the plans in memory. An entry is freed when it is neither kept nor in use: a newer plan may push it out
 * while a save still reads it. Files are read and written outside of the lock (plan_file.c); where two threads come
 * with the same plan, the first stays.
 *
 * A plan of a thousand boxes is a hundred pages, and to touch a page for the first time costs as much as to check ten
 * boxes. A job that was started again would do so while its trainer waits: so memory for the first plan that comes from
 * a file is taken, and touched, when the cache is made. */
#include "core/save/plan_cache_internal.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define CACHE_SPARE_BOXES 1024u

struct plan_entry {
	struct save_plan plan;          /* first: what callers hold is a pointer to it */
	struct save_plan_key key;
	uint32_t users;
	bool kept;
	uint64_t used;                  /* the cache's count of uses, when it was last used */
};

struct save_plan_cache {
	char *dir;                      /* NULL: memory only */
	uint64_t max_bytes;
	pthread_mutex_t lock;           /* protects all below, and every entry */
	struct plan_entry *kept[SAVE_PLAN_CACHE_KEPT];
	uint64_t uses;
	struct save_plan_cache_stats stats;
	struct save_plan_box *spare;    /* for the boxes of the first plan from a file; NULL: it was used */
};

struct save_plan_cache *save_plan_cache_new(const char *dir, uint64_t max_bytes)
{
	struct save_plan_cache *c = calloc(1, sizeof *c);

	if (!c)
		return NULL;
	c->max_bytes = max_bytes ? max_bytes : SAVE_PLAN_CACHE_BYTES;
	if (dir && dir[0] && !(c->dir = strdup(dir))) {
		free(c);
		return NULL;
	}
	if (c->dir && (c->spare = malloc(CACHE_SPARE_BOXES * sizeof *c->spare)))
		memset(c->spare, 1, CACHE_SPARE_BOXES * sizeof *c->spare); /* zeros would not be written */
	pthread_mutex_init(&c->lock, NULL);
	return c;
}

static void entry_free(struct plan_entry *e)
{
	save_plan_release(&e->plan);
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
	free(c->spare);
	free(c->dir);
	free(c);
}

/* The lock is held. */
static struct plan_entry *entry_use(struct save_plan_cache *c, const struct save_plan_key *key)
{
	for (unsigned i = 0; i < SAVE_PLAN_CACHE_KEPT; i++) {
		struct plan_entry *e = c->kept[i];

		if (!e || !base_digest_equal(&e->key.digest, &key->digest) || e->key.ntensors != key->ntensors ||
			e->key.rank != key->rank)
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
	unsigned place = 0;

	for (unsigned i = 1; i < SAVE_PLAN_CACHE_KEPT && c->kept[place]; i++)
		if (!c->kept[i] || c->kept[i]->used < c->kept[place]->used)
			place = i;
	if (c->kept[place]) {
		c->kept[place]->kept = false;
		if (c->kept[place]->users == 0)
			entry_free(c->kept[place]);
	}
	e->kept = true;
	e->users = 1;
	e->used = ++c->uses;
	c->kept[place] = e;
}

/* Takes the plan. NULL: out of memory. */
static const struct save_plan *plan_insert(struct save_plan_cache *c, const struct save_plan_key *key,
	struct save_plan *plan)
{
	struct plan_entry *e = calloc(1, sizeof *e), *there;

	if (!e)
		return NULL;
	e->plan = *plan;
	e->key = *key;
	memset(plan, 0, sizeof *plan);
	pthread_mutex_lock(&c->lock);
	there = entry_use(c, key);
	if (!there)
		entry_keep(c, e);
	pthread_mutex_unlock(&c->lock);
	if (!there)
		return &e->plan;
	entry_free(e);
	return &there->plan;
}

int save_plan_cache_get(struct save_plan_cache *c, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, const struct save_plan **ret_plan)
{
	struct save_plan_box *spare = NULL;
	struct save_plan plan = {0};
	struct plan_entry *e;
	bool found;

	pthread_mutex_lock(&c->lock);
	e = entry_use(c, key);
	if (!e)
		spare = base_steal(c->spare);
	c->stats.memory_hits += e != NULL;
	pthread_mutex_unlock(&c->lock);
	if (e) {
		*ret_plan = &e->plan;
		return 1;
	}
	found = c->dir && save_plan_file_read(c->dir, c->max_bytes, key, tensors, spare, &plan);
	if (found) {
		*ret_plan = plan_insert(c, key, &plan);
		found = *ret_plan != NULL;
		save_plan_release(&plan);
	}
	pthread_mutex_lock(&c->lock);
	c->stats.disk_hits += found;
	c->stats.misses += !found;
	pthread_mutex_unlock(&c->lock);
	return found ? 2 : 0;
}

const struct save_plan *save_plan_cache_put(struct save_plan_cache *c, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, struct save_plan *plan)
{
	const struct save_plan *kept = plan_insert(c, key, plan);

	if (kept && c->dir)
		save_plan_file_write(c->dir, c->max_bytes, key, tensors, kept);
	return kept;
}

void save_plan_cache_give(struct save_plan_cache *c, const struct save_plan *plan)
{
	struct plan_entry *e = (struct plan_entry *)plan;
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

int save_plan_cache_dir(char *path, size_t room)
{
	const char *base = secure_getenv("XDG_CACHE_HOME"), *below = "/vckpt/plans";
	int n;

	if (!base || base[0] != '/') {
		base = secure_getenv("HOME");
		below = "/.cache/vckpt/plans";
	}
	if (!base || base[0] != '/')
		return -ENOENT;
	n = snprintf(path, room, "%s%s", base, below);
	return n < 0 || (size_t)n >= room ? -ENAMETOOLONG : 0;
}
