/* SPDX-License-Identifier: Apache-2.0
 *
 * A run's list, out of memory (docs/format/list.md). Input: u8 for how many entries stand before those of the input
 * (they remove nothing; few, or nearly as many as come before a snapshot; bit 6: the store has the word list-2), then
 * entries, each u8 flags | u16 length | body. Flags:
 *
 *   bit 0      a number is left out before it
 *   bit 1      the body is put as it is. Else its run, its number and the digest of the entry before are made good, and
 *              that of a snapshot that it goes on from. A collected record takes the place of the entry that its
 *              `number` says, with the newest snapshot as its head
 *   bit 2      a writer puts it, as far as it may stand there; it puts the snapshots that are due, too
 *   bit 3      and that writer knows the newest steps only. Without bit 2: 64 entries are put before it that decide
 *              nothing, with the snapshot that is due
 *   bits 4-7   so many more follow that a writer puts, commits with the steps behind it
 *
 * The list is read whole, from its newest snapshot, for its newest steps and then the rest, and in two parts. Read in
 * parts it is the same as read at once; and where writers alone have put it, all of these are the same. */
#define MEMORY_FILES 300u

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/log.h"
#include "core/commit/list/list_compare.h"
#include "core/commit/list/list_facts.h"
#include "tests/fuzz/fuzz_memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RUN "run"
#define BEFORE 14u              /* entries before the input's: so many at most, or up to the snapshot's number and on */
#define BEFORE_SNAPSHOT 56u
enum { SKIPPED = 1, AS_IT_IS = 2, WRITER = 4, NEWEST = 8, MORE = 4 };

struct made {
	struct memory m;
	struct store s;
	uint64_t number;
	struct base_digest last, *digests;      /* of entry `number` - 1; of each that was put */
	bool gaps, forged;                      /* numbers are left out; others than writers put entries */
	bool collected;                         /* entries were: half of the files are no list that once was */
	struct commit_list *writers[2];          /* one that knows everything, one that knows the newest steps */
};

static void name_of(uint64_t number, char name[static 64])
{
	snprintf(name, 64, "runs/" RUN "/%012llu", (unsigned long long)number);
}

static void put(struct made *made, const void *body, size_t len)
{
	char name[64];

	base_sha256(body, len, &made->last);
	if (made->number < MEMORY_FILES)
		made->digests[made->number] = made->last;
	name_of(made->number++, name);
	memory_put(&made->m, name, STORE_RECORD_ENTRY, body, len);
	made->forged = true;
}

static void put_encoded(struct made *made, const struct proto_entry *e)
{
	struct base_buf body = BASE_BUF_INIT;

	must(proto_entry_encode(e, &body) == 0);
	put(made, body.data, body.len);
	base_buf_release(&body);
}

/* Is it one that readers from the head on read? */
static bool stays(struct made *made, const char *name)
{
	struct store_record record = {0};
	struct proto_entry e = {0};
	bool launch = true;

	if (store_record_get(&made->m.base, name, STORE_RECORD_ENTRY, made->s.info.id, &record, NULL, NULL) == 0)
		launch = proto_entry_decode(record.body, record.len, &e) < 0 || e.kind == PROTO_ENTRY_LAUNCH;
	proto_entry_release(&e);
	store_record_release(&record);
	return launch;
}

/* In the place of an entry that there is: a snapshot or a launch entry, and what cannot be read, stays. */
static void put_collected(struct made *made, struct proto_entry *e)
{
	uint64_t at = made->number ? e->number % made->number : 0, head;
	struct base_buf body = BASE_BUF_INIT;
	char name[64];

	head = made->number ? (made->number - 1) / COMMIT_SNAPSHOT_EVERY * COMMIT_SNAPSHOT_EVERY : 0;
	name_of(at, name);
	if (at >= head || at % COMMIT_SNAPSHOT_EVERY == 0 || stays(made, name))
		return;
	e->number = head;
	e->before = made->digests[head];
	must(proto_entry_encode(e, &body) == 0);
	memory_put(&made->m, name, STORE_RECORD_ENTRY, body.data, body.len);
	base_buf_release(&body);
	made->collected = true;
}

/* With its place made good; as it is if it does not decode, or cannot stand here. */
static void put_mended(struct made *made, const uint8_t *body, size_t len)
{
	struct base_buf good = BASE_BUF_INIT;
	struct proto_entry e;

	if (proto_entry_decode(body, len, &e) < 0) {
		put(made, body, len);
		return;
	}
	e.version = 0;
	e.run = RUN;
	if (e.kind == PROTO_ENTRY_COLLECTED) {
		put_collected(made, &e);
		proto_entry_release(&e);
		return;
	}
	e.number = made->number;
	e.before = made->last;
	if (e.kind == PROTO_ENTRY_SNAPSHOT && e.list_2 && e.from && e.from < made->number)
		e.from_digest = made->digests[e.from];
	if (proto_entry_encode(&e, &good) == 0)
		put(made, good.data, good.len);
	else
		put(made, body, len);
	base_buf_release(&good);
	proto_entry_release(&e);
}

/* Entries that decide nothing, and in `snapshots` the ones that are due, of a list where nothing is visible. */
static void put_before(struct made *made, unsigned n, bool snapshots)
{
	bool forged = made->forged;

	for (; n > 0 && made->number < MEMORY_FILES; n--) {
		struct proto_entry e = {.kind = PROTO_ENTRY_REMOVE, .host = "h", .run = RUN, .number = made->number,
			.before = made->last};
		uint64_t i = made->number / COMMIT_SNAPSHOT_EVERY;

		if (snapshots && i && made->number % COMMIT_SNAPSHOT_EVERY == 0) {
			e.kind = PROTO_ENTRY_SNAPSHOT;
			e.list_2 = made->s.info.list_2;
			e.older = e.newest_launch = PROTO_NONE;
			e.from = e.list_2 ? (i & (i - 1)) * COMMIT_SNAPSHOT_EVERY : 0;
			if (e.from)
				e.from_digest = made->digests[e.from];
		}
		put_encoded(made, &e);
	}
	made->forged = forged || made->writers[0]; /* after a writer's commit they are not right */
}

/* ---- what writers put ---- */

struct writer { struct made *made; struct proto_entry e; struct proto_step_facts row; };

/* A writer has itself read everything since its launch: an attempt that is decided commits nothing. */
static int writer_check(void *arg, struct commit_list *l)
{
	struct writer *w = arg;
	struct commit_list *whole = w->made->writers[0];
	const struct commit_list_step *s;

	if (commit_list_refresh(whole, NULL) < 0)
		return -EINVAL;
	if (w->e.kind == PROTO_ENTRY_REMOVE && commit_list_count(whole))
		w->e.removes = commit_list_at(whole, w->e.removes % commit_list_count(whole))->entry;
	if (w->e.kind == PROTO_ENTRY_FACTS && w->e.facts.nsteps && commit_list_count(whole)) {
		w->row = w->e.facts.steps[0];
		w->row.entry = commit_list_at(whole, w->row.entry % commit_list_count(whole))->entry;
		w->e.facts.steps = &w->row;
		w->e.facts.nsteps = 1;
	}
	if (w->e.kind != PROTO_ENTRY_COMMIT)
		return 0;
	if (commit_list_attempt(whole, w->e.commit.attempt, NULL, NULL) != COMMIT_ATTEMPT_UNDECIDED ||
		commit_list_know_step(l, w->e.commit.step, NULL) < 0)
		return -EINVAL;
	s = commit_list_find(l, w->e.commit.step);
	w->e.commit.replaces = s ? s->entry : PROTO_NONE;
	return 0;
}

static struct commit_list *writer_list(struct made *made, bool newest)
{
	struct commit_list **l = &made->writers[newest];
	int r = 0;

	if (!*l && newest)
		r = commit_list_open_newest(&made->s, RUN, l, NULL);
	else if (!*l)
		r = commit_list_open(&made->s, RUN, true, l, NULL);
	return r < 0 ? NULL : *l;
}

/* What stands behind made->number now, is written down. */
static void writer_put(struct made *made, struct writer *w, bool newest)
{
	struct commit_list *all = writer_list(made, false), *l = writer_list(made, newest);
	struct base_error err = {0};
	char name[64];

	if (!all || !l)
		return;
	commit_list_put(l, &w->e, writer_check, w, &err);
	for (; made->number < MEMORY_FILES; made->number++) {
		struct store_record record = {0};

		name_of(made->number, name);
		if (store_record_get(&made->m.base, name, STORE_RECORD_ENTRY, made->s.info.id, &record, NULL, NULL) < 0)
			break;
		base_sha256(record.body, record.len, &made->last);
		made->digests[made->number] = made->last;
		store_record_release(&record);
	}
}

/* Number i of what is meant: a launch that was not there before, or an attempt of the same one. */
static void put_one_more(struct made *made, const struct proto_entry *e, unsigned i, bool newest)
{
	struct writer w = {.made = made, .e = *e};
	char attempt[PROTO_ATTEMPT_MAX], launch[17];

	w.e.version = 0;
	w.e.list_2 = false; /* the list fills in what the word asks for */
	w.e.nth = w.e.nids = 0;
	w.e.arena = NULL;
	if (e->kind == PROTO_ENTRY_COMMIT) {
		snprintf(attempt, sizeof attempt, "%.16s-%u", e->commit.attempt, (unsigned)made->number);
		w.e.commit.attempt = attempt;
		w.e.commit.step = (e->commit.step + i) & INT64_MAX;
	}
	if (e->kind == PROTO_ENTRY_LAUNCH) {
		snprintf(launch, sizeof launch, "%.8s%08x", e->launch, (unsigned)made->number);
		w.e.launch = launch;
	}
	writer_put(made, &w, newest);
}

static void put_by_writer(struct made *made, const uint8_t *body, size_t len, uint8_t flags)
{
	struct proto_entry e;

	if (proto_entry_decode(body, len, &e) < 0)
		return;
	if (!made->s.info.list_4) /* no writer puts facts there */
		e.commit.facts = NULL;
	for (unsigned i = 0; (e.kind <= PROTO_ENTRY_REMOVE || (e.kind == PROTO_ENTRY_FACTS && made->s.info.list_4)) &&
		i <= flags >> MORE; i++)
		put_one_more(made, &e, i, flags & NEWEST);
	proto_entry_release(&e);
}

static void put_all(struct made *made, const uint8_t *data, size_t size)
{
	made->s.info.list_2 = made->s.info.list_3 = made->s.info.list_4 = data[0] & 0x40;
	put_before(made, data[0] % 0x40 % BEFORE + (data[0] & 0x80 ? BEFORE_SNAPSHOT : 0), false);
	data++, size--;
	while (size >= 3 && base_get16(data + 1) <= size - 3u && made->number < MEMORY_FILES) {
		size_t len = base_get16(data + 1);

		made->number += data[0] & SKIPPED;
		made->gaps |= data[0] & SKIPPED;
		if (data[0] & NEWEST && !(data[0] & WRITER))
			put_before(made, COMMIT_SNAPSHOT_EVERY, true);
		if (made->number >= MEMORY_FILES)
			break;
		if (data[0] & AS_IT_IS)
			put(made, data + 3, len);
		else if (data[0] & WRITER)
			put_by_writer(made, data + 3, len, data[0]);
		else
			put_mended(made, data + 3, len);
		data += 3 + len;
		size -= 3 + len;
	}
}

/* ---- what readers see ---- */

/* Each of its tags is its own. */
static void check_tags(const struct commit_list *l, const struct commit_list_step *s)
{
	const struct proto_step_facts *f = commit_list_facts(l, s->entry);

	for (size_t k = 0; f && k < f->ntags; k++)
		must(commit_list_tagged(l, f->tags[k]) == s);
}

static void check(const struct commit_list *l)
{
	const char *why;
	uint64_t at = 0, damaged = 0;

	for (size_t i = 0; i < commit_list_count(l); i++) {
		const struct commit_list_step *s = commit_list_at(l, i);

		must(i == 0 || commit_list_at(l, i - 1)->step < s->step);
		must(s->entry < commit_list_next(l) && s->commit.step == s->step && commit_list_find(l, s->step) == s);
		must(commit_list_entry_live(l, s->entry) && commit_list_commit_step(l, s->entry) == s->step);
		check_tags(l, s);
	}
	while (commit_list_damaged_next(l, &at, &why) != PROTO_NONE)
		damaged += why[0] != 0;
	must(damaged == commit_list_damaged(l));
}

/* Both see the same steps, with the same facts, and skip as many entries. */
static void same(const struct commit_list *a, const struct commit_list *b)
{
	must(commit_list_count(a) == commit_list_count(b) && commit_list_next(a) == commit_list_next(b));
	must(commit_list_damaged(a) == commit_list_damaged(b));
	for (size_t i = 0; i < commit_list_count(a); i++) {
		uint64_t entry = commit_list_at(a, i)->entry;

		must(entry == commit_list_at(b, i)->entry &&
			commit_equal(&commit_list_at(a, i)->commit, &commit_list_at(b, i)->commit));
	}
	must(commit_list_facts_same(a, b));
}

static struct commit_list *opened_by(struct store *s,
	int (*f)(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err))
{
	struct commit_list *l = NULL;
	struct base_error err = {0};
	int r = f(s, RUN, &l, &err);

	/* NULL: refused with a sentence, as a list is that a newer vckpt wrote */
	must(r >= 0 ? l != NULL : err.code == r && err.text[0] && !strchr(err.text, '\n'));
	if (r >= 0)
		check(l);
	return r < 0 ? NULL : l;
}

static int open_whole(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err)
{
	return commit_list_open(s, run, true, ret_l, err);
}

static int open_snapshot(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err)
{
	return commit_list_open(s, run, false, ret_l, err);
}

/* Opened when half of the entries were there, and then read on. */
static struct commit_list *grown(struct made *made)
{
	size_t n = made->m.n;
	struct commit_list *l;

	made->m.n = n / 2;
	l = opened_by(&made->s, open_whole);
	made->m.n = n;
	if (l && commit_list_refresh(l, NULL) < 0) {
		commit_list_close(l);
		return NULL;
	}
	if (l)
		check(l);
	return l;
}

/* One that knows the newest steps, and then all. NULL: refused. */
static struct commit_list *learned(struct made *made, const struct commit_list *part)
{
	struct commit_list *l = opened_by(&made->s, commit_list_open_newest);
	const struct commit_list_step *s = l ? commit_list_latest(l) : NULL;
	uint64_t latest = s ? s->step : PROTO_NONE;
	struct base_error err = {0};
	int r = l ? commit_list_know_all(l, &err) : 0;

	must(r >= 0 || err.code == r);
	if (r < 0) {
		commit_list_close(l);
		return NULL;
	}
	if (l)
		check(l);
	if (l && part) { /* nothing here says anything that is not so */
		s = commit_list_latest(l);
		must(latest == (s ? s->step : PROTO_NONE));
		same(part, l);
	}
	return l;
}

static void read_all(struct made *made)
{
	struct commit_list *whole = opened_by(&made->s, commit_list_open_compared);
	struct commit_list *part = opened_by(&made->s, open_snapshot);
	struct commit_list *grow = made->gaps || made->collected ? NULL : grown(made);
	bool right = whole && !commit_list_skips(whole) && commit_list_lie(whole) == 0;

	must(made->gaps || made->collected || !whole == !grow);
	if (whole && grow)
		same(whole, grow);
	must(right || made->forged);
	commit_list_close(learned(made, right ? part : NULL));
	if (right && !made->forged)
		same(whole, part);
	for (unsigned i = 0; i < 2 && right && !made->forged; i++)
		if (made->writers[i]) {
			must(commit_list_refresh(made->writers[i], NULL) >= 0);
			must(commit_list_know_all(made->writers[i], NULL) == 0);
			same(whole, made->writers[i]);
		}
	commit_list_close(whole);
	commit_list_close(part);
	commit_list_close(grow);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct made *made = calloc(1, sizeof *made);

	must(made != NULL);
	made->m.base.ops = &memory_ops;
	made->s = memory_store(&made->m);
	made->digests = calloc(MEMORY_FILES, sizeof *made->digests);
	must(made->digests != NULL);
	base_log_set_level(BASE_LOG_ERROR); /* what is skipped is a warning */
	if (size)
		put_all(made, data, size);
	read_all(made);
	for (unsigned i = 0; i < 2; i++)
		commit_list_close(made->writers[i]);
	memory_release(&made->m);
	free(made->digests);
	free(made);
	return 0;
}
