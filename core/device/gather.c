/* SPDX-License-Identifier: Apache-2.0
 *
 * gather: fold first, then walk. The walk writes the destination in order, row after row, which reads well only while
 * the row is also what is closest together in the source. Where another dimension does (a column-major matrix, a
 * permuted tensor), items are moved in square tiles over that dimension and the last one: a tile is read along the
 * source's dense direction, reordered in a buffer that stays in the first-level cache, and written along the
 * destination's. Each cache line of either side is then touched once, whatever the strides are (powers of two would
 * throw lines out of a direct copy before they are used up).
 *
 * Items may be misaligned: they are loaded and stored as unaligned words. Threads: nothing is shared. */
#include "core/device/gather.h"

#include <stdbool.h>
#include <string.h>

#include "core/base/le.h"

#define GATHER_DENSE_BYTES 4096          /* beyond this a tile reads no fewer lines or pages than the plain walk */
#define GATHER_ITEM_TILED 64             /* an item of a cache line or more wastes nothing */

typedef uint8_t gather_1 __attribute__((may_alias));
typedef uint16_t gather_2 __attribute__((may_alias, aligned(1)));
typedef uint32_t gather_4 __attribute__((may_alias, aligned(1)));
typedef uint64_t gather_8 __attribute__((may_alias, aligned(1)));
typedef uint64_t gather_16 __attribute__((vector_size(16), may_alias, aligned(1)));

struct gather_walk {
	const struct device_gather *g;   /* folded */
	uint32_t last, dense;            /* last: written in order; dense: another one to be tiled with it, or last */
	uint64_t to_stride[DEVICE_GATHER_DIMS];
};

static bool gather_joins(int64_t outer, uint64_t size, int64_t inner)
{
	int64_t span;

	return size <= INT64_MAX && !__builtin_mul_overflow((int64_t)size, inner, &span) && span == outer;
}

void device_gather_fold(struct device_gather *g)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < g->ndim; i++) {
		if (g->size[i] == 0) {
			g->ndim = 0;
			g->item_bytes = 0;
			return;
		}
		if (g->size[i] == 1)
			continue;
		if (n > 0 && gather_joins(g->stride[n - 1], g->size[i], g->stride[i])) {
			g->size[n - 1] *= g->size[i];
			g->stride[n - 1] = g->stride[i];
			continue;
		}
		g->size[n] = g->size[i];
		g->stride[n++] = g->stride[i];
	}
	if (n > 0 && g->stride[n - 1] > 0 && (uint64_t)g->stride[n - 1] == g->item_bytes)
		g->item_bytes *= g->size[--n];
	g->ndim = n;
}

/* line: n items, `stride` apart, to contiguous memory. tile: at most SIDE x SIDE items; from has `dense` and `last`
 * strides, to has `row` between neighbours along dense. */
#define GATHER_KERNELS(N, SIDE)                                                                                        \
	static void gather_line_##N(char *to, const char *from, int64_t stride, uint64_t n)                            \
	{                                                                                                              \
		gather_##N *out = (gather_##N *)to;                                                                    \
                                                                                                                       \
		for (uint64_t i = 0; i < n; i++)                                                                       \
			out[i] = *(const gather_##N *)(from + (int64_t)i * stride);                                    \
	}                                                                                                              \
	static void gather_tile_##N(char *to, uint64_t row, const char *from, int64_t dense, int64_t last,             \
		unsigned ndense, unsigned nlast)                                                                       \
	{                                                                                                              \
		gather_##N buffer[SIDE][SIDE + 64 / N / 4];                                                            \
                                                                                                                       \
		for (unsigned j = 0; j < nlast; j++, from += last)                                                     \
			if (dense == N)                                                                                \
				for (unsigned i = 0; i < ndense; i++)                                                  \
					buffer[i][j] = ((const gather_##N *)from)[i];                                  \
			else                                                                                           \
				for (unsigned i = 0; i < ndense; i++)                                                  \
					buffer[i][j] = *(const gather_##N *)(from + (int64_t)i * dense);               \
		for (unsigned i = 0; i < ndense; i++, to += row)                                                       \
			memcpy(to, buffer[i], (size_t)nlast * N);                                                      \
	}

GATHER_KERNELS(1, 64)
GATHER_KERNELS(2, 64)
GATHER_KERNELS(4, 32)
GATHER_KERNELS(8, 32)
GATHER_KERNELS(16, 16)

static void gather_line(char *to, const char *from, uint64_t item, int64_t stride, uint64_t n)
{
	switch (item) {
	case 1: gather_line_1(to, from, stride, n); return;
	case 2: gather_line_2(to, from, stride, n); return;
	case 4: gather_line_4(to, from, stride, n); return;
	case 8: gather_line_8(to, from, stride, n); return;
	case 16: gather_line_16(to, from, stride, n); return;
	}
	for (uint64_t i = 0; i < n; i++)
		memcpy(to + i * item, from + (int64_t)i * stride, item);
}

static unsigned gather_side(uint64_t item)
{
	return item <= 2 ? 64 : item <= 8 ? 32 : 16;
}

static void gather_tile(const struct gather_walk *w, char *to, const char *from, unsigned ndense, unsigned nlast)
{
	uint64_t row = w->to_stride[w->dense], item = w->g->item_bytes;
	int64_t dense = w->g->stride[w->dense], last = w->g->stride[w->last];

	switch (item) {
	case 1: gather_tile_1(to, row, from, dense, last, ndense, nlast); return;
	case 2: gather_tile_2(to, row, from, dense, last, ndense, nlast); return;
	case 4: gather_tile_4(to, row, from, dense, last, ndense, nlast); return;
	case 8: gather_tile_8(to, row, from, dense, last, ndense, nlast); return;
	case 16: gather_tile_16(to, row, from, dense, last, ndense, nlast); return;
	}
	for (unsigned i = 0; i < ndense; i++)
		gather_line(to + i * row, from + (int64_t)i * dense, item, last, nlast);
}

/* All of the dense and the last dimension, with the others fixed. Tiles go along the dense dimension first: its
 * neighbours share the source's pages. */
static void gather_plane(const struct gather_walk *w, char *to, const char *from)
{
	const struct device_gather *g = w->g;
	unsigned side = gather_side(g->item_bytes);

	for (uint64_t j = 0; j < g->size[w->last]; j += side)
		for (uint64_t i = 0; i < g->size[w->dense]; i += side) {
			uint64_t ni = g->size[w->dense] - i, nj = g->size[w->last] - j;

			gather_tile(w, to + i * w->to_stride[w->dense] + j * g->item_bytes,
				from + (int64_t)i * g->stride[w->dense] + (int64_t)j * g->stride[w->last],
				ni < side ? (unsigned)ni : side, nj < side ? (unsigned)nj : side);
		}
}

static void gather_dim(const struct gather_walk *w, uint32_t dim, char *to, const char *from)
{
	const struct device_gather *g = w->g;

	if (dim == w->last && w->dense != w->last) {
		gather_plane(w, to, from);
	} else if (dim == w->last) {
		gather_line(to, from, g->item_bytes, g->stride[dim], g->size[dim]);
	} else if (dim == w->dense) {
		gather_dim(w, dim + 1, to, from);
	} else {
		for (uint64_t i = 0; i < g->size[dim]; i++)
			gather_dim(w, dim + 1, to + i * w->to_stride[dim], from + (int64_t)i * g->stride[dim]);
	}
}

/* The dimension whose items are closest together in the source, if tiling it pays; else the last one. A dimension with
 * a stride of 0 (the same items again) or of a single item is not taken. */
static uint32_t gather_choose_dense(const struct device_gather *g)
{
	uint32_t best = g->ndim - 1;

	if (g->item_bytes >= GATHER_ITEM_TILED)
		return best;
	for (uint32_t i = 0; i + 1 < g->ndim; i++) {
		uint64_t stride = device_gather_abs(g->stride[i]);

		if (g->size[i] > 1 && stride > 0 && stride < GATHER_DENSE_BYTES
			&& (stride < device_gather_abs(g->stride[best]) || g->size[best] == 1))
			best = i;
	}
	return best;
}

void device_gather_part(void *to, const uint64_t *to_stride, const struct device_gather *g)
{
	struct gather_walk w = {.g = g, .last = g->ndim - 1};

	if (g->ndim == 0) {
		memcpy(to, g->from, g->item_bytes);
		return;
	}
	memcpy(w.to_stride, to_stride, g->ndim * sizeof *to_stride);
	w.dense = gather_choose_dense(g);
	gather_dim(&w, 0, to, g->from);
}

void device_gather_strides(const struct device_gather *g, uint64_t *ret_to_stride)
{
	uint64_t bytes = g->item_bytes;

	for (uint32_t i = g->ndim; i-- > 0;) {
		ret_to_stride[i] = bytes;
		if (base_mul_overflows(bytes, g->size[i], &bytes))
			bytes = UINT64_MAX;
	}
}

void device_gather_host(void *to, const struct device_gather *source)
{
	struct device_gather g = *source;
	uint64_t to_stride[DEVICE_GATHER_DIMS];

	device_gather_fold(&g);
	device_gather_strides(&g, to_stride);
	if (g.item_bytes)
		device_gather_part(to, to_stride, &g);
}
