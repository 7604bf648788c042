/* SPDX-License-Identifier: Apache-2.0
 *
 * mesh_internal: how the tensors of a step are cut under a mesh (docs/tree.md, "Under a mesh"), and the meshes under
 * which a step was saved. */
#ifndef CORE_VIEW_MESH_INTERNAL_H
#define CORE_VIEW_MESH_INTERNAL_H

#include <stdatomic.h>

#include "core/tensor/shard.h"
#include "core/view/layouts.h"

/* A way: how tensors are cut that were saved alike, or that one line of a layout file names. */
struct view_way {
	/* the key: how the tensors were saved, or the line; layout NULL and line -1: neither */
	const struct store_layout *layout; uint32_t mesh, placement;
	int64_t line;
	bool recorded;                  /* false: the save recorded nothing: they count as replicated */
	const char *left_out;           /* the reason; NULL: the tensors are shown */
	const struct tensor_mesh *seen; /* the mesh that was asked for, or `own`: ranks and `at` are in its order */
	struct tensor_mesh *own;        /* the mesh that saved them, with the same ranks, if it is another; or NULL */
	struct tensor_placement at[TENSOR_MAX_DIMS];
	uint32_t order[TENSOR_MAX_DIMS]; /* the dimensions of `seen` in the order in which they cut, and so: */
	struct tensor_mesh *cutting;    /* NULL: as in `seen` */
	struct tensor_placement cut[TENSOR_MAX_DIMS];
};

struct view_ways;
struct view_mesh {
	atomic_uint refs;
	struct tensor_mesh *mesh;
	struct view_ways *ways;
};

/* Looks at all tensors of the step. Keeps the mesh and the layout file, but not the step. -ENOENT: a tensor, which err
 * names, cannot be cut so. */
int view_ways_new(const struct load_step *step, const struct view_layouts *layouts, const struct tensor_mesh *mesh,
	struct view_ways **ret_w, struct base_error *err);
void view_ways_free(struct view_ways *w); /* NULL-safe */
const struct view_way *view_ways_of(const struct view_ways *w, uint32_t tensor);
const struct view_layouts_line *view_ways_line(const struct view_ways *w, const struct view_way *way); /* or NULL */
/* As tensor_shard_of, for a rank of the mesh that was asked for. */
int view_way_shard(const struct view_way *way, const struct tensor_shape *shape, unsigned item_bytes, uint32_t rank,
	const struct tensor_flat *flat, struct tensor_shard *ret_shard, struct base_error *err);

int view_mesh_text(const struct tensor_mesh *mesh, char **ret_text);
/* The dimensions of the mesh in the order in which its ranks ascend; dimensions of size 1 keep their places. false:
 * there is no such order. */
bool view_mesh_rank_order(const struct tensor_mesh *mesh, uint32_t ret_order[static TENSOR_MAX_DIMS]);
/* The mesh with its dimensions in that order, and ranks 0, 1, 2, ... */
int view_mesh_reorder(const struct tensor_mesh *mesh, const uint32_t *order, struct tensor_mesh **ret_mesh);
/* Calls f for each mesh under which tensors of the step were saved, except broken ones. f takes the mesh over. If f
 * returns something other than 0, the walk ends and returns it. */
int view_mesh_each(const struct load_step *step, int (*f)(void *arg, struct tensor_mesh *mesh), void *arg);

#endif
