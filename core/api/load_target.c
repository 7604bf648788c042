/* SPDX-License-Identifier: Apache-2.0
 *
 * load_target: which slice of which stored tensor goes into which slice of a destination. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/api/api_load_internal.h"
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

/* One target while it is checked. */
struct target_check {
	const struct vckpt_target *said;
	struct load_holding to;
	struct load_tensor_info stored;
	uint64_t offset[TENSOR_MAX_DIMS], size[TENSOR_MAX_DIMS]; /* of the slice, in the stored tensor */
	uint64_t at[TENSOR_MAX_DIMS];    /* its first item in the destination */
	struct load_slice slice;
};

static int target_slice(struct target_check *t, struct base_error *err)
{
	const struct tensor_shape *s = &t->stored.shape;
	const uint64_t *from = t->said->from;

	if (from && t->said->from_ndim != s->ndim)
		return base_error_set(err, -EINVAL, "the slice has %" PRIu32 " dimensions, and the stored tensor %"
			PRIu32, t->said->from_ndim, s->ndim);
	for (uint32_t d = 0; d < s->ndim; d++) {
		t->offset[d] = from ? from[2 * d] : 0;
		t->size[d] = from ? from[2 * d + 1] : s->dim[d];
		if (t->size[d] > s->dim[d] || t->offset[d] > s->dim[d] - t->size[d])
			return base_error_set(err, -EINVAL, "the slice has %" PRIu64 " items from %" PRIu64 " on in "
				"dimension %" PRIu32 " of the stored tensor, which has %" PRIu64, t->size[d],
				t->offset[d], d, s->dim[d]);
	}
	for (uint32_t k = 0; t->said->at && k < t->to.shape.ndim; k++) {
		t->at[k] = t->said->at[k];
		if (t->at[k] > t->to.shape.dim[k])
			return base_error_set(err, -EINVAL, "the slice is to begin at %" PRIu64 " in dimension %"
				PRIu32 " of the destination, which has %" PRIu64, t->at[k], k, t->to.shape.dim[k]);
	}
	return 0;
}

/* Pairs dimensions of the slice with those of the destination. Where their numbers differ and a slice is given, those
 * of one index on the longer side have no partner; where a place is given, the destination's first ones. */
static bool target_pair(struct target_check *t)
{
	uint32_t ndim = t->stored.shape.ndim, other = t->to.shape.ndim, d = 0, k = 0;

	t->slice.ndim = ndim;
	while (d < ndim || k < other) {
		if (ndim - d > other - k) {
			if (t->size[d] != 1 && k < other)
				t->slice.dim[d++] = k++;
			else if (t->size[d] != 1 || !t->said->from)
				return false;
			else
				t->slice.dim[d++] = TENSOR_MAX_DIMS;
		} else if (ndim - d < other - k) {
			if (t->said->at)
				k++;
			else if (t->to.shape.dim[k] != 1 && d < ndim)
				t->slice.dim[d++] = k++;
			else if (t->to.shape.dim[k] != 1 || !t->said->from)
				return false;
			else
				k++;
		} else {
			t->slice.dim[d++] = k++;
		}
	}
	return true;
}

/* The window: false, where the sizes do not fit. */
static bool target_window(struct target_check *t)
{
	const struct tensor_shape *to = &t->to.shape;
	bool resize = t->said->flags & VCKPT_TARGET_RESIZE;

	for (uint32_t k = 0; k < to->ndim; k++) {
		t->slice.window.offset[k] = t->at[k];
		t->slice.window.size[k] = 1; /* if it has no partner */
	}
	for (uint32_t d = 0; d < t->slice.ndim; d++) {
		uint32_t k = t->slice.dim[d];
		uint64_t room;

		t->slice.from[d] = t->offset[d];
		if (k == TENSOR_MAX_DIMS)
			continue;
		room = to->dim[k] - t->at[k];
		if (!resize && (t->said->at ? t->size[d] > room : t->size[d] != room))
			return false;
		t->slice.window.size[k] = base_min(t->size[d], room);
	}
	return tensor_box_inside(to, &t->slice.window);
}

/* What the caller can do about it. */
static const char *target_hint(const struct target_check *t, bool pairs, bool fits)
{
	enum tensor_dtype from = t->stored.dtype, to = (enum tensor_dtype)t->to.t->dtype;

	if (!pairs || (!fits && t->said->flags & VCKPT_TARGET_RESIZE))
		return "";
	if (!fits)
		return ": a target with VCKPT_TARGET_RESIZE loads what fits";
	return tensor_convert_possible(from, to) ? ": a target with VCKPT_TARGET_CONVERT converts it"
		: ": the one cannot be converted to the other";
}

static int target_unfit(const struct target_check *t, const char *hint, struct base_error *err)
{
	char has[SHAPE_TEXT], wants[SHAPE_TEXT], some[SHAPE_TEXT], at[SHAPE_TEXT];
	const char *from = tensor_dtype_name(t->stored.dtype);
	const char *to = tensor_dtype_name((enum tensor_dtype)t->to.t->dtype);

	shape_text(t->stored.shape.ndim, t->stored.shape.dim, has);
	shape_text(t->to.shape.ndim, t->to.shape.dim, wants);
	if (!t->said->from && !t->said->at)
		return base_error_set(err, -EINVAL, "the step has it as %s (%s), and it is to be loaded as %s (%s)%s",
			from, has, to, wants, hint);
	return base_error_set(err, -EINVAL, "a slice (%s) of what the step has as %s (%s) is to be loaded into %s (%s) "
		"at (%s)%s", shape_text(t->stored.shape.ndim, t->size, some), from, has, to, wants,
		shape_text(t->to.shape.ndim, t->at, at), hint);
}

static int target_matches(struct target_check *t, struct base_error *err)
{
	enum tensor_dtype to = (enum tensor_dtype)t->to.t->dtype;
	int r = target_slice(t, err);
	bool pairs, fits;

	if (r < 0)
		return r;
	pairs = target_pair(t);
	fits = pairs && target_window(t);
	if (!fits || (to != t->stored.dtype && !(t->said->flags & VCKPT_TARGET_CONVERT)))
		return target_unfit(t, target_hint(t, pairs, fits), err);
	if (!tensor_convert_possible(t->stored.dtype, to))
		return convert_refuse(t->stored.dtype, to, err);
	return 0;
}

/* ---- declaring ---- */

static int target_known(const struct vckpt_target *t, struct base_error *err)
{
	const uint32_t known = VCKPT_TARGET_CONVERT | VCKPT_TARGET_RESIZE | VCKPT_TARGET_ZERO;

	int r = api_size_check(t->size, sizeof *t, "vckpt_target", err);

	if (r == 0)
		r = api_given(t->to, "destination of a target", err);
	return r < 0 ? r : api_flags_check(t->flags, known, "the target", "VCKPT_TARGET_...", err);
}

/* The step has no such tensor. It is listed under the caller's name, unless the target names a stored one. */
static int target_lacking(struct vckpt_load *load, const struct vckpt_target *said, const char *component,
	const char *stored)
{
	const char *name = said->name ? said->name : said->to->name;

	return load_names_add(&load->lacking, component, name, strlen(name), strcmp(name, stored) ? stored : "");
}

static int target_declare(struct vckpt_load *load, struct target_check *t, const char *component, const char *name,
	struct base_error *err)
{
	int64_t tensor;
	int r = load_holding_of(load, t->said->to, &t->to, err);

	if (r < 0)
		return r;
	tensor = load_step_tensor_find(load->step->step, component, name, strlen(name));
	if (tensor >= 0) {
		load_step_tensor_info(load->step->step, (uint32_t)tensor, &t->stored);
		r = target_matches(t, err);
	}
	if (r == 0)
		r = load_holding_memory(load, &t->to, err);
	if (r < 0)
		return r;
	if (tensor < 0)
		return target_lacking(load, t->said, component, name) < 0 ? base_no_memory(err) : 0;
	r = load_tape_slice(load, (uint32_t)tensor, &t->to, &t->slice);
	if (r == 0 && (t->said->flags & VCKPT_TARGET_ZERO))
		r = load_tape_rest(load, (uint32_t)tensor, &t->to, &t->slice.window);
	return r < 0 ? base_no_memory(err) : 0;
}

int load_declare(struct vckpt_load *load, const struct vckpt_target *said, size_t number, struct base_error *err)
{
	const struct load_step_info *step = load_step_info(load->step->step);
	struct target_check t = {.said = said};
	const char *component = NULL, *name = NULL;
	int r = target_known(said, err);

	if (r < 0)
		return base_error_prefix(err, r, "%.100s/%" PRIu64 ": target %zu", step->run, step->step, number);
	if (r == 0) {
		component = said->component ? said->component : said->to->component;
		name = said->name ? said->name : said->to->name;
		if (!component || !name)
			r = base_error_set(err, -EINVAL, "a tensor needs a component and a name");
	}
	if (r == 0 && !said->name)
		r = load_renamed(load, component, &name, err);
	if (r == 0)
		r = target_declare(load, &t, component, name, err);
	return r == 0 ? 0 : base_error_prefix(err, r, "%.100s/%" PRIu64 ": tensor %.100s/%.200s", step->run, step->step,
		component ? component : "", name ? name : "");
}

int vckpt_convert(uint32_t from, uint32_t to, const void *in, void *out, size_t n, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_dtype_check(from, "the dtype to convert from:", e);

	if (r == 0)
		r = api_dtype_check(to, "the dtype to convert to:", e);
	if (r == 0 && n)
		r = api_given(in, "memory to convert from", e);
	if (r == 0 && n)
		r = api_given(out, "memory to convert into", e);
	if (r < 0)
		return r;
	if (!tensor_convert_possible((enum tensor_dtype)from, (enum tensor_dtype)to))
		return convert_refuse((enum tensor_dtype)from, (enum tensor_dtype)to, e);
	if (n > 0)
		tensor_convert((enum tensor_dtype)from, (enum tensor_dtype)to, in, out, n);
	return 0;
}
