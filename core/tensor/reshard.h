/* SPDX-License-Identifier: Apache-2.0
 *
 * reshard: from the pieces that a step holds of a tensor to the buffer that a rank wants filled. Pure functions, any
 * thread.
 *
 * A step holds boxes, each cut into pieces by the grid (grid.h). An index (boxes.h) or the sharding (shard.h) finds the
 * boxes that overlap a wanted one; arithmetic finds the pieces of a box that do. Only pieces that are needed are looked
 * at, and none is held in memory. */
#ifndef CORE_TENSOR_RESHARD_H
#define CORE_TENSOR_RESHARD_H

#include "core/tensor/boxes.h"
#include "core/tensor/grid.h"
#include "core/tensor/shard.h"

/* The pieces of a box that overlap a window, in storage order, without walking the others. */
struct tensor_piece_window {
	const struct tensor_grid *grid;
	struct tensor_box box, window;  /* window: cut to the box */
	bool done;
	uint64_t number;                /* of the current piece, among all of the box */
	struct tensor_box piece, part;  /* the current one, and what of it is in the window */
};
/* An empty box or window: done at once. A scalar: its one piece. */
void tensor_piece_window_first(struct tensor_piece_window *w, const struct tensor_grid *g, const struct tensor_box *box,
	const struct tensor_box *window);
void tensor_piece_window_next(struct tensor_piece_window *w);

/* One line of the relation: `part` of piece number `piece` of source box number `box` goes to the buffer. */
struct tensor_reshard_line {
	size_t box;
	uint64_t piece;                 /* among the pieces of that box, in storage order */
	struct tensor_box piece_box;    /* of the whole piece */
	struct tensor_box part;         /* what is wanted of it, in coordinates of the tensor */
	uint64_t local_offset;          /* of its first item in the buffer, in items */
	uint64_t local_stride[TENSOR_MAX_DIMS];
};
/* All lines for one wanted box, of a shard or of a raw list (tensor_shard_list), from the source boxes in the index,
 * which lie in the tensor; those of one source box come one after another, by ascending piece. Where source boxes
 * overlap (replicas that were stored twice) an item may come more than once: give the index disjoint boxes. -EINVAL:
 * other dimensions than the grid's. What f returns, if not 0, ends the walk and is returned. */
int tensor_reshard_box(const struct tensor_grid *g, const struct tensor_box_index *sources,
	const struct tensor_boxes *boxes, const struct tensor_shard_box *wanted,
	int (*f)(void *arg, const struct tensor_reshard_line *line), void *arg);

#endif
