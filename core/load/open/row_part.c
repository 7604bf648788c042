/* SPDX-License-Identifier: Apache-2.0
 *
 * row_part: the pieces of a row that can hold what is wanted, and no others.
 *
 * An index over the wanted boxes finds those that a stored box meets; the pieces of the box that meet them are computed
 * (tensor_piece_window). A short row is taken out of its chunk, which is checked as a whole. A long row (alone in its
 * chunk, which is longer than chunks are made) is read by ranges: its boxes and extents, and the wanted pieces
 * (core/step/part_excerpt.h). */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/load/open/rows_internal.h"
#include "core/tensor/reshard.h"

#define TAKE_PIECES 1024u        /* of a long row that are asked for at once */

struct row_take {
	const struct load_question *q;
	const struct tensor_box *box;    /* under way */
	unsigned windows;                /* wanted boxes that it meets */
	struct tensor_box *boxes; uint32_t nboxes, boxes_room; /* that meet a wanted one */
	uint64_t *first; size_t first_room; /* by box: the first of its numbers */
	uint64_t *from; size_t from_room; /* by box: number of its first piece in the row */
	uint64_t *numbers; uint64_t n; size_t room; /* of wanted pieces, among those of their box; ascending for each */
	struct store_piece *pieces;
	struct base_buf inlined;
};

static void take_release(struct row_take *t)
{
	free(t->boxes);
	free(t->first);
	free(t->from);
	free(t->numbers);
	free(t->pieces);
	base_buf_release(&t->inlined);
}

void load_row_release(struct load_row *row)
{
	if (row->numbers)
		free(row->row.boxes);
	store_row_release(&row->row);
	free(row->first);
	free(row->numbers);
	base_buf_release(&row->inlined);
	*row = (struct load_row){0};
}

/* The pieces of the box under way that meet a wanted box. */
static int take_window(void *arg, size_t number)
{
	struct row_take *t = arg;
	struct tensor_piece_window w;
	struct tensor_box wanted;

	tensor_boxes_get(t->q->wanted, number, &wanted);
	for (tensor_piece_window_first(&w, t->q->grid, t->box, &wanted); !w.done; tensor_piece_window_next(&w)) {
		if (base_array_room(t->numbers, t->room, t->n + 1) < 0)
			return -ENOMEM;
		t->numbers[t->n++] = w.number;
	}
	t->windows++;
	return 0;
}

/* `from`: the number of its first piece in the row. */
static int take_box(struct row_take *t, const struct tensor_box *box, uint64_t from)
{
	uint64_t first = t->n;

	t->box = box;
	t->windows = 0;
	if (tensor_box_index_find(t->q->index, box, take_window, t) < 0)
		return -ENOMEM;
	if (t->windows == 0)
		return 0;
	if (t->windows > 1) /* two wanted boxes may want something of one piece: it counts once */
		t->n = first + base_array_unique(t->numbers + first, t->n - first, sizeof *t->numbers, base_compare_64);
	if (base_array_room(t->boxes, t->boxes_room, t->nboxes + 1) < 0
		|| base_array_room(t->first, t->first_room, (size_t)t->nboxes + 2) < 0
		|| base_array_room(t->from, t->from_room, (size_t)t->nboxes + 1) < 0)
		return -ENOMEM;
	t->boxes[t->nboxes] = *box;
	t->first[t->nboxes] = first;
	t->from[t->nboxes++] = from;
	t->first[t->nboxes] = t->n;
	return 0;
}

static void take_piece(struct row_take *t, uint64_t i, const struct store_piece *p)
{
	t->pieces[i] = *p;
	if (p->inline_bytes)
		base_buf_append(&t->inlined, p->inline_bytes, p->ref.raw_len);
}

/* Gives back the room that an array does not need: there are as many rows as tensors times writers. */
static void *take_exact(void *array, uint64_t n, size_t item_bytes)
{
	void *exact = realloc(array, n * item_bytes);

	return exact ? exact : array;
}

/* The row is what was taken. */
static int take_finish(struct row_take *t, struct load_row *ret_row)
{
	const uint8_t *inlined = t->inlined.data;

	if (t->inlined.error)
		return -ENOMEM;
	for (uint64_t i = 0; i < t->n; i++)
		if (t->pieces[i].inline_bytes) {
			t->pieces[i].inline_bytes = inlined;
			inlined += t->pieces[i].ref.raw_len;
		}
	ret_row->row = (struct store_row){.boxes = take_exact(base_steal(t->boxes), t->nboxes, sizeof *t->boxes),
		.nboxes = t->nboxes, .pieces = t->pieces, .npieces = t->n, .memory = t->pieces};
	t->pieces = NULL;
	ret_row->first = take_exact(base_steal(t->first), (uint64_t)t->nboxes + 1, sizeof *t->first);
	ret_row->numbers = take_exact(base_steal(t->numbers), t->n, sizeof *t->numbers);
	ret_row->inlined = t->inlined;
	t->inlined = (struct base_buf)BASE_BUF_INIT;
	return 0;
}

int load_row_take(const struct load_question *q, const struct store_row *all, struct load_row *ret_row)
{
	base_cleanup(take_release) struct row_take t = {.q = q};
	uint64_t from = 0;

	for (uint32_t i = 0; i < all->nboxes; i++) {
		if (take_box(&t, &all->boxes[i], from) < 0)
			return -ENOMEM;
		from += tensor_piece_count(q->grid, &all->boxes[i]);
	}
	if (t.n == 0)
		return -ENODATA;
	t.pieces = malloc(t.n * sizeof *t.pieces);
	if (!t.pieces)
		return -ENOMEM;
	for (uint32_t b = 0; b < t.nboxes; b++)
		for (uint64_t i = t.first[b]; i < t.first[b + 1]; i++)
			take_piece(&t, i, &all->pieces[t.from[b] + t.numbers[i]]);
	return take_finish(&t, ret_row);
}

/* ---- long rows ---- */

/* Pieces of one box; one call for those that follow each other. */
static int excerpt_pieces(struct row_take *t, struct store_part_excerpt *e, uint32_t box, struct base_error *err)
{
	int r = 0;

	for (uint64_t i = t->first[box], n; r == 0 && i < t->first[box + 1]; i += n) {
		uint64_t most = base_min(t->first[box + 1] - i, TAKE_PIECES);

		for (n = 1; n < most && t->numbers[i + n] == t->numbers[i] + n;)
			n++;
		r = store_part_excerpt_pieces(e, t->from[box] + t->numbers[i], n, t->pieces + i, err);
		for (uint64_t k = i; r == 0 && k < i + n; k++)
			take_piece(t, k, &t->pieces[k]);
	}
	return r;
}

int load_row_excerpt(const struct load_question *q, struct store_part_excerpt *e, struct load_row *ret_row,
	struct base_error *err)
{
	base_cleanup(take_release) struct row_take t = {.q = q};
	struct tensor_box box;
	int r = 0;

	for (size_t i = 0; i < e->boxes.n; i++) {
		tensor_boxes_get(&e->boxes, i, &box);
		if (take_box(&t, &box, e->first_piece[i]) < 0)
			return base_no_memory(err);
	}
	if (t.n == 0)
		return -ENODATA;
	t.pieces = malloc(t.n * sizeof *t.pieces);
	if (!t.pieces)
		return base_no_memory(err);
	for (uint32_t b = 0; r == 0 && b < t.nboxes; b++)
		r = excerpt_pieces(&t, e, b, err);
	if (r == 0 && take_finish(&t, ret_row) < 0)
		r = base_no_memory(err);
	return r;
}
