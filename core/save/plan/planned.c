/* SPDX-License-Identifier: Apache-2.0 */
#include "core/save/plan/planned.h"

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
