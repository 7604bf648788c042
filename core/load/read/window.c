/* SPDX-License-Identifier: Apache-2.0
 *
 * window: a box of a tensor, out of the cache.
 *
 * The pieces that meet the box are pinned a few at a time, so that a request never pins more than WINDOW_PINS pieces
 * however many its box meets, and those of one batch are read together. Pieces longer than a segment of the cache have
 * no bytes in one place: their tensors are read row after row, as ranges of the whole tensor.
 *
 * The items are counted, so that a read that succeeds has filled all of its memory. */
#include <stdlib.h>
#include <string.h>

#include "core/load/read/read_internal.h"
#include "core/tensor/reshard.h"

#define WINDOW_PINS 16u

struct window_part { struct tensor_box piece, part; uint64_t number; };

struct window {
	struct load_object *o;
	struct load_cache *c;
	const struct tensor_box *box;
	uint8_t *out;
	const uint64_t *stride;
	uint64_t left;                  /* items of the box that no piece had so far */
	struct window_part parts[WINDOW_PINS]; unsigned n;
	struct base_error *err;
};

/* Stored boxes or pieces contradict what was checked when the object was opened. */
static int window_bad(const struct window *w)
{
	char text[800];

	tensor_box_text(w->o->grid.shape.ndim, w->box, text, sizeof text);
	base_error_set(w->err, -BASE_EFORMAT, "the items of box %s are not each in exactly one of its pieces", text);
	return load_object_fail(w->o, -BASE_EFORMAT, w->err);
}

/* Copies what has been collected. The pieces of a stored box are ascending, the stored boxes are in any order; no piece
 * comes twice, since stored boxes are disjoint. */
static int window_flush(struct window *w)
{
	struct load_want wants[WINDOW_PINS];
	unsigned n = w->n;
	int r;

	w->n = 0;
	for (unsigned i = 0; i < n; i++)
		wants[i] = (struct load_want){.piece = w->parts[i].number};
	r = n ? load_cache_pin(w->c, w->o, wants, n, w->err) : 0;
	if (r < 0)
		return r;
	for (unsigned i = 0; i < n; i++) {
		const struct window_part *p = &w->parts[i];
		const uint8_t *bytes = w->o->pieces[p->number].inline_bytes;

		if (!bytes)
			bytes = load_pin_bytes(wants[i].pin);
		tensor_piece_scatter(&w->o->grid, &p->piece, &p->part, bytes, w->out, w->box->offset, w->stride);
		load_unpin(wants[i].pin);
	}
	return 0;
}

/* The pieces of one stored box, whose first is number `first` of the object. */
static int window_stored(struct window *w, const struct tensor_box *stored, uint64_t first)
{
	struct tensor_piece_window p;
	int r = 0;

	for (tensor_piece_window_first(&p, &w->o->grid, stored, w->box); !p.done && r == 0;
		tensor_piece_window_next(&p)) {
		uint64_t items = tensor_box_items(&w->o->grid.shape, &p.part);

		if (items > w->left || first + p.number >= w->o->npieces)
			return window_bad(w);
		w->left -= items;
		w->parts[w->n++] = (struct window_part){p.piece, p.part, first + p.number};
		if (w->n == WINDOW_PINS)
			r = window_flush(w);
	}
	return r;
}

static int window_box(void *arg, size_t box)
{
	struct window *w = arg;
	struct tensor_box stored;

	tensor_boxes_get(&w->o->boxes->list, box, &stored);
	return window_stored(w, &stored, w->o->boxes->first_piece[box]);
}

/* Row after row; the items of a row are copied one by one, since neighbours may be apart in `out`. */
static int window_rows(struct window *w)
{
	unsigned ndim = w->o->grid.shape.ndim, item = w->o->grid.item_bytes;
	uint64_t at[TENSOR_MAX_DIMS] = {0}, len = ndim ? w->box->size[ndim - 1] * item : item;
	base_cleanup_free uint8_t *row = malloc(len);
	int r;

	if (!row)
		return base_no_memory(w->err);
	for (;;) {
		uint64_t from = 0, to = 0;
		unsigned d = ndim;

		for (unsigned i = 0; i < ndim; i++) {
			from += (w->box->offset[i] + at[i]) * w->o->stride[i];
			to += at[i] * w->stride[i];
		}
		r = load_object_read(w->o, w->c, from, len, row, w->err);
		if (r < 0)
			return r;
		for (uint64_t i = 0; i < len / item; i++)
			memcpy(w->out + to + (ndim ? i * w->stride[ndim - 1] : 0), row + i * item, item);
		while (d > 1 && ++at[d - 2] == w->box->size[d - 2])
			at[--d - 1] = 0;
		if (d <= 1)
			return 0;
	}
}

int load_object_read_box(struct load_object *o, struct load_cache *c, const struct tensor_box *box, void *out,
	const uint64_t *stride, struct base_error *err)
{
	struct window w = {.o = o, .c = c, .box = box, .out = out, .stride = stride, .err = err};
	int r;

	if (o->blob || !tensor_box_inside(&o->grid.shape, box))
		return base_error_set(err, -EINVAL, "%s: the box is not inside it", o->label);
	w.left = tensor_box_items(&o->grid.shape, box);
	if (w.left == 0)
		return 0;
	if (o->grid.shape.ndim == 0 || o->max_piece > LOAD_SEGMENT_BYTES)
		return window_rows(&w);
	if (o->boxes)
		r = tensor_box_index_find(o->boxes->index, box, window_box, &w);
	else
		r = window_stored(&w, &o->whole, 0);
	if (r == 0 && w.left)
		r = window_bad(&w);
	return r < 0 ? r : window_flush(&w);
}
