/* SPDX-License-Identifier: Apache-2.0
 *
 * How each tensor is cut under a mesh. Tensors that were saved alike (same mesh and placements of the same layout) are
 * cut alike: each such way is computed once, and a tensor keeps the number of its way. With a layout file there is a
 * way for each of its lines, except those that leave tensors as they were saved, and one for tensors that no line
 * names.
 *
 * If several mesh dimensions cut the same dimension of a tensor, their order matters. It comes from the source of the
 * placements, never from the mesh that is asked for:
 *
 *   that mesh saved the step   Each tensor whose own mesh has the same ranks is cut as it was saved, whatever the
 *                              dimensions of its own mesh.
 *   any other mesh             Dimensions of the same names cut, in the order of the save. If all that cut have the
 *   same sizes as in the save, the placements are the same, too. a line of a layout file    The order of the line.
 *
 * A strided placement means "cut after some of the dimensions behind": its split is the product of their sizes. With
 * other sizes the split no longer is that product, so there it becomes a plain placement at its place in the order. */
#include <string.h>

#include "core/base/table.h"
#include "core/view/mesh_internal.h"
#include "core/view/view_internal.h"

struct view_ways {
	const struct tensor_mesh *mesh;
	const struct view_layouts *layouts;
	struct base_buf ways;           /* struct view_way */
	uint32_t *of_tensor;            /* number of its way */
	struct base_table by_key;       /* while the tensors are looked at */
	struct base_buf homes;          /* struct tensor_mesh *, likewise: saved meshes that have the name asked for */
};

static struct view_way *way_at(const struct view_ways *w, uint32_t i)
{
	return (struct view_way *)w->ways.data + i;
}

/* ---- the order of cutting ---- */

/* The place that the split of `d` gives it in an order of dimensions that are all behind `d` in the mesh: as late as
 * possible; first if it is not strided. -1: there is none. */
static int place_in(const uint32_t *order, uint32_t n, const struct tensor_mesh *mesh,
	const struct tensor_placement *p, uint32_t d)
{
	uint64_t before = 1;
	int found = -1;

	if (p[d].kind != TENSOR_STRIDED_SHARD)
		return 0;
	for (uint32_t i = 0; i <= n; i++) {
		if (before == p[d].split)
			found = (int)i;
		if (i < n && p[order[i]].kind != TENSOR_REPLICATE && p[order[i]].dim == p[d].dim)
			before *= mesh->size[order[i]]; /* of ranks of the mesh: at most 2^24 */
	}
	return found;
}

/* The dimensions of a saved mesh in the order in which they cut, by their splits. Those that cut a tensor's dimension
 * in `kept` keep their places. Returns 0, or the bit of a dimension whose splits fit no order. */
static uint32_t order_find(const struct tensor_mesh *mesh, const struct tensor_placement *p, uint32_t kept,
	uint32_t ret_order[static TENSOR_MAX_DIMS])
{
	for (uint32_t d = mesh->ndim, n = 0; d-- > 0; n++) {
		uint32_t bit = 1u << p[d].dim;
		int at = kept & bit ? 0 : place_in(ret_order, n, mesh, p, d);

		if (at < 0)
			return bit;
		memmove(ret_order + at + 1, ret_order + at, (n - (uint32_t)at) * sizeof *ret_order);
		ret_order[at] = d;
	}
	return 0;
}

static bool cut_alike(const struct tensor_placement *a, const struct tensor_placement *b)
{
	return a->kind != TENSOR_REPLICATE && b->kind != TENSOR_REPLICATE && a->dim == b->dim;
}

/* Does it matter that the dimensions cut in this order instead of the mesh's? */
static bool order_matters(const struct view_way *w)
{
	for (uint32_t i = 0; i < w->seen->ndim; i++)
		for (uint32_t j = i + 1; j < w->seen->ndim; j++)
			if (w->order[i] > w->order[j] && cut_alike(&w->at[w->order[i]], &w->at[w->order[j]]))
				return true;
	return false;
}

/* `at` and the first n of `order` are set. Dimensions that are not in it do not cut. */
static int way_finish(struct view_way *w, uint32_t n)
{
	uint32_t has = 0;
	bool matters;

	for (uint32_t i = 0; i < n; i++)
		has |= 1u << w->order[i];
	for (uint32_t d = 0; d < w->seen->ndim; d++)
		if (!(has & 1u << d))
			w->order[n++] = d;
	matters = !w->left_out && order_matters(w);
	if (w->left_out) /* ragged placements point to memory that will be freed */
		memset(w->at, 0, sizeof w->at);
	for (uint32_t i = 0; i < n; i++) {
		w->order[i] = matters ? w->order[i] : i;
		w->cut[i] = w->at[w->order[i]];
	}
	return matters ? view_mesh_reorder(w->seen, w->order, &w->cutting) : 0;
}

/* ---- ways ---- */

/* As it was saved: the mesh asked for is one that saved the step, and its ranks are those of the tensor's own mesh. */
static int way_of_home(struct view_way *w, const struct tensor_mesh *mesh, const struct tensor_mesh *saved,
	const struct tensor_placement *p)
{
	uint32_t ranked[TENSOR_MAX_DIMS];
	int r;
	bool same;

	view_mesh_rank_order(saved, ranked);
	r = view_mesh_reorder(saved, ranked, &w->own);
	if (r < 0)
		return r;
	for (uint32_t i = 0; i < saved->ndim; i++) {
		w->at[i] = p[ranked[i]];
		w->order[ranked[i]] = i; /* the saved order is 0, 1, 2, ... */
		if (w->at[i].kind == TENSOR_RAGGED_SHARD)
			w->left_out = "its shards have no rectangular shape (RS)";
	}
	same = mesh->ndim == w->own->ndim;
	for (uint32_t i = 0; same && i < mesh->ndim; i++)
		same = mesh->size[i] == w->own->size[i] && strcmp(mesh->name[i], w->own->name[i]) == 0;
	if (same) {
		tensor_mesh_free(w->own);
		w->own = NULL;
	}
	w->seen = same ? mesh : w->own;
	return way_finish(w, saved->ndim);
}

/* By the names of dimensions. */
static int way_of_names(struct view_way *w, const struct tensor_mesh *mesh, const struct tensor_mesh *saved,
	const struct tensor_placement *p)
{
	uint32_t order[TENSOR_MAX_DIMS], kept = UINT32_MAX, bit, n = 0;
	bool same = true;

	for (uint32_t d = 0; d < saved->ndim; d++) {
		int to = tensor_mesh_dim(mesh, saved->name[d]);

		order[d] = d;
		same = same && (p[d].kind == TENSOR_REPLICATE || (to >= 0 && mesh->size[to] == saved->size[d]));
		if (to >= 0 && p[d].kind == TENSOR_RAGGED_SHARD)
			w->left_out = "its shards have no rectangular shape (RS)";
	}
	if (!same && !w->left_out)
		for (kept = 0; (bit = order_find(saved, p, kept, order)) != 0;)
			kept |= bit;
	for (uint32_t i = 0; i < saved->ndim; i++) {
		uint32_t d = order[i];
		int to = tensor_mesh_dim(mesh, saved->name[d]);

		if (to < 0)
			continue;
		w->at[to] = p[d];
		if (p[d].kind == TENSOR_STRIDED_SHARD && !(kept & 1u << p[d].dim))
			w->at[to] = (struct tensor_placement){.kind = TENSOR_SHARD, .dim = p[d].dim};
		w->order[n++] = (uint32_t)to;
	}
	return way_finish(w, n);
}

static int way_of_line(struct view_way *w, const struct tensor_mesh *mesh, const struct view_layouts_line *line)
{
	uint32_t n = 0;

	for (uint32_t i = 0; line && i < line->ncuts; i++) {
		int d = tensor_mesh_dim(mesh, line->cuts[i].dim);

		if (d < 0)
			continue;
		w->at[d] = line->cuts[i].placement;
		w->order[n++] = (uint32_t)d;
	}
	return way_finish(w, n);
}

static bool same_ranks(const struct tensor_mesh *a, const struct tensor_mesh *b)
{
	if (a->count != b->count)
		return false;
	for (uint32_t i = 0; i < a->count; i++)
		if ((a->ranks ? a->ranks[a->order[i]] : i) != (b->ranks ? b->ranks[b->order[i]] : i))
			return false;
	return true;
}

/* Was the step saved under the mesh asked for, by the ranks of the tensor's mesh? */
static bool at_home(const struct view_ways *w, const struct tensor_mesh *saved)
{
	struct tensor_mesh *const *homes = (struct tensor_mesh *const *)w->homes.data;
	uint32_t order[TENSOR_MAX_DIMS];

	for (size_t i = 0; i < w->homes.len / sizeof *homes; i++)
		if (same_ranks(homes[i], saved))
			return view_mesh_rank_order(saved, order);
	return false;
}

static int way_make(const struct view_ways *w, struct view_way *way, uint32_t tensor, struct base_error *err)
{
	struct tensor_placements *p = NULL;
	struct tensor_mesh *saved = NULL;
	int r;

	if (!way->layout || way->mesh == 0 || way->placement == 0) /* by a line, or nothing is recorded */
		return way_of_line(way, w->mesh, view_ways_line(w, way));
	r = store_layout_mesh(way->layout, tensor, &saved, err);
	if (r == 0)
		r = store_layout_placements(way->layout, tensor, &p, err);
	if (r == 0 && p->n != saved->ndim)
		r = base_error_set(err, -BASE_EFORMAT, "a layout has %u placements for a mesh of %u dimensions", p->n,
			saved->ndim);
	else if (r == 0)
		r = (at_home(w, saved) ? way_of_home : way_of_names)(way, w->mesh, saved, p->at);
	way->recorded = r == 0;
	free(p);
	tensor_mesh_free(saved);
	return r == -ENOMEM || r == 0 ? r : -BASE_EFORMAT;
}

static void way_release(struct view_way *way)
{
	tensor_mesh_free(way->own);
	tensor_mesh_free(way->cutting);
}

static int64_t way_find(struct view_ways *w, const struct view_way *key, uint32_t tensor, struct base_error *err)
{
	uint64_t text[3] = {(uintptr_t)key->layout, (uint64_t)key->mesh << 32 | key->placement, (uint64_t)key->line};
	uint32_t hash = base_table_hash(text, sizeof text), i, n = (uint32_t)(w->ways.len / sizeof *key);
	struct view_way way = *key;
	size_t at = 0;
	int r;

	while ((i = base_table_next(&w->by_key, hash, &at)) != BASE_TABLE_NONE) {
		const struct view_way *other = way_at(w, i);

		if (other->layout == key->layout && other->mesh == key->mesh && other->placement == key->placement &&
		    other->line == key->line)
			return i;
	}
	r = way_make(w, &way, tensor, err);
	if (r == 0 && base_table_reserve(&w->by_key, 1) == 0)
		base_buf_append(&w->ways, &way, sizeof way);
	if (w->ways.len / sizeof way == n) {
		way_release(&way);
		return r == -BASE_EFORMAT ? r : base_no_memory(err);
	}
	base_table_add(&w->by_key, hash, n);
	return n;
}

/* The number of a tensor's way. */
static int64_t way_of(struct view_ways *w, const struct load_step *step, uint32_t tensor, struct base_error *err)
{
	struct load_tensor_info info;
	struct view_way key = {.line = -1, .recorded = true, .seen = w->mesh};
	uint32_t number;
	const struct store_layout *l = load_step_layout(step, tensor, &number);

	if (w->layouts) {
		load_step_tensor_info(step, tensor, &info);
		key.line = view_layouts_find(w->layouts, &info);
		if (key.line == -ENOMEM)
			return base_no_memory(err);
		if (key.line < 0)
			key.line = -1;
	}
	if (!w->layouts || (key.line >= 0 && view_layouts_line(w->layouts, (uint32_t)key.line)->saved)) {
		key.layout = l;
		key.mesh = l->m.tensors[number].mesh;
		key.placement = l->m.tensors[number].placement;
		key.recorded = false;
	}
	return way_find(w, &key, number, err);
}

int view_way_shard(const struct view_way *way, const struct tensor_shape *shape, unsigned item_bytes, uint32_t rank,
	const struct tensor_flat *flat, struct tensor_shard *ret_shard, struct base_error *err)
{
	struct tensor_sharding s = {.shape = *shape, .item_bytes = item_bytes, .placement = way->cut,
		.mesh = way->cutting ? way->cutting : way->seen};
	uint32_t at[TENSOR_MAX_DIMS], position = 0;

	if (way->cutting && rank < way->seen->count) {
		tensor_mesh_coordinate(way->seen, rank, at);
		for (uint32_t i = 0; i < way->seen->ndim; i++)
			position = position * way->cutting->size[i] + at[way->order[i]];
		rank = position;
	}
	return tensor_shard_of(&s, rank, flat, ret_shard, err);
}

/* ---- all tensors ---- */

static int add_home(void *arg, struct tensor_mesh *mesh)
{
	struct view_ways *w = arg;
	uint32_t order[TENSOR_MAX_DIMS];
	bool home = mesh->ndim == w->mesh->ndim && mesh->count == w->mesh->count && view_mesh_rank_order(mesh, order);

	for (uint32_t i = 0; home && i < mesh->ndim; i++)
		home = mesh->size[order[i]] == w->mesh->size[i] && strcmp(mesh->name[order[i]], w->mesh->name[i]) == 0;
	for (size_t i = 0; home && i < w->homes.len / sizeof mesh; i++)
		home = !same_ranks(((struct tensor_mesh **)w->homes.data)[i], mesh);
	if (home)
		base_buf_append(&w->homes, &mesh, sizeof mesh);
	if (!home || w->homes.error)
		tensor_mesh_free(mesh);
	return w->homes.error;
}

static int fit(const struct view_ways *w, const struct load_step *step, uint32_t tensor, struct base_error *err)
{
	const struct view_way *way = view_ways_of(w, tensor);
	const struct view_layouts_line *line = view_ways_line(w, way);
	struct load_tensor_info info;
	struct tensor_sharding s;
	int r;

	load_step_tensor_info(step, tensor, &info);
	if (way->left_out)
		return 0;
	s = (struct tensor_sharding){.shape = info.shape, .item_bytes = tensor_dtype_bytes(info.dtype),
		.mesh = way->cutting ? way->cutting : way->seen, .placement = way->cut};
	r = tensor_sharding_check(&s, s.mesh->ndim, err);
	if (r == -ENOMEM || r == 0)
		return r;
	if (line)
		base_error_prefix(err, r, "%.200s:%u", line->file, line->number);
	base_error_prefix(err, r, "tensor %s/%.*s", info.component, store_layout_shown(info.name, info.name_len),
		info.name);
	return -ENOENT;
}

static int find_ways(struct view_ways *w, const struct load_step *step, struct base_error *err)
{
	int64_t r = view_mesh_each(step, add_home, w);

	if (r < 0)
		return base_no_memory(err);
	for (uint32_t i = 0; r >= 0 && i < load_step_tensor_count(step); i++) {
		r = way_of(w, step, i, err);
		if (r < 0)
			break;
		w->of_tensor[i] = (uint32_t)r;
		r = fit(w, step, i, err);
	}
	for (uint32_t i = 0; i < w->ways.len / sizeof(struct view_way); i++)
		way_at(w, i)->layout = NULL; /* the step may be closed */
	return r < 0 ? (int)r : 0;
}

int view_ways_new(const struct load_step *step, const struct view_layouts *layouts, const struct tensor_mesh *mesh,
	struct view_ways **ret_w, struct base_error *err)
{
	struct view_ways *w = calloc(1, sizeof *w);
	int r;

	if (!w)
		return base_no_memory(err);
	w->mesh = mesh;
	w->layouts = layouts;
	w->of_tensor = malloc(load_step_tensor_count(step) * sizeof *w->of_tensor + 1);
	r = w->of_tensor ? find_ways(w, step, err) : base_no_memory(err);
	base_table_release(&w->by_key);
	for (size_t i = 0; i < w->homes.len / sizeof(struct tensor_mesh *); i++)
		tensor_mesh_free(((struct tensor_mesh **)w->homes.data)[i]);
	base_buf_release(&w->homes);
	if (r < 0)
		view_ways_free(w);
	else
		*ret_w = w;
	return r;
}

void view_ways_free(struct view_ways *w)
{
	if (!w)
		return;
	for (uint32_t i = 0; i < w->ways.len / sizeof(struct view_way); i++)
		way_release(way_at(w, i));
	base_buf_release(&w->ways);
	free(w->of_tensor);
	free(w);
}

const struct view_way *view_ways_of(const struct view_ways *w, uint32_t tensor)
{
	return way_at(w, w->of_tensor[tensor]);
}

const struct view_layouts_line *view_ways_line(const struct view_ways *w, const struct view_way *way)
{
	return way->line < 0 ? NULL : view_layouts_line(w->layouts, (uint32_t)way->line);
}
