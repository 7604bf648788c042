/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt find: the steps that an expression holds for. */
#include <inttypes.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/base/text.h"
#include "core/commit/list/list_facts.h"
#include "core/find/find.h"
#include "tools/vckpt/list/ls.h"

struct find_command {
	struct tool_progress progress; /* first: gets the library's calls, too */
	struct tool *t;
	struct ls ls;
	int code;
};

static void failed(void *arg, const struct base_error *why)
{
	struct find_command *c = arg;

	tool_progress_clear(&c->progress);
	c->code = tool_fail(c->t, why);
}

static void add_step(struct ls *ls, const struct find_step *found)
{
	base_cleanup_free struct proto_attribute *attributes = NULL;
	char name[PROTO_RUN_MAX + 30];
	size_t n;
	json_t *row;

	if (commit_list_attributes(found->list, found->step, &attributes, &n) < 0)
		n = 0; /* no memory: the others of the step are shown */
	row = ls_step_json(found->list, found->step, attributes, n);
	snprintf(name, sizeof name, "%s/%" PRIu64, found->run, found->step->step);
	if (!ls->t->json) {
		json_object_set_new(row, "name", json_string(name));
		ls_add_when(ls, row, found->step->commit.time_ns);
	}
	ls_add(ls, row);
}

static int print(struct find_command *c, const struct find *f)
{
	struct ls *ls = &c->ls;
	const struct tool_column columns[] = {{"RUN/STEP", "name", .shorten = true, .style = TOOL_RUN},
		{ls->time ? "TIME" : "AGE", "when"}, {"TENSORS", "tensors", .right = true},
		{"SIZE", "bytes", TOOL_AS_BYTES, .right = true}, {"ATTRIBUTES", "attributes", .shorten = true}};
	const char *name;

	for (size_t i = 0; !c->t->quiet && (name = find_unknown(f, i)); i++)
		tool_print(stderr, "vckpt find: no step has an attribute %s\n", name);
	ls_begin(ls, columns, BASE_COUNT(columns));
	for (size_t i = 0; i < find_count(f); i++)
		add_step(ls, find_at(f, i));
	if (!c->t->json && find_count(f) == 0)
		return TOOL_DONE; /* no header alone */
	return ls_print(ls, json_pack("{s:o}", "steps", ls_take(ls)));
}

static int find(struct find_command *c, const struct find_options *o)
{
	struct base_error err = {0};
	struct find *f = NULL;
	int r, code;

	tool_progress_start(&c->progress, c->t->quiet, "find");
	c->progress.counts = true;
	r = find_open(c->t->store, o, &f, &err);
	tool_progress_end(&c->progress);
	if (r == -EINVAL || r == -BASE_ELIMIT)
		return tool_usage(c->t, "%s", err.text);
	if (r < 0)
		return tool_fail(c->t, &err);
	code = print(c, f);
	find_close(f);
	return code ? code : c->code;
}

static int find_run(struct tool *t, int argc, char **argv)
{
	struct find_command c = {.t = t, .ls = {.t = t, .now_ns = base_realtime_ns()}};
	struct find_options o = {.now_ns = c.ls.now_ns, .progress = tool_progress_update, .failed = failed, .arg = &c};
	const char *limit = NULL;
	const struct tool_option options[] = {{"limit", 'l', .text = &limit}, {"no-index", .flag = &o.no_index},
		{"time", .flag = &c.ls.time}, {"no-header", 'H', .flag = &c.ls.bare}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	if (limit && (!base_decimal(limit, 0, UINT64_MAX, &o.limit) || !o.limit))
		return tool_usage(t, "--limit %s: give a number of steps, 1 or more", limit);
	o.expression = t->arguments[1];
	code = tool_open_store(t, STORE_OPEN_READ_ONLY);
	if (code == 0)
		code = find(&c, &o);
	tool_table_free(c.ls.table);
	json_decref(c.ls.rows);
	return code;
}

const struct tool_command tool_find = {"find", "find steps by attributes and tensors",
	"usage: vckpt find STORE EXPR [OPTION...]\n\n"
	"Lists the steps of all runs that an expression holds for, newest first:\n"
	"  vckpt find STORE 'loss < 2.3 and age < 7d'\n"
	"  vckpt find STORE \"tensor ~ 'layers.*.weight' and dtype == bf16 and shape == [4096,4096]\"\n"
	"It may ask for step, time, age, bytes, run, tag, pinned, attributes, and for tensors: tensor (its name),\n"
	"component, dtype, shape, digest (its first digits). Conditions on tensors that are joined by \"and\" mean\n"
	"one tensor; \"not\" before them: no tensor. docs/expressions.md has the rest.\n"
	"What tensors a step has is read once and kept in the index.\n\n"
	"  -l, --limit N       the N newest of them\n"
	"  --no-index          neither use the index nor write it\n"
	"  --time              the time of a commit instead of its age\n"
	"  -H, --no-header     for scripts: no header, a tab between fields\n"
	"  --json -q           print JSON; no notes\n",
	find_run};
