/* SPDX-License-Identifier: Apache-2.0
 *
 * piece_internal: what the files of core/tensor share about how a tile row is cut. Pure functions, any thread. */
#ifndef CORE_TENSOR_PIECE_INTERNAL_H
#define CORE_TENSOR_PIECE_INTERNAL_H

#include "core/tensor/grid.h"

/* Width along k of the pieces of a tile row whose slices across k have `r` bytes (r = item * the row's sizes). */
uint64_t tensor_piece_width(const struct tensor_grid *g, uint64_t r);
uint64_t tensor_piece_row_width(const struct tensor_grid *g, const struct tensor_box *piece); /* of that piece's row */
/* Number and box of the piece of `box` that holds the item `at` of it. Box and tensor have dimensions and items. */
uint64_t tensor_piece_locate(const struct tensor_grid *g, const struct tensor_box *box, const uint64_t *at,
	struct tensor_box *ret_piece);
/* The cell of the piece that holds `x` along k, and the items of one slice of the piece across k: a cell begins
 * (cell offset - piece offset) * slice items into the piece. */
void tensor_piece_cell(const struct tensor_grid *g, const struct tensor_box *piece, uint64_t x,
	struct tensor_box *ret_cell);
uint64_t tensor_piece_slice(const struct tensor_grid *g, const struct tensor_box *piece);

#endif
