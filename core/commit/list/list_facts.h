/* SPDX-License-Identifier: Apache-2.0
 *
 * list_facts: what a run's list says of its steps after their commits: pins, tags, attributes that were set later; and
 * the run's policy (docs/format/list.md, "Facts"). A list belongs to one thread. */
#ifndef CORE_COMMIT_LIST_LIST_FACTS_H
#define CORE_COMMIT_LIST_LIST_FACTS_H

#include "core/commit/list/list.h"

/* The facts of the visible commit `entry`; NULL: nothing. Borrowed until the list changes. Of a list that was opened
 * for the newest steps: once the commit is known, so is this. */
const struct proto_step_facts *commit_list_facts(const struct commit_list *l, uint64_t entry);
/* The attributes of the step's commit with those that were set later, sorted by key. *ret_a is malloc'ed, an array
 * alone: the texts are the list's, until it changes. -ENOMEM. */
int commit_list_attributes(const struct commit_list *l, const struct commit_list_step *s,
	struct proto_attribute **ret_a, size_t *ret_n);
/* The step that has the tag; NULL: none. Of a list that knows all (commit_list_know_all). */
const struct commit_list_step *commit_list_tagged(const struct commit_list *l, const char *tag);
/* All tags of such a list, sorted. *ret_tags is malloc'ed, an array alone: what it points to is the list's, until it
 * changes. -ENOMEM. */
struct commit_list_tag { const char *tag; const struct commit_list_step *step; };
int commit_list_tags(const struct commit_list *l, struct commit_list_tag **ret_tags, size_t *ret_n);
/* The run's policy; NULL: it has none. Every list knows it. Borrowed until the list changes. */
const struct proto_policy *commit_list_policy(const struct commit_list *l);
/* May the visible step go? 0; or -BASE_EPINNED: it is, and the sentence says why and what to do. done: "removed". */
int commit_list_unpinned(const struct commit_list *l, const struct commit_list_step *s, const char *done,
	struct base_error *err);

/* One change of the facts of a visible step. */
struct commit_facts_change {
	uint64_t step, entry;            /* entry: still visible under the step; PROTO_NONE: whatever is there */
	int pin;                         /* 1: pin; -1: unpin; 0: neither */
	const char *reason;              /* of the pin; NULL: none, or the one that it has */
	const char *const *tags; size_t ntags;     /* added; another step that has one loses it */
	const char *const *untags; size_t nuntags; /* taken away, if the step has them */
	const struct proto_attribute *set; size_t nset; /* value NULL: what was set later is unset */
};
/* Makes the change on the newest state and puts it as one entry, so no change of another writer is lost. 0: it is
 * put. 1: nothing would change, and nothing was put. -ENOENT: there is no such step, or an attribute that is to be
 * unset was not set later; -ESTALE: the step was removed or replaced by another writer; -EINVAL: a tag, key, value or
 * reason that cannot be, or too many; -ENOTSUP: the store lacks the word list-4; -BASE_EUNDECIDED: the entry could not
 * be put, but may have landed, or may land yet; or another error of commit_list_put. */
int commit_list_facts_change(struct commit_list *l, const struct commit_facts_change *c, struct base_error *err);
/* Sets the run's policy, whatever the rules mean; n 0: the run has none from now on. Returns the same. */
int commit_list_policy_put(struct commit_list *l, const char *const *rules, size_t n, struct base_error *err);

#endif
