/* SPDX-License-Identifier: Apache-2.0
 *
 * list: reading a run's list and putting its next entry.
 *
 * The list is the one source of truth of what is visible. It is a sequence of files runs/<run>/<number>, each put if
 * absent and never changed, so that two writers who want the same number find out which of them has it, and the other
 * reads on and decides again on what it has read. There is no other lock. The rules are checked exhaustively for small
 * configurations as a Promela model (tests/model): a function that makes one of its transitions names it by `model`.
 *
 * States of an attempt, as one list knows it:
 *
 *     undecided --commit entry that counts--> committed          (apply_commit)
 *     undecided --abort entry---------------> aborted            (apply_abort)
 *     undecided --entry of a newer launch---> aborted            (apply_launch)
 *
 * and there is no way out of the two on the right. States of a commit entry: it counts or it never will, decided by
 * what stands before it; one that counts is visible until a `remove` that names it (apply_remove) or a commit that
 * names it as replaced. Transitions that this file makes: end and start of reading (list_open_at), reading on
 * (store_list_refresh), check and put (store_list_put), the snapshot (put_snapshot), removal (store_step_remove),
 * durability (store_list_sync).
 *
 * Invariants (the numbers are used all over the store):
 *   1. A step is visible if and only if the list says so: list_replay.c, and nothing else decides it.
 *   2. A commit entry is put only after every pack and part that it names is durable, and after existence and size of
 *      every older pack that it names were checked again: store_attempt_commit.
 *   3. One number holds one entry for ever (storage put if absent); a step is never silently replaced (`replaces` must
 *      be what is live: apply_commit).
 *   4. The boxes of every tensor cover it exactly: store_manifest_check_cover, before the commit entry.
 *   5. `failed` is told only when the list says so: store_attempt_commit and store_attempt_abort append `abort` first,
 *      and who finds a commit of the attempt instead reports success.
 *   6. Nobody puts the next number, deletes, or tells an outcome on the strength of an entry before making the list's
 *      directory durable: store_list_sync, called by store_list_put before each check and put, and by the collector.
 *   7. The collector never removes what a live commit, an undecided attempt or a base named by one reaches: gc.c.
 *
 * Snapshots. Entry 64 n names all visible steps, so that opening reads one snapshot and at most 63 entries. It says
 * nothing of attempts. That is enough for readers, since no writer puts a commit that does not count; and it is why a
 * writer must have read every entry since its attempt's begin itself: its list is opened before `begin` is put and only
 * ever refreshed, never opened again. A snapshot that would exceed an entry's maximum, or finds the disk full, is left
 * out; readers look for the one before.
 *
 * Damage. An entry whose two copies are both bad, or that is missing although later numbers exist, is skipped, logged
 * and counted; what the next snapshot says then repairs what is visible. Writers refuse a list with a skipped entry:
 * what they would decide on is not known. A newer format version is no damage: the run is refused by name. */
#include "core/store/list_internal.h"

#include <stdio.h>

#include "core/base/log.h"

#define PUT_IDLE_MAX 100u /* "exists" without anything to read, so often: the storage contradicts itself */
#define FAR_PROBES 20u    /* looks for entries behind a gap, at distances 2, 4, ... 2^20 */

static void entry_name(const struct store_list *l, uint64_t n, char name[static STORE_NAME_MAX])
{
	snprintf(name, STORE_NAME_MAX, "runs/%s/%012llu", l->run, (unsigned long long)n);
}

/* A directory, a link, a pipe where the entry should be: the number is taken, the entry damaged. */
static bool not_a_file(int r)
{
	return r == -EISDIR || r == -ELOOP || r == -EINVAL;
}

/* 1: there is an entry of that number; 0: not. */
static int entry_exists(const struct store_list *l, uint64_t n)
{
	char name[STORE_NAME_MAX];
	uint64_t size;
	int r;

	entry_name(l, n, name);
	r = store_size(l->store->storage, name, &size);
	return r == -ENOENT ? 0 : r == 0 || not_a_file(r) ? 1 : r;
}

/* ---- one entry ---- */

/* What the rules rely on, beyond what decoding checks. */
static bool entry_sane(const struct proto_entry *e, uint64_t n)
{
	switch (e->kind) {
	case PROTO_ENTRY_COMMIT:
		return e->commit.attempt && strlen(e->commit.attempt) < PROTO_ATTEMPT_MAX &&
			e->commit.step <= INT64_MAX;
	case PROTO_ENTRY_ABORT:
		return e->attempt && strlen(e->attempt) < PROTO_ATTEMPT_MAX;
	case PROTO_ENTRY_LAUNCH:
		return e->launch && strlen(e->launch) == 16;
	case PROTO_ENTRY_SNAPSHOT:
		for (size_t i = 0; i < e->nlive; i++)
			if (e->live[i].entry >= n || (i && e->live[i].entry <= e->live[i - 1].entry)
			    || strlen(e->live[i].commit.attempt) >= PROTO_ATTEMPT_MAX)
				return false;
		return true;
	case PROTO_ENTRY_REMOVE:
		return true;
	}
	return false;
}

static bool entry_damaged(int r)
{
	return r == -BASE_EDAMAGED || r == -BASE_EFORMAT || r == -EIO || r == -EFBIG || r == -ENODATA ||
		not_a_file(r);
}

/* 0, -ENOENT, -BASE_EDAMAGED for every kind of damage, or another error that `err` explains. */
static int entry_read(const struct store_list *l, uint64_t n, struct proto_entry *ret_e, struct base_error *err)
{
	struct store_record record = {0};
	struct base_error why = {0};
	char name[STORE_NAME_MAX];
	int r;

	entry_name(l, n, name);
	r = store_record_get(l->store->storage, name, STORE_RECORD_ENTRY, l->store->info.id, &record, NULL, &why);
	if (r == 0) {
		r = proto_entry_decode(record.body, record.len, ret_e);
		store_record_release(&record);
	}
	if (r == 0 && !entry_sane(ret_e, n)) {
		proto_entry_release(ret_e);
		r = -BASE_EFORMAT;
	}
	if (entry_damaged(r))
		return -BASE_EDAMAGED;
	if (r < 0 && r != -ENOENT)
		return base_error_set(err, r, "%s: %s", name, why.code ? why.text : base_error_name(r));
	return r;
}

int store_list_each_commit(const struct store_list *l, uint64_t from,
	int (*f)(void *arg, uint64_t entry, const struct base_digest *manifest), void *arg, struct base_error *err)
{
	int r = 0;

	for (size_t i = l->ncommits; r == 0 && i-- > 0 && l->commits[i].entry >= from;) {
		struct proto_entry e = {0};

		r = entry_read(l, l->commits[i].entry, &e, err);
		if (r == -BASE_EDAMAGED || r == -ENOENT)
			return base_error_set(err, -BASE_EDAMAGED, "run %s: entry %llu cannot be read any more", l->run,
				(unsigned long long)l->commits[i].entry);
		if (r == 0 && e.kind == PROTO_ENTRY_COMMIT)
			r = f(arg, l->commits[i].entry, &e.commit.manifest);
		proto_entry_release(&e);
	}
	return r;
}

static void entry_skip(struct store_list *l, uint64_t n, const char *why)
{
	char name[STORE_NAME_MAX];

	entry_name(l, n, name);
	base_warning("%s/%s: %s; entry skipped", l->store->path, name, why);
	l->damaged++;
	l->gap = true;
	l->next = n + 1;
}

/* Reads entry l->next and applies it. 1: done (or skipped); 0: there is none. below_end: there must be one. */
static int list_step(struct store_list *l, bool below_end, struct base_error *err)
{
	struct proto_entry e = {0};
	int r, exists = 1;

	r = entry_read(l, l->next, &e, err);
	if (r == -ENOENT) {
		exists = entry_exists(l, l->next); /* asks the server: a look-up may have been answered from a cache */
		if (exists < 0)
			return base_error_set(err, exists, "run %s: entry %llu: %s", l->run,
				(unsigned long long)l->next, base_error_name(exists));
		if (exists)
			r = entry_read(l, l->next, &e, err);
	}
	if (r == -ENOENT && !below_end)
		return 0;
	if (r == -ENOENT || r == -BASE_EDAMAGED) {
		entry_skip(l, l->next,
			r == -ENOENT ? "missing, though later entries exist" : "both copies are damaged");
		return 1;
	}
	if (r < 0)
		return r;
	r = list_apply(l, l->next, &e);
	if (r < 0)
		return base_error_set(err, r, "run %s: %s", l->run, base_error_name(r));
	l->next++;
	return 1;
}

/* ---- reading ---- */

/* Entries below `from` exist. The end is between the last number that is found and the next that is not. */
static int64_t end_from(const struct store_list *l, uint64_t from)
{
	uint64_t low = from, step = 1, high; /* all below low exist, as far as probes tell; high does not */
	int r;

	for (high = low; (r = entry_exists(l, high)) == 1; step *= 2) {
		low = high + 1;
		if (high > INT64_MAX / 4)
			return -EOVERFLOW;
		high += step;
	}
	while (r >= 0 && low < high) {
		uint64_t middle = low + (high - low) / 2;

		r = entry_exists(l, middle);
		if (r == 1)
			low = middle + 1;
		else
			high = middle;
	}
	return r < 0 ? r : (int64_t)low;
}

/* The end again, this time with looks beyond it: a lost file must not be taken for the end, or its number would be put
 * again. Not for each refresh. */
static int64_t end_beyond_gaps(const struct store_list *l, uint64_t from)
{
	for (;;) {
		int64_t end = end_from(l, from);
		unsigned k;

		if (end < 0)
			return end;
		from = 0;
		for (k = 0; k <= FAR_PROBES && !from; k++) {
			uint64_t far = (uint64_t)end + (UINT64_C(1) << k);
			int r = entry_exists(l, far);

			if (r < 0)
				return r;
			if (r)
				from = far + 1;
		}
		if (!from)
			return end;
	}
}

static int read_until(struct store_list *l, uint64_t end, struct base_error *err)
{
	int r = 0;

	while (r >= 0 && l->next < end)
		r = list_step(l, true, err);
	return r < 0 ? r : 0;
}

/* model: newest. Starts from the newest snapshot that can be read, `skip` of them left out, else from entry 0. */
static int start_from_snapshot(struct store_list *l, uint64_t end, unsigned skip, struct base_error *err)
{
	uint64_t n;

	for (n = end ? (end - 1) / STORE_SNAPSHOT_EVERY * STORE_SNAPSHOT_EVERY : 0; n > 0; n -= STORE_SNAPSHOT_EVERY) {
		struct proto_entry e = {0};
		int r = entry_read(l, n, &e, err);

		if (r == -ENOENT || r == -BASE_EDAMAGED)
			continue; /* replay comes across it and says so */
		if (r < 0)
			return r;
		if (e.kind != PROTO_ENTRY_SNAPSHOT || skip) {
			skip -= e.kind == PROTO_ENTRY_SNAPSHOT;
			proto_entry_release(&e);
			continue;
		}
		r = list_adopt(l, &e);
		if (r < 0)
			return base_error_set(err, r, "run %s: %s", l->run, base_error_name(r));
		l->next = n + 1;
		return 0;
	}
	return 0;
}

static int list_open_at(struct store_list *l, bool whole, unsigned skip, struct base_error *err)
{
	int64_t end = end_beyond_gaps(l, 0);
	int r = 0;

	if (end < 0)
		return base_error_set(err, (int)end, "run %s: its list cannot be read: %s", l->run,
			base_error_name((int)end));
	if (!whole)
		r = start_from_snapshot(l, (uint64_t)end, skip, err);
	if (r == 0)
		r = read_until(l, (uint64_t)end, err);
	return r;
}

static int list_open(struct store *s, const char *run, bool whole, unsigned skip, struct store_list **ret_l,
	struct base_error *err)
{
	struct store_list *l;
	int r;

	if (!proto_run_valid(run))
		return base_error_set(err, -EINVAL, "\"%s\" is not the name of a run", run);
	l = calloc(1, sizeof *l);
	if (!l)
		return base_error_set(err, -ENOMEM, "run %s: out of memory", run);
	l->store = s;
	snprintf(l->run, sizeof l->run, "%s", run);
	r = list_open_at(l, whole, skip, err);
	if (r < 0) {
		store_list_close(l);
		return r;
	}
	*ret_l = l;
	return 0;
}

int store_list_open(struct store *s, const char *run, bool whole, struct store_list **ret_l, struct base_error *err)
{
	return list_open(s, run, whole, 0, ret_l, err);
}

int store_list_open_earlier(struct store *s, const char *run, struct store_list **ret_l, struct base_error *err)
{
	return list_open(s, run, false, 1, ret_l, err);
}

void store_list_close(struct store_list *l)
{
	if (!l)
		return;
	list_state_release(l);
	free(l);
}

/* model: replay. From where this list stands. */
int store_list_refresh(struct store_list *l, struct base_error *err)
{
	int count = 0;

	for (;;) {
		int r = entry_exists(l, l->next);

		if (r < 0)
			return base_error_set(err, r, "run %s: its list cannot be read: %s", l->run,
				base_error_name(r));
		if (r == 0)
			return count;
		r = list_step(l, false, err);
		if (r < 0)
			return r;
		count += r && count < INT32_MAX;
		if (r == 0)
			return count;
	}
}

const char *store_list_run(const struct store_list *l) { return l->run; }
uint64_t store_list_next(const struct store_list *l) { return l->next; }
uint64_t store_list_damaged(const struct store_list *l) { return l->damaged; }
size_t store_list_count(const struct store_list *l) { return l->nsteps; }
const struct store_list_step *store_list_at(const struct store_list *l, size_t i)
{
	return i < l->nsteps ? &l->steps[i] : NULL;
}
const struct store_list_step *store_list_latest(const struct store_list *l)
{
	return l->nsteps ? &l->steps[l->nsteps - 1] : NULL;
}

/* ---- putting ---- */

/* model: sync. Invariant 6. */
int store_list_sync(struct store_list *l, struct base_error *err)
{
	char dir[STORE_NAME_MAX];
	int r;

	if (l->synced == l->next)
		return 0;
	snprintf(dir, sizeof dir, "runs/%s", l->run);
	r = l->unsafe ? -EIO : l->store->storage->ops->sync_dir(l->store->storage, dir);
	l->unsafe |= r == -EIO;
	if (r < 0)
		return base_error_set(err, r, "run %s: its list cannot be made durable: %s", l->run,
			base_error_name(r));
	l->synced = l->next;
	return 0;
}

/* Everything read, nothing skipped, all of it durable. */
static int list_settle(struct store_list *l, struct base_error *err)
{
	int r = store_list_refresh(l, err);

	if (r < 0)
		return r;
	if (l->damaged)
		return base_error_set(err, -BASE_EDAMAGED,
			"run %s: %llu entries of its list are damaged, so nothing may be written to it "
			"(vckpt verify names them)",
			l->run, (unsigned long long)l->damaged);
	return store_list_sync(l, err);
}

/* model: PUT. 1 mine (and applied), 0 somebody else's, or an error, after which the outcome is not known. */
static int put_number(struct store_list *l, const struct proto_entry *entry, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct proto_entry mine = {0};
	char name[STORE_NAME_MAX];
	int r;

	entry_name(l, l->next, name);
	r = proto_entry_encode(entry, &body);
	if (r == 0 && body.len > store_record_max(STORE_RECORD_ENTRY))
		r = -BASE_ELIMIT;
	if (r == 0)
		r = proto_entry_decode(body.data, body.len, &mine); /* nothing is put that could not be read */
	if (r == 0 && !entry_sane(&mine, l->next)) {
		proto_entry_release(&mine);
		r = -EINVAL;
	}
	if (r < 0)
		return base_error_set(err, r, "%s: the entry cannot be written: %s", name, base_error_name(r));
	r = store_record_put(l->store->storage, name, STORE_RECORD_ENTRY, l->store->info.id, body.data, body.len);
	if (r != STORE_PUT_MINE) {
		proto_entry_release(&mine);
		return r == STORE_PUT_OTHER ? 0 : base_error_set(err, r, "%s: %s", name, base_error_name(r));
	}
	if (list_apply(l, l->next, &mine) < 0)
		return base_error_set(err, -ENOMEM, "%s: out of memory", name);
	l->synced = ++l->next; /* put answers when its directory is durable */
	return 1;
}

/* model: sn. 1: the next number needs no snapshot (any more). */
static int put_snapshot(struct store_list *l, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_SNAPSHOT, .time_ns = store_time_ns(), .host = store_hostname()};
	int r;

	r = list_snapshot(l, &e.live, &e.nlive);
	if (r < 0)
		return base_error_set(err, r, "run %s: out of memory", l->run);
	r = put_number(l, &e, err);
	free(e.live);
	/* Left out where it has no room: on a full disk the reserve may do for a removal and not for ten thousand
	 * steps. */
	return r == -BASE_ELIMIT || r == -ENOSPC || r == -EDQUOT ? 1 : r;
}

/* One round: check against everything read, then the next number. -EAGAIN: somebody else has it. */
static int64_t put_once(struct store_list *l, const struct proto_entry *entry,
	int (*check)(void *arg, struct store_list *l), void *arg, struct base_error *err)
{
	uint64_t n;
	int r;

	r = list_settle(l, err);
	if (r < 0)
		return r;
	r = check ? check(arg, l) : 0;
	if (r < 0)
		return r;
	if (l->next > 0 && l->next % STORE_SNAPSHOT_EVERY == 0) {
		r = put_snapshot(l, err);
		if (r <= 0)
			return r < 0 ? r : -EAGAIN;
		/* state and check are what they were: either the snapshot stands, or there is none */
	}
	n = l->next;
	r = put_number(l, entry, err);
	return r < 0 ? r : r ? (int64_t)n : -EAGAIN;
}

/* model: chk */
int64_t store_list_put(struct store_list *l, const struct proto_entry *entry,
	int (*check)(void *arg, struct store_list *l), void *arg, struct base_error *err)
{
	unsigned idle = 0;

	for (;;) {
		uint64_t before = l->next;
		int64_t n = put_once(l, entry, check, arg, err);

		if (n != -EAGAIN)
			return n;
		idle = l->next == before ? idle + 1 : 0;
		if (idle > PUT_IDLE_MAX)
			return base_error_set(err, -EIO, "run %s: entry %llu exists and cannot be read", l->run,
				(unsigned long long)l->next);
		if (idle > 1)
			usleep(10000);
	}
}

/* ---- runs, removal ---- */

struct runs_found { char **names; size_t n, size; };

static int runs_add(void *arg, const struct store_storage_entry *entry)
{
	struct runs_found *f = arg;
	const char *slash = strrchr(entry->name, '/'), *run = slash ? slash + 1 : entry->name;

	if (entry->foreign || !proto_run_valid(run))
		return 0;
	if (f->n == f->size) {
		size_t size = f->size ? f->size * 2 : 16;
		char **more = reallocarray(f->names, size, sizeof *more);

		if (!more)
			return -ENOMEM;
		f->names = more;
		f->size = size;
	}
	f->names[f->n] = strdup(run);
	return f->names[f->n] ? (f->n++, 0) : -ENOMEM;
}

static int name_compare(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

int store_runs(struct store *s, char ***ret_runs, size_t *ret_n, struct base_error *err)
{
	struct runs_found f = {0};
	int r = store_list_dirs(s->storage, "runs", runs_add, &f);

	if (r < 0 && r != -ENOENT) {
		store_runs_free(f.names, f.n);
		return base_error_set(err, r, "%s/runs: %s", s->path, base_error_name(r));
	}
	if (f.n)
		qsort(f.names, f.n, sizeof *f.names, name_compare);
	*ret_runs = f.names;
	*ret_n = f.n;
	return 0;
}

void store_runs_free(char **runs, size_t n)
{
	for (size_t i = 0; i < n; i++)
		free(runs[i]);
	free(runs);
}

struct remove_check { uint64_t entry; };

/* model: rm */
static int remove_allowed(void *arg, struct store_list *l)
{
	return store_list_entry_live(l, ((struct remove_check *)arg)->entry) ? 0 : -ESTALE;
}

/* model: rm. Removes what it saw, not what may stand under that step by then. */
static int64_t remove_seen(struct store_list *l, uint64_t entry, struct base_error *err)
{
	struct proto_entry e = {
		.kind = PROTO_ENTRY_REMOVE, .time_ns = store_time_ns(), .host = store_hostname(), .removes = entry};
	struct remove_check check = {entry};
	int64_t n = store_list_put(l, &e, remove_allowed, &check, err);

	if (n != -ENOSPC && n != -EDQUOT)
		return n;
	store_reserve_release(l->store);
	n = store_list_put(l, &e, remove_allowed, &check, err);
	return n;
}

int store_step_remove(struct store *s, const char *run, uint64_t step, struct base_error *err)
{
	const struct store_list_step *seen;
	struct store_list *l;
	int64_t n;
	int r;

	r = store_list_open(s, run, false, &l, err);
	if (r < 0)
		return r;
	seen = store_list_find(l, step);
	if (!seen) {
		store_list_close(l);
		return base_error_set(err, -ENOENT, "%s has no step %llu", run, (unsigned long long)step);
	}
	n = remove_seen(l, seen->entry, err);
	store_list_close(l);
	if (n == -ESTALE)
		return base_error_set(err, -ESTALE, "%s: step %llu was removed or replaced by somebody else just now",
			run, (unsigned long long)step);
	store_reserve_restore(s);
	return n < 0 ? (int)n : 0;
}
