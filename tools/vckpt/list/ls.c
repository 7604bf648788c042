/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt ls: runs; the steps of a run; the components and blobs of a step; the tensors of a component. Listing runs and
 * steps reads lists only. */
#include "core/base/clock.h"
#include "tools/vckpt/list/ls.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

/* ---- cells ---- */

char *ls_format_bytes(const struct ls *ls, uint64_t bytes, char text[static 32])
{
	if (!ls->bytes)
		return tool_format_bytes(bytes, text);
	snprintf(text, 32, "%" PRIu64, bytes);
	return text;
}

void ls_add_bytes(const struct ls *ls, struct tool_table *table, uint64_t bytes)
{
	tool_table_text(table, LS_BYTES(ls, bytes));
}

static void add_time(const struct ls *ls, struct tool_table *table, int64_t time_ns)
{
	char text[40];

	tool_table_text(table, ls->time ? tool_format_time(time_ns, text) : tool_format_age(time_ns, ls->now_ns, text));
}

static void add_step(struct tool_table *table, uint64_t step, bool latest)
{
	char text[40];
	int len = snprintf(text, sizeof text, "step-%08" PRIu64, step);

	tool_table_add(table, latest ? TOOL_GOOD : TOOL_PLAIN, text, (size_t)len);
}

static void add_attributes(struct tool_table *table, const struct proto_commit *c)
{
	base_cleanup_free char *text = NULL;
	size_t size;
	FILE *to = open_memstream(&text, &size);

	for (size_t i = 0; to && i < c->nattributes; i++)
		fprintf(to, "%s%s=%s", i ? "  " : "", c->attributes[i].key, c->attributes[i].value);
	if (to)
		fclose(to);
	tool_table_text(table, text ? text : "");
}

int ls_print(const struct ls *ls, struct tool_table *table)
{
	struct base_error err = {.code = -ENOMEM};
	int r = table ? tool_table_print(table, stdout, ls->bare, tool_terminal_width(STDOUT_FILENO)) : -ENOMEM;

	tool_table_free(table);
	return r < 0 ? tool_fail(ls->t, &err) : TOOL_DONE;
}

bool ls_says(const struct ls *ls)
{
	return !ls->bare && !ls->t->quiet;
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

static void read_run(struct run *run, const struct store_list *l)
{
	const struct store_list_step *latest = store_list_latest(l);

	run->steps = store_list_count(l);
	if (latest) {
		run->latest = latest->step;
		run->time_ns = latest->commit.time_ns;
	}
	for (size_t i = 0; i < run->steps; i++) {
		run->bytes += store_list_at(l, i)->commit.bytes;
		run->added += store_list_at(l, i)->commit.new_bytes;
	}
}

static int print_runs(const struct ls *ls, const struct run *runs, const struct ls_item *items, size_t n)
{
	const struct tool_column columns[] = {{"RUN", .shorten = true}, {"STEPS", true}, {"LATEST"},
		{ls->time ? "TIME" : "AGE"}, {"SIZE", true}, {"ADDED", true}};
	struct tool_table *table = tool_table_new(columns, BASE_COUNT(columns));
	uint64_t steps = 0, bytes = 0, added = 0;

	for (size_t i = 0; table && i < n; i++) {
		const struct run *run = &runs[items[i].index];

		tool_table_add(table, TOOL_RUN, run->name, strlen(run->name));
		tool_table_number(table, run->steps);
		add_step(table, run->latest, true);
		add_time(ls, table, run->time_ns);
		ls_add_bytes(ls, table, run->bytes);
		ls_add_bytes(ls, table, run->added);
		steps += run->steps;
		bytes += run->bytes;
		added += run->added;
	}
	int code = ls_print(ls, table);
	if (code || !ls_says(ls))
		return code;
	printf("total: %s, ", TOOL_COUNT(n, "run", "runs"));
	say_steps(ls, steps, bytes, added);
	return TOOL_DONE;
}

static int print_runs_json(const struct run *runs, const struct ls_item *items, size_t n)
{
	json_t *all = json_array();

	for (size_t i = 0; i < n; i++) {
		const struct run *run = &runs[items[i].index];

		json_array_append_new(all, json_pack("{s:s, s:I, s:I, s:s, s:I, s:I}", "run", run->name, "steps",
			(json_int_t)run->steps, "latest", (json_int_t)run->latest, "time", TOOL_TIME(run->time_ns),
			"bytes", (json_int_t)run->bytes, "new_bytes", (json_int_t)run->added));
	}
	return tool_print_json(json_pack("{s:o}", "runs", all));
}

/* A run that cannot be read hides no other; one without a step is left out. */
static int read_runs(const struct ls *ls, struct store *s, char **names, size_t n, struct run *runs,
	struct ls_item *items, size_t *ret_n)
{
	struct base_error err = {0};
	struct store_list *l;
	int code = 0;

	for (size_t i = 0; i < n; i++) {
		struct run *run = &runs[*ret_n];

		if (store_list_open(s, names[i], false, &l, &err) < 0) {
			code = tool_fail(ls->t, &err);
			continue;
		}
		*run = (struct run){.name = names[i]};
		read_run(run, l);
		items[*ret_n] = (struct ls_item){.name = run->name, .name_len = strlen(run->name), .step = run->latest,
			.time_ns = run->time_ns, .bytes = run->bytes, .index = *ret_n};
		*ret_n += run->steps > 0;
		store_list_close(l);
	}
	return code;
}

static int list_runs(const struct ls *ls)
{
	struct store *s = ls->t->store;
	struct base_error err = {0};
	char **names;
	size_t n, found = 0;

	if (store_runs(s, &names, &n, &err) < 0)
		return tool_fail(ls->t, &err);
	base_cleanup_free struct run *runs = calloc(n + 1, sizeof *runs);
	base_cleanup_free struct ls_item *items = calloc(n + 1, sizeof *items);
	int code = TOOL_FAILED, failed = 0;
	if (!runs || !items)
		tool_fail(ls->t, &(struct base_error){.code = -ENOMEM});
	else {
		failed = read_runs(ls, s, names, n, runs, items, &found);
		code = ls_sort(ls, "runs", LS_NAME | LS_STEP | LS_TIME | LS_SIZE, items, found);
		if (code == 0)
			code = ls->t->json ? print_runs_json(runs, items, found) : print_runs(ls, runs, items, found);
	}
	store_runs_free(names, n);
	return code ? code : failed;
}

/* ---- the steps of a run ---- */

json_t *ls_step_json(const char *run, const struct store_list_step *s)
{
	return json_pack("{s:s, s:I, s:I, s:s, s:s, s:s, s:I, s:I, s:I, s:o}", "run", run, "step", (json_int_t)s->step,
		"entry", (json_int_t)s->entry, "attempt", s->commit.attempt, "time", TOOL_TIME(s->commit.time_ns),
		"manifest", TOOL_DIGEST(&s->commit.manifest), "tensors", (json_int_t)s->commit.tensors, "bytes",
		(json_int_t)s->commit.bytes, "new_bytes", (json_int_t)s->commit.new_bytes, "attributes",
		tool_json_attributes(s->commit.attributes, s->commit.nattributes));
}

static struct ls_item *step_items(const struct store_list *l)
{
	size_t n = store_list_count(l);
	struct ls_item *items = calloc(n + 1, sizeof *items);

	for (size_t i = 0; items && i < n; i++) {
		const struct store_list_step *s = store_list_at(l, i);

		items[i] = (struct ls_item){.step = s->step, .time_ns = s->commit.time_ns, .bytes = s->commit.bytes,
			.attributes = s->commit.attributes, .nattributes = s->commit.nattributes, .index = i};
	}
	return items;
}

static int print_steps_json(const struct store_list *l, const char *run, const struct ls_item *items)
{
	json_t *all = json_array();

	for (size_t i = 0; i < store_list_count(l); i++)
		json_array_append_new(all, ls_step_json(run, store_list_at(l, items[i].index)));
	return tool_print_json(json_pack("{s:s, s:o}", "run", run, "steps", all));
}

static void add_step_row(const struct ls *ls, struct tool_table *table, const struct store_list_step *s, bool latest)
{
	add_step(table, s->step, latest);
	add_time(ls, table, s->commit.time_ns);
	tool_table_number(table, s->commit.tensors);
	ls_add_bytes(ls, table, s->commit.bytes);
	ls_add_bytes(ls, table, s->commit.new_bytes);
	if (ls->more)
		tool_table_text(table, s->commit.attempt);
	add_attributes(table, &s->commit);
}

static int print_steps(const struct ls *ls, const struct store_list *l, const struct ls_item *items)
{
	const struct tool_column common[] = {{"STEP"}, {ls->time ? "TIME" : "AGE"}, {"TENSORS", true}, {"SIZE", true},
		{"ADDED", true}, {"ATTRIBUTES", .shorten = true}};
	struct tool_column columns[BASE_COUNT(common) + 1];
	uint64_t bytes = 0, added = 0;
	size_t n = store_list_count(l);

	memcpy(columns, common, sizeof common);
	columns[6] = columns[5];
	if (ls->more)
		columns[5] = (struct tool_column){"ATTEMPT"};
	struct tool_table *table = tool_table_new(columns, ls->more ? 7 : 6);
	for (size_t i = 0; table && i < n; i++) {
		const struct store_list_step *s = store_list_at(l, items[i].index);

		add_step_row(ls, table, s, s == store_list_latest(l));
		bytes += s->commit.bytes;
		added += s->commit.new_bytes;
	}
	int code = ls_print(ls, table);
	if (code == 0 && ls_says(ls)) {
		fputs("total: ", stdout);
		say_steps(ls, n, bytes, added);
	}
	return code;
}

static int list_steps(const struct ls *ls, const char *run)
{
	struct base_error err = {0};
	int code;

	if (store_list_open(ls->t->store, run, false, &ls->t->list, &err) < 0)
		return tool_fail(ls->t, &err);
	const struct store_list *l = ls->t->list;
	base_cleanup_free struct ls_item *items = step_items(l);
	if (store_list_next(l) == 0)
		return tool_no_run(ls->t, run);
	if (!items)
		return tool_fail(ls->t, &(struct base_error){.code = -ENOMEM});
	if ((code = ls_sort(ls, "steps", LS_NAME | LS_STEP | LS_TIME | LS_SIZE | LS_ATTRIBUTE, items,
			store_list_count(l))))
		return code;
	return ls->t->json ? print_steps_json(l, run, items) : print_steps(ls, l, items);
}

/* ---- the command ---- */

static int list_target(const struct ls *ls, const struct tool_target *target)
{
	const struct store_list_step *entry;
	int code = tool_step_open(ls->t, target, &entry);

	if (code)
		return code;
	return target->rest ? ls_tensors(ls, ls->t->step, target->rest) : ls_step(ls, ls->t->step, entry);
}

static int ls_run(struct tool *t, int argc, char **argv)
{
	struct ls ls = {.t = t, .now_ns = base_realtime_ns()};
	const struct tool_option options[] = {{"incoming", .flag = &ls.incoming}, {"sort", .text = &ls.sort},
		{"reverse", 'r', .flag = &ls.reverse}, {"bytes", .flag = &ls.bytes}, {"time", .flag = &ls.time},
		{"long", 'l', .flag = &ls.more}, {"no-header", 'H', .flag = &ls.bare}, {0}};
	struct tool_target target = {0};
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	ls.more |= t->verbose > 0;
	if (t->narguments == 2 && (code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (ls.incoming && target.has_step)
		return tool_usage(t, "--incoming takes a RUN without a step");
	if (target.has_step)
		return list_target(&ls, &target);
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY)))
		return code;
	if (ls.incoming)
		return tool_list_incoming(t, t->narguments == 2 ? target.run : NULL);
	return t->narguments == 2 ? list_steps(&ls, target.run) : list_runs(&ls);
}

const struct tool_command tool_ls = {"ls", "list runs, steps, components, tensors",
	"usage: vckpt ls STORE [RUN[/STEP[/COMPONENT]]] [OPTION...]\n"
	"       vckpt ls STORE --incoming [RUN] [--json]\n\n"
	"Lists the runs of a store, the steps of a run with their attributes, the components and files of a\n"
	"step, or the tensors of a component. STEP is a number or latest. SIZE is what a step holds, ADDED\n"
	"what its save stored that was not there before.\n\n"
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
