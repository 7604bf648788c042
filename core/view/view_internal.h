/* SPDX-License-Identifier: Apache-2.0
 *
 * view_internal: what the files of this folder share. */
#ifndef CORE_VIEW_VIEW_INTERNAL_H
#define CORE_VIEW_VIEW_INTERNAL_H

#include "core/view/safetensors.h"
#include "core/view/tree.h"

#define VIEW_SAFETENSORS_METADATA "__metadata__" /* a key of the format: no tensor in a file can have this name */

/* Whether a tensor can stand in a .safetensors file: it has a dtype there, and neither its name nor its shape is in the way. */
bool view_safetensors_can(enum tensor_dtype dtype, const struct tensor_shape *shape, const char *name, uint32_t name_len);

/* A string with its quotes. Valid UTF-8 in, JSON out; only what must be escaped is. */
void view_json_string(struct base_buf *b, const char *text, size_t len);

/* The manifest view of a step. ret_text may be NULL: only the length is computed, in little memory. */
int view_manifest_json(const struct view_tree *t, struct base_buf *ret_text, uint64_t *ret_len);

/* Path of a node below the step's directory, appended. */
void view_tree_path(const struct view_tree *t, uint32_t node, struct base_buf *b);

#endif
