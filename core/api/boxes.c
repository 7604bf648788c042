/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes: which boxes of a tensor a rank holds, and where in its memory, by the very description that a save takes: what
 * is read back is placed where a save would look for it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/api/api_internal.h"
#include "core/base/cleanup.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shard.h"

static int boxes_shard(const struct vckpt_tensor *t, const struct tensor_placements *words, uint32_t rank,
	struct tensor_shard *ret_shard, struct base_error *err)
{
	static const struct tensor_placement replicate[TENSOR_MAX_DIMS];
	struct tensor_sharding s = {.shape.ndim = t->ndim, .mesh = t->mesh->mesh,
		.item_bytes = tensor_dtype_bytes((enum tensor_dtype)t->dtype),
		.placement = words ? words->at : replicate};
	int r;

	memcpy(s.shape.dim, t->shape, t->ndim * sizeof *t->shape);
	r = tensor_sharding_check(&s, words ? words->n : s.mesh->ndim, err);
	return r < 0 ? r : tensor_shard_of(&s, rank, (const struct tensor_flat *)t->flat, ret_shard, err);
}

/* (offset, size) of each dimension, the place in the buffer, its strides. */
static uint64_t *boxes_put(uint64_t *to, uint32_t ndim, const struct tensor_shard_box *b)
{
	for (uint32_t d = 0; d < ndim; d++) {
		*to++ = b->box.offset[d];
		*to++ = b->box.size[d];
	}
	*to++ = b->local_offset;
	memcpy(to, b->local_stride, ndim * sizeof *to);
	return to + ndim;
}

static int boxes_list(const struct tensor_shard *shard, uint64_t **ret_boxes, size_t *ret_n, struct base_error *err)
{
	uint64_t n = shard->absent ? 0 : tensor_shard_box_count(shard), *to;
	struct tensor_shard_iter it;

	to = calloc(n + 1, (3 * shard->shape.ndim + 1) * sizeof *to);
	if (!to)
		return base_no_memory_for(err, "%" PRIu64 " boxes", n);
	*ret_boxes = to;
	*ret_n = n;
	if (n == 0)
		return 0;
	for (tensor_shard_first(&it, shard, NULL); !it.done; tensor_shard_next(&it))
		to = boxes_put(to, shard->shape.ndim, &it.at);
	return 0;
}

int vckpt_tensor_boxes(const struct vckpt_tensor *t, uint32_t rank, uint64_t **ret_boxes, size_t *ret_n,
	struct vckpt_error *err)
{
	base_cleanup_free struct tensor_placements *words = NULL;
	struct base_error *e = api_error(err);
	struct tensor_shard shard;
	int r = 0;

	if (!t || !t->mesh || t->ndim > TENSOR_MAX_DIMS || (t->ndim && !t->shape)
		|| (t->flags & (VCKPT_TENSOR_BOXES | VCKPT_TENSOR_ALONE)))
		return base_error_set(e, -EINVAL, "no tensor, or one without mesh or shape");
	if (!tensor_dtype_valid(t->dtype))
		return base_error_set(e, -EINVAL, "dtype %" PRIu32 " is unknown", t->dtype);
	if (t->placements)
		r = tensor_placements_parse(t->placements, &words, e);
	if (r == 0)
		r = boxes_shard(t, words, rank, &shard, e);
	if (r == 0)
		r = boxes_list(&shard, ret_boxes, ret_n, e);
	return api_result(r, e);
}
