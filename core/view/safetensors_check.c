/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks a stored header against its layout. Readers check only what they show; this checks all of it, for vckpt
 * verify. */
#include "core/view/view_internal.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/plural.h"

static int64_t component_find(const struct store_layout *l, const char *component)
{
	for (uint32_t i = 0; i < l->m.ncomponents; i++)
		if (strcmp(l->m.components[i], component) == 0)
			return i;
	return -ENOENT;
}

static int check_tensor(const struct store_layout *l, const char *component, const struct view_safetensors_tensor *t,
	struct base_error *err)
{
	int64_t number = store_layout_find(l, component, t->name, t->name_len);
	int shown = store_layout_shown(t->name, t->name_len);
	struct tensor_shape shape;

	if (number < 0)
		return base_error_set(err, -BASE_EFORMAT,
			"the header of %s.safetensors names tensor '%.*s', which the layout does not have", component,
			shown, t->name);
	store_layout_shape(l, (uint32_t)number, &shape);
	if (store_layout_dtype(l, (uint32_t)number) != t->dtype)
		return base_error_set(err, -BASE_EFORMAT,
			"the header of %s.safetensors says that tensor '%.*s' is %s, the layout %s", component, shown,
			t->name, tensor_dtype_name(t->dtype),
			tensor_dtype_name(store_layout_dtype(l, (uint32_t)number)));
	if (!tensor_shape_equal(&shape, &t->shape))
		return base_error_set(err, -BASE_EFORMAT,
			"the header of %s.safetensors gives tensor '%.*s' another shape than the layout", component,
			shown, t->name);
	return 0;
}

/* No name occurs twice in a header or in a layout. So if each name of the header was found, and both have the same
 * number of names, they have the same names. */
static int check_all(const struct store_layout *l, uint32_t component, const struct view_safetensors *s, bool some,
	struct base_error *err)
{
	const char *name = l->m.components[component];
	uint32_t first, end, n = 0;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < s->ntensors; i++)
		r = check_tensor(l, name, &s->tensors[i], err);
	store_layout_component_range(l, component, &first, &end);
	for (uint32_t i = first; i < end; i++) {
		struct tensor_shape shape;
		uint32_t len;
		const char *tensor = store_layout_name(l, i, &len);

		store_layout_shape(l, i, &shape);
		n += view_safetensors_can(store_layout_dtype(l, i), &shape, tensor, len);
	}
	if (r == 0 && n != s->ntensors && !some)
		r = base_error_set(err, -BASE_EFORMAT,
			"the header of %s.safetensors names %u %s, and %u of the layout %s there", name,
			s->ntensors, base_plural(s->ntensors, "tensor", "tensors"), n,
			base_plural(n, "belongs", "belong"));
	return r;
}

static bool is_one_file(const char *view)
{
	char text[VIEW_FILES_VIEW_BYTES];
	unsigned file;

	return sscanf(view, VIEW_FILE_VIEW, &file) == 1 && strcmp(view_files_view(file + 1, text), view) == 0;
}

bool view_header_known(const char *view)
{
	return strcmp(view, VIEW_SAFETENSORS_VIEW) == 0 || strcmp(view, VIEW_FILES_VIEW) == 0 || is_one_file(view);
}

int view_header_check(const struct store_layout *l, const char *component, const char *view, const void *header,
	size_t len, uint64_t data_bytes, struct base_error *err)
{
	int64_t number = component_find(l, component);
	struct view_safetensors s;
	uint64_t size;
	int r;

	if (!view_header_known(view))
		return 0;
	if (number < 0)
		return base_error_set(err, -BASE_EFORMAT,
			"it has a header of %s.safetensors, and the layout has no such component", component);
	if (strcmp(view, VIEW_FILES_VIEW) == 0)
		return view_files_count(header, len) ? 0 : base_error_set(err, -BASE_EFORMAT,
			"the paths of the files of component %s are not valid", component);
	if (base_add_overflows(len, data_bytes, &size))
		return base_error_set(err, -BASE_EFORMAT,
			"it says %" PRIu64 " bytes behind the header of %s.safetensors", data_bytes, component);
	r = view_safetensors_parse(header, len, size, &s, err);
	if (r < 0)
		return base_error_prefix(err, r, "the header of %s.safetensors", component);
	if (s.data_offset != len)
		r = base_error_set(err, -BASE_EFORMAT,
			"the header of %s.safetensors is followed by other bytes than spaces", component);
	if (r == 0)
		r = check_all(l, (uint32_t)number, &s, strcmp(view, VIEW_SAFETENSORS_VIEW) != 0, err);
	view_safetensors_release(&s);
	return r;
}
