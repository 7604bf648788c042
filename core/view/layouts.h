/* SPDX-License-Identifier: Apache-2.0
 *
 * layouts: layout files, which say by the names of tensors how a mesh cuts them (docs/layouts.md, "Layout files"). Read
 * once, then read-only, any thread. Everything in a file is bounded, and every error names file and line. */
#ifndef CORE_VIEW_LAYOUTS_H
#define CORE_VIEW_LAYOUTS_H

#include "core/load/open/step.h"
#include "core/tensor/mesh.h"

#define VIEW_LAYOUTS_BYTES (1u << 20)   /* of a file */
#define VIEW_LAYOUTS_LINES 10000u       /* with those of its presets */
#define VIEW_LAYOUTS_LINE 1000u         /* bytes of a line */

struct view_layouts_cut { char dim[TENSOR_MESH_NAME_MAX]; struct tensor_placement placement; };
struct view_layouts_line {
	const char *file; uint32_t number; /* of the line */
	const char *pattern;
	bool component;                 /* the pattern has a slash: it is matched against component/name */
	bool saved;                     /* as the tensor was saved */
	uint32_t ncuts;                 /* 0: replicated */
	const struct view_layouts_cut *cuts;
};

struct view_layouts;
/* path: a file's, or the name of a preset. -EINVAL, with FILE:LINE and what is wrong there; -BASE_ELIMIT: too long. */
int view_layouts_open(const char *path, struct view_layouts **ret_l, struct base_error *err);
int view_layouts_parse(const char *file, const char *text, size_t len, struct view_layouts **ret_l,
	struct base_error *err);
void view_layouts_free(struct view_layouts *l); /* NULL-safe */
uint32_t view_layouts_count(const struct view_layouts *l);
const struct view_layouts_line *view_layouts_line(const struct view_layouts *l, uint32_t i);
/* The line for a tensor: the first whose pattern fits the name and whose placements fit the tensor's number of
 * dimensions. -ENOENT: none, so the tensor is replicated. */
int64_t view_layouts_find(const struct view_layouts *l, const struct load_tensor_info *info);

/* The text of a preset; NULL: none of that name. */
const char *view_layouts_preset(const char *name);

#endif
