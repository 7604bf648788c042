/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_aborts: aborts that could not be written.
 *
 * The other ranks wait for this one as long as it lives, so an abort that cannot be written is not forgotten. The
 * launch keeps it, and tries to append it before its next begin, while the attempt is waited for, and from its
 * heartbeat's thread at every beat, until it is written or the list decides the attempt in another way. If that fails
 * for longer than a rank may be missing at the start, the heartbeat stops, so that the others give this rank up. It
 * beats again once the list can be written. So a short fault costs the save that it hit, and no fault of one rank keeps
 * the others waiting for as long as that rank lives. */
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/incoming/incoming.h"
#include "core/commit/launch/launch_work.h"

#include <stdio.h>

struct launch_abort {
	struct launch_abort *next;
	char attempt[PROTO_ATTEMPT_MAX], reason[PROTO_REASON_MAX];
};

/* model: kept */
void commit_launch_abort_keep(struct commit_launch *l, const char *attempt, const char *reason)
{
	struct launch_abort **at = &l->aborts, *k;

	for (; *at; at = &(*at)->next)
		if (strcmp((*at)->attempt, attempt) == 0)
			return;
	k = l->spare ? base_steal(l->spare) : calloc(1, sizeof *k);
	if (!k) {
		base_warning("run %s: attempt %s: out of memory: its abort is not tried again", l->run, attempt);
		return;
	}
	snprintf(k->attempt, sizeof k->attempt, "%s", attempt);
	snprintf(k->reason, sizeof k->reason, "%s", reason);
	if (!l->aborts)
		l->aborts_ms = base_monotonic_ms();
	*at = k;
}

int commit_launch_abort_room(struct commit_launch *l)
{
	int r = 0;

	pthread_mutex_lock(&l->lock);
	if (!l->spare && !(l->spare = calloc(1, sizeof *l->spare)))
		r = -ENOMEM;
	pthread_mutex_unlock(&l->lock);
	return r;
}

bool commit_launch_abort_kept(const struct commit_launch *l, const char *attempt)
{
	for (const struct launch_abort *k = l->aborts; k; k = k->next)
		if (strcmp(k->attempt, attempt) == 0)
			return true;
	return false;
}

/* model: fail */
int commit_launch_aborts_put(struct commit_launch *l)
{
	uint64_t patience = commit_list_patience(l->list, 0);
	struct launch_abort *k;
	int r = 0;

	while (r >= 0 && (k = l->aborts) != NULL) {
		r = commit_list_abort(l->list, k->attempt, l->rank, k->reason, NULL);
		if (r < 0 && r != -EALREADY)
			break;
		base_warning("run %s: attempt %s: %s", l->run, k->attempt,
			r == 0 ? "its abort is written now" : "the list has decided it meanwhile");
		if (r == 0)
			commit_folder_delete(l->store, l->run, k->attempt, NULL);
		r = 0;
		l->aborts = k->next;
		free(k);
	}
	commit_list_patience(l->list, patience);
	return r;
}

/* model: stuck */
bool commit_launch_tend(void *arg, uint64_t *ret_idle_ms)
{
	struct commit_launch *l = arg;
	uint64_t idle_ms;
	bool beats;

	if (pthread_mutex_trylock(&l->lock) != 0)
		return true; /* another thread works on the list; try at the next beat */
	if (l->aborts) /* else the list may not even be open */
		commit_launch_aborts_put(l);
	beats = !l->aborts || base_monotonic_ms() - l->aborts_ms < l->start_ms;
	if (beats == l->rests)
		base_warning("run %s: rank %u: %s", l->run, l->rank, beats ? "its heartbeat goes on"
			: "the run's list cannot be written: its heartbeat stops, so that no one waits for it");
	l->rests = !beats;
	idle_ms = commit_launch_idle_ms(l);
	pthread_mutex_unlock(&l->lock);
	*ret_idle_ms = idle_ms && commit_launch_heeded(l, idle_ms) ? idle_ms : 0;
	return beats;
}

void commit_launch_aborts_drop(struct commit_launch *l)
{
	struct launch_abort *k;

	if (l->list && l->aborts && getpid() == l->pid)
		commit_launch_aborts_put(l);
	while ((k = l->aborts) != NULL) {
		if (getpid() == l->pid)
			base_warning("run %s: attempt %s: its abort cannot be written; another rank or vckpt gc will "
				     "abort it", l->run, k->attempt);
		l->aborts = k->next;
		free(k);
	}
	free(base_steal(l->spare));
}
