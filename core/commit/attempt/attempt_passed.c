/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_passed: ranks that are out of phase, and how they meet again.
 *
 * Every rank saves every step. A rank that leaves a save out, or whose call failed before it began, announces its part
 * of a later step and never one of this step: the others would wait for it as long as it lives, and it for them. So
 * while parts are missing the committing rank lists what the ranks of this launch have announced. If the part of a rank
 * q is missing:
 *
 *     q has announced a later attempt      q will not come: this attempt is given up in its name
 *     q has announced an earlier one,      this rank will not come there: it gives that one up in its own name, so that
 *     which this rank has not begun        q goes on and comes here
 *     q has announced an earlier one,      the same: the entry that decided it was collected before q read it (if this
 *     which this rank has behind it        rank has another attempt under way, it may be that one, and goes on)
 *
 * A rank that has begun two attempts knows which is later; otherwise it is the one with the higher step, or with the
 * higher try of one step. So if two ranks part, the save of the one behind fails, and they meet at the next step that
 * both save. Before that the committing rank looks for the part once more, because a listing is not of one moment, and
 * a rank announces in the order in which it begins. */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/base/text.h"
#include "core/commit/attempt/attempt_internal.h"

#define PASSED_EVERY_MS 1000u
#define PASSED_SHARE 20u                /* one part in so many of the time goes into listings */

struct passed {
	struct commit_attempt *a;
	uint64_t step;                  /* of the later attempt */
	uint32_t rank;                  /* that has announced it; UINT32_MAX: none */
	char behind[PROTO_ATTEMPT_MAX]; /* the earlier one; empty: none */
};

enum passed_order { PASSED_LATER, PASSED_BEHIND, PASSED_NEITHER };

/* How the attempt compares with the one at hand, as this rank sees it. Files left over from a decided attempt carry no
 * information. */
static enum passed_order passed_compare(const struct commit_attempt *a, const char *attempt, uint64_t step,
	uint64_t try)
{
	uint64_t order;
	bool begun, decided, alone;

	pthread_mutex_lock(&a->launch->lock);
	begun = attempt_try_begun(a->launch, step, try, &order);
	decided = commit_list_attempt(a->list, attempt, NULL, NULL) != COMMIT_ATTEMPT_UNDECIDED;
	alone = a->launch->nattempts == 1;
	pthread_mutex_unlock(&a->launch->lock);
	if (decided)
		return PASSED_NEITHER;
	if (begun)
		return order > a->order ? PASSED_LATER : alone ? PASSED_BEHIND : PASSED_NEITHER;
	return (step != a->step ? step > a->step : try > a->try) ? PASSED_LATER : PASSED_BEHIND;
}

static int passed_found(void *arg, const struct storage_entry *entry)
{
	struct passed *p = arg;
	const struct commit_attempt *a = p->a;
	size_t skip = strlen("incoming/") + strlen(a->run) + 1;
	const char *name = strlen(entry->name) > skip ? entry->name + skip : "", *last = strchr(name, '/');
	char attempt[PROTO_ATTEMPT_MAX];
	uint64_t rank, step, try;

	if (entry->temporary || entry->foreign || !last || last - name >= PROTO_ATTEMPT_MAX
		|| strncmp(last, "/part.", 6) != 0 || !base_decimal(last + 6, 0, a->launch->world - 1, &rank)
		|| a->announcements[rank].arena)
		return 0;
	snprintf(attempt, sizeof attempt, "%.*s", (int)(last - name), name);
	if (strcmp(attempt, a->name) == 0 || !attempt_name_take(a->launch, attempt, &step, &try))
		return 0;
	switch (passed_compare(a, attempt, step, try)) {
	case PASSED_LATER:
		p->step = step;
		p->rank = (uint32_t)rank;
		break;
	case PASSED_BEHIND: snprintf(p->behind, sizeof p->behind, "%s", attempt); break;
	case PASSED_NEITHER: break;
	}
	return 0;
}

/* model: wait. It goes on at once where that is decided already, or cannot be written now: then the next look does. */
static void passed_end_behind(struct commit_attempt *a, const char *attempt)
{
	char why[PROTO_REASON_MAX];

	snprintf(why, sizeof why, "rank %u on %.64s: it has gone on to step %llu without a part in this save: all "
		"ranks have to save the same steps", a->launch->rank, store_hostname(), (unsigned long long)a->step);
	pthread_mutex_lock(&a->launch->lock);
	commit_list_abort(a->list, attempt, a->launch->rank, why, NULL);
	pthread_mutex_unlock(&a->launch->lock);
}

/* model: wait */
static int passed_end_this(struct commit_attempt *a, const struct passed *p, uint64_t *ret_entry,
	struct base_error *err)
{
	char host[PROTO_HOST_MAX], why[300];
	int r = attempt_announcement_read(a, p->rank, err);

	if (r == 1)
		a->nannouncements++;
	if (r != 0)
		return r < 0 ? r : 0;
	launch_watch_judge(a->launch->watch, p->rank, a->announced_ms, host);
	snprintf(why, sizeof why, "it has announced its part of step %llu%s and none of this one (seen by rank %u on "
		"%.64s): all ranks have to save the same steps", (unsigned long long)p->step,
		p->step == a->step ? " in a later try" : "", a->launch->rank, store_hostname());
	return attempt_give_up(a, p->rank, host, why, ret_entry, err);
}

int attempt_passed(struct commit_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	struct passed p = {.a = a, .rank = UINT32_MAX};
	uint64_t now = base_monotonic_ms();
	char dir[STORAGE_NAME_MAX];
	int r;

	if (now - a->announced_ms < PASSED_EVERY_MS || now < a->passed_ms)
		return 0;
	snprintf(dir, sizeof dir, "incoming/%s", a->run);
	r = storage_list_files(a->store->storage, dir, passed_found, &p);
	if (r >= 0 && p.behind[0])
		passed_end_behind(a, p.behind);
	r = r >= 0 && p.rank != UINT32_MAX ? passed_end_this(a, &p, ret_entry, err) : 0;
	a->passed_ms = base_monotonic_ms() + base_max(PASSED_EVERY_MS, PASSED_SHARE * (base_monotonic_ms() - now));
	/* an error of reading: looked at again */
	return r < 0 && r != -BASE_EABORTED && commit_attempt_undecided(a) ? 0 : r;
}
