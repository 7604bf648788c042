/* SPDX-License-Identifier: Apache-2.0
 *
 * list_mark: the collection of entries that a snapshot covers (list_head.c; docs/format/list.md, "Collected entries"),
 * and the two files of a head:
 *
 *     head.<number>       the mark: a snapshot that names all that is visible there, wherever it was committed
 *     collected.<number>  the collected record, of which the names of collected entries become further names
 *
 * No snapshot is trusted for that. What readers will find at the head, by the snapshots and launch entries that stay,
 * is read as they read it, and compared with what the entries have made visible; and the mark is read again before the
 * first entry goes. Both files are durable before that, so after a loss of power each number is its entry or the
 * record, and both are right. All collectors make the same files, so several of them do no harm. */
#include "core/commit/list/list_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/base/cleanup.h"

struct commit_list_mark {
	struct commit_list at;            /* the list as it is for a reader that begins at the head */
	struct list_made made;
	struct proto_entry e;
	char record[STORAGE_NAME_MAX];     /* collected.<number> */
};

static const char *const mark_names[] = {[COMMIT_LIST_HEAD] = "head.", [COMMIT_LIST_COLLECTED] = "collected."};

void commit_list_mark_name(const char *run, enum commit_list_mark_file file, uint64_t head,
	char name[static STORAGE_NAME_MAX])
{
	snprintf(name, STORAGE_NAME_MAX, "runs/%s/%s%012llu", run, mark_names[file], (unsigned long long)head);
}

enum commit_list_mark_file commit_list_mark_parse(const char *base, uint64_t *ret_head)
{
	for (enum commit_list_mark_file file = COMMIT_LIST_HEAD; file <= COMMIT_LIST_COLLECTED; file++) {
		size_t len = strlen(mark_names[file]);
		const char *digits = base + len;
		char same[24];

		if (strncmp(base, mark_names[file], len) != 0 || strspn(digits, "0123456789") != strlen(digits) ||
			strlen(digits) > 19)
			continue;
		*ret_head = strtoull(digits, NULL, 10);
		snprintf(same, sizeof same, "%012llu", (unsigned long long)*ret_head);
		if (strcmp(digits, same) == 0 && *ret_head && *ret_head % COMMIT_SNAPSHOT_EVERY == 0)
			return file;
	}
	return COMMIT_LIST_NO_MARK;
}

int list_mark_read(struct commit_list *l, const struct list_head *h, struct proto_entry *ret_e, struct base_error *err)
{
	char name[STORAGE_NAME_MAX];
	int r;

	commit_list_mark_name(l->run, COMMIT_LIST_HEAD, h->number, name);
	r = list_file_read(l, STORE_RECORD_MARK, name, h->number, ret_e, err);
	if (r < 0 || (ret_e->kind == PROTO_ENTRY_SNAPSHOT && !ret_e->from && ret_e->list_2 &&
		base_digest_equal(&ret_e->before, &h->self)))
		return r;
	proto_entry_release(ret_e);
	return base_error_set(err, -BASE_EDAMAGED, "it does not say what was visible at the snapshot of its number");
}

BASE_CLEANUP_DEFINE(struct commit_list_mark *, commit_list_mark_free)

/* ---- making ---- */

/* The commits that were visible at the head by the entries themselves. -ENOMEM. */
static int visible_at(const struct commit_list *l, uint64_t head, uint64_t **ret_entries, size_t *ret_n)
{
	uint64_t *all = malloc((l->nsteps + l->ndropped + 1) * sizeof *all);
	size_t n = 0;

	if (!all)
		return -ENOMEM;
	for (size_t i = 0; i < l->nsteps; i++)
		if (l->steps[i].entry < head)
			all[n++] = l->steps[i].entry;
	for (size_t i = 0; i < l->ndropped; i++)
		if (l->dropped[i].entry < head && l->dropped[i].at > head)
			all[n++] = l->dropped[i].entry;
	qsort(all, n, sizeof *all, list_number_order);
	*ret_entries = all;
	*ret_n = n;
	return 0;
}

/* Does it name the steps that the entries have made visible, and say of them what the entries do? -ENOMEM. */
static int steps_true(const struct commit_list *l, const struct proto_entry *e, bool *ret_true)
{
	base_cleanup_free uint64_t *entries = NULL;
	size_t n;
	int r = visible_at(l, e->number, &entries, &n);

	*ret_true = r == 0 && n == e->nlive;
	for (size_t i = 0; *ret_true && i < n; i++) {
		const struct commit_list_step *step = list_step_of_entry(l, entries[i]);

		*ret_true = e->live[i].entry == entries[i] &&
			(!step || commit_equal(&step->commit, &e->live[i].commit));
	}
	*ret_true = *ret_true && list_facts_true(l, e);
	return r;
}

/* Are the launches before the head those that the entries have? */
static bool launches_true(const struct commit_list *l, const struct commit_list *at)
{
	size_t n = l->nbefore;

	for (size_t i = 0; i < l->nlaunches && l->launches[i].entry < at->first; i++)
		n++;
	if (!l->before_known || n != at->nbefore)
		return false;
	for (size_t i = 0; i < n; i++)
		if (strcmp(at->before[i].launch,
			i < l->nbefore ? l->before[i].launch : l->launches[i - l->nbefore].launch) != 0)
			return false;
	return true;
}

/* -ENOENT: nothing may be skipped for a reader that begins there and knows nothing of what was before, or what l knows
 * of acceptances. */
static int mark_state(const struct commit_list *l, uint64_t head, bool accepts, struct commit_list *ret_at,
	struct base_error *err)
{
	struct list_head h = {head, {{0}}};
	const struct list_node *node = list_node_find(l, head);
	struct commit_list fresh;
	int r;

	if (accepts)
		h = l->head;
	else if (node)
		h.self = node->self;
	list_begin(&fresh, l->store, l->run, &l->how);
	r = list_head_open(accepts ? l : &fresh, &h, ret_at, err);
	return r == 0 && ret_at->nskips ? -ENOENT : r;
}

static int mark_make(struct commit_list *l, uint64_t head, bool accepts, struct commit_list_mark *k,
	struct base_error *err)
{
	bool is_true = false;
	int r = mark_state(l, head, accepts, &k->at, err);

	if (r < 0)
		return r == -BASE_EDAMAGED ? -ENOENT : r;
	k->e = (struct proto_entry){.kind = PROTO_ENTRY_SNAPSHOT, .host = "", .run = k->at.run, .number = head,
		.before = k->at.head.self};
	commit_list_mark_name(l->run, COMMIT_LIST_COLLECTED, head, k->record);
	r = list_snapshot_make(&k->at, &k->e, &k->made);
	if (r == 0)
		r = steps_true(l, &k->e, &is_true);
	if (r < 0)
		return base_no_memory_for(err, "run %s", l->run);
	if (is_true && launches_true(l, &k->at))
		return 0;
	return base_error_set(err, -BASE_EDAMAGED, "run %s: snapshot %llu of its list says something else than the "
		"entries before it (vckpt verify --paranoid)", l->run, (unsigned long long)head);
}

static int mark_new(struct commit_list *l, uint64_t head, bool accepts, struct commit_list_mark **ret_k,
	struct base_error *err)
{
	struct commit_list_mark *k = calloc(1, sizeof *k);
	int r = k ? mark_make(l, head, accepts, k, err) : base_no_memory_for(err, "run %s", l->run);

	if (r < 0)
		commit_list_mark_free(k);
	else
		*ret_k = k;
	return r;
}

int commit_list_mark_make(struct commit_list *l, uint64_t head, struct commit_list_mark **ret_k, struct base_error *err)
{
	return mark_new(l, head, false, ret_k, err);
}

int commit_list_mark_own(struct commit_list *l, struct commit_list_mark **ret_k, struct base_error *err)
{
	return l->head.number ? mark_new(l, l->head.number, true, ret_k, err) : -ENOENT;
}

void commit_list_mark_free(struct commit_list_mark *k)
{
	if (!k)
		return;
	list_head_drop(&k->at);
	list_made_release(&k->made);
	free(k);
}

bool commit_list_mark_keeps(const struct commit_list_mark *k, uint64_t n)
{
	if (n >= k->at.first || list_node_find(&k->at, n))
		return true;
	for (size_t i = 0; i < k->at.nbefore; i++)
		if (k->at.before[i].entry == n)
			return true;
	return false;
}

bool commit_list_mark_collected(struct commit_list_mark *k, uint64_t n)
{
	struct proto_entry e = {0};
	int r = list_entry_read(&k->at, n, &e, NULL);
	bool collected = r == 0 ? e.kind == PROTO_ENTRY_COLLECTED : commit_error_passes(r);

	proto_entry_release(&e);
	return collected;
}

/* ---- comparing ---- */

bool commit_list_head_right(const struct commit_list *l, const struct proto_entry *e)
{
	struct proto_entry head = {0};
	struct commit_list one;
	bool right;

	if (e->number <= l->head.number)
		return e->number < l->head.number || base_digest_equal(&e->before, &l->head.self);
	list_begin(&one, l->store, l->run, &l->how); /* of a later collection */
	right = list_entry_read(&one, e->number, &head, NULL) == 0 && (head.kind == PROTO_ENTRY_COLLECTED ||
		(head.kind == PROTO_ENTRY_SNAPSHOT && base_digest_equal(&e->before, &head.self)));
	proto_entry_release(&head);
	return right;
}

/* Does the mark there say the same? 0, -ENOENT, -BASE_EDAMAGED, another error. */
static int mark_compare(struct commit_list_mark *k, struct base_error *err)
{
	struct proto_entry e = {0};
	int r = list_mark_read(&k->at, &k->at.head, &e, err);
	bool same = r == 0 && list_snapshot_equal(&k->e, &e);

	proto_entry_release(&e);
	if (r == 0 && !same)
		return base_error_set(err, -BASE_EDAMAGED, "it says something else than the snapshot of its number");
	return r;
}

int commit_list_mark_check(struct commit_list *l, struct base_error *err)
{
	base_cleanup(commit_list_mark_free_p) struct commit_list_mark *k = NULL;
	int r = l->head.number && !l->nskips ? commit_list_mark_make(l, l->head.number, &k, NULL) : -ENOENT;

	if (r == -ENOENT || r == -BASE_EDAMAGED)
		return 0; /* the list says it */
	return r < 0 ? r : mark_compare(k, err);
}

/* ---- putting ---- */

int commit_list_mark_body(const struct commit_list_mark *k, enum commit_list_mark_file file, struct base_buf *ret_body)
{
	const struct proto_entry record = {.kind = PROTO_ENTRY_COLLECTED, .host = "", .run = k->e.run,
		.number = k->e.number, .before = k->e.before};

	return proto_entry_encode(file == COMMIT_LIST_HEAD ? &k->e : &record, ret_body);
}

/* Another file of that name is damaged: what it should say is known. */
static int file_put(struct commit_list_mark *k, const char *name, enum commit_list_mark_file file)
{
	enum store_record_kind kind = file == COMMIT_LIST_HEAD ? STORE_RECORD_MARK : STORE_RECORD_ENTRY;
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT, record = BASE_BUF_INIT;
	struct store *s = k->at.store;
	int r = commit_list_mark_body(k, file, &body);

	if (r == 0 && body.len > store_record_max(kind))
		r = -BASE_ELIMIT;
	if (r == 0)
		r = store_record_encode(kind, s->info.id, body.data, body.len, &record);
	if (r == 0)
		r = storage_put(s->storage, name, record.data, record.len);
	if (r == -ENOSPC || r == -EDQUOT) {
		store_reserve_release(s);
		r = storage_put(s->storage, name, record.data, record.len);
	}
	return r == STORAGE_PUT_OTHER ? storage_replace(s->storage, name, record.data, record.len) : r;
}

int commit_list_mark_put(struct commit_list_mark *k, struct base_error *err)
{
	struct base_error why = {0};
	char mark[STORAGE_NAME_MAX];
	const char *name = mark;
	int r;

	commit_list_mark_name(k->e.run, COMMIT_LIST_HEAD, k->e.number, mark);
	r = file_put(k, mark, COMMIT_LIST_HEAD);
	if (r == 0)
		r = mark_compare(k, &why);
	if (r == 0) {
		name = k->record;
		r = file_put(k, k->record, COMMIT_LIST_COLLECTED);
	}
	return r < 0 ? base_error_set(err, r, "%s: %s", name, why.code ? why.text : base_error_name(r)) : 0;
}

/* If the record has all the names that it can have, another file of the same bytes goes on. If it has none any more,
 * another collector has gone on so. */
int commit_list_mark_collect(struct commit_list_mark *k, uint64_t n)
{
	struct storage *s = k->at.store->storage;
	char name[STORAGE_NAME_MAX];
	int r;

	if (!s->ops->replace_by_name)
		return -EOPNOTSUPP;
	list_entry_name(&k->at, n, name);
	r = s->ops->replace_by_name(s, name, k->record);
	if (r != -EMLINK && r != -ENOENT)
		return r;
	if (r == -EMLINK)
		storage_remove(s, k->record);
	r = file_put(k, k->record, COMMIT_LIST_COLLECTED);
	return r < 0 ? r : s->ops->replace_by_name(s, name, k->record);
}
