/* SPDX-License-Identifier: Apache-2.0
 *
 * A mesh of a step: its name, its ranks, and their files. How each tensor is cut under it: mesh_ways.c. */
#include "core/view/mesh.h"

#include <stdio.h>
#include <string.h>

#include "core/view/mesh_internal.h"
#include "core/view/view_internal.h"

/* ---- names ---- */

static int parse_name(const char *name, struct tensor_mesh **ret_mesh, struct base_error *err)
{
	base_cleanup_free char *text = NULL;
	struct tensor_mesh *mesh = NULL;

	int r = tensor_mesh_parse(name, NULL, 0, &mesh, err);
	if (r < 0 && r != -ENOMEM)
		r = err ? (err->code = -ENOENT) : -ENOENT;
	if (r < 0)
		return r;
	r = view_mesh_text(mesh, &text);
	if (r < 0)
		base_no_memory(err);
	else if (strcmp(text, name) != 0)
		r = base_error_set(err, -ENOENT, "the mesh '%.200s' is shown only as '%.200s'", name, text);
	else if (mesh->count > VIEW_MESH_RANKS_MAX)
		r = base_error_set(err, -ENOENT, "the mesh '%.200s' has %u ranks: at most %u can be shown", name,
			mesh->count, VIEW_MESH_RANKS_MAX);
	if (r < 0)
		tensor_mesh_free(mesh);
	else
		*ret_mesh = mesh;
	return r;
}

void view_mesh_rank_name(uint32_t rank, char name[static VIEW_MESH_RANK_NAME])
{
	snprintf(name, VIEW_MESH_RANK_NAME, "rank-%05u", rank);
}

int view_mesh_rank_parse(const struct view_mesh *m, const char *name, uint32_t *ret_rank, bool *ret_alias)
{
	char canonical[VIEW_MESH_RANK_NAME];
	uint32_t rank = 0;

	if (strncmp(name, "rank-", 5) != 0 || strlen(name) < 6 || strlen(name) > 10)
		return -ENOENT;
	for (const char *s = name + 5; *s; s++) {
		if (*s < '0' || *s > '9')
			return -ENOENT;
		rank = rank * 10 + (uint32_t)(*s - '0');
	}
	if (rank >= m->mesh->count)
		return -ENOENT;
	view_mesh_rank_name(rank, canonical);
	*ret_alias = strcmp(name, canonical) != 0;
	*ret_rank = rank;
	/* the alias has no leading zeros */
	return *ret_alias && name[5] == '0' && name[6] ? -ENOENT : 0;
}

/* ---- the mesh ---- */

int view_mesh_new(const struct load_step *step, const struct view_layouts *layouts, const char *name,
	struct view_mesh **ret_m, struct base_error *err)
{
	struct view_mesh *m = calloc(1, sizeof *m);
	int r;

	if (!m)
		return base_no_memory(err);
	m->refs = 1;
	r = parse_name(name, &m->mesh, err);
	if (r == 0)
		r = view_ways_new(step, layouts, m->mesh, &m->ways, err);
	if (r < 0) {
		view_mesh_unref(m);
		return r;
	}
	*ret_m = m;
	return 0;
}

struct view_mesh *view_mesh_ref(struct view_mesh *m)
{
	atomic_fetch_add(&m->refs, 1);
	return m;
}

void view_mesh_unref(struct view_mesh *m)
{
	if (!m || atomic_fetch_sub(&m->refs, 1) != 1)
		return;
	view_ways_free(m->ways);
	tensor_mesh_free(m->mesh);
	free(m);
}

uint32_t view_mesh_ranks(const struct view_mesh *m) { return m->mesh->count; }

int view_mesh_shard(const struct view_mesh *m, uint32_t tensor, const struct tensor_shape *shape, unsigned item_bytes,
	uint32_t rank, const struct tensor_flat *flat, struct tensor_shard *ret_shard, struct base_error *err)
{
	return view_way_shard(view_ways_of(m->ways, tensor), shape, item_bytes, rank, flat, ret_shard, err);
}

bool view_mesh_info(const struct view_mesh *m, const struct load_step *step, uint32_t tensor, uint32_t rank,
	struct load_tensor_info *ret_info)
{
	struct tensor_shard shard;

	load_step_tensor_info(step, tensor, ret_info);
	if (view_ways_of(m->ways, tensor)->left_out ||
	    view_mesh_shard(m, tensor, &ret_info->shape, tensor_dtype_bytes(ret_info->dtype), rank, NULL, &shard,
		NULL) < 0)
		return false;
	ret_info->shape = shard.local_shape;
	ret_info->bytes = tensor_shard_items(&shard) * tensor_dtype_bytes(ret_info->dtype);
	return true;
}

/* ---- files ---- */

int view_mesh_size(const struct view_mesh *m, const struct load_step *step, uint32_t rank, uint32_t component,
	uint64_t *ret_size)
{
	uint64_t head, data;
	int r;

	if (rank == VIEW_MESH_ALL)
		return view_mesh_json(m, step, NULL, ret_size);
	if (component >= load_step_component_count(step))
		return -ENOENT;
	r = view_safetensors_make_step(step, m, rank, component, NULL, &head, &data);
	if (r == -EFBIG || (r == 0 && (base_add_overflows(head, data, ret_size) || *ret_size > INT64_MAX)))
		return -ENOENT;
	return r;
}

int64_t view_mesh_component(const struct load_step *step, const char *file)
{
	static const char ending[] = ".safetensors";
	size_t n = strlen(file), len = sizeof ending - 1;
	uint32_t first, end;

	if (n <= len || strcmp(file + n - len, ending) != 0)
		return -ENOENT;
	for (uint32_t i = 0; i < load_step_component_count(step); i++) {
		const char *name = load_step_component(step, i, &first, &end);

		if (strlen(name) == n - len && memcmp(name, file, n - len) == 0)
			return i;
	}
	return -ENOENT;
}

static int walk_in(struct view_mesh *m, struct view_tree *t, const char *rank_name, const char *file,
	struct view_file **ret_f, struct base_error *err)
{
	uint32_t rank = VIEW_MESH_ALL;
	int64_t component = 0;
	bool alias;

	if (rank_name) {
		component = view_mesh_component(view_tree_step(t), file);
		if (view_mesh_rank_parse(m, rank_name, &rank, &alias) < 0)
			return base_error_set(err, -ENOENT, "%.200s: the mesh has the ranks rank-00000 to rank-%05u",
				rank_name, m->mesh->count - 1);
	} else if (strcmp(file, "manifest.json") != 0) {
		component = -ENOENT;
	}
	if (component < 0)
		return base_error_set(err, -ENOENT, "'%.200s' is not a file of %s", file,
			rank_name ? "a rank: COMPONENT.safetensors" : "a mesh: manifest.json");
	return view_mesh_open(m, t, rank, (uint32_t)component, ret_f, err);
}

int view_mesh_walk(struct view_tree *t, const struct view_layouts *layouts, const char *path, struct view_file **ret_f,
	struct base_error *err)
{
	base_cleanup_free char *copy = strdup(path);
	char *state = NULL, *word[5] = {NULL};
	struct view_mesh *m = NULL;
	unsigned n = 0;
	int r;

	if (!copy)
		return base_no_memory(err);
	for (char *part = strtok_r(copy, "/", &state); part && n < 5; part = strtok_r(NULL, "/", &state))
		word[n++] = part;
	if (n < 3 || n > 4 || strcmp(word[0], VIEW_MESH_DIRECTORY) != 0)
		return base_error_set(err, -ENOENT, "'%.200s' is not a file under a mesh", path);
	r = view_mesh_new(view_tree_step(t), layouts, word[1], &m, err);
	if (r == 0)
		r = walk_in(m, t, n == 4 ? word[2] : NULL, word[n - 1], ret_f, err);
	view_mesh_unref(m);
	return r;
}
