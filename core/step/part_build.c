/* SPDX-License-Identifier: Apache-2.0
 *
 * part_build: writes rows into chunk objects, and the part that lists them.
 *
 * The tables of the chunk under way grow in one buffer each; they are joined when the next row would make the chunk
 * longer than STORE_CHUNK_TARGET_BYTES, and appended to the meta pack. A chunk's reference is complete
 * only when its extent is closed, so references have memory of their own that never moves, and the part is encoded
 * after that. What is refused here is exactly what chunk.c would refuse to read. */
#include "core/step/chunk_internal.h"

#include <string.h>

#include "core/base/buf.h"
#include "core/pack/pack.h"

struct part_chunk { struct part_chunk *next; uint32_t first_tensor, last_tensor, nrows; struct pack_object_ref ref; };

struct store_part_builder {
	const struct store_layout *layout;
	struct pack_writer *meta;
	uint32_t meta_pack;
	struct store_part_kept *kept;   /* NULL: nothing is */
	int64_t last_tensor;            /* -1: none yet */
	struct part_chunk *first, **end; uint32_t nchunks;
	struct proto_chunk *table;      /* of part_finish */
	uint32_t first_tensor, nrows, nextents;
	uint64_t npieces, npairs;       /* of the chunk under way */
	struct base_buf rows, extents, pieces, boxes, inlined;
};

struct store_part_builder *store_part_builder_new(const struct store_layout *l, struct pack_writer *meta,
	uint32_t meta_pack)
{
	struct store_part_builder *b = calloc(1, sizeof *b);

	if (!b)
		return NULL;
	b->layout = l;
	b->meta = meta;
	b->meta_pack = meta_pack;
	b->last_tensor = -1;
	b->end = &b->first;
	return b;
}

void store_part_builder_keep(struct store_part_builder *b, struct store_part_kept *k) { b->kept = k; }

void store_part_builder_free(struct store_part_builder *b)
{
	struct part_chunk *next;

	if (!b)
		return;
	for (struct part_chunk *c = b->first; c; c = next) {
		next = c->next;
		free(c);
	}
	base_buf_release(&b->rows);
	base_buf_release(&b->extents);
	base_buf_release(&b->pieces);
	base_buf_release(&b->boxes);
	base_buf_release(&b->inlined);
	free(b->table);
	free(b);
}

static uint64_t chunk_bytes(const struct store_part_builder *b)
{
	return b->rows.len + b->extents.len + b->pieces.len + b->boxes.len + b->inlined.len;
}

static void chunk_head_put(const struct store_part_builder *b, struct base_buf *object)
{
	base_buf_append(object, CHUNK_MAGIC, 8);
	base_buf_put16(object, CHUNK_VERSION);
	base_buf_put16(object, 0);
	base_buf_put32(object, 0);
	base_buf_put32(object, b->nrows);
	base_buf_put32(object, b->nextents);
	base_buf_put64(object, b->npieces);
	base_buf_put64(object, 0); /* base objects, and zero */
	base_buf_put64(object, b->npairs);
	base_buf_put64(object, b->inlined.len);
	base_buf_put64(object, 0);
}

static void chunk_clear(struct store_part_builder *b)
{
	b->rows.len = b->extents.len = b->pieces.len = b->boxes.len = b->inlined.len = 0;
	b->nrows = b->nextents = 0;
	b->npieces = b->npairs = 0;
}

static int chunk_flush(struct store_part_builder *b, struct base_error *err)
{
	base_cleanup_buf struct base_buf object = BASE_BUF_INIT;
	struct part_chunk *c;
	int r;

	if (b->nrows == 0)
		return 0;
	chunk_head_put(b, &object);
	base_buf_append(&object, b->rows.data, b->rows.len);
	base_buf_append(&object, b->extents.data, b->extents.len);
	base_buf_append(&object, b->pieces.data, b->pieces.len);
	base_buf_append(&object, b->boxes.data, b->boxes.len);
	base_buf_append(&object, b->inlined.data, b->inlined.len);
	c = calloc(1, sizeof *c);
	if (!c || object.error) {
		free(c);
		return base_no_memory(err);
	}
	*c = (struct part_chunk){
		.first_tensor = b->first_tensor, .last_tensor = (uint32_t)b->last_tensor, .nrows = b->nrows};
	*b->end = c;
	b->end = &c->next;
	b->nchunks++;
	chunk_clear(b);
	if (b->kept)
		part_kept_chunk(b->kept, &object);
	/* a long row is read by ranges (part_excerpt.c), which is cheaper if nothing has to be decoded */
	r = object.len > STORE_CHUNK_TARGET_BYTES
		? pack_append_raw(b->meta, PACK_OBJECT_PART_CHUNK, object.data, object.len, &c->ref)
		: pack_append_encoded(b->meta, PACK_OBJECT_PART_CHUNK, object.data, object.len, &c->ref);
	return r < 0 ? base_error_set(err, r, "the part's rows cannot be written: %s", base_error_name(r)) : 0;
}

/* ---- one row ---- */

/* One box that is the whole tensor is written as no box. */
static bool row_is_whole(const struct tensor_shape *s, const struct tensor_box *boxes, uint32_t nboxes)
{
	struct tensor_box whole;

	if (!boxes)
		return true;
	tensor_box_whole(s, &whole);
	return nboxes == 1 && memcmp(boxes[0].offset, whole.offset, s->ndim * sizeof whole.offset[0]) == 0 &&
		memcmp(boxes[0].size, whole.size, s->ndim * sizeof whole.size[0]) == 0;
}

static int row_piece_check(const struct store_piece *p, uint64_t raw_len)
{
	struct pack_object_ref ref = p->ref;

	if (p->ref.raw_len != raw_len || p->base != STORE_PIECE_NO_BASE || raw_len > UINT32_MAX)
		return -EINVAL;
	if (raw_len <= STORE_INLINE_MAX_BYTES)
		return p->ref.pack == CHUNK_INLINE && p->ref.codec == PACK_CODEC_RAW &&
				(p->inline_bytes || raw_len == 0)
			? 0
			: -EINVAL;
	ref.kind = PACK_OBJECT_PIECE;
	return p->ref.pack == CHUNK_INLINE || pack_object_ref_check(&ref, STORE_OBJECT_MAX_BYTES) < 0 ? -EINVAL : 0;
}

/* The pieces have to be those that the grid cuts the boxes into. */
static int row_pieces_check(const struct tensor_grid *g, const struct tensor_box *boxes, uint32_t nboxes,
	const struct store_piece *pieces, uint64_t npieces)
{
	struct tensor_piece_iter it;
	uint64_t n = 0;
	int r;

	for (uint32_t i = 0; i < nboxes; i++)
		for (tensor_piece_first(&it, g, &boxes[i]); !it.done; tensor_piece_next(&it), n++) {
			if (n == npieces)
				return -EINVAL;
			r = row_piece_check(&pieces[n], tensor_box_items(&g->shape, &it.piece) * g->item_bytes);
			if (r < 0)
				return r;
		}
	return n == npieces ? 0 : -EINVAL;
}

static void row_piece_put(struct store_part_builder *b, const struct store_piece *p)
{
	base_buf_append(&b->pieces, p->ref.digest.bytes, sizeof p->ref.digest.bytes);
	base_buf_append(&b->pieces, p->xxh.bytes, sizeof p->xxh.bytes);
	base_buf_put32(&b->pieces, (uint32_t)(p->ref.pack == CHUNK_INLINE ? p->ref.raw_len : p->ref.stored_len));
	base_buf_put32(&b->pieces, (uint32_t)p->ref.raw_len);
	base_buf_put16(&b->pieces, p->ref.codec);
	base_buf_put16(&b->pieces, 0);
	base_buf_put32(&b->pieces, STORE_PIECE_NO_BASE);
}

static bool row_run_goes_on(const struct store_piece *last, const struct store_piece *p)
{
	struct pack_object_ref next = p->ref;

	if (last->ref.pack != p->ref.pack)
		return false;
	if (p->ref.pack == CHUNK_INLINE)
		return true;
	return chunk_extent_next(&last->ref, &next) && next.offset == p->ref.offset && next.checks == p->ref.checks;
}

/* Returns the number of extents. */
static uint32_t row_extents_put(struct store_part_builder *b, const struct store_piece *pieces, uint64_t npieces)
{
	uint32_t nextents = 0;
	uint64_t n;

	for (uint64_t i = 0; i < npieces; i += n) {
		bool inlined = pieces[i].ref.pack == CHUNK_INLINE;

		for (n = 1; i + n < npieces && n < UINT32_MAX && row_run_goes_on(&pieces[i + n - 1], &pieces[i + n]);
			n++)
			;
		base_buf_put32(&b->extents, pieces[i].ref.pack);
		base_buf_put32(&b->extents, (uint32_t)n);
		base_buf_put64(&b->extents, inlined ? b->inlined.len : pieces[i].ref.offset);
		base_buf_put64(&b->extents, inlined ? 0 : pieces[i].ref.checks);
		for (uint64_t j = i; inlined && j < i + n; j++)
			base_buf_append(&b->inlined, pieces[j].inline_bytes, pieces[j].ref.raw_len);
		nextents++;
	}
	return nextents;
}

static int row_put(struct store_part_builder *b, const struct tensor_shape *s, uint32_t tensor, bool whole,
	const struct tensor_box *boxes, uint32_t nboxes, const struct store_piece *pieces, uint64_t npieces)
{
	struct base_digest digest;
	int r = store_row_digest(pieces, npieces, &digest);
	uint32_t nextents;

	if (r < 0)
		return r;
	nextents = row_extents_put(b, pieces, npieces);
	for (uint64_t i = 0; i < npieces; i++)
		row_piece_put(b, &pieces[i]);
	for (uint32_t i = 0; !whole && i < nboxes; i++)
		for (uint32_t d = 0; d < s->ndim; d++) {
			base_buf_put64(&b->boxes, boxes[i].offset[d]);
			base_buf_put64(&b->boxes, boxes[i].size[d]);
		}
	base_buf_put32(&b->rows, tensor);
	base_buf_put32(&b->rows, whole ? CHUNK_ROW_WHOLE : 0);
	base_buf_put32(&b->rows, whole ? 0 : nboxes);
	base_buf_put32(&b->rows, nextents);
	base_buf_put64(&b->rows, npieces);
	base_buf_put64(&b->rows, 0); /* base objects, and zero */
	base_buf_append(&b->rows, digest.bytes, sizeof digest.bytes);
	b->nrows++;
	b->nextents += nextents;
	b->npieces += npieces;
	b->npairs += whole ? 0 : (uint64_t)nboxes * s->ndim;
	return b->rows.error || b->extents.error || b->pieces.error || b->boxes.error || b->inlined.error ? -ENOMEM : 0;
}

static int row_check(const struct store_part_builder *b, uint32_t tensor, const struct tensor_grid *g, bool whole,
	const struct tensor_box *boxes, uint32_t nboxes, const struct store_piece *pieces, uint64_t npieces,
	struct base_error *err)
{
	uint32_t len;
	const char *name = store_layout_name(b->layout, tensor, &len);
	int shown = store_layout_shown(name, len), r;

	for (uint32_t i = 0; !whole && i < nboxes; i++)
		if (!tensor_box_inside(&g->shape, &boxes[i]) || tensor_box_items(&g->shape, &boxes[i]) == 0)
			return base_error_set(err, -EINVAL, "tensor \"%.*s\": box %u is empty or not inside the tensor",
				shown, name, i);
	r = row_pieces_check(g, boxes, nboxes, pieces, npieces);
	if (r < 0)
		return base_error_set(err, r, "tensor \"%.*s\": its pieces are not those of its boxes", shown, name);
	/* Extents are at most as many as pieces. */
	if (CHUNK_ROW_BYTES + npieces * (CHUNK_PIECE_BYTES + CHUNK_EXTENT_BYTES + STORE_INLINE_MAX_BYTES) +
			(uint64_t)nboxes * g->shape.ndim * CHUNK_PAIR_BYTES >
		STORE_METADATA_MAX_BYTES - CHUNK_HEAD_BYTES)
		return base_error_set(err, -BASE_ELIMIT, "tensor \"%.*s\" has too many pieces or boxes for one writer",
			shown, name);
	return 0;
}

int store_part_add_row(struct store_part_builder *b, uint32_t tensor, const struct tensor_box *boxes, uint32_t nboxes,
	const struct store_piece *pieces, uint64_t npieces, struct base_error *err)
{
	struct tensor_grid g;
	struct tensor_box all;
	bool whole;
	int r;

	if (tensor >= b->layout->m.ntensors || (int64_t)tensor <= b->last_tensor || (boxes && nboxes == 0))
		return base_error_set(err, -EINVAL, "row of tensor %u after that of tensor %lld", tensor,
			(long long)b->last_tensor);
	store_layout_grid(b->layout, tensor, &g);
	whole = row_is_whole(&g.shape, boxes, nboxes);
	if (whole) {
		tensor_box_whole(&g.shape, &all);
		boxes = &all;
		nboxes = 1;
	}
	r = row_check(b, tensor, &g, whole, boxes, nboxes, pieces, npieces, err);
	if (r == 0 && b->nrows &&
		chunk_bytes(b) + CHUNK_ROW_BYTES + npieces * CHUNK_PIECE_BYTES > STORE_CHUNK_TARGET_BYTES)
		r = chunk_flush(b, err);
	if (r < 0)
		return r;
	if (b->nrows == 0)
		b->first_tensor = tensor;
	b->last_tensor = tensor;
	r = row_put(b, &g.shape, tensor, whole, boxes, nboxes, pieces, npieces);
	return r < 0 ? base_no_memory(err) : 0;
}

/* ---- the part ---- */

static struct proto_ref part_ref(const struct pack_object_ref *ref, uint32_t pack)
{
	return (struct proto_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .pack = pack, .codec = ref->codec,
		.kind = ref->kind};
}

static int part_table(struct store_part_builder *b, struct proto_part *part)
{
	uint32_t n = 0;

	b->table = calloc((size_t)b->nchunks + 1, sizeof *b->table);
	if (!b->table)
		return -ENOMEM;
	for (const struct part_chunk *c = b->first; c; c = c->next)
		b->table[n++] = (struct proto_chunk){
			c->first_tensor, c->last_tensor, c->nrows, part_ref(&c->ref, b->meta_pack)};
	part->chunks = b->table;
	part->nchunks = n;
	return 0;
}

int store_part_finish(struct store_part_builder *b, struct proto_part *part, struct pack_object_ref *ret_ref,
	struct base_error *err)
{
	base_cleanup_buf struct base_buf object = BASE_BUF_INIT;
	int r = chunk_flush(b, err);

	if (r < 0)
		return r;
	r = pack_extent_end(b->meta); /* the chunks' references are complete from here on */
	if (r == 0)
		r = part_table(b, part);
	if (r == 0)
		r = proto_part_encode(part, &object);
	if (r == 0 && object.len > STORE_METADATA_MAX_BYTES)
		r = -BASE_ELIMIT;
	if (r == 0)
		r = pack_append_encoded(b->meta, PACK_OBJECT_PART, object.data, object.len, ret_ref);
	if (r >= 0 && b->kept)
		part_kept_finish(b->kept, &object);
	return r < 0 ? base_error_set(err, r, "the part cannot be written: %s", base_error_name(r)) : 0;
}
