/* SPDX-License-Identifier: Apache-2.0
 *
 * list_numbers_internal: which numbers of a list there are. Part of list_internal.h. */
#ifndef CORE_COMMIT_LIST_LIST_NUMBERS_INTERNAL_H
#define CORE_COMMIT_LIST_LIST_NUMBERS_INTERNAL_H

#include "core/commit/list/list.h"

/* The numbers that the run's directory has, ascending: asked for once so many entries in a row decide nothing. */
struct list_numbers {
	bool read;
	uint64_t *all;
	size_t n, size;
};

/* ---- list_numbers.c ---- */

/* Ascending, for qsort: of numbers, and of structs that begin with one. */
int list_number_order(const void *a, const void *b);
bool list_number_in(const uint64_t *all, size_t n, uint64_t number); /* of an ascending array */
#define LIST_END_MAX (UINT64_C(1) << 61) /* no entry has this number or a higher one */
#define LIST_MISSING_MAX 16u             /* entries in a row that decide nothing are looked for one by one */
int list_numbers_read(struct commit_list *l, struct base_error *err); /* unless this reading has */
bool list_number_there(const struct commit_list *l, uint64_t n);      /* does it list n? */
/* Those at and after l->next up to the next number that there is, or `end`, are skipped as missing, if
 * LIST_MISSING_MAX before them are. 0, or an error. */
int list_gap_pass(struct commit_list *l, uint64_t end, struct base_error *err);
/* If LIST_MISSING_MAX entries before it decide nothing: does the directory list l->next? 0, or an error. */
int list_next_listed(struct commit_list *l, struct base_error *err);
/* Does the directory list l->next, as it was when this reading first asked? 1, 0 or an error. */
int list_number_listed(struct commit_list *l, struct base_error *err);
/* How many of the numbers from l->next on may well be there, at most `most`, at least 1. */
uint32_t list_numbers_run(const struct commit_list *l, uint32_t most);
/* The place of a snapshot before n, *ret_n 0: there is none; missing: so many places behind it have no entry. */
int list_snapshot_before(struct commit_list *l, uint64_t n, unsigned missing, uint64_t *ret_n, struct base_error *err);
void list_numbers_release(struct commit_list *l);

#endif
