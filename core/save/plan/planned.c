/* SPDX-License-Identifier: Apache-2.0 */
#include "core/save/plan/planned.h"

int save_planned_whole(struct save_planned *whole, struct base_error *err)
{
	uint32_t n = whole->layout->m.ntensors;
	struct save_plan *p = &whole->plan;

	p->boxes = calloc((size_t)n + 1, sizeof *p->boxes);
	if (!p->boxes)
		return base_no_memory(err);
	for (uint32_t i = 0; i < n; i++) {
		struct save_plan_box *box = &p->boxes[p->nboxes++];
		struct tensor_grid grid;

		store_layout_grid(whole->layout, i, &grid);
		box->tensor = i;
		tensor_box_whole(&grid.shape, &box->at.box);
		box->pieces = tensor_piece_count(&grid, &box->at.box);
		p->pieces += box->pieces;
		if (base_add_overflows(p->bytes, store_layout_bytes(whole->layout, i), &p->bytes))
			return base_error_set(err, -EOVERFLOW, "the tensors are too large together");
	}
	p->held_bytes = p->bytes;
	whole->stores_layout = true;
	return 0;
}

void save_planned_release(struct save_planned *p)
{
	if (!p)
		return;
	save_plan_release(&p->plan);
	store_layout_free(p->layout);
	base_buf_release(&p->layout_object);
	free(p->numbers);
	*p = (struct save_planned){0};
}
