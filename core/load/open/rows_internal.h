/* SPDX-License-Identifier: Apache-2.0
 *
 * rows: what the parts of a step say of tensors. Questions about many tensors are asked at once, so that each part is
 * opened once, and each chunk read once for all of them. rows.c knows which parts to ask, row_part.c what to take of a
 * row. */
#ifndef CORE_LOAD_OPEN_ROWS_INTERNAL_H
#define CORE_LOAD_OPEN_ROWS_INTERNAL_H

#include <stdatomic.h>

#include "core/load/open/object.h"
#include "core/step/part_excerpt.h"

/* A part's row of a tensor: the part on rank line `line` of the manifest, which has `npacks` packs. */
struct load_row {
	struct store_row row;            /* as the part has it; or of it, the boxes and pieces that are wanted */
	/* then: by box, where its pieces begin here, and their end; by piece, its number among all of its box */
	uint64_t *first, *numbers;
	struct base_buf inlined;
	bool whole;                      /* the part has all of the tensor */
	uint32_t line, npacks;
};
void load_row_release(struct load_row *row);

struct load_question {
	uint32_t tensor;
	const struct tensor_grid *grid;
	const struct tensor_boxes *wanted; /* not empty; NULL: all of the tensor, all of each row */
	const struct tensor_box_index *index; /* of wanted */
	/* the answer: rows by ascending rank. One alone, if it has all of the tensor; none, if no part has a row that
	 * meets what is wanted */
	struct load_row *rows; uint32_t nrows;
	int r; char *why;                /* or it failed */
};
void load_question_release(struct load_question *q);
/* Asks only parts that may have what is wanted by the layouts (holders.c) and by their chunks, several at once. A row
 * outside of what its layout gives its rank is -BASE_EFORMAT. Returns errors that are no question's fault: -ENOMEM;
 * -ECANCELED: *stop was set (NULL: never). */
int load_rows_ask(const struct load_step *step, struct load_question *questions, uint32_t n, const atomic_bool *stop,
	struct base_error *err);

/* The boxes and pieces that are wanted of a whole row, or of one that is read by ranges. -ENODATA: nothing. */
int load_row_take(const struct load_question *q, const struct store_row *all, struct load_row *ret_row); /* -ENOMEM */
int load_row_excerpt(const struct load_question *q, struct store_part_excerpt *e, struct load_row *ret_row,
	struct base_error *err);

#endif
