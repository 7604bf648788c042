/* SPDX-License-Identifier: Apache-2.0
 *
 * How each tensor is cut under a mesh. Tensors that were saved alike (same mesh and placements of the same layout) are
 * cut alike: each such way is worked out once, and a tensor keeps the number of its way. With a layout file, a way is
 * one of its lines, but for lines that leave a tensor as it was saved; and one more for tensors of no line.
 *
 * A strided placement whose split is what the dimensions behind it cut the same tensor dimension into says "cut after
 * these" (FSDP over tensor parallelism). It still says so under another mesh: its split follows the mesh. */
#include "core/view/mesh.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "core/base/table.h"
#include "core/view/view_internal.h"

struct way {
	/* the key: how it was saved, or the line; layout NULL and line -1: no line */
	const struct store_layout *layout; uint32_t mesh, placement;
	int64_t line;
	bool recorded;
	const char *left_out;           /* why; NULL: it is shown */
	struct tensor_placement at[TENSOR_MAX_DIMS];
};

struct view_mesh {
	atomic_uint refs;
	struct tensor_mesh *mesh;
	const struct view_layouts *layouts;
	struct base_buf ways;           /* struct way */
	uint32_t *of_tensor;            /* number of its way */
	uint32_t ntensors;
};

static struct way *way_at(const struct view_mesh *m, uint32_t i)
{
	return (struct way *)m->ways.data + i;
}

/* ---- names ---- */

static int name_text(const struct tensor_mesh *mesh, char **ret_text)
{
	struct base_buf b = BASE_BUF_INIT;

	tensor_mesh_print(mesh, &b);
	*ret_text = base_buf_steal_text(&b);
	return *ret_text ? 0 : -ENOMEM;
}

static int parse_name(const char *name, struct tensor_mesh **ret_mesh, struct base_error *err)
{
	base_cleanup_free char *text = NULL;
	struct tensor_mesh *mesh = NULL;

	int r = tensor_mesh_parse(name, NULL, 0, &mesh, err);
	if (r < 0 && r != -ENOMEM)
		r = err ? (err->code = -ENOENT) : -ENOENT;
	if (r < 0)
		return r;
	r = name_text(mesh, &text);
	if (r < 0)
		base_no_memory(err);
	else if (strcmp(text, name) != 0)
		r = base_error_set(err, -ENOENT, "the mesh '%.200s' is shown as '%.200s' only", name, text);
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
	/* one other spelling, not each number of zeros */
	return *ret_alias && name[5] == '0' && name[6] ? -ENOENT : 0;
}

/* ---- ways ---- */

/* Into how many shares the placements behind dimension `m` cut tensor dimension `dim`. */
static uint64_t cut_behind(const struct tensor_mesh *mesh, const struct tensor_placement *p, uint32_t m, uint32_t dim)
{
	uint64_t n = 1;

	for (uint32_t i = m + 1; i < mesh->ndim; i++)
		if ((p[i].kind == TENSOR_SHARD || p[i].kind == TENSOR_STRIDED_SHARD) && p[i].dim == dim)
			n *= mesh->size[i]; /* of ranks of the mesh: below 2^24 */
	return n;
}

static void way_fill(struct way *w, const struct tensor_mesh *mesh, const struct tensor_mesh *saved,
	const struct tensor_placement *p)
{
	bool follows[TENSOR_MAX_DIMS] = {false};

	for (uint32_t i = 0; i < mesh->ndim; i++) {
		int d = tensor_mesh_dim(saved, mesh->name[i]);

		if (d < 0)
			continue;
		w->at[i] = p[d];
		follows[i] = p[d].kind == TENSOR_STRIDED_SHARD &&
			p[d].split == cut_behind(saved, p, (uint32_t)d, p[d].dim);
		if (p[d].kind == TENSOR_RAGGED_SHARD)
			w->left_out = "its shards have no rectangular shape (RS)";
	}
	for (uint32_t i = 0; i < mesh->ndim; i++)
		if (follows[i])
			w->at[i].split = cut_behind(mesh, w->at, i, w->at[i].dim);
	if (w->left_out) /* what a ragged placement points to goes */
		memset(w->at, 0, sizeof w->at);
}

static void way_of_line(struct way *w, const struct tensor_mesh *mesh, const struct view_layouts_line *line)
{
	for (uint32_t i = 0; i < line->ncuts; i++) {
		int d = tensor_mesh_dim(mesh, line->cuts[i].dim);

		if (d >= 0)
			w->at[d] = line->cuts[i].placement;
	}
}

static int way_make(struct way *w, const struct tensor_mesh *mesh, uint32_t tensor, struct base_error *err)
{
	struct tensor_placements *p = NULL;
	struct tensor_mesh *saved = NULL;

	if (w->mesh == 0 || w->placement == 0)
		return 0; /* not recorded: nothing cuts it */
	int r = store_layout_mesh(w->layout, tensor, &saved, err);
	if (r == 0)
		r = store_layout_placements(w->layout, tensor, &p, err);
	if (r == 0 && p->n != saved->ndim)
		r = base_error_set(err, -BASE_EFORMAT, "a layout has %u placements for a mesh of %u dimensions", p->n,
			saved->ndim);
	else if (r == 0)
		way_fill(w, mesh, saved, p->at);
	w->recorded = r == 0;
	free(p);
	tensor_mesh_free(saved);
	return r == -ENOMEM || r == 0 ? r : -BASE_EFORMAT;
}

static int64_t way_find(struct view_mesh *m, struct base_table *by_key, const struct way *key, uint32_t tensor,
	struct base_error *err)
{
	uint64_t text[3] = {(uintptr_t)key->layout, (uint64_t)key->mesh << 32 | key->placement, (uint64_t)key->line};
	uint32_t hash = base_table_hash(text, sizeof text), i, n = (uint32_t)(m->ways.len / sizeof *key);
	struct way w = *key;
	size_t at = 0;
	int r = 0;

	while ((i = base_table_next(by_key, hash, &at)) != BASE_TABLE_NONE) {
		const struct way *other = way_at(m, i);

		if (other->layout == w.layout && other->mesh == w.mesh && other->placement == w.placement &&
		    other->line == w.line)
			return i;
	}
	if (w.layout)
		r = way_make(&w, m->mesh, tensor, err);
	else if (w.line >= 0)
		way_of_line(&w, m->mesh, view_layouts_line(m->layouts, (uint32_t)w.line));
	if (r < 0)
		return r;
	base_buf_append(&m->ways, &w, sizeof w);
	if (m->ways.error || base_table_reserve(by_key, 1) < 0)
		return base_no_memory(err);
	base_table_add(by_key, hash, n);
	return n;
}

/* The number of a tensor's way. */
static int64_t way_of(struct view_mesh *m, struct base_table *by_key, const struct load_step *step, uint32_t tensor,
	struct base_error *err)
{
	struct load_tensor_info info;
	struct way key = {.line = -1, .recorded = true};
	uint32_t number;
	const struct store_layout *l = load_step_layout(step, tensor, &number);

	if (m->layouts) {
		load_step_tensor_info(step, tensor, &info);
		key.line = view_layouts_find(m->layouts, &info);
		if (key.line == -ENOMEM)
			return base_no_memory(err);
		if (key.line < 0)
			key.line = -1;
	}
	if (!m->layouts || (key.line >= 0 && view_layouts_line(m->layouts, (uint32_t)key.line)->saved)) {
		key.layout = l;
		key.mesh = l->m.tensors[number].mesh;
		key.placement = l->m.tensors[number].placement;
		key.recorded = false;
	}
	return way_find(m, by_key, &key, number, err);
}

/* ---- the mesh ---- */

static struct tensor_sharding sharding_of(const struct view_mesh *m, uint32_t tensor, const struct tensor_shape *shape,
	unsigned item_bytes)
{
	return (struct tensor_sharding){.shape = *shape, .item_bytes = item_bytes, .mesh = m->mesh,
		.placement = way_at(m, m->of_tensor[tensor])->at};
}

static int fit(const struct view_mesh *m, const struct load_step *step, uint32_t tensor, struct base_error *err)
{
	struct load_tensor_info info;

	load_step_tensor_info(step, tensor, &info);
	if (way_at(m, m->of_tensor[tensor])->left_out)
		return 0;
	struct tensor_sharding s = sharding_of(m, tensor, &info.shape, tensor_dtype_bytes(info.dtype));
	int r = tensor_sharding_check(&s, m->mesh->ndim, err);
	if (r == -ENOMEM || r == 0)
		return r;
	struct view_mesh_tensor t;
	view_mesh_tensor(m, tensor, &t);
	if (t.line)
		base_error_prefix(err, r, "%.200s:%u", t.line->file, t.line->number);
	base_error_prefix(err, r, "tensor %s/%.*s", info.component, store_layout_shown(info.name, info.name_len),
		info.name);
	return -ENOENT;
}

static int find_ways(struct view_mesh *m, const struct load_step *step, struct base_error *err)
{
	struct base_table by_key = {0};
	int64_t r = 0;

	for (uint32_t i = 0; r >= 0 && i < m->ntensors; i++) {
		r = way_of(m, &by_key, step, i, err);
		if (r < 0)
			break;
		m->of_tensor[i] = (uint32_t)r;
		r = fit(m, step, i, err);
	}
	base_table_release(&by_key);
	for (uint32_t i = 0; i < m->ways.len / sizeof(struct way); i++)
		way_at(m, i)->layout = NULL; /* the step may be closed */
	return r < 0 ? (int)r : 0;
}

int view_mesh_new(const struct load_step *step, const struct view_layouts *layouts, const char *name,
	struct view_mesh **ret_m, struct base_error *err)
{
	struct view_mesh *m = calloc(1, sizeof *m);

	if (!m)
		return base_no_memory(err);
	m->refs = 1;
	m->layouts = layouts;
	m->ntensors = load_step_tensor_count(step);
	m->of_tensor = malloc(m->ntensors * sizeof *m->of_tensor + 1);
	int r = m->of_tensor ? parse_name(name, &m->mesh, err) : base_no_memory(err);
	if (r == 0)
		r = find_ways(m, step, err);
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
	tensor_mesh_free(m->mesh);
	base_buf_release(&m->ways);
	free(m->of_tensor);
	free(m);
}

uint32_t view_mesh_ranks(const struct view_mesh *m) { return m->mesh->count; }
const struct tensor_mesh *view_mesh_dims(const struct view_mesh *m) { return m->mesh; }

void view_mesh_tensor(const struct view_mesh *m, uint32_t tensor, struct view_mesh_tensor *ret_t)
{
	const struct way *w = way_at(m, m->of_tensor[tensor]);

	*ret_t = (struct view_mesh_tensor){w->at, w->left_out, w->recorded,
		w->line < 0 ? NULL : view_layouts_line(m->layouts, (uint32_t)w->line)};
}

int view_mesh_shard(const struct view_mesh *m, uint32_t tensor, const struct tensor_shape *shape, unsigned item_bytes,
	uint32_t rank, const struct tensor_flat *flat, struct tensor_shard *ret_shard, struct base_error *err)
{
	struct tensor_sharding s = sharding_of(m, tensor, shape, item_bytes);

	return tensor_shard_of(&s, rank, flat, ret_shard, err);
}

bool view_mesh_info(const struct view_mesh *m, const struct load_step *step, uint32_t tensor, uint32_t rank,
	struct load_tensor_info *ret_info)
{
	struct tensor_shard shard;

	load_step_tensor_info(step, tensor, ret_info);
	if (way_at(m, m->of_tensor[tensor])->left_out ||
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

	if (rank == VIEW_MESH_ALL)
		return view_mesh_json(m, step, NULL, ret_size);
	if (component >= load_step_component_count(step))
		return -ENOENT;
	int r = view_safetensors_make_step(step, m, rank, component, NULL, &head, &data);
	if (r == -EFBIG || (r == 0 && (base_add_overflows(head, data, ret_size) || *ret_size > INT64_MAX)))
		return -ENOENT;
	return r;
}

/* The component of "<component>.safetensors", or -ENOENT. */
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
		return base_error_set(err, -ENOENT, "'%.200s' is no file of %s", file,
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

	if (!copy)
		return base_no_memory(err);
	for (char *part = strtok_r(copy, "/", &state); part && n < 5; part = strtok_r(NULL, "/", &state))
		word[n++] = part;
	if (n < 3 || n > 4 || strcmp(word[0], VIEW_MESH_DIRECTORY) != 0)
		return base_error_set(err, -ENOENT, "'%.200s' is no file under a mesh", path);
	int r = view_mesh_new(view_tree_step(t), layouts, word[1], &m, err);
	if (r == 0)
		r = walk_in(m, t, n == 4 ? word[2] : NULL, word[n - 1], ret_f, err);
	view_mesh_unref(m);
	return r;
}

static int by_text(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void free_texts(char **text, size_t n)
{
	for (size_t i = 0; i < n; i++)
		free(text[i]);
	free(text);
}

/* One text for each mesh of each layout, as often as a tensor's mesh is another than that of the tensor before. */
static int collect_names(const struct load_step *step, char ***ret_text, size_t *ret_n)
{
	const struct store_layout *last = NULL;
	base_cleanup_buf struct base_buf texts = BASE_BUF_INIT;
	uint32_t last_mesh = 0;
	size_t n = 0;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < load_step_tensor_count(step); i++) {
		uint32_t number;
		const struct store_layout *l = load_step_layout(step, i, &number);
		struct tensor_mesh *mesh = NULL;
		char *text = NULL;

		if (l->m.tensors[number].mesh == 0 || (l == last && l->m.tensors[number].mesh == last_mesh))
			continue;
		last = l;
		last_mesh = l->m.tensors[number].mesh;
		r = store_layout_mesh(l, number, &mesh, NULL);
		if (r == 0 && mesh->count <= VIEW_MESH_RANKS_MAX)
			r = name_text(mesh, &text);
		if (text) {
			base_buf_append(&texts, &text, sizeof text);
			if (texts.error)
				free(text);
			n += !texts.error;
		}
		tensor_mesh_free(mesh);
		r = r == -ENOMEM || texts.error ? -ENOMEM : 0; /* a broken one is not listed */
	}
	*ret_n = n;
	*ret_text = (char **)base_steal(texts.data);
	return r;
}

int view_mesh_names(const struct load_step *step, struct base_buf *ret_names, uint32_t *ret_n)
{
	struct base_buf names = BASE_BUF_INIT;
	char **text;
	size_t n;

	int r = collect_names(step, &text, &n);
	if (n)
		qsort(text, n, sizeof *text, by_text);
	*ret_n = 0;
	for (size_t i = 0; r == 0 && i < n; i++) {
		if (strlen(text[i]) > 255 || (i && strcmp(text[i - 1], text[i]) == 0))
			continue;
		base_buf_append(&names, text[i], strlen(text[i]) + 1);
		(*ret_n)++;
	}
	free_texts(text, n);
	r = r ? r : names.error;
	if (r < 0)
		base_buf_release(&names);
	else
		*ret_names = names;
	return r;
}
