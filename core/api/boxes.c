/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes: what every description of a tensor has; and which boxes of it a rank holds, and where in its memory, by the
 * very description that a save takes: what is read back is placed where a save would look for it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/api/api_internal.h"
#include "core/base/plural.h"

_Static_assert(sizeof(struct tensor_flat) == 3 * sizeof(uint64_t) && offsetof(struct tensor_flat, to) == 8
	&& offsetof(struct tensor_flat, len) == 16, "a flat range is handed through");

int api_dtype_check(uint32_t dtype, const char *what, struct base_error *err)
{
	return tensor_dtype_valid(dtype) ? 0 : base_error_set(err, -EINVAL, "%s %" PRIu32 " is not known: it is one "
		"of enum vckpt_dtype, %d to %d", what, dtype, VCKPT_BOOL, VCKPT_F4_E2M1FN_X2);
}

/* Shape, dimensions, dtype, flags. */
static int tensor_check(const struct vckpt_tensor *t, struct base_error *err)
{
	const uint32_t known = VCKPT_TENSOR_DEVICE | VCKPT_TENSOR_BUFFER | VCKPT_TENSOR_BOXES | VCKPT_TENSOR_ALONE;
	int r;

	if (t->ndim > VCKPT_DIMS_MAX || t->local_ndim > VCKPT_DIMS_MAX)
		return base_error_set(err, -EINVAL, "it has %" PRIu32 " dimensions (%" PRIu32 " in the local shape): "
			"at most %u are possible", t->ndim, t->local_ndim, VCKPT_DIMS_MAX);
	if (t->ndim && !t->shape)
		return base_error_set(err, -EINVAL, "its shape is a null pointer, for %" PRIu32 " %s", t->ndim,
			base_plural(t->ndim, "dimension", "dimensions"));
	r = api_reserved_check(t->reserved, "vckpt_tensor", err);
	if (r == 0)
		r = api_dtype_check(t->dtype, "its dtype", err);
	return r < 0 ? r : api_flags_check(t->flags, known, "the tensor", "VCKPT_TENSOR_...", err);
}

int api_tensor_describe(const struct vckpt_tensor *t, struct tensor_description *ret_d, struct base_error *err)
{
	int r = tensor_check(t, err);

	if (r < 0)
		return r;
	*ret_d = (struct tensor_description){.component = t->component, .name = t->name,
		.dtype = (enum tensor_dtype)t->dtype, .shape.ndim = t->ndim, .mesh = t->mesh ? t->mesh->mesh : NULL,
		.placements = t->placements, .flat = (const struct tensor_flat *)t->flat,
		.has_boxes = t->flags & VCKPT_TENSOR_BOXES, .boxes = t->boxes, .nboxes = t->nboxes,
		.same_dims = t->same_dims, .data = t->data, .strides = t->strides, .local_shape = t->local_shape,
		.local_ndim = t->local_ndim, .device = t->flags & VCKPT_TENSOR_DEVICE,
		.buffer = t->flags & VCKPT_TENSOR_BUFFER, .alone = t->flags & VCKPT_TENSOR_ALONE};
	if (t->ndim)
		memcpy(ret_d->shape.dim, t->shape, t->ndim * sizeof *t->shape);
	return 0;
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
	struct base_error *e = api_error(err);
	struct tensor_description d;
	struct tensor_shard shard;
	int r = api_given(t, "tensor", e);

	if (r == 0 && (!ret_boxes || !ret_n))
		r = base_error_set(e, -EINVAL, "no place for the boxes is given");
	if (r < 0)
		return r;
	r = api_tensor_describe(t, &d, e);
	if (r == 0 && (t->flags & (VCKPT_TENSOR_BOXES | VCKPT_TENSOR_ALONE)))
		r = base_error_set(e, -EINVAL, "boxes are computed of a mesh and placements, which VCKPT_TENSOR_BOXES "
			"and VCKPT_TENSOR_ALONE exclude");
	if (r == 0)
		r = api_given(t->mesh, "mesh", e);
	if (r == 0)
		r = tensor_description_shard(&d, d.mesh, rank, &shard, e);
	if (r == 0)
		r = boxes_list(&shard, ret_boxes, ret_n, e);
	return r == 0 ? 0 : base_error_prefix(e, r, "tensor %.100s/%.200s", t->component ? t->component : "",
		t->name ? t->name : "");
}
