/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt du: where the bytes of a store are, by run, step and component, what a removal would free, the largest tensors,
 * and packs of which less is used than they have. What a step alone needs is known only when the manifests of all
 * steps of the store were read; parts are read for the tensors of --tensors only. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/table.h"
#include "core/upkeep/usage.h"
#include "tools/vckpt/list/sums.h"
#include "tools/vckpt/print/table.h"
#include "tools/vckpt/tool.h"

struct du {
	struct tool_progress progress; /* first: gets the library's calls, too */
	struct tool *t;
	const char *sort;
	bool bytes, bare, packs;
	uint64_t tensors;
	struct tool_target target;
	struct freed { struct tool_target target; struct tool_range range; } *freed;
	size_t nfreed;
	struct upkeep_usage u;
	json_t *all;            /* the document */
};

static json_int_t number(uint64_t n) { return (json_int_t)base_min(n, INT64_MAX); }

/* ---- rows in order ---- */

/* By a member: names and steps ascend, other numbers descend; what lacks the member comes last. */
static int compare(const void *a, const void *b, void *key)
{
	json_t *x = json_object_get(*(json_t *const *)a, key), *y = json_object_get(*(json_t *const *)b, key);
	json_int_t p = json_integer_value(x), q = json_integer_value(y);

	if (!x || !y)
		return !x - !y;
	if (json_is_string(x))
		return strcmp(json_string_value(x), json_string_value(y));
	return strcmp(key, "step") == 0 ? (p > q) - (p < q) : (p < q) - (p > q);
}

/* What the first table is sorted by: --sort names one of its columns. NULL: none. */
static const char *key_of(struct du *du, const struct tool_column *columns, unsigned n, const char *key)
{
	const char *head = base_steal(du->sort);
	char words[160] = "";

	for (unsigned i = 0; head && i < n; i++) {
		if (strcasecmp(columns[i].head, head) == 0)
			return columns[i].key;
		snprintf(words + strlen(words), sizeof words - strlen(words), "%s%s", i ? ", " : "", columns[i].head);
	}
	if (!head)
		return key;
	tool_usage(du->t, "--sort %s: give one of the columns here: %s", head, words);
	return NULL;
}

/* Sorts the rows, which it takes, prints them, and puts them into the document. An exit code. */
static int show(struct du *du, const char *member, json_t *rows, const struct tool_column *columns, unsigned n,
	const char *key)
{
	size_t count = json_array_size(rows);
	base_cleanup_free json_t **all = calloc(count + 1, sizeof *all);
	struct tool_table *table = du->t->json ? NULL : tool_table_new(columns, n, true, du->bytes);
	json_t *shown = json_array();
	int code = (key = key_of(du, columns, n, key)) ? all ? 0 : TOOL_FAILED : TOOL_USAGE;

	for (size_t i = 0; code == 0 && i < count; i++)
		all[i] = json_array_get(rows, i);
	if (code == 0 && count)
		qsort_r(all, count, sizeof *all, compare, (char *)key);
	for (size_t i = 0; code == 0 && i < count; i++) {
		json_array_append(shown, all[i]);
		tool_table_add(table, json_incref(all[i]));
	}
	if (code == 0 && table &&
		tool_table_print(table, stdout, du->bare, tool_terminal_width(STDOUT_FILENO)) < 0)
		code = tool_fail(du->t, &(struct base_error){.code = -ENOMEM});
	json_object_set_new(du->all, member, shown);
	tool_table_free(table);
	json_decref(rows);
	return code;
}

static void add_bytes(json_t *o, const struct upkeep_bytes *b)
{
	json_object_set_new(o, "logical_bytes", json_integer(number(b->logical)));
	json_object_set_new(o, "stored_bytes", json_integer(number(b->stored)));
	json_object_set_new(o, "shared_bytes", json_integer(number(b->stored - base_min(b->unique, b->stored))));
	json_object_set_new(o, "unique_bytes", json_integer(number(b->unique)));
}

#define BYTES(head, key) {head, key, TOOL_AS_BYTES, .right = true}
#define COLUMNS_OF_BYTES BYTES("STORED", "stored_bytes"), BYTES("SHARED", "shared_bytes"), \
	BYTES("UNIQUE", "unique_bytes")

/* ---- runs, steps, components ---- */

static int show_runs(struct du *du)
{
	static const struct tool_column columns[] = {{"RUN", "run", .shorten = true, .style = TOOL_RUN},
		{"STEPS", "steps", .right = true}, BYTES("SIZE", "logical_bytes"), COLUMNS_OF_BYTES};
	json_t *rows = json_array();

	for (uint32_t i = 0; i < du->u.nruns; i++) {
		const struct upkeep_usage_run *run = &du->u.runs[i];
		json_t *o;

		if (!run->n)
			continue;
		o = json_pack("{s:s, s:I}", "run", run->name, "steps", (json_int_t)run->n);
		add_bytes(o, &run->bytes);
		json_array_append_new(rows, o);
	}
	return show(du, "runs", rows, columns, BASE_COUNT(columns), "stored_bytes");
}

static const struct upkeep_usage_run *run_find(const struct du *du, const char *name)
{
	for (uint32_t i = 0; i < du->u.nruns; i++)
		if (strcmp(du->u.runs[i].name, name) == 0 && du->u.runs[i].next)
			return &du->u.runs[i];
	return NULL;
}

static int show_steps(struct du *du, const struct upkeep_usage_run *run)
{
	static const struct tool_column columns[] = {{"STEP", "step", TOOL_AS_STEP}, BYTES("SIZE", "logical_bytes"),
		BYTES("USED", "used_bytes"), COLUMNS_OF_BYTES};
	json_t *rows = json_array();

	for (uint32_t i = run->first; i < run->first + run->n; i++) {
		const struct upkeep_usage_step *step = &du->u.steps[i];
		json_t *o = json_pack("{s:I, s:I}", "step", number(step->step), "used_bytes",
			number(step->live_bytes));

		add_bytes(o, &step->bytes);
		json_array_append_new(rows, o);
	}
	return show(du, "steps", rows, columns, BASE_COUNT(columns), "step");
}

struct part { char name[72]; int64_t tensors; struct upkeep_bytes bytes; uint64_t used; };

struct parts { struct part *all; size_t n; struct base_table by_name; }; /* with room for all there may be */

static void parts_release(struct parts *parts)
{
	free(parts->all);
	base_table_release(&parts->by_name);
}

static struct part *part_of(struct parts *parts, const char *name, int64_t tensors)
{
	const uint32_t hash = base_table_hash(name, strlen(name));
	struct part *part = &parts->all[parts->n];
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&parts->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(parts->all[i].name, name) == 0)
			return &parts->all[i];
	*part = (struct part){.tensors = tensors};
	snprintf(part->name, sizeof part->name, "%s", name);
	base_table_add(&parts->by_name, hash, (uint32_t)parts->n++);
	return part;
}

static uint64_t parts_tensors(struct load_step *step, struct parts *parts)
{
	uint64_t all = 0;

	for (uint32_t c = 0; c < load_step_component_count(step); c++) {
		uint32_t first, end;
		const char *name = load_step_component(step, c, &first, &end);
		struct part *p = part_of(parts, name, end - first);

		for (uint32_t i = first; i < end; i++) {
			struct load_tensor_info info;

			load_step_tensor_info(step, i, &info);
			p->bytes.logical = upkeep_bytes_add(p->bytes.logical, info.bytes);
		}
		all = upkeep_bytes_add(all, p->bytes.logical);
	}
	return all;
}

/* By the packs that the step names: a pack is of one component, of files, or of records ("meta"). */
static void parts_packs(struct du *du, struct parts *parts)
{
	const struct proto_manifest *m = load_step_manifest(du->t->step);

	for (uint32_t i = 0; i < m->npacks; i++) {
		const struct upkeep_usage_file *f = upkeep_usage_pack(&du->u, m->packs[i].pack);
		struct pack_name name;
		struct part *p;
		uint64_t bytes;

		if (!f || pack_name_parse(f->name, &name) < 0)
			continue;
		p = part_of(parts, name.class, -1);
		bytes = upkeep_bytes_add(f->size, f->note_bytes);
		p->bytes.stored = upkeep_bytes_add(p->bytes.stored, bytes);
		p->bytes.unique = upkeep_bytes_add(p->bytes.unique, f->steps == 1 && !f->base ? bytes : 0);
		p->used = upkeep_bytes_add(p->used, base_min(m->packs[i].live_bytes, f->size));
	}
}

static json_t *part_row(const struct part *p)
{
	json_t *o = json_pack("{s:s, s:I}", "component", p->name, "used_bytes", number(p->used));

	if (p->tensors >= 0)
		json_object_set_new(o, "tensors", json_integer(p->tensors));
	add_bytes(o, &p->bytes);
	return o;
}

static int show_components(struct du *du, const struct upkeep_usage_step *step)
{
	static const struct tool_column columns[] = {{"COMPONENT", "component", .shorten = true},
		{"TENSORS", "tensors", .right = true}, BYTES("SIZE", "logical_bytes"), BYTES("USED", "used_bytes"),
		COLUMNS_OF_BYTES};
	size_t most = load_step_component_count(du->t->step) + load_step_manifest(du->t->step)->npacks;
	base_cleanup(parts_release) struct parts parts = {.all = calloc(most + 1, sizeof *parts.all)};
	uint64_t tensors, packs = 0, unique = 0;
	struct part *records;
	json_t *rows = json_array();

	if (!parts.all || base_table_reserve(&parts.by_name, most + 1) < 0)
		return tool_fail(du->t, &(struct base_error){.code = -ENOMEM});
	tensors = parts_tensors(du->t->step, &parts);
	parts_packs(du, &parts);
	for (size_t i = 0; i < parts.n; i++) {
		packs = upkeep_bytes_add(packs, parts.all[i].bytes.stored);
		unique = upkeep_bytes_add(unique, parts.all[i].bytes.unique);
	}
	records = part_of(&parts, "meta", -1); /* with the manifest, and measures */
	records->bytes.stored += step->bytes.stored - base_min(packs, step->bytes.stored);
	records->bytes.unique += step->bytes.unique - base_min(unique, step->bytes.unique);
	for (size_t i = 0; i < parts.n; i++)
		if (parts.all[i].tensors < 0 && (strcmp(parts.all[i].name, "blobs") == 0 || &parts.all[i] == records)) {
			parts.all[i].bytes.logical = step->bytes.logical - base_min(tensors, step->bytes.logical);
			tensors = step->bytes.logical;
		}
	for (size_t i = 0; i < parts.n; i++)
		json_array_append_new(rows, part_row(&parts.all[i]));
	json_object_set_new(du->all, "used_bytes", json_integer(number(step->live_bytes)));
	return show(du, "components", rows, columns, BASE_COUNT(columns), "stored_bytes");
}

/* ---- what else is asked for ---- */

static bool freed_goes(void *arg, const char *run, const struct commit_list_step *step)
{
	const struct du *du = arg;

	for (size_t i = 0; i < du->nfreed; i++) {
		const struct freed *f = &du->freed[i];

		if (strcmp(f->target.run, run) == 0 && tool_range_has(&f->range, step->step) &&
			(!f->target.has_step || f->target.step == step->step))
			return true;
	}
	return false;
}

/* A range has one step at least. */
static int range_find(struct du *du, const struct tool_range *range)
{
	struct base_error err = {0};

	if (commit_list_know_all(du->t->list, &err) < 0)
		return tool_fail(du->t, &err);
	for (size_t i = 0; i < commit_list_count(du->t->list); i++)
		if (tool_range_has(range, commit_list_at(du->t->list, i)->step))
			return 0;
	return tool_no_range(du->t, du->t->list, range);
}

/* --freed RUN/latest has its number from here on; what it names must be there. */
static int freed_find(struct du *du)
{
	const struct commit_list_step *step;
	int code = 0;

	for (size_t i = 0; code == 0 && i < du->nfreed; i++) {
		struct freed *f = &du->freed[i];

		code = tool_target_find(du->t, &f->target, &step);
		if (code == 0 && f->target.has_step)
			f->target.step = step->step;
		if (code == 0 && f->range.given)
			code = range_find(du, &f->range);
	}
	commit_list_close(base_steal(du->t->list));
	return code;
}

static void show_freed(struct du *du)
{
	uint64_t steps = 0;

	for (uint32_t i = 0; i < du->u.nsteps; i++)
		steps += du->u.steps[i].goes;
	json_object_set_new(du->all, "freed", json_pack("{s:I, s:I, s:I}", "steps", number(steps), "packs",
		number(du->u.freed_packs), "bytes", number(du->u.freed_bytes)));
	if (!du->t->json)
		printf("removing %s together gives %s back (vckpt rm, then vckpt gc)\n",
			TOOL_COUNT(steps, "step", "steps"), TOOL_BYTES(du->u.freed_bytes));
}

static bool step_has(const struct du *du, const char *pack)
{
	const struct proto_manifest *m = load_step_manifest(du->t->step);

	return base_search(i, 0, m->npacks, strcmp(m->packs[i].pack, pack)) >= 0; /* sorted by name */
}

/* Packs that visible steps name: of the run, or of the step, that is asked about. */
static int show_packs(struct du *du, const struct upkeep_usage_run *run)
{
	static const struct tool_column columns[] = {{"PACK", "pack", .shorten = true}, BYTES("SIZE", "bytes"),
		BYTES("LIVE", "live_bytes"), BYTES("DEAD", "dead_bytes"), {"STEPS", "steps", .right = true}};
	uint32_t of = run ? (uint32_t)(run - du->u.runs) : UINT32_MAX;
	json_t *rows = json_array();

	for (uint32_t i = 0; i < du->u.nfiles; i++) {
		const struct upkeep_usage_file *f = &du->u.files[i];

		if (!f->pack || !f->steps || (run && f->run != of) ||
			(du->target.has_step && !step_has(du, f->name)))
			continue;
		json_array_append_new(rows, json_pack("{s:s, s:I, s:I, s:I, s:I}", "pack", f->name, "bytes",
			number(f->size), "live_bytes", number(f->live_bytes), "dead_bytes",
			number(f->size - f->live_bytes), "steps", (json_int_t)f->steps));
	}
	return show(du, "packs", rows, columns, BASE_COUNT(columns), "dead_bytes");
}

struct sized { uint64_t bytes; uint32_t number; };

static int compare_sized(const void *a, const void *b)
{
	const struct sized *x = a, *y = b;

	return x->bytes != y->bytes ? (x->bytes < y->bytes) - (x->bytes > y->bytes)
		: (x->number > y->number) - (x->number < y->number);
}

/* The rows of pieces are read of those that are shown only. */
static int show_tensors(struct du *du)
{
	static const struct tool_column columns[] = {{"COMPONENT", "component"}, {"NAME", "name", .shorten = true},
		{"DTYPE", "dtype"}, {"SHAPE", "shape"}, BYTES("SIZE", "bytes"), BYTES("STORED", "stored_bytes")};
	uint32_t n = load_step_tensor_count(du->t->step);
	base_cleanup_free struct sized *all = calloc((size_t)n + 1, sizeof *all);
	json_t *rows = json_array();
	struct base_error err = {0};
	struct load_tensor_info info;

	for (uint32_t i = 0; all && i < n; i++) {
		load_step_tensor_info(du->t->step, i, &info);
		all[i] = (struct sized){info.bytes, i};
	}
	if (all)
		qsort(all, n, sizeof *all, compare_sized);
	for (uint32_t i = 0; all && i < base_min(n, du->tensors); i++) {
		struct tool_sums sums = {0};

		if (tool_sums_tensor(&sums, du->t->step, NULL, all[i].number, &err) < 0) {
			json_decref(rows);
			return tool_fail(du->t, &err);
		}
		load_step_tensor_info(du->t->step, all[i].number, &info);
		json_array_append_new(rows, json_pack("{s:s, s:o, s:s, s:o, s:I, s:I}", "component", info.component,
			"name", tool_json_text(info.name, info.name_len), "dtype", tensor_dtype_name(info.dtype),
			"shape", tool_json_shape(&info.shape), "bytes", number(info.bytes), "stored_bytes",
			number(sums.stored)));
	}
	return show(du, "tensors", rows, columns, BASE_COUNT(columns), "bytes");
}

/* ---- the command ---- */

static void say_total(const struct du *du)
{
	if (du->t->json || du->t->quiet || du->bare)
		return;
	printf("total: %s, %s logical; on disk %s", TOOL_COUNT(du->u.nsteps, "step", "steps"),
		TOOL_BYTES(du->u.logical_bytes), TOOL_BYTES(upkeep_bytes_add(du->u.stored_bytes, du->u.spare_bytes)));
	if (du->u.spare_bytes)
		printf(", of which no step needs %s (vckpt gc -n)", TOOL_BYTES(du->u.spare_bytes));
	putchar('\n');
}

/* The step that is asked about, among those that were read; it may have gone since it was opened. */
static const struct upkeep_usage_step *step_found(const struct du *du, const struct upkeep_usage_run *run)
{
	for (uint32_t i = run->first; i < run->first + run->n; i++)
		if (du->u.steps[i].entry == load_step_info(du->t->step)->entry)
			return &du->u.steps[i];
	return NULL;
}

static int show_target(struct du *du)
{
	const struct upkeep_usage_run *run = run_find(du, du->target.run);
	const struct upkeep_usage_step *step = run && du->target.has_step ? step_found(du, run) : NULL;
	struct upkeep_bytes bytes;
	int code;

	if (!run)
		return tool_no_run(du->t, du->target.run);
	if (du->target.has_step && !step)
		return tool_failed(du->t, "%s/%" PRIu64 " was removed or replaced meanwhile", du->target.run,
			load_step_info(du->t->step)->step);
	bytes = step ? step->bytes : run->bytes;
	json_object_set_new(du->all, "run", json_string(run->name));
	if (step)
		json_object_set_new(du->all, "step", json_integer(number(step->step)));
	add_bytes(du->all, &bytes);
	code = step ? show_components(du, step) : show_steps(du, run);
	if (code == 0 && !du->t->json && !du->t->quiet && !du->bare)
		printf("total: %s logical, %s stored, of which %s %s alone\n", TOOL_BYTES(bytes.logical),
			TOOL_BYTES(bytes.stored), TOOL_BYTES(bytes.unique), step ? "is this step's" : "is this run's");
	return code == 0 && du->packs ? show_packs(du, run) : code;
}

static int show_all(struct du *du)
{
	int code;

	if (du->t->narguments == 2) {
		code = show_target(du);
	} else {
		code = show_runs(du);
		say_total(du);
		json_object_set_new(du->all, "logical_bytes", json_integer(number(du->u.logical_bytes)));
		json_object_set_new(du->all, "stored_bytes", json_integer(number(du->u.stored_bytes)));
		json_object_set_new(du->all, "spare_bytes", json_integer(number(du->u.spare_bytes)));
		if (code == 0 && du->packs)
			code = show_packs(du, NULL);
	}
	if (code == 0 && du->tensors)
		code = show_tensors(du);
	if (code == 0 && du->nfreed)
		show_freed(du);
	return code == 0 && du->t->json ? tool_print_json(base_steal(du->all)) : code;
}

static int measure(struct du *du)
{
	const struct upkeep_usage_question q = {.store = du->t->store, .goes = du->nfreed ? freed_goes : NULL,
		.arg = du, .last = du->t->narguments == 2 ? du->target.run : NULL, .progress = tool_progress_update,
		.progress_arg = &du->progress};
	struct base_error err = {0};
	int r;

	tool_progress_start(&du->progress, du->t->quiet, "du");
	du->progress.counts = true;
	r = upkeep_usage_read(&q, &du->u, &err);
	tool_progress_end(&du->progress);
	return r < 0 ? tool_fail(du->t, &err) : show_all(du);
}

static int add_freed(struct tool *t, void *arg, const char *value)
{
	struct du *du = arg;

	if (base_array_more(du->freed, du->nfreed) < 0)
		return TOOL_FAILED;
	du->nfreed++;
	return tool_steps_parse(t, value, &du->freed[du->nfreed - 1].target, &du->freed[du->nfreed - 1].range);
}

static int du_open(struct du *du)
{
	struct tool *t = du->t;
	int code;

	for (size_t i = 0; i < du->nfreed; i++)
		if (du->freed[i].target.rest)
			return tool_usage(t, "--freed: only whole steps can be removed: RUN/STEP, or RUN for all");
	if (t->narguments == 2 && (code = tool_target_parse(t, t->arguments[1], &du->target)))
		return code;
	if (du->target.rest)
		return tool_usage(t, "%s: give RUN or RUN/STEP", t->arguments[1]);
	if (du->tensors && t->narguments < 2)
		return tool_usage(t, "--tensors: give a RUN, for its latest step, or RUN/STEP");
	if (du->target.has_step || du->tensors) { /* opens the store */
		code = tool_step_open(t, &du->target, NULL);
		commit_list_close(base_steal(t->list));
	} else {
		code = tool_open_store(t, STORE_OPEN_READ_ONLY);
	}
	return code ? code : freed_find(du);
}

static int du_run(struct tool *t, int argc, char **argv)
{
	struct du du = {.t = t};
	const char *tensors = NULL;
	const struct tool_option options[] = {{"freed", .call = add_freed, .arg = &du}, {"tensors", .text = &tensors},
		{"packs", .flag = &du.packs}, {"sort", 's', .text = &du.sort}, {"bytes", .flag = &du.bytes},
		{"no-header", 'H', .flag = &du.bare}, {0}};
	int code = tool_parse(t, argc, argv, options);

	du.all = json_object();
	if (code == 0 && (code = tool_count_parse(t, "--tensors", tensors, &du.tensors)) == 0 &&
		(code = du_open(&du)) == 0)
		code = measure(&du);
	upkeep_usage_release(&du.u);
	json_decref(du.all);
	free(du.freed);
	return code;
}

const struct tool_command tool_du = {"du", "say where the bytes of a store are, and what a removal frees",
	"usage: vckpt du STORE [RUN[/STEP]] [OPTION...]\n\n"
	"Says of the runs of a store, of the steps of a run or of the components of a step: SIZE, what they hold;\n"
	"STORED, the files that they need, whole; SHARED, how much of that others need, too; UNIQUE, what no other\n"
	"needs, which is what removing just that run or step gives back; and USED, the bytes in their packs that a\n"
	"step refers to. For that the manifests of all steps of the store are read.\n\n"
	"  --freed RUN[/STEP]  also what removing these steps together gives back (may be given again);\n"
	"                      RUN/FIRST..LAST: of the steps from FIRST to LAST, as vckpt rm takes them\n"
	"  --tensors N         also the N largest tensors of the step, or of the latest step of a RUN\n"
	"  --packs             also the packs: how much of each the step that uses most of it refers to, and how much\n"
	"                      is dead if no other step refers to other bytes of it\n"
	"  -s, --sort COLUMN   order by a column of the first table; numbers descend\n"
	"  --bytes             exact numbers of bytes\n"
	"  -H, --no-header     for scripts: no header and no total, a tab between fields\n"
	"  --json -q           print JSON; leave out the total\n",
	du_run};
