/* SPDX-License-Identifier: Apache-2.0
 *
 * reshard: see the header. A tile row is one tile in every dimension but k; its pieces lie side by side along k. So the
 * pieces that overlap a window are those of the tile rows that do, and of each row the ones from the first to the
 * last along k. A row begins by arithmetic (which piece holds the window's first item in it, and its number among all
 * of the box); along k the pieces follow each other. Nothing is walked over. */
#include "core/tensor/reshard.h"

#include <errno.h>
#include <string.h>

#include "core/base/le.h"
#include "core/tensor/piece_internal.h"

/* The piece that holds `at`, and what of it is wanted. */
static void window_set(struct tensor_piece_window *w, const uint64_t *at)
{
	w->number = tensor_piece_locate(w->grid, &w->box, at, &w->piece);
	tensor_box_intersect(w->grid->shape.ndim, &w->piece, &w->window, &w->part);
}

void tensor_piece_window_first(struct tensor_piece_window *w, const struct tensor_grid *g, const struct tensor_box *box,
	const struct tensor_box *window)
{
	w->grid = g;
	w->box = *box;
	w->number = 0;
	w->done = !tensor_box_intersect(g->shape.ndim, box, window, &w->window);
	w->piece = w->part = *box;
	if (!w->done && g->shape.ndim > 0)
		window_set(w, w->window.offset);
}

/* Moves on to the next piece of the tile row; false at its end. */
static bool window_along_k(struct tensor_piece_window *w)
{
	const struct tensor_grid *g = w->grid;
	uint64_t end = w->piece.offset[g->k] + w->piece.size[g->k];

	if (end >= w->window.offset[g->k] + w->window.size[g->k])
		return false;
	w->number++;
	w->piece.offset[g->k] = end; /* a multiple of the width */
	w->piece.size[g->k] = base_min(tensor_piece_row_width(g, &w->piece),
		w->box.offset[g->k] + w->box.size[g->k] - end);
	w->part.offset[g->k] = end;
	w->part.size[g->k] = base_min(w->piece.size[g->k], w->window.offset[g->k] + w->window.size[g->k] - end);
	return true;
}

void tensor_piece_window_next(struct tensor_piece_window *w)
{
	uint64_t at[TENSOR_MAX_DIMS], end;
	unsigned d = w->grid->shape.ndim;

	if (d > 0 && window_along_k(w))
		return;
	/* along k the part now ends where the window does */
	memcpy(at, w->part.offset, sizeof at);
	while (d-- > 0) {
		end = w->part.offset[d] + w->part.size[d];
		if (end < w->window.offset[d] + w->window.size[d]) {
			at[d] = end;
			at[w->grid->k] = w->window.offset[w->grid->k];
			window_set(w, at);
			return;
		}
		at[d] = w->window.offset[d];
	}
	w->done = true;
}

/* ---- the relation ---- */

struct reshard {
	const struct tensor_grid *grid;
	const struct tensor_boxes *sources;
	const struct tensor_shard_box *wanted;  /* the target's box under way */
	int (*f)(void *arg, const struct tensor_reshard_line *line);
	void *arg;
};

/* The lines of one source box for one box of the target. */
static int reshard_source(void *arg, size_t source)
{
	const struct reshard *s = arg;
	const struct tensor_shard_box *wanted = s->wanted;
	unsigned ndim = s->grid->shape.ndim;
	struct tensor_reshard_line line = {.box = source};
	struct tensor_piece_window w;
	struct tensor_box box;
	int r = 0;

	tensor_boxes_get(s->sources, source, &box);
	memcpy(line.local_stride, wanted->local_stride, ndim * sizeof line.local_stride[0]);
	for (tensor_piece_window_first(&w, s->grid, &box, &wanted->box); !w.done && r == 0;
		tensor_piece_window_next(&w)) {
		line.piece = w.number;
		line.piece_box = w.piece;
		line.part = w.part;
		line.local_offset = wanted->local_offset;
		for (unsigned d = 0; d < ndim; d++)
			line.local_offset += (w.part.offset[d] - wanted->box.offset[d]) * wanted->local_stride[d];
		r = s->f(s->arg, &line);
	}
	return r;
}

int tensor_reshard_box(const struct tensor_grid *g, const struct tensor_box_index *sources,
	const struct tensor_boxes *boxes, const struct tensor_shard_box *wanted,
	int (*f)(void *arg, const struct tensor_reshard_line *line), void *arg)
{
	struct reshard s = {g, boxes, wanted, f, arg};

	if (boxes->ndim != g->shape.ndim)
		return -EINVAL;
	return tensor_box_index_find(sources, &wanted->box, reshard_source, &s);
}
