/* SPDX-License-Identifier: Apache-2.0
 *
 * loader: by the reads of a .safetensors, which the kernel makes for whoever reads or maps it, does a loader come for
 * all of it? Said before the loader has read much. It guesses: a guess costs time or memory, never bytes.
 *
 * A copy reads from the beginning to the end, and is none. A loader looks at the header, maps the file, mostly by a
 * descriptor of its own, and goes from tensor to tensor, in whatever order. So the second touch of another tensor is
 * the sign: a place to which a reader jumps, or, where the file was opened again after its header was read, what is
 * read on past the end of the first tensor. Who wants one tensor touches one.
 *
 * The caller locks. */
#ifndef FS_LOADER_H
#define FS_LOADER_H

#include <stdbool.h>

#include "core/view/tree.h"

struct fs_loader {
	uint64_t begin, end;            /* of what was read last without a jump; end 0: nothing was */
	bool touched;
	int64_t first, last;            /* the tensors of which one was touched */
	bool again;                     /* it was opened again when little more than the header was read */
	bool found;
};

/* It is opened, and was open before, and `served` bytes of it were read. */
void fs_loader_opened(struct fs_loader *l, uint64_t served);
/* Bytes [offset, offset + len) are read. true: a loader reads it; once. */
bool fs_loader_read(struct fs_loader *l, const struct view_file *f, uint64_t offset, uint64_t len);

#endif
