/* SPDX-License-Identifier: Apache-2.0
 *
 * wire: between bytes and protobuf-c's messages.
 *
 * Order of a decode: a look at its size (scan.c), unpack under a memory bound, version, features, canonical length. The
 * last one compares the body's length with that of the shortest encoding of what was understood: a NUL inside a string
 * (protobuf-c's strings end there), a field given twice, a padded varint or an explicit default all make the body
 * longer, so one comparison refuses them all. Groups are refused by protobuf-c itself, and no message here nests into
 * itself: depth is bounded. */
#include "proto/proto_internal.h"

#include "core/base/log.h"

/* Every record begins like Head: fields 1 and 2 of its message. */
#define WIRE_HEAD_CHECK(type) \
	_Static_assert(offsetof(type, version) == offsetof(Vckpt__Head, version) && \
		offsetof(type, n_features) == offsetof(Vckpt__Head, n_features) && \
		offsetof(type, features) == offsetof(Vckpt__Head, features), #type)
WIRE_HEAD_CHECK(Vckpt__Store);
WIRE_HEAD_CHECK(Vckpt__Entry);
WIRE_HEAD_CHECK(Vckpt__Layout);
WIRE_HEAD_CHECK(Vckpt__Part);
WIRE_HEAD_CHECK(Vckpt__Announcement);
WIRE_HEAD_CHECK(Vckpt__Manifest);
WIRE_HEAD_CHECK(Vckpt__Begin);
WIRE_HEAD_CHECK(Vckpt__BaseRecord);
WIRE_HEAD_CHECK(Vckpt__Heartbeat);
WIRE_HEAD_CHECK(Vckpt__Trash);
WIRE_HEAD_CHECK(Vckpt__Damage);
WIRE_HEAD_CHECK(Vckpt__Stats);

int proto_no_memory(const struct proto_arena *a)
{
	return a->exhausted ? -BASE_EFORMAT : -ENOMEM;
}

/* protobuf-c answers a malformed body and a failed allocation alike. A failed allocation says nothing of the
 * body: a caller that took it for damage would stop the writers of a sound list. */
static int unpack_failed(const struct proto_arena *a)
{
	return a->starved ? -ENOMEM : -BASE_EFORMAT;
}

int proto_unpack_inner(const ProtobufCMessageDescriptor *d, const void *body, size_t len, struct proto_arena *arena,
	void *ret_message)
{
	ProtobufCAllocator allocator = proto_arena_allocator(arena);
	ProtobufCMessage *m;

	if (proto_scan(d, body, len, arena->left) < 0)
		return -BASE_EFORMAT;
	m = protobuf_c_message_unpack(d, &allocator, len, body);
	if (!m)
		return unpack_failed(arena);
	if (protobuf_c_message_get_packed_size(m) != len)
		return -BASE_EFORMAT;
	*(ProtobufCMessage **)ret_message = m;
	return 0;
}

/* All words (docs/format/versions.md), in the order of their bits. */
static char *wire_words[] = {(char[]){"grid-2"}, (char[]){"list-2"}, (char[]){"list-3"}, (char[]){"list-4"}};

/* Words that are used together are next to each other in the table, but for two of snapshots. */
char **proto_words(unsigned words, size_t *ret_n)
{
	static char list_2[] = "list-2", list_4[] = "list-4", *snapshot[] = {list_2, list_4};

	*ret_n = (size_t)__builtin_popcount(words);
	if (words == (PROTO_LIST_2 | PROTO_LIST_4))
		return snapshot;
	return wire_words + (words ? __builtin_ctz(words) : 0);
}

bool proto_words_are(char *const *features, size_t n, unsigned words)
{
	size_t have;
	char **all = proto_words(words, &have);

	for (size_t i = 0; i < have && n == have; i++)
		if (strcmp(features[i], all[i]) != 0)
			return false;
	return n == have;
}

static unsigned word_bit(const char *word)
{
	for (unsigned i = 0; i < BASE_COUNT(wire_words); i++)
		if (strcmp(word, wire_words[i]) == 0)
			return 1u << i;
	return 0;
}

bool proto_word_known(const char *word) { return word_bit(word); }

static unsigned words_of(const ProtobufCMessageDescriptor *d)
{
	if (d == &vckpt__store__descriptor)
		return PROTO_GRID_2 | PROTO_LIST_2 | PROTO_LIST_3 | PROTO_LIST_4;
	if (d == &vckpt__entry__descriptor)
		return PROTO_LIST_2 | PROTO_LIST_3 | PROTO_LIST_4;
	return d == &vckpt__layout__descriptor ? PROTO_GRID_2 : 0;
}

bool proto_grid_valid(const struct tensor_grid_params *g)
{
	return g->min_bytes && g->row_bytes && g->min_bytes <= g->target_bytes && g->row_bytes <= g->target_bytes / 2
		&& g->target_bytes <= PROTO_TARGET_MAX_BYTES && g->small_bytes <= g->min_bytes;
}

static int wire_head_check(const ProtobufCMessageDescriptor *d, const Vckpt__Head *h)
{
	const char *what = d->short_name;

	if (h->version == 0)
		return -BASE_EFORMAT;
	if (h->version > PROTO_VERSION) {
		base_debug("%s of version %u; this program knows versions up to %u", what, h->version, PROTO_VERSION);
		return -BASE_EVERSION;
	}
	for (size_t i = 0; i < h->n_features; i++) {
		if (word_bit(h->features[i]) & words_of(d))
			continue;
		base_debug("%s needs the feature \"%.64s\", which this program does not know", what, h->features[i]);
		return -BASE_EVERSION;
	}
	return 0;
}

/* The memory that a body of that length may take. */
static uint64_t wire_memory(const ProtobufCMessageDescriptor *d, uint64_t len)
{
	bool object = d == &vckpt__layout__descriptor || d == &vckpt__part__descriptor;

	len = base_min(len, UINT64_C(1) << 40);
	return object ? len * STORE_DECODE_OBJECT_FACTOR + STORE_DECODE_OBJECT_BYTES
		      : len * STORE_DECODE_FACTOR + STORE_DECODE_BYTES;
}

int proto_head_unpack(const void *body, size_t len, struct proto_arena **ret_arena, Vckpt__Head **ret_head)
{
	size_t head = proto_scan_head(body, len); /* what follows it is not unpacked */
	struct proto_arena *arena = proto_arena_new(wire_memory(&vckpt__head__descriptor, head));
	ProtobufCAllocator allocator;

	if (!arena)
		return -ENOMEM;
	allocator = proto_arena_allocator(arena);
	*ret_head = (Vckpt__Head *)protobuf_c_message_unpack(&vckpt__head__descriptor, &allocator, head, body);
	if (!*ret_head) {
		int r = unpack_failed(arena);

		proto_arena_free(arena);
		return r;
	}
	*ret_arena = arena;
	return 0;
}

/* Of a body that is too large to unpack, or malformed: a later version may have written it. */
static int unpack_refused(const ProtobufCMessageDescriptor *d, const void *body, size_t len)
{
	struct proto_arena *arena;
	Vckpt__Head *head;
	int r = proto_head_unpack(body, len, &arena, &head);

	if (r < 0)
		return r;
	r = wire_head_check(d, head);
	proto_arena_free(arena);
	return r < 0 ? r : -BASE_EFORMAT;
}

int proto_unpack(const ProtobufCMessageDescriptor *d, const void *body, size_t len, struct proto_arena **ret_arena,
	void *ret_message)
{
	uint64_t memory = wire_memory(d, len);
	ProtobufCAllocator allocator;
	struct proto_arena *arena;
	ProtobufCMessage *m;
	int r;

	if (proto_scan(d, body, len, memory) < 0)
		return unpack_refused(d, body, len);
	arena = proto_arena_new(memory);
	if (!arena)
		return -ENOMEM;
	allocator = proto_arena_allocator(arena);
	m = protobuf_c_message_unpack(d, &allocator, len, body);
	r = m ? wire_head_check(d, (const Vckpt__Head *)m) : unpack_failed(arena);
	if (r == 0 && protobuf_c_message_get_packed_size(m) != len)
		r = -BASE_EFORMAT;
	if (r < 0) {
		proto_arena_free(arena);
		return r;
	}
	*ret_arena = arena;
	*(ProtobufCMessage **)ret_message = m;
	return 0;
}

int proto_pack(const void *message, struct base_buf *b)
{
	size_t len = protobuf_c_message_get_packed_size(message);
	void *to = base_buf_extend(b, len);

	if (!to)
		return b->error ? b->error : (len ? -ENOMEM : 0);
	protobuf_c_message_pack(message, to);
	return 0;
}

int proto_unknown_take(const ProtobufCMessage *m, struct proto_arena *a, const uint8_t **ret_bytes, size_t *ret_len)
{
	static const ProtobufCMessageDescriptor no_fields = {.magic = PROTOBUF_C__MESSAGE_DESCRIPTOR_MAGIC};
	ProtobufCMessage only = {&no_fields, m->n_unknown_fields, m->unknown_fields};
	size_t len = protobuf_c_message_get_packed_size(&only);
	uint8_t *bytes = len ? proto_arena_array(a, len, 1) : NULL;

	if (len && !bytes)
		return proto_no_memory(a);
	if (len)
		protobuf_c_message_pack(&only, bytes);
	*ret_bytes = bytes;
	*ret_len = len;
	return 0;
}

/* protobuf-c writes a field's number and then its data, unchanged: as one field, all behind the first number. */
int proto_unknown_put(ProtobufCMessage *m, struct proto_arena *a, const uint8_t *bytes, size_t len)
{
	ProtobufCMessageUnknownField *all;
	uint32_t tag = 0;
	size_t n = 0;

	if (len == 0)
		return 0;
	all = proto_arena_array(a, 1, sizeof *all);
	if (!all)
		return proto_no_memory(a);
	do
		tag |= (uint32_t)(bytes[n] & 0x7f) << (7 * n);
	while (bytes[n++] >= 0x80 && n < len && n < 5);
	*all = (ProtobufCMessageUnknownField){tag >> 3, tag & 7, len - n, (uint8_t *)(uintptr_t)bytes + n};
	m->n_unknown_fields = 1;
	m->unknown_fields = all;
	return 0;
}

bool proto_rows(const ProtobufCBinaryData *field, size_t row_bytes, uint64_t max_rows, uint32_t *ret_n)
{
	uint64_t n = field->len / row_bytes;

	if (field->len % row_bytes || n > max_rows || n > UINT32_MAX)
		return false;
	*ret_n = (uint32_t)n;
	return true;
}

bool proto_digest_get(const ProtobufCBinaryData *field, struct base_digest *ret_d)
{
	if (field->len != sizeof ret_d->bytes)
		return false;
	memcpy(ret_d->bytes, field->data, sizeof ret_d->bytes);
	return true;
}
