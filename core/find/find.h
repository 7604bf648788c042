/* SPDX-License-Identifier: Apache-2.0
 *
 * find: the steps of a store, of any run, that an expression holds for (docs/expressions.md).
 *
 * Which steps there are, and their facts, is in the lists, which are read each time. What a step's tensors
 * are is in its manifest and layouts, what their digests are in its parts: these are read once, and kept in the index.
 * Steps of the same layouts share one answer. Without an index that can be written all works, slower. One thread. */
#ifndef CORE_FIND_FIND_H
#define CORE_FIND_FIND_H

#include "core/commit/list/list.h"

struct find_options {
	const char *expression;
	uint64_t limit;                 /* of the steps, the newest; 0: all */
	int64_t now_ns;                 /* of the question, since 1970 */
	bool no_index;                  /* neither read nor write one */
	/* Called after a step was read; may be NULL. */
	void (*progress)(void *arg, uint64_t done, uint64_t total);
	/* Called for each run and step that cannot be read, and so is not found; NULL: the first one is the error. */
	void (*failed)(void *arg, const struct base_error *why);
	void *arg;
};
struct find_step { const char *run; const struct commit_list *list; const struct commit_list_step *step; };

struct find;
/* -EINVAL, -BASE_ELIMIT: the expression is wrong, and the sentence has the column. Release with find_close. */
int find_open(struct store *s, const struct find_options *o, struct find **ret_f, struct base_error *err);
void find_close(struct find *f); /* NULL-safe */
size_t find_count(const struct find *f);
const struct find_step *find_at(const struct find *f, size_t i); /* newest first; borrowed until the close */
/* The i-th attribute that the expression asks for and no step has: probably a mistake. NULL: no more. */
const char *find_unknown(const struct find *f, size_t i);

#endif
