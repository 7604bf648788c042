/* SPDX-License-Identifier: Apache-2.0
 *
 * check: opens the files of a step and compares their bytes with the step's digests, for vckpt verify. */
#ifndef CORE_VIEW_CHECK_H
#define CORE_VIEW_CHECK_H

#include "core/commit/list/list.h"

/* Builds the tree of the step's files and opens each .safetensors and each blob. read: opens each .npy, too, reads
 * every file to its end as the mount does, and compares the bytes with the digests of pieces and blobs
 * (core/load/read/prove.h); files of meshes are not read. Reports the first file that fails, in the order of the tree.
 * Uses several threads. It is an upkeep_verify_files_func. */
int view_step_check(struct store *s, const char *run, const struct commit_list_step *entry, bool read,
	void (*wrong)(void *arg, int r, const char *text), void (*read_bytes)(void *arg, uint64_t bytes), void *arg);

#endif
