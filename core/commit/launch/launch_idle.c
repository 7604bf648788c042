/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_idle: when a rank's heartbeat may slow down (docs/format/incoming.md).
 *
 * A job is idle for most of its life, and all its ranks beat into one directory. Only a committing rank of another host
 * needs these beats, while this rank's part is missing. So a rank that has nothing under way beats ever less often, and
 * each beat states when the next one comes. A committing rank reads that before it gives the rank up. The first beat
 * after the rank begins an attempt comes at once.
 *
 * These beat quickly all the same:
 *
 *     rank 0                           ranks that come late look for it (launch_meet.c), and it shows every observer,
 *                                      of older versions too, that the launch lives
 *     a rank with an abort to write    it has to try at each beat, or to stop beating (launch_aborts.c)
 *     a rank whose committers may be   they would give it up after the time-out. Heartbeats of a vckpt that heeds
 *     of an older vckpt                periods state one, so a rank reads those of the ranks that may commit, once, the
 *                                      first time that it would slow down */
#include "core/base/clock.h"
#include "core/commit/launch/launch_work.h"

void commit_launch_attempt_begins(struct commit_launch *l)
{
	pthread_mutex_lock(&l->lock);
	l->nattempts++;
	pthread_mutex_unlock(&l->lock);
	commit_heartbeat_wake(l->heartbeat);
}

void commit_launch_attempt_ends(struct commit_launch *l)
{
	if (commit_launch_check(l, NULL) < 0)
		return;
	pthread_mutex_lock(&l->lock);
	if (--l->nattempts == 0)
		l->idle_ms = base_monotonic_ms();
	pthread_mutex_unlock(&l->lock);
}

uint64_t commit_launch_idle_ms(const struct commit_launch *l)
{
	return l->rank && !l->aborts && !l->nattempts ? base_monotonic_ms() - l->idle_ms : 0;
}

struct leaders {
	struct store *store;
	uint32_t ranks[COMMIT_LAUNCH_LEADERS];
	unsigned n;
	bool heeds[COMMIT_LAUNCH_LEADERS], older;
};

static void leaders_found(void *arg, uint32_t rank, uint64_t number, const char *host, const char *file)
{
	struct leaders *f = arg;
	struct commit_heartbeat_rank seen;

	(void)number;
	(void)host;
	for (unsigned i = 0; i < f->n; i++) {
		if (f->ranks[i] != rank || f->heeds[i] || commit_heartbeat_look(f->store, file, &seen) < 0)
			continue;
		f->heeds[i] = seen.period_ms != 0;
		f->older |= !f->heeds[i];
	}
}

/* A heartbeat that is not there yet, or could not be read, is looked for again when this rank has been idle twice as
 * long. */
bool commit_launch_heeded(struct commit_launch *l, uint64_t idle_ms)
{
	struct leaders f = {.store = l->store};
	uint64_t every_ms = commit_launch_every_ms(l);

	if (l->heeds.known || commit_heartbeat_period_ms(every_ms, idle_ms) == every_ms || idle_ms < l->heeds.next_ms)
		return l->heeds.all;
	f.n = commit_launch_leaders(l->world, f.ranks);
	for (unsigned i = 0; i < f.n; i++)
		f.heeds[i] = f.ranks[i] == l->rank;
	l->heeds.next_ms = 2 * idle_ms;
	if (commit_heartbeat_each(l->store, l->name, leaders_found, &f) < 0)
		return false;
	l->heeds.all = true;
	for (unsigned i = 0; i < f.n; i++)
		l->heeds.all &= f.heeds[i];
	l->heeds.known = l->heeds.all || f.older;
	return l->heeds.all;
}
