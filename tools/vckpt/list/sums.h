/* SPDX-License-Identifier: Apache-2.0
 *
 * sums: what tensors are made of, added up: types, pieces, codecs, and what they share with the same tensors of another
 * step. For `info` and `ls --long`. One thread. */
#ifndef TOOLS_VCKPT_LIST_SUMS_H
#define TOOLS_VCKPT_LIST_SUMS_H

#include <jansson.h>

#include "core/load/open/step.h"
#include "core/tensor/dtype.h"

/* shared: pieces that have the same number and digest in the other step */
struct tool_sums {
	uint64_t tensors, tensors_equal, pieces, pieces_shared, bytes, bytes_shared, stored;
	uint64_t dtypes[TENSOR_DTYPE_END]; /* tensors of each */
	struct {
		uint16_t word;
		uint64_t pieces, raw, stored;
	} codecs[16];
	unsigned ncodecs;
	struct base_digest digest; /* of the last one */
};

/* Opens tensor `number` of the step and adds it. before: a step to compare with, or NULL. 0 or a negative errno, with a
 * sentence in err. */
int tool_sums_tensor(struct tool_sums *s, struct load_step *step, struct load_step *before, uint32_t number,
	struct base_error *err);

#define TOOL_SUMS_TEXT 640
/* "bf16 291, f32 2"; "-": none. Of codecs the numbers of pieces. They write into `text` and return it. */
char *tool_sums_dtypes(const struct tool_sums *s, char text[static TOOL_SUMS_TEXT]);
char *tool_sums_codecs(const struct tool_sums *s, char text[static TOOL_SUMS_TEXT]);
json_t *tool_sums_dtypes_json(const struct tool_sums *s);
json_t *tool_sums_codecs_json(const struct tool_sums *s);
/* A line for each type among them that numpy lacks: what numpy shows, and what to do. */
void tool_sums_print_numpy(const struct tool_sums *s, const char *indent);

#endif
