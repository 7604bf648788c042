/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_rewrite: a step that is there, written anew by a writer alone (vckpt prune --thin). It is an attempt like any
 * other, but this writer has the announcements of all ranks of the step, in memory, and the commit entry keeps the time
 * of the step and its facts. The name of the attempt shows that no job saved the step last by it. */
#include <stdlib.h>
#include <string.h>

#include "core/commit/attempt/attempt_internal.h"

bool commit_attempt_rewritten(const char *attempt)
{
	const char *count = strchr(attempt, '-');

	return count && strtoull(count + 1, NULL, 10) == COMMIT_ATTEMPT_REWRITES;
}

int commit_attempt_rewrite(struct commit_attempt *a, const struct commit_attempt_rewrite *w, uint64_t *ret_entry,
	struct base_error *err)
{
	struct proto_announcement *announced = a->announcements;
	uint64_t entry = PROTO_NONE;
	int r = commit_launch_check(a->launch, err);

	if (r < 0)
		return r;
	if (a->announced || a->decided || !commit_attempt_rewritten(a->name))
		return base_error_set(err, -EINVAL, "attempt %s cannot rewrite a step", a->name);
	for (uint32_t i = 0; i < w->n; i++) {
		const char *host = w->all[i].host;

		if (announced && announced[i].arena)
			w->all[i] = announced[i];
		w->all[i].host = host;
		w->all[i].run = a->run;
		w->all[i].attempt = a->name;
		w->all[i].step = a->step;
		w->all[i].world = w->n;
	}
	a->rewrite = w;
	a->announcements = w->all;
	a->nannouncements = w->n;
	a->announced = true;
	r = attempt_commit_all(a, &entry, err);
	a->rewrite = NULL;
	a->announcements = announced;
	a->nannouncements = 0;
	if (r == -BASE_EABORTED)
		commit_attempt_packs_delete(a);
	if (a->decided)
		attempt_folder_delete(a);
	*ret_entry = entry;
	return r == -EEXIST ? err->code = -ESTALE : r < 0 ? r : 0;
}
