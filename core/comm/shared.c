/* SPDX-License-Identifier: Apache-2.0
 *
 * shared: gathers and passes over the segments that the ranks have of each other (shared_internal.h).
 *
 * Gathers go by steps of up to 64 KiB a rank. A rank puts its bytes into one of two halves by turns, counts the step,
 * and reads those of all ranks that have counted it. A rank that has counted step n has read step n - 2, so its half
 * may be written again.
 *
 * A pass: the owner writes into `slot` which room it is, and counts. The ranks that want it read the room itself, and
 * say in `done` when they have used it; then the owner's finish returns, and the room is free.
 *
 * A rank that waits sleeps on the bell of the rank that it waits for, and checks every 50 ms that this rank is alive
 * and that none has given up. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/comm/shared_internal.h"

#define WAIT_SLICE_MS 50u

/* ---- waiting ---- */

static struct shared *shared_of(struct comm *c) { return (struct shared *)c; }

/* What the segment of that rank says of its state: 0, or an error that names the rank. */
static int peer_lives(const struct shared *s, uint32_t rank, struct base_error *err)
{
	struct shared_head *head = s->peers[rank].head;
	char why[sizeof head->why];

	switch (atomic_load(&head->state)) {
	case SHARED_ABORTED:
		memcpy(why, head->why, sizeof why);
		why[sizeof why - 1] = 0;
		return base_error_set(err, -BASE_EABORTED, "%s", why);
	case SHARED_CLOSED:
		return base_error_set(err, -BASE_EABORTED, "rank %u has left", rank);
	}
	if (shared_dead(head->pid, head->start))
		return base_error_set(err, -BASE_EABORTED, "rank %u is dead (process %d)", rank, (int)head->pid);
	return 0;
}

/* That rank may be waiting for another one that has given up. */
static int wait_look(struct shared *s, uint32_t rank, struct base_error *err)
{
	int r;

	for (uint32_t i = 0; i < s->comm.size; i++)
		if (i != s->comm.rank && atomic_load(&s->peers[i].head->state) == SHARED_ABORTED)
			rank = i;
	r = peer_lives(s, rank, err);
	if (r < 0)
		atomic_store(&s->relays, true);
	return r;
}

/* Until that rank's word is at least so much. */
static int shared_wait(struct shared *s, uint32_t rank, const _Atomic uint64_t *word, uint64_t least,
	struct base_error *err)
{
	struct shared_head *head = s->peers[rank].head;
	_Atomic uint64_t *w = (_Atomic uint64_t *)(uintptr_t)word;
	uint64_t until = 0;

	for (;;) {
		uint32_t bell = atomic_load(&head->bell);
		int r;

		if (atomic_load(w) >= least)
			return 0;
		if (atomic_load(&s->peers[s->comm.rank].head->state) != SHARED_LIVES)
			return -BASE_EABORTED; /* comm.c has the words: a thread of this rank's gave up */
		if (!until)
			until = base_monotonic_ns() + (uint64_t)s->comm.timeout_ms * 1000000;
		r = wait_look(s, rank, err);
		if (r < 0)
			return r;
		if (s->comm.stop && atomic_load(s->comm.stop))
			return base_error_set(err, -ECANCELED, "the load was stopped");
		if (base_monotonic_ns() > until)
			return base_error_set(err, -ETIMEDOUT, "rank %u did nothing for %u ms", rank,
				s->comm.timeout_ms);
		shared_sleep(head, bell, WAIT_SLICE_MS);
	}
}

/* ---- gathers ---- */

static uint8_t *gather_half(const struct shared *s, uint32_t rank, uint64_t step)
{
	return (uint8_t *)s->peers[rank].head + s->gather_at + step % 2 * SHARED_GATHER_BYTES;
}

/* Bytes of a string in step i of its gather. */
static uint64_t gather_part(uint64_t len, uint64_t i)
{
	return len <= i * SHARED_GATHER_BYTES ? 0 : base_min(len - i * SHARED_GATHER_BYTES, SHARED_GATHER_BYTES);
}

static int gather_step(struct shared *s, uint64_t i, const uint8_t *mine, const uint64_t *lens, uint8_t *all,
	struct base_error *err)
{
	struct shared_head *own = s->peers[s->comm.rank].head;
	uint64_t part = gather_part(lens[s->comm.rank], i);

	if (part)
		memcpy(gather_half(s, s->comm.rank, s->steps), mine + i * SHARED_GATHER_BYTES, part);
	atomic_store(&own->gathered, s->steps + 1);
	shared_ring(own);
	for (uint32_t k = 0; k < s->comm.size; all += lens[k], k++) {
		int r = k == s->comm.rank ? 0 : shared_wait(s, k, &s->peers[k].head->gathered, s->steps + 1, err);

		if (r < 0)
			return r;
		part = gather_part(lens[k], i);
		if (part)
			memcpy(all + i * SHARED_GATHER_BYTES, gather_half(s, k, s->steps), part);
	}
	s->steps++;
	return 0;
}

static int shared_gather(struct comm *c, const void *mine, const uint64_t *lens, uint8_t *ret_all,
	struct base_error *err)
{
	uint64_t longest = 0;
	int r = 0;

	for (uint32_t k = 0; k < c->size; k++)
		longest = base_max(longest, lens[k]);
	for (uint64_t i = 0; r == 0 && i < base_div_up(longest, SHARED_GATHER_BYTES); i++)
		r = gather_step(shared_of(c), i, mine, lens, ret_all, err);
	return r;
}

/* ---- passes ---- */

static int shared_room(struct comm *c, const uint8_t *bytes)
{
	const struct shared *s = shared_of(c);

	return shared_have(s, (size_t)(bytes - (const uint8_t *)s->peers[c->rank].head), COMM_PASS_BYTES);
}

static int shared_start(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct shared *s = shared_of(c);
	struct shared_head *own = s->peers[c->rank].head;
	struct shared_slot *slot;
	uint64_t at;

	p->word[0] = s->peers[p->owner].passed++;
	if (p->owner != c->rank)
		return 0;
	at = (uint64_t)(p->bytes - ((uint8_t *)own + s->rooms_at));
	if (at % COMM_PASS_BYTES || at / COMM_PASS_BYTES >= COMM_ROOMS)
		return base_error_set(err, -EINVAL, "a bucket is in no room of its communicator");
	slot = &own->slot[p->word[0] % COMM_ROOMS];
	*slot = (struct shared_slot){.room = (uint32_t)(at / COMM_PASS_BYTES), .len = p->len};
	atomic_store(&own->passed, p->word[0] + 1);
	shared_ring(own);
	return 0;
}

static int finish_owner(struct shared *s, const struct comm_pass *p, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < p->nranks; i++) {
		struct shared_seat *seat = &shared_seats(s, s->peers[p->ranks[i]].head)[s->comm.rank];

		r = shared_wait(s, p->ranks[i], &seat->done[p->word[0] % COMM_ROOMS], p->word[0] + 1, err);
	}
	return r;
}

static int finish_wanted(struct shared *s, struct comm_pass *p, struct base_error *err)
{
	struct shared_head *head = s->peers[p->owner].head;
	struct shared_slot slot;
	int r = shared_wait(s, p->owner, &head->passed, p->word[0] + 1, err);

	if (r < 0)
		return r;
	slot = head->slot[p->word[0] % COMM_ROOMS];
	if (slot.room >= COMM_ROOMS || slot.len != p->len)
		return base_error_set(err, -BASE_EFORMAT, "rank %u passes on %llu bytes in room %u, where this rank "
			"expects %llu", p->owner, (unsigned long long)slot.len, slot.room, (unsigned long long)p->len);
	p->bytes = (uint8_t *)head + s->rooms_at + (size_t)slot.room * COMM_PASS_BYTES;
	return 0;
}

static int shared_finish(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	return p->owner == c->rank ? finish_owner(shared_of(c), p, err) : finish_wanted(shared_of(c), p, err);
}

static void shared_done(struct comm *c, struct comm_pass *p)
{
	struct shared *s = shared_of(c);
	struct shared_head *own = s->peers[c->rank].head;

	atomic_store(&shared_seats(s, own)[p->owner].done[p->word[0] % COMM_ROOMS], p->word[0] + 1);
	shared_ring(own);
}

/* ---- the end ---- */

static void shared_abort(struct comm *c, const char *why)
{
	struct shared_head *own = shared_of(c)->peers[c->rank].head;

	if (atomic_load(&shared_of(c)->relays))
		snprintf(own->why, sizeof own->why, "%s", why);
	else
		snprintf(own->why, sizeof own->why, "rank %u gave up: %s", c->rank, why);
	atomic_store(&own->state, SHARED_ABORTED);
	shared_ring(own);
}

static void shared_free(struct comm *c)
{
	struct shared *s = shared_of(c);
	struct shared_head *own = s->peers ? s->peers[c->rank].head : NULL;
	uint32_t lives = SHARED_LIVES;

	shared_hide(s);
	if (own && atomic_compare_exchange_strong(&own->state, &lives, SHARED_CLOSED))
		shared_ring(own);
	for (uint32_t i = 0; s->peers && i < c->size; i++)
		if (s->peers[i].head)
			munmap(s->peers[i].head, s->bytes);
	if (s->fd >= 0)
		close(s->fd);
	free(s->peers);
	comm_release(c);
	free(s);
}

/* ---- the beginning ---- */

/* A rank that has left needs nothing more. */
static int shared_listen(struct comm *c, struct base_error *err)
{
	struct shared *s = shared_of(c);

	for (uint32_t i = 0; i < c->size; i++) {
		int r = i == c->rank ? 0 : peer_lives(s, i, err);

		if (r < 0 && atomic_load(&s->peers[i].head->state) != SHARED_CLOSED)
			return r;
	}
	return 0;
}

static const struct comm_ops shared_ops = {.gather = shared_gather, .room = shared_room, .start = shared_start,
	.finish = shared_finish, .done = shared_done, .listen = shared_listen, .abort = shared_abort,
	.free = shared_free};

static int name_check(const char *name, struct base_error *err)
{
	size_t len = strlen(name);

	if (len == 0 || len > 100 || strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
		!= len)
		return base_error_set(err, -EINVAL, "\"%.120s\" cannot be the name under which ranks meet: it has 1 to "
			"100 letters, digits, '.', '_' or '-'", name);
	return 0;
}

static void shared_measure(struct shared *s)
{
	s->seats_at = base_align(sizeof(struct shared_head), 4096);
	s->gather_at = s->seats_at + base_align(s->comm.size * sizeof(struct shared_seat), 4096);
	s->rooms_at = s->gather_at + 2 * SHARED_GATHER_BYTES;
	s->bytes = s->rooms_at + (size_t)COMM_ROOMS * COMM_PASS_BYTES;
}

int comm_shared_new(const char *name, uint32_t rank, uint32_t size, uint32_t timeout_ms, struct comm **ret_comm,
	struct base_error *err)
{
	struct base_error why = {0};
	struct shared *s;
	int r = name_check(name, err);

	if (r == 0 && size > COMM_SHARED_RANKS_MAX)
		r = base_error_set(err, -EINVAL, "%u ranks of one host are too many: %u are the most", size,
			COMM_SHARED_RANKS_MAX);
	s = r == 0 ? calloc(1, sizeof *s) : NULL;
	if (!s)
		return r < 0 ? r : base_no_memory(err);
	s->fd = -1;
	r = comm_init(&s->comm, &shared_ops, rank, size, timeout_ms, err);
	if (r < 0) {
		free(s);
		return r;
	}
	s->comm.lends = true;
	snprintf(s->folder, sizeof s->folder, SHARED_ROOT "/vckpt-%u-%s", (unsigned)geteuid(), name);
	shared_measure(s);
	s->peers = calloc(size, sizeof *s->peers);
	r = s->peers ? shared_meet(s, &why) : base_no_memory(&why);
	if (r < 0) {
		comm_free(&s->comm);
		return base_error_set(err, r, "%s", why.code ? why.text : base_error_name(r));
	}
	comm_lend_rooms(&s->comm, (uint8_t *)s->peers[rank].head + s->rooms_at);
	*ret_comm = &s->comm;
	return 0;
}
