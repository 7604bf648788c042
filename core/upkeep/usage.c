/* SPDX-License-Identifier: Apache-2.0
 *
 * usage: see usage.h. Files are listed, then lists are read, then the manifest of each visible step, once: each names
 * its packs, and a file counts for how many steps and which one named it last. So at the end it is known of each file
 * whether one step alone needs it, one run alone, or only steps that go. Whether a step shares a pack cannot be said
 * from its own manifest: a step of any other run may name the pack, too.
 *
 * Packs and manifests are listed before any list is read, so that a listed file which no step names by then is needed
 * by none; one that a later step names is looked at by itself. */
#include "core/upkeep/usage.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/commit/incoming/incoming.h"
#include "core/step/manifest.h"
#include "core/upkeep/file_name.h"

#define add upkeep_bytes_add

uint64_t upkeep_bytes_add(uint64_t a, uint64_t b)
{
	uint64_t sum;

	return base_add_overflows(a, b, &sum) ? UINT64_MAX : sum;
}

/* ---- files ---- */

struct listing { struct store *store; struct upkeep_usage *u; int r; };

static struct upkeep_usage_file *file_find(const struct upkeep_usage *u, const char *name, uint32_t hash)
{
	size_t at = 0;
	uint32_t i;

	while ((i = base_table_next(&u->by_name, hash, &at)) != BASE_TABLE_NONE)
		if (strcmp(u->files[i].name, name) == 0)
			return &u->files[i];
	return NULL;
}

const struct upkeep_usage_file *upkeep_usage_pack(const struct upkeep_usage *u, const char *pack)
{
	return file_find(u, pack, base_table_hash(pack, strlen(pack)));
}

static int file_add(struct upkeep_usage *u, const char *name, bool pack, uint64_t size,
	struct upkeep_usage_file **ret_f)
{
	uint32_t hash = base_table_hash(name, strlen(name));
	struct upkeep_usage_file *f = file_find(u, name, hash);

	if (!f) {
		if (u->nfiles + 1 >= BASE_TABLE_NONE || base_array_more(u->files, u->nfiles) < 0 ||
			base_table_reserve(&u->by_name, 1) < 0)
			return -ENOMEM;
		f = &u->files[u->nfiles];
		*f = (struct upkeep_usage_file){.name = strdup(name), .size = size, .pack = pack};
		if (!f->name)
			return -ENOMEM;
		base_table_add(&u->by_name, hash, u->nfiles++);
		u->packs += pack;
		u->pack_bytes = add(u->pack_bytes, pack ? size : 0);
	}
	*ret_f = f;
	return 0;
}

static int usage_file(struct store *s, struct upkeep_usage *u, const char *name, bool pack,
	struct upkeep_usage_file **ret_f)
{
	char path[STORAGE_NAME_MAX];
	uint64_t size = 0;
	int r = 0;

	*ret_f = file_find(u, name, base_table_hash(name, strlen(name)));
	if (*ret_f)
		return 0;
	if (pack)
		r = pack_path(name, path);
	if (r == 0)
		r = storage_size(s->storage, pack ? path : name, &size);
	if (r < 0 && r != -ENOENT && !storage_not_a_file(r))
		return r;
	return file_add(u, name, pack, size, ret_f);
}

static int listed_file(void *arg, const struct storage_entry *e)
{
	struct listing *l = arg;
	struct upkeep_usage_file *f;
	struct file_name n;
	int kind;

	if (e->foreign || e->temporary)
		return 0;
	kind = file_name_parse(e->name, &n);
	if (kind == FILE_PACK)
		l->r = file_add(l->u, n.pack, true, e->size, &f);
	else if (kind == STORE_RECORD_MANIFEST)
		l->r = file_add(l->u, e->name, false, e->size, &f);
	else if (kind == STORE_RECORD_DAMAGE && upkeep_usage_pack(l->u, n.pack))
		file_find(l->u, n.pack, base_table_hash(n.pack, strlen(n.pack)))->note_bytes = e->size;
	return l->r;
}

static int list_files(struct listing *l, const char *dir, storage_list_func f, struct base_error *err)
{
	int r = storage_list_files(l->store->storage, dir, f, l);

	if (l->r == -ENOMEM)
		return base_no_memory(err);
	if (r == 0 || r == -ENOENT || store_denied_listing(l->store, r, err))
		return r == -ENOENT ? 0 : r;
	return base_error_set(err, r, "%s/%s cannot be listed: %s", l->store->path, dir, base_error_name(r));
}

static int files_list(struct store *s, struct upkeep_usage *u, struct base_error *err)
{
	struct listing l = {s, u, 0};
	char dir[STORAGE_NAME_MAX];
	int r = list_files(&l, "packs", listed_file, err);

	if (r == 0)
		r = list_files(&l, "damaged", listed_file, err);
	for (uint32_t i = 0; r == 0 && i < u->nruns; i++) {
		snprintf(dir, sizeof dir, "runs/%s/manifests", u->runs[i].name);
		r = list_files(&l, dir, listed_file, err);
	}
	return r;
}

/* ---- measures ---- */

static struct upkeep_usage_run *run_find(const struct upkeep_usage *u, const char *name)
{
	uint32_t at = base_bisect(i, 0, u->nruns, strcmp(u->runs[i].name, name) < 0);

	return at < u->nruns && strcmp(u->runs[at].name, name) == 0 ? &u->runs[at] : NULL;
}

static struct upkeep_usage_step *step_find(const struct upkeep_usage *u, const struct upkeep_usage_run *run,
	uint64_t step)
{
	uint32_t end = run->first + run->n, at = base_bisect(i, run->first, end, u->steps[i].step < step);

	return at < end && u->steps[at].step == step ? &u->steps[at] : NULL;
}

static int listed_measures(void *arg, const struct storage_entry *e)
{
	struct listing *l = arg;
	struct upkeep_usage_step *step;
	struct upkeep_usage_run *run;
	struct commit_stats_name n;

	if (e->foreign || e->temporary || !commit_stats_name_parse(e->name, &n))
		return 0;
	run = run_find(l->u, n.run);
	if (!run || n.entry >= run->next)
		return 0; /* of a step that came since */
	step = step_find(l->u, run, n.step);
	if (step && step->entry == n.entry)
		step->measures = add(step->measures, e->size);
	else
		l->u->spare_bytes = add(l->u->spare_bytes, e->size);
	return 0;
}

static int measures_list(struct store *s, struct upkeep_usage *u, struct base_error *err)
{
	struct listing l = {s, u, 0};

	return list_files(&l, "stats", listed_measures, err);
}

/* ---- lists ---- */

static int runs_read(struct store *s, struct upkeep_usage *u, struct base_error *err)
{
	char **names;
	size_t n;
	int r = commit_runs(s, &names, &n, err);

	if (r < 0)
		return r;
	u->runs = calloc(n + 1, sizeof *u->runs);
	for (size_t i = 0; u->runs && i < n && n < UINT32_MAX; i++)
		u->runs[u->nruns++].name = base_steal(names[i]);
	commit_runs_free(names, n);
	return u->nruns == n ? 0 : base_no_memory(err);
}

static int list_steps(const struct upkeep_usage_question *q, struct upkeep_usage *u, uint32_t run,
	const struct commit_list *l)
{
	u->runs[run].next = commit_list_next(l);
	u->runs[run].first = u->nsteps;
	u->visible_runs += commit_list_count(l) > 0;
	for (size_t i = 0; i < commit_list_count(l); i++) {
		const struct commit_list_step *step = commit_list_at(l, i);

		if (u->nsteps + 1 >= UINT32_MAX || base_array_more(u->steps, u->nsteps) < 0)
			return -ENOMEM;
		u->steps[u->nsteps++] = (struct upkeep_usage_step){.step = step->step, .entry = step->entry,
			.manifest = step->commit.manifest, .run = run,
			.goes = q->goes && q->goes(q->arg, u->runs[run].name, step),
			.rewritten = q->drops && q->drops(q->arg, u->runs[run].name, step->entry, NULL),
			.bytes.logical = step->commit.bytes};
		u->runs[run].n++;
		u->runs[run].bytes.logical = add(u->runs[run].bytes.logical, step->commit.bytes);
		u->logical_bytes = add(u->logical_bytes, step->commit.bytes);
	}
	return 0;
}

static int lists_read(const struct upkeep_usage_question *q, struct upkeep_usage *u, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < u->nruns; i++) {
		struct commit_list *l;

		r = commit_list_open(q->store, u->runs[i].name, false, &l, err);
		if (r < 0)
			break;
		if (list_steps(q, u, i, l) < 0)
			r = base_no_memory(err);
		commit_list_close(l);
	}
	return r;
}

/* ---- manifests ---- */

static uint64_t file_bytes(const struct upkeep_usage_file *f) { return add(f->size, f->note_bytes); }

static int step_names(const struct upkeep_usage_question *q, struct upkeep_usage *u, uint32_t number, const char *name,
	bool pack, uint64_t live)
{
	struct upkeep_usage_step *step = &u->steps[number];
	struct upkeep_usage_file *f;
	int r = usage_file(q->store, u, name, pack, &f);

	if (r < 0)
		return r;
	live = base_min(live, f->size);
	step->bytes.stored = add(step->bytes.stored, file_bytes(f));
	step->live_bytes = add(step->live_bytes, live);
	if (f->steps == 0 || f->run != step->run)
		u->runs[step->run].bytes.stored = add(u->runs[step->run].bytes.stored, file_bytes(f));
	f->runs |= f->steps && f->run != step->run;
	f->live_bytes = base_max(f->live_bytes, live);
	f->steps++;
	f->going += step->goes || (step->rewritten && (!pack ||
		q->drops(q->arg, u->runs[step->run].name, step->entry, name)));
	f->run = step->run;
	f->step = number;
	return 0;
}

/* Files of a step that was removed since its list was read may be gone. */
static bool step_removed(struct store *s, const char *run, uint64_t entry)
{
	struct commit_list *now;
	bool live;

	if (commit_list_open(s, run, false, &now, NULL) < 0)
		return false;
	live = commit_list_entry_live(now, entry);
	commit_list_close(now);
	return !live;
}

static int step_read(const struct upkeep_usage_question *q, struct upkeep_usage *u, uint32_t number,
	struct base_error *err)
{
	const struct upkeep_usage_step *step = &u->steps[number];
	const char *run = u->runs[step->run].name;
	struct proto_manifest m = {0};
	struct base_error why = {0};
	struct store *s = q->store;
	char path[STORAGE_NAME_MAX];
	int r = store_manifest_path(run, &step->manifest, path);

	if (r == 0)
		r = store_manifest_get(s, run, &step->manifest, &m, &why);
	if (r == -ENOENT && step_removed(s, run, step->entry))
		return 0;
	if (r == 0)
		r = step_names(q, u, number, path, false, 0);
	for (uint32_t i = 0; r == 0 && i < m.npacks; i++)
		r = step_names(q, u, number, m.packs[i].pack, true, m.packs[i].live_bytes);
	proto_manifest_release(&m);
	return r < 0 ? base_error_set(err, r, "%s", why.code ? why.text : base_error_name(r)) : 0;
}

/* last: those of the run that is read last, or the others. */
static int steps_read(const struct upkeep_usage_question *q, struct upkeep_usage *u, bool last, struct base_error *err)
{
	int r = 0;

	for (uint32_t i = 0, done = 0; r == 0 && i < u->nsteps; i++) {
		if ((q->last && strcmp(q->last, u->runs[u->steps[i].run].name) == 0) != last)
			continue;
		r = step_read(q, u, i, err);
		if (q->progress)
			q->progress(q->progress_arg, last ? i : ++done, u->nsteps);
	}
	return r;
}

/* ---- saves under way ---- */

static int base_reach(struct store *s, struct upkeep_usage *u, const struct proto_base *b)
{
	struct proto_manifest m = {0};
	struct upkeep_usage_file *f;
	char path[STORAGE_NAME_MAX];
	int r = 0;

	if (!proto_run_valid(b->run) || store_manifest_path(b->run, &b->manifest, path) < 0 ||
		store_manifest_get(s, b->run, &b->manifest, &m, NULL) < 0)
		return 0; /* it is gone: none of its data is used */
	for (uint32_t i = 0; r == 0 && i <= m.npacks; i++) {
		r = usage_file(s, u, i < m.npacks ? m.packs[i].pack : path, i < m.npacks, &f);
		if (r == 0)
			f->base = true;
	}
	proto_manifest_release(&m);
	return r;
}

/* The collector keeps what their bases reach. Those of writers that are gone it ends first. */
static int saves_read(struct store *s, struct upkeep_usage *u, struct base_error *err)
{
	struct commit_folders folders = {0};
	int r = commit_folders_read(s, &folders, err);

	for (size_t i = 0; r == 0 && i < folders.n; i++) {
		const struct commit_folder *f = &folders.all[i];

		if (f->info.state == COMMIT_DEAD)
			continue;
		for (uint32_t k = 0; r == 0 && f->info.begun && k < f->info.begin.nbases; k++)
			r = base_reach(s, u, &f->info.begin.bases[k]);
		for (size_t k = 0; r == 0 && k < f->nbases; k++)
			r = base_reach(s, u, &f->bases[k].base);
	}
	commit_folders_release(&folders);
	return r < 0 && err && !err->code ? base_error_set(err, r, "%s", base_error_name(r)) : r;
}

/* ---- sums ---- */

static void sum_file(struct upkeep_usage *u, const struct upkeep_usage_file *f)
{
	if (f->steps == 0) {
		u->spare_bytes = add(u->spare_bytes, f->base ? 0 : file_bytes(f));
		return;
	}
	u->needed_packs += f->pack;
	u->needed_bytes = add(u->needed_bytes, f->pack ? f->size : 0);
	u->stored_bytes = add(u->stored_bytes, file_bytes(f));
	if (f->base)
		return;
	if (f->steps == 1)
		u->steps[f->step].bytes.unique = add(u->steps[f->step].bytes.unique, file_bytes(f));
	if (!f->runs)
		u->runs[f->run].bytes.unique = add(u->runs[f->run].bytes.unique, file_bytes(f));
	if (f->going == f->steps) {
		u->freed_packs += f->pack;
		u->freed_bytes = add(u->freed_bytes, file_bytes(f));
	}
}

static void sum_measures(struct upkeep_usage *u, struct upkeep_usage_step *step)
{
	struct upkeep_bytes *b[] = {&step->bytes, &u->runs[step->run].bytes};

	for (unsigned i = 0; i < BASE_COUNT(b); i++) {
		b[i]->stored = add(b[i]->stored, step->measures);
		b[i]->unique = add(b[i]->unique, step->measures);
	}
	u->stored_bytes = add(u->stored_bytes, step->measures);
	u->freed_bytes = add(u->freed_bytes, step->goes || step->rewritten ? step->measures : 0);
}

int upkeep_usage_read(const struct upkeep_usage_question *q, struct upkeep_usage *ret_u, struct base_error *err)
{
	struct upkeep_usage *u = ret_u;
	int r;

	*u = (struct upkeep_usage){0};
	r = runs_read(q->store, u, err);
	if (r == 0)
		r = files_list(q->store, u, err);
	if (r == 0)
		r = lists_read(q, u, err);
	if (r == 0)
		r = steps_read(q, u, false, err);
	if (r == 0 && q->last)
		r = steps_read(q, u, true, err);
	if (r == 0)
		r = measures_list(q->store, u, err);
	if (r == 0)
		r = saves_read(q->store, u, err);
	for (uint32_t i = 0; r == 0 && i < u->nfiles; i++)
		sum_file(u, &u->files[i]);
	for (uint32_t i = 0; r == 0 && i < u->nsteps; i++)
		sum_measures(u, &u->steps[i]);
	return r;
}

void upkeep_usage_release(struct upkeep_usage *u)
{
	for (uint32_t i = 0; i < u->nruns; i++)
		free(u->runs[i].name);
	for (uint32_t i = 0; i < u->nfiles; i++)
		free(u->files[i].name);
	free(u->runs);
	free(u->steps);
	free(u->files);
	base_table_release(&u->by_name);
	*u = (struct upkeep_usage){0};
}
