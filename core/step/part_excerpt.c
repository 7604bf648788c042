/* SPDX-License-Identifier: Apache-2.0
 *
 * part_excerpt: see the header. A chunk object is read in spans of whole blocks, whose checks are seeded by its digest,
 * so every byte that is looked at is the writer's; the fields are then checked by the same decoders as those of a
 * chunk that is read whole (chunk_fields.c).
 *
 *   head      the tables fill the object
 *   rows      all of them: this one's shares begin after those of the rows before it, and the sums are those of the
 *             head. A chunk of more than one row has at most STORE_CHUNK_TARGET_BYTES, so this is bounded
 *   boxes     of the row: inside the tensor, and together cut into as many pieces as the row has
 *   extents   of the row: in existing packs, and together of as many pieces. 24 bytes for up to 64 MiB of data
 *   pieces    those that are asked for: lengths by the grid, places by the arithmetic of extents. The first piece of
 *             every 64th extent is remembered; from there the extent of a piece is found, and from its start the piece
 *   inline    bytes of pieces that are asked for, against their digests
 *
 * A cursor is behind the last piece that was returned, so that ascending calls go on from there. Three spans are kept;
 * memory is at most SPAN_BLOCKS blocks for each, and 8 bytes for 64 extents and for each box. */
#include "core/step/part_excerpt.h"

#include <string.h>

#include "core/base/bisect.h"
#include "core/base/le.h"
#include "core/step/chunk_internal.h"
#include "core/step/store.h"

enum {
	SPAN_BLOCKS = 16,               /* 256 KiB read at once */
	ANCHOR_EXTENTS = 64,            /* extents from one anchor to the next */
};

/* Bytes [from, end) of the object. */
struct excerpt_span { uint8_t *bytes; size_t room; uint64_t from, end; };
/* head, rows and extents; pieces; boxes and inline */
enum excerpt_table { TABLE_EXTENTS, TABLE_PIECES, TABLE_BYTES, TABLES };

struct excerpt {
	struct store_part_excerpt row;  /* first: what callers see */
	struct store *store;
	const struct store_layout *layout;
	struct pack *pack;
	struct pack_object_ref ref;    /* of the chunk */
	uint32_t npacks, nextents;      /* nextents: of the row */
	struct chunk_tables t;
	struct chunk_start start;       /* of the row; inlined is not known */
	struct excerpt_span span[TABLES];
	uint64_t *anchors;              /* number of the first piece of extent 0, 64, 128... */
	uint8_t *inline_memory;         /* of the last call */
	/* the cursor */
	bool set;
	uint64_t next;                  /* piece that comes next */
	uint32_t extent;                /* extent to open when the one under way is used up */
	struct chunk_extent under_way;
	size_t box;
	struct tensor_piece_iter at;    /* piece `next`, if there is one */
};

static int excerpt_bad(const struct excerpt *e, int r, struct base_error *err)
{
	if (r == -ENOMEM)
		return base_no_memory(err);
	return base_error_set(err, r, "the row of tensor %u in the part of rank %u cannot be read: %s", e->row.tensor,
		e->row.rank, base_error_name(r));
}

/* Bytes [at, at + len) of the object, which has them. The read begins with their first block and goes on to `end`,
 * which is not before theirs, or as far as a span reaches. len is at most a few blocks. */
static int span_get(struct excerpt *e, enum excerpt_table table, uint64_t at, uint64_t len, uint64_t end,
	const uint8_t **ret_bytes, struct base_error *err)
{
	uint64_t first = at / BASE_BLOCK_BYTES, last = base_min(base_block_count(end), first + SPAN_BLOCKS);
	size_t room = (last - first) * BASE_BLOCK_BYTES;
	struct excerpt_span *s;
	int r;

	for (s = e->span; s < e->span + TABLES; s++)
		if (at >= s->from && at + len <= s->end) {
			*ret_bytes = s->bytes + (at - s->from);
			return 0;
		}
	s = &e->span[table];
	s->from = s->end = 0;
	if (room > s->room) {
		free(s->bytes);
		s->bytes = malloc(room);
		s->room = s->bytes ? room : 0;
	}
	if (!s->bytes)
		return excerpt_bad(e, -ENOMEM, err);
	r = pack_object_read_blocks(e->pack, &e->ref, first, last - first, s->bytes, err);
	if (r < 0)
		return r;
	s->from = first * BASE_BLOCK_BYTES;
	s->end = base_min(last * BASE_BLOCK_BYTES, e->ref.raw_len);
	*ret_bytes = s->bytes + (at - s->from);
	return 0;
}

/* ---- opening ---- */

static int excerpt_head(struct excerpt *e, const struct proto_chunk *from, struct base_error *err)
{
	const uint8_t *head;
	int r;

	if (e->ref.raw_len < CHUNK_HEAD_BYTES || e->ref.raw_len > STORE_METADATA_MAX_BYTES)
		return excerpt_bad(e, -BASE_EFORMAT, err);
	r = span_get(e, TABLE_EXTENTS, 0, CHUNK_HEAD_BYTES, CHUNK_HEAD_BYTES, &head, err);
	if (r < 0)
		return r;
	r = chunk_head_decode(head, e->ref.raw_len, &e->t);
	if (r == 0 && e->t.nrows != from->nrows)
		r = -BASE_EFORMAT;
	if (r == -BASE_EVERSION)
		return chunk_refused(err, r, head);
	return r < 0 ? excerpt_bad(e, r, err) : 0;
}

/* Checks that the rows are those that the part lists; finds the wanted one, and where its shares begin. */
static int excerpt_row(struct excerpt *e, const struct proto_chunk *from, struct chunk_row *ret_row,
	struct base_error *err)
{
	struct chunk_start at = {0};
	struct chunk_row row;
	int64_t last = -1;
	bool found = false;
	const uint8_t *bytes = NULL;
	int r;

	for (uint32_t i = 0; i < e->t.nrows; i++, last = row.tensor) {
		r = span_get(e, TABLE_EXTENTS, e->t.rows + (uint64_t)i * CHUNK_ROW_BYTES, CHUNK_ROW_BYTES, e->t.extents,
			&bytes, err);
		if (r < 0)
			return r;
		r = chunk_row_decode(bytes, e->layout, &e->t, &at, last, &row);
		if (r < 0 || (i == 0 && row.tensor != from->first_tensor))
			return excerpt_bad(e, -BASE_EFORMAT, err);
		if (row.tensor == e->row.tensor) {
			found = true;
			e->start = at;
			*ret_row = row;
		}
		at.extent += row.nextents;
		at.piece += row.npieces;
		at.pair += row.npairs;
	}
	if (last != from->last_tensor || at.extent != e->t.nextents || at.piece != e->t.npieces ||
		at.pair != e->t.npairs)
		return excerpt_bad(e, -BASE_EFORMAT, err);
	if (!found)
		return base_error_set(err, -ENODATA, "rank %u stored nothing of tensor %u", e->row.rank, e->row.tensor);
	return 0;
}

static int excerpt_box(struct excerpt *e, const struct chunk_row *row, uint32_t i, struct tensor_box *ret_box,
	struct base_error *err)
{
	const struct tensor_shape *s = &e->row.grid.shape;
	uint64_t at = e->t.boxes + (e->start.pair + (uint64_t)i * s->ndim) * CHUNK_PAIR_BYTES,
		 end = e->t.boxes + (e->start.pair + row->npairs) * CHUNK_PAIR_BYTES;
	const uint8_t *bytes = NULL;
	int r;

	if (row->nboxes == 0) {
		tensor_box_whole(s, ret_box);
		return 0;
	}
	r = span_get(e, TABLE_BYTES, at, (uint64_t)s->ndim * CHUNK_PAIR_BYTES, end, &bytes, err);
	if (r < 0)
		return r;
	chunk_box_decode(bytes, s->ndim, ret_box);
	return chunk_box_valid(s, ret_box, row->nboxes == 1) ? 0 : excerpt_bad(e, -BASE_EFORMAT, err);
}

static int excerpt_boxes(struct excerpt *e, const struct chunk_row *row, struct base_error *err)
{
	uint32_t nboxes = row->nboxes ? row->nboxes : 1;
	uint64_t *first = malloc(((size_t)nboxes + 1) * sizeof *first), left = row->npieces, n;
	struct tensor_box box;
	int r;

	e->row.first_piece = first;
	if (!first)
		return excerpt_bad(e, -ENOMEM, err);
	for (uint32_t i = 0; i < nboxes; i++) {
		r = excerpt_box(e, row, i, &box, err);
		if (r < 0)
			return r;
		if (tensor_boxes_add(&e->row.boxes, &box) < 0)
			return excerpt_bad(e, -ENOMEM, err);
		n = tensor_piece_count(&e->row.grid, &box);
		if (n > left)
			return excerpt_bad(e, -BASE_EFORMAT, err);
		first[i] = row->npieces - left;
		left -= n;
	}
	first[nboxes] = row->npieces;
	return left == 0 ? 0 : excerpt_bad(e, -BASE_EFORMAT, err);
}

/* The bytes of extents [i, i + n) of the row; `end`: how far to read on. n is at most ANCHOR_EXTENTS. */
static int excerpt_extent_bytes(struct excerpt *e, uint32_t i, uint32_t n, uint32_t end, const uint8_t **ret_bytes,
	struct base_error *err)
{
	uint64_t table = e->t.extents + (uint64_t)e->start.extent * CHUNK_EXTENT_BYTES;

	return span_get(e, TABLE_EXTENTS, table + (uint64_t)i * CHUNK_EXTENT_BYTES, (uint64_t)n * CHUNK_EXTENT_BYTES,
		table + (uint64_t)end * CHUNK_EXTENT_BYTES, ret_bytes, err);
}

/* Checks extents and takes their pieces from *left. */
static int runs_check(const struct excerpt *e, const uint8_t *bytes, uint32_t n, uint64_t *left, uint64_t *inline_at)
{
	struct chunk_extent extent;

	for (uint32_t i = 0; i < n; i++, bytes += CHUNK_EXTENT_BYTES) {
		if (chunk_extent_decode(bytes, e->npacks, &extent) < 0 || extent.left > *left)
			return -BASE_EFORMAT;
		*left -= extent.left;
		if (extent.ref.pack != CHUNK_INLINE)
			continue;
		if (extent.ref.offset < *inline_at || extent.ref.offset > e->t.ninline)
			return -BASE_EFORMAT;
		*inline_at = extent.ref.offset;
	}
	return 0;
}

static int excerpt_extents(struct excerpt *e, struct base_error *err)
{
	uint64_t left = e->row.npieces, inline_at = 0;
	const uint8_t *bytes = NULL;
	uint32_t n;
	int r;

	e->anchors = malloc(((size_t)e->nextents / ANCHOR_EXTENTS + 1) * sizeof *e->anchors);
	if (!e->anchors)
		return excerpt_bad(e, -ENOMEM, err);
	for (uint32_t i = 0; i < e->nextents; i += n) {
		n = (uint32_t)base_min(e->nextents - i, ANCHOR_EXTENTS);
		r = excerpt_extent_bytes(e, i, n, e->nextents, &bytes, err);
		if (r < 0)
			return r;
		e->anchors[i / ANCHOR_EXTENTS] = e->row.npieces - left;
		if (runs_check(e, bytes, n, &left, &inline_at) < 0)
			return excerpt_bad(e, -BASE_EFORMAT, err);
	}
	return left == 0 ? 0 : excerpt_bad(e, -BASE_EFORMAT, err);
}

static int excerpt_load(struct excerpt *e, const struct proto_chunk *from, struct base_error *err)
{
	struct chunk_row row = {0};
	int r = excerpt_head(e, from, err);

	if (r == 0)
		r = excerpt_row(e, from, &row, err);
	if (r < 0)
		return r;
	e->nextents = row.nextents;
	e->row.whole = row.nboxes == 0;
	e->row.npieces = row.npieces;
	e->row.digest = row.digest;
	store_layout_grid(e->layout, row.tensor, &e->row.grid);
	e->row.boxes.ndim = e->row.grid.shape.ndim;
	r = excerpt_boxes(e, &row, err);
	return r < 0 ? r : excerpt_extents(e, err);
}

bool store_part_excerpt_pays(const struct proto_part *part, uint32_t tensor)
{
	int64_t number = part_chunk_find(part, tensor);

	return number >= 0 && part->chunks[number].nrows == 1 &&
		part->chunks[number].ref.raw_len > STORE_CHUNK_TARGET_BYTES;
}

int store_part_excerpt_open(struct store *s, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs, uint32_t npacks, uint32_t tensor, struct store_part_excerpt **ret_e,
	struct base_error *err)
{
	int64_t number = part_chunk_find(part, tensor);
	struct excerpt *e;
	int r;

	if (!base_digest_equal(&part->layout, &l->digest))
		return base_error_set(err, -BASE_EFORMAT, "a part of another layout");
	if (number < 0)
		return base_error_set(err, -ENODATA, "rank %u stored nothing of tensor %u", part->rank, tensor);
	e = calloc(1, sizeof *e);
	if (!e)
		return base_no_memory(err);
	e->row.tensor = tensor;
	e->row.rank = part->rank;
	e->store = s;
	e->layout = l;
	e->npacks = npacks;
	e->ref = pack_object_ref_from(&part->chunks[number].ref);
	if (e->ref.pack >= npacks || e->ref.kind != PACK_OBJECT_PART_CHUNK)
		r = base_error_set(err, -BASE_EFORMAT, "a part names pack %u of %u", e->ref.pack, npacks);
	else
		r = store_pack_get(s, packs[e->ref.pack], &e->pack, err);
	if (r == 0)
		r = excerpt_load(e, &part->chunks[number], err);
	if (r < 0) {
		store_part_excerpt_close(&e->row);
		return r;
	}
	*ret_e = &e->row;
	return 0;
}

void store_part_excerpt_close(struct store_part_excerpt *row)
{
	struct excerpt *e = (struct excerpt *)row;

	if (!e)
		return;
	if (e->pack)
		store_pack_put(e->store, e->pack);
	tensor_boxes_release(&e->row.boxes);
	free((void *)(uintptr_t)e->row.first_piece);
	free(e->anchors);
	free(e->inline_memory);
	for (unsigned i = 0; i < TABLES; i++)
		free(e->span[i].bytes);
	free(e);
}

/* ---- pieces ---- */

/* The last of n ascending numbers, the first of which is 0, that is not above `number`. */
static size_t last_below(const uint64_t *numbers, size_t n, uint64_t number)
{
	return base_bisect(i, 1, n, numbers[i] <= number) - 1;
}

/* Puts the cursor's box and iterator on piece `next`, by arithmetic. */
static void cursor_place(struct excerpt *e)
{
	struct tensor_box box, piece;

	e->box = last_below(e->row.first_piece, e->row.boxes.n, e->next);
	tensor_boxes_get(&e->row.boxes, e->box, &box);
	tensor_piece_at(&e->row.grid, &box, e->next - e->row.first_piece[e->box], &piece);
	e->at = (struct tensor_piece_iter){.grid = &e->row.grid, .box = box, .piece = piece};
}

/* Extent `i` of the row, fresh. */
static int cursor_extent(struct excerpt *e, uint32_t i, struct chunk_extent *ret_extent, struct base_error *err)
{
	const uint8_t *bytes = NULL;
	uint32_t end = (uint32_t)base_min(e->nextents, base_align((uint64_t)i + 1, ANCHOR_EXTENTS));
	int r = excerpt_extent_bytes(e, i, 1, end, &bytes, err);

	if (r < 0)
		return r;
	return chunk_extent_decode(bytes, e->npacks, ret_extent) < 0 ? excerpt_bad(e, -BASE_EFORMAT, err) : 0;
}

/* Puts the cursor on the start of the extent that holds `piece`, unless it is in that extent and not behind the
 * piece. */
static int cursor_seek(struct excerpt *e, uint64_t piece, struct base_error *err)
{
	struct chunk_extent extent;
	uint64_t at;
	uint32_t i;
	int r;

	if (e->set && piece >= e->next && piece - e->next < base_max(e->under_way.left, 1))
		return 0;
	i = (uint32_t)last_below(e->anchors, ((size_t)e->nextents + ANCHOR_EXTENTS - 1) / ANCHOR_EXTENTS, piece);
	at = e->anchors[i];
	for (i *= ANCHOR_EXTENTS;; i++) {
		r = cursor_extent(e, i, &extent, err);
		if (r < 0)
			return r;
		if (piece - at < extent.left)
			break;
		at += extent.left;
		if (i + 1 >= e->nextents) /* they were enough when the row was opened: they were changed since */
			return excerpt_bad(e, -BASE_EDAMAGED, err);
	}
	e->next = at;
	e->extent = i + 1;
	e->under_way = extent;
	e->set = true;
	cursor_place(e);
	return 0;
}

static void cursor_step(struct excerpt *e)
{
	struct tensor_box box;

	if (++e->next == e->row.npieces)
		return;
	tensor_piece_next(&e->at);
	if (e->at.done) {
		tensor_boxes_get(&e->row.boxes, ++e->box, &box);
		tensor_piece_first(&e->at, &e->row.grid, &box);
	}
}

/* Takes the piece at the cursor, and moves on; `end`: the first piece that is not wanted. */
static int cursor_take(struct excerpt *e, uint64_t end, struct store_piece *ret_p, uint64_t *ret_inline,
	struct base_error *err)
{
	uint64_t raw_len = tensor_box_items(&e->row.grid.shape, &e->at.piece) * e->row.grid.item_bytes,
		 table = e->t.pieces + e->start.piece * CHUNK_PIECE_BYTES;
	const uint8_t *bytes = NULL;
	int r = 0;

	if (e->under_way.left == 0 && e->extent >= e->nextents)
		return excerpt_bad(e, -BASE_EDAMAGED, err);
	if (e->under_way.left == 0)
		r = cursor_extent(e, e->extent++, &e->under_way, err);
	if (r == 0)
		r = span_get(e, TABLE_PIECES, table + e->next * CHUNK_PIECE_BYTES, CHUNK_PIECE_BYTES,
			table + end * CHUNK_PIECE_BYTES, &bytes, err);
	if (r < 0)
		return r;
	r = chunk_piece_decode(bytes, raw_len, e->t.ninline, &e->under_way, ret_p, ret_inline);
	if (r < 0)
		return excerpt_bad(e, r, err);
	cursor_step(e);
	return 0;
}

/* The bytes of an inline piece, at `at` in the inline bytes, into `memory`. */
static int piece_inline(struct excerpt *e, uint64_t at, struct store_piece *p, uint8_t *memory, struct base_error *err)
{
	uint64_t from = e->t.inlined + at;
	struct base_digest digest;
	const uint8_t *bytes = NULL;
	int r;

	if (p->ref.raw_len > 0) {
		r = span_get(e, TABLE_BYTES, from, p->ref.raw_len, from + p->ref.raw_len, &bytes, err);
		if (r < 0)
			return r;
		memcpy(memory, bytes, p->ref.raw_len);
	}
	p->inline_bytes = memory;
	base_digest_of(memory, p->ref.raw_len, &digest);
	return base_digest_equal(&digest, &p->ref.digest) ? 0 : excerpt_bad(e, -BASE_EFORMAT, err);
}

static int pieces_take(struct excerpt *e, uint64_t first, uint64_t n, struct store_piece *ret_pieces,
	struct base_error *err)
{
	struct store_piece skipped;
	uint64_t at = 0, used = 0;
	int r = cursor_seek(e, first, err);

	while (r == 0 && e->next < first)
		r = cursor_take(e, first + n, &skipped, &at, err);
	for (uint64_t i = 0; i < n && r == 0; i++) {
		r = cursor_take(e, first + n, &ret_pieces[i], &at, err);
		if (r < 0 || ret_pieces[i].ref.pack != CHUNK_INLINE)
			continue;
		if (!e->inline_memory)
			e->inline_memory = malloc((n - i) * STORE_INLINE_MAX_BYTES);
		if (!e->inline_memory)
			return excerpt_bad(e, -ENOMEM, err);
		r = piece_inline(e, at, &ret_pieces[i], e->inline_memory + used, err);
		used += ret_pieces[i].ref.raw_len;
	}
	return r;
}

int store_part_excerpt_pieces(struct store_part_excerpt *row, uint64_t first, uint64_t n,
	struct store_piece *ret_pieces, struct base_error *err)
{
	struct excerpt *e = (struct excerpt *)row;
	int r;

	if (first > row->npieces || n > row->npieces - first)
		return base_error_set(err, -EINVAL, "tensor %u has no piece %llu in the part of rank %u", row->tensor,
			(unsigned long long)(first + n - 1), row->rank);
	if (n == 0)
		return 0;
	free(e->inline_memory);
	e->inline_memory = NULL;
	r = pieces_take(e, first, n, ret_pieces, err);
	if (r < 0)
		e->set = false;
	return r;
}
