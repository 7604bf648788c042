/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt layout --check: reads a layout file, and says what each tensor of a step gets from it, and which lines no
 * tensor has. The mesh is not known here, so it is not checked what does not divide. */
#include <inttypes.h>
#include <string.h>

#include "core/view/layouts.h"
#include "tools/vckpt/print/format.h"
#include "tools/vckpt/layout/layout.h"
#include "tools/vckpt/print/table.h"

/* Free it. NULL: no memory. */
static char *placements_text(const struct view_layouts_line *line)
{
	struct base_buf words base_cleanup_buf = BASE_BUF_INIT;

	for (uint32_t i = 0; line && i < line->ncuts; i++) {
		base_buf_printf(&words, "%s%s=", i ? " " : "", line->cuts[i].dim);
		tensor_placements_print(&line->cuts[i].placement, 1, &words);
	}
	if (!words.len)
		base_buf_append_text(&words, line && line->saved ? "saved" : "R");
	return base_buf_steal_text(&words);
}

static int add_tensor(struct tool_table *table, const struct view_layouts *l, const struct load_tensor_info *info,
	uint32_t *counts)
{
	int64_t i = view_layouts_find(l, info);
	const struct view_layouts_line *line = i < 0 ? NULL : view_layouts_line(l, (uint32_t)i);
	base_cleanup_free char *words = placements_text(line);
	base_cleanup_free char *place = line ? tool_string("%.200s:%u", line->file, line->number) : NULL;
	json_t *row;
	int r = 0;

	if (i == -ENOMEM)
		return -ENOMEM;
	row = json_pack("{s:s++%, s:o, s:s, s:s}", "tensor", info->component, "/", info->name, (size_t)info->name_len,
		"shape", tool_json_shape(&info->shape), "dtype", tensor_dtype_name(info->dtype), "placements", words);
	if (line) {
		/* a path need not be UTF-8, and may be cut within a character */
		r = json_object_set_new(row, "line", json_string_nocheck(place));
		counts[i]++;
	}
	tool_table_add(table, row);
	return r < 0 ? -ENOMEM : 0;
}

static int print_step(struct tool *t, const struct view_layouts *l)
{
	static const struct tool_column columns[] = {{"tensor", "tensor", .shorten = true}, {"shape", "shape"},
		{"dtype", "dtype"}, {"placements", "placements"}, {"line", "line"}};
	struct tool_table *table = tool_table_new(columns, BASE_COUNT(columns), false, false);
	base_cleanup_free uint32_t *counts = calloc(view_layouts_count(l) + 1, sizeof *counts);
	struct base_error err = {.code = -ENOMEM};
	int r = table && counts ? 0 : -ENOMEM;

	for (uint32_t i = 0; r == 0 && i < load_step_tensor_count(t->step); i++) {
		struct load_tensor_info info;

		load_step_tensor_info(t->step, i, &info);
		r = add_tensor(table, l, &info, counts);
	}
	tool_output_begin();
	if (r == 0)
		r = tool_table_print(table, stdout, false, tool_terminal_width(STDOUT_FILENO));
	tool_table_free(table);
	for (uint32_t i = 0; r == 0 && i < view_layouts_count(l); i++) {
		const struct view_layouts_line *line = view_layouts_line(l, i);

		if (counts[i] || view_layouts_preset(line->file))
			continue;
		tool_print(stdout, "%s:%u: no tensor has '%s'\n", line->file, line->number, line->pattern);
	}
	return r < 0 ? tool_fail(t, &err) : tool_output_end(t);
}

/* RUN/STEP alone is in the store that VCKPT_STORE names. */
static int read_target(struct tool *t, struct tool_target *ret_target)
{
	const char *store = getenv("VCKPT_STORE");
	int code;

	if (t->narguments == 1 && store && *store) {
		t->arguments[t->narguments++] = t->arguments[0]; /* there is room for the store of the environment */
		t->arguments[0] = store;
		t->from_environment = true;
	}
	if (t->narguments != 2)
		return tool_usage(t, "--check FILE: give STORE and RUN/STEP, or neither");
	code = tool_target_parse(t, t->arguments[1], ret_target);
	if (code == 0 && (ret_target->rest || (!ret_target->has_step && !ret_target->latest)))
		code = tool_usage(t, "%s is no step: give RUN/STEP", t->arguments[1]);
	return code;
}

int layout_check(struct tool *t, const char *file)
{
	struct view_layouts *l = NULL;
	struct base_error err = {0};
	struct tool_target target;
	int code = t->narguments ? read_target(t, &target) : 0;

	if (code)
		return code;
	if (t->json)
		return tool_usage(t, "--check prints a table and has no --json");
	if (view_layouts_open(file, &l, &err) < 0)
		return tool_fail(t, &err);
	if (t->narguments) {
		code = tool_step_open(t, &target, NULL);
		code = code ? code : print_step(t, l);
	} else {
		tool_output_begin();
		printf("%s: %s\n", file, TOOL_COUNT(view_layouts_count(l), "line", "lines"));
		code = tool_output_end(t);
	}
	view_layouts_free(l);
	return code;
}
