/* SPDX-License-Identifier: Apache-2.0
 *
 * import_shards: safetensors files that hold boxes of tensors, as torch's distributed checkpoint writes them: the
 * header's metadata have DCP_SHARDING_INFO, {name: {"saved_offsets": [...]}}. One thread. */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_SHARDS_H
#define TOOLS_VCKPT_IMPORT_IMPORT_SHARDS_H

#include <jansson.h>

#include "core/tensor/box.h"
#include "tools/vckpt/import/import.h"

/* What one such file, or the end of one, holds. */
struct import_parts {
	void *header;
	struct view_safetensors s;
	uint64_t offset;        /* of its first byte, in the file */
	json_t *numbers;        /* {name: number in s} */
	json_t *sharding;       /* DCP_SHARDING_INFO; NULL: every tensor is whole */
};
int import_parts_read(struct import_file *f, uint64_t offset, struct import_parts *ret_p, struct base_error *err);
/* Which box of its tensor number i is. */
int import_parts_box(const struct import_parts *p, uint32_t i, struct tensor_box *ret_box, struct base_error *err);
/* -ENOENT: no tensor has that name. */
int64_t import_parts_find(const struct import_parts *p, const char *name, size_t len);
void import_parts_release(struct import_parts *p);

/* A directory of them. Tensors are as large as their boxes together. */
struct import_shards;
bool import_shards_is(const char *rel); /* by the name that HuggingFaceStorageWriter gives */
int import_shards_new(struct import_plan *p, const char *component, struct import_shards **ret_s);
int import_shards_add(struct import_shards *s, const char *path, struct base_error *err);
/* After the last file: the tensors go into the plan. */
int import_shards_finish(struct import_shards *s, struct base_error *err);
void import_shards_free(struct import_shards *s); /* NULL-safe */

#endif
