/* SPDX-License-Identifier: Apache-2.0
 *
 * The timeline of a save in the trace event format that chrome://tracing and Perfetto read: a process a rank, a thread
 * a phase, one complete event for each; on thread 0 the save as a whole and what the trainer waited for. Microseconds
 * since the first rank submitted. Differences between the hosts' clocks are not corrected. Spans have the names of
 * Megatron's OpenTelemetry spans where both cover the same (docs/report.md), threads those of the phases. */
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "tools/vckpt/stalls/stalls.h"

struct trace { FILE *to; uint64_t origin_ns; bool some, failed; };

static void trace_put(struct trace *tr, json_t *event)
{
	fputs(tr->some ? ",\n" : "\n", tr->to);
	tr->some = true;
	tr->failed |= !event || json_dumpf(event, tr->to, JSON_COMPACT | JSON_REAL_PRECISION(15)) < 0;
	json_decref(event);
}

static void trace_name(struct trace *tr, const char *what, uint32_t rank, unsigned thread, const char *name)
{
	trace_put(tr, json_pack("{s:s, s:s, s:I, s:I, s:{s:o}}", "ph", "M", "name", what, "pid", (json_int_t)rank,
		"tid", (json_int_t)thread, "args", "name", tool_json_text(name, strlen(name))));
}

static double trace_us(const struct trace *tr, uint64_t ns)
{
	return ns >= tr->origin_ns ? (double)(ns - tr->origin_ns) / 1e3 : -(double)(tr->origin_ns - ns) / 1e3;
}

/* The name of a phase's span, into `text`. */
static const char *trace_span_name(const char *phase, char *text, size_t size)
{
	static const struct { const char *phase, *span; } shared[] = {{"write", "megatron.checkpoint.save.io_write"},
		{"commit", "megatron.checkpoint.save.finalize"}};

	for (size_t i = 0; i < BASE_COUNT(shared); i++)
		if (strcmp(shared[i].phase, phase) == 0)
			return shared[i].span;
	snprintf(text, size, "vckpt.checkpoint.save.%s", phase);
	return text;
}

/* Nothing where a time is not recorded, or the clock was set back meanwhile. */
static void trace_span(struct trace *tr, uint32_t rank, unsigned thread, const char *name, uint64_t start, uint64_t end,
	json_t *args)
{
	if (!start || end < start) {
		json_decref(args);
		return;
	}
	trace_put(tr, json_pack("{s:s, s:o, s:s, s:I, s:I, s:f, s:f, s:o}", "ph", "X", "name",
		tool_json_text(name, strlen(name)), "cat", "save", "pid", (json_int_t)rank, "tid", (json_int_t)thread,
		"ts", trace_us(tr, start), "dur", (double)(end - start) / 1e3, "args", args));
}

static void trace_rank(struct trace *tr, const struct stalls *st, const struct stalls_rank *rank)
{
	char name[PROTO_HOST_MAX + 32], span[128];

	snprintf(name, sizeof name, "rank %" PRIu32 " (%s)", rank->rank, rank->host);
	trace_name(tr, "process_name", rank->rank, 0, name);
	trace_put(tr, json_pack("{s:s, s:s, s:I, s:I, s:{s:I}}", "ph", "M", "name", "process_sort_index", "pid",
		(json_int_t)rank->rank, "tid", (json_int_t)0, "args", "sort_index", (json_int_t)rank->rank));
	trace_name(tr, "thread_name", rank->rank, 0, "save");
	trace_span(tr, rank->rank, 0, "megatron.checkpoint.save", rank->submitted_ns, rank->at_ns[STALLS_COMMITTED],
		json_object());
	trace_span(tr, rank->rank, 0, "megatron.checkpoint.exposed_save", rank->submitted_ns,
		rank->at_ns[STALLS_STAGED], json_object());
	for (unsigned i = 0; i < rank->ntimes; i++) {
		const struct stalls_time *t = &rank->times[i];
		const char *phase = st->phases[t->phase];

		trace_name(tr, "thread_name", rank->rank, t->phase + 1, phase);
		trace_span(tr, rank->rank, t->phase + 1, trace_span_name(phase, span, sizeof span), t->start_ns,
			t->end_ns, json_pack("{s:I, s:I}", "busy_ns", (json_int_t)(t->busy_ns & INT64_MAX),
				"bytes", (json_int_t)(t->bytes & INT64_MAX)));
	}
}

uint64_t stalls_origin(const struct stalls *st)
{
	uint64_t submitted = 0, started = 0;

	for (uint32_t i = 0; i < st->nranks; i++) {
		const struct stalls_rank *rank = &st->ranks[i];

		if (rank->submitted_ns && (!submitted || rank->submitted_ns < submitted))
			submitted = rank->submitted_ns;
		for (unsigned k = 0; k < rank->ntimes; k++)
			if (rank->times[k].start_ns && (!started || rank->times[k].start_ns < started))
				started = rank->times[k].start_ns;
	}
	return submitted ? submitted : started;
}

int stalls_trace(const struct stalls *st, const char *path, struct base_error *err)
{
	struct trace tr = {fopen(path, "we"), stalls_origin(st), false, false};

	if (!tr.to)
		return base_error_set(err, -errno, "%s: %s", path, strerror(errno));
	fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", tr.to);
	for (uint32_t i = 0; i < st->nranks; i++)
		trace_rank(&tr, st, &st->ranks[i]);
	fputs("\n]}\n", tr.to);
	errno = 0;
	tr.failed |= ferror(tr.to) != 0;
	if (fclose(tr.to) == 0 && !tr.failed)
		return 0;
	base_error_set(err, errno ? -errno : -EIO, "%s cannot be written: %s", path, strerror(errno ? errno : EIO));
	return err->code;
}
