/* SPDX-License-Identifier: Apache-2.0
 *
 * base_keep: which attempts of the bases are kept (keep.h), by the pack tables of their manifests. All ranks read the
 * same manifests, so they decide alike without a message, before the first piece is looked at; what of an attempt has
 * not changed is not known by then, so its bytes are those that the bases refer to.
 *
 * Of each component one base is counted, the first that fits (base_fit.c): most of it follows from there. Bases before
 * that one count, too, if they have some of its tensors. These attempts are decided on together. What other bases, and
 * other components, name would only push these out; so each base then gets the room that is left, in their order.
 *
 * A component that this rank does not save may be another rank's, if the base's ranks have several layouts. Then it is
 * counted, too, so that ranks decide alike.
 *
 * Metadata of a base is never referred to, its layouts apart: a job's ranks other than the one that stores a layout
 * refer to the base's copy, and so to that attempt. Blobs are found by the index alone. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/save/write/base_internal.h"

#define KEEP_ATTEMPTS_MAX 1024u /* of a forged manifest; others are referred to first come, as long as there is room */

#define KEEP_LOOK 16u /* entries of the list */

struct keep_table {
	const struct save_bases *all;
	struct base_attempts attempts; size_t room;
	size_t named, named_max;
};

static struct base_attempt *keep_find(const struct base_attempts *a, const char *pack, size_t len)
{
	for (size_t i = a->n; i-- > 0;)
		if (strncmp(a->all[i].name, pack, len) == 0 && a->all[i].name[len] == '\0')
			return &a->all[i];
	return NULL;
}

static const struct base_attempt *keep_decided(const struct save_bases *all, unsigned nbases, const char *pack,
	size_t len)
{
	const struct base_attempt *found = keep_find(&all->attempts, pack, len);

	for (unsigned i = 0; !found && i < nbases; i++)
		found = keep_find(&all->all[i]->attempts, pack, len);
	return found;
}

bool save_bases_keep(const struct save_bases *all, const char *pack, bool layout)
{
	const char *class;
	bool merges = all && atomic_load_explicit(&all->merges, memory_order_acquire);
	size_t len = merges ? save_pack_attempt(pack, &class) : 0;
	const struct base_attempt *a = len ? keep_decided(all, save_bases_count(all), pack, len) : NULL;

	return !a || a->keep.kept || (layout && a->keep.named);
}

/* The attempt's row, which is made if need be. 1: *ret_a; 0: there is none, because it was decided on before or there
 * are too many; -ENOMEM. */
static int keep_row(struct keep_table *t, const char *pack, size_t len, struct base_attempt **ret_a)
{
	*ret_a = keep_find(&t->attempts, pack, len);
	if (*ret_a)
		return 1;
	if (t->attempts.n == KEEP_ATTEMPTS_MAX || keep_decided(t->all, save_bases_count(t->all), pack, len))
		return 0;
	if (base_array_room(t->attempts.all, t->room, t->attempts.n + 1) < 0)
		return -ENOMEM;
	*ret_a = &t->attempts.all[t->attempts.n++];
	**ret_a = (struct base_attempt){0};
	memcpy((*ret_a)->name, pack, len);
	return 1;
}

static int keep_bytes(struct keep_table *t, const char *pack, size_t len, uint64_t bytes)
{
	struct base_attempt *a;
	int r = bytes ? keep_row(t, pack, len, &a) : 0;

	if (r == 1 && base_add_overflows(a->keep.bytes, bytes, &a->keep.bytes))
		a->keep.bytes = UINT64_MAX;
	return r < 0 ? r : 0;
}

/* counts: by component of the base; NULL: all do. The table is sorted by name, so packs of an attempt are one after
 * another. */
static int keep_packs(struct keep_table *t, const struct save_base *b, const bool *counts, bool blobs)
{
	const char *attempt = "", *class;
	uint64_t bytes = 0;
	size_t len = 0;

	for (uint32_t i = 0; i < b->m.npacks; i++) {
		const struct proto_pack_use *p = &b->m.packs[i];
		int64_t component;

		if (len == 0 || strncmp(p->pack, attempt, len + 1) != 0) {
			if (keep_bytes(t, attempt, len, bytes) < 0)
				return -ENOMEM;
			bytes = 0;
			attempt = p->pack;
			len = save_pack_attempt(attempt, &class);
		}
		if (!save_pack_attempt(p->pack, &class))
			continue;
		component = save_component_find(b->components, b->ncomponents, class);
		if (component >= 0 ? !counts || counts[component] : blobs && strcmp(class, "blobs") == 0)
			bytes += p->live_bytes;
	}
	return keep_bytes(t, attempt, len, bytes);
}

static int keep_layouts(struct keep_table *t, const struct proto_manifest *m)
{
	const char *class;
	struct base_attempt *a;
	int r = 0;

	for (uint32_t i = 0; r >= 0 && i < m->nlayouts; i++) {
		uint32_t pack = m->layouts[i].ref.pack;
		size_t len = pack < m->npacks ? save_pack_attempt(m->packs[pack].pack, &class) : 0;

		r = len && t->named < t->named_max ? keep_row(t, m->packs[pack].pack, len, &a) : 0;
		if (r == 1) {
			t->named += !a->keep.named;
			a->keep.named = true;
		}
	}
	return r < 0 ? r : 0;
}

static int keep_choose(struct keep_table *t, struct save_bases *all, size_t *room)
{
	struct base_attempts *a = &t->attempts;
	base_cleanup_free struct save_keep *keep = calloc(a->n + 1, sizeof *keep);
	size_t taken = 0;

	if (!keep)
		return -ENOMEM;
	for (size_t i = 0; i < a->n; i++)
		keep[i] = a->all[i].keep;
	if (save_keep_choose(keep, a->n, *room) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < a->n; i++) {
		a->all[i].keep = keep[i];
		taken += keep[i].kept || keep[i].named;
		if (!keep[i].kept)
			atomic_store_explicit(&all->merges, true, memory_order_release);
	}
	*room -= base_min(*room, taken);
	all->taken += taken;
	return 0;
}

/* The base with all of its manifest, which is open by now. */
static const struct save_base *keep_whole(const struct save_base *b) { return b->excerpt ? b->whole : b; }

/* r: the result of filling the table. */
static int keep_end(struct keep_table *t, int r, struct save_bases *all, size_t *room, struct base_attempts *ret_a)
{
	if (r == 0)
		r = keep_choose(t, all, room);
	if (r == 0)
		*ret_a = t->attempts;
	else
		free(t->attempts.all);
	return r;
}

int save_base_decide(struct save_bases *all, struct save_base *b, size_t *room)
{
	struct keep_table t = {.all = all, .named_max = base_min(*room, SAVE_KEEP_LARGE)};
	const struct save_base *whole = keep_whole(b);
	int r = whole->open ? keep_packs(&t, whole, NULL, all->index != NULL) : 0;

	if (r == 0 && whole->open && all->layouts)
		r = keep_layouts(&t, &whole->m);
	return keep_end(&t, r, all, room, &b->attempts);
}

/* ---- all bases together ---- */

struct keep_of { const struct save_bases *all; const struct store_layout *l; int64_t component; const char *name; };

static enum save_fit keep_fit(const struct keep_of *k, unsigned base)
{
	struct save_base *b = k->all->all[base];

	if (k->component >= 0)
		return save_base_fit(b, k->all->world, k->l, (uint32_t)k->component);
	b = b->excerpt ? b->whole : b;
	return save_component_find(b->components, b->ncomponents, k->name) < 0 ? SAVE_FIT_NOT : SAVE_FIT_ALL;
}

/* Is that base counted for this component of its own? */
static bool keep_counts(const struct save_bases *all, const struct store_layout *l, unsigned base, const char *name)
{
	const struct keep_of k = {all, l,
		base_search(at, 0, l->m.ncomponents, strcmp(l->m.components[at], name)), name};
	bool fits = k.component < 0 || save_bases_fit(all, l, (uint32_t)k.component) >= SAVE_FIT_SOME;

	if ((k.component < 0 && keep_whole(all->all[base])->m.nlayouts == 1) ||
		keep_fit(&k, base) < (fits ? SAVE_FIT_SOME : SAVE_FIT_HAS))
		return false;
	for (unsigned i = 0; i < base; i++)
		if (keep_fit(&k, i) >= (fits ? SAVE_FIT_ALL : SAVE_FIT_HAS))
			return false;
	return true;
}

static int keep_base(struct keep_table *t, const struct store_layout *l, unsigned base)
{
	const struct save_base *b = keep_whole(t->all->all[base]);
	base_cleanup_free bool *counts = calloc((size_t)b->ncomponents + 1, sizeof *counts);
	bool any = false;
	int r;

	if (!counts)
		return -ENOMEM;
	for (uint32_t i = 0; i < b->ncomponents; i++)
		any |= counts[i] = keep_counts(t->all, l, base, b->components[i].name);
	r = keep_packs(t, b, counts, t->all->index && base == 0);
	return r == 0 && any && t->all->layouts ? keep_layouts(t, &b->m) : r;
}

/* Does what the last save left prove that all attempts are kept? Only where this base is the only one: others get the
 * room that is left, and the bound does not say how much that is. All ranks look when the number of the base's entry
 * passes a multiple of KEEP_LOOK: those that came to count differently decide alike again. */
static bool keep_all(const struct save_bases *all)
{
	const struct save_base *b = all->all[0];

	return save_bases_count(all) == 1 && b->excerpt && all->last->attempts <= SAVE_KEEP_MAX &&
		b->entry / KEEP_LOOK == all->last->base / KEEP_LOOK;
}

size_t save_bases_attempts(const struct save_bases *all, uint64_t *ret_base)
{
	const struct save_base *b = save_bases_count(all) == 1 ? all->all[0] : NULL;
	bool known = b && b->open && (!b->whole || b->whole->open);

	*ret_base = known ? b->entry : 0;
	return known ? all->taken + 1 : SIZE_MAX;
}

int save_bases_decide(struct save_bases *all, const struct store_layout *l)
{
	struct keep_table t = {.all = all, .named_max = SAVE_KEEP_LARGE};
	unsigned n = save_bases_count(all);
	size_t room = SAVE_KEEP_MAX;
	int r = 0;

	all->decided = true;
	if (keep_all(all)) {
		all->taken = all->last->attempts;
		return 0;
	}
	for (unsigned i = 0; i < n; i++)
		if (!save_base_whole(all->all[i]))
			return -ENOMEM;
	for (unsigned i = 0; r == 0 && i < n; i++)
		r = keep_base(&t, l, i);
	r = keep_end(&t, r, all, &room, &all->attempts);
	for (unsigned i = 0; r == 0 && i < n; i++)
		r = save_base_decide(all, all->all[i], &room);
	return r;
}
