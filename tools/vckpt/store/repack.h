/* SPDX-License-Identifier: Apache-2.0
 *
 * repack: what vckpt repack and vckpt gc --repack-below share. */
#ifndef TOOLS_VCKPT_STORE_REPACK_H
#define TOOLS_VCKPT_STORE_REPACK_H

#include "core/upkeep/repack.h"
#include "tools/vckpt/tool.h"

/* Steps that are repacked, in order; prints a line for each that was or could not be, and adds both to the arrays. What
 * another writer changed meanwhile, or may go on from, stays as it is. A full disk and an interruption end it. Returns
 * an exit code, the highest of all. */
struct tool_repack {
	struct tool *t;
	struct tool_progress progress;
	struct upkeep_repack_options options;
	struct upkeep_repack *session;
	json_t *steps, *kept, *failed;
};
int tool_repack_open(struct tool_repack *x, struct tool *t);
void tool_repack_close(struct tool_repack *x);
int tool_repack_steps(struct tool_repack *x, const struct upkeep_repack_step *steps, size_t n);

#endif
