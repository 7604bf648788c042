/* SPDX-License-Identifier: Apache-2.0
 *
 * part_read: rows of a part out of its chunks. A chunk is loaded whole, re-hashed and checked (chunk.c), which makes
 * its rows good. One tensor costs one chunk, unless a cache has it (chunk_cache.c). */
#include "core/step/chunk_internal.h"

#include <string.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/step/store.h"

BASE_CLEANUP_DEFINE(struct store_chunk *, store_chunk_free)

static int part_chunk_bytes(struct store *s, const struct proto_chunk *from, const char *const *packs, uint32_t npacks,
	void **ret_bytes, struct base_error *err)
{
	struct pack_object_ref ref = pack_object_ref_from(&from->ref);

	if (ref.pack >= npacks || ref.kind != PACK_OBJECT_PART_CHUNK)
		return base_error_set(err, -BASE_EFORMAT, "a part names pack %u of %u", ref.pack, npacks);
	return store_object_load(s, packs[ref.pack], &ref, STORE_METADATA_MAX_BYTES, ret_bytes, err);
}

int store_part_decode(const void *object, size_t len, struct proto_part *ret_part, struct base_error *err)
{
	int r = proto_part_decode(object, len, ret_part);

	if (r == -BASE_EVERSION)
		return store_newer(err, "the part", object, len);
	return r < 0 ? base_error_set(err, r, "the part cannot be read: %s", base_error_name(r)) : 0;
}

/* Loads a chunk; its rows must be those that the part lists. */
int store_part_chunk(struct store *s, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs, uint32_t npacks, uint32_t number, struct store_chunk **ret_c, struct base_error *err)
{
	const struct proto_chunk *from = &part->chunks[number];
	void *bytes = NULL;
	struct store_chunk *c = NULL;
	int r;

	if (!base_digest_equal(&part->layout, &l->digest))
		return base_error_set(err, -BASE_EFORMAT, "a part of another layout");
	r = part_chunk_bytes(s, from, packs, npacks, &bytes, err);
	if (r == 0)
		r = store_chunk_take(bytes, from->ref.raw_len, l, npacks, &c, err);
	if (r < 0)
		return r;
	if (store_chunk_rows(c) != from->nrows || store_chunk_find(c, from->first_tensor) != 0 ||
	    store_chunk_find(c, from->last_tensor) != (int64_t)from->nrows - 1) {
		store_chunk_free(c);
		return base_error_set(err, -BASE_EFORMAT, "the rows of a part are not those that it names");
	}
	*ret_c = c;
	return 0;
}

void store_part_chunk_give(struct store_chunk_cache *cache, const struct store_layout *l, const struct proto_part *part,
	uint32_t npacks, uint32_t number, struct store_chunk *chunk)
{
	const struct proto_chunk *from = &part->chunks[number];
	struct chunk_key key = {l, &from->ref.digest, npacks, from->first_tensor};
	struct store_chunk_held *h = store_chunk_cache_add(cache, &key, from->first_tensor, from->last_tensor, chunk);

	if (h)
		store_chunk_release(h);
}

int64_t part_chunk_find(const struct proto_part *part, uint32_t tensor)
{
	uint32_t at = base_bisect(i, 0, part->nchunks, part->chunks[i].last_tensor < tensor);

	return at < part->nchunks && part->chunks[at].first_tensor <= tensor ? (int64_t)at : -ENOENT;
}

/* Gets the row of `tensor` in chunk `number` from the cache, or loads the chunk into the cache. */
static int part_chunk_hold(struct store_chunk_cache *cache, struct store *s, const struct store_layout *l,
	const struct proto_part *part, const char *const *packs, uint32_t npacks, uint32_t number, uint32_t tensor,
	struct store_chunk_held **ret_h, struct base_error *err)
{
	const struct proto_chunk *from = &part->chunks[number];
	struct chunk_key key = {l, &from->ref.digest, npacks, tensor};
	struct chunk_reading mine;
	struct store_chunk *c;
	int r;

	*ret_h = store_chunk_cache_take(cache, &key, &mine);
	if (*ret_h)
		return 0;
	r = store_part_chunk(s, l, part, packs, npacks, number, &c, err);
	if (r == 0) {
		*ret_h = store_chunk_cache_add(cache, &key, from->first_tensor, from->last_tensor, c);
		r = *ret_h ? 0 : base_no_memory(err);
	}
	store_chunk_cache_read(cache, &mine);
	return r;
}

/* The chunk that has the row of `tensor`, held, and the row's number in it. -ENODATA: the part has none. */
static int part_row_hold(struct store_chunk_cache *cache, struct store *s, const struct store_layout *l,
	const struct proto_part *part, const char *const *packs, uint32_t npacks, uint32_t tensor,
	struct store_chunk_held **ret_h, uint32_t *ret_row, struct base_error *err)
{
	int64_t number = part_chunk_find(part, tensor), row = -ENOENT;
	struct store_chunk_held *h = NULL;

	if (number >= 0) {
		int r = part_chunk_hold(cache, s, l, part, packs, npacks, (uint32_t)number, tensor, &h, err);

		if (r < 0)
			return r;
		row = store_chunk_find(store_chunk_held_chunk(h), tensor);
	}
	if (row < 0) {
		if (h)
			store_chunk_release(h);
		return base_error_set(err, -ENODATA, "rank %u stored nothing of tensor %u", part->rank, tensor);
	}
	*ret_h = h;
	*ret_row = (uint32_t)row;
	return 0;
}

int store_part_read_row_cached(struct store_chunk_cache *cache, struct store *s, const struct store_layout *l,
	const struct proto_part *part, const char *const *packs, uint32_t npacks, uint32_t tensor,
	struct store_row *ret_row, struct base_error *err)
{
	struct store_chunk_held *h = NULL;
	uint32_t row = 0;
	int r = part_row_hold(cache, s, l, part, packs, npacks, tensor, &h, &row, err);

	if (r < 0)
		return r;
	if ((r = store_chunk_row(store_chunk_held_chunk(h), row, ret_row)) < 0)
		r = base_no_memory(err);
	store_chunk_release(h);
	return r;
}

int store_part_row_digest(struct store_chunk_cache *cache, struct store *s, const struct store_layout *l,
	const struct proto_part *part, const char *const *packs, uint32_t npacks, uint32_t tensor, bool *ret_whole,
	struct base_digest *ret_d, struct base_error *err)
{
	struct store_chunk_held *h = NULL;
	uint32_t row = 0;
	int r = part_row_hold(cache, s, l, part, packs, npacks, tensor, &h, &row, err);

	if (r < 0)
		return r;
	store_chunk_row_digest(store_chunk_held_chunk(h), row, ret_whole, ret_d);
	store_chunk_release(h);
	return 0;
}

int store_part_read_chunk(struct store *s, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs, uint32_t npacks, uint32_t chunk, int (*f)(void *arg, const struct store_row *row),
	void *arg, struct base_error *err)
{
	base_cleanup(store_chunk_free_p) struct store_chunk *c = NULL;
	int r;

	if (chunk >= part->nchunks)
		return base_error_set(err, -ENOENT, "a part has no chunk %u", chunk);
	r = store_part_chunk(s, l, part, packs, npacks, chunk, &c, err);
	for (uint32_t i = 0; r == 0 && i < store_chunk_rows(c); i++) {
		struct store_row row;

		r = store_chunk_row(c, i, &row);
		if (r < 0)
			return base_no_memory(err);
		r = f(arg, &row);
		store_row_release(&row);
	}
	return r;
}
