/* SPDX-License-Identifier: Apache-2.0
 *
 * gc_sweep: what happens to each file of the listing, once it is known what must stay.
 *
 *     pack, manifest         free if nothing reaches it and its attempt is decided (or has neither folder nor
 *                            heartbeat)
 *     unfinished file        of a pack: as its pack. Others: free, but its mark also waits for every launch that was
 *                            alive when it was marked, since its maker is not known
 *     folder in incoming/    deleted when its attempt is decided, or when it is empty and its launch is gone
 *     heartbeat              deleted when its launch is dead
 *     stats/<run>/<step>.<n> deleted when entry n is no longer a visible commit
 *     mark                   deleted when its file is gone or reached
 *     note of damage         deleted when its pack is gone and nothing reaches it
 *
 * "free" means: marked in trash/, and deleted by a later collection that finds the mark at least a grace period old, by
 * this host's clock, and the file still free. A wrong clock makes a deletion early or late, never wrong: what may be
 * deleted is decided before the mark is looked at. A file that no vckpt makes is reported and left alone. */
#include "core/upkeep/gc_internal.h"

#include <stdio.h>

#include "core/base/clock.h"
#include "core/upkeep/file_name.h"

#define TRASH_NAME_MAX 200

struct sweep_mark {
	char name[STORAGE_NAME_MAX];    /* of the mark */
	bool exists;                    /* and is good */
	bool over;                      /* the grace period has passed */
	int64_t due_ns;                 /* when it has */
	bool writers;                   /* a launch that was alive at the marking still is */
	bool newer;                     /* a newer vckpt made it: it stays, and so does what it marks */
};

void gc_fault(struct gc *g, int r, const char *name, const char *verb)
{
	if (g->fault)
		return;
	g->fault = r;
	if (!store_denied(g->store, r, g->err))
		base_error_set(g->err, r, "%s cannot be %s: %s", name, verb, base_error_name(r));
}

static bool sweep_remove(struct gc *g, const char *name)
{
	int r = g->o->dry_run ? 0 : storage_remove(g->store->storage, name);

	if (r < 0 && r != -ENOENT)
		gc_fault(g, r, name, "deleted");
	return r == 0 || r == -ENOENT;
}

/* ---- marks ---- */

/* trash/<pack> for a pack. For other files the name with `=` for each `/` and one at its end (because the end of an
 * unfinished file's name has a meaning); a long name is shortened by a hash. */
static void mark_name(const char *file, char name[static STORAGE_NAME_MAX])
{
	size_t len = strlen(file);
	struct base_digest d;
	char hex[BASE_DIGEST_HEX];
	struct file_name parsed;
	int n;

	if (file_name_parse(file, &parsed) == FILE_PACK) {
		snprintf(name, STORAGE_NAME_MAX, "trash/%s", parsed.pack);
		return;
	}
	if (len <= TRASH_NAME_MAX) {
		n = snprintf(name, STORAGE_NAME_MAX, "trash/%s=", file);
	} else {
		base_sha256(file, len, &d);
		base_digest_hex(&d, hex);
		n = snprintf(name, STORAGE_NAME_MAX, "trash/%.64s=%s", file, hex);
	}
	for (int i = 6; i < n; i++)
		if (name[i] == '/')
			name[i] = '=';
}

static int mark_read(struct gc *g, const char *name, struct proto_trash *ret_m)
{
	struct store_record record = {0};
	int r = store_record_get(g->store->storage, name, STORE_RECORD_TRASH, g->store->info.id, &record, NULL, NULL);

	if (r == 0)
		r = proto_trash_decode(record.body, record.len, ret_m);
	store_record_release(&record);
	return r;
}

/* When a mark's grace period is over: at most the last moment that there is. */
static int64_t sweep_due(const struct gc *g, int64_t since_ns)
{
	uint64_t grace_ns = base_min(g->o->grace_s, INT64_MAX / 2 / 1000000000) * 1000000000;

	return since_ns < INT64_MAX / 2 ? since_ns + (int64_t)grace_ns : INT64_MAX;
}

/* A mark that cannot be read, or that names another file, is deleted; a later collection marks the file again. */
static void mark_find(struct gc *g, const char *file, struct sweep_mark *ret_mark)
{
	struct proto_trash m = {0};
	int r;

	*ret_mark = (struct sweep_mark){0};
	mark_name(file, ret_mark->name);
	if (!commit_files_find(&g->files, ret_mark->name))
		return;
	r = mark_read(g, ret_mark->name, &m);
	ret_mark->newer = r == -BASE_EVERSION;
	if (r == 0 && strcmp(m.name, file) == 0) {
		uint64_t age_ns = g->now_ns > m.time_ns ? (uint64_t)(g->now_ns - m.time_ns) : 0;

		ret_mark->exists = true;
		ret_mark->due_ns = sweep_due(g, m.time_ns);
		ret_mark->over = age_ns / 1000000000 >= g->o->grace_s;
		for (uint32_t i = 0; i < m.nheartbeats; i++)
			ret_mark->writers |= gc_launch_alive(g, m.heartbeats[i]);
	} else if (!ret_mark->newer) {
		sweep_remove(g, ret_mark->name);
	}
	proto_trash_release(&m);
}

static int mark_encode(struct gc *g, const char *file, struct base_buf *b)
{
	struct proto_trash m = {.name = file, .time_ns = base_realtime_ns()};
	const char **beats = calloc(g->launches.n ? g->launches.n : 1, sizeof *beats);
	int r;

	if (!beats)
		return -ENOMEM;
	for (size_t i = 0; i < g->launches.n; i++)
		if (g->launches.all[i].state == COMMIT_ALIVE)
			beats[m.nheartbeats++] = g->launches.all[i].file + strlen("hosts/");
	m.heartbeats = beats;
	r = proto_trash_encode(&m, b);
	free(beats);
	return r;
}

static bool mark_put(struct gc *g, const char *file, const char *name)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct store *s = g->store;
	int r = g->o->dry_run ? 0 : mark_encode(g, file, &body);

	if (r == 0 && !g->o->dry_run) {
		r = store_record_put(s->storage, name, STORE_RECORD_TRASH, s->info.id, body.data, body.len);
		if (r == -ENOSPC || r == -EDQUOT) {
			store_reserve_release(s);
			r = store_record_put(s->storage, name, STORE_RECORD_TRASH, s->info.id, body.data, body.len);
		}
	}
	if (r < 0)
		gc_fault(g, r, file, "marked");
	return r >= 0;
}

/* ---- verdicts ---- */

/* model: mark */
static void sweep_keep(struct gc *g, const struct commit_file *f)
{
	struct proto_trash m = {0};
	char name[STORAGE_NAME_MAX];

	mark_name(f->name, name);
	if (commit_files_find(&g->files, name) && mark_read(g, name, &m) != -BASE_EVERSION)
		sweep_remove(g, name);
	proto_trash_release(&m);
}

/* After a pack was deleted: deletes the note of its damage. */
static void sweep_forget(struct gc *g, const struct commit_file *f)
{
	const struct commit_file *note;
	char name[STORAGE_NAME_MAX];
	struct file_name n;

	if (file_name_parse(f->name, &n) != FILE_PACK)
		return;
	snprintf(name, sizeof name, "damaged/%s", n.pack);
	note = commit_files_find(&g->files, name);
	if (note && sweep_remove(g, name))
		g->result.deleted_bytes += note->size;
}

/* model: sweep */
static void sweep_delete(struct gc *g, const struct commit_file *f, const char *mark, const char *why)
{
	if (!sweep_remove(g, f->name))
		return;
	if (mark)
		sweep_remove(g, mark);
	sweep_forget(g, f);
	if (strncmp(f->name, "runs/", 5) == 0 && gc_names_add(&g->manifests_gone, f->name) < 0)
		gc_fault(g, -ENOMEM, f->name, "remembered");
	g->result.deleted++;
	g->result.deleted_bytes += f->size;
	gc_reason(g, "delete", why, 1, f->size, 0);
	gc_report(g, "delete", f->name, f->size, why);
}

/* model: mark. owned: its attempt is known to be over, so no writer has to be waited for. */
static void sweep_free(struct gc *g, const struct commit_file *f, bool owned, const char *why)
{
	const char *waits = "a writer that was alive when it was marked still is";
	struct sweep_mark mark;

	mark_find(g, f->name, &mark);
	if (mark.newer) {
		gc_report(g, "keep", f->name, f->size, "a newer vckpt marked it");
		return;
	}
	if (g->o->grace_s == 0 || (mark.exists && mark.over && (owned || !mark.writers))) {
		sweep_delete(g, f, mark.exists ? mark.name : NULL, why);
		return;
	}
	if (!mark.exists) {
		if (!mark_put(g, f->name, mark.name))
			return;
		g->result.marked++;
		g->result.marked_bytes += f->size;
		gc_reason(g, "mark", why, 1, f->size, sweep_due(g, g->now_ns));
		gc_report(g, "mark", f->name, f->size, why);
		return;
	}
	g->result.waiting++;
	g->result.waiting_bytes += f->size;
	gc_reason(g, "keep", mark.over ? waits : why, 1, f->size, mark.over ? 0 : mark.due_ns);
	gc_report(g, "keep", f->name, f->size, mark.over ? waits : "its grace period is not over");
}

static void sweep_foreign(struct gc *g, const struct commit_file *f)
{
	gc_report(g, "damage", f->name, f->size, "not a file that vckpt makes; left alone");
}

/* A live launch may have decided the attempt so long ago that the entry was collected. An attempt has a folder from
 * before its first file until it is decided: so one without a folder, which no list mentions, is over. */
static bool attempt_collected(struct gc *g, const char *attempt)
{
	bool collected = false;

	for (size_t i = 0; i < g->nlists; i++) {
		char begin[STORAGE_NAME_MAX];
		uint64_t size;

		snprintf(begin, sizeof begin, "incoming/%s/%s/begin", commit_list_run(g->lists[i]), attempt);
		if (storage_size(g->store->storage, begin, &size) != -ENOENT)
			return false;
		collected |= commit_list_head(g->lists[i]) > 0;
	}
	return collected;
}

/* May what belongs to this attempt go, if nothing reaches it? */
static const char *attempt_over(struct gc *g, const char *attempt)
{
	bool alive = gc_launch_alive(g, attempt);

	if (gc_decided(g, attempt, true))
		return "no visible step needs it";
	if (gc_decided(g, attempt, false))
		return NULL;
	for (size_t i = 0; i < g->folders.n; i++)
		if (strcmp(g->folders.all[i].info.attempt, attempt) == 0)
			return NULL;
	if (alive)
		return attempt_collected(g, attempt) ? "no list or folder knows its attempt any more" : NULL;
	return "no list, folder or heartbeat knows its attempt";
}

/* ---- kinds of files ---- */

/* An unfinished one belongs to the pack whose name its own begins with. */
static void sweep_pack(struct gc *g, const struct commit_file *f)
{
	char name[STORAGE_NAME_MAX];
	struct file_name n;
	const char *why;

	snprintf(name, sizeof name, "%s", f->name);
	if (f->temporary)
		name[strlen(name) - STORAGE_TEMP_SUFFIX_LEN] = 0;
	if (file_name_parse(name, &n) != FILE_PACK) {
		sweep_foreign(g, f);
		return;
	}
	why = !f->temporary && gc_names_has(&g->packs_kept, n.pack) ? NULL : attempt_over(g, n.attempt);
	if (why)
		sweep_free(g, f, true, f->temporary ? "an unfinished pack of a writer that is gone" : why);
	else
		sweep_keep(g, f);
}

/* Only reading a manifest shows its attempt. */
static void sweep_manifest(struct gc *g, const struct commit_file *f, const char *run, const struct base_digest *digest)
{
	struct proto_manifest m = {0};
	struct base_error err = {0};
	const char *why;
	int r;

	if (gc_names_has(&g->manifests_kept, f->name)) {
		sweep_keep(g, f);
		return;
	}
	r = store_manifest_get(g->store, run, digest, &m, &err);
	if (r == -ENOENT)
		return;
	if (r < 0) {
		gc_report(g, r == -BASE_EVERSION ? "keep" : "damage", f->name, f->size,
			err.code ? err.text : base_error_name(r));
		return;
	}
	why = attempt_over(g, m.attempt);
	proto_manifest_release(&m);
	if (why)
		sweep_free(g, f, true, "no visible step names it");
	else
		sweep_keep(g, f);
}

static void sweep_host(struct gc *g, const struct commit_file *f, const struct file_name *n)
{
	for (size_t i = 0; i < g->launches.n; i++)
		if (strcmp(g->launches.all[i].launch, n->launch) == 0 && strcmp(g->launches.all[i].host, n->host) == 0
		    && g->launches.all[i].state == COMMIT_DEAD)
			sweep_delete(g, f, NULL, "the heartbeat of a launch that is gone");
}

static void sweep_mark_file(struct gc *g, const struct commit_file *f)
{
	struct proto_trash m = {0};
	int r = mark_read(g, f->name, &m);

	if (r == -BASE_EDAMAGED || r == -BASE_EFORMAT || (r == 0 && !commit_files_find(&g->files, m.name)))
		sweep_remove(g, f->name);
	proto_trash_release(&m);
}

static void sweep_note(struct gc *g, const struct commit_file *f, const char *pack)
{
	char path[STORAGE_NAME_MAX];

	if (pack_path(pack, path) == 0 && !commit_files_find(&g->files, path) &&
		!gc_names_has(&g->packs_kept, pack))
		sweep_delete(g, f, NULL, "a note of damage in a pack that is gone");
}

/* false: no such commit was ever made. Measures are put after their commit, and were listed before the lists were read:
 * so the first reading knows their entry. */
static bool stats_known(struct gc *g, const struct commit_stats_name *n, bool *ret_live)
{
	for (size_t i = 0; i < g->nlists; i++) {
		const struct commit_list *l = g->lists[i];
		const struct commit_list_step *step;

		if (strcmp(commit_list_run(l), n->run) != 0)
			continue;
		step = commit_list_find(l, n->step);
		*ret_live = step && step->entry == n->entry;
		return n->entry < g->known[i].first && (*ret_live || !commit_list_entry_live(l, n->entry));
	}
	return false;
}

static void sweep_stats(struct gc *g, const struct commit_file *f, const struct commit_stats_name *name)
{
	bool live = false;

	if (!stats_known(g, name, &live)) {
		sweep_foreign(g, f);
		return;
	}
	if (live || !sweep_remove(g, f->name))
		return;
	snprintf(g->measures, sizeof g->measures, "%.*s", (int)(strrchr(f->name, '/') - f->name), f->name);
	g->measures_bytes += f->size;
}

/* Measures in one directory follow each other in the listing, and are reported as one. next: the file after the last
 * one; NULL: there is none. */
static void sweep_stats_end(struct gc *g, const struct commit_file *next)
{
	size_t len = strlen(g->measures);

	if (!len || (next && strncmp(next->name, g->measures, len) == 0 && next->name[len] == '/'))
		return;
	if (!g->o->dry_run)
		g->store->storage->ops->remove_dir(g->store->storage, g->measures);
	g->result.deleted++;
	g->result.deleted_bytes += g->measures_bytes;
	gc_reason(g, "delete", "measures of a step that is gone", 1, g->measures_bytes, 0);
	gc_report(g, "delete", g->measures, g->measures_bytes, "measures of a step that is gone");
	g->measures[0] = 0;
	g->measures_bytes = 0;
}

static void sweep_file(struct gc *g, const struct commit_file *f)
{
	struct file_name n;
	int kind = file_name_parse(f->name, &n);

	if (kind == FILE_INDEX)
		return;
	if (f->foreign)
		sweep_foreign(g, f);
	else if (strncmp(f->name, "packs/", 6) == 0)
		sweep_pack(g, f);
	else if (strncmp(f->name, "incoming/", 9) == 0)
		n.attempt[0] ? (void)0 : sweep_foreign(g, f); /* goes with its folder */
	else if (f->temporary)
		sweep_free(g, f, false, "an unfinished file");
	else if (kind == STORE_RECORD_MANIFEST)
		sweep_manifest(g, f, n.run, &n.digest);
	else if (kind == STORE_RECORD_STATS)
		sweep_stats(g, f, &n.stats);
	else if (kind == STORE_RECORD_HEARTBEAT)
		sweep_host(g, f, &n);
	else if (kind == STORE_RECORD_TRASH)
		sweep_mark_file(g, f);
	else if (kind == STORE_RECORD_DAMAGE)
		sweep_note(g, f, n.pack);
	else if (kind == FILE_FOREIGN)
		sweep_foreign(g, f);
}

/* model: folders */
static void sweep_folder(struct gc *g, const struct commit_folder *f)
{
	char name[STORAGE_NAME_MAX];
	uint64_t bytes = 0, files = 0;

	if (!gc_decided(g, f->info.attempt, false))
		return;
	snprintf(name, sizeof name, "incoming/%s/%s", f->info.run, f->info.attempt);
	for (size_t i = 0; i < f->files.n; i++)
		bytes += f->files.all[i].size;
	if (!g->o->dry_run)
		bytes = commit_folder_delete(g->store, f->info.run, f->info.attempt, &files);
	g->result.deleted++;
	g->result.deleted_bytes += bytes;
	gc_reason(g, "delete", "folder of an attempt that is decided", 1, bytes, 0);
	gc_report(g, "delete", name, bytes, "its attempt is decided");
}

/* ---- folders without a file, of writers that died before they put `begin` ---- */

static bool sweep_folder_known(const struct gc *g, const char *run, size_t run_len, const char *attempt)
{
	for (size_t i = 0; i < g->folders.n; i++)
		if (strcmp(g->folders.all[i].info.attempt, attempt) == 0 &&
			strncmp(g->folders.all[i].info.run, run, run_len) == 0 &&
			g->folders.all[i].info.run[run_len] == 0)
			return true;
	return false;
}

static int sweep_empty_attempt(void *arg, const struct storage_entry *e)
{
	const char *run = e->name + strlen("incoming/"), *attempt = strrchr(e->name, '/') + 1;
	struct commit_files files = {0};
	struct gc *g = arg;

	if (!commit_attempt_name_valid(attempt) || gc_launch_alive(g, attempt) ||
		sweep_folder_known(g, run, (size_t)(attempt - run) - 1, attempt))
		return 0;
	if (commit_files_list(g->store, e->name, &files, NULL) == 0 && files.n == 0) {
		/* a writer that comes now makes it again: storage_posix_write.c */
		if (!g->o->dry_run)
			g->store->storage->ops->remove_dir(g->store->storage, e->name);
		gc_report(g, "delete", e->name, 0, "an empty folder of a writer that is gone");
	}
	commit_files_release(&files);
	return 0;
}

static int sweep_empty_run(void *arg, const struct storage_entry *e)
{
	struct gc *g = arg;

	storage_list_dirs(g->store->storage, e->name, sweep_empty_attempt, g);
	return 0;
}

/* A directory whose maker was killed before it moved it to its place. One that is still alive makes the directory in
 * its place then. */
static int sweep_unplaced(void *arg, const struct storage_entry *e)
{
	struct gc *g = arg;
	struct storage *s = g->store->storage;

	if (e->temporary && (g->o->dry_run || s->ops->remove_dir(s, e->name) == 0))
		gc_report(g, "delete", e->name, 0, "a directory of a writer that is gone");
	return 0;
}

void gc_sweep(struct gc *g)
{
	storage_list_dirs(g->store->storage, "", sweep_unplaced, g);
	storage_list_dirs(g->store->storage, "incoming", sweep_empty_run, g);
	for (size_t i = 0; i < g->folders.n; i++)
		sweep_folder(g, &g->folders.all[i]);
	for (size_t i = 0; i < g->files.n; i++) {
		sweep_file(g, &g->files.all[i]);
		sweep_stats_end(g, i + 1 < g->files.n ? &g->files.all[i + 1] : NULL);
		gc_progress(g);
	}
}
