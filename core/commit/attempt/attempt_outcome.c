/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_outcome: what the list says of an attempt, and how a writer gives it up.
 *
 *     outcome [yes], [no]              attempt_outcome_known       once the entry that decided it is durable
 *     abort entry [fail]               give_up_first               before anything announced is deleted
 *     abort entry, later [fail]        launch_aborts.c             one that could not be written
 *     abort entry, by a person [fail]  commit_attempt_stop          even if ranks are at work on it
 *
 * Without this rank's announcement no one can commit the attempt. So the calls of a rank that has not announced its
 * part return what failed, whether the abort can be written or not. After the announcement only the list says what
 * became of the attempt, and until it does they return -BASE_EUNDECIDED (invariant 5).
 *
 * A rank whose announcement and abort both failed does not wait for its own part: attempt_give_up_again tries the abort
 * again, and then the list has either that abort or, if the announcement had landed after all, a commit. */
#include <stdio.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/attempt/attempt_internal.h"

/* ---- what the list says ---- */

/* The list does not say, for the error that `err` has. */
static int outcome_unknown(const struct commit_attempt *a, int r, struct base_error *err)
{
	return base_error_prefix(err, r, a->announced ? "%s: step %llu: undecided" : "%s: step %llu", a->run,
		(unsigned long long)a->step);
}

/* Entries since the attempt's begin were collected before this list had read them. While the attempt was undecided,
 * with its folder, none was (gc_list.c); so it was decided there, or it began while its writers stood still. If it is
 * not visible it failed, or its step is gone again. */
static bool attempt_jumped(const struct commit_attempt *a)
{
	return a->store->info.list_3 && commit_list_first(a->list) > a->position;
}

bool attempt_overtaken(const struct commit_attempt *a)
{
	return attempt_jumped(a) && commit_list_attempt(a->list, a->name, NULL, NULL) == COMMIT_ATTEMPT_UNDECIDED;
}

/* The abort makes it certain: if the attempt was decided, it decides nothing. */
static int outcome_decide(struct commit_attempt *a, struct base_error *err)
{
	char reason[PROTO_REASON_MAX];
	int r;

	attempt_reason(a, a->launch->rank, store_hostname(), "it paused so long that vckpt gc has collected "
		"entries of the list that it had not read", reason);
	r = commit_list_abort(a->list, a->name, a->launch->rank, reason, err);
	return r < 0 && r != -EALREADY ? outcome_unknown(a, r, err) : 0;
}

/* model: yes, no */
int attempt_outcome_known(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	enum commit_attempt_state state;
	const char *reason;
	int r;

	if (commit_list_damaged(a->list)) {
		base_error_set(err, -BASE_EDAMAGED, "the run's list is damaged");
		return outcome_unknown(a, -BASE_EDAMAGED, err);
	}
	r = commit_list_newer(a->list, NULL, err);
	if (r < 0)
		return outcome_unknown(a, r, err);
	r = attempt_overtaken(a) ? outcome_decide(a, err) : 0;
	if (r < 0)
		return r;
	state = commit_list_attempt(a->list, a->name, &reason, ret_entry);
	if (state == COMMIT_ATTEMPT_UNDECIDED)
		return 0;
	r = commit_list_sync(a->list, err);
	if (r < 0)
		return outcome_unknown(a, r, err);
	a->decided = true;
	if (state == COMMIT_ATTEMPT_COMMITTED)
		return 1;
	return base_error_set(err, -BASE_EABORTED, "%s: step %llu: the attempt was aborted: %s%s", a->run,
		(unsigned long long)a->step, reason && reason[0] ? reason : "no reason was given",
		attempt_jumped(a) ? " (if its step was committed, it was removed since)" : "");
}

int attempt_outcome(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	uint64_t patience;
	int r;

	pthread_mutex_lock(&a->launch->lock);
	patience = commit_list_patience(a->list, 0); /* the caller's own is at work */
	r = commit_list_refresh(a->list, err);
	if (r < 0)
		r = outcome_unknown(a, r, err);
	else
		r = attempt_outcome_known(a, ret_entry, err);
	commit_list_patience(a->list, patience);
	pthread_mutex_unlock(&a->launch->lock);
	return r;
}

/* ---- giving up ---- */

/* Does the attempt need an abort entry? A writer alone that has announced nothing does not: no one will look for it. */
static bool abort_needed(const struct commit_attempt *a)
{
	return !a->launch->alone || a->announced;
}

void attempt_reason(const struct commit_attempt *a, uint32_t rank, const char *host, const char *why,
	char reason[static PROTO_REASON_MAX])
{
	if (!a->launch->alone)
		snprintf(reason, PROTO_REASON_MAX, "rank %u%s%.64s: %.900s", rank, host[0] ? " on " : "", host, why);
	else
		snprintf(reason, PROTO_REASON_MAX, "%s", why);
}

/* model: fail. The abort entry, and what the list says then. *ret_put: 0 it is written now, 1 it was before, -EALREADY
 * there is a commit, another error: it cannot be written; one of this rank's own is kept. */
static int give_up_put(struct commit_attempt *a, uint32_t rank, const char *reason, int *ret_put, uint64_t *ret_entry,
	struct base_error *err)
{
	int r;

	pthread_mutex_lock(&a->launch->lock);
	*ret_put = commit_list_abort(a->list, a->name, rank, reason, NULL);
	if (*ret_put >= 0 || *ret_put == -EALREADY) {
		r = attempt_outcome_known(a, ret_entry, err);
	} else {
		base_error_set(err, *ret_put, "the abort cannot be written (%s): %s", base_error_name(*ret_put),
			reason);
		r = outcome_unknown(a, *ret_put, err);
		if (rank == a->launch->rank)
			commit_launch_abort_keep(a->launch, a->name, reason);
	}
	pthread_mutex_unlock(&a->launch->lock);
	return r;
}

/* `rank` (on `host`, if that is known) is why the attempt is given up. 1: it is committed, for all that.
 * -BASE_EABORTED: it is aborted, for this reason or (*ret_first false) an earlier one. Another error: undecided. */
static int give_up_first(struct commit_attempt *a, uint32_t rank, const char *host, const char *why, bool *ret_first,
	uint64_t *ret_entry, struct base_error *err)
{
	char reason[PROTO_REASON_MAX];
	int put = 0, r;

	attempt_reason(a, rank, host, why, reason);
	if (abort_needed(a))
		r = give_up_put(a, rank, reason, &put, ret_entry, err);
	else
		r = base_error_set(err, -BASE_EABORTED, "%s: step %llu: %s", a->run, (unsigned long long)a->step, why);
	if (put == 0) /* ours: the others leave the folder alone */
		attempt_folder_delete(a);
	if (r == -BASE_EABORTED)
		commit_attempt_packs_delete(a);
	*ret_first = put == 0;
	return r;
}

int attempt_give_up(struct commit_attempt *a, uint32_t rank, const char *host, const char *why, uint64_t *ret_entry,
	struct base_error *err)
{
	bool first;

	return give_up_first(a, rank, host, why, &first, ret_entry, err);
}

/* The error stays what it was, unless another reason came first: that may well have been what made this rank fail. */
int attempt_give_up_own(struct commit_attempt *a, int code, const char *why, uint64_t *ret_entry,
	struct base_error *err)
{
	struct base_error e = {0};
	bool first;
	int r = give_up_first(a, a->launch->rank, store_hostname(), why, &first, ret_entry, &e);

	if (r == 1)
		return 1;
	if (r != -BASE_EABORTED && !a->announced)
		return base_error_set(err, code, "%.800s; the abort is written to the run's list once that can be done",
			why);
	if (r == -BASE_EABORTED && first)
		return base_error_set(err, code, "%s", a->launch->world > 1 ? e.text : why);
	return base_error_set(err, r == -BASE_EABORTED ? r : -BASE_EUNDECIDED, "%s", e.text);
}

/* Is this rank giving the attempt up? Then once more: 1, -BASE_EABORTED or undecided, as attempt_give_up. 0: it is
 * not. */
int attempt_give_up_again(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	int r = 0;

	pthread_mutex_lock(&a->launch->lock);
	if (commit_launch_abort_kept(a->launch, a->name)) {
		r = commit_launch_aborts_put(a->launch);
		if (r < 0)
			r = outcome_unknown(a, base_error_set(err, r, "the abort cannot be written (%s)",
				base_error_name(r)), err);
		else
			r = attempt_outcome_known(a, ret_entry, err);
	}
	pthread_mutex_unlock(&a->launch->lock);
	if (r == -BASE_EABORTED)
		commit_attempt_packs_delete(a);
	return r;
}

/* model: no */
int commit_attempt_abort(struct commit_attempt *a, const char *reason, uint64_t *ret_entry, struct base_error *err)
{
	struct base_error why = {0};
	uint64_t entry = PROTO_NONE;
	int r = commit_launch_check(a->launch, err);

	if (r < 0)
		return r;
	if (!reason)
		reason = "the run's list could not be read or written in time";
	r = a->decided && abort_needed(a)
		? attempt_outcome(a, &entry, &why)
		: attempt_give_up(a, a->launch->rank, store_hostname(), reason, &entry, &why);
	if ((r == 1 || r == -BASE_EABORTED) && a->launch->alone)
		attempt_folder_delete(a);
	if (r == 1) {
		if (ret_entry)
			*ret_entry = entry;
		return 0;
	}
	if (r == -BASE_EABORTED) {
		commit_attempt_packs_delete(a);
		store_reserve_restore(a->store);
		return base_error_set(err, r, "%s", why.text);
	}
	if (!a->announced) { /* no one can commit it */
		commit_attempt_packs_delete(a);
		a->decided = true; /* as far as this rank can */
	}
	base_warning("%s: attempt %s: the abort could not be written (%s); it is tried again", a->store->path, a->name,
		why.text);
	return base_error_set(err, a->announced ? -BASE_EUNDECIDED : -BASE_EABORTED, "%s", why.text);
}

/* ---- by a person ---- */

/* What the list says after a put that failed with r. */
static int stop_state(const struct commit_list *l, const char *attempt, int r)
{
	switch (commit_list_attempt(l, attempt, NULL, NULL)) {
	case COMMIT_ATTEMPT_COMMITTED: return -EALREADY;
	case COMMIT_ATTEMPT_ABORTED: return 0;
	case COMMIT_ATTEMPT_UNDECIDED: break;
	}
	return r;
}

/* model: fail */
int commit_attempt_stop(struct store *s, struct commit_list *l, const char *attempt, const char *reason,
	uint64_t *ret_entry, struct base_error *err)
{
	const char *run = commit_list_run(l);
	int r = commit_list_abort(l, attempt, 0, reason, err);

	if (commit_list_put_open(l, r)) {
		if (!commit_list_put_known(l)) {
			base_error_prefix(err, r, "run %s: undecided whether attempt %s is aborted (see "
				"vckpt ls --incoming)", run, attempt);
			return err->code = -BASE_EUNDECIDED;
		}
		r = stop_state(l, attempt, r);
	}
	if (r == -EALREADY)
		return base_error_set(err, r,
			"run %s: attempt %s has committed: its step is visible (vckpt rm removes it)", run, attempt);
	if (r < 0)
		return r;
	commit_list_attempt(l, attempt, NULL, ret_entry);
	commit_folder_delete(s, run, attempt, NULL);
	store_reserve_restore(s);
	return r;
}
