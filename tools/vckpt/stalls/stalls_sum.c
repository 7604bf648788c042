/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ranks' measures say together: medians, the slowest, totals. Durations are differences of one rank's clock;
 * times of two ranks are never compared, for their clocks may differ. */
#include <string.h>

#include "tools/vckpt/stalls/stalls.h"

const char *const stalls_milestone_names[STALLS_MILESTONES] = {"staged", "announced", "committed"};
const char *const stalls_bytes_names[STALLS_BYTES] = {
	"held", "staged", "unchanged", "deduplicated", "again", "no_base", "encoded", "written"};

bool stalls_since(const struct stalls_rank *rank, enum stalls_milestone m, uint64_t *ret_ns)
{
	if (!rank->submitted_ns || rank->at_ns[m] < rank->submitted_ns)
		return false;
	*ret_ns = rank->at_ns[m] - rank->submitted_ns;
	return true;
}

/* Slowest first; of equal ones the lowest rank. */
static int value_order(const void *a, const void *b)
{
	const struct stalls_value *x = a, *y = b;

	if (x->ns != y->ns)
		return x->ns < y->ns ? 1 : -1;
	return (x->rank > y->rank) - (x->rank < y->rank);
}

static void sum_values(struct stalls_value *v, uint32_t n, struct stalls_sum *ret_s)
{
	*ret_s = (struct stalls_sum){.n = n};
	if (n == 0)
		return;
	qsort(v, n, sizeof *v, value_order);
	ret_s->max = v[0].ns;
	ret_s->slowest = v[0].rank;
	ret_s->min = v[n - 1].ns;
	ret_s->median = v[n / 2].ns + (v[(n - 1) / 2].ns - v[n / 2].ns) / 2;
}

static struct stalls_value *values_new(const struct stalls *st)
{
	return calloc(st->nranks ? st->nranks : 1, sizeof(struct stalls_value));
}

static uint32_t milestone_values(const struct stalls *st, enum stalls_milestone m, struct stalls_value *v)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < st->nranks; i++)
		if (stalls_since(&st->ranks[i], m, &v[n].ns))
			v[n++].rank = i;
	return n;
}

int stalls_sum_milestone(const struct stalls *st, enum stalls_milestone m, struct stalls_sum *ret_s)
{
	struct stalls_value *v = values_new(st);

	if (!v)
		return -ENOMEM;
	sum_values(v, milestone_values(st, m, v), ret_s);
	free(v);
	return 0;
}

int stalls_sum_phase(const struct stalls *st, unsigned phase, struct stalls_sum *ret_s)
{
	struct stalls_value *v = values_new(st);
	uint32_t n = 0;

	if (!v)
		return -ENOMEM;
	for (uint32_t i = 0; i < st->nranks; i++)
		for (unsigned k = 0; k < st->ranks[i].ntimes; k++)
			if (st->ranks[i].times[k].phase == phase)
				v[n++] = (struct stalls_value){st->ranks[i].times[k].busy_ns, i};
	sum_values(v, n, ret_s);
	free(v);
	return 0;
}

int stalls_slowest(const struct stalls *st, enum stalls_milestone m, struct stalls_value top[static STALLS_SLOWEST])
{
	struct stalls_value *v = values_new(st);
	uint32_t n;

	if (!v)
		return -ENOMEM;
	n = milestone_values(st, m, v);
	qsort(v, n, sizeof *v, value_order);
	n = n < STALLS_SLOWEST ? n : STALLS_SLOWEST;
	memcpy(top, v, n * sizeof *v);
	free(v);
	return (int)n;
}

/* How long a phase took before the milestone: from start to end by the clock, but no longer than its work, since it may
 * come in pieces (blobs are sealed first, packs last). */
static uint64_t time_before(const struct stalls_rank *rank, const struct stalls_time *t, enum stalls_milestone m)
{
	uint64_t end = rank->at_ns[m] < t->end_ns ? rank->at_ns[m] : t->end_ns;

	if (!t->start_ns || !t->end_ns)
		return t->busy_ns;
	return end > t->start_ns ? base_min(end - t->start_ns, t->busy_ns) : 0;
}

const struct stalls_time *stalls_largest(const struct stalls_rank *rank, enum stalls_milestone m, uint64_t *ret_ns)
{
	const struct stalls_time *best = NULL;

	*ret_ns = 0;
	for (unsigned i = 0; i < rank->ntimes; i++) {
		uint64_t ns = time_before(rank, &rank->times[i], m);

		if (ns > *ret_ns) {
			best = &rank->times[i];
			*ret_ns = ns;
		}
	}
	return best;
}

uint64_t stalls_bytes_total(const struct stalls *st, enum stalls_bytes b)
{
	uint64_t total = 0;

	for (uint32_t i = 0; i < st->nranks; i++)
		if (base_add_overflows(total, st->ranks[i].bytes[b], &total))
			return UINT64_MAX;
	return total;
}

bool stalls_rate(const struct stalls *st, enum stalls_bytes b, uint64_t *ret_bytes_per_s)
{
	enum stalls_milestone m = b == STALLS_COPIED ? STALLS_STAGED : b == STALLS_HELD ? STALLS_COMMITTED
		: STALLS_ANNOUNCED;
	uint64_t longest = 0, ns;
	double rate;

	for (uint32_t i = 0; i < st->nranks; i++)
		if (stalls_since(&st->ranks[i], m, &ns) && ns > longest)
			longest = ns;
	if (longest == 0)
		return false;
	rate = (double)stalls_bytes_total(st, b) * 1e9 / (double)longest;
	*ret_bytes_per_s = rate < 9e18 ? (uint64_t)rate : INT64_MAX;
	return true;
}

int stalls_ranks_of(const struct stalls *st, enum stalls_source source, uint32_t **ret_ranks, uint32_t *ret_n)
{
	uint32_t *ranks = calloc(st->nranks ? st->nranks : 1, sizeof *ranks), n = 0;

	if (!ranks)
		return -ENOMEM;
	for (uint32_t i = 0; i < st->nranks; i++)
		if (st->ranks[i].source == source)
			ranks[n++] = st->ranks[i].rank;
	*ret_ranks = ranks;
	*ret_n = n;
	return 0;
}
