/* SPDX-License-Identifier: Apache-2.0
 *
 * entry: an entry of a run's list (docs/format/list.md).
 *
 * A snapshot may hold ten thousand live steps: its commits are rows of fixed width, not messages.
 *
 * With the word "list-2" a snapshot names what changed since an earlier one, and a launch entry the launches since an
 * earlier one.
 *
 *   live step, 112 bytes: entry u64 | step u64 | time i64 | replaces + 1 u64 | manifest 32 | tensors u64 | bytes u64 |
 *   new bytes u64 | launch 8 | count u64 | extra offset u32 | extra length u32
 *
 * `extra` is a Commit message with nothing but attributes and unknown fields: what a later version put into a commit
 * that this one does not know stays with it when it is put again in a snapshot (proto_commit.extra). */
#include "proto/codec_internal.h"

#define ENTRY_LIVE_MAX (UINT32_C(1) << 22)

/* ---- facts ---- */

static bool reason_valid(const char *reason) { return !reason || proto_text_valid(reason, 0, PROTO_REASON_MAX); }
static bool by_valid(const char *host) { return !host || proto_host_valid(host); }

static const struct codec_field step_facts_fields[] = {
	CODEC_FIELD(NEXT, StepFacts, step_facts, entry),
	CODEC_FIELD(BOOL, StepFacts, step_facts, pinned),
	CODEC_FIELD(TEXT, StepFacts, step_facts, reason, .valid = reason_valid),
	CODEC_FIELD(NUMBER, StepFacts, step_facts, pinned_ns),
	CODEC_FIELD(TEXT, StepFacts, step_facts, pinned_by, .valid = by_valid),
	CODEC_LIST(TEXTS, StepFacts, step_facts, tags, .max = PROTO_TAGS_MAX, .valid = proto_tag_valid, .sorted = true),
	CODEC_LIST(MESSAGES, StepFacts, step_facts, attributes, .max = PROTO_ATTRIBUTES_MAX,
		.message = &proto_attribute_message),
};

static bool text_empty(const char *text) { return !text || !text[0]; }

static int step_facts_check(const void *m)
{
	const struct proto_step_facts *f = m;
	bool pin = f->pinned || (text_empty(f->reason) && f->pinned_ns == 0 && text_empty(f->pinned_by));

	return pin && proto_attributes_check(f->attributes, f->nattributes) ? 0 : -BASE_EFORMAT;
}

static const struct codec_message step_facts_message = CODEC_MESSAGE_OF(step_facts, struct proto_step_facts,
	step_facts_fields, .check = step_facts_check);

static const struct codec_field policy_fields[] = {
	CODEC_LIST(TEXTS, Policy, policy, rules, .max = PROTO_RULES_MAX, .text = {1, PROTO_RULE_MAX}),
	CODEC_FIELD(NUMBER, Policy, policy, time_ns),
	CODEC_FIELD(TEXT, Policy, policy, host, .valid = by_valid),
};
static const struct codec_message policy_message = CODEC_MESSAGE_OF(policy, struct proto_policy, policy_fields);

static const struct codec_field facts_fields[] = {
	CODEC_LIST(MESSAGES, Facts, facts, steps, .message = &step_facts_message),
	CODEC_FIELD(MESSAGE, Facts, facts, policy, .message = &policy_message,
		.has = offsetof(struct proto_facts, policed)),
};

static int facts_check(const void *m)
{
	const struct proto_facts *f = m;

	for (size_t i = 0; i < f->nsteps; i++)
		if (f->steps[i].entry == PROTO_NONE || (i > 0 && f->steps[i - 1].entry >= f->steps[i].entry))
			return -BASE_EFORMAT;
	return f->nsteps || f->policed ? 0 : -BASE_EFORMAT;
}

static const struct codec_message facts_message = CODEC_MESSAGE_OF(facts, struct proto_facts, facts_fields,
	.check = facts_check);

bool proto_facts_empty(const struct proto_step_facts *f)
{
	return !f->pinned && f->ntags == 0 && f->nattributes == 0;
}

static bool text_same(const char *a, const char *b) { return strcmp(a ? a : "", b ? b : "") == 0; }

bool proto_facts_equal(const struct proto_step_facts *a, const struct proto_step_facts *b)
{
	if (a->entry != b->entry || a->pinned != b->pinned || !text_same(a->reason, b->reason) ||
		a->pinned_ns != b->pinned_ns || !text_same(a->pinned_by, b->pinned_by) || a->ntags != b->ntags)
		return false;
	for (size_t i = 0; i < a->ntags; i++)
		if (strcmp(a->tags[i], b->tags[i]) != 0)
			return false;
	return proto_attributes_equal(a->attributes, a->nattributes, b->attributes, b->nattributes);
}

/* ---- commits ---- */

#define COMMIT_ATTRIBUTES CODEC_LIST(MESSAGES, Commit, commit, attributes, .max = PROTO_ATTRIBUTES_MAX, \
	.message = &proto_attribute_message)
static const struct codec_field commit_fields[] = {
	CODEC_FIELD(NUMBER, Commit, commit, step, .max = PROTO_STEP_MAX),
	CODEC_FIELD(TEXT, Commit, commit, attempt, .valid = proto_attempt_valid),
	CODEC_FIELD(NUMBER, Commit, commit, time_ns),
	CODEC_FIELD(NEXT, Commit, commit, replaces),
	CODEC_FIELD(BYTES, Commit, commit, manifest),
	CODEC_FIELD(NUMBER, Commit, commit, tensors),
	CODEC_FIELD(NUMBER, Commit, commit, bytes),
	CODEC_FIELD(NUMBER, Commit, commit, new_bytes),
	COMMIT_ATTRIBUTES,
};

static int unknown_pack(const void *m, struct proto_arena *arena, void *message)
{
	const struct proto_commit *commit = m;

	return proto_unknown_put(message, arena, commit->extra, commit->extra_len);
}

static int unknown_unpack(const void *message, struct proto_arena *arena, void *m)
{
	struct proto_commit *commit = m;

	return proto_unknown_take(message, arena, &commit->extra, &commit->extra_len);
}

static const struct codec_field commit_facts = {CODEC_MESSAGE, .message = &step_facts_message};

static int commit_pack(const void *m, struct proto_arena *arena, void *message)
{
	const struct proto_commit *commit = m;
	Vckpt__Commit *s = message;
	int r = commit->facts ? codec_fields_pack(&commit_facts, 1, commit->facts, arena, &s->facts) : 0;

	return r < 0 ? r : unknown_pack(m, arena, message);
}

static int commit_unpack(const void *message, struct proto_arena *arena, void *m)
{
	const Vckpt__Commit *s = message;
	struct proto_commit *commit = m;
	struct proto_step_facts *facts = NULL;
	int r = 0;

	if (s->facts && !(facts = proto_arena_array(arena, 1, sizeof *facts)))
		return proto_no_memory(arena);
	if (facts)
		r = codec_fields_unpack(&commit_facts, 1, &s->facts, arena, facts);
	commit->facts = facts;
	return r < 0 ? r : unknown_unpack(message, arena, m);
}

static int commit_check(const void *m)
{
	const struct proto_commit *commit = m;

	return proto_attributes_check(commit->attributes, commit->nattributes) &&
		(!commit->facts || commit->facts->entry == PROTO_NONE) ? 0 : -BASE_EFORMAT;
}

static const struct codec_message commit_message = CODEC_MESSAGE_OF(commit, struct proto_commit, commit_fields,
	.pack = commit_pack, .unpack = commit_unpack, .check = commit_check);

/* ---- launches, aborts, removes, accepts: fields of struct proto_entry itself ---- */

static const struct codec_row id_row = CODEC_ROW_OF(proto_launch_id, PROTO_LAUNCH_ROW_BYTES,
	{CODEC_COLUMN_HEX, 0, PROTO_LAUNCH_ROW_BYTES});

static const struct codec_field launch_fields[] = {
	CODEC_FIELD(TEXT, Launch, entry, launch, .valid = proto_launch_valid),
	CODEC_FIELD(NEXT, Launch, entry, newest_step, .max = PROTO_STEP_MAX),
	CODEC_FIELD(BYTES_OR_NONE, Launch, entry, nonce),
	CODEC_FIELD(NUMBER, Launch, entry, nth),
	CODEC_FIELD(NEXT, Launch, entry, from),
	CODEC_LIST(ROWS, Launch, entry, ids, .row = &id_row),
};

static int launch_pack(const void *m, struct proto_arena *arena, void *message)
{
	const struct proto_entry *entry = m;
	Vckpt__Launch *s = message;

	(void)arena;
	if (!entry->list_2)
		s->from = 0;
	return 0;
}

static int launch_unpack(const void *message, struct proto_arena *arena, void *m)
{
	const Vckpt__Launch *s = message;
	const struct proto_entry *entry = m;

	(void)arena;
	return s->from && !entry->list_2 ? -BASE_EFORMAT : 0;
}

static int launch_check(const void *m)
{
	const struct proto_entry *entry = m;
	uint64_t before = entry->nth - 1; /* launches */

	if (!entry->list_2)
		return entry->nth == 0 && entry->nids == 0 ? 0 : -BASE_EFORMAT;
	if (entry->nth == 0 || (entry->from == PROTO_NONE ? entry->nids != before
		: entry->nids >= before || entry->from >= entry->number))
		return -BASE_EFORMAT;
	return 0;
}

static const struct codec_message launch_message = CODEC_MESSAGE_OF(launch, struct proto_entry, launch_fields,
	.pack = launch_pack, .unpack = launch_unpack, .check = launch_check);

static const struct codec_field abort_fields[] = {
	CODEC_FIELD(TEXT, Abort, entry, attempt, .valid = proto_attempt_valid),
	CODEC_FIELD(TEXT, Abort, entry, reason, .text = {0, PROTO_REASON_MAX}),
	CODEC_FIELD(NUMBER, Abort, entry, rank),
};
static const struct codec_message abort_message = CODEC_MESSAGE_OF(abort, struct proto_entry, abort_fields);

static const struct codec_field remove_fields[] = {
	CODEC_FIELD_AS(NEXT, Remove, entry, entry, removes),
	CODEC_FIELD(TEXT, Remove, entry, reason, .valid = reason_valid),
};

static int remove_check(const void *m)
{
	const struct proto_entry *entry = m;

	return entry->removes == PROTO_NONE ? -BASE_EFORMAT : 0;
}

static const struct codec_message remove_message = CODEC_MESSAGE_OF(remove, struct proto_entry, remove_fields,
	.check = remove_check);

static const struct codec_field accept_fields[] = {
	CODEC_LIST_AS(ROWS, Accept, numbers, entry, accepts, naccepts, .row = &proto_u64_row, .max = PROTO_ACCEPTS_MAX),
};

static int accept_check(const void *m)
{
	const struct proto_entry *entry = m;

	for (size_t i = 0; i < entry->naccepts; i++)
		if (entry->accepts[i] >= entry->number || (i > 0 && entry->accepts[i - 1] >= entry->accepts[i]))
			return -BASE_EFORMAT;
	return entry->naccepts > 0 && entry->version != 1 ? 0 : -BASE_EFORMAT;
}

static const struct codec_message accept_message = CODEC_MESSAGE_OF(accept, struct proto_entry, accept_fields,
	.check = accept_check);

/* ---- snapshots ---- */

static const struct codec_field snapshot_fields[] = {
	CODEC_FIELD(NUMBER, Snapshot, entry, from),
	CODEC_LIST(ROWS, Snapshot, entry, gone, .row = &proto_u64_row, .max = ENTRY_LIVE_MAX),
	CODEC_FIELD(NEXT, Snapshot, entry, older, .max = PROTO_STEP_MAX),
	CODEC_FIELD_AS(NEXT, Snapshot, launch, entry, newest_launch),
	CODEC_FIELD(MESSAGE, Snapshot, entry, facts, .message = &facts_message,
		.has = offsetof(struct proto_entry, facts.there)),
};

/* What `extra` has of a live step's commit. */
static const struct codec_field extra_fields[] = {COMMIT_ATTRIBUTES};
static const struct codec_message extra_message = CODEC_MESSAGE_OF(commit, struct proto_commit, extra_fields,
	.pack = unknown_pack, .unpack = unknown_unpack);
static const struct codec_field live_extra = {CODEC_MESSAGE, .message = &extra_message};

static int live_extra_put(const struct proto_commit *c, struct proto_arena *arena, struct base_buf *extra)
{
	Vckpt__Commit *only;
	int r;

	if (c->nattributes == 0 && c->extra_len == 0)
		return 0;
	r = codec_fields_pack(&live_extra, 1, c, arena, &only);
	return r < 0 ? r : proto_pack(only, extra);
}

/* The rules in the table of a commit, for a live step's; its attempt comes out of the row and is valid. */
static bool live_check(const struct proto_live *l)
{
	return l->entry != PROTO_NONE && l->commit.step <= PROTO_STEP_MAX &&
		proto_attributes_check(l->commit.attributes, l->commit.nattributes);
}

static int live_put(const struct proto_live *l, struct proto_arena *arena, struct base_buf *extra, uint8_t *row)
{
	size_t before = extra->len;
	struct proto_attempt_number a;
	int r = live_extra_put(&l->commit, arena, extra);

	if (r < 0)
		return r;
	if (extra->len > UINT32_MAX || !proto_attempt_parse(l->commit.attempt, &a) || !live_check(l))
		return -BASE_EFORMAT;
	base_put64(row, l->entry);
	base_put64(row + 8, l->commit.step);
	base_put64(row + 16, (uint64_t)l->commit.time_ns);
	base_put64(row + 24, l->commit.replaces + 1);
	memcpy(row + 32, l->commit.manifest.bytes, sizeof l->commit.manifest.bytes);
	base_put64(row + 64, l->commit.tensors);
	base_put64(row + 72, l->commit.bytes);
	base_put64(row + 80, l->commit.new_bytes);
	memcpy(row + 88, a.launch, sizeof a.launch);
	base_put64(row + 96, a.count);
	base_put32(row + 104, (uint32_t)before);
	base_put32(row + 108, (uint32_t)(extra->len - before));
	return 0;
}

static int snapshot_pack(const void *m, struct proto_arena *arena, void *message)
{
	base_cleanup_buf struct base_buf extra = BASE_BUF_INIT;
	const struct proto_entry *entry = m;
	Vckpt__Snapshot *s = message;
	uint8_t *rows = proto_arena_array(arena, entry->nlive, PROTO_LIVE_ROW_BYTES), *bytes;
	int r = rows ? 0 : -ENOMEM;

	for (size_t i = 0; i < entry->nlive && r == 0; i++)
		r = live_put(&entry->live[i], arena, &extra, rows + i * PROTO_LIVE_ROW_BYTES);
	bytes = proto_arena_array(arena, extra.len, 1);
	if (r < 0 || !bytes)
		return r < 0 ? r : -ENOMEM;
	if (extra.len)
		memcpy(bytes, extra.data, extra.len);
	s->live = (ProtobufCBinaryData){entry->nlive * PROTO_LIVE_ROW_BYTES, rows};
	s->extra = (ProtobufCBinaryData){extra.len, bytes};
	if (entry->from)
		s->from_digest = proto_digest_field(&entry->from_digest);
	if (!entry->list_2)
		s->older = s->launch = 0;
	return 0;
}

static int live_extra_get(const uint8_t *bytes, size_t len, struct proto_arena *arena, struct proto_commit *c)
{
	Vckpt__Commit *only;
	int r = proto_unpack_inner(&vckpt__commit__descriptor, bytes, len, arena, &only);

	if (r < 0)
		return r;
	if (only->step || only->attempt[0] || only->time_ns || only->replaces || only->manifest.len || only->tensors ||
		only->bytes || only->new_bytes || only->facts)
		return -BASE_EFORMAT;
	return codec_fields_unpack(&live_extra, 1, &only, arena, c);
}

static int live_get(const uint8_t *row, const Vckpt__Snapshot *s, uint32_t *extra_at, struct proto_arena *arena,
	struct proto_live *ret_l)
{
	struct proto_commit *c = &ret_l->commit;
	uint32_t offset = base_get32(row + 104), len = base_get32(row + 108);
	struct proto_attempt_number a;
	char text[PROTO_ATTEMPT_MAX];
	int r;

	ret_l->entry = base_get64(row);
	c->step = base_get64(row + 8);
	c->time_ns = (int64_t)base_get64(row + 16);
	c->replaces = base_get64(row + 24) - 1;
	memcpy(c->manifest.bytes, row + 32, sizeof c->manifest.bytes);
	c->tensors = base_get64(row + 64);
	c->bytes = base_get64(row + 72);
	c->new_bytes = base_get64(row + 80);
	memcpy(a.launch, row + 88, sizeof a.launch);
	a.count = base_get64(row + 96);
	proto_attempt_format(&a, text);
	c->attempt = proto_arena_text(arena, text, strlen(text));
	if (!c->attempt)
		return proto_no_memory(arena);
	/* One after another without gaps, so that snapshots of the same steps have the same bytes. */
	if (offset != *extra_at || len > s->extra.len - offset)
		return -BASE_EFORMAT;
	*extra_at = offset + len;
	r = len ? live_extra_get(s->extra.data + offset, len, arena, c) : 0;
	return r == 0 && !live_check(ret_l) ? -BASE_EFORMAT : r;
}

static int snapshot_from_unpack(const Vckpt__Snapshot *s, struct proto_entry *entry)
{
	if (!entry->list_2) {
		entry->older = entry->newest_launch = 0;
		return s->from || s->from_digest.len || s->gone.len || s->older || s->launch ? -BASE_EFORMAT : 0;
	}
	if (s->from ? !proto_digest_get(&s->from_digest, &entry->from_digest) : s->from_digest.len != 0)
		return -BASE_EFORMAT;
	return 0;
}

static int snapshot_unpack(const void *message, struct proto_arena *arena, void *m)
{
	const Vckpt__Snapshot *s = message;
	struct proto_entry *entry = m;
	uint32_t n, extra_at = 0;
	int r = snapshot_from_unpack(s, entry);

	if (r < 0)
		return r;
	if (!proto_rows(&s->live, PROTO_LIVE_ROW_BYTES, ENTRY_LIVE_MAX, &n) || s->extra.len > UINT32_MAX)
		return -BASE_EFORMAT;
	entry->live = proto_arena_array(arena, n, sizeof *entry->live);
	if (!entry->live)
		return proto_no_memory(arena);
	entry->nlive = n;
	for (uint32_t i = 0; i < n && r == 0; i++)
		r = live_get(s->live.data + (size_t)i * PROTO_LIVE_ROW_BYTES, s, &extra_at, arena, &entry->live[i]);
	return r == 0 && extra_at != s->extra.len ? -BASE_EFORMAT : r;
}

/* The fields of a snapshot other than its rows. */
static bool snapshot_from_check(const struct proto_entry *m)
{
	static const struct base_digest none;

	if (!m->list_2)
		return m->from == 0 && m->ngone == 0 && base_digest_equal(&m->from_digest, &none);
	if (m->from == 0 && (m->ngone || m->older != PROTO_NONE || !base_digest_equal(&m->from_digest, &none)))
		return false;
	for (size_t i = 0; i < m->ngone; i++)
		if (m->gone[i] >= m->from || (i > 0 && m->gone[i - 1] >= m->gone[i]))
			return false;
	if (m->from >= m->number || (m->from && m->nlive && m->live[0].entry <= m->from))
		return false;
	return m->newest_launch == PROTO_NONE || m->newest_launch < m->number;
}

static int snapshot_check(const void *m)
{
	const struct proto_entry *entry = m;

	for (size_t i = 1; i < entry->nlive; i++)
		if (entry->live[i - 1].entry >= entry->live[i].entry)
			return -BASE_EFORMAT;
	return entry->nlive <= ENTRY_LIVE_MAX && snapshot_from_check(entry) ? 0 : -BASE_EFORMAT;
}

static const struct codec_message snapshot_message = CODEC_MESSAGE_OF(snapshot, struct proto_entry, snapshot_fields,
	.pack = snapshot_pack, .unpack = snapshot_unpack, .check = snapshot_check);

/* ---- the record ---- */

/* The message of each kind; COLLECTED has none. */
static const struct codec_field entry_kinds[] = {
	[PROTO_ENTRY_LAUNCH] = CODEC_WHOLE(Entry, launch, &launch_message),
	[PROTO_ENTRY_COMMIT] = CODEC_FIELD(MESSAGE, Entry, entry, commit, .message = &commit_message),
	[PROTO_ENTRY_ABORT] = CODEC_WHOLE(Entry, abort, &abort_message),
	[PROTO_ENTRY_REMOVE] = CODEC_WHOLE(Entry, remove, &remove_message),
	[PROTO_ENTRY_SNAPSHOT] = CODEC_WHOLE(Entry, snapshot, &snapshot_message),
	[PROTO_ENTRY_ACCEPT] = CODEC_WHOLE(Entry, accept, &accept_message),
	[PROTO_ENTRY_FACTS] = CODEC_FIELD(MESSAGE, Entry, entry, facts, .message = &facts_message,
		.has = offsetof(struct proto_entry, facts.there)),
};

static const struct codec_field entry_fields[] = {
	CODEC_FIELD(NUMBER, Entry, entry, version),
	CODEC_FIELD(NUMBER, Entry, entry, kind),
	CODEC_FIELD(NUMBER, Entry, entry, time_ns),
	CODEC_FIELD(TEXT, Entry, entry, host, .valid = proto_host_valid),
	CODEC_FIELD(TEXT, Entry, entry, run),
	CODEC_FIELD(NUMBER, Entry, entry, number),
};

static unsigned entry_words(const void *m)
{
	const struct proto_entry *entry = m;

	return entry->kind == PROTO_ENTRY_COLLECTED ? PROTO_LIST_3
		: (entry->list_2 ? PROTO_LIST_2 : 0) | (proto_entry_list_4(entry) ? PROTO_LIST_4 : 0);
}

static bool entry_has_message(uint32_t kind)
{
	return kind > 0 && kind < BASE_COUNT(entry_kinds) && entry_kinds[kind].message;
}

static int entry_pack(const void *m, struct proto_arena *arena, void *message)
{
	const struct proto_entry *entry = m;
	Vckpt__Entry *e = message;

	if (entry->version != 1)
		e->before = proto_digest_field(&entry->before);
	return entry_has_message(entry->kind) ? codec_fields_pack(&entry_kinds[entry->kind], 1, m, arena, message) : 0;
}

static int entry_unpack(const void *message, struct proto_arena *arena, void *m)
{
	const Vckpt__Entry *e = message;
	struct proto_entry *entry = m;

	entry->list_2 = e->n_features != 0 && strcmp(e->features[0], "list-2") == 0;
	if (e->version == 1 ? e->before.len != 0 : !proto_digest_get(&e->before, &entry->before))
		return -BASE_EFORMAT;
	if (e->kind > PROTO_ENTRY_KNOWN)
		return 0; /* of a later version: nothing is known of it */
	for (uint32_t i = 1; i < BASE_COUNT(entry_kinds); i++)
		if (entry_has_message(i) && codec_message_there(&entry_kinds[i], message) != (e->kind == i))
			return -BASE_EFORMAT;
	return entry_has_message(e->kind) ? codec_fields_unpack(&entry_kinds[e->kind], 1, message, arena, m) : 0;
}

/* Version 1 had no place. */
static bool entry_place_check(const struct proto_entry *m)
{
	static const struct base_digest none;

	if (m->version == 1)
		return (!m->run || !m->run[0]) && m->number == 0 && base_digest_equal(&m->before, &none);
	return m->version <= PROTO_VERSION && m->run && proto_run_valid(m->run) && m->number != PROTO_NONE;
}

static int entry_facts_check(const struct proto_entry *m)
{
	size_t n = m->facts.nsteps;

	if (m->kind == PROTO_ENTRY_FACTS && !m->facts.there)
		return -BASE_EFORMAT;
	return proto_entry_list_4(m) && (m->version == 1 || (n && m->facts.steps[n - 1].entry >= m->number))
		? -BASE_EFORMAT : 0;
}

static int entry_check(const void *m)
{
	const struct proto_entry *entry = m;

	if (!entry_place_check(entry) || entry->kind == 0)
		return -BASE_EFORMAT;
	if (entry->kind == PROTO_ENTRY_COLLECTED && (entry->version == 1 || entry->number == 0))
		return -BASE_EFORMAT;
	if (entry->list_2 && (entry->version == 1 ||
		(entry->kind != PROTO_ENTRY_SNAPSHOT && entry->kind != PROTO_ENTRY_LAUNCH)))
		return -BASE_EFORMAT;
	return entry_facts_check(entry);
}

static const struct codec_message entry_message = CODEC_MESSAGE_OF(entry, struct proto_entry, entry_fields,
	.words = entry_words, .pack = entry_pack, .unpack = entry_unpack, .check = entry_check);
CODEC_ENCODE(entry, struct proto_entry)
CODEC_RELEASE(entry, struct proto_entry)

int proto_entry_decode(const void *body, size_t len, struct proto_entry *ret_m)
{
	int r = codec_decode(&entry_message, body, len, ret_m, &ret_m->arena);

	if (r == 0)
		base_sha256(body, len, &ret_m->self);
	return r;
}
