/* SPDX-License-Identifier: Apache-2.0
 *
 * place: a part of a piece is cut into chunks that stay in the processor's nearest cache. The items of a chunk are put
 * into the order of the destination, one after another, then converted all at once, and then written in the longest
 * runs that the destination's strides leave. So neither the piece's order nor the strides slow down the conversion. */
#include "core/load/fill/place.h"

#include <string.h>

#include "core/tensor/boxes.h"
#include "core/tensor/convert.h"

#define PLACE_CHUNK_ITEMS 2048u
#define PLACE_ITEM_BYTES 16u

/* ---- what both share ---- */

void place_describe(const struct place_job *j, const struct tensor_box *some, struct device_gather *ret_g)
{
	uint8_t *at = j->data;

	for (uint32_t d = 0; d < j->ndim; d++)
		at += (some->offset[d] - j->box.offset[d]) * j->stride[d];
	*ret_g = (struct device_gather){.from = at, .item_bytes = j->item_bytes, .ndim = j->ndim};
	for (uint32_t i = 0; i < j->ndim; i++) {
		ret_g->size[i] = some->size[j->order[i]];
		ret_g->stride[i] = (int64_t)j->stride[j->order[i]];
	}
	device_gather_fold(ret_g);
}

static void place_order(struct place_job *j)
{
	for (uint32_t d = 0; d < j->ndim; d++) {
		uint32_t at = d;

		for (; at > 0 && j->stride[j->order[at - 1]] < j->stride[d]; at--)
			j->order[at] = j->order[at - 1];
		j->order[at] = d;
	}
}

static uint64_t place_items(const struct place_job *j, const struct tensor_box *some)
{
	uint64_t items = 1;

	for (uint32_t d = 0; d < j->ndim; d++)
		items *= some->size[d];
	return items;
}

/* Cuts along the dimension with the largest stride in the destination first. */
void place_cut(const struct place_job *j, const struct tensor_box *part, uint64_t most,
	void (*put)(void *arg, const struct tensor_box *some), void *arg)
{
	uint64_t items = place_items(j, part), step;
	struct tensor_box some = *part;
	uint32_t d = 0;

	if (items <= most) {
		put(arg, part);
		return;
	}
	while (part->size[j->order[d]] == 1)
		d++;
	d = j->order[d];
	step = base_max(most / (items / part->size[d]), 1);
	for (uint64_t at = 0; at < part->size[d]; at += step) {
		some.offset[d] = part->offset[d] + at;
		some.size[d] = base_min(step, part->size[d] - at);
		place_cut(j, &some, most, put, arg);
	}
}

struct place_lining { const struct place_job *j; uint8_t *out; };

static void lining_put(void *arg, const struct tensor_box *some)
{
	uint8_t room[PLACE_CHUNK_ITEMS * PLACE_ITEM_BYTES] __attribute__((aligned(64)));
	struct place_lining *l = arg;
	const struct place_job *j = l->j;
	uint64_t stride[TENSOR_MAX_DIMS] = {0}, items = place_items(j, some), bytes = j->grid->item_bytes;
	bool same = j->from == j->to;

	for (uint32_t i = j->ndim; i-- > 0; bytes *= some->size[j->order[i]])
		stride[j->order[i]] = bytes;
	tensor_piece_scatter(j->grid, j->piece, some, j->bytes, same ? l->out : room, some->offset, stride);
	if (!same)
		tensor_convert(j->from, j->to, room, l->out, items);
	l->out += items * j->item_bytes;
}

void place_line_up(const struct place_job *j, const struct tensor_box *some, uint8_t *out)
{
	struct place_lining l = {j, out};

	if (!j->grid)
		memset(out, 0, place_items(j, some) * j->item_bytes);
	else
		place_cut(j, some, j->from == j->to ? UINT64_MAX : PLACE_CHUNK_ITEMS, lining_put, &l);
}

/* ---- into host memory ---- */

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

static void host_put(void *arg, const struct tensor_box *some)
{
	uint8_t room[PLACE_CHUNK_ITEMS * PLACE_ITEM_BYTES] __attribute__((aligned(64)));
	const struct place_job *j = arg;
	struct device_gather g;
	uint8_t *to;

	place_describe(j, some, &g);
	to = (uint8_t *)(uintptr_t)g.from; /* ours, const for those that read */
	place_line_up(j, some, g.ndim ? room : to);
	if (g.ndim)
		place_runs(&g, 0, to, room);
}

static void place_job_do(struct place_job *j, const struct tensor_box *part, bool device, unsigned place)
{
	if (device)
		place_device_job(j, part, place);
	else
		place_cut(j, part, PLACE_CHUNK_ITEMS, host_put, j);
}

/* ---- for the fill ---- */

/* The job of all that a box is to get, without its bytes. */
static void box_job(const struct load_fill *f, const struct fill_box *b, struct place_job *j)
{
	struct load_tensor_info info;

	load_step_tensor_info(f->step, b->tensor, &info);
	*j = (struct place_job){.box = b->box, .tensor = b->tensor, .ndim = b->ndim, .data = b->data,
		.stride = b->stride, .from = info.dtype, .to = b->dtype ? b->dtype : info.dtype};
	j->item_bytes = tensor_dtype_bytes(j->to);
	place_order(j);
}

void place_box(const struct load_fill *f, const struct fill_box *b, struct device_gather *ret_g)
{
	struct place_job j;

	box_job(f, b, &j);
	place_describe(&j, &b->box, ret_g);
}

void place_part(struct load_fill *f, const struct fill_box *b, const struct tensor_grid *g,
	const struct tensor_box *piece, const struct tensor_box *part, const uint8_t *bytes)
{
	struct place_job j;

	box_job(f, b, &j);
	j.f = f;
	j.grid = g;
	j.piece = piece;
	j.bytes = bytes;
	place_job_do(&j, part, b->device, b->place);
}

void place_zeros(struct load_fill *f)
{
	for (size_t i = 0; i < f->nzeros; i++) {
		const struct fill_box *z = &f->zeros[i];
		struct place_job j;

		box_job(f, z, &j);
		j.f = f;
		if (!atomic_load(&f->stopped) && place_items(&j, &z->box))
			place_job_do(&j, &z->box, z->device, z->place);
	}
	if (f->nzeros)
		place_device_wait(f);
}
