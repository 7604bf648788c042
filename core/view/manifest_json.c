/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest.json: what a step holds, for people and scripts (docs/tree.md has the schema). It is a pure function of the
 * tree and the step, so the text is made when it is read, and only its length is kept before. */
#include "core/view/view_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "core/commit/list/list.h"

struct json {
	const struct view_tree *t;
	struct load_step *step;
	struct base_error *err;
	struct view_text out;
};

static void text(struct json *j, const char *s)
{
	base_buf_append_text(&j->out.b, s);
}

static void string(struct json *j, const char *s)
{
	view_json_shown(&j->out.b, s, strlen(s));
}

void view_time_text(int64_t time_ns, char out[static VIEW_TIME_BYTES])
{
	int64_t ns = time_ns % 1000000000;
	time_t seconds = time_ns / 1000000000;
	struct tm tm;
	if (ns < 0) {
		ns += 1000000000;
		seconds--;
	}
	if (!gmtime_r(&seconds, &tm))
		memset(&tm, 0, sizeof tm);
	snprintf(out, VIEW_TIME_BYTES, "%04d-%02d-%02dT%02d:%02d:%02d.%09" PRId64 "Z", tm.tm_year + 1900, tm.tm_mon + 1,
		tm.tm_mday, tm.tm_hour,
		tm.tm_min, tm.tm_sec, ns);
}

static void put_head(struct json *j)
{
	const struct load_step_info *info = load_step_info(j->step);
	char time[VIEW_TIME_BYTES], hex[BASE_DIGEST_HEX];
	view_time_text(info->time_ns, time);
	base_digest_hex(&info->manifest, hex);
	text(j, "{\n  \"run\": ");
	string(j, info->run);
	base_buf_printf(&j->out.b, ",\n  \"step\": %" PRIu64 ",\n  \"time\": \"%s\",\n  \"attempt\": ", info->step,
		time);
	string(j, info->attempt);
	base_buf_printf(&j->out.b, ",\n  \"manifest\": \"%s\",\n  \"attributes\": {", hex);
	for (size_t i = 0; i < info->nattributes; i++) {
		text(j, i ? ",\n    " : "\n    ");
		string(j, info->attributes[i].key);
		text(j, ": ");
		string(j, info->attributes[i].value);
	}
	text(j, info->nattributes ? "\n  }" : "}");
	view_text_flush(&j->out);
}

static void put_totals(struct json *j)
{
	const struct load_step_info *info = load_step_info(j->step);
	base_buf_printf(&j->out.b,
		",\n  \"totals\": {\"tensors\": %" PRIu64 ", \"blobs\": %" PRIu32 ", \"bytes\": %" PRIu64
		", \"new_bytes\": %" PRIu64 "}",
		info->tensors, load_step_blob_count(j->step), info->bytes, info->new_bytes);
	view_text_flush(&j->out);
}

static void put_left_out(struct json *j, uint32_t first, uint32_t end)
{
	bool any = false;
	text(j, ", \"left_out\": [");
	for (uint32_t i = first; i < end; i++) {
		struct load_tensor_info info;
		load_step_tensor_info(j->step, i, &info);
		if (view_safetensors_can(info.dtype, &info.shape, info.name, info.name_len))
			continue;
		text(j, any ? ", " : "");
		view_json_shown(&j->out.b, info.name, info.name_len);
		any = true;
	}
	text(j, "]");
}

/* Of a node below the step's directory, with quotes. */
static void put_path(struct json *j, uint32_t node)
{
	base_cleanup_buf struct base_buf path = BASE_BUF_INIT;
	view_tree_path(j->t, node, &path);
	view_json_shown(&j->out.b, (const char *)path.data, path.len);
	if (path.error)
		j->out.b.error = path.error;
}

static void put_component(struct json *j, uint32_t component, const char *before)
{
	const uint32_t *nodes;
	uint32_t first, end, n = view_tree_files(j->t, component, &nodes);
	uint64_t bytes = 0;
	const char *name = load_step_component(j->step, component, &first, &end);
	for (uint32_t i = first; i < end; i++) {
		struct load_tensor_info info;
		load_step_tensor_info(j->step, i, &info);
		if (base_add_overflows(bytes, info.bytes, &bytes))
			bytes = UINT64_MAX;
	}
	base_buf_printf(&j->out.b, "%s    {\"name\": \"%s\", \"tensors\": %u, \"bytes\": %" PRIu64
		", \"safetensors\": ", before, name, end - first, bytes);
	if (n == 1) {
		put_path(j, nodes[0]);
		put_left_out(j, first, end);
	} else if (n) {
		text(j, "null, \"reason\": \"its tensors are in several files\", \"files\": [");
		for (uint32_t i = 0; i < n; i++) {
			text(j, i ? ", " : "");
			put_path(j, nodes[i]);
		}
		text(j, "]");
		put_left_out(j, first, end);
	} else if (!(view_tree_show(j->t) & VIEW_SHOW_SAFETENSORS)) {
		text(j, "null, \"reason\": \"only .npy files are shown here\"");
	} else {
		text(j, bytes > INT64_MAX - VIEW_SAFETENSORS_MAX_MADE
			? "null, \"reason\": \"its tensors have more bytes than a file can\""
			: "null, \"reason\": \"its header would be longer than 90000000 bytes\"");
	}
	text(j, "}");
	view_text_flush(&j->out);
}

static void put_digest(struct json *j, const struct base_digest *d)
{
	char hex[BASE_DIGEST_HEX];

	base_digest_hex(d, hex);
	base_buf_printf(&j->out.b, ", \"digest\": \"%s\"", hex);
}

/* It depends on the tensor's pieces, which are looked up only if the text is wanted, since the length does not depend
 * on them. A tensor that cannot be read has null, padded with spaces to the same length, so that the others are shown.
 */
static void put_tensor_digest(struct json *j, uint32_t tensor)
{
	static const struct base_digest none;
	struct load_object *o = NULL;
	struct base_error why = {0};
	int r = j->out.keep && j->out.b.error == 0 ? load_tensor_open(j->step, tensor, &o, &why) : 0;

	if (r < 0 && commit_error_passes(r))
		j->out.b.error = base_error_set(j->err, r, "%s", why.text);
	else if (r < 0)
		base_buf_printf(&j->out.b, ", \"digest\": %-*s", BASE_DIGEST_HEX + 1, "null");
	else
		put_digest(j, o ? load_object_digest(o) : &none);
	load_object_unref(o);
}

/* node: of the file that holds it: its .npy, or if that is not shown a .safetensors of its component. */
static void put_tensor(struct json *j, uint32_t tensor, uint32_t node)
{
	struct load_tensor_info info;
	load_step_tensor_info(j->step, tensor, &info);
	text(j, "    {\"file\": ");
	put_path(j, node);
	text(j, ", \"component\": ");
	string(j, info.component);
	text(j, ", \"name\": ");
	view_json_shown(&j->out.b, info.name, info.name_len);
	text(j, ", \"dtype\": \"");
	text(j, tensor_dtype_name(info.dtype));
	text(j, "\", \"shape\": ");
	view_json_shape(&j->out.b, &info.shape);
	text(j, ", \"bytes\": ");
	view_json_number(&j->out.b, info.bytes);
	put_tensor_digest(j, tensor);
	text(j, "}");
}

static void put_blob(struct json *j, uint32_t number, const struct view_node *node)
{
	struct load_blob_info info;
	load_step_blob_info(j->step, node->item, &info);
	text(j, "    {\"file\": ");
	put_path(j, number);
	text(j, ", \"name\": ");
	string(j, info.name);
	if (info.per_rank)
		base_buf_printf(&j->out.b, ", \"rank\": %u", info.rank);
	text(j, ", \"bytes\": ");
	view_json_number(&j->out.b, info.bytes);
	put_digest(j, &info.digest);
	text(j, "}");
}

static int put_component_tensors(struct json *j, uint32_t component, const char **before)
{
	const uint32_t *nodes;
	uint32_t first, end, n = view_tree_files(j->t, component, &nodes);
	base_cleanup_free uint32_t *map = NULL;
	int r;

	load_step_component(j->step, component, &first, &end);
	map = n ? malloc((end - first + 1) * sizeof *map) : NULL;
	if (n == 0)
		return 0;
	r = map ? 0 : -ENOMEM;
	if (r == 0 && n > 1)
		r = view_files_map(j->t, nodes, n, first, end, map, j->err);
	for (uint32_t i = first; r == 0 && i < end; i++) {
		struct load_tensor_info info;
		load_step_tensor_info(j->step, i, &info);
		if (!view_safetensors_can(info.dtype, &info.shape, info.name, info.name_len))
			continue;
		text(j, *before);
		*before = ",\n";
		put_tensor(j, i, n > 1 && map[i - first] ? map[i - first] : nodes[0]);
		view_text_flush(&j->out);
	}
	return r;
}

/* Tensors that are shown in a .safetensors only, by component and name. */
static int put_tensors_without_npy(struct json *j, const char *before)
{
	uint32_t n = view_tree_show(j->t) & VIEW_SHOW_NPY ? 0 : load_step_component_count(j->step);
	int r = 0;
	for (uint32_t c = 0; r == 0 && c < n; c++)
		r = put_component_tensors(j, c, &before);
	return r;
}

/* One line for each file, in the order of the nodes. Returns the text that separates the next line. */
static const char *put_nodes(struct json *j, enum view_kind kind)
{
	const char *before = "\n";
	for (uint32_t i = 1; i < view_tree_count(j->t); i++) {
		const struct view_node *node = view_tree_node(j->t, i);
		if (node->kind != kind)
			continue;
		text(j, before);
		before = ",\n";
		if (kind == VIEW_BLOB)
			put_blob(j, i, node);
		else
			put_tensor(j, node->item, i);
		view_text_flush(&j->out);
	}
	return before;
}

int view_manifest_json(const struct view_tree *t, struct base_buf *ret_text, uint64_t *ret_len, struct base_error *err)
{
	struct json j = {.t = t, .step = view_tree_step(t), .out.keep = ret_text != NULL, .err = err};
	const char *before = "\n";
	int r;

	put_head(&j);
	if (view_tree_has(t, UINT32_MAX)) /* a component's tree has none: they are the whole step's */
		put_totals(&j);
	text(&j, ",\n  \"components\": [");
	for (uint32_t i = 0; i < load_step_component_count(j.step); i++) {
		if (!view_tree_has(t, i))
			continue;
		put_component(&j, i, before);
		before = ",\n";
	}
	text(&j, "\n  ],\n  \"tensors\": [");
	r = put_tensors_without_npy(&j, put_nodes(&j, VIEW_TENSOR_NPY));
	text(&j, "\n  ],\n  \"blobs\": [");
	put_nodes(&j, VIEW_BLOB);
	text(&j, "\n  ]\n}\n");
	return view_text_end(&j.out, r, ret_text, ret_len);
}
