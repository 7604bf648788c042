/* SPDX-License-Identifier: Apache-2.0
 *
 * The meshes under which a step was saved, by the names that a directory lists.
 *
 * A save that has to record in which order a tensor was cut gives its mesh with the dimensions in that order, so that
 * the ranks are no longer 0, 1, 2, ... (torch_state.py). The directory lists a mesh with its dimensions in the order in
 * which the ranks ascend: then rank-00001 is rank 1, and one job has one mesh. */
#include <string.h>

#include "core/base/table.h"
#include "core/view/mesh_internal.h"
#include "core/view/view_internal.h"

int view_mesh_text(const struct tensor_mesh *mesh, char **ret_text)
{
	struct base_buf b = BASE_BUF_INIT;

	tensor_mesh_print(mesh, &b);
	*ret_text = base_buf_steal_text(&b);
	return *ret_text ? 0 : -ENOMEM;
}

/* By how much the rank grows in one step along the dimension; 0: it becomes lower. */
static uint32_t rank_step(const struct tensor_mesh *mesh, uint32_t d)
{
	uint32_t next = 1, first = tensor_mesh_rank_at(mesh, 0);
	uint32_t rank;

	for (uint32_t i = d + 1; i < mesh->ndim; i++)
		next *= mesh->size[i];
	rank = tensor_mesh_rank_at(mesh, next);
	return rank > first ? rank - first : 0;
}

static bool ranks_ascend(const struct tensor_mesh *mesh, const uint32_t *order)
{
	uint32_t at[TENSOR_MAX_DIMS] = {0}, rank, last = 0, d;

	for (uint32_t n = 0; n < mesh->count; n++) {
		if (tensor_mesh_rank(mesh, at, &rank) < 0 || (n && rank <= last))
			return false;
		last = rank;
		for (d = mesh->ndim; d-- > 0;) {
			if (++at[order[d]] < mesh->size[order[d]])
				break;
			at[order[d]] = 0;
		}
	}
	return true;
}

bool view_mesh_rank_order(const struct tensor_mesh *mesh, uint32_t ret_order[static TENSOR_MAX_DIMS])
{
	uint32_t step[TENSOR_MAX_DIMS] = {0};

	for (uint32_t d = 0; d < mesh->ndim; d++) {
		ret_order[d] = d;
		step[d] = mesh->size[d] > 1 ? rank_step(mesh, d) : 0;
	}
	for (uint32_t i = 0; i < mesh->ndim; i++)
		for (uint32_t j = i + 1; j < mesh->ndim; j++) {
			uint32_t a = ret_order[i], b = ret_order[j];

			if (mesh->size[a] > 1 && mesh->size[b] > 1 && step[b] > step[a]) {
				ret_order[i] = b;
				ret_order[j] = a;
			}
		}
	return ranks_ascend(mesh, ret_order);
}

int view_mesh_reorder(const struct tensor_mesh *mesh, const uint32_t *order, struct tensor_mesh **ret_mesh)
{
	const char *names[TENSOR_MAX_DIMS];
	uint32_t sizes[TENSOR_MAX_DIMS];

	for (uint32_t i = 0; i < mesh->ndim; i++) {
		names[i] = mesh->name[order[i]];
		sizes[i] = mesh->size[order[i]];
	}
	return tensor_mesh_new(mesh->ndim, names, sizes, NULL, 0, ret_mesh, NULL);
}

struct known { const struct store_layout *layout; uint32_t mesh; };

/* 1: this mesh of the layout is new, and is known from now on; 0: it was known. */
static int learn(struct base_table *table, struct base_buf *all, struct known k)
{
	uint32_t hash = base_table_hash_in((uintptr_t)k.layout, &k.mesh, sizeof k.mesh), i;
	size_t at = 0;

	while ((i = base_table_next(table, hash, &at)) != BASE_TABLE_NONE) {
		const struct known *other = (const struct known *)all->data + i;

		if (other->layout == k.layout && other->mesh == k.mesh)
			return 0;
	}
	base_buf_append(all, &k, sizeof k);
	if (all->error || base_table_reserve(table, 1) < 0)
		return -ENOMEM;
	base_table_add(table, hash, (uint32_t)(all->len / sizeof k - 1));
	return 1;
}

int view_mesh_each(const struct load_step *step, int (*f)(void *arg, struct tensor_mesh *mesh), void *arg)
{
	base_cleanup_buf struct base_buf all = BASE_BUF_INIT;
	struct base_table table = {0};
	struct known last = {0};
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < load_step_tensor_count(step); i++) {
		struct tensor_mesh *mesh = NULL;
		uint32_t number;
		const struct store_layout *l = load_step_layout(step, i, &number);
		struct known k = {l, l->m.tensors[number].mesh};

		if (k.mesh == 0 || (k.layout == last.layout && k.mesh == last.mesh))
			continue;
		last = k;
		r = learn(&table, &all, k);
		if (r == 1)
			r = store_layout_mesh(l, number, &mesh, NULL);
		if (mesh)
			r = f(arg, mesh);
		r = r == -ENOMEM || (mesh && r) ? r : 0;
	}
	base_table_release(&table);
	return r;
}

static int add_name(void *arg, struct tensor_mesh *mesh)
{
	struct base_buf *texts = arg;
	uint32_t order[TENSOR_MAX_DIMS];
	struct tensor_mesh *shown = NULL;
	char *text = NULL;
	int r = 0;

	if (mesh->count <= VIEW_MESH_RANKS_MAX && view_mesh_rank_order(mesh, order))
		r = view_mesh_reorder(mesh, order, &shown);
	if (r == 0 && mesh->count <= VIEW_MESH_RANKS_MAX)
		r = view_mesh_text(shown ? shown : mesh, &text);
	if (text) {
		base_buf_append(texts, &text, sizeof text);
		r = texts->error;
		if (r < 0)
			free(text);
	}
	tensor_mesh_free(shown);
	tensor_mesh_free(mesh);
	return r;
}

static int by_text(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

int view_mesh_names(const struct load_step *step, struct base_buf *ret_names, uint32_t *ret_n)
{
	base_cleanup_buf struct base_buf texts = BASE_BUF_INIT;
	struct base_buf names = BASE_BUF_INIT;

	int r = view_mesh_each(step, add_name, &texts);
	char **text = (char **)texts.data;
	size_t n = texts.len / sizeof *text;
	if (n)
		qsort(text, n, sizeof *text, by_text);
	*ret_n = 0;
	for (size_t i = 0; r == 0 && i < n; i++) {
		if (strlen(text[i]) > 255 || (i && strcmp(text[i - 1], text[i]) == 0))
			continue;
		base_buf_append(&names, text[i], strlen(text[i]) + 1);
		(*ret_n)++;
	}
	for (size_t i = 0; i < n; i++)
		free(text[i]);
	r = r ? r : names.error;
	if (r < 0)
		base_buf_release(&names);
	else
		*ret_names = names;
	return r;
}
