/* SPDX-License-Identifier: Apache-2.0
 *
 * retain: rules that say which steps of a run stay (docs/prune.md). Pure: it takes rows and gives for each what keeps
 * it. A step stays if any rule keeps it; those of upkeep_retain_always always stay. Rules are read-only once added; any
 * thread. */
#ifndef CORE_UPKEEP_RETAIN_H
#define CORE_UPKEEP_RETAIN_H

#include "core/query/step.h"

#define UPKEEP_RETAIN_MAX 64u /* rules */

struct upkeep_retain;
struct upkeep_retain *upkeep_retain_new(void); /* NULL: no memory */
void upkeep_retain_free(struct upkeep_retain *k); /* NULL-safe */
/* A rule as a policy has it: keep-last=3, keep-every=1000, keep-within=7d, keep-daily=7, keep-weekly=4,
 * keep-best=2:loss[:min|max], keep-step=10,20, keep-if=EXPR; or warn-free=10G, which keeps nothing. -EINVAL; another
 * word is one of a newer vckpt: -BASE_EVERSION; -BASE_ELIMIT: too many. */
int upkeep_retain_add(struct upkeep_retain *k, const char *rule, struct base_error *err);
unsigned upkeep_retain_count(const struct upkeep_retain *k);         /* rules that keep steps */
const char *upkeep_retain_rule(const struct upkeep_retain *k, unsigned i); /* its text */

/* Those that stay whatever the rules are: the highest step, the one that was committed last by its own time, the one
 * that was saved last by the order of the list (what a job goes on from), pinned and tagged ones. */
enum { UPKEEP_RETAIN_HIGHEST = 1u << 0, UPKEEP_RETAIN_NEWEST = 1u << 1, UPKEEP_RETAIN_LAST = 1u << 2,
	UPKEEP_RETAIN_PINNED = 1u << 3, UPKEEP_RETAIN_TAGGED = 1u << 4 };
#define UPKEEP_RETAIN_ALWAYS 5u
extern const char *const upkeep_retain_always[UPKEEP_RETAIN_ALWAYS]; /* names by bit: "highest", ... */

struct upkeep_retain_row {
	struct query_step step; /* borrowed; now_ns is the same in all */
	uint64_t entry;         /* number of its commit entry */
	bool rewritten;         /* that entry is no save: it took the place of one (vckpt prune --thin) */
	uint64_t rules;         /* set by apply: bit i, if rule i keeps it */
	unsigned always;        /* set by apply: bits as above */
};
/* All visible steps of a run, by ascending step. -EINVAL: a rule is about an attribute that no step has, or of which a
 * step has a value that is no number. -ENOMEM. Without rules every row has `always` only. */
int upkeep_retain_apply(const struct upkeep_retain *k, struct upkeep_retain_row *rows, size_t n,
	struct base_error *err);
/* The lowest step that a rule keep-step names and that is not among those rows (by ascending step); PROTO_NONE: they
 * all are. */
uint64_t upkeep_retain_missing(const struct upkeep_retain *k, const struct upkeep_retain_row *rows, size_t n);

#endif
