/* SPDX-License-Identifier: Apache-2.0
 *
 * list_steps: what is visible, in an array by step; training appends at its end. Other writers may commit hundreds of
 * thousands of steps in any order, and moving half of the array for each would take hours. So while entries are read, a
 * step that belongs elsewhere waits in a short second array until that is full, and a step that is removed only loses
 * its hold. list_steps_settle puts both right before steps are counted or gone through. */
#include "core/commit/list/list_internal.h"

#include "core/base/array.h"
#include "core/base/bisect.h"

#define LATE_MAX 512u /* short enough to move, long enough that merging it is rare */

struct step_at { struct commit_list_step *step; struct list_hold **hold; };

void list_hold_drop(struct list_hold *h)
{
	if (h && --h->users == 0) {
		proto_entry_release(&h->entry);
		free(h);
	}
}

/* Index of the step in an array, or of where it belongs. */
static size_t step_place(const struct commit_list_step *steps, size_t n, uint64_t step)
{
	if (n && steps[n - 1].step < step)
		return n;
	return base_bisect(i, 0, n, steps[i].step < step);
}

/* Where the step is, visible or not any more; step NULL: nowhere. */
static struct step_at step_find(const struct commit_list *l, uint64_t step)
{
	size_t i = step_place(l->steps, l->nsteps, step);

	if (i < l->nsteps && l->steps[i].step == step)
		return (struct step_at){&l->steps[i], &l->holds[i]};
	i = step_place(l->late, l->nlate, step);
	if (i < l->nlate && l->late[i].step == step)
		return (struct step_at){&l->late[i], &l->late_holds[i]};
	return (struct step_at){0};
}

const struct commit_list_step *commit_list_find(const struct commit_list *l, uint64_t step)
{
	struct step_at at = step_find(l, step);

	return at.step && *at.hold ? at.step : NULL;
}

int list_steps_reserve(struct commit_list *l, size_t n, bool back)
{
	size_t size = l->steps_size, late_size = l->late_size, all = l->nsteps + l->nlate + n;

	if (base_array_room(l->commits, l->commits_size, l->ncommits + n) < 0
	    || base_array_room(l->holds, size, all) < 0 || base_array_room(l->steps, l->steps_size, all) < 0)
		return -ENOMEM;
	if (back)
		return 0;
	if (base_array_room(l->late_holds, late_size, l->nlate + n) < 0)
		return -ENOMEM;
	return base_array_room(l->late, l->late_size, l->nlate + n);
}

/* Late steps into the array, from its end on; there is room. */
static void late_merge(struct commit_list *l)
{
	size_t i = l->nsteps, j = l->nlate;

	l->nsteps += l->nlate;
	while (j > 0) {
		bool late = i == 0 || l->steps[i - 1].step < l->late[j - 1].step;
		size_t to = i + j - 1;

		l->steps[to] = late ? l->late[j - 1] : l->steps[i - 1];
		l->holds[to] = late ? l->late_holds[j - 1] : l->holds[i - 1];
		j -= late;
		i -= !late;
	}
	l->nlate = 0;
}

static void late_insert(struct commit_list *l, const struct commit_list_step *s, struct list_hold *h)
{
	size_t i;

	if (l->nlate == LATE_MAX)
		late_merge(l);
	i = step_place(l->late, l->nlate, s->step);
	memmove(&l->late[i + 1], &l->late[i], (l->nlate - i) * sizeof *l->late);
	memmove(&l->late_holds[i + 1], &l->late_holds[i], (l->nlate - i) * sizeof *l->late_holds);
	l->late[i] = *s;
	l->late_holds[i] = h;
	l->nlate++;
}

void list_step_set(struct commit_list *l, uint64_t n, const struct proto_commit *c, struct list_hold *h)
{
	struct commit_list_step s = {.step = c->step, .entry = n, .commit = *c};
	struct step_at at = step_find(l, c->step);

	s.commit.facts = NULL; /* its facts now: list_facts.c */
	if (at.step) {
		l->ngone -= !*at.hold;
		list_hold_drop(*at.hold);
		*at.step = s;
		*at.hold = h;
	} else if (l->nsteps == 0 || l->steps[l->nsteps - 1].step < c->step) {
		l->steps[l->nsteps] = s;
		l->holds[l->nsteps++] = h;
	} else {
		late_insert(l, &s, h);
	}
	h->users++;
	l->commits[l->ncommits++] = (struct list_commit_key){.entry = n, .step = c->step};
}

void list_step_remove(struct commit_list *l, uint64_t step)
{
	struct step_at at = step_find(l, step);

	list_hold_drop(*at.hold);
	*at.hold = NULL;
	l->ngone++;
}

void list_steps_clear(struct commit_list *l)
{
	for (size_t i = 0; i < l->nsteps; i++)
		list_hold_drop(l->holds[i]);
	for (size_t i = 0; i < l->nlate; i++)
		list_hold_drop(l->late_holds[i]);
	l->nsteps = l->nlate = l->ngone = l->ncommits = 0;
}

void list_steps_settle(struct commit_list *l)
{
	size_t n = 0;

	late_merge(l);
	for (size_t i = 0; l->ngone && i < l->nsteps; i++) {
		if (!l->holds[i])
			continue;
		l->steps[n] = l->steps[i];
		l->holds[n++] = l->holds[i];
	}
	if (l->ngone)
		l->nsteps = n;
	l->ngone = 0;
	free(l->late);
	free(l->late_holds);
	l->late = NULL;
	l->late_holds = NULL;
	l->late_size = 0;
}
