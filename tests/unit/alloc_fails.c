/* SPDX-License-Identifier: Apache-2.0
 *
 * alloc_fails STORE RUN: reads and applies the entries of a list one after another, and lets each allocation of each
 * fail in turn. An entry that cannot be read for that is not damaged. One that could not be applied must have changed
 * nothing: the list says what it said, and with memory it goes on to what a list says that never met a failure; all of
 * them together to what a reader of the run sees. Each entry also as the first one after a gap, where a snapshot
 * counts.
 *
 * alloc_fails STORE RUN rest: the same of a list that is opened for its newest steps, when it reads the rest.
 *
 * Allocation is taken from libc here; the library knows nothing of it. Prints "entries N, failures F". */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/buf.h"
#include "core/commit/list/list_internal.h"

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);

static _Thread_local unsigned long left; /* allocations until one fails; 0: none does */
static unsigned long failures;

static bool fails(void)
{
	if (!left || --left)
		return false;
	failures++;
	errno = ENOMEM;
	return true;
}

void *malloc(size_t n) { return fails() ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails() ? NULL : __libc_realloc(p, n); }
void *reallocarray(void *p, size_t n, size_t size)
{
	return (size && n > SIZE_MAX / size) || fails() ? NULL : __libc_realloc(p, n * size);
}

static void text_view(const char *text, struct base_buf *b)
{
	base_buf_append(b, text ? text : "", text ? strlen(text) + 1 : 1);
}

static void facts_view(const struct proto_step_facts *f, struct base_buf *b)
{
	base_buf_append(b, &f->entry, sizeof f->entry);
	base_buf_append(b, &f->pinned, sizeof f->pinned);
	text_view(f->reason, b);
	for (size_t i = 0; i < f->ntags; i++)
		text_view(f->tags[i], b);
	for (size_t i = 0; i < f->nattributes; i++) {
		text_view(f->attributes[i].key, b);
		text_view(f->attributes[i].value, b);
	}
}

static void steps_view(struct commit_list *l, struct base_buf *b)
{
	b->len = 0;
	list_steps_settle(l);
	for (size_t i = 0; i < commit_list_count(l); i++) {
		const struct commit_list_step *s = commit_list_at(l, i);

		base_buf_append(b, &s->step, sizeof s->step);
		base_buf_append(b, &s->entry, sizeof s->entry);
		base_buf_append(b, s->commit.attempt, strlen(s->commit.attempt) + 1);
		base_buf_append(b, &s->commit.manifest, sizeof s->commit.manifest);
		if (commit_list_facts(l, s->entry))
			facts_view(commit_list_facts(l, s->entry), b);
	}
}

/* All that a list says, as bytes. */
static void view(struct commit_list *l, struct base_buf *b)
{
	steps_view(l, b);
	for (size_t i = 0; i < l->nattempts; i++) {
		const struct list_attempt *a = &l->attempts[i];

		base_buf_append(b, a->name, strlen(a->name) + 1);
		base_buf_append(b, &a->state, sizeof a->state);
		base_buf_append(b, a->reason ? a->reason : "", a->reason ? strlen(a->reason) + 1 : 1);
	}
	for (size_t i = 0; i < l->facts.n; i++) {
		facts_view(&l->facts.all[i].is, b);
		base_buf_append(b, &l->facts.all[i].at, sizeof l->facts.all[i].at);
	}
	for (size_t i = 0; i < l->facts.ntags; i++) {
		text_view(l->facts.tags[i].name, b);
		base_buf_append(b, &l->facts.tags[i].owner, sizeof l->facts.tags[i].owner);
	}
	base_buf_append(b, &l->facts.policy_at, sizeof l->facts.policy_at);
	for (size_t i = 0; i < l->nlaunches; i++)
		base_buf_append(b, l->launches[i].launch, 17);
	for (size_t i = 0; i < l->nskips; i++)
		base_buf_append(b, &l->skips[i].first, sizeof l->skips[i].first);
	base_buf_append(b, l->accepts, l->naccepts * sizeof *l->accepts);
	base_buf_append(b, &l->ncommits, sizeof l->ncommits);
	base_buf_append(b, &l->damaged, sizeof l->damaged);
	base_buf_append(b, &l->gap, sizeof l->gap);
	base_buf_append(b, &l->next, sizeof l->next);
}

static int differs(const struct base_buf *a, const struct base_buf *b)
{
	return a->len != b->len || memcmp(a->data, b->data, a->len) != 0;
}

#define READ_ALLOCATIONS 3u /* of a small entry: there are thousands */

static void die(const char *what, uint64_t n, unsigned long k)
{
	printf("entry %llu, allocation %lu: %s\n", (unsigned long long)n, k, what);
	exit(1);
}

static void entry_get(struct store *s, const char *run, uint64_t n, struct proto_entry *ret_e)
{
	struct store_record record = {0};
	struct base_error err = {0};
	char name[STORAGE_NAME_MAX];

	*ret_e = (struct proto_entry){0};
	snprintf(name, sizeof name, "runs/%s/%012llu", run, (unsigned long long)n);
	if (store_record_get(s->storage, name, STORE_RECORD_ENTRY, s->info.id, &record, NULL, &err) < 0
	    || proto_entry_decode(record.body, record.len, ret_e) < 0)
		die(err.code ? err.text : "cannot be decoded", n, 0);
	store_record_release(&record);
}

/* Reads entry n with its k-th allocation failing: that is no fault of the entry. false: it had fewer. */
static bool read_fails(struct store *s, const char *run, uint64_t n, unsigned long k)
{
	struct store_record record = {0};
	struct proto_entry e = {0};
	char name[STORAGE_NAME_MAX];
	bool failed;
	int r;

	snprintf(name, sizeof name, "runs/%s/%012llu", run, (unsigned long long)n);
	left = k;
	r = store_record_get(s->storage, name, STORE_RECORD_ENTRY, s->info.id, &record, NULL, NULL);
	if (r == 0)
		r = proto_entry_decode(record.body, record.len, &e);
	failed = !left;
	left = 0;
	if (r != (failed ? -ENOMEM : 0))
		die("an entry that is read without memory is taken for damaged", n, k);
	proto_entry_release(&e);
	store_record_release(&record);
	return failed;
}

/* The list before entry n. */
static struct commit_list *list_before(struct store *s, const char *run, uint64_t n, bool gap)
{
	struct commit_list *l = calloc(1, sizeof *l);

	l->store = s;
	snprintf(l->run, sizeof l->run, "%s", run);
	for (; l->next < n; l->next++) {
		struct proto_entry e;

		entry_get(s, run, l->next, &e);
		if (list_apply(l, l->next, &e) < 0)
			die("does not apply", l->next, 0);
	}
	l->gap |= gap;
	return l;
}

/* Applies entry n with its k-th allocation failing. false: it had fewer. */
static bool one(struct store *s, const char *run, uint64_t n, bool gap, unsigned long k, struct base_buf *ret_after)
{
	struct base_buf before = BASE_BUF_INIT, now = BASE_BUF_INIT;
	struct commit_list *l = list_before(s, run, n, gap);
	struct proto_entry e;
	bool failed;
	int r;

	view(l, &before);
	entry_get(s, run, n, &e);
	left = k;
	r = list_apply(l, n, &e);
	failed = !left;
	left = 0;
	if (failed != (r == -ENOMEM))
		die("the failure was not told", n, k);
	view(l, &now);
	if (failed && differs(&now, &before))
		die("half applied", n, k);
	if (failed) {
		entry_get(s, run, n, &e);
		if (list_apply(l, n, &e) < 0)
			die("does not go on", n, k);
		view(l, &now);
	}
	if (ret_after->len && differs(&now, ret_after))
		die("goes on to something else", n, k);
	base_buf_release(ret_after);
	*ret_after = now;
	base_buf_release(&before);
	commit_list_close(l);
	return failed;
}

/* Reads the rest of a list of the newest steps with the k-th allocation failing. false: it had fewer. */
static bool rest_fails(struct store *s, const char *run, unsigned long k, const struct base_buf *all)
{
	struct base_buf before = BASE_BUF_INIT, now = BASE_BUF_INIT;
	struct base_error err = {0};
	struct commit_list *l;
	bool failed;
	int r;

	if (commit_list_open_newest(s, run, &l, &err) < 0 || !l->rest)
		die("has no rest", 0, k);
	view(l, &before);
	left = k;
	r = commit_list_know_all(l, &err);
	failed = !left;
	left = 0;
	view(l, &now);
	if (r < 0 && (r != -ENOMEM || err.code != r || !l->rest || differs(&now, &before)))
		die("half of the rest is known, or no sentence says why", l->next, k);
	if (commit_list_know_all(l, &err) < 0)
		die("the rest cannot be read afterwards", l->next, k);
	steps_view(l, &now);
	if (differs(&now, all))
		die("the rest is something else", l->next, k);
	base_buf_release(&before);
	base_buf_release(&now);
	commit_list_close(l);
	return failed;
}

int main(int argc, char **argv)
{
	struct base_buf end = BASE_BUF_INIT, seen = BASE_BUF_INIT;
	struct base_error err = {0};
	struct commit_list *l, *all;
	struct store *s;
	uint64_t n;

	if (argc < 3 || store_open(argv[1], 0, &s, &err) < 0 || commit_list_open(s, argv[2], true, &l, &err) < 0) {
		printf("usage: alloc_fails STORE RUN [rest]: %s\n", err.text);
		return 2;
	}
	n = commit_list_next(l);
	if (argc > 3) {
		steps_view(l, &end);
		for (unsigned long k = 1; rest_fails(s, argv[2], k, &end);)
			k++;
	}
	for (uint64_t i = 0; argc == 3 && i < 2 * n; i++) {
		unsigned long k = 1;

		while (i % 2 == 0 && read_fails(s, argv[2], i / 2, k))
			k++;
		if (i / 2 + 1 < n && k - 1 > READ_ALLOCATIONS) /* the last one is a snapshot */
			die("takes more memory than that of its file, and what it is decoded into", i / 2, k);
		k = 1;
		end.len = 0;
		while (one(s, argv[2], i / 2, i % 2, k, &end))
			k++;
	}
	base_buf_release(&end);
	all = argc == 3 ? list_before(s, argv[2], n, false) : NULL;
	if (all) {
		view(all, &end);
		view(l, &seen);
		if (differs(&end, &seen))
			die("a reader sees something else", n, 0);
	}
	commit_list_close(all);
	commit_list_close(l);
	base_buf_release(&end);
	base_buf_release(&seen);
	store_close(s);
	printf("entries %llu, failures %lu\n", (unsigned long long)n, failures);
	return 0;
}
