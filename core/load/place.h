/* SPDX-License-Identifier: Apache-2.0
 *
 * place: how a part of a piece comes into a destination that is not simply host memory in the step's dtype: memory of
 * another dtype. And zeros, for what of a destination the step does not have.
 *
 * A fill has one; any of its threads calls place_part, for parts that share no byte of the destination. Nothing here
 * waits for a disk. Errors (memory) end the fill. */
#ifndef CORE_LOAD_PLACE_H
#define CORE_LOAD_PLACE_H

#include "core/load/fill_internal.h"

/* Is the box of host memory in the step's dtype? Then the fill itself writes there. */
static inline bool place_is_plain(const struct fill_box *b) { return b->dtype == 0; }

/* Converts `part` of the piece at `bytes`, in stored order, and writes it to its place in the box. */
void place_part(struct load_fill *f, const struct fill_box *b, const struct tensor_grid *g,
	const struct tensor_box *piece, const struct tensor_box *part, const uint8_t *bytes);
/* Writes the zeros, before anything is read. */
void place_zeros(const struct load_fill *f);

#endif
