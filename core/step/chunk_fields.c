/* SPDX-License-Identifier: Apache-2.0
 *
 * chunk_fields: head, rows, boxes, extents and pieces of a chunk (bytes: chunk_internal.h), one at a time, for readers
 * of a whole chunk (chunk.c) and of ranges of it (part_excerpt.c). Pure functions; no field is believed unchecked. */
#include "core/step/chunk_internal.h"

#include <string.h>

#include "core/base/le.h"
#include "core/pack/pack.h"

/* Takes a table of n entries from what is left of the object. */
static bool table_take(uint64_t *at, uint64_t *left, uint64_t n, uint64_t bytes, uint64_t *ret_table)
{
	uint64_t len;

	if (base_mul_overflows(n, bytes, &len) || len > *left)
		return false;
	*ret_table = *at;
	*at += len;
	*left -= len;
	return true;
}

int chunk_head_decode(const uint8_t head[static CHUNK_HEAD_BYTES], uint64_t len, struct chunk_tables *ret_t)
{
	uint64_t at = CHUNK_HEAD_BYTES, left;
	struct chunk_tables t;

	if (len < CHUNK_HEAD_BYTES || memcmp(head, CHUNK_MAGIC, 8) != 0)
		return -BASE_EFORMAT;
	left = len - CHUNK_HEAD_BYTES;
	if (base_get16(head + 8) > CHUNK_VERSION || base_get32(head + 12) != 0)
		return -BASE_EVERSION;
	if (base_get16(head + 8) != CHUNK_VERSION || base_get16(head + 10) != 0 || base_get64(head + 32) != 0 ||
		base_get64(head + 56) != 0)
		return -BASE_EFORMAT;
	t.nrows = base_get32(head + 16);
	t.nextents = base_get32(head + 20);
	t.npieces = base_get64(head + 24);
	t.npairs = base_get64(head + 40);
	t.ninline = base_get64(head + 48);
	if (!table_take(&at, &left, t.nrows, CHUNK_ROW_BYTES, &t.rows) ||
		!table_take(&at, &left, t.nextents, CHUNK_EXTENT_BYTES, &t.extents) ||
		!table_take(&at, &left, t.npieces, CHUNK_PIECE_BYTES, &t.pieces) ||
		!table_take(&at, &left, t.npairs, CHUNK_PAIR_BYTES, &t.boxes) ||
		!table_take(&at, &left, t.ninline, 1, &t.inlined))
		return -BASE_EFORMAT;
	*ret_t = t;
	return left == 0 && t.nrows > 0 ? 0 : -BASE_EFORMAT;
}

int chunk_row_decode(const uint8_t bytes[static CHUNK_ROW_BYTES], const struct store_layout *l,
	const struct chunk_tables *t, const struct chunk_start *at, int64_t last_tensor, struct chunk_row *ret_row)
{
	uint32_t flags = base_get32(bytes + 4);
	struct tensor_shape shape;
	struct chunk_row row = {.tensor = base_get32(bytes), .nboxes = base_get32(bytes + 8),
		.nextents = base_get32(bytes + 12), .npieces = base_get64(bytes + 16)};

	if (row.tensor >= l->m.ntensors || (int64_t)row.tensor <= last_tensor)
		return -BASE_EFORMAT;
	if ((flags & ~CHUNK_ROW_WHOLE) || base_get64(bytes + 24) != 0 ||
		((flags & CHUNK_ROW_WHOLE) != 0) != (row.nboxes == 0))
		return -BASE_EFORMAT;
	store_layout_shape(l, row.tensor, &shape);
	row.npairs = (uint64_t)row.nboxes * shape.ndim;
	if (row.nextents > t->nextents - at->extent || row.npieces > t->npieces - at->piece ||
		row.npairs > t->npairs - at->pair || (row.nboxes && shape.ndim == 0))
		return -BASE_EFORMAT;
	memcpy(row.digest.bytes, bytes + 32, sizeof row.digest.bytes);
	*ret_row = row;
	return 0;
}

void chunk_box_decode(const uint8_t *pairs, uint32_t ndim, struct tensor_box *ret_box)
{
	memset(ret_box, 0, sizeof *ret_box);
	for (uint32_t d = 0; d < ndim; d++) {
		ret_box->offset[d] = base_get64(pairs + (size_t)d * CHUNK_PAIR_BYTES);
		ret_box->size[d] = base_get64(pairs + (size_t)d * CHUNK_PAIR_BYTES + 8);
	}
}

bool chunk_box_valid(const struct tensor_shape *s, const struct tensor_box *b, bool only)
{
	struct tensor_box whole;

	if (!tensor_box_inside(s, b) || tensor_box_items(s, b) == 0)
		return false;
	tensor_box_whole(s, &whole);
	/* The whole tensor has the flag instead. */
	return !only || memcmp(whole.offset, b->offset, s->ndim * sizeof whole.offset[0]) != 0 ||
		memcmp(whole.size, b->size, s->ndim * sizeof whole.size[0]) != 0;
}

int chunk_extent_decode(const uint8_t bytes[static CHUNK_EXTENT_BYTES], uint32_t npacks,
	struct chunk_extent *ret_extent)
{
	/* The other fields are set with the first piece, because a long row has very many extents. */
	ret_extent->ref.pack = base_get32(bytes);
	ret_extent->left = base_get32(bytes + 4);
	ret_extent->ref.offset = base_get64(bytes + 8);
	ret_extent->ref.checks = base_get64(bytes + 16);
	ret_extent->fresh = true;
	if (ret_extent->left == 0)
		return -BASE_EFORMAT;
	if (ret_extent->ref.pack == CHUNK_INLINE)
		return ret_extent->ref.checks == 0 ? 0 : -BASE_EFORMAT;
	return ret_extent->ref.pack < npacks ? 0 : -BASE_EFORMAT;
}

/* Inline bytes follow each other: the extent's reference has the place of the next ones. */
static int inline_take(struct chunk_extent *extent, uint64_t ninline, struct pack_object_ref *ref,
	uint64_t *ret_inline)
{
	if (ref->raw_len > STORE_INLINE_MAX_BYTES || ref->stored_len != ref->raw_len || ref->codec != PACK_CODEC_RAW)
		return -BASE_EFORMAT;
	if (extent->ref.offset > ninline || ref->raw_len > ninline - extent->ref.offset)
		return -BASE_EFORMAT;
	*ret_inline = extent->ref.offset;
	extent->ref.offset += ref->raw_len;
	return 0;
}

int chunk_piece_decode(const uint8_t bytes[static CHUNK_PIECE_BYTES], uint64_t raw_len, uint64_t ninline,
	struct chunk_extent *extent, struct store_piece *ret_p, uint64_t *ret_inline)
{
	struct pack_object_ref *ref = &ret_p->ref;
	int r = 0;

	memset(ret_p, 0, sizeof *ret_p);
	memcpy(ref->digest.bytes, bytes, sizeof ref->digest.bytes);
	memcpy(ret_p->xxh.bytes, bytes + 32, sizeof ret_p->xxh.bytes);
	ref->stored_len = base_get32(bytes + 48);
	ref->raw_len = base_get32(bytes + 52);
	ref->codec = base_get16(bytes + 56);
	ref->kind = PACK_OBJECT_PIECE;
	ref->pack = extent->ref.pack;
	ret_p->base = base_get32(bytes + 60);
	if (!pack_codec_valid(ref->codec))
		return -BASE_EVERSION; /* the chunk's digest holds: no damage made it */
	if (base_get16(bytes + 58) != 0 || ret_p->base != STORE_PIECE_NO_BASE || ref->raw_len != raw_len)
		return -BASE_EFORMAT;
	if (ref->pack == CHUNK_INLINE)
		r = inline_take(extent, ninline, ref, ret_inline);
	else {
		ref->offset = extent->ref.offset;
		ref->checks = extent->ref.checks;
		if (raw_len <= STORE_INLINE_MAX_BYTES || (!extent->fresh && !chunk_extent_next(&extent->ref, ref)) ||
			pack_object_ref_check(ref, STORE_OBJECT_MAX_BYTES) < 0)
			r = -BASE_EFORMAT;
		extent->ref = *ref;
	}
	extent->fresh = false;
	extent->left--;
	return r;
}
