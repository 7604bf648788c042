/* SPDX-License-Identifier: Apache-2.0
 *
 * keep: which earlier attempts a save goes on referring to, and whose unchanged pieces it writes again. A pure function
 * of what the bases' manifests say, so that all ranks with the same bases choose alike without a message. docs/save.md
 * (How many earlier attempts) has the rule, its bound, and the proof. */
#ifndef CORE_SAVE_PLAN_KEEP_H
#define CORE_SAVE_PLAN_KEEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SAVE_KEEP_MAX 16u       /* a save refers to packs of at most so many earlier attempts */
#define SAVE_KEEP_LARGE 8u      /* so many stay when the others are merged into this save */
#define SAVE_KEEP_DUST 100u     /* an attempt with at most 1/100 of all bytes is dust */

struct save_keep {              /* an earlier attempt */
	uint64_t bytes;         /* stored bytes of pieces that the bases refer to: what merging it writes, at most */
	bool named;             /* the save refers to it in any case, for its layout: merging it makes no room */
	bool kept;              /* the result: its pieces may be referred to */
};
/* Of n attempts that are given in the same order to all ranks, at most `room` are kept or named afterwards (if at most
 * so many are named). -ENOMEM. */
int save_keep_choose(struct save_keep *all, size_t n, size_t room);

#endif
