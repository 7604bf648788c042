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
#include "proto/proto_internal.h"

#define ENTRY_LIVE_MAX (UINT32_C(1) << 22)

static bool entry_commit_check(const struct proto_commit *c)
{
	struct proto_attempt_number a;

	return c->step <= PROTO_STEP_MAX && proto_attempt_parse(c->attempt, &a) &&
		proto_attributes_check(c->attributes, c->nattributes);
}

/* What a snapshot says beside its rows. */
static bool entry_from_check(const struct proto_entry *m)
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
	return (m->older == PROTO_NONE || m->older <= PROTO_STEP_MAX) &&
		(m->newest_launch == PROTO_NONE || m->newest_launch < m->number);
}

static bool entry_snapshot_check(const struct proto_entry *m)
{
	if (m->nlive > ENTRY_LIVE_MAX || !entry_from_check(m))
		return false;
	for (size_t i = 0; i < m->nlive; i++)
		if ((i > 0 && m->live[i - 1].entry >= m->live[i].entry) || m->live[i].entry == PROTO_NONE ||
			!entry_commit_check(&m->live[i].commit))
			return false;
	return true;
}

static bool entry_accept_check(const struct proto_entry *m)
{
	for (size_t i = 0; i < m->naccepts; i++)
		if (m->accepts[i] >= m->number || (i > 0 && m->accepts[i - 1] >= m->accepts[i]))
			return false;
	return m->naccepts > 0 && m->naccepts <= PROTO_ACCEPTS_MAX && m->version != 1;
}

static bool entry_launch_check(const struct proto_entry *m)
{
	if (!proto_launch_valid(m->launch) || (m->newest_step != PROTO_NONE && m->newest_step > PROTO_STEP_MAX))
		return false;
	if (!m->list_2)
		return m->nth == 0 && m->nids == 0;
	if (m->from == PROTO_NONE)
		return m->nth > 0 && m->nids == m->nth - 1;
	return m->nth > 0 && m->nids < m->nth - 1 && m->from < m->number;
}

/* Version 1 knew no place, and says none. */
static bool entry_place_check(const struct proto_entry *m)
{
	static const struct base_digest none;

	if (m->version == 1)
		return (!m->run || !m->run[0]) && m->number == 0 && base_digest_equal(&m->before, &none);
	return m->version <= PROTO_VERSION && m->run && proto_run_valid(m->run) && m->number != PROTO_NONE;
}

static int entry_check(const struct proto_entry *m)
{
	struct proto_attempt_number a;
	bool good = m->kind > PROTO_ENTRY_COLLECTED; /* of a later version: nothing is known of it */

	if (!proto_host_valid(m->host) || !entry_place_check(m))
		return -BASE_EFORMAT;
	if (m->list_2 && (m->version == 1 || (m->kind != PROTO_ENTRY_SNAPSHOT && m->kind != PROTO_ENTRY_LAUNCH)))
		return -BASE_EFORMAT;
	switch (m->kind) {
	case PROTO_ENTRY_LAUNCH:
		good = entry_launch_check(m);
		break;
	case PROTO_ENTRY_COMMIT:
		good = entry_commit_check(&m->commit);
		break;
	case PROTO_ENTRY_ABORT:
		good = proto_attempt_parse(m->attempt, &a) && proto_text_valid(m->reason, 0, PROTO_REASON_MAX);
		break;
	case PROTO_ENTRY_REMOVE:
		good = m->removes != PROTO_NONE;
		break;
	case PROTO_ENTRY_SNAPSHOT:
		good = entry_snapshot_check(m);
		break;
	case PROTO_ENTRY_ACCEPT:
		good = entry_accept_check(m);
		break;
	case PROTO_ENTRY_COLLECTED:
		good = m->version != 1 && m->number > 0;
		break;
	}
	return good ? 0 : -BASE_EFORMAT;
}

/* Appends the unknown fields as they stood: fields of a message may follow each other in any order. */
static int entry_commit_pack(const Vckpt__Commit *message, const struct proto_commit *c, struct base_buf *b)
{
	int r = proto_pack(message, b);

	if (r == 0)
		base_buf_append(b, c->extra, c->extra_len);
	return r < 0 ? r : b->error;
}

static int entry_commit_message(const struct proto_commit *c, struct proto_arena *arena, Vckpt__Commit *ret_message)
{
	vckpt__commit__init(ret_message);
	ret_message->step = c->step;
	ret_message->attempt = (char *)c->attempt;
	ret_message->time_ns = c->time_ns;
	ret_message->replaces = c->replaces + 1; /* PROTO_NONE wraps to 0 */
	ret_message->manifest = proto_digest_field(&c->manifest);
	ret_message->tensors = c->tensors;
	ret_message->bytes = c->bytes;
	ret_message->new_bytes = c->new_bytes;
	return proto_attributes_pack(c->attributes, c->nattributes, arena, &ret_message->n_attributes,
		&ret_message->attributes);
}

static int entry_extra_put(const struct proto_commit *c, struct base_buf *extra)
{
	struct proto_arena *arena;
	Vckpt__Commit only = VCKPT__COMMIT__INIT;
	int r;

	if (c->nattributes == 0 && c->extra_len == 0)
		return 0;
	arena = proto_arena_new(UINT64_MAX);
	if (!arena)
		return -ENOMEM;
	r = proto_attributes_pack(c->attributes, c->nattributes, arena, &only.n_attributes, &only.attributes);
	if (r == 0)
		r = entry_commit_pack(&only, c, extra);
	proto_arena_free(arena);
	return r;
}

static int entry_live_put(const struct proto_live *l, struct base_buf *rows, struct base_buf *extra)
{
	size_t before = extra->len;
	struct proto_attempt_number a;
	int r = entry_extra_put(&l->commit, extra);

	if (r < 0)
		return r;
	if (extra->len > UINT32_MAX || !proto_attempt_parse(l->commit.attempt, &a))
		return -BASE_EFORMAT;
	base_buf_put64(rows, l->entry);
	base_buf_put64(rows, l->commit.step);
	base_buf_put64(rows, (uint64_t)l->commit.time_ns);
	base_buf_put64(rows, l->commit.replaces + 1);
	base_buf_append(rows, l->commit.manifest.bytes, sizeof l->commit.manifest.bytes);
	base_buf_put64(rows, l->commit.tensors);
	base_buf_put64(rows, l->commit.bytes);
	base_buf_put64(rows, l->commit.new_bytes);
	base_buf_append(rows, a.launch, sizeof a.launch);
	base_buf_put64(rows, a.count);
	base_buf_put32(rows, (uint32_t)before);
	base_buf_put32(rows, (uint32_t)(extra->len - before));
	return rows->error;
}

static int entry_snapshot_encode(const struct proto_entry *m, Vckpt__Entry *e, struct base_buf *b)
{
	base_cleanup_buf struct base_buf rows = BASE_BUF_INIT, extra = BASE_BUF_INIT, gone = BASE_BUF_INIT;
	Vckpt__Snapshot s = VCKPT__SNAPSHOT__INIT;
	int r = 0;

	for (size_t i = 0; i < m->nlive && r == 0; i++)
		r = entry_live_put(&m->live[i], &rows, &extra);
	for (size_t i = 0; i < m->ngone; i++)
		base_buf_put64(&gone, m->gone[i]);
	if (r < 0 || gone.error)
		return r < 0 ? r : gone.error;
	s.live = proto_bytes(&rows);
	s.extra = proto_bytes(&extra);
	s.gone = proto_bytes(&gone);
	s.from = m->from;
	if (m->from)
		s.from_digest = proto_digest_field(&m->from_digest);
	if (m->list_2) {
		s.older = m->older + 1; /* PROTO_NONE wraps to 0 */
		s.launch = m->newest_launch + 1;
	}
	e->snapshot = &s;
	return proto_pack(e, b);
}

static int entry_accept_encode(const struct proto_entry *m, Vckpt__Entry *e, struct base_buf *b)
{
	base_cleanup_buf struct base_buf rows = BASE_BUF_INIT;
	Vckpt__Accept a = VCKPT__ACCEPT__INIT;

	for (size_t i = 0; i < m->naccepts; i++)
		base_buf_put64(&rows, m->accepts[i]);
	if (rows.error)
		return rows.error;
	a.numbers = proto_bytes(&rows);
	e->accept = &a;
	return proto_pack(e, b);
}

/* A commit's unknown fields have to stand inside its submessage: packed by hand, between those before and after. */
static int entry_commit_encode(const struct proto_entry *m, Vckpt__Entry *e, struct base_buf *b)
{
	base_cleanup_buf struct base_buf inner = BASE_BUF_INIT;
	struct proto_arena *arena = proto_arena_new(UINT64_MAX);
	Vckpt__Entry after = VCKPT__ENTRY__INIT;
	Vckpt__Commit c;
	uint64_t len;
	uint8_t head[11] = {7 << 3 | PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED};
	size_t n = 1;
	int r;

	if (!arena)
		return -ENOMEM;
	r = entry_commit_message(&m->commit, arena, &c);
	if (r == 0)
		r = entry_commit_pack(&c, &m->commit, &inner);
	proto_arena_free(arena);
	after.run = e->run;
	after.number = e->number;
	after.before = e->before;
	e->run = after.host; /* the default: left out */
	e->number = 0;
	e->before = (ProtobufCBinaryData){0};
	if (r == 0)
		r = proto_pack(e, b);
	if (r < 0)
		return r;
	for (len = inner.len; len >= 0x80; len >>= 7)
		head[n++] = (uint8_t)(len | 0x80);
	head[n++] = (uint8_t)len;
	base_buf_append(b, head, n);
	base_buf_append(b, inner.data, inner.len);
	return b->error ? b->error : proto_pack(&after, b);
}

static int entry_launch_encode(const struct proto_entry *m, Vckpt__Entry *e, struct base_buf *b)
{
	base_cleanup_buf struct base_buf ids = BASE_BUF_INIT;
	Vckpt__Launch launch = VCKPT__LAUNCH__INIT;
	uint8_t id[PROTO_LAUNCH_ROW_BYTES];

	launch.launch = (char *)m->launch;
	launch.newest_step = m->newest_step + 1;
	launch.nonce = proto_nonce_field(m->nonce);
	for (size_t i = 0; i < m->nids; i++)
		if (proto_launch_parse(m->ids[i], id))
			base_buf_append(&ids, id, sizeof id);
	if (ids.error || ids.len != m->nids * sizeof id)
		return ids.error ? ids.error : -BASE_EFORMAT;
	launch.ids = proto_bytes(&ids);
	launch.nth = m->nth;
	launch.from = m->list_2 ? m->from + 1 : 0;
	e->launch = &launch;
	return proto_pack(e, b);
}

static unsigned entry_words(const struct proto_entry *m)
{
	return m->kind == PROTO_ENTRY_COLLECTED ? PROTO_LIST_3 : m->list_2 ? PROTO_LIST_2 : 0;
}

static void entry_head(const struct proto_entry *m, Vckpt__Entry *ret_e)
{
	vckpt__entry__init(ret_e);
	ret_e->version = m->version ? m->version : PROTO_VERSION;
	ret_e->features = proto_words(entry_words(m), &ret_e->n_features);
	ret_e->kind = m->kind;
	ret_e->time_ns = m->time_ns;
	ret_e->host = (char *)m->host;
	if (ret_e->version == 1)
		return;
	ret_e->run = (char *)m->run;
	ret_e->number = m->number;
	ret_e->before = proto_digest_field(&m->before);
}

int proto_entry_encode(const struct proto_entry *m, struct base_buf *b)
{
	Vckpt__Entry e;
	Vckpt__Abort abort_message = VCKPT__ABORT__INIT;
	Vckpt__Remove remove_message = VCKPT__REMOVE__INIT;
	int r = entry_check(m);

	if (r < 0)
		return r;
	entry_head(m, &e);
	switch (m->kind) {
	case PROTO_ENTRY_COMMIT:
		return entry_commit_encode(m, &e, b);
	case PROTO_ENTRY_SNAPSHOT:
		return entry_snapshot_encode(m, &e, b);
	case PROTO_ENTRY_ACCEPT:
		return entry_accept_encode(m, &e, b);
	case PROTO_ENTRY_LAUNCH:
		return entry_launch_encode(m, &e, b);
	case PROTO_ENTRY_ABORT:
		abort_message.attempt = (char *)m->attempt;
		abort_message.reason = (char *)m->reason;
		abort_message.rank = m->rank;
		e.abort = &abort_message;
		break;
	case PROTO_ENTRY_REMOVE:
		remove_message.entry = m->removes + 1;
		e.remove = &remove_message;
		break;
	case PROTO_ENTRY_COLLECTED:
		break;
	}
	return proto_pack(&e, b);
}

static int entry_commit_get(const Vckpt__Commit *message, struct proto_arena *arena, struct proto_commit *ret_c)
{
	int r;

	ret_c->step = message->step;
	ret_c->attempt = message->attempt;
	ret_c->time_ns = message->time_ns;
	ret_c->replaces = message->replaces - 1;
	ret_c->tensors = message->tensors;
	ret_c->bytes = message->bytes;
	ret_c->new_bytes = message->new_bytes;
	if (!proto_digest_get(&message->manifest, &ret_c->manifest))
		return -BASE_EFORMAT;
	r = proto_attributes_unpack(message->attributes, message->n_attributes, arena, &ret_c->attributes,
		&ret_c->nattributes);
	return r < 0 ? r : proto_unknown_take(&message->base, arena, &ret_c->extra, &ret_c->extra_len);
}

static int entry_extra_get(const uint8_t *bytes, size_t len, struct proto_arena *arena, struct proto_commit *c)
{
	Vckpt__Commit *only;
	int r = proto_unpack_inner(&vckpt__commit__descriptor, bytes, len, arena, &only);

	if (r < 0)
		return r;
	if (only->step || only->attempt[0] || only->time_ns || only->replaces || only->manifest.len || only->tensors ||
		only->bytes || only->new_bytes)
		return -BASE_EFORMAT;
	r = proto_attributes_unpack(only->attributes, only->n_attributes, arena, &c->attributes, &c->nattributes);
	return r < 0 ? r : proto_unknown_take(&only->base, arena, &c->extra, &c->extra_len);
}

static int entry_live_get(const uint8_t *row, const Vckpt__Snapshot *s, uint32_t *extra_at, struct proto_arena *arena,
	struct proto_live *ret_l)
{
	struct proto_commit *c = &ret_l->commit;
	uint32_t offset = base_get32(row + 104), len = base_get32(row + 108);
	struct proto_attempt_number a;
	char text[PROTO_ATTEMPT_MAX];

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
	/* One after another, no byte unclaimed: a snapshot of the same steps has the same bytes. */
	if (offset != *extra_at || len > s->extra.len - offset)
		return -BASE_EFORMAT;
	*extra_at = offset + len;
	return len ? entry_extra_get(s->extra.data + offset, len, arena, c) : 0;
}

/* Rows of u64. */
static int entry_numbers_get(const ProtobufCBinaryData *field, uint32_t max, struct proto_arena *arena,
	const uint64_t **ret_numbers, size_t *ret_n)
{
	uint64_t *numbers;
	uint32_t n;

	if (!proto_rows(field, sizeof *numbers, max, &n))
		return -BASE_EFORMAT;
	numbers = proto_arena_array(arena, n, sizeof *numbers);
	if (!numbers)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++)
		numbers[i] = base_get64(field->data + (size_t)i * sizeof *numbers);
	*ret_numbers = numbers;
	*ret_n = n;
	return 0;
}

static int entry_from_get(const Vckpt__Snapshot *s, struct proto_arena *arena, struct proto_entry *m)
{
	if (!m->list_2)
		return s->from || s->from_digest.len || s->gone.len || s->older || s->launch ? -BASE_EFORMAT : 0;
	m->from = s->from;
	m->older = s->older - 1;
	m->newest_launch = s->launch - 1;
	if (s->from ? !proto_digest_get(&s->from_digest, &m->from_digest) : s->from_digest.len != 0)
		return -BASE_EFORMAT;
	return entry_numbers_get(&s->gone, ENTRY_LIVE_MAX, arena, &m->gone, &m->ngone);
}

static int entry_launch_get(const Vckpt__Launch *l, struct proto_arena *arena, struct proto_entry *m)
{
	proto_launch_id *ids;
	uint32_t n;

	m->launch = l->launch;
	m->newest_step = l->newest_step - 1;
	m->from = l->from - 1;
	m->nth = l->nth;
	if (!proto_rows(&l->ids, PROTO_LAUNCH_ROW_BYTES, UINT32_MAX, &n) || !proto_nonce_get(&l->nonce, m->nonce)
		|| (l->from && !m->list_2))
		return -BASE_EFORMAT;
	ids = proto_arena_array(arena, n, sizeof *ids);
	if (!ids)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++)
		proto_launch_format(l->ids.data + (size_t)i * PROTO_LAUNCH_ROW_BYTES, ids[i]);
	m->ids = (const proto_launch_id *)ids;
	m->nids = n;
	return 0;
}

static int entry_snapshot_get(const Vckpt__Snapshot *s, struct proto_arena *arena, struct proto_entry *m)
{
	uint32_t n, extra_at = 0;
	int r = entry_from_get(s, arena, m);

	if (r < 0)
		return r;
	if (!proto_rows(&s->live, PROTO_LIVE_ROW_BYTES, ENTRY_LIVE_MAX, &n) || s->extra.len > UINT32_MAX)
		return -BASE_EFORMAT;
	m->live = proto_arena_array(arena, n, sizeof *m->live);
	if (!m->live)
		return proto_no_memory(arena);
	m->nlive = n;
	for (uint32_t i = 0; i < n && r == 0; i++)
		r = entry_live_get(s->live.data + (size_t)i * PROTO_LIVE_ROW_BYTES, s, &extra_at, arena, &m->live[i]);
	return r == 0 && extra_at != s->extra.len ? -BASE_EFORMAT : r;
}

static int entry_head_get(const Vckpt__Entry *e, struct proto_entry *m)
{
	m->kind = (enum proto_entry_kind)e->kind;
	m->list_2 = e->n_features != 0 && e->kind != PROTO_ENTRY_COLLECTED;
	m->version = e->version;
	m->time_ns = e->time_ns;
	m->host = e->host;
	m->run = e->run;
	m->number = e->number;
	if (e->version == 1)
		return e->before.len ? -BASE_EFORMAT : 0;
	return proto_digest_get(&e->before, &m->before) ? 0 : -BASE_EFORMAT;
}

static int entry_get(const Vckpt__Entry *e, struct proto_arena *arena, struct proto_entry *m)
{
	const void *const parts[] = {e->launch, e->commit, e->abort, e->remove, e->snapshot, e->accept};
	int r = entry_head_get(e, m);

	if (r < 0 || !proto_words_are(e->features, e->n_features, entry_words(m)))
		return r < 0 ? r : -BASE_EFORMAT;
	for (unsigned i = 0; i < BASE_COUNT(parts) && e->kind <= PROTO_ENTRY_COLLECTED; i++)
		if ((parts[i] != NULL) != (e->kind == i + 1))
			return -BASE_EFORMAT;
	switch (m->kind) {
	case PROTO_ENTRY_LAUNCH:
		return entry_launch_get(e->launch, arena, m);
	case PROTO_ENTRY_COMMIT:
		return entry_commit_get(e->commit, arena, &m->commit);
	case PROTO_ENTRY_ABORT:
		m->attempt = e->abort->attempt;
		m->reason = e->abort->reason;
		m->rank = e->abort->rank;
		return 0;
	case PROTO_ENTRY_REMOVE:
		m->removes = e->remove->entry - 1;
		return 0;
	case PROTO_ENTRY_SNAPSHOT:
		return entry_snapshot_get(e->snapshot, arena, m);
	case PROTO_ENTRY_ACCEPT:
		return entry_numbers_get(&e->accept->numbers, PROTO_ACCEPTS_MAX, arena, &m->accepts, &m->naccepts);
	case PROTO_ENTRY_COLLECTED:
		break;
	}
	return 0; /* of a later version */
}

int proto_entry_decode(const void *body, size_t len, struct proto_entry *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Entry *e;
	int r = proto_unpack(&vckpt__entry__descriptor, body, len, &arena, &e);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	base_sha256(body, len, &ret_m->self);
	r = entry_get(e, arena, ret_m);
	if (r == 0)
		r = entry_check(ret_m);
	if (r < 0)
		proto_entry_release(ret_m);
	return r;
}

void proto_entry_release(struct proto_entry *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
