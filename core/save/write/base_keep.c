/* SPDX-License-Identifier: Apache-2.0
 *
 * base_keep: which attempts of the bases are kept (keep.h), by the pack tables of their manifests. All ranks read the
 * same manifests, so they decide alike without a message, before the first piece is looked at; what of an attempt has
 * not changed is not known by then, so its bytes are those that the bases refer to.
 *
 * Of several bases most of a state usually follows one, and what the others name would only take its places. So one
 * base is decided on after the other, and each gets the places that those before it left: first bases with the save's
 * own layout, then the others; of equal ones in their order.
 *
 * Metadata of a base is never referred to, its layouts apart: a job's ranks other than the one that stores a layout
 * refer to the base's copy, and so to that attempt. Blobs are found by the index alone. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/save/write/base_internal.h"

#define KEEP_ATTEMPTS_MAX 1024u /* of a forged manifest; others are referred to first come, as long as there is room */

struct keep_table {
	const struct save_bases *all;
	struct base_attempt *attempts; size_t n, room;
	size_t named, named_max;
};

/* Length of the attempt in a pack's name; 0: it has none. */
static size_t keep_attempt(const char *pack, const char **ret_class)
{
	const char *count = strchr(pack, '-'), *rank = count ? strchr(count + 1, '-') : NULL;
	const char *class = rank ? strchr(rank + 1, '-') : NULL;

	if (!class || rank - pack >= (ptrdiff_t)PROTO_ATTEMPT_MAX)
		return 0;
	*ret_class = class + 1;
	return (size_t)(rank - pack);
}

static struct base_attempt *keep_find(struct base_attempt *all, size_t n, const char *pack, size_t len)
{
	for (size_t i = n; i-- > 0;)
		if (strncmp(all[i].name, pack, len) == 0 && all[i].name[len] == '\0')
			return &all[i];
	return NULL;
}

static const struct base_attempt *keep_decided(const struct save_bases *all, unsigned nbases, const char *pack,
	size_t len)
{
	const struct base_attempt *found = NULL;

	for (unsigned i = 0; !found && i < nbases; i++)
		found = keep_find(all->all[i]->attempts, all->all[i]->nattempts, pack, len);
	return found;
}

bool save_bases_keep(const struct save_bases *all, const char *pack, bool layout)
{
	const char *class;
	bool merges = all && atomic_load_explicit(&all->merges, memory_order_acquire);
	size_t len = merges ? keep_attempt(pack, &class) : 0;
	const struct base_attempt *a = len ? keep_decided(all, save_bases_count(all), pack, len) : NULL;

	return !a || a->keep.kept || (layout && a->keep.named);
}

/* The attempt's row, which is made if need be. 1: *ret_a; 0: there is none, because it was decided on before or there
 * are too many; -ENOMEM. */
static int keep_row(struct keep_table *t, const char *pack, size_t len, struct base_attempt **ret_a)
{
	*ret_a = keep_find(t->attempts, t->n, pack, len);
	if (*ret_a)
		return 1;
	if (t->n == KEEP_ATTEMPTS_MAX || keep_decided(t->all, save_bases_count(t->all), pack, len))
		return 0;
	if (base_array_room(t->attempts, t->room, t->n + 1) < 0)
		return -ENOMEM;
	*ret_a = &t->attempts[t->n++];
	**ret_a = (struct base_attempt){0};
	memcpy((*ret_a)->name, pack, len);
	return 1;
}

static int keep_bytes(struct keep_table *t, const char *pack, size_t len, uint64_t bytes)
{
	struct base_attempt *a;
	int r = bytes ? keep_row(t, pack, len, &a) : 0;

	if (r == 1)
		a->keep.bytes = base_max(a->keep.bytes, bytes);
	return r < 0 ? r : 0;
}

/* The table is sorted by name, so packs of an attempt are one after another. */
static int keep_packs(struct keep_table *t, const struct proto_manifest *m)
{
	const char *attempt = "", *class;
	uint64_t bytes = 0;
	size_t len = 0;

	for (uint32_t i = 0; i < m->npacks; i++) {
		const struct proto_manifest_pack *p = &m->packs[i];

		if (len == 0 || strncmp(p->pack, attempt, len + 1) != 0) {
			if (keep_bytes(t, attempt, len, bytes) < 0)
				return -ENOMEM;
			bytes = 0;
			attempt = p->pack;
			len = keep_attempt(attempt, &class);
		}
		if (keep_attempt(p->pack, &class) && strcmp(class, "meta") != 0 &&
			(t->all->index || strcmp(class, "blobs") != 0))
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
		size_t len = pack < m->npacks ? keep_attempt(m->packs[pack].pack, &class) : 0;

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
	base_cleanup_free struct save_keep *keep = calloc(t->n + 1, sizeof *keep);
	size_t taken = 0;

	if (!keep)
		return -ENOMEM;
	for (size_t i = 0; i < t->n; i++)
		keep[i] = t->attempts[i].keep;
	if (save_keep_choose(keep, t->n, *room) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < t->n; i++) {
		t->attempts[i].keep = keep[i];
		taken += keep[i].kept || keep[i].named;
		if (!keep[i].kept)
			atomic_store_explicit(&all->merges, true, memory_order_release);
	}
	*room -= base_min(*room, taken);
	return 0;
}

int save_base_decide(struct save_bases *all, struct save_base *b, size_t *room)
{
	struct keep_table t = {.all = all, .named_max = base_min(*room, SAVE_KEEP_LARGE)};
	int r = b->open ? keep_packs(&t, &b->m) : 0;

	if (r == 0 && b->open && all->layouts)
		r = keep_layouts(&t, &b->m);
	if (r == 0)
		r = keep_choose(&t, all, room);
	if (r < 0) {
		free(t.attempts);
		return r;
	}
	b->attempts = t.attempts;
	b->nattempts = t.n;
	return 0;
}

int save_bases_decide(struct save_bases *all, const struct base_digest *layout)
{
	unsigned n = save_bases_count(all);
	size_t room = SAVE_KEEP_MAX;
	int r = 0;

	all->decided = true;
	for (unsigned i = 0; r == 0 && i < 2 * n; i++) {
		struct save_base *b = all->all[i % n];

		if (save_base_has_layout(b, layout) == (i < n))
			r = save_base_decide(all, b, &room);
	}
	return r;
}
