/* SPDX-License-Identifier: Apache-2.0
 *
 * prune: rules (retain.h) applied to a run's list (docs/prune.md). A list and what prunes it belong to one thread. */
#ifndef CORE_UPKEEP_PRUNE_H
#define CORE_UPKEEP_PRUNE_H

#include "core/commit/list/list.h"
#include "core/upkeep/retain.h"

/* Adds the rules of the run's policy. 1: it has none. -BASE_EVERSION: a newer vckpt made it. */
int upkeep_policy_add(const struct commit_list *l, struct upkeep_retain *k, struct base_error *err);

/* Below how many free bytes the run's policy asks for a warning; 0: it does not ask, or not in a way that is known. */
uint64_t upkeep_policy_warn_free(const struct commit_list *l);

struct upkeep_prune;
/* l knows all steps (commit_list_know_all); it and k are borrowed. Errors as upkeep_retain_apply. */
int upkeep_prune_new(struct commit_list *l, const struct upkeep_retain *k, int64_t now_ns,
	struct upkeep_prune **ret_p, struct base_error *err);
void upkeep_prune_free(struct upkeep_prune *p); /* NULL-safe */
/* All visible steps and what keeps them; valid until the next upkeep_prune_remove. */
const struct upkeep_retain_row *upkeep_prune_rows(const struct upkeep_prune *p, size_t *ret_n);
static inline bool upkeep_prune_goes(const struct upkeep_retain_row *row) { return !row->rules && !row->always; }
/* Removes the step that this entry made, unless the newest state of the list keeps it. reason: for the list. 0; 1: it
 * stays, and `err` says why; -ESTALE: it was removed or replaced; else as commit_list_remove, or what rules refuse. */
int upkeep_prune_remove(struct upkeep_prune *p, uint64_t step, uint64_t entry, const char *reason,
	struct base_error *err);
/* All that go. *ret_removed: how many were. Ends at the first error but for those that another writer removed. */
int upkeep_prune_all(struct upkeep_prune *p, const char *reason, uint64_t *ret_removed, struct base_error *err);

#endif
