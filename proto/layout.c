/* SPDX-License-Identifier: Apache-2.0
 *
 * layout: a layout object: names, dtypes, shapes, grid, who holds what (docs/format/layout.md).
 *
 *   tensor, 32 bytes: component u32 | name offset u32 | name length u32 | first dimension u32 | dtype u8 | ndim u8 |
 *   flags u16 | mesh + 1 u32 | placement + 1 u32 | 0 u32
 *
 * Names and dimensions lie in the order of the tensors without gaps, so that equal layouts have equal bytes. */
#include "proto/proto_internal.h"

#define LAYOUT_FLAGS_KNOWN 1u
#define LAYOUT_MESHES_MAX 4096u
#define LAYOUT_PLACEMENTS_MAX 65536u
#define LAYOUT_PLACEMENT_MAX (UINT32_C(1) << 20) /* a ragged one has a number for each rank */

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

	if (m->ntensors > PROTO_LAYOUT_MAX_TENSORS || m->names_len > UINT32_MAX)
		return false;
	for (uint32_t i = 0; i < m->ntensors; i++) {
		if (!layout_tensor_check(m, &m->tensors[i], names_at, dims_at))
			return false;
		if (i ? !layout_sorted(m, &m->tensors[i - 1], &m->tensors[i]) : m->tensors[i].component != 0)
			return false;
		names_at += m->tensors[i].name_len;
		dims_at += m->tensors[i].ndim;
	}
	/* Components go up by one from 0, so that the last one used tells that each is. */
	if (m->ncomponents != (m->ntensors ? m->tensors[m->ntensors - 1].component + 1 : 0))
		return false;
	return names_at == m->names_len && dims_at == m->ndims;
}

static bool layout_mesh_check(const struct proto_mesh *mesh)
{
	uint64_t product = 1;

	if (mesh->ndims == 0 || mesh->ndims > TENSOR_MAX_DIMS)
		return false;
	for (uint32_t i = 0; i < mesh->ndims; i++) {
		if (!proto_word_valid(mesh->dim_names[i]) || mesh->dim_sizes[i] == 0)
			return false;
		for (uint32_t j = 0; j < i; j++)
			if (strcmp(mesh->dim_names[i], mesh->dim_names[j]) == 0)
				return false;
		product *= mesh->dim_sizes[i];
		if (product > PROTO_WORLD_MAX)
			return false;
	}
	for (uint32_t i = 0; i < mesh->nranks; i++)
		if (mesh->ranks[i] >= PROTO_WORLD_MAX)
			return false;
	return product == mesh->nranks;
}

static int layout_check(const struct proto_layout *m)
{
	if (!proto_grid_valid(&m->grid) || m->ncomponents > PROTO_COMPONENTS_MAX)
		return -BASE_EFORMAT;
	for (uint32_t i = 0; i < m->ncomponents; i++)
		if (!proto_component_valid(m->components[i]) ||
			(i > 0 && strcmp(m->components[i - 1], m->components[i]) >= 0))
			return -BASE_EFORMAT;
	if (m->nmeshes > LAYOUT_MESHES_MAX || m->nplacements > LAYOUT_PLACEMENTS_MAX)
		return -BASE_EFORMAT;
	for (uint32_t i = 0; i < m->nmeshes; i++)
		if (!layout_mesh_check(&m->meshes[i]))
			return -BASE_EFORMAT;
	for (uint32_t i = 0; i < m->nplacements; i++)
		if (!proto_text_valid(m->placements[i], 1, LAYOUT_PLACEMENT_MAX))
			return -BASE_EFORMAT;
	return layout_tensors_check(m) ? 0 : -BASE_EFORMAT;
}

static void layout_tensor_put(uint8_t row[static PROTO_TENSOR_ROW_BYTES], const struct proto_layout_tensor *t)
{
	base_put32(row, t->component);
	base_put32(row + 4, t->name_offset);
	base_put32(row + 8, t->name_len);
	base_put32(row + 12, t->first_dim);
	row[16] = t->dtype;
	row[17] = t->ndim;
	base_put16(row + 18, t->flags);
	base_put32(row + 20, t->mesh);
	base_put32(row + 24, t->placement);
	base_put32(row + 28, 0);
}

static int layout_u32_field(const uint32_t *table, uint32_t n, struct proto_arena *arena,
	ProtobufCBinaryData *ret_field)
{
	ret_field->len = (size_t)n * 4;
	ret_field->data = proto_arena_array(arena, n, 4);
	if (!ret_field->data)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++)
		base_put32(ret_field->data + 4 * (size_t)i, table[i]);
	return 0;
}

static int layout_meshes_pack(const struct proto_layout *m, struct proto_arena *arena, Vckpt__Layout *s)
{
	Vckpt__Mesh *all = proto_arena_array(arena, m->nmeshes, sizeof *all);
	int r = 0;

	s->meshes = proto_arena_array(arena, m->nmeshes, sizeof *s->meshes);
	if (!all || !s->meshes)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < m->nmeshes && r == 0; i++) {
		const struct proto_mesh *mesh = &m->meshes[i];

		vckpt__mesh__init(&all[i]);
		all[i].n_dim_names = mesh->ndims;
		all[i].dim_names = (char **)mesh->dim_names;
		r = layout_u32_field(mesh->dim_sizes, mesh->ndims, arena, &all[i].dim_sizes);
		if (r == 0)
			r = layout_u32_field(mesh->ranks, mesh->nranks, arena, &all[i].ranks);
		s->meshes[i] = &all[i];
	}
	s->n_meshes = m->nmeshes;
	return r;
}

static int layout_pack(const struct proto_layout *m, struct proto_arena *arena, struct base_buf *b)
{
	size_t rows_bytes = (size_t)m->ntensors * PROTO_TENSOR_ROW_BYTES, dims_bytes = m->ndims * 8;
	base_cleanup_free uint8_t *rows = malloc(rows_bytes + 1), *dims = malloc(dims_bytes + 1);
	Vckpt__Layout s = VCKPT__LAYOUT__INIT;
	int r = layout_meshes_pack(m, arena, &s);

	if (r < 0 || !rows || !dims)
		return r < 0 ? r : -ENOMEM;
	for (uint32_t i = 0; i < m->ntensors; i++)
		layout_tensor_put(rows + (size_t)i * PROTO_TENSOR_ROW_BYTES, &m->tensors[i]);
	for (uint64_t i = 0; i < m->ndims; i++)
		base_put64(dims + 8 * i, m->dims[i]);
	s.version = PROTO_VERSION;
	s.features = proto_words(m->grid.small_bytes ? PROTO_GRID_2 : 0, &s.n_features);
	s.min_bytes = m->grid.min_bytes;
	s.target_bytes = m->grid.target_bytes;
	s.row_bytes = m->grid.row_bytes;
	s.small_bytes = m->grid.small_bytes;
	s.n_components = m->ncomponents;
	s.components = (char **)m->components;
	s.tensors = (ProtobufCBinaryData){rows_bytes, rows};
	s.names = (ProtobufCBinaryData){m->names_len, (uint8_t *)m->names};
	s.dims = (ProtobufCBinaryData){dims_bytes, dims};
	s.n_placements = m->nplacements;
	s.placements = (char **)m->placements;
	return proto_pack(&s, b);
}

int proto_layout_encode(const struct proto_layout *m, struct base_buf *b)
{
	struct proto_arena *arena;
	int r = layout_check(m);

	if (r < 0)
		return r;
	arena = proto_arena_new(UINT64_MAX);
	if (!arena)
		return -ENOMEM;
	r = layout_pack(m, arena, b);
	proto_arena_free(arena);
	return r;
}

static int layout_tensors_get(const Vckpt__Layout *s, struct proto_arena *arena, struct proto_layout *m)
{
	struct proto_layout_tensor *tensors;
	uint32_t n;

	if (!proto_rows(&s->tensors, PROTO_TENSOR_ROW_BYTES, PROTO_LAYOUT_MAX_TENSORS, &n))
		return -BASE_EFORMAT;
	tensors = proto_arena_array(arena, n, sizeof *tensors);
	if (!tensors)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = s->tensors.data + (size_t)i * PROTO_TENSOR_ROW_BYTES;
		struct proto_layout_tensor *t = &tensors[i];

		t->component = base_get32(row);
		t->name_offset = base_get32(row + 4);
		t->name_len = base_get32(row + 8);
		t->first_dim = base_get32(row + 12);
		t->dtype = row[16];
		t->ndim = row[17];
		t->flags = base_get16(row + 18);
		t->mesh = base_get32(row + 20);
		t->placement = base_get32(row + 24);
		if (base_get32(row + 28) != 0)
			return -BASE_EFORMAT;
		if (t->dtype >= TENSOR_DTYPE_END || (t->flags & ~LAYOUT_FLAGS_KNOWN))
			return -BASE_EVERSION; /* the object's digest holds: no damage made it */
	}
	m->tensors = tensors;
	m->ntensors = n;
	return 0;
}

static int layout_dims_get(const Vckpt__Layout *s, struct proto_arena *arena, struct proto_layout *m)
{
	uint64_t *dims;
	uint32_t n;

	if (!proto_rows(&s->dims, 8, (uint64_t)PROTO_LAYOUT_MAX_TENSORS * TENSOR_MAX_DIMS, &n))
		return -BASE_EFORMAT;
	dims = proto_arena_array(arena, n, sizeof *dims);
	if (!dims)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++)
		dims[i] = base_get64(s->dims.data + 8 * (size_t)i);
	m->dims = dims;
	m->ndims = n;
	return 0;
}

static int layout_meshes_get(const Vckpt__Layout *s, struct proto_arena *arena, struct proto_layout *m)
{
	struct proto_mesh *meshes;
	uint32_t n;
	int r = 0;

	if (s->n_meshes > LAYOUT_MESHES_MAX)
		return -BASE_EFORMAT;
	meshes = proto_arena_array(arena, s->n_meshes, sizeof *meshes);
	if (!meshes)
		return proto_no_memory(arena);
	for (size_t i = 0; i < s->n_meshes && r == 0; i++) {
		const Vckpt__Mesh *from = s->meshes[i];

		r = proto_u32_table(&from->dim_sizes, arena, &meshes[i].dim_sizes, &n);
		if (r == 0 && n != from->n_dim_names)
			r = -BASE_EFORMAT;
		if (r == 0)
			r = proto_u32_table(&from->ranks, arena, &meshes[i].ranks, &meshes[i].nranks);
		meshes[i].dim_names = (const char *const *)from->dim_names;
		meshes[i].ndims = n;
	}
	m->meshes = meshes;
	m->nmeshes = (uint32_t)s->n_meshes;
	return r;
}

static int layout_get(const Vckpt__Layout *s, struct proto_arena *arena, struct proto_layout *m)
{
	int r;

	m->grid = (struct tensor_grid_params){s->min_bytes, s->target_bytes, s->row_bytes, s->small_bytes};
	if (s->n_features != (s->small_bytes != 0))
		return -BASE_EFORMAT;
	if (s->n_components > PROTO_COMPONENTS_MAX || s->n_placements > LAYOUT_PLACEMENTS_MAX)
		return -BASE_EFORMAT;
	m->components = (const char *const *)s->components;
	m->ncomponents = (uint32_t)s->n_components;
	m->placements = (const char *const *)s->placements;
	m->nplacements = (uint32_t)s->n_placements;
	m->names = (const char *)s->names.data;
	m->names_len = s->names.len;
	r = layout_tensors_get(s, arena, m);
	if (r == 0)
		r = layout_dims_get(s, arena, m);
	if (r == 0)
		r = layout_meshes_get(s, arena, m);
	return r < 0 ? r : layout_check(m);
}

int proto_layout_decode(const void *body, size_t len, struct proto_layout *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Layout *s;
	int r = proto_unpack(&vckpt__layout__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	r = layout_get(s, arena, ret_m);
	if (r < 0)
		proto_layout_release(ret_m);
	return r;
}

void proto_layout_release(struct proto_layout *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
