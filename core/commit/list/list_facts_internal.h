/* SPDX-License-Identifier: Apache-2.0
 *
 * list_facts_internal: what list_facts.c keeps in a list, and does for the other files. Part of list_internal.h. */
#ifndef CORE_COMMIT_LIST_LIST_FACTS_INTERNAL_H
#define CORE_COMMIT_LIST_LIST_FACTS_INTERNAL_H

#include "core/base/table.h"
#include "core/commit/list/list.h"
#include "core/commit/list/list_snapshot_internal.h"

/* The facts of one commit; is.entry is its number, whether it is known here or not. */
struct list_fact {
	struct proto_step_facts is;      /* is.tags: those that it has still. The array is this fact's alone */
	uint64_t at;                     /* the last entry that changed it, or a snapshot that has it */
	struct list_hold *hold;          /* has the texts; NULL: the commit was removed or replaced */
};

/* Once a tag was said it stays here, so that what older snapshots say of it does not count. */
struct list_tag {
	char name[PROTO_TAG_MAX + 1];
	uint64_t owner;                  /* the commit; PROTO_NONE: none any more */
	uint64_t first;                  /* the first entry that said it, of those that are known */
};

struct list_facts {
	struct list_fact *all;           /* in the order in which commits were named */
	size_t n, size;
	struct base_table by_entry;
	struct list_tag *tags;
	size_t ntags, tags_size;
	struct base_table by_tag;
	bool unsure;                     /* a tag was said that a commit of the rest may have */
	struct list_hold *policy;        /* the entry or snapshot that has it; NULL: none was said */
	uint64_t policy_at;
};

/* Room for what these say. -ENOMEM. */
int list_facts_reserve(struct list_facts *f, const struct proto_step_facts *rows, size_t n);
/* Entry `at`, in the hold, says this of a visible commit (or one that may be: list_facts_know). There is room. */
void list_facts_say(struct commit_list *l, uint64_t entry, const struct proto_step_facts *row, uint64_t at,
	struct list_hold *h);
/* The commit is not visible any more, since entry `at`. */
void list_facts_drop(struct commit_list *l, uint64_t entry, uint64_t at);
int list_facts_apply(struct commit_list *l, uint64_t n, struct list_hold *h);
/* Before an entry of kind 8 is applied: reads what its rule asks for. */
int list_facts_know(struct commit_list *l, const struct proto_facts *facts, struct base_error *err);

/* What a chain says, newest first, behind what is known already; not of commits `dead`, ascending. Room is there. */
int list_facts_chain_reserve(struct list_facts *f, const struct list_chain *c);
void list_facts_chain(struct list_facts *f, const struct list_chain *c, const uint64_t *dead, size_t ndead);
void list_facts_policy(struct list_facts *f, struct list_hold *snapshot);
/* Is enough of the rest known for a snapshot that goes on from `from`? */
bool list_facts_enough(const struct commit_list *l, uint64_t from);
/* Fills e->facts as a snapshot that goes on from e->from has them. -ENOMEM. *ret_made is the caller's. */
int list_facts_make(const struct commit_list *l, struct proto_entry *e, struct proto_step_facts **ret_made);
bool list_facts_equal(const struct proto_facts *a, const struct proto_facts *b);
/* Does the mark say of the visible steps what this list does, as far as that was so at the mark? */
bool list_facts_true(const struct commit_list *l, const struct proto_entry *mark);
void list_facts_release(struct list_facts *f);

#endif
