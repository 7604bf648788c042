/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_turns: the calls of the communicator that pass buckets on, by the one thread that makes them.
 *
 * All ranks start all passes in the order of the plan. Each finishes its own (those that it owns or wants) in the same
 * order, but late: when 32 of its own are in flight, or 4 that it owns, since the other rooms are being filled
 * meanwhile; and all of them before the ranks vote. So no ranks wait for each other in a circle. Proof: take the first
 * pass that is not finished. Each of its ranks has finished its own passes before it, so that rank can start and finish
 * this one; it waits at most for a bucket that is still being read. */
#include <stdlib.h>

#include "core/load/exchange/exchange_internal.h"

struct turns {
	struct load_exchange *x;
	struct exchange_pass *first, **end; /* in flight, in the order of their starts */
	uint32_t flying, own;            /* how many; of these, owned by this rank */
};

/* Hands a bucket that has arrived, or a room that is free again, to the workers. */
static void turn_end(struct turns *t, struct exchange_pass *p)
{
	struct load_exchange *x = t->x;
	bool own = p->pass.owner == x->comm->rank;

	pthread_mutex_lock(&x->lock);
	if (!own) {
		p->next = NULL;
		*x->arrived_end = p;
		x->arrived_end = &p->next;
		x->placing++;
	}
	pthread_cond_broadcast(&x->work);
	while (x->placing > EXCHANGE_FLYING)
		pthread_cond_wait(&x->news, &x->lock);
	pthread_mutex_unlock(&x->lock);
	if (own)
		free(p);
}

static int turn_finish(struct turns *t, struct base_error *err)
{
	struct exchange_pass *p = t->first;
	const struct exchange_bucket *b = &t->x->plan.buckets[p->bucket];
	int r = comm_pass_finish(t->x->comm, &p->pass, err);

	if (r < 0)
		return r;
	t->first = p->next;
	if (!t->first)
		t->end = &t->first;
	t->flying--;
	if (b->owner == t->x->comm->rank) {
		t->own--;
		t->x->result.sent += b->bytes;
	} else
		t->x->result.got += b->bytes;
	turn_end(t, p);
	return 0;
}

/* The bucket that this rank owns, once it has been read. */
static uint8_t *turn_room(struct load_exchange *x, uint32_t own)
{
	struct exchange_own *ready = &x->ready[own % COMM_ROOMS];
	uint8_t *room;

	pthread_mutex_lock(&x->lock);
	while (!ready->ready)
		pthread_cond_wait(&x->news, &x->lock);
	ready->ready = false;
	room = ready->room;
	pthread_mutex_unlock(&x->lock);
	return room;
}

static int turn_start(struct turns *t, uint32_t bucket, struct base_error *err)
{
	struct load_exchange *x = t->x;
	const struct exchange_bucket *b = &x->plan.buckets[bucket];
	const struct exchange_group *g = &x->plan.groups[b->group];
	struct exchange_pass *p = calloc(1, sizeof *p + g->n * sizeof *p->ranks);
	int r;

	if (!p)
		return exchange_short(x, err);
	p->bucket = bucket;
	p->pass = (struct comm_pass){.owner = b->owner, .ranks = p->ranks, .len = EXCHANGE_HEAD_BYTES + b->bytes};
	for (uint32_t i = 0; i < g->n; i++)
		if (g->ranks[i] != b->owner)
			p->ranks[p->pass.nranks++] = g->ranks[i];
	if (b->owner == x->comm->rank)
		p->pass.bytes = turn_room(x, b->own);
	r = comm_pass_start(x->comm, &p->pass, err);
	if (r < 0 || (b->owner != x->comm->rank && !comm_pass_wants(x->comm, &p->pass))) {
		free(p);
		return r;
	}
	*t->end = p;
	t->end = &p->next;
	t->flying++;
	t->own += b->owner == x->comm->rank;
	return 0;
}

int exchange_turns(struct load_exchange *x, size_t from, size_t to, struct base_error *err)
{
	struct turns t = {.x = x};
	int r = 0;

	t.end = &t.first;
	for (size_t i = from; r == 0 && i < to; i++) {
		bool own = x->plan.buckets[i].owner == x->comm->rank;

		while (r == 0 && (t.flying >= EXCHANGE_FLYING || (own && t.own >= EXCHANGE_OWN_FLYING)))
			r = turn_finish(&t, err);
		if (r == 0)
			r = turn_start(&t, (uint32_t)i, err);
	}
	while (r == 0 && t.first)
		r = turn_finish(&t, err);
	while (t.first) { /* the communicator is broken, and keeps their memory */
		struct exchange_pass *p = t.first;

		t.first = p->next;
		free(p);
	}
	return r;
}
