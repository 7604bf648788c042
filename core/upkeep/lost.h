/* SPDX-License-Identifier: Apache-2.0
 *
 * lost: do other files name entries that a list does not have (docs/format/list.md, "What a lost end can show")?
 * Writers may be at work: files that they put meanwhile are not taken for traces. Any thread. */
#ifndef CORE_UPKEEP_LOST_H
#define CORE_UPKEEP_LOST_H

#include "core/commit/list/list.h"

struct upkeep_lost_question {
	struct store *store;
	struct commit_list *const *lists; size_t nlists; /* whole, read before the question */
	const char *run;                                /* NULL: all */
	/* Called for each trace: the file that names an entry (or its folder in incoming/), and what is wrong, as part
	 * of a sentence. */
	void (*found)(void *arg, const char *file, const char *run, const char *text);
	void *arg;
};
/* The list of that run, or NULL. */
struct commit_list *upkeep_list_among(struct commit_list *const *lists, size_t n, const char *run);
/* 0, whether there are traces or not. An error: it is not known. */
int upkeep_lost_find(const struct upkeep_lost_question *q, struct base_error *err);

#endif
