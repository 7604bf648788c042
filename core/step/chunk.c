/* SPDX-License-Identifier: Apache-2.0
 *
 * chunk: decodes a chunk of a part (bytes: chunk_internal.h). Everything is checked once, here, for all rows: tables
 * against the object's length, rows against the layout, pieces against what the grid cuts their boxes into, places
 * against the arithmetic of extents, inline bytes and rows against their digests. The pieces of a row then need no more
 * checks than those of the packs. No count is believed before memory is taken: the tables have to be in the object.
 *
 * A decoded chunk owns the object, or a copy of it, and where each row's shares begin; it is read-only afterwards. */
#include "core/step/chunk_internal.h"

#include <string.h>

#include "core/base/bisect.h"
#include "core/base/le.h"

struct store_chunk {
	const struct store_layout *layout;
	uint32_t npacks;
	struct chunk_tables t;
	struct chunk_start *starts;     /* nrows + 1 */
	uint8_t *object;                /* in `memory`, or behind this */
	void *memory;                   /* malloc'ed; or NULL */
};

/* Walks the pieces of a row. */
struct chunk_cursor {
	const struct store_chunk *c;
	uint32_t extent, extent_end;          /* the next extent, and one past the row's last */
	uint64_t piece, inline_at;
	struct chunk_extent under_way;
};

/* Item i of a table. In a chunk of some rows (store_chunk_some) a table's beginning is outside of its bytes, maybe
 * before the object's: so numbers are added first. */
static const uint8_t *item(const struct store_chunk *c, uint64_t table, uint64_t i, size_t item_bytes)
{
	return c->object + (size_t)(table + i * item_bytes);
}

static const uint8_t *row_bytes(const struct store_chunk *c, uint32_t row)
{
	return item(c, c->t.rows, row, CHUNK_ROW_BYTES);
}

static int digest_of_digests(const uint8_t *first, size_t stride, uint64_t n, struct base_digest *ret_d)
{
	base_cleanup_free uint8_t *bytes = NULL;
	uint64_t len;

	if (base_mul_overflows(n, BASE_DIGEST_BYTES, &len) || len > SIZE_MAX / 2)
		return -ENOMEM;
	bytes = malloc(len + 9);
	if (!bytes)
		return -ENOMEM;
	bytes[0] = 0x02;
	base_put64(bytes + 1, n);
	for (uint64_t i = 0; i < n; i++)
		memcpy(bytes + 9 + i * BASE_DIGEST_BYTES, first + i * stride, BASE_DIGEST_BYTES);
	base_sha256(bytes, len + 9, ret_d);
	return 0;
}

int store_row_digest(const struct store_piece *pieces, uint64_t n, struct base_digest *ret_d)
{
	return digest_of_digests(n ? pieces->ref.digest.bytes : NULL, sizeof *pieces, n, ret_d);
}

void store_row_release(struct store_row *row)
{
	if (!row)
		return;
	free(row->memory);
	memset(row, 0, sizeof *row);
}

static void cursor_init(struct chunk_cursor *k, const struct store_chunk *c, uint32_t row)
{
	const struct chunk_start *s = &c->starts[row];

	*k = (struct chunk_cursor){.c = c,
		.extent = s->extent,
		.extent_end = s->extent + base_get32(row_bytes(c, row) + 12),
		.piece = s->piece,
		.inline_at = s->inlined};
}

/* The next piece, of raw_len bytes. */
static int cursor_next(struct chunk_cursor *k, uint64_t raw_len, struct store_piece *ret_p)
{
	const struct store_chunk *c = k->c;
	uint64_t at;
	int r = 0;

	if (k->under_way.left == 0) {
		if (k->extent == k->extent_end)
			return -BASE_EFORMAT;
		r = chunk_extent_decode(item(c, c->t.extents, k->extent, CHUNK_EXTENT_BYTES), c->npacks,
			&k->under_way);
		if (r < 0 || (k->under_way.ref.pack == CHUNK_INLINE && k->under_way.ref.offset != k->inline_at))
			return -BASE_EFORMAT;
		k->extent++;
	}
	r = chunk_piece_decode(item(c, c->t.pieces, k->piece, CHUNK_PIECE_BYTES), raw_len, c->t.ninline,
		&k->under_way, ret_p, &at);
	k->piece++;
	if (r == 0 && ret_p->ref.pack == CHUNK_INLINE) {
		ret_p->inline_bytes = item(c, c->t.inlined, at, 1);
		k->inline_at += raw_len;
	}
	return r;
}

/* ---- checks of one row ---- */

static void row_box(const struct store_chunk *c, uint32_t row, uint32_t i, const struct tensor_shape *s,
	struct tensor_box *ret_box)
{
	if (base_get32(row_bytes(c, row) + 4) & CHUNK_ROW_WHOLE)
		tensor_box_whole(s, ret_box);
	else
		chunk_box_decode(item(c, c->t.boxes, c->starts[row].pair + (uint64_t)i * s->ndim, CHUNK_PAIR_BYTES),
			s->ndim, ret_box);
}

static int row_piece_check(struct chunk_cursor *k, uint64_t raw_len)
{
	struct base_digest digest;
	struct store_piece p;

	int r = cursor_next(k, raw_len, &p);

	if (r < 0)
		return r;
	if (p.ref.pack != CHUNK_INLINE)
		return 0;
	base_digest_of(p.inline_bytes, raw_len, &digest);
	return base_digest_equal(&digest, &p.ref.digest) ? 0 : -BASE_EFORMAT;
}

/* The pieces of one box, at most `most` of them; *ret_n: how many. */
static int row_box_check(struct chunk_cursor *k, const struct tensor_grid *g, const struct tensor_box *box,
	uint64_t most, uint64_t *ret_n)
{
	struct tensor_piece_iter it;
	int r = 0;

	*ret_n = tensor_piece_count(g, box);
	if (*ret_n > most)
		return -BASE_EFORMAT;
	for (tensor_piece_first(&it, g, box); !it.done && r == 0; tensor_piece_next(&it))
		r = row_piece_check(k, tensor_box_items(&g->shape, &it.piece) * g->item_bytes);
	return r;
}

static int row_pieces_check(const struct store_chunk *c, uint32_t row, const struct chunk_row *fields,
	const struct tensor_grid *g, struct chunk_cursor *k)
{
	uint32_t nboxes = fields->nboxes ? fields->nboxes : 1;
	uint64_t left = fields->npieces, n;
	struct base_digest digest;
	struct tensor_box box;
	int r;

	for (uint32_t i = 0; i < nboxes; i++) {
		row_box(c, row, i, &g->shape, &box);
		if (fields->nboxes && !chunk_box_valid(&g->shape, &box, nboxes == 1))
			return -BASE_EFORMAT;
		r = row_box_check(k, g, &box, left, &n);
		if (r < 0)
			return r;
		left -= n;
	}
	if (left != 0 || k->under_way.left != 0 || k->extent != k->extent_end)
		return -BASE_EFORMAT;
	r = digest_of_digests(item(c, c->t.pieces, c->starts[row].piece, CHUNK_PIECE_BYTES), CHUNK_PIECE_BYTES,
		fields->npieces, &digest);
	if (r < 0)
		return r;
	return base_digest_equal(&digest, &fields->digest) ? 0 : -BASE_EFORMAT;
}

/* The grid of a tensor, which is often that of the one before. */
static void row_grid(const struct store_layout *l, uint32_t tensor, int64_t last, struct tensor_grid *g)
{
	const struct proto_layout_tensor *t = &l->m.tensors[tensor], *u = last >= 0 ? &l->m.tensors[last] : NULL;

	if (!u || t->dtype != u->dtype || t->ndim != u->ndim || (t->ndim && memcmp(l->m.dims + t->first_dim,
		l->m.dims + u->first_dim, t->ndim * sizeof *l->m.dims) != 0))
		store_layout_grid(l, tensor, g);
}

/* Checks a row, and sets where the next one's shares begin. g: the grid of the row before, and then of this one. */
static int row_check(struct store_chunk *c, uint32_t row, struct tensor_grid *g)
{
	int64_t last_tensor = row > 0 ? (int64_t)base_get32(row_bytes(c, row - 1)) : -1;
	const struct chunk_start *s = &c->starts[row];
	struct chunk_row fields;
	struct chunk_cursor k;
	int r = chunk_row_decode(row_bytes(c, row), c->layout, &c->t, s, last_tensor, &fields);

	if (r < 0)
		return r;
	row_grid(c->layout, fields.tensor, last_tensor, g);
	cursor_init(&k, c, row);
	r = row_pieces_check(c, row, &fields, g, &k);
	if (r < 0)
		return r;
	c->starts[row + 1] = (struct chunk_start){
		s->extent + fields.nextents, s->piece + fields.npieces, s->pair + fields.npairs, k.inline_at};
	return 0;
}

/* ---- the object ---- */

int chunk_refused(struct base_error *err, int r, const uint8_t head[static CHUNK_HEAD_BYTES])
{
	if (r != -BASE_EVERSION)
		return base_error_set(err, r, "rows of a part cannot be read: %s", base_error_name(r));
	if (base_get16(head + 8) > CHUNK_VERSION || base_get32(head + 12))
		return base_error_newer(err,
			"rows of a part were written by a newer vckpt: their chunk is of version %u and needs the "
			"features %#x; this vckpt knows version %u and no feature", base_get16(head + 8),
			base_get32(head + 12), CHUNK_VERSION);
	return base_error_newer(err,
		"rows of a part were written by a newer vckpt: a piece has a codec that this vckpt does not know");
}

static int chunk_check(struct store_chunk *c, size_t len)
{
	const struct chunk_start *end;
	struct tensor_grid g;
	int r = chunk_head_decode(c->object, len, &c->t);

	if (r < 0)
		return r;
	c->starts = calloc((size_t)c->t.nrows + 1, sizeof *c->starts);
	if (!c->starts)
		return -ENOMEM;
	for (uint32_t i = 0; i < c->t.nrows && r == 0; i++)
		r = row_check(c, i, &g);
	end = &c->starts[c->t.nrows];
	if (r == 0 &&
		(end->extent != c->t.nextents || end->piece != c->t.npieces || end->pair != c->t.npairs ||
			end->inlined != c->t.ninline))
		r = -BASE_EFORMAT;
	return r;
}

int store_chunk_take(void *object, size_t len, const struct store_layout *l, uint32_t npacks,
	struct store_chunk **ret_c, struct base_error *err)
{
	struct store_chunk *c;
	int r;

	if (len < CHUNK_HEAD_BYTES || len > STORE_METADATA_MAX_BYTES) {
		free(object);
		return base_error_set(err, -BASE_EFORMAT,
			"rows of a part cannot be read: a chunk of %zu bytes is too short or too long", len);
	}
	c = calloc(1, sizeof *c);
	if (!c) {
		free(object);
		return base_no_memory(err);
	}
	*c = (struct store_chunk){.layout = l, .npacks = npacks, .object = object, .memory = object};
	r = chunk_check(c, len);
	if (r < 0) {
		chunk_refused(err, r, object);
		store_chunk_free(c);
		return r;
	}
	*ret_c = c;
	return 0;
}

int store_chunk_decode(const void *object, size_t len, const struct store_layout *l, uint32_t npacks,
	struct store_chunk **ret_c, struct base_error *err)
{
	void *copy = malloc(len + 1);

	if (!copy)
		return base_no_memory(err);
	if (len)
		memcpy(copy, object, len);
	return store_chunk_take(copy, len, l, npacks, ret_c, err);
}

/* ---- some rows ---- */

/* The share that rows [first, end) have of a table, and the length of its items. */
struct chunk_share { uint64_t *table; uint64_t from, n; size_t item_bytes; };
enum { CHUNK_SHARES = 5 };

static size_t chunk_shares(const struct store_chunk *c, struct chunk_tables *t, uint32_t first, uint32_t end,
	struct chunk_share shares[static CHUNK_SHARES])
{
	const struct chunk_start *from = &c->starts[first], *to = &c->starts[end];
	size_t bytes = 0;

	shares[0] = (struct chunk_share){&t->rows, first, end - first, CHUNK_ROW_BYTES};
	shares[1] = (struct chunk_share){&t->extents, from->extent, to->extent - from->extent, CHUNK_EXTENT_BYTES};
	shares[2] = (struct chunk_share){&t->pieces, from->piece, to->piece - from->piece, CHUNK_PIECE_BYTES};
	shares[3] = (struct chunk_share){&t->boxes, from->pair, to->pair - from->pair, CHUNK_PAIR_BYTES};
	shares[4] = (struct chunk_share){&t->inlined, from->inlined, to->inlined - from->inlined, 1};
	for (unsigned i = 0; i < CHUNK_SHARES; i++)
		bytes += shares[i].n * shares[i].item_bytes;
	return bytes;
}

static size_t rows_memory(const struct store_chunk *c, uint32_t first, uint32_t end)
{
	struct chunk_share shares[CHUNK_SHARES];
	struct chunk_tables t;

	return sizeof *c + chunk_shares(c, &t, first, end, shares) + (end - first + 1) * sizeof *c->starts;
}

size_t store_chunk_memory(const struct store_chunk *c)
{
	return rows_memory(c, 0, c->t.nrows);
}

struct store_chunk *store_chunk_some(const struct store_chunk *c, uint32_t first, size_t most_bytes)
{
	struct chunk_share shares[CHUNK_SHARES];
	struct chunk_tables t = c->t;
	uint32_t end = first + 1;
	struct store_chunk *some;
	size_t bytes, at = 0;

	while (end < c->t.nrows && rows_memory(c, first, end + 1) <= most_bytes)
		end++;
	bytes = chunk_shares(c, &t, first, end, shares);
	some = malloc(sizeof *some + bytes);
	if (!some)
		return NULL;
	*some = (struct store_chunk){.layout = c->layout, .npacks = c->npacks, .object = (uint8_t *)(some + 1),
		.starts = malloc((end - first + 1) * sizeof *c->starts)};
	if (!some->starts) {
		free(some);
		return NULL;
	}
	memcpy(some->starts, c->starts + first, (end - first + 1) * sizeof *c->starts);
	for (unsigned i = 0; i < CHUNK_SHARES; i++) {
		const struct chunk_share *s = &shares[i];

		memcpy(some->object + at, item(c, *s->table, s->from, s->item_bytes), s->n * s->item_bytes);
		*s->table = at - (s == shares ? 0 : s->from * s->item_bytes); /* rows alone are counted from 0 */
		at += s->n * s->item_bytes;
	}
	t.nrows = end - first;
	some->t = t;
	return some;
}

void store_chunk_free(struct store_chunk *c)
{
	if (!c)
		return;
	free(c->starts);
	free(c->memory);
	free(c);
}

uint32_t store_chunk_rows(const struct store_chunk *c)
{
	return c->t.nrows;
}

int store_chunk_row(const struct store_chunk *c, uint32_t i, struct store_row *ret_row)
{
	const uint8_t *bytes = row_bytes(c, i);
	uint32_t nboxes = base_get32(bytes + 8);
	uint64_t npieces = base_get64(bytes + 16), inlined = c->starts[i + 1].inlined - c->starts[i].inlined;
	struct tensor_shape shape;
	struct chunk_cursor k;
	uint8_t *memory;

	memset(ret_row, 0, sizeof *ret_row);
	ret_row->tensor = base_get32(bytes);
	ret_row->whole = nboxes == 0;
	ret_row->nboxes = nboxes ? nboxes : 1;
	ret_row->npieces = npieces;
	memcpy(ret_row->digest.bytes, bytes + 32, sizeof ret_row->digest.bytes);
	/* Counts are bounded by the object's length: no product here overflows. */
	memory = malloc(npieces * sizeof *ret_row->pieces + ret_row->nboxes * sizeof *ret_row->boxes + inlined);
	if (!memory)
		return -ENOMEM;
	ret_row->memory = memory;
	ret_row->pieces = (struct store_piece *)memory;
	ret_row->boxes = (struct tensor_box *)(memory + npieces * sizeof *ret_row->pieces);
	memory = (uint8_t *)(ret_row->boxes + ret_row->nboxes);
	memcpy(memory, item(c, c->t.inlined, c->starts[i].inlined, 1), inlined);
	store_layout_shape(c->layout, ret_row->tensor, &shape);
	for (uint32_t n = 0; n < ret_row->nboxes; n++)
		row_box(c, i, n, &shape, &ret_row->boxes[n]);
	cursor_init(&k, c, i);
	for (uint64_t n = 0; n < npieces; n++) {
		struct store_piece *p = &ret_row->pieces[n];

		cursor_next(&k, base_get32(item(c, c->t.pieces, k.piece, CHUNK_PIECE_BYTES) + 52), p);
		if (p->inline_bytes) /* all was checked */
			p->inline_bytes = memory +
				(p->inline_bytes - item(c, c->t.inlined, c->starts[i].inlined, 1));
	}
	return 0;
}

uint32_t store_chunk_tensor(const struct store_chunk *c, uint32_t i)
{
	return base_get32(row_bytes(c, i));
}

uint32_t store_chunk_after(const struct store_chunk *c, uint32_t tensor)
{
	return base_bisect(k, 0, c->t.nrows, store_chunk_tensor(c, k) < tensor);
}

void store_chunk_row_digest(const struct store_chunk *c, uint32_t i, bool *ret_whole, struct base_digest *ret_d)
{
	*ret_whole = base_get32(row_bytes(c, i) + 4) & CHUNK_ROW_WHOLE;
	memcpy(ret_d->bytes, row_bytes(c, i) + 32, sizeof ret_d->bytes);
}

void store_chunk_face(const struct store_chunk *c, uint32_t i, struct store_row_face *ret_f)
{
	const struct chunk_start *from = &c->starts[i];

	*ret_f = (struct store_row_face){.tensor = store_chunk_tensor(c, i),
		.npieces = base_get64(row_bytes(c, i) + 16),
		.boxes = item(c, c->t.boxes, from->pair, CHUNK_PAIR_BYTES),
		.boxes_len = (size_t)(from[1].pair - from->pair) * CHUNK_PAIR_BYTES};
	store_chunk_row_digest(c, i, &ret_f->whole, &ret_f->digest);
}

int64_t store_chunk_find(const struct store_chunk *c, uint32_t tensor)
{
	uint32_t i = store_chunk_after(c, tensor);

	return i < c->t.nrows && store_chunk_tensor(c, i) == tensor ? (int64_t)i : -ENOENT;
}
