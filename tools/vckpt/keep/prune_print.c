/* SPDX-License-Identifier: Apache-2.0
 *
 * prune_print: the plan, as a table or as what --json prints of it: each step with the rules that keep it, and how many
 * steps each rule keeps. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/keep/prune.h"
#include "tools/vckpt/print/table.h"

static json_t *kept_by(const struct prune_run *run, const struct upkeep_retain_row *row)
{
	json_t *by = json_array();

	for (unsigned i = 0; i < UPKEEP_RETAIN_ALWAYS; i++)
		if (row->always >> i & 1)
			json_array_append_new(by, json_string(upkeep_retain_always[i]));
	for (unsigned i = 0; i < upkeep_retain_count(run->rules); i++) {
		const char *rule = upkeep_retain_rule(run->rules, i);

		if (row->rules >> i & 1)
			json_array_append_new(by, tool_json_text(rule, strlen(rule)));
	}
	return by;
}

/* "highest, keep-last=3" */
static json_t *joined(json_t *by)
{
	base_cleanup_buf struct base_buf text = BASE_BUF_INIT;
	base_cleanup_free char *all = NULL;
	size_t i;
	json_t *word;

	json_array_foreach(by, i, word)
		base_buf_printf(&text, "%s%s", i ? ", " : "", json_string_value(word));
	all = base_buf_steal_text(&text);
	return all ? json_string(all) : NULL;
}

static json_t *step_json(const struct prune *p, const struct prune_run *run, const struct upkeep_retain_row *row)
{
	const struct prune_step *s = prune_step_find(p, run->name, row->step.step);
	const char *plan = !s ? "stays" : s->thinned ? "thinned" : "goes";
	json_t *by = kept_by(run, row), *o = json_pack("{s:s, s:I, s:I, s:s, s:I, s:s, s:o}", "run", run->name, "step",
		(json_int_t)row->step.step, "entry", (json_int_t)row->entry, "time", TOOL_TIME(row->step.time_ns),
		"bytes", (json_int_t)row->step.bytes, "plan", plan, "kept_by", by);

	if (p->t->json)
		return o;
	json_object_set_new(o, "when", json_string(tool_format_age(row->step.time_ns, p->now_ns, (char[32]){0})));
	if (json_array_size(by))
		json_object_set_new(o, "by", joined(by));
	if (*plan == 'g')
		json_object_set_new(o, "gone", json_true());
	return o;
}

/* Of each rule how many steps it keeps. */
static json_t *rules_json(const struct prune_run *run, const struct upkeep_retain_row *rows, size_t n)
{
	json_t *all = json_array();

	for (unsigned i = 0; i < upkeep_retain_count(run->rules); i++) {
		const char *rule = upkeep_retain_rule(run->rules, i);
		size_t keeps = 0;

		for (size_t k = 0; k < n; k++)
			keeps += rows[k].rules >> i & 1;
		json_array_append_new(all, json_pack("{s:o, s:I}", "rule", tool_json_text(rule, strlen(rule)), "keeps",
			(json_int_t)keeps));
	}
	return json_pack("{s:s, s:b, s:I, s:o}", "run", run->name, "policy", run->policy && run->removes, "steps",
		(json_int_t)n, "rules", all);
}

static void say_run(const json_t *run)
{
	const json_t *rules = json_object_get(run, "rules");
	size_t i;
	json_t *rule;

	if (!json_array_size(rules))
		return;
	tool_print(stdout, "run %s%s:", json_string_value(json_object_get(run, "run")),
		json_is_true(json_object_get(run, "policy")) ? ", by its policy" : "");
	json_array_foreach(rules, i, rule)
		tool_print(stdout, "%s %s keeps %" JSON_INTEGER_FORMAT, i ? ";" : "",
			json_string_value(json_object_get(rule, "rule")),
			json_integer_value(json_object_get(rule, "keeps")));
	putchar('\n');
}

/* Steps that were to be thinned and have nothing else. */
static void say_left(const struct prune *p)
{
	size_t i;
	json_t *row;

	json_array_foreach(p->kept, i, row)
		tool_print(stdout, "%s\n", json_string_value(json_object_get(row, "why")));
}

static void say_sum(const struct prune *p)
{
	size_t steps = 0, n;

	for (size_t i = 0; i < p->nruns; i++) {
		upkeep_prune_rows(p->runs[i].plan, &n);
		steps += n;
	}
	printf("%zu of %s %s", p->nremove, TOOL_COUNT(steps, "step", "steps"),
		base_plural(steps == 1 ? 1 : p->nremove, "goes", "go"));
	if (p->thin)
		tool_print(stdout, ", %zu %s %s", p->nthin, base_plural(p->nthin, "loses", "lose"), p->thin);
	if (p->nsteps && p->frees)
		printf("; vckpt gc could then give %s back", TOOL_BYTES(p->freed_bytes));
	putchar('\n');
}

int prune_print_plan(struct prune *p)
{
	const struct tool_column columns[] = {{"RUN", "run", .shorten = true, .style = TOOL_RUN},
		{"STEP", "step", TOOL_AS_STEP}, {"AGE", "when"}, {"SIZE", "bytes", TOOL_AS_BYTES, .right = true},
		{"PLAN", "plan", .style = TOOL_BAD, .style_if = "gone"}, {"KEPT BY", "by", .shorten = true}};
	struct tool_table *table = p->t->json || p->t->quiet ? NULL
		: tool_table_new(columns, BASE_COUNT(columns), false, false);
	size_t n;
	int r = 0;

	for (size_t i = 0; i < p->nruns; i++) {
		const struct prune_run *run = &p->runs[i];
		const struct upkeep_retain_row *rows = upkeep_prune_rows(run->plan, &n);

		json_array_append_new(p->runs_json, rules_json(run, rows, n));
		for (size_t k = 0; k < n; k++) {
			json_t *row = step_json(p, run, &rows[k]);

			if (table)
				tool_table_add(table, row);
			else
				json_array_append_new(p->steps_json, row);
		}
	}
	if (table) {
		r = tool_table_print(table, stdout, false, tool_terminal_width(STDOUT_FILENO));
		for (size_t i = 0; i < p->nruns; i++)
			say_run(json_array_get(p->runs_json, i));
		say_left(p);
		say_sum(p);
		fflush(stdout);
	}
	tool_table_free(table);
	return r < 0 ? tool_fail(p->t, &(struct base_error){.code = r}) : 0;
}
