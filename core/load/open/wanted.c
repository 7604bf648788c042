/* SPDX-License-Identifier: Apache-2.0
 *
 * wanted: tensors, opened as far as boxes of them are wanted: what a load opens.
 *
 * The rows that come (rows.c) have only the stored boxes and the pieces that meet a wanted box. Equal boxes count once.
 * The rule for a whole tensor holds for what is wanted of it: the stored boxes, cut to a wanted box, have to cover it
 * exactly, no item twice. What is outside is not checked: other ranks may read it, or none.
 *
 * Memory: the place of each stored box, an entry in the index, and what its wanted pieces need. */
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/load/open/gather_internal.h"
#include "core/storage/spread.h"

#define WANTED_JOB 256u          /* tensors that one thread puts together at once: a few microseconds each */

void load_wanted_release(struct load_wanted *w)
{
	load_object_unref(w->object);
	tensor_boxes_release(&w->boxes);
	free(w->why);
}

/* ---- the boxes ---- */

static int wanted_boxes(struct load_gather *g, const struct load_question *q)
{
	struct load_boxes *b = g->o->boxes = calloc(1, sizeof *b);

	for (uint32_t r = 0; r < q->nrows; r++)
		for (uint32_t i = 0; i < q->rows[r].row.nboxes; i++)
			base_buf_append(&g->from, &(struct load_gather_from){r, i, q->rows[r].first[i],
				q->rows[r].first[i + 1] - q->rows[r].first[i]}, sizeof(struct load_gather_from));
	if (!b || g->from.error)
		return base_no_memory(g->err);
	if (g->from.len && load_gather_fold(g) < 0)
		return base_no_memory(g->err);
	b->list = g->list;
	g->list = (struct tensor_boxes){.ndim = b->list.ndim, .n = b->list.n};
	b->first_piece = calloc(b->list.n + 1, sizeof *b->first_piece);
	return b->first_piece && tensor_box_index_new(&b->list, &b->index) == 0 ? 0 : base_no_memory(g->err);
}

/* ---- every wanted item once ---- */

struct wanted_cover {
	const struct load_gather *g;
	struct tensor_box window;        /* wanted */
	struct tensor_boxes cut;         /* what stored boxes have of it, in its coordinates */
	struct base_buf from;            /* size_t: which stored box that is */
};

static void cover_release(struct wanted_cover *c)
{
	tensor_boxes_release(&c->cut);
	base_buf_release(&c->from);
}

static int cover_cut(void *arg, size_t number)
{
	struct wanted_cover *c = arg;
	struct tensor_box box;

	tensor_boxes_get(&c->g->o->boxes->list, number, &box);
	tensor_box_intersect(c->cut.ndim, &box, &c->window, &box);
	for (uint32_t d = 0; d < c->cut.ndim; d++)
		box.offset[d] -= c->window.offset[d];
	base_buf_append(&c->from, &number, sizeof number);
	return tensor_boxes_add(&c->cut, &box) < 0 || c->from.error ? -ENOMEM : 0;
}

/* One wanted box. */
static int wanted_covered(const struct load_gather *g, const struct tensor_box *window)
{
	base_cleanup(cover_release) struct wanted_cover c = {.g = g, .window = *window,
		.cut.ndim = g->o->grid.shape.ndim};
	struct tensor_shape shape = {.ndim = c.cut.ndim};
	struct tensor_cover fault = {0};
	const size_t *from;
	int r = tensor_box_index_find(g->o->boxes->index, window, cover_cut, &c);

	if (r < 0)
		return base_no_memory(g->err);
	memcpy(shape.dim, window->size, shape.ndim * sizeof *shape.dim);
	r = tensor_boxes_cover(&shape, &c.cut, &fault);
	if (r == 0)
		return 0;
	for (uint32_t d = 0; d < shape.ndim; d++)
		fault.box.offset[d] += window->offset[d];
	from = (const size_t *)c.from.data;
	if (r == -EEXIST) {
		fault.a = from[fault.a];
		fault.b = from[fault.b];
	}
	return load_gather_fault(g, r, &fault);
}

/* ---- the pieces ---- */

static int wanted_pieces(struct load_gather *g)
{
	struct load_object *o = g->o;
	uint64_t next = 0;
	uint8_t *inlined;
	int r = load_gather_room(g, &inlined);

	if (r < 0)
		return r;
	o->numbers = malloc((o->npieces + 1) * sizeof *o->numbers);
	if (!o->numbers)
		return base_no_memory(g->err);
	for (size_t i = 0; i < g->list.n; i++) {
		const struct load_gather_from *from = &load_gather_from(g)[i];

		o->boxes->first_piece[i] = next;
		for (uint64_t k = 0; k < from->n; k++, next++) {
			load_gather_piece(g, from, k, &o->row.pieces[next], &inlined);
			o->numbers[next] = g->rows[from->row].numbers[from->first + k];
		}
	}
	o->boxes->first_piece[g->list.n] = next;
	return 0;
}

/* ---- all of them ---- */

struct wanted_opening {
	struct load_step *step;
	struct load_wanted *all; uint32_t n;
	struct load_question *questions;
	struct tensor_box_index **indexes;
};

static void opening_release(struct wanted_opening *w)
{
	for (uint32_t i = 0; w->questions && i < w->n; i++)
		load_question_release(&w->questions[i]);
	for (uint32_t i = 0; w->indexes && i < w->n; i++)
		tensor_box_index_free(w->indexes[i]);
	free(w->questions);
	free(w->indexes);
}

static int opening_begin(struct wanted_opening *w, struct base_error *err)
{
	w->questions = calloc((size_t)w->n + 1, sizeof *w->questions);
	w->indexes = calloc((size_t)w->n + 1, sizeof *w->indexes);
	if (!w->questions || !w->indexes)
		return base_no_memory(err);
	for (uint32_t i = 0; i < w->n; i++) {
		struct load_wanted *wanted = &w->all[i];
		int r = load_object_new(w->step, wanted->tensor, &wanted->object, err);

		if (r == 0 && tensor_box_index_new(&wanted->boxes, &w->indexes[i]) < 0)
			r = base_no_memory(err);
		if (r < 0)
			return r;
		w->questions[i] = (struct load_question){.tensor = wanted->tensor, .grid = &wanted->object->grid,
			.wanted = &wanted->boxes, .index = w->indexes[i]};
	}
	return 0;
}

static int wanted_put(struct load_object *o, const struct load_wanted *wanted, const struct load_question *q,
	struct base_error *err)
{
	base_cleanup(load_gather_release) struct load_gather g = {.o = o, .err = err, .rows = q->rows,
		.list.ndim = o->grid.shape.ndim};
	int r = q->r < 0 ? base_error_set(err, q->r, "%s", q->why) : wanted_boxes(&g, q);

	for (size_t i = 0; r == 0 && i < wanted->boxes.n; i++) {
		struct tensor_box window;

		tensor_boxes_get(&wanted->boxes, i, &window);
		r = wanted_covered(&g, &window);
	}
	return r < 0 ? r : wanted_pieces(&g);
}

static int opening_one(const struct wanted_opening *w, uint32_t i, struct base_error *err)
{
	struct load_wanted *wanted = &w->all[i];
	struct base_error why = {0};

	wanted->r = wanted_put(wanted->object, wanted, &w->questions[i], &why);
	load_question_release(&w->questions[i]);
	w->questions[i] = (struct load_question){0};
	if (wanted->r == 0)
		return 0;
	load_object_fail(wanted->object, wanted->r, &why);
	load_object_unref(base_steal(wanted->object));
	wanted->why = strdup(why.text);
	return wanted->why ? 0 : base_no_memory(err);
}

static int opening_some(void *arg, uint32_t job, struct base_error *err)
{
	const struct wanted_opening *w = arg;
	uint32_t end = (uint32_t)base_min(w->n, ((uint64_t)job + 1) * WANTED_JOB);
	int r = 0;

	for (uint32_t i = job * WANTED_JOB; r == 0 && i < end; i++)
		r = opening_one(w, i, err);
	return r;
}

int load_wanted_open(struct load_step *step, struct load_wanted *all, uint32_t n, const atomic_bool *stop,
	struct base_error *err)
{
	base_cleanup(opening_release) struct wanted_opening w = {.step = step, .all = all, .n = n};
	int r = opening_begin(&w, err);

	if (r == 0)
		r = load_rows_ask(step, w.questions, n, stop, err);
	return r < 0 ? r : storage_spread((uint32_t)base_div_up(n, WANTED_JOB), opening_some, &w, err);
}
