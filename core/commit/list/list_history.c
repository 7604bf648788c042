/* SPDX-License-Identifier: Apache-2.0
 *
 * list_history: going backwards, a removal is met before the commit that it removes, and a commit before the one that
 * it replaces. So what became of a commit is known when it is met: it is visible, or an entry that was met has taken it
 * away, or it never counted. */
#include "core/commit/list/list_history.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/commit/list/list_internal.h"

struct taken { uint64_t entry, by; bool replaced; };

struct history {
	struct commit_list *l;
	uint64_t most;                          /* entries that are read; UINT64_MAX: all */
	int (*f)(void *arg, const struct commit_list_event *e);
	void *arg;
	struct taken *taken; size_t ntaken;     /* commits that entries which were met have taken away */
	struct base_table by_entry;
	struct commit_list_history *ret;
	struct base_error *err;
};

static const struct taken *taken_find(const struct history *h, uint64_t entry)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&h->by_entry, base_table_hash_number(entry), &at)) != BASE_TABLE_NONE)
		if (h->taken[i].entry == entry)
			return &h->taken[i];
	return NULL;
}

/* An entry that was met later, going back, is the one that did it. */
static int taken_add(struct history *h, uint64_t entry, uint64_t by, bool replaced)
{
	struct taken *t = (struct taken *)taken_find(h, entry);

	if (!t) {
		if (h->ntaken + 1 >= BASE_TABLE_NONE || base_array_more(h->taken, h->ntaken) < 0 ||
			base_table_reserve(&h->by_entry, 1) < 0)
			return base_no_memory_for(h->err, "run %s", h->l->run);
		base_table_add(&h->by_entry, base_table_hash_number(entry), (uint32_t)h->ntaken);
		t = &h->taken[h->ntaken++];
	}
	*t = (struct taken){entry, by, replaced};
	return 0;
}

/* ---- one entry ---- */

static int met_commit(struct history *h, uint64_t n, const struct proto_entry *e)
{
	struct commit_list_event event = {.kind = COMMIT_LIST_SAVED, .entry = n, .time_ns = e->time_ns, .host = e->host,
		.commit = &e->commit, .gone = PROTO_NONE};
	const struct taken *t = taken_find(h, n);
	int r = 0;

	if (t) {
		event.gone = t->by;
		event.replaced = t->replaced;
	} else {
		r = commit_list_know_entry(h->l, n, h->err);
		if (r < 0 || !commit_list_entry_live(h->l, n))
			return r; /* it never counted */
	}
	if (e->commit.replaces != PROTO_NONE && e->commit.replaces < n)
		r = taken_add(h, e->commit.replaces, n, true);
	return r < 0 ? r : h->f(h->arg, &event);
}

static int met_remove(struct history *h, uint64_t n, const struct proto_entry *e)
{
	struct commit_list_event event = {.kind = COMMIT_LIST_REMOVED, .entry = n, .time_ns = e->time_ns,
		.host = e->host, .reason = e->reason, .gone = PROTO_NONE};
	struct proto_entry of = {0};
	int r;

	if (e->removes >= n)
		return 0;
	r = taken_add(h, e->removes, n, false);
	if (r < 0)
		return r;
	if (list_entry_read(h->l, e->removes, &of, NULL) == 0 && of.kind == PROTO_ENTRY_COMMIT)
		event.commit = &of.commit;
	h->ret->entries++;
	r = h->f(h->arg, &event);
	proto_entry_release(&of);
	return r;
}

static int met_abort(struct history *h, uint64_t n, const struct proto_entry *e)
{
	const struct commit_list_event event = {.kind = COMMIT_LIST_ABORTED, .entry = n, .time_ns = e->time_ns,
		.host = e->host, .attempt = e->attempt, .reason = e->reason, .rank = e->rank, .gone = PROTO_NONE};

	return h->f(h->arg, &event);
}

static int met_unreadable(struct history *h, uint64_t n, const char *why)
{
	const struct commit_list_event event = {.kind = COMMIT_LIST_UNREADABLE, .entry = n, .reason = why,
		.gone = PROTO_NONE};

	return h->f(h->arg, &event);
}

/* ---- entries ---- */

/* Entry *n is missing. The next lower one that there is; *n 0 and 1: none. A single file far away makes a gap of any
 * length. */
static int gap_pass(struct history *h, uint64_t *n)
{
	const struct list_numbers *x = &h->l->numbers;
	int r = list_numbers_read(h->l, h->err);
	size_t at = r < 0 ? 0 : base_bisect(i, 0, x->n, x->all[i] < *n);

	if (r < 0)
		return r;
	*n = at > 0 ? x->all[at - 1] + 1 : 0;
	return 0;
}

static int entry_meet(struct history *h, uint64_t n, const struct proto_entry *e)
{
	switch (e->kind) { /* others say nothing that people look for */
	case PROTO_ENTRY_COMMIT: return met_commit(h, n, e);
	case PROTO_ENTRY_REMOVE: return met_remove(h, n, e);
	case PROTO_ENTRY_ABORT: return met_abort(h, n, e);
	default: return 0;
	}
}

/* Down to entry 0, or to a collected record: then *ret_n is one above it. */
static int entries_meet(struct history *h, uint64_t *ret_n)
{
	uint64_t n = commit_list_next(h->l);
	int r = 0;

	while (r == 0 && n > 0 && !h->ret->collected && h->ret->entries < h->most) {
		struct proto_entry e = {0};
		struct base_error why = {0};

		if (list_accepted(h->l, n - 1)) {
			n--;
			continue;
		}
		r = list_entry_read(h->l, n - 1, &e, &why);
		h->ret->entries++;
		if (r == -ENOENT) {
			r = met_unreadable(h, n - 1, "it is missing");
			n--;
			if (r == 0)
				r = gap_pass(h, &n);
			continue;
		}
		if (r == -BASE_EDAMAGED)
			r = met_unreadable(h, n - 1, why.text);
		else if (r < 0)
			r = base_error_set(h->err, r, "run %s: entry %llu: %s", h->l->run, (unsigned long long)n - 1,
				why.text);
		else if (e.kind == PROTO_ENTRY_COLLECTED)
			h->ret->collected = e.number;
		else
			r = entry_meet(h, n - 1, &e);
		n -= !h->ret->collected;
		proto_entry_release(&e);
	}
	*ret_n = n;
	return r;
}

static int compare_entries(const void *a, const void *b)
{
	const struct commit_list_step *const *x = a, *const *y = b;

	return ((*x)->entry < (*y)->entry) - ((*x)->entry > (*y)->entry);
}

/* What is visible of those that were collected: entries below n. */
static int collected_meet(struct history *h, uint64_t n)
{
	base_cleanup_free const struct commit_list_step **all = NULL;
	size_t count, found = 0;
	int r = commit_list_know_all(h->l, h->err);

	if (r < 0)
		return r;
	count = commit_list_count(h->l);
	all = calloc(count + 1, sizeof *all);
	if (!all)
		return base_no_memory_for(h->err, "run %s", h->l->run);
	for (size_t i = 0; i < count; i++)
		if (commit_list_at(h->l, i)->entry < n)
			all[found++] = commit_list_at(h->l, i);
	if (found)
		qsort(all, found, sizeof *all, compare_entries);
	for (size_t i = 0; r == 0 && i < found; i++) {
		const struct commit_list_event event = {.kind = COMMIT_LIST_SAVED, .entry = all[i]->entry,
			.time_ns = all[i]->commit.time_ns, .commit = &all[i]->commit, .gone = PROTO_NONE};

		r = h->f(h->arg, &event);
	}
	return r;
}

int commit_list_history_each(struct commit_list *l, uint64_t most,
	int (*f)(void *arg, const struct commit_list_event *e), void *arg, struct commit_list_history *ret_h,
	struct base_error *err)
{
	struct history h = {.l = l, .most = most ? most : UINT64_MAX, .f = f, .arg = arg, .ret = ret_h, .err = err};
	bool listed = l->numbers.read;
	uint64_t n;
	int r;

	*ret_h = (struct commit_list_history){0};
	r = entries_meet(&h, &n);
	if (r == 0 && ret_h->collected)
		r = collected_meet(&h, n);
	if (!listed)
		list_numbers_release(l);
	free(h.taken);
	base_table_release(&h.by_entry);
	return r;
}
