/* SPDX-License-Identifier: Apache-2.0
 *
 * prove: do readers get the bytes of a tensor or a blob that the step names by digest? All bytes are read as readers
 * read them, cut again as a writer would, and compared by SHA-256. This finds what checks of stored bytes cannot: right
 * bytes in a wrong place. Any thread. */
#ifndef CORE_LOAD_READ_PROVE_H
#define CORE_LOAD_READ_PROVE_H

#include "core/load/open/step.h"

/* Bytes [offset, offset + len) of the row-major tensor or the blob. */
typedef int (*load_prove_read)(void *arg, uint64_t offset, size_t len, void *out, struct base_error *err);
/* 0; what `read` returned; -ENOMEM; -BASE_EDAMAGED: a piece is not what its digest says. */
int load_object_prove(const struct load_object *o, load_prove_read read, void *arg, struct base_error *err);

#endif
