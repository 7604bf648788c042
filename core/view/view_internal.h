/* SPDX-License-Identifier: Apache-2.0
 *
 * view_internal: what the files of this folder share. */
#ifndef CORE_VIEW_VIEW_INTERNAL_H
#define CORE_VIEW_VIEW_INTERNAL_H

#include <pthread.h>

#include "core/tensor/shard.h"
#include "core/view/mesh.h"
#include "core/view/name.h"
#include "core/view/npy.h"
#include "core/view/safetensors.h"
#include "core/view/tree.h"

#define VIEW_SAFETENSORS_METADATA "__metadata__" /* a key of the format: a tensor in a file cannot have this name */
#define VIEW_SAFETENSORS_VIEW "safetensors"      /* kind of a stored view header */

/* ---- the files of a component (files.c) ---- */
/* The view with a file's header. 0: VIEW_SAFETENSORS_VIEW; n + 1: that of the n-th path of VIEW_FILES_VIEW. */
const char *view_files_view(unsigned file, char text[static VIEW_FILES_VIEW_BYTES]);
/* How many paths the object of a VIEW_FILES_VIEW has; 0: it is not valid. */
uint32_t view_files_count(const void *bytes, size_t len);
#define VIEW_NAMED 20u /* things of one kind in a step that the log names; the others are counted */
/* The paths of a component's files, each with its NUL, and their number. 0 paths: it has none of its own, or they are
 * not valid, which is logged as a warning and counted in *warned. An error: they could not be read now. left: bytes
 * that the paths of this and other components may still have. */
int view_files_read(const struct load_step *step, const char *component, uint64_t *left, uint32_t *warned,
	struct base_buf *ret_paths, uint32_t *ret_n, struct base_error *err);
/* map[item - first]: for each tensor of the component the first of n .safetensors nodes that has it, or 0. */
int view_files_map(const struct view_tree *t, const uint32_t *nodes, uint32_t n, uint32_t first, uint32_t end,
	uint32_t *map, struct base_error *err);
/* Parses a stored header; ret_bytes is what ret_s points into. */
int view_files_header(const struct load_step *step, const char *component, unsigned file, void **ret_bytes,
	struct view_safetensors *ret_s, struct base_error *err);

/* As view_name_escape for a name that is too long, but for any length. */
void view_name_shorten(const char *name, size_t len, const char *suffix, char file[static VIEW_FILE_NAME_BYTES]);

/* As view_safetensors_make, for a component of a step, which may have several layouts. mesh: what `rank` holds of it;
 * NULL: all of it. ret_header NULL: only the lengths are computed, in little memory. ret_len: bytes of the header,
 * including its length field. */
int view_safetensors_make_step(const struct load_step *step, const struct view_mesh *mesh, uint32_t rank,
	uint32_t component, struct base_buf *ret_header, uint64_t *ret_len, uint64_t *ret_data_bytes);

/* ---- meshes ---- */
/* As load_step_tensor_info, but with the shape and bytes of what a rank holds of the tensor. false: the tensor is in no
 * file of the mesh. */
bool view_mesh_info(const struct view_mesh *m, const struct load_step *step, uint32_t tensor, uint32_t rank,
	struct load_tensor_info *ret_info);
/* The boxes of a rank's shard of a tensor of that shape, or of a flat range of the shard; errors as in shard.h. */
int view_mesh_shard(const struct view_mesh *m, uint32_t tensor, const struct tensor_shape *shape, unsigned item_bytes,
	uint32_t rank, const struct tensor_flat *flat, struct tensor_shard *ret_shard, struct base_error *err);
/* As load_object_slices and load_object_read, for bytes [offset, offset + len) of what the rank holds of the tensor. */
int view_mesh_slices(const struct view_mesh *m, uint32_t tensor, uint32_t rank, struct load_object *o,
	struct load_cache *c, uint64_t offset, size_t len, void *scratch, struct load_slices *ret_e,
	struct base_error *err);
int view_mesh_read(const struct view_mesh *m, uint32_t tensor, uint32_t rank, struct load_object *o,
	struct load_cache *c, uint64_t offset, size_t len, void *out, struct base_error *err);
/* The text of the mesh's manifest.json; ret_text as below. */
int view_mesh_json(const struct view_mesh *m, const struct load_step *step, struct base_buf *ret_text,
	uint64_t *ret_len);

/* ---- files (file.c) ---- */
#define VIEW_FILE_SLOTS 64u
struct view_place { uint64_t begin, end; uint32_t item; };     /* bytes of the data behind the head */
struct view_slot { struct load_object *object; uint64_t used; uint32_t item; };
struct view_file {
	struct view_tree *tree;
	enum view_kind kind;
	unsigned file;                  /* of a .safetensors: view_files_view */
	struct view_mesh *mesh;         /* NULL: whole tensors; else what `rank` of it holds of them */
	uint32_t rank;
	uint64_t size;
	uint8_t *head;
	size_t head_len;
	struct view_place *places;
	uint32_t nplaces;
	pthread_mutex_t lock;           /* protects what follows */
	struct view_slot slots[VIEW_FILE_SLOTS];
	uint64_t clock;
};
/* Bytes [offset, offset + len), clipped at the end of the file, to `out`. Returns how many. */
int64_t view_file_read(struct view_file *f, struct load_cache *c, uint64_t offset, size_t len, void *out,
	struct base_error *err);

/* ---- JSON (json.c) ---- */
/* A text that is written when it is read: where only its length is wanted, what was written is dropped on the way. */
struct view_text { struct base_buf b; uint64_t dropped; bool keep; };
uint64_t view_text_flush(struct view_text *t); /* bytes written so far */
/* r: 0, or an error, which is returned. ret_text NULL: only the length is wanted. */
int view_text_end(struct view_text *t, int r, struct base_buf *ret_text, uint64_t *ret_len);
/* Valid UTF-8 in, JSON out; only what must be escaped is. The text has no quotes, the string has. */
void view_json_text(struct base_buf *b, const char *text, size_t len);
void view_json_string(struct base_buf *b, const char *text, size_t len);
void view_json_number(struct base_buf *b, uint64_t v);
void view_json_shape(struct base_buf *b, const struct tensor_shape *shape); /* "[2, 3]" */
/* With quotes, for text that people look at: also escapes what a terminal would obey. */
void view_json_shown(struct base_buf *b, const char *text, size_t len);

/* The text of manifest.json. ret_text may be NULL: only the length is computed, in little memory. */
int view_manifest_json(const struct view_tree *t, struct base_buf *ret_text, uint64_t *ret_len,
	struct base_error *err);

unsigned view_tree_show(const struct view_tree *t); /* bits of enum view_show */
bool view_tree_has(const struct view_tree *t, uint32_t component); /* false: it is a tree of another one alone */
/* The nodes of a component's .safetensors files, in their order. */
uint32_t view_tree_files(const struct view_tree *t, uint32_t component, const uint32_t **ret_nodes);
/* Appends the path of a node below the step's directory. */
void view_tree_path(const struct view_tree *t, uint32_t node, struct base_buf *b);
/* "2026-01-31T12:00:00.123456789Z" */
#define VIEW_TIME_BYTES 64
void view_time_text(int64_t time_ns, char text[static VIEW_TIME_BYTES]);

#endif
