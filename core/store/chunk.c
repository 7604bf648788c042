/* SPDX-License-Identifier: Apache-2.0
 *
 * chunk: decodes a chunk of a part (bytes: chunk_internal.h). Everything is checked once, here, for all rows: tables
 * against the object's length, rows against the layout, pieces against what the grid cuts their boxes into, places
 * against the arithmetic of runs, inline bytes and rows against their digests. What a row then hands out needs no more
 * checking than the packs themselves ask for. Nothing is allocated on the word of a count: the tables have to be there.
 *
 * A decoded chunk owns a copy of the object and where each row's shares begin; it is read-only afterwards. */
#include "core/store/chunk_internal.h"

#include <string.h>

#include "core/base/le.h"
#include "core/store/pack_internal.h"

struct chunk_start { uint32_t run; uint64_t piece, pair, inlined; };

struct store_chunk {
	const struct store_layout *layout;
	uint32_t npacks;
	uint32_t nrows, nruns;
	uint64_t npieces, npairs, ninline;
	const uint8_t *rows, *runs, *pieces, *boxes, *inlined;
	struct chunk_start *starts;     /* nrows + 1 */
	uint8_t object[];
};

/* Walks the pieces of a row. */
struct chunk_cursor {
	const struct store_chunk *c;
	uint32_t run, run_end;          /* the next run, and one past the row's last */
	uint32_t left;                  /* pieces left in the run under way */
	uint64_t piece, inline_at;
	struct store_object_ref ref;    /* of the piece before, in the same run */
};

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

void store_row_release(struct store_row *r)
{
	if (!r)
		return;
	free(r->memory);
	memset(r, 0, sizeof *r);
}

static void cursor_init(struct chunk_cursor *k, const struct store_chunk *c, uint32_t row)
{
	const struct chunk_start *s = &c->starts[row];

	*k = (struct chunk_cursor){.c = c,
		.run = s->run,
		.run_end = s->run + base_get32(c->rows + (size_t)row * CHUNK_ROW_BYTES + 12),
		.piece = s->piece,
		.inline_at = s->inlined};
}

/* Opens the next run: the place of its first piece. */
static int cursor_run(struct chunk_cursor *k, struct store_object_ref *ref)
{
	const uint8_t *run = k->c->runs + (size_t)k->run * CHUNK_RUN_BYTES;

	if (k->run == k->run_end)
		return -BASE_EFORMAT;
	k->run++;
	ref->pack = base_get32(run);
	k->left = base_get32(run + 4);
	ref->offset = base_get64(run + 8);
	ref->checks = base_get64(run + 16);
	if (k->left == 0)
		return -BASE_EFORMAT;
	if (ref->pack == CHUNK_INLINE)
		return ref->offset == k->inline_at && ref->checks == 0 ? 0 : -BASE_EFORMAT;
	return ref->pack < k->c->npacks ? 0 : -BASE_EFORMAT;
}

static int cursor_inline(struct chunk_cursor *k, struct store_piece *p)
{
	if (p->ref.raw_len > STORE_INLINE_MAX_BYTES || p->ref.stored_len != p->ref.raw_len ||
		p->ref.codec != STORE_CODEC_RAW)
		return -BASE_EFORMAT;
	if (p->ref.raw_len > k->c->ninline - k->inline_at)
		return -BASE_EFORMAT;
	p->inline_bytes = k->c->inlined + k->inline_at;
	p->ref.offset = p->ref.checks = 0;
	k->inline_at += p->ref.raw_len;
	return 0;
}

static int cursor_next(struct chunk_cursor *k, struct store_piece *ret_p)
{
	const uint8_t *piece = k->c->pieces + k->piece * CHUNK_PIECE_BYTES;
	struct store_object_ref *ref = &ret_p->ref;
	bool first = k->left == 0;
	int r = 0;

	memset(ret_p, 0, sizeof *ret_p);
	memcpy(ref->digest.bytes, piece, sizeof ref->digest.bytes);
	memcpy(ret_p->xxh.bytes, piece + 32, sizeof ret_p->xxh.bytes);
	ref->stored_len = base_get32(piece + 48);
	ref->raw_len = base_get32(piece + 52);
	ref->codec = base_get16(piece + 56);
	ref->kind = STORE_OBJECT_PIECE;
	ret_p->base = base_get32(piece + 60);
	if (base_get16(piece + 58) != 0 || ret_p->base != STORE_PIECE_NO_BASE)
		return -BASE_EFORMAT;
	if (first)
		r = cursor_run(k, ref);
	else
		ref->pack = k->ref.pack;
	if (r < 0)
		return r;
	if (ref->pack == CHUNK_INLINE)
		r = cursor_inline(k, ret_p);
	else if (ref->raw_len <= STORE_INLINE_MAX_BYTES || (!first && !chunk_run_next(&k->ref, ref)) ||
		store_object_ref_check(ref, STORE_OBJECT_MAX_BYTES) < 0)
		r = -BASE_EFORMAT;
	k->ref = *ref;
	k->left--;
	k->piece++;
	return r;
}

/* ---- checks of one row ---- */

static void box_get(const uint8_t *pairs, uint32_t ndim, struct tensor_box *ret_box)
{
	memset(ret_box, 0, sizeof *ret_box);
	for (uint32_t d = 0; d < ndim; d++) {
		ret_box->offset[d] = base_get64(pairs + (size_t)d * CHUNK_PAIR_BYTES);
		ret_box->size[d] = base_get64(pairs + (size_t)d * CHUNK_PAIR_BYTES + 8);
	}
}

static void row_box(const struct store_chunk *c, uint32_t row, uint32_t i, const struct tensor_shape *s,
	struct tensor_box *ret_box)
{
	if (base_get32(c->rows + (size_t)row * CHUNK_ROW_BYTES + 4) & CHUNK_ROW_WHOLE)
		tensor_box_whole(s, ret_box);
	else
		box_get(c->boxes + (c->starts[row].pair + (uint64_t)i * s->ndim) * CHUNK_PAIR_BYTES, s->ndim, ret_box);
}

static bool box_valid(const struct tensor_shape *s, const struct tensor_box *b, bool only)
{
	struct tensor_box whole;

	if (!tensor_box_inside(s, b) || tensor_box_items(s, b) == 0)
		return false;
	tensor_box_whole(s, &whole);
	/* The whole tensor has the flag instead. */
	return !only || memcmp(whole.offset, b->offset, s->ndim * sizeof whole.offset[0]) != 0 ||
		memcmp(whole.size, b->size, s->ndim * sizeof whole.size[0]) != 0;
}

static int row_piece_check(struct chunk_cursor *k, uint64_t raw_len)
{
	struct base_digest digest;
	struct store_piece p;
	int r = cursor_next(k, &p);

	if (r < 0 || p.ref.raw_len != raw_len)
		return -BASE_EFORMAT;
	if (p.ref.pack != CHUNK_INLINE)
		return 0;
	base_digest_of(p.inline_bytes, raw_len, &digest);
	return base_digest_equal(&digest, &p.ref.digest) ? 0 : -BASE_EFORMAT;
}

/* The pieces of one box, which may be `most` at most; *ret_n: how many. */
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

static int row_pieces_check(const struct store_chunk *c, uint32_t row, const struct tensor_grid *g, uint32_t nboxes,
	bool whole, struct chunk_cursor *k)
{
	const uint8_t *bytes = c->rows + (size_t)row * CHUNK_ROW_BYTES;
	uint64_t left = base_get64(bytes + 16), n;
	struct base_digest digest;
	struct tensor_box box;
	int r;

	for (uint32_t i = 0; i < nboxes; i++) {
		row_box(c, row, i, &g->shape, &box);
		if (!whole && !box_valid(&g->shape, &box, nboxes == 1))
			return -BASE_EFORMAT;
		r = row_box_check(k, g, &box, left, &n);
		if (r < 0)
			return r;
		left -= n;
	}
	if (left != 0 || k->left != 0 || k->run != k->run_end)
		return -BASE_EFORMAT;
	r = digest_of_digests(c->pieces + c->starts[row].piece * CHUNK_PIECE_BYTES, CHUNK_PIECE_BYTES,
		base_get64(bytes + 16), &digest);
	if (r < 0)
		return r;
	return memcmp(digest.bytes, bytes + 32, sizeof digest.bytes) == 0 ? 0 : -BASE_EFORMAT;
}

/* Checks a row and tells where the next one's shares begin. */
static int row_check(struct store_chunk *c, uint32_t row)
{
	const uint8_t *bytes = c->rows + (size_t)row * CHUNK_ROW_BYTES;
	uint32_t tensor = base_get32(bytes), flags = base_get32(bytes + 4), nboxes = base_get32(bytes + 8),
		 nruns = base_get32(bytes + 12);
	uint64_t npieces = base_get64(bytes + 16), pairs;
	const struct chunk_start *s = &c->starts[row];
	struct chunk_cursor k;
	struct tensor_grid g;
	int r;

	if (tensor >= c->layout->m.ntensors || (row > 0 && tensor <= base_get32(bytes - CHUNK_ROW_BYTES)))
		return -BASE_EFORMAT;
	if ((flags & ~CHUNK_ROW_WHOLE) || base_get64(bytes + 24) != 0 ||
		((flags & CHUNK_ROW_WHOLE) != 0) != (nboxes == 0))
		return -BASE_EFORMAT;
	store_layout_grid(c->layout, tensor, &g);
	pairs = (uint64_t)nboxes * g.shape.ndim;
	if (nruns > c->nruns - s->run || npieces > c->npieces - s->piece || pairs > c->npairs - s->pair ||
		(nboxes && g.shape.ndim == 0))
		return -BASE_EFORMAT;
	cursor_init(&k, c, row);
	r = row_pieces_check(c, row, &g, nboxes ? nboxes : 1, nboxes == 0, &k);
	if (r < 0)
		return r;
	c->starts[row + 1] = (struct chunk_start){s->run + nruns, s->piece + npieces, s->pair + pairs, k.inline_at};
	return 0;
}

/* ---- the object ---- */

/* Takes a table of n entries from what is left of the object. */
static bool table_take(const uint8_t **at, uint64_t *left, uint64_t n, uint64_t bytes, const uint8_t **ret_table)
{
	uint64_t len;

	if (base_mul_overflows(n, bytes, &len) || len > *left)
		return false;
	*ret_table = *at;
	*at += len;
	*left -= len;
	return true;
}

static int head_decode(struct store_chunk *c, size_t len)
{
	const uint8_t *h = c->object, *at = h + CHUNK_HEAD_BYTES;
	uint64_t left = len - CHUNK_HEAD_BYTES;

	if (memcmp(h, CHUNK_MAGIC, 8) != 0)
		return -BASE_EFORMAT;
	if (base_get16(h + 8) > CHUNK_VERSION || base_get32(h + 12) != 0)
		return -BASE_EVERSION;
	if (base_get16(h + 8) != CHUNK_VERSION || base_get16(h + 10) != 0 || base_get64(h + 32) != 0 ||
		base_get64(h + 56) != 0)
		return -BASE_EFORMAT;
	c->nrows = base_get32(h + 16);
	c->nruns = base_get32(h + 20);
	c->npieces = base_get64(h + 24);
	c->npairs = base_get64(h + 40);
	c->ninline = base_get64(h + 48);
	if (!table_take(&at, &left, c->nrows, CHUNK_ROW_BYTES, &c->rows) ||
		!table_take(&at, &left, c->nruns, CHUNK_RUN_BYTES, &c->runs) ||
		!table_take(&at, &left, c->npieces, CHUNK_PIECE_BYTES, &c->pieces) ||
		!table_take(&at, &left, c->npairs, CHUNK_PAIR_BYTES, &c->boxes) ||
		!table_take(&at, &left, c->ninline, 1, &c->inlined))
		return -BASE_EFORMAT;
	return left == 0 && c->nrows > 0 ? 0 : -BASE_EFORMAT;
}

static int chunk_check(struct store_chunk *c, size_t len)
{
	const struct chunk_start *end;
	int r = head_decode(c, len);

	if (r < 0)
		return r;
	c->starts = calloc((size_t)c->nrows + 1, sizeof *c->starts);
	if (!c->starts)
		return -ENOMEM;
	for (uint32_t i = 0; i < c->nrows && r == 0; i++)
		r = row_check(c, i);
	end = &c->starts[c->nrows];
	if (r == 0 &&
		(end->run != c->nruns || end->piece != c->npieces || end->pair != c->npairs ||
			end->inlined != c->ninline))
		r = -BASE_EFORMAT;
	return r;
}

int store_chunk_decode(const void *object, size_t len, const struct store_layout *l, uint32_t npacks,
	struct store_chunk **ret_c, struct base_error *err)
{
	struct store_chunk *c;
	int r;

	if (len < CHUNK_HEAD_BYTES || len > STORE_CHUNK_MAX_BYTES)
		return base_error_set(err, -BASE_EFORMAT, "rows of a part cannot be read: %zu bytes are no chunk", len);
	c = calloc(1, sizeof *c + len);
	if (!c)
		return base_error_set(err, -ENOMEM, "out of memory");
	c->layout = l;
	c->npacks = npacks;
	memcpy(c->object, object, len);
	r = chunk_check(c, len);
	if (r < 0) {
		store_chunk_free(c);
		return base_error_set(err, r, "rows of a part cannot be read: %s", base_error_name(r));
	}
	*ret_c = c;
	return 0;
}

void store_chunk_free(struct store_chunk *c)
{
	if (!c)
		return;
	free(c->starts);
	free(c);
}

uint32_t store_chunk_rows(const struct store_chunk *c)
{
	return c->nrows;
}

int store_chunk_row(const struct store_chunk *c, uint32_t i, struct store_row *ret_row)
{
	const uint8_t *bytes = c->rows + (size_t)i * CHUNK_ROW_BYTES;
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
	memcpy(memory, c->inlined + c->starts[i].inlined, inlined);
	store_layout_shape(c->layout, ret_row->tensor, &shape);
	for (uint32_t n = 0; n < ret_row->nboxes; n++)
		row_box(c, i, n, &shape, &ret_row->boxes[n]);
	cursor_init(&k, c, i);
	for (uint64_t n = 0; n < npieces; n++) {
		struct store_piece *p = &ret_row->pieces[n];

		cursor_next(&k, p); /* was checked */
		if (p->inline_bytes)
			p->inline_bytes = memory + (p->inline_bytes - (c->inlined + c->starts[i].inlined));
	}
	return 0;
}

int64_t store_chunk_find(const struct store_chunk *c, uint32_t tensor)
{
	uint32_t low = 0, high = c->nrows;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2, at = base_get32(c->rows + (size_t)middle * CHUNK_ROW_BYTES);

		if (at == tensor)
			return middle;
		if (at < tensor)
			low = middle + 1;
		else
			high = middle;
	}
	return -ENOENT;
}
