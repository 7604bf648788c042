/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi: a gather is one MPI_Iallgatherv, a pass one message from its owner to each rank that wants it. Messages between
 * two ranks keep their order, and both start their passes in that order, so a message needs no number. Whether a
 * request is done is asked again and again, with sleeps, until the time-out: MPI has no waits that end by themselves.
 * Such a question also makes MPI work on whatever else is open.
 *
 * A request that has not ended keeps the memory that it was given, and nothing is sure to get that back: a send that
 * has begun, or a collective, cannot be cancelled. So where one is left over (`open`), freeing the communicator leaves
 * all of it as it is, and the process does not finalise MPI by itself.
 *
 * The bell is the message that another rank has given up. Each rank has posted a receive for one. */
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/base/clock.h"
#include "core/comm/mpi.h"
#include "core/comm/mpi_internal.h"

enum { MPI_TAG_PASS = 1, MPI_TAG_BELL = 2 };
#define MPI_EAGER_POLLS 100u             /* before the first sleep */
#define MPI_SLEEP_NS 200000L
#define MPI_BELL_END_MS 1000u

struct mpi_bell { uint32_t rank; char why[508]; };
struct mpi_requests { uint32_t n; union mpi_handle at[]; };

struct mpi_transport {
	struct comm c;
	const struct mpi_library *l;
	union mpi_handle comm;
	uint32_t open;                   /* passes and gathers that have begun and not ended */
	union mpi_handle bell;           /* a receive into the next */
	struct mpi_bell rung;
	bool posted;                     /* the receive is */
	atomic_bool heard;               /* the message has come */
	struct mpi_bell *ring;           /* this rank's, and the sends of it; NULL: it did not give up */
	struct mpi_requests *rings;
};

/* ---- waits ---- */

struct mpi_wait { uint64_t until_ms; unsigned polls; };

static struct mpi_wait mpi_wait_for_ms(uint64_t ms)
{
	return (struct mpi_wait){.until_ms = base_monotonic_ms() + ms};
}

static void mpi_sleep(struct mpi_wait *w)
{
	struct timespec t = {.tv_nsec = MPI_SLEEP_NS};

	if (w->polls++ < MPI_EAGER_POLLS)
		sched_yield();
	else
		nanosleep(&t, NULL);
}

/* Whether another rank gave up. */
static int mpi_listen(struct comm *c, struct base_error *err)
{
	struct mpi_transport *m = (struct mpi_transport *)c;
	int done = 0, n = 0, code;

	if (!m->posted)
		return 0;
	if (!atomic_load(&m->heard)) {
		code = mpi_test(m->l, &m->bell, &done, &n);
		if (code != MPI_SUCCEEDED)
			return mpi_translate(m->l, code, "MPI_Test", err);
		if (!done)
			return 0;
		m->rung.why[n == sizeof m->rung ? sizeof m->rung.why - 1 : 0] = 0;
		atomic_store(&m->heard, true);
	}
	return base_error_set(err, -BASE_EABORTED, "rank %u gave up: %s", m->rung.rank, m->rung.why);
}

/* Until the request is done; *ret_n: the bytes that came, where it was a receive. */
static int mpi_wait(struct mpi_transport *m, union mpi_handle *request, struct mpi_wait *w, const char *what,
	int *ret_n, struct base_error *err)
{
	for (;;) {
		int done = 0, r, code = mpi_test(m->l, request, &done, ret_n);

		if (code != MPI_SUCCEEDED)
			return mpi_translate(m->l, code, what, err);
		if (done)
			return 0;
		r = mpi_listen(&m->c, err);
		if (r < 0)
			return r;
		if (m->c.stop && atomic_load(m->c.stop))
			return base_error_set(err, -ECANCELED, "the load was stopped");
		if (base_monotonic_ms() >= w->until_ms)
			return base_error_set(err, -ETIMEDOUT, "%s: the other ranks did nothing for %u ms", what,
				m->c.timeout_ms);
		mpi_sleep(w);
	}
}

/* ---- gathers ---- */

/* What MPI uses until the request is done. */
struct mpi_gathering { int *lens, *at; uint8_t *mine, *all; };

static void mpi_gathering_release(struct mpi_gathering *g)
{
	free(g->lens);
	free(g->at);
	free(g->mine);
	free(g->all);
}

static int mpi_gathering_init(const struct mpi_transport *m, const void *mine, const uint64_t *lens,
	struct mpi_gathering *g, uint64_t *ret_sum, struct base_error *err)
{
	uint64_t sum = 0;

	*g = (struct mpi_gathering){.lens = calloc(m->c.size, sizeof *g->lens), .at = calloc(m->c.size, sizeof *g->at)};
	for (uint32_t i = 0; g->lens && g->at && i < m->c.size; i++) {
		if (lens[i] > INT_MAX - sum)
			return base_error_set(err, -BASE_ELIMIT, "MPI gathers at most 2 GiB at once");
		g->lens[i] = (int)lens[i];
		g->at[i] = (int)sum;
		sum += lens[i];
	}
	g->mine = malloc(lens[m->c.rank] + 1);
	g->all = malloc(sum + 1);
	if (!g->lens || !g->at || !g->mine || !g->all)
		return base_no_memory(err);
	if (lens[m->c.rank])
		memcpy(g->mine, mine, lens[m->c.rank]);
	*ret_sum = sum;
	return 0;
}

static int mpi_gather(struct comm *c, const void *mine, const uint64_t *lens, uint8_t *ret_all,
	struct base_error *err)
{
	struct mpi_transport *m = (struct mpi_transport *)c;
	struct mpi_wait w = mpi_wait_for_ms(c->timeout_ms);
	union mpi_handle request;
	struct mpi_gathering g;
	uint64_t sum = 0;
	int r = mpi_gathering_init(m, mine, lens, &g, &sum, err);

	if (r == 0)
		r = mpi_translate(m->l, mpi_iallgatherv(m->l, m->comm, g.mine, g.lens[c->rank], g.all, g.lens, g.at,
			&request), "MPI_Iallgatherv", err);
	if (r < 0) {
		mpi_gathering_release(&g);
		return r;
	}
	r = mpi_wait(m, &request, &w, "MPI_Iallgatherv", NULL, err);
	if (r < 0) {
		m->open++;
		return r;
	}
	if (sum)
		memcpy(ret_all, g.all, sum);
	mpi_gathering_release(&g);
	return 0;
}

/* ---- passes ---- */

/* Sends that were begun before one failed stay open. */
static int mpi_send(struct mpi_transport *m, const struct comm_pass *p, struct mpi_requests *q, struct base_error *err)
{
	int code = MPI_SUCCEEDED;

	for (; q->n < p->nranks && code == MPI_SUCCEEDED; q->n++)
		code = mpi_isend(m->l, m->comm, p->bytes, (int)p->len, (int)p->ranks[q->n], MPI_TAG_PASS,
			&q->at[q->n]);
	return mpi_translate(m->l, code, "MPI_Isend", err);
}

static int mpi_receive(struct mpi_transport *m, const struct comm_pass *p, struct mpi_requests *q,
	struct base_error *err)
{
	int code = mpi_irecv(m->l, m->comm, p->bytes, (int)p->len, (int)p->owner, MPI_TAG_PASS, &q->at[0]);

	q->n = 1;
	return mpi_translate(m->l, code, "MPI_Irecv", err);
}

static int mpi_start(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct mpi_transport *m = (struct mpi_transport *)c;
	bool owner = p->owner == c->rank;
	struct mpi_requests *q;
	int r = mpi_listen(c, err);

	if (r < 0 || (!owner && !comm_pass_wants(c, p)))
		return r;
	q = calloc(1, sizeof *q + (owner ? p->nranks : 1) * sizeof *q->at);
	if (!q)
		return base_no_memory(err);
	p->request = q;
	m->open++;
	return owner ? mpi_send(m, p, q, err) : mpi_receive(m, p, q, err);
}

static int mpi_finish(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct mpi_transport *m = (struct mpi_transport *)c;
	struct mpi_wait w = mpi_wait_for_ms(c->timeout_ms);
	struct mpi_requests *q = p->request;
	bool owner = p->owner == c->rank;
	int n = 0;

	for (uint32_t i = 0; i < q->n; i++) {
		int r = mpi_wait(m, &q->at[i], &w, owner ? "MPI_Isend" : "MPI_Irecv", owner ? NULL : &n, err);

		if (r < 0)
			return r;
	}
	free(q);
	p->request = NULL;
	m->open--;
	if (!owner && (uint64_t)n != p->len)
		return base_error_set(err, -BASE_EFORMAT, "rank %u sent %d bytes as a bucket of %llu", p->owner, n,
			(unsigned long long)p->len);
	return 0;
}

/* ---- the bell ---- */

/* A rank that rings informs all others, so a rank that has heard it does not ring. */
static void mpi_abort(struct comm *c, const char *why)
{
	struct mpi_transport *m = (struct mpi_transport *)c;
	struct mpi_requests *q = atomic_load(&m->heard) ? NULL : calloc(1, sizeof *q + c->size * sizeof *q->at);

	m->ring = q ? calloc(1, sizeof *m->ring) : NULL;
	if (!m->ring) {
		free(q);
		return;
	}
	m->ring->rank = c->rank;
	strncpy(m->ring->why, why, sizeof m->ring->why - 1);
	for (uint32_t i = 0; i < c->size; i++)
		if (i != c->rank && mpi_isend(m->l, m->comm, m->ring, sizeof *m->ring, (int)i, MPI_TAG_BELL,
			&q->at[q->n]) == MPI_SUCCEEDED)
			q->n++;
	m->rings = q;
}

/* True: MPI has let go of its memory. */
static bool mpi_request_ends(const struct mpi_transport *m, union mpi_handle *request)
{
	struct mpi_wait w = mpi_wait_for_ms(MPI_BELL_END_MS);
	int done = 0;

	while (mpi_test(m->l, request, &done, NULL) == MPI_SUCCEEDED && !done && base_monotonic_ms() < w.until_ms)
		mpi_sleep(&w);
	return done;
}

static bool mpi_bell_ends(struct mpi_transport *m)
{
	bool ends = !m->posted || atomic_load(&m->heard) ||
		(mpi_cancel(m->l, &m->bell) == MPI_SUCCEEDED && mpi_request_ends(m, &m->bell));

	for (uint32_t i = 0; ends && m->rings && i < m->rings->n; i++)
		ends = mpi_request_ends(m, &m->rings->at[i]);
	return ends;
}

/* ---- a communicator ---- */

static void mpi_end(struct comm *c)
{
	struct mpi_transport *m = (struct mpi_transport *)c;

	if (!mpi_library_works(m->l) || m->open || !mpi_bell_ends(m))
		return;
	/* A bell that a rank had not heard when it freed its end stays with MPI, which gives the number of a freed
	 * communicator to the next one: that would hear it. MPI takes a number that no rank has in use, so a rank
	 * that rang keeps its own. */
	if (m->posted && !m->ring)
		mpi_comm_free(m->l, &m->comm);
	mpi_library_put();
	free(m->ring);
	free(m->rings);
	comm_release(c);
	free(m);
}

static const struct comm_ops mpi_ops = {.gather = mpi_gather, .start = mpi_start, .finish = mpi_finish,
	.listen = mpi_listen, .abort = mpi_abort, .free = mpi_end};

/* ---- a communicator's begin ---- */

static int mpi_duplicate(struct mpi_transport *m, union mpi_handle from, struct base_error *err)
{
	struct mpi_wait w = mpi_wait_for_ms(m->c.timeout_ms);
	union mpi_handle request;
	int r = mpi_translate(m->l, mpi_comm_idup(m->l, from, &m->comm, &request), "MPI_Comm_idup", err);

	if (r < 0)
		return r;
	m->open++;
	r = mpi_wait(m, &request, &w, "MPI_Comm_idup", NULL, err);
	if (r < 0)
		return r;
	m->open--;
	return mpi_translate(m->l, mpi_comm_return_errors(m->l, m->comm), "MPI_Comm_set_errhandler", err);
}

static int mpi_post_bell(struct mpi_transport *m, struct base_error *err)
{
	int r = mpi_translate(m->l, mpi_irecv(m->l, m->comm, &m->rung, sizeof m->rung, m->l->any_source, MPI_TAG_BELL,
		&m->bell), "MPI_Irecv", err);

	m->posted = r == 0;
	return r;
}

static int mpi_begin(struct mpi_transport *m, union mpi_handle from, uint32_t timeout_ms, struct base_error *err)
{
	int rank = 0, size = 0, r;

	r = mpi_translate(m->l, mpi_comm_rank(m->l, from, &rank), "MPI_Comm_rank", err);
	if (r == 0)
		r = mpi_translate(m->l, mpi_comm_size(m->l, from, &size), "MPI_Comm_size", err);
	if (r == 0)
		r = comm_init(&m->c, &mpi_ops, (uint32_t)rank, (uint32_t)size, timeout_ms, err);
	if (r < 0) {
		mpi_library_put();
		free(m);
		return r;
	}
	r = mpi_duplicate(m, from, err);
	if (r == 0)
		r = mpi_post_bell(m, err);
	if (r < 0)
		mpi_end(&m->c);
	return r;
}

int comm_mpi_new(const void *mpi_comm, bool init, uint32_t timeout_ms, struct comm **ret_c, struct base_error *err)
{
	const struct mpi_library *l;
	int r = mpi_library_get(init, &l, err);
	struct mpi_transport *m = r == 0 ? calloc(1, sizeof *m) : NULL;
	union mpi_handle from;

	if (r < 0)
		return r;
	if (!m) {
		mpi_library_put();
		return base_no_memory(err);
	}
	m->l = l;
	from = l->world;
	if (mpi_comm && l->pointers)
		from.pointer = *(void *const *)mpi_comm;
	else if (mpi_comm)
		from.number = *(const int *)mpi_comm;
	r = mpi_begin(m, from, timeout_ms, err);
	if (r == 0)
		*ret_c = &m->c;
	return r;
}
