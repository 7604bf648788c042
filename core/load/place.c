/* SPDX-License-Identifier: Apache-2.0
 *
 * place: a part of a piece is cut into chunks that stay in the processor's nearest cache. Of a chunk the items are put
 * into the order in which they lie in the destination, one after another, then converted all at once, and then written
 * in the longest runs that the destination's strides leave. So neither the piece's order nor the strides slow down the
 * conversion. */
#include "core/load/place.h"

#include <string.h>

#include "core/device/gather.h"
#include "core/tensor/boxes.h"
#include "core/tensor/convert.h"

#define PLACE_CHUNK_ITEMS 2048u
#define PLACE_ITEM_BYTES 16u

struct place_job {
	const struct fill_box *box;
	const struct tensor_grid *grid;
	const struct tensor_box *piece;
	const uint8_t *bytes;
	enum tensor_dtype from, to;
	uint32_t order[TENSOR_MAX_DIMS]; /* the dimensions, the destination's largest stride first */
};

/* ---- strided memory ---- */

/* What a box is in memory: dimensions in `order`; g->from is the address that is written. */
static void place_describe(const struct tensor_box *box, uint32_t ndim, const uint32_t *order, const uint64_t *stride,
	uint8_t *to, unsigned item_bytes, struct device_gather *g)
{
	*g = (struct device_gather){.from = to, .item_bytes = item_bytes, .ndim = ndim};
	for (uint32_t i = 0; i < ndim; i++) {
		g->size[i] = box->size[order[i]];
		g->stride[i] = (int64_t)stride[order[i]];
	}
	device_gather_fold(g);
}

static void place_order(uint32_t ndim, const uint64_t *stride, uint32_t *ret_order)
{
	for (uint32_t d = 0; d < ndim; d++) {
		uint32_t at = d;

		for (; at > 0 && stride[ret_order[at - 1]] < stride[d]; at--)
			ret_order[at] = ret_order[at - 1];
		ret_order[at] = d;
	}
}

/* n items in the order of `from`, each `stride` after the one before. */
static void place_line(uint8_t *to, int64_t stride, const uint8_t *from, uint64_t item_bytes, uint64_t n)
{
#define PLACE_LINE(N) \
	case N: \
		for (uint64_t i = 0; i < n; i++) \
			memcpy(to + (int64_t)i * stride, from + N * i, N); \
		return
	switch (item_bytes) {
	PLACE_LINE(1);
	PLACE_LINE(2);
	PLACE_LINE(4);
	PLACE_LINE(8);
	PLACE_LINE(16);
	}
#undef PLACE_LINE
	for (uint64_t i = 0; i < n; i++)
		memcpy(to + (int64_t)i * stride, from + item_bytes * i, item_bytes);
}

/* Returns where the bytes of the next begin. */
static const uint8_t *place_runs(const struct device_gather *g, uint32_t dim, uint8_t *to, const uint8_t *from)
{
	if (dim == g->ndim) {
		memcpy(to, from, g->item_bytes);
		return from + g->item_bytes;
	}
	if (dim + 1 == g->ndim) {
		place_line(to, g->stride[dim], from, g->item_bytes, g->size[dim]);
		return from + g->size[dim] * g->item_bytes;
	}
	for (uint64_t i = 0; i < g->size[dim]; i++)
		from = place_runs(g, dim + 1, to + (int64_t)i * g->stride[dim], from);
	return from;
}

/* ---- conversion ---- */

static void place_chunk(const struct place_job *j, const struct tensor_box *chunk)
{
	uint8_t room[PLACE_CHUNK_ITEMS * PLACE_ITEM_BYTES] __attribute__((aligned(64)));
	uint8_t made[PLACE_CHUNK_ITEMS * PLACE_ITEM_BYTES] __attribute__((aligned(64)));
	uint32_t ndim = j->grid->shape.ndim;
	uint64_t stride[TENSOR_MAX_DIMS] = {0}, bytes = j->grid->item_bytes, items = 1;
	uint8_t *to = j->box->data;
	struct device_gather g;

	for (uint32_t i = ndim; i-- > 0; bytes *= chunk->size[j->order[i]])
		stride[j->order[i]] = bytes;
	for (uint32_t d = 0; d < ndim; d++) {
		to += (chunk->offset[d] - j->box->box.offset[d]) * j->box->stride[d];
		items *= chunk->size[d];
	}
	tensor_piece_scatter(j->grid, j->piece, chunk, j->bytes, room, chunk->offset, stride);
	place_describe(chunk, ndim, j->order, j->box->stride, to, tensor_dtype_bytes(j->to), &g);
	tensor_convert(j->from, j->to, room, g.ndim ? made : to, items);
	if (g.ndim)
		place_runs(&g, 0, to, made);
}

/* Along the dimension whose neighbours are furthest from each other in the destination, and so on. */
static void place_cut(const struct place_job *j, const struct tensor_box *part)
{
	uint64_t items = tensor_box_items(&j->grid->shape, part), step;
	struct tensor_box some = *part;
	uint32_t d = 0;

	if (items <= PLACE_CHUNK_ITEMS) {
		place_chunk(j, part);
		return;
	}
	while (part->size[j->order[d]] == 1)
		d++;
	d = j->order[d];
	step = base_max(part->size[d] * PLACE_CHUNK_ITEMS / items, 1);
	for (uint64_t at = 0; at < part->size[d]; at += step) {
		some.offset[d] = part->offset[d] + at;
		some.size[d] = base_min(step, part->size[d] - at);
		place_cut(j, &some);
	}
}

void place_part(struct load_fill *f, const struct fill_box *b, const struct tensor_grid *g,
	const struct tensor_box *piece, const struct tensor_box *part, const uint8_t *bytes)
{
	struct place_job j = {.box = b, .grid = g, .piece = piece, .bytes = bytes, .to = b->dtype};
	struct load_tensor_info info;

	load_step_tensor_info(f->step, b->tensor, &info);
	j.from = info.dtype;
	place_order(g->shape.ndim, b->stride, j.order);
	place_cut(&j, part);
}

/* ---- zeros ---- */

static void zeros_runs(const struct device_gather *g, uint32_t dim, uint8_t *to)
{
	if (dim == g->ndim) {
		memset(to, 0, g->item_bytes);
		return;
	}
	for (uint64_t i = 0; i < g->size[dim]; i++)
		zeros_runs(g, dim + 1, to + (int64_t)i * g->stride[dim]);
}

void place_zeros(const struct load_fill *f)
{
	for (size_t i = 0; i < f->nzeros; i++) {
		const struct fill_zeros *z = &f->zeros[i];
		uint32_t order[TENSOR_MAX_DIMS];
		struct device_gather g;

		place_order(z->ndim, z->stride, order);
		place_describe(&z->box, z->ndim, order, z->stride, z->data, z->item_bytes, &g);
		if (!atomic_load(&f->stopped) && g.item_bytes)
			zeros_runs(&g, 0, z->data);
	}
}
