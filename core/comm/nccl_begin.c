/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl begin: a communicator's beginning and end.
 *
 * Each rank first makes what it can by itself (the library, a stream, pinned memory), and reports over `base` whether
 * that worked, and rank 0 the unique id. So a rank that has no NCCL is an error of all, before any of them waits in
 * NCCL. When NCCL is done they report again. `base` goes on working in any case: without NCCL it may
 * carry the buckets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/comm/nccl_comm_internal.h"

#define NCCL_END_MS 30000u               /* for abort and destroy, at most */
#define NCCL_NEWS_MAX (64u << 20)

/* ---- memory ---- */

int nccl_memory_new(struct nccl_transport *t, size_t bytes, struct nccl_memory *ret_m, struct base_error *err)
{
	void *memory = NULL;
	int r = device_registration_new(t->fence, &memory, bytes, &ret_m->registration, err);

	if (r < 0)
		return base_error_prefix(err, r, "pinned memory for NCCL");
	ret_m->bytes = memory;
	ret_m->len = bytes;
	return 0;
}

void nccl_memory_free(struct nccl_memory *m)
{
	device_registration_free(m->registration);
	*m = (struct nccl_memory){0};
}

/* ---- the end ---- */

static void nccl_leave(struct nccl_transport *t, int (*how)(unsigned timeout_ms, nccl_comm c, struct base_error *err))
{
	nccl_comm comm = base_steal(t->comm);

	if (comm && how(base_min(t->c.timeout_ms, NCCL_END_MS), comm, NULL) == -ETIMEDOUT)
		t->stuck = true;
}

void nccl_give_up(struct nccl_transport *t)
{
	nccl_leave(t, nccl_abort_within);
}

static void nccl_free(struct nccl_transport *t)
{
	while (t->all) {
		struct nccl_flight *f = t->all;

		t->all = f->older;
		device_event_free(f->event);
		nccl_memory_free(&f->memory);
		free(f);
	}
	device_event_free(t->gathered);
	nccl_memory_free(&t->strings);
	device_stream_free(t->stream);
	nccl_memory_free(&t->rooms);
	device_fence_free(t->fence);
	pthread_mutex_destroy(&t->lock);
	comm_release(&t->c);
	free(t);
}

void nccl_end(struct comm *c)
{
	struct nccl_transport *t = (struct nccl_transport *)c;

	nccl_leave(t, c->broken.code || c->flying ? nccl_abort_within : nccl_destroy_within);
	if (!t->stuck)                           /* the device may still use its memory */
		nccl_free(t);
}

/* ---- what a rank makes by itself ---- */

static int nccl_alone(struct nccl_transport *t, struct base_error *err)
{
	unsigned context;
	int r = device_fence_new(&t->fence, err);

	if (r == 0)
		r = device_fence_context(t->fence, NULL, &context, err);
	if (r == 0)
		r = device_stream_new(t->fence, context, DEVICE_PIN_NO, &t->stream, err);
	if (r == 0)
		r = device_event_new(t->stream, &t->gathered, err);
	if (r == 0)
		r = nccl_memory_new(t, (size_t)COMM_ROOMS * COMM_PASS_BYTES, &t->rooms, err);
	if (r == 0)
		comm_lend_rooms(&t->c, t->rooms.bytes);
	return r;
}

static int nccl_new(struct comm *base, uint32_t rank, uint32_t size, uint32_t timeout_ms, struct nccl_transport **ret_t,
	struct base_error *err)
{
	struct nccl_transport *t = calloc(1, sizeof *t);
	int r;

	if (!t)
		return base_no_memory(err);
	r = comm_init(&t->c, &nccl_ops, rank, size, timeout_ms, err);
	if (r < 0) {
		free(t);
		return r;
	}
	pthread_mutex_init(&t->lock, NULL);
	t->c.lends = true;
	t->base = base;
	r = nccl_alone(t, err);
	if (r < 0)
		nccl_free(t);
	else
		*ret_t = t;
	return r;
}

/* ---- what they make together ---- */

enum { NCCL_WORKS, NCCL_TIMED_OUT, NCCL_FAILED };
struct nccl_news { uint8_t state; char what[511]; }; /* the unique id, or why there is none */

/* Gathers what became of each rank; any rank's failure is every rank's. `why`: this rank's. A time-out may be another's
 * failure, which says more. */
static int nccl_exchange(struct comm *base, const struct nccl_news *mine, const char *what,
	const struct base_error *why, struct nccl_news *ret_first, struct base_error *err)
{
	struct comm_gathered all;
	uint8_t worst = NCCL_WORKS;
	int r = comm_gather(base, what, mine, sizeof *mine, NCCL_NEWS_MAX, &all, err);

	for (uint32_t i = 0; all.bytes && i < base->size; i++) {
		struct nccl_news *news = (struct nccl_news *)all.bytes[i];

		if (all.len[i] != sizeof *news) {
			r = base_error_set(err, -BASE_EFORMAT, "rank %u says something else than %s", i, what);
			break;
		}
		news->what[sizeof news->what - 1] = 0;
		if (i == 0)
			*ret_first = *news;
		if (news->state > worst)
			r = base_error_set(err, i == base->rank ? why->code : -BASE_EABORTED, "rank %u: %s", i,
				news->what);
		worst = base_max(worst, news->state);
	}
	comm_gathered_release(&all);
	return r;
}

/* id: what the others need where all is well; or NULL. */
static struct nccl_news nccl_news_of(const struct base_error *why, const nccl_id *id)
{
	struct nccl_news news = {.state = why->code == 0 ? NCCL_WORKS : why->code == -ETIMEDOUT ? NCCL_TIMED_OUT :
		NCCL_FAILED};

	if (why->code)
		snprintf(news.what, sizeof news.what, "%.500s", why->text);
	else if (id)
		memcpy(news.what, id, sizeof *id);
	return news;
}

static int nccl_init(struct nccl_transport *t, const struct nccl_news *first, struct base_error *err)
{
	nccl_config config = NCCL_CONFIG_NONBLOCKING;
	nccl_id id;
	int r = device_stream_enter(t->stream, err);

	if (r < 0)
		return r;
	memcpy(&id, first->what, sizeof id);
	r = nccl_translate(nccl.init_rank(&t->starting, (int)t->c.size, id, (int)t->c.rank, &config),
		"ncclCommInitRankConfig", err);
	t->comm = t->starting;
	device_stream_leave(t->stream);
	return r == 0 ? nccl_wait(t, NULL, "ncclCommInitRankConfig", err) : r;
}

/* `t` may be NULL: this rank has failed already, `why` says how. */
static int nccl_agree(struct nccl_transport *t, struct comm *base, struct base_error *why, struct base_error *err)
{
	struct nccl_news mine, first = {0};
	nccl_id id = {0};
	int r;

	if (t && base->rank == 0)
		nccl_translate(nccl.get_unique_id(&id), "ncclGetUniqueId", why);
	mine = nccl_news_of(why, &id);
	r = nccl_exchange(base, &mine, "NCCL's unique id", why, &first, err);
	if (r < 0)
		return r;
	nccl_init(t, &first, why);
	mine = nccl_news_of(why, NULL);
	return nccl_exchange(base, &mine, "NCCL's communicator", why, &first, err);
}

int comm_nccl_new(struct comm *base, uint32_t timeout_ms, struct comm **ret_c, struct base_error *err)
{
	struct nccl_transport *t = NULL;
	struct base_error why = {0};
	int r;

	if (nccl_load(&why) == 0)
		nccl_new(base, base->rank, base->size, timeout_ms, &t, &why);
	r = nccl_agree(t, base, &why, err);
	if (r < 0 && t) {
		t->c.broken.code = r;            /* so it is aborted */
		nccl_end(&t->c);
	}
	if (r == 0)
		*ret_c = &t->c;
	return r;
}

/* ---- from the caller's ---- */

int comm_nccl_split(void *nccl_comm_, uint32_t timeout_ms, struct comm **ret_c, struct base_error *err)
{
	struct nccl_transport *t = NULL;
	nccl_comm parent = nccl_comm_;
	int r = nccl_load(err), rank = 0, size = 0;

	if (r == 0 && !nccl.split)
		return base_error_set(err, -ENOENT, "the NCCL library has no ncclCommSplit: NCCL 2.18 or later is "
			"needed for a communicator from the caller's");
	if (r == 0)
		r = nccl_translate(nccl.user_rank(parent, &rank), "ncclCommUserRank", err);
	if (r == 0)
		r = nccl_translate(nccl.count(parent, &size), "ncclCommCount", err);
	if (r == 0)
		r = nccl_new(NULL, (uint32_t)rank, (uint32_t)size, timeout_ms, &t, err);
	if (r < 0)
		return r;
	r = nccl_split_within(t->c.timeout_ms, parent, rank, &t->comm, err);
	if (r == 0)
		r = nccl_wait(t, NULL, "ncclCommSplit", err);
	if (r < 0) {
		t->c.broken.code = r;
		nccl_end(&t->c);
		return r;
	}
	*ret_c = &t->c;
	return 0;
}
