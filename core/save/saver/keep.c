/* SPDX-License-Identifier: Apache-2.0
 *
 * keep: which steps stay (docs/prune.md, "In a job"). After each commit, which is durable by then, rank 0's persister
 * applies the rules of the saver's options and those of the run's policy, together: a step stays if any of them keeps
 * it. Callers do not wait for that. A failure is a warning, once for each reason, and never one of a save. */
#include <inttypes.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/plural.h"
#include "core/save/saver/saver_internal.h"

int saver_keep_init(struct saver_keep *k, const char *const *rules, size_t n, struct base_error *err)
{
	int r = 0;

	k->rules = upkeep_retain_new();
	if (!k->rules)
		return base_no_memory(err);
	for (size_t i = 0; r == 0 && i < n; i++)
		r = upkeep_retain_add(k->rules, rules[i], err);
	return r;
}

void saver_keep_release(struct saver_keep *k)
{
	upkeep_retain_free(k->rules);
}

/* The list that the persister has of the run, read on to its end. */
static int keep_list(struct save_saver *s, struct base_error *err)
{
	int r = s->past.list ? commit_list_refresh(s->past.list, err)
		: commit_list_open_newest(s->store, s->run, &s->past.list, err);

	return r < 0 ? r : 0;
}

/* The rules of the options, and of the policy as it is now. */
static int keep_rules(struct save_saver *s, struct upkeep_retain *k, struct base_error *err)
{
	int r = 0;

	for (unsigned i = 0; r == 0 && i < upkeep_retain_count(s->keep.rules); i++)
		r = upkeep_retain_add(k, upkeep_retain_rule(s->keep.rules, i), err);
	if (r == 0)
		r = upkeep_policy_add(s->past.list, k, err);
	return r < 0 ? r : 0;
}

static int keep_remove(struct save_saver *s, const struct upkeep_retain *k, uint64_t *ret_removed,
	struct base_error *err)
{
	struct upkeep_prune *p = NULL;
	int r = upkeep_retain_count(k) ? commit_list_know_all(s->past.list, err) : 1;

	if (r == 0)
		r = upkeep_prune_new(s->past.list, k, base_realtime_ns(), &p, err);
	if (r == 0)
		r = upkeep_prune_all(p, "prune: no rule of the job or its policy keeps it", ret_removed, err);
	upkeep_prune_free(p);
	return r < 0 ? r : 0;
}

uint64_t saver_keep_warn_free(struct save_saver *s)
{
	if (s->options.warn_free)
		return s->options.warn_free;
	return s->past.list || keep_list(s, NULL) == 0 ? upkeep_policy_warn_free(s->past.list) : 0;
}

void saver_keep_apply(struct save_saver *s)
{
	struct upkeep_retain *k = upkeep_retain_new();
	struct base_error err = {0};
	uint64_t removed = 0;
	int r = k ? keep_list(s, &err) : base_no_memory(&err);

	if (r == 0)
		r = keep_rules(s, k, &err);
	if (r == 0)
		r = keep_remove(s, k, &removed, &err);
	upkeep_retain_free(k);
	if (removed)
		base_info("run %s: removed %" PRIu64 " %s that no rule keeps", s->run, removed,
			base_plural(removed, "step", "steps"));
	if (r < 0 && strcmp(err.text, s->keep.err.text) != 0)
		base_warning("run %s: old steps are not removed: %s", s->run,
			err.text[0] ? err.text : base_error_name(r));
	s->keep.err = r < 0 ? err : (struct base_error){0};
}
