/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_loop: the loops that tests/bench/plan.py times, so that calls from Python are not what is measured. Each returns
 * nanoseconds of wall time, or what is negative. */
#include <time.h>

#include "core/save/plan/plan.h"

int64_t bench_own_boxes(const struct tensor_sharding *s, uint32_t n, uint32_t rank, uint64_t *ret_boxes);
int64_t bench_plan(const struct save_tensor *tensors, uint32_t n, const struct tensor_grid_params *params,
	uint32_t rank, uint64_t *ret_pieces, uint64_t *ret_bytes);

static int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Checks the sharding of each tensor, and walks the boxes that `rank` holds. */
int64_t bench_own_boxes(const struct tensor_sharding *s, uint32_t n, uint32_t rank, uint64_t *ret_boxes)
{
	int64_t start = now_ns();
	struct tensor_shard_iter it;
	struct tensor_shard shard;

	*ret_boxes = 0;
	for (uint32_t t = 0; t < n; t++) {
		int r = tensor_sharding_check(&s[t], s[t].mesh->ndim, NULL);

		if (r == 0)
			r = tensor_shard_of(&s[t], rank, NULL, &shard, NULL);
		if (r < 0)
			return r;
		for (tensor_shard_first(&it, &shard, NULL); !it.done; tensor_shard_next(&it))
			(*ret_boxes)++;
	}
	return now_ns() - start;
}

/* Checks the sharding of each tensor, plans, and walks all pieces of the plan. */
int64_t bench_plan(const struct save_tensor *tensors, uint32_t n, const struct tensor_grid_params *params,
	uint32_t rank, uint64_t *ret_pieces, uint64_t *ret_bytes)
{
	int64_t start = now_ns();
	struct save_plan plan;
	int r = 0;

	for (uint32_t t = 0; r == 0 && t < n; t++)
		r = tensor_sharding_check(&tensors[t].sharding, tensors[t].sharding.mesh->ndim, NULL);
	if (r == 0)
		r = save_plan_make(tensors, n, *params, rank, &plan, NULL);
	if (r < 0)
		return r;
	*ret_pieces = *ret_bytes = 0;
	for (uint64_t i = 0; i < plan.nboxes; i++) {
		const struct tensor_sharding *s = &tensors[plan.boxes[i].tensor].sharding;
		struct tensor_piece_iter it;
		struct tensor_grid g;

		tensor_grid_init(&g, &s->shape, s->item_bytes, *params);
		for (tensor_piece_first(&it, &g, &plan.boxes[i].at.box); !it.done; tensor_piece_next(&it)) {
			(*ret_pieces)++;
			*ret_bytes += tensor_box_items(&g.shape, &it.piece) * g.item_bytes;
		}
	}
	if (*ret_pieces != plan.pieces || *ret_bytes != plan.bytes)
		r = -EPROTO;
	save_plan_release(&plan);
	return r < 0 ? r : now_ns() - start;
}
