/* SPDX-License-Identifier: Apache-2.0
 *
 * whole: a step of several ranks, written anew as one writer would have saved it (docs/gc.md, "Whole tensors"). Rank 0
 * gets a row for each tensor, whole, in the pieces of the grid. They are read by boxes as any load reads them, and
 * compared with the digests of the pieces that they come from. */
#ifndef CORE_COPY_WHOLE_H
#define CORE_COPY_WHOLE_H

#include "core/upkeep/repack.h"

/* For upkeep_repack_options. Writes packs of rank 0 of w->attempt, and announces its part, blobs included. -ENOTSUP:
 * the step's layouts do not allow it. -BASE_EDAMAGED: a piece is not what its digest says. -EINTR. After an error the
 * attempt is to be aborted. One thread; as many as w->threads read and hash. Memory: some 20 MiB a thread, and for each
 * piece 200 bytes. */
int copy_whole(struct upkeep_whole *w, struct base_error *err);

#endif
