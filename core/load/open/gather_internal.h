/* SPDX-License-Identifier: Apache-2.0
 *
 * gather: the boxes in the rows of several parts, each once. A tensor is put together from them, whole (boxes.c) or as
 * far as it is wanted (wanted.c). One thread. */
#ifndef CORE_LOAD_OPEN_GATHER_INTERNAL_H
#define CORE_LOAD_OPEN_GATHER_INTERNAL_H

#include "core/load/open/rows_internal.h"

#define BOX_TEXT 800u   /* 16 dimensions of two numbers of 20 digits */

/* A box: its number in a row, the number of its first piece there, and how many pieces of it the row has. */
struct load_gather_from { uint32_t row, box; uint64_t first, n; };

struct load_gather {
	struct load_object *o;
	struct base_error *err;
	const struct load_row *rows;     /* ascending lines */
	struct base_buf from;            /* struct load_gather_from; sorted and folded: as list */
	struct tensor_boxes list;        /* with ndim, empty */
};
void load_gather_release(struct load_gather *g);

static inline struct load_gather_from *load_gather_from(const struct load_gather *g)
{
	return (struct load_gather_from *)g->from.data;
}
static inline const struct tensor_box *load_gather_box(const struct load_gather *g, const struct load_gather_from *f)
{
	return &g->rows[f->row].row.boxes[f->box];
}

/* Sorts `from` by place and makes the list of it; of equal boxes the lowest rank's stays. -ENOMEM. */
int load_gather_fold(struct load_gather *g);
/* Makes room for the pieces of the list in g->o->row; *ret_inlined: for their inline bytes, behind. -ENOMEM. */
int load_gather_room(struct load_gather *g, uint8_t **ret_inlined);
/* Copies piece i of a box, with the manifest's number of its pack, and moves *inlined past the piece's inline bytes. */
void load_gather_piece(const struct load_gather *g, const struct load_gather_from *from, uint64_t i,
	struct store_piece *to, uint8_t **inlined);
/* What tensor_boxes_cover found of boxes of the list, in words. Returns r, or -BASE_EFORMAT. */
int load_gather_fault(const struct load_gather *g, int r, const struct tensor_cover *where);

#endif
