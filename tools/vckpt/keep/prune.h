/* SPDX-License-Identifier: Apache-2.0
 *
 * prune: what the files of vckpt prune share. First everything is planned, for all runs; then it is printed; then, with
 * --yes or an answer, steps are removed and thinned. */
#ifndef TOOLS_VCKPT_KEEP_PRUNE_H
#define TOOLS_VCKPT_KEEP_PRUNE_H

#include "core/upkeep/prune.h"
#include "tools/vckpt/keep/keep.h"

struct prune_run {
	const char *name;
	struct commit_list *list;
	const struct upkeep_retain *rules; /* of the command, or the policy's, or empty */
	struct upkeep_retain *policy;      /* owned; NULL: the command's are used */
	bool removes;                      /* false: there are no rules, and no step goes */
	struct upkeep_prune *plan;
};

/* A step that goes, or one that is thinned: it keeps these packs. */
struct prune_step {
	const struct prune_run *run;
	uint64_t step, entry, bytes;
	bool thinned;
	char **packs; size_t npacks; /* sorted */
};

struct prune {
	struct tool *t;
	struct keep keep;
	const char *thin;           /* a component; NULL */
	uint64_t older_ns;
	bool dry_run, yes;
	int64_t now_ns;
	char **names; size_t nnames; /* of all runs */
	struct prune_run *runs; size_t nruns;
	struct prune_step *steps; size_t nsteps; /* by run and step */
	size_t nremove, nthin;
	const struct prune_step **thins; /* by run and entry */
	bool frees; uint64_t freed_bytes;
	json_t *steps_json, *runs_json, *removed, *thinned, *kept, *failed; /* of --json */
};

/* prune_plan.c: what goes and what is thinned, and what that frees. 0 or an exit code. */
int prune_plan(struct prune *p);
/* NULL: the step stays as it is. */
const struct prune_step *prune_step_find(const struct prune *p, const char *run, uint64_t step);
void prune_step_release(struct prune_step *s);
/* prune_print.c: what stays and why, and what goes */
int prune_print_plan(struct prune *p);

#endif
