/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange: ranks that fill at the same time. What several of them want is read by one, which passes it on while it
 * reads on.
 *
 *   greet      each rank says what it asks for, and whether it has failed so far. All report the first difference
 *   lists      which blocks of which objects each rank wants; equal lists are sent once
 *   plan       every rank makes the same plan (exchange_plan.c), and they compare it
 *   probe      "auto": a few buckets are read, then passed on; the times decide, the same at all ranks
 *   rounds     buckets go from owners to the ranks that want them (exchange_turns.c), then the ranks vote
 *   last vote  repeated until every rank has read what it alone wants
 *
 * Votes: each rank says whether it has failed. If one has, all end there with the sentence of the lowest such rank, and
 * the communicator can be used for the next load. No rank leaves between votes: one that has failed passes on empty
 * buckets. So an error of any rank is an error of all, and a rank reports success when all have succeeded. What breaks
 * the communicator (a rank that dies, a time-out, a load that is stopped while it waits for others) ends the exchange
 * at once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/pool.h"
#include "core/base/log.h"
#include "core/load/exchange/exchange_internal.h"
#include "core/load/exchange/exchange_words.h"
#include "core/load/fill/place.h"

#define EXCHANGE_IDLE_MS 1000            /* between votes, while some rank reads what it alone wants */

struct load_exchange *load_exchange_new(struct load_fill *f, struct comm *comm, enum load_exchange_mode mode)
{
	struct load_exchange *x = calloc(1, sizeof *x);

	if (!x)
		return NULL;
	x->f = f;
	x->comm = comm;
	x->mode = mode;
	x->arrived_end = &x->arrived;
	x->result.ranks = comm->size;
	pthread_mutex_init(&x->lock, NULL);
	pthread_cond_init(&x->work, NULL);
	pthread_cond_init(&x->news, NULL);
	return x;
}

void load_exchange_free(struct load_exchange *x)
{
	if (!x)
		return;
	exchange_plan_release(&x->plan);
	base_buf_release(&x->list);
	free(x->mine);
	free(x->own);
	free(x->split);
	pthread_cond_destroy(&x->news);
	pthread_cond_destroy(&x->work);
	pthread_mutex_destroy(&x->lock);
	free(x);
}

void load_exchange_result(const struct load_exchange *x, struct load_exchange_result *ret_result)
{
	*ret_result = x->result;
	ret_result->why = x->why;
}

/* ---- threads ---- */

void exchange_rooms(struct load_exchange *x, unsigned want)
{
	struct base_error err = {0};
	uint8_t *rooms[COMM_ROOMS];
	unsigned n = 0;
	int r = 0;

	for (; r == 0 && n < want; n += r == 0) {
		r = comm_room(x->comm, &rooms[n]);
		if (r == 0)
			memset(rooms[n], 0, COMM_PASS_BYTES);
	}
	while (n > 0)
		comm_room_free(x->comm, rooms[--n]);
	if (r == 0 || r == -EAGAIN) /* there are no more */
		return;
	base_error_set(&err, r, "the buckets of an exchange: %s", base_error_name(r));
	exchange_fail(x, &err);
}

static void threads_start(struct load_exchange *x)
{
	struct base_error err = {0};
	int r = 0;

	if (x->mode == LOAD_EXCHANGE_ALWAYS)
		exchange_rooms(x, COMM_ROOMS);
	while (r == 0 && x->nthreads < base_min(x->f->threads, EXCHANGE_THREADS)) {
		r = base_thread_start(&x->threads[x->nthreads], exchange_worker, x);
		x->nthreads += r == 0;
	}
	if (r < 0 && x->nthreads == 0 && !err.code)
		base_error_set(&err, r, "no thread can be started for the load: %s", base_error_name(r));
	x->f->times.threads = x->nthreads;
	if (err.code)
		exchange_fail(x, &err);
}

/* After an error: buckets that were read and not passed on, and those that came and were not placed. The communicator
 * can still be used, and needs its memory back. */
static void leftovers_free(struct load_exchange *x)
{
	for (struct exchange_pass *p = x->arrived, *next; p; p = next) {
		next = p->next;
		comm_pass_done(x->comm, &p->pass);
		free(p);
	}
	x->arrived = NULL;
	for (unsigned i = 0; i < COMM_ROOMS; i++)
		if (x->ready[i].ready)
			comm_room_free(x->comm, x->ready[i].room);
}

static void threads_end(struct load_exchange *x)
{
	pthread_mutex_lock(&x->lock);
	x->over = true;
	pthread_cond_broadcast(&x->work);
	pthread_mutex_unlock(&x->lock);
	while (x->nthreads > 0)
		pthread_join(x->threads[--x->nthreads], NULL);
	leftovers_free(x);
}

/* ---- the course of it ---- */

/* This rank's buckets, in their order. */
static int exchange_own(struct load_exchange *x)
{
	x->own = malloc((x->plan.nbuckets + 1) * sizeof *x->own);
	if (!x->own)
		return -ENOMEM;
	for (size_t i = 0; i < x->plan.nbuckets; i++)
		if (x->plan.buckets[i].owner == x->comm->rank)
			x->own[x->nowned++] = (uint32_t)i;
	return 0;
}

/* How many buckets are to be passed on, and how many of them have been. */
static int exchange_choose(struct load_exchange *x, size_t *ret_done, size_t *ret_n, struct base_error *err)
{
	struct exchange_plan *p = &x->plan;
	bool shares = x->mode == LOAD_EXCHANGE_ALWAYS;
	uint64_t bytes = 0;
	int r = 0;

	*ret_done = 0;
	if (x->mode == LOAD_EXCHANGE_NEVER || p->nbuckets == 0)
		shares = false;
	if (x->mode == LOAD_EXCHANGE_NEVER)
		snprintf(x->why, sizeof x->why, "not shared, as the caller asked");
	else if (p->nbuckets == 0 && !x->why[0])
		snprintf(x->why, sizeof x->why, "not shared: no two ranks want the same bytes");
	else if (shares)
		snprintf(x->why, sizeof x->why, "shared, as the caller asked; %u ranks want %.1f MiB, of which %.1f "
			"MiB differ", x->comm->size, (double)p->wanted / 1048576, (double)p->distinct / 1048576);
	else if (p->nbuckets && exchange_probe_order(x, ret_done, &bytes) < 0)
		return exchange_short(x, err);
	else if (p->nbuckets && *ret_done == 0)
		snprintf(x->why, sizeof x->why, "not shared: the %.1f MiB that several ranks want are too little to "
			"measure", (double)p->distinct / 1048576);
	if (exchange_own(x) < 0)
		return exchange_short(x, err);
	if (*ret_done)
		r = exchange_probe(x, *ret_done, bytes, &shares, err);
	*ret_n = shares ? p->nbuckets : *ret_done;
	x->result.chosen = shares ? LOAD_EXCHANGE_ALWAYS : LOAD_EXCHANGE_NEVER;
	return r;
}

static void exchange_begin(struct load_exchange *x, size_t n)
{
	struct base_error err = {0};

	if (exchange_split(x, n) < 0) {
		base_no_memory_for(&err, "the plan of an exchange");
		exchange_fail(x, &err);
	}
	pthread_mutex_lock(&x->lock);
	x->own_limit = 0;
	for (size_t i = 0; i < n; i++)
		x->own_limit += x->plan.buckets[i].owner == x->comm->rank;
	x->private_too = true;
	pthread_cond_broadcast(&x->work);
	pthread_mutex_unlock(&x->lock);
}

/* Has everything come, and been read? Waits a while for it. */
static bool exchange_is_done(struct load_exchange *x)
{
	const struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, EXCHANGE_IDLE_MS);
	int late = 0;
	bool done;

	pthread_mutex_lock(&x->lock);
	while (!(done = !x->placing && x->tasks_over && !x->busy) && !late && !x->error.code)
		late = pthread_cond_clockwait(&x->news, &x->lock, CLOCK_MONOTONIC, &until);
	pthread_mutex_unlock(&x->lock);
	return done;
}

/* Nothing is on its way to this rank any more. */
static void exchange_check(struct load_exchange *x)
{
	struct base_error err = {0};

	place_device_wait(x->f);
	if (fill_check(x->f, &err) < 0)
		exchange_fail(x, &err);
}

/* Votes until all ranks are done. */
static int exchange_end(struct load_exchange *x, struct base_error *err)
{
	bool all = false;
	int r = 0;

	while (r == 0 && !all) {
		uint64_t numbers[EXCHANGE_VOTE_NUMBERS] = {exchange_is_done(x)};
		struct exchange_vote *votes = NULL;

		if (numbers[0]) /* all threads of this rank have placed all they have */
			exchange_check(x);
		r = exchange_agree(x, "the end of a load", numbers, &votes, err);
		all = r == 0;
		for (uint32_t i = 0; all && i < x->comm->size; i++)
			all = votes[i].number[0] == 1;
		free(votes);
	}
	return r;
}

static int exchange_rounds(struct load_exchange *x, struct base_error *err)
{
	size_t done = 0, n = 0, next;
	int r = exchange_choose(x, &done, &n, err);

	if (r < 0)
		return r;
	if (n > done && x->mode == LOAD_EXCHANGE_AUTO) {
		exchange_rooms(x, COMM_ROOMS);
		r = exchange_agree(x, "memory for buckets", NULL, NULL, err);
	}
	if (r < 0)
		return r;
	exchange_begin(x, n);
	for (; r == 0 && done < n; done = next) {
		next = base_min(n, done + (size_t)EXCHANGE_ROUND * x->comm->size);
		r = exchange_turns(x, done, next, err);
		if (r == 0)
			r = exchange_agree(x, "a round of buckets", NULL, NULL, err);
	}
	return r < 0 ? r : exchange_end(x, err);
}

/* Do all ranks have the same plan? */
static int exchange_compare(struct load_exchange *x, struct base_error *err)
{
	const uint64_t numbers[EXCHANGE_VOTE_NUMBERS] = {x->plan.sum, x->plan.nbuckets};
	struct exchange_vote *votes = NULL;
	int r = exchange_agree(x, "a plan", numbers, &votes, err);

	for (uint32_t i = 0; r == 0 && i < x->comm->size; i++)
		if (votes[i].number[0] != numbers[0] || votes[i].number[1] != numbers[1])
			r = base_error_set(err, -BASE_EFORMAT, "rank %u made another plan of the exchange than rank %u",
				i, x->comm->rank);
	free(votes);
	return r;
}

static int exchange_meet(struct load_exchange *x, int r, struct base_error *err)
{
	base_cleanup_free struct exchange_greeting *all = calloc(x->comm->size, sizeof *all);
	struct base_error failed = {0};

	if (r == 0 && x->mode != LOAD_EXCHANGE_NEVER && exchange_wants(x) < 0)
		r = base_no_memory_for(err, "what is wanted of a load");
	if (r < 0)
		base_error_set(&failed, r, "%s", err && err->code ? err->text : base_error_name(r));
	if (!all)
		return exchange_short(x, err);
	r = exchange_greet(x, &failed, all, err);
	if (r < 0 || x->mode == LOAD_EXCHANGE_NEVER)
		return r;
	r = exchange_lists(x, all, err);
	if (r == -BASE_ELIMIT) { /* at all ranks alike */
		snprintf(x->why, sizeof x->why, "not shared: %.300s", err->text);
		exchange_plan_release(&x->plan);
		*err = (struct base_error){0};
		r = 0;
	}
	return r;
}

/* r: the result of this rank's fill_begin; err has its sentence. */
static int exchange_together(struct load_exchange *x, int r, struct base_error *err)
{
	x->comm->stop = &x->f->stopped;
	r = exchange_meet(x, r, err);
	if (r == 0) {
		threads_start(x);
		r = exchange_compare(x, err);
	}
	if (r == 0)
		r = exchange_rounds(x, err);
	threads_end(x);
	x->comm->stop = NULL;
	x->result.shared = x->plan.distinct;
	x->result.wanted = x->plan.wanted;
	if (r < 0)
		return r;
	base_info("load of %s/%llu, rank %u: %s", load_step_info(x->f->step)->run,
		(unsigned long long)load_step_info(x->f->step)->step, x->comm->rank, x->why);
	return 0;
}

int load_exchange_run(struct load_exchange *x, struct base_error *err)
{
	struct base_error own = {0}, *e = err ? err : &own;
	int r = exchange_together(x, fill_begin(x->f, e), e);

	fill_end(x->f);
	return r;
}
