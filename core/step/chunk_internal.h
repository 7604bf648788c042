/* SPDX-License-Identifier: Apache-2.0
 *
 * chunk_internal: the bytes of a chunk of a part (docs/format/part.md), shared by its builder and its decoder.
 *
 *   head 64 | rows 64 each | extents 24 each | pieces 64 each | base objects 72 each | boxes 16 a dimension
 *   | inline bytes
 *
 *   head   0 magic "VCKPTCHK" | 8 u16 version | 10 u16 zero | 12 u32 required features | 16 u32 rows | 20 u32 extents
 *          | 24 u64 pieces | 32 u32 base objects | 36 u32 zero | 40 u64 box numbers (u64 pairs)
 *          | 48 u64 inline bytes | 56 u64 zero
 *   row    0 u32 tensor | 4 u32 flags | 8 u32 boxes (WHOLE: 0) | 12 u32 extents | 16 u64 pieces | 24 u32 base objects
 *          | 28 u32 zero
 *          | 32 row digest (32)
 *   extent 0 u32 pack (0xffffffff: inline) | 4 u32 pieces | 8 u64 offset of the first object (inline: in the inline
 *          bytes)
 *          | 16 u64 offset of its checks (inline: 0)
 *   piece  0 digest (32) | 32 XXH3-128 (16) | 48 u32 stored length | 52 u32 raw length | 56 u16 codec
 *          | 58 u16 flags, zero
 *          | 60 u32 base object (0xffffffff: none)
 *   box    for each dimension: u64 offset | u64 size
 *
 * Every table is in the order of the rows, without gaps: a row's share of each follows from the rows before it. */
#ifndef CORE_STEP_CHUNK_INTERNAL_H
#define CORE_STEP_CHUNK_INTERNAL_H

#include "core/pack/codec.h"
#include "core/step/part.h"

enum {
	CHUNK_VERSION = 1,
	CHUNK_HEAD_BYTES = 64,
	CHUNK_ROW_BYTES = 64,
	CHUNK_EXTENT_BYTES = 24,
	CHUNK_PIECE_BYTES = 64,
	CHUNK_BASE_BYTES = 72,
	CHUNK_PAIR_BYTES = 16,
};
#define CHUNK_MAGIC "VCKPTCHK"
#define CHUNK_ROW_WHOLE 1u
#define CHUNK_INLINE UINT32_MAX        /* in place of a pack: the piece is in the chunk */

/* The place of the object that follows `ref` in its extent. `next` has its lengths and codec; false: beyond every
 * bound. */
static inline bool chunk_extent_next(const struct pack_object_ref *ref, struct pack_object_ref *next)
{
	next->offset = base_align(ref->offset + ref->stored_len, pack_object_align(next->codec, next->stored_len));
	next->checks = ref->checks + pack_object_checks_bytes(ref->codec, ref->raw_len);
	return next->offset < STORE_OBJECT_MAX_BYTES && next->checks < STORE_OBJECT_MAX_BYTES;
}

/* ---- fields, one by one (chunk_fields.c): each is checked as far as itself and its bounds go ---- */

/* What the head says: counts, and where the tables begin in the object. */
struct chunk_tables {
	uint32_t nrows, nextents;
	uint64_t npieces, npairs, ninline;
	uint64_t rows, extents, pieces, boxes, inlined;
};
/* `len`: of the object, which the tables have to fill. -BASE_EFORMAT, -BASE_EVERSION. */
int chunk_head_decode(const uint8_t head[static CHUNK_HEAD_BYTES], uint64_t len, struct chunk_tables *ret_t);

/* Says in words why a chunk is refused. Returns r. */
int chunk_refused(struct base_error *err, int r, const uint8_t head[static CHUNK_HEAD_BYTES]);

struct chunk_row {
	uint32_t tensor, nboxes, nextents; /* nboxes 0: whole */
	uint64_t npieces, npairs;
	struct base_digest digest;
};
/* Where a row's shares of the tables begin. */
struct chunk_start { uint32_t extent; uint64_t piece, pair, inlined; };
/* `last_tensor`: of the row before, -1 if there is none. Its shares have to be there, from `at` on. */
int chunk_row_decode(const uint8_t bytes[static CHUNK_ROW_BYTES], const struct store_layout *l,
	const struct chunk_tables *t, const struct chunk_start *at, int64_t last_tensor, struct chunk_row *ret_row);
void chunk_box_decode(const uint8_t *pairs, uint32_t ndim, struct tensor_box *ret_box);
/* Inside the tensor, not empty; the `only` box of a row is not the whole tensor. */
bool chunk_box_valid(const struct tensor_shape *s, const struct tensor_box *b, bool only);

/* An extent under way. */
struct chunk_extent {
	struct pack_object_ref ref;    /* fresh: pack, offset and checks of its first piece; then the piece before */
	uint32_t left;                  /* pieces to come */
	bool fresh;
};
int chunk_extent_decode(const uint8_t bytes[static CHUNK_EXTENT_BYTES], uint32_t npacks,
	struct chunk_extent *ret_extent);
/* The extent's next piece, of `raw_len` bytes as the grid says; left > 0. An inline one: *ret_inline is where its bytes
 * begin in the `ninline` inline bytes; they are not set, nor checked. */
int chunk_piece_decode(const uint8_t bytes[static CHUNK_PIECE_BYTES], uint64_t raw_len, uint64_t ninline,
	struct chunk_extent *extent, struct store_piece *ret_p, uint64_t *ret_inline);

/* The builder keeps (part_kept.c): each chunk's object, and in the end the part's. */
void part_kept_chunk(struct store_part_kept *k, const struct base_buf *object);
void part_kept_finish(struct store_part_kept *k, const struct base_buf *object);

/* The chunk of a part whose range holds `tensor`, or -ENOENT (part_read.c). */
int64_t part_chunk_find(const struct proto_part *part, uint32_t tensor);

/* ---- chunks that are kept (chunk_cache.c) ---- */
struct store_chunk_held;
/* A chunk, and the tensor that is wanted of it. */
struct chunk_key { const struct store_layout *layout; const struct base_digest *digest; uint32_t npacks, tensor; };
/* A chunk that a thread is reading; in the thread's own memory. */
struct chunk_reading { const struct base_digest *digest; struct chunk_reading *next; };
/* A chunk with the tensor's row, if the chunk has one; to be released. NULL: it is not there (or c is NULL). Then the
 * caller reads it, adds it, and calls store_chunk_cache_read, also after an error: other threads that want it wait
 * until then. */
struct store_chunk_held *store_chunk_cache_take(struct store_chunk_cache *c, const struct chunk_key *key,
	struct chunk_reading *mine);
void store_chunk_cache_read(struct store_chunk_cache *c, struct chunk_reading *mine);
/* Takes the chunk over, also on failure (NULL: no memory); its rows are of tensors `first` to `last`. c NULL: it goes
 * into no cache. */
struct store_chunk_held *store_chunk_cache_add(struct store_chunk_cache *c, const struct chunk_key *key, uint32_t first,
	uint32_t last, struct store_chunk *chunk);
const struct store_chunk *store_chunk_held_chunk(const struct store_chunk_held *h);
void store_chunk_release(struct store_chunk_held *h);

#endif
