/* SPDX-License-Identifier: Apache-2.0
 *
 * loader: guesses from the reads of a .safetensors, which the kernel makes for programs that read or map it, whether a
 * loader is about to read all of it, and does so before much was read. A wrong guess costs time or memory, never bytes.
 *
 * A copy reads from the beginning to the end. A loader reads the header, maps the file, usually through another
 * descriptor, and goes from tensor to tensor in any order. So the sign of a loader is that a second tensor is touched:
 * by a jump to it, or, where the file was opened again after its header was read, by reading on past the end of the
 * first one. A program that wants one tensor touches one.
 *
 * The caller locks. */
#ifndef FS_LOADER_H
#define FS_LOADER_H

#include <stdbool.h>

#include "core/view/tree.h"

struct fs_loader {
	uint64_t begin, end;            /* of what was read since the last jump; end 0: nothing yet */
	bool touched;
	int64_t first, last;            /* one of these tensors was touched */
	bool again;                     /* the file was opened again when little more than the header was read */
	bool found;
};

/* The file is opened while it is open already and `served` bytes of it were read. */
void fs_loader_opened(struct fs_loader *l, uint64_t served);
/* Bytes [offset, offset + len) are read. Returns true once: when it is clear that a loader reads the file. */
bool fs_loader_read(struct fs_loader *l, const struct view_file *f, uint64_t offset, uint64_t len);
/* Where to begin with what such a loader has yet to read. It reads at `offset`, and has read `served` bytes. */
uint64_t fs_loader_from(const struct view_file *f, uint64_t offset, uint64_t served);

#endif
