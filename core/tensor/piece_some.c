/* SPDX-License-Identifier: Apache-2.0
 *
 * piece_some: from some bytes of a piece's stored order to a strided array. A range of row-major items of a cell is a
 * few boxes (at most two for each dimension, and one): rows that it has whole, and what it has of the rows before and
 * after them. Each box is scattered like any part of the piece. */
#include "core/base/le.h"
#include "core/tensor/boxes.h"
#include "core/tensor/grid.h"
#include "core/tensor/piece_internal.h"

struct piece_some {
	const struct tensor_grid *g;
	const struct tensor_box *window;
	void (*each)(void *arg, const struct tensor_box *part);
	void *arg;
	uint64_t items;                  /* found so far */
};

static void some_box(struct piece_some *s, const struct tensor_box *box)
{
	struct tensor_box part = *box;

	if (!tensor_box_intersect(s->g->shape.ndim, box, s->window, &part))
		return;
	s->items += tensor_box_items(&s->g->shape, &part);
	s->each(s->arg, &part);
}

/* Items [a, b) of a box, counted row-major in dimensions d and after; in those before d it is one thick. Depth: the
 * number of dimensions. */
static void some_rows(struct piece_some *s, const struct tensor_box *box, unsigned d, uint64_t a, uint64_t b)
{
	struct tensor_box some = *box;
	uint64_t inner = 1, first, last;

	if (a == b)
		return;
	for (unsigned i = d + 1; i < s->g->shape.ndim; i++)
		inner *= box->size[i];
	first = a / inner;
	last = (b - 1) / inner;
	some.offset[d] = box->offset[d] + first;
	some.size[d] = 1;
	if (first == last && b - a < inner) {
		some_rows(s, &some, d + 1, a % inner, a % inner + (b - a));
		return;
	}
	if (a % inner) {
		some_rows(s, &some, d + 1, a % inner, inner);
		first++;
	}
	some.offset[d] = box->offset[d] + first;
	some.size[d] = b / inner - first;
	if (some.size[d])
		some_box(s, &some);
	some.offset[d] = box->offset[d] + b / inner;
	some.size[d] = 1;
	if (b % inner)
		some_rows(s, &some, d + 1, 0, b % inner);
}

uint64_t tensor_piece_some(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	uint64_t from, uint64_t len, void (*each)(void *arg, const struct tensor_box *part), void *arg)
{
	struct piece_some s = {.g = g, .window = window, .each = each, .arg = arg};
	uint64_t a = from / g->item_bytes, b = a + len / g->item_bytes, slice, cell_items;
	struct tensor_box cell;

	if (g->shape.ndim == 0 && a < b) {
		each(arg, piece);
		return 1;
	}
	if (a == b || tensor_box_empty(g->shape.ndim, piece))
		return 0;
	slice = tensor_piece_slice(g, piece);
	for (uint64_t at = 0; at < b; at += cell_items) {
		tensor_piece_cell(g, piece, piece->offset[g->k] + at / slice, &cell);
		cell_items = cell.size[g->k] * slice;
		if (at + cell_items > a)
			some_rows(&s, &cell, 0, a > at ? a - at : 0, base_min(b - at, cell_items));
	}
	return s.items;
}

struct scatter_some {
	const struct tensor_grid *g;
	const struct tensor_box *piece;
	const uint8_t *bytes;            /* where byte 0 of the piece would lie */
	void *base;
	const uint64_t *origin, *stride;
};

static void scatter_part(void *arg, const struct tensor_box *part)
{
	const struct scatter_some *s = arg;

	tensor_piece_scatter(s->g, s->piece, part, s->bytes, s->base, s->origin, s->stride);
}

uint64_t tensor_piece_scatter_some(const struct tensor_grid *g, const struct tensor_box *piece,
	const struct tensor_box *window, const void *bytes, uint64_t from, uint64_t len, void *base,
	const uint64_t *origin, const uint64_t *stride)
{
	struct scatter_some s = {g, piece, (const uint8_t *)((uintptr_t)bytes - from), base, origin, stride};

	return tensor_piece_some(g, piece, window, from, len, scatter_part, &s);
}
