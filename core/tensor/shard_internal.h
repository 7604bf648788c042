/* SPDX-License-Identifier: Apache-2.0
 *
 * shard_internal: cuts, shared by the files that make shards (shard.c), check them (shard_check.c) and walk them
 * (shard_walk.c). */
#ifndef CORE_TENSOR_SHARD_INTERNAL_H
#define CORE_TENSOR_SHARD_INTERNAL_H

#include "core/base/le.h"
#include "core/tensor/shard.h"

/* What coordinate `i` of `p` holds of a dimension of size `n` under a placement that cuts it (Shard, StridedShard,
 * InterleavedShard, whose divisibility was checked). Neighbouring stretches never touch. */
void tensor_cut_make(const struct tensor_placement *placement, uint64_t n, uint32_t p, uint32_t i,
	struct tensor_cut *ret_cut);
static inline uint64_t tensor_cut_size(const struct tensor_cut *c) { return c->full * c->stretch + c->tail; }
/* The coordinates (0 to size - 1) that can hold some of the indices [low, high), not empty, of a dimension of size `n`:
 * one or two ranges [first, last]. Returns how many ranges. */
unsigned tensor_cut_holders(const struct tensor_placement *placement, uint64_t n, uint32_t size, uint64_t low,
	uint64_t high, uint32_t first[static 2], uint32_t last[static 2]);
/* How many indices below `x` are held; `x` is an index before the cut. */
uint64_t tensor_cut_below(const struct tensor_cut *c, uint64_t x);

/* The word of one placement for a sentence, cut where it is long. */
void tensor_placement_text(const struct tensor_placement *p, char text[static 48]);

static inline bool tensor_placement_cuts(const struct tensor_placement *p)
{
	return p->kind == TENSOR_SHARD || p->kind == TENSOR_STRIDED_SHARD || p->kind == TENSOR_INTERLEAVED_SHARD;
}

/* Items of dimensions [first, end) of a checked shape; 1 if there are none. */
static inline uint64_t tensor_shape_product(const struct tensor_shape *s, uint32_t first, uint32_t end)
{
	uint64_t items = 1;

	for (uint32_t d = first; d < end; d++)
		items *= s->dim[d];
	return items;
}

#endif
