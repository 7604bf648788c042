/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_missing: a committing rank judges the ranks whose parts are missing (launch_watch.c), and aborts the attempt
 * in the name of one that will not come. A rank that was wrongly given up finds the abort as the list's next entry, and
 * nothing that it does afterwards counts. */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/attempt/attempt_internal.h"

#define JUDGE_SHARE 20u         /* one part in so many of the time goes into judging those that are missing */
/* They are judged at least twice a second, and eight times in a heartbeat time-out, or the watch would think that this
 * rank itself had been suspended. */
#define JUDGE_MAX_MS 500u
#define MISSING_NAMED 5u        /* ranks, in a warning */

static void missing_why(const struct commit_attempt *a, uint32_t rank, enum launch_rank_state state,
	char why[static 200])
{
	const struct commit_launch *l = a->launch;

	switch (state) {
	case LAUNCH_RANK_FINE:
	case LAUNCH_RANK_AWAITED: why[0] = 0; return;
	case LAUNCH_RANK_LATE:
		snprintf(why, 200, "it has not announced its part %g s after rank %u on %.64s did, which "
			"is the deadline; its heartbeat moved %g s ago", (double)l->deadline_ms / 1000, l->rank,
			store_hostname(), (double)launch_watch_still_ms(l->watch, rank) / 1000);
		return;
	case LAUNCH_RANK_NEVER:
		snprintf(why, 200, "it did not come within %g s (seen by rank %u on %.64s): see whether it was "
			"started, and start the job again", (double)l->start_ms / 1000, l->rank, store_hostname());
		return;
	case LAUNCH_RANK_DIED:
		snprintf(why, 200, "its process is gone (seen by rank %u on %.64s): start the job again", l->rank,
			store_hostname());
		return;
	case LAUNCH_RANK_STOPPED:
		snprintf(why, 200, "its heartbeat stood still for %g s (seen by rank %u on %.64s): unless it goes on, "
			"start the job again",
			(double)launch_watch_limit_ms(l->watch, rank) / 1000, l->rank, store_hostname());
		return;
	}
}

/* Of the committing ranks that wait, only the first in turn warns. */
static bool missing_warner(const struct commit_attempt *a)
{
	uint32_t ranks[COMMIT_LAUNCH_LEADERS];
	unsigned n = commit_launch_leaders(a->launch->world, ranks);

	for (unsigned i = 0; i < n && ranks[i] != a->launch->rank; i++)
		if (a->announcements[ranks[i]].arena)
			return false;
	return true;
}

/* A wait for a rank that lives and never saves has no end, and no one would see why: this warns, once for each attempt.
 * Whether a rank of another host lives is not known, only when its heartbeat moved. */
static void missing_warn(struct commit_attempt *a)
{
	char names[MISSING_NAMED * (PROTO_HOST_MAX + 80)] = "", host[PROTO_HOST_MAX];
	uint32_t n = 0;
	size_t len = 0;

	if (a->warned || base_monotonic_ms() - a->announced_ms < a->launch->start_ms || !missing_warner(a))
		return;
	for (uint32_t rank = 0; rank < a->launch->world; rank++) {
		if (a->announcements[rank].arena
			|| launch_watch_judge(a->launch->watch, rank, a->announced_ms, host) != LAUNCH_RANK_FINE
			|| n++ >= MISSING_NAMED)
			continue;
		len += (size_t)snprintf(names + len, sizeof names - len,
			"%srank %u%s%s, whose heartbeat moved %llu s ago", len ? "; " : "", rank,
			host[0] ? " on " : "", host,
			(unsigned long long)launch_watch_still_ms(a->launch->watch, rank) / 1000);
	}
	if (n > MISSING_NAMED)
		snprintf(names + len, sizeof names - len, "; and %u more", n - MISSING_NAMED);
	a->warned = n > 0;
	if (n)
		base_warning("%s: step %llu: waiting for %g s for the part of %s. Every rank of a job has to save; "
			     "with a deadline the wait would end",
			a->run, (unsigned long long)a->step, (double)a->launch->start_ms / 1000, names);
}

int attempt_missing_judge(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	char host[PROTO_HOST_MAX], why[200];
	uint64_t most_ms = base_min(JUDGE_MAX_MS, a->launch->heartbeat_ms / 8), begin, took;
	int passed;

	if (base_monotonic_ns() < a->judge_ns)
		return 0;
	launch_watch_look(a->launch->watch); /* which takes care of its own share */
	begin = base_monotonic_ns();
	for (uint32_t rank = 0; rank < a->launch->world; rank++) {
		enum launch_rank_state state;
		int r;

		if (a->announcements[rank].arena)
			continue;
		state = launch_watch_judge(a->launch->watch, rank, a->announced_ms, host);
		if (state == LAUNCH_RANK_FINE || state == LAUNCH_RANK_AWAITED)
			continue;
		r = attempt_announcement_read(a, rank, err); /* it may have announced before it went */
		if (r == 1) {
			a->nannouncements++;
			continue;
		}
		if (attempt_try_again(a, r))
			return base_error_prefix(err, r, "%s: step %llu: undecided", a->run,
				(unsigned long long)a->step);
		missing_why(a, rank, state, why);
		return attempt_give_up(a, rank, host, r < 0 ? err->text : why, ret_entry, err);
	}
	missing_warn(a);
	passed = attempt_passed(a, ret_entry, err);
	took = base_monotonic_ns() - begin;
	a->judge_ns = begin + base_min(took * JUDGE_SHARE, most_ms * 1000000);
	return passed;
}
