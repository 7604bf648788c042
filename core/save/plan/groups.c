/* SPDX-License-Identifier: Apache-2.0
 *
 * groups: found by mesh pointer and dimensions, as almost all tensors share a few meshes, then by their names. The
 * ranks of a group are written out to be hashed, and not kept: a group over a million ranks costs no more than that
 * once for each different mesh pointer. */
#include "core/save/plan/groups_internal.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/digest.h"
#include "core/base/le.h"

/* The group's name, in place of the next one. */
static int groups_name(struct save_groups *g, const struct tensor_mesh *mesh, uint32_t dims)
{
	uint32_t size = tensor_mesh_group_size(mesh, dims);
	struct base_digest digest;

	if (base_array_room(g->ranks, g->ranks_room, (size_t)size + 1) < 0
		|| base_array_room(g->names, g->names_room, g->n + 1) < 0)
		return -ENOMEM;
	base_put32(g->ranks, g->mode);
	if (tensor_mesh_group(mesh, g->rank, dims, g->ranks + 1) < 0)
		return -ENOENT;
	for (uint32_t i = 1; i <= size; i++)
		base_put32(&g->ranks[i], g->ranks[i]);
	base_sha256(g->ranks, ((size_t)size + 1) * sizeof *g->ranks, &digest);
	memcpy(g->names[g->n], digest.bytes, sizeof g->names[0]);
	return 0;
}

/* The number of the group with that name. Room is reserved. */
static uint32_t groups_intern(struct save_groups *g)
{
	uint32_t hash = base_table_hash(g->names[g->n], sizeof g->names[0]), i;
	size_t at = 0;

	while ((i = base_table_next(&g->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (memcmp(g->names[i], g->names[g->n], sizeof g->names[0]) == 0)
			return i;
	base_table_add(&g->by_name, hash, g->n);
	return g->n++;
}

int save_groups_find(struct save_groups *g, const struct tensor_mesh *mesh, uint32_t dims, uint32_t *ret_group)
{
	uint32_t hash = base_table_hash_in(dims, &mesh, sizeof mesh), i;
	size_t at = 0;
	int r;

	while ((i = base_table_next(&g->by_mesh, hash, &at)) != BASE_TABLE_NONE)
		if (g->pairs[i].mesh == mesh && g->pairs[i].dims == dims) {
			*ret_group = g->pairs[i].group;
			return 0;
		}
	if (base_array_more(g->pairs, g->npairs) < 0 || base_table_reserve(&g->by_mesh, 1) < 0
		|| base_table_reserve(&g->by_name, 1) < 0)
		return -ENOMEM;
	r = groups_name(g, mesh, dims);
	if (r < 0)
		return r;
	*ret_group = groups_intern(g);
	g->pairs[g->npairs] = (struct save_pair){mesh, dims, *ret_group};
	base_table_add(&g->by_mesh, hash, g->npairs++);
	return 0;
}

void save_groups_release(struct save_groups *g)
{
	free(g->names);
	free(g->pairs);
	free(g->ranks);
	base_table_release(&g->by_mesh);
	base_table_release(&g->by_name);
}
