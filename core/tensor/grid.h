/* SPDX-License-Identifier: Apache-2.0
 *
 * grid: the fixed tiles of a logical tensor, and the pieces that a box of it is cut into (docs/format/grid.md).
 * Integers only; a change of these rules is a change of format. Pure functions, any thread, no allocation.
 *
 * With k the last dimension that is cut and r = item * product of the sizes of box ∩ tile in all dimensions but k,
 * pieces along k are w = edge[k] * 2^j wide with the smallest j >= 0 such that r * w >= M or w >= shape[k] (j = 0 if k
 * is the only dimension that is cut); cuts lie at multiples of w from the tensor's origin. */
#ifndef CORE_TENSOR_GRID_H
#define CORE_TENSOR_GRID_H

#include <stddef.h>

#include "core/tensor/box.h"

/* M, T, R and S of the page. small_bytes 0: the older rule, without S. */
struct tensor_grid_params { uint64_t min_bytes, target_bytes, row_bytes, small_bytes; };
bool tensor_grid_params_equal(const struct tensor_grid_params *a, const struct tensor_grid_params *b);

struct tensor_grid {
	struct tensor_shape shape;
	unsigned item_bytes;
	struct tensor_grid_params params; /* min_bytes: the one that counts for this tensor, S or M */
	uint64_t edge[TENSOR_MAX_DIMS];  /* tile edge in each dimension; >= 1 (dimension 0 of a scalar: unused) */
	unsigned k;                      /* last dimension that may be cut */
	bool only_k;                     /* k is the only dimension that is cut */
};

/* Refuses M, T or R of 0, M > T, S > M, and shapes that tensor_shape_items refuses. */
int tensor_grid_init(struct tensor_grid *g, const struct tensor_shape *s, unsigned item_bytes,
	struct tensor_grid_params params);

/* Walks the pieces of one box (or of a whole tensor) in storage order: row-major over (tile rows..., k). */
struct tensor_piece_iter {
	const struct tensor_grid *grid;
	struct tensor_box box;      /* what is cut */
	struct tensor_box piece;    /* the current one */
	bool done;
	uint64_t number;            /* of the current piece, from 0 */
};
/* An empty box (a size of 0) has exactly one piece, empty; a scalar exactly one. */
void tensor_piece_first(struct tensor_piece_iter *it, const struct tensor_grid *g, const struct tensor_box *box);
void tensor_piece_next(struct tensor_piece_iter *it);
/* without walking every piece */
uint64_t tensor_piece_count(const struct tensor_grid *g, const struct tensor_box *box);
/* Piece number `n` of `box` by arithmetic (not by walking all before it). -ERANGE when there is none. */
int tensor_piece_at(const struct tensor_grid *g, const struct tensor_box *box, uint64_t n,
	struct tensor_box *ret_piece);
/* Number of the piece of the whole tensor that holds item coordinate `at`. */
uint64_t tensor_piece_find(const struct tensor_grid *g, const uint64_t *at);

/* Copies between a piece's stored order (grid cell after grid cell in row-major order of the grid, each cell
 * row-major) and a row-major strided array: `base` is where the item at the tensor coordinate `origin` is,
 * `stride` the bytes between neighbours in each dimension (the innermost is item_bytes where rows are contiguous).
 * Only the part of the piece inside `window` (tensor coordinates; NULL: all of it) is copied; window must lie inside
 * what `base` addresses. */
void tensor_piece_gather(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	void *piece_bytes, const void *base, const uint64_t *origin, const uint64_t *stride);   /* array -> piece */
void tensor_piece_scatter(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	const void *piece_bytes, void *base, const uint64_t *origin, const uint64_t *stride);   /* piece -> array */
/* The same past the processor's caches (core/base/past.h), for an array that will not be read soon. */
void tensor_piece_scatter_past(const struct tensor_grid *g, const struct tensor_box *piece,
	const struct tensor_box *window, const void *piece_bytes, void *base, const uint64_t *origin,
	const uint64_t *stride);
/* Calls `each` for parts of the piece that together are the `len` bytes from byte `from` of the stored order
 * on, whole items of the piece, and in the window. Returns how many items that is. */
uint64_t tensor_piece_some(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	uint64_t from, uint64_t len, void (*each)(void *arg, const struct tensor_box *part), void *arg);
/* Scatters the `len` bytes from byte `from` of the stored order on, whole items of the piece (`bytes`: these
 * bytes alone) and in the window. Returns how many items that is. */
uint64_t tensor_piece_scatter_some(const struct tensor_grid *g, const struct tensor_box *piece,
	const struct tensor_box *window, const void *bytes, uint64_t from, uint64_t len, void *base,
	const uint64_t *origin, const uint64_t *stride);
/* Gathers a whole piece strip by strip, in stored order: each is gathered into `room` and handed to `strip`. A strip
 * has at most `room_bytes` bytes, which is at least one item; so a piece can be read while it is in the
 * processor's nearest cache. `there`: what is contiguous is handed over where it is; that is quicker, but another
 * thread may change the bytes while `strip` reads them. */
void tensor_piece_stream(const struct tensor_grid *g, const struct tensor_box *piece, const void *base,
	const uint64_t *origin, const uint64_t *stride, void *room, size_t room_bytes, bool there,
	void (*strip)(void *arg, const void *bytes, size_t len), void *arg);

/* Are the bytes of a piece, in stored order, contiguous in such an array? */
bool tensor_piece_lies(const struct tensor_grid *g, const struct tensor_box *piece, const uint64_t *stride);
/* Calls f for ranges of bytes of the stored order that together are the part of the piece inside `window`, ascending.
 * What f returns, if not 0, ends the walk and is returned. */
int tensor_piece_ranges(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	int (*f)(void *arg, uint64_t offset, uint64_t len), void *arg);

/* The contiguous fragments of a range of row-major bytes of the whole tensor. A fragment is as many bytes from byte
 * `at` of the tensor on as are contiguous in one piece too, up to byte `end`. */
struct tensor_fragment {
	uint64_t piece;        /* number among the pieces of the whole tensor, or of the box */
	uint64_t piece_offset; /* byte in the piece's stored order */
	uint64_t len;          /* bytes, >= 1 */
};
void tensor_fragment_at(const struct tensor_grid *g, uint64_t at, uint64_t end, struct tensor_fragment *ret_f);
/* The same where a box was stored by itself: `piece` is a number among the pieces of `box`, which holds the item at
 * byte `at`. */
void tensor_fragment_in(const struct tensor_grid *g, const struct tensor_box *box, uint64_t at, uint64_t end,
	struct tensor_fragment *ret_f);

#endif
