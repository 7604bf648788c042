/* SPDX-License-Identifier: Apache-2.0
 *
 * The measures of a step's ranks as tables and as JSON (vckpt(1), JSON OUTPUT). */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/stalls/stalls.h"

/* ---- tables ---- */

static int print_sum(const struct stalls *st, unsigned row)
{
	struct stalls_sum s;
	int r = stalls_sum(st, row, &s);

	if (r == 0 && s.n)
		tool_print(stdout, "  %-12s %10s  %10s  %10s  %6" PRIu32 "  %6" PRIu32 "  %s\n",
			stalls_row_name(st, row), TOOL_DURATION(s.median), TOOL_DURATION(s.max),
			TOOL_DURATION(s.max - s.min), s.n, st->ranks[s.slowest].rank, st->ranks[s.slowest].host);
	return r;
}

/* Did one process read it from files? Only an import has a phase "read". */
static bool imported(const struct stalls *st)
{
	if (st->nranks != 1 || st->ranks[0].source != STALLS_PART)
		return false;
	for (unsigned i = 0; i < st->ranks[0].ntimes; i++)
		if (strcmp(st->phases[st->ranks[0].times[i].phase], "read") == 0)
			return true;
	return false;
}

static int print_sums(const struct stalls *st)
{
	int r = 0;

	printf("\n  %-12s %10s  %10s  %10s  %6s  %6s  %s\n", imported(st) ? "busy in" : "since submit", "median",
		"longest", "spread", "ranks", "rank", "on host");
	for (unsigned i = 0; r == 0 && i < STALLS_MILESTONES + st->nphases; i++) {
		if (i == STALLS_MILESTONES && !imported(st))
			puts("\n  busy in");
		r = print_sum(st, i);
	}
	return r;
}

static int print_slowest(const struct stalls *st, enum stalls_milestone m)
{
	struct stalls_value top[STALLS_SLOWEST];
	int n = stalls_slowest(st, m, top);

	if (n <= 0)
		return n;
	printf("\n  last to %s\n", m == STALLS_STAGED ? "be staged" : "announce its part");
	for (int i = 0; i < n; i++) {
		const struct stalls_rank *rank = &st->ranks[top[i].rank];
		uint64_t ns;
		const struct stalls_time *t = stalls_largest(rank, m, &ns);

		tool_print(stdout, "  %10s  rank %" PRIu32 " on %s%s%s%s%s\n", TOOL_DURATION(top[i].ns), rank->rank,
			rank->host, t ? ": " : "", t ? TOOL_DURATION(ns) : "", t ? " in " : "",
			t ? st->phases[t->phase] : "");
	}
	return 0;
}

static void print_bytes(const struct stalls *st)
{
	uint64_t rate;

	putchar('\n');
	for (unsigned i = 0; i < STALLS_BYTES; i++) {
		printf("  %-12s %10s", stalls_bytes_names[i],
			TOOL_BYTES(stalls_bytes_total(st, (enum stalls_bytes)i)));
		if ((i == STALLS_HELD || i == STALLS_COPIED || i == STALLS_WRITTEN) &&
			stalls_rate(st, (enum stalls_bytes)i, &rate))
			printf("  %s/s", TOOL_BYTES(rate));
		putchar('\n');
	}
}

/* For steps of which only parts are known: these are the only bytes in parts. */
static void print_again(const struct stalls *st)
{
	if (stalls_bytes_total(st, STALLS_AGAIN))
		putchar('\n');
	for (unsigned i = STALLS_AGAIN; i <= STALLS_NO_BASE; i++) {
		uint64_t n = stalls_bytes_total(st, (enum stalls_bytes)i);

		if (n)
			printf("  %-12s %10s\n", stalls_bytes_names[i], TOOL_BYTES(n));
	}
}

static int print_ranks_of(const struct stalls *st, enum stalls_source source, const char *what)
{
	uint32_t *ranks, n;
	int r = stalls_ranks_of(st, source, &ranks, &n);

	if (r < 0)
		return r;
	if (n)
		printf("%s of %" PRIu32 " of %s: %s\n", what, n, TOOL_COUNT(st->nranks, "rank", "ranks"),
			TOOL_RANKS(ranks, n));
	free(ranks);
	return 0;
}

/* Prints for how many ranks not everything is known. */
static int print_unknown(const struct stalls *st, uint32_t full)
{
	int r;

	if (imported(st)) {
		puts("imported by one process: no rank waited, and only the time in each phase is known");
		return 0;
	}
	r = full < st->nranks ? print_ranks_of(st, STALLS_NONE, "no timings") : 0;
	if (r == 0 && full < st->nranks)
		r = print_ranks_of(st, STALLS_PART, "only what their parts say (phases up to the part)");
	return r;
}

int stalls_print(const struct stalls *st)
{
	uint32_t full = 0;
	int r;

	for (uint32_t i = 0; i < st->nranks; i++)
		full += st->ranks[i].source == STALLS_STATS;
	printf("%s/step-%08" PRIu64 ", %s, attempt %s, entry %" PRIu64 "\n", st->run, st->step,
		TOOL_COUNT(st->nranks, "rank", "ranks"), st->attempt, st->entry);
	r = print_unknown(st, full);
	if (st->damaged)
		printf("%s of measures or parts cannot be read: vckpt verify says more\n",
			TOOL_COUNT(st->damaged, "file", "files"));
	if (st->phases_left_out)
		printf("%s of phases beyond the first %u names\n",
			TOOL_COUNT(st->phases_left_out, "timing is", "timings are"), STALLS_PHASES_MAX);
	if (r == 0)
		r = print_sums(st);
	if (r == 0)
		r = print_slowest(st, STALLS_STAGED);
	if (r == 0)
		r = print_slowest(st, STALLS_ANNOUNCED);
	if (r == 0 && full)
		print_bytes(st);
	else if (r == 0)
		print_again(st);
	return r;
}

/* ---- JSON ---- */

static json_t *number(uint64_t n)
{
	return json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n);
}

static json_t *number_or_null(bool known, uint64_t n)
{
	return known ? number(n) : json_null();
}

static json_t *text(const char *t)
{
	return tool_json_text(t, strlen(t));
}

static json_t *sums_json(const struct stalls *st, unsigned from, unsigned to)
{
	json_t *all = json_array();
	struct stalls_sum s;

	for (unsigned i = from; i < to; i++) {
		if (stalls_sum(st, i, &s) < 0 || !s.n)
			continue;
		json_array_append_new(all, json_pack("{s:o, s:I, s:o, s:o, s:o, s:I, s:o}", "name",
			text(stalls_row_name(st, i)), "ranks", (json_int_t)s.n, "median_ns", number(s.median),
			"max_ns", number(s.max), "min_ns", number(s.min), "rank",
			(json_int_t)st->ranks[s.slowest].rank, "host", text(st->ranks[s.slowest].host)));
	}
	return all;
}

static json_t *slowest_json(const struct stalls *st, enum stalls_milestone m)
{
	struct stalls_value top[STALLS_SLOWEST];
	json_t *all = json_array();
	int n = stalls_slowest(st, m, top);

	for (int i = 0; i < n; i++) {
		const struct stalls_rank *rank = &st->ranks[top[i].rank];
		uint64_t ns;
		const struct stalls_time *t = stalls_largest(rank, m, &ns);

		json_array_append_new(all, json_pack("{s:I, s:o, s:o, s:o, s:o}", "rank", (json_int_t)rank->rank,
			"host", text(rank->host), "ns", number(top[i].ns), "phase",
			t ? text(st->phases[t->phase]) : json_null(), "phase_ns", number(ns)));
	}
	return all;
}

static json_t *bytes_json(const struct stalls *st, bool rate)
{
	json_t *all = json_object();

	for (unsigned i = 0; i < STALLS_BYTES; i++) {
		uint64_t n = rate ? 0 : stalls_bytes_total(st, (enum stalls_bytes)i);
		bool known = !rate || stalls_rate(st, (enum stalls_bytes)i, &n);

		if (!rate || i == STALLS_HELD || i == STALLS_COPIED || i == STALLS_WRITTEN)
			json_object_set_new(all, stalls_bytes_names[i], number_or_null(known, n));
	}
	return all;
}

static json_t *times_json(const struct stalls *st, const struct stalls_rank *rank)
{
	json_t *all = json_array();

	for (unsigned i = 0; i < rank->ntimes; i++) {
		const struct stalls_time *t = &rank->times[i];

		json_array_append_new(all, json_pack("{s:o, s:o, s:o, s:o, s:o}", "name", text(st->phases[t->phase]),
			"busy_ns", number(t->busy_ns), "bytes", number(t->bytes), "start_ns",
			number_or_null(t->start_ns, t->start_ns), "end_ns", number_or_null(t->end_ns, t->end_ns)));
	}
	return all;
}

static void rank_measures_json(json_t *o, const struct stalls_rank *rank)
{
	static const char *const plans[] = {"made", "memory", "disk"};
	json_t *bytes = json_object();

	for (unsigned i = 0; i < STALLS_BYTES; i++)
		json_object_set_new(bytes, stalls_bytes_names[i], number(rank->bytes[i]));
	json_object_set_new(o, "bytes", bytes);
	json_object_set_new(o, "pieces", number(rank->pieces));
	json_object_set_new(o, "pieces_new", number(rank->pieces_new));
	json_object_set_new(o, "plan", json_string(rank->plan_cached < BASE_COUNT(plans)
		? plans[rank->plan_cached] : "?"));
	json_object_set_new(o, "ring_waits", number(rank->ring_waits));
}

static json_t *rank_json(const struct stalls *st, const struct stalls_rank *rank)
{
	static const char *const sources[] = {"none", "part", "stats"};
	uint64_t stall = 0;
	bool known = stalls_since(rank, STALLS_STAGED, &stall);
	json_t *o = json_pack("{s:I, s:o, s:s, s:o, s:o}", "rank", (json_int_t)rank->rank, "host", text(rank->host),
		"timings", sources[rank->source], "stall_ns", number_or_null(known, stall), "submitted_ns",
		number_or_null(rank->submitted_ns, rank->submitted_ns));

	for (unsigned i = 0; i < STALLS_MILESTONES; i++) {
		char key[32];

		snprintf(key, sizeof key, "%s_ns", stalls_row_name(st, i));
		json_object_set_new(o, key, number_or_null(rank->at_ns[i], rank->at_ns[i]));
	}
	json_object_set_new(o, "phases", times_json(st, rank));
	if (rank->source == STALLS_STATS)
		rank_measures_json(o, rank);
	return o;
}

static json_t *ranks_of_json(const struct stalls *st, enum stalls_source source)
{
	json_t *all = json_array();

	for (uint32_t i = 0; i < st->nranks; i++)
		if (st->ranks[i].source == source)
			json_array_append_new(all, json_integer(st->ranks[i].rank));
	return all;
}

json_t *stalls_json(const struct stalls *st)
{
	json_t *ranks = json_array(), *slowest = json_object();

	for (unsigned m = STALLS_STAGED; m <= STALLS_ANNOUNCED; m++)
		json_object_set_new(slowest, stalls_row_name(st, m), slowest_json(st, (enum stalls_milestone)m));
	for (uint32_t i = 0; i < st->nranks; i++)
		json_array_append_new(ranks, rank_json(st, &st->ranks[i]));
	return json_pack("{s:s, s:I, s:I, s:s, s:I, s:o, s:o, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "run", st->run,
		"step", (json_int_t)st->step, "entry", (json_int_t)st->entry, "attempt", st->attempt, "world",
		(json_int_t)st->nranks, "missing", ranks_of_json(st, STALLS_NONE), "partial",
		ranks_of_json(st, STALLS_PART), "damaged", (json_int_t)st->damaged, "milestones",
		sums_json(st, 0, STALLS_MILESTONES), "phases",
		sums_json(st, STALLS_MILESTONES, STALLS_MILESTONES + st->nphases), "slowest", slowest, "bytes",
		bytes_json(st, false), "bytes_per_s", bytes_json(st, true), "ranks", ranks);
}
