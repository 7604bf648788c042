/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt diff: what is different between two steps, or a step and files. Its exit codes are those of diff(1): 1 says
 * that something is different, so what fails ends with 2, where other commands end with 1. */
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "tools/vckpt/diff/diff_path.h"
#include "tools/vckpt/print/table.h"
#include "tools/vckpt/tool.h"

enum { EXIT_DIFFERENT = 1, EXIT_TROUBLE = 2 };
#define DIFFERENT 2000 /* inside, where 1 is TOOL_FAILED; no other code */

struct differ {
	struct tool *t, other;          /* A's; B's, where it is a step */
	struct diff_options options;
	bool stat;
	const char *store;              /* of B; NULL: A's */
	struct diff_path *path;         /* B, where it is no step */
	char *names[2];
	struct diff_side sides[2];
	struct diff *found;
	struct tool_progress progress;
};

/* ---- sides ---- */

static char *step_name(const struct load_step *step)
{
	const struct load_step_info *info = load_step_info(step);

	return tool_string("%s/%" PRIu64, info->run, info->step);
}

/* What begins as a path does is one. Else a run of the store comes first. */
static bool is_path(const struct differ *d, const char *text)
{
	char run[4400];

	if (text[0] == '/' || text[0] == '.')
		return true;
	return snprintf(run, sizeof run, "%s/runs/%.*s", d->t->arguments[0], (int)strcspn(text, "/"), text) <
		(int)sizeof run && access(run, F_OK) != 0 && access(text, F_OK) == 0;
}

static int target_of(const struct tool *t, const char *text, struct tool_target *ret_target)
{
	int code = tool_target_parse(t, text, ret_target);

	if (code == 0 && ret_target->rest)
		code = tool_usage(t, "%s names a part of a step: give RUN/STEP, and --component for one component",
			text);
	return code;
}

/* B as a step, of the store that is open or of another one. */
static int open_other(struct differ *d, const struct tool_target *target)
{
	const struct commit_list_step *entry;
	struct base_error err = {0};
	int code;

	if (d->store)
		return tool_step_open(&d->other, target, NULL);
	d->other.store = d->t->store;
	code = tool_target_find(&d->other, target, &entry);
	if (code == 0 && load_step_open(d->t->store, target->run, entry, &d->other.step, &err) < 0)
		code = tool_fail(d->t, &err);
	return code;
}

static int open_sides(struct differ *d)
{
	const char *a = d->t->arguments[1], *b = d->t->arguments[2], *place[2] = {d->store, b};
	bool path = !d->store && is_path(d, b);
	struct tool_target first, second;
	struct base_error err = {0};
	int code = target_of(d->t, a, &first);

	d->other = *d->t;
	if (d->store) {
		d->other.arguments = place;
		d->other.narguments = 2;
		d->other.from_environment = false;
	}
	if (code == 0 && !path)
		code = target_of(&d->other, b, &second);
	if (code == 0)
		code = tool_step_open(d->t, &first, NULL);
	if (code)
		return code;
	if (path && diff_path_open(b, d->options.component, &d->path, &err) < 0)
		code = tool_fail(d->t, &err);
	else if (!path)
		code = open_other(d, &second);
	if (code)
		return code;
	d->names[0] = step_name(d->t->step);
	d->names[1] = path ? strdup(b) : step_name(d->other.step);
	d->sides[0].step = d->t->step;
	d->sides[1].step = d->other.step;
	d->sides[1].other = path ? diff_path_side(d->path) : NULL;
	return d->names[0] && d->names[1] ? 0 : tool_failed(d->t, "out of memory");
}

/* ---- rows ---- */

static void set_integer(json_t *o, const char *key, uint64_t n)
{
	json_object_set_new(o, key, json_integer((json_int_t)n));
}

static void set_real(json_t *o, const char *key, double value)
{
	json_object_set_new(o, key, isfinite(value) ? json_real(value) : json_null());
}

static void set_tensor(json_t *o, const struct load_tensor_info *t, bool b)
{
	json_object_set_new(o, "component", json_string(t->component));
	json_object_set_new(o, "name", tool_json_text(t->name, t->name_len));
	json_object_set_new(o, b ? "dtype_b" : "dtype_a", json_string(tensor_dtype_name(t->dtype)));
	json_object_set_new(o, b ? "shape_b" : "shape_a", tool_json_shape(&t->shape));
	set_integer(o, b ? "bytes_b" : "bytes_a", t->bytes);
}

static void set_blob(json_t *o, const struct load_blob_info *blob, bool b)
{
	json_object_set_new(o, "name", tool_json_text(blob->name, strlen(blob->name)));
	if (blob->per_rank)
		set_integer(o, "rank", blob->rank);
	set_integer(o, b ? "bytes_b" : "bytes_a", blob->bytes);
}

static void set_values(json_t *o, const struct diff_values *v)
{
	set_integer(o, "changed", v->changed);
	set_real(o, "max", v->max);
	set_real(o, "rms", v->rms);
	set_real(o, "relative", v->relative);
	set_integer(o, "nan_a", v->nan_a);
	set_integer(o, "nan_b", v->nan_b);
	set_integer(o, "inf_a", v->inf_a);
	set_integer(o, "inf_b", v->inf_b);
}

static json_t *row_json(const struct differ *d, const struct diff_row *row)
{
	json_t *o = json_pack("{s:s, s:b}", "change", diff_change_words[row->change], "blob", row->blob);
	struct load_tensor_info t;
	struct load_blob_info blob;

	for (int b = 0; b < 2; b++) {
		uint32_t number = b ? row->b : row->a;

		if (number == DIFF_NONE)
			continue;
		if (row->blob) {
			diff_side_blob(&d->sides[b], number, &blob);
			set_blob(o, &blob, b);
		} else {
			diff_side_tensor(&d->sides[b], number, &t);
			set_tensor(o, &t, b);
		}
	}
	if (row->has_values)
		set_values(o, &row->values);
	return o;
}

/* ---- counts ---- */

static uint64_t count_all(const struct diff_count *c)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < BASE_COUNT(c->n); i++)
		n += c->n[i];
	return n;
}

static json_t *count_json(const struct diff_count *c)
{
	json_t *o = json_pack("{s:I, s:I}", "all", (json_int_t)count_all(c), "equal",
		(json_int_t)c->n[DIFF_CHANGED + 1]);

	for (unsigned i = 0; i <= DIFF_CHANGED; i++)
		json_object_set_new(o, diff_change_words[i], json_integer((json_int_t)c->n[i]));
	return o;
}

/* ret_sum: of all tensors, if files is false, else of the blobs. */
static struct diff_count count_sum(const struct diff *d, bool files)
{
	struct diff_count sum = {0};

	for (size_t c = 0; c < d->ncounts; c++)
		for (unsigned i = 0; !d->counts[c].component == files && i < BASE_COUNT(sum.n); i++)
			sum.n[i] += d->counts[c].n[i];
	return sum;
}

static int print_json(const struct differ *d)
{
	const struct diff *found = d->found;
	struct diff_count files = count_sum(found, true);
	json_t *rows = json_array(), *counts = json_array(), *all;

	for (size_t i = 0; !d->stat && i < found->n; i++)
		json_array_append_new(rows, row_json(d, &found->rows[i]));
	for (size_t i = 0; i < found->ncounts; i++)
		if (found->counts[i].component) {
			json_t *o = count_json(&found->counts[i]);

			json_object_set_new(o, "component", json_string(found->counts[i].component));
			json_array_append_new(counts, o);
		}
	all = json_pack("{s:o, s:o, s:b, s:o, s:o}", "a", tool_json_text(d->names[0], strlen(d->names[0])),
		"b", tool_json_text(d->names[1], strlen(d->names[1])), "equal", found->n == 0,
		"components", counts, "blobs", count_json(&files));
	if (d->stat)
		json_decref(rows);
	else
		json_object_set_new(all, "differences", rows);
	return tool_print_json(all);
}

static int print_table(struct tool_table *table)
{
	int r = tool_table_print(table, stdout, false, tool_terminal_width(STDOUT_FILENO));

	tool_table_free(table);
	return r < 0 ? TOOL_FAILED : 0;
}

static int print_stat(const struct differ *d)
{
	static const struct tool_column columns[] = {{"COMPONENT", "component"}, {"ALL", "all", .right = true},
		{"EQUAL", "equal", .right = true}, {"CHANGED", "changed", .right = true},
		{"ADDED", "added", .right = true}, {"REMOVED", "removed", .right = true},
		{"RETYPED", "retyped", .right = true}, {"RESHAPED", "reshaped", .right = true}};
	struct tool_table *table = tool_table_new(columns, BASE_COUNT(columns), false, true);
	struct diff_count sum = {.component = "total"};

	for (size_t i = 0; i <= d->found->ncounts; i++) {
		const struct diff_count *c = i < d->found->ncounts ? &d->found->counts[i] : &sum;
		json_t *o = count_json(c);

		json_object_set_new(o, "component", json_string(c->component ? c->component : "(files)"));
		tool_table_add(table, o);
		for (unsigned k = 0; k < BASE_COUNT(sum.n); k++)
			sum.n[k] += c->n[k];
	}
	return print_table(table);
}

static void print_total(const struct differ *d)
{
	const char *comma = "";

	for (int files = 0; files < 2; files++) {
		struct diff_count sum = count_sum(d->found, files);

		if (!count_all(&sum))
			continue;
		printf("%s%s: ", comma, files ? TOOL_COUNT(count_all(&sum), "file", "files")
			: TOOL_COUNT(count_all(&sum), "tensor", "tensors"));
		printf("%" PRIu64 " equal", sum.n[DIFF_CHANGED + 1]);
		for (unsigned i = 0; i <= DIFF_CHANGED; i++)
			if (sum.n[i])
				printf(", %" PRIu64 " %s", sum.n[i], diff_change_words[i]);
		comma = "; ";
	}
	putchar('\n');
}

static int print_rows(const struct differ *d)
{
	static const struct tool_column plain[] = {{"CHANGE", "change"}, {"COMPONENT", "component"},
		{"NAME", "name", .shorten = true}, {"RANK", "rank", .right = true}, {"DTYPE", "dtype_a"},
		{"SHAPE", "shape_a", .shorten = true}, {"B DTYPE", "dtype_b"}, {"B SHAPE", "shape_b", .shorten = true}};
	static const struct tool_column values[] = {{"CHANGE", "change"}, {"COMPONENT", "component"},
		{"NAME", "name", .shorten = true}, {"VALUES", "changed", .right = true}, {"MAX", "max", .right = true},
		{"RMS", "rms", .right = true}, {"RELATIVE", "relative", .right = true}, {"NAN", "nan_a", .right = true},
		{"B NAN", "nan_b", .right = true}, {"INF", "inf_a", .right = true}, {"B INF", "inf_b", .right = true}};
	struct tool_table *table;

	if (d->found->n == 0) {
		tool_print(stdout, "%s and %s are equal\n", d->names[0], d->names[1]);
		return 0;
	}
	table = d->options.values ? tool_table_new(values, BASE_COUNT(values), false, true)
		: tool_table_new(plain, BASE_COUNT(plain), false, true);
	for (size_t i = 0; i < d->found->n; i++)
		tool_table_add(table, row_json(d, &d->found->rows[i]));
	return print_table(table);
}

static int differ_print(const struct differ *d)
{
	int code = d->t->json ? print_json(d) : d->t->quiet ? 0 : d->stat ? print_stat(d) : print_rows(d);

	if (code == 0 && !d->t->json && !d->t->quiet && !d->stat)
		print_total(d);
	if (code == 0 && fflush(stdout) == EOF)
		code = tool_failed(d->t, "standard output: %s", strerror(errno));
	return code ? code : d->found->n ? DIFFERENT : 0;
}

/* ---- the command ---- */

static int differ_work(struct differ *d)
{
	struct base_error err = {0};
	int code = open_sides(d), r;

	if (code)
		return code;
	tool_progress_start(&d->progress, d->t->quiet, "diff");
	d->options.progress = tool_progress_update;
	d->options.arg = &d->progress;
	r = diff_run(&d->sides[0], &d->sides[1], &d->options, &d->found, &err);
	tool_progress_end(&d->progress);
	return r < 0 ? tool_fail(d->t, &err) : differ_print(d);
}

static void differ_release(struct differ *d)
{
	diff_free(d->found);
	load_step_unref(d->other.step);
	commit_list_close(d->other.list);
	if (d->store)
		store_close(d->other.store);
	diff_path_close(d->path);
	free(d->names[0]);
	free(d->names[1]);
}

static int diff_command(struct tool *t, int argc, char **argv)
{
	struct differ d = {.t = t};
	const struct tool_option options[] = {{"component", .text = &d.options.component}, {"stat", .flag = &d.stat},
		{"values", .flag = &d.options.values}, {"other", .text = &d.store}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code == 0 && d.stat && d.options.values)
		code = tool_usage(t, "--stat only counts tensors, --values reads them: give one of the two");
	if (code == 0)
		code = differ_work(&d);
	differ_release(&d);
	return code == DIFFERENT ? EXIT_DIFFERENT : code == TOOL_FAILED ? EXIT_TROUBLE : code;
}

const struct tool_command tool_diff = {"diff", "say what is different between two steps",
	"usage: vckpt diff STORE RUN[/STEP] RUN[/STEP]|PATH [OPTION...]\n\n"
	"Says which tensors and files are added, removed, changed, or have another dtype or shape from the first\n"
	"step, A, to the second, B; of a run its latest step. B may be a file or a directory of safetensors, as\n"
	"vckpt import would take it: PATH begins with / or ., or is no run of the store. Digests decide; data is\n"
	"read only where A and B cut a tensor differently, or B is a PATH. Attributes are not compared.\n"
	"Exit codes are those of diff(1): 0 equal, 1 different, 2 or more trouble.\n\n"
	"  --component NAME   only this component; tensors of a PATH that names none belong to it\n"
	"  --stat             count the differences: a line for each component, and the sum\n"
	"  --values           how much values changed, most first: it reads the pieces that differ\n"
	"  --other STORE      B is in this store\n"
	"  --json -q -v       print JSON; print nothing, the exit code says it; say more\n",
	diff_command};
