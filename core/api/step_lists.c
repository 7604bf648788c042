/* SPDX-License-Identifier: Apache-2.0
 *
 * step_lists: what is in an open step, component by component. */
#include <string.h>

#include "core/api/api_internal.h"

uint32_t vckpt_step_component_count(const struct vckpt_step *step)
{
	return load_step_component_count(step->step);
}

int vckpt_step_component(const struct vckpt_step *step, uint32_t component, struct vckpt_component_info *ret_info)
{
	struct load_tensor_info t;
	uint32_t first, end;

	if (component >= load_step_component_count(step->step))
		return -ENOENT;
	*ret_info = (struct vckpt_component_info){0};
	ret_info->name = load_step_component(step->step, component, &first, &end);
	ret_info->first = first;
	ret_info->count = end - first;
	for (; first < end; first++) {
		load_step_tensor_info(step->step, first, &t);
		ret_info->bytes += t.bytes;
	}
	return 0;
}

const char *vckpt_step_thinned(const struct vckpt_step *step, uint32_t number)
{
	const struct proto_manifest *m = load_step_manifest(step->step);

	return number < m->nthinned ? m->thinned[number] : NULL;
}

int64_t vckpt_step_next_blob(struct vckpt_step *step, const char *component, uint32_t from, struct vckpt_error *err)
{
	size_t len = component ? strlen(component) : 0;
	struct base_error *e = api_error(err);
	struct load_blob_info b;
	int r = api_step_alive(step, e);

	if (r == 0)
		r = load_step_blobs(step->step, e);
	if (r < 0)
		return api_result(r, e);
	for (uint32_t n = load_step_blob_count(step->step); from < n; from++) {
		load_step_blob_info(step->step, from, &b);
		if (!component || (strncmp(b.name, component, len) == 0 && b.name[len] == '/'))
			return from;
	}
	return api_result(base_error_set(e, -ENOENT, "there is no further blob"), e);
}
