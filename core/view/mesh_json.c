/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest.json of a mesh: how each tensor is cut, and which are in no rank's file. Like the step's, it is made when it
 * is read. */
#include "core/view/mesh_internal.h"
#include "core/view/view_internal.h"

static void put_mesh(struct base_buf *b, const struct tensor_mesh *mesh)
{
	base_buf_append_text(b, "\"mesh\": [");
	for (uint32_t d = 0; d < mesh->ndim; d++)
		base_buf_printf(b, "%s[\"%s\", %u]", d ? ", " : "", mesh->name[d], mesh->size[d]);
	base_buf_append_text(b, "]");
}

static void put_head(struct view_text *j, const struct tensor_mesh *mesh)
{
	base_buf_append_text(&j->b, "{\n  ");
	put_mesh(&j->b, mesh);
	base_buf_printf(&j->b, ",\n  \"ranks\": %u,\n  \"tensors\": [", mesh->count);
}

/* The dimensions that cut, in the order in which they do, if that is not their order in the mesh. */
static void put_order(struct base_buf *b, const struct view_way *way)
{
	const char *before = ", \"order\": [";

	for (uint32_t i = 0; way->cutting && i < way->cutting->ndim; i++) {
		if (way->cut[i].kind == TENSOR_REPLICATE)
			continue;
		base_buf_printf(b, "%s\"%s\"", before, way->cutting->name[i]);
		before = ", ";
	}
	if (way->cutting)
		base_buf_append_text(b, "]");
}

/* "FILE:LINE"; a path need not be UTF-8. */
static void put_place(struct base_buf *b, const char *file, uint32_t number)
{
	base_buf_append_text(b, "\"");
	for (const char *c = file; *c; c++)
		view_json_text(b, (unsigned char)*c < 0x80 ? c : "?", 1);
	base_buf_printf(b, ":%u\"", number);
}

static const char *left_out_of(const struct load_tensor_info *info, const struct view_way *way)
{
	if (!way->left_out && !view_safetensors_can(info->dtype, &info->shape, info->name, info->name_len))
		return "no .safetensors can hold it";
	return way->left_out;
}

static void put_tensor(struct view_text *j, const struct view_mesh *m, const struct load_tensor_info *info,
	const struct view_way *way)
{
	const struct view_layouts_line *line = view_ways_line(m->ways, way);

	base_buf_printf(&j->b, "    {\"component\": \"%s\", \"name\": ", info->component);
	view_json_shown(&j->b, info->name, info->name_len);
	base_buf_append_text(&j->b, ", \"shape\": ");
	view_json_shape(&j->b, &info->shape);
	base_buf_append_text(&j->b, ", ");
	if (way->own) {
		put_mesh(&j->b, way->own);
		base_buf_append_text(&j->b, ", ");
	}
	base_buf_append_text(&j->b, "\"placements\": \"");
	tensor_placements_print(way->at, way->seen->ndim, &j->b);
	base_buf_append_text(&j->b, way->recorded ? "\"" : "\", \"recorded\": false");
	put_order(&j->b, way);
	if (line) {
		base_buf_append_text(&j->b, ", \"line\": ");
		put_place(&j->b, line->file, line->number);
	}
	base_buf_append_text(&j->b, "}");
}

/* shown: the tensors in ranks' files; else the others. */
static void put_tensors(struct view_text *j, const struct view_mesh *m, const struct load_step *step, bool shown)
{
	const char *before = "\n";

	for (uint32_t i = 0; i < load_step_tensor_count(step); i++) {
		struct load_tensor_info info;
		const struct view_way *way = view_ways_of(m->ways, i);
		const char *why;

		load_step_tensor_info(step, i, &info);
		why = left_out_of(&info, way);
		if (shown == (why != NULL))
			continue;
		base_buf_append_text(&j->b, before);
		before = ",\n";
		if (shown) {
			put_tensor(j, m, &info, way);
		} else {
			base_buf_printf(&j->b, "    {\"component\": \"%s\", \"name\": ", info.component);
			view_json_shown(&j->b, info.name, info.name_len);
			base_buf_printf(&j->b, ", \"reason\": \"%s\"}", why);
		}
		view_text_flush(j);
	}
}

int view_mesh_json(const struct view_mesh *m, const struct load_step *step, struct base_buf *ret_text,
	uint64_t *ret_len)
{
	struct view_text j = {.keep = ret_text != NULL};

	put_head(&j, m->mesh);
	put_tensors(&j, m, step, true);
	base_buf_append_text(&j.b, "\n  ],\n  \"left_out\": [");
	put_tensors(&j, m, step, false);
	base_buf_append_text(&j.b, "\n  ]\n}\n");
	return view_text_end(&j, 0, ret_text, ret_len);
}
