/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "core/view/mesh.h"
#include "core/view/npy.h"
#include "tools/vckpt/tool.h"

#define CACHE_BYTES (UINT64_C(64) << 20)

static int write_out(void *arg, const void *bytes, size_t len, struct base_error *err)
{
	(void)arg;
	return tool_write(STDOUT_FILENO, "standard output", bytes, len, err);
}

/* Opens a file of the tree, or one under a mesh. ret_skip: bytes before those of a tensor. */
static int open_path(struct view_tree *tree, const struct view_layouts *layouts, const char *path,
	struct view_file **ret_f, uint64_t *ret_skip, struct base_error *err)
{
	const struct load_step_info *info = load_step_info(view_tree_step(tree));
	int64_t node = view_tree_walk(tree, path);

	*ret_skip = 0;
	path += strspn(path, "/");
	if (node == -ENOENT && strncmp(path, VIEW_MESH_DIRECTORY "/", strlen(VIEW_MESH_DIRECTORY "/")) == 0) {
		int r = view_mesh_walk(tree, layouts, path, ret_f, err);

		return r < 0 ? base_error_prefix(err, r, "%s/%" PRIu64, info->run, info->step) : 0;
	}
	if (node < 0)
		return load_step_lacks(view_tree_step(tree), "file", path, err);
	if (view_tree_node(tree, (uint32_t)node)->kind == VIEW_TENSOR_NPY)
		*ret_skip = VIEW_NPY_DATA_OFFSET;
	return view_file_open(tree, (uint32_t)node, ret_f, err);
}

static int cat_file(struct tool *t, const char *path, bool raw, const struct view_layouts *layouts)
{
	struct base_error err = {0};
	struct view_tree *tree = NULL;
	struct view_file *file = NULL;
	struct load_cache *cache = load_cache_new(CACHE_BYTES);
	uint64_t skip = 0;
	int r = cache ? view_tree_build(t->step, VIEW_SHOW_ALL, &tree, &err) : base_no_memory(&err);
	int code;

	if (cache)
		load_cache_quiet(cache);
	if (r == 0)
		r = open_path(tree, layouts, path, &file, &skip, &err);
	if (r == 0)
		r = view_file_stream(file, cache, raw ? skip : 0, 0, write_out, NULL, &err);
	code = r < 0 ? tool_fail(t, &err) : TOOL_DONE;
	view_file_close(file);
	view_tree_unref(tree);
	load_cache_free(cache);
	return code;
}

static int cat_run(struct tool *t, int argc, char **argv)
{
	bool raw = false;
	const char *file = NULL;
	const struct tool_option options[] = {{"raw", .flag = &raw}, {"layouts", .text = &file}, {0}};
	struct view_layouts *layouts = NULL;
	struct tool_target target;
	struct base_error err = {0};
	int code = tool_parse(t, argc, argv, options);

	if (code)
		return code;
	if (t->json)
		return tool_usage(t, "the command prints bytes and has no --json");
	if ((code = tool_target_parse(t, t->arguments[1], &target)))
		return code;
	if (!target.rest)
		return tool_usage(t, "%s is not a file of a step: give RUN/STEP/PATH, where PATH is as the mount "
			"shows it", t->arguments[1]);
	if (file && view_layouts_open(file, &layouts, &err) < 0)
		return tool_usage(t, "%s", err.text);
	if ((code = tool_step_open(t, &target, NULL)) == 0)
		code = cat_file(t, target.rest, raw, layouts);
	view_layouts_free(layouts);
	return code;
}

const struct tool_command tool_cat = {"cat", "print one file of a step",
	"usage: vckpt cat STORE RUN/STEP/PATH [--raw] [--layouts FILE] [-q] [-v]\n\n"
	"Prints a file of a step as the mount shows it: model/NAME.npy (.npy may be left off, and a name may be\n"
	"given as vckpt ls lists it), model.safetensors, config.json, ..., or what a rank of a mesh holds:\n"
	"mesh/tp=4/rank-0/model.safetensors.\n\n"
	"  --raw           of a tensor the bare bytes, row-major, without the .npy header\n"
	"  --layouts FILE  what cuts tensors under a mesh: a layout file, or llama, mixtral, deepseek\n",
	cat_run};
