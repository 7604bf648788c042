/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_wait: from the announcement until the list decides the attempt.
 *
 * Rank 0 commits. If nothing has decided the attempt, so do ranks floor(k N / 8), k = 1 ... 7 (equal ones once), each
 * two seconds later than the one before, counted from its own announcement; or at once when it sees that the processes
 * of all before it are gone. Any number of ranks may commit at the same time: they write the same manifest, one entry
 * gets in, and to the others it is their own success. So no rank has to know whether another is slow or dead.
 *
 * Requests: every rank looks up the list's next entry once a poll, first every 1 ms and in the end every 100 ms. If
 * there are more than 1,000 ranks, N of them, those that do not commit slow down to N times 0.1 ms. A writer alone
 * commits in its first round.
 *
 * What fails is tried again, for as long as a rank may be missing at the start (a writer alone: for the patience of a
 * list); then the attempt is undecided. */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/attempt/attempt_internal.h"

#define TAKEOVER_MS 2000u
#define POLL_MIN_US 1000u
#define POLL_MAX_US 100000u
#define POLL_EACH_US 100u       /* between looks at the list by any rank: of 8,192, each looks every 0.8 s */
#define FAILING_WARN_MS 1000u   /* a storage that fails longer is warned of */

/* Is it this rank's turn to commit? */
static bool wait_turn(struct commit_attempt *a)
{
	uint32_t ranks[COMMIT_LAUNCH_LEADERS];
	unsigned n = commit_launch_leaders(a->launch->world, ranks), place = 0;
	char host[PROTO_HOST_MAX];

	while (place < n && ranks[place] != a->launch->rank)
		place++;
	if (place == n)
		return false;
	if (base_monotonic_ms() - a->announced_ms >= (uint64_t)place * TAKEOVER_MS)
		return true;
	launch_watch_look(a->launch->watch);
	for (unsigned i = 0; i < place; i++)
		if (launch_watch_judge(a->launch->watch, ranks[i], a->announced_ms, host) != LAUNCH_RANK_DIED)
			return false;
	return true;
}

static int wait_over(struct commit_attempt *a, struct base_error *err)
{
	char missing[200] = "";
	size_t len = 0;

	for (uint32_t i = 0; a->announcements && i < a->world && len + 20 < sizeof missing; i++)
		if (!a->announcements[i].arena)
			len += (size_t)snprintf(missing + len, sizeof missing - len, "%s%u", len ? ", " : "", i);
	return base_error_set(err, -ETIMEDOUT, "%s: step %llu: undecided so far%s%s", a->run,
		(unsigned long long)a->step, len ? "; not announced: rank " : "", missing);
}

/* While nothing is decided and the storage fails: try again? Yes, until it has failed for as long as a rank may be
 * missing at the start. */
static bool wait_on(struct commit_attempt *a, int r, uint64_t now, const struct base_error *err)
{
	if (r == 0) {
		a->failing_ms = 0;
		a->failing_warned = false;
	}
	if (r == 0 || a->decided || r == -BASE_EDAMAGED || r == -BASE_EVERSION || r == -BASE_EFORMAT)
		return r == 0;
	if (!a->failing_ms)
		a->failing_ms = now;
	if (now - a->failing_ms >= FAILING_WARN_MS && !a->failing_warned) {
		base_warning("%s; it is tried again for %g s", err->text, (double)a->launch->start_ms / 1000);
		a->failing_warned = true;
	}
	return now - a->failing_ms < a->launch->start_ms;
}

/* model: wait */
static int attempt_wait(struct commit_attempt *a, uint64_t end, uint64_t *ret_entry, struct base_error *err)
{
	uint64_t sleep_us = POLL_MIN_US, most_us = base_max(POLL_MAX_US, (uint64_t)a->launch->world * POLL_EACH_US);

	for (;;) {
		uint64_t now;
		bool new = false, lead;
		int r = attempt_outcome(a, ret_entry, err);

		if (r == 0)
			r = attempt_give_up_again(a, ret_entry, err);
		lead = r == 0 && wait_turn(a);
		if (lead)
			r = attempt_lead(a, &new, ret_entry, err);
		if (r == -ETIMEDOUT) /* of the storage: here it would say that only this call's time is over */
			r = err->code = -EIO;
		now = base_monotonic_ms();
		if (r > 0 || !wait_on(a, r, now, err))
			return r < 0 ? r : 0;
		if (now >= end)
			return r < 0 ? r : wait_over(a, err);
		sleep_us = new ? POLL_MIN_US : base_min(sleep_us * 3 / 2, lead ? POLL_MAX_US : most_us);
		usleep((useconds_t)base_min(sleep_us, (end - now) * 1000));
	}
}

int commit_attempt_wait(struct commit_attempt *a, int64_t timeout_ms, uint64_t *ret_entry, struct base_error *err)
{
	struct base_error own = {0};
	uint64_t entry = PROTO_NONE;
	int r;

	if (!err)
		err = &own;
	if (!a->announced && !a->decided)
		return base_error_set(err, -EINVAL, "attempt %s: no part was announced, so nothing can be waited for",
			a->name);
	r = commit_launch_check(a->launch, err);
	if (r < 0)
		return r;
	r = attempt_wait(a, timeout_ms < 0 ? UINT64_MAX : base_monotonic_ms() + (uint64_t)timeout_ms, &entry, err);
	if (r == -BASE_EABORTED)
		commit_attempt_packs_delete(a);
	if (a->decided && a->launch->alone)
		attempt_folder_delete(a);
	if (r < 0 && r != -ETIMEDOUT && !a->decided)
		r = err->code = -BASE_EUNDECIDED;
	if (r == 0 && ret_entry)
		*ret_entry = entry;
	return r;
}
