/* SPDX-License-Identifier: Apache-2.0
 *
 * The small files that writers and verify leave for others, out of memory: heartbeats, folders of incoming/, notes of
 * damage. Input: files, each u8 kind | u8 length | name | u16 length | bytes. Kind 0: the bytes are the whole file.
 * Otherwise they are the body of a record of that kind, whose envelope is made good. All is read as `vckpt ls` with
 * --incoming, the collector and a save read it. Then a range is noted: the notes still name what they named before, and
 * what was added. */
#include <stdlib.h>
#include <string.h>

#include "core/commit/incoming/incoming.h"
#include "core/commit/notes/note.h"
#include "tests/fuzz/fuzz_memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define WORLD_MAX 65536u        /* of a `begin`: who is missing takes 4 bytes for each rank */
struct input { const uint8_t *at; size_t left; };

/* ---- the input ---- */

/* n bytes; NULL: there are not so many. */
static const uint8_t *take(struct input *in, size_t n)
{
	const uint8_t *at = in->at;

	if (n > in->left)
		return NULL;
	in->at += n;
	in->left -= n;
	return at;
}

/* A `begin` of more ranks is left out: it is right, and would take all the time. */
static bool too_many(unsigned kind, const uint8_t *body, size_t len)
{
	struct proto_begin m;
	bool many;

	if (kind != STORE_RECORD_BEGIN || proto_begin_decode(body, len, &m) < 0)
		return false;
	many = m.world > WORLD_MAX;
	proto_begin_release(&m);
	return many;
}

static void put_file(struct memory *m, unsigned kind, const char *name, const uint8_t *body, size_t len)
{
	if (memory_find(m, name) || too_many(kind, body, len))
		return;
	if (kind == 0)
		must(memory_replace(&m->base, name, body, len) == 0);
	else
		memory_put(m, name, (enum store_record_kind)kind, body, len);
}

static void put_files(struct memory *m, struct input *in)
{
	while (m->n + 1 < MEMORY_FILES) { /* one is left for the note */
		const uint8_t *head = take(in, 2), *text = head ? take(in, head[1]) : NULL;
		const uint8_t *len = text ? take(in, 2) : NULL, *body = len ? take(in, base_get16(len)) : NULL;
		char name[256] = "";

		if (!body)
			return;
		memcpy(name, text, head[1]);
		if (name[0])
			put_file(m, head[0] % (STORE_RECORD_DAMAGE + 1), name, body, base_get16(len));
	}
}

/* ---- what is read ---- */

static void launches(struct store *s)
{
	struct commit_launch_info *infos;
	size_t n;

	must(commit_launches(s, &infos, &n, NULL) == 0);
	for (size_t i = 0; i < n; i++) {
		int order = i ? strcmp(infos[i - 1].launch, infos[i].launch) : -1;

		must(strlen(infos[i].launch) == 16 && (!infos[i].run[0] || proto_run_valid(infos[i].run)));
		must(order < 0 || (order == 0 && strcmp(infos[i - 1].host, infos[i].host) < 0));
	}
	free(infos);
}

static void folder(const struct commit_incoming *in)
{
	uint32_t inside = 0;

	must(proto_run_valid(in->run) && commit_attempt_name_valid(in->attempt));
	must(!in->begun || (strcmp(in->begin.run, in->run) == 0 && strcmp(in->begin.attempt, in->attempt) == 0));
	for (uint32_t i = 0; i < in->nannounced; i++) {
		must(i == 0 || in->announced[i - 1] < in->announced[i]);
		inside += in->begun && in->announced[i] < in->begin.world;
	}
	for (uint32_t i = 0; i < in->nmissing; i++)
		must(in->missing[i] < in->begin.world && (i == 0 || in->missing[i - 1] < in->missing[i]));
	must(in->nmissing == (in->begun ? in->begin.world - inside : 0));
}

static void folders(struct store *s)
{
	struct commit_incoming *all;
	size_t n;

	must(commit_incoming_read(s, &all, &n, NULL) == 0);
	for (size_t i = 0; i < n; i++)
		folder(&all[i]);
	commit_incoming_free(all, n);
}

static bool named(const struct commit_notes *notes, const char *pack, const struct proto_range *range)
{
	const struct pack_object_ref at = {.offset = range->offset, .stored_len = range->len ? range->len : 1};

	return commit_notes_name(notes, pack, &at);
}

static void notes_check(const struct commit_notes *notes)
{
	must(!notes->unknown);
	for (size_t i = 0; i < notes->n; i++) {
		const struct commit_note *note = &notes->all[i];

		must(note->nranges > 0 && (i == 0 || strcmp(notes->all[i - 1].pack, note->pack) < 0));
		for (uint32_t k = 0; k < note->nranges; k++)
			must(named(notes, note->pack, &note->ranges[k]));
	}
}

/* What is noted stays noted when more is added. */
static void notes_add(struct store *s, const struct commit_notes *before, struct input *in)
{
	const char *pack = before->n ? before->all[0].pack : "0123456789abcdef-0-0-model";
	const uint8_t *bytes = take(in, 16);
	struct proto_range range;
	struct commit_notes after;

	if (!bytes)
		return;
	range = (struct proto_range){base_get64(bytes) & INT64_MAX, base_get64(bytes + 8) & INT64_MAX};
	must(commit_note_put(s, pack, &range, 1, false, NULL) == 0);
	must(commit_notes_read(s, &after) == 0);
	notes_check(&after);
	must(named(&after, pack, &range));
	for (size_t i = 0; i < before->n; i++)
		for (uint32_t k = 0; k < before->all[i].nranges; k++)
			must(named(&after, before->all[i].pack, &before->all[i].ranges[k]));
	commit_notes_release(&after);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct memory m = {.base = {&memory_ops}};
	struct store s = memory_store(&m);
	struct input in = {data, size};
	struct commit_notes notes;

	put_files(&m, &in);
	launches(&s);
	folders(&s);
	must(commit_notes_read(&s, &notes) == 0);
	notes_check(&notes);
	notes_add(&s, &notes, &in);
	commit_notes_release(&notes);
	memory_release(&m);
	return 0;
}
