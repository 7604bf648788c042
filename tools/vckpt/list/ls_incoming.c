/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt ls --incoming: saves under way, and what is left of others. Whether a writer lives is known by heartbeats, as
 * far as this machine sees at once: another host's are "unknown" (the collector watches them). Once the list has
 * decided an attempt its folder has no meaning, whether its writers live or not. */
#include <inttypes.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/commit/attempt/attempt.h"
#include "core/commit/incoming/incoming.h"
#include "tools/vckpt/tool.h"

struct incoming {
	const struct commit_incoming *in;
	enum commit_attempt_state decided;
	int64_t now_ns;
};

const char *const tool_liveness[] = {[COMMIT_DEAD] = "dead", [COMMIT_ALIVE] = "alive", [COMMIT_UNKNOWN] = "unknown"};

static bool left_over(const struct incoming *i)
{
	return i->in->state == COMMIT_DEAD || i->decided != COMMIT_ATTEMPT_UNDECIDED;
}

static bool incoming_age(const struct incoming *i, uint64_t *ret_ns)
{
	if (i->in->since_ns <= 0)
		return false;
	*ret_ns = i->now_ns > i->in->since_ns ? (uint64_t)(i->now_ns - i->in->since_ns) : 0;
	return true;
}

static json_t *missing_json(const struct commit_incoming *in)
{
	json_t *all = json_array();

	for (uint32_t i = 0; i < in->nmissing; i++)
		json_array_append_new(all, json_integer(in->missing[i]));
	return all;
}

static json_t *incoming_json(const struct incoming *i)
{
	static const char *const decisions[] = {NULL, "committed", "aborted"};
	const struct commit_incoming *in = i->in;
	const char *host = in->begun && in->begin.host && in->begin.host[0] ? in->begin.host : NULL;
	uint64_t age = 0;
	bool known = incoming_age(i, &age);

	return json_pack("{s:s, s:s, s:o, s:o, s:o, s:I, s:o, s:s?, s:s?, s:o, s:s, s:s?, s:b, s:b}", "run", in->run,
		"attempt", in->attempt, "import", in->begun ? json_boolean(in->begin.alone) : json_null(), "step",
		in->begun ? json_integer((json_int_t)in->begin.step) : json_null(), "world",
		in->begun ? json_integer(in->begin.world) : json_null(), "announced", (json_int_t)in->nannounced,
		"missing", in->begun ? missing_json(in) : json_null(), "host", host, "since",
		known ? TOOL_TIME(in->since_ns) : NULL, "age_s",
		known ? json_integer((json_int_t)(age / 1000000000)) : json_null(), "state", tool_liveness[in->state],
		"decided", decisions[i->decided], "left_over", left_over(i),
		"replace", in->begun && in->begin.replace);
}

static void print_incoming(const struct incoming *i)
{
	static const char *const decisions[] = {"", "committed; ", "aborted; "};
	const struct commit_incoming *in = i->in;
	uint64_t ns;

	if (in->begun)
		printf("%s/step-%08" PRIu64 "%s  %" PRIu32 " of %s announced", in->run, in->begin.step,
			in->begin.replace ? " (replacing)" : "", in->begin.world - in->nmissing,
			TOOL_COUNT(in->begin.world, "rank", "ranks"));
	else
		printf("%s  not begun", in->run);
	if (in->begun && in->nmissing)
		printf(", missing %s", TOOL_RANKS(in->missing, in->nmissing));
	if (incoming_age(i, &ns))
		printf("  for %s", TOOL_DURATION(ns));
	printf("  %s%s%s%s  attempt %s\n", decisions[i->decided], left_over(i) ? "left over (" : "",
		tool_liveness[in->state], left_over(i) ? ")" : "", in->attempt);
}

void tool_print_incoming(const struct commit_incoming *in)
{
	print_incoming(&(struct incoming){.in = in, .decided = COMMIT_ATTEMPT_UNDECIDED, .now_ns = base_realtime_ns()});
}

/* t->list is the list of the run at hand: attempts come run by run. */
static int incoming_decide(struct tool *t, struct incoming *i, struct base_error *err)
{
	uint64_t entry;
	int r = 0;

	if (t->list && strcmp(commit_list_run(t->list), i->in->run) != 0)
		commit_list_close(base_steal(t->list));
	if (!t->list)
		r = commit_list_open(t->store, i->in->run, false, &t->list, err);
	if (r == 0)
		i->decided = commit_list_attempt(t->list, i->in->attempt, NULL, &entry);
	return r;
}

int tool_list_incoming(struct tool *t, const char *run)
{
	struct commit_incoming *all = NULL;
	struct base_error err = {0};
	int64_t now_ns = base_realtime_ns();
	json_auto_t *shown = json_array();
	size_t n = 0;
	int r = commit_incoming_read(t->store, &all, &n, &err);

	for (size_t k = 0; r == 0 && k < n; k++) {
		struct incoming i = {.in = &all[k], .now_ns = now_ns};

		if (run && strcmp(all[k].run, run) != 0)
			continue;
		r = incoming_decide(t, &i, &err);
		if (r == 0 && t->json)
			json_array_append_new(shown, incoming_json(&i));
		else if (r == 0)
			print_incoming(&i);
	}
	commit_incoming_free(all, n);
	if (r < 0)
		return tool_fail(t, &err);
	return t->json ? tool_print_json(json_pack("{s:O}", "incoming", shown)) : TOOL_DONE;
}
