/* SPDX-License-Identifier: Apache-2.0
 *
 * step: an opened step: manifest, layouts and parts, and where each tensor's pieces are. Opening reads the manifest
 * and the layouts: no footer, no index, no part. Heads and rows of parts are read when a tensor is opened that the part
 * may have, or when its blobs are asked for. Safe from any thread. */
#ifndef CORE_LOAD_OPEN_STEP_H
#define CORE_LOAD_OPEN_STEP_H

#include "core/commit/list/list.h"
#include "core/step/part.h"
#include "core/tensor/grid.h"

struct load_step;
struct load_step_info {
	const char *run; uint64_t step, entry; int64_t time_ns; const char *attempt;
	struct base_digest manifest;
	const struct proto_attribute *attributes; size_t nattributes;
	uint64_t tensors, bytes, new_bytes;
};
/* `entry` is copied. Missing or damaged records: an error that names them. */
int load_step_open(struct store *s, const char *run, const struct commit_list_step *entry, struct load_step **ret_step,
	struct base_error *err);
/* Returns r, an error of reading the step, and puts RUN/STEP and `what` (may be NULL) before its sentence.
 * If a file is missing (-ENOENT) and the list says that the step was removed or replaced: -ESTALE, and err says so. */
int load_step_failed(const struct load_step *step, int r, const char *what, struct base_error *err);
/* Returns r, and puts "RUN/STEP: tensor COMPONENT/NAME: " before the sentence. */
int load_step_tensor_failed(const struct load_step *step, uint32_t tensor, int r, struct base_error *err);
struct load_step *load_step_ref(struct load_step *step);
void load_step_unref(struct load_step *step); /* NULL-safe */
const struct load_step_info *load_step_info(const struct load_step *step);
const struct proto_manifest *load_step_manifest(const struct load_step *step);
/* The step has no such component (or file in it). -ENOENT, and a sentence; it says so if the step has lost it since it
 * was saved. path: COMPONENT or COMPONENT/...; what: "component", "file", ... */
int load_step_lacks(const struct load_step *step, const char *what, const char *path, struct base_error *err);
struct store *load_step_store(const struct load_step *step);
size_t load_step_memory(const struct load_step *step); /* bytes held, roughly: for bounding caches of steps */

/* Tensors of all layouts as one table sorted by (component, name); numbers 0 .. count-1. */
struct load_tensor_info {
	const char *component;
	const char *name;
	uint32_t name_len;
	enum tensor_dtype dtype;
	struct tensor_shape shape;
	uint64_t bytes;
};
uint32_t load_step_tensor_count(const struct load_step *step);
void load_step_tensor_info(const struct load_step *step, uint32_t tensor, struct load_tensor_info *ret_info);
/* Its shape, in the step's memory. */
const uint64_t *load_step_tensor_dims(const struct load_step *step, uint32_t tensor);
int64_t load_step_tensor_find(const struct load_step *step, const char *component, const char *name, size_t name_len);
uint32_t load_step_component_count(const struct load_step *step);
const char *load_step_component(const struct load_step *step, uint32_t component, uint32_t *ret_first,
	uint32_t *ret_end);

/* The layout that has a tensor, and the tensor's number there; of several, the first that records a mesh. */
const struct store_layout *load_step_layout(const struct load_step *step, uint32_t tensor, uint32_t *ret_index);
/* The next of several by that order; NULL: there is no other. */
const struct store_layout *load_step_layout_more(const struct load_step *step, uint32_t tensor, uint32_t *ret_index);

/* Finds all blobs: reads the heads of the parts that have some, once; of all parts, if the manifest does not say which
 * these are. Before it has returned 0 there are no blobs. load_blob_open calls it. */
int load_step_blobs(struct load_step *step, struct base_error *err);
/* Bytes that were unchanged when the step was saved and were written again all the same, and how many of them because
 * earlier steps could not be used. Reads the heads of all parts, once. */
int load_step_again(struct load_step *step, uint64_t *ret_bytes, uint64_t *ret_no_base, struct base_error *err);
struct load_blob_info { const char *name; bool per_rank; uint32_t rank; uint64_t bytes; struct base_digest digest; };
uint32_t load_step_blob_count(const struct load_step *step);
void load_step_blob_info(const struct load_step *step, uint32_t blob, struct load_blob_info *ret_info);
/* 1: *ret_rank is the first rank from `from` on that has a blob of its own of that name; 0: none has. Reads nothing if
 * the manifest lists the blobs. */
int load_step_blob_rank(struct load_step *step, const char *name, uint32_t from, uint32_t *ret_rank,
	struct base_error *err);

/* A component's stored view header, which belongs to a layout that has all tensors of the component. NULL: there is
 * none. */
const struct proto_view_header *load_step_header_find(const struct load_step *step, const char *component,
	const char *view);
/* Reads that header into fresh memory and checks its digest; -ENOENT: there is none. */
int load_step_header(const struct load_step *step, const char *component, const char *view, uint64_t max,
	void **ret_bytes, size_t *ret_len,
	uint64_t *ret_data_bytes, struct base_error *err);

/* An opened tensor or blob: its places. Safe from any thread; keeps the step alive. */
struct load_object;
/* Opens a tensor, whichever ranks wrote it: the row of the lowest rank that has it whole, or the boxes of all ranks (of
 * equal boxes the lowest rank's), which must cover it exactly; -BASE_EFORMAT names tensor, box and ranks. It reads one
 * chunk, or the chunks of all parts that may have rows of the tensor. A tensor without items may have no row. */
int load_tensor_open(struct load_step *step, uint32_t tensor, struct load_object **ret_o, struct base_error *err);
/* A tensor without its pieces: 1: the lowest rank that may have something of it has all of it, and this is the digest
 * over its pieces; with equal dtypes, shapes and grids, two such tensors are equal if their digests are. 0: it is not
 * so, or only load_tensor_open can say. Errors as there. */
int load_tensor_row_digest(struct load_step *step, uint32_t tensor, struct base_digest *ret_d, struct base_error *err);
int load_blob_open(struct load_step *step, uint32_t blob, struct load_object **ret_o, struct base_error *err);
/* By its name; rank: whose own it is, -1: none's. Reads the head of one part, if the manifest says which part has it.
 * 1: opened; 0: there is none. ret_info may be NULL. */
int load_blob_open_named(struct load_step *step, const char *name, int64_t rank, struct load_blob_info *ret_info,
	struct load_object **ret_o, struct base_error *err);
struct load_object *load_object_ref(struct load_object *o);
void load_object_unref(struct load_object *o);
uint64_t load_object_bytes(const struct load_object *o);
/* The object digest of a blob; of a tensor the digest over its dtype, shape and pieces, whichever ranks stored them
 * (docs/format/part.md, "The digest of a tensor"). */
const struct base_digest *load_object_digest(const struct load_object *o);
const struct tensor_grid *load_object_grid(const struct load_object *o);      /* NULL: a blob */
uint64_t load_object_piece_count(const struct load_object *o);
/* In storage order; if boxes were not cut as the whole would have been, box after box by ascending offset. ref.pack:
 * the number in the table of the part that has it, or in the manifest's if several parts have boxes of it. */
const struct store_piece *load_object_piece(const struct load_object *o, uint64_t piece);
size_t load_object_memory(const struct load_object *o);

/* Reads all bytes of a blob past the cache, straight into the caller's memory, and checks them. Any thread; errors name
 * step, blob, pack and offset. Boxes of tensors: fill.h. */
int load_blob_read(struct load_object *o, void *data, struct base_error *err);
/* Blocks [first, first + n) of it only (BASE_BLOCK_BYTES each, the last one may be shorter). */
int load_blob_read_blocks(struct load_object *o, uint64_t first, uint64_t n, void *data, struct base_error *err);
/* To be called before memory is taken for a long blob (LOAD_BLOB_LOOK_BYTES). -ENOMEM: this process could not allocate
 * so many bytes now. Errors of load_blob_read for its first and last block. */
#define LOAD_BLOB_LOOK_BYTES (UINT64_C(16) << 20)
int load_blob_look(struct load_object *o, struct base_error *err);

#endif
