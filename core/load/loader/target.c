/* SPDX-License-Identifier: Apache-2.0
 *
 * target: which slice of which stored tensor goes into which slice of a destination, and its boxes to the fill. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/array.h"
#include "core/load/loader/loader_internal.h"
#include "core/tensor/convert.h"

#define SHAPE_TEXT 160

static int convert_refuse(enum tensor_dtype from, enum tensor_dtype to, struct base_error *err)
{
	return base_error_set(err, -EINVAL, "%s cannot be converted to %s", tensor_dtype_name(from),
		tensor_dtype_name(to));
}

static const char *shape_text(uint32_t ndim, const uint64_t *dim, char text[static SHAPE_TEXT])
{
	size_t len = 0;

	text[0] = 0;
	for (uint32_t d = 0; d < ndim && len < SHAPE_TEXT - 30; d++)
		len += (size_t)snprintf(text + len, SHAPE_TEXT - len, "%s%" PRIu64, d ? "," : "", dim[d]);
	return text;
}

/* ---- the slice ---- */

/* One target while it is declared. */
struct target {
	struct loader *l;
	const struct loader_target *given;
	struct base_error *err;
	struct destination to;
	uint32_t tensor;                 /* of the step */
	struct load_tensor_info stored;
	uint64_t offset[TENSOR_MAX_DIMS], size[TENSOR_MAX_DIMS]; /* of the slice, in the stored tensor */
	uint64_t at[TENSOR_MAX_DIMS];    /* its first item in the destination */
	uint32_t partner[TENSOR_MAX_DIMS]; /* by stored dimension: the destination's, or TENSOR_MAX_DIMS: one index */
	struct tensor_box window;        /* of the destination: what the step has of it */
};

static int target_slice(struct target *t, struct base_error *err)
{
	const struct tensor_shape *s = &t->stored.shape;
	const uint64_t *from = t->given->from;

	if (from && t->given->from_ndim != s->ndim)
		return base_error_set(err, -EINVAL, "the slice has %" PRIu32 " dimensions, and the stored tensor %"
			PRIu32, t->given->from_ndim, s->ndim);
	for (uint32_t d = 0; d < s->ndim; d++) {
		t->offset[d] = from ? from[2 * d] : 0;
		t->size[d] = from ? from[2 * d + 1] : s->dim[d];
		if (t->size[d] > s->dim[d] || t->offset[d] > s->dim[d] - t->size[d])
			return base_error_set(err, -EINVAL, "the slice has %" PRIu64 " items from %" PRIu64 " on in "
				"dimension %" PRIu32 " of the stored tensor, which has %" PRIu64, t->size[d],
				t->offset[d], d, s->dim[d]);
	}
	for (uint32_t k = 0; t->given->at && k < t->to.t->shape.ndim; k++) {
		t->at[k] = t->given->at[k];
		if (t->at[k] > t->to.t->shape.dim[k])
			return base_error_set(err, -EINVAL, "the slice is to begin at %" PRIu64 " in dimension %"
				PRIu32 " of the destination, which has %" PRIu64, t->at[k], k, t->to.t->shape.dim[k]);
	}
	return 0;
}

/* Pairs dimensions of the slice with those of the destination. Where their numbers differ and a slice is given, those
 * of one index on the longer side have no partner; where a place is given, the destination's first ones. */
static bool target_pair(struct target *t)
{
	uint32_t ndim = t->stored.shape.ndim, other = t->to.t->shape.ndim, d = 0, k = 0;

	while (d < ndim || k < other) {
		if (ndim - d > other - k) {
			if (t->size[d] != 1 && k < other)
				t->partner[d++] = k++;
			else if (t->size[d] != 1 || !t->given->from)
				return false;
			else
				t->partner[d++] = TENSOR_MAX_DIMS;
		} else if (ndim - d < other - k) {
			if (t->given->at)
				k++;
			else if (t->to.t->shape.dim[k] != 1 && d < ndim)
				t->partner[d++] = k++;
			else if (t->to.t->shape.dim[k] != 1 || !t->given->from)
				return false;
			else
				k++;
		} else {
			t->partner[d++] = k++;
		}
	}
	return true;
}

/* The window: false, where the sizes do not fit. */
static bool target_window(struct target *t)
{
	const struct tensor_shape *to = &t->to.t->shape;
	bool resize = t->given->resize;

	for (uint32_t k = 0; k < to->ndim; k++) {
		t->window.offset[k] = t->at[k];
		t->window.size[k] = 1; /* if it has no partner */
	}
	for (uint32_t d = 0; d < t->stored.shape.ndim; d++) {
		uint32_t k = t->partner[d];
		uint64_t room;

		if (k == TENSOR_MAX_DIMS)
			continue;
		room = to->dim[k] - t->at[k];
		if (!resize && (t->given->at ? t->size[d] > room : t->size[d] != room))
			return false;
		t->window.size[k] = base_min(t->size[d], room);
	}
	return tensor_box_inside(to, &t->window);
}

/* What the caller can do about it. */
static const char *target_hint(const struct target *t, bool pairs, bool fits)
{
	enum tensor_dtype from = t->stored.dtype, to = t->to.t->dtype;

	if (!pairs || (!fits && t->given->resize))
		return "";
	if (!fits)
		return ": a target with VCKPT_TARGET_RESIZE loads what fits";
	return tensor_convert_possible(from, to) ? ": a target with VCKPT_TARGET_CONVERT converts it"
		: ": the one cannot be converted to the other";
}

static int target_unfit(const struct target *t, const char *hint, struct base_error *err)
{
	char has[SHAPE_TEXT], wants[SHAPE_TEXT], some[SHAPE_TEXT], at[SHAPE_TEXT];
	const char *from = tensor_dtype_name(t->stored.dtype);
	const char *to = tensor_dtype_name(t->to.t->dtype);

	shape_text(t->stored.shape.ndim, t->stored.shape.dim, has);
	shape_text(t->to.t->shape.ndim, t->to.t->shape.dim, wants);
	if (!t->given->from && !t->given->at)
		return base_error_set(err, -EINVAL, "the step has it as %s (%s), and it is to be loaded as %s (%s)%s",
			from, has, to, wants, hint);
	return base_error_set(err, -EINVAL, "a slice (%s) of what the step has as %s (%s) is to be loaded into %s (%s) "
		"at (%s)%s", shape_text(t->stored.shape.ndim, t->size, some), from, has, to, wants,
		shape_text(t->to.t->shape.ndim, t->at, at), hint);
}

static int target_matches(struct target *t, struct base_error *err)
{
	enum tensor_dtype to = t->to.t->dtype;
	int r = target_slice(t, err);
	bool pairs, fits;

	if (r < 0)
		return r;
	pairs = target_pair(t);
	fits = pairs && target_window(t);
	if (!fits || (to != t->stored.dtype && !(t->given->convert)))
		return target_unfit(t, target_hint(t, pairs, fits), err);
	if (!tensor_convert_possible(t->stored.dtype, to))
		return convert_refuse(t->stored.dtype, to, err);
	return 0;
}

/* ---- boxes ---- */

static struct load_fill_memory target_memory(const struct target *t, uint8_t *data, const uint64_t *stride)
{
	return (struct load_fill_memory){.data = data, .stride = stride, .dtype = t->to.t->dtype,
		.device = t->to.t->device, .destination = (uint32_t)t->l->ndeclared};
}

/* A part of the window, in the coordinates of the destination. */
static int target_add(void *arg, const struct tensor_box *part, uint8_t *data, const int64_t *stride)
{
	const struct target *t = arg;
	uint64_t stored_stride[TENSOR_MAX_DIMS] = {0};
	const struct load_fill_memory memory = target_memory(t, data, stored_stride);
	struct tensor_box box = {0};

	for (uint32_t d = 0; d < t->stored.shape.ndim; d++) {
		uint32_t k = t->partner[d];
		bool one = k == TENSOR_MAX_DIMS;

		box.offset[d] = t->offset[d] + (one ? 0 : part->offset[k] - t->window.offset[k]);
		box.size[d] = one ? 1 : part->size[k];
		stored_stride[d] = one ? 0 : (uint64_t)stride[k];
	}
	return load_fill_add_to(t->l->fill, t->tensor, &box, &memory, t->err);
}

static int target_zero(void *arg, const struct tensor_box *part, uint8_t *data, const int64_t *stride)
{
	const struct target *t = arg;
	const struct load_fill_memory memory = target_memory(t, data, (const uint64_t *)stride);
	struct tensor_shape size = {.ndim = t->to.t->shape.ndim};

	memcpy(size.dim, part->size, sizeof size.dim);
	return load_fill_zero(t->l->fill, t->tensor, &size, &memory);
}

/* Zeros outside the window: below and above it in each dimension, within it in the dimensions before. */
static int target_rest(struct target *t)
{
	struct tensor_box rest, some;
	int r = 0;

	tensor_box_whole(&t->to.t->shape, &rest);
	for (uint32_t d = 0; r == 0 && d < t->to.t->shape.ndim; d++) {
		uint64_t end = t->window.offset[d] + t->window.size[d];

		some = rest;
		some.size[d] = t->window.offset[d];
		r = destination_walk(&t->to, &some, target_zero, t);
		some.offset[d] = end;
		some.size[d] = t->to.t->shape.dim[d] - end;
		if (r == 0)
			r = destination_walk(&t->to, &some, target_zero, t);
		rest.offset[d] = t->window.offset[d];
		rest.size[d] = t->window.size[d];
	}
	return r;
}

/* ---- declaring ---- */

/* The step has no such tensor. It is listed under the caller's name, unless the target names a stored one. */
static int target_lacking(const struct target *t, const char *component, const char *stored)
{
	const char *name = t->given->name ? t->given->name : t->given->to->name;

	return names_add(&t->l->lacking, component, name, strlen(name), strcmp(name, stored) ? stored : "");
}

static int target_found(struct target *t)
{
	struct loader *l = t->l;
	int r;

	if (base_array_room(l->declared, l->declared_room, l->ndeclared + 1) < 0)
		return -ENOMEM;
	l->declared[l->ndeclared++] = t->tensor;
	r = destination_walk(&t->to, &t->window, target_add, t);
	return r == 0 && t->given->zero ? target_rest(t) : r;
}

static int target_declare(struct target *t, const char *component, const char *name)
{
	const struct load_step *step = t->l->step;
	struct base_error *err = t->err;
	int r = destination_of(t->l, t->given->to, &t->to, err);
	int64_t tensor;

	if (r < 0)
		return r;
	tensor = load_step_tensor_find(step, component, name, strlen(name));
	if (tensor >= 0) {
		t->tensor = (uint32_t)tensor;
		load_step_tensor_info(step, t->tensor, &t->stored);
		r = target_matches(t, err);
	}
	if (r == 0)
		r = destination_memory(t->l, &t->to, err);
	if (r < 0)
		return r;
	r = tensor >= 0 ? target_found(t) : target_lacking(t, component, name);
	return r == -ENOMEM ? base_no_memory(err) : r;
}

int loader_target(struct loader *l, const struct loader_target *target, struct base_error *err)
{
	const char *component = target->component ? target->component : target->to->component;
	const char *name = target->name ? target->name : target->to->name;
	struct target t = {.l = l, .given = target, .err = err};
	int r = component && name ? 0 : base_error_set(err, -EINVAL, "a tensor needs a component and a name");

	if (r == 0 && !target->name)
		r = rename_find(l, component, &name, err);
	if (r == 0)
		r = target_declare(&t, component, name);
	return r == 0 ? 0 : base_error_prefix(err, r, "%.100s/%" PRIu64 ": tensor %.100s/%.200s",
		load_step_info(l->step)->run, load_step_info(l->step)->step, component ? component : "",
		name ? name : "");
}
