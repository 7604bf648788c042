/* SPDX-License-Identifier: Apache-2.0
 *
 * share: which replica of a group stores what, decided without a message (docs/layouts.md). All replicated tensors of a
 * group that are not buffers, in their order, form one sequence of bytes, each tensor as the pieces of the box that
 * every replica holds, in storage order. The sequence is cut into equal spans, one a replica: replica i has [total*i/r,
 * total*(i+1)/r). A tensor of under 1 MiB is never cut: it goes whole to the replica in whose span it begins; of a
 * longer one each piece goes to the replica in whose span it begins. So a replica stores its span, give or take one
 * piece or small tensor: less than 1 MiB with the default grid, whose pieces are no longer than that. Pure functions of
 * integers, any thread. */
#ifndef CORE_TENSOR_SHARE_H
#define CORE_TENSOR_SHARE_H

#include "core/tensor/grid.h"

#define TENSOR_SHARE_WHOLE_BYTES (UINT64_C(1) << 20) /* shorter tensors are never cut */

struct tensor_span { uint64_t from, to; };      /* bytes of the sequence */
/* total * replica / replicas, exactly (128 bits); replica < replicas. */
struct tensor_span tensor_share_span(uint64_t total, uint32_t replica, uint32_t replicas);

/* The pieces of one box (all its bytes, as one tensor or one of its boxes in the sequence) that begin in the span,
 * when the box begins at `at` in the sequence: piece numbers [*ret_first, *ret_end), empty where equal. `bytes` is of
 * the whole tensor's share in the sequence (all boxes that a replica holds of it), which began at `start`: under 1 MiB
 * it is not cut. at - start, and the box's bytes after it, lie within `bytes`. A box of size 0 has nothing to share:
 * empty for everyone. Its cost is that of counting pieces (grid.h): of
 * tile rows by kind, at most 3 in each dimension that is cut, whatever their number. */
void tensor_share_pieces(const struct tensor_grid *g, const struct tensor_box *box, uint64_t at, uint64_t start,
	uint64_t bytes, struct tensor_span span, uint64_t *ret_first, uint64_t *ret_end);

/* Pieces [first, end) of `box` (end past their number: all from `first` on) as boxes that the grid cuts into just these
 * pieces, in their order: at most 2d-1 (one if d is 0), which ret_boxes has room for. Returns how many. */
#define TENSOR_SHARE_BOXES_MAX (2 * TENSOR_MAX_DIMS)
uint32_t tensor_share_boxes(const struct tensor_grid *g, const struct tensor_box *box, uint64_t first, uint64_t end,
	struct tensor_box *ret_boxes);

#endif
