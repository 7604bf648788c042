/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_list: entries of lists.
 *
 *     one copy good         the record is written again
 *     both bad, or missing  from a copy of the store (same id), if its digest is known here: by the entry after it,
 *                           a snapshot that goes on from it, or the record that names it as the head; if the copy's
 *                           entries lead from it to one that is known so; or if it commits a manifest that is here;
 *                           else
 *                           accepted as damaged: it decides nothing from now on, for all readers
 *
 * What refers to an accepted entry shows what it was: measures of its step, a removal or a replacement that names it,
 * the snapshot after it. mend_step.c handles the steps. */
#include "core/upkeep/mend_internal.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/plural.h"
#include "core/commit/list/list_facts.h"
#include "core/commit/notes/stats.h"

/* Is the file an entry of that run? */
static bool entry_of(const char *file, const char *run, uint64_t *ret_n)
{
	struct file_name n;
	bool entry = file_name_parse(file, &n) == STORE_RECORD_ENTRY && !n.collected && strcmp(n.run, run) == 0;

	*ret_n = n.number;
	return entry;
}

/* The record's body and the entry in it, of this run and number, or of an entry that was collected. */
static int entry_or_collected(struct store *s, const char *run, uint64_t n, struct store_record *ret_r,
	struct proto_entry *ret_e)
{
	char name[STORAGE_NAME_MAX];
	int r;

	commit_list_entry_name(run, n, name);
	r = store_record_get(s->storage, name, STORE_RECORD_ENTRY, s->info.id, ret_r, NULL, NULL);
	if (r == 0)
		r = proto_entry_decode(ret_r->body, ret_r->len, ret_e);
	if (r == 0 && ret_e->version > 1 && (strcmp(ret_e->run, run) != 0
	    || (ret_e->kind == PROTO_ENTRY_COLLECTED ? ret_e->number <= n : ret_e->number != n))) {
		proto_entry_release(ret_e);
		r = -BASE_EFORMAT;
	}
	if (r < 0)
		store_record_release(ret_r);
	return r;
}

static int entry_record(struct store *s, const char *run, uint64_t n, struct store_record *ret_r,
	struct proto_entry *ret_e)
{
	int r = entry_or_collected(s, run, n, ret_r, ret_e);

	if (r < 0 || ret_e->kind != PROTO_ENTRY_COLLECTED)
		return r;
	proto_entry_release(ret_e);
	store_record_release(ret_r);
	return -BASE_EFORMAT;
}

int mend_entry_read(struct store *s, const char *run, uint64_t n, struct proto_entry *ret_e)
{
	struct store_record record = {0};
	int r = entry_record(s, run, n, &record, ret_e);

	if (r == 0)
		store_record_release(&record);
	return r;
}

/* numbers NULL: all of the run. */
static void treat_entries(struct mend *m, const char *run, const uint64_t *numbers, size_t n)
{
	uint64_t number;

	for (size_t i = 0; i < m->nfaults; i++)
		if (entry_of(m->faults[i].file, run, &number)
		    && (!numbers || bsearch(&number, numbers, n, sizeof number, base_compare_64)))
			m->faults[i].treated = true;
}

/* ---- from a copy of the store ---- */

/* What is known of an entry from others. */
struct entry_wanted { bool known; struct base_digest self; };

/* What an entry of that number must have as `before`; false: the entry before it cannot be read. */
static bool entry_before(struct store *s, const char *run, uint64_t n, struct base_digest *ret_d)
{
	struct proto_entry e = {0};
	bool known = n == 0 || mend_entry_read(s, run, n - 1, &e) == 0;

	*ret_d = e.self;
	proto_entry_release(&e);
	return known;
}

static bool copy_given(const struct mend *m)
{
	return m->from && memcmp(m->from->info.id, m->store->info.id, 16) == 0;
}

/* The digest of entry n by what is here. */
static bool digest_known(struct mend *m, const struct commit_list *l, uint64_t n, struct base_digest *ret_d)
{
	struct proto_entry next = {0};
	bool known = mend_entry_read(m->store, commit_list_run(l), n + 1, &next) == 0;

	*ret_d = next.before;
	proto_entry_release(&next);
	return known || commit_list_digest_named(l, n, ret_d);
}

/* Do the entries of the copy that follow entry n lead to one whose digest is known here, and is the same? A collected
 * record leads to its head, but has no digest of what is before it: that does for launches, which have no other proof.
 * (Snapshots have one: the head's chain.) */
static bool copy_leads(struct mend *m, const struct commit_list *l, uint64_t n, const struct proto_entry *of)
{
	struct base_digest self = of->self, known;
	bool follows = true;

	while (follows && n < commit_list_next(l)) {
		struct store_record record = {0};
		struct proto_entry e = {0};

		if (digest_known(m, l, n, &known))
			return base_digest_equal(&known, &self);
		follows = entry_or_collected(m->from, commit_list_run(l), n + 1, &record, &e) == 0
			&& (e.kind == PROTO_ENTRY_COLLECTED ? of->kind == PROTO_ENTRY_LAUNCH
				: base_digest_equal(&e.before, &self));
		self = e.kind == PROTO_ENTRY_COLLECTED ? e.before : e.self;
		n = e.number;
		proto_entry_release(&e);
		store_record_release(&record);
	}
	return false;
}

static bool manifest_here(struct mend *m, const char *run, const struct base_digest *digest)
{
	char path[STORAGE_NAME_MAX];
	uint64_t size;

	return store_manifest_path(run, digest, path) == 0 && storage_size(m->store->storage, path, &size) == 0;
}

/* Does it commit a manifest that is in this store and has that step and attempt, of an attempt that the list does not
 * mention? A copy may have been changed since, so it must not be trusted about a manifest that a step shows, or about
 * another step. */
static bool commit_missed(struct mend *m, const struct commit_list *l, const struct proto_entry *e)
{
	const struct proto_commit *c = &e->commit;
	struct proto_manifest man = {0};
	bool missed;

	if (e->kind != PROTO_ENTRY_COMMIT || !manifest_here(m, commit_list_run(l), &c->manifest)
	    || commit_list_attempt(l, c->attempt, NULL, NULL) != COMMIT_ATTEMPT_UNDECIDED)
		return false;
	if (store_manifest_get(m->store, commit_list_run(l), &c->manifest, &man, NULL) < 0
	    && store_manifest_get(m->from, commit_list_run(l), &c->manifest, &man, NULL) < 0)
		return false;
	missed = man.step == c->step && strcmp(man.attempt, c->attempt) == 0;
	proto_manifest_release(&man);
	return missed;
}

/* Is the entry of the copy the one that is here, which can be read but does not follow the one before it? */
static bool entry_same(struct mend *m, const char *run, uint64_t n, const struct proto_entry *e)
{
	struct proto_entry here = {0};
	bool same = mend_entry_read(m->store, run, n, &here) == 0 && base_digest_equal(&here.self, &e->self);

	proto_entry_release(&here);
	return same;
}

/* Is this the entry that was here? The last entry of the copy may also be another one, written since store and copy
 * went apart. */
static bool entry_fits(struct mend *m, const struct commit_list *l, uint64_t n, const struct proto_entry *e,
	const struct entry_wanted *w)
{
	struct base_digest before;

	if (w->known)
		return base_digest_equal(&w->self, &e->self);
	if (n < commit_list_head(l)) /* those after it were collected here */
		return copy_leads(m, l, n, e);
	if (entry_before(m->store, commit_list_run(l), n, &before) && !base_digest_equal(&before, &e->before))
		return false;
	return commit_missed(m, l, e);
}

/* 1: an action puts the entry as the copy has it. */
static int entry_bring(struct mend *m, const char *run, uint64_t n)
{
	struct store_record record = {0};
	struct proto_entry e = {0};
	char name[STORAGE_NAME_MAX];
	int r;

	if (entry_record(m->from, run, n, &record, &e) < 0)
		return 0;
	commit_list_entry_name(run, n, name);
	r = mend_act_record(m, name, STORE_RECORD_ENTRY, record.body, record.len);
	if (r == 0)
		mend_line(m, UPKEEP_MEND_MEND, name, "from %s, a copy of this store", m->from->path);
	proto_entry_release(&e);
	store_record_release(&record);
	return r < 0 ? r : 1;
}

/* 1: an action restores entry n. *w: what is known of it; afterwards, of the one before it. */
static int entry_from(struct mend *m, const struct commit_list *l, uint64_t n, struct entry_wanted *w)
{
	const char *run = commit_list_run(l);
	struct proto_entry e = {0};
	int r = 0;

	if (!copy_given(m) || mend_entry_read(m->from, run, n, &e) < 0)
		return 0;
	if (!entry_same(m, run, n, &e) && entry_fits(m, l, n, &e, w)) {
		r = entry_bring(m, run, n);
		*w = (struct entry_wanted){true, e.before};
	}
	proto_entry_release(&e);
	return r;
}

static bool snapshot_is(struct store *s, const char *run, uint64_t n, const struct base_digest *self,
	struct proto_entry *ret_e)
{
	if (mend_entry_read(s, run, n, ret_e) < 0)
		return false;
	if (ret_e->kind == PROTO_ENTRY_SNAPSHOT && base_digest_equal(&ret_e->self, self))
		return true;
	proto_entry_release(ret_e);
	return false;
}

static bool entry_accepted(const struct commit_list *l, uint64_t n)
{
	uint64_t at = n;

	return commit_list_skipped(l, n) && commit_list_damaged_next(l, &at, NULL) != n;
}

/* The snapshots of the head's chain: the collected records have the digest of the first, and each has that of the next.
 * 1: actions bring some, and the list is to be read again. */
static int chain_bring(struct mend *m, const struct commit_list *l)
{
	uint64_t n = commit_list_head_named(l), from;
	const char *run = commit_list_run(l);
	struct base_digest self;
	int r = 0, brought = 0;

	if (!copy_given(m) || !commit_list_digest_named(l, n, &self))
		return 0;
	for (; n && r >= 0 && !entry_accepted(l, n); n = from) {
		struct proto_entry e = {0};
		bool here = snapshot_is(m->store, run, n, &self, &e);

		if (!here && !snapshot_is(m->from, run, n, &self, &e))
			break;
		if (!here) {
			r = entry_bring(m, run, n);
			brought = 1;
		}
		from = e.from < n ? e.from : 0;
		self = e.from_digest;
		proto_entry_release(&e);
	}
	if (brought)
		treat_entries(m, run, NULL, 0);
	return r < 0 ? r : brought;
}

/* ---- acceptance ---- */

struct known { const uint64_t *numbers; size_t n; const char **what; size_t snapshot; };

static void known_add(struct known *t, uint64_t number, const char *what)
{
	size_t at = base_bisect(i, 0, t->n, t->numbers[i] < number);

	if (at < t->n && t->numbers[at] == number && !t->what[at])
		t->what[at] = what;
}

/* What these entries were, by what other entries say; of each NULL if no other entry shows it. malloc'ed. */
static const char **entries_known(struct mend *m, const struct commit_list *l, const uint64_t *numbers, size_t n)
{
	struct known t = {numbers, n, calloc(n + 1, sizeof *t.what), 0};

	for (uint64_t k = base_max(n ? numbers[0] + 1 : 0, commit_list_first(l)); t.what && k < commit_list_next(l);
		k++) {
		struct proto_entry e = {0};

		if (commit_list_skipped(l, k) || mend_entry_read(m->store, commit_list_run(l), k, &e) < 0)
			continue;
		if (e.kind == PROTO_ENTRY_COMMIT)
			known_add(&t, e.commit.replaces, "it committed a step that was replaced later");
		else if (e.kind == PROTO_ENTRY_REMOVE)
			known_add(&t, e.removes, "it committed a step that was removed later");
		for (; commit_list_snapshot_whole(l, k) && t.snapshot < n && numbers[t.snapshot] < k; t.snapshot++)
			known_add(&t, numbers[t.snapshot],
				"a snapshot after it says what was visible then: no step is lost");
		proto_entry_release(&e);
	}
	for (size_t i = 0; t.what && i < n; i++) {
		bool snapshot = numbers[i] && numbers[i] % COMMIT_SNAPSHOT_EVERY == 0;

		if (!t.what[i] && commit_list_head(l) && numbers[i] <= commit_list_head(l))
			t.what[i] = "the file head.* of the run says what was visible then: no step is lost";
		else if (!t.what[i] && snapshot)
			t.what[i] = "it was at the place of a snapshot, which only repeats other entries";
	}
	return t.what;
}

static int accept_put(struct mend *m, struct commit_list *l, uint64_t *numbers, size_t n)
{
	struct mend_action *a = mend_act(m, MEND_ACCEPT, NULL, commit_list_run(l));
	const char **known = entries_known(m, l, numbers, n);
	char name[STORAGE_NAME_MAX];

	if (!a || !known) {
		free(known);
		free(numbers);
		return -ENOMEM;
	}
	a->numbers = numbers;
	a->n = n;
	for (size_t i = 0; i < n; i++) {
		commit_list_entry_name(commit_list_run(l), numbers[i], name);
		mend_line(m, UPKEEP_MEND_ACCEPT, name, "from now on it decides nothing; %s",
			known[i] ? known[i] : "no other entry shows what it was");
	}
	free(known);
	return 0;
}

/* The numbers of the entries that the list skips: malloc'ed, ascending. */
static int skipped_numbers(const struct commit_list *l, uint64_t **ret_numbers, size_t *ret_n)
{
	size_t n = commit_list_damaged(l);
	uint64_t at = 0;

	*ret_numbers = calloc(n + 1, sizeof **ret_numbers);
	if (!*ret_numbers)
		return -ENOMEM;
	for (size_t i = 0; i < n; i++)
		(*ret_numbers)[i] = commit_list_damaged_next(l, &at, NULL);
	qsort(*ret_numbers, n, sizeof **ret_numbers, base_compare_64);
	*ret_n = n;
	return 0;
}

/* ---- one run ---- */

/* From the last one to the first, so that what the next entry says is known of each. */
static int list_skipped(struct mend *m, struct commit_list *l)
{
	const char *run = commit_list_run(l);
	struct entry_wanted wanted = {0};
	uint64_t *numbers;
	size_t n, kept = 0;
	int r = skipped_numbers(l, &numbers, &n);

	if (r == 0)
		treat_entries(m, run, numbers, n);
	for (size_t i = n; r >= 0 && i-- > 0;) {
		if (i + 1 == n || numbers[i + 1] != numbers[i] + 1)
			wanted.known = digest_known(m, l, numbers[i], &wanted.self);
		else if (!wanted.known)
			wanted.known = commit_list_digest_named(l, numbers[i], &wanted.self);
		r = entry_from(m, l, numbers[i], &wanted);
		if (r == 0) {
			wanted.known = false;
			numbers[n - ++kept] = numbers[i];
		}
	}
	if (r >= 0)
		memmove(numbers, numbers + n - kept, kept * sizeof *numbers);
	if (r < 0 || kept == 0) {
		free(numbers);
		return r < 0 ? r : 0;
	}
	r = accept_put(m, l, numbers, kept);
	return r < 0 ? r : mend_steps(m, l, numbers, kept);
}

/* Restored entries explain the files that name entries behind the end. */
static void treat_traces(struct mend *m, const char *run)
{
	struct file_name n;

	for (size_t i = 0; i < m->nfaults; i++) {
		int kind = file_name_parse(m->faults[i].file, &n);

		if (strcmp(n.run, run) == 0 && (kind == STORE_RECORD_STATS
			|| (kind == STORE_RECORD_MANIFEST && m->faults[i].ntouches == 0)))
			m->faults[i].treated = true;
	}
}

/* Facts from a copy, which may have been changed, set no policy, by which steps go, and unpin no step. */
static bool facts_harmless(const struct commit_list *l, const struct proto_facts *f)
{
	bool harmless = !f->policed;

	for (size_t i = 0; i < f->nsteps && harmless; i++) {
		const struct proto_step_facts *now = commit_list_facts(l, f->steps[i].entry);

		harmless = f->steps[i].pinned || !now || !now->pinned;
	}
	return harmless;
}

/* May an entry of the copy be put behind the end? Not one that takes away steps which this list shows (a removal, an
 * acceptance; nor a snapshot, because a later one says the same), and no commit that must not be trusted. If a removal
 * was lost too, its step is visible again. */
static bool end_takes(struct mend *m, const struct commit_list *l, const struct proto_entry *e)
{
	if (e->kind == PROTO_ENTRY_COMMIT) /* one that is not missed has been removed since, and collected */
		return commit_missed(m, l, e) || (!manifest_here(m, commit_list_run(l), &e->commit.manifest)
			&& !commit_list_entry_live(l, e->commit.replaces));
	if (e->kind == PROTO_ENTRY_REMOVE)
		return !commit_list_entry_live(l, e->removes);
	if (e->kind == PROTO_ENTRY_FACTS)
		return facts_harmless(l, &e->facts);
	return e->kind == PROTO_ENTRY_LAUNCH || e->kind == PROTO_ENTRY_ABORT;
}

/* If files of this store show that entries are lost behind the end, takes them from the copy, up to the last one that
 * commits a manifest which this store has. 1: it took some. */
static int list_end(struct mend *m, const struct commit_list *l)
{
	const char *run = commit_list_run(l);
	uint64_t begin = commit_list_next(l), end = begin;
	struct base_digest before;
	int r = 1;

	if (!copy_given(m) || !mend_end_traced(m, l) || !entry_before(m->store, run, begin, &before))
		return 0;
	for (uint64_t n = begin; ; n++) {
		struct proto_entry e = {0};
		bool follows = mend_entry_read(m->from, run, n, &e) == 0 && base_digest_equal(&e.before, &before)
			&& end_takes(m, l, &e);

		if (follows && commit_missed(m, l, &e))
			end = n + 1;
		before = e.self;
		proto_entry_release(&e);
		if (!follows)
			break;
	}
	for (uint64_t n = begin; r == 1 && n < end; n++)
		r = entry_bring(m, run, n);
	if (r == 1 && end > begin)
		treat_traces(m, run);
	return r < 0 ? r : end > begin;
}

/* An entry of which one copy is good: both are written again. */
static int entry_rewrite(struct mend *m, const char *file)
{
	struct store_record record = {0};
	bool whole;
	int r = store_record_get(m->store->storage, file, STORE_RECORD_ENTRY, m->store->info.id, &record, &whole, NULL);

	if (r < 0 || whole) { /* whole: what is wrong is what it says */
		store_record_release(&record);
		return 0;
	}
	r = mend_act_record(m, file, STORE_RECORD_ENTRY, record.body, record.len);
	if (r == 0) {
		mend_line(m, UPKEEP_MEND_MEND, file, "written again from its good copy");
		mend_treat(m, file);
	}
	store_record_release(&record);
	return r;
}

/* The other run to which the entry of that number belongs. */
static void entry_run(struct store *s, const char *run, uint64_t n, char ret_other[static PROTO_RUN_MAX + 1])
{
	struct store_record record = {0};
	struct proto_entry e = {0};
	char name[STORAGE_NAME_MAX];

	commit_list_entry_name(run, n, name);
	if (store_record_get(s->storage, name, STORE_RECORD_ENTRY, s->info.id, &record, NULL, NULL) == 0
	    && proto_entry_decode(record.body, record.len, &e) == 0)
		if (e.version > 1 && strcmp(e.run, run) != 0 && e.number == n)
			snprintf(ret_other, PROTO_RUN_MAX + 1, "%s", e.run);
	proto_entry_release(&e);
	store_record_release(&record);
}

/* Is this the whole list of another run under this run's name? Then its entries are good and have to be moved where
 * they belong. Nothing is decided about them here, and the collector goes on deleting nothing. */
static bool list_misplaced(struct mend *m, const struct commit_list *l)
{
	const char *run = commit_list_run(l);
	char other[PROTO_RUN_MAX + 1] = "", dir[STORAGE_NAME_MAX];
	struct commit_list_damage d;
	uint64_t next = 0;

	for (size_t at = 0; commit_list_damage_next(l, &at, &d) && d.first == next; next += d.count)
		if (!other[0] && d.count == 1)
			entry_run(m->store, run, d.first, other);
	if (next < commit_list_next(l))
		return false;
	snprintf(dir, sizeof dir, "runs/%s", run);
	if (other[0] && !m->again)
		mend_line(m, UPKEEP_MEND_LEFT, dir, "this is the list of run %s under another name: rename it to "
			"runs/%s, or, if runs/%s exists, move it away; until then vckpt mend leaves it as it is", other,
			other, other);
	return other[0];
}

/* No list loses so many entries and goes on: a file is behind its end. */
static void list_far(struct mend *m, const struct commit_list *l)
{
	char name[STORAGE_NAME_MAX];
	uint64_t before;

	commit_list_entry_name(commit_list_run(l), commit_list_next(l) - 1, name);
	before = commit_list_damaged(l) - 1;
	if (!m->again)
		mend_line(m, UPKEEP_MEND_LEFT, name,
			"%" PRIu64 " %s before it %s missing or damaged: if this file does "
			"not belong to the list, move it away and mend again", before,
			base_plural(before, "entry", "entries"), base_plural(before, "is", "are"));
}

/* Files of a collected list that repeat what others say: the mark of its head, and the collected records. */
static int collected_mend(struct mend *m, struct commit_list *l, const struct commit_list_mark *k,
	const struct mend_fault *f)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	const char *base = strrchr(f->file, '/') ? strrchr(f->file, '/') + 1 : "";
	char same[STORAGE_NAME_MAX];
	uint64_t n = 0, head = commit_list_head(l);
	enum commit_list_mark_file file = commit_list_mark_parse(base, &n);
	int r;

	if (file != COMMIT_LIST_NO_MARK)
		commit_list_mark_name(commit_list_run(l), file, head, same);
	else if (entry_of(f->file, commit_list_run(l), &n) && !commit_list_mark_keeps(k, n))
		commit_list_entry_name(commit_list_run(l), n, same);
	else
		return 0;
	if (strcmp(same, f->file) != 0)
		return 0;
	r = commit_list_mark_body(k, file, &body);
	if (r == 0)
		r = mend_act_record(m, f->file, file == COMMIT_LIST_HEAD ? STORE_RECORD_MARK : STORE_RECORD_ENTRY,
			body.data, body.len);
	if (r == 0) {
		mend_line(m, UPKEEP_MEND_MEND, f->file, "made again: entries from %" PRIu64 " on say the same", head);
		mend_treat(m, f->file);
	}
	return r;
}

static int list_collected(struct mend *m, struct commit_list *l)
{
	struct commit_list_mark *k = NULL;
	int r = m->nfaults ? commit_list_mark_own(l, &k, NULL) : -ENOENT;

	if (r == -ENOENT || r == -BASE_EDAMAGED)
		return 0;
	for (size_t i = 0; r == 0 && i < m->nfaults; i++)
		if (!m->faults[i].treated)
			r = collected_mend(m, l, k, &m->faults[i]);
	commit_list_mark_free(k);
	return r;
}

static int list_mend(struct mend *m, const char *run)
{
	struct commit_list *l;
	uint64_t n;
	int r = commit_list_open(m->store, run, true, &l, m->err);

	if (r < 0)
		return r;
	if (list_misplaced(m, l)) {
		commit_list_close(l);
		return 0;
	}
	for (size_t i = 0; r == 0 && i < m->nfaults; i++)
		if (entry_of(m->faults[i].file, run, &n) && !commit_list_skipped(l, n) && !m->faults[i].treated)
			r = entry_rewrite(m, m->faults[i].file);
	if (r == 0)
		r = list_collected(m, l);
	if (r == 0)
		r = chain_bring(m, l);
	if (r == 0 && commit_list_damaged(l) > PROTO_ACCEPTS_MAX)
		list_far(m, l);
	else if (r == 0 && commit_list_damaged(l))
		r = list_skipped(m, l);
	else if (r == 0 && (r = list_end(m, l)) == 0)
		r = mend_steps(m, l, NULL, 0);
	r = r > 0 ? 0 : r;
	commit_list_close(l);
	return r;
}

int mend_lists(struct mend *m)
{
	char **runs;
	size_t n;
	int r = commit_runs(m->store, &runs, &n, m->err);

	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++)
		r = list_mend(m, runs[i]);
	commit_runs_free(runs, n);
	return r;
}
