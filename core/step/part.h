/* SPDX-License-Identifier: Apache-2.0
 *
 * part: one writer's table tensor -> pieces (docs/format/part.md). The rows are in chunk objects of at most
 * STORE_CHUNK_TARGET bytes of rows (more only for a single row), each with its own digest, so reading one chunk is
 * enough to find and check a tensor's row. A row holds the boxes that this writer stored of the tensor (or the flag
 * WHOLE); for the pieces of these boxes, in order, extents (pack, first offset, checks offset, count) with each piece's
 * digest, XXH3-128, lengths and codec, where pieces of at most 64 bytes are in the row itself (inline); and a digest
 * over the digests of its pieces. A builder belongs to one thread; decoded rows are read-only. */
#ifndef CORE_STEP_PART_H
#define CORE_STEP_PART_H

#include "core/pack/pack.h"
#include "core/step/layout.h"

#define STORE_CHUNK_TARGET_BYTES (256u << 10)
#define STORE_PIECE_NO_BASE UINT32_MAX

struct store_piece {                /* as rows give it */
	struct pack_object_ref ref;     /* pack: number in the part's pack table; UINT32_MAX: inline */
	struct base_xxh128 xxh;         /* of the raw bytes, under the store's seed */
	const uint8_t *inline_bytes;    /* raw_len bytes, into the row's memory; NULL otherwise */
	/* index into the row's base objects (for delta codecs of later versions); STORE_PIECE_NO_BASE */
	uint32_t base;
};
struct store_row {
	uint32_t tensor;                /* index into the layout */
	struct tensor_box *boxes; uint32_t nboxes;   /* whole tensor: one box */
	bool whole;
	struct store_piece *pieces; uint64_t npieces; /* of all boxes, box after box, each in storage order */
	struct base_digest digest;      /* SHA-256 over 0x02 | le64(npieces) | digests of its pieces */
	void *memory;                   /* owns boxes, pieces, inline bytes */
};
void store_row_release(struct store_row *row);
int store_row_digest(const struct store_piece *pieces, uint64_t n, struct base_digest *ret_d); /* 0 or -ENOMEM */

/* Writing: rows in ascending tensor order; chunks are appended to the meta pack as they fill. */
struct store_part_builder;
struct store_part_builder *store_part_builder_new(const struct store_layout *l, struct pack_writer *meta,
	uint32_t meta_pack);
void store_part_builder_free(struct store_part_builder *b);
/* boxes NULL: whole. Consecutive pieces whose places follow each other by the arithmetic of extents go into one
 * extent. */
int store_part_add_row(struct store_part_builder *b, uint32_t tensor, const struct tensor_box *boxes, uint32_t nboxes,
	const struct store_piece *pieces, uint64_t npieces, struct base_error *err);
/* Flushes the last chunk, fills part->chunks (memory owned by the builder) and appends the part object; *ret_ref is
 * complete after the next pack_extent_end or seal. */
int store_part_finish(struct store_part_builder *b, struct proto_part *part, struct pack_object_ref *ret_ref,
	struct base_error *err);

/* A part that its writer keeps in memory: a copy, and its first chunks, at most 4 MiB of them. {0}: nothing. */
struct store_part_kept {
	struct proto_part part;         /* arena NULL: nothing is kept */
	struct base_buf chunks;         /* objects, one after another */
	uint32_t nchunks;
	bool more;                      /* there are further chunks, which are not kept */
};
void store_part_kept_release(struct store_part_kept *k);
/* From now on keeps what is written in `k`, too, if there is memory for it. `k` is empty, and the caller's. */
void store_part_builder_keep(struct store_part_builder *b, struct store_part_kept *k);

/* Reading. */
struct store;
/* proto_part_decode, and a sentence. */
int store_part_decode(const void *object, size_t len, struct proto_part *ret_part, struct base_error *err);
/* A cache of decoded chunks, for callers that read many rows. */
struct store_chunk_cache;
/* Any thread; layouts that it is used with outlive it. parts: how many parts share max_bytes, so that of each the rows
 * that are read next have room. NULL: no memory. */
struct store_chunk_cache *store_chunk_cache_new(size_t max_bytes, uint32_t parts);
void store_chunk_cache_free(struct store_chunk_cache *c);           /* NULL-safe */
/* Puts the chunks that are kept into the cache; `l`: the part's layout. */
void store_part_kept_give(const struct store_part_kept *k, struct store_chunk_cache *cache,
	const struct store_layout *l);
/* `packs`: pack names by number in the part's table (from the manifest). The chunk that holds `tensor` is loaded and
 * checked by its digest, unless the cache has it; the cache (NULL: none) keeps it. -ENODATA: this part has no row for
 * it. */
int store_part_read_row_cached(struct store_chunk_cache *c, struct store *s, const struct store_layout *l,
	const struct proto_part *part, const char *const *packs, uint32_t npacks, uint32_t tensor,
	struct store_row *ret_row, struct base_error *err);
/* The digest of that row alone, and whether it has the whole tensor. */
int store_part_row_digest(struct store_chunk_cache *c, struct store *s, const struct store_layout *l,
	const struct proto_part *part, const char *const *packs, uint32_t npacks, uint32_t tensor, bool *ret_whole,
	struct base_digest *ret_d, struct base_error *err);
/* A whole chunk, for callers that walk rows; store_chunk_free. chunk < part->nchunks. */
struct store_chunk;
int store_part_chunk(struct store *s, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs, uint32_t npacks, uint32_t chunk, struct store_chunk **ret_c, struct base_error *err);
/* Puts it into the cache, which owns it then, also on failure. */
void store_part_chunk_give(struct store_chunk_cache *cache, const struct store_layout *l, const struct proto_part *part,
	uint32_t npacks, uint32_t number, struct store_chunk *chunk);
/* All rows of one chunk, in order, through a callback (the row is the callback's to read, not to keep). */
int store_part_read_chunk(struct store *s, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs, uint32_t npacks, uint32_t chunk, int (*f)(void *arg, const struct store_row *row),
	void *arg, struct base_error *err);
/* The in-memory decoder behind both; it is fuzzed, and checks every index, count, length and offset. */
int store_chunk_decode(const void *object, size_t len, const struct store_layout *l, uint32_t npacks,
	struct store_chunk **ret_c, struct base_error *err);
/* The same; `object` is malloc'ed, and the chunk's from now on, also on failure. */
int store_chunk_take(void *object, size_t len, const struct store_layout *l, uint32_t npacks,
	struct store_chunk **ret_c, struct base_error *err);
void store_chunk_free(struct store_chunk *c);
uint32_t store_chunk_rows(const struct store_chunk *c);
int store_chunk_row(const struct store_chunk *c, uint32_t i, struct store_row *ret_row);
void store_chunk_row_digest(const struct store_chunk *c, uint32_t i, bool *ret_whole, struct base_digest *ret_d);
/* A row without its pieces; boxes: as they are stored (none, if it is whole), in the chunk's memory. */
struct store_row_face {
	uint32_t tensor;
	bool whole;
	const uint8_t *boxes; size_t boxes_len;
	uint64_t npieces;
	struct base_digest digest;
};
void store_chunk_face(const struct store_chunk *c, uint32_t i, struct store_row_face *ret_f);
int64_t store_chunk_find(const struct store_chunk *c, uint32_t tensor); /* row number or -ENOENT */
uint32_t store_chunk_after(const struct store_chunk *c, uint32_t tensor); /* number of the first row from it on */
uint32_t store_chunk_tensor(const struct store_chunk *c, uint32_t i); /* of row i */
size_t store_chunk_memory(const struct store_chunk *c);
/* A copy with the rows from `first` on, as many as fit into most_bytes, but at least one. NULL: no memory. */
struct store_chunk *store_chunk_some(const struct store_chunk *c, uint32_t first, size_t most_bytes);

#endif
