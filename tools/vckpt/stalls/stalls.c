/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt stalls: which rank was slow at what in one save. Reads the manifest (which ranks, on which hosts) and what each
 * rank measured; of a rank without measures the part's timings are taken, which end with the part, and it is named as
 * one of which less is known. Nothing else of the step is read; time and memory grow with the ranks only. */
#include <inttypes.h>
#include <string.h>

#include "core/step/manifest.h"
#include "core/step/open.h"
#include "core/step/part.h"
#include "tools/vckpt/stalls/stalls.h"

/* ---- the table ---- */

void stalls_release(struct stalls *st)
{
	for (uint32_t i = 0; i < st->nranks; i++)
		free(st->ranks[i].times);
	free(st->ranks);
	for (unsigned i = 0; i < st->nphases; i++)
		free(st->phases[i]);
	commit_stats_free(st->measures, st->nmeasures);
	proto_manifest_release(&st->manifest);
}

/* Number of a phase; STALLS_PHASES_MAX: no more room. */
static int phase_number(struct stalls *st, const char *name)
{
	for (unsigned i = 0; i < st->nphases; i++)
		if (strcmp(st->phases[i], name) == 0)
			return (int)i;
	if (st->nphases == STALLS_PHASES_MAX)
		return STALLS_PHASES_MAX;
	st->phases[st->nphases] = strdup(name);
	return st->phases[st->nphases] ? (int)st->nphases++ : -ENOMEM;
}

static void time_merge(struct stalls_time *to, const struct proto_timing *t)
{
	if (base_add_overflows(to->busy_ns, t->ns, &to->busy_ns))
		to->busy_ns = UINT64_MAX;
	if (base_add_overflows(to->bytes, t->bytes, &to->bytes))
		to->bytes = UINT64_MAX;
	if (t->start_ns && (!to->start_ns || t->start_ns < to->start_ns))
		to->start_ns = t->start_ns;
	if (t->end_ns > to->end_ns)
		to->end_ns = t->end_ns;
}

/* Is it no phase, but bytes? */
static bool rank_bytes(struct stalls_rank *rank, const struct proto_timing *t)
{
	bool again = strcmp(t->phase, PROTO_TIMING_AGAIN) == 0;

	if (!again && strcmp(t->phase, PROTO_TIMING_NO_BASE) != 0)
		return false;
	rank->bytes[again ? STALLS_AGAIN : STALLS_NO_BASE] = t->bytes;
	return true;
}

static int rank_times(struct stalls *st, struct stalls_rank *rank, const struct proto_timing *t, uint32_t n)
{
	rank->times = calloc(n ? n : 1, sizeof *rank->times);
	if (!rank->times)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		unsigned k = 0;
		int phase;

		if (rank_bytes(rank, &t[i]))
			continue;
		phase = phase_number(st, t[i].phase);
		if (phase < 0)
			return phase;
		if (phase == STALLS_PHASES_MAX) {
			st->phases_left_out++;
			continue;
		}
		while (k < rank->ntimes && rank->times[k].phase != (unsigned)phase)
			k++;
		if (k == rank->ntimes)
			rank->times[rank->ntimes++].phase = (unsigned)phase;
		time_merge(&rank->times[k], &t[i]);
	}
	return 0;
}

/* ---- what was measured ---- */

/* When the rank had only to wait for the others: the start of the phase `wait`, else the end of `seal`. */
static uint64_t announced_at(const struct proto_stats *m)
{
	uint64_t sealed = 0;

	for (uint32_t i = 0; i < m->ntimings; i++) {
		if (strcmp(m->timings[i].phase, "wait") == 0 && m->timings[i].start_ns)
			return m->timings[i].start_ns;
		if (strcmp(m->timings[i].phase, "seal") == 0)
			sealed = m->timings[i].end_ns;
	}
	return sealed;
}

static int rank_stats(struct stalls *st, struct stalls_rank *rank, const struct proto_stats *m)
{
	rank->source = STALLS_STATS;
	rank->host = m->host;
	rank->submitted_ns = m->submitted_ns;
	rank->at_ns[STALLS_STAGED] = m->staged_ns;
	rank->at_ns[STALLS_ANNOUNCED] = announced_at(m);
	rank->at_ns[STALLS_COMMITTED] = m->committed_ns;
	rank->bytes[STALLS_HELD] = m->bytes_held;
	rank->bytes[STALLS_COPIED] = m->bytes_staged;
	rank->bytes[STALLS_UNCHANGED] = m->bytes_unchanged;
	rank->bytes[STALLS_DEDUPLICATED] = m->bytes_deduplicated;
	rank->bytes[STALLS_ENCODED] = m->bytes_encoded;
	rank->bytes[STALLS_WRITTEN] = m->bytes_written;
	rank->pieces = m->pieces;
	rank->pieces_new = m->pieces_new;
	rank->plan_cached = m->plan_cached;
	rank->ring_waits = m->ring_waits;
	return rank_times(st, rank, m->timings, m->ntimings);
}

/* A part that cannot be read is counted; `verify` says what is wrong with it. */
static int rank_part(struct stalls *st, struct store *s, const struct proto_manifest *m, uint32_t line)
{
	struct stalls_rank *rank = &st->ranks[line];
	struct store_opened_part o = {0};
	struct base_error why = {0};
	int r = store_open_part(s, m, line, &o, &why);

	if (r == 0 && o.part.ntimings) {
		rank->source = STALLS_PART;
		r = rank_times(st, rank, o.part.timings, o.part.ntimings);
	}
	store_opened_part_release(&o);
	if (r == -BASE_EVERSION)
		base_warning("rank %u: %s; left out", m->ranks[line].rank, why.text);
	else
		st->damaged += r < 0 && r != -ENOMEM;
	return r == -ENOMEM ? r : 0;
}

/* `all`: by ascending rank. Measures of other attempts, or of ranks beyond the world, are not this save's. */
static int stalls_fill(struct stalls *st, struct store *s)
{
	const struct proto_manifest *m = &st->manifest;
	const struct proto_stats *all = st->measures;
	uint32_t next = 0, n = st->nmeasures;
	int r = 0;

	st->ranks = calloc(m->nranks ? m->nranks : 1, sizeof *st->ranks);
	if (!st->ranks)
		return -ENOMEM;
	st->nranks = m->nranks;
	for (uint32_t i = 0; r == 0 && i < m->nranks; i++) {
		st->ranks[i].rank = m->ranks[i].rank;
		st->ranks[i].host = m->hosts[m->ranks[i].host];
		while (next < n && all[next].rank < m->ranks[i].rank)
			next++;
		if (next < n && all[next].rank == m->ranks[i].rank && strcmp(all[next].attempt, m->attempt) == 0)
			r = rank_stats(st, &st->ranks[i], &all[next]);
		else
			r = rank_part(st, s, m, i);
	}
	return r;
}

int stalls_read(struct stalls *st, struct store *s, const char *run, const struct commit_list_step *step,
	struct base_error *err)
{
	static const char *const usual[] = {"plan", "copy", "digest", "encode", "write", "seal", "wait", "commit"};
	int r;

	*st = (struct stalls){.run = run, .step = step->step, .entry = step->entry, .attempt = step->commit.attempt};
	r = store_manifest_get(s, run, &step->commit.manifest, &st->manifest, err);
	if (r == 0)
		r = commit_stats_read(s, run, step->step, step->entry, &st->measures, &st->nmeasures, &st->damaged,
			err);
	for (size_t i = 0; r >= 0 && i < BASE_COUNT(usual); i++) /* in this order, whichever rank names them first */
		r = phase_number(st, usual[i]);
	return r < 0 ? r : stalls_fill(st, s);
}

/* ---- the command ---- */

static int stalls_show(struct tool *t, const struct stalls *st, const char *trace)
{
	struct base_error err = {0};
	int r = trace ? stalls_trace(st, trace, &err) : 0, code = TOOL_DONE;

	if (r == 0 && t->json)
		code = tool_print_json(stalls_json(st));
	else if (r == 0 && !t->quiet)
		r = stalls_print(st);
	err.code = r;
	if (r < 0)
		return tool_fail(t, &err);
	return code == TOOL_DONE && st->damaged ? TOOL_DAMAGE : code;
}

static int stalls_step(struct tool *t, const char *run, const struct commit_list_step *step, const char *trace)
{
	struct stalls st;
	struct base_error err = {0};
	int code;

	err.code = stalls_read(&st, t->store, run, step, &err);
	code = err.code < 0 ? tool_fail(t, &err) : stalls_show(t, &st, trace);
	stalls_release(&st);
	return code;
}

static int stalls_run(struct tool *t, int argc, char **argv)
{
	const struct commit_list_step *step;
	struct tool_target target;
	const char *trace = NULL;
	int code = tool_parse(t, argc, argv, (const struct tool_option[]){{"trace", .text = &trace}, {0}});

	if (code || (code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (!target.has_step || target.rest)
		return tool_usage(t, "%s is not a step: RUN/STEP", t->arguments[1]);
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY)) || (code = tool_target_find(t, &target, &step)))
		return code;
	return stalls_step(t, target.run, step, trace);
}

const struct tool_command tool_stalls = {"stalls", "who was slow at what in a save",
	"usage: vckpt stalls STORE RUN/STEP [--trace FILE] [--json] [-q] [-v]\n\n"
	"What the ranks measured while they saved the step: how long each phase took, which ranks were the last\n"
	"to be staged and to announce what they had written, and why; bytes held, staged, unchanged,\n"
	"deduplicated, encoded and written; and whose timings are missing. STEP is a number or latest.\n\n"
	"  --trace FILE        write the timeline, for Perfetto or chrome://tracing\n",
	stalls_run};
