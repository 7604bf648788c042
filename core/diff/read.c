/* SPDX-License-Identifier: Apache-2.0 */
#include "core/diff/read.h"

#include "core/base/bisect.h"
#include "core/base/le.h"

void diff_piece_box(const struct load_object *o, uint64_t piece, struct tensor_box *ret_box)
{
	struct tensor_box box = o->whole;

	if (o->boxes) {
		size_t at = base_bisect(i, 0, o->boxes->list.n, o->boxes->first_piece[i] <= piece) - 1;

		tensor_boxes_get(&o->boxes->list, at, &box);
		piece -= o->boxes->first_piece[at];
	}
	if (tensor_piece_at(&o->grid, &box, piece, ret_box) < 0)
		*ret_box = (struct tensor_box){0}; /* the object was checked to have as many pieces as its boxes */
}

void diff_cut_first(struct diff_cut *c, const struct tensor_grid *g, const struct tensor_box *all)
{
	uint64_t bytes = g->item_bytes;

	*c = (struct diff_cut){.grid = g, .all = *all, .box = *all};
	c->d = g->shape.ndim;
	for (unsigned d = 0; d < g->shape.ndim; d++)
		c->done |= all->size[d] == 0;
	while (!c->done && c->d > 0 && bytes * all->size[c->d - 1] <= DIFF_CUT_BYTES)
		bytes *= all->size[--c->d];
	if (c->done || c->d == 0)
		return;
	c->most = base_max(DIFF_CUT_BYTES / bytes, 1);
	c->box.size[--c->d] = c->most;
	for (unsigned d = 0; d < c->d; d++)
		c->box.size[d] = 1;
}

void diff_cut_next(struct diff_cut *c)
{
	for (unsigned d = c->most ? c->d + 1 : 0; d-- > 0;) {
		uint64_t end = c->all.offset[d] + c->all.size[d];

		c->box.offset[d] += c->box.size[d];
		if (c->box.offset[d] == end)
			c->box.offset[d] = c->all.offset[d];
		if (d == c->d)
			c->box.size[d] = base_min(c->most, end - c->box.offset[d]);
		if (c->box.offset[d] != c->all.offset[d])
			return;
	}
	c->done = true;
}

uint64_t diff_cut_items(const struct diff_cut *c) { return tensor_box_items(&c->grid->shape, &c->box); }

int diff_cut_read(const struct diff_cut *c, struct load_object *o, struct load_cache *cache, void *out,
	struct base_error *err)
{
	uint64_t stride[TENSOR_MAX_DIMS], bytes = c->grid->item_bytes;

	for (unsigned d = c->grid->shape.ndim; d-- > 0; bytes *= c->box.size[d])
		stride[d] = bytes;
	return load_object_read_box(o, cache, &c->box, out, stride, err);
}
