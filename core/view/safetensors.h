/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors: headers of the safetensors format (u64 length | JSON | data), read and written. The reader refuses a
 * header with any fault; each error is one sentence that names the tensor. Pure functions over memory, any thread. */
#ifndef CORE_VIEW_SAFETENSORS_H
#define CORE_VIEW_SAFETENSORS_H

#include "core/base/error.h"
#include "core/step/layout.h"

#define VIEW_SAFETENSORS_MAX_HEADER ((uint32_t)STORE_VIEW_HEADER_MAX_BYTES - 8u) /* bytes of JSON: the format's own */
#define VIEW_FILES_VIEW "files"                 /* views of a component that came in files of other names */
#define VIEW_FILE_VIEW "safetensors.%u"
#define VIEW_FILES_VIEW_BYTES 32
#define VIEW_FILES_MAX_BYTES (4u << 20)         /* of all paths of a step */
#define VIEW_SAFETENSORS_MAX_MADE 90000000u    /* above this a component has no .safetensors */

struct view_safetensors_tensor {
	const char *name; uint32_t name_len;
	enum tensor_dtype dtype; struct tensor_shape shape;  /* vckpt's shape: F4 in pairs */
	uint64_t begin, end;            /* in the data */
};
struct view_safetensors {
	struct view_safetensors_tensor *tensors; uint32_t ntensors; /* by ascending begin, then end, then name */
	struct proto_attribute *metadata; uint32_t nmetadata;       /* __metadata__, strings only */
	uint64_t data_offset, data_bytes;                           /* data_offset = 8 + header length */
	void *memory;
};
/* `header`: the file's first 8 + N bytes. file_size is checked against the data's end. Refused: N > limit or past the
 * file, not JSON, not an object, a name twice, an empty name, NUL or broken UTF-8 in a name, unknown keys or dtype (by
 * name), a shape with > 16 dimensions or whose product overflows, offsets that overlap, leave gaps, run backwards, or
 * differ from the shape's bytes, or do not end at the file's end. */
int view_safetensors_parse(const void *header, size_t len, uint64_t file_size, struct view_safetensors *ret_s,
	struct base_error *err);
void view_safetensors_release(struct view_safetensors *s);

/* Can a tensor be in a .safetensors file? Its dtype, name and shape must be possible there. */
bool view_safetensors_can(enum tensor_dtype dtype, const struct tensor_shape *shape, const char *name,
	uint32_t name_len);

/* The header of a component, a pure function of the layout and the imported metadata: keys `format: pt` and the
 * metadata; order: sizes that are multiples of 4096 first, then falling element size, then name; padded with spaces so
 * that data starts at a multiple of 4096. Tensors whose dtype safetensors lacks are left out. ret_header: 8-byte length
 * included. -EFBIG over VIEW_SAFETENSORS_MAX_MADE. */
int view_safetensors_make(const struct store_layout *l, uint32_t component, const struct proto_attribute *metadata,
	uint32_t nmetadata, struct base_buf *ret_header, uint64_t *ret_data_bytes);

/* May a component be shown as a file at this path? It has to be a blob's name that ends in .safetensors and does not
 * begin with one of the tree's own names. */
bool view_files_path_valid(const char *path);

/* Is it one of the views above? */
bool view_header_known(const char *view);
/* Does a stored header agree with its layout? It must have every tensor of the component that can be in such a file
 * (one of several files: any of them) and no other, each with its dtype, shape and bytes, and data_bytes in all.
 * Returns 0, also for an unknown view, or an error with a sentence that says what is wrong. It is an
 * upkeep_verify_header_func.
 */
int view_header_check(const struct store_layout *l, const char *component, const char *view, const void *header,
	size_t len, uint64_t data_bytes, struct base_error *err);

#endif
