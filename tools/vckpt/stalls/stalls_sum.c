/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ranks' measures say together: medians, the slowest, totals. Durations are differences of one rank's clock;
 * times of two ranks are never compared, for their clocks may differ. */
#include <string.h>

#include "tools/vckpt/stalls/stalls.h"

const char *const stalls_bytes_names[STALLS_BYTES] = {
	"held", "staged", "unchanged", "deduplicated", "again", "no_base", "encoded", "written"};

const char *stalls_row_name(const struct stalls *st, unsigned row)
{
	static const char *const milestones[STALLS_MILESTONES] = {"staged", "announced", "committed"};

	return row < STALLS_MILESTONES ? milestones[row] : st->phases[row - STALLS_MILESTONES];
}

bool stalls_since(const struct stalls_rank *rank, enum stalls_milestone m, uint64_t *ret_ns)
{
	if (!rank->submitted_ns || rank->at_ns[m] < rank->submitted_ns)
		return false;
	*ret_ns = rank->at_ns[m] - rank->submitted_ns;
	return true;
}

bool stalls_row_value(const struct stalls *st, uint32_t i, unsigned row, uint64_t *ret_ns)
{
	const struct stalls_rank *rank = &st->ranks[i];

	if (row < STALLS_MILESTONES)
		return stalls_since(rank, (enum stalls_milestone)row, ret_ns);
	for (unsigned k = 0; k < rank->ntimes; k++)
		if (rank->times[k].phase + STALLS_MILESTONES == row) {
			*ret_ns = rank->times[k].busy_ns;
			return true;
		}
	return false;
}

/* Slowest first; of equal ones the lowest rank. */
static int value_order(const void *a, const void *b)
{
	const struct stalls_value *x = a, *y = b;

	if (x->ns != y->ns)
		return x->ns < y->ns ? 1 : -1;
	return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The values of a row, slowest first. NULL: no memory. */
static struct stalls_value *row_values(const struct stalls *st, unsigned row, uint32_t *ret_n)
{
	struct stalls_value *v = calloc(st->nranks ? st->nranks : 1, sizeof *v);
	uint32_t n = 0;

	for (uint32_t i = 0; v && i < st->nranks; i++)
		if (stalls_row_value(st, i, row, &v[n].ns))
			v[n++].rank = i;
	if (n)
		qsort(v, n, sizeof *v, value_order);
	*ret_n = n;
	return v;
}

int stalls_sum(const struct stalls *st, unsigned row, struct stalls_sum *ret_s)
{
	uint32_t n;
	base_cleanup_free struct stalls_value *v = row_values(st, row, &n);

	if (!v)
		return -ENOMEM;
	*ret_s = (struct stalls_sum){.n = n};
	if (n)
		*ret_s = (struct stalls_sum){.n = n, .max = v[0].ns, .slowest = v[0].rank, .min = v[n - 1].ns,
			.median = v[n / 2].ns + (v[(n - 1) / 2].ns - v[n / 2].ns) / 2};
	return 0;
}

int stalls_slowest(const struct stalls *st, enum stalls_milestone m, struct stalls_value top[static STALLS_SLOWEST])
{
	uint32_t n;
	base_cleanup_free struct stalls_value *v = row_values(st, m, &n);

	if (!v)
		return -ENOMEM;
	n = n < STALLS_SLOWEST ? n : STALLS_SLOWEST;
	memcpy(top, v, n * sizeof *v);
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
