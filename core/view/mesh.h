/* SPDX-License-Identifier: Apache-2.0
 *
 * mesh: a step under a mesh of the reader's choice: what each of its ranks holds of each tensor, and the files that
 * show it (docs/tree.md, "Under a mesh").
 *
 *   mesh/<mesh>/manifest.json   mesh/<mesh>/rank-<%05u>/<component>.safetensors
 *
 * Ranks are 0, 1, 2, ... in the order of the mesh. Under the mesh that saved the step each rank has what it held. Under
 * another mesh a tensor is cut by a layout file, or by the placements that it was saved with, in their order: each mesh
 * dimension cuts as the dimension of the same name did, and others do not cut. Everything is a pure function of the
 * step, the mesh's name and that file. A mesh is read-only once made. It keeps neither step nor tree, so it may be used
 * with a step that was closed and opened again. Any thread. */
#ifndef CORE_VIEW_MESH_H
#define CORE_VIEW_MESH_H

#include "core/view/layouts.h"
#include "core/view/tree.h"

#define VIEW_MESH_DIRECTORY "mesh"
#define VIEW_MESH_RANKS_MAX 65536u
#define VIEW_MESH_ALL UINT32_MAX        /* in place of a rank: the mesh's own file, manifest.json */

struct view_mesh;
/* layouts: NULL, or the layout file by which tensors are cut, which must live as long as the mesh.
 * -ENOENT: there is no such directory, and err says why: the name is not a mesh, or not written as tensor_mesh_print
 * writes it; it has more than VIEW_MESH_RANKS_MAX ranks; or a tensor cannot be cut so. */
int view_mesh_new(const struct load_step *step, const struct view_layouts *layouts, const char *name,
	struct view_mesh **ret_m, struct base_error *err);
struct view_mesh *view_mesh_ref(struct view_mesh *m);
void view_mesh_unref(struct view_mesh *m); /* NULL-safe */
uint32_t view_mesh_ranks(const struct view_mesh *m);

/* "rank-00003", the name that is written, or "rank-3", an alias (*ret_alias). -ENOENT: no such rank. */
#define VIEW_MESH_RANK_NAME 32
void view_mesh_rank_name(uint32_t rank, char name[static VIEW_MESH_RANK_NAME]);
int view_mesh_rank_parse(const struct view_mesh *m, const char *name, uint32_t *ret_rank, bool *ret_alias);

/* Size of a rank's file of a component, or of manifest.json (rank: VIEW_MESH_ALL). -ENOENT: there is no such file.
 * Walks over the component's tensors. */
int view_mesh_size(const struct view_mesh *m, const struct load_step *step, uint32_t rank, uint32_t component,
	uint64_t *ret_size);
int64_t view_mesh_component(const struct load_step *step, const char *file); /* of "model.safetensors", or -ENOENT */
/* m is a mesh of the tree's step. */
int view_mesh_open(struct view_mesh *m, struct view_tree *t, uint32_t rank, uint32_t component,
	struct view_file **ret_f, struct base_error *err);
/* Opens a path below a step's directory, "mesh/tp=2/rank-0/model.safetensors". -ENOENT: not a file of a mesh. */
int view_mesh_walk(struct view_tree *t, const struct view_layouts *layouts, const char *path, struct view_file **ret_f,
	struct base_error *err);

/* The meshes under which the step's tensors were saved, with dimensions in the order in which ranks ascend: n names,
 * sorted, each with its NUL. */
int view_mesh_names(const struct load_step *step, struct base_buf *ret_names, uint32_t *ret_n);

#endif
