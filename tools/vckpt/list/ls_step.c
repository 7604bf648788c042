/* SPDX-License-Identifier: Apache-2.0
 *
 * What a step holds, and the tensors of a component. With --long also what they are made of, for which the rows of
 * their pieces are read. */
#include <inttypes.h>
#include <string.h>

#include "core/commit/list/list_facts.h"
#include "tools/vckpt/list/ls.h"
#include "tools/vckpt/list/sums.h"

/* The members of --long. */
static void add_sums(const struct ls *ls, json_t *row, const struct tool_sums *s)
{
	char text[TOOL_SUMS_TEXT];

	json_object_set_new(row, "pieces", json_integer((json_int_t)s->pieces));
	json_object_set_new(row, "stored_bytes", json_integer((json_int_t)s->stored));
	json_object_set_new(row, "codecs",
		ls->t->json ? tool_sums_codecs_json(s) : json_string(tool_sums_codecs(s, text)));
}

/* ---- the tensors of a component ---- */

static int find_component(const struct ls *ls, struct load_step *step, const char *component, uint32_t *ret_first,
	uint32_t *ret_end)
{
	struct base_error err = {0};

	for (uint32_t c = 0; c < load_step_component_count(step); c++)
		if (!strcmp(load_step_component(step, c, ret_first, ret_end), component))
			return 0;
	load_step_lacks(step, "component", component, &err);
	return tool_fail(ls->t, &err);
}

/* Tensors in the order of `items`. */
static int add_tensors(struct ls *ls, struct load_step *step, const struct ls_item *items, size_t n,
	struct tool_sums *ret_total)
{
	for (size_t i = 0; i < n; i++) {
		struct load_tensor_info info;
		struct tool_sums sums = {0};
		struct base_error err = {0};
		json_t *row;

		load_step_tensor_info(step, (uint32_t)items[i].index, &info);
		if (ls->more && tool_sums_tensor(&sums, step, NULL, (uint32_t)items[i].index, &err) < 0)
			return tool_fail(ls->t, &err);
		ret_total->bytes += info.bytes;
		ret_total->stored += sums.stored;
		ret_total->dtypes[info.dtype]++;
		row = json_pack("{s:o, s:s, s:o, s:I}", "name", tool_json_text(info.name, info.name_len), "dtype",
			tensor_dtype_name(info.dtype), "shape", tool_json_shape(&info.shape), "bytes",
			(json_int_t)info.bytes);
		if (ls->more) {
			add_sums(ls, row, &sums);
			json_object_set_new(row, "digest", json_string(TOOL_DIGEST(&sums.digest)));
		}
		ls_add(ls, row);
	}
	return 0;
}

static struct ls_item *tensor_items(struct load_step *step, uint32_t first, uint32_t end)
{
	struct ls_item *items = calloc((size_t)end - first + 1, sizeof *items);

	for (uint32_t i = first; items && i < end; i++) {
		struct load_tensor_info info;

		load_step_tensor_info(step, i, &info);
		items[i - first] = (struct ls_item){
			.name = info.name, .name_len = info.name_len, .bytes = info.bytes, .index = i};
	}
	return items;
}

static void say_tensors(const struct ls *ls, size_t n, const struct tool_sums *s)
{
	if (!ls_says(ls))
		return;
	printf("total: %s, %s", TOOL_COUNT(n, "tensor", "tensors"), LS_BYTES(ls, s->bytes));
	if (ls->more)
		printf(", %s stored", LS_BYTES(ls, s->stored));
	putchar('\n');
	if (ls->more)
		tool_sums_print_numpy(s, "");
}

int ls_tensors(struct ls *ls, struct load_step *step, const char *component)
{
	static const struct tool_column columns[] = {{"NAME", "name", .shorten = true}, {"DTYPE", "dtype"},
		{"SHAPE", "shape"}, {"SIZE", "bytes", TOOL_AS_BYTES, .right = true},
		{"STORED", "stored_bytes", TOOL_AS_BYTES, .right = true, .more = true},
		{"PIECES", "pieces", .right = true, .more = true}, {"CODECS", "codecs", .more = true}};
	base_cleanup_free struct ls_item *items = NULL;
	uint32_t first, end;
	struct tool_sums total = {0};
	int code = find_component(ls, step, component, &first, &end);

	if (code)
		return code;
	items = tensor_items(step, first, end);
	if (!items)
		return tool_fail(ls->t, &(struct base_error){.code = -ENOMEM});
	ls_begin(ls, columns, BASE_COUNT(columns));
	code = ls_sort(ls, "tensors", LS_NAME | LS_SIZE, items, end - first);
	if (code == 0)
		code = add_tensors(ls, step, items, end - first, &total);
	if (code == 0)
		code = ls_print(ls, json_pack("{s:s, s:o}", "component", component, "tensors", ls_take(ls)));
	if (code == 0)
		say_tensors(ls, end - first, &total);
	return code;
}

/* ---- a step ---- */

struct contents {
	struct ls *ls;
	struct load_step *step;
	json_t *components; /* with --json */
	struct tool_sums total;
	uint64_t bytes, again, no_base; /* load_step_again */
};

static int sum_component(struct contents *c, uint32_t first, uint32_t end, struct tool_sums *s)
{
	struct base_error err = {0};

	for (uint32_t i = first; i < end; i++)
		if (tool_sums_tensor(s, c->step, NULL, i, &err) < 0)
			return tool_fail(c->ls->t, &err);
	return 0;
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

static json_t *component_row(const struct contents *c, const struct ls_item *item, uint32_t n,
	const struct tool_sums *s)
{
	char name[PROTO_COMPONENT_MAX + 2], text[TOOL_SUMS_TEXT];
	json_t *row = json_pack("{s:s, s:I, s:I}", "component", item->name, "tensors", (json_int_t)n, "bytes",
		(json_int_t)item->bytes);

	snprintf(name, sizeof name, "%s/", item->name);
	if (!c->ls->t->json)
		json_object_set_new(row, "name", json_string(name));
	if (!c->ls->more)
		return row;
	add_sums(c->ls, row, s);
	json_object_set_new(row, "dtypes",
		c->ls->t->json ? tool_sums_dtypes_json(s) : json_string(tool_sums_dtypes(s, text)));
	return row;
}

static int add_component(struct contents *c, const struct ls_item *item)
{
	uint32_t first, end;
	struct tool_sums sums = {0};
	int code = 0;

	load_step_component(c->step, (uint32_t)item->index, &first, &end);
	if (c->ls->more)
		code = sum_component(c, first, end, &sums);
	if (code)
		return code;
	ls_add(c->ls, component_row(c, item, end - first, &sums));
	c->bytes += item->bytes;
	c->total.tensors += end - first;
	c->total.stored += sums.stored;
	for (unsigned i = 0; i < TENSOR_DTYPE_END; i++)
		c->total.dtypes[i] += sums.dtypes[i];
	return 0;
}

static void add_blob(struct contents *c, const struct ls_item *item)
{
	base_cleanup_free char *shown = NULL;
	struct load_blob_info info;
	json_t *row;

	load_step_blob_info(c->step, (uint32_t)item->index, &info);
	c->bytes += info.bytes;
	row = json_pack("{s:s, s:o, s:I}", "name", info.name, "rank",
		info.per_rank ? json_integer(info.rank) : json_null(), "bytes", (json_int_t)info.bytes);
	if (c->ls->more)
		json_object_set_new(row, "digest", json_string(TOOL_DIGEST(&info.digest)));
	if (!c->ls->t->json && info.per_rank) {
		shown = tool_string("ranks/%05u/%s", info.rank, info.name);
		json_object_set_new(row, "name", json_string(shown ? shown : info.name));
	}
	ls_add(c->ls, row);
}

static int add_contents(struct contents *c)
{
	uint32_t ncomponents = load_step_component_count(c->step), first, end;
	size_t nblobs = load_step_blob_count(c->step);
	base_cleanup_free struct ls_item *items = calloc(ncomponents + nblobs + 1, sizeof *items);
	struct ls_item *blobs = items + ncomponents;
	int code;

	for (uint32_t i = 0; items && i < ncomponents; i++) {
		const char *name = load_step_component(c->step, i, &first, &end);

		items[i] = (struct ls_item){.name = name, .name_len = strlen(name),
			.bytes = component_bytes(c->step, first, end), .index = i};
	}
	for (uint32_t i = 0; items && i < nblobs; i++) {
		struct load_blob_info info;

		load_step_blob_info(c->step, i, &info);
		blobs[i] = (struct ls_item){
			.name = info.name, .name_len = strlen(info.name), .bytes = info.bytes, .index = i};
	}
	if (!items)
		return tool_fail(c->ls->t, &(struct base_error){.code = -ENOMEM});
	code = ls_sort(c->ls, "components and files", LS_NAME | LS_SIZE, items, ncomponents);
	if (code == 0)
		code = ls_sort(c->ls, "components and files", LS_NAME | LS_SIZE, blobs, nblobs);
	for (uint32_t i = 0; code == 0 && i < ncomponents; i++)
		code = add_component(c, &items[i]);
	c->components = ls_take(c->ls);
	for (size_t i = 0; code == 0 && i < nblobs; i++)
		add_blob(c, &blobs[i]);
	return code;
}

static void say_contents(const struct contents *c)
{
	if (!ls_says(c->ls))
		return;
	printf("total: %s with %s, %s, %s", TOOL_COUNT(load_step_component_count(c->step), "component", "components"),
		TOOL_COUNT(c->total.tensors, "tensor", "tensors"),
		TOOL_COUNT(load_step_blob_count(c->step), "file", "files"), LS_BYTES(c->ls, c->bytes));
	if (c->again)
		printf("; %s%s of unchanged data was written again", c->no_base ? "up to " : "",
			LS_BYTES(c->ls, c->again));
	putchar('\n');
	if (c->ls->more)
		tool_sums_print_numpy(&c->total, "");
}

/* With everything that the list says of it. */
static json_t *document(struct contents *c, const struct commit_list_step *entry)
{
	base_cleanup_free struct proto_attribute *attributes = NULL;
	size_t n = 0;
	json_t *all;

	if (commit_list_attributes(c->ls->t->list, entry, &attributes, &n) < 0)
		return NULL;
	all = ls_step_json(c->ls->t->list, entry, attributes, n);
	json_object_set_new(all, "components", c->components);
	json_object_set_new(all, "blobs", ls_take(c->ls));
	json_object_set_new(all, "again_bytes", json_integer((json_int_t)c->again));
	json_object_set_new(all, "no_base_bytes", json_integer((json_int_t)c->no_base));
	return all;
}

static void say_facts(const struct contents *c, const struct commit_list_step *entry)
{
	base_cleanup_buf struct base_buf note = BASE_BUF_INIT;

	tool_facts_note(commit_list_facts(c->ls->t->list, entry->entry), &note);
	if (note.len && ls_says(c->ls))
		tool_print(stdout, "note: %.*s\n", (int)note.len, (const char *)note.data);
}

int ls_step(struct ls *ls, struct load_step *step, const struct commit_list_step *entry)
{
	static const struct tool_column columns[] = {{"NAME", "name", .shorten = true},
		{"SIZE", "bytes", TOOL_AS_BYTES, .right = true}, {"TENSORS", "tensors", .right = true},
		{"STORED", "stored_bytes", TOOL_AS_BYTES, .right = true, .more = true},
		{"PIECES", "pieces", .right = true, .more = true}, {"CODECS", "codecs", .more = true},
		{"DTYPES", "dtypes", .more = true}};
	struct contents c = {.ls = ls, .step = step};
	struct base_error err = {0};
	int code;

	if (load_step_again(step, &c.again, &c.no_base, &err) < 0 || load_step_blobs(step, &err) < 0)
		return tool_fail(ls->t, &err);
	ls_begin(ls, columns, BASE_COUNT(columns));
	code = add_contents(&c);
	if (code == 0)
		code = ls_print(ls, document(&c, entry));
	else
		json_decref(c.components);
	if (code == 0)
		say_contents(&c);
	if (code == 0)
		say_facts(&c, entry);
	return code;
}
