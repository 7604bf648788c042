/* SPDX-License-Identifier: Apache-2.0
 *
 * launch_meet: how a rank makes sure that the launch entry which it found is that of its own start.
 *
 * The name of a launch is a hash of run and id. If an id is used twice, the entry of the first start is in the list
 * when the second start begins. Only rank 0 would notice, because it wants to append an entry and may not. The others
 * would go on with the first start's undecided attempts, and a step of old and new parts would be committed. So the
 * launch entry holds a nonce of this opening, rank 0 shows the same nonce in its heartbeat from before the entry until
 * it closes, and a rank follows an entry that it finds only if a rank 0 that shows the nonce lives:
 *
 *     of this machine       its process lives
 *     of another host       its heartbeat is seen to move: for its first 15 s that is four times a second
 *     none that shows it    for a second's looks: the id was used before, or rank 0 has ended; -EEXIST
 *
 * An entry that comes while the rank is looking for it was put by a rank 0 that lived then, and needs no proof. A name
 * has one launch entry for ever. So after finding an old one a rank need not wait for the new rank 0, whose entry
 * cannot come. If the old entry is before the snapshot from which a rank starts, the rank learns of the refusal from
 * the list: a rank 0 that finds its id used puts an `abort` of attempt `<launch>-18446744073709551615`, which no save
 * ever has.
 *
 * If two processes are the same rank of one launch, each lists the heartbeats after it has put its own, so at least one
 * of them sees the other and refuses. */
#include "core/base/clock.h"
#include "core/commit/launch/launch_work.h"

#include <stdio.h>

#define GONE_MS 1000u           /* without a rank 0 that shows the nonce: longer than a listing can miss it */
#define LIST_EVERY_MS 500u
#define POLL_MS 50u

/* A rank 0 of another host, that shows the nonce. */
struct meet_seen { char host[65]; uint64_t number; bool seen; };

struct meet {
	struct commit_launch *l;
	const uint8_t *nonce;
	struct meet_seen first, now;    /* when it was first seen; in the last look */
	bool lives, missed;             /* there it is; a file was gone before it was read */
	char twin[STORAGE_NAME_MAX];    /* the heartbeat of another process of this rank; empty: none */
};

static void meet_rank_0(struct meet *m, uint64_t number, const char *host, const char *file)
{
	struct commit_heartbeat_rank found;

	if (commit_heartbeat_look(m->l->store, file, &found) < 0) {
		m->missed = true;
		return;
	}
	if (memcmp(found.nonce, m->nonce, PROTO_NONCE_BYTES) != 0)
		return;
	if (found.here) {
		m->lives |= commit_process_lives(found.pid, found.start_time);
		return;
	}
	if (m->now.seen && m->now.number >= number)
		return;
	m->now = (struct meet_seen){.number = number, .seen = true};
	snprintf(m->now.host, sizeof m->now.host, "%s", host);
}

static void meet_found(void *arg, uint32_t rank, uint64_t number, const char *host, const char *file)
{
	struct meet *m = arg;

	if (rank == 0)
		meet_rank_0(m, number, host, file);
	else if (rank == m->l->rank && !commit_heartbeat_own(m->l->heartbeat, host, number))
		snprintf(m->twin, sizeof m->twin, "%s", file);
}

/* One listing. 1: follow. 0: not yet. */
static int meet_look(struct meet *m, struct base_error *err)
{
	int r;

	m->now.seen = m->missed = false;
	r = commit_heartbeat_each(m->l->store, m->l->name, meet_found, m);
	if (r < 0)
		return r;
	if (m->twin[0])
		return base_error_set(err, -EEXIST,
			"run %s: the launch id was used before: rank %u of launch %s has shown a heartbeat already "
			"(%s): the id has to be new at every start", m->l->run, m->l->rank, m->l->name, m->twin);
	if (m->now.seen && !m->first.seen)
		m->first = m->now;
	return m->lives || (m->now.seen && m->now.number > m->first.number);
}

/* Between two listings: has the heartbeat that was seen gone on to its next number? */
static bool meet_moved(const struct meet *m)
{
	char name[STORAGE_NAME_MAX];
	uint64_t size;

	if (!m->now.seen)
		return false;
	commit_heartbeat_name(m->l->name, 0, m->now.host, m->now.number + 1, name);
	return storage_size(m->l->store->storage, name, &size) == 0;
}

static int meet_refuse(const struct meet *m, struct base_error *err)
{
	char seen[200] = "";

	if (m->now.seen)
		snprintf(seen, sizeof seen, " (a heartbeat of rank 0 on %.64s is there, and has stood still for %g s)",
			m->now.host, (double)m->l->heartbeat_ms / 1000);
	return base_error_set(err, -EEXIST,
		"run %s: launch %s has begun before, and its rank 0 is gone%s: the launch id was used before (it has "
		"to be new at every start), or rank 0 has ended already",
		m->l->run, m->l->name, seen);
}

/* model: lau. 0: the launch entry with that nonce is this start's. */
int commit_launch_meet(struct commit_launch *l, const uint8_t nonce[static PROTO_NONCE_BYTES], bool fresh,
	struct base_error *err)
{
	struct meet m = {.l = l, .nonce = nonce, .lives = fresh};
	uint64_t begin = base_monotonic_ms(), gone = begin, failing = 0;

	for (;;) {
		uint64_t now = base_monotonic_ms(), next = now + LIST_EVERY_MS;
		int r = meet_look(&m, err);

		if (r > 0 || r == -EEXIST)
			return r > 0 ? 0 : r;
		if (r < 0) {
			failing = failing ? failing : now;
			if (!commit_error_passes(r) || now - failing >= l->start_ms)
				return base_error_set(err, r, "run %s: %s/hosts cannot be read: %s", l->run,
					l->store->path, base_error_name(r));
			gone = base_monotonic_ms(); /* it saw nothing */
		} else {
			failing = 0;
			gone = m.now.seen || m.missed ? now : gone;
		}
		if (now - gone >= GONE_MS || (m.now.seen && now - begin >= l->heartbeat_ms))
			return meet_refuse(&m, err);
		for (; base_monotonic_ms() < next; usleep(POLL_MS * 1000))
			if (r == 0 && meet_moved(&m))
				return 0;
	}
}
