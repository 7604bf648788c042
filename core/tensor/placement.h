/* SPDX-License-Identifier: Apache-2.0
 *
 * placement: how one mesh dimension cuts a tensor, and the words for it, one a mesh dimension, outermost first:
 *
 *   R                replicate
 *   S(d)             shard dimension d: ceil rule of torch's Shard (torch.chunk)
 *   SS(d,split)      torch's _StridedShard: into `split` chunks, each of these over the ranks (FSDP over TP)
 *   IS(d,k)          d seen as (k, n/k), the second factor sharded (merged QKV, gate and up)
 *   RS(0,1;u0,u1)    ragged: the leading dimensions flattened and given out by units, one number a rank; RS(;0,1) with
 *                    no dimension: all of it to one rank
 *   P                partial: pending a reduction, refused wherever boxes are asked for
 *
 * Pure functions, any thread. What a placement means for a shape: shard.h. */
#ifndef CORE_TENSOR_PLACEMENT_H
#define CORE_TENSOR_PLACEMENT_H

#include "core/base/buf.h"
#include "core/base/error.h"
#include "core/tensor/box.h"

enum tensor_placement_kind { TENSOR_REPLICATE, TENSOR_SHARD, TENSOR_STRIDED_SHARD, TENSOR_INTERLEAVED_SHARD,
	TENSOR_RAGGED_SHARD, TENSOR_PARTIAL };

struct tensor_placement {
	enum tensor_placement_kind kind;
	uint32_t dim;           /* of the tensor; ragged: how many leading dimensions */
	uint64_t split;         /* strided: split factor; interleaved: k */
	const uint64_t *ends;   /* ragged: for each coordinate i the sum of the units of 0 to i; the caller's memory */
	uint32_t nends;         /* coordinates of the mesh dimension */
};

struct tensor_placements {      /* one allocation, ends included */
	uint32_t n;
	struct tensor_placement at[TENSOR_MAX_DIMS];
};
/* -EINVAL (the word, named in err), -EOVERFLOW (units that sum to more than 64 bits), -BASE_ELIMIT (more than
 * TENSOR_MAX_DIMS words), -ENOMEM. Free with free. */
int tensor_placements_parse(const char *text, struct tensor_placements **ret_p, struct base_error *err);
/* The canonical words, as layouts store them: no spaces. */
void tensor_placements_print(const struct tensor_placement *p, uint32_t n, struct base_buf *b);
bool tensor_placement_equal(const struct tensor_placement *a, const struct tensor_placement *b);

#endif
