/* SPDX-License-Identifier: Apache-2.0
 *
 * list_compare: what the snapshots of a list say, compared with what was visible before them (for verify). A list
 * belongs to one thread. */
#ifndef CORE_COMMIT_LIST_LIST_COMPARE_H
#define CORE_COMMIT_LIST_LIST_COMPARE_H

#include "core/commit/list/list.h"

/* As commit_list_open of the whole list, and every snapshot is compared (commit_list_lie). */
int commit_list_open_compared(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err);
/* The number of the first snapshot that says something else; 0: none does, or it was not compared. */
uint64_t commit_list_lie(const struct commit_list *l);
/* Do two lists of the same steps say the same of them (list_facts.h), and have the same policy? */
bool commit_list_facts_same(const struct commit_list *a, const struct commit_list *b);
/* Do two commits say the same, with attributes and fields that are not known? */
bool commit_equal(const struct proto_commit *a, const struct proto_commit *b);

#endif
