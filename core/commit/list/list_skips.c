/* SPDX-License-Identifier: Apache-2.0
 *
 * list_skips: entries that decide nothing. Damaged ones are in an array of stretches by number, because they are found
 * in that order: a file far behind the end makes one stretch of all numbers before it, however many they are. Numbers
 * that accept entries name are in a hash table; a stretch only counts them, so that an acceptance never cuts it. */
#include "core/commit/list/list_internal.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/log.h"

#define WARN_SKIPS 16u    /* damaged entries or stretches of a list that are named in warnings */
#define MISSING "it is missing, though later entries exist"

/* ---- accepted ones ---- */

bool list_accepted(const struct commit_list *l, uint64_t n)
{
	uint32_t hash, i;
	size_t at = 0;

	if (!l->naccepts)
		return false;
	hash = base_table_hash_number(n);
	while ((i = base_table_next(&l->by_number, hash, &at)) != BASE_TABLE_NONE)
		if (l->accepts[i] == n)
			return true;
	return false;
}

int list_accepts_reserve(struct commit_list *l, size_t more)
{
	int r = base_array_room(l->accepts, l->accepts_size, l->naccepts + more);

	return r < 0 ? r : base_table_reserve(&l->by_number, more);
}

bool list_accept_add(struct commit_list *l, uint64_t n)
{
	const struct list_skip *s = list_skip_find(l, n);

	if (list_accepted(l, n))
		return false;
	l->accepts[l->naccepts] = n;
	base_table_add(&l->by_number, base_table_hash_number(n), (uint32_t)l->naccepts++);
	if (!s)
		return true;
	l->skips[s - l->skips].accepted++;
	l->damaged--;
	return false;
}

void list_accepts_move(struct commit_list *to, struct commit_list *from)
{
	to->accepts = base_steal(from->accepts);
	to->naccepts = from->naccepts;
	to->accepts_size = from->accepts_size;
	to->by_number = from->by_number;
	from->naccepts = 0;
	from->accepts_size = 0;
	from->by_number = (struct base_table){0};
}

/* ---- damage ---- */

/* Index of the stretch that holds n, or of the first one behind it. */
static size_t skip_place(const struct commit_list *l, uint64_t n)
{
	return base_bisect(i, 0, l->nskips, l->skips[i].first + (l->skips[i].count - 1) < n);
}

const struct list_skip *list_skip_find(const struct commit_list *l, uint64_t n)
{
	size_t i = skip_place(l, n);

	return i < l->nskips && l->skips[i].first <= n ? &l->skips[i] : NULL;
}

int list_skip_add(struct commit_list *l, uint64_t first, uint64_t count, const char *why)
{
	struct list_skip *last = l->nskips ? &l->skips[l->nskips - 1] : NULL;
	char *text = NULL;
	size_t at;

	if (!why && last && !last->why && !last->warned && last->first + last->count == first) {
		last->count += count;
		l->damaged += count;
		return 0;
	}
	if (base_array_room(l->skips, l->skips_size, l->nskips + 1) < 0 || (why && !(text = strdup(why))))
		return -ENOMEM;
	for (at = l->nskips++; at && l->skips[at - 1].first > first; at--) /* from before the head: a few */
		l->skips[at] = l->skips[at - 1];
	l->skips[at] = (struct list_skip){.first = first, .count = count, .why = text};
	l->damaged += count;
	return 0;
}

/* What is wrong with these entries. */
static void skip_text(const struct list_skip *s, char text[static COMMIT_LIST_WHY_BYTES])
{
	if (s->why || s->count == 1)
		snprintf(text, COMMIT_LIST_WHY_BYTES, "%s", s->why ? s->why : MISSING);
	else if (s->accepted)
		snprintf(text, COMMIT_LIST_WHY_BYTES, "of the %" PRIu64 " entries from this one on %" PRIu64
			" are missing, though later entries exist, and the others are accepted as damaged", s->count,
			s->count - s->accepted);
	else
		snprintf(text, COMMIT_LIST_WHY_BYTES, "this entry and the %" PRIu64
			" after it are missing, though later entries exist", s->count - 1);
}

/* A later entry may accept it, so this waits until all is read. */
void list_skips_warn(struct commit_list *l)
{
	char name[STORAGE_NAME_MAX], why[COMMIT_LIST_WHY_BYTES];
	unsigned warned = 0;

	for (size_t i = 0; l->unwarned && i < l->nskips; i++) {
		struct list_skip *s = &l->skips[i];

		if (s->accepted == s->count || s->warned)
			continue;
		s->warned = true;
		list_entry_name(l, s->first, name);
		skip_text(s, why);
		if (warned < WARN_SKIPS)
			base_warning("%s/%s: %s; %s skipped", l->store->path, name, why,
				s->count == 1 ? "entry" : "entries");
		else if (warned == WARN_SKIPS)
			base_warning("%s/%s: %s; entry skipped, and others after it (vckpt verify names them all)",
				l->store->path, name, why);
		warned++;
	}
	l->unwarned = false;
}

void list_skips_release(struct commit_list *l)
{
	for (size_t i = 0; i < l->nskips; i++)
		free(l->skips[i].why);
	free(l->skips);
	free(l->accepts);
	base_table_release(&l->by_number);
}

/* ---- for others ---- */

uint64_t commit_list_damaged(const struct commit_list *l) { return l->damaged; }
bool commit_list_skips(const struct commit_list *l) { return l->nskips || l->naccepts; }

bool commit_list_skipped(const struct commit_list *l, uint64_t n)
{
	return list_accepted(l, n) || list_skip_find(l, n);
}

uint64_t commit_list_damaged_next(const struct commit_list *l, uint64_t *at, const char **ret_why)
{
	for (size_t i = skip_place(l, *at); i < l->nskips; i++) {
		const struct list_skip *s = &l->skips[i];

		*at = base_max(*at, s->first);
		for (; *at - s->first < s->count && s->accepted < s->count; (*at)++) {
			if (list_accepted(l, *at))
				continue;
			if (ret_why)
				*ret_why = s->why ? s->why : MISSING;
			return (*at)++;
		}
	}
	return PROTO_NONE;
}

bool commit_list_damage_next(const struct commit_list *l, size_t *at, struct commit_list_damage *ret_d)
{
	while (*at < l->nskips) {
		const struct list_skip *s = &l->skips[(*at)++];

		if (s->accepted == s->count)
			continue;
		*ret_d = (struct commit_list_damage){
			.first = s->first, .count = s->count, .damaged = s->count - s->accepted};
		skip_text(s, ret_d->why);
		return true;
	}
	return false;
}
