/* SPDX-License-Identifier: Apache-2.0
 *
 * tree: the files of a step (docs/tree.md), used by the mount, `vckpt cat`, `ls` and `export`.
 *
 *   <component>/<FQN>.npy   <component>.safetensors   <blob path>   ranks/<%05u>/<blob path>   manifest.json
 *
 * A component whose tensors came in files of other names, or in several, is shown as those (files.c).
 *
 * Built from an opened step, with names, kinds and sizes only. Node numbers are a pure function of the step and of what
 * is shown of it (0: the step's directory; children of a directory are contiguous and sorted by bytes), so they are the
 * same in every process. Read-only once built, any thread. */
#ifndef CORE_VIEW_TREE_H
#define CORE_VIEW_TREE_H

#include "core/load/read/cache.h"

/* The forms in which a tree shows tensors. Blobs and manifest.json are in every tree, under the same names. */
enum view_show { VIEW_SHOW_NPY = 1 << 0, VIEW_SHOW_SAFETENSORS = 1 << 1, VIEW_SHOW_ALL = 3 };
enum view_kind { VIEW_DIRECTORY, VIEW_TENSOR_NPY, VIEW_SAFETENSORS, VIEW_BLOB, VIEW_MANIFEST_JSON };

struct view_node {
	const char *name;               /* file name (escaped) */
	uint32_t parent, first_child, nchildren; /* directories */
	uint32_t item;                  /* tensor, blob or component number of the step */
	uint8_t kind;
	uint16_t file;                  /* of a .safetensors: view_files_view */
	uint64_t size;                  /* bytes of the file; for a directory 0; VIEW_SIZE_UNKNOWN: view_tree_size */
};
#define VIEW_SIZE_UNKNOWN UINT64_MAX     /* of manifest.json */
/* "npy", "safetensors", or both with a comma between: of enum view_show; -EINVAL. */
int view_show_parse(const char *words);

struct view_tree;
/* show: bits of enum view_show, at least one. Without VIEW_SHOW_NPY, tensors that are in no .safetensors are still
 * shown as .npy, so that every tree has every tensor. A blob whose path the tree uses, or would use if it showed
 * everything, is shown with its first character as %XX, which is logged as a warning. */
int view_tree_build(struct load_step *step, unsigned show, struct view_tree **ret_t, struct base_error *err);
/* The same for one component alone: its tensors, the blob COMPONENT.json, the blobs in folders of its own, the indices
 * of its files, and a manifest.json of these. All have the same paths as in the whole tree. */
int view_tree_build_component(struct load_step *step, unsigned show, uint32_t component, struct view_tree **ret_t,
	struct base_error *err);
struct view_tree *view_tree_ref(struct view_tree *t);
void view_tree_unref(struct view_tree *t);
struct load_step *view_tree_step(const struct view_tree *t);
uint32_t view_tree_count(const struct view_tree *t);
const struct view_node *view_tree_node(const struct view_tree *t, uint32_t node); /* NULL: none */
/* Of an existing node. The first call for manifest.json takes as long as making its text and may read headers: -ENOMEM,
 * and errors of reading. */
int view_tree_size(struct view_tree *t, uint32_t node, uint64_t *ret_size);
/* node or -ENOENT, -ENOTDIR */
int64_t view_tree_lookup(const struct view_tree *t, uint32_t directory, const char *name);
int64_t view_tree_walk(const struct view_tree *t, const char *path);  /* "model/a.weight.npy"; `.npy` may be left off */
size_t view_tree_memory(const struct view_tree *t);

/* Calls f(arg, key, value) for each extended attribute of a node (dtype, shape, digest, stored_bytes, codec, name ...),
 * as text, with keys without the prefix "user.vckpt.". They never change. Node 0 has the step's attributes as
 * attr.<key>. It may read the tensor's row. */
int view_node_attributes(struct view_tree *t, uint32_t node, int (*f)(void *arg, const char *key, const char *value),
	void *arg, struct base_error *err);

/* An open file. Any thread. */
struct view_file;
int view_file_open(struct view_tree *t, uint32_t node, struct view_file **ret_f, struct base_error *err); /* -EISDIR */
void view_file_close(struct view_file *f);
uint64_t view_file_size(const struct view_file *f);
/* Bytes [offset, offset + len), clipped at the end of the file, as slices (core/load/read/cache.h; scratch: room for
 * len bytes). */
int view_file_slices(struct view_file *f, struct load_cache *c, uint64_t offset, size_t len, void *scratch,
	struct load_slices *ret_e, struct base_error *err);
/* Of a .safetensors: the number of the tensor whose byte is at `offset`, counted by their places in the file; -1: it is
 * the header's. Of any other file: -1. */
int64_t view_file_tensor(const struct view_file *f, uint64_t offset);
/* Fills `to`, with room for the file's size, by all cores: checked and decoded bytes go there directly; those of files
 * under a mesh go through the cache. The order is from `from` to the end of the file, then from its beginning to
 * `from`; the first *ready bytes of that order are there (stored with release; the size in the end). `begin` is called
 * before bytes [at, end) are written, when all before them are there; its error ends the call. After an error the ready
 * bytes are right, and the rest is undefined. */
struct view_filling {
	void *to;
	uint64_t from;                  /* 0, or from view_file_from */
	_Atomic uint64_t *ready;
	int (*begin)(void *arg, uint64_t at, uint64_t end, struct base_error *err); /* NULL: none */
	void *arg;
};
/* Where the tensor at `offset` of a .safetensors begins, to fill the file from there; 0: fill it from its beginning. */
uint64_t view_file_from(const struct view_file *f, uint64_t offset);
int view_file_fill(struct view_file *f, struct load_cache *c, const struct view_filling *to, struct base_error *err);
/* The whole file (from `offset`) in order to a sink, read ahead by `threads` (0: all cores). */
int view_file_stream(struct view_file *f, struct load_cache *c, uint64_t offset, unsigned threads,
	int (*sink)(void *arg, const void *bytes, size_t len, struct base_error *err), void *arg,
	struct base_error *err);

#endif
