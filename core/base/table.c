/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/table.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/base/digest.h"

enum { TABLE_MIN_SLOTS = 16 };

static pthread_once_t seed_once = PTHREAD_ONCE_INIT;
static uint64_t seed;

static void seed_make(void)
{
	if (base_random(&seed, sizeof seed) < 0) /* no getrandom: what is hard to guess from outside */
		seed = base_monotonic_ns() ^ (uint64_t)(uintptr_t)&seed << 20 ^ (uint64_t)base_realtime_ns() << 32;
}

uint32_t base_table_hash_in(uint64_t of, const void *key, size_t len)
{
	pthread_once(&seed_once, seed_make);
	return (uint32_t)base_xxh64_of(seed + of, key, len);
}

uint32_t base_table_hash(const void *key, size_t len) { return base_table_hash_in(0, key, len); }
uint32_t base_table_hash_number(uint64_t key) { return base_table_hash_in(0, &key, sizeof key); }

static void slot_fill(struct base_table_slot *slots, size_t nslots, struct base_table_slot item)
{
	size_t i = item.hash;

	while (slots[i & (nslots - 1)].item)
		i++;
	slots[i & (nslots - 1)] = item;
}

int base_table_reserve(struct base_table *t, size_t more)
{
	size_t nslots = t->nslots ? t->nslots : TABLE_MIN_SLOTS;
	struct base_table_slot *slots;

	if (more >= BASE_TABLE_NONE - t->n)
		return -ENOMEM;
	while (nslots / 4 * 3 < t->n + more)
		nslots *= 2;
	if (nslots == t->nslots)
		return 0;
	slots = calloc(nslots, sizeof *slots);
	if (!slots)
		return -ENOMEM;
	for (size_t i = 0; i < t->nslots; i++)
		if (t->slots[i].item)
			slot_fill(slots, nslots, t->slots[i]);
	free(t->slots);
	t->slots = slots;
	t->nslots = nslots;
	return 0;
}

void base_table_add(struct base_table *t, uint32_t hash, uint32_t number)
{
	slot_fill(t->slots, t->nslots, (struct base_table_slot){hash, number + 1});
	t->n++;
}

void base_table_clear(struct base_table *t)
{
	if (t->n)
		memset(t->slots, 0, t->nslots * sizeof *t->slots);
	t->n = 0;
}

void base_table_release(struct base_table *t)
{
	free(t->slots);
	*t = (struct base_table){0};
}
