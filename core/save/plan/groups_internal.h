/* SPDX-License-Identifier: Apache-2.0
 *
 * groups: the groups of ranks that a rank belongs to, each once, whichever meshes it comes from. One thread. */
#ifndef CORE_SAVE_PLAN_GROUPS_INTERNAL_H
#define CORE_SAVE_PLAN_GROUPS_INTERNAL_H

#include "core/base/table.h"
#include "core/tensor/mesh.h"

struct save_groups {                    /* zero-initialise, with the first two */
	uint32_t rank, mode;            /* mode: a number that is part of all names */
	uint8_t (*names)[16]; uint32_t n; /* of each: the first half of SHA-256 over mode and ranks, in mesh order */
	/* private */
	struct save_pair { const struct tensor_mesh *mesh; uint32_t dims, group; } *pairs; uint32_t npairs;
	uint32_t names_room, *ranks, ranks_room;
	struct base_table by_mesh, by_name;
};
/* The number of the rank's group along `dims`, by the order in which they were first asked for. -ENOMEM; -ENOENT: the
 * rank is not in the mesh. */
int save_groups_find(struct save_groups *g, const struct tensor_mesh *mesh, uint32_t dims, uint32_t *ret_group);
void save_groups_release(struct save_groups *g);

#endif
