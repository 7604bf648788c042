/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/list/tensors.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/view/tree.h"

int64_t tool_tensor_find(struct load_step *step, const char *path, struct base_error *err)
{
	const char *slash = strchr(path, '/');
	char component[PROTO_COMPONENT_MAX + 1];
	struct view_tree *tree;
	int64_t tensor, node;
	const struct view_node *n;

	if (!slash || (size_t)(slash - path) >= sizeof component)
		return -ENOENT;
	snprintf(component, sizeof component, "%.*s", (int)(slash - path), path);
	tensor = load_step_tensor_find(step, component, slash + 1, strlen(slash + 1));
	if (tensor >= 0 || view_tree_build(step, VIEW_SHOW_ALL, &tree, err) < 0)
		return tensor;
	node = view_tree_walk(tree, path);
	n = node >= 0 ? view_tree_node(tree, (uint32_t)node) : NULL;
	if (n && n->kind == VIEW_TENSOR_NPY)
		tensor = n->item;
	view_tree_unref(tree);
	return tensor;
}

int tool_tensors_match(struct load_step *step, const char *path, int (*f)(void *arg, uint32_t tensor), void *arg,
	struct base_error *err)
{
	const struct load_step_info *info = load_step_info(step);
	int64_t tensor = tool_tensor_find(step, path, err);
	bool found = false;
	int r = 0;

	if (tensor >= 0)
		return f(arg, (uint32_t)tensor);
	if (err->code)
		return err->code;
	for (uint32_t i = 0; r == 0 && i < load_step_tensor_count(step); i++) {
		base_cleanup_free char *name = NULL;
		struct load_tensor_info t;

		load_step_tensor_info(step, i, &t);
		if (asprintf(&name, "%s/%.*s", t.component, (int)t.name_len, t.name) < 0)
			return base_no_memory(err);
		if (fnmatch(path, name, 0) != 0)
			continue;
		found = true;
		r = f(arg, i);
	}
	if (r || found)
		return r;
	return base_error_set(err, -ENOENT, "%s/%" PRIu64 " has no tensor %s", info->run, info->step, path);
}
