/* SPDX-License-Identifier: Apache-2.0
 *
 * list_head: lists whose first entries were collected (docs/format/list.md, "Collected entries"; list_mark.c and
 * core/upkeep/gc_list.c collect).
 *
 * A number that was used stays used. A collection deletes no entry: it puts a collected record in its place, in one
 * moment. The record names the head, a snapshot that shows what they made visible. So nothing changes for writers, for
 * the search of the end, or for what a missing number means: it is the end, or damage.
 *
 * A reader that comes to a collected record goes on behind the head, with what was visible there. That is in two places
 * that do not need each other: the chain of the snapshot, and the file head.<number>. The entries of the chain stay
 * entries, and so do the launches that later ones go on from; whatever the list becomes, later chains need no others
 * below the head (docs/format/list.md). If they did, readers would take the list from the head on, as a whole.
 *
 * A later collection may take what a reader is about to read, too. Then the reader comes to a record that names a
 * higher head, or the first record does, which every collection replaces; it begins again there. Each time the head is
 * higher, so it ends. If there is no higher one, what was visible at the head is lost: then collected records are
 * damage, and a snapshot behind the head shows what is visible, as after any damage. */
#include "core/commit/list/list_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"

#define FIRST_MAX 65u   /* more entries are not kept before the head: one for each bit of the number of launches */

void list_head_see(struct commit_list *l, const struct proto_entry *e)
{
	if (e->kind == PROTO_ENTRY_COLLECTED && e->number > l->seen.number)
		l->seen = (struct list_head){e->number, e->before};
}

/* ---- beginning at a head ---- */

/* -ENOENT, -BASE_EDAMAGED: the snapshot ret_at->broken of its chain cannot be used. */
static int start_chain(struct commit_list *at, const struct list_head *h, struct base_error *err)
{
	struct proto_entry e = {0};
	int r;

	at->broken = h->number;
	r = list_accepted(at, h->number) ? -ENOENT : list_entry_read(at, h->number, &e, err);
	if (r == 0 && (e.kind != PROTO_ENTRY_SNAPSHOT || !base_digest_equal(&e.self, &h->self))) {
		proto_entry_release(&e);
		r = base_error_set(err, -BASE_EDAMAGED, "it is not the snapshot that was collected up to");
	}
	return r < 0 ? r : list_start(at, h->number, &e, err);
}

/* No later snapshot goes on from it: its chain is not known. */
static int start_mark(struct commit_list *at, const struct list_head *h, struct base_error *err)
{
	struct proto_entry e = {0};
	int r = list_mark_read(at, h, &e, err);

	if (r == 0)
		r = list_start(at, h->number, &e, err);
	if (r < 0)
		return r;
	at->tail = h->self;
	at->nnodes = 0;
	return 0;
}

/* Snapshot at->broken of the chain cannot be used: an error r, or its bytes are wrong. The file replaces it. */
static int chain_broken(struct commit_list *at, int r, const struct base_error *why)
{
	char text[160];

	if (list_accepted(at, at->broken))
		return 0;
	if (commit_error_passes(r)) {
		snprintf(text, sizeof text, "it cannot be read (%s), and is left out until it can", base_error_name(r));
		at->unread = true;
		at->hole = at->broken;
	} else {
		snprintf(text, sizeof text, "%.100s", r != -ENOENT && why->code ? why->text
			: "it is missing, or is no snapshot that later ones can go on from");
	}
	at->unwarned = true;
	return list_skip_add(at, at->broken, 1, text);
}

/* Is the head behind the end? Then the end is lost, and entries behind the head with it. */
static int head_beyond(struct commit_list *at, uint64_t head)
{
	int r = list_entry_exists(at, head);

	if (r == 0)
		r = list_entry_exists(at, head + 1);
	return r < 0 ? r : !r;
}

static int start_head(struct commit_list *at, const struct list_head *h, struct base_error *err)
{
	struct base_error why = {0}, other = {0};
	int r = start_chain(at, h, &why), beyond, mark;

	if (r == 0 || at->seen.number > h->number)
		return r;
	if (r != -ENOENT && r != -BASE_EDAMAGED && !list_leaves_out(at, r))
		return why.code ? base_error_set(err, r, "%s", why.text) : list_unreadable(at, r, err);
	beyond = head_beyond(at, h->number);
	mark = beyond ? -ENOENT : start_mark(at, h, &other);
	if (beyond >= 0 && (mark == -ENOENT || mark == -BASE_EDAMAGED))
		return -ENOENT;
	if (beyond < 0 || mark < 0)
		return other.code ? base_error_set(err, mark, "%s", other.text)
			: list_unreadable(at, beyond < 0 ? beyond : mark, err);
	return chain_broken(at, r, &why) < 0 ? base_no_memory_for(err, "run %s", at->run) : 0;
}

int list_head_open(const struct commit_list *l, const struct list_head *h, struct commit_list *ret_at,
	struct base_error *err)
{
	struct commit_list_how how = l->how;
	int r;

	how.newest = false;
	list_begin(ret_at, l->store, l->run, &how);
	ret_at->seen = *h;
	ret_at->accepts = l->accepts; /* lent */
	ret_at->naccepts = l->naccepts;
	ret_at->by_number = l->by_number;
	r = start_head(ret_at, h, err);
	ret_at->head = *h;
	return r < 0 ? r : list_launches_start(ret_at, err);
}

void list_head_drop(struct commit_list *at)
{
	at->accepts = NULL;
	at->by_number = (struct base_table){0};
	list_state_release(at);
}

/* ---- coming to a collected entry ---- */

/* The first entry that was collected names the head that the last collection has left. */
static int first_look(struct commit_list *l, struct base_error *err)
{
	bool found = false;
	int r = 0;

	for (uint64_t n = 0; n < FIRST_MAX && !found && !commit_error_passes(r); n++) {
		struct proto_entry e = {0};

		r = list_entry_read(l, n, &e, NULL);
		found = r == 0 && e.kind == PROTO_ENTRY_COLLECTED;
		proto_entry_release(&e);
	}
	return commit_error_passes(r) ? list_unreadable(l, r, err) : 0;
}

static void head_take(struct commit_list *l, struct commit_list *at)
{
	at->accepts = NULL;
	list_accepts_move(at, l);
	at->synced = l->synced;
	at->open = l->open;
	at->open_at = l->open_at;
	at->lost = l->lost;
	list_state_release(l);
	*l = *at;
}

int list_jump(struct commit_list *l, const struct proto_entry *e, struct base_error *err)
{
	int r;

	list_head_see(l, e);
	if (l->next && (r = first_look(l, err)) < 0)
		return r;
	while (l->seen.number > l->lost) {
		struct list_head h = l->seen;
		struct commit_list at;

		r = list_head_open(l, &h, &at, err);
		if (r == 0) {
			head_take(l, &at);
			return 0;
		}
		l->seen = at.seen;
		list_head_drop(&at);
		if (r != -ENOENT && r != -BASE_EDAMAGED)
			return r;
		if (l->seen.number == h.number && (r = first_look(l, err)) < 0)
			return r;
		if (l->seen.number == h.number)
			l->lost = h.number;
	}
	return base_error_set(err, -BASE_EDAMAGED,
		"it was collected, and what was visible at entry %llu cannot be read: neither that snapshot and those "
		"that it goes on from, nor the file head.%012llu",
		(unsigned long long)l->lost, (unsigned long long)l->lost);
}

uint64_t commit_list_head_named(const struct commit_list *l) { return l->seen.number; }

bool commit_list_digest_named(const struct commit_list *l, uint64_t n, struct base_digest *ret_d)
{
	if (n % COMMIT_SNAPSHOT_EVERY || n == 0)
		return false;
	for (size_t i = 0; i < l->nnodes; i++)
		if (l->nodes[i].from == n) {
			*ret_d = l->nodes[i].from_digest;
			return true;
		}
	*ret_d = l->seen.self;
	return n == l->seen.number;
}

/* ---- what readers that begin at a head know of attempts ---- */

bool commit_list_launch_decided(const struct commit_list *l, uint64_t entry)
{
	size_t at = base_bisect(i, 0, l->nlaunches, l->launches[i].entry < entry);

	return entry < l->first || (at < l->nlaunches && l->launches[at].entry == entry);
}

uint64_t commit_list_attempt_from(const struct commit_list *l, const char *attempt)
{
	uint64_t entry;
	enum commit_attempt_state state = commit_list_attempt(l, attempt, NULL, &entry);

	if (state == COMMIT_ATTEMPT_UNDECIDED)
		return PROTO_NONE;
	if (state == COMMIT_ATTEMPT_ABORTED)
		return commit_list_launch_decided(l, entry) ? PROTO_NONE : entry;
	if (commit_list_entry_live(l, entry))
		return PROTO_NONE;
	for (size_t i = 0; i < l->ndropped; i++) /* until then snapshots showed it */
		if (l->dropped[i].entry == entry && l->dropped[i].at > entry)
			return l->dropped[i].at;
	return entry;
}

uint64_t commit_list_aborts_from(const struct commit_list *l, const char *launch)
{
	uint64_t from = PROTO_NONE;

	for (size_t i = 0; i < l->nattempts; i++) /* in the order of decision */
		if (strncmp(l->attempts[i].name, launch, 16) == 0)
			from = l->attempts[i].state == COMMIT_ATTEMPT_COMMITTED ? PROTO_NONE
				: base_min(from, l->attempts[i].entry);
	return from;
}
