/* SPDX-License-Identifier: Apache-2.0
 *
 * destination: what a rank has of a tensor that it loads, by the description and the rules of a save. */
#include <inttypes.h>

#include "core/load/loader/loader_internal.h"

static int description_check(const struct tensor_description *t, struct base_error *err)
{
	if (t->alone && (t->mesh || t->placements || t->same_dims || t->flat || t->has_boxes))
		return base_error_set(err, -EINVAL,
			"one rank alone holds it, whole: mesh, placements, same_dims, flat and boxes cannot be given");
	if (t->has_boxes && (t->placements || t->flat))
		return base_error_set(err, -EINVAL, "boxes exclude placements and a flat range");
	if (t->placements && !t->mesh)
		return base_error_set(err, -EINVAL, "placements are given, but no mesh");
	return 0;
}

static int destination_boxes(struct destination *d, struct base_error *err)
{
	const struct tensor_description *t = d->t;
	struct tensor_box box;
	uint64_t items = 0;
	int r;

	if (t->nboxes && t->shape.ndim && !t->boxes)
		return base_error_set(err, -EINVAL, "its boxes are missing");
	d->boxes = (struct tensor_boxes){.ndim = t->shape.ndim, .n = t->nboxes, .room = t->nboxes,
		.pairs = (uint64_t *)(uintptr_t)t->boxes}; /* only read */
	r = tensor_shard_list_check(&t->shape, &d->boxes, err);
	for (size_t i = 0; r == 0 && i < d->boxes.n; i++) {
		tensor_boxes_get(&d->boxes, i, &box);
		items += tensor_box_items(&t->shape, &box);
	}
	d->local = (struct tensor_shape){.ndim = 1, .dim = {items}};
	return r;
}

int destination_of(const struct loader *l, const struct tensor_description *t, struct destination *ret_d,
	struct base_error *err)
{
	int r = description_check(t, err);

	*ret_d = (struct destination){.t = t, .item_bytes = tensor_dtype_bytes(t->dtype)};
	if (r == 0)
		r = tensor_description_shard(t, t->mesh ? t->mesh : l->alone, l->options.rank, &ret_d->shard, err);
	if (r == 0 && t->has_boxes)
		return destination_boxes(ret_d, err);
	ret_d->local = ret_d->shard.absent ? (struct tensor_shape){.ndim = 1} : ret_d->shard.local_shape;
	return r;
}

int destination_memory(const struct loader *l, const struct destination *d, struct base_error *err)
{
	const struct tensor_description *t = d->t;
	uint64_t items;
	int r = tensor_shape_items(&d->local, d->item_bytes, &items);

	if (r < 0)
		return base_error_set(err, r, "its local shape: %s", base_error_name(r));
	if (items == 0)
		return 0;
	r = tensor_shard_check_local(&d->local, l->options.rank, t->local_ndim, t->local_shape, t->strides, err);
	if (r == 0 && t->strides)
		r = tensor_strides_check(&d->local, d->item_bytes, t->strides, err);
	if (r == 0 && !t->data)
		r = base_error_set(err, -EINVAL, "its data is a null pointer");
	return r;
}

/* ---- its boxes ---- */

struct walk {
	const struct destination *d;
	const struct tensor_box *window;
	int (*f)(void *arg, const struct tensor_box *part, uint8_t *data, const int64_t *stride);
	void *arg;
};

static int walk_box(const struct walk *w, const struct tensor_shard_box *at)
{
	const struct tensor_description *t = w->d->t;
	int64_t from, stride[TENSOR_MAX_DIMS];
	struct tensor_box part;

	if (!tensor_box_intersect(t->shape.ndim, &at->box, w->window, &part))
		return 0;
	tensor_shard_memory(at, t->shape.ndim, &w->d->local, w->d->item_bytes, t->strides, &from, stride);
	for (uint32_t k = 0; k < t->shape.ndim; k++)
		from += (int64_t)(part.offset[k] - at->box.offset[k]) * stride[k];
	return w->f(w->arg, &part, (uint8_t *)((uintptr_t)t->data + (uintptr_t)from), stride);
}

int destination_walk(const struct destination *d, const struct tensor_box *window,
	int (*f)(void *arg, const struct tensor_box *part, uint8_t *data, const int64_t *stride), void *arg)
{
	const struct walk w = {d, window, f, arg};
	struct tensor_shard_list list;
	struct tensor_shard_iter it;
	int r = 0;

	if (tensor_box_empty(d->t->shape.ndim, window))
		return 0;
	if (d->t->has_boxes) {
		for (tensor_shard_list_first(&list, &d->boxes); r == 0 && !list.done; tensor_shard_list_next(&list))
			r = walk_box(&w, &list.at);
	} else if (!d->shard.absent && tensor_shard_items(&d->shard)) {
		for (tensor_shard_first(&it, &d->shard, window); r == 0 && !it.done; tensor_shard_next(&it))
			r = walk_box(&w, &it.at);
	}
	return r;
}
