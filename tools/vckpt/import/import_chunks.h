/* SPDX-License-Identifier: Apache-2.0
 *
 * import_chunks: a tensor whose boxes are at many places, each in a file with strides of its own. It is made by one
 * thread, then read from many. A read takes memory for at most IMPORT_SPAN_BYTES beside the caller's. */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_CHUNKS_H
#define TOOLS_VCKPT_IMPORT_IMPORT_CHUNKS_H

#include "core/base/cleanup.h"
#include "core/tensor/boxes.h"
#include "tools/vckpt/import/import.h"

#define IMPORT_SPAN_BYTES ((uint64_t)1 << 20)

struct import_chunk {
	struct import_file *file;
	uint64_t offset;        /* of its first item */
	uint64_t *stride;       /* in items, malloc'ed; NULL: row-major */
};
struct import_chunks;

int import_chunks_new(const struct tensor_shape *shape, unsigned item_bytes, struct import_chunks **ret_c);
void import_chunks_free(struct import_chunks *c); /* NULL-safe */
BASE_CLEANUP_DEFINE(struct import_chunks *, import_chunks_free)
/* Takes chunk->stride if it succeeds. All items of the box must be in the file. -ENOMEM */
int import_chunks_add(struct import_chunks *c, const struct tensor_box *box, const struct import_chunk *chunk);
/* After the last one: the boxes must cover the tensor exactly; -BASE_EFORMAT names those that do not. -ENOMEM */
int import_chunks_finish(struct import_chunks *c, struct base_error *err);
/* Row-major bytes of the whole tensor, whole items. */
int import_chunks_read(const struct import_chunks *c, uint64_t offset, void *bytes, size_t len, struct base_error *err);

#endif
