/* SPDX-License-Identifier: Apache-2.0
 *
 * list_head_internal: what list_head.c and list_mark.c keep in a list, and do for list.c and each other. Part of
 * list_internal.h. */
#ifndef CORE_COMMIT_LIST_LIST_HEAD_INTERNAL_H
#define CORE_COMMIT_LIST_LIST_HEAD_INTERNAL_H

#include "core/commit/list/list.h"
#include "core/commit/list/list_snapshot_internal.h"
#include "core/commit/list/list_writer.h"
#include "core/step/record.h"
#include "proto/message.h"

/* A head that a collected record names: a snapshot of this digest. number 0: none. */
struct list_head { uint64_t number; struct base_digest self; };

/* ---- list.c ---- */

/* A list of which nothing was read. */
void list_begin(struct commit_list *l, struct store *s, const char *run, const struct commit_list_how *how);
/* 1: there is an entry of that number; 0: not. */
int list_entry_exists(struct commit_list *l, uint64_t n);
/* Reads, with the list's patience, what entries are made of from a record of that kind under that name. */
int list_file_read(struct commit_list *l, enum store_record_kind kind, const char *name, uint64_t n,
	struct proto_entry *ret_e, struct base_error *err);

/* ---- list_head.c ---- */

/* An entry was read: does it name a head? */
void list_head_see(struct commit_list *l, const struct proto_entry *e);
/* The next entry was collected: goes on behind the head, with what was visible there. 0; -BASE_EDAMAGED: that cannot be
 * read, and the entry counts as damaged; or another error. */
int list_jump(struct commit_list *l, const struct proto_entry *e, struct base_error *err);
/* Fills *ret_at with the list as it is for a reader that begins at this head. -ENOENT, -BASE_EDAMAGED: that cannot be
 * read. list_head_drop, whatever it returns. */
int list_head_open(const struct commit_list *l, const struct list_head *h, struct commit_list *ret_at,
	struct base_error *err);
void list_head_drop(struct commit_list *at);
/* The file that says what is visible there. */
int list_mark_read(struct commit_list *l, const struct list_head *h, struct proto_entry *ret_e, struct base_error *err);

#endif
