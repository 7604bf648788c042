/* SPDX-License-Identifier: Apache-2.0
 *
 * read: the values of a tensor in boxes of bounded bytes, each piece's after the other. Pure functions, any thread. */
#ifndef CORE_DIFF_READ_H
#define CORE_DIFF_READ_H

#include "core/load/open/object.h"
#include "core/load/read/cache.h"

#define DIFF_CUT_BYTES (UINT64_C(1) << 20)

/* The box that piece `piece` of an opened tensor is; the tensor has all of its pieces. */
void diff_piece_box(const struct load_object *o, uint64_t piece, struct tensor_box *ret_box);

/* Walks a box in boxes of at most DIFF_CUT_BYTES bytes, in row-major order. */
struct diff_cut {
	const struct tensor_grid *grid;
	struct tensor_box all, box;     /* box: the current one */
	unsigned d;                     /* the dimension that is cut; those before it have size 1 */
	uint64_t most;                  /* of its size */
	bool done;
};
void diff_cut_first(struct diff_cut *c, const struct tensor_grid *g, const struct tensor_box *all);
void diff_cut_next(struct diff_cut *c);
uint64_t diff_cut_items(const struct diff_cut *c); /* of the current box */
/* Its items, row-major, to `out`: load_object_read_box. */
int diff_cut_read(const struct diff_cut *c, struct load_object *o, struct load_cache *cache, void *out,
	struct base_error *err);

#endif
