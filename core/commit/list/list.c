/* SPDX-License-Identifier: Apache-2.0
 *
 * list: reading a run's list; list_replay.c has the rules, list_put.c puts the next entry. What follows is of all
 * three. list_steps.c, list_skips.c and list_numbers.c keep what is visible, what is skipped, and which numbers exist;
 * list_snapshot.c reads and makes snapshots, list_launches.c knows the launches of long ago.
 *
 * The list is the one source of truth of what is visible. It is a sequence of files runs/<run>/<number>, each put if
 * absent and never changed, so that of two writers that want the same number one gets it, and the other reads on and
 * decides again on what it has read. There is no other lock. The rules are checked exhaustively for small
 * configurations as a Promela model (tests/model): a function that makes one of its transitions names it by `model`.
 *
 * States of an attempt, as one list knows it:
 *
 *     undecided --commit entry that counts--> committed          (apply_commit)
 *     undecided --abort entry---------------> aborted            (apply_abort)
 *     undecided --entry of a newer launch---> aborted            (apply_launch)
 *
 * and there is no way out of the two on the right. States of a commit entry: it counts or it never will, decided by
 * what is before it; one that counts is visible until a `remove` that names it (apply_remove) or a commit that names it
 * as replaced. Transitions: end and start of reading (list_open_at), reading on (commit_list_refresh), check and put
 * (commit_list_put), the snapshot (put_snapshot), removal (commit_step_remove), durability (commit_list_sync).
 *
 * Invariants (docs/design.md, "Invariants"; the sources cite them by these numbers):
 *   1. A step is visible if and only if the list says so: list_replay.c, and nothing else decides it.
 *   2. A commit entry is put only after every pack and part that it names is durable, and after existence and size of
 *      every older pack that it names were checked again: commit_manifest in attempt_commit.c.
 *   3. One number holds one entry for ever (storage put if absent), or the collected record that has taken its place:
 *      it never becomes free. A step is never silently replaced (`replaces` must be what is live: apply_commit).
 *   4. The boxes of every tensor cover it exactly: check_manifest_cover, before the commit entry.
 *   5. What was announced is reported as failed only when the list says so: a writer that gives up appends `abort`
 *      first, and reports success if it finds a commit of the attempt; undecided until then: attempt_outcome.c.
 *   6. No one puts the next number, deletes, or reports an outcome because of an entry before the list's directory is
 *      durable: commit_list_sync, called by commit_list_put before each check and put, and by the collector.
 *   7. The collector never removes what a live commit, an undecided attempt or a base named by one reaches: gc.c.
 *   8. Facts are of one visible commit; only an entry changes them, and a pin is honoured by every put: list_facts.c.
 *
 * Snapshots. Entry 64 n says, with those that it goes on from (list_snapshot.c), which steps are visible, so that
 * opening reads a few snapshots and at most 63 entries. It says nothing about attempts. That is enough for readers,
 * since no writer puts a commit that does not count. It is also why a writer must itself have read every entry since
 * its attempt's begin: its list is opened before `begin` is put and only ever refreshed, or read anew as a whole. A
 * snapshot that would exceed an entry's maximum, or finds the disk full, is left out; readers look for the one before.
 *
 * Chain. An entry carries its run, its number and the SHA-256 of the body of the entry before. So an entry at the place
 * of another, or from another list, is damage and not history. Where the entry before was skipped the chain begins
 * anew; the end of a list holds nothing that would miss it.
 *
 * Collected entries. The collector replaces the entries before a snapshot, the head, by a record; the head shows what
 * all of them made visible (list_head.c; list_mark.c has what it puts). Invariants:
 *   a. A number that was used stays used: put if absent fails there, for ever, and a missing one is the end or damage.
 *   b. Before an entry is replaced, what is visible at the head is durable twice, and was compared with the entries.
 *   c. What a reader that begins at the head reads before it, the chain and launch entries, is never replaced.
 *   d. Whatever a reader comes to, it is an entry, or a record whose head is higher than where the reader was; and if
 *      what is visible there cannot be had any more, a later collection has left a record with a still higher head.
 *   e. No head goes above what the writers of an undecided attempt with a folder have read, nor above a decision that a
 *      file which is left still needs: so a writer whose list jumped above its attempt's position finds the attempt
 *      visible, or makes certain by an abort that it is not (attempt_outcome_known).
 *
 * Damage. An entry whose two copies are both bad, that is missing although later numbers exist, or that does not belong
 * where it is, is skipped, logged and counted; the next snapshot then repairs what is visible. Writers refuse a list
 * with a skipped entry, because they would decide on what is not known, until an accept entry names it: then it decides
 * nothing, for all readers. A newer format version is no damage: the run is refused by name. An entry of a kind that is
 * not known decides nothing, and keeps writers and the collector away (docs/format/versions.md).
 *
 * Errors of reading are no damage: damage is an entry that was read and is wrong, or something else under its name.
 * What is wrong with a directory on the way to an entry is an error of the run, and says nothing of any entry. An entry
 * that cannot be read is asked for again, for 3 s (in a launch's list: as long as a rank may be missing at the start),
 * with a sentence after the first second. After that a writer's list stays before it: the call fails, and a later call
 * goes on when the entry can be read again. A list of a store that was opened for reading leaves the entry out, says
 * so, and replays everything once it can be read (list_heal). Many entries are read several at once and applied in
 * order, because others wait while a list of 40,000 is opened.
 *
 * Work. A list may be forged: what reading costs, in time and memory, goes by the files that there are. A gap is passed
 * over as one stretch (list_numbers.c), steps may come in any order (list_steps.c), and reading begins anew at most
 * AGAIN_MAX times because of acceptances. No search believes looks at single names for ever: after some entries in a
 * row that decide nothing, reading goes on only at numbers that the run's directory lists. */
#include "core/commit/list/list_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/storage/spread.h"

#define READ_BATCH 1024u  /* entries that are read at once, when there are many */
#define READ_ALONE 16u    /* fewer are read one after another */
#define RETRY_MAX_MS 100u
#define WARN_MS 1000u     /* a storage that fails longer is warned of */
#define SHORT_END 255u    /* a list without this entry is taken for a short one */
#define NEWER_MAX 4u      /* looks behind the end of a short one reach so far */
#define FAR_PROBES 20u    /* looks for entries behind a gap, at distances 2, 4, ... 2^20 */
#define LARGE_BYTES (UINT64_C(1) << 20) /* of a snapshot: it names 4,600 steps */
#define AGAIN_MAX 16u     /* times that acceptances make a list begin anew at once; of an honest one: once or twice */

void commit_list_entry_name(const char *run, uint64_t n, char name[static STORAGE_NAME_MAX])
{
	snprintf(name, STORAGE_NAME_MAX, "runs/%s/%012llu", run, (unsigned long long)n);
}

void list_entry_name(const struct commit_list *l, uint64_t n, char name[static STORAGE_NAME_MAX])
{
	commit_list_entry_name(l->run, n, name);
}

/* Errors of the storage at this moment, which say nothing about what is stored. */
bool commit_error_passes(int r)
{
	switch (r) {
	case -EIO: case -ESTALE: case -ETIMEDOUT: case -EAGAIN: case -ENOMEM: case -EMFILE: case -ENFILE:
	case -ENOTCONN: case -EREMOTEIO: case -ESHUTDOWN: case -EHOSTDOWN: case -EHOSTUNREACH: case -ENETDOWN:
	case -ENETUNREACH:
		return true;
	}
	return false;
}

bool list_leaves_out(const struct commit_list *l, int r)
{
	return l->store->read_only && r != -ENOMEM && commit_error_passes(r);
}

static void list_answered(struct commit_list *l)
{
	l->failing_ms = 0;
	l->warned = false;
}

/* The list's patience counts from its last answer. Once it is over, each call tries once. */
bool list_again(struct commit_list *l, uint64_t n, int r)
{
	uint64_t now = base_monotonic_ms(), failed;

	if (!commit_error_passes(r))
		return false;
	if (!l->failing_ms)
		l->failing_ms = now;
	failed = now - l->failing_ms;
	if (failed >= l->how.patience_ms)
		return false;
	if (failed >= WARN_MS && !l->warned) {
		base_warning("%s: run %s: entry %llu of its list cannot be read (%s); trying for another %llu s",
			l->store->path, l->run, (unsigned long long)n, base_error_name(r),
			(unsigned long long)(l->how.patience_ms - failed + 999) / 1000);
		l->warned = true;
	}
	usleep((useconds_t)base_min(failed + 1, base_min(RETRY_MAX_MS, l->how.patience_ms - failed)) * 1000);
	return true;
}

int list_unreadable(const struct commit_list *l, int r, struct base_error *err)
{
	if (store_no_directory(l->store, r, err))
		return base_error_prefix(err, r, "run %s", l->run);
	return base_error_set(err, r, "run %s: its list cannot be read: %s", l->run, base_error_name(r));
}

int list_entry_exists(struct commit_list *l, uint64_t n)
{
	char name[STORAGE_NAME_MAX];
	uint64_t size;
	int r;

	list_entry_name(l, n, name);
	do
		r = storage_size(l->store->storage, name, &size);
	while (list_again(l, n, r));
	/* a directory, a link, a pipe where the entry should be: the number is taken, the entry damaged */
	return r == -ENOENT ? 0 : r == 0 || storage_not_a_file(r) ? 1 : r;
}

/* ---- one entry ---- */

/* Snapshot n goes on from one whose number lacks some of its lowest bits: so no chain is longer than a number has bits,
 * even in a forged list. */
static bool from_sane(uint64_t n, uint64_t from)
{
	uint64_t i = n / COMMIT_SNAPSHOT_EVERY, k = from / COMMIT_SNAPSHOT_EVERY;

	return from == 0 || (n % COMMIT_SNAPSHOT_EVERY == 0 && from % COMMIT_SNAPSHOT_EVERY == 0 && (i ^ k) < (k & -k));
}

bool list_entry_sane(const struct proto_entry *e, uint64_t n)
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
		return from_sane(n, e->from);
	case PROTO_ENTRY_REMOVE:
	case PROTO_ENTRY_ACCEPT:
	case PROTO_ENTRY_COLLECTED:
	case PROTO_ENTRY_FACTS:
		return true;
	}
	return true; /* of a later version */
}

int commit_list_entry_placed(const struct store *s, const char *run, uint64_t n, const struct proto_entry *e,
	struct base_error *err)
{
	if (e->version != s->info.version)
		return base_error_set(err, -BASE_EFORMAT, "it has format %u, but the store has format %u", e->version,
			s->info.version);
	if (e->version == 1)
		return 0;
	if (e->kind == PROTO_ENTRY_COLLECTED && !s->info.list_3)
		return base_error_set(err, -BASE_EFORMAT,
			"it says that entries were collected, and the store lacks the word list-3");
	if (proto_entry_list_4(e) && !s->info.list_4)
		return base_error_set(err, -BASE_EFORMAT, "it has facts of steps, and the store lacks the word list-4");
	if ((e->kind == PROTO_ENTRY_SNAPSHOT || e->kind == PROTO_ENTRY_LAUNCH) && e->list_2 != s->info.list_2)
		return base_error_set(err, -BASE_EFORMAT, "it %s the word list-2, and the store %s", e->list_2 ? "has"
			: "lacks", e->list_2 ? "lacks it" : "has it");
	if (strcmp(e->run, run) != 0)
		return base_error_set(err, -BASE_EFORMAT, "it is an entry of run %.100s", e->run);
	if (e->kind == PROTO_ENTRY_COLLECTED && (e->number <= n || e->number % COMMIT_SNAPSHOT_EVERY))
		return base_error_set(err, -BASE_EFORMAT, "it says that entries below %llu were collected",
			(unsigned long long)e->number);
	if (e->number != n && e->kind != PROTO_ENTRY_COLLECTED)
		return base_error_set(err, -BASE_EFORMAT, "it is entry %llu", (unsigned long long)e->number);
	return 0;
}

/* Does entry l->next follow the one before, as that one is here? */
static int entry_follows(const struct commit_list *l, const struct proto_entry *e, struct base_error *err)
{
	if (e->version == 1 || !l->tail_known || base_digest_equal(&e->before, &l->tail))
		return 0;
	if (l->next == 0)
		return base_error_set(err, -BASE_EDAMAGED, "it names an entry before it, but it is the first one");
	return base_error_set(err, -BASE_EDAMAGED,
		"it does not follow entry %llu as that entry is here: one of the two does not belong to this list",
		(unsigned long long)l->next - 1);
}

/* Is r about bytes that were read and are wrong? An error of reading (-EIO) is no damage. */
static bool entry_damaged(int r)
{
	return r == -BASE_EDAMAGED || r == -BASE_EFORMAT || r == -EFBIG || r == -ENODATA || storage_not_a_file(r);
}

static const char *damage_text(int r)
{
	if (r == -BASE_EDAMAGED)
		return "both copies are damaged, or of another store";
	return r == -BASE_EFORMAT ? "its body breaks the rules of its format" : base_error_name(r);
}

/* 0, -ENOENT, or an error that `err` explains: -BASE_EDAMAGED for every kind of damage. */
static int file_read(const struct commit_list *l, enum store_record_kind kind, const char *name, uint64_t n,
	struct proto_entry *ret_e, struct base_error *err)
{
	struct store_record record = {0};
	struct base_error why = {0};
	int r = store_record_get(l->store->storage, name, kind, l->store->info.id, &record, NULL, &why);

	if (r == -ENOENT)
		return r;
	if (r == 0) {
		r = proto_entry_decode(record.body, record.len, ret_e);
		if (r == -BASE_EVERSION)
			store_newer(&why, name, record.body, record.len);
		store_record_release(&record);
		if (r == 0)
			r = commit_list_entry_placed(l->store, l->run, n, ret_e, &why);
		if (r == 0 && !list_entry_sane(ret_e, n))
			r = -BASE_EFORMAT;
	} else if (r == -BASE_EFORMAT) {
		base_error_set(&why, r, "it is a record of another kind");
	}
	if (r == 0)
		return 0;
	proto_entry_release(ret_e);
	if (r == -BASE_EVERSION)
		return base_error_set(err, r, "run %s cannot be read: %s", l->run, why.text);
	if (entry_damaged(r))
		return base_error_set(err, -BASE_EDAMAGED, "%s",
			why.code && r == -BASE_EFORMAT ? why.text : damage_text(r));
	if (why.code)
		return base_error_set(err, r, "%s", why.text);
	return base_error_set(err, r, "%s: %s", name, base_error_name(r));
}

static int entry_read(const struct commit_list *l, uint64_t n, struct proto_entry *ret_e, struct base_error *err)
{
	char name[STORAGE_NAME_MAX];

	list_entry_name(l, n, name);
	return file_read(l, STORE_RECORD_ENTRY, name, n, ret_e, err);
}

int list_file_read(struct commit_list *l, enum store_record_kind kind, const char *name, uint64_t n,
	struct proto_entry *ret_e, struct base_error *err)
{
	int r;

	do
		r = file_read(l, kind, name, n, ret_e, err);
	while (list_again(l, n, r));
	if (!commit_error_passes(r))
		list_answered(l);
	return r;
}

int list_entry_read(struct commit_list *l, uint64_t n, struct proto_entry *ret_e, struct base_error *err)
{
	char name[STORAGE_NAME_MAX];
	int r;

	list_entry_name(l, n, name);
	r = list_file_read(l, STORE_RECORD_ENTRY, name, n, ret_e, err);
	if (r == 0)
		list_head_see(l, ret_e);
	return r;
}

int commit_list_each_commit(const struct commit_list *l, uint64_t from,
	int (*f)(void *arg, uint64_t entry, const struct base_digest *manifest), void *arg, struct base_error *err)
{
	int r = 0;

	for (size_t i = l->ncommits; r == 0 && i-- > 0 && l->commits[i].entry >= from;) {
		const struct commit_list_step *live = list_step_of_entry(l, l->commits[i].entry);
		struct proto_entry e = {0};

		if (live) {
			r = f(arg, live->entry, &live->commit.manifest);
			continue;
		}
		r = entry_read(l, l->commits[i].entry, &e, err);
		if (r == -BASE_EDAMAGED || r == -ENOENT)
			return base_error_set(err, -BASE_EDAMAGED, "run %s: entry %llu cannot be read any more", l->run,
				(unsigned long long)l->commits[i].entry);
		if (r == 0 && e.kind == PROTO_ENTRY_COMMIT)
			r = f(arg, l->commits[i].entry, &e.commit.manifest);
		else if (r == 0 && e.kind == PROTO_ENTRY_COLLECTED)
			r = base_error_set(err, -ESTALE, "run %s: another collection has collected entry %llu of its "
				"list meanwhile: nothing was deleted; run vckpt gc again", l->run,
				(unsigned long long)l->commits[i].entry);
		proto_entry_release(&e);
	}
	return r;
}

int commit_list_commit_read(struct store *s, const char *run, uint64_t entry, struct proto_entry *ret_e,
	struct base_error *err)
{
	struct commit_list l = {.store = s, .how.patience_ms = COMMIT_LIST_PATIENCE_MS};
	struct base_error why = {0};
	int r;

	snprintf(l.run, sizeof l.run, "%s", run);
	r = list_entry_read(&l, entry, ret_e, &why);
	if (r == 0 && ret_e->kind != PROTO_ENTRY_COMMIT) {
		proto_entry_release(ret_e);
		r = -ENOENT;
	}
	if (r == -ENOENT)
		return base_error_set(err, r, "run %s of %s has no commit entry %llu", run, s->path,
			(unsigned long long)entry);
	return r < 0 ? base_error_set(err, r, "run %s: entry %llu: %s", run, (unsigned long long)entry, why.text) : 0;
}

/* Entry l->next decides nothing. */
static int entry_pass(struct commit_list *l)
{
	l->gap = true;
	l->tail_known = false;
	l->next++;
	return 1;
}

/* As damage; why NULL: it is missing. */
static int entry_skip(struct commit_list *l, const char *why)
{
	if (list_skip_add(l, l->next, 1, why) < 0)
		return -ENOMEM;
	l->unwarned = true;
	l->missing++;
	return entry_pass(l);
}

/* A reader goes on without an entry that it cannot read, until it can (list_heal). */
static int entry_leave_out(struct commit_list *l, int r)
{
	char why[128];

	snprintf(why, sizeof why, "it cannot be read (%s), and is left out until it can", base_error_name(r));
	if (!l->unread)
		l->hole = l->next;
	l->unread = true;
	r = entry_skip(l, why);
	l->missing = 0; /* it is there */
	return r;
}

int list_take(struct commit_list *l, struct proto_entry *e)
{
	struct base_digest self = e->self;
	uint32_t kind = (uint32_t)e->kind;
	int r = list_apply(l, l->next, e);

	if (r < 0)
		return r;
	if (kind > PROTO_ENTRY_KNOWN && !l->newer_kind) {
		l->newer_kind = kind;
		l->newer = l->next;
	}
	l->tail = self;
	l->tail_known = true;
	l->missing = 0;
	l->next++;
	return 1;
}

/* A look did not find entry l->next, which has to be there. On a file system that hosts share, the look may have been
 * answered by a cache that is older than the entry. If the directory lists it, it is read as soon as the cache ends. */
static int entry_unseen(struct commit_list *l, struct proto_entry *ret_e, struct base_error *err)
{
	int r = list_number_listed(l, err);

	if (r <= 0)
		return r < 0 ? r : -ENOENT;
	do {
		r = entry_read(l, l->next, ret_e, err);
		if (r == -ENOENT)
			r = base_error_set(err, -ESTALE, "run %s: its directory lists entry %llu, which cannot be "
				"opened: a cache of the file system is behind", l->run, (unsigned long long)l->next);
	} while (list_again(l, l->next, r));
	return r;
}

/* The rule for a commit asks what is visible under its step, the one for tags whether their step is visible. 1: the
 * list was read anew for that. */
static int rule_know(struct commit_list *l, const struct proto_entry *e, struct base_error *err)
{
	uint64_t next = l->next;
	int r = e->kind == PROTO_ENTRY_COMMIT ? commit_list_know_step(l, e->commit.step, err)
		: e->kind == PROTO_ENTRY_FACTS ? list_facts_know(l, &e->facts, err) : 0;

	return r == 0 && l->next != next ? 1 : r;
}

/* Reads entry l->next (unless it was `read` before, which is taken over) and applies it. 1: done (or skipped); 0: there
 * is none. below_end: there must be one. */
static int list_step(struct commit_list *l, bool below_end, struct proto_entry *read, struct base_error *err)
{
	struct proto_entry e = read ? *read : (struct proto_entry){0};
	struct base_error why = {0};
	int r = 0, exists = 1;

	if (list_accepted(l, l->next)) {
		proto_entry_release(&e);
		return entry_pass(l);
	}
	if (!read)
		r = list_entry_read(l, l->next, &e, &why);
	if (r == -ENOENT) {
		/* asks the server: a look-up may have been answered from a cache */
		exists = list_entry_exists(l, l->next);
		if (exists < 0)
			return list_unreadable(l, exists, err);
		if (exists)
			r = list_entry_read(l, l->next, &e, &why);
	}
	if (r == -ENOENT && !below_end)
		return 0;
	if (r == -ENOENT && !l->missing)
		r = entry_unseen(l, &e, &why);
	if (r == 0 && e.kind == PROTO_ENTRY_COLLECTED) {
		r = list_jump(l, &e, &why);
		proto_entry_release(&e);
		if (r == 0)
			return 1;
	} else if (r == 0 && (r = entry_follows(l, &e, &why)) < 0) {
		proto_entry_release(&e);
	}
	if (r == 0 && (r = rule_know(l, &e, &why)) != 0) {
		proto_entry_release(&e);
		if (r > 0)
			return 1;
	}
	if (r == -ENOENT || r == -BASE_EDAMAGED)
		r = entry_skip(l, r == -ENOENT ? NULL : why.text);
	else if (list_leaves_out(l, r))
		r = entry_leave_out(l, r);
	else if (r < 0)
		return base_error_set(err, r, "%s", why.text);
	else
		r = list_take(l, &e);
	return r < 0 ? base_error_set(err, r, "run %s: %s", l->run, base_error_name(r)) : r;
}

/* ---- reading ---- */

/* By the directory, once it was read. */
static int end_exists(struct commit_list *l, uint64_t n)
{
	return l->numbers.read ? list_number_there(l, n) : list_entry_exists(l, n);
}

/* Entries below `from` exist. The end is between the last number that is found and the next that is not. */
static int64_t end_from(struct commit_list *l, uint64_t from)
{
	uint64_t low = from, step = 1, high; /* all below low exist, as far as probes show; high does not */
	int r = 0;

	for (high = low; high < LIST_END_MAX && (r = end_exists(l, high)) == 1; step *= 2) {
		low = high + 1;
		high += step;
	}
	high = base_min(high, LIST_END_MAX);
	while (r >= 0 && low < high) {
		uint64_t middle = low + (high - low) / 2;

		r = end_exists(l, middle);
		if (r == 1)
			low = middle + 1;
		else
			high = middle;
	}
	return r < 0 ? r : (int64_t)low;
}

/* The end again, this time with looks beyond it: a lost file must not be taken for the end, or its number would be put
 * again. Not for each refresh. */
static int64_t end_beyond_gaps(struct commit_list *l, uint64_t from)
{
	for (;;) {
		int64_t end = end_from(l, from);
		unsigned k;

		if (end < 0)
			return end;
		from = 0;
		for (k = 0; k <= FAR_PROBES && !from; k++) {
			uint64_t far = (uint64_t)end + (UINT64_C(1) << k);
			int r = far < LIST_END_MAX ? end_exists(l, far) : 0;

			if (r < 0)
				return r;
			if (r)
				from = far + 1;
		}
		if (!from) {
			list_answered(l);
			return end;
		}
	}
}

struct read_batch {
	const struct commit_list *l;
	uint64_t from;
	struct proto_entry entries[READ_BATCH];
	int results[READ_BATCH];
};

static int batch_read(void *arg, uint32_t i, struct base_error *err)
{
	struct read_batch *b = arg;

	(void)err; /* what is wrong with an entry is reported when its turn comes */
	b->results[i] = entry_read(b->l, b->from + i, &b->entries[i], NULL);
	return 0;
}

/* Many entries: several are read at once, and applied in order. One that could not be read is read again alone. After
 * many missing ones the rest is left for later: most of it will be missing, too. */
static int read_many(struct commit_list *l, struct read_batch *b, uint32_t n, struct base_error *err)
{
	int r;

	b->l = l;
	b->from = l->next;
	memset(b->entries, 0, n * sizeof *b->entries);
	r = storage_spread(n, batch_read, b, err);
	for (uint32_t i = 0; i < n; i++)
		if (r >= 0 && l->next == b->from + i && (l->missing < LIST_MISSING_MAX || b->results[i] != -ENOENT))
			r = list_step(l, true, b->results[i] == 0 ? &b->entries[i] : NULL, err);
		else
			proto_entry_release(&b->entries[i]);
	return r;
}

static int read_some(struct commit_list *l, struct read_batch *b, uint64_t end, struct base_error *err)
{
	uint32_t n;
	int r = list_gap_pass(l, end, err);

	if (r < 0 || l->next >= end)
		return r;
	/* the first may be a collected one, and then so are most behind it */
	n = b && l->next ? list_numbers_run(l, (uint32_t)base_min(end - l->next, READ_BATCH)) : 1;
	return n > 1 ? read_many(l, b, n, err) : list_step(l, true, NULL, err);
}

static int read_until(struct commit_list *l, uint64_t end, struct base_error *err)
{
	base_cleanup_free struct read_batch *b = NULL;
	int r = 0;

	if (end - base_min(l->next, end) > READ_ALONE)
		b = malloc(sizeof *b); /* without it one after another will do */
	while (r >= 0 && l->next < end)
		r = read_some(l, b, end, err);
	list_steps_settle(l);
	return r < 0 ? r : 0;
}

void list_begin(struct commit_list *l, struct store *s, const char *run, const struct commit_list_how *how)
{
	*l = (struct commit_list){.store = s, .how = *how, .tail_known = true, .launch_before = PROTO_NONE,
		.before_known = true};
	snprintf(l->run, sizeof l->run, "%s", run);
}

/* Drops what is known but for the numbers that accept entries name, and reads from entry 0 to where it stood. An entry
 * that is taken only now may be an acceptance of more of them. */
static int read_again(struct commit_list *l, struct base_error *err)
{
	for (unsigned times = 0; l->again; times++) {
		struct commit_list old = *l;
		int r;

		if (times == AGAIN_MAX)
			return base_error_set(err, -BASE_EDAMAGED,
				"run %s: entries of its list accept others as damaged, and these again others, more "
				"than %u times over: no vckpt wrote this list", l->run, AGAIN_MAX);
		list_begin(l, old.store, old.run, &old.how);
		l->synced = old.synced;
		list_accepts_move(l, &old);
		list_state_release(&old);
		r = read_until(l, old.next, err);
		if (r < 0)
			return r;
	}
	return 0;
}

static bool snapshot_larger(struct commit_list *l, uint64_t n)
{
	char name[STORAGE_NAME_MAX];
	uint64_t size;

	list_entry_name(l, n, name);
	return storage_size(l->store->storage, name, &size) == 0 && size > LARGE_BYTES;
}

/* Does it name much more than its own 64 entries? Then the one before it is small, and costs less together with the 64
 * entries after it. If that one is large, too, so are all: the store lacks the word, or commits have large
 * attributes. */
static bool snapshot_large(struct commit_list *l, uint64_t n)
{
	return n > COMMIT_SNAPSHOT_EVERY && snapshot_larger(l, n) && !snapshot_larger(l, n - COMMIT_SNAPSHOT_EVERY);
}

/* model: newest. Starts from the newest snapshot that can be read, `skip` of them left out, else from entry 0. */
static int start_from_snapshot(struct commit_list *l, uint64_t end, unsigned skip, struct base_error *err)
{
	uint64_t n = end ? (end - 1) / COMMIT_SNAPSHOT_EVERY * COMMIT_SNAPSHOT_EVERY : 0;
	unsigned missing = 0;
	int r = 0;

	for (; r >= 0 && n > 0; r = list_snapshot_before(l, n, missing, &n, err)) {
		struct proto_entry e = {0};
		struct base_error why = {0};

		if (l->how.newest && snapshot_large(l, n)) {
			skip -= skip > 0;
			continue;
		}
		r = list_entry_read(l, n, &e, &why);
		missing += r == -ENOENT || r == -BASE_EDAMAGED;
		if (r == -ENOENT || r == -BASE_EDAMAGED || list_leaves_out(l, r))
			continue; /* replay comes across it and says so */
		if (r < 0)
			return base_error_set(err, r, "%s", why.text);
		if (e.kind == PROTO_ENTRY_COLLECTED) { /* none from the head on can be read: as a whole */
			proto_entry_release(&e);
			return 0;
		}
		if (e.kind != PROTO_ENTRY_SNAPSHOT || skip) {
			skip -= e.kind == PROTO_ENTRY_SNAPSHOT;
			proto_entry_release(&e);
			continue;
		}
		r = list_start(l, n, &e, &why);
		if (r == -BASE_EDAMAGED || list_leaves_out(l, r)) {
			n = l->broken; /* all between the two go on from it */
			continue;
		}
		if (r < 0)
			return why.code ? base_error_set(err, r, "%s", why.text)
				: base_error_set(err, r, "run %s: %s", l->run, base_error_name(r));
		return 0;
	}
	return r < 0 ? r : 0;
}

/* Is there an entry behind the end of the listing, which may be older? */
static int newer_than_listed(struct commit_list *l, uint64_t end)
{
	int r = 0;

	for (uint64_t distance = 1; r == 0 && distance <= NEWER_MAX; distance *= 2)
		r = list_entry_exists(l, end + distance - 1);
	return r;
}

/* The end of the whole list. For a short one the directory answers, but for a few numbers right behind the end. To list
 * a long one costs more than to look at single numbers; and some directories cannot be listed. */
static int64_t list_end(struct commit_list *l, struct base_error *err)
{
	int r = list_entry_exists(l, SHORT_END);
	int64_t end = 0;

	if (r == 0) {
		struct base_error why = {0};

		r = list_numbers_read(l, &why);
		if (r < 0 && r != -EACCES)
			return base_error_set(err, r, "%s", why.text);
		if (r == 0) {
			end = end_beyond_gaps(l, 0);
			r = newer_than_listed(l, (uint64_t)end);
			if (r == 0)
				return end;
		}
		list_numbers_release(l);
		r = 0;
	}
	end = r < 0 ? r : end_beyond_gaps(l, 0);
	return end < 0 ? list_unreadable(l, (int)end, err) : end;
}

static int list_open_at(struct commit_list *l, struct base_error *err)
{
	int64_t end = list_end(l, err);
	int r = 0;

	if (end < 0)
		return (int)end;
	if (!l->how.whole)
		r = start_from_snapshot(l, (uint64_t)end, l->how.skip, err);
	if (r == 0)
		r = read_until(l, (uint64_t)end, err);
	if (r >= 0)
		r = read_again(l, err);
	if (r >= 0)
		r = list_know_newest(l, err);
	list_numbers_release(l);
	list_skips_warn(l);
	return r;
}

int commit_list_open_how(struct store *s, const char *run, const struct commit_list_how *how,
	struct commit_list **ret_l,
	struct base_error *err)
{
	struct commit_list *l;
	int r;

	if (!proto_run_valid(run))
		return base_error_set(err, -EINVAL, "\"%s\" is not the name of a run", run);
	l = calloc(1, sizeof *l);
	if (!l)
		return base_no_memory_for(err, "run %s", run);
	list_begin(l, s, run, how);
	r = list_open_at(l, err);
	if (r < 0) {
		commit_list_close(l);
		return r;
	}
	*ret_l = l;
	return 0;
}

int commit_list_open_newest(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err)
{
	return commit_list_open_how(s, run,
		&(struct commit_list_how){.newest = true, .patience_ms = COMMIT_LIST_PATIENCE_MS}, ret_l, err);
}

int commit_list_open(struct store *s, const char *run, bool whole, struct commit_list **ret_l, struct base_error *err)
{
	return commit_list_open_how(s, run,
		&(struct commit_list_how){.whole = whole, .patience_ms = COMMIT_LIST_PATIENCE_MS}, ret_l, err);
}

int commit_list_open_compared(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err)
{
	return commit_list_open_how(s, run,
		&(struct commit_list_how){.whole = true, .compare = true, .patience_ms = COMMIT_LIST_PATIENCE_MS},
			ret_l,
		err);
}

void commit_list_close(struct commit_list *l)
{
	if (!l)
		return;
	list_state_release(l);
	free(l);
}

static void list_replace(struct commit_list *l, struct commit_list *fresh)
{
	list_state_release(l);
	*l = *fresh;
	free(fresh);
}

/* The entry that was left out can be read again: everything anew, for the rules go by order. 1: so it was. */
static int list_heal(struct commit_list *l)
{
	struct commit_list *fresh;
	struct proto_entry e = {0};
	int r = entry_read(l, l->hole, &e, NULL);

	proto_entry_release(&e);
	if (commit_error_passes(r) || commit_list_open_how(l->store, l->run, &l->how, &fresh, NULL) < 0)
		return 0;
	list_replace(l, fresh);
	base_warning("%s: run %s: entries of its list that could not be read are read now, and count",
		l->store->path, l->run);
	return 1;
}

uint64_t commit_list_patience(struct commit_list *l, uint64_t ms)
{
	uint64_t before = l->how.patience_ms;

	l->how.patience_ms = ms;
	return before;
}

int commit_list_reopen(struct commit_list *l, struct base_error *err)
{
	struct commit_list_how how = l->how;
	struct commit_list *fresh;
	int r;

	how.whole = true;
	r = commit_list_open_how(l->store, l->run, &how, &fresh, err);
	if (r == 0)
		list_replace(l, fresh);
	return r;
}

static int read_on(struct commit_list *l, struct base_error *err)
{
	int count = l->unread ? list_heal(l) : 0, again;

	for (;;) {
		int r = list_entry_exists(l, l->next);

		if (r < 0)
			return list_unreadable(l, r, err);
		if (r == 0) {
			list_answered(l);
			return count;
		}
		r = list_next_listed(l, err);
		if (r >= 0)
			r = list_step(l, false, NULL, err);
		if (r >= 0 && l->again && (again = read_again(l, err)) < 0)
			return again;
		if (r < 0)
			return r;
		count += r && count < INT32_MAX;
		if (r == 0)
			return count;
	}
}

/* model: replay. From l->next on. */
int commit_list_refresh(struct commit_list *l, struct base_error *err)
{
	int r = read_on(l, err), known;

	list_steps_settle(l);
	known = r >= 0 ? list_know_newest(l, err) : 0;
	if (known < 0)
		r = known;
	list_numbers_release(l);
	list_skips_warn(l);
	return r;
}

int commit_list_catch_up(struct commit_list *l, struct base_error *err)
{
	uint64_t until = base_monotonic_ms() + l->how.patience_ms;

	for (;;) {
		uint64_t before = l->next;
		int r = list_number_listed(l, err);

		list_numbers_release(l);
		if (r == 0)
			return 0;
		if (r > 0)
			r = commit_list_refresh(l, err);
		if (r < 0)
			return r;
		if (base_monotonic_ms() < until) {
			if (l->next == before)
				usleep(RETRY_MAX_MS * 1000);
			continue;
		}
		if (l->next > before)
			return 0; /* as far as others have come meanwhile */
		return base_error_set(err, -ESTALE, "run %s: its directory lists entry %llu, which cannot be opened: "
			"a cache of the file system is behind; try again", l->run, (unsigned long long)l->next);
	}
}

int commit_list_newer(const struct commit_list *l, uint64_t *ret_entry, struct base_error *err)
{
	if (!l->newer_kind)
		return 0;
	if (ret_entry)
		*ret_entry = l->newer;
	return base_error_newer(err,
		"run %s: a newer vckpt wrote entry %llu of its list, which is of a kind (%u) that this one does not "
		"know: it skips the entry, and writes nothing to the run",
		l->run, (unsigned long long)l->newer, l->newer_kind);
}

const char *commit_list_run(const struct commit_list *l) { return l->run; }
uint64_t commit_list_next(const struct commit_list *l) { return l->next; }
uint64_t commit_list_first(const struct commit_list *l) { return l->first; }
uint64_t commit_list_head(const struct commit_list *l) { return l->head.number; }
uint64_t commit_list_lie(const struct commit_list *l) { return l->lie; }
size_t commit_list_count(const struct commit_list *l) { return l->nsteps; }
const struct commit_list_step *commit_list_at(const struct commit_list *l, size_t i)
{
	return i < l->nsteps ? &l->steps[i] : NULL;
}
const struct commit_list_step *commit_list_latest(const struct commit_list *l)
{
	return l->nsteps ? &l->steps[l->nsteps - 1] : NULL;
}

/* ---- runs ---- */

struct runs_found { char **names; size_t n, size; };

static int runs_add(void *arg, const struct storage_entry *entry)
{
	struct runs_found *f = arg;
	const char *slash = strrchr(entry->name, '/'), *run = slash ? slash + 1 : entry->name;

	if (!proto_run_valid(run))
		return 0; /* what is no directory counts: its list cannot be read, and the reader has to know */
	if (base_array_room(f->names, f->size, f->n + 1) < 0)
		return -ENOMEM;
	f->names[f->n] = strdup(run);
	return f->names[f->n] ? (f->n++, 0) : -ENOMEM;
}

static int name_compare(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

int commit_runs(struct store *s, char ***ret_runs, size_t *ret_n, struct base_error *err)
{
	struct runs_found f = {0};
	int r = storage_list_dirs(s->storage, "runs", runs_add, &f);

	if (r < 0 && r != -ENOENT) {
		commit_runs_free(f.names, f.n);
		if (store_denied_listing(s, r, err))
			return r;
		return base_error_set(err, r, "%s/runs: %s", s->path, base_error_name(r));
	}
	if (f.n)
		qsort(f.names, f.n, sizeof *f.names, name_compare);
	*ret_runs = f.names;
	*ret_n = f.n;
	return 0;
}

void commit_runs_free(char **runs, size_t n)
{
	for (size_t i = 0; i < n; i++)
		free(runs[i]);
	free(runs);
}
