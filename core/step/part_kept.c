/* SPDX-License-Identifier: Apache-2.0
 *
 * part_kept: a part that its writer keeps in memory, decoded, with its first chunks. The chunks are put into a cache of
 * decoded chunks as if they had been read; their bytes have never left this process, so they are not hashed. */
#include "core/step/chunk_internal.h"

#define KEPT_BYTES (UINT64_C(4) << 20) /* of chunks: the rows of 65,536 pieces */

void store_part_kept_release(struct store_part_kept *k)
{
	proto_part_release(&k->part);
	base_buf_release(&k->chunks);
	*k = (struct store_part_kept){0};
}

void part_kept_chunk(struct store_part_kept *k, const struct base_buf *object)
{
	k->more |= k->chunks.len + object->len > KEPT_BYTES;
	if (k->more)
		return;
	base_buf_append(&k->chunks, object->data, object->len);
	k->nchunks++;
}

void part_kept_finish(struct store_part_kept *k, const struct base_buf *object)
{
	if (k->chunks.error || object->len > KEPT_BYTES ||
		proto_part_decode(object->data, object->len, &k->part) < 0)
		store_part_kept_release(k);
}

void store_part_kept_give(const struct store_part_kept *k, struct store_chunk_cache *cache,
	const struct store_layout *l)
{
	const uint8_t *at = k->chunks.data;

	for (uint32_t i = 0; i < k->nchunks; i++) {
		const struct proto_chunk *from = &k->part.chunks[i];
		struct store_chunk *c;

		if (store_chunk_decode(at, from->ref.raw_len, l, k->part.npacks, &c, NULL) == 0)
			store_part_chunk_give(cache, l, &k->part, k->part.npacks, i, c);
		at += from->ref.raw_len;
	}
}
