/* SPDX-License-Identifier: Apache-2.0
 *
 * catalog: brings a store's index up to date with its lists: adds the pieces and blobs of visible commits that it
 * does not know, oldest first, within its bound, and forgets commits that are gone. Runs in a process of its own
 * (`vckpt index STORE`), because LMDB may die of a damaged file. */
#ifndef CORE_SAVE_WRITE_CATALOG_H
#define CORE_SAVE_WRITE_CATALOG_H

#include "core/step/store.h"
#include "index/index.h"

/* STORE/index if the store's directory is this user's, and `index` too, which no one else may write in, or it is not
 * there and can be made: then *ret_store is the store's directory, open, to be closed; else it is -1. In every other
 * case, and on a network filesystem: $XDG_CACHE_HOME (or ~/.cache)/vckpt/<store id hex>. So each user of a store has an
 * index. -ENOENT: the user has no home directory either. */
int save_index_dir(const struct store *s, int *ret_store, char dir[static 4096]);
/* For reading. */
int save_index_open(const struct store *s, struct index **ret_i, struct base_error *err);
/* A file of rows; flags: of enum index_flag, that file and more. A writer makes the directory, and a damaged file
 * anew. */
int save_index_open_rows(const struct store *s, unsigned flags, struct index **ret_i, struct base_error *err);
/* Removes what a writer of the index that died has left. Best effort. */
void save_index_tidy(const struct store *s);
/* flags: of enum index_flag, INDEX_ANEW and INDEX_BRIEFLY (-EBUSY: another process is at it; it takes in what became
 * visible meanwhile, too). */
int save_index_update(struct store *s, unsigned flags, struct index_stats *ret_stats, struct base_error *err);

#endif
