/* SPDX-License-Identifier: Apache-2.0
 *
 * list_replay: the rules by which entries become what is visible (inline `replay` of the model).
 *
 * Decided attempts are in a hash table by name. What a launch entry aborts is not recorded: an attempt was aborted by a
 * launch if its own launch has an entry here that is not the newest one, which commit_list_attempt looks up. An attempt
 * whose launch has no entry (an import) is aborted by no launch. A launch counts from its first entry; a second entry
 * of the same launch changes nothing.
 *
 * An entry is applied whole or not at all: whatever it needs is allocated before anything is changed, so after -ENOMEM
 * a list is as it was before that entry, and can go on later. A view that had half of one would be put into the next
 * snapshot.
 *
 * list_steps.c has the visible steps. Commit entries that counted are in an array by entry number, in which `remove`
 * finds its step by bisection. */
#include "core/commit/list/list_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"

#define LAUNCH_REASON "a newer launch of the run began"

/* ---- attempts ---- */

static uint32_t attempt_hash(const char *name) { return base_table_hash(name, strlen(name)); }

static struct list_attempt *attempt_find(const struct commit_list *l, const char *name)
{
	uint32_t hash = attempt_hash(name), i;
	size_t at = 0;

	while ((i = base_table_next(&l->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(l->attempts[i].name, name) == 0)
			return &l->attempts[i];
	return NULL;
}

int list_attempts_reserve(struct commit_list *l, size_t more)
{
	int r = base_array_room(l->attempts, l->attempts_size, l->nattempts + more);

	return r < 0 ? r : base_table_reserve(&l->by_name, more);
}

/* The attempt is decided from here on, unless it was before. There is room (list_attempts_reserve). reason: taken over,
 * may be NULL. */
static void attempt_decide(struct commit_list *l, const char *name, enum commit_attempt_state state, uint64_t entry,
	char *reason)
{
	struct list_attempt *a;

	if (attempt_find(l, name)) {
		free(reason);
		return;
	}
	a = &l->attempts[l->nattempts];
	*a = (struct list_attempt){.state = state, .entry = entry, .reason = reason};
	/* zeroes follow; a snapshot comes here ten thousand times */
	memcpy(a->name, name, strnlen(name, sizeof a->name - 1));
	base_table_add(&l->by_name, attempt_hash(a->name), (uint32_t)l->nattempts++);
}

const struct commit_list_launch *commit_list_launch(const struct commit_list *l, const char id[static 16])
{
	uint32_t hash = base_table_hash(id, 16), i;
	size_t at = 0;

	while ((i = base_table_next(&l->by_launch, hash, &at)) != BASE_TABLE_NONE)
		if (memcmp(l->launches[i].launch, id, 16) == 0)
			return &l->launches[i];
	return NULL;
}

/* Of a launch from before the first entry. If its number is not known, the one before that entry is taken. */
static uint64_t launch_after_before(const struct commit_list *l, const struct list_id *own)
{
	if (own + 1 < l->before + l->nbefore)
		return own[1].entry == PROTO_NONE ? l->first - 1 : own[1].entry;
	return l->nlaunches ? l->launches[0].entry : PROTO_NONE;
}

/* The number of the launch entry that aborts what launch `name[0..16)` has not decided, or PROTO_NONE. */
static uint64_t launch_after(const struct commit_list *l, const char *name)
{
	const struct commit_list_launch *own = strnlen(name, 16) == 16 ? commit_list_launch(l, name) : NULL;
	const struct list_id *before;

	if (own)
		return own + 1 < l->launches + l->nlaunches ? own[1].entry : PROTO_NONE;
	before = l->nbefore && strnlen(name, 16) == 16 ? list_launch_before(l, name) : NULL;
	return before ? launch_after_before(l, before) : PROTO_NONE;
}

void list_attempt_committed(struct commit_list *l, const char *name, uint64_t entry)
{
	attempt_decide(l, name, COMMIT_ATTEMPT_COMMITTED, entry, NULL);
}

enum commit_attempt_state commit_list_attempt(const struct commit_list *l, const char *attempt, const char **ret_reason,
	uint64_t *ret_entry)
{
	const struct list_attempt *a = attempt_find(l, attempt);
	uint64_t newer = a ? PROTO_NONE : launch_after(l, attempt);

	if (ret_reason)
		*ret_reason = a ? a->reason : newer != PROTO_NONE ? LAUNCH_REASON : NULL;
	if (ret_entry)
		*ret_entry = a ? a->entry : newer;
	if (a)
		return a->state;
	return newer != PROTO_NONE ? COMMIT_ATTEMPT_ABORTED : COMMIT_ATTEMPT_UNDECIDED;
}

/* ---- visible steps ---- */

uint64_t commit_list_commit_step(const struct commit_list *l, uint64_t entry)
{
	size_t at = base_bisect(i, 0, l->ncommits, l->commits[i].entry < entry);

	return at < l->ncommits && l->commits[at].entry == entry ? l->commits[at].step : PROTO_NONE;
}

const struct commit_list_step *list_step_of_entry(const struct commit_list *l, uint64_t entry)
{
	uint64_t step = commit_list_commit_step(l, entry);
	const struct commit_list_step *s = step == PROTO_NONE ? NULL : commit_list_find(l, step);

	return s && s->entry == entry ? s : NULL;
}

bool commit_list_entry_live(const struct commit_list *l, uint64_t entry)
{
	return list_step_of_entry(l, entry) != NULL;
}

/* A reader that could read such an entry reads the list again without it, so that all readers see the same. */
static int apply_accept(struct commit_list *l, const struct proto_entry *e)
{
	if (list_accepts_reserve(l, e->naccepts) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < e->naccepts; i++)
		if (list_accept_add(l, e->accepts[i]))
			l->again |= e->accepts[i] >= l->first || e->accepts[i] % COMMIT_SNAPSHOT_EVERY == 0;
	return 0;
}

/* ---- entries ---- */

/* model: COMMIT. There: `VALID(vx) && vl[STEP(vx)] == rep[vN]`. */
static int apply_commit(struct commit_list *l, uint64_t n, struct list_hold *h)
{
	const struct proto_commit *c = &h->entry.commit;
	const struct commit_list_step *now = commit_list_find(l, c->step);
	bool back = l->nsteps == 0 || l->steps[l->nsteps - 1].step <= c->step;

	if (commit_list_attempt(l, c->attempt, NULL, NULL) != COMMIT_ATTEMPT_UNDECIDED)
		return 0;
	if (c->replaces != (now ? now->entry : PROTO_NONE))
		return 0;
	if (list_attempts_reserve(l, 1) < 0 || list_steps_reserve(l, 1, back) < 0 || list_dropped_reserve(l, 1) < 0 ||
		list_facts_reserve(&l->facts, c->facts, c->facts != NULL) < 0)
		return -ENOMEM;
	attempt_decide(l, c->attempt, COMMIT_ATTEMPT_COMMITTED, n, NULL);
	if (c->replaces != PROTO_NONE) {
		list_dropped_add(l, c->replaces, n);
		list_facts_drop(l, c->replaces, n);
	}
	list_step_set(l, n, c, h);
	if (c->facts)
		list_facts_say(l, n, c->facts, n, h);
	return 0;
}

/* model: ABORT. Counts only while the attempt has not committed. */
static int apply_abort(struct commit_list *l, uint64_t n, const struct proto_entry *e)
{
	char *reason = e->reason ? strdup(e->reason) : NULL;

	if ((e->reason && !reason) || list_attempts_reserve(l, 1) < 0) {
		free(reason);
		return -ENOMEM;
	}
	attempt_decide(l, e->attempt, COMMIT_ATTEMPT_ABORTED, n, reason);
	return 0;
}

/* model: LAUNCH */
static int apply_launch(struct commit_list *l, uint64_t n, const struct proto_entry *e)
{
	struct commit_list_launch *x;
	bool same = true;

	if (commit_list_launch(l, e->launch) || commit_list_launch_used(l, e->launch))
		return 0;
	if (l->how.compare && e->list_2 && !commit_list_skips(l) && list_launch_compare(l, e, &same) < 0)
		return -ENOMEM;
	if (!same && !l->lie)
		l->lie = n;
	if (base_array_room(l->launches, l->launches_size, l->nlaunches + 1) < 0
	    || base_table_reserve(&l->by_launch, 1) < 0)
		return -ENOMEM;
	base_table_add(&l->by_launch, base_table_hash(e->launch, 16), (uint32_t)l->nlaunches);
	x = &l->launches[l->nlaunches++];
	*x = (struct commit_list_launch){.entry = n, .newest_step = e->newest_step};
	snprintf(x->launch, sizeof x->launch, "%.16s", e->launch);
	memcpy(x->nonce, e->nonce, sizeof x->nonce);
	return 0;
}

/* model: REMOVE. Names the commit entry, not only the step. */
static int apply_remove(struct commit_list *l, uint64_t n, const struct proto_entry *e)
{
	const struct commit_list_step *s = list_step_of_entry(l, e->removes);
	bool rest = l->rest && e->removes < l->rest; /* rest_gone finds out */

	if (!s && !rest)
		return 0;
	if (list_dropped_reserve(l, 1) < 0)
		return -ENOMEM;
	list_dropped_add(l, e->removes, n);
	list_facts_drop(l, e->removes, n);
	if (s)
		list_step_remove(l, s->step);
	return 0;
}

/* model: SNAPSH. A reader of everything before it learns nothing new; after a skipped entry what was visible comes from
 * the snapshot (its writer knew the entry). If one that it goes on from is damaged, a later one may do. */
static int apply_snapshot(struct commit_list *l, uint64_t n, struct list_hold *h)
{
	bool same = true;
	int r;

	if (l->gap) {
		r = list_adopt(l, h, false, NULL);
		if (r != -BASE_EDAMAGED)
			return r;
	}
	r = l->how.compare && !l->gap ? list_snapshot_compare(l, &h->entry, &same) : 0;
	if (r < 0 || list_node_reserve(l, 1) < 0)
		return -ENOMEM;
	if (!same && !l->lie)
		l->lie = n;
	list_node_add(l, n, &h->entry);
	return 0;
}

/* Takes `e` over, whatever it returns. NULL: out of memory. */
static struct list_hold *hold_new(struct proto_entry *e)
{
	struct list_hold *h = calloc(1, sizeof *h);

	if (h)
		*h = (struct list_hold){*e, 1};
	else
		proto_entry_release(e);
	*e = (struct proto_entry){0};
	return h;
}

/* model: replay */
int list_apply(struct commit_list *l, uint64_t n, struct proto_entry *e)
{
	struct list_hold *h = hold_new(e);
	int r = 0;

	if (!h)
		return -ENOMEM;
	switch (h->entry.kind) { /* another one is of a later version, and decides nothing */
	case PROTO_ENTRY_LAUNCH: r = apply_launch(l, n, &h->entry); break;
	case PROTO_ENTRY_COMMIT: r = apply_commit(l, n, h); break;
	case PROTO_ENTRY_ABORT: r = apply_abort(l, n, &h->entry); break;
	case PROTO_ENTRY_REMOVE: r = apply_remove(l, n, &h->entry); break;
	case PROTO_ENTRY_SNAPSHOT: r = apply_snapshot(l, n, h); break;
	case PROTO_ENTRY_ACCEPT: r = apply_accept(l, &h->entry); break;
	case PROTO_ENTRY_FACTS: r = list_facts_apply(l, n, h); break;
	case PROTO_ENTRY_COLLECTED: break; /* never comes here: list_jump */
	}
	list_hold_drop(h);
	return r;
}

/* model: SNAPSH */
int list_start(struct commit_list *l, uint64_t n, struct proto_entry *e, struct base_error *err)
{
	struct list_hold *h = hold_new(e);
	int r;

	if (!h)
		return -ENOMEM;
	r = list_adopt(l, h, l->how.newest, err);
	if (r == 0) {
		l->tail = h->entry.self;
		l->first = n;
		l->next = n + 1;
		l->launch_before = h->entry.newest_launch;
		l->before_known = false;
	}
	list_hold_drop(h);
	return r;
}

void list_state_release(struct commit_list *l)
{
	list_steps_clear(l);
	for (size_t i = 0; i < l->nattempts; i++)
		free(l->attempts[i].reason);
	list_skips_release(l);
	list_numbers_release(l);
	list_facts_release(&l->facts);
	free(l->steps);
	free(l->holds);
	free(l->late);
	free(l->late_holds);
	free(l->commits);
	free(l->nodes);
	free(l->dropped);
	free(l->before);
	free(l->attempts);
	base_table_release(&l->by_name);
	free(l->launches);
	base_table_release(&l->by_launch);
}
