/* SPDX-License-Identifier: Apache-2.0
 *
 * table: finds the items of an array by their keys. The items stay where they are; the table holds the number of each
 * and 32 bits of the hash of its key, in open addressing, at most three quarters full. Nothing is ever taken out, and
 * no one walks the slots: no result depends on the order of a hash. Zero-initialise. A table may be read by several
 * threads while none adds.
 *
 *     size_t at = 0;
 *     uint32_t i;
 *     while ((i = base_table_next(&t, hash, &at)) != BASE_TABLE_NONE)
 *             if (strcmp(items[i].name, name) == 0)
 *                     return i;
 *
 * Keys may be chosen so that all are in one slot (names in a store, a checkpoint's tensors): hashes are
 * seeded with a random number of the process, and leave it nowhere. */
#ifndef CORE_BASE_TABLE_H
#define CORE_BASE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BASE_TABLE_NONE UINT32_MAX

struct base_table_slot { uint32_t hash, item; }; /* item: 1 + the number; 0: free */
struct base_table { struct base_table_slot *slots; size_t nslots, n; }; /* nslots: a power of two, or 0 */

uint32_t base_table_hash(const void *key, size_t len);
uint32_t base_table_hash_number(uint64_t key);
uint32_t base_table_hash_in(uint64_t of, const void *key, size_t len); /* of a key in one of many spaces */

/* Room for `more` items more: adding these does not fail. -ENOMEM: nothing has changed. */
int base_table_reserve(struct base_table *t, size_t more);
/* `number` < BASE_TABLE_NONE: under this hash from now on. Room was reserved; whether there is an equal key already is
 * the caller's to know. */
void base_table_add(struct base_table *t, uint32_t hash, uint32_t number);
void base_table_clear(struct base_table *t);   /* empty; keeps its memory */
void base_table_release(struct base_table *t); /* empty, without memory */

/* The next item whose key may be the one with this hash: the caller compares. *at: 0 for the first one. */
static inline uint32_t base_table_next(const struct base_table *t, uint32_t hash, size_t *at)
{
	if (!t->nslots)
		return BASE_TABLE_NONE;
	for (;;) {
		const struct base_table_slot *s = &t->slots[(hash + (*at)++) & (t->nslots - 1)];

		if (!s->item)
			return BASE_TABLE_NONE;
		if (s->hash == hash)
			return s->item - 1;
	}
}

#endif
