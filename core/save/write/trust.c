/* SPDX-License-Identifier: Apache-2.0
 *
 * trust: the parts that this process wrote; and the comparison that replaces trust where a record is another's. The
 * stored bytes of a piece are read, decoded and compared with those at hand, which costs less than to hash them; the
 * digest is of the bytes at hand. A blob is hashed as it is stored, because a long one is not at hand. */
#include "core/save/write/trust.h"

#include <pthread.h>
#include <string.h>

#include "core/save/write/write_internal.h"

#define TRUST_READ_BLOCKS 64u

/* ---- parts ---- */

static struct {
	pthread_mutex_t lock;           /* protects all below */
	struct base_digest parts[SAVE_TRUST_PARTS];
	size_t n;                       /* so many were added; the oldest give way */
} trust = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool trust_find(const struct base_digest *part)
{
	for (size_t i = 0; i < base_min(trust.n, SAVE_TRUST_PARTS); i++)
		if (base_digest_equal(&trust.parts[i], part))
			return true;
	return false;
}

void save_trust_add(const struct base_digest *part)
{
	pthread_mutex_lock(&trust.lock);
	if (!trust_find(part))
		trust.parts[trust.n++ % SAVE_TRUST_PARTS] = *part;
	pthread_mutex_unlock(&trust.lock);
}

bool save_trust_has(const struct base_digest *part)
{
	bool has;

	pthread_mutex_lock(&trust.lock);
	has = trust_find(part);
	pthread_mutex_unlock(&trust.lock);
	return has;
}

/* ---- bytes ---- */

bool save_trust_compare(struct store *s, const struct index_place *place, const void *bytes, void *room)
{
	struct pack_object_ref ref = save_place_ref(place);
	struct pack *pack;
	bool same;

	if (store_pack_get(s, place->pack, &pack, NULL) < 0)
		return false;
	same = pack_object_read(pack, &ref, room, NULL) == 0 && memcmp(room, bytes, ref.raw_len) == 0;
	store_pack_put(s, pack);
	return same;
}

static int trust_hash(struct pack *pack, const struct pack_object_ref *ref, struct base_hasher *h,
	struct base_xxh128_state *x, uint8_t *room)
{
	uint64_t blocks = base_block_count(ref->raw_len), left = ref->raw_len;
	int r = 0;

	for (uint64_t at = 0; r == 0 && at < blocks; at += TRUST_READ_BLOCKS) {
		uint64_t len = base_min(left, TRUST_READ_BLOCKS * BASE_BLOCK_BYTES);

		r = pack_object_read_blocks(pack, ref, at, base_min(blocks - at, TRUST_READ_BLOCKS), room, NULL);
		if (r == 0)
			base_hasher_update(h, room, len);
		if (r == 0 && x)
			base_xxh128_update(x, room, len);
		left -= len;
	}
	return r;
}

bool save_trust_rehash(struct store *s, const struct index_place *place, struct base_xxh128 *ret_xxh)
{
	struct pack_object_ref ref = save_place_ref(place);
	base_cleanup_free uint8_t *room = malloc(TRUST_READ_BLOCKS * BASE_BLOCK_BYTES);
	struct base_hasher *h = base_hasher_new();
	struct base_xxh128_state *x = ret_xxh ? base_xxh128_state_new() : NULL;
	struct base_digest found;
	struct pack *pack;
	bool same = false;

	if (x)
		base_xxh128_begin(x, s->info.seed);
	if (room && h && (x || !ret_xxh) && store_pack_get(s, place->pack, &pack, NULL) == 0) {
		same = trust_hash(pack, &ref, h, x, room) == 0 && base_hasher_final(h, &found) == 0 &&
			base_digest_equal(&found, &place->digest);
		store_pack_put(s, pack);
	}
	if (x)
		base_xxh128_final(x, ret_xxh);
	base_xxh128_state_free(x);
	base_hasher_free(h);
	return same;
}
