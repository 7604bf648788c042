/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt ls: runs; the steps of a run; the components and blobs of a step; the tensors of a component. Listing runs and
 * steps reads lists only. */
#include <inttypes.h>
#include <string.h>

#include "core/view/tree.h"
#include "tools/vckpt/tool.h"

static json_t *step_json(const char *run, const struct store_list_step *s)
{
	char time[40], digest[BASE_DIGEST_HEX];

	tool_format_time(s->commit.time_ns, time);
	base_digest_hex(&s->commit.manifest, digest);
	return json_pack("{s:s, s:I, s:I, s:s, s:s, s:s, s:I, s:I, s:I, s:o}", "run", run, "step", (json_int_t)s->step,
		"entry", (json_int_t)s->entry, "attempt", s->commit.attempt, "time", time, "manifest", digest,
		"tensors", (json_int_t)s->commit.tensors, "bytes", (json_int_t)s->commit.bytes, "new_bytes",
		(json_int_t)s->commit.new_bytes, "attributes",
		tool_json_attributes(s->commit.attributes, s->commit.nattributes));
}

static void print_step(const struct store_list_step *s)
{
	char time[40], bytes[32], added[32];

	tool_format_time(s->commit.time_ns, time);
	tool_format_bytes(s->commit.bytes, bytes);
	tool_format_bytes(s->commit.new_bytes, added);
	printf("step-%08" PRIu64 "  %s  %7" PRIu64 " tensors  %9s  new %9s", s->step, time, s->commit.tensors, bytes,
		added);
	for (size_t i = 0; i < s->commit.nattributes; i++) {
		printf("  %s=", s->commit.attributes[i].key);
		tool_print_text(stdout, s->commit.attributes[i].value, strlen(s->commit.attributes[i].value));
	}
	putchar('\n');
}

static int list_runs(struct tool *t, struct store *s)
{
	struct base_error err = {0};
	char **runs;
	size_t n;
	json_t *all = json_array();

	if (store_runs(s, &runs, &n, &err) < 0) {
		json_decref(all);
		return tool_fail(t, &err);
	}
	int code = 0;
	for (size_t i = 0; i < n; i++) { /* a run that cannot be read hides no other */
		struct store_list *l;

		if (store_list_open(s, runs[i], false, &l, &err) < 0) {
			code = tool_fail(t, &err);
			continue;
		}
		const struct store_list_step *latest = store_list_latest(l);
		if (latest && t->json)
			json_array_append_new(all,
				json_pack("{s:s, s:I, s:I}", "run", runs[i], "steps", (json_int_t)store_list_count(l),
					"latest", (json_int_t)latest->step));
		else if (latest)
			printf("%-32s %6zu steps, latest step-%08" PRIu64 "\n", runs[i], store_list_count(l),
				latest->step);
		store_list_close(l);
	}
	store_runs_free(runs, n);
	if (t->json) {
		int printed = tool_print_json(json_pack("{s:o}", "runs", all));

		return printed ? printed : code;
	}
	json_decref(all);
	return code;
}

static int list_steps(struct tool *t, struct store *s, const char *run)
{
	struct base_error err = {0};
	struct store_list *l = NULL;
	json_t *all = json_array();
	int code = 0;

	if (store_list_open(s, run, false, &l, &err) < 0)
		code = tool_fail(t, &err);
	else if (store_list_next(l) == 0) {
		base_error_set(&err, -ENOENT, "%s has no run %s", s->path, run);
		code = tool_fail(t, &err);
	}
	for (size_t i = 0; code == 0 && i < store_list_count(l); i++) {
		if (t->json)
			json_array_append_new(all, step_json(run, store_list_at(l, i)));
		else
			print_step(store_list_at(l, i));
	}
	if (l)
		store_list_close(l);
	if (code == 0 && t->json)
		return tool_print_json(json_pack("{s:s, s:o}", "run", run, "steps", all));
	json_decref(all);
	return code;
}

static json_t *shape_json(const struct tensor_shape *shape)
{
	json_t *a = json_array();

	for (uint32_t i = 0; i < shape->ndim; i++)
		json_array_append_new(a, json_integer((json_int_t)shape->dim[i]));
	return a;
}

static void print_tensor(const struct load_tensor_info *info)
{
	char bytes[32];

	tool_format_bytes(info->bytes, bytes);
	printf("%-12s %9s  [", tensor_dtype_name(info->dtype), bytes);
	for (uint32_t i = 0; i < info->shape.ndim; i++)
		printf("%s%" PRIu64, i ? ", " : "", info->shape.dim[i]);
	fputs("]  ", stdout);
	tool_print_text(stdout, info->name, info->name_len);
	putchar('\n');
}

static int list_tensors(struct tool *t, struct load_step *step, const char *component)
{
	uint32_t first = 0, end = 0, c;
	json_t *all = json_array();

	for (c = 0; c < load_step_component_count(step); c++)
		if (!strcmp(load_step_component(step, c, &first, &end), component))
			break;
	if (c == load_step_component_count(step)) {
		struct base_error err = {0};

		json_decref(all);
		base_error_set(&err, -ENOENT, "step %" PRIu64 " has no component %s", load_step_info(step)->step,
			component);
		return tool_fail(t, &err);
	}
	for (uint32_t i = first; i < end; i++) {
		struct load_tensor_info info;

		load_step_tensor_info(step, i, &info);
		if (!t->json) {
			print_tensor(&info);
			continue;
		}
		json_array_append_new(all,
			json_pack("{s:o, s:s, s:o, s:I}", "name", tool_json_text(info.name, info.name_len), "dtype",
				tensor_dtype_name(info.dtype), "shape", shape_json(&info.shape), "bytes",
				(json_int_t)info.bytes));
	}
	if (t->json)
		return tool_print_json(json_pack("{s:s, s:o}", "component", component, "tensors", all));
	json_decref(all);
	return TOOL_DONE;
}

static uint64_t component_bytes(const struct load_step *step, uint32_t first, uint32_t end)
{
	uint64_t bytes = 0;

	for (uint32_t i = first; i < end; i++) {
		struct load_tensor_info info;

		load_step_tensor_info(step, i, &info);
		bytes += info.bytes;
	}
	return bytes;
}

static void print_blob(const struct load_blob_info *info, const char *bytes)
{
	printf("%-10s %9s  ", "blob", bytes);
	if (info->per_rank)
		printf("ranks/%05u/", info->rank);
	tool_print_text(stdout, info->name, strlen(info->name));
	putchar('\n');
}

static int list_step(struct tool *t, struct load_step *step, const struct store_list_step *entry)
{
	json_t *components = json_array(), *blobs = json_array();
	char text[32];

	for (uint32_t c = 0; c < load_step_component_count(step); c++) {
		uint32_t first, end;
		const char *name = load_step_component(step, c, &first, &end);
		uint64_t bytes = component_bytes(step, first, end);

		tool_format_bytes(bytes, text);
		if (t->json)
			json_array_append_new(components,
				json_pack("{s:s, s:I, s:I}", "component", name, "tensors", (json_int_t)(end - first),
					"bytes", (json_int_t)bytes));
		else
			printf("%-10s %9s  %s/  %u tensors\n", "component", text, name, end - first);
	}
	for (uint32_t i = 0; i < load_step_blob_count(step); i++) {
		struct load_blob_info info;

		load_step_blob_info(step, i, &info);
		tool_format_bytes(info.bytes, text);
		json_t *rank = info.per_rank ? json_integer(info.rank) : json_null();
		if (t->json)
			json_array_append_new(blobs,
				json_pack("{s:s, s:O, s:I}", "name", info.name, "rank", rank, "bytes",
					(json_int_t)info.bytes));
		else
			print_blob(&info, text);
		json_decref(rank);
	}
	json_t *all = step_json(load_step_info(step)->run, entry);
	json_object_set_new(all, "components", components);
	json_object_set_new(all, "blobs", blobs);
	if (t->json)
		return tool_print_json(all);
	json_decref(all);
	return TOOL_DONE;
}

static int list_target(struct tool *t, struct store *s, const struct tool_target *target)
{
	const struct store_list_step *entry;
	struct store_list *l;
	struct load_step *step;
	struct base_error err = {0};
	int code = tool_target_find(t, s, target, &l, &entry);

	if (code)
		return code;
	if (load_step_open(s, target->run, entry, &step, &err) < 0)
		code = tool_fail(t, &err);
	else {
		code = target->rest ? list_tensors(t, step, target->rest) : list_step(t, step, entry);
		load_step_unref(step);
	}
	store_list_close(l);
	return code;
}

static int option(struct tool *t, void *arg, int val, const char *value)
{
	(void)t;
	(void)value;
	if (val == 'i')
		*(bool *)arg = true;
	return 0;
}

static int ls_run(struct tool *t, int argc, char **argv)
{
	static const struct option options[] = {{"incoming", no_argument, NULL, 'i'}, {0}};
	bool incoming = false;
	struct tool_target target;
	struct store *s = NULL;
	int code = tool_parse(t, argc, argv, NULL, options, option, &incoming);

	if (code)
		return code - TOOL_LEAVE;
	if (t->narguments == 2 && (code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (incoming && t->narguments == 2 && target.has_step)
		return tool_usage(t, "--incoming takes a RUN without a step");
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY, &s)))
		return code;
	if (incoming)
		code = tool_list_incoming(t, s, t->narguments == 2 ? target.run : NULL);
	else if (t->narguments < 2)
		code = list_runs(t, s);
	else if (!target.has_step)
		code = list_steps(t, s, target.run);
	else
		code = list_target(t, s, &target);
	store_close(s);
	return code;
}

const struct tool_command tool_ls = {"ls", "list runs, steps, components, tensors",
	"usage: vckpt ls STORE [RUN[/STEP[/COMPONENT]]] [--json] [-q] [-v]\n"
	"       vckpt ls STORE --incoming [RUN] [--json]\n\n"
	"Lists the runs of a store, the steps of a run with their attributes, the components and files of a\n"
	"step, or the tensors of a component. STEP is a number or latest.\n\n"
	"  --incoming          saves under way instead, and what is left of others: how many ranks have written their\n"
	"                      part, which are missing, for how long, and whether somebody is still at it\n",
	ls_run};
