/* SPDX-License-Identifier: Apache-2.0
 *
 * fetch: a copy engine wants long rows and few calls. Where the box's order is that of the source both are had by
 * copies with a pitch. Where it is not (a transposed matrix, channels_last, any permutation) rows are single items: one
 * call for each line of them, and each item a transfer of its own. So the box is taken in the order of the source,
 * dimension by dimension from the largest distance to the smallest, which for a dense tensor is contiguous, and the
 * host reorders it: that costs memory bandwidth of the host, several threads of which go side by side, and hides behind
 * the next copy.
 *
 * Items with gaps between them (every second column) are rows of one item again. Then the gaps are copied, too, as long
 * as no more than FETCH_SPAN times the bytes come over the bus.
 *
 * Ways are compared by what they cost, in bytes of one long copy: every byte one, a row at least FETCH_ROW_BYTES (what
 * a copy engine moves in the time that a short row takes it: 70 to 140 on an H100), a call FETCH_CALL_BYTES (about a
 * microsecond at 55 GB/s), a byte that is reordered FETCH_REORDER, more where it is written in rows shorter than a
 * cache line (so it is where 16 threads reorder at a time; one thread alone reorders 2 GB/s).
 *
 * Distance 0 (broadcast) is copied once and reordered into as many; negative distances are copied forwards. */
#include "core/device/fetch.h"

#include "core/base/le.h"

#define FETCH_SPAN 4
#define FETCH_ROW_BYTES 128
#define FETCH_CALL_BYTES 65536.0
#define FETCH_REORDER 2.0
#define FETCH_REORDER_SHORT 4.0
#define FETCH_LINE_BYTES 64
/* CU_DEVICE_ATTRIBUTE_MAX_PITCH is 2^31 - 1 on all devices that there are; this is well below it. */
#define FETCH_PITCH_MAX (UINT64_C(1) << 30)

/* ---- straight ---- */

static bool fetch_is_rows(const struct device_gather *g, const uint64_t *to_stride, uint32_t i)
{
	return g->stride[i] >= 0 && (uint64_t)g->stride[i] >= g->item_bytes && (uint64_t)g->stride[i] <= FETCH_PITCH_MAX
		&& to_stride[i] <= FETCH_PITCH_MAX;
}

/* A plane is a whole number of rows away from the next, on both sides, and no shorter than it is high. */
static bool fetch_is_planes(const struct device_gather *g, const uint64_t *to_stride, uint32_t rows, uint32_t i)
{
	uint64_t pitch = (uint64_t)g->stride[rows], to_pitch = to_stride[rows];

	return i != rows && g->stride[i] > 0 && (uint64_t)g->stride[i] % pitch == 0 && to_stride[i] % to_pitch == 0
		&& (uint64_t)g->stride[i] / pitch >= g->size[rows] && to_stride[i] / to_pitch >= g->size[rows];
}

static uint64_t fetch_times(uint64_t a, uint64_t b)
{
	return base_mul_overflows(a, b, &a) ? UINT64_MAX : a;
}

uint64_t device_fetch_dims(const struct device_gather *g, const uint64_t *to_stride, struct device_copy_dims *ret_d)
{
	uint64_t most = 1, calls = 1;

	*ret_d = (struct device_copy_dims){g->ndim, g->ndim};
	for (uint32_t i = 0; i < g->ndim; i++) {
		if (!fetch_is_rows(g, to_stride, i))
			continue;
		if (g->size[i] > most) {
			most = g->size[i];
			*ret_d = (struct device_copy_dims){i, g->ndim};
		}
		for (uint32_t j = 0; j < g->ndim; j++)
			if (fetch_is_planes(g, to_stride, i, j) && fetch_times(g->size[i], g->size[j]) > most) {
				most = fetch_times(g->size[i], g->size[j]);
				*ret_d = (struct device_copy_dims){i, j};
			}
	}
	for (uint32_t i = 0; i < g->ndim; i++)
		if (i != ret_d->rows && i != ret_d->planes)
			calls = fetch_times(calls, g->size[i]);
	return calls;
}

/* Of a gather into contiguous memory. */
static double fetch_cost(const struct device_gather *g)
{
	uint64_t to_stride[DEVICE_GATHER_DIMS];
	struct device_copy_dims d;
	double rows = 1;

	device_gather_strides(g, to_stride);
	for (uint32_t i = 0; i < g->ndim; i++)
		rows *= (double)g->size[i];
	return rows * (double)base_max(g->item_bytes, FETCH_ROW_BYTES)
		+ (double)device_fetch_dims(g, to_stride, &d) * FETCH_CALL_BYTES;
}

/* ---- reordered ---- */

/* Dimensions that move in the source, the largest distance first. */
static uint32_t fetch_sort(const struct device_gather *g, uint32_t *ret_dims)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < g->ndim; i++) {
		uint32_t at = n;

		if (g->size[i] == 1 || g->stride[i] == 0)
			continue;
		for (; at > 0 && device_gather_abs(g->stride[ret_dims[at - 1]]) < device_gather_abs(g->stride[i]); at--)
			ret_dims[at] = ret_dims[at - 1];
		ret_dims[at] = i;
		n++;
	}
	return n;
}

/* The first `outer` of the sorted dimensions are walked, the others lie within rows of `width` bytes. */
static void fetch_copy(const struct device_gather *g, const uint32_t *dims, uint32_t outer, uint64_t width,
	struct device_gather *ret_copy)
{
	const char *from = g->from;

	for (uint32_t i = 0; i < g->ndim; i++)
		if (g->stride[i] < 0)
			from += (int64_t)(g->size[i] - 1) * g->stride[i];
	*ret_copy = (struct device_gather){.from = from, .item_bytes = width, .ndim = outer};
	for (uint32_t k = 0; k < outer; k++) {
		ret_copy->size[k] = g->size[dims[k]];
		ret_copy->stride[k] = (int64_t)device_gather_abs(g->stride[dims[k]]);
	}
	device_gather_fold(ret_copy);
}

/* The same box in what fetch_copy's copy brings. */
static void fetch_reordered(const struct device_gather *g, const uint32_t *dims, uint32_t outer, uint64_t width,
	struct device_gather *ret_reorder)
{
	uint64_t bytes = width;

	*ret_reorder = *g;
	for (uint32_t k = outer; k-- > 0; bytes = fetch_times(bytes, g->size[dims[k]]))
		ret_reorder->stride[dims[k]] = g->stride[dims[k]] < 0 ? -(int64_t)bytes : (int64_t)bytes;
	ret_reorder->from = NULL;
	for (uint32_t i = 0; i < g->ndim; i++)
		if (g->stride[i] < 0)
			ret_reorder->from = (const char *)((uintptr_t)ret_reorder->from
				+ (g->size[i] - 1) * device_gather_abs(ret_reorder->stride[i]));
}

static double fetch_reorder_cost(const struct device_gather *g)
{
	double bytes = (double)g->item_bytes, row = bytes * (double)(g->ndim ? g->size[g->ndim - 1] : 1);

	for (uint32_t i = 0; i < g->ndim; i++)
		bytes *= (double)g->size[i];
	return bytes * (row < FETCH_LINE_BYTES ? FETCH_REORDER_SHORT : FETCH_REORDER);
}

/* How many of the sorted dimensions are best walked, and how wide rows are then. */
static uint32_t fetch_choose(const struct device_gather *g, const uint32_t *dims, uint32_t n, uint64_t *ret_width,
	double *ret_cost)
{
	uint64_t width = g->item_bytes, moved, rows = 1, wanted;
	uint32_t best = n;

	for (uint32_t k = 0; k < n; k++)
		rows = fetch_times(rows, g->size[dims[k]]);
	wanted = fetch_times(rows, g->item_bytes);
	*ret_cost = -1;
	for (uint32_t k = n;; k--) {
		struct device_gather copy;
		double cost;

		fetch_copy(g, dims, k, width, &copy);
		cost = fetch_cost(&copy);
		if (*ret_cost < 0 || cost < *ret_cost) {
			best = k;
			*ret_width = width;
			*ret_cost = cost;
		}
		if (k == 0)
			return best;
		moved = fetch_times(g->size[dims[k - 1]] - 1, device_gather_abs(g->stride[dims[k - 1]]));
		rows /= g->size[dims[k - 1]];
		if (__builtin_add_overflow(width, moved, &width)
			|| fetch_times(rows, width) / FETCH_SPAN > wanted)
			return best;
	}
}

void device_fetch_reorder(const struct device_gather *g, struct device_reorder *ret_t)
{
	uint32_t dims[DEVICE_GATHER_DIMS], n = fetch_sort(g, dims), outer;
	uint64_t width = 0;

	outer = fetch_choose(g, dims, n, &width, &ret_t->cost);
	fetch_copy(g, dims, outer, width, &ret_t->copy);
	fetch_reordered(g, dims, outer, width, &ret_t->reorder);
	ret_t->cost += fetch_reorder_cost(g);
	ret_t->bytes = width;
	for (uint32_t k = 0; k < outer; k++)
		ret_t->bytes = fetch_times(ret_t->bytes, g->size[dims[k]]);
}

bool device_fetch_reorders(const struct device_gather *g, uint64_t room)
{
	struct device_reorder t;

	if (g->ndim == 0 || g->item_bytes == 0 || g->item_bytes > room)
		return false;
	device_fetch_reorder(g, &t);
	return t.cost < fetch_cost(g);
}

uint32_t device_fetch_cut(const struct device_gather *g, uint64_t room, uint64_t *ret_n)
{
	uint32_t dims[DEVICE_GATHER_DIMS], n = fetch_sort(g, dims), best = 0;
	struct device_reorder whole, part;
	double least = -1;

	device_fetch_reorder(g, &whole);
	*ret_n = 1;
	for (uint32_t k = 0; k < n; k++) {
		struct device_gather some = *g;
		double parts;

		some.size[dims[k]] = (uint64_t)((double)g->size[dims[k]] * ((double)room / (double)whole.bytes));
		some.size[dims[k]] = base_max(some.size[dims[k]], 1);
		device_fetch_reorder(&some, &part);
		parts = (double)g->size[dims[k]] / (double)some.size[dims[k]];
		if (least < 0 || parts * part.cost < least) {
			least = parts * part.cost;
			best = dims[k];
			*ret_n = some.size[dims[k]];
		}
	}
	return best;
}
