/* SPDX-License-Identifier: Apache-2.0
 *
 * layout: a layout object: names, dtypes, shapes, grid, which rank holds what (docs/format/layout.md).
 *
 *   tensor, 32 bytes: component u32 | name offset u32 | name length u32 | first dimension u32 | dtype u8 | ndim u8 |
 *   flags u16 | mesh + 1 u32 | placement + 1 u32 | 0 u32
 *
 * Names and dimensions are in the order of the tensors without gaps, so that equal layouts have equal bytes. */
#include "proto/codec_internal.h"

#define LAYOUT_FLAGS_KNOWN 1u
#define LAYOUT_MESHES_MAX 4096u
#define LAYOUT_PLACEMENTS_MAX 65536u
#define LAYOUT_PLACEMENT_MAX (UINT32_C(1) << 20) /* a ragged one has a number for each rank */

/* ---- meshes ---- */

static const struct codec_field mesh_fields[] = {
	CODEC_LIST_AS(TEXTS, Mesh, dim_names, mesh, dim_names, ndims, .max = TENSOR_MAX_DIMS,
		.valid = proto_word_valid),
	CODEC_LIST_AS(ROWS, Mesh, dim_sizes, mesh, dim_sizes, ndims, .row = &proto_u32_row, .paired = true),
	CODEC_LIST(ROWS, Mesh, mesh, ranks, .row = &proto_u32_row, .max = PROTO_WORLD_MAX),
};

static int mesh_check(const void *m)
{
	const struct proto_mesh *mesh = m;
	uint64_t product = 1;

	for (uint32_t i = 0; i < mesh->ndims; i++) {
		for (uint32_t j = 0; j < i; j++)
			if (strcmp(mesh->dim_names[i], mesh->dim_names[j]) == 0)
				return -BASE_EFORMAT;
		product *= mesh->dim_sizes[i];
		if (product == 0 || product > PROTO_WORLD_MAX)
			return -BASE_EFORMAT;
	}
	for (uint32_t i = 0; i < mesh->nranks; i++)
		if (mesh->ranks[i] >= PROTO_WORLD_MAX)
			return -BASE_EFORMAT;
	return mesh->ndims > 0 && product == mesh->nranks ? 0 : -BASE_EFORMAT;
}

static const struct codec_message mesh_message = CODEC_MESSAGE_OF(mesh, struct proto_mesh, mesh_fields,
	.check = mesh_check);

/* ---- tensors ---- */

/* Checked before anything else: what else looks wrong may belong to that version, too. */
static int tensors_unpack(const void *rows, uint32_t n)
{
	const struct proto_layout_tensor *tensors = rows;

	for (uint32_t i = 0; i < n; i++)
		if (tensors[i].dtype >= TENSOR_DTYPE_END || (tensors[i].flags & ~LAYOUT_FLAGS_KNOWN))
			return -BASE_EVERSION; /* the object's digest holds: no damage made it */
	return 0;
}

static const struct codec_row tensor_row = CODEC_ROW_OF(struct proto_layout_tensor, PROTO_TENSOR_ROW_BYTES,
	CODEC_NUMBERS(struct proto_layout_tensor, component), CODEC_NUMBERS(struct proto_layout_tensor, name_offset),
	CODEC_NUMBERS(struct proto_layout_tensor, name_len), CODEC_NUMBERS(struct proto_layout_tensor, first_dim),
	CODEC_NUMBERS(struct proto_layout_tensor, dtype), CODEC_NUMBERS(struct proto_layout_tensor, ndim),
	CODEC_NUMBERS(struct proto_layout_tensor, flags), CODEC_NUMBERS(struct proto_layout_tensor, mesh),
	CODEC_NUMBERS(struct proto_layout_tensor, placement), CODEC_ZEROS(4));

static bool layout_tensor_check(const struct proto_layout *m, const struct proto_layout_tensor *t, uint64_t names_at,
	uint64_t dims_at)
{
	struct tensor_shape shape = {.ndim = t->ndim};
	uint64_t items;

	if (t->component >= m->ncomponents || t->name_offset != names_at || t->first_dim != dims_at)
		return false;
	if (t->name_len == 0 || t->name_len > PROTO_NAME_MAX || t->name_len > m->names_len - names_at)
		return false;
	if (!tensor_dtype_valid(t->dtype) || t->ndim > TENSOR_MAX_DIMS || t->ndim > m->ndims - dims_at ||
		(t->flags & ~LAYOUT_FLAGS_KNOWN))
		return false;
	if (t->mesh > m->nmeshes || t->placement > m->nplacements ||
		!proto_utf8_valid(m->names + names_at, t->name_len))
		return false;
	if (t->ndim)
		memcpy(shape.dim, m->dims + dims_at, t->ndim * sizeof *m->dims);
	return tensor_shape_items(&shape, tensor_dtype_bytes(t->dtype), &items) == 0;
}

static bool layout_sorted(const struct proto_layout *m, const struct proto_layout_tensor *a,
	const struct proto_layout_tensor *b)
{
	if (a->component != b->component)
		return a->component + 1 == b->component;
	return proto_name_compare(m->names + a->name_offset, a->name_len, m->names + b->name_offset, b->name_len) < 0;
}

static bool layout_tensors_check(const struct proto_layout *m)
{
	uint64_t names_at = 0, dims_at = 0;

	if (m->names_len > UINT32_MAX)
		return false;
	for (uint32_t i = 0; i < m->ntensors; i++) {
		if (!layout_tensor_check(m, &m->tensors[i], names_at, dims_at))
			return false;
		if (i ? !layout_sorted(m, &m->tensors[i - 1], &m->tensors[i]) : m->tensors[i].component != 0)
			return false;
		names_at += m->tensors[i].name_len;
		dims_at += m->tensors[i].ndim;
	}
	/* Components go up by one from 0: if the last one is used, all are. */
	if (m->ncomponents != (m->ntensors ? m->tensors[m->ntensors - 1].component + 1 : 0))
		return false;
	return names_at == m->names_len && dims_at == m->ndims;
}

/* ---- the record ---- */

static const struct codec_field layout_fields[] = {
	CODEC_LIST(ROWS, Layout, layout, tensors, .row = &tensor_row, .max = PROTO_LAYOUT_MAX_TENSORS,
		.rows_unpack = tensors_unpack),
	CODEC_FIELD_AS(NUMBER, Layout, min_bytes, layout, grid.min_bytes),
	CODEC_FIELD_AS(NUMBER, Layout, target_bytes, layout, grid.target_bytes),
	CODEC_FIELD_AS(NUMBER, Layout, row_bytes, layout, grid.row_bytes),
	CODEC_LIST(TEXTS, Layout, layout, components, .max = PROTO_COMPONENTS_MAX, .valid = proto_component_valid,
		.sorted = true),
	CODEC_LIST(ROWS, Layout, layout, dims, .row = &proto_u64_row,
		.max = (uint64_t)PROTO_LAYOUT_MAX_TENSORS * TENSOR_MAX_DIMS),
	CODEC_LIST(MESSAGES, Layout, layout, meshes, .max = LAYOUT_MESHES_MAX, .message = &mesh_message),
	CODEC_LIST(TEXTS, Layout, layout, placements, .max = LAYOUT_PLACEMENTS_MAX, .text = {1, LAYOUT_PLACEMENT_MAX}),
	CODEC_FIELD_AS(NUMBER, Layout, small_bytes, layout, grid.small_bytes),
};

static unsigned layout_words(const void *m)
{
	const struct proto_layout *layout = m;

	return layout->grid.small_bytes ? PROTO_GRID_2 : 0;
}

static int layout_pack(const void *m, struct proto_arena *arena, void *message)
{
	const struct proto_layout *layout = m;
	Vckpt__Layout *s = message;

	(void)arena;
	s->names = (ProtobufCBinaryData){layout->names_len, (uint8_t *)(uintptr_t)layout->names};
	return 0;
}

/* Names are not copied: there may be a hundred megabytes of them. */
static int layout_unpack(const void *message, struct proto_arena *arena, void *m)
{
	const Vckpt__Layout *s = message;
	struct proto_layout *layout = m;

	(void)arena;
	layout->names = (const char *)s->names.data;
	layout->names_len = s->names.len;
	return 0;
}

static int layout_check(const void *m)
{
	const struct proto_layout *layout = m;

	return proto_grid_valid(&layout->grid) && layout_tensors_check(layout) ? 0 : -BASE_EFORMAT;
}

static const struct codec_message layout_message = CODEC_MESSAGE_OF(layout, struct proto_layout, layout_fields,
	.words = layout_words, .pack = layout_pack, .unpack = layout_unpack, .check = layout_check);
CODEC_RECORD(layout, struct proto_layout)
