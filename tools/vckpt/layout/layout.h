/* SPDX-License-Identifier: Apache-2.0
 *
 * layout: the arguments of `vckpt layout`, shared with its picture. One thread. */
#ifndef TOOLS_VCKPT_LAYOUT_LAYOUT_H
#define TOOLS_VCKPT_LAYOUT_LAYOUT_H

#include "tools/vckpt/layout/layout_args.h"

struct layout {
	struct tool *t;
	const char *shape_text, *dtype_text, *flat_text;
	struct tensor_shape shape;
	enum tensor_dtype dtype;
	struct tool_sharding on;
	struct tool_ranks ranks;
	struct tensor_flat flat;
	bool draw;
	bool countable;         /* boxes are counted by arithmetic, not one by one */
	uint64_t boxes;         /* of all these ranks; only with --json or --rank */
};
int layout_shard(const struct layout *l, uint32_t rank, struct tensor_shard *ret_shard, struct base_error *err);
/* The picture of a 2-d tensor on standard output; an exit code. */
int layout_draw(const struct layout *l);
/* What a layout file gives to the tensors of the step that t's arguments name, or that it is right; an exit code. */
int layout_check(struct tool *t, const char *file);

#endif
