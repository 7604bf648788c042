/* SPDX-License-Identifier: Apache-2.0
 *
 * import_weights: which .safetensors files of a directory belong together, and which component they are. Decided from
 * names and indices alone, before a header is read. One thread. */
#ifndef TOOLS_VCKPT_IMPORT_IMPORT_WEIGHTS_H
#define TOOLS_VCKPT_IMPORT_IMPORT_WEIGHTS_H

#include "tools/vckpt/import/import.h"

/* A regular file of a directory: its path, and that from the directory. */
struct import_found {
	char *path, *rel;
	uint32_t set; /* of import_weights; 0: it holds no tensors that are wanted */
	size_t first, ntensors; /* that it holds, in the plan */
	uint32_t compared;      /* the number of the last index that was compared with it */
};

struct import_weights;
/* `found`, sorted, gets its sets, and must live as long as ret_w. */
int import_weights_new(struct import_plan *p, const char *root, const char *component, struct import_found *found,
	size_t nfound, struct import_weights **ret_w, struct base_error *err);
/* A shard whose tensors are in other files of the directory, too. */
bool import_weights_skips(const struct import_weights *w, const struct import_found *f);
/* Reads the headers of a file that has a set. 1: it has no tensors, and is kept as a blob. */
int import_weights_take(struct import_weights *w, struct import_found *f, struct base_error *err);
/* After the last file: every index names exactly the tensors of its files. */
int import_weights_check(struct import_weights *w, struct base_error *err);
void import_weights_free(struct import_weights *w); /* NULL-safe */

#endif
