/* SPDX-License-Identifier: Apache-2.0
 *
 * keep: the options --keep-… that vckpt prune and vckpt policy share, as rules. One thread. */
#ifndef TOOLS_VCKPT_KEEP_KEEP_H
#define TOOLS_VCKPT_KEEP_KEEP_H

#include "core/upkeep/retain.h"
#include "tools/vckpt/tool.h"

struct keep;
struct keep_word { struct keep *keep; const char *word; };
struct keep {
	struct upkeep_retain *rules; /* NULL: none were given */
	char **texts; size_t n;      /* all, as a policy has them */
	struct keep_word words[9];
};
/* Rows of the command's options. */
#define KEEP_OPTIONS(k) KEEP_OPTION(k, 0, "keep-last"), KEEP_OPTION(k, 1, "keep-every"), \
	KEEP_OPTION(k, 2, "keep-within"), KEEP_OPTION(k, 3, "keep-daily"), KEEP_OPTION(k, 4, "keep-weekly"), \
	KEEP_OPTION(k, 5, "keep-best"), KEEP_OPTION(k, 6, "keep-step"), KEEP_OPTION(k, 7, "keep-if")
#define KEEP_OPTION(k, i, word_) {word_, .call = keep_option, \
	.arg = ((k)->words[i] = (struct keep_word){k, word_}, &(k)->words[i])}
/* How the help describes them. */
#define KEEP_HELP \
	"  --keep-last K       the last K steps, by number\n" \
	"  --keep-every N      steps whose number is a multiple of N\n" \
	"  --keep-within AGE   steps that are no older than 7d, 12h, 30m, 2w or 1d12h\n" \
	"  --keep-daily K      of each of the last K days that have steps (UTC) the newest one\n" \
	"  --keep-weekly K     the same of weeks, which begin on Monday\n" \
	"  --keep-best K:ATTRIBUTE[:min|max]\n" \
	"                      the K steps with the lowest (max: the highest) value of an attribute\n" \
	"  --keep-step N,...   these steps\n" \
	"  --keep-if EXPR      steps of which an expression holds, such as 'loss < 2.3 and not has bad'\n"
int keep_option(struct tool *t, void *arg, const char *value);
void keep_release(struct keep *k);

#endif
