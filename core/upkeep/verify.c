/* SPDX-License-Identifier: Apache-2.0
 *
 * verify: the passes, in order.
 *
 *   1  lists are read; the visible steps that are asked for are known
 *   2  whole store: every file by itself (verify_files.c)
 *      whole store or run: traces of entries that the lists do not have (lost.c)
 *   3  every step is walked: records, layouts, parts, exact cover; objects that no verified footer lists are hashed by
 *      reference, and so is every one of a stranger's store; then the steps' files are opened (verify_steps.c)
 *   4  lists are read again: what was removed meanwhile is no damage
 *   5  faults are reported: if there are any, the steps are walked once more to find everything that they touch
 *   6  faults of packs are noted for writers, if asked for (verify_note.c)
 *
 * A fault is about bytes of a file. It is counted once, and reported once for each step and tensor that it touches. */
#include "core/upkeep/verify_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/commit/list/list_compare.h"
#include "core/upkeep/lost.h"

#define SKIPS_EACH 16u /* a longer gap in a list is one fault */
#define GAPS_EACH UINT64_C(4096) /* of a list's missing collected entries; of each gap the rest is one fault */

void verify_error(struct verify *v, int error)
{
	pthread_mutex_lock(&v->lock);
	if (!v->error)
		v->error = error;
	pthread_mutex_unlock(&v->lock);
}

void verify_progress(struct verify *v, uint64_t bytes)
{
	pthread_mutex_lock(&v->lock);
	v->done_bytes += bytes;
	v->result.bytes += bytes;
	if (v->total_bytes < v->done_bytes)
		v->total_bytes = v->done_bytes;
	if (v->o->progress)
		v->o->progress(v->o->arg, v->done_bytes, v->total_bytes);
	pthread_mutex_unlock(&v->lock);
}

/* A hostile writer might make two places hash alike, so that only one of them is checked: the hash has a secret of this
 * process in it. */
static uint8_t place_secret[16];
static pthread_once_t place_once = PTHREAD_ONCE_INIT;

static void place_secret_make(void)
{
	uint64_t guess[2] = {base_monotonic_ns(), (uint64_t)base_realtime_ns()};

	if (base_random(place_secret, sizeof place_secret) < 0) /* no getrandom: what is hard to know from outside */
		memcpy(place_secret, guess, sizeof place_secret);
}

uint64_t verify_place(const char *pack, const struct pack_object_ref *ref, const void *more, size_t len)
{
	uint8_t bytes[sizeof place_secret + 80 + VERIFY_PLACE_MORE + PACK_NAME_MAX] = {0};
	uint8_t *at = bytes + sizeof place_secret;
	struct base_digest d;
	uint64_t hash;

	pthread_once(&place_once, place_secret_make);
	memcpy(bytes, place_secret, sizeof place_secret);
	memcpy(at, &ref->digest, 32);
	base_put64(at + 32, ref->offset);
	base_put64(at + 40, ref->checks);
	base_put64(at + 48, ref->raw_len);
	base_put64(at + 56, ref->stored_len);
	base_put64(at + 64, ref->codec);
	base_put64(at + 72, len);
	if (len)
		memcpy(at + 80, more, len);
	if (pack)
		memcpy(at + 80 + VERIFY_PLACE_MORE, pack, base_min(strlen(pack), PACK_NAME_MAX));
	base_sha256(bytes, pack ? sizeof bytes : sizeof bytes - PACK_NAME_MAX, &d);
	hash = base_get64(d.bytes);
	return hash ? hash : 1;
}

/* ---- faults ---- */

static bool same_fault(const struct verify_fault *a, const struct verify_fault *b)
{
	return a->offset == b->offset && a->len == b->len && a->step == b->step && a->by_xxh == b->by_xxh &&
		!memcmp(&a->xxh, &b->xxh, sizeof a->xxh) && !strcmp(a->file, b->file) &&
		!strcmp(a->what, b->what);
}

/* `text` behind the words that it begins with, or NULL. */
static const char *text_after(const char *text, const char *begin, size_t len)
{
	return strncmp(text, begin, len) == 0 ? text + len : NULL;
}

/* A sentence of the pack reader names the pack, which the fault's file names already: the name is removed. */
static char *said_of_pack(const char *file, const char *what)
{
	const char *slash = strrchr(file, '/'), *name = slash ? slash + 1 : file, *rest;
	size_t len = strcspn(name, ".");
	char *text = NULL;

	rest = text_after(what, file, strlen(file));
	if (rest && rest[0] == ':') /* "FILE: it is missing" */
		return strdup(rest + 1 + strspn(rest + 1, " "));
	rest = text_after(what, "pack ", 5);
	rest = rest ? text_after(rest, name, len) : NULL;
	if (rest && (rest[0] == ':' || rest[0] == ',')) /* "pack X: its head ..." */
		return strdup(rest + 1 + strspn(rest + 1, " "));
	if (rest && rest[0] == ' ') /* "pack X is cut short ..." */
		return asprintf(&text, "it%s", rest) < 0 ? NULL : text;
	return strdup(what);
}

void verify_fault(struct verify *v, struct verify_fault f)
{
	bool known = false;

	pthread_mutex_lock(&v->lock);
	f.what = f.pack ? said_of_pack(f.file, f.what) : strdup(f.what);
	f.file = strdup(f.file);
	f.run = f.run ? strdup(f.run) : NULL;
	for (size_t i = v->nfaults > 64 ? v->nfaults - 64 : 0; i < v->nfaults && f.what && f.file && !known; i++)
		known = same_fault(&v->faults[i], &f);
	if (!known && f.what && f.file && base_array_more(v->faults, v->nfaults) == 0 &&
		(!f.pack || verify_index_add(&v->places, f.file, f.offset, f.len, v->nfaults) == 0)) {
		v->faults[v->nfaults++] = f;
	} else {
		if (!known && !v->error)
			v->error = -ENOMEM;
		free((char *)f.what);
		free((char *)f.file);
		free((char *)f.run);
	}
	pthread_mutex_unlock(&v->lock);
}

/* Asks for the faults of a pack that touch an object's bytes or checks. */
struct hits {
	struct verify *v;
	const char *file;
	const struct base_xxh128 *xxh; /* of a piece, or NULL */
	uint64_t begin, end;           /* the range asked for before, whose faults were found already */
	int (*f)(void *arg, struct verify_fault *f);
	void *arg;
};

static int on_hit(void *arg, size_t number)
{
	const struct hits *h = arg;
	struct verify_fault *f = &h->v->faults[number];

	if (strcmp(f->file, h->file) || (f->by_xxh && (!h->xxh || memcmp(h->xxh, &f->xxh, sizeof f->xxh))))
		return 0;
	return f->offset < h->end && h->begin < f->offset + f->len ? 0 : h->f(h->arg, f);
}

/* ref NULL: only faults of the whole file. */
static int fault_hits(struct verify *v, const char *file, const struct pack_object_ref *ref,
	const struct base_xxh128 *xxh, int (*f)(void *arg, struct verify_fault *f), void *arg)
{
	struct hits h = {v, file, xxh, 0, 0, f, arg};
	int r = verify_index_whole(&v->places, file, on_hit, &h);

	if (r || !ref)
		return r;
	r = verify_index_range(&v->places, file, ref->offset, ref->offset + ref->stored_len, on_hit, &h);
	if (r)
		return r;
	h.begin = ref->offset;
	h.end = ref->offset + ref->stored_len;
	return verify_index_range(&v->places, file, ref->checks,
		ref->checks + pack_object_checks_bytes(ref->codec, ref->raw_len), on_hit, &h);
}

static int any_hit(void *arg, struct verify_fault *f)
{
	(void)arg;
	(void)f;
	return 1;
}

bool verify_known(struct verify *v, const char *file, const struct pack_object_ref *ref)
{
	return fault_hits(v, file, ref, NULL, any_hit, NULL) != 0;
}

/* ---- pass 1: lists ---- */

static bool steps_equal(const struct commit_list_step *a, const struct commit_list_step *b)
{
	return a->entry == b->entry && commit_equal(&a->commit, &b->commit);
}

static void entry_fault(struct verify *v, const struct commit_list *l, uint64_t n, bool newer, const char *what)
{
	char name[STORAGE_NAME_MAX];

	commit_list_entry_name(commit_list_run(l), n, name);
	verify_fault(v, (struct verify_fault){.file = name, .what = what, .newer = newer, .run = commit_list_run(l)});
}

static void report_snapshot(struct verify *v, const struct commit_list *l, uint64_t snapshot)
{
	entry_fault(v, l, snapshot, false, "readers from this snapshot see other steps than readers from the start, or "
		"other facts of them");
}

/* A reader that starts at the newest snapshot must see what one sees that starts at entry 0. */
static int compare_snapshot(struct verify *v, const struct commit_list *whole, struct base_error *err)
{
	uint64_t next = commit_list_next(whole), newest;
	const struct commit_list_step *latest;
	struct commit_list *l;
	bool same;
	int r;

	if (next <= COMMIT_SNAPSHOT_EVERY)
		return 0;
	r = commit_list_open_newest(v->store, commit_list_run(whole), &l, err);
	if (r < 0)
		return r;
	latest = commit_list_latest(l);
	newest = latest ? latest->step : PROTO_NONE;
	r = commit_list_know_all(l, err);
	latest = r == 0 ? commit_list_latest(l) : NULL;
	same = newest == (latest ? latest->step : PROTO_NONE);
	if (r == 0 && commit_list_next(l) == next) { /* nothing was put meanwhile */
		same = same && commit_list_count(l) == commit_list_count(whole);
		for (size_t i = 0; same && i < commit_list_count(whole); i++)
			same = steps_equal(commit_list_at(l, i), commit_list_at(whole, i));
		same = same && commit_list_facts_same(l, whole);
	}
	commit_list_close(l);
	if (r == 0 && !same)
		report_snapshot(v, whole, (next - 1) / COMMIT_SNAPSHOT_EVERY * COMMIT_SNAPSHOT_EVERY);
	return r;
}

/* Reports the entries that the list skips: only reading in order shows what is wrong with them. A long gap is one
 * fault. */
static void report_skipped(struct verify *v, const struct commit_list *l)
{
	struct commit_list_damage d;

	for (size_t at = 0; commit_list_damage_next(l, &at, &d);) {
		uint64_t n, from = d.first;
		const char *why;

		if (d.count > SKIPS_EACH) {
			entry_fault(v, l, d.first, false, d.why);
			continue;
		}
		while ((n = commit_list_damaged_next(l, &from, &why)) - d.first < d.count)
			entry_fault(v, l, n, false, why);
	}
}

static void report_lost(void *arg, const char *file, const char *run, const char *text)
{
	verify_fault(arg, (struct verify_fault){.file = file, .what = text, .run = run});
}

/* A later collection may have deleted it meanwhile. */
static bool head_same(struct verify *v, const struct commit_list *l)
{
	struct commit_list *now;
	bool same;

	if (commit_list_open(v->store, commit_list_run(l), true, &now, NULL) < 0)
		return false;
	same = commit_list_head(now) == commit_list_head(l);
	commit_list_close(now);
	return same;
}

/* The mark of the head, which says what the snapshot there says. */
static int check_mark(struct verify *v, struct commit_list *l)
{
	struct base_error why = {0};
	char name[STORAGE_NAME_MAX];
	int r = commit_list_mark_check(l, &why);

	commit_list_mark_name(commit_list_run(l), COMMIT_LIST_HEAD, commit_list_head(l), name);
	if (r == -BASE_EDAMAGED)
		report_lost(v, name, commit_list_run(l), why.text);
	else if (r == -ENOENT && head_same(v, l))
		report_lost(v, name, commit_list_run(l), "it is missing: a reader that finds a snapshot of this list "
			"damaged needs it, because earlier entries were collected");
	return r == -ENOMEM ? r : 0; /* what cannot be read is reported as a file */
}

/* *room: as many numbers may be reported one by one. Mend puts these again, and more in its next round. */
static void check_gap(struct verify *v, const struct commit_list *l, uint64_t first, uint64_t count, uint64_t *room)
{
	static const char one[] = "it is missing: it was collected, but its number stays used";
	uint64_t each = base_min(count, *room), rest = count - each, size;
	char name[STORAGE_NAME_MAX], text[160];

	*room -= each;
	for (uint64_t n = first; n - first < each; n++) {
		commit_list_entry_name(commit_list_run(l), n, name);
		if (!commit_list_skipped(l, n) && storage_size(v->store->storage, name, &size) == -ENOENT)
			report_lost(v, name, commit_list_run(l), one);
	}
	if (rest == 0)
		return;
	commit_list_entry_name(commit_list_run(l), first + each, name);
	snprintf(text, sizeof text, "%llu entries from this one on are missing: they were collected, but their "
		"numbers stay used", (unsigned long long)rest);
	report_lost(v, name, commit_list_run(l), rest == 1 ? one : text);
}

/* Numbers before the head have an entry or a collected record, so that a writer that was stopped since finds its number
 * taken. */
static int check_collected(struct verify *v, struct commit_list *l, struct base_error *err)
{
	uint64_t at = 0, first, count, room = GAPS_EACH;
	int r;

	while ((r = commit_list_unlisted_next(l, commit_list_head(l), &at, &first, &count, err)) > 0)
		check_gap(v, l, first, count, &room);
	return r;
}

static int check_head(struct verify *v, struct commit_list *l, struct base_error *err)
{
	int r;

	if (!commit_list_head(l))
		return 0;
	if (v->o->begins)
		v->o->begins(v->o->arg, commit_list_run(l), commit_list_head(l));
	r = check_collected(v, l, err);
	return r < 0 ? r : check_mark(v, l);
}

static int add_step(struct verify *v, const struct commit_list *l, size_t i)
{
	if (base_array_more(v->steps, v->nsteps) < 0)
		return -ENOMEM;
	v->steps[v->nsteps++] = (struct verify_step){commit_list_run(l), commit_list_at(l, i)};
	return 0;
}

static bool wanted(const struct verify *v, const struct commit_list *l, size_t i)
{
	return !v->o->run || (!strcmp(v->o->run, commit_list_run(l)) &&
				(v->o->step == PROTO_NONE || v->o->step == commit_list_at(l, i)->step));
}

/* Can the run's manifests be looked for? (One that is missing is a fault of its step.) */
static int manifests_reached(const struct verify *v, const char *run, struct base_error *err)
{
	char name[STORAGE_NAME_MAX];
	uint64_t size;
	int r;

	snprintf(name, sizeof name, "runs/%s/manifests/0", run);
	r = storage_size(v->store->storage, name, &size);
	if (r == 0 || r == -ENOENT)
		return 0;
	if (!store_denied_listing(v->store, r, err))
		base_error_set(err, r, "its manifests: %s", base_error_name(r));
	return base_error_prefix(err, r, "run %s", run);
}

static int open_list(struct verify *v, const char *run, struct base_error *err)
{
	struct commit_list *l;
	int r;

	if (base_array_more(v->lists, v->nlists) < 0)
		return -ENOMEM;
	r = v->o->paranoid ? commit_list_open_compared(v->store, run, &l, err)
		: commit_list_open(v->store, run, true, &l, err);
	if (r < 0)
		return r;
	if ((r = manifests_reached(v, run, err)) < 0)
		commit_list_close(l);
	else
		v->lists[v->nlists++] = l;
	return r;
}

/* The run's files are not looked at; other runs are verified as always. */
static int run_unread(struct verify *v, const char *run, int r, const struct base_error *why, struct base_error *err)
{
	const char *text = why->text[0] ? why->text : base_error_name(r);

	if (r == -ENOMEM || v->o->run || !v->o->unread)
		return base_error_set(err, r, "%s", text);
	if (base_array_more(v->unread, v->nunread) < 0 || !(v->unread[v->nunread] = strdup(run)))
		return -ENOMEM;
	v->result.unread = ++v->nunread;
	v->o->unread(v->o->arg, run, text);
	return 0;
}

/* What is visible in this run is not known. */
static void report_newer_run(struct verify *v, const char *run, const struct base_error *err)
{
	char name[STORAGE_NAME_MAX];

	snprintf(name, sizeof name, "runs/%s", run);
	verify_fault(v, (struct verify_fault){.file = name, .what = err->text, .newer = true, .run = run});
}

static void report_newer_entry(struct verify *v, const struct commit_list *l)
{
	struct base_error why = {0};
	uint64_t n;

	if (commit_list_newer(l, &n, &why) < 0)
		entry_fault(v, l, n, true, why.text);
}

static int add_run(struct verify *v, const char *run, struct base_error *err)
{
	struct base_error why = {0};
	int r = open_list(v, run, &why);
	struct commit_list *l;

	if (r == -BASE_EVERSION) {
		report_newer_run(v, run, &why);
		return 0;
	}
	if (r < 0)
		return run_unread(v, run, r, &why, err);
	l = v->lists[v->nlists - 1];
	report_newer_entry(v, l);
	r = check_head(v, l, err);
	if (commit_list_lie(l))
		report_snapshot(v, l, commit_list_lie(l));
	if (commit_list_damaged(l))
		report_skipped(v, l);
	else if (r == 0)
		r = compare_snapshot(v, l, err);
	for (size_t i = 0; r == 0 && i < commit_list_count(l); i++)
		if (wanted(v, l, i))
			r = add_step(v, l, i);
	return r;
}

/* Adds all other visible steps, because a fault may touch them, too. Runs that cannot be read are left out here. */
static int add_others(struct verify *v)
{
	char **runs;
	size_t n;
	int r = commit_runs(v->store, &runs, &n, NULL);

	if (r < 0)
		return r == -ENOMEM ? r : 0;
	for (size_t i = 0; r == 0 && i < n; i++)
		if (strcmp(runs[i], v->o->run) && open_list(v, runs[i], NULL) == -ENOMEM)
			r = -ENOMEM;
	commit_runs_free(runs, n);
	for (size_t k = 0; r == 0 && k < v->nlists; k++)
		for (size_t i = 0; r == 0 && i < commit_list_count(v->lists[k]); i++)
			if (!wanted(v, v->lists[k], i))
				r = add_step(v, v->lists[k], i);
	return r;
}

static int add_runs(struct verify *v, struct base_error *err)
{
	char **runs;
	size_t n;
	int r;

	if (v->o->run)
		return add_run(v, v->o->run, err);
	r = commit_runs(v->store, &runs, &n, err);
	if (r < 0)
		return r;
	for (size_t i = 0; i < n && r >= 0; i++)
		r = add_run(v, runs[i], err);
	commit_runs_free(runs, n);
	return r;
}

/* Checks the entries of the steps that are asked for, both copies of each. */
static void check_entries(struct verify *v)
{
	char name[STORAGE_NAME_MAX];
	struct file_name n;

	for (size_t i = 0; i < v->nsteps; i++) {
		const struct commit_list_step *step = v->steps[i].step;

		commit_list_entry_name(v->steps[i].run, step->entry, name);
		if (file_name_parse(name, &n))
			verify_record(v, name, &n);
		if (v->o->paranoid && store_manifest_path(v->steps[i].run, &step->commit.manifest, name) == 0 &&
			file_name_parse(name, &n))
			verify_record(v, name, &n);
	}
}

/* ---- pass 2: entries that the lists do not have ---- */

static int find_lost(struct verify *v, struct base_error *err)
{
	const struct upkeep_lost_question q = {v->store, v->lists, v->nlists, v->o->run, report_lost, v};

	return v->o->run && v->o->step != PROTO_NONE ? 0 : upkeep_lost_find(&q, err);
}

/* ---- pass 4: what was removed meanwhile ---- */

/* Files are deleted only after the entry that removes their step is durable: so a list that is read after a file was
 * missed shows that the step was removed. */
static int look_again(struct verify *v)
{
	struct commit_list *now;

	for (size_t k = 0; v->nfaults && k < v->nlists; k++) {
		const char *run = commit_list_run(v->lists[k]);
		int r = commit_list_open(v->store, run, false, &now, NULL);

		if (r == -ENOMEM)
			return r;
		if (r < 0)
			continue;
		for (size_t i = 0; i < v->nsteps; i++)
			if (v->steps[i].run == run)
				v->steps[i].removed = !commit_list_entry_live(now, v->steps[i].step->entry);
		commit_list_close(now);
	}
	for (size_t i = 0; i < v->nfaults; i++)
		v->faults[i].gone = v->faults[i].step && v->steps[v->faults[i].step - 1].removed;
	return 0;
}

/* Is this a pack that is gone and that no visible step needs? It was listed, or needed, when verify began. */
static bool fault_pack_gone(struct verify *v, const struct verify_fault *f)
{
	uint64_t size;

	return f->pack && storage_size(v->store->storage, f->file, &size) == -ENOENT;
}

static uint64_t count_removed(const struct verify *v)
{
	uint64_t n = 0;

	for (size_t i = 0; i < v->nsteps; i++)
		n += v->steps[i].removed;
	return n;
}

/* ---- pass 5: reports ---- */

struct report {
	struct verify *v;
	const struct verify_step *step;
	size_t number;          /* of the step, from 1 */
	const struct verify_item *item;
};

static void report_one(struct verify *v, struct verify_fault *f, const char *run, uint64_t step, const char *component,
	const char *tensor)
{
	struct upkeep_damage d = {.fault = (size_t)(f - v->faults), .file = f->file, .newer = f->newer,
		.offset = f->offset, .len = f->len, .what = f->what,
		.run = run, .step = step, .component = component, .tensor = tensor};

	f->reported = true;
	v->o->damage(v->o->arg, &d);
}

/* Reports a fault once for each step and tensor; the pieces of a tensor come one after another. Faults of records that
 * describe a whole step have no tensor. */
static int report_item(void *arg, struct verify_fault *f)
{
	const struct report *t = arg;
	const struct verify_item *it = t->item;
	const char *run = t->step->run;
	uint64_t step = t->step->step->step;

	if (it->what == VERIFY_BLOB) {
		report_one(t->v, f, run, step, NULL, it->blob);
	} else if (it->what == VERIFY_PIECE) {
		uint32_t len;
		const char *bytes = store_layout_name(it->layout, it->tensor, &len);
		base_cleanup_free char *name = strndup(bytes, len);

		if (!name)
			return -ENOMEM;
		if (f->tensor_step == t->number && f->tensor == it->tensor)
			return 0;
		f->tensor_step = t->number;
		f->tensor = it->tensor;
		report_one(t->v, f, run, step, store_layout_component(it->layout, it->tensor), name);
	} else if (f->whole_step != t->number) {
		f->whole_step = t->number;
		report_one(t->v, f, run, step, NULL, NULL);
	}
	return 0;
}

static int on_item(struct verify_walker *w, const struct verify_item *it)
{
	struct report *t = w->arg;
	char file[STORAGE_NAME_MAX];

	if (pack_path(it->pack, file) < 0)
		return 0;
	t->item = it;
	return fault_hits(t->v, file, it->what == VERIFY_PACK ? NULL : it->ref, it->xxh, report_item, t);
}

/* Faults of the step's manifest and entry, and those that were found in the step itself. */
static void report_step_faults(struct verify *v, size_t number)
{
	const struct verify_step *s = &v->steps[number];
	char manifest[STORAGE_NAME_MAX], entry[STORAGE_NAME_MAX];

	if (store_manifest_path(s->run, &s->step->commit.manifest, manifest) < 0)
		manifest[0] = 0;
	commit_list_entry_name(s->run, s->step->entry, entry);
	for (size_t i = 0; i < v->nfaults; i++) {
		struct verify_fault *f = &v->faults[i];

		if (f->pack)
			continue;
		if (f->step ? f->step == number + 1 : !strcmp(f->file, manifest) || !strcmp(f->file, entry))
			report_one(v, f, s->run, s->step->step, NULL, NULL);
	}
}

static int report_all(struct verify *v)
{
	int r = v->nfaults && v->o->run ? add_others(v) : 0;

	for (size_t i = 0; r == 0 && v->nfaults && i < v->nsteps; i++) {
		struct report t = {v, &v->steps[i], i + 1, NULL};
		struct verify_walker w = {.store = v->store, .step = &v->steps[i], .item = on_item, .arg = &t};

		if (v->steps[i].removed)
			continue;
		report_step_faults(v, i);
		r = verify_walk(&w);
	}
	for (size_t i = 0; r == 0 && i < v->nfaults; i++) {
		struct verify_fault *f = &v->faults[i];

		f->gone = f->gone || (!f->reported && fault_pack_gone(v, f));
		if (!f->reported && !f->gone)
			report_one(v, f, f->run, PROTO_NONE, NULL, NULL);
	}
	return r;
}

/* ---- all ---- */

static void release(struct verify *v)
{
	base_pool_free(v->pool);
	for (size_t i = 0; i < v->nfaults; i++) {
		free((char *)v->faults[i].file);
		free((char *)v->faults[i].what);
		free((char *)v->faults[i].run);
	}
	for (size_t i = 0; i < v->npacks; i++) {
		free(v->packs[i].file);
		free(v->packs[i].seen);
	}
	for (size_t i = 0; i < v->ntodo; i++)
		free(v->todo[i].pack);
	for (size_t i = 0; i < v->nlists; i++)
		commit_list_close(v->lists[i]);
	free(v->faults);
	verify_index_release(&v->places);
	free(v->packs);
	free(v->todo);
	verify_set_release(&v->seen);
	for (size_t i = 0; i < v->nunread; i++)
		free(v->unread[i]);
	free(v->unread);
	free(v->lists);
	free(v->steps);
	pthread_mutex_destroy(&v->lock);
}

int upkeep_verify(struct store *s, const struct upkeep_verify_options *o, struct upkeep_verify_result *ret_r,
	struct base_error *err)
{
	struct verify v = {.store = s, .o = o, .lock = PTHREAD_MUTEX_INITIALIZER};
	unsigned threads = o->threads ? o->threads : base_cpu_count();
	int r;

	v.pool = base_pool_new(threads, 4 * threads);
	r = v.pool ? add_runs(&v, err) : -ENOMEM;
	if (r == 0 && !o->run)
		r = verify_files(&v, err);
	else if (r == 0)
		check_entries(&v);
	if (r == 0)
		r = find_lost(&v, err);
	if (r == 0)
		r = verify_steps(&v);
	if (r == 0)
		r = look_again(&v);
	v.result.steps = v.nsteps - count_removed(&v);
	if (r == 0 && o->run && o->step != PROTO_NONE && v.result.steps == 0 && v.nsteps)
		r = base_error_set(err, -ENOENT, "%s/%llu was removed while it was verified", o->run,
			(unsigned long long)o->step);
	if (r == 0)
		r = report_all(&v);
	if (r == 0 && o->note && !v.unlisted)
		r = verify_note(&v);
	if (r == 0)
		r = v.error;
	for (size_t i = 0; i < v.nfaults; i++) {
		v.result.newer += v.faults[i].newer && !v.faults[i].gone;
		v.result.faults += !v.faults[i].newer && !v.faults[i].gone;
	}
	*ret_r = v.result;
	release(&v);
	if (r < 0 && err && !err->code && !store_no_directory(s, r, err))
		base_error_set(err, r, "verify stopped: %s", base_error_name(r));
	return r;
}
