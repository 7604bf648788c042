/* SPDX-License-Identifier: Apache-2.0
 *
 * comm: what all transports have in common: checks of what the caller and the peers say, memory, and what a failed call
 * leaves behind.
 *
 * A gather is two of the transport's: first 24 bytes of each rank (which call it is, of what, and how long its string
 * is), then the strings. So ranks that are out of step find it out before one of them takes bytes for what they are
 * not.
 *
 * Buffers stay the communicator's until it is freed: where a call failed, a transport may still write into them. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/digest.h"
#include "core/base/le.h"
#include "core/comm/comm.h"

#define GATHER_HEAD_BYTES 24u            /* calls before this one, hash of its name and of the passes, length */

int comm_init(struct comm *c, const struct comm_ops *ops, uint32_t rank, uint32_t size, uint32_t timeout_ms,
	struct base_error *err)
{
	if (size == 0 || size > COMM_RANKS_MAX)
		return base_error_set(err, -EINVAL, "a communicator has 1 to %u ranks, not %u", COMM_RANKS_MAX, size);
	if (rank >= size)
		return base_error_set(err, -EINVAL, "there is no rank %u among %u", rank, size);
	c->ops = ops;
	c->rank = rank;
	c->size = size;
	c->timeout_ms = timeout_ms ? timeout_ms : COMM_TIMEOUT_MS;
	pthread_mutex_init(&c->lock, NULL);
	return 0;
}

void comm_lend_rooms(struct comm *c, uint8_t *bytes)
{
	for (unsigned i = 0; i < COMM_ROOMS; i++)
		c->rooms[i].bytes = bytes + (size_t)i * COMM_PASS_BYTES;
	c->rooms_lent = true;
}

void comm_release(struct comm *c)
{
	for (unsigned i = 0; i < COMM_ROOMS && !c->rooms_lent; i++)
		free(c->rooms[i].bytes);
	for (size_t i = 0; i < c->nbuffers; i++)
		free(c->buffers[i].bytes);
	free(c->buffers);
	pthread_mutex_destroy(&c->lock);
}

void comm_free(struct comm *c)
{
	if (c)
		c->ops->free(c);
}

int comm_take(struct comm *c, struct base_error *err)
{
	return !atomic_exchange(&c->taken, true) ? 0 : base_error_set(err, -EBUSY,
		"the communicator is in use by another load, call or communicator");
}

/* ---- failure ---- */

static int comm_works(struct comm *c, struct base_error *err)
{
	int r = 0;

	pthread_mutex_lock(&c->lock);
	if (c->broken.code)
		r = base_error_set(err, c->broken.code, "%s", c->broken.text);
	pthread_mutex_unlock(&c->lock);
	return r;
}

/* The first failure counts, and is what the others get. */
static void comm_fail(struct comm *c, int r, const char *why)
{
	bool first;

	pthread_mutex_lock(&c->lock);
	first = !c->broken.code;
	if (first)
		base_error_set(&c->broken, r, "%s", why);
	pthread_mutex_unlock(&c->lock);
	if (first && c->ops->abort)
		c->ops->abort(c, why);
}

void comm_abort(struct comm *c, const char *why)
{
	comm_fail(c, -BASE_EABORTED, why);
}

static int comm_failed(struct comm *c, int r, const struct base_error *why, struct base_error *err)
{
	comm_fail(c, r, why->code ? why->text : base_error_name(r));
	return comm_works(c, err);
}

/* ---- gathers ---- */

void comm_gathered_release(struct comm_gathered *g)
{
	if (g->bytes)
		free(g->bytes[0]);
	free(g->bytes);
	free(g->len);
	*g = (struct comm_gathered){0};
}

/* Compares what the ranks say of the call, and adds their lengths. */
static int gather_heads(const struct comm *c, const char *what, const uint8_t *heads, uint64_t *lens,
	uint64_t *ret_sum, struct base_error *err)
{
	const uint8_t *mine = heads + (size_t)c->rank * GATHER_HEAD_BYTES;

	*ret_sum = 0;
	for (uint32_t i = 0; i < c->size; i++) {
		const uint8_t *head = heads + (size_t)i * GATHER_HEAD_BYTES;

		if (memcmp(head, mine, 16) != 0)
			return base_error_set(err, -BASE_EFORMAT, "rank %u is out of step with rank %u, which is at "
				"\"%s\", its call %llu: all ranks have to make the same calls in the same order", i,
				c->rank, what, (unsigned long long)c->gathers);
		lens[i] = base_get64(head + 16);
		if (base_add_overflows(*ret_sum, lens[i], ret_sum))
			*ret_sum = UINT64_MAX;
		if (*ret_sum == UINT64_MAX)
			break;
	}
	return 0;
}

static int gather_lens(struct comm *c, const char *what, uint64_t len, uint64_t *lens, uint64_t *ret_sum,
	struct base_error *err)
{
	uint64_t head[GATHER_HEAD_BYTES / 8];
	base_cleanup_free uint8_t *heads = malloc((size_t)c->size * GATHER_HEAD_BYTES);
	int r;

	if (!heads)
		return base_no_memory(err);
	base_put64(&head[0], c->gathers);
	base_put64(&head[1], base_xxh64_of(c->passes, what, strlen(what)));
	base_put64(&head[2], len);
	for (uint32_t i = 0; i < c->size; i++)
		lens[i] = GATHER_HEAD_BYTES;
	r = c->size > 1 ? c->ops->gather(c, head, lens, heads, err) : 0;
	if (r < 0)
		return r;
	if (memcmp(heads + (size_t)c->rank * GATHER_HEAD_BYTES, head, sizeof head) != 0 && c->size > 1)
		return base_error_set(err, -BASE_EFORMAT, "a gather does not give rank %u what it gave itself",
			c->rank);
	memcpy(heads + (size_t)c->rank * GATHER_HEAD_BYTES, head, sizeof head);
	return gather_heads(c, what, heads, lens, ret_sum, err);
}

static int gather_strings(struct comm *c, const void *mine, uint64_t sum, struct comm_gathered *g,
	struct base_error *err)
{
	uint8_t *at = malloc(sum + 1);

	g->bytes = calloc(c->size, sizeof *g->bytes);
	if (!g->bytes || !at) {
		free(at);
		return base_no_memory_for(err, "%llu bytes of all ranks", (unsigned long long)sum);
	}
	for (uint32_t i = 0; i < c->size; i++) {
		g->bytes[i] = at;
		at += g->len[i];
	}
	if (c->size > 1 && sum)
		return c->ops->gather(c, mine, g->len, g->bytes[0], err);
	if (sum)
		memcpy(g->bytes[0], mine, sum);
	return 0;
}

int comm_gather(struct comm *c, const char *what, const void *mine, uint64_t len, uint64_t max,
	struct comm_gathered *ret_all, struct base_error *err)
{
	struct base_error why = {0};
	uint64_t sum = 0;
	int r = comm_works(c, err);

	*ret_all = (struct comm_gathered){0};
	if (r == 0 && c->flying)
		r = base_error_set(err, -EINVAL, "%llu passes are not finished", (unsigned long long)c->flying);
	if (r < 0)
		return r;
	ret_all->len = calloc(c->size, sizeof *ret_all->len);
	r = ret_all->len ? gather_lens(c, what, len, ret_all->len, &sum, &why) : base_no_memory(&why);
	c->gathers++;
	if (r == 0 && sum > max) {
		comm_gathered_release(ret_all);
		return base_error_set(err, -BASE_ELIMIT, "%s of all ranks: more than %llu bytes", what,
			(unsigned long long)max);
	}
	if (r == 0)
		r = gather_strings(c, mine, sum, ret_all, &why);
	if (r == 0)
		return 0;
	comm_gathered_release(ret_all);
	return comm_failed(c, r, &why, err);
}

/* ---- passes ---- */

/* A lent room has its address from the beginning, and memory when it is needed. */
static int room_make(struct comm *c, struct comm_buffer *room)
{
	int r = room->made || !c->rooms_lent || !c->ops->room ? 0 : c->ops->room(c, room->bytes);

	room->made = r == 0;
	return r;
}

static uint8_t *buffer_take(struct comm_buffer *b)
{
	if (!b->bytes)
		b->bytes = malloc(COMM_PASS_BYTES);
	b->taken = b->bytes;
	return b->bytes;
}

int comm_room(struct comm *c, uint8_t **ret_bytes)
{
	int r = -EAGAIN;

	pthread_mutex_lock(&c->lock);
	for (unsigned i = 0; r == -EAGAIN && i < COMM_ROOMS; i++)
		if (!c->rooms[i].taken) {
			r = room_make(c, &c->rooms[i]);
			if (r == 0 && !(*ret_bytes = buffer_take(&c->rooms[i])))
				r = -ENOMEM;
		}
	pthread_mutex_unlock(&c->lock);
	return r;
}

void comm_room_free(struct comm *c, const uint8_t *bytes)
{
	pthread_mutex_lock(&c->lock);
	for (unsigned i = 0; bytes && i < COMM_ROOMS; i++)
		if (c->rooms[i].bytes == bytes)
			c->rooms[i].taken = false;
	pthread_mutex_unlock(&c->lock);
}

/* Memory for what comes. */
static uint8_t *comm_buffer(struct comm *c)
{
	uint8_t *bytes = NULL;
	size_t i = 0;

	pthread_mutex_lock(&c->lock);
	while (i < c->nbuffers && c->buffers[i].taken)
		i++;
	if (i < c->nbuffers || base_array_room(c->buffers, c->buffers_room, i + 1) == 0) {
		if (i == c->nbuffers)
			c->buffers[c->nbuffers++] = (struct comm_buffer){0};
		bytes = buffer_take(&c->buffers[i]);
	}
	pthread_mutex_unlock(&c->lock);
	return bytes;
}

bool comm_pass_wants(const struct comm *c, const struct comm_pass *p)
{
	uint32_t at = base_bisect(i, 0, p->nranks, p->ranks[i] < c->rank);

	return at < p->nranks && p->ranks[at] == c->rank;
}

static int pass_check(const struct comm *c, const struct comm_pass *p, struct base_error *err)
{
	if (p->owner >= c->size || p->nranks == 0 || p->nranks >= c->size || p->len == 0 || p->len > COMM_PASS_BYTES)
		return base_error_set(err, -EINVAL, "a bucket of %llu bytes cannot go from rank %u to %u of %u ranks",
			(unsigned long long)p->len, p->owner, p->nranks, c->size);
	for (uint32_t i = 0; i < p->nranks; i++)
		if (p->ranks[i] >= c->size || p->ranks[i] == p->owner || (i && p->ranks[i] <= p->ranks[i - 1]))
			return base_error_set(err, -EINVAL, "the ranks that want a bucket are no list of ranks");
	return 0;
}

int comm_pass_start(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct base_error why = {0};
	int r = comm_works(c, err);

	if (r < 0)
		return r;
	r = pass_check(c, p, &why);
	p->number = c->passes++;
	if (r == 0 && p->owner != c->rank) {
		bool buffer = !c->lends && comm_pass_wants(c, p);

		p->bytes = buffer ? comm_buffer(c) : NULL;
		if (buffer && !p->bytes)
			r = base_no_memory(&why);
	}
	if (r == 0)
		r = c->ops->start(c, p, &why);
	if (r < 0)
		return comm_failed(c, r, &why, err);
	c->flying += p->owner == c->rank || comm_pass_wants(c, p);
	return 0;
}

int comm_pass_finish(struct comm *c, struct comm_pass *p, struct base_error *err)
{
	struct base_error why = {0};
	int r = comm_works(c, err);

	if (r < 0 || (p->owner != c->rank && !comm_pass_wants(c, p)))
		return r;
	r = c->ops->finish(c, p, &why);
	if (r < 0)
		return comm_failed(c, r, &why, err);
	c->flying--;
	if (p->owner == c->rank) {
		comm_room_free(c, p->bytes);
		p->bytes = NULL;
	}
	return 0;
}

void comm_pass_done(struct comm *c, struct comm_pass *p)
{
	if (c->ops->done)
		c->ops->done(c, p);
	pthread_mutex_lock(&c->lock);
	for (size_t i = 0; i < c->nbuffers; i++)
		if (c->buffers[i].bytes == p->bytes)
			c->buffers[i].taken = false;
	pthread_mutex_unlock(&c->lock);
	p->bytes = NULL;
}
