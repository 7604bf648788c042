/* SPDX-License-Identifier: Apache-2.0
 *
 * gc_list: collects list entries that a snapshot covers (docs/format/list.md, "Collected entries"). It makes a
 * snapshot the head of its list, and puts the collected record in the place of every entry before it, except those that
 * readers that begin at the head read (list_mark.c). How far the head goes:
 *
 *   - some history stays for people, and some snapshots behind the head, so that losing the newest ones does no harm;
 *   - it ends where the list ended when manifests and folders were listed: the listing does not show later ones;
 *   - a writer of an attempt has read all entries up to the position in its `begin`, and reads on from there;
 *   - a rank of a live launch may come to an attempt that others have given up, and must not begin it again; a rank
 *     that took part in a later commit of its launch does not come to an earlier attempt;
 *   - if a folder or a manifest of an attempt is left, readers from the head on have to know what became of the
 *     attempt: else the manifest would show that entries are lost (lost.c).
 *
 * Every collection replaces the first entry that does not stay, as its last one: it names the newest head. Files of
 * lower heads are deleted after that. So a list is read rightly wherever a collection was stopped, and the next one
 * finishes the work: it knows a collected entry by the many names of its file, or, if these are few, by reading it.
 * (Where a copy of a store made separate files of these names, they become names of one file again.) */
#include "core/upkeep/gc_internal.h"

#include <stdio.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/base/plural.h"
#include "core/upkeep/file_name.h"

BASE_CLEANUP_DEFINE(struct commit_list_mark *, commit_list_mark_free)

#define LIST_LAG 3u     /* snapshots before the newest one that stay: at least 192 entries */

/* A file with more names is a collected record; fewer names may be those of a backup (cp -l, rsync --link-dest). */
#define NAMES_SURE 64u

/* The files of the listing whose names begin with `dir`: it is sorted. */
struct files_of { size_t first, end; };
static struct files_of files_of(const struct gc *g, const char *dir)
{
	const struct commit_file *all = g->files.all;
	size_t len = strlen(dir), first = base_bisect(i, 0, g->files.n, strcmp(all[i].name, dir) < 0);

	return (struct files_of){first, base_bisect(i, first, g->files.n, strncmp(all[i].name, dir, len) == 0)};
}

/* Readers from the head on have to know what became of attempts of which a manifest is left. */
static int head_manifests(struct gc *g, const struct commit_list *l, uint64_t *head)
{
	char dir[STORAGE_NAME_MAX];
	struct files_of in;
	int r;

	snprintf(dir, sizeof dir, "runs/%s/manifests/", commit_list_run(l));
	in = files_of(g, dir);
	for (size_t i = in.first; i < in.end; i++) {
		const struct commit_file *f = &g->files.all[i];
		struct proto_manifest m = {0};
		struct base_digest d;
		const char *hex = f->name + strlen(dir);

		if (f->temporary || f->foreign || base_digest_parse(hex, strlen(hex), &d) < 0 ||
			gc_names_has(&g->manifests_gone, f->name))
			continue;
		r = store_manifest_get(g->store, commit_list_run(l), &d, &m, NULL);
		if (r == -ENOMEM)
			return base_no_memory(g->err);
		if (r == 0)
			*head = base_min(*head, commit_list_attempt_from(l, m.attempt));
		proto_manifest_release(&m);
	}
	return 0;
}

static void head_folders(const struct gc *g, const struct commit_list *l, uint64_t *head)
{
	for (size_t i = 0; i < g->folders.n; i++) {
		const struct commit_incoming *f = &g->folders.all[i].info;

		if (strcmp(f->run, commit_list_run(l)) != 0)
			continue;
		*head = base_min(*head, commit_list_attempt_from(l, f->attempt));
		if (f->begun)
			*head = base_min(*head, f->begin.position);
	}
}

static void head_launches(const struct gc *g, const struct commit_list *l, uint64_t *head)
{
	for (size_t i = 0; i < g->launches.n; i++)
		if (g->launches.all[i].state == COMMIT_ALIVE)
			*head = base_min(*head, commit_list_aborts_from(l, g->launches.all[i].launch));
}

/* The head that there is, or a higher one; 0: none. */
static int head_choose(struct gc *g, size_t i, uint64_t *ret_head)
{
	const struct commit_list *l = g->lists[i];
	uint64_t now = commit_list_head(l), lag = UINT64_C(64) * LIST_LAG, head;
	int r = 0;

	head = g->known[i].before - base_min(g->known[i].before, lag + 1);
	head_folders(g, l, &head);
	head_launches(g, l, &head);
	if (head > now)
		r = head_manifests(g, l, &head);
	head -= head % COMMIT_SNAPSHOT_EVERY;
	while (head > now && !commit_list_snapshot_whole(l, head))
		head -= COMMIT_SNAPSHOT_EVERY;
	*ret_head = base_max(head, now);
	return r;
}

/* Is this, of a run's directory, an entry whose place the collected record is to take? */
static bool entry_goes(const struct commit_file *f, struct commit_list_mark *k, uint64_t head, uint64_t *ret_n)
{
	struct file_name parsed;

	if (f->temporary || f->foreign || file_name_parse(f->name, &parsed) != STORE_RECORD_ENTRY || parsed.collected)
		return false;
	*ret_n = parsed.number;
	return *ret_n < head && f->names <= NAMES_SURE && !commit_list_mark_keeps(k, *ret_n) &&
		(f->names <= 1 || !commit_list_mark_collected(k, *ret_n));
}

/* Why no entry was collected. A list that contradicts itself is reported as damage; a file system without hard links,
 * and a list that no mark can describe, are no errors. (What a list with a head lacks was found when it was read.) */
static void entries_kept(struct gc *g, const char *run, int r, const struct base_error *why)
{
	char name[STORAGE_NAME_MAX];

	snprintf(name, sizeof name, "runs/%s", run);
	if (r == -ENOENT) /* another collection has a higher head, and has deleted this one's files */
		return;
	if (r == -BASE_ELIMIT || r == -EOPNOTSUPP || r == -EPERM || r == -EMLINK) {
		gc_report(g, "keep", name, 0, r == -BASE_ELIMIT
			? "too many steps are visible: the list keeps its entries"
			: "the file system gives no file several names: the list keeps its entries");
		return;
	}
	if (r == -BASE_EDAMAGED)
		gc_report(g, "damage", name, 0, why->text);
	g->fault = r;
	base_error_set(g->err, r, "%s: no entry of the list was collected", why->code ? why->text : base_error_name(r));
}

struct collected { uint64_t files, bytes; };

static int entries_replace(struct gc *g, const char *dir, struct commit_list_mark *k, uint64_t head,
	struct collected *c)
{
	const struct files_of in = files_of(g, dir);
	uint64_t n, first = 0;
	int r = 0;

	while (first < head && commit_list_mark_keeps(k, first))
		first++;
	for (size_t i = in.end; i-- > in.first && r == 0;)
		if (entry_goes(&g->files.all[i], k, head, &n)) {
			r = g->o->dry_run ? 0 : commit_list_mark_collect(k, n);
			c->files += r == 0;
			c->bytes += r == 0 ? g->files.all[i].size : 0;
		}
	if (r == 0 && first < head && !g->o->dry_run)
		r = commit_list_mark_collect(k, first);
	return r;
}

static void marks_delete(struct gc *g, const char *dir, uint64_t head)
{
	const struct files_of in = files_of(g, dir);
	uint64_t n;

	for (size_t i = in.first; i < in.end && !g->fault; i++) {
		const struct commit_file *f = &g->files.all[i];
		int r = -ENOENT; /* another collection was here */

		if (!f->temporary && !f->foreign && commit_list_mark_parse(f->name + strlen(dir), &n) && n < head &&
			!g->o->dry_run)
			r = storage_remove(g->store->storage, f->name);
		if (r < 0 && r != -ENOENT)
			gc_fault(g, r, f->name, "deleted");
	}
}

static void entries_report(struct gc *g, const char *dir, uint64_t head, const struct collected *c)
{
	char text[160];

	if (c->files == 0)
		return;
	g->result.entries += c->files;
	g->result.entries_bytes += c->bytes;
	gc_reason(g, "collect", "entries of lists that later snapshots cover", c->files, c->bytes, 0);
	snprintf(text, sizeof text, "%llu %s of the list before entry %llu: later snapshots cover %s",
		(unsigned long long)c->files, base_plural(c->files, "entry", "entries"), (unsigned long long)head,
		base_plural(c->files, "it", "them"));
	gc_report(g, "collect", dir, c->bytes, text);
}

static bool entries_all_gone(const struct gc *g, const char *run, struct commit_list_mark *k, uint64_t head)
{
	char dir[STORAGE_NAME_MAX], mark[STORAGE_NAME_MAX], record[STORAGE_NAME_MAX];
	struct files_of in;
	uint64_t n;

	snprintf(dir, sizeof dir, "runs/%s/", run);
	commit_list_mark_name(run, COMMIT_LIST_HEAD, head, mark);
	commit_list_mark_name(run, COMMIT_LIST_COLLECTED, head, record);
	in = files_of(g, dir);
	for (size_t i = in.first; i < in.end; i++)
		if (entry_goes(&g->files.all[i], k, head, &n))
			return false;
	return commit_files_find(&g->files, mark) && commit_files_find(&g->files, record);
}

/* -ENOENT of the mark: the snapshots that there are cannot be used (by a reader that knows no acceptances). */
static void entries_collect(struct gc *g, struct commit_list *l, uint64_t head)
{
	base_cleanup(commit_list_mark_free_p) struct commit_list_mark *k = NULL;
	struct collected c = {0, 0};
	struct base_error why = {0};
	char dir[STORAGE_NAME_MAX];
	bool goes;
	int r = commit_list_mark_make(l, head, &k, &why);

	if (r == -ENOENT)
		return;
	snprintf(dir, sizeof dir, "runs/%s/", commit_list_run(l));
	goes = r == 0 && (head > commit_list_head(l) || !entries_all_gone(g, commit_list_run(l), k, head));
	if (goes && !g->o->dry_run)
		r = commit_list_mark_put(k, &why);
	if (goes && r == 0)
		r = entries_replace(g, dir, k, head, &c);
	if (r < 0)
		entries_kept(g, commit_list_run(l), r, &why);
	else
		marks_delete(g, dir, head);
	dir[strlen(dir) - 1] = 0;
	entries_report(g, dir, head, &c);
}

void gc_entries(struct gc *g)
{
	for (size_t i = 0; i < g->nlists && !g->fault && g->store->info.list_3; i++) {
		uint64_t head;
		int r = head_choose(g, i, &head);

		if (r < 0)
			g->fault = r;
		else if (head)
			entries_collect(g, g->lists[i], head);
	}
}
