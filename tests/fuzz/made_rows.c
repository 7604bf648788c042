/* SPDX-License-Identifier: Apache-2.0
 *
 * made_rows: which boxes a rank stores of each tensor, and the objects of their pieces (made_step.h). */
#include "tests/fuzz/made_step.h"

#include "core/pack/codec.h"

MADE_NOT_COVERED

#define ENCODED 4u                      /* of a tensor's content */

/* ---- boxes ---- */

static void row_add(struct made_row *row, const struct tensor_box *box)
{
	if (row->nboxes == MADE_BOXES)
		return;
	if ((row->nboxes & (row->nboxes - 1)) == 0) {
		row->boxes = realloc(row->boxes, (row->nboxes ? 2 * row->nboxes : 1) * sizeof *row->boxes);
		must(row->boxes != NULL);
	}
	row->boxes[row->nboxes++] = *box;
}

static bool box_empty(const struct tensor_shape *s, const struct tensor_box *box)
{
	return tensor_box_items(s, box) == 0;
}

/* Bit i of the argument: the i-th rank of the layout has all of it; if none has, the first. */
static void boxes_whole(struct made_row *row, const struct made_tensor *t, uint32_t at, uint32_t n)
{
	uint32_t who = t->arg & ((1u << n) - 1);
	struct tensor_box box;

	tensor_box_whole(&t->shape, &box);
	if ((who ? who : 1) >> at & 1)
		row_add(row, &box);
}

/* Equal shares of one dimension, which no layout records. Bits 4 to 7 of the argument: in so many boxes each. */
static void boxes_split(struct made_row *row, const struct made_tensor *t, uint32_t at, uint32_t n)
{
	uint32_t d = t->shape.ndim ? t->arg % t->shape.ndim : 0, cuts = 1 + (t->arg >> 4);
	struct tensor_box box;

	tensor_box_whole(&t->shape, &box);
	if (t->shape.ndim == 0) {
		if (at == 0)
			row_add(row, &box);
		return;
	}
	if (cuts == 16)
		cuts = MADE_BOXES;
	for (uint64_t dim = t->shape.dim[d], share = base_div_up(dim, (uint64_t)n * cuts), i = 0; i < cuts; i++) {
		uint64_t from = base_min((at * (uint64_t)cuts + i) * share, dim);

		box.offset[d] = from;
		box.size[d] = base_min(share, dim - from);
		if (!box_empty(&t->shape, &box))
			row_add(row, &box);
	}
}

static void boxes_mesh(struct made_row *row, const struct made_tensor *t, uint32_t layout, uint32_t rank)
{
	struct tensor_sharding s = {.shape = t->shape, .item_bytes = tensor_dtype_bytes(t->dtype),
		.mesh = t->mesh[layout], .placement = t->placements[layout]->at};
	struct tensor_shard shard;
	struct tensor_shard_iter it;

	must(tensor_shard_of(&s, rank, NULL, &shard, NULL) == 0);
	if (shard.absent)
		return;
	for (tensor_shard_first(&it, &shard, NULL); !it.done; tensor_shard_next(&it))
		if (!box_empty(&t->shape, &it.at.box))
			row_add(row, &it.at.box);
}

/* The boxes that the description lists; each is inside the tensor, and nothing else is sure. */
static void boxes_listed(struct made_row *row, const struct made_rank *k, const struct made_tensor *t)
{
	const struct made *made = k->made;

	for (size_t i = 0; i < made->nrecords; i++) {
		const struct made_record *record = &made->records[i];
		struct tensor_box box = {0};

		if (record->kind != 2 || &made->tensors[made_byte(record, 0) % made->ntensors] != t
			|| made_byte(record, 1) % made->nranks != k->rank)
			continue;
		for (uint32_t d = 0; d < t->shape.ndim; d++) {
			uint64_t dim = t->shape.dim[d];

			box.offset[d] = dim ? made_u16(record, 2 + 4 * d) % dim : 0;
			box.size[d] = base_min(made_u16(record, 4 + 4 * d), dim - box.offset[d]);
		}
		if (!box_empty(&t->shape, &box))
			row_add(row, &box);
	}
}

static void row_boxes(struct made_row *row, const struct made_rank *k, const struct made_tensor *t)
{
	uint32_t ranks[MADE_RANKS], n = made_ranks(k->made, k->layout, ranks), at = 0;

	while (ranks[at] != k->rank)
		at++;
	if (t->how == MADE_LISTED)
		boxes_listed(row, k, t);
	else if (t->how == MADE_MESH && t->mesh[k->layout])
		boxes_mesh(row, t, k->layout, k->rank);
	else if (t->how == MADE_WHOLE)
		boxes_whole(row, t, at, n);
	else
		boxes_split(row, t, at, n);
}

/* ---- rows ---- */

static uint64_t row_pieces(const struct made_rank *k, const struct made_row *row)
{
	struct tensor_grid g;
	uint64_t n = 0;

	store_layout_grid(k->made->layouts[k->layout], row->tensor, &g);
	for (uint32_t i = 0; i < row->nboxes; i++)
		n += tensor_piece_count(&g, &row->boxes[i]);
	return n;
}

void made_rows_plan(struct made_rank *k)
{
	const struct store_layout *l = k->made->layouts[k->layout];
	uint64_t most = k->made->flags & MADE_MANY ? MADE_MANY_PIECES : MADE_PIECES;

	for (uint32_t i = 0; i < l->m.ntensors; i++) {
		struct made_row *row = &k->rows[k->nrows];
		uint64_t n;

		*row = (struct made_row){.tensor = i, .number = k->made->tags[k->layout][i], .first = k->npieces};
		row_boxes(row, k, &k->made->tensors[row->number]);
		n = row_pieces(k, row);
		if (row->nboxes == 0 || n > most - k->npieces) {
			k->made->complete = k->made->complete && n == 0;
			free(row->boxes);
			continue;
		}
		row->n = n;
		k->npieces += n;
		k->nrows++;
	}
	k->pieces = calloc(k->npieces + 1, sizeof *k->pieces);
	k->same_as = calloc(k->npieces + 1, sizeof *k->same_as);
	must(k->pieces && k->same_as);
}

/* ---- pieces ---- */

static void append_raw(struct pack_writer *w, struct store_piece *p, const uint8_t *bytes, uint64_t len)
{
	uint64_t checks[MADE_BYTES / BASE_BLOCK_BYTES + 1];
	const struct base_digest d = p->ref.digest;

	for (uint64_t i = 0; i < base_block_count(len); i++)
		checks[i] = base_block_check(&d, i, bytes + i * BASE_BLOCK_BYTES,
			base_min(BASE_BLOCK_BYTES, len - i * BASE_BLOCK_BYTES));
	must(pack_append(w, &d, PACK_OBJECT_PIECE, PACK_CODEC_RAW, bytes, len, len, checks, NULL,
		&p->ref) == 0);
}

/* Encoded where that gains. */
static void append_encoded(struct pack_writer *w, unsigned word, struct store_piece *p, const uint8_t *bytes,
	uint64_t len)
{
	static uint8_t out[MADE_BYTES], scratch[PACK_CODEC_SCRATCH];
	uint64_t checks[MADE_BYTES / BASE_BLOCK_BYTES + 1], stored, at = 0;
	uint32_t lens[MADE_BYTES / BASE_BLOCK_BYTES + 1];
	uint16_t codec = pack_codec_encode(word, bytes, len, out, lens, &stored, scratch);
	const struct base_digest d = p->ref.digest;

	if (codec == PACK_CODEC_RAW) {
		append_raw(w, p, bytes, len);
		return;
	}
	for (uint64_t i = 0; i < base_block_count(len); i++) {
		checks[i] = base_block_check(&d, i, out + at, lens[i] & ~PACK_BLOCK_RAW);
		at += lens[i] & ~PACK_BLOCK_RAW;
	}
	must(pack_append(w, &d, PACK_OBJECT_PIECE, codec, out, stored, len, checks, lens, &p->ref) == 0);
}

/* What is left to be done where it equals the last piece that was stored: it has the same place (made_rows_settle). */
static void piece_append(struct made_rank *k, size_t i, const struct made_tensor *t, const uint8_t *bytes, uint64_t len,
	struct pack_writer *w)
{
	struct store_piece *p = &k->pieces[i], *last = i ? &k->pieces[k->same_as[i - 1]] : NULL;

	k->same_as[i] = (uint32_t)i;
	p->base = STORE_PIECE_NO_BASE;
	if (last && last->ref.raw_len == len && last->inline_bytes && memcmp(last->inline_bytes, bytes, len) == 0) {
		*p = *last;
		k->same_as[i] = k->same_as[i - 1];
		return;
	}
	base_digest_of(bytes, len, &p->ref.digest);
	base_xxh128_of(MADE_SEED, bytes, len, &p->xxh);
	p->inline_bytes = bytes; /* of one that is stored in the pack: until made_rows_settle */
	if (len <= STORE_INLINE_MAX_BYTES) {
		p->ref.raw_len = p->ref.stored_len = len;
		p->ref.kind = PACK_OBJECT_PIECE;
		p->ref.pack = UINT32_MAX;
	} else if (t->content & ENCODED) {
		append_encoded(w, tensor_dtype_word_bytes(t->dtype), p, bytes, len);
	} else {
		append_raw(w, p, bytes, len);
	}
}

static uint8_t *row_append(struct made_rank *k, const struct made_row *row, uint8_t *room, struct pack_writer *w)
{
	const struct made_tensor *t = &k->made->tensors[row->number];
	uint64_t stride[TENSOR_MAX_DIMS], zeros[TENSOR_MAX_DIMS] = {0}, bytes = tensor_dtype_bytes(t->dtype);
	struct tensor_piece_iter it;
	struct tensor_grid g;
	size_t at = row->first;

	store_layout_grid(k->made->layouts[k->layout], row->tensor, &g);
	for (unsigned d = g.shape.ndim; d-- > 0; bytes *= g.shape.dim[d])
		stride[d] = bytes;
	for (uint32_t i = 0; i < row->nboxes; i++)
		for (tensor_piece_first(&it, &g, &row->boxes[i]); !it.done; tensor_piece_next(&it)) {
			uint64_t len = tensor_box_items(&g.shape, &it.piece) * g.item_bytes;

			if (len)
				tensor_piece_gather(&g, &it.piece, NULL, room, t->bytes, zeros, stride);
			piece_append(k, at++, t, room, len, w);
			room += len;
		}
	must(at == row->first + row->n);
	return room;
}

static uint64_t row_bytes(const struct made_rank *k, const struct made_row *row)
{
	const struct made_tensor *t = &k->made->tensors[row->number];
	uint64_t items = 0;

	for (uint32_t i = 0; i < row->nboxes; i++)
		items += tensor_box_items(&t->shape, &row->boxes[i]);
	return items * tensor_dtype_bytes(t->dtype);
}

void made_rows_append(struct made_rank *k, struct pack_writer *w)
{
	uint64_t bytes = 1;
	uint8_t *room;

	for (uint32_t i = 0; i < k->nrows; i++)
		bytes += row_bytes(k, &k->rows[i]);
	k->room = room = malloc(bytes);
	must(room != NULL);
	for (uint32_t i = 0; i < k->nrows; i++) {
		room = row_append(k, &k->rows[i], room, w);
		if (k->made->flags & MADE_EXTENTS)
			must(pack_extent_end(w) == 0);
	}
}

void made_rows_settle(struct made_rank *k)
{
	for (size_t i = 0; i < k->npieces; i++) {
		k->pieces[i] = k->pieces[k->same_as[i]];
		if (k->pieces[i].ref.pack != UINT32_MAX)
			k->pieces[i].inline_bytes = NULL;
	}
	for (size_t i = 0; i < k->made->nrecords; i++) {
		const struct made_record *record = &k->made->records[i];
		struct store_piece *a, *b, swap;

		if (record->kind != 4 || made_byte(record, 0) % k->made->nranks != k->rank || k->npieces == 0)
			continue;
		a = &k->pieces[made_u16(record, 1) % k->npieces];
		b = &k->pieces[made_u16(record, 3) % k->npieces];
		if (a->ref.raw_len != b->ref.raw_len)
			continue;
		swap = *a;
		*a = *b;
		*b = swap;
		k->made->honest = false;
	}
}

void made_rank_release(struct made_rank *k)
{
	for (uint32_t i = 0; i < k->nrows; i++)
		free(k->rows[i].boxes);
	free(k->pieces);
	free(k->same_as);
	free(k->room);
}

MADE_COVERED
