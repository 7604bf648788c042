/* SPDX-License-Identifier: Apache-2.0
 *
 * known: layouts and sets by digest, each once; from the index, or from the store.
 *
 * A manifest never changes, and neither does what follows from it, so the index needs no look at anything else. What it
 * says of layouts and sets is compared with their digests again. */
#include "core/find/find_internal.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/load/open/step.h"
#include "core/save/write/catalog.h"
#include "core/step/manifest.h"
#include "core/step/open.h"

static const uint8_t *known_row(struct find_known *k, struct find_file *file, enum index_rows rows,
	const struct base_digest *key, size_t *ret_len)
{
	if (!file->opened && !k->no_index)
		(void)save_index_open_rows(k->store, file->flag | INDEX_READ_ONLY, &file->reads, NULL);
	file->opened = true;
	return file->reads ? index_row(file->reads, rows, key, ret_len) : NULL;
}

/* ---- layouts ---- */

int64_t find_known_layout(const struct find_known *k, const struct base_digest *digest)
{
	const uint32_t hash = base_table_hash(digest->bytes, sizeof digest->bytes);
	uint32_t n;

	for (size_t at = 0; (n = base_table_next(&k->layouts_by_digest, hash, &at)) != BASE_TABLE_NONE;)
		if (base_digest_equal(&k->layouts[n].digest, digest))
			return n;
	return -ENOENT;
}

/* Takes over what `l` has. Its number, or -ENOMEM. */
static int64_t layout_add(struct find_known *k, const struct find_layout *l)
{
	if (base_array_more(k->layouts, k->nlayouts) < 0 || base_table_reserve(&k->layouts_by_digest, 1) < 0) {
		store_layout_free(l->layout);
		free(l->object);
		return -ENOMEM;
	}
	k->layouts[k->nlayouts] = *l;
	base_table_add(&k->layouts_by_digest, base_table_hash(l->digest.bytes, sizeof l->digest.bytes),
		(uint32_t)k->nlayouts);
	return (int64_t)k->nlayouts++;
}

static int64_t layout_from_index(struct find_known *k, const struct base_digest *digest)
{
	struct find_layout l = {.digest = *digest};
	struct base_digest found;
	size_t len;
	const uint8_t *row = known_row(k, &k->steps, INDEX_OF_LAYOUT, digest, &len);

	if (!row)
		return -ENOENT;
	base_digest_of(row, len, &found);
	if (!base_digest_equal(&found, digest) || store_layout_decode_known(row, len, digest, &l.layout, NULL) < 0)
		return -ENOENT;
	return layout_add(k, &l);
}

static int64_t layout_from_store(struct find_known *k, const struct proto_manifest *m, uint32_t number,
	struct base_error *err)
{
	struct find_layout l = {.digest = m->layouts[number].digest, .len = m->layouts[number].ref.raw_len};
	int r = store_open_layout_object(k->store, m, number, &l.layout, &l.object, err);
	int64_t n = r < 0 ? r : layout_add(k, &l);

	return n == -ENOMEM ? base_no_memory(err) : n;
}

/* ---- sets ---- */

struct find_set *find_known_set_of(const struct find_known *k, const struct base_digest *id)
{
	const uint32_t hash = base_table_hash(id->bytes, sizeof id->bytes);
	uint32_t n;

	for (size_t at = 0; (n = base_table_next(&k->sets_by_id, hash, &at)) != BASE_TABLE_NONE;)
		if (base_digest_equal(&k->sets[n].id, id))
			return &k->sets[n];
	return NULL;
}

/* With its layouts, whose numbers it takes over. NULL: no memory. */
static struct find_set *set_add(struct find_known *k, const struct base_digest *id, uint32_t *layouts, uint32_t n,
	bool kept)
{
	struct find_set set = {.id = *id, .layouts = layouts, .nlayouts = n, .kept = kept,
		.asked = calloc(k->groups + 1, sizeof *set.asked), .ends = calloc(n + 1u, sizeof *set.ends)};

	if (!set.asked || !set.ends || base_array_more(k->sets, k->nsets) < 0 ||
		base_table_reserve(&k->sets_by_id, 1) < 0) {
		free(set.asked);
		free(set.ends);
		free(layouts);
		return NULL;
	}
	for (uint32_t i = 0; i < n; i++)
		set.ends[i] = set.tensors += k->layouts[layouts[i]].layout->m.ntensors;
	base_table_add(&k->sets_by_id, base_table_hash(id->bytes, sizeof id->bytes), (uint32_t)k->nsets);
	k->sets[k->nsets] = set;
	return &k->sets[k->nsets++];
}

static struct find_set *set_from_index(struct find_known *k, const struct base_digest *id)
{
	base_cleanup_free uint32_t *layouts = NULL;
	struct base_digest found, *digests;
	base_cleanup_free void *copy = NULL;
	size_t len;
	const uint8_t *row = known_row(k, &k->steps, INDEX_OF_SET, id, &len);
	const uint32_t n = row ? (uint32_t)(len / sizeof found) : 0;

	if (!row || len % sizeof found || !(copy = malloc(len + 1)) || !(layouts = calloc(n + 1u, sizeof *layouts)))
		return NULL;
	digests = memcpy(copy, row, len);
	base_digest_of(copy, len, &found);
	if (!base_digest_equal(&found, id))
		return NULL;
	for (uint32_t i = 0; i < n; i++) {
		int64_t number = find_known_layout(k, &digests[i]);

		if (number < 0 && (number = layout_from_index(k, &digests[i])) < 0)
			return NULL;
		layouts[i] = (uint32_t)number;
	}
	return set_add(k, id, base_steal(layouts), n, true);
}

static int by_digest(const void *a, const void *b, void *layouts)
{
	const struct proto_manifest_layout *all = layouts;

	return base_digest_compare(&all[*(const uint32_t *)a].digest, &all[*(const uint32_t *)b].digest);
}

/* The layouts of a manifest by number, sorted by digest, each once: a stranger's may name one many times. */
static uint32_t unique_layouts(const struct proto_manifest *m, uint32_t *numbers)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < m->nlayouts; i++)
		numbers[i] = i;
	if (m->nlayouts)
		qsort_r(numbers, m->nlayouts, sizeof *numbers, by_digest, (void *)m->layouts);
	for (uint32_t i = 0; i < m->nlayouts; i++)
		if (n == 0 || by_digest(&numbers[n - 1], &numbers[i], (void *)m->layouts) != 0)
			numbers[n++] = numbers[i];
	return n;
}

static int set_from_manifest(struct find_known *k, const struct proto_manifest *m, struct find_set **ret_set,
	struct base_error *err)
{
	base_cleanup_free struct base_digest *digests = calloc(m->nlayouts + 1u, sizeof *digests);
	base_cleanup_free uint32_t *layouts = calloc(m->nlayouts + 1u, sizeof *layouts);
	struct base_digest id;
	uint32_t n;

	if (!digests || !layouts)
		return base_no_memory(err);
	n = unique_layouts(m, layouts);
	for (uint32_t i = 0; i < n; i++)
		digests[i] = m->layouts[layouts[i]].digest;
	base_digest_of(digests, n * sizeof *digests, &id);
	*ret_set = find_known_set_of(k, &id);
	for (uint32_t i = 0; !*ret_set && i < n; i++) {
		int64_t number = find_known_layout(k, &digests[i]);

		if (number < 0 && (number = layout_from_store(k, m, layouts[i], err)) < 0)
			return (int)number;
		layouts[i] = (uint32_t)number;
	}
	if (!*ret_set)
		*ret_set = set_add(k, &id, base_steal(layouts), n, false);
	return *ret_set ? 0 : base_no_memory(err);
}

int find_known_set(struct find_known *k, const char *run, const struct commit_list_step *step,
	struct find_set **ret_set, struct base_error *err)
{
	struct find_row row = {.manifest = step->commit.manifest};
	struct proto_manifest m;
	struct base_digest id;
	size_t len;
	const uint8_t *at = known_row(k, &k->steps, INDEX_OF_STEP, &row.manifest, &len);
	int r;

	if (at && len == sizeof id) {
		memcpy(&id, at, sizeof id);
		*ret_set = find_known_set_of(k, &id);
		if (*ret_set || (*ret_set = set_from_index(k, &id)))
			return 0;
	}
	r = store_manifest_get(k->store, run, &row.manifest, &m, err);
	if (r < 0)
		return r;
	r = set_from_manifest(k, &m, ret_set, err);
	proto_manifest_release(&m);
	if (r < 0)
		return r;
	row.set = (uint32_t)(*ret_set - k->sets);
	find_keep_row(k, &k->steps, &row);
	return 1;
}

const struct store_layout *find_known_tensor(const struct find_known *k, const struct find_set *set, uint64_t tensor,
	uint32_t *ret_number)
{
	const uint32_t at = base_bisect(i, 0, set->nlayouts, set->ends[i] <= tensor);

	*ret_number = (uint32_t)(tensor - (at ? set->ends[at - 1] : 0));
	return k->layouts[set->layouts[at]].layout;
}

/* ---- digests ---- */

static int digest_of(struct load_step *step, const struct store_layout *l, uint32_t number, uint8_t *out,
	struct base_error *err)
{
	struct load_object *o;
	uint32_t len;
	const char *name = store_layout_name(l, number, &len);
	const int64_t tensor = load_step_tensor_find(step, store_layout_component(l, number), name, len);
	int r = tensor < 0 ? (int)tensor : load_tensor_open(step, (uint32_t)tensor, &o, err);

	if (r < 0)
		return r;
	memcpy(out, load_object_digest(o)->bytes, BASE_DIGEST_BYTES);
	load_object_unref(o);
	return 0;
}

static int digests_from_store(struct find_known *k, const char *run, const struct commit_list_step *entry,
	const struct find_set *set, uint8_t *out, struct base_error *err)
{
	struct load_step *step;
	int r = load_step_open(k->store, run, entry, &step, err);

	if (r < 0)
		return r;
	for (uint64_t t = 0; r == 0 && t < set->tensors; t++) {
		uint32_t number;
		const struct store_layout *l = find_known_tensor(k, set, t, &number);

		r = digest_of(step, l, number, out + t * BASE_DIGEST_BYTES, err);
	}
	load_step_unref(step);
	return r;
}

int find_known_digests(struct find_known *k, const char *run, const struct commit_list_step *step,
	const struct find_set *set, const uint8_t **ret_digests, struct base_error *err)
{
	struct find_row row = {.manifest = step->commit.manifest, .len = (size_t)set->tensors * BASE_DIGEST_BYTES};
	size_t len;
	int r;

	*ret_digests = known_row(k, &k->digests, INDEX_OF_STEP, &row.manifest, &len);
	if (*ret_digests && len == row.len)
		return 0;
	if (base_array_room(k->read, k->read_room, row.len + 1) < 0)
		return base_no_memory(err);
	r = digests_from_store(k, run, step, set, k->read, err);
	if (r < 0)
		return r;
	*ret_digests = row.digests = k->read;
	find_keep_row(k, &k->digests, &row);
	return 1;
}

static void file_release(struct find_file *file)
{
	index_close(file->reads);
	index_close(file->writes);
	for (size_t i = 0; i < file->nrows; i++)
		free(file->rows[i].digests);
	free(file->rows);
}

void find_known_release(struct find_known *k)
{
	for (size_t i = 0; i < k->nlayouts; i++) {
		store_layout_free(k->layouts[i].layout);
		free(k->layouts[i].object);
	}
	for (size_t i = 0; i < k->nsets; i++) {
		for (size_t g = 0; g < k->groups; g++)
			free(k->sets[i].asked[g].tensors);
		free(k->sets[i].asked);
		free(k->sets[i].layouts);
		free(k->sets[i].ends);
	}
	free(k->layouts);
	free(k->sets);
	free(k->visible);
	free(k->read);
	free(k->name);
	base_table_release(&k->layouts_by_digest);
	base_table_release(&k->sets_by_id);
	file_release(&k->steps);
	file_release(&k->digests);
}
