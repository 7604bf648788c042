/* SPDX-License-Identifier: Apache-2.0
 *
 * load_tensors: the description of a destination, checked by the rules of a save. */
#include <inttypes.h>
#include <string.h>

#include "core/api/api_load_internal.h"
#include "core/base/cleanup.h"
#include "core/tensor/dtype.h"

/* ---- what the caller says ---- */

static int holding_known(const struct vckpt_tensor *t, struct base_error *err)
{
	struct tensor_description d;
	int r = api_tensor_describe(t, &d, err);

	if (r < 0)
		return r;
	if ((t->flags & VCKPT_TENSOR_ALONE) && (t->mesh || t->placements || t->same_dims || t->flat
		|| (t->flags & VCKPT_TENSOR_BOXES)))
		return base_error_set(err, -EINVAL,
			"one rank alone holds it, whole: mesh, placements, same_dims, flat and boxes cannot be given");
	if ((t->flags & VCKPT_TENSOR_BOXES) && (t->placements || t->flat))
		return base_error_set(err, -EINVAL, "boxes exclude placements and a flat range");
	if (t->placements && !t->mesh)
		return base_error_set(err, -EINVAL, "placements are given, but no mesh");
	return 0;
}

static int holding_boxes(struct load_holding *h, struct base_error *err)
{
	const struct vckpt_tensor *t = h->t;
	uint64_t items = 0;
	int r;

	if (t->nboxes && t->ndim && !t->boxes)
		return base_error_set(err, -EINVAL, "its boxes are missing");
	h->boxes = (struct tensor_boxes){.ndim = t->ndim, .n = t->nboxes, .room = t->nboxes,
		.pairs = (uint64_t *)(uintptr_t)t->boxes}; /* only read */
	r = tensor_shard_list_check(&h->shape, &h->boxes, err);
	for (size_t i = 0; r == 0 && i < h->boxes.n; i++) {
		struct tensor_box box;

		tensor_boxes_get(&h->boxes, i, &box);
		items += tensor_box_items(&h->shape, &box);
	}
	h->local = (struct tensor_shape){.ndim = 1, .dim = {items}};
	return r;
}

static int holding_shard(const struct vckpt_load *load, struct load_holding *h, struct base_error *err)
{
	static const struct tensor_placement replicate[TENSOR_MAX_DIMS];
	base_cleanup_free struct tensor_placements *words = NULL;
	const struct vckpt_tensor *t = h->t;
	struct tensor_sharding s = {.shape = h->shape, .item_bytes = h->item_bytes, .placement = replicate,
		.mesh = t->mesh ? t->mesh->mesh : load->alone};
	int r = t->placements ? tensor_placements_parse(t->placements, &words, err) : 0;

	if (r == 0 && words)
		s.placement = words->at;
	if (r == 0)
		r = tensor_sharding_check(&s, words ? words->n : s.mesh->ndim, err);
	if (r < 0 || (t->flags & VCKPT_TENSOR_BOXES))
		return r < 0 ? r : holding_boxes(h, err);
	r = tensor_shard_of(&s, load->rank, (const struct tensor_flat *)t->flat, &h->shard, err);
	h->local = r == 0 && h->shard.absent ? (struct tensor_shape){.ndim = 1} : h->shard.local_shape;
	return r;
}

int load_holding_memory(const struct vckpt_load *load, const struct load_holding *h, struct base_error *err)
{
	const struct vckpt_tensor *t = h->t;
	uint64_t items;
	int r = tensor_shape_items(&h->local, h->item_bytes, &items);

	if (r < 0)
		return base_error_set(err, r, "its local shape: %s", base_error_name(r));
	if (items == 0)
		return 0;
	r = tensor_shard_check_local(&h->local, load->rank, t->local_ndim, t->local_shape, t->strides, err);
	if (r == 0 && t->strides)
		r = api_strides_check(h->local.ndim, h->local.dim, h->item_bytes, t->strides, err);
	if (r == 0 && !t->data)
		r = base_error_set(err, -EINVAL, "its data is a null pointer");
	return r;
}

int load_holding_of(const struct vckpt_load *load, const struct vckpt_tensor *t, struct load_holding *ret_h,
	struct base_error *err)
{
	int r = holding_known(t, err);

	*ret_h = (struct load_holding){.t = t, .shape.ndim = t->ndim};
	if (r < 0)
		return r;
	ret_h->item_bytes = tensor_dtype_bytes((enum tensor_dtype)t->dtype);
	if (t->ndim)
		memcpy(ret_h->shape.dim, t->shape, t->ndim * sizeof *t->shape);
	return holding_shard(load, ret_h, err);
}
