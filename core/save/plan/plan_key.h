/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_key: a digest of everything that a rank's plan and layout depend on and that changes from save to save: in one
 * saver, saves of equal keys have equal plans and equal layouts. A mesh counts by its address: the saver has one copy
 * of equal meshes, as long as it lives (saver_mesh). Strides of dimensions of one item do not matter. Pure: no I/O. */
#ifndef CORE_SAVE_PLAN_PLAN_KEY_H
#define CORE_SAVE_PLAN_PLAN_KEY_H

#include "core/base/digest.h"
#include "core/save/plan/plan.h"

/* tensors: in the order of the plan. -ENOMEM */
int save_plan_key(const struct save_tensor *tensors, uint32_t n, struct base_digest *ret_key);

#endif
