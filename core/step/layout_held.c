/* SPDX-License-Identifier: Apache-2.0
 *
 * layout_held: which rank holds what. A model has a hundred thousand tensors but a few meshes and a few dozen
 * combinations of placements, and they come in the order in which a program names its tensors. So the last mesh and
 * placements are compared first, then the others by value; a mesh of thousands of ranks is compared by its pointer
 * first. Both are numbered in the order in which they come, and sorted when the layout is finished: the tables depend
 * on the set of tensors alone, and all ranks that list the same ones make the same bytes.
 *
 * Order of meshes: number of dimensions; sizes, outermost first; names; ranks by position. Of placements: that of their
 * words. */
#include "core/step/layout_internal.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/plural.h"

struct layout_words {
	uint32_t n;
	struct tensor_placement at[TENSOR_MAX_DIMS]; /* ragged ones point behind the struct */
};

void layout_held_release(struct layout_held *h)
{
	for (uint32_t i = 0; i < h->nwords; i++)
		free(h->words[i]);
	free(h->words);
	free(h->meshes);
	base_table_release(&h->by_words);
	*h = (struct layout_held){0};
}

/* ---- meshes ---- */

static int mesh_order(const struct tensor_mesh *a, const struct tensor_mesh *b)
{
	int c;

	if (a == b)
		return 0;
	if (a->ndim != b->ndim)
		return a->ndim < b->ndim ? -1 : 1;
	for (uint32_t d = 0; d < a->ndim; d++)
		if (a->size[d] != b->size[d])
			return a->size[d] < b->size[d] ? -1 : 1;
	for (uint32_t d = 0; d < a->ndim; d++) {
		c = strcmp(a->name[d], b->name[d]);
		if (c)
			return c;
	}
	for (uint32_t i = 0; (a->ranks || b->ranks) && i < a->count; i++) {
		uint32_t x = tensor_mesh_rank_at(a, i), y = tensor_mesh_rank_at(b, i);

		if (x != y)
			return x < y ? -1 : 1;
	}
	return 0;
}

static int held_mesh_new(struct layout_held *h, const struct tensor_mesh *mesh, struct base_error *err)
{
	if (h->nmeshes == LAYOUT_HELD_MESHES_MAX)
		return base_error_set(err, -BASE_ELIMIT, "more than %u meshes", LAYOUT_HELD_MESHES_MAX);
	if (base_array_more(h->meshes, h->nmeshes) < 0)
		return base_no_memory(err);
	h->meshes[h->nmeshes++] = mesh;
	return 0;
}

static int held_mesh(struct layout_held *h, const struct tensor_mesh *mesh, uint32_t *ret_mesh, struct base_error *err)
{
	uint32_t n = 0;
	int r = 0;

	if (h->last_mesh != mesh) {
		while (n < h->nmeshes && h->meshes[n] != mesh)
			n++;
		for (uint32_t i = 0; n == h->nmeshes && i < h->nmeshes; i++)
			if (mesh_order(h->meshes[i], mesh) == 0)
				n = i;
		if (n == h->nmeshes)
			r = held_mesh_new(h, mesh, err);
		if (r < 0)
			return r;
		h->last_mesh = mesh;
		h->last_mesh_number = n;
	}
	*ret_mesh = 1 + h->last_mesh_number;
	return 0;
}

/* ---- placements ---- */

static uint32_t words_hash(const struct tensor_placement *p, uint32_t n)
{
	uint32_t hash = n;

	for (uint32_t i = 0; i < n; i++) { /* what tensor_placement_equal looks at */
		uint64_t with[3] = {p[i].kind};

		if (p[i].kind != TENSOR_REPLICATE && p[i].kind != TENSOR_PARTIAL)
			with[1] = p[i].dim;
		if (p[i].kind == TENSOR_STRIDED_SHARD || p[i].kind == TENSOR_INTERLEAVED_SHARD)
			with[2] = p[i].split;
		if (p[i].kind == TENSOR_RAGGED_SHARD)
			with[2] = base_table_hash(p[i].ends, p[i].nends * sizeof *p[i].ends);
		hash = base_table_hash_in(hash, with, sizeof with);
	}
	return hash;
}

static bool words_equal(const struct layout_words *w, const struct tensor_placement *p, uint32_t n)
{
	if (w->n != n)
		return false;
	for (uint32_t i = 0; i < n; i++)
		if (!tensor_placement_equal(&w->at[i], &p[i]))
			return false;
	return true;
}

/* The number of equal placements, or BASE_TABLE_NONE. */
static uint32_t words_find(const struct layout_held *h, const struct tensor_placement *p, uint32_t n, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&h->by_words, hash, &at)) != BASE_TABLE_NONE)
		if (words_equal(h->words[i], p, n))
			break;
	return i;
}

static struct layout_words *words_new(const struct tensor_placement *p, uint32_t n)
{
	struct layout_words *w;
	size_t nends = 0;
	uint64_t *ends;

	for (uint32_t i = 0; i < n; i++)
		nends += p[i].kind == TENSOR_RAGGED_SHARD ? p[i].nends : 0;
	w = calloc(1, sizeof *w + nends * sizeof *ends);
	if (!w)
		return NULL;
	ends = (uint64_t *)(w + 1);
	w->n = n;
	memcpy(w->at, p, n * sizeof *p);
	for (uint32_t i = 0; i < n; i++) {
		if (p[i].kind != TENSOR_RAGGED_SHARD || p[i].nends == 0)
			continue;
		w->at[i].ends = memcpy(ends, p[i].ends, p[i].nends * sizeof *ends);
		ends += p[i].nends;
	}
	return w;
}

static int held_words(struct layout_held *h, const struct tensor_placement *p, uint32_t n, uint32_t *ret_words,
	struct base_error *err)
{
	uint32_t hash, i;

	if (h->nwords && words_equal(h->words[h->last_words], p, n)) {
		*ret_words = 1 + h->last_words;
		return 0;
	}
	hash = words_hash(p, n);
	i = words_find(h, p, n, hash);
	if (i == BASE_TABLE_NONE) {
		i = h->nwords;
		if (i == LAYOUT_HELD_PLACEMENTS_MAX)
			return base_error_set(err, -BASE_ELIMIT, "more than %u combinations of placements",
				LAYOUT_HELD_PLACEMENTS_MAX);
		if (base_array_more(h->words, i) < 0 || base_table_reserve(&h->by_words, 1) < 0)
			return base_no_memory(err);
		h->words[i] = words_new(p, n);
		if (!h->words[i])
			return base_no_memory(err);
		base_table_add(&h->by_words, hash, h->nwords++);
	}
	h->last_words = i;
	*ret_words = 1 + i;
	return 0;
}

int layout_held_add(struct layout_held *h, const struct store_layout_held *held, uint32_t *ret_mesh,
	uint32_t *ret_words, struct base_error *err)
{
	int r;

	*ret_mesh = *ret_words = 0;
	if (!held || !held->mesh)
		return 0;
	if (held->nplacements != held->mesh->ndim)
		return base_error_set(err, -EINVAL, "%u %s for a mesh of %u %s", held->nplacements,
			base_plural(held->nplacements, "placement", "placements"), held->mesh->ndim,
			base_plural(held->mesh->ndim, "dimension", "dimensions"));
	for (uint32_t i = 0; i < held->nplacements; i++)
		if (held->placements[i].kind == TENSOR_PARTIAL)
			return base_error_set(err, -EINVAL, "a partial placement does not say which rank holds what");
	r = held_mesh(h, held->mesh, ret_mesh, err);
	return r < 0 ? r : held_words(h, held->placements, held->nplacements, ret_words, err);
}

/* ---- the tables ---- */

void layout_held_tables_release(struct layout_held_tables *t)
{
	for (uint32_t i = 0; t->placements && i < t->nplacements; i++)
		free(t->placements[i]);
	free(t->placements);
	free(t->meshes);
	free(t->mesh_at);
	free(t->words_at);
	free(t->memory);
	*t = (struct layout_held_tables){0};
}

static int mesh_compare(const void *a, const void *b, void *arg)
{
	const struct layout_held *h = arg;

	return mesh_order(h->meshes[*(const uint32_t *)a], h->meshes[*(const uint32_t *)b]);
}

/* Bytes of all names of a mesh with their NULs. */
static size_t mesh_names_bytes(const struct tensor_mesh *m)
{
	size_t bytes = 0;

	for (uint32_t d = 0; d < m->ndim; d++)
		bytes += strlen(m->name[d]) + 1;
	return bytes;
}

/* Ranks are written out, so that readers need not support meshes without a list. Everything is copied, so the meshes
 * may be freed. */
static int tables_meshes(const struct layout_held *h, struct layout_held_tables *t)
{
	base_cleanup_free uint32_t *sorted = malloc((h->nmeshes + 1) * sizeof *sorted);
	size_t numbers_n = 0, texts = 0;
	const char **names;
	uint32_t *numbers;
	char *text;

	for (uint32_t i = 0; i < h->nmeshes; i++) {
		numbers_n += (size_t)h->meshes[i]->ndim + h->meshes[i]->count;
		texts += mesh_names_bytes(h->meshes[i]);
	}
	t->memory = malloc((size_t)h->nmeshes * TENSOR_MAX_DIMS * sizeof *names + numbers_n * sizeof *numbers
		+ texts + 1);
	t->meshes = calloc((size_t)h->nmeshes + 1, sizeof *t->meshes);
	t->mesh_at = calloc((size_t)h->nmeshes + 1, sizeof *t->mesh_at);
	if (!sorted || !t->memory || !t->meshes || !t->mesh_at)
		return -ENOMEM;
	for (uint32_t i = 0; i < h->nmeshes; i++)
		sorted[i] = i;
	qsort_r(sorted, h->nmeshes, sizeof *sorted, mesh_compare, (void *)h);
	names = t->memory;
	numbers = (uint32_t *)(names + (size_t)h->nmeshes * TENSOR_MAX_DIMS);
	text = (char *)(numbers + numbers_n);
	for (uint32_t i = 0; i < h->nmeshes; i++) {
		const struct tensor_mesh *m = h->meshes[sorted[i]];

		t->mesh_at[sorted[i]] = i + 1;
		t->meshes[i] = (struct proto_mesh){names, numbers, m->ndim, numbers + m->ndim, m->count};
		for (uint32_t d = 0; d < m->ndim; d++) {
			*names++ = text;
			text = stpcpy(text, m->name[d]) + 1;
			*numbers++ = m->size[d];
		}
		for (uint32_t k = 0; k < m->count; k++)
			*numbers++ = tensor_mesh_rank_at(m, k);
	}
	return 0;
}

static int words_compare(const void *a, const void *b, void *arg)
{
	char **texts = arg;

	return strcmp(texts[*(const uint32_t *)a], texts[*(const uint32_t *)b]);
}

static int tables_words(const struct layout_held *h, struct layout_held_tables *t, struct base_error *err)
{
	base_cleanup_free uint32_t *sorted = malloc((h->nwords + 1) * sizeof *sorted);
	base_cleanup_free char **texts = calloc((size_t)h->nwords + 1, sizeof *texts);
	int r = 0;

	t->words_at = calloc((size_t)h->nwords + 1, sizeof *t->words_at);
	t->placements = calloc((size_t)h->nwords + 1, sizeof *t->placements);
	t->nplacements = h->nwords;
	if (!sorted || !texts || !t->words_at || !t->placements)
		return base_no_memory(err);
	for (uint32_t i = 0; i < h->nwords; i++) {
		struct base_buf text = BASE_BUF_INIT;

		sorted[i] = i;
		tensor_placements_print(h->words[i]->at, h->words[i]->n, &text);
		if (text.len > LAYOUT_HELD_WORDS_MAX)
			r = base_error_set(err, -BASE_ELIMIT, "the placements of a tensor have more than %u bytes",
				LAYOUT_HELD_WORDS_MAX);
		texts[i] = t->placements[i] = base_buf_steal_text(&text);
		if (!texts[i] || r < 0)
			return r < 0 ? r : base_no_memory(err);
	}
	qsort_r(sorted, h->nwords, sizeof *sorted, words_compare, texts);
	for (uint32_t i = 0; i < h->nwords; i++) {
		t->placements[i] = texts[sorted[i]];
		t->words_at[sorted[i]] = i + 1;
	}
	return 0;
}

int layout_held_finish(const struct layout_held *h, struct layout_held_tables *ret_t, struct base_error *err)
{
	int r = tables_meshes(h, ret_t);

	return r < 0 ? base_no_memory(err) : tables_words(h, ret_t, err);
}

/* ---- asking ---- */

int store_layout_mesh(const struct store_layout *l, uint32_t tensor, struct tensor_mesh **ret_mesh,
	struct base_error *err)
{
	const struct proto_mesh *m;
	uint32_t number = l->m.tensors[tensor].mesh;

	if (number == 0)
		return base_error_set(err, -ENOENT, "the layout has no mesh of tensor %u", tensor);
	m = &l->m.meshes[number - 1];
	return tensor_mesh_new(m->ndims, m->dim_names, m->dim_sizes, m->ranks, m->nranks, ret_mesh, err);
}

int store_layout_placements(const struct store_layout *l, uint32_t tensor, struct tensor_placements **ret_p,
	struct base_error *err)
{
	uint32_t number = l->m.tensors[tensor].placement;

	if (number == 0)
		return base_error_set(err, -ENOENT, "the layout has no placements of tensor %u", tensor);
	return tensor_placements_parse(l->m.placements[number - 1], ret_p, err);
}
