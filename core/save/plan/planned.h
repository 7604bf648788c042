/* SPDX-License-Identifier: Apache-2.0
 *
 * planned: what a rank's save is prepared to: its layout, and the plan of what this rank stores of it. Its maker
 * releases it, or gives it to a cache (plan_cache.h). Any thread reads it; the layout object is the one thing that is
 * made later, by the thread that writes. */
#ifndef CORE_SAVE_PLAN_PLANNED_H
#define CORE_SAVE_PLAN_PLANNED_H

#include "core/save/plan/plan.h"
#include "core/step/layout.h"

struct save_planned {
	struct save_plan plan;
	struct store_layout *layout;    /* tables; its digest is set with the object */
	struct base_buf layout_object;  /* empty until it is encoded, for the first save */
	uint32_t *numbers;              /* by the plan's tensor: in the layout. NULL: the same */
	bool stores_layout;             /* this rank is the one that is sure to store the layout object */
};
/* Makes the plan of one writer that stores all tensors of the layout, each whole. -ENOMEM, -EOVERFLOW. */
int save_planned_whole(struct save_planned *whole, struct base_error *err);
void save_planned_release(struct save_planned *p); /* NULL-safe; what is zero is not there */
/* The number in the layout of the tensor of a box of the plan. */
static inline uint32_t save_planned_tensor(const struct save_planned *p, uint64_t box)
{
	uint32_t tensor = p->plan.boxes[box].tensor;

	return p->numbers ? p->numbers[tensor] : tensor;
}

#endif
