/* SPDX-License-Identifier: Apache-2.0
 *
 * gc_reach: what may not be deleted: packs of visible commits, and packs of commits that undecided attempts named as
 * bases. Both sets only grow during a collection: what was reached at any time during it is kept. A list with a skipped
 * entry, or a live manifest that cannot be read, ends the collection, because what it reaches is unknown. */
#include "core/upkeep/gc_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/plural.h"
#include "core/upkeep/lost.h"

/* ---- names ---- */

static bool names_have(const struct gc_names *s, const char *name, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&s->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(s->all[i], name) == 0)
			return true;
	return false;
}

bool gc_names_has(const struct gc_names *s, const char *name)
{
	return names_have(s, name, base_table_hash(name, strlen(name)));
}

int gc_names_add(struct gc_names *s, const char *name)
{
	uint32_t hash = base_table_hash(name, strlen(name));

	if (names_have(s, name, hash))
		return 0;
	if (base_array_more(s->all, s->n) < 0 || base_table_reserve(&s->by_name, 1) < 0)
		return -ENOMEM;
	s->all[s->n] = strdup(name);
	if (!s->all[s->n])
		return -ENOMEM;
	base_table_add(&s->by_name, hash, (uint32_t)s->n++);
	return 0;
}

void gc_names_release(struct gc_names *s)
{
	for (size_t i = 0; i < s->n; i++)
		free(s->all[i]);
	free(s->all);
	base_table_release(&s->by_name);
	*s = (struct gc_names){0};
}

/* ---- lists ---- */

static int list_open_new(struct gc *g, const char *run)
{
	int r;

	if (base_array_more(g->lists, g->nlists) < 0 || base_array_more(g->known, g->nlists) < 0)
		return base_no_memory_for(g->err, "run %s", run);
	g->known[g->nlists] = (struct gc_list){0};
	r = commit_list_open(g->store, run, true, &g->lists[g->nlists], g->err);
	if (r == 0)
		g->nlists++;
	return r;
}

/* The runs of a store: those that have a list, and those that have an attempt only. */
static int list_each(struct gc *g, char **runs, size_t n)
{
	int r = 0;

	for (size_t i = 0; r >= 0 && i < n; i++) {
		struct commit_list *l = upkeep_list_among(g->lists, g->nlists, runs[i]);

		r = l ? commit_list_refresh(l, g->err) : list_open_new(g, runs[i]);
		if (r == -BASE_EVERSION)
			base_error_set(g->err, r, "%s; what the run needs is not known: nothing was deleted",
				g->err->text);
	}
	return r < 0 ? r : 0;
}

static int list_check(struct gc *g, struct commit_list *l, struct gc_list *known, bool first)
{
	char name[STORAGE_NAME_MAX], detail[160];
	int r;

	if (first)
		known->first = commit_list_next(l);
	else if (commit_list_first(l) > known->first)
		return base_error_set(g->err, -ESTALE, "run %s: another collection has collected entries of its list "
			"that this one had not read: nothing was deleted; run vckpt gc again",
			commit_list_run(l));
	r = commit_list_newer(l, NULL, g->err);
	if (r < 0)
		return base_error_set(g->err, r, "%s: nothing was deleted", g->err->text);
	if (commit_list_damaged(l) == 0)
		return g->o->dry_run ? 0 : commit_list_sync(l, g->err);
	snprintf(name, sizeof name, "runs/%s", commit_list_run(l));
	snprintf(detail, sizeof detail, "%llu %s of the list %s damaged",
		(unsigned long long)commit_list_damaged(l),
		base_plural(commit_list_damaged(l), "entry", "entries"),
		base_plural(commit_list_damaged(l), "is", "are"));
	gc_report(g, "damage", name, 0, detail);
	return base_error_set(g->err, -BASE_EDAMAGED, "run %s: %s, so what it needs is not known: nothing was deleted "
		"(vckpt mend says what can be done)",
		commit_list_run(l), detail);
}

/* model: top */
int gc_lists_read(struct gc *g, bool first)
{
	char **runs;
	size_t n;
	int r = commit_runs(g->store, &runs, &n, g->err);

	if (r < 0)
		return r;
	r = list_each(g, runs, n);
	commit_runs_free(runs, n);
	for (size_t i = 0; r == 0 && i < g->nlists; i++)
		r = list_check(g, g->lists[i], &g->known[i], first);
	return r;
}

/* known: the list mentions it. */
static bool list_decides(const struct gc *g, size_t i, const char *attempt, bool first, bool *ret_known)
{
	uint64_t entry;

	*ret_known = commit_list_attempt(g->lists[i], attempt, NULL, &entry) != COMMIT_ATTEMPT_UNDECIDED;
	return *ret_known && (!first || entry < g->known[i].first);
}

/* A folder says which run's list decides: a job may save to several runs, and a newer launch in one of them aborts
 * nothing in the others. Without a folder there is no writer at work, and any list will do. */
bool gc_decided(struct gc *g, const char *attempt, bool first)
{
	bool folder = false, decided = true, known;

	if (gc_names_has(&g->aborted, attempt))
		return true;
	for (size_t i = 0; i < g->folders.n; i++)
		if (strcmp(g->folders.all[i].info.attempt, attempt) == 0) {
			bool here = false;

			for (size_t k = 0; k < g->nlists; k++)
				if (strcmp(commit_list_run(g->lists[k]), g->folders.all[i].info.run) == 0)
					here = list_decides(g, k, attempt, first, &known);
			folder = true;
			decided &= here;
		}
	for (size_t k = 0; !folder && k < g->nlists; k++) {
		size_t i = (g->hint + k) % g->nlists;

		decided = list_decides(g, i, attempt, first, &known);
		if (known) {
			g->hint = i;
			return decided;
		}
	}
	return folder && decided;
}

/* ---- manifests ---- */

static int manifest_damaged(struct gc *g, const char *path, int r, const struct base_error *why)
{
	const char *text = why->code ? why->text : base_error_name(r);

	if (r == -ENOMEM)
		return base_error_set(g->err, r, "%s: %s", path, text);
	if (r == -BASE_EVERSION)
		return base_error_set(g->err, r, "%s; what it needs is not known: nothing was deleted", text);
	gc_report(g, "damage", path, 0, text);
	return base_error_set(g->err, -BASE_EDAMAGED, "%s is needed and cannot be read (%s): nothing was deleted "
		"(vckpt mend says what can be done)", path,
		text);
}

/* 0: its packs are kept from now on. -ENOENT: there is no such manifest. */
static int reach_manifest(struct gc *g, const char *run, const struct base_digest *digest,
	char path[static STORAGE_NAME_MAX], struct base_error *why)
{
	struct proto_manifest m = {0};
	int r = store_manifest_path(run, digest, path);

	if (r < 0 || gc_names_has(&g->manifests_kept, path))
		return r;
	r = store_manifest_get(g->store, run, digest, &m, why);
	if (r < 0)
		return r;
	for (uint32_t i = 0; r == 0 && i < m.npacks; i++)
		r = gc_names_add(&g->packs_kept, m.packs[i].pack);
	proto_manifest_release(&m);
	gc_progress(g);
	return r < 0 ? r : gc_names_add(&g->manifests_kept, path);
}

static int reach_list(struct gc *g, struct commit_list *l)
{
	for (size_t i = 0; i < commit_list_count(l); i++) {
		const struct commit_list_step *step = commit_list_at(l, i);
		uint64_t entry = step->entry;
		char path[STORAGE_NAME_MAX];
		struct base_error why = {0};
		int r = reach_manifest(g, commit_list_run(l), &step->commit.manifest, path, &why);

		if (r == 0)
			continue;
		if (r == -ENOENT) { /* perhaps removed, and deleted by another collection, since the list was read */
			int fresh = commit_list_refresh(l, g->err);

			if (fresh < 0)
				return fresh;
			if (!commit_list_entry_live(l, entry)) {
				i = (size_t)-1; /* the array has changed: again; what is kept already costs nothing */
				continue;
			}
		}
		return manifest_damaged(g, path, r, &why);
	}
	return 0;
}

struct reach_since { struct gc *g; const char *run; };

static int reach_commit(void *arg, uint64_t entry, const struct base_digest *manifest)
{
	const struct reach_since *s = arg;
	struct base_error why = {0};
	char path[STORAGE_NAME_MAX];
	int r = reach_manifest(s->g, s->run, manifest, path, &why);

	(void)entry;
	return r == 0 || r == -ENOENT ? 0 : manifest_damaged(s->g, path, r, &why);
}

/* model: again. What is visible now, and every commit since the first reading, removed meanwhile or not: an attempt
 * that began after `incoming` was read may have named one as its base (rule SINCE of the model). */
int gc_reach_commits(struct gc *g)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < g->nlists; i++) {
		struct reach_since since = {g, commit_list_run(g->lists[i])};

		r = reach_list(g, g->lists[i]);
		if (r == 0)
			r = commit_list_each_commit(g->lists[i], g->known[i].first, reach_commit, &since, g->err);
	}
	return r;
}

/* A base that is gone was gone when it was named, since named bases are kept: none of its data is used. */
static int reach_base(struct gc *g, const struct proto_base *b)
{
	struct commit_list *l = upkeep_list_among(g->lists, g->nlists, b->run);
	struct base_error why = {0};
	char path[STORAGE_NAME_MAX];
	int r;

	if (!proto_run_valid(b->run))
		return 0;
	r = reach_manifest(g, b->run, &b->manifest, path, &why);
	if (r == 0 || (r == -ENOENT && !(l && commit_list_entry_live(l, b->entry))))
		return 0;
	return manifest_damaged(g, path, r, &why);
}

static int reach_folder(struct gc *g, const struct commit_folder *f)
{
	char name[STORAGE_NAME_MAX];
	int r = 0;

	if (f->newer.code)
		return base_error_set(g->err, f->newer.code,
			"%s; what this attempt needs is not known: nothing was deleted", f->newer.text);
	if (f->damaged) {
		snprintf(name, sizeof name, "incoming/%s/%s", f->info.run, f->info.attempt);
		gc_report(g, "damage", name, 0, "begin or a base cannot be read, and the attempt is undecided");
		return base_error_set(g->err, -BASE_EDAMAGED,
			"%s: what this attempt needs cannot be read: nothing was deleted (vckpt abort ends it)", name);
	}
	for (uint32_t i = 0; r == 0 && f->info.begun && i < f->info.begin.nbases; i++)
		r = reach_base(g, &f->info.begin.bases[i]);
	for (size_t i = 0; r == 0 && i < f->nbases; i++)
		r = reach_base(g, &f->bases[i].base);
	return r;
}

/* model: again */
int gc_reach_bases(struct gc *g)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < g->folders.n; i++)
		if (!gc_decided(g, g->folders.all[i].info.attempt, false))
			r = reach_folder(g, &g->folders.all[i]);
	return r;
}
