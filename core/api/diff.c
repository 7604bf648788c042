/* SPDX-License-Identifier: Apache-2.0
 *
 * diff: what is different between two open steps. */
#include "core/diff/diff.h"

#include <stdlib.h>
#include <string.h>

#include "core/api/api_internal.h"

struct vckpt_diff {
	struct diff_side a, b;           /* steps of the caller */
	struct diff *made;
};

static int options_check(const struct vckpt_diff_options *o, struct base_error *err)
{
	int r = api_size_check(o->size, sizeof *o, "vckpt_diff_options", err);

	if (r == 0)
		r = api_flags_check(o->flags, VCKPT_DIFF_VALUES, "a difference", "VCKPT_DIFF_...", err);
	if (r == 0)
		r = api_reserved_check(o->reserved, "vckpt_diff_options", err);
	return r;
}

int vckpt_diff_steps(struct vckpt_step *a, struct vckpt_step *b, const struct vckpt_diff_options *o,
	struct vckpt_diff **ret_diff, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct diff_options options = {0};
	struct vckpt_diff *d;
	int r = api_given(ret_diff, "place for the differences", e);

	if (r == 0)
		r = api_step_alive(a, e);
	if (r == 0)
		r = api_step_alive(b, e);
	if (r == 0 && o)
		r = options_check(o, e);
	if (r < 0)
		return api_result(r, e);
	d = calloc(1, sizeof *d);
	if (!d)
		return base_no_memory(e);
	if (o)
		options = (struct diff_options){.component = o->component, .values = o->flags & VCKPT_DIFF_VALUES};
	d->a.step = a->step;
	d->b.step = b->step;
	r = diff_run(&d->a, &d->b, &options, &d->made, e);
	if (r < 0)
		free(d);
	else
		*ret_diff = d;
	return api_result(r, e);
}

void vckpt_diff_free(struct vckpt_diff *diff)
{
	if (!diff)
		return;
	diff_free(diff->made);
	free(diff);
}

size_t vckpt_diff_count(const struct vckpt_diff *diff) { return diff->made->n; }

int vckpt_diff_row(const struct vckpt_diff *diff, size_t i, struct vckpt_diff_row *ret_row)
{
	const struct diff_row *row = i < diff->made->n ? &diff->made->rows[i] : NULL;
	const struct diff_side *side;
	struct load_tensor_info t;
	struct load_blob_info b;

	if (!row)
		return -ENOENT;
	side = row->a == DIFF_NONE ? &diff->b : &diff->a;
	*ret_row = (struct vckpt_diff_row){.change = row->change, .rank = -1,
		.a = row->a == DIFF_NONE ? -1 : (int64_t)row->a, .b = row->b == DIFF_NONE ? -1 : (int64_t)row->b,
		.changed = row->values.changed, .nan_a = row->values.nan_a, .nan_b = row->values.nan_b,
		.inf_a = row->values.inf_a, .inf_b = row->values.inf_b, .max = row->values.max, .rms = row->values.rms,
		.relative = row->values.relative};
	if (row->blob) {
		diff_side_blob(side, row->a == DIFF_NONE ? row->b : row->a, &b);
		ret_row->name = b.name;
		ret_row->name_len = (uint32_t)strlen(b.name);
		ret_row->rank = b.per_rank ? (int64_t)b.rank : -1;
		return 0;
	}
	diff_side_tensor(side, row->a == DIFF_NONE ? row->b : row->a, &t);
	ret_row->component = t.component;
	ret_row->name = t.name;
	ret_row->name_len = t.name_len;
	return 0;
}
