/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_votes: the gathers of an exchange: greetings, lists, votes. All ranks check the same strings by the same
 * rules, so all find the same errors, and none goes on alone. A rank that cannot take part, for want of memory, breaks
 * the communicator instead. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/load/exchange/exchange_internal.h"
#include "core/load/exchange/exchange_words.h"

#define EXCHANGE_LISTS_MAX (UINT64_C(1) << 30) /* bytes of all lists */

int exchange_short(struct load_exchange *x, struct base_error *err)
{
	base_no_memory_for(err, "an exchange");
	comm_abort(x->comm, "out of memory");
	return -ENOMEM;
}

/* ---- votes ---- */

/* Each rank gives a vote and gets those of all (free them). An error is the communicator's, or that of the lowest rank
 * that has failed; at a rank that has failed itself, its own. */
static int exchange_vote(struct load_exchange *x, const char *what, struct exchange_vote *mine,
	struct exchange_vote **ret_votes, struct base_error *err)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	struct exchange_vote *votes = calloc(x->comm->size, sizeof *votes);
	struct comm_gathered g = {0};
	int r;

	exchange_vote_put(&b, mine);
	if (!votes || b.error) {
		free(votes);
		return exchange_short(x, err);
	}
	r = comm_gather(x->comm, what, b.data, b.len, (uint64_t)x->comm->size * 2048, &g, err);
	for (uint32_t i = 0; r == 0 && i < x->comm->size; i++)
		if (exchange_vote_take(g.bytes[i], g.len[i], &votes[i]) < 0)
			r = base_error_set(err, -BASE_EFORMAT, "rank %u sent a vote that breaks its form", i);
	for (uint32_t i = 0; r == 0 && i < x->comm->size; i++)
		if (votes[i].error.code)
			r = base_error_set(err, votes[i].error.code, "rank %u: %s", i, votes[i].error.text);
	if (r < 0 && mine->error.code)
		r = base_error_set(err, mine->error.code, "%s", mine->error.text);
	comm_gathered_release(&g);
	if (ret_votes && r == 0)
		*ret_votes = base_steal(votes);
	free(votes);
	return r;
}

int exchange_agree(struct load_exchange *x, const char *what, const uint64_t *numbers,
	struct exchange_vote **ret_votes, struct base_error *err)
{
	struct exchange_vote mine = {0};

	exchange_failed(x, &mine.error);
	for (unsigned i = 0; numbers && i < EXCHANGE_VOTE_NUMBERS; i++)
		mine.number[i] = numbers[i];
	return exchange_vote(x, what, &mine, ret_votes, err);
}

/* ---- greetings and lists ---- */

int exchange_greet(struct load_exchange *x, const struct base_error *failed, struct exchange_greeting *ret_all,
	struct base_error *err)
{
	const struct load_step_info *info = load_step_info(x->f->step);
	struct exchange_greeting mine = {.error = *failed, .mode = x->mode, .manifest = info->manifest,
		.flags = x->f->flags & (LOAD_FILL_REHASH | LOAD_FILL_SKIP_DAMAGED), .list_len = x->list.len};
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	struct comm_gathered g = {0};
	int r;

	memcpy(mine.store, load_step_store(x->f->step)->info.id, sizeof mine.store);
	snprintf(mine.step, sizeof mine.step, "%s/%llu", info->run, (unsigned long long)info->step);
	base_sha256(x->list.len ? (const void *)x->list.data : "", x->list.len, &mine.list);
	exchange_greeting_put(&b, &mine);
	if (b.error)
		return exchange_short(x, err);
	r = comm_gather(x->comm, "the greetings of a load", b.data, b.len, (uint64_t)x->comm->size * 4096, &g, err);
	for (uint32_t i = 0; r == 0 && i < x->comm->size; i++)
		if (exchange_greeting_take(g.bytes[i], g.len[i], &ret_all[i]) < 0)
			r = base_error_set(err, -BASE_EFORMAT, "rank %u sent a greeting that breaks its form; all "
				"ranks of a load need the same version of vckpt", i);
	for (uint32_t i = 1; r == 0 && i < x->comm->size; i++)
		r = exchange_greetings_compare(&ret_all[0], &ret_all[i], i, err);
	for (uint32_t i = 0; r == 0 && i < x->comm->size; i++)
		if (ret_all[i].error.code)
			r = base_error_set(err, ret_all[i].error.code, "rank %u: %s", i, ret_all[i].error.text);
	if (r < 0 && failed->code)
		r = base_error_set(err, failed->code, "%s", failed->text);
	comm_gathered_release(&g);
	return r;
}

/* Which ranks have equal lists: `leader` of each is the lowest of them. */
static void greetings_group(const struct exchange_greeting *all, uint32_t n, uint32_t *leader)
{
	for (uint32_t i = 0; i < n; i++) {
		leader[i] = i;
		for (uint32_t k = 0; k < i && leader[i] == i; k++)
			if (leader[k] == k && all[k].list_len == all[i].list_len &&
				base_digest_equal(&all[k].list, &all[i].list))
				leader[i] = k;
	}
}

/* The lists that were gathered, each with the ranks that want it. `ranks`: room for all ranks. */
static int lists_sort(const struct load_exchange *x, const struct exchange_greeting *all, const uint32_t *leader,
	const struct comm_gathered *g, struct exchange_list *lists, uint32_t *ranks, uint32_t *ret_n,
	struct base_error *err)
{
	struct base_digest digest;
	uint32_t n = 0;

	for (uint32_t i = 0; i < x->comm->size; i++) {
		if (leader[i] != i)
			continue;
		base_sha256(g->bytes[i], g->len[i], &digest);
		if (g->len[i] != all[i].list_len || !base_digest_equal(&digest, &all[i].list))
			return base_error_set(err, -BASE_EFORMAT, "rank %u sent a list that is not the one it "
				"announced", i);
		lists[n] = (struct exchange_list){.bytes = g->bytes[i], .len = g->len[i], .ranks = ranks};
		for (uint32_t k = i; k < x->comm->size; k++)
			if (leader[k] == i)
				ranks[lists[n].nranks++] = k;
		ranks += lists[n++].nranks;
	}
	*ret_n = n;
	return 0;
}

int exchange_lists(struct load_exchange *x, const struct exchange_greeting *all, struct base_error *err)
{
	const struct exchange_terms terms = {.rank = x->comm->rank, .size = x->comm->size, .npacks = x->f->npacks,
		.whole = x->f->flags & LOAD_FILL_REHASH, .small = x->mode == LOAD_EXCHANGE_AUTO};
	base_cleanup_free struct exchange_list *lists = calloc(x->comm->size, sizeof *lists);
	base_cleanup_free uint32_t *leader = calloc(x->comm->size, 2 * sizeof *leader);
	struct comm_gathered g = {0};
	struct base_error why = {0};
	uint32_t n = 0;
	int r;

	if (!lists || !leader)
		return exchange_short(x, err);
	greetings_group(all, x->comm->size, leader);
	r = comm_gather(x->comm, "lists", x->list.data, leader[x->comm->rank] == x->comm->rank ? x->list.len : 0,
		EXCHANGE_LISTS_MAX, &g, err);
	if (r < 0)
		return r;
	r = lists_sort(x, all, leader, &g, lists, leader + x->comm->size, &n, &why);
	if (r == 0)
		r = exchange_plan_make(lists, n, &terms, &x->plan, &why);
	comm_gathered_release(&g);
	base_buf_release(&x->list);
	if (r < 0 && r != -BASE_ELIMIT) {
		exchange_fail(x, &why); /* the next vote reports it */
		return 0;
	}
	return r < 0 ? base_error_set(err, r, "%s", why.text) : 0;
}
