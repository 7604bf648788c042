/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt ls: runs; the steps of a run; the components and blobs of a step; the tensors of a component. Listing runs and
 * steps reads lists only. */
#include "core/base/clock.h"
#include "core/commit/list/list_facts.h"
#include "tools/vckpt/list/ls.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

/* ---- rows ---- */

char *ls_format_bytes(const struct ls *ls, uint64_t bytes, char text[static 32])
{
	if (!ls->bytes)
		return tool_format_bytes(bytes, text);
	snprintf(text, 32, "%" PRIu64, bytes);
	return text;
}

void ls_begin(struct ls *ls, const struct tool_column *columns, unsigned n)
{
	if (ls->t->json)
		ls->rows = json_array();
	else
		ls->table = tool_table_new(columns, n, ls->more, ls->bytes);
}

void ls_add(struct ls *ls, json_t *row)
{
	if (ls->t->json)
		json_array_append_new(ls->rows, row);
	else
		tool_table_add(ls->table, row);
}

json_t *ls_take(struct ls *ls)
{
	json_t *rows = ls->rows;

	ls->rows = rows ? json_array() : NULL;
	return rows;
}

int ls_print(struct ls *ls, json_t *document)
{
	if (ls->t->json)
		return tool_print_json(document);
	json_decref(document);
	if (tool_table_print(ls->table, stdout, ls->bare, tool_terminal_width(STDOUT_FILENO)) < 0)
		return tool_fail(ls->t, &(struct base_error){.code = -ENOMEM});
	return TOOL_DONE;
}

void ls_add_when(const struct ls *ls, json_t *row, int64_t time_ns)
{
	char text[40];

	json_object_set_new(row, "when", json_string(ls->time ? tool_format_time(time_ns, text)
		: tool_format_age(time_ns, ls->now_ns, text)));
}

bool ls_says(const struct ls *ls)
{
	return !ls->bare && !ls->t->quiet && !ls->t->json;
}

static void say_steps(const struct ls *ls, uint64_t steps, uint64_t bytes, uint64_t added)
{
	printf("%s, %s logical; saving %s added %s (vckpt info STORE: size on disk)\n",
		TOOL_COUNT(steps, "step", "steps"), LS_BYTES(ls, bytes), base_plural(steps, "it", "them"),
		LS_BYTES(ls, added));
}

/* ---- runs ---- */

struct run {
	const char *name;
	size_t steps;
	uint64_t latest, bytes, added;
	int64_t time_ns; /* of the latest */
};

static void read_run(struct run *run, const struct commit_list *l)
{
	const struct commit_list_step *latest = commit_list_latest(l);

	run->steps = commit_list_count(l);
	if (latest) {
		run->latest = latest->step;
		run->time_ns = latest->commit.time_ns;
	}
	for (size_t i = 0; i < run->steps; i++) {
		run->bytes += commit_list_at(l, i)->commit.bytes;
		run->added += commit_list_at(l, i)->commit.new_bytes;
	}
}

static int print_runs(struct ls *ls, const struct run *runs, const struct ls_item *items, size_t n)
{
	const struct tool_column columns[] = {{"RUN", "run", .shorten = true, .style = TOOL_RUN},
		{"STEPS", "steps", .right = true}, {"LATEST", "latest", TOOL_AS_STEP, .style = TOOL_GOOD},
		{ls->time ? "TIME" : "AGE", "when"}, {"SIZE", "bytes", TOOL_AS_BYTES, .right = true},
		{"ADDED", "new_bytes", TOOL_AS_BYTES, .right = true}};
	uint64_t steps = 0, bytes = 0, added = 0;
	int code;

	ls_begin(ls, columns, BASE_COUNT(columns));
	for (size_t i = 0; i < n; i++) {
		const struct run *run = &runs[items[i].index];
		json_t *row = json_pack("{s:s, s:I, s:I, s:s, s:I, s:I}", "run", run->name, "steps",
			(json_int_t)run->steps, "latest", (json_int_t)run->latest, "time", TOOL_TIME(run->time_ns),
			"bytes", (json_int_t)run->bytes, "new_bytes", (json_int_t)run->added);

		if (!ls->t->json)
			ls_add_when(ls, row, run->time_ns);
		ls_add(ls, row);
		steps += run->steps;
		bytes += run->bytes;
		added += run->added;
	}
	code = ls_print(ls, json_pack("{s:o}", "runs", ls_take(ls)));
	if (code || !ls_says(ls))
		return code;
	printf("total: %s, ", TOOL_COUNT(n, "run", "runs"));
	say_steps(ls, steps, bytes, added);
	return TOOL_DONE;
}

/* A run that cannot be read hides no other; one without a step is left out. */
static int read_runs(const struct ls *ls, struct store *s, char **names, size_t n, struct run *runs,
	struct ls_item *items, size_t *ret_n)
{
	struct base_error err = {0};
	struct commit_list *l;
	int code = 0;

	for (size_t i = 0; i < n; i++) {
		struct run *run = &runs[*ret_n];

		if (commit_list_open(s, names[i], false, &l, &err) < 0) {
			code = tool_fail(ls->t, &err);
			continue;
		}
		*run = (struct run){.name = names[i]};
		read_run(run, l);
		items[*ret_n] = (struct ls_item){.name = run->name, .name_len = strlen(run->name), .step = run->latest,
			.time_ns = run->time_ns, .bytes = run->bytes, .index = *ret_n};
		*ret_n += run->steps > 0;
		commit_list_close(l);
	}
	return code;
}

static int list_runs(struct ls *ls)
{
	struct store *s = ls->t->store;
	struct base_error err = {0};
	char **names;
	size_t n, found = 0;
	base_cleanup_free struct run *runs = NULL;
	base_cleanup_free struct ls_item *items = NULL;
	int code = TOOL_FAILED, failed = 0;

	if (commit_runs(s, &names, &n, &err) < 0)
		return tool_fail(ls->t, &err);
	runs = calloc(n + 1, sizeof *runs);
	items = calloc(n + 1, sizeof *items);
	if (!runs || !items)
		tool_fail(ls->t, &(struct base_error){.code = -ENOMEM});
	else {
		failed = read_runs(ls, s, names, n, runs, items, &found);
		code = ls_sort(ls, "runs", LS_NAME | LS_STEP | LS_TIME | LS_SIZE, items, found);
		if (code == 0)
			code = print_runs(ls, runs, items, found);
	}
	commit_runs_free(names, n);
	return code ? code : failed;
}

/* ---- the steps of a run ---- */

json_t *ls_step_json(const struct commit_list *l, const struct commit_list_step *s,
	const struct proto_attribute *attributes, size_t n)
{
	json_t *row = json_pack("{s:s, s:I, s:I, s:s, s:s, s:s, s:I, s:I, s:I, s:o}", "run", commit_list_run(l), "step",
		(json_int_t)s->step, "entry", (json_int_t)s->entry, "attempt", s->commit.attempt, "time",
		TOOL_TIME(s->commit.time_ns), "manifest", TOOL_DIGEST(&s->commit.manifest), "tensors",
		(json_int_t)s->commit.tensors, "bytes", (json_int_t)s->commit.bytes, "new_bytes",
		(json_int_t)s->commit.new_bytes, "attributes", tool_json_attributes(attributes, n));

	tool_json_facts(row, commit_list_facts(l, s->entry));
	return row;
}

static void items_free(struct ls_item *items, size_t n)
{
	for (size_t i = 0; items && i < n; i++)
		free(items[i].attributes);
	free(items);
}

static struct ls_item *step_items(const struct commit_list *l)
{
	size_t n = commit_list_count(l);
	struct ls_item *items = calloc(n + 1, sizeof *items);

	for (size_t i = 0; items && i < n; i++) {
		const struct commit_list_step *s = commit_list_at(l, i);

		items[i] = (struct ls_item){.step = s->step, .time_ns = s->commit.time_ns, .bytes = s->commit.bytes,
			.index = i};
		if (commit_list_attributes(l, s, &items[i].attributes, &items[i].nattributes) < 0) {
			items_free(items, n);
			return NULL;
		}
	}
	return items;
}

/* The members that only columns name. */
static void add_columns(const struct ls *ls, json_t *row, const struct commit_list *l, const struct commit_list_step *s)
{
	base_cleanup_buf struct base_buf note = BASE_BUF_INIT;

	ls_add_when(ls, row, s->commit.time_ns);
	if (s == commit_list_latest(l))
		json_object_set_new(row, "latest", json_true());
	tool_facts_note(commit_list_facts(l, s->entry), &note);
	if (note.len)
		json_object_set_new(row, "note", tool_json_text((const char *)note.data, note.len));
}

/* For people the last column is there where it says something. */
static bool has_notes(const struct commit_list *l)
{
	for (size_t i = 0; i < commit_list_count(l); i++) {
		const struct proto_step_facts *f = commit_list_facts(l, commit_list_at(l, i)->entry);

		if (f && (f->pinned || f->ntags))
			return true;
	}
	return false;
}

static int print_steps(struct ls *ls, const struct commit_list *l, const char *run, const struct ls_item *items)
{
	const struct tool_column columns[] = {{"STEP", "step", TOOL_AS_STEP, .style = TOOL_GOOD, .style_if = "latest"},
		{ls->time ? "TIME" : "AGE", "when"}, {"TENSORS", "tensors", .right = true},
		{"SIZE", "bytes", TOOL_AS_BYTES, .right = true}, {"ADDED", "new_bytes", TOOL_AS_BYTES, .right = true},
		{"ATTEMPT", "attempt", .more = true}, {"ATTRIBUTES", "attributes", .shorten = true},
		{"NOTE", "note", .shorten = true}};
	uint64_t bytes = 0, added = 0;
	size_t n = commit_list_count(l);
	int code;

	ls_begin(ls, columns, BASE_COUNT(columns) - !(ls->bare || has_notes(l)));
	for (size_t i = 0; i < n; i++) {
		const struct commit_list_step *s = commit_list_at(l, items[i].index);
		json_t *row = ls_step_json(l, s, items[i].attributes, items[i].nattributes);

		if (!ls->t->json)
			add_columns(ls, row, l, s);
		ls_add(ls, row);
		bytes += s->commit.bytes;
		added += s->commit.new_bytes;
	}
	code = ls_print(ls, json_pack("{s:s, s:o}", "run", run, "steps", ls_take(ls)));
	if (code == 0 && ls_says(ls)) {
		fputs("total: ", stdout);
		say_steps(ls, n, bytes, added);
	}
	return code;
}

static int list_steps(struct ls *ls, const char *run)
{
	struct base_error err = {0};
	const struct commit_list *l;
	struct ls_item *items;
	int code;

	if (commit_list_open(ls->t->store, run, false, &ls->t->list, &err) < 0)
		return tool_fail(ls->t, &err);
	l = ls->t->list;
	if (commit_list_next(l) == 0)
		return tool_no_run(ls->t, run);
	items = step_items(l);
	if (!items)
		return tool_fail(ls->t, &(struct base_error){.code = -ENOMEM});
	code = ls_sort(ls, "steps", LS_NAME | LS_STEP | LS_TIME | LS_SIZE | LS_ATTRIBUTE, items, commit_list_count(l));
	if (code == 0)
		code = print_steps(ls, l, run, items);
	items_free(items, commit_list_count(l));
	return code;
}

/* ---- the command ---- */

static int list_target(struct ls *ls, const struct tool_target *target)
{
	const struct commit_list_step *entry;
	int code = tool_step_open(ls->t, target, &entry);

	if (code)
		return code;
	return target->rest ? ls_tensors(ls, ls->t->step, target->rest) : ls_step(ls, ls->t->step, entry);
}

static int list(struct ls *ls)
{
	struct tool_target target = {0};
	struct tool *t = ls->t;
	int code;

	if (t->narguments == 2 && (code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (ls->incoming && target.has_step)
		return tool_usage(t, "--incoming takes a RUN without a step");
	if (target.has_step)
		return list_target(ls, &target);
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY)))
		return code;
	if (ls->incoming)
		return tool_list_incoming(t, t->narguments == 2 ? target.run : NULL);
	return t->narguments == 2 ? list_steps(ls, target.run) : list_runs(ls);
}

static int ls_run(struct tool *t, int argc, char **argv)
{
	struct ls ls = {.t = t, .now_ns = base_realtime_ns()};
	const struct tool_option options[] = {{"incoming", .flag = &ls.incoming}, {"sort", .text = &ls.sort},
		{"reverse", 'r', .flag = &ls.reverse}, {"bytes", .flag = &ls.bytes}, {"time", .flag = &ls.time},
		{"long", 'l', .flag = &ls.more}, {"no-header", 'H', .flag = &ls.bare}, {0}};
	int code = tool_parse(t, argc, argv, options);

	ls.more |= t->verbose > 0;
	if (code == 0)
		code = list(&ls);
	tool_table_free(ls.table);
	json_decref(ls.rows);
	return code;
}

const struct tool_command tool_ls = {"ls", "list runs, steps, components, tensors",
	"usage: vckpt ls STORE [RUN[/STEP[/COMPONENT]]] [OPTION...]\n"
	"       vckpt ls STORE --incoming [RUN] [--json]\n\n"
	"Lists the runs of a store, the steps of a run with their attributes, the components and files of a\n"
	"step, or the tensors of a component. STEP is a number, latest or a tag. SIZE is what a step holds, ADDED\n"
	"what its save stored that was not there before. Attributes are shown with those that were set later;\n"
	"NOTE are a step's tags, and why it is pinned.\n\n"
	"  -l, -v, --long      also attempts of steps; of components and tensors stored bytes, pieces, codecs,\n"
	"                      types, and how numpy reads those that it lacks\n"
	"  --sort KEY          by name, step, time, size or, for steps, an attribute; ascending\n"
	"  -r, --reverse       in the opposite order\n"
	"  --bytes             exact numbers of bytes\n"
	"  --time              the time of a commit instead of its age\n"
	"  -H, --no-header     for scripts: no header and no total, a tab between fields\n"
	"  --incoming          saves under way instead, and what is left of others: how many ranks have written their\n"
	"                      part, which are missing, for how long, and whether its writers are alive\n"
	"  --json -q           print JSON; leave out the total\n",
	ls_run};
