/* SPDX-License-Identifier: Apache-2.0
 *
 * alike: steps of the save's own layout.
 *
 * Thin shards have pieces that no other layout has. So where the bases have other layouts than the save, the newest of
 * the last steps that has its layout is a base, too. To find it, manifests are read, and each rank reads them. A saver
 * remembers what layouts they have: else each save of a state whose layout changes every time (a tensor that grows)
 * would read those of all the last steps. */
#include "core/save/write/write_internal.h"

#include <stdlib.h>

#include "core/save/write/base_internal.h"
#include "core/step/manifest.h"

static void alike_release_step(struct save_alike_step *k)
{
	free(k->layouts);
	*k = (struct save_alike_step){0};
}

static struct save_alike_step *alike_find(struct save_alike *a, const struct base_digest *manifest)
{
	for (unsigned i = 0; i < SAVE_ALIKE_STEPS; i++)
		if (a->all[i].known && base_digest_equal(&a->all[i].manifest, manifest))
			return &a->all[i];
	return NULL;
}

/* What is not one of the last steps, so that there is a place for each of these. */
static void alike_forget(struct save_alike *a, const struct store_list *list, size_t from)
{
	for (unsigned i = 0; i < SAVE_ALIKE_STEPS; i++) {
		struct save_alike_step *k = &a->all[i];
		bool last = false;

		for (size_t n = from; k->known && !last && n < store_list_count(list); n++)
			last = base_digest_equal(&store_list_at(list, n)->commit.manifest, &k->manifest);
		if (!last)
			alike_release_step(k);
	}
}

/* NULL: no memory. */
static struct save_alike_step *alike_put(struct save_alike *a, const struct base_digest *manifest,
	const struct proto_manifest *m)
{
	struct save_alike_step *k = a->all;
	struct base_digest *layouts = calloc(m->nlayouts + 1, sizeof *layouts);

	while (k->known)
		k++;
	if (!layouts)
		return NULL;
	for (uint32_t i = 0; i < m->nlayouts; i++)
		layouts[i] = m->layouts[i].digest;
	*k = (struct save_alike_step){true, *manifest, layouts, m->nlayouts};
	return k;
}

static bool alike_has(struct save_alike *a, const struct save_writer *w, const struct base_digest *manifest)
{
	const struct save_alike_step *k = alike_find(a, manifest);
	struct proto_manifest m;
	bool has = false;

	if (!k && store_manifest_get(w->store, w->options.run, manifest, &m, NULL) == 0) {
		k = alike_put(a, manifest, &m);
		proto_manifest_release(&m);
	}
	for (uint32_t i = 0; k && !has && i < k->nlayouts; i++)
		has = base_digest_equal(&k->layouts[i], &w->planned->layout->digest);
	return has;
}

/* The manifest of a base has been read already. */
static void alike_note(struct save_alike *a, const struct save_bases *bases, const struct base_digest *manifest)
{
	for (unsigned i = 0; i < save_bases_count(bases); i++)
		if (bases->all[i]->open && base_digest_equal(&bases->all[i]->manifest, manifest) &&
			!alike_find(a, manifest))
			alike_put(a, manifest, &bases->all[i]->m);
}

const struct store_list_step *save_alike_find(struct save_alike *a, const struct save_writer *w,
	const struct store_list *list)
{
	size_t n = store_list_count(list), end = n - base_min(n, SAVE_ALIKE_STEPS);

	alike_forget(a, list, end);
	for (size_t i = end; i < n; i++)
		alike_note(a, &w->bases, &store_list_at(list, i)->commit.manifest);
	if (save_bases_have_layout(&w->bases, &w->planned->layout->digest))
		return NULL;
	for (size_t i = n; i-- > end;) {
		const struct store_list_step *step = store_list_at(list, i);

		if (!save_bases_have(&w->bases, &step->commit.manifest) && alike_has(a, w, &step->commit.manifest))
			return step;
	}
	return NULL;
}

void save_alike_release(struct save_alike *a)
{
	for (unsigned i = 0; i < SAVE_ALIKE_STEPS; i++)
		alike_release_step(&a->all[i]);
}
