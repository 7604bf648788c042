/* SPDX-License-Identifier: Apache-2.0
 *
 * load_overlap: finds two destinations that share a byte, before anything is written.
 *
 * Entries are sorted by where their memory begins, so only those whose extents meet are compared, box by box. Extents
 * of columns of one matrix meet all along, though their bytes do not; so two boxes are compared exactly. An item of one
 * lies at the start of the box plus a multiple of each stride. Two items share a byte where the difference of their
 * addresses is small; that difference is a sum over the strides of both boxes, and equal strides count once, with the
 * difference of their multiples. From the largest stride down only few multiples leave a rest that the smaller ones can
 * make up for: for boxes of one array one or two of each.
 *
 * Strides that nearly agree could leave many. After OVERLAP_STEPS of them in all the search ends, and says nothing. */
#include <inttypes.h>
#include <stdlib.h>

#include "core/api/api_load_internal.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/tensor/dtype.h"

#define OVERLAP_STEPS (UINT64_C(1) << 24)
#define OVERLAP_TERMS (2 * TENSOR_MAX_DIMS)

typedef __int128 wide; /* sums of addresses and strides */

struct overlap_entry { struct load_entry e; uint64_t begin, end; };

/* Multiples from low to high of a stride. */
struct overlap_term { uint64_t stride; int64_t low, high; };
struct overlap {
	struct overlap_term term[OVERLAP_TERMS]; /* the largest stride first */
	unsigned n;
	wide low[OVERLAP_TERMS + 1], high[OVERLAP_TERMS + 1]; /* what the terms from here on can add */
	int64_t below, above;            /* bytes of an item of the first box, of the second */
	uint64_t *steps;                 /* left */
};

/* ---- two boxes ---- */

struct overlap_box { uint64_t at, width, end; uint32_t ndim; uint64_t size[TENSOR_MAX_DIMS], stride[TENSOR_MAX_DIMS]; };

/* Dimensions of more than one item by ascending stride; those that lie together belong to the item. */
static void box_of(const struct load_entry *e, uint64_t number, struct overlap_box *b)
{
	const uint64_t *words = e->head + LOAD_TAPE_HEAD + number * load_box_words(e->ndim);
	const uint64_t *size = words + 1 + e->ndim, *stride = size + e->ndim;
	uint32_t n = 0;

	*b = (struct overlap_box){.at = words[0],
		.width = tensor_dtype_bytes((enum tensor_dtype)(e->kind & LOAD_TAPE_DTYPE))};
	for (uint32_t d = 0; d < e->ndim; d++) {
		uint32_t at = n;

		if (size[d] <= 1)
			continue;
		for (; at > 0 && b->stride[at - 1] > stride[d]; at--) {
			b->stride[at] = b->stride[at - 1];
			b->size[at] = b->size[at - 1];
		}
		b->stride[at] = stride[d];
		b->size[at] = size[d];
		n++;
	}
	for (uint32_t d = 0; d < n; d++) {
		if (b->ndim == 0 && b->stride[d] == b->width) {
			b->width *= b->size[d];
			continue;
		}
		b->stride[b->ndim] = b->stride[d];
		b->size[b->ndim++] = b->size[d];
	}
	b->end = b->at + b->width;
	for (uint32_t d = 0; d < b->ndim; d++)
		b->end += (b->size[d] - 1) * b->stride[d];
}

static void overlap_add(struct overlap *o, uint64_t stride, int64_t low, int64_t high)
{
	unsigned at = 0;

	while (at < o->n && o->term[at].stride > stride)
		at++;
	if (at < o->n && o->term[at].stride == stride) {
		o->term[at].low += low;
		o->term[at].high += high;
		return;
	}
	for (unsigned i = o->n++; i > at; i--)
		o->term[i] = o->term[i - 1];
	o->term[at] = (struct overlap_term){stride, low, high};
}

static wide divide_down(wide a, uint64_t b)
{
	wide q = a / (wide)b;

	return q * (wide)b > a ? q - 1 : q;
}

/* Can the terms from number t on bring `x`, how far the first item is behind the second, to where they share a byte? */
static bool overlap_from(const struct overlap *o, unsigned t, wide x)
{
	const struct overlap_term *term = &o->term[t];
	wide low, high;

	if (*o->steps == 0)
		return false;
	--*o->steps;
	if (t == o->n)
		return -(wide)o->below < x && x < o->above;
	high = divide_down((wide)o->above - 1 - x - o->low[t + 1], term->stride);
	low = -divide_down((wide)o->below - 1 + x + o->high[t + 1], term->stride);
	high = high < term->high ? high : term->high;
	low = low > term->low ? low : term->low;
	for (; low <= high; low++)
		if (overlap_from(o, t + 1, x + low * (wide)term->stride))
			return true;
	return false;
}

static bool boxes_share(const struct overlap_box *a, const struct overlap_box *b, uint64_t *steps)
{
	struct overlap o = {.below = (int64_t)a->width, .above = (int64_t)b->width, .steps = steps};

	for (uint32_t d = 0; d < a->ndim; d++)
		overlap_add(&o, a->stride[d], 0, (int64_t)a->size[d] - 1);
	for (uint32_t d = 0; d < b->ndim; d++)
		overlap_add(&o, b->stride[d], 1 - (int64_t)b->size[d], 0);
	for (unsigned t = o.n; t-- > 0;) {
		o.low[t] = o.low[t + 1] + o.term[t].low * (wide)o.term[t].stride;
		o.high[t] = o.high[t + 1] + o.term[t].high * (wide)o.term[t].stride;
	}
	return overlap_from(&o, 0, (wide)a->at - (wide)b->at);
}

/* ---- all entries ---- */

static int entry_compare(const void *a, const void *b)
{
	const struct overlap_entry *x = a, *y = b;

	return (x->begin > y->begin) - (x->begin < y->begin);
}

static size_t entries_collect(const struct vckpt_load *load, struct overlap_entry *entries)
{
	struct overlap_entry one;
	struct overlap_box box;
	size_t n = 0;

	for (size_t at = 0; load_tape_next(load, &at, &one.e);) {
		if (one.e.nboxes == 0 || (one.e.kind & LOAD_TAPE_ZEROS))
			continue;
		one.begin = UINT64_MAX;
		one.end = 0;
		for (uint64_t i = 0; i < one.e.nboxes && entries; i++) {
			box_of(&one.e, i, &box);
			one.begin = base_min(one.begin, box.at);
			one.end = base_max(one.end, box.end);
		}
		if (entries)
			entries[n] = one;
		n++;
	}
	return n;
}

static bool entries_share(const struct overlap_entry *x, const struct overlap_entry *y, uint64_t *steps)
{
	struct overlap_box a, b;

	for (uint64_t i = 0; i < x->e.nboxes && *steps; i++) {
		box_of(&x->e, i, &a);
		--*steps;
		if (a.at >= y->end || y->begin >= a.end)
			continue;
		for (uint64_t k = 0; k < y->e.nboxes && *steps; k++) {
			box_of(&y->e, k, &b);
			--*steps;
			if (a.at < b.end && b.at < a.end && boxes_share(&a, &b, steps))
				return true;
		}
	}
	return false;
}

static int overlap_tell(const struct vckpt_load *load, const struct load_entry *a, const struct load_entry *b,
	struct base_error *err)
{
	const struct load_step_info *step = load_step_info(load->step->step);
	struct load_tensor_info x, y;

	load_step_tensor_info(load->step->step, (uint32_t)base_min(a->tensor, b->tensor), &x);
	load_step_tensor_info(load->step->step, (uint32_t)base_max(a->tensor, b->tensor), &y);
	return base_error_set(err, -EINVAL, "%.100s/%" PRIu64 ": the destinations of tensor %s/%.*s and of tensor "
		"%s/%.*s overlap: each byte can be loaded once only", step->run, step->step, x.component,
		(int)base_min(x.name_len, 200), x.name, y.component, (int)base_min(y.name_len, 200), y.name);
}

int load_overlap_check(const struct vckpt_load *load, struct base_error *err)
{
	base_cleanup_free struct overlap_entry *entries = NULL;
	size_t n = entries_collect(load, NULL);
	uint64_t steps = OVERLAP_STEPS;

	if (n < 2)
		return 0;
	entries = malloc(n * sizeof *entries);
	if (!entries)
		return base_no_memory(err);
	entries_collect(load, entries);
	qsort(entries, n, sizeof *entries, entry_compare);
	for (size_t i = 0; i < n && steps; i++)
		for (size_t k = i + 1; k < n && entries[k].begin < entries[i].end && steps; k++) {
			steps--;
			if (entries_share(&entries[i], &entries[k], &steps))
				return overlap_tell(load, &entries[i].e, &entries[k].e, err);
		}
	return 0;
}
