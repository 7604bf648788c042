/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_key: a digest of everything that a rank's plan and layout depend on, except the store's grid, which does not
 * change: in one store, saves of equal keys have equal plans and equal layouts. Pure: no I/O. A key's builder belongs
 * to one thread. */
#ifndef CORE_SAVE_PLAN_PLAN_KEY_H
#define CORE_SAVE_PLAN_PLAN_KEY_H

#include "core/base/buf.h"
#include "core/base/digest.h"
#include "core/base/table.h"
#include "core/save/plan/plan.h"

/* init, tensor for each in the order of the plan, final. A failure is kept, and final returns it. Meshes are read once
 * for each pointer, and may be freed only after final. */
struct save_plan_key_builder {
	struct base_hasher *hasher;             /* NULL: nothing was given to it yet */
	struct base_buf bytes, meshes;          /* what it is given next; struct base_digest of each different mesh */
	struct save_plan_key_mesh { const struct tensor_mesh *mesh; uint32_t number; } *seen; /* each pointer once */
	struct base_table by_pointer;
	uint32_t nseen, nmeshes, ntensors;
	struct save_plan_key_mesh last;
	int error;
};
/* mesh: the saver's, or NULL. */
void save_plan_key_init(struct save_plan_key_builder *b, uint32_t rank, uint32_t world, const struct tensor_mesh *mesh);
/* Strides of dimensions of one item do not matter. */
void save_plan_key_tensor(struct save_plan_key_builder *b, const struct save_tensor *t);
/* 0 or -ENOMEM; releases the builder. */
int save_plan_key_final(struct save_plan_key_builder *b, struct base_digest *ret_key);

#endif
