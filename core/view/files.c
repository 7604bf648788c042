/* SPDX-License-Identifier: Apache-2.0
 *
 * files: the paths of a component whose tensors came in files of names other than COMPONENT.safetensors, or in several
 * (docs/format/header.md). An import keeps the paths and each file's own header as views of the component. A reader
 * that does not know these views shows COMPONENT.safetensors, and so does this one if the paths are not valid. Whether
 * a path is in use already is decided in tree.c. */
#include "core/view/view_internal.h"

#include <stdio.h>

#include "core/base/log.h"
#include "proto/limits.h"
#include "proto/name.h"

#define FILES_MAX 4096u

const char *view_files_view(unsigned file, char text[static VIEW_FILES_VIEW_BYTES])
{
	if (file == 0)
		return VIEW_SAFETENSORS_VIEW;
	snprintf(text, VIEW_FILES_VIEW_BYTES, VIEW_FILE_VIEW, file - 1);
	return text;
}

static bool element_is(const char *path, size_t n, const char *name)
{
	return strlen(name) == n && memcmp(path, name, n) == 0;
}

bool view_files_path_valid(const char *path)
{
	size_t len = strlen(path), end = strlen(".safetensors");

	if (len <= end || len > PROTO_NAME_MAX || strcmp(path + len - end, ".safetensors") != 0)
		return false;
	if (!proto_utf8_valid(path, len) || proto_name_slashes(path) >= STORE_BLOB_PARTS_MAX)
		return false;
	for (const char *at = path;; at++) {
		size_t n = strcspn(at, "/");

		if (n == 0 || element_is(at, n, ".") || element_is(at, n, ".."))
			return false;
		if (at == path && (element_is(at, n, "ranks") || element_is(at, n, "mesh") ||
			element_is(at, n, "manifest.json")))
			return false;
		at += n;
		if (!*at)
			return true;
	}
}

uint32_t view_files_count(const void *bytes, size_t len)
{
	const char *at = bytes, *end = at + len;
	uint32_t n = 0;

	if (len == 0 || end[-1])
		return 0;
	for (; at < end; at += strlen(at) + 1)
		if (!view_files_path_valid(at) || ++n > FILES_MAX)
			return 0;
	return n;
}

int view_files_read(const struct load_step *step, const char *component, uint64_t *left, uint32_t *warned,
	struct base_buf *ret_paths, uint32_t *ret_n, struct base_error *err)
{
	const struct load_step_info *info = load_step_info(step);
	struct base_error own = {0};
	uint64_t data_bytes;
	size_t len = 0;
	void *bytes = NULL;
	int r = load_step_header(step, component, VIEW_FILES_VIEW, *left, &bytes, &len, &data_bytes, &own);

	*ret_paths = (struct base_buf)BASE_BUF_INIT;
	*ret_n = 0;
	if (r == -ENOENT)
		return 0;
	if (r < 0 && r != -BASE_EDAMAGED && r != -BASE_EFORMAT && r != -BASE_EVERSION && r != -BASE_ELIMIT &&
		r != -EFBIG)
		return base_error_set(err, r, "%s", own.text);
	if (r == 0) {
		*left -= len;
		*ret_paths = (struct base_buf){.data = bytes, .len = len, .size = len};
		*ret_n = view_files_count(bytes, len);
	}
	if (*ret_n == 0 && (*warned)++ < VIEW_NAMED)
		base_warning("%s/%llu: the names of the files of component %s cannot be used; it is shown as "
			"%s.safetensors%s%s", info->run, (unsigned long long)info->step, component, component,
			own.code ? ": " : "", own.text);
	return 0;
}

int view_files_header(const struct load_step *step, const char *component, unsigned file, void **ret_bytes,
	struct view_safetensors *ret_s, struct base_error *err)
{
	base_cleanup_free void *bytes = NULL;
	char view[VIEW_FILES_VIEW_BYTES];
	uint64_t data_bytes, size;
	size_t len = 0;
	int r = load_step_header(step, component, view_files_view(file, view), STORE_VIEW_HEADER_MAX_BYTES, &bytes,
		&len, &data_bytes, err);

	if (r < 0)
		return r;
	if (base_add_overflows(len, data_bytes, &size))
		size = UINT64_MAX;
	r = view_safetensors_parse(bytes, len, size, ret_s, err);
	if (r == 0)
		*ret_bytes = base_steal(bytes);
	return r;
}

int view_files_map(const struct view_tree *t, const uint32_t *nodes, uint32_t n, uint32_t first, uint32_t end,
	uint32_t *map, struct base_error *err)
{
	struct load_step *step = view_tree_step(t);

	memset(map, 0, (end - first) * sizeof *map);
	for (uint32_t i = 0; i < n; i++) {
		const struct view_node *node = view_tree_node(t, nodes[i]);
		const char *component = load_step_component(step, node->item, &first, &end);
		struct view_safetensors s;
		base_cleanup_free void *bytes = NULL;
		int r = view_files_header(step, component, node->file, &bytes, &s, err);

		if (r < 0)
			return r;
		for (uint32_t k = 0; k < s.ntensors; k++) {
			int64_t item = load_step_tensor_find(step, component, s.tensors[k].name,
				s.tensors[k].name_len);

			if (item >= first && item < end && !map[item - first])
				map[item - first] = nodes[i];
		}
		view_safetensors_release(&s);
	}
	return 0;
}
