/* SPDX-License-Identifier: Apache-2.0
 *
 * piece: the pieces of a box, their numbers, and the bytes in them.
 *
 * A tile row is a choice of one tile in every dimension but k. The pieces of a tile row lie side by side along k,
 * all of one width, and that width depends on the row only through r = item * the product of its sizes. In one
 * dimension the sizes of the tiles that a box overlaps are at most three numbers: the first tile's, that of full
 * tiles, the last tile's. So pieces are counted kind by kind, never one by one, and with the one or two cut
 * dimensions of real tensors that is a handful of multiplications. Of the tiles before a coordinate only the first can
 * be a short one, and in a whole tensor not even that, which makes finding a piece's number cheaper still.
 *
 * The stored order of a piece: it is one tile thick in every dimension but k, where it may span several cells;
 * cell after cell, each row-major. With r' = the items of one slice across k, the cell that begins at x along k
 * begins (x - piece offset) * r' items into the piece, whatever the box cut off. */
#include "core/tensor/grid.h"

#include <errno.h>
#include <string.h>

#include "core/base/le.h"
#include "core/base/past.h"
#include "core/tensor/boxes.h"
#include "core/tensor/piece_internal.h"

/* The tiles of one dimension that a box overlaps, in order, neighbours of equal size together. */
struct piece_kinds {
	unsigned n;
	struct { uint64_t size, tiles; } kind[3];
};

static void kinds_add(struct piece_kinds *k, uint64_t size, uint64_t tiles)
{
	if (tiles == 0)
		return;
	if (k->n > 0 && k->kind[k->n - 1].size == size)
		k->kind[k->n - 1].tiles += tiles;
	else {
		k->kind[k->n].size = size;
		k->kind[k->n++].tiles = tiles;
	}
}

static void kinds_init(struct piece_kinds *k, const struct tensor_grid *g, const struct tensor_box *box, unsigned d)
{
	uint64_t edge = g->edge[d], low = box->offset[d], high = low + box->size[d];
	uint64_t first = low / edge, last = (high - 1) / edge;

	k->n = 0;
	if (first == last) {
		kinds_add(k, high - low, 1);
		return;
	}
	kinds_add(k, (first + 1) * edge - low, 1);
	kinds_add(k, edge, last - first - 1);
	kinds_add(k, high - last * edge, 1);
}

/* r * w <= the tensor's bytes: no overflow. */
uint64_t tensor_piece_width(const struct tensor_grid *g, uint64_t r)
{
	uint64_t w = g->edge[g->k];

	if (!g->only_k)
		while (w < g->shape.dim[g->k] && r * w < g->params.min_bytes)
			w *= 2;
	return w;
}

uint64_t tensor_piece_row_width(const struct tensor_grid *g, const struct tensor_box *piece)
{
	return tensor_piece_width(g, tensor_piece_slice(g, piece) * g->item_bytes);
}

/* Pieces of a box in all tile rows that agree on the dimensions below `d`, where `r` = item * their sizes. */
static uint64_t count_from(const struct tensor_grid *g, const struct tensor_box *box, unsigned d, uint64_t r)
{
	struct piece_kinds kinds;
	uint64_t count = 0;

	if (d == g->k)
		d++;
	if (d >= g->shape.ndim) {
		uint64_t w = tensor_piece_width(g, r), low = box->offset[g->k];

		return (low + box->size[g->k] - 1) / w - low / w + 1;
	}
	kinds_init(&kinds, g, box, d);
	for (unsigned i = 0; i < kinds.n; i++)
		count += kinds.kind[i].tiles * count_from(g, box, d + 1, r * kinds.kind[i].size);
	return count;
}

uint64_t tensor_piece_count(const struct tensor_grid *g, const struct tensor_box *box)
{
	if (g->shape.ndim == 0 || tensor_box_empty(g->shape.ndim, box))
		return 1;
	return count_from(g, box, 0, g->item_bytes);
}

/* Puts [number * w, (number + 1) * w) ∩ box into dimension d of the piece. */
static void piece_clip(struct tensor_box *piece, const struct tensor_box *box, unsigned d, uint64_t number, uint64_t w)
{
	uint64_t low = base_max(box->offset[d], number * w);

	piece->offset[d] = low;
	piece->size[d] = base_min(box->offset[d] + box->size[d], (number + 1) * w) - low;
}

int tensor_piece_at(const struct tensor_grid *g, const struct tensor_box *box, uint64_t n, struct tensor_box *ret_piece)
{
	struct tensor_box piece = *box;
	uint64_t r = g->item_bytes, w;

	if (g->shape.ndim == 0 || tensor_box_empty(g->shape.ndim, box)) {
		*ret_piece = piece;
		return n == 0 ? 0 : -ERANGE;
	}
	for (unsigned d = 0; d < g->shape.ndim; d++) {
		struct piece_kinds kinds;
		uint64_t pieces = 1, at = box->offset[d];
		unsigned i;

		if (d == g->k)
			continue;
		kinds_init(&kinds, g, box, d);
		for (i = 0; i < kinds.n; i++) {
			pieces = count_from(g, box, d + 1, r * kinds.kind[i].size);
			if (n < kinds.kind[i].tiles * pieces)
				break;
			n -= kinds.kind[i].tiles * pieces;
			at += kinds.kind[i].tiles * kinds.kind[i].size;
		}
		if (i == kinds.n)
			return -ERANGE;
		piece.offset[d] = at + n / pieces * kinds.kind[i].size;
		piece.size[d] = kinds.kind[i].size;
		n %= pieces;
		r *= piece.size[d];
	}
	w = tensor_piece_width(g, r);
	if (n > (box->offset[g->k] + box->size[g->k] - 1) / w - box->offset[g->k] / w)
		return -ERANGE;
	piece_clip(&piece, box, g->k, box->offset[g->k] / w + n, w);
	*ret_piece = piece;
	return 0;
}

uint64_t tensor_piece_locate(const struct tensor_grid *g, const struct tensor_box *box, const uint64_t *at,
	struct tensor_box *ret_piece)
{
	uint64_t r = g->item_bytes, n = 0, w;

	for (unsigned d = 0; d < g->shape.ndim; d++) {
		uint64_t edge = g->edge[d], tile = at[d] / edge, first = box->offset[d] / edge,
			 cut = box->offset[d] % edge;

		if (d == g->k)
			continue;
		if (tile > first && cut != 0) { /* only the first of the tiles before can be a short one */
			n += count_from(g, box, d + 1, r * (edge - cut));
			first++;
		}
		if (tile > first)
			n += (tile - first) * count_from(g, box, d + 1, r * edge);
		piece_clip(ret_piece, box, d, tile, edge);
		r *= ret_piece->size[d];
	}
	w = tensor_piece_width(g, r);
	piece_clip(ret_piece, box, g->k, at[g->k] / w, w);
	return n + at[g->k] / w - box->offset[g->k] / w;
}

uint64_t tensor_piece_find(const struct tensor_grid *g, const uint64_t *at)
{
	struct tensor_box whole, piece;

	tensor_box_whole(&g->shape, &whole);
	return g->shape.ndim == 0 || tensor_shape_empty(&g->shape) ? 0 : tensor_piece_locate(g, &whole, at, &piece);
}

static void iter_begin_row(struct tensor_piece_iter *it)
{
	const struct tensor_grid *g = it->grid;
	uint64_t w = tensor_piece_row_width(g, &it->piece);

	piece_clip(&it->piece, &it->box, g->k, it->box.offset[g->k] / w, w);
}

void tensor_piece_first(struct tensor_piece_iter *it, const struct tensor_grid *g, const struct tensor_box *box)
{
	it->grid = g;
	it->box = *box;
	it->piece = *box;
	it->done = false;
	it->number = 0;
	if (g->shape.ndim == 0 || tensor_box_empty(g->shape.ndim, box))
		return;
	for (unsigned d = 0; d < g->shape.ndim; d++)
		if (d != g->k)
			piece_clip(&it->piece, box, d, box->offset[d] / g->edge[d], g->edge[d]);
	iter_begin_row(it);
}

/* Moves one tile on along `d`; false at the end of the box, where `d` starts again. */
static bool iter_step(struct tensor_piece_iter *it, unsigned d, uint64_t w)
{
	uint64_t end = it->piece.offset[d] + it->piece.size[d];
	bool more = end < it->box.offset[d] + it->box.size[d];

	piece_clip(&it->piece, &it->box, d, (more ? end : it->box.offset[d]) / w, w);
	return more;
}

void tensor_piece_next(struct tensor_piece_iter *it)
{
	const struct tensor_grid *g = it->grid;
	unsigned k = g->k, d = g->shape.ndim;

	it->done = true;
	if (d == 0 || tensor_box_empty(d, &it->box))
		return;
	it->done = false;
	it->number++;
	if (iter_step(it, k, tensor_piece_row_width(g, &it->piece)))
		return;
	while (d-- > 0)
		if (d != k && iter_step(it, d, g->edge[d])) {
			iter_begin_row(it);
			return;
		}
	it->done = true;
}

void tensor_piece_cell(const struct tensor_grid *g, const struct tensor_box *piece, uint64_t x,
	struct tensor_box *ret_cell)
{
	*ret_cell = *piece;
	piece_clip(ret_cell, piece, g->k, x / g->edge[g->k], g->edge[g->k]);
}

uint64_t tensor_piece_slice(const struct tensor_grid *g, const struct tensor_box *piece)
{
	uint64_t items = 1;

	for (unsigned d = 0; d < g->shape.ndim; d++)
		if (d != g->k)
			items *= piece->size[d];
	return items;
}

/* Items from `x` on that are neighbours in the tensor and in the piece: to the end of the cell in the last
 * dimension D that the cell does not fill, times all that comes after it. A cell that is one row thick before k is
 * followed in the piece by its neighbour along k, as in the tensor. */
static uint64_t fragment_items(const struct tensor_grid *g, const struct tensor_box *piece,
	const struct tensor_box *cell, const uint64_t *x)
{
	uint64_t inner = 1, done = 0, end;
	bool thin = true;
	unsigned d = g->shape.ndim;

	while (d-- > 0) {
		if (cell->size[d] != g->shape.dim[d])
			break;
		done += x[d] * inner;
		inner *= cell->size[d];
	}
	if (d == UINT32_MAX)
		return inner - done;
	end = cell->offset[d] + cell->size[d];
	for (unsigned i = 0; i < d; i++)
		if (cell->size[i] != 1)
			thin = false;
	if (d == g->k && thin)
		end = piece->offset[d] + piece->size[d];
	return (end - x[d]) * inner - done;
}

void tensor_fragment_in(const struct tensor_grid *g, const struct tensor_box *box, uint64_t at, uint64_t end,
	struct tensor_fragment *ret_f)
{
	uint64_t x[TENSOR_MAX_DIMS], item = at / g->item_bytes, skip = at % g->item_bytes, in_cell = 0;
	struct tensor_box piece, cell;
	unsigned k = g->k;

	if (g->shape.ndim == 0) {
		*ret_f = (struct tensor_fragment){0, at, end - at};
		return;
	}
	for (unsigned d = g->shape.ndim; d-- > 0; item /= g->shape.dim[d])
		x[d] = item % g->shape.dim[d];
	ret_f->piece = tensor_piece_locate(g, box, x, &piece);
	tensor_piece_cell(g, &piece, x[k], &cell);
	for (unsigned d = 0; d < g->shape.ndim; d++)
		in_cell = in_cell * cell.size[d] + (x[d] - cell.offset[d]);
	in_cell += (cell.offset[k] - piece.offset[k]) * tensor_piece_slice(g, &piece);
	ret_f->piece_offset = in_cell * g->item_bytes + skip;
	ret_f->len = base_min(fragment_items(g, &piece, &cell, x) * g->item_bytes - skip, end - at);
}

void tensor_fragment_at(const struct tensor_grid *g, uint64_t at, uint64_t end, struct tensor_fragment *ret_f)
{
	struct tensor_box whole;

	tensor_box_whole(&g->shape, &whole);
	tensor_fragment_in(g, &whole, at, end, ret_f);
}

/* A copy of n-dimensional strided bytes, dimensions that are contiguous on both sides folded together. */
struct piece_copy {
	uint64_t len;     /* bytes that lie together on both sides */
	bool past;        /* they are written past the caches */
	unsigned n;       /* loops around them, innermost first */
	struct { uint64_t count, to, from; } loop[TENSOR_MAX_DIMS]; /* times, strides in bytes */
};

static void copy_add(struct piece_copy *c, uint64_t count, uint64_t to, uint64_t from)
{
	if (count == 1)
		return;
	if (c->n == 0 && to == c->len && from == c->len)
		c->len *= count;
	else if (c->n > 0 && to == c->loop[c->n - 1].to * c->loop[c->n - 1].count
		 && from == c->loop[c->n - 1].from * c->loop[c->n - 1].count)
		c->loop[c->n - 1].count *= count;
	else {
		c->loop[c->n].count = count;
		c->loop[c->n].to = to;
		c->loop[c->n++].from = from;
	}
}

#define COPY_LINE 64u           /* bytes of a line of the cache */
#define COPY_AHEAD 8u           /* rows that are asked for before they are copied, if they are not longer than this: */
#define COPY_AHEAD_BYTES 1024u

/* The length of single items is made a constant, so that they are moved by one instruction. */
static void copy_rows(uint8_t *to, const uint8_t *from, uint64_t len, uint64_t count, uint64_t to_stride,
	uint64_t from_stride)
{
#define COPY_ROWS(n) \
	case n: \
		for (; count > 0; count--, to += to_stride, from += from_stride) \
			memcpy(to, from, n); \
		return
	switch (len) {
	COPY_ROWS(1);
	COPY_ROWS(2);
	COPY_ROWS(4);
	COPY_ROWS(8);
	COPY_ROWS(16);
	}
#undef COPY_ROWS
	for (; count > 0; count--, to += to_stride, from += from_stride) {
		/* Processors see a sequence inside a page of memory, not across rows that lie further apart: the rows
		 * ahead are asked for, also beyond the last (an address that is not there is no error). */
		if (from_stride > len && len <= COPY_AHEAD_BYTES)
			for (uint64_t i = 0; i < len; i += COPY_LINE)
				__builtin_prefetch((const void *)((uintptr_t)from + COPY_AHEAD * from_stride + i));
		memcpy(to, from, len);
	}
}

static void copy_rows_past(uint8_t *to, const uint8_t *from, uint64_t len, uint64_t count, uint64_t to_stride,
	uint64_t from_stride)
{
	for (; count > 0; count--, to += to_stride, from += from_stride)
		base_copy_past(to, from, len);
}

static void copy_nest(const struct piece_copy *c, uint8_t *to, const uint8_t *from)
{
	void (*rows)(uint8_t *, const uint8_t *, uint64_t, uint64_t, uint64_t, uint64_t) =
		c->past ? copy_rows_past : copy_rows;
	uint64_t i[TENSOR_MAX_DIMS] = {0};

	if (c->n == 0) {
		rows(to, from, c->len, 1, 0, 0);
		return;
	}
	for (;;) {
		unsigned d = 1;

		rows(to, from, c->len, c->loop[0].count, c->loop[0].to, c->loop[0].from);
		for (; d < c->n; d++) {
			to += c->loop[d].to;
			from += c->loop[d].from;
			if (++i[d] < c->loop[d].count)
				break;
			i[d] = 0;
			to -= c->loop[d].to * c->loop[d].count;
			from -= c->loop[d].from * c->loop[d].count;
		}
		if (d >= c->n)
			return;
	}
}

/* The array's side of a copy: where `origin` is, and the strides. */
struct piece_array {
	uint8_t *base;
	const uint64_t *origin, *stride;
	bool past;                       /* written past the caches */
};

#define COPY_PAST_BYTES 256u             /* shorter rows are not worth it */

/* Copies `part` of a cell whose bytes begin at `cell_bytes`. */
static void copy_cell(const struct tensor_grid *g, const struct tensor_box *cell, const struct tensor_box *part,
	uint8_t *cell_bytes, const struct piece_array *array, bool gather)
{
	struct piece_copy c = {.len = g->item_bytes};
	uint8_t *stored = cell_bytes, *outside = array->base;
	uint64_t stride = g->item_bytes;

	for (unsigned d = g->shape.ndim; d-- > 0; stride *= cell->size[d]) {
		stored += (part->offset[d] - cell->offset[d]) * stride;
		outside += (part->offset[d] - array->origin[d]) * array->stride[d];
		copy_add(&c, part->size[d], gather ? stride : array->stride[d], gather ? array->stride[d] : stride);
	}
	c.past = array->past && c.len >= COPY_PAST_BYTES;
	copy_nest(&c, gather ? stored : outside, gather ? outside : stored);
}

static void copy_piece(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	uint8_t *piece_bytes, const struct piece_array *array, bool gather)
{
	struct tensor_box area = *piece, cell, part;
	unsigned k = g->k;
	uint64_t slice, end;

	if (g->shape.ndim == 0) {
		memcpy(gather ? piece_bytes : array->base, gather ? array->base : piece_bytes, g->item_bytes);
		return;
	}
	if (!tensor_box_intersect(g->shape.ndim, piece, window ? window : piece, &area))
		return;
	slice = tensor_piece_slice(g, piece) * g->item_bytes;
	end = area.offset[k] + area.size[k];
	for (uint64_t x = area.offset[k]; x < end; x = cell.offset[k] + cell.size[k]) {
		tensor_piece_cell(g, piece, x, &cell);
		if (tensor_box_intersect(g->shape.ndim, &cell, &area, &part))
			copy_cell(g, &cell, &part, piece_bytes + (cell.offset[k] - piece->offset[k]) * slice, array,
				gather);
	}
}

void tensor_piece_gather(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	void *piece_bytes, const void *base, const uint64_t *origin, const uint64_t *stride)
{
	/* read only when gathering */
	const struct piece_array array = {(uint8_t *)(uintptr_t)base, origin, stride, false};

	copy_piece(g, piece, window, piece_bytes, &array, true);
}

struct piece_strips {
	const struct piece_array *array;
	void *room;
	uint64_t room_bytes;
	bool there;                      /* a strip that is contiguous is handed over where it is */
	void (*strip)(void *arg, const void *bytes, size_t len);
	void *arg;
};

/* How a slab of these sizes is copied into memory of its own. */
static void slab_copy(const struct tensor_grid *g, const uint64_t *size, const struct piece_array *array,
	struct piece_copy *ret_c)
{
	uint64_t stride = g->item_bytes;

	*ret_c = (struct piece_copy){.len = g->item_bytes};
	for (unsigned d = g->shape.ndim; d-- > 0; stride *= size[d])
		copy_add(ret_c, size[d], stride, array->stride[d]);
}

static void stream_slab(const struct piece_strips *p, const struct piece_copy *c, const uint8_t *from, size_t len)
{
	if (p->there && c->n == 0) {
		p->strip(p->arg, from, len);
		return;
	}
	copy_nest(c, p->room, from);
	p->strip(p->arg, p->room, len);
}

/* Slabs of the cell that lie together: whole in the dimensions from `d` on, a few rows of the one before, and one place
 * in each of the outer ones. */
static void stream_cell(const struct tensor_grid *g, const struct tensor_box *cell, const struct piece_strips *p)
{
	const uint8_t *from = p->array->base;
	uint64_t inner = g->item_bytes, at[TENSOR_MAX_DIMS] = {0}, count = 1, step = 1, across = 0;
	struct tensor_box slab = *cell;
	struct piece_copy c;
	unsigned d = g->shape.ndim, i;

	for (i = 0; i < g->shape.ndim; i++)
		from += (cell->offset[i] - p->array->origin[i]) * p->array->stride[i];
	while (d > 0 && inner * cell->size[d - 1] <= p->room_bytes)
		inner *= cell->size[--d];
	for (i = 0; i + 1 < d; i++)
		slab.size[i] = 1;
	if (d > 0) {
		count = cell->size[d - 1];
		step = p->room_bytes / inner;
		across = p->array->stride[d - 1];
		slab.size[d - 1] = step;
	}
	slab_copy(g, slab.size, p->array, &c);
	do {
		uint64_t x = 0;

		for (; x + step <= count; x += step)
			stream_slab(p, &c, from + x * across, step * inner);
		if (x < count) {
			struct piece_copy rest;

			slab.size[d - 1] = count - x;
			slab_copy(g, slab.size, p->array, &rest);
			stream_slab(p, &rest, from + x * across, (count - x) * inner);
		}
		for (i = d ? d - 1 : 0; i > 0; i--) {
			from += p->array->stride[i - 1];
			if (++at[i - 1] < cell->size[i - 1])
				break;
			from -= at[i - 1] * p->array->stride[i - 1];
			at[i - 1] = 0;
		}
	} while (i > 0);
}

void tensor_piece_stream(const struct tensor_grid *g, const struct tensor_box *piece, const void *base,
	const uint64_t *origin, const uint64_t *stride, void *room, size_t room_bytes, bool there,
	void (*strip)(void *arg, const void *bytes, size_t len), void *arg)
{
	const struct piece_array array = {(uint8_t *)(uintptr_t)base, origin, stride, false}; /* only read */
	const struct piece_strips strips = {&array, room, room_bytes, there, strip, arg};
	struct tensor_box cell;
	unsigned k = g->k;

	if (g->shape.ndim == 0) {
		memcpy(room, base, g->item_bytes);
		strip(arg, room, g->item_bytes);
		return;
	}
	if (tensor_box_items(&g->shape, piece) == 0)
		return;
	for (uint64_t x = piece->offset[k]; x < piece->offset[k] + piece->size[k]; x = cell.offset[k] + cell.size[k]) {
		tensor_piece_cell(g, piece, x, &cell);
		stream_cell(g, &cell, &strips);
	}
}

void tensor_piece_scatter(const struct tensor_grid *g, const struct tensor_box *piece, const struct tensor_box *window,
	const void *piece_bytes, void *base, const uint64_t *origin, const uint64_t *stride)
{
	const struct piece_array array = {base, origin, stride, false};

	copy_piece(g, piece, window, (uint8_t *)(uintptr_t)piece_bytes, &array, false); /* read only when scattering */
}

void tensor_piece_scatter_past(const struct tensor_grid *g, const struct tensor_box *piece,
	const struct tensor_box *window, const void *piece_bytes, void *base, const uint64_t *origin,
	const uint64_t *stride)
{
	const struct piece_array array = {base, origin, stride, true};

	copy_piece(g, piece, window, (uint8_t *)(uintptr_t)piece_bytes, &array, false); /* read only when scattering */
	base_copy_past_end();
}
