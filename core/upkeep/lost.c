/* SPDX-License-Identifier: Apache-2.0
 *
 * lost: traces of entries that a list does not have. The entry after a lost one shows the loss; only the loss of a
 * list's last entries leaves no trace in the list itself. Other files may show it (docs/format/list.md, "What a lost
 * end can show"):
 *
 *   measures      are put after their commit entry, whose number they carry
 *   a manifest    belongs to an attempt, whose folder is deleted only after the list has decided it
 *   begin, base.n say how far a list had been read, and on which entries an attempt builds
 *
 * Writers put an entry first, and put or delete these files later. So a file that the caller's list does not
 * explain proves nothing yet: after the files the list is read again, to the last entry that its directory lists,
 * and decides. */
#include "core/upkeep/lost.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/plural.h"
#include "core/commit/incoming/incoming.h"
#include "core/step/manifest.h"
#include "core/upkeep/file_name.h"

enum trace_what { TRACE_STATS, TRACE_MANIFEST, TRACE_READ, TRACE_ENTRY };

struct trace {
	enum trace_what what;
	char *file;
	char run[PROTO_RUN_MAX + 1];     /* the run whose list should have the entry */
	uint64_t entry, step;            /* STATS, ENTRY; READ: how many entries were read */
	char attempt[PROTO_ATTEMPT_MAX]; /* MANIFEST */
};

struct traces {
	const struct upkeep_lost_question *q;
	struct trace *all;
	size_t n;
};

static void traces_release(struct traces *t)
{
	for (size_t i = 0; i < t->n; i++)
		free(t->all[i].file);
	free(t->all);
}

/* Does the list leave this trace unexplained? */
static bool trace_unexplained(const struct commit_list *l, const struct trace *t)
{
	uint64_t end = commit_list_next(l);

	switch (t->what) {
	case TRACE_STATS:
		if (t->entry >= end)
			return true;
		/* steps that were gone at the first entry are not known */
		return !commit_list_skips(l) && t->entry >= commit_list_first(l) &&
			commit_list_commit_step(l, t->entry) != t->step;
	case TRACE_MANIFEST:
		/* accepted entries no longer decide anything; a damaged one may yet be mended */
		return !commit_list_damaged(l) &&
			commit_list_attempt(l, t->attempt, NULL, NULL) == COMMIT_ATTEMPT_UNDECIDED;
	case TRACE_READ: return t->entry > end;
	case TRACE_ENTRY: return t->entry >= end;
	}
	return false;
}

static void trace_report(const struct upkeep_lost_question *q, const struct commit_list *l, const struct trace *t)
{
	unsigned long long end = commit_list_next(l), entry = t->entry;
	char text[320];

	if (t->what == TRACE_MANIFEST && commit_list_skips(l))
		snprintf(text, sizeof text,
			"the list has neither a commit nor an abort of its attempt %s, though that save has ended: an "
			"entry that was accepted as damaged, or was lost at the end of the list, may have committed it",
			t->attempt);
	else if (t->what == TRACE_MANIFEST)
		snprintf(text, sizeof text,
			"the list has neither a commit nor an abort of its attempt %s, though that save has ended: "
			"entries at the end of the list, from %llu on, are lost",
			t->attempt, end);
	else if (t->what == TRACE_READ)
		snprintf(text, sizeof text,
			"its writer had read %llu %s of run %s, but the list has only %llu: entries at its end "
			"are lost",
			entry, base_plural(entry, "entry", "entries"), t->run, end);
	else if (t->entry < end)
		snprintf(text, sizeof text,
			"it names entry %llu as the commit of step %llu, but that entry of the list is another one",
			entry, (unsigned long long)t->step);
	else
		snprintf(text, sizeof text,
			"it names entry %llu of run %s, but the list has only %llu %s: entries at its end are lost",
			entry, t->run, end, base_plural(end, "entry", "entries"));
	q->found(q->arg, t->file, t->run, text);
}

struct commit_list *upkeep_list_among(struct commit_list *const *lists, size_t n, const char *run)
{
	for (size_t i = 0; i < n; i++)
		if (strcmp(commit_list_run(lists[i]), run) == 0)
			return lists[i];
	return NULL;
}

/* Keeps a trace that the caller's list does not explain. A run without a list counts as one without entries. */
static int trace_add(struct traces *t, const struct trace *what, const char *file)
{
	struct commit_list *l = upkeep_list_among(t->q->lists, t->q->nlists, what->run);

	if (t->q->run && strcmp(t->q->run, what->run) != 0)
		return 0;
	if (l && !trace_unexplained(l, what))
		return 0;
	if (base_array_more(t->all, t->n) < 0)
		return -ENOMEM;
	t->all[t->n] = *what;
	t->all[t->n].file = strdup(file);
	return t->all[t->n].file ? (t->n++, 0) : -ENOMEM;
}

static int add_stats(struct traces *t, struct base_error *err)
{
	struct commit_files files = {0};
	int r = commit_files_list(t->q->store, "stats", &files, err);

	for (size_t i = 0; r == 0 && i < files.n; i++) {
		struct commit_stats_name n;
		struct trace what = {.what = TRACE_STATS};

		if (files.all[i].foreign || !commit_stats_name_parse(files.all[i].name, &n))
			continue;
		what.entry = n.entry;
		what.step = n.step;
		snprintf(what.run, sizeof what.run, "%s", n.run);
		r = trace_add(t, &what, files.all[i].name);
	}
	commit_files_release(&files);
	return r;
}

/* A manifest whose attempt has no folder. A manifest that cannot be read is no trace. */
static int add_manifest(struct traces *t, const char *run, const char *file, const struct base_digest *digest)
{
	char begin[STORAGE_NAME_MAX];
	struct trace what = {.what = TRACE_MANIFEST};
	struct proto_manifest m;
	uint64_t size;
	int r = store_manifest_get(t->q->store, run, digest, &m, NULL);

	if (r < 0)
		return r == -ENOMEM ? r : 0;
	snprintf(what.run, sizeof what.run, "%s", run);
	snprintf(what.attempt, sizeof what.attempt, "%s", m.attempt);
	proto_manifest_release(&m);
	snprintf(begin, sizeof begin, "incoming/%s/%s/begin", run, what.attempt);
	r = storage_size(t->q->store->storage, begin, &size);
	return r == -ENOENT ? trace_add(t, &what, file) : 0;
}

static int digest_order(const void *a, const void *b)
{
	return base_digest_compare(a, b);
}

/* Of steps that are not visible. */
static int add_manifests(struct traces *t, struct commit_list *l, struct base_error *err)
{
	size_t n = commit_list_count(l);
	base_cleanup_free struct base_digest *visible = malloc((n + 1) * sizeof *visible);
	struct commit_files files = {0};
	char dir[STORAGE_NAME_MAX];
	int r = visible ? 0 : -ENOMEM;

	for (size_t i = 0; r == 0 && i < n; i++)
		visible[i] = commit_list_at(l, i)->commit.manifest;
	if (r == 0 && n)
		qsort(visible, n, sizeof *visible, digest_order);
	snprintf(dir, sizeof dir, "runs/%s/manifests", commit_list_run(l));
	if (r == 0)
		r = commit_files_list(t->q->store, dir, &files, err);
	for (size_t i = 0; r == 0 && i < files.n; i++) {
		struct file_name f;

		if (file_name_parse(files.all[i].name, &f) == STORE_RECORD_MANIFEST &&
			!(n && bsearch(&f.digest, visible, n, sizeof f.digest, digest_order)))
			r = add_manifest(t, f.run, files.all[i].name, &f.digest);
	}
	commit_files_release(&files);
	return r;
}

static int add_base(struct traces *t, const struct proto_base *b, const char *file)
{
	struct trace what = {.what = TRACE_ENTRY, .entry = b->entry};

	snprintf(what.run, sizeof what.run, "%s", b->run);
	return trace_add(t, &what, file);
}

static int add_folder(struct traces *t, const struct commit_folder *f)
{
	const struct proto_begin *b = &f->info.begin;
	struct trace what = {.what = TRACE_READ, .entry = b->position};
	char file[STORAGE_NAME_MAX];
	int r = 0;

	snprintf(file, sizeof file, "incoming/%s/%s/begin", f->info.run, f->info.attempt);
	snprintf(what.run, sizeof what.run, "%s", f->info.run);
	if (f->info.begun)
		r = trace_add(t, &what, file);
	if (r == 0 && f->info.begun && b->replace && b->replaces != PROTO_NONE)
		r = add_base(t, &(struct proto_base){.run = f->info.run, .entry = b->replaces}, file);
	for (uint32_t i = 0; r == 0 && f->info.begun && i < b->nbases; i++)
		r = add_base(t, &b->bases[i], file);
	/* which base.<n> it was is not kept */
	snprintf(file, sizeof file, "incoming/%s/%s", f->info.run, f->info.attempt);
	for (size_t i = 0; r == 0 && i < f->nbases; i++)
		r = add_base(t, &f->bases[i].base, file);
	return r;
}

static int add_folders(struct traces *t, struct base_error *err)
{
	struct commit_folders folders = {0};
	int r = commit_folders_read(t->q->store, &folders, err);

	for (size_t i = 0; r == 0 && i < folders.n; i++)
		r = add_folder(t, &folders.all[i]);
	commit_folders_release(&folders);
	return r;
}

/* Asks again, of lists that are read now. A list that cannot be read is reported elsewhere. */
static int traces_report(struct traces *t, struct base_error *err)
{
	struct commit_list *l = NULL;
	int r;

	for (size_t i = 0; i < t->n; i++) {
		if (!l || strcmp(commit_list_run(l), t->all[i].run) != 0) {
			commit_list_close(l);
			l = NULL;
			r = commit_list_open(t->q->store, t->all[i].run, true, &l, NULL);

			if (r == -ENOMEM)
				return r;
			if (r < 0)
				continue;
			r = commit_list_catch_up(l, err);
			if (r < 0) {
				commit_list_close(l);
				return r;
			}
		}
		if (trace_unexplained(l, &t->all[i]))
			trace_report(t->q, l, &t->all[i]);
	}
	commit_list_close(l);
	return 0;
}

int upkeep_lost_find(const struct upkeep_lost_question *q, struct base_error *err)
{
	base_cleanup(traces_release) struct traces t = {.q = q};
	int r = add_folders(&t, err);

	if (r == 0)
		r = add_stats(&t, err);
	for (size_t i = 0; r == 0 && i < q->nlists; i++)
		r = add_manifests(&t, q->lists[i], err);
	return r < 0 ? r : traces_report(&t, err);
}
