/* SPDX-License-Identifier: Apache-2.0
 *
 * step: manifest and layouts of one commit, kept as they were decoded; parts are read when they are needed
 * (step_parts.c).
 *
 * There may be any number of layouts and parts. The tensors of all layouts are in one table sorted by (component,
 * name); each entry has the number of the layout and of the tensor there. The other layouts that have a tensor (two
 * pipeline stages may share one) are kept beside the table.
 *
 * Ownership: a step owns what it decoded; its strings (pack names, run, attempt, attributes, blob names) live as
 * long as it does. Threads: after load_step_open nothing changes but the reference count, the cache of chunks, and what
 * is published once (step_internal.h). */
#include <stdio.h>
#include <stdlib.h>

#include "core/base/bisect.h"
#include "core/load/open/step_internal.h"
#include "core/storage/spread.h"

#define STEP_CHUNKS_BYTES (UINT64_C(4) << 20) /* decoded chunks of parts that a step keeps, ... */
#define STEP_CHUNKS_EACH (UINT64_C(4) << 10) /* ... or so much of each part: some 20 rows of one piece */

static void step_free(struct load_step *step)
{
	store_chunk_cache_free(step->chunks); /* before the layouts, which its chunks point to */
	load_step_layouts_free(step);
	load_step_parts_free(step);
	free(step->tensors);
	base_buf_release(&step->others);
	free(atomic_load_explicit(&step->packs, memory_order_relaxed));
	free(step->components);
	free(step->run);
	free(step->attempt);
	proto_manifest_release(&step->manifest);
	free(step);
}

BASE_CLEANUP_DEFINE(struct load_step *, load_step_unref)

static uint64_t step_chunks_bytes(const struct load_step *step)
{
	return base_max(STEP_CHUNKS_BYTES, step->manifest.nranks * STEP_CHUNKS_EACH);
}

static int step_open_manifest(struct load_step *step, const struct commit_list_step *entry, struct base_error *err)
{
	const struct proto_manifest *m = &step->manifest;
	int r = store_manifest_get(step->store, step->run, &entry->commit.manifest, &step->manifest, err);

	if (r < 0)
		return r;
	if (m->step != entry->commit.step || strcmp(m->run, step->run) != 0 || strcmp(m->attempt, step->attempt) != 0)
		return base_error_set(err, -BASE_EFORMAT,
			"the manifest is that of %s/%llu, attempt %s, not of attempt %s", m->run,
			(unsigned long long)m->step, m->attempt, step->attempt);
	step->layouts = calloc(m->nlayouts ? m->nlayouts : 1, sizeof *step->layouts);
	step->parts = calloc(m->nranks ? m->nranks : 1, sizeof *step->parts);
	step->chunks = store_chunk_cache_new(step_chunks_bytes(step), m->nranks);
	return step->layouts && step->parts && step->chunks ? 0 : base_no_memory(err);
}

static int step_open_layout(void *arg, uint32_t i, struct base_error *err)
{
	struct load_step *step = arg;
	struct step_layout *l = &step->layouts[i];
	int r = store_open_layout(step->store, &step->manifest, i, &l->layout, err);

	if (r < 0)
		return r;
	l->meshes = calloc((size_t)l->layout->m.nmeshes + 1, sizeof *l->meshes);
	l->placements = calloc((size_t)l->layout->m.nplacements + 1, sizeof *l->placements);
	return l->meshes && l->placements ? 0 : base_no_memory(err);
}

static const struct store_layout *place_layout(const struct load_step *step, const struct load_tensor_place *p)
{
	return step->layouts[p->layout].layout;
}

static int step_name_compare(const struct load_step *step, const struct load_tensor_place *a, const char *component,
	const char *name, size_t len)
{
	uint32_t mine_len;
	int d = strcmp(store_layout_component(place_layout(step, a), a->tensor), component);
	const char *mine = store_layout_name(place_layout(step, a), a->tensor, &mine_len);

	if (d == 0)
		d = memcmp(mine, name, base_min(mine_len, len));
	return d ? d : (mine_len > len) - (mine_len < len);
}

static bool place_held(const struct load_step *step, const struct load_tensor_place *p)
{
	return place_layout(step, p)->m.tensors[p->tensor].mesh != 0;
}

/* Of one tensor a layout that records who holds it comes first: that of a writer of whole tensors (repack) does not. */
static int step_place_compare(const void *a, const void *b, void *arg)
{
	const struct load_step *step = arg;
	const struct load_tensor_place *x = a, *y = b;
	uint32_t len;
	const char *name = store_layout_name(place_layout(step, y), y->tensor, &len);
	int d = step_name_compare(step, x, store_layout_component(place_layout(step, y), y->tensor), name, len);

	if (d == 0)
		d = place_held(step, y) - place_held(step, x);
	return d ? d : (x->layout > y->layout) - (x->layout < y->layout);
}

static bool step_place_same(const struct load_step *step, const struct load_tensor_place *p,
	const struct load_tensor_place *q)
{
	const struct store_layout *x = place_layout(step, p), *y = place_layout(step, q);
	struct tensor_shape a, b;

	store_layout_shape(x, p->tensor, &a);
	store_layout_shape(y, q->tensor, &b);
	return tensor_shape_equal(&a, &b) && store_layout_dtype(x, p->tensor) == store_layout_dtype(y, q->tensor) &&
		tensor_grid_params_equal(&x->m.grid, &y->m.grid);
}

/* A tensor may be in several layouts (a tied embedding in the first and last pipeline stage); then they must agree. */
static int step_merge_tensors(struct load_step *step, struct base_error *err)
{
	uint32_t kept = 0;

	qsort_r(step->tensors, step->ntensors, sizeof *step->tensors, step_place_compare, step);
	for (uint32_t i = 0; i < step->ntensors; i++) {
		const struct load_tensor_place *p = &step->tensors[i], *q = kept ? &step->tensors[kept - 1] : NULL;
		uint32_t len;
		const char *name = store_layout_name(place_layout(step, p), p->tensor, &len);

		if (!q || step_name_compare(step, q, store_layout_component(place_layout(step, p), p->tensor), name,
			len) != 0) {
			step->tensors[kept++] = *p;
			continue;
		}
		if (!step_place_same(step, p, q))
			return base_error_set(err, -BASE_EFORMAT, "two layouts disagree about tensor %.*s",
				(int)base_min(len, 200), name);
		base_buf_append(&step->others, &(struct step_other){kept - 1, *p}, sizeof(struct step_other));
	}
	step->ntensors = kept;
	step->memory += step->others.size;
	return step->others.error ? base_no_memory(err) : 0;
}

static int step_table_tensors(struct load_step *step, struct base_error *err)
{
	uint64_t total = 0;
	uint32_t n = 0;

	for (uint32_t i = 0; i < step->manifest.nlayouts; i++)
		total += step->layouts[i].layout->m.ntensors;
	if (total > UINT32_MAX)
		return base_error_set(err, -BASE_ELIMIT, "more tensors than a step can have");
	step->tensors = calloc(total ? total : 1, sizeof *step->tensors);
	if (!step->tensors)
		return base_no_memory(err);
	for (uint32_t i = 0; i < step->manifest.nlayouts; i++)
		for (uint32_t t = 0; t < step->layouts[i].layout->m.ntensors; t++)
			step->tensors[n++] = (struct load_tensor_place){i, t};
	step->ntensors = n;
	step->memory += total * sizeof *step->tensors;
	return step->manifest.nlayouts > 1 ? step_merge_tensors(step, err) : 0;
}

static int step_table_components(struct load_step *step, struct base_error *err)
{
	struct step_component *last = NULL;
	uint32_t room = 0;

	for (uint32_t i = 0; i < step->manifest.nlayouts; i++)
		room += step->layouts[i].layout->m.ncomponents;
	step->components = calloc(room ? room : 1, sizeof *step->components);
	if (!step->components)
		return base_no_memory(err);
	for (uint32_t i = 0; i < step->ntensors; i++) {
		const struct load_tensor_place *p = &step->tensors[i];
		const char *name = store_layout_component(place_layout(step, p), p->tensor);

		if (!last || strcmp(last->name, name) != 0) {
			last = &step->components[step->ncomponents++];
			*last = (struct step_component){name, i, i};
		}
		last->end = i + 1;
	}
	return 0;
}

static int step_read(struct load_step *step, const struct commit_list_step *entry, struct base_error *err)
{
	int r = step_open_manifest(step, entry, err);

	if (r >= 0)
		r = storage_spread(step->manifest.nlayouts, step_open_layout, step, err);
	if (r >= 0)
		r = step_table_tensors(step, err);
	if (r >= 0)
		r = step_table_components(step, err);
	return r;
}

/* The memory of a step when all parts are read, with as much as fits of their chunks, which are in the packs of the
 * parts. */
static size_t step_bytes(const struct load_step *step)
{
	const struct proto_manifest *m = &step->manifest;
	uint64_t bytes = sizeof *step + m->npacks * (sizeof *m->packs + 64), chunks = 0;

	for (uint32_t i = 0; i < m->nlayouts; i++)
		bytes += 2 * (uint64_t)m->layouts[i].ref.raw_len;
	for (uint32_t i = 0; i < m->nranks; i++) {
		bytes += sizeof(struct store_opened_part) + 2 * (uint64_t)m->ranks[i].part.raw_len +
			m->ranks[i].npacks * sizeof(char *);
		if (m->ranks[i].part.pack < m->npacks && chunks < step_chunks_bytes(step))
			chunks += base_min(m->packs[m->ranks[i].part.pack].size, STEP_CHUNKS_BYTES);
	}
	return bytes + base_min(chunks, step_chunks_bytes(step));
}

/* Files of a step that was removed may be missing: does the list say that it was? If the list cannot be read: no. */
static bool step_removed(const struct load_step *step)
{
	struct commit_list *l;
	bool removed;

	if (commit_list_open_newest(step->store, step->run, &l, NULL) < 0)
		return false;
	removed = commit_list_know_entry(l, step->info.entry, NULL) == 0 &&
		!commit_list_entry_live(l, step->info.entry);
	commit_list_close(l);
	return removed;
}

int load_step_failed(const struct load_step *step, int r, const char *what, struct base_error *err)
{
	unsigned long long number = step->info.step;

	if (r == -ENOENT && step_removed(step))
		return base_error_set(err, -ESTALE, "%s/%llu was removed or replaced while it was read", step->run,
			number);
	return what ? base_error_prefix(err, r, "%s/%llu: %s", step->run, number, what)
		: base_error_prefix(err, r, "%s/%llu", step->run, number);
}

int load_step_open(struct store *s, const char *run, const struct commit_list_step *entry, struct load_step **ret_step,
	struct base_error *err)
{
	base_cleanup(load_step_unref_p) struct load_step *step = calloc(1, sizeof *step);
	int r;

	if (step) {
		atomic_init(&step->refs, 1);
		step->store = s;
		step->run = strdup(run);
		step->attempt = strdup(entry->commit.attempt);
	}
	if (!step || !step->run || !step->attempt)
		return base_no_memory(err);
	step->info = (struct load_step_info){.step = entry->step, .entry = entry->entry};
	r = step_read(step, entry, err);
	if (r < 0)
		return load_step_failed(step, r, NULL, err);
	step->info = (struct load_step_info){.run = step->run, .step = entry->step, .entry = entry->entry,
		.time_ns = entry->commit.time_ns,
		.attempt = step->attempt, .manifest = entry->commit.manifest, .attributes = step->manifest.attributes,
		.nattributes = step->manifest.nattributes, .tensors = step->ntensors,
		.bytes = step->manifest.bytes, .new_bytes = step->manifest.new_bytes};
	step->memory += step_bytes(step);
	*ret_step = base_steal(step);
	return 0;
}

struct load_step *load_step_ref(struct load_step *step)
{
	atomic_fetch_add_explicit(&step->refs, 1, memory_order_relaxed);
	return step;
}

void load_step_unref(struct load_step *step)
{
	if (step && atomic_fetch_sub_explicit(&step->refs, 1, memory_order_acq_rel) == 1)
		step_free(step);
}

int load_step_lacks(const struct load_step *step, const char *what, const char *path, struct base_error *err)
{
	const struct proto_manifest *m = &step->manifest;
	const size_t len = strcspn(path, "/");

	for (uint32_t i = 0; i < m->nthinned; i++)
		if (strncmp(m->thinned[i], path, len) == 0 && !m->thinned[i][len])
			return base_error_set(err, -ENOENT,
				"component '%s' of %s/%llu was thinned: it was dropped from the step after it was "
				"saved (vckpt prune --thin)", m->thinned[i], step->info.run,
				(unsigned long long)step->info.step);
	return base_error_set(err, -ENOENT, "%s/%llu has no %s %.400s", step->info.run,
		(unsigned long long)step->info.step, what, path);
}

const struct load_step_info *load_step_info(const struct load_step *step) { return &step->info; }
const struct proto_manifest *load_step_manifest(const struct load_step *step) { return &step->manifest; }
struct store *load_step_store(const struct load_step *step) { return step->store; }
size_t load_step_memory(const struct load_step *step) { return step->memory; }
uint32_t load_step_tensor_count(const struct load_step *step) { return step->ntensors; }
uint32_t load_step_component_count(const struct load_step *step) { return step->ncomponents; }

const struct store_layout *load_step_layout(const struct load_step *step, uint32_t tensor, uint32_t *ret_index)
{
	*ret_index = step->tensors[tensor].tensor;
	return step->layouts[step->tensors[tensor].layout].layout;
}

const struct store_layout *load_step_layout_more(const struct load_step *step, uint32_t tensor, uint32_t *ret_index)
{
	const struct step_other *others = (const struct step_other *)step->others.data;
	size_t n = step->others.len / sizeof *others, i = base_bisect(k, (size_t)0, n, others[k].number < tensor);

	if (i == n || others[i].number != tensor)
		return NULL;
	*ret_index = others[i].place.tensor;
	return place_layout(step, &others[i].place);
}

void load_step_tensor_info(const struct load_step *step, uint32_t tensor, struct load_tensor_info *ret_info)
{
	uint32_t i;
	const struct store_layout *l = load_step_layout(step, tensor, &i);

	ret_info->component = store_layout_component(l, i);
	ret_info->name = store_layout_name(l, i, &ret_info->name_len);
	ret_info->dtype = store_layout_dtype(l, i);
	store_layout_shape(l, i, &ret_info->shape);
	ret_info->bytes = store_layout_bytes(l, i);
}

const uint64_t *load_step_tensor_dims(const struct load_step *step, uint32_t tensor)
{
	static const uint64_t none;
	uint32_t i;
	const struct store_layout *l = load_step_layout(step, tensor, &i);

	return l->m.tensors[i].ndim ? l->m.dims + l->m.tensors[i].first_dim : &none;
}

int load_step_tensor_failed(const struct load_step *step, uint32_t tensor, int r, struct base_error *err)
{
	struct load_tensor_info info;

	load_step_tensor_info(step, tensor, &info);
	return base_error_prefix(err, r, "%s/%llu: tensor %s/%.*s", step->run, (unsigned long long)step->info.step,
		info.component, (int)base_min(info.name_len, 400), info.name);
}

int64_t load_step_tensor_find(const struct load_step *step, const char *component, const char *name, size_t name_len)
{
	return base_search(i, 0, step->ntensors,
		step_name_compare(step, &step->tensors[i], component, name, name_len));
}

const char *load_step_component(const struct load_step *step, uint32_t component, uint32_t *ret_first,
	uint32_t *ret_end)
{
	const struct step_component *c = &step->components[component];

	*ret_first = c->first;
	*ret_end = c->end;
	return c->name;
}

static uint32_t step_component_tensors(const struct load_step *step, const char *component)
{
	for (uint32_t i = 0; i < step->ncomponents; i++)
		if (strcmp(step->components[i].name, component) == 0)
			return step->components[i].end - step->components[i].first;
	return 0;
}

static uint32_t layout_component_tensors(const struct store_layout *l, const char *component)
{
	uint32_t first, end;

	for (uint32_t i = 0; i < l->m.ncomponents; i++) {
		store_layout_component_range(l, i, &first, &end);
		if (strcmp(l->m.components[i], component) == 0)
			return end - first;
	}
	return 0;
}

const struct proto_view_header *load_step_header_find(const struct load_step *step, const char *component,
	const char *view)
{
	uint32_t tensors = step_component_tensors(step, component);

	for (uint32_t i = 0; i < step->manifest.nheaders; i++) {
		const struct proto_view_header *h = &step->manifest.headers[i];

		if (strcmp(h->component, component) == 0 && strcmp(h->view, view) == 0 &&
			layout_component_tensors(step->layouts[h->layout].layout, component) == tensors)
			return h;
	}
	return NULL;
}

int load_step_header(const struct load_step *step, const char *component, const char *view, uint64_t max,
	void **ret_bytes, size_t *ret_len,
	uint64_t *ret_data_bytes, struct base_error *err)
{
	const struct proto_view_header *h = load_step_header_find(step, component, view);
	int r;

	if (!h)
		return -ENOENT;
	r = store_manifest_object(step->store, &step->manifest, &h->ref, max, ret_bytes, err);
	if (r < 0) {
		char what[300];

		snprintf(what, sizeof what, "%s header of %.200s", view, component);
		return load_step_failed(step, r, what, err);
	}
	*ret_len = h->ref.raw_len;
	*ret_data_bytes = h->data_bytes;
	return 0;
}

int64_t load_step_number_in(const struct load_step *step, uint32_t tensor, uint32_t layout)
{
	const struct load_tensor_place *p = &step->tensors[tensor];
	const struct step_other *others = (const struct step_other *)step->others.data;
	size_t n = step->others.len / sizeof *others;

	if (p->layout == layout)
		return p->tensor;
	for (size_t i = base_bisect(k, 0, n, others[k].number < tensor); i < n && others[i].number == tensor; i++)
		if (others[i].place.layout == layout)
			return others[i].place.tensor;
	return -ENOENT;
}

int load_step_packs(struct load_step *step, const char *const **ret_packs, uint32_t *ret_npacks)
{
	const char **names = atomic_load_explicit(&step->packs, memory_order_acquire), **mine;

	*ret_npacks = step->manifest.npacks;
	if (!names) {
		mine = calloc((size_t)step->manifest.npacks + 1, sizeof *mine);
		if (!mine)
			return -ENOMEM;
		for (uint32_t i = 0; i < step->manifest.npacks; i++)
			mine[i] = step->manifest.packs[i].pack;
		names = step_publish(&step->packs, mine, free);
	}
	*ret_packs = names;
	return 0;
}

uint32_t load_step_pack(const struct load_step *step, uint32_t line, uint32_t pack)
{
	return step->manifest.map[step->manifest.ranks[line].first_map + pack];
}
