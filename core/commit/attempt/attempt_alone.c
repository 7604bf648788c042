/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_alone: a writer alone (an import): a launch of one rank with a random name, one attempt, and no launch entry.
 * So no launch of a job aborts it, and it aborts no attempt of others. Once its heartbeat has stopped, the collector or
 * a person ends it. `begin` says how far it had read the list. */
#include <stdio.h>

#include "core/base/cleanup.h"
#include "core/commit/attempt/attempt_internal.h"

/* Unnumbered saves of two writers would take the same number. */
static int run_is_free(struct store *s, const char *run, struct base_error *err)
{
	base_cleanup_free struct commit_launch_info *infos = NULL;
	size_t n;
	int r = commit_launches(s, &infos, &n, err);

	for (size_t i = 0; r == 0 && i < n; i++)
		if (infos[i].state != COMMIT_DEAD && strcmp(infos[i].run, run) == 0)
			r = base_error_set(err, -BASE_EBUSY,
				"run %s: another writer%s on %s: give the number of the step (vckpt gc removes "
				"what a dead writer left)",
				run, infos[i].state == COMMIT_ALIVE ? " is at work" : " may be at work", infos[i].host);
	return r;
}

int attempt_alone_name(struct commit_attempt *a, uint64_t wanted, struct base_error *err)
{
	const struct commit_list_step *latest = commit_list_latest(a->list);

	snprintf(a->name, sizeof a->name, "%s-%llu", a->launch->name, (unsigned long long)a->count);
	a->unnumbered = wanted == PROTO_NONE;
	if (a->unnumbered && latest && latest->step >= INT64_MAX)
		return base_error_set(err, -EOVERFLOW, "run %s: there is no step after %llu", a->run,
			(unsigned long long)latest->step);
	a->step = !a->unnumbered ? wanted : latest ? latest->step + 1 : 0;
	if (a->step > INT64_MAX)
		return base_error_set(err, -EINVAL, "run %s: steps go from 0 to 2^63-1", a->run);
	return 0;
}

int commit_attempt_begin_alone(struct store *s, const char *run, const struct commit_attempt_save *o,
	struct commit_attempt **ret_a, struct base_error *err)
{
	struct commit_launch *l;
	int r;

	if (!run || !proto_run_valid(run))
		return base_error_set(err, -EINVAL, "\"%s\" is not the name of a run", run ? run : "");
	r = o->step == PROTO_NONE ? run_is_free(s, run, err) : 0;
	if (r == 0)
		r = commit_launch_open_alone(s, run, o->list, &l, err);
	if (r < 0)
		return r;
	r = commit_attempt_begin(l, o, ret_a, err);
	if (r < 0)
		commit_launch_close(l);
	else
		(*ret_a)->owns_launch = true;
	return r;
}
