/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_watch: which ranks of a launch still live, as the committing rank sees it. The others look once, to count the
 * ranks of their machine.
 *
 * One listing of hosts/ a second at most (a quarter of the time-outs where these are shorter, and no more than a
 * twentieth of the time goes into listings, unless that would leave less than four looks to a time-out). For a rank of
 * another host the file's name is enough. A file with this host's name is read when the rank is first seen, because it
 * says which process the rank is; and that of a rank whose number has stood still for the whole time-out, because it
 * may state a longer period (launch_idle.c). If a file was replaced by the next one between listing and reading, it is
 * listed once more. Whether a process of this machine lives is asked at every call, which costs the store nothing;
 * ranks that are threads of one process share the answer. The time of a change is the time of the look that found it,
 * by this rank's monotonic clock, and no time-out begins before the rank's own announcement in this attempt, so what
 * happened between two saves does not count. But a rank that was found missing or stopped, and has not been seen to
 * move since, is not waited for again: the saves that are queued behind the first would each take the whole time-out.
 * An observer that was itself suspended (as when a whole job is) starts all clocks anew; otherwise it would give up all
 * ranks at its first look. An observer whose own beats are slow does so too, because a storage with too much to do
 * makes the beats of healthy ranks slow as well. A process of this machine that is gone is recognised in any case. */
#include "core/base/clock.h"
#include "core/commit/launch/launch_work.h"

#include <stdio.h>

#define LIST_TRIES 3u
#define PROCESS_MS 10u                  /* how long a process that was seen alive is not checked again */

struct watch_rank {
	struct commit_heartbeat_rank process;
	uint64_t number;
	uint64_t changed_ms;            /* when the number was last seen to move */
	uint64_t limit_ms;              /* how long it may not move */
	bool asked;                     /* its file was read for that, after the time-out */
	uint64_t gone_ms;               /* since when no listing shows it; 0: the last one did */
	bool seen, listed;              /* ever; in the listing at hand */
	enum launch_rank_state found;   /* NEVER or STOPPED since it last moved; else FINE */
};

struct launch_watch {
	const struct commit_launch *own;
	uint64_t every_ms;
	pthread_mutex_t lock;           /* protects all below */
	struct watch_rank *ranks;
	uint64_t looked_ms;             /* when the last look began; 0: never looked */
	uint64_t ended_ms, next_ms;     /* when it ended, and when the next one is due */
	bool missed;                    /* it met a file that could not be read */
	uint64_t since_ms;              /* since when a rank that was never seen is missing */
	struct { uint64_t pid, start_time, asked_ms; } lives; /* the last process that was found alive */
};

int launch_watch_new(const struct commit_launch *l, struct launch_watch **ret_w)
{
	uint64_t least = base_min(l->heartbeat_ms, l->start_ms);
	struct launch_watch *w = calloc(1, sizeof *w);

	if (w)
		w->ranks = calloc(l->world, sizeof *w->ranks);
	if (!w || !w->ranks) {
		free(w);
		return -ENOMEM;
	}
	w->own = l;
	if (l->deadline_ms)
		least = base_min(least, l->deadline_ms);
	/* with the caller's pause (0.1 s) well below heartbeat_ms / 2, see launch_watch_look */
	w->every_ms = base_min(least / 8 + 1, 1000);
	pthread_mutex_init(&w->lock, NULL);
	*ret_w = w;
	return 0;
}

void launch_watch_free(struct launch_watch *w)
{
	if (!w)
		return;
	pthread_mutex_destroy(&w->lock);
	free(w->ranks);
	free(w);
}

/* Which process it is, when it is first seen. */
static int watch_meet(struct launch_watch *w, struct watch_rank *k, const char *host, const char *file)
{
	if (commit_heartbeat_may_be_here(host))
		return commit_heartbeat_look(w->own->store, file, &k->process);
	snprintf(k->process.host, sizeof k->process.host, "%s", host);
	return 0;
}

/* A heartbeat that does not move may state a period. One that cannot be read for a while counts as stating the longest
 * there is. */
static void watch_period(struct launch_watch *w, struct watch_rank *k, const char *file)
{
	struct commit_heartbeat_rank seen;
	int r;

	if (k->asked || w->looked_ms - k->changed_ms < w->own->heartbeat_ms)
		return;
	r = commit_heartbeat_look(w->own->store, file, &seen);
	k->asked = r != -ENOENT;
	if (r == -ENOENT)
		w->missed = true; /* moved on */
	else if (r == 0)
		k->limit_ms = commit_heartbeat_limit_ms(w->own->heartbeat_ms, seen.period_ms);
	else if (commit_error_passes(r))
		k->limit_ms = commit_heartbeat_limit_ms(w->own->heartbeat_ms,
			commit_heartbeat_period_ms(COMMIT_HEARTBEAT_EVERY_S * 1000, UINT64_MAX));
}

static void watch_found(void *arg, uint32_t rank, uint64_t number, const char *host, const char *file)
{
	struct launch_watch *w = arg;
	struct watch_rank *k = rank < w->own->world ? &w->ranks[rank] : NULL;

	if (!k)
		return;
	if (!k->seen)
		k->found = LAUNCH_RANK_FINE; /* it came */
	if (!k->seen && watch_meet(w, k, host, file) < 0) {
		w->missed = true; /* moved on, or cannot be read */
		return;
	}
	k->listed = true;
	if (k->seen && number <= k->number) {
		watch_period(w, k, file);
		return;
	}
	k->seen = true;
	k->limit_ms = w->own->heartbeat_ms;
	k->asked = false;
	k->found = LAUNCH_RANK_FINE;
	k->number = number;
	k->changed_ms = w->looked_ms;
}

/* All clocks start now. */
static void watch_restart(struct launch_watch *w, uint64_t now)
{
	w->since_ms = now;
	for (uint32_t i = 0; i < w->own->world; i++) {
		w->ranks[i].changed_ms = now;
		w->ranks[i].gone_ms = w->ranks[i].gone_ms ? now : 0;
	}
}

static int watch_list(struct launch_watch *w)
{
	int r = 0;

	w->missed = true;
	for (unsigned i = 0; i < LIST_TRIES && w->missed && r >= 0; i++) {
		w->missed = false;
		r = commit_heartbeat_each(w->own->store, w->own->name, watch_found, w);
	}
	return r;
}

int launch_watch_look(struct launch_watch *w)
{
	uint64_t now = base_monotonic_ms(), took;
	int r;

	pthread_mutex_lock(&w->lock);
	if (now < w->next_ms) {
		pthread_mutex_unlock(&w->lock);
		return 0;
	}
	if (w->looked_ms == 0 || now - w->ended_ms > w->own->heartbeat_ms / 2
		|| commit_heartbeat_slow_ms(w->own->heartbeat) > w->own->heartbeat_ms / 4)
		watch_restart(w, now);
	w->looked_ms = now;
	for (uint32_t i = 0; i < w->own->world; i++)
		w->ranks[i].listed = false;
	r = watch_list(w);
	for (uint32_t i = 0; r >= 0 && i < w->own->world; i++) {
		struct watch_rank *k = &w->ranks[i];

		k->gone_ms = k->listed || !k->seen ? 0 : k->gone_ms ? k->gone_ms : now;
	}
	if (r < 0) { /* it saw nothing, so no rank is missing by it */
		watch_restart(w, now);
		for (uint32_t i = 0; i < w->own->world; i++)
			w->ranks[i].found = LAUNCH_RANK_FINE;
	}
	w->ended_ms = base_monotonic_ms();
	took = w->ended_ms - now;
	/* were the next look due after heartbeat_ms / 2, every one would start the clocks anew */
	w->next_ms = w->ended_ms + base_max(w->every_ms, base_min(20 * took, w->own->heartbeat_ms / 4));
	pthread_mutex_unlock(&w->lock);
	return r < 0 ? r : 0;
}

/* Has the last look found it so for that long? */
static bool lasts(const struct launch_watch *w, uint64_t since, uint64_t from, uint64_t limit)
{
	uint64_t start = base_max(since, from);

	return w->looked_ms >= start && w->looked_ms - start >= limit;
}

static bool process_lives(struct launch_watch *w, const struct commit_heartbeat_rank *p)
{
	uint64_t now = base_monotonic_ms();

	if (p->pid == w->lives.pid && p->start_time == w->lives.start_time && now < w->lives.asked_ms + PROCESS_MS)
		return true;
	if (!commit_process_lives(p->pid, p->start_time))
		return false;
	w->lives.pid = p->pid;
	w->lives.start_time = p->start_time;
	w->lives.asked_ms = now;
	return true;
}

static enum launch_rank_state judge(struct launch_watch *w, const struct watch_rank *k, uint64_t since)
{
	if (k->found != LAUNCH_RANK_FINE && w->looked_ms >= since)
		return k->found;
	if (!k->seen)
		return w->looked_ms && lasts(w, since, w->since_ms, w->own->start_ms) ? LAUNCH_RANK_NEVER
										 : LAUNCH_RANK_AWAITED;
	if (k->process.here && !process_lives(w, &k->process))
		return LAUNCH_RANK_DIED;
	if (k->gone_ms)
		return lasts(w, since, k->gone_ms, w->own->start_ms) ? LAUNCH_RANK_NEVER : LAUNCH_RANK_AWAITED;
	if (lasts(w, since, k->changed_ms, k->limit_ms))
		return LAUNCH_RANK_STOPPED;
	if (w->own->deadline_ms && lasts(w, since, w->since_ms, w->own->deadline_ms))
		return LAUNCH_RANK_LATE;
	return !k->process.here && lasts(w, since, k->changed_ms, w->own->heartbeat_ms) ? LAUNCH_RANK_AWAITED
										   : LAUNCH_RANK_FINE;
}

enum launch_rank_state launch_watch_judge(struct launch_watch *w, uint32_t rank, uint64_t since, char *host)
{
	struct watch_rank *k = &w->ranks[rank];
	enum launch_rank_state state;

	pthread_mutex_lock(&w->lock);
	state = judge(w, k, since);
	if (state == LAUNCH_RANK_NEVER || state == LAUNCH_RANK_STOPPED)
		k->found = state;
	snprintf(host, PROTO_HOST_MAX, "%s", k->process.host);
	pthread_mutex_unlock(&w->lock);
	return state;
}

uint64_t launch_watch_still_ms(struct launch_watch *w, uint32_t rank)
{
	uint64_t changed, now = base_monotonic_ms();

	pthread_mutex_lock(&w->lock);
	changed = w->ranks[rank].changed_ms;
	pthread_mutex_unlock(&w->lock);
	return now - base_min(changed, now);
}

uint64_t launch_watch_limit_ms(struct launch_watch *w, uint32_t rank)
{
	uint64_t ms;

	pthread_mutex_lock(&w->lock);
	ms = w->ranks[rank].limit_ms;
	pthread_mutex_unlock(&w->lock);
	return ms;
}

uint32_t commit_launch_neighbours(const struct commit_launch *l)
{
	struct launch_watch *w = l->watch;
	uint32_t count = 1;

	if (commit_launch_check(l, NULL) < 0)
		return count;
	launch_watch_look(w);
	pthread_mutex_lock(&w->lock);
	for (uint32_t i = 0; i < w->own->world; i++)
		count += i != l->rank && w->ranks[i].listed && w->ranks[i].process.here;
	pthread_mutex_unlock(&w->lock);
	return count;
}
