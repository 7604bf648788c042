/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_internal: what a rank holds of one tensor, as plan.c and replica.c walk it. One thread at a time. */
#ifndef CORE_SAVE_PLAN_PLAN_INTERNAL_H
#define CORE_SAVE_PLAN_PLAN_INTERNAL_H

#include "core/save/plan/plan.h"

/* Boxes of a shard, or of a list. */
struct save_held {
	struct tensor_shard shard;
	struct tensor_shard_iter it;
	struct tensor_shard_list list;
	const struct tensor_boxes *boxes;       /* NULL: the shard's */
};
/* s: the tensor's sharding, with a mesh. -EINVAL and what tensor_shard_of and tensor_shard_list_check return. */
int save_held_init(struct save_held *h, const struct save_tensor *tensor, const struct tensor_sharding *s,
	uint32_t rank, struct base_error *err);
/* The first box, the one after the last one given (NULL); NULL: that was all. */
const struct tensor_shard_box *save_held_first(struct save_held *h);
const struct tensor_shard_box *save_held_next(struct save_held *h);
uint64_t save_held_items(struct save_held *h);
/* The mesh dimensions along which several ranks hold the same boxes of it, as a mask. */
uint32_t save_held_alike(const struct save_tensor *tensor, const struct tensor_sharding *s);

#endif
