/* SPDX-License-Identifier: Apache-2.0
 *
 * frees: see frees.h. Steps that stay are read first, so that a pack is counted once, where it is kept. */
#include "core/upkeep/frees.h"

#include "core/step/manifest.h"
#include "core/upkeep/gc_internal.h"

struct needs {
	struct store *store;
	bool (*goes)(void *arg, const char *run, const struct commit_list_step *step);
	void *arg;
	struct gc_names seen;
	struct upkeep_needs n;
};

/* Files of a step that was removed since its list was read may be gone. */
static bool step_removed(struct needs *k, const struct commit_list *l, const struct commit_list_step *step)
{
	struct commit_list *now;
	bool live;

	if (commit_list_open(k->store, commit_list_run(l), false, &now, NULL) < 0)
		return false;
	live = commit_list_entry_live(now, step->entry);
	commit_list_close(now);
	return !live;
}

static int needs_manifest(struct needs *k, const struct commit_list *l, const struct commit_list_step *step, bool goes,
	struct base_error *err)
{
	struct proto_manifest m = {0};
	struct base_error why = {0};
	int r = store_manifest_get(k->store, commit_list_run(l), &step->commit.manifest, &m, &why);

	if (r == -ENOENT && step_removed(k, l, step))
		return 0;
	for (uint32_t i = 0; r == 0 && i < m.npacks; i++) {
		if (gc_names_has(&k->seen, m.packs[i].pack))
			continue;
		r = gc_names_add(&k->seen, m.packs[i].pack);
		*(goes ? &k->n.freed_packs : &k->n.kept_packs) += 1;
		*(goes ? &k->n.freed_bytes : &k->n.kept_bytes) += m.packs[i].size;
	}
	proto_manifest_release(&m);
	return r < 0 ? base_error_set(err, r, "%s", why.code ? why.text : base_error_name(r)) : 0;
}

/* Of one run, either the steps that stay or those that go. */
static int needs_list(struct needs *k, struct commit_list *l, bool going, struct base_error *err)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < commit_list_count(l); i++) {
		const struct commit_list_step *step = commit_list_at(l, i);

		if ((k->goes && k->goes(k->arg, commit_list_run(l), step)) != going)
			continue;
		k->n.steps++;
		k->n.bytes += step->commit.bytes;
		r = needs_manifest(k, l, step, going, err);
	}
	return r;
}

static int needs_all(struct needs *k, char **runs, size_t n, bool going, struct base_error *err)
{
	struct commit_list *l;
	int r = 0;

	for (size_t i = 0; r == 0 && i < n; i++) {
		r = commit_list_open(k->store, runs[i], false, &l, err);
		if (r < 0)
			break;
		k->n.runs += !going && commit_list_count(l) > 0;
		r = needs_list(k, l, going, err);
		commit_list_close(l);
	}
	return r;
}

int upkeep_needs(struct store *s, bool (*goes)(void *arg, const char *run, const struct commit_list_step *step),
	void *arg, struct upkeep_needs *ret_n, struct base_error *err)
{
	struct needs k = {.store = s, .goes = goes, .arg = arg};
	char **runs;
	size_t n;
	int r = commit_runs(s, &runs, &n, err);

	if (r < 0)
		return r;
	r = needs_all(&k, runs, n, false, err);
	if (r == 0 && goes)
		r = needs_all(&k, runs, n, true, err);
	commit_runs_free(runs, n);
	gc_names_release(&k.seen);
	*ret_n = k.n;
	return r;
}

int upkeep_packs_bytes(struct store *s, uint64_t *ret_packs, uint64_t *ret_bytes, struct base_error *err)
{
	struct commit_files files = {0};
	int r = commit_files_list(s, "packs", &files, err);

	*ret_packs = *ret_bytes = 0;
	for (size_t i = 0; r == 0 && i < files.n; i++) {
		*ret_packs += !files.all[i].foreign;
		*ret_bytes += files.all[i].foreign ? 0 : files.all[i].size;
	}
	commit_files_release(&files);
	return r;
}
