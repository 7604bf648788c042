/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_step: steps that would be lost with an entry that is accepted as damaged.
 *
 * A lost commit leaves its manifest. Measures stats/<run>/<step>.<entry>/ of the lost entry prove that it was
 * committed, because they are put after it. A commit that can be read, but replaces a lost one, no longer counts, since
 * what it replaces is not visible. Both are committed again, as a new attempt, since the old one may be decided; but
 * not if a later entry commits or removes the same step. Measures without a manifest at least show which step is lost.
 *
 * Without measures (an import has none) a manifest may be that of a lost entry if the list does not mention its
 * attempt, the attempt's folder is gone (it is deleted only after the list has decided) and all its packs are here (an
 * aborted attempt deletes its own). If there are no more such manifests than lost entries of which nothing else is
 * known (after a lost end: however many), they are committed again, too. Otherwise they are reported.
 *
 * The facts of a lost commit go to the one that takes its place.
 *
 * A lost removal makes its step visible again. If the collector has deleted the manifest since, the step is removed
 * again.
 */
#include "core/upkeep/mend_internal.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/commit/notes/stats.h"

struct step_said { uint64_t entry, at; };       /* entry `at` says facts of commit `entry` */
struct step_commit { uint64_t entry, step, replaces; struct base_digest manifest; int64_t time_ns; };
struct steps {
	struct mend *m;
	struct commit_list *list;
	const uint64_t *lost; size_t nlost;
	struct step_commit *commits; size_t ncommits; /* all that can be read, by entry */
	uint64_t *removed; size_t nremoved;           /* entries that a removal names */
	struct step_said *said; size_t nsaid;         /* by entry, of commits that are not visible */
	uint64_t snapshot;                            /* the newest one, which says what was visible before it; 0 */
	uint64_t unknown, first_unknown;              /* lost entries of which nothing is known: how many; the first */
	uint64_t likely;                              /* how many manifests may be theirs */
	uint64_t *proved; size_t nproved;             /* lost entries that measures and a manifest show */
};

/* Is entry n skipped, now or from now on, or behind the end of the list? */
static bool entry_lost(const struct steps *k, uint64_t n)
{
	for (size_t i = 0; i < k->nlost; i++)
		if (k->lost[i] == n)
			return true;
	return commit_list_skipped(k->list, n) || n >= commit_list_next(k->list);
}

static int number_add(uint64_t **numbers, size_t *n, uint64_t number)
{
	if (base_array_more(*numbers, *n) < 0)
		return -ENOMEM;
	(*numbers)[(*n)++] = number;
	return 0;
}

static int said_add(struct steps *k, uint64_t entry, uint64_t at)
{
	if (commit_list_entry_live(k->list, entry))
		return 0;
	if (base_array_more(k->said, k->nsaid) < 0)
		return -ENOMEM;
	k->said[k->nsaid++] = (struct step_said){entry, at};
	return 0;
}

static int said_order(const void *a, const void *b)
{
	const struct step_said *x = a, *y = b;
	uint64_t p = x->entry == y->entry ? x->at : x->entry, q = x->entry == y->entry ? y->at : y->entry;

	return (p > q) - (p < q);
}

/* The newest entry that says facts of the commit; PROTO_NONE. */
static uint64_t said_newest(const struct steps *k, uint64_t entry)
{
	size_t end = base_bisect(i, 0, k->nsaid, k->said[i].entry <= entry);

	return end && k->said[end - 1].entry == entry ? k->said[end - 1].at : PROTO_NONE;
}

static int steps_add(struct steps *k, uint64_t n, const struct proto_entry *e)
{
	int r = e->kind == PROTO_ENTRY_COMMIT && e->commit.facts ? said_add(k, n, n) : 0;

	for (size_t i = 0; i < e->facts.nsteps && e->kind == PROTO_ENTRY_FACTS && r == 0; i++)
		r = said_add(k, e->facts.steps[i].entry, n);
	if (r < 0)
		return r;
	if (e->kind == PROTO_ENTRY_COMMIT) {
		if (base_array_more(k->commits, k->ncommits) < 0)
			return -ENOMEM;
		k->commits[k->ncommits++] = (struct step_commit){
			n, e->commit.step, e->commit.replaces, e->commit.manifest, e->commit.time_ns};
	} else if (e->kind == PROTO_ENTRY_REMOVE) {
		return number_add(&k->removed, &k->nremoved, e->removes);
	} else if (commit_list_snapshot_whole(k->list, n)) {
		k->snapshot = n;
	}
	return 0;
}

/* Reads every entry again, those that did not count included. */
static int steps_read(struct steps *k)
{
	int r = 0;

	for (uint64_t n = commit_list_first(k->list); r == 0 && n < commit_list_next(k->list); n++) {
		struct proto_entry e = {0};

		if (entry_lost(k, n) || mend_entry_read(k->m->store, commit_list_run(k->list), n, &e) < 0)
			continue;
		r = steps_add(k, n, &e);
		proto_entry_release(&e);
	}
	if (k->nsaid)
		qsort(k->said, k->nsaid, sizeof *k->said, said_order);
	return r;
}

/* Does a later entry than n decide what became of the step? */
static bool step_superseded(const struct steps *k, uint64_t n, uint64_t step)
{
	if (n < k->snapshot)
		return true;
	for (size_t i = 0; i < k->nremoved; i++)
		if (k->removed[i] == n)
			return true;
	for (size_t i = 0; i < k->ncommits; i++)
		if (k->commits[i].entry > n && k->commits[i].step == step)
			return true;
	return false;
}

/* ---- what proves a commit ---- */

struct step_proof { uint64_t entry; int64_t time_ns; };

/* Are there measures of this step that belong to a lost entry and name this attempt? */
static bool proof_stats(const struct steps *k, const struct proto_manifest *man, struct step_proof *ret_p)
{
	char dir[STORAGE_NAME_MAX];
	struct commit_files files = {0};
	bool found = false;

	snprintf(dir, sizeof dir, "stats/%s", man->run);
	if (commit_files_list(k->m->store, dir, &files, NULL) < 0)
		return false;
	for (size_t i = 0; !found && i < files.n; i++) {
		struct proto_stats *all = NULL;
		struct commit_stats_name name;
		uint32_t n = 0, damaged;

		if (!commit_stats_name_parse(files.all[i].name, &name) || name.step != man->step
		    || commit_list_commit_step(k->list, name.entry) == name.step
		    || commit_stats_read(k->m->store, man->run, name.step, name.entry, &all, &n, &damaged, NULL) < 0)
			continue;
		for (uint32_t s = 0; s < n && !found; s++)
			if (strcmp(all[s].attempt, man->attempt) == 0) {
				*ret_p = (struct step_proof){name.entry, (int64_t)all[s].committed_ns};
				found = true;
			}
		commit_stats_free(all, n);
	}
	commit_files_release(&files);
	return found;
}

static bool folder_gone(const struct steps *k, const struct proto_manifest *man)
{
	struct commit_files files = {0};
	char dir[STORAGE_NAME_MAX];
	bool gone;

	snprintf(dir, sizeof dir, "incoming/%s/%s", man->run, man->attempt);
	gone = commit_files_list(k->m->store, dir, &files, NULL) == 0 && files.n == 0;
	commit_files_release(&files);
	return gone;
}

enum step_state { STEP_NOTHING, STEP_LIKELY, STEP_PROVED };

/* What is known about a manifest that no visible step has. */
static enum step_state step_judge(const struct steps *k, const struct proto_manifest *man,
	const struct base_digest *digest, struct step_proof *ret_p)
{
	enum commit_attempt_state state = commit_list_attempt(k->list, man->attempt, NULL, NULL);

	if (commit_list_find(k->list, man->step) || state == COMMIT_ATTEMPT_COMMITTED)
		return STEP_NOTHING; /* it counted, and was removed or replaced */
	for (size_t i = 0; i < k->ncommits; i++)
		if (base_digest_equal(&k->commits[i].manifest, digest)) {
			*ret_p = (struct step_proof){k->commits[i].entry, k->commits[i].time_ns};
			return step_superseded(k, ret_p->entry, man->step) ? STEP_NOTHING : STEP_PROVED;
		}
	if (proof_stats(k, man, ret_p))
		return step_superseded(k, ret_p->entry, man->step) ? STEP_NOTHING : STEP_PROVED;
	*ret_p = (struct step_proof){k->first_unknown, 0};
	if (!k->unknown || state != COMMIT_ATTEMPT_UNDECIDED || !folder_gone(k, man)
	    || step_superseded(k, k->first_unknown, man->step))
		return STEP_NOTHING;
	return STEP_LIKELY;
}

/* ---- manifests that nothing shows ---- */

static bool step_known(const struct steps *k, const struct base_digest *digest)
{
	for (size_t i = 0; i < commit_list_count(k->list); i++)
		if (base_digest_equal(&commit_list_at(k->list, i)->commit.manifest, digest))
			return true;
	return false;
}

static int step_recommit(struct steps *k, const struct proto_manifest *man, const struct base_digest *digest,
	const struct step_proof *p, bool sure, const char *file)
{
	struct base_error why = {0};
	struct mend_action *a;

	if (store_manifest_check_packs(k->m->store, man, &why) < 0) { /* until they are mended */
		if (!k->m->again)
			mend_lost(k->m, file, man->run, man->step, NULL, NULL, why.text);
		return 0;
	}
	a = mend_act(k->m, MEND_COMMIT, NULL, man->run);
	if (!a)
		return -ENOMEM;
	a->step = man->step;
	a->manifest = *digest;
	a->time_ns = p->time_ns;
	a->entry = p->entry;
	a->said = sure ? said_newest(k, p->entry) : PROTO_NONE;
	mend_line(k->m, UPKEEP_MEND_MEND, file,
		"step %" PRIu64 " is committed anew: it vanished with a lost entry of the list", man->step);
	return 0;
}

/* A manifest that no visible step has: pass 1 counts, pass 2 acts. */
static int step_hidden(struct steps *k, unsigned pass, const char *file, const struct base_digest *digest)
{
	struct proto_manifest man = {0};
	struct step_proof proof;
	enum step_state is;
	int r = 0;

	if (step_known(k, digest) || store_manifest_get(k->m->store, commit_list_run(k->list), digest, &man, NULL) < 0)
		return 0;
	is = step_judge(k, &man, digest, &proof);
	if (pass == 1) {
		k->likely += is == STEP_LIKELY;
		k->unknown -= is == STEP_PROVED && k->unknown && entry_lost(k, proof.entry);
		if (is == STEP_PROVED)
			r = number_add(&k->proved, &k->nproved, proof.entry);
	} else if (is == STEP_PROVED || (is == STEP_LIKELY && k->likely <= k->unknown)) {
		r = step_recommit(k, &man, digest, &proof, is == STEP_PROVED || k->unknown == 1, file);
	} else if (is == STEP_LIKELY && (k->nlost || !k->m->again)) { /* the next round gives the attempt up */
		char why[160];

		snprintf(why, sizeof why, "its attempt %s may have been committed, but nothing proves it", man.attempt);
		mend_lost(k->m, file, man.run, man.step, NULL, NULL, why);
	}
	proto_manifest_release(&man);
	return r;
}

static int steps_hidden(struct steps *k, unsigned pass)
{
	struct commit_files files = {0};
	char dir[STORAGE_NAME_MAX];
	int r;

	snprintf(dir, sizeof dir, "runs/%s/manifests", commit_list_run(k->list));
	r = commit_files_list(k->m->store, dir, &files, k->m->err);
	for (size_t i = 0; r == 0 && i < files.n; i++) {
		struct file_name n;

		if (!files.all[i].foreign && file_name_parse(files.all[i].name, &n) == STORE_RECORD_MANIFEST)
			r = step_hidden(k, pass, files.all[i].name, &n.digest);
	}
	commit_files_release(&files);
	return r;
}

/* ---- measures of commits that are lost with their manifests ---- */

static int measured_step(struct steps *k, const char *file, const struct commit_stats_name *name)
{
	struct proto_stats *all = NULL;
	uint32_t n = 0, damaged;
	bool known = k->m->again || commit_list_commit_step(k->list, name->entry) == name->step
		|| commit_list_find(k->list, name->step) || step_superseded(k, name->entry, name->step);
	int r = 0;

	for (size_t i = 0; i < k->nproved && !known; i++)
		known = k->proved[i] == name->entry;
	if (known || commit_stats_read(k->m->store, name->run, name->step, name->entry, &all, &n, &damaged, NULL) < 0)
		return 0;
	if (n) {
		mend_lost(k->m, file, name->run, name->step, NULL, NULL,
			"these measures show that it was committed, but its commit entry and its manifest are lost");
		r = number_add(&k->proved, &k->nproved, name->entry); /* so that it is reported once */
	}
	commit_stats_free(all, n);
	return r;
}

static int steps_measured(struct steps *k)
{
	struct commit_stats_name name;
	int r = 0;

	for (size_t i = 0; r == 0 && i < k->m->nfaults; i++)
		if (commit_stats_name_parse(k->m->faults[i].file, &name)
		    && strcmp(name.run, commit_list_run(k->list)) == 0)
			r = measured_step(k, k->m->faults[i].file, &name);
	return r;
}

/* Lost entries behind the newest snapshot that no removal and no replacement names. */
static void steps_unknown(struct steps *k)
{
	for (uint64_t n = k->snapshot; n < commit_list_next(k->list); n++) {
		bool known = !entry_lost(k, n);

		for (size_t i = 0; i < k->nremoved && !known; i++)
			known = k->removed[i] == n;
		for (size_t i = 0; i < k->ncommits && !known; i++)
			known = k->commits[i].replaces == n;
		if (!known && k->unknown++ == 0)
			k->first_unknown = n;
	}
}

/* ---- removals that were lost ---- */

static int step_reappeared(struct steps *k, const struct commit_list_step *s)
{
	char path[STORAGE_NAME_MAX];
	struct mend_action *a;
	bool lost_after = false;
	uint64_t size;

	for (uint64_t n = s->entry + 1; !lost_after && n < commit_list_next(k->list); n++)
		lost_after = entry_lost(k, n);
	if (!lost_after || store_manifest_path(commit_list_run(k->list), &s->commit.manifest, path) < 0
	    || storage_size(k->m->store->storage, path, &size) != -ENOENT)
		return 0;
	if (k->m->from) { /* it may be there */
		if (storage_size(k->m->from->storage, path, &size) == 0)
			return 0;
	}
	a = mend_act(k->m, MEND_REMOVE, NULL, commit_list_run(k->list));
	if (!a)
		return -ENOMEM;
	a->step = s->step;
	mend_line(k->m, UPKEEP_MEND_MEND, path,
		"step %" PRIu64 " is removed: its manifest is gone, and a lost entry may have been its removal",
		s->step);
	mend_treat(k->m, path);
	return 0;
}

/* Do other files name entries behind the end, or entries whose places other entries have taken? */
bool mend_end_traced(const struct mend *m, const struct commit_list *l)
{
	struct file_name n;

	for (size_t i = 0; i < m->nfaults; i++) {
		const struct mend_fault *f = &m->faults[i];
		int kind = file_name_parse(f->file, &n);

		if (strcmp(n.run, commit_list_run(l)) == 0 && (kind == STORE_RECORD_STATS
			? commit_list_commit_step(l, n.stats.entry) != n.stats.step
			: kind == STORE_RECORD_MANIFEST && !f->ntouches))
			return true;
	}
	return false;
}

int mend_steps(struct mend *m, struct commit_list *l, const uint64_t *lost, size_t n)
{
	struct steps k = {.m = m, .list = l, .lost = lost, .nlost = n};
	bool end = !commit_list_skips(l) && mend_end_traced(m, l);
	int r;

	if (n == 0 && !commit_list_skips(l) && !end)
		return 0;
	r = steps_read(&k);
	if (r == 0 && end) {
		k.unknown = UINT32_MAX; /* it is not known how many */
		k.first_unknown = commit_list_next(l);
	} else if (r == 0) {
		steps_unknown(&k);
	}
	if (r == 0)
		r = steps_hidden(&k, 1);
	if (r == 0)
		r = steps_hidden(&k, 2);
	if (r == 0)
		r = steps_measured(&k);
	for (size_t i = 0; r == 0 && i < commit_list_count(l); i++)
		r = step_reappeared(&k, commit_list_at(l, i));
	free(k.commits);
	free(k.removed);
	free(k.said);
	free(k.proved);
	return r;
}
