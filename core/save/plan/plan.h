/* SPDX-License-Identifier: Apache-2.0
 *
 * plan: what one rank stores of every tensor of a step, from meshes, placements and shapes alone: no rank asks
 * another. What only it holds, all of it; of what several hold, its share (core/tensor/share.h); buffers whole, by the
 * first rank of their group. Pure: no I/O; memory is the result's and a few words a tensor. Any thread.
 *
 * A tensor's group is the ranks along the mesh dimensions that replicate it, in mesh order. Tensors belong to one
 * sequence where their groups are the same ranks in the same order, on whatever meshes. What the caller guarantees:
 * 1. each rank of a group lists every tensor of that group that any of them lists, with equal shape, item size,
 *    placements and mesh (in content; pointers do not matter), and the same `buffer`, and cuts by the same parameters;
 * 2. of any two such tensors the same one comes first on all of them (sort by name, and it does);
 * 3. replicas are declared on one mesh: a weight that two pipeline stages hold (tied embeddings) is one tensor on a
 *    mesh over the ranks of both, replicated along it, and not two of one name.
 * What else a rank lists (other stages' tensors, experts, its own) changes nothing: every member of a group has the
 * same list of ranks for each tensor of it, finds the same tensors in the same order, with the same bytes of each,
 * since members of a replica group hold the same boxes. */
#ifndef CORE_SAVE_PLAN_PLAN_H
#define CORE_SAVE_PLAN_PLAN_H

#include "core/tensor/dtype.h"
#include "core/tensor/shard.h"
#include "core/tensor/share.h"

/* A tensor as a rank holds it: what is declared, planned and copied. */
struct save_tensor {
	const char *component, *name; uint32_t name_len;
	enum tensor_dtype dtype;
	struct tensor_sharding sharding;        /* checked; mesh NULL: this rank alone holds it, whole */
	const struct tensor_flat *flat;         /* this rank's range of what the placements give it; NULL: none */
	const struct tensor_boxes *boxes;       /* this rank's raw list (all placements R, flat NULL); NULL: none */
	uint32_t same_dims;                     /* with these: replicated mesh dimensions along which they are equal,
	                                           as a mask. Along others nothing is shared */
	bool buffer;
	/* This rank's memory; the plan does not look at it. */
	bool device; unsigned context;          /* in device memory; by number in the save's fence */
	struct tensor_shape local;              /* with boxes: all items, one after another */
	const int64_t *strides;                 /* of `local`, in bytes; NULL: contiguous */
	const uint8_t *data;
};
/* A box that is stored, and where its first item is in the tensor's local buffer. Of a tensor without items the first
 * rank of its mesh stores the whole, empty box: its part has to have a row. */
struct save_plan_box { uint32_t tensor; struct tensor_shard_box at; uint64_t pieces; };
struct save_plan {
	struct save_plan_box *boxes; uint64_t nboxes;   /* by tensor, box of its shard, pieces in storage order */
	uint64_t pieces, bytes;                         /* stored by this rank */
	uint64_t shared_bytes;                          /* of them, out of sequences shared with others */
	uint64_t held_bytes;                            /* that this rank holds, stored by it or by others */
};
/* tensors: what this rank holds (those on meshes without it are skipped), in an order that all ranks agree on. params:
 * of the grid that cuts all of them. -ENOMEM, -EOVERFLOW (bytes of all tensors), -BASE_ELIMIT (tensors), or what
 * tensor_shard_of, tensor_shard_list_check and tensor_grid_init return; err names the tensor's number.
 * Free with save_plan_release; after an error there is nothing to free. */
int save_plan_make(const struct save_tensor *tensors, uint32_t n, struct tensor_grid_params params, uint32_t rank,
	struct save_plan *ret_plan, struct base_error *err);
void save_plan_release(struct save_plan *p); /* NULL-safe */

#endif
