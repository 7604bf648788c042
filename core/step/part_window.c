/* SPDX-License-Identifier: Apache-2.0
 *
 * part_window: see the header. A chunk object is read in spans of whole blocks, whose checks are seeded by its digest,
 * so every byte that is looked at is the writer's; the fields are then checked by the same decoders as those of a
 * chunk that is read whole (chunk_fields.c).
 *
 *   head      the tables fill the object
 *   rows      all of them: the rows before tell where this one's shares begin, their sums are those of the head. More
 *             than one row means a chunk of at most STORE_CHUNK_TARGET_BYTES, so this is bounded
 *   boxes     of the row: inside the tensor, and together cut into as many pieces as the row has
 *   extents      of the row: packs that there are, and together as many pieces. 24 bytes for up to 64 MiB of data
 *   pieces    as asked for: lengths that the grid says, places by the arithmetic of extents. Every 64th extent's first
 *             piece is remembered; from there the extent of a piece is found, and from the extent's start the piece
 *   inline    bytes of pieces that are asked for, against their digests
 *
 * A cursor stands behind the last piece that was handed out, so that ascending calls go on from there. Three spans are
 * kept; memory is at most SPAN_BLOCKS blocks for each, and 8 bytes for 64 extents and for each box.
 *
 * All of it is for the load; no product code calls it yet. */
#include "core/step/part_window.h"

#include <string.h>

#include "core/base/bisect.h"
#include "core/base/le.h"
#include "core/step/chunk_internal.h"
#include "core/step/store.h"

enum {
	SPAN_BLOCKS = 16,               /* 256 KiB read at once */
	MARK_EXTENTS = 64,                 /* extents from one mark to the next */
};

/* Bytes [from, end) of the object. */
struct window_span { uint8_t *bytes; size_t room; uint64_t from, end; };
/* head, rows and extents; pieces; boxes and inline */
enum window_table { TABLE_EXTENTS, TABLE_PIECES, TABLE_BYTES, TABLES };

struct window {
	struct store_part_window row;   /* first: what callers see */
	struct store *store;
	const struct store_layout *layout;
	struct store_pack *pack;
	struct store_object_ref ref;    /* of the chunk */
	uint32_t npacks, nextents;         /* nextents: of the row */
	struct chunk_tables t;
	struct chunk_start start;       /* of the row; inlined is not known */
	struct window_span span[TABLES];
	uint64_t *marks;                /* number of the first piece of extent 0, 64, 128... */
	uint8_t *inline_memory;         /* of the last call */
	/* the cursor */
	bool set;
	uint64_t next;                  /* piece that comes next */
	uint32_t extent;                   /* extent to open when the one under way is used up */
	struct chunk_extent under_way;
	size_t box;
	struct tensor_piece_iter at;    /* piece `next`, if there is one */
};

static int window_bad(const struct window *w, int r, struct base_error *err)
{
	if (r == -ENOMEM)
		return base_no_memory(err);
	return base_error_set(err, r, "the row of tensor %u in the part of rank %u cannot be read: %s", w->row.tensor,
		w->row.rank, base_error_name(r));
}

/* Bytes [at, at + len) of the object, which has them; what is read begins with their first block and goes up to `end`,
 * not before theirs, or as far as a span does. len is at most a few blocks. */
static int span_get(struct window *w, enum window_table table, uint64_t at, uint64_t len, uint64_t end,
	const uint8_t **ret_bytes, struct base_error *err)
{
	uint64_t first = at / BASE_BLOCK_BYTES, last = base_min(base_block_count(end), first + SPAN_BLOCKS);
	size_t room = (last - first) * BASE_BLOCK_BYTES;
	struct window_span *s;
	int r;

	for (s = w->span; s < w->span + TABLES; s++)
		if (at >= s->from && at + len <= s->end) {
			*ret_bytes = s->bytes + (at - s->from);
			return 0;
		}
	s = &w->span[table];
	s->from = s->end = 0;
	if (room > s->room) {
		free(s->bytes);
		s->bytes = malloc(room);
		s->room = s->bytes ? room : 0;
	}
	if (!s->bytes)
		return window_bad(w, -ENOMEM, err);
	r = store_object_read_blocks(w->pack, &w->ref, first, last - first, s->bytes, err);
	if (r < 0)
		return r;
	s->from = first * BASE_BLOCK_BYTES;
	s->end = base_min(last * BASE_BLOCK_BYTES, w->ref.raw_len);
	*ret_bytes = s->bytes + (at - s->from);
	return 0;
}

/* ---- opening ---- */

static int window_head(struct window *w, const struct proto_chunk *from, struct base_error *err)
{
	const uint8_t *head;
	int r;

	if (w->ref.raw_len < CHUNK_HEAD_BYTES || w->ref.raw_len > STORE_METADATA_MAX_BYTES)
		return window_bad(w, -BASE_EFORMAT, err);
	r = span_get(w, TABLE_EXTENTS, 0, CHUNK_HEAD_BYTES, CHUNK_HEAD_BYTES, &head, err);
	if (r < 0)
		return r;
	r = chunk_head_decode(head, w->ref.raw_len, &w->t);
	if (r == 0 && w->t.nrows != from->nrows)
		r = -BASE_EFORMAT;
	if (r == -BASE_EVERSION)
		return chunk_refused(err, r, head);
	return r < 0 ? window_bad(w, r, err) : 0;
}

/* Checks all rows, those that the part promises; finds the one wanted and where its shares begin. */
static int window_row(struct window *w, const struct proto_chunk *from, struct chunk_row *ret_row,
	struct base_error *err)
{
	struct chunk_start at = {0};
	struct chunk_row row;
	int64_t last = -1;
	bool found = false;
	const uint8_t *bytes = NULL;
	int r;

	for (uint32_t i = 0; i < w->t.nrows; i++, last = row.tensor) {
		r = span_get(w, TABLE_EXTENTS, w->t.rows + (uint64_t)i * CHUNK_ROW_BYTES, CHUNK_ROW_BYTES, w->t.extents,
			&bytes, err);
		if (r < 0)
			return r;
		r = chunk_row_decode(bytes, w->layout, &w->t, &at, last, &row);
		if (r < 0 || (i == 0 && row.tensor != from->first_tensor))
			return window_bad(w, -BASE_EFORMAT, err);
		if (row.tensor == w->row.tensor) {
			found = true;
			w->start = at;
			*ret_row = row;
		}
		at.extent += row.nextents;
		at.piece += row.npieces;
		at.pair += row.npairs;
	}
	if (last != from->last_tensor || at.extent != w->t.nextents || at.piece != w->t.npieces ||
		at.pair != w->t.npairs)
		return window_bad(w, -BASE_EFORMAT, err);
	if (!found)
		return base_error_set(err, -ENOENT, "rank %u stored nothing of tensor %u", w->row.rank, w->row.tensor);
	return 0;
}

static int window_box(struct window *w, const struct chunk_row *row, uint32_t i, struct tensor_box *ret_box,
	struct base_error *err)
{
	const struct tensor_shape *s = &w->row.grid.shape;
	uint64_t at = w->t.boxes + (w->start.pair + (uint64_t)i * s->ndim) * CHUNK_PAIR_BYTES,
		 end = w->t.boxes + (w->start.pair + row->npairs) * CHUNK_PAIR_BYTES;
	const uint8_t *bytes = NULL;
	int r;

	if (row->nboxes == 0) {
		tensor_box_whole(s, ret_box);
		return 0;
	}
	r = span_get(w, TABLE_BYTES, at, (uint64_t)s->ndim * CHUNK_PAIR_BYTES, end, &bytes, err);
	if (r < 0)
		return r;
	chunk_box_decode(bytes, s->ndim, ret_box);
	return chunk_box_valid(s, ret_box, row->nboxes == 1) ? 0 : window_bad(w, -BASE_EFORMAT, err);
}

static int window_boxes(struct window *w, const struct chunk_row *row, struct base_error *err)
{
	uint32_t nboxes = row->nboxes ? row->nboxes : 1;
	uint64_t *first = malloc(((size_t)nboxes + 1) * sizeof *first), left = row->npieces, n;
	struct tensor_box box;
	int r;

	w->row.first_piece = first;
	if (!first)
		return window_bad(w, -ENOMEM, err);
	for (uint32_t i = 0; i < nboxes; i++) {
		r = window_box(w, row, i, &box, err);
		if (r < 0)
			return r;
		if (tensor_boxes_add(&w->row.boxes, &box) < 0)
			return window_bad(w, -ENOMEM, err);
		n = tensor_piece_count(&w->row.grid, &box);
		if (n > left)
			return window_bad(w, -BASE_EFORMAT, err);
		first[i] = row->npieces - left;
		left -= n;
	}
	first[nboxes] = row->npieces;
	return left == 0 ? 0 : window_bad(w, -BASE_EFORMAT, err);
}

/* The bytes of extents [i, i + n) of the row; `end`: how far to read on. n is at most MARK_EXTENTS. */
static int window_extent_bytes(struct window *w, uint32_t i, uint32_t n, uint32_t end, const uint8_t **ret_bytes,
	struct base_error *err)
{
	uint64_t table = w->t.extents + (uint64_t)w->start.extent * CHUNK_EXTENT_BYTES;

	return span_get(w, TABLE_EXTENTS, table + (uint64_t)i * CHUNK_EXTENT_BYTES, (uint64_t)n * CHUNK_EXTENT_BYTES,
		table + (uint64_t)end * CHUNK_EXTENT_BYTES, ret_bytes, err);
}

/* Checks extents and takes their pieces from *left. */
static int runs_check(const struct window *w, const uint8_t *bytes, uint32_t n, uint64_t *left, uint64_t *inline_at)
{
	struct chunk_extent extent;

	for (uint32_t i = 0; i < n; i++, bytes += CHUNK_EXTENT_BYTES) {
		if (chunk_extent_decode(bytes, w->npacks, &extent) < 0 || extent.left > *left)
			return -BASE_EFORMAT;
		*left -= extent.left;
		if (extent.ref.pack != CHUNK_INLINE)
			continue;
		if (extent.ref.offset < *inline_at || extent.ref.offset > w->t.ninline)
			return -BASE_EFORMAT;
		*inline_at = extent.ref.offset;
	}
	return 0;
}

static int window_extents(struct window *w, struct base_error *err)
{
	uint64_t left = w->row.npieces, inline_at = 0;
	const uint8_t *bytes = NULL;
	uint32_t n;
	int r;

	w->marks = malloc(((size_t)w->nextents / MARK_EXTENTS + 1) * sizeof *w->marks);
	if (!w->marks)
		return window_bad(w, -ENOMEM, err);
	for (uint32_t i = 0; i < w->nextents; i += n) {
		n = (uint32_t)base_min(w->nextents - i, MARK_EXTENTS);
		r = window_extent_bytes(w, i, n, w->nextents, &bytes, err);
		if (r < 0)
			return r;
		w->marks[i / MARK_EXTENTS] = w->row.npieces - left;
		if (runs_check(w, bytes, n, &left, &inline_at) < 0)
			return window_bad(w, -BASE_EFORMAT, err);
	}
	return left == 0 ? 0 : window_bad(w, -BASE_EFORMAT, err);
}

static int window_load(struct window *w, const struct proto_chunk *from, struct base_error *err)
{
	struct chunk_row row = {0};
	int r = window_head(w, from, err);

	if (r == 0)
		r = window_row(w, from, &row, err);
	if (r < 0)
		return r;
	w->nextents = row.nextents;
	w->row.whole = row.nboxes == 0;
	w->row.npieces = row.npieces;
	w->row.digest = row.digest;
	store_layout_grid(w->layout, row.tensor, &w->row.grid);
	w->row.boxes.ndim = w->row.grid.shape.ndim;
	r = window_boxes(w, &row, err);
	return r < 0 ? r : window_extents(w, err);
}

int store_part_window_open(struct store *s, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs, uint32_t npacks, uint32_t tensor, struct store_part_window **ret_w,
	struct base_error *err)
{
	int64_t number = part_chunk_find(part, tensor);
	struct window *w;
	int r;

	if (!base_digest_equal(&part->layout, &l->digest))
		return base_error_set(err, -BASE_EFORMAT, "a part of another layout");
	if (number < 0)
		return base_error_set(err, -ENOENT, "rank %u stored nothing of tensor %u", part->rank, tensor);
	w = calloc(1, sizeof *w);
	if (!w)
		return base_no_memory(err);
	w->row.tensor = tensor;
	w->row.rank = part->rank;
	w->store = s;
	w->layout = l;
	w->npacks = npacks;
	w->ref = store_object_ref_from(&part->chunks[number].ref);
	if (w->ref.pack >= npacks || w->ref.kind != STORE_OBJECT_PART_CHUNK)
		r = base_error_set(err, -BASE_EFORMAT, "a part names pack %u of %u", w->ref.pack, npacks);
	else
		r = store_pack_get(s, packs[w->ref.pack], &w->pack, err);
	if (r == 0)
		r = window_load(w, &part->chunks[number], err);
	if (r < 0) {
		store_part_window_close(&w->row);
		return r;
	}
	*ret_w = &w->row;
	return 0;
}

void store_part_window_close(struct store_part_window *row)
{
	struct window *w = (struct window *)row;

	if (!w)
		return;
	if (w->pack)
		store_pack_put(w->store, w->pack);
	tensor_boxes_release(&w->row.boxes);
	free((void *)(uintptr_t)w->row.first_piece);
	free(w->marks);
	free(w->inline_memory);
	for (unsigned i = 0; i < TABLES; i++)
		free(w->span[i].bytes);
	free(w);
}

/* ---- pieces ---- */

/* The last of n ascending numbers, the first of which is 0, that is not above `number`. */
static size_t last_below(const uint64_t *numbers, size_t n, uint64_t number)
{
	return base_bisect(i, 1, n, numbers[i] <= number) - 1;
}

/* Puts the cursor's box and iterator on piece `next`, by arithmetic. */
static void cursor_place(struct window *w)
{
	struct tensor_box box, piece;

	w->box = last_below(w->row.first_piece, w->row.boxes.n, w->next);
	tensor_boxes_get(&w->row.boxes, w->box, &box);
	tensor_piece_at(&w->row.grid, &box, w->next - w->row.first_piece[w->box], &piece);
	w->at = (struct tensor_piece_iter){.grid = &w->row.grid, .box = box, .piece = piece};
}

/* Extent `i` of the row, fresh. */
static int cursor_extent(struct window *w, uint32_t i, struct chunk_extent *ret_extent, struct base_error *err)
{
	const uint8_t *bytes = NULL;
	uint32_t end = (uint32_t)base_min(w->nextents, base_align((uint64_t)i + 1, MARK_EXTENTS));
	int r = window_extent_bytes(w, i, 1, end, &bytes, err);

	if (r < 0)
		return r;
	return chunk_extent_decode(bytes, w->npacks, ret_extent) < 0 ? window_bad(w, -BASE_EFORMAT, err) : 0;
}

/* Puts the cursor on the start of the extent that holds `piece`, unless the one under way does and stands before it. */
static int cursor_seek(struct window *w, uint64_t piece, struct base_error *err)
{
	struct chunk_extent extent;
	uint64_t at;
	uint32_t i;
	int r;

	if (w->set && piece >= w->next && piece - w->next < base_max(w->under_way.left, 1))
		return 0;
	i = (uint32_t)last_below(w->marks, ((size_t)w->nextents + MARK_EXTENTS - 1) / MARK_EXTENTS, piece);
	at = w->marks[i];
	for (i *= MARK_EXTENTS;; i++) {
		r = cursor_extent(w, i, &extent, err);
		if (r < 0)
			return r;
		if (piece - at < extent.left)
			break;
		at += extent.left;
		if (i + 1 >= w->nextents) /* they were enough when the row was opened: somebody changed them */
			return window_bad(w, -BASE_EDAMAGED, err);
	}
	w->next = at;
	w->extent = i + 1;
	w->under_way = extent;
	w->set = true;
	cursor_place(w);
	return 0;
}

static void cursor_step(struct window *w)
{
	struct tensor_box box;

	if (++w->next == w->row.npieces)
		return;
	tensor_piece_next(&w->at);
	if (w->at.done) {
		tensor_boxes_get(&w->row.boxes, ++w->box, &box);
		tensor_piece_first(&w->at, &w->row.grid, &box);
	}
}

/* The piece at the cursor, and on; `end`: up to which pieces are wanted. */
static int cursor_take(struct window *w, uint64_t end, struct store_piece *ret_p, uint64_t *ret_inline,
	struct base_error *err)
{
	uint64_t raw_len = tensor_box_items(&w->row.grid.shape, &w->at.piece) * w->row.grid.item_bytes,
		 table = w->t.pieces + w->start.piece * CHUNK_PIECE_BYTES;
	const uint8_t *bytes = NULL;
	int r = 0;

	if (w->under_way.left == 0 && w->extent >= w->nextents)
		return window_bad(w, -BASE_EDAMAGED, err);
	if (w->under_way.left == 0)
		r = cursor_extent(w, w->extent++, &w->under_way, err);
	if (r == 0)
		r = span_get(w, TABLE_PIECES, table + w->next * CHUNK_PIECE_BYTES, CHUNK_PIECE_BYTES,
			table + end * CHUNK_PIECE_BYTES, &bytes, err);
	if (r < 0)
		return r;
	r = chunk_piece_decode(bytes, raw_len, w->t.ninline, &w->under_way, ret_p, ret_inline);
	if (r < 0)
		return window_bad(w, r, err);
	cursor_step(w);
	return 0;
}

/* The bytes of an inline piece, at `at` in the inline bytes, into `memory`. */
static int piece_inline(struct window *w, uint64_t at, struct store_piece *p, uint8_t *memory, struct base_error *err)
{
	uint64_t from = w->t.inlined + at;
	struct base_digest digest;
	const uint8_t *bytes = NULL;
	int r;

	if (p->ref.raw_len > 0) {
		r = span_get(w, TABLE_BYTES, from, p->ref.raw_len, from + p->ref.raw_len, &bytes, err);
		if (r < 0)
			return r;
		memcpy(memory, bytes, p->ref.raw_len);
	}
	p->inline_bytes = memory;
	base_digest_of(memory, p->ref.raw_len, &digest);
	return base_digest_equal(&digest, &p->ref.digest) ? 0 : window_bad(w, -BASE_EFORMAT, err);
}

static int pieces_take(struct window *w, uint64_t first, uint64_t n, struct store_piece *ret_pieces,
	struct base_error *err)
{
	struct store_piece skipped;
	uint64_t at = 0, used = 0;
	int r = cursor_seek(w, first, err);

	while (r == 0 && w->next < first)
		r = cursor_take(w, first + n, &skipped, &at, err);
	for (uint64_t i = 0; i < n && r == 0; i++) {
		r = cursor_take(w, first + n, &ret_pieces[i], &at, err);
		if (r < 0 || ret_pieces[i].ref.pack != CHUNK_INLINE)
			continue;
		if (!w->inline_memory)
			w->inline_memory = malloc((n - i) * STORE_INLINE_MAX_BYTES);
		if (!w->inline_memory)
			return window_bad(w, -ENOMEM, err);
		r = piece_inline(w, at, &ret_pieces[i], w->inline_memory + used, err);
		used += ret_pieces[i].ref.raw_len;
	}
	return r;
}

int store_part_window_pieces(struct store_part_window *row, uint64_t first, uint64_t n,
	struct store_piece *ret_pieces, struct base_error *err)
{
	struct window *w = (struct window *)row;
	int r;

	if (first > row->npieces || n > row->npieces - first)
		return base_error_set(err, -EINVAL, "tensor %u has no piece %llu in the part of rank %u", row->tensor,
			(unsigned long long)(first + n - 1), row->rank);
	if (n == 0)
		return 0;
	free(w->inline_memory);
	w->inline_memory = NULL;
	r = pieces_take(w, first, n, ret_pieces, err);
	if (r < 0)
		w->set = false;
	return r;
}
