/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_internal: what a rank holds of one tensor, as plan.c and replica.c walk it. One thread at a time. */
#ifndef CORE_SAVE_PLAN_PLAN_INTERNAL_H
#define CORE_SAVE_PLAN_PLAN_INTERNAL_H

#include "core/base/table.h"
#include "core/save/plan/plan.h"

/* Groups of a mesh's ranks along some of its dimensions, by mesh pointer and dimensions: almost all tensors share a
 * few. Zero-initialise. */
struct save_pairs {
	struct save_pair { const struct tensor_mesh *mesh; uint32_t dims, group; } *all;
	uint32_t n, room;
	struct base_table by_mesh;
};
/* The group that was added for them, or BASE_TABLE_NONE. */
uint32_t save_pairs_find(const struct save_pairs *p, const struct tensor_mesh *mesh, uint32_t dims);
int save_pairs_add(struct save_pairs *p, const struct tensor_mesh *mesh, uint32_t dims, uint32_t group); /* -ENOMEM */
void save_pairs_release(struct save_pairs *p);

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
