/* SPDX-License-Identifier: Apache-2.0
 *
 * piece_ranges: where in a piece's stored order a part of it is. */
#include "core/base/le.h"
#include "core/tensor/boxes.h"
#include "core/tensor/grid.h"
#include "core/tensor/piece_internal.h"

bool tensor_piece_lies(const struct tensor_grid *g, const struct tensor_box *piece, const uint64_t *stride)
{
	uint64_t bytes = g->item_bytes, outer = 1;
	struct tensor_box first;

	for (unsigned d = g->shape.ndim; d-- > 0; bytes *= piece->size[d])
		if (piece->size[d] > 1 && stride[d] != bytes)
			return false;
	if (g->shape.ndim == 0 || tensor_box_empty(g->shape.ndim, piece))
		return true;
	/* cell after cell is row after row only of one cell, or of rows that are one thick before k */
	tensor_piece_cell(g, piece, piece->offset[g->k], &first);
	for (unsigned d = 0; d < g->k; d++)
		outer *= piece->size[d];
	return outer == 1 || first.size[g->k] == piece->size[g->k];
}

/* The part of a cell that begins `base` bytes into the piece. */
static int ranges_cell(const struct tensor_grid *g, const struct tensor_box *cell, const struct tensor_box *part,
	uint64_t base, int (*f)(void *arg, uint64_t offset, uint64_t len), void *arg)
{
	uint64_t stride[TENSOR_MAX_DIMS], at[TENSOR_MAX_DIMS] = {0}, len = g->item_bytes, bytes = g->item_bytes;
	unsigned outer = 0, d;
	bool full = true;

	for (d = g->shape.ndim; d-- > 0; bytes *= cell->size[d]) {
		stride[d] = bytes;
		base += (part->offset[d] - cell->offset[d]) * bytes;
		if (full)
			len *= part->size[d];
		else if (outer == 0)
			outer = d + 1; /* dimensions before this one are walked */
		full = full && part->size[d] == cell->size[d];
	}
	for (;;) {
		int r = f(arg, base, len);

		if (r != 0)
			return r;
		for (d = outer; d-- > 0;) {
			base += stride[d];
			if (++at[d] < part->size[d])
				break;
			base -= at[d] * stride[d];
			at[d] = 0;
		}
		if (d == UINT32_MAX)
			return 0;
	}
}

int tensor_piece_ranges(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	int (*f)(void *arg, uint64_t offset, uint64_t len), void *arg)
{
	struct tensor_box area, cell, part;
	uint64_t slice, end;
	int r = 0;

	if (g->shape.ndim == 0)
		return f(arg, 0, g->item_bytes);
	if (!tensor_box_intersect(g->shape.ndim, piece, window, &area))
		return 0;
	slice = tensor_piece_slice(g, piece) * g->item_bytes;
	end = area.offset[g->k] + area.size[g->k];
	for (uint64_t x = area.offset[g->k]; r == 0 && x < end; x = cell.offset[g->k] + cell.size[g->k]) {
		tensor_piece_cell(g, piece, x, &cell);
		if (tensor_box_intersect(g->shape.ndim, &cell, &area, &part))
			r = ranges_cell(g, &cell, &part, (cell.offset[g->k] - piece->offset[g->k]) * slice, f, arg);
	}
	return r;
}
