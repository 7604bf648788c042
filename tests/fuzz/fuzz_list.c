/* SPDX-License-Identifier: Apache-2.0
 *
 * A run's list, out of memory (docs/format/list.md). Input: u8 for how many entries stand before those of the input
 * (they remove nothing; few, or nearly as many as come before a snapshot), then entries, each u8 flags | u16 length |
 * body. Flags: bit 0: a number is left out before it; bit 1: the body is put as it is. Otherwise its run, its number
 * and the digest of the entry before are made good. The list is read whole, from its newest snapshot, and in two parts:
 * read in parts it is the same as read at once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/log.h"
#include "core/commit/list.h"
#include "tests/fuzz/fuzz_memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RUN "run"
#define BEFORE 14u              /* entries before the input's: so many at most, or up to the snapshot's number and on */
#define BEFORE_SNAPSHOT 56u

struct made { struct memory m; uint64_t number; struct base_digest last; bool gaps; };

static void put(struct made *made, const void *body, size_t len)
{
	char name[64];

	snprintf(name, sizeof name, "runs/" RUN "/%012llu", (unsigned long long)made->number++);
	memory_put(&made->m, name, STORE_RECORD_ENTRY, body, len);
	base_sha256(body, len, &made->last);
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
	e.number = made->number;
	e.before = made->last;
	if (proto_entry_encode(&e, &good) == 0)
		put(made, good.data, good.len);
	else
		put(made, body, len);
	base_buf_release(&good);
	proto_entry_release(&e);
}

static void put_before(struct made *made, unsigned n)
{
	while (n-- > 0) {
		struct proto_entry e = {.kind = PROTO_ENTRY_REMOVE, .host = "h", .run = RUN, .number = made->number,
			.before = made->last};
		struct base_buf body = BASE_BUF_INIT;

		must(proto_entry_encode(&e, &body) == 0);
		put(made, body.data, body.len);
		base_buf_release(&body);
	}
}

static void put_all(struct made *made, const uint8_t *data, size_t size)
{
	put_before(made, data[0] % BEFORE + (data[0] & 0x80 ? BEFORE_SNAPSHOT : 0));
	data++, size--;
	while (size >= 3 && base_get16(data + 1) <= size - 3u && made->m.n < MEMORY_FILES) {
		size_t len = base_get16(data + 1);

		made->number += data[0] & 1;
		made->gaps |= data[0] & 1;
		if (data[0] & 2)
			put(made, data + 3, len);
		else
			put_mended(made, data + 3, len);
		data += 3 + len;
		size -= 3 + len;
	}
}

static void check(const struct store_list *l)
{
	const char *why;
	uint64_t at = 0, damaged = 0;

	for (size_t i = 0; i < store_list_count(l); i++) {
		const struct store_list_step *s = store_list_at(l, i);

		must(i == 0 || store_list_at(l, i - 1)->step < s->step);
		must(s->entry < store_list_next(l) && s->commit.step == s->step && store_list_find(l, s->step) == s);
		must(store_list_entry_live(l, s->entry) && store_list_commit_step(l, s->entry) == s->step);
	}
	while (store_list_damaged_next(l, &at, &why) != PROTO_NONE)
		damaged += why[0] != 0;
	must(damaged == store_list_damaged(l));
}

/* Both see the same steps, and skip as many entries. */
static void same(const struct store_list *a, const struct store_list *b)
{
	must(store_list_count(a) == store_list_count(b) && store_list_next(a) == store_list_next(b));
	must(store_list_damaged(a) == store_list_damaged(b));
	for (size_t i = 0; i < store_list_count(a); i++)
		must(store_list_at(a, i)->entry == store_list_at(b, i)->entry);
}

/* NULL: refused with a sentence, as a list is that a newer vckpt wrote. */
static struct store_list *opened(struct store *s, bool whole)
{
	struct store_list *l = NULL;
	struct base_error err = {0};
	int r = store_list_open(s, RUN, whole, &l, &err);

	must(r >= 0 ? l != NULL : err.code == r && err.text[0] && !strchr(err.text, '\n'));
	if (r >= 0)
		check(l);
	return r < 0 ? NULL : l;
}

/* Opened when half of the entries were there, and then read on. */
static struct store_list *grown(struct store *s, struct memory *m)
{
	size_t n = m->n;
	struct store_list *l;

	m->n = n / 2;
	l = opened(s, true);
	m->n = n;
	if (l && store_list_refresh(l, NULL) < 0) {
		store_list_close(l);
		return NULL;
	}
	if (l)
		check(l);
	return l;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct made made = {.m = {.base = {&memory_ops}}};
	struct store s = memory_store(&made.m);
	struct store_list *whole, *part;

	base_log_set_level(BASE_LOG_ERROR); /* what is skipped is a warning */
	if (size)
		put_all(&made, data, size);
	whole = opened(&s, true);
	store_list_close(opened(&s, false));
	part = made.gaps ? NULL : grown(&s, &made.m);
	must(made.gaps || !whole == !part);
	if (whole && part)
		same(whole, part);
	store_list_close(whole);
	store_list_close(part);
	memory_release(&made.m);
	return 0;
}
