/* SPDX-License-Identifier: Apache-2.0
 *
 * list_snapshot_internal: what list_snapshot.c and list_launches.c keep in a list, and do for list.c, list_put.c and
 * list_replay.c. Part of list_internal.h. */
#ifndef CORE_COMMIT_LIST_LIST_SNAPSHOT_INTERNAL_H
#define CORE_COMMIT_LIST_LIST_SNAPSHOT_INTERNAL_H

#include "core/commit/list/list.h"
#include "proto/message.h"

struct list_hold;

/* A launch from before the entry that reading began at. entry PROTO_NONE: not known. */
struct list_id { proto_launch_id launch; uint64_t entry; };

/* A snapshot that was read: its number, that which it goes on from (0: none), and their digests. */
struct list_node { uint64_t entry, from; struct base_digest self, from_digest; };

/* A commit entry that is not visible any more, since entry `at`; or a snapshot `at` says so. */
struct list_dropped { uint64_t entry, at; };

/* Snapshots from a newer one to an older one; each entry is held. */
struct list_chain { struct list_hold **all; size_t n; };

/* ---- list_snapshot.c ---- */

int list_node_reserve(struct commit_list *l, size_t more);
const struct list_node *list_node_find(const struct commit_list *l, uint64_t n); /* NULL: it was not read */
/* Snapshot n was read; there is room. */
void list_node_add(struct commit_list *l, uint64_t n, const struct proto_entry *e);
int list_dropped_reserve(struct commit_list *l, size_t more);
void list_dropped_add(struct commit_list *l, uint64_t entry, uint64_t at);          /* there is room */
/* What the snapshot in h shows takes the place of what is visible. newest: without its chain. -BASE_EDAMAGED: one of
 * those that it goes on from, l->broken, is damaged, and nothing has changed. */
int list_adopt(struct commit_list *l, struct list_hold *h, bool newest, struct base_error *err);
/* Reads what is not known below l->rest, if the highest visible step is not known otherwise; may read all anew
 * (commit_list_reopen). */
int list_know_newest(struct commit_list *l, struct base_error *err);
/* The same as far as a snapshot at the next number needs it. */
int list_snapshot_know(struct commit_list *l, struct base_error *err);
/* Puts a snapshot as the next number, as list_put_number. What it needs is known (list_snapshot_know). */
int list_snapshot_put(struct commit_list *l, struct base_error *err);
/* Fills `e` as a snapshot of what is visible that goes on from e->from; `m` keeps its arrays. -ENOMEM. What it needs
 * is known. */
struct list_made { struct proto_live *live; uint64_t *gone; struct proto_step_facts *facts; };
int list_snapshot_make(const struct commit_list *l, struct proto_entry *e, struct list_made *m);
void list_made_release(struct list_made *m);
bool list_snapshot_equal(const struct proto_entry *a, const struct proto_entry *b);
/* Does it say what the entries before it say, which were all read? -ENOMEM. */
int list_snapshot_compare(struct commit_list *l, const struct proto_entry *e, bool *ret_same);

/* ---- list_launches.c ---- */

/* The newest launch entry, or PROTO_NONE. */
uint64_t list_newest_launch(const struct commit_list *l);
/* Reads which launches there were before the list's first entry; may read all anew (commit_list_reopen). */
int list_launches_know(struct commit_list *l, struct base_error *err);
/* The same for a list that began at its head. */
int list_launches_start(struct commit_list *l, struct base_error *err);
/* The launch of that id among these; NULL. */
const struct list_id *list_launch_before(const struct commit_list *l, const char name[static 16]);
/* Fills what a launch entry says of those before it, which are known. *ret_ids is malloc'ed. */
int list_launch_fill(const struct commit_list *l, struct proto_entry *e, proto_launch_id **ret_ids);
/* Does it say what the entries before it say, which were all read? -ENOMEM. */
int list_launch_compare(struct commit_list *l, const struct proto_entry *e, bool *ret_same);

#endif
