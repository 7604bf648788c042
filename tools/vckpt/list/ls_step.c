/* SPDX-License-Identifier: Apache-2.0
 *
 * What a step holds, and the tensors of a component. With --long also what they are made of, for which the rows of
 * their pieces are read. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/list/ls.h"
#include "tools/vckpt/list/sums.h"

/* The cells of --long. */
static void add_sums(const struct ls *ls, struct tool_table *table, const struct tool_sums *s)
{
	ls_add_bytes(ls, table, s->stored);
	tool_table_number(table, s->pieces);
	tool_table_text(table, tool_sums_codecs(s, (char[TOOL_SUMS_TEXT]){0}));
}

static void sums_json(json_t *o, const struct tool_sums *s)
{
	json_object_set_new(o, "pieces", json_integer((json_int_t)s->pieces));
	json_object_set_new(o, "stored_bytes", json_integer((json_int_t)s->stored));
	json_object_set_new(o, "codecs", tool_sums_codecs_json(s));
}

/* ---- the tensors of a component ---- */

static int find_component(const struct ls *ls, struct load_step *step, const char *component, uint32_t *ret_first,
	uint32_t *ret_end)
{
	for (uint32_t c = 0; c < load_step_component_count(step); c++)
		if (!strcmp(load_step_component(step, c, ret_first, ret_end), component))
			return 0;
	return tool_failed(ls->t, "step %" PRIu64 " has no component %s", load_step_info(step)->step, component);
}

static json_t *tensor_json(const struct load_tensor_info *info)
{
	return json_pack("{s:o, s:s, s:o, s:I}", "name", tool_json_text(info->name, info->name_len), "dtype",
		tensor_dtype_name(info->dtype), "shape", tool_json_shape(&info->shape), "bytes",
		(json_int_t)info->bytes);
}

static void add_tensor(const struct ls *ls, struct tool_table *table, const struct load_tensor_info *info,
	const struct tool_sums *s)
{
	tool_table_add(table, TOOL_PLAIN, info->name, info->name_len);
	tool_table_text(table, tensor_dtype_name(info->dtype));
	tool_table_text(table, TOOL_SHAPE(&info->shape));
	ls_add_bytes(ls, table, info->bytes);
	if (ls->more)
		add_sums(ls, table, s);
}

/* Tensors in the order of `items`, into the table and the JSON array. */
static int add_tensors(const struct ls *ls, struct load_step *step, const struct ls_item *items, size_t n,
	struct tool_table *table, json_t *all, struct tool_sums *ret_total)
{
	for (size_t i = 0; i < n; i++) {
		struct load_tensor_info info;
		struct tool_sums sums = {0};
		struct base_error err = {0};

		load_step_tensor_info(step, (uint32_t)items[i].index, &info);
		if (ls->more && tool_sums_tensor(&sums, step, NULL, (uint32_t)items[i].index, &err) < 0)
			return tool_fail(ls->t, &err);
		ret_total->bytes += info.bytes;
		ret_total->stored += sums.stored;
		ret_total->dtypes[info.dtype]++;
		if (table)
			add_tensor(ls, table, &info, &sums);
		if (!ls->t->json)
			continue;
		json_t *o = tensor_json(&info);
		if (ls->more) {
			sums_json(o, &sums);
			json_object_set_new(o, "digest", json_string(TOOL_DIGEST(&sums.digest)));
		}
		json_array_append_new(all, o);
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

int ls_tensors(const struct ls *ls, struct load_step *step, const char *component)
{
	static const struct tool_column columns[] = {{"NAME", .shorten = true}, {"DTYPE"}, {"SHAPE"}, {"SIZE", true},
		{"STORED", true}, {"PIECES", true}, {"CODECS"}};
	uint32_t first, end;
	struct tool_sums total = {0};
	int code = find_component(ls, step, component, &first, &end);

	if (code)
		return code;
	base_cleanup_free struct ls_item *items = tensor_items(step, first, end);
	struct tool_table *table = ls->t->json ? NULL : tool_table_new(columns, ls->more ? 7 : 4);
	json_auto_t *all = json_array();
	if (items)
		code = ls_sort(ls, "tensors", LS_NAME | LS_SIZE, items, end - first);
	if (items && code == 0)
		code = add_tensors(ls, step, items, end - first, table, all, &total);
	if (code == 0 && ls->t->json)
		code = tool_print_json(json_pack("{s:s, s:O}", "component", component, "tensors", all));
	else if (code == 0)
		code = ls_print(ls, items ? base_steal(table) : NULL);
	if (code == 0 && !ls->t->json)
		say_tensors(ls, end - first, &total);
	tool_table_free(table);
	return code;
}

/* ---- a step ---- */

struct contents {
	const struct ls *ls;
	struct load_step *step;
	struct tool_table *table;
	json_t *components, *blobs;
	struct tool_sums total;
	uint64_t bytes;
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

static void add_component_row(struct contents *c, const struct ls_item *item, uint32_t n, const struct tool_sums *s)
{
	char name[PROTO_COMPONENT_MAX + 2];

	snprintf(name, sizeof name, "%s/", item->name);
	tool_table_text(c->table, name);
	ls_add_bytes(c->ls, c->table, item->bytes);
	tool_table_number(c->table, n);
	if (!c->ls->more)
		return;
	add_sums(c->ls, c->table, s);
	tool_table_text(c->table, tool_sums_dtypes(s, (char[TOOL_SUMS_TEXT]){0}));
}

static void add_component_json(struct contents *c, const struct ls_item *item, uint32_t n, const struct tool_sums *s)
{
	json_t *o = json_pack("{s:s, s:I, s:I}", "component", item->name, "tensors", (json_int_t)n, "bytes",
		(json_int_t)item->bytes);

	if (c->ls->more) {
		sums_json(o, s);
		json_object_set_new(o, "dtypes", tool_sums_dtypes_json(s));
	}
	json_array_append_new(c->components, o);
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
	if (c->table)
		add_component_row(c, item, end - first, &sums);
	else
		add_component_json(c, item, end - first, &sums);
	c->bytes += item->bytes;
	c->total.tensors += end - first;
	c->total.stored += sums.stored;
	for (unsigned i = 0; i < TENSOR_DTYPE_END; i++)
		c->total.dtypes[i] += sums.dtypes[i];
	return 0;
}

static void add_blob(struct contents *c, const struct ls_item *item)
{
	struct load_blob_info info;

	load_step_blob_info(c->step, (uint32_t)item->index, &info);
	c->bytes += info.bytes;
	if (!c->table) {
		json_t *o = json_pack("{s:s, s:o, s:I}", "name", info.name, "rank",
			info.per_rank ? json_integer(info.rank) : json_null(), "bytes", (json_int_t)info.bytes);

		if (c->ls->more)
			json_object_set_new(o, "digest", json_string(TOOL_DIGEST(&info.digest)));
		json_array_append_new(c->blobs, o);
		return;
	}
	base_cleanup_free char *name = info.per_rank ? tool_string("ranks/%05u/%s", info.rank, info.name) : NULL;
	tool_table_text(c->table, name ? name : info.name);
	ls_add_bytes(c->ls, c->table, info.bytes);
	for (int i = 0; i < (c->ls->more ? 5 : 1); i++)
		tool_table_text(c->table, "-");
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
	for (size_t i = 0; code == 0 && i < nblobs; i++)
		add_blob(c, &blobs[i]);
	return code;
}

static void say_contents(const struct contents *c)
{
	uint64_t no_base, again = load_step_again(c->step, &no_base);

	if (!ls_says(c->ls))
		return;
	printf("total: %s with %s, %s, %s", TOOL_COUNT(load_step_component_count(c->step), "component", "components"),
		TOOL_COUNT(c->total.tensors, "tensor", "tensors"),
		TOOL_COUNT(load_step_blob_count(c->step), "file", "files"), LS_BYTES(c->ls, c->bytes));
	if (again)
		printf("; %s%s of unchanged data was written again", no_base ? "up to " : "", LS_BYTES(c->ls, again));
	putchar('\n');
	if (c->ls->more)
		tool_sums_print_numpy(&c->total, "");
}

int ls_step(const struct ls *ls, struct load_step *step, const struct store_list_step *entry)
{
	static const struct tool_column columns[] = {{"NAME", .shorten = true}, {"SIZE", true}, {"TENSORS", true},
		{"STORED", true}, {"PIECES", true}, {"CODECS"}, {"DTYPES"}};
	struct contents c = {.ls = ls, .step = step};
	struct base_error err = {0};
	int code;

	if (load_step_heads(step, &err) < 0 || load_step_blobs(step, &err) < 0)
		return tool_fail(ls->t, &err);
	c.components = json_array();
	c.blobs = json_array();
	if (!ls->t->json)
		c.table = tool_table_new(columns, ls->more ? 7 : 3);
	code = ls->t->json || c.table ? add_contents(&c) : 0;
	if (code == 0 && ls->t->json) {
		json_t *all = ls_step_json(load_step_info(step)->run, entry);
		uint64_t no_base, again = load_step_again(step, &no_base);

		json_object_set(all, "components", c.components);
		json_object_set(all, "blobs", c.blobs);
		json_object_set_new(all, "again_bytes", json_integer((json_int_t)again));
		json_object_set_new(all, "no_base_bytes", json_integer((json_int_t)no_base));
		code = tool_print_json(all);
	} else if (code == 0) {
		code = ls_print(ls, base_steal(c.table));
		if (code == 0)
			say_contents(&c);
	}
	tool_table_free(c.table);
	json_decref(c.components);
	json_decref(c.blobs);
	return code;
}
