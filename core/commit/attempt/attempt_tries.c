/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_tries: the name of a job's attempt: `<launch>-<try * 2^44 + step>`.
 *
 * The name says what is saved, not how many calls a rank has made. So a rank that leaves out a save, or makes one
 * twice, never meets the others in an attempt at another step; they meet again at the next step that all of them save.
 *
 * A try is the n-th time that a rank begins the step within the launch. Ranks that learn of each failed save have the
 * same count. A rank may have fewer tries than the others, because its call failed before it began, or because it left
 * one out. It then finds that others have ended the try which it is about to make. Its call fails with their reason:
 * they may have ended it a moment ago, while this rank was on its way. If it took the next try at once, it would wait
 * there for ranks that have given the step up. But this happens once: its next call takes the first try that no one has
 * ended. */
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/commit/attempt/attempt_internal.h"

#define TRIES_MAX ((UINT64_C(1) << (64 - COMMIT_JOB_STEP_BITS)) - 1)     /* the last number of all is no attempt's */

void attempt_name_make(const char *launch, uint64_t step, uint64_t try, char name[static PROTO_ATTEMPT_MAX])
{
	snprintf(name, PROTO_ATTEMPT_MAX, "%s-%llu", launch, (unsigned long long)(try << COMMIT_JOB_STEP_BITS | step));
}

bool attempt_name_take(const struct commit_launch *l, const char *name, uint64_t *ret_step, uint64_t *ret_try)
{
	uint64_t number;

	if (!commit_attempt_name_valid(name) || strncmp(name, l->name, 16) != 0)
		return false;
	errno = 0;
	number = strtoull(name + 17, NULL, 10);
	*ret_step = number & COMMIT_JOB_STEP_MAX;
	*ret_try = number >> COMMIT_JOB_STEP_BITS;
	return errno == 0;
}

/* Index of the step, or of where it belongs. */
static size_t tries_place(const struct commit_launch *l, uint64_t step)
{
	if (l->ntries && l->tries[l->ntries - 1].step < step)
		return l->ntries;
	return base_bisect(i, 0, l->ntries, l->tries[i].step < step);
}

static struct launch_tries *tries_find(const struct commit_launch *l, uint64_t step)
{
	size_t i = tries_place(l, step);

	return i < l->ntries && l->tries[i].step == step ? &l->tries[i] : NULL;
}

static struct launch_tries *tries_of(struct commit_launch *l, uint64_t step)
{
	struct launch_tries *t = tries_find(l, step);
	size_t i = tries_place(l, step);

	if (t)
		return t;
	if (base_array_room(l->tries, l->tries_room, l->ntries + 1) < 0)
		return NULL;
	memmove(&l->tries[i + 1], &l->tries[i], (l->ntries - i) * sizeof *l->tries);
	l->ntries++;
	l->tries[i] = (struct launch_tries){.step = step};
	return &l->tries[i];
}

bool attempt_try_begun(const struct commit_launch *l, uint64_t step, uint64_t try, uint64_t *ret_order)
{
	const struct launch_tries *t = tries_find(l, step);

	if (!t || try >= t->next)
		return false;
	*ret_order = try + 1 == t->next ? t->order : 0;
	return true;
}

/* The first try from `next` on that is not decided; *ret_ended: the last before it that was aborted, or TRIES_MAX. */
static uint64_t try_free(const struct commit_launch *l, uint64_t step, uint64_t next, uint64_t *ret_ended)
{
	char name[PROTO_ATTEMPT_MAX];

	*ret_ended = TRIES_MAX;
	if (!commit_list_launch_newest(l->list, l->name)) /* a newer launch has ended all of them */
		return next;
	for (;; next++) {
		enum commit_attempt_state state;

		attempt_name_make(l->name, step, next, name);
		state = next < TRIES_MAX ? commit_list_attempt(l->list, name, NULL, NULL) : COMMIT_ATTEMPT_UNDECIDED;
		if (state == COMMIT_ATTEMPT_UNDECIDED)
			return next;
		if (state == COMMIT_ATTEMPT_ABORTED)
			*ret_ended = next;
	}
}

/* model: come */
int attempt_try_take(struct commit_attempt *a, struct base_error *err)
{
	struct commit_launch *l = a->launch;
	struct launch_tries *t = tries_of(l, a->step);
	uint64_t ended, free_;

	if (!t)
		return base_no_memory_for(err, "run %s", a->run);
	free_ = try_free(l, a->step, t->next, &ended);
	if (free_ >= TRIES_MAX)
		return base_error_set(err, -EOVERFLOW, "run %s: step %llu was tried too often", a->run,
			(unsigned long long)a->step);
	a->try = ended < TRIES_MAX ? ended : free_;
	t->next = ended < TRIES_MAX ? free_ : free_ + 1;
	a->order = t->order = ++l->order;
	attempt_name_make(l->name, a->step, a->try, a->name);
	return ended < TRIES_MAX ? attempt_outcome_known(a, NULL, err) : 0;
}
