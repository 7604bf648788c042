/* SPDX-License-Identifier: Apache-2.0
 *
 * step: manifest, layouts and part heads of one commit, kept as they were decoded.
 *
 * Everything here is general in the number of layouts and parts: tensors of all layouts stand in one table sorted by
 * (component, name), each naming its layout and its number there; where else a tensor stands (the layouts of two
 * pipeline stages may share one) is kept beside the table. A tensor's rows are looked for in the parts
 * whose layout has it and whose chunks may, several at once; what is found does not depend on the order of answers.
 *
 * Ownership: a step owns what it decoded; its strings (pack names, run, attempt, attributes, blob names) live as
 * long as it does. Threads: nothing changes after load_step_open but the reference count and the cache of chunks. */
#include <stdatomic.h>
#include <stdlib.h>

#include "core/base/bisect.h"
#include "core/load/load_internal.h"
#include "core/step/manifest.h"
#include "core/step/open.h"
#include "core/storage/spread.h"

#define STEP_CHUNKS_BYTES (UINT64_C(4) << 20) /* decoded chunks of parts that a step keeps */
#define STEP_ASKED_MAX 512u     /* parts asked at once before one is known to have a piece of the tensor */

struct step_blob { uint32_t line, blob; }; /* rank line of the manifest, blob of its part */

struct step_component { const char *name; uint32_t first, end; };

struct step_other { uint32_t number; struct load_tensor_place place; }; /* a tensor's place in a further layout */

struct load_step {
	atomic_uint refs;
	struct store *store;
	struct load_step_info info;
	char *run, *attempt;
	struct proto_manifest manifest;
	struct store_layout **layouts;
	struct store_opened_part *ranks;
	struct load_tensor_place *tensors; uint32_t ntensors;
	struct base_buf others;          /* struct step_other, ascending */
	_Atomic(const char **) packs;    /* names by number in the manifest, made when first asked for */
	struct step_component *components; uint32_t ncomponents;
	struct step_blob *blobs; uint32_t nblobs;
	struct store_chunk_cache *chunks; /* has a lock of its own */
	size_t memory;
};

static void step_free(struct load_step *step)
{
	store_chunk_cache_free(step->chunks); /* before the layouts, which its chunks point to */
	for (uint32_t i = 0; step->layouts && i < step->manifest.nlayouts; i++)
		store_layout_free(step->layouts[i]);
	for (uint32_t i = 0; step->ranks && i < step->manifest.nranks; i++)
		store_opened_part_release(&step->ranks[i]);
	free(step->layouts);
	free(step->ranks);
	free(step->tensors);
	base_buf_release(&step->others);
	free(atomic_load_explicit(&step->packs, memory_order_relaxed));
	free(step->components);
	free(step->blobs);
	free(step->run);
	free(step->attempt);
	proto_manifest_release(&step->manifest);
	free(step);
}

BASE_CLEANUP_DEFINE(struct load_step *, load_step_unref)

static int step_open_manifest(struct load_step *step, const struct store_list_step *entry, struct base_error *err)
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
	step->ranks = calloc(m->nranks ? m->nranks : 1, sizeof *step->ranks);
	return step->layouts && step->ranks ? 0 : base_no_memory(err);
}

static int step_open_layout(struct load_step *step, uint32_t i, struct base_error *err)
{
	step->memory += 2 * step->manifest.layouts[i].ref.raw_len;
	return store_open_layout(step->store, &step->manifest, i, &step->layouts[i], err);
}

static int step_open_part(void *arg, uint32_t line, struct base_error *err)
{
	struct load_step *step = arg;

	return store_open_part(step->store, &step->manifest, line, &step->ranks[line], err);
}

static int step_name_compare(const struct load_step *step, const struct load_tensor_place *a, const char *component,
	const char *name, size_t len)
{
	uint32_t mine_len;
	int d = strcmp(store_layout_component(step->layouts[a->layout], a->tensor), component);
	const char *mine = store_layout_name(step->layouts[a->layout], a->tensor, &mine_len);

	if (d == 0)
		d = memcmp(mine, name, base_min(mine_len, len));
	return d ? d : (mine_len > len) - (mine_len < len);
}

static int step_place_compare(const void *a, const void *b, void *arg)
{
	const struct load_step *step = arg;
	const struct load_tensor_place *x = a, *y = b;
	uint32_t len;
	const char *name = store_layout_name(step->layouts[y->layout], y->tensor, &len);
	int d = step_name_compare(step, x, store_layout_component(step->layouts[y->layout], y->tensor), name, len);

	return d ? d : (x->layout > y->layout) - (x->layout < y->layout);
}

static bool step_place_same(const struct load_step *step, const struct load_tensor_place *p,
	const struct load_tensor_place *q)
{
	const struct store_layout *x = step->layouts[p->layout], *y = step->layouts[q->layout];
	struct tensor_shape a, b;

	store_layout_shape(x, p->tensor, &a);
	store_layout_shape(y, q->tensor, &b);
	return tensor_shape_equal(&a, &b) && store_layout_dtype(x, p->tensor) == store_layout_dtype(y, q->tensor) &&
		x->m.min_bytes == y->m.min_bytes && x->m.target_bytes == y->m.target_bytes &&
		x->m.row_bytes == y->m.row_bytes;
}

/* A tensor may stand in several layouts (a tied embedding in the first and last pipeline stage); then they must
 * agree. */
static int step_merge_tensors(struct load_step *step, struct base_error *err)
{
	uint32_t kept = 0;

	qsort_r(step->tensors, step->ntensors, sizeof *step->tensors, step_place_compare, step);
	for (uint32_t i = 0; i < step->ntensors; i++) {
		const struct load_tensor_place *p = &step->tensors[i], *q = kept ? &step->tensors[kept - 1] : NULL;
		uint32_t len;
		const char *name = store_layout_name(step->layouts[p->layout], p->tensor, &len);

		if (!q || step_name_compare(step, q, store_layout_component(step->layouts[p->layout], p->tensor), name,
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
		total += step->layouts[i]->m.ntensors;
	if (total > UINT32_MAX)
		return base_error_set(err, -BASE_ELIMIT, "more tensors than a step can have");
	step->tensors = calloc(total ? total : 1, sizeof *step->tensors);
	if (!step->tensors)
		return base_no_memory(err);
	for (uint32_t i = 0; i < step->manifest.nlayouts; i++)
		for (uint32_t t = 0; t < step->layouts[i]->m.ntensors; t++)
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
		room += step->layouts[i]->m.ncomponents;
	step->components = calloc(room ? room : 1, sizeof *step->components);
	if (!step->components)
		return base_no_memory(err);
	for (uint32_t i = 0; i < step->ntensors; i++) {
		const struct load_tensor_place *p = &step->tensors[i];
		const char *name = store_layout_component(step->layouts[p->layout], p->tensor);

		if (!last || strcmp(last->name, name) != 0) {
			last = &step->components[step->ncomponents++];
			*last = (struct step_component){name, i, i};
		}
		last->end = i + 1;
	}
	return 0;
}

static int step_blob_compare(const void *a, const void *b, void *arg)
{
	const struct load_step *step = arg;
	const struct step_blob *x = a, *y = b;
	const struct proto_blob *p = &step->ranks[x->line].part.blobs[x->blob],
		*q = &step->ranks[y->line].part.blobs[y->blob];
	int d = (int)p->per_rank - (int)q->per_rank;

	if (d == 0 && p->per_rank)
		d = (x->line > y->line) - (x->line < y->line);
	if (d == 0)
		d = strcmp(p->name, q->name);
	return d ? d : (x->line > y->line) - (x->line < y->line);
}

/* Global blobs by name (the lowest rank's, where several have it), then each rank's own. */
static int step_table_blobs(struct load_step *step, struct base_error *err)
{
	uint64_t total = 0;
	uint32_t kept = 0;

	for (uint32_t i = 0; i < step->manifest.nranks; i++)
		total += step->ranks[i].part.nblobs;
	step->blobs = total <= UINT32_MAX ? calloc(total ? total : 1, sizeof *step->blobs) : NULL;
	if (!step->blobs)
		return base_no_memory(err);
	for (uint32_t i = 0; i < step->manifest.nranks; i++)
		for (uint32_t b = 0; b < step->ranks[i].part.nblobs; b++)
			step->blobs[step->nblobs++] = (struct step_blob){i, b};
	qsort_r(step->blobs, step->nblobs, sizeof *step->blobs, step_blob_compare, step);
	for (uint32_t i = 0; i < step->nblobs; i++) {
		const struct step_blob *b = &step->blobs[i], *before = kept ? &step->blobs[kept - 1] : NULL;
		const struct proto_blob *p = &step->ranks[b->line].part.blobs[b->blob];
		const struct proto_blob *q = before ? &step->ranks[before->line].part.blobs[before->blob] : NULL;

		if (!q || p->per_rank || q->per_rank || strcmp(p->name, q->name) != 0)
			step->blobs[kept++] = *b;
	}
	step->nblobs = kept;
	step->memory += total * sizeof *step->blobs;
	return 0;
}

static int step_read(struct load_step *step, const struct store_list_step *entry, struct base_error *err)
{
	int r = step_open_manifest(step, entry, err);

	for (uint32_t i = 0; r >= 0 && i < step->manifest.nlayouts; i++)
		r = step_open_layout(step, i, err);
	if (r >= 0)
		r = store_spread(step->manifest.nranks, step_open_part, step, err);
	for (uint32_t i = 0; r >= 0 && i < step->manifest.nranks; i++)
		step->memory += 2 * step->manifest.ranks[i].part.raw_len +
			step->manifest.ranks[i].npacks * sizeof *step->ranks[i].packs;
	if (r >= 0)
		r = step_table_tensors(step, err);
	if (r >= 0)
		r = step_table_components(step, err);
	if (r >= 0)
		r = step_table_blobs(step, err);
	return r;
}

/* What the cache of chunks may come to hold. */
static size_t step_chunk_bytes(const struct load_step *step)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < step->manifest.nranks && bytes < STEP_CHUNKS_BYTES; i++)
		for (uint32_t k = 0; k < step->ranks[i].part.nchunks && bytes < STEP_CHUNKS_BYTES; k++)
			bytes += base_min(step->ranks[i].part.chunks[k].ref.raw_len, STEP_CHUNKS_BYTES);
	return base_min(bytes, STEP_CHUNKS_BYTES);
}

int load_step_open(struct store *s, const char *run, const struct store_list_step *entry, struct load_step **ret_step,
	struct base_error *err)
{
	base_cleanup(load_step_unref_p) struct load_step *step = calloc(1, sizeof *step);
	int r;

	if (step) {
		atomic_init(&step->refs, 1);
		step->store = s;
		step->run = strdup(run);
		step->attempt = strdup(entry->commit.attempt);
		step->chunks = store_chunk_cache_new(STEP_CHUNKS_BYTES);
	}
	if (!step || !step->run || !step->attempt || !step->chunks)
		return base_no_memory(err);
	r = step_read(step, entry, err);
	if (r < 0)
		return base_error_prefix(err, r, "%s/%llu", run, (unsigned long long)entry->step);
	step->info = (struct load_step_info){.run = step->run, .step = entry->step, .entry = entry->entry,
		.time_ns = entry->commit.time_ns,
		.attempt = step->attempt, .manifest = entry->commit.manifest, .attributes = step->manifest.attributes,
		.nattributes = step->manifest.nattributes, .tensors = step->ntensors, .blobs = step->nblobs,
		.bytes = step->manifest.bytes, .new_bytes = step->manifest.new_bytes};
	step->memory += sizeof *step + step_chunk_bytes(step) +
		step->manifest.npacks * (sizeof *step->manifest.packs + 64);
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

const struct load_step_info *load_step_info(const struct load_step *step) { return &step->info; }
const struct proto_manifest *load_step_manifest(const struct load_step *step) { return &step->manifest; }
struct store *load_step_store(const struct load_step *step) { return step->store; }
size_t load_step_memory(const struct load_step *step) { return step->memory; }
uint32_t load_step_tensor_count(const struct load_step *step) { return step->ntensors; }
uint32_t load_step_component_count(const struct load_step *step) { return step->ncomponents; }
uint32_t load_step_blob_count(const struct load_step *step) { return step->nblobs; }

const struct store_layout *load_step_layout(const struct load_step *step, uint32_t tensor, uint32_t *ret_index)
{
	*ret_index = step->tensors[tensor].tensor;
	return step->layouts[step->tensors[tensor].layout];
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

void load_step_blob_info(const struct load_step *step, uint32_t blob, struct load_blob_info *ret_info)
{
	const struct step_blob *b = &step->blobs[blob];
	const struct proto_blob *p = &step->ranks[b->line].part.blobs[b->blob];

	*ret_info = (struct load_blob_info){.name = p->name, .per_rank = p->per_rank,
		.rank = step->manifest.ranks[b->line].rank,
		.bytes = p->len, .digest = p->ref.digest};
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
			layout_component_tensors(step->layouts[h->layout], component) == tensors)
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
	if (r < 0)
		return base_error_prefix(err, r, "%s/%llu: %s header of %s", step->run,
			(unsigned long long)step->info.step, view, component);
	*ret_len = h->ref.raw_len;
	*ret_data_bytes = h->data_bytes;
	return 0;
}

/* The tensor's number in a layout, or -ENOENT. */
static int64_t step_number_in(const struct load_step *step, uint32_t tensor, uint32_t layout)
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

/* Not told by a part's head: which tensors between the first and the last one of a chunk have rows. */
static bool step_part_may_have(const struct proto_part *part, int64_t number)
{
	return number >= 0 && part->nchunks && number >= part->chunks[0].first_tensor &&
		number <= part->chunks[part->nchunks - 1].last_tensor;
}

/* A part that may have the tensor, which has this number in its layout. */
struct step_asked { uint32_t number; int r; struct load_row found; };
struct step_asking { const struct load_step *step; struct step_asked *parts; };

static int step_ask_part(void *arg, uint32_t i, struct base_error *err)
{
	const struct step_asking *asking = arg;
	const struct load_step *step = asking->step;
	struct step_asked *a = &asking->parts[i];
	const struct store_opened_part *rank = &step->ranks[a->found.line];
	const struct proto_manifest_rank *from = &step->manifest.ranks[a->found.line];

	a->r = store_part_read_row_cached(step->chunks, step->store, step->layouts[from->layout], &rank->part,
		rank->packs, rank->npacks, a->number, &a->found.row, err);
	if (a->r < 0 && a->r != -ENOENT)
		return base_error_prefix(err, a->r, "part of rank %u", from->rank);
	return 0;
}

/* Which parts may have it, by ascending rank. */
static int step_ask_whom(const struct load_step *step, uint32_t tensor, struct step_asked **ret_parts, uint32_t *ret_n)
{
	struct step_asked *parts = calloc((size_t)step->manifest.nranks + 1, sizeof *parts);
	uint32_t n = 0;

	if (!parts)
		return -ENOMEM;
	for (uint32_t i = 0; i < step->manifest.nranks; i++) {
		int64_t number = step_number_in(step, tensor, step->manifest.ranks[i].layout);

		if (step_part_may_have(&step->ranks[i].part, number))
			parts[n++] = (struct step_asked){.number = (uint32_t)number, .r = -ENOENT,
				.found = {.line = i, .npacks = step->ranks[i].npacks}};
	}
	*ret_parts = parts;
	*ret_n = n;
	return 0;
}

void load_rows_release(struct load_rows *rows)
{
	for (size_t i = 0; i < rows->n; i++)
		store_row_release(&rows->all[i].row);
	free(rows->all);
}

/* Takes what `n` parts answered. `r` and its error are of the first of them that could not be read: they count unless
 * one before has all of the tensor. True: no more parts need be asked. */
static bool step_rows_take(struct load_rows *rows, struct step_asked *parts, uint32_t n, int *r)
{
	bool over = false;

	for (uint32_t i = 0; i < n; i++) {
		if (parts[i].r < 0 && parts[i].r != -ENOENT)
			over = true;
		else if (parts[i].r == 0 && over)
			store_row_release(&parts[i].found.row);
		else if (parts[i].r == 0) {
			rows->all[rows->n++] = parts[i].found;
			if (rows->n == 1 && parts[i].found.row.whole) {
				over = true;
				*r = 0;
			}
		}
	}
	return over;
}

/* The first part is asked alone, for it often has all of the tensor; then twice as many each time, and all that are
 * left once one of them has a box of it. */
int load_step_rows(const struct load_step *step, uint32_t tensor, struct load_rows *ret_rows, struct base_error *err)
{
	base_cleanup_free struct step_asked *parts = NULL;
	base_cleanup(load_rows_release) struct load_rows rows = {0};
	struct base_error why = {0};
	uint32_t nparts = 0, first = 0, n;
	int r = step_ask_whom(step, tensor, &parts, &nparts);

	if (r == 0)
		rows.all = malloc((nparts + 1) * sizeof *rows.all);
	if (r < 0 || !rows.all)
		return base_no_memory(err);
	for (bool over = false; !over && first < nparts; first += n) {
		n = rows.n ? nparts - first : base_min(base_min(first + 1, STEP_ASKED_MAX), nparts - first);
		r = store_spread(n, step_ask_part, &(struct step_asking){step, parts + first}, &why);
		over = step_rows_take(&rows, parts + first, n, &r);
	}
	if (r < 0)
		return base_error_set(err, r, "%s", why.text);
	*ret_rows = rows;
	rows = (struct load_rows){0};
	return 0;
}

const char *const *load_step_part_packs(const struct load_step *step, uint32_t line)
{
	return step->ranks[line].packs;
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
		if (atomic_compare_exchange_strong_explicit(&step->packs, &names, mine, memory_order_acq_rel,
			memory_order_acquire))
			names = mine;
		else
			free(mine); /* another thread was faster */
	}
	*ret_packs = names;
	return 0;
}

uint32_t load_step_pack(const struct load_step *step, uint32_t line, uint32_t pack)
{
	return step->manifest.map[step->manifest.ranks[line].first_map + pack];
}

int load_step_blob_ref(const struct load_step *step, uint32_t blob, struct store_object_ref *ret_ref,
	const char *const **ret_packs, uint32_t *ret_npacks,
	struct base_error *err)
{
	const struct step_blob *b = &step->blobs[blob];
	const struct store_opened_part *rank = &step->ranks[b->line];
	const struct proto_blob *p = &rank->part.blobs[b->blob];

	*ret_ref = store_object_ref_from(&p->ref);
	*ret_packs = rank->packs;
	*ret_npacks = rank->npacks;
	if (p->len && (p->ref.pack >= rank->npacks || p->ref.raw_len != p->len))
		return base_error_set(err, -BASE_EFORMAT, "the reference to it in the part is wrong");
	return 0;
}
