/* SPDX-License-Identifier: Apache-2.0
 *
 * share: positions in the pieces of a box, in bytes.
 *
 * The pieces of a box lie one after another as a row-major walk over its tiles does: all dimensions but k from the
 * outside in, then k. Bytes before a piece are therefore those of the slabs before it, one slab a dimension: the tiles
 * before its own, as thick as its own tiles are in the dimensions outside, whole in those inside. No tile is visited:
 * a slab's bytes are a product, and its pieces are counted by kind (piece.c). The same slabs, from a first piece to a
 * last one, are the boxes that a range of pieces is handed on as: thickest in the middle, thinner towards both ends. */
#include "core/tensor/share.h"

#include "core/base/le.h"
#include "core/tensor/piece_internal.h"

struct tensor_span tensor_share_span(uint64_t total, uint32_t replica, uint32_t replicas)
{
	unsigned __int128 bytes = total;

	return (struct tensor_span){(uint64_t)(bytes * replica / replicas),
		(uint64_t)(bytes * ((uint64_t)replica + 1) / replicas)};
}

/* The dimensions from the outside in as pieces are ordered: all but k, then k. */
static unsigned share_order(const struct tensor_grid *g, unsigned *ret_order)
{
	unsigned n = 0;

	for (unsigned d = 0; d < g->shape.ndim; d++)
		if (d != g->k)
			ret_order[n++] = d;
	if (g->shape.ndim > 0)
		ret_order[n++] = g->k;
	return n;
}

static uint64_t share_bytes(const struct tensor_grid *g, const struct tensor_box *box)
{
	return tensor_box_items(&g->shape, box) * g->item_bytes;
}

/* The tile row that holds byte *at of the pieces of a box with items. *at becomes the byte in that row; returned is
 * the number of pieces before it. */
static uint64_t share_row(const struct tensor_grid *g, const struct tensor_box *box, uint64_t *at,
	struct tensor_box *ret_row)
{
	uint64_t pieces = 0;

	*ret_row = *box;
	for (unsigned d = 0; d < g->shape.ndim; d++) {
		uint64_t edge = g->edge[d], low = box->offset[d], high = low + box->size[d];
		uint64_t unit = share_bytes(g, ret_row) / box->size[d], tile = low + *at / unit;

		if (d == g->k)
			continue;
		tile = base_max(low, tile / edge * edge);
		*at -= (tile - low) * unit;
		if (tile > low) {
			ret_row->size[d] = tile - low;
			pieces += tensor_piece_count(g, ret_row);
		}
		ret_row->offset[d] = tile;
		ret_row->size[d] = base_min(high, (tile / edge + 1) * edge) - tile;
	}
	return pieces;
}

/* The first piece of `box` that begins at or after byte `at` of its pieces; their number if there is none. */
static uint64_t share_from_byte(const struct tensor_grid *g, const struct tensor_box *box, uint64_t at)
{
	uint64_t all = share_bytes(g, box), before, r, w, low, x;
	struct tensor_box row;

	if (at == 0)
		return 0;
	if (at >= all || g->shape.ndim == 0)
		return tensor_piece_count(g, box);
	before = share_row(g, box, &at, &row);
	low = row.offset[g->k];
	r = share_bytes(g, &row) / row.size[g->k];
	w = tensor_piece_width(g, r);
	x = low + base_div_up(at, r);
	if (x == low)
		return before;
	/* cuts lie at multiples of w; x may be the end of the row, where the next one's first piece begins */
	return before + base_div_up(x, w) - low / w;
}

void tensor_share_pieces(const struct tensor_grid *g, const struct tensor_box *box, uint64_t at, uint64_t start,
	uint64_t bytes, struct tensor_span span, uint64_t *ret_first, uint64_t *ret_end)
{
	bool empty = share_bytes(g, box) == 0;

	*ret_first = *ret_end = 0;
	if (empty || span.to <= span.from)
		return;
	if (bytes < TENSOR_SHARE_WHOLE_BYTES) {
		if (start >= span.from && start < span.to)
			*ret_end = tensor_piece_count(g, box);
		return;
	}
	if (span.to <= at)
		return;
	*ret_first = span.from <= at ? 0 : share_from_byte(g, box, span.from - at);
	*ret_end = share_from_byte(g, box, span.to - at);
}

/* Builds boxes out of the levels of the walk: level i is dimension order[i]. */
struct share_slabs {
	const struct tensor_box *box;
	unsigned order[TENSOR_MAX_DIMS], dims;
	struct tensor_box *ret_boxes;
	uint32_t n;
};

static uint64_t box_end(const struct tensor_box *b, unsigned d)
{
	return b->offset[d] + b->size[d];
}

/* The slab that is `piece` above level i, [from, to) in it, and the whole box below. */
static void slabs_add(struct share_slabs *s, const struct tensor_box *piece, unsigned i, uint64_t from, uint64_t to)
{
	struct tensor_box slab = *s->box;

	if (from >= to)
		return;
	for (unsigned j = 0; j < i; j++) {
		slab.offset[s->order[j]] = piece->offset[s->order[j]];
		slab.size[s->order[j]] = piece->size[s->order[j]];
	}
	slab.offset[s->order[i]] = from;
	slab.size[s->order[i]] = to - from;
	s->ret_boxes[s->n++] = slab;
}

/* All pieces from `a` to `b`, both included. A head begins at the outermost level below which `a` is the first piece
 * of the box, a tail ends where `b` is the last. */
static void slabs_range(struct share_slabs *s, const struct tensor_box *a, const struct tensor_box *b)
{
	const unsigned *order = s->order;
	unsigned head = s->dims - 1, tail = s->dims - 1, split = 0;

	while (head > 0 && a->offset[order[head]] == s->box->offset[order[head]])
		head--;
	while (tail > 0 && box_end(b, order[tail]) == box_end(s->box, order[tail]))
		tail--;
	while (split + 1 < s->dims && a->offset[order[split]] == b->offset[order[split]])
		split++;
	for (unsigned i = head; i > split; i--)
		slabs_add(s, a, i, i == head ? a->offset[order[i]] : box_end(a, order[i]), box_end(s->box, order[i]));
	slabs_add(s, a, split, head <= split ? a->offset[order[split]] : box_end(a, order[split]),
		tail <= split ? box_end(b, order[split]) : b->offset[order[split]]);
	for (unsigned i = split + 1; i <= tail; i++)
		slabs_add(s, b, i, s->box->offset[order[i]], i == tail ? box_end(b, order[i]) : b->offset[order[i]]);
}

uint32_t tensor_share_boxes(const struct tensor_grid *g, const struct tensor_box *box, uint64_t first, uint64_t end,
	struct tensor_box *ret_boxes)
{
	struct share_slabs s = {.box = box, .ret_boxes = ret_boxes};
	struct tensor_box a, b;

	end = base_min(end, tensor_piece_count(g, box));
	if (first >= end || tensor_piece_at(g, box, first, &a) < 0 || tensor_piece_at(g, box, end - 1, &b) < 0)
		return 0;
	s.dims = share_order(g, s.order);
	if (s.dims == 0 || share_bytes(g, box) == 0)
		ret_boxes[s.n++] = *box;
	else
		slabs_range(&s, &a, &b);
	return s.n;
}
