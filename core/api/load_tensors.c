/* SPDX-License-Identifier: Apache-2.0
 *
 * load_tensors: the description of a tensor, checked by the rules of a save, against the step, and turned into boxes
 * with places and strides in the caller's memory. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/api/api_load_internal.h"
#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shard.h"

#define SHAPE_TEXT 160

/* One description: what the rank has of the tensor. */
struct load_holding {
	const struct vckpt_tensor *t;
	struct tensor_shape shape, local;
	unsigned item_bytes;
	struct tensor_shard shard;
	struct tensor_boxes boxes;       /* with VCKPT_TENSOR_BOXES: the caller's memory */
};

/* ---- what the caller says ---- */

static int holding_known(const struct vckpt_tensor *t, struct base_error *err)
{
	const uint32_t known = VCKPT_TENSOR_DEVICE | VCKPT_TENSOR_BUFFER | VCKPT_TENSOR_BOXES | VCKPT_TENSOR_ALONE;

	if (!t->component || !t->name)
		return base_error_set(err, -EINVAL, "a tensor needs a component and a name");
	if (t->ndim > TENSOR_MAX_DIMS || t->local_ndim > TENSOR_MAX_DIMS || (t->ndim && !t->shape))
		return base_error_set(err, -EINVAL, "it has no shape, or more than %u dimensions", TENSOR_MAX_DIMS);
	if (t->flags & ~known)
		return base_error_set(err, -EINVAL, "flags that are not known");
	if (t->flags & VCKPT_TENSOR_DEVICE)
		return base_error_set(err, -EOPNOTSUPP,
			"a load into device memory is not there yet: load into host memory and copy");
	if (!tensor_dtype_valid(t->dtype))
		return base_error_set(err, -EINVAL, "dtype %" PRIu32 " is not known", t->dtype);
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

static int holding_memory(const struct vckpt_load *load, const struct load_holding *h, struct base_error *err)
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

/* ---- against the step ---- */

static const char *shape_text(const struct tensor_shape *s, char text[static SHAPE_TEXT])
{
	size_t len = 0;

	text[0] = 0;
	for (uint32_t d = 0; d < s->ndim && len < SHAPE_TEXT - 30; d++)
		len += (size_t)snprintf(text + len, SHAPE_TEXT - len, "%s%" PRIu64, d ? "," : "", s->dim[d]);
	return text;
}

static int holding_matches(const struct load_holding *h, const struct load_tensor_info *info, struct base_error *err)
{
	char has[SHAPE_TEXT], wants[SHAPE_TEXT];

	if (info->dtype == (enum tensor_dtype)h->t->dtype && tensor_shape_equal(&info->shape, &h->shape))
		return 0;
	return base_error_set(err, -EINVAL, "the step has it as %s (%s), and it is to be loaded as %s (%s)",
		tensor_dtype_name(info->dtype), shape_text(&info->shape, has),
		tensor_dtype_name((enum tensor_dtype)h->t->dtype), shape_text(&h->shape, wants));
}

/* ---- the tape ---- */

static int tape_box(struct vckpt_load *load, const struct load_holding *h, const struct tensor_shard_box *at)
{
	int64_t from, stride[TENSOR_MAX_DIMS];
	uint32_t ndim = h->shape.ndim;
	uint64_t *to;

	if (base_array_room(load->tape, load->tape_room, load->ntape + 1 + 3 * (size_t)ndim) < 0)
		return -ENOMEM;
	to = load->tape + load->ntape;
	tensor_shard_place(at, ndim, &h->local, h->item_bytes, h->t->strides, &from, stride);
	*to++ = (uint64_t)(uintptr_t)h->t->data + (uint64_t)from;
	for (uint32_t d = 0; d < ndim; d++) {
		to[d] = at->box.offset[d];
		to[ndim + d] = at->box.size[d];
		to[2 * ndim + d] = (uint64_t)stride[d];
	}
	load->ntape += 1 + 3 * (size_t)ndim;
	return 0;
}

static int tape_boxes(struct vckpt_load *load, const struct load_holding *h, uint64_t *ret_n)
{
	struct tensor_shard_list list;
	struct tensor_shard_iter it;
	int r = 0;

	*ret_n = 0;
	if (h->t->flags & VCKPT_TENSOR_BOXES) {
		for (tensor_shard_list_first(&list, &h->boxes); r == 0 && !list.done; tensor_shard_list_next(&list)) {
			if (tensor_box_empty(h->shape.ndim, &list.at.box))
				continue;
			r = tape_box(load, h, &list.at);
			++*ret_n;
		}
	} else if (!h->shard.absent && tensor_shard_items(&h->shard)) {
		for (tensor_shard_first(&it, &h->shard, NULL); r == 0 && !it.done; tensor_shard_next(&it)) {
			r = tape_box(load, h, &it.at);
			++*ret_n;
		}
	}
	return r;
}

static int tape_tensor(struct vckpt_load *load, uint32_t tensor, const struct load_holding *h)
{
	size_t head = load->ntape;
	uint64_t n;
	int r;

	if (base_array_room(load->tape, load->tape_room, head + 2) < 0)
		return -ENOMEM;
	load->ntape += 2;
	r = tape_boxes(load, h, &n);
	load->tape[head] = tensor;
	load->tape[head + 1] = n;
	return r;
}

static int load_describe(struct vckpt_load *load, const struct vckpt_tensor *t, struct base_error *err)
{
	struct load_holding h = {.t = t, .shape.ndim = t->ndim};
	struct load_tensor_info info;
	int64_t tensor;
	int r = holding_known(t, err);

	if (r < 0)
		return r;
	h.item_bytes = tensor_dtype_bytes((enum tensor_dtype)t->dtype);
	if (t->ndim)
		memcpy(h.shape.dim, t->shape, t->ndim * sizeof *t->shape);
	r = holding_shard(load, &h, err);
	if (r < 0)
		return r;
	tensor = load_step_tensor_find(load->step->step, t->component, t->name, strlen(t->name));
	if (tensor >= 0) {
		load_step_tensor_info(load->step->step, (uint32_t)tensor, &info);
		r = holding_matches(&h, &info, err);
	}
	if (r == 0)
		r = holding_memory(load, &h, err);
	if (r < 0)
		return r;
	r = tensor < 0 ? load_names_add(&load->lacking, t->component, t->name, strlen(t->name))
		: tape_tensor(load, (uint32_t)tensor, &h);
	return r < 0 ? base_no_memory(err) : 0;
}

int load_declare(struct vckpt_load *load, const struct vckpt_tensor *t, struct base_error *err)
{
	const struct load_step_info *step = load_step_info(load->step->step);
	int r = load_describe(load, t, err);

	return r == 0 ? 0 : base_error_prefix(err, r, "%.100s/%" PRIu64 ": tensor %.100s/%.200s", step->run, step->step,
		t->component ? t->component : "", t->name ? t->name : "");
}

int load_fill_tape(struct vckpt_load *load, struct base_error *err)
{
	struct load_tensor_info info;
	size_t nboxes = 0, room = 0;

	for (size_t at = 0; at < load->ntape;) {
		uint32_t tensor = (uint32_t)load->tape[at], ndim;
		uint64_t n = load->tape[at + 1];

		load_step_tensor_info(load->step->step, tensor, &info);
		ndim = info.shape.ndim;
		at += 2;
		for (; n > 0; n--, at += 1 + 3 * (size_t)ndim) {
			const uint64_t *from = load->tape + at + 1;
			struct tensor_box box = {0};
			int r;

			memcpy(box.offset, from, ndim * sizeof *from);
			memcpy(box.size, from + ndim, ndim * sizeof *from);
			r = load_fill_add(load->fill, tensor, &box, (void *)(uintptr_t)load->tape[at], from + 2 * ndim,
				err);
			if (r < 0)
				return r;
			if (base_array_room(load->tensors, room, nboxes + 1) < 0)
				return base_no_memory(err);
			load->tensors[nboxes++] = tensor;
		}
	}
	return 0;
}
