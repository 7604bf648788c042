/* SPDX-License-Identifier: Apache-2.0
 *
 * overlap: finds two destinations that share a byte, before anything is written.
 *
 * Destinations are sorted by where their memory begins, so only those whose extents meet are compared, box by box.
 * Extents of columns of one matrix meet all along, though their bytes do not; so two boxes are compared exactly. An
 * item of a box is at its start plus a multiple of each stride. Two items share a byte if the difference of their
 * addresses is small; that difference is a sum over the strides of both boxes, and equal strides count once, with the
 * difference of their multiples. From the largest stride down only few multiples leave a rest that the smaller ones can
 * make up for: one or two of each for boxes of one array.
 *
 * Strides that nearly agree could leave many, so the search ends after OVERLAP_STEPS of them in all. */
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/load/fill/place.h"

#define OVERLAP_STEPS (UINT64_C(1) << 24)

typedef __int128 wide; /* sums of addresses and strides */

/* Boxes [first, end) of the fill: one destination, and the memory that they are in. */
struct destination { size_t first, end; uint64_t from, to; };

/* ---- two boxes ---- */

struct memory {
	struct device_gather g;
	uint64_t from, to;               /* its bytes are in there */
	uint64_t reach[TENSOR_MAX_DIMS + 1]; /* from the first to the last item over the dimensions from this one on */
};

static void memory_of(const struct load_fill *f, size_t box, struct memory *m)
{
	place_box(f, &f->boxes[box], &m->g);
	m->reach[m->g.ndim] = 0;
	for (uint32_t d = m->g.ndim; d-- > 0;)
		m->reach[d] = m->reach[d + 1] + (m->g.size[d] - 1) * (uint64_t)m->g.stride[d];
	m->from = (uintptr_t)m->g.from;
	m->to = m->from + m->reach[0] + m->g.item_bytes;
}

static wide divide_down(wide a, int64_t b)
{
	wide q = a / b;

	return q * b > a ? q - 1 : q;
}

/* Do some items share a byte, if x is how far the first item of `a` is behind that of `b`, over the dimensions from da
 * and db on? */
static bool memory_meets(const struct memory *a, uint32_t da, const struct memory *b, uint32_t db, wide x,
	uint64_t *steps)
{
	int64_t of_a = da < a->g.ndim ? a->g.stride[da] : 0, of_b = db < b->g.ndim ? b->g.stride[db] : 0;
	int64_t stride = of_a > of_b ? of_a : of_b;
	wide low = 0, high = 0, least, most; /* multiples of it */

	if (*steps == 0)
		return false;
	--*steps;
	if (stride == 0)
		return -(wide)a->g.item_bytes < x && x < (wide)b->g.item_bytes;
	if (of_a == stride)
		high = (wide)a->g.size[da++] - 1;
	if (of_b == stride)
		low = 1 - (wide)b->g.size[db++];
	least = -divide_down((wide)a->g.item_bytes - 1 + x + a->reach[da], stride);
	most = divide_down((wide)b->g.item_bytes - 1 - x + b->reach[db], stride);
	for (wide k = low > least ? low : least; k <= high && k <= most; k++)
		if (memory_meets(a, da, b, db, x + k * stride, steps))
			return true;
	return false;
}

/* ---- all destinations ---- */

static int destination_compare(const void *a, const void *b)
{
	const struct destination *x = a, *y = b;

	return (x->from > y->from) - (x->from < y->from);
}

/* Returns how many there are. */
static size_t destinations_find(const struct load_fill *f, struct destination *all)
{
	struct memory m;
	size_t n = 0;

	for (size_t i = 0; i < f->nboxes; i++) {
		memory_of(f, i, &m);
		if (i == 0 || f->boxes[i].destination != f->boxes[i - 1].destination)
			all[n++] = (struct destination){i, i, m.from, m.to};
		all[n - 1].end++;
		all[n - 1].from = base_min(all[n - 1].from, m.from);
		all[n - 1].to = base_max(all[n - 1].to, m.to);
	}
	return n;
}

static bool destinations_meet(const struct load_fill *f, const struct destination *x, const struct destination *y,
	uint64_t *steps)
{
	struct memory a, b;

	for (size_t i = x->first; i < x->end && *steps; i++) {
		memory_of(f, i, &a);
		--*steps;
		if (a.from >= y->to || y->from >= a.to)
			continue;
		for (size_t k = y->first; k < y->end && *steps; k++) {
			memory_of(f, k, &b);
			--*steps;
			if (a.from < b.to && b.from < a.to
				&& memory_meets(&a, 0, &b, 0, (wide)a.from - (wide)b.from, steps))
				return true;
		}
	}
	return false;
}

static int overlap_refuse(const struct load_fill *f, uint32_t a, uint32_t b, struct base_error *err)
{
	const struct load_step_info *step = load_step_info(f->step);
	struct load_tensor_info x, y;

	load_step_tensor_info(f->step, base_min(a, b), &x);
	load_step_tensor_info(f->step, base_max(a, b), &y);
	return base_error_set(err, -EINVAL, "%.100s/%llu: the destinations of tensor %s/%.*s and of tensor %s/%.*s "
		"overlap: each byte can be loaded once only", step->run, (unsigned long long)step->step, x.component,
		(int)base_min(x.name_len, 200), x.name, y.component, (int)base_min(y.name_len, 200), y.name);
}

int load_fill_overlap(const struct load_fill *f, struct base_error *err)
{
	base_cleanup_free struct destination *all = malloc((f->nboxes + 1) * sizeof *all);
	uint64_t steps = OVERLAP_STEPS;
	size_t n;

	if (!all)
		return base_no_memory(err);
	n = destinations_find(f, all);
	qsort(all, n, sizeof *all, destination_compare);
	for (size_t i = 0; i < n && steps; i++)
		for (size_t k = i + 1; k < n && all[k].from < all[i].to && steps; k++) {
			steps--;
			if (destinations_meet(f, &all[i], &all[k], &steps))
				return overlap_refuse(f, f->boxes[all[i].first].tensor, f->boxes[all[k].first].tensor,
					err);
		}
	return 0;
}
