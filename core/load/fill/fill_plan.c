/* SPDX-License-Identifier: Apache-2.0
 *
 * fill_plan: from boxes to needs and tasks (fill_work.h). All tensors are opened together, each once and as far as
 * its boxes want it (wanted.c). An index finds the stored boxes that meet a wanted one, and their pieces are computed;
 * so the work grows with what is wanted, not with what the step holds.
 *
 * The needs of a box have each of its items once: stored boxes were cut to it and checked (wanted.c), and the pieces of
 * one are disjoint. In the end the bytes that were placed are compared with those wanted (fill_check). */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/clock.h"
#include "core/load/fill/fill_work.h"
#include "core/tensor/reshard.h"

/* ---- tensors ---- */

/* Each tensor that has boxes, once, with its boxes. */
static int plan_objects(struct load_fill *f)
{
	base_cleanup_free uint32_t *tensors = malloc((f->nboxes + 1) * sizeof *tensors);
	uint32_t n;

	if (!tensors)
		return -ENOMEM;
	for (size_t i = 0; i < f->nboxes; i++)
		tensors[i] = f->boxes[i].tensor;
	n = (uint32_t)base_array_unique(tensors, f->nboxes, sizeof *tensors, base_compare_32);
	f->objects = calloc((size_t)n + 1, sizeof *f->objects);
	if (!f->objects)
		return -ENOMEM;
	f->nobjects = n;
	for (uint32_t i = 0; i < n; i++) {
		struct load_tensor_info info;

		load_step_tensor_info(f->step, tensors[i], &info);
		f->objects[i] = (struct load_wanted){.tensor = tensors[i], .boxes.ndim = info.shape.ndim};
	}
	for (size_t i = 0; i < f->nboxes; i++) {
		struct fill_box *b = &f->boxes[i];

		b->object = base_bisect(k, 0, n, tensors[k] < b->tensor);
		if (tensor_boxes_add(&f->objects[b->object].boxes, &b->box) < 0)
			return -ENOMEM;
	}
	return 0;
}

/* Damage may be skipped: then the boxes of a tensor that cannot be opened are lost. */
static int plan_open(struct load_fill *f, struct base_error *err)
{
	int r = load_wanted_open(f->step, f->objects, f->nobjects, &f->stopped, err);

	for (uint32_t i = 0; r == 0 && i < f->nobjects; i++)
		if (f->objects[i].r < 0 && !fill_skips(f, f->objects[i].r))
			r = base_error_set(err, f->objects[i].r, "%s", f->objects[i].why);
	return r;
}

/* ---- needs ---- */

/* The box whose needs are made, and its last piece: number of the stored box, and number in the object. */
struct plan_box { struct load_fill *f; uint32_t number; size_t stored; uint64_t at; };

/* A piece that the box wants something of. The object has all of these, by stored box in the same order, since they
 * were computed in the same way when it was opened (row_part.c). */
static int need_line(void *arg, const struct tensor_reshard_line *line)
{
	struct plan_box *b = arg;
	struct load_fill *f = b->f;
	const struct load_object *o = f->objects[f->boxes[b->number].object].object;
	const uint64_t *first = o->boxes->first_piece;
	const struct store_piece *p;

	b->at = line->box == b->stored ? b->at + 1 : first[line->box];
	if (b->at >= first[line->box + 1] || o->numbers[b->at] != line->piece)
		b->at = base_bisect(i, first[line->box], first[line->box + 1], o->numbers[i] < line->piece);
	if (b->at >= first[line->box + 1] || o->numbers[b->at] != line->piece)
		return -BASE_EFORMAT;
	b->stored = line->box;
	p = &o->pieces[b->at];
	if (base_array_room(f->needs, f->needs_room, f->nneeds + 1) < 0)
		return -ENOMEM;
	f->needs[f->nneeds++] = (struct fill_need){.offset = p->ref.offset, .piece = b->at,
		.pack = p->inline_bytes ? FILL_INLINE : p->ref.pack, .box = b->number, .stored = line->box};
	return 0;
}

static int plan_needs(struct load_fill *f, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < f->nboxes; i++) {
		const struct fill_box *wanted = &f->boxes[i];
		const struct load_wanted *opened = &f->objects[wanted->object];

		const struct load_object *o = opened->object;

		if (!o)
			r = fill_lose(f, i, &wanted->box, opened->r, opened->why);
		else
			r = tensor_reshard_box(&o->grid, o->boxes->index, &o->boxes->list,
				&(struct tensor_shard_box){.box = wanted->box}, need_line,
				&(struct plan_box){f, i, SIZE_MAX, 0});
		if (r == -BASE_EFORMAT) {
			base_error_set(err, r, "a piece of it was not found again");
			return load_object_fail(o, r, err);
		}
	}
	return r < 0 ? base_no_memory_for(err, "the plan of a load") : 0;
}

static int need_compare(const void *a, const void *b)
{
	const struct fill_need *x = a, *y = b;

	if (x->pack != y->pack)
		return x->pack < y->pack ? -1 : 1;
	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	return (x->box > y->box) - (x->box < y->box);
}

/* ---- tasks ---- */

/* The same object? A reference to the same place that differs in anything is read, and checked, by itself. */
static bool need_same(const struct load_fill *f, const struct fill_need *x, const struct fill_need *y)
{
	const struct pack_object_ref *a, *b;

	if (x->pack != y->pack || x->offset != y->offset || x->pack == FILL_INLINE)
		return false;
	a = need_ref(f, x);
	b = need_ref(f, y);
	return a->raw_len == b->raw_len && a->stored_len == b->stored_len && a->checks == b->checks &&
		a->codec == b->codec && base_digest_equal(&a->digest, &b->digest);
}

static bool need_same_piece(const struct load_fill *f, const struct fill_need *x, const struct fill_need *y)
{
	return x->piece == y->piece && f->boxes[x->box].object == f->boxes[y->box].object;
}

size_t fill_group_end(const struct load_fill *f, size_t first)
{
	size_t end = first + 1;

	while (end < f->nneeds && need_same(f, &f->needs[first], &f->needs[end])
		&& (end - first < FILL_GROUP_NEEDS || need_same_piece(f, &f->needs[end - 1], &f->needs[end])))
		end++;
	return end;
}

static int task_begin(struct load_fill *f, size_t need)
{
	if (base_array_room(f->tasks, f->tasks_room, f->ntasks + 2) < 0)
		return -ENOMEM;
	f->tasks[f->ntasks++] = need;
	return 0;
}

int fill_plan_tasks(struct load_fill *f)
{
	uint64_t bytes = 0;
	size_t begun = 0;

	f->ntasks = 0;
	for (size_t i = 0, next; i < f->nneeds; i = next) {
		next = fill_group_end(f, i);
		if (i == 0 || bytes >= FILL_TASK_BYTES || i - begun >= FILL_TASK_NEEDS) {
			if (task_begin(f, i) < 0)
				return -ENOMEM;
			begun = i;
			bytes = 0;
		}
		bytes += (next - i) * need_ref(f, &f->needs[i])->raw_len;
	}
	if (f->ntasks)
		f->tasks[f->ntasks] = f->nneeds;
	return 0;
}

int fill_plan(struct load_fill *f, struct base_error *err)
{
	uint64_t from = base_monotonic_ns(), opened;
	int r = plan_objects(f);

	if (r == 0)
		r = load_step_packs(f->step, &f->packs, &f->npacks);
	if (r < 0)
		return base_no_memory(err);
	r = plan_open(f, err);
	if (r < 0)
		return r;
	opened = base_monotonic_ns();
	f->times.open_ns = opened - from;
	r = plan_needs(f, err);
	if (r == 0 && f->nneeds) {
		qsort(f->needs, f->nneeds, sizeof *f->needs, need_compare);
		if (fill_plan_tasks(f) < 0)
			r = base_no_memory_for(err, "the plan of a load");
	}
	f->times.plan_ns = base_monotonic_ns() - opened;
	return r;
}
