/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl: gathers and passes. All of NCCL's work goes to one stream, in the order in which the ranks start it, which is
 * the same at all of them; NCCL needs that. A pass to all other ranks is a broadcast, one to some is a send to each, in
 * one group.
 *
 * A call of a non-blocking communicator may return before NCCL has given its work to the stream. Then the next call has
 * to wait, and so has the event behind the work: start waits for that, and at the first passes NCCL
 * makes connections meanwhile, for which the other ranks have to come to the same pass. They do: nothing that they may
 * wait for before it needs this rank any more.
 *
 * A wait that fails aborts the communicator: a kernel that waits for a dead rank would keep the device, and write into
 * buckets that are long another's. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/comm/nccl_comm_internal.h"

#define NCCL_EAGER_POLLS 100u            /* before the first sleep */
#define NCCL_SLEEP_NS 100000L
#define NCCL_STRINGS_MAX (1u << 30)
#define NCCL_STRINGS_LEAST (64u << 10)

static struct nccl_transport *nccl_of(struct comm *c) { return (struct nccl_transport *)c; }

/* ---- waits ---- */

/* 1: it is so; 0: not yet. */
static int nccl_look(struct nccl_transport *t, struct device_event *event, const char *what, struct base_error *err)
{
	nccl_result state = NCCL_SUCCESS;
	int r = nccl_translate(nccl.async_error(t->comm, &state), "ncclCommGetAsyncError", err);

	if (r == 0)
		r = nccl_translate(state, what, err);
	if (r < 0)
		return r;
	return event ? device_event_done(event, err) : state != NCCL_IN_PROGRESS;
}

int nccl_wait(struct nccl_transport *t, struct device_event *event, const char *what, struct base_error *err)
{
	uint64_t until = base_monotonic_ms() + t->c.timeout_ms;

	for (unsigned polls = 0;; polls++) {
		struct timespec pause = {.tv_nsec = polls < NCCL_EAGER_POLLS ? 0 : NCCL_SLEEP_NS};
		int r = nccl_look(t, event, what, err);

		if (r != 0)
			return r < 0 ? r : 0;
		r = t->base && t->base->ops->listen && polls % NCCL_EAGER_POLLS == NCCL_EAGER_POLLS - 1 ?
			t->base->ops->listen(t->base, err) : 0;
		if (r < 0)
			return r;
		if (t->c.stop && atomic_load(t->c.stop))
			return base_error_set(err, -ECANCELED, "the load was stopped");
		if (base_monotonic_ms() >= until)
			return base_error_set(err, -ETIMEDOUT, "%s: the other ranks did nothing for %u ms", what,
				t->c.timeout_ms);
		nanosleep(&pause, NULL);
	}
}

/* What was given to the stream last, which NCCL may not have done yet. `r` is what the calls gave. */
static int nccl_given(struct nccl_transport *t, int r, struct device_event *event, const char *what,
	struct base_error *err)
{
	device_stream_leave(t->stream);
	if (r == 0)
		r = nccl_wait(t, NULL, what, err);
	if (r == 0)
		r = device_event_set(event, err);
	if (r < 0)
		nccl_give_up(t);
	return r;
}

/* ---- gathers ---- */

static int nccl_strings_room(struct nccl_transport *t, size_t bytes, struct base_error *err)
{
	size_t len = NCCL_STRINGS_LEAST;

	if (bytes > NCCL_STRINGS_MAX)
		return base_error_set(err, -BASE_ELIMIT, "NCCL gathers at most %u bytes at once", NCCL_STRINGS_MAX);
	if (bytes <= t->strings.len)
		return 0;
	while (len < bytes)
		len *= 2;
	nccl_memory_free(&t->strings);
	return nccl_memory_new(t, len, &t->strings, err);
}

static int nccl_broadcasts(struct nccl_transport *t, const uint64_t *lens, struct base_error *err)
{
	uint8_t *at = t->strings.bytes;
	int r = nccl_translate(nccl.group_start(), "ncclGroupStart", err), ended;

	for (uint32_t i = 0; r == 0 && i < t->c.size; at += lens[i], i++)
		if (lens[i])
			r = nccl_translate(nccl.broadcast(at, at, lens[i], NCCL_UINT8, (int)i, t->comm,
				device_stream_handle(t->stream)), "ncclBroadcast", err);
	ended = nccl_translate(nccl.group_end(), "ncclGroupEnd", r == 0 ? err : NULL);
	return r < 0 ? r : ended;
}

static int nccl_gather_strings(struct nccl_transport *t, const void *mine, const uint64_t *lens, uint8_t *ret_all,
	struct base_error *err)
{
	uint64_t sum = 0, own = 0;
	int r;

	for (uint32_t i = 0; i < t->c.size; i++) {
		own = i == t->c.rank ? sum : own;
		sum = lens[i] > NCCL_STRINGS_MAX ? UINT64_MAX / 2 : sum + lens[i];
	}
	r = nccl_strings_room(t, sum, err);
	if (r == 0)
		r = device_stream_enter(t->stream, err);
	if (r < 0)
		return r;
	if (lens[t->c.rank])
		memcpy(t->strings.bytes + own, mine, lens[t->c.rank]);
	r = nccl_given(t, nccl_broadcasts(t, lens, err), t->gathered, "ncclBroadcast", err);
	if (r == 0)
		r = nccl_wait(t, t->gathered, "ncclBroadcast", err);
	if (r < 0)
		nccl_give_up(t);
	else
		memcpy(ret_all, t->strings.bytes, sum);
	return r;
}

static int nccl_gather(struct comm *c, const void *mine, const uint64_t *lens, uint8_t *ret_all,
	struct base_error *err)
{
	struct nccl_transport *t = nccl_of(c);

	if (!t->base)
		return nccl_gather_strings(t, mine, lens, ret_all, err);
	t->base->stop = c->stop;
	return t->base->ops->gather(t->base, mine, lens, ret_all, err);
}

/* ---- passes ---- */

static void nccl_flight_give(struct nccl_transport *t, struct nccl_flight *f)
{
	struct nccl_flight **list = f->memory.bytes ? &t->receives : &t->sends;

	pthread_mutex_lock(&t->lock);
	f->next = *list;
	*list = f;
	pthread_mutex_unlock(&t->lock);
}

static int nccl_flight_new(struct nccl_transport *t, bool receives, struct nccl_flight **ret_f, struct base_error *err)
{
	struct nccl_flight *f = calloc(1, sizeof *f);
	int r;

	if (!f)
		return base_no_memory(err);
	f->older = t->all;
	t->all = f;
	r = device_event_new(t->stream, &f->event, err);
	if (r == 0 && receives)
		r = nccl_memory_new(t, COMM_PASS_BYTES, &f->memory, err);
	*ret_f = f;
	return r;
}

static int nccl_flight_take(struct nccl_transport *t, bool receives, struct nccl_flight **ret_f, struct base_error *err)
{
	struct nccl_flight **list = receives ? &t->receives : &t->sends, *f;

	pthread_mutex_lock(&t->lock);
	f = *list;
	if (f)
		*list = f->next;
	pthread_mutex_unlock(&t->lock);
	*ret_f = f;
	return f ? 0 : nccl_flight_new(t, receives, ret_f, err);
}

static int nccl_send_to_each(struct nccl_transport *t, const struct comm_pass *p, struct base_error *err)
{
	int r = nccl_translate(nccl.group_start(), "ncclGroupStart", err), ended;

	for (uint32_t i = 0; r == 0 && i < p->nranks; i++)
		r = nccl_translate(nccl.send(p->bytes, p->len, NCCL_UINT8, (int)p->ranks[i], t->comm,
			device_stream_handle(t->stream)), "ncclSend", err);
	ended = nccl_translate(nccl.group_end(), "ncclGroupEnd", r == 0 ? err : NULL);
	return r < 0 ? r : ended;
}

static const char *nccl_pass_name(const struct comm *c, const struct comm_pass *p)
{
	return p->nranks == c->size - 1 ? "ncclBroadcast" : p->owner == c->rank ? "ncclSend" : "ncclRecv";
}

static int nccl_start(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct nccl_transport *t = nccl_of(c);
	bool owner = p->owner == c->rank;
	nccl_stream stream = device_stream_handle(t->stream);
	struct nccl_flight *f;
	int r;

	if (!owner && !comm_pass_wants(c, p))
		return 0;
	r = nccl_flight_take(t, !owner, &f, err);
	if (r == 0)
		r = device_stream_enter(t->stream, err);
	if (r < 0)
		return r;
	p->request = f;
	if (p->nranks == c->size - 1)
		r = nccl_translate(nccl.broadcast(owner ? p->bytes : f->memory.bytes, owner ? p->bytes :
			f->memory.bytes, p->len, NCCL_UINT8, (int)p->owner, t->comm, stream), "ncclBroadcast", err);
	else if (owner)
		r = nccl_send_to_each(t, p, err);
	else
		r = nccl_translate(nccl.recv(f->memory.bytes, p->len, NCCL_UINT8, (int)p->owner, t->comm, stream),
			"ncclRecv", err);
	return nccl_given(t, r, f->event, nccl_pass_name(c, p), err);
}

static int nccl_finish(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct nccl_transport *t = nccl_of(c);
	struct nccl_flight *f = p->request;
	int r = nccl_wait(t, f->event, nccl_pass_name(c, p), err);

	if (r < 0) {
		nccl_give_up(t);
		return r;
	}
	if (p->owner == c->rank)
		nccl_flight_give(t, f);
	else
		p->bytes = f->memory.bytes;
	return 0;
}

static void nccl_done(struct comm *c, struct comm_pass *p)
{
	nccl_flight_give(nccl_of(c), p->request);
}

static void nccl_abort(struct comm *c, const char *why)
{
	struct nccl_transport *t = nccl_of(c);

	if (t->base)
		comm_abort(t->base, why);
}

const struct comm_ops nccl_ops = {.gather = nccl_gather, .start = nccl_start, .finish = nccl_finish, .done = nccl_done,
	.abort = nccl_abort, .free = nccl_end};
