/* SPDX-License-Identifier: Apache-2.0 */
#include "core/tensor/description.h"

#include "core/base/cleanup.h"

int tensor_description_shard(const struct tensor_description *t, const struct tensor_mesh *mesh, uint32_t rank,
	struct tensor_shard *ret_shard, struct base_error *err)
{
	static const struct tensor_placement replicate[TENSOR_MAX_DIMS];
	base_cleanup_free struct tensor_placements *words = NULL;
	struct tensor_sharding s = {.shape = t->shape, .item_bytes = tensor_dtype_bytes(t->dtype), .mesh = mesh,
		.placement = replicate};
	int r = t->placements ? tensor_placements_parse(t->placements, &words, err) : 0;

	if (r == 0 && words)
		s.placement = words->at;
	if (r == 0)
		r = tensor_sharding_check(&s, words ? words->n : mesh->ndim, err);
	return r < 0 || t->has_boxes ? r : tensor_shard_of(&s, rank, t->flat, ret_shard, err);
}
