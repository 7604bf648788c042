/* SPDX-License-Identifier: Apache-2.0
 *
 * base_fit: how much of a save's components a base may have, by its manifest and by the layout of the rank of the
 * save's own number there. Nothing of a part is read, and ranks of one layout answer alike. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/save/write/base_internal.h"

#define FIT_COMPONENTS_MAX 1024u        /* of a manifest; others count as missing */

/* ---- the components of a manifest ---- */

size_t save_pack_attempt(const char *pack, const char **ret_class)
{
	const char *count = strchr(pack, '-'), *rank = count ? strchr(count + 1, '-') : NULL;
	const char *class = rank ? strchr(rank + 1, '-') : NULL;

	if (!class || rank - pack >= (ptrdiff_t)PROTO_ATTEMPT_MAX || strlen(class + 1) > PROTO_COMPONENT_MAX)
		return 0;
	*ret_class = class + 1;
	return (size_t)(rank - pack);
}

static uint32_t component_at(const struct save_component *all, uint32_t n, const char *name)
{
	return base_bisect(i, 0, n, strcmp(all[i].name, name) < 0);
}

int64_t save_component_find(const struct save_component *all, uint32_t n, const char *name)
{
	uint32_t i = component_at(all, n, name);

	return i < n && strcmp(all[i].name, name) == 0 ? (int64_t)i : -ENOENT;
}

int save_components(const struct proto_manifest *m, struct save_component **ret_all, uint32_t *ret_n)
{
	struct save_component *all = NULL;
	uint32_t n = 0, room = 0;
	const char *class;

	for (uint32_t i = 0; i < m->npacks && n < FIT_COMPONENTS_MAX; i++) {
		uint32_t at;

		if (!save_pack_attempt(m->packs[i].pack, &class) || strcmp(class, "meta") == 0 ||
			strcmp(class, "blobs") == 0 || save_component_find(all, n, class) >= 0)
			continue;
		if (base_array_room(all, room, (size_t)n + 1) < 0) {
			free(all);
			return -ENOMEM;
		}
		at = component_at(all, n, class);
		memmove(&all[at + 1], &all[at], (n++ - at) * sizeof *all);
		all[at] = (struct save_component){0};
		memcpy(all[at].name, class, strlen(class));
	}
	*ret_all = all;
	*ret_n = n;
	return 0;
}

int save_layout_components(const struct store_layout *l, struct save_component **ret_all, uint32_t *ret_n)
{
	struct save_component *all = calloc(l->m.ncomponents + 1, sizeof *all);

	if (!all)
		return -ENOMEM;
	for (uint32_t i = 0; i < l->m.ncomponents; i++)
		memccpy(all[i].name, l->m.components[i], 0, sizeof all[i].name - 1);
	*ret_all = all;
	*ret_n = l->m.ncomponents;
	return 0;
}

/* ---- fit ---- */

static bool fit_same_mesh(const struct proto_mesh *a, const struct proto_mesh *b)
{
	if (a->ndims != b->ndims || a->nranks != b->nranks)
		return false;
	for (uint32_t d = 0; d < a->ndims; d++)
		if (a->dim_sizes[d] != b->dim_sizes[d] || strcmp(a->dim_names[d], b->dim_names[d]) != 0)
			return false;
	return memcmp(a->ranks, b->ranks, a->nranks * sizeof *a->ranks) == 0;
}

/* Do both layouts give the ranks the same boxes of the tensor, if its shape is the same? */
static bool fit_same_cut(const struct store_layout *a, uint32_t ta, const struct store_layout *b, uint32_t tb)
{
	const struct proto_layout_tensor *x = &a->m.tensors[ta], *y = &b->m.tensors[tb];

	if (!x->mesh != !y->mesh || !x->placement != !y->placement)
		return false;
	if (x->mesh && !fit_same_mesh(&a->m.meshes[x->mesh - 1], &b->m.meshes[y->mesh - 1]))
		return false;
	return !x->placement || strcmp(a->m.placements[x->placement - 1], b->m.placements[y->placement - 1]) == 0;
}

static int fit_compare_names(const struct store_layout *a, uint32_t ta, const struct store_layout *b, uint32_t tb)
{
	uint32_t la, lb;
	const char *x = store_layout_name(a, ta, &la), *y = store_layout_name(b, tb, &lb);
	int order = memcmp(x, y, base_min(la, lb));

	return order ? order : la < lb ? -1 : la > lb;
}

/* One component of the save's layout against the same one of the base's; both are sorted by name. */
static enum save_fit fit_tensors(const struct store_layout *l, uint32_t component, const struct store_layout *from,
	uint32_t other)
{
	uint32_t i, end, j, last, common = 0, n;

	store_layout_component_range(l, component, &i, &end);
	store_layout_component_range(from, other, &j, &last);
	for (n = end - i; i < end && j < last;) {
		int order = fit_compare_names(l, i, from, j);

		if (order == 0 && common++ == 0 && !fit_same_cut(l, i, from, j)) /* the others are cut alike */
			return SAVE_FIT_HAS;
		i += order <= 0;
		j += order >= 0;
	}
	return common == n ? SAVE_FIT_ALL : common ? SAVE_FIT_SOME : SAVE_FIT_HAS;
}

/* Under the lock. */
static enum save_fit fit_look(struct save_base *b, uint32_t world, const struct store_layout *l, uint32_t component)
{
	const char *name = l->m.components[component];
	uint32_t line = b->own_line == BASE_NO_LINE ? 0 : b->own_line;
	const struct store_layout *from;
	int64_t other = -ENOENT;

	if (save_base_has_layout(b, &l->digest))
		return SAVE_FIT_ALL;
	from = save_base_open_layout(b, b->m.ranks[line].layout);
	if (from)
		other = base_search(i, 0, from->m.ncomponents, strcmp(from->m.components[i], name));
	if (other < 0)
		return save_component_find(b->components, b->ncomponents, name) < 0 ? SAVE_FIT_NOT : SAVE_FIT_HAS;
	return b->m.nranks == world ? fit_tensors(l, component, from, (uint32_t)other) : SAVE_FIT_HAS;
}

enum save_fit save_base_fit(struct save_base *b, uint32_t world, const struct store_layout *l, uint32_t component)
{
	enum save_fit fit;

	if (!b->open)
		return SAVE_FIT_NOT;
	if (!b->fits)
		b->fits = calloc(l->m.ncomponents + 1, sizeof *b->fits);
	if (b->fits && b->fits[component].known)
		return b->fits[component].fit;
	pthread_mutex_lock(&b->lock);
	fit = fit_look(b, world, l, component);
	pthread_mutex_unlock(&b->lock);
	if (b->fits)
		b->fits[component] = (struct base_fit){true, fit};
	return fit;
}

enum save_fit save_bases_fit(const struct save_bases *all, const struct store_layout *l, uint32_t component)
{
	enum save_fit best = SAVE_FIT_NOT;

	for (unsigned i = 0; i < save_bases_count(all); i++)
		best = base_max(best, save_base_fit(all->all[i], all->world, l, component));
	return best;
}
