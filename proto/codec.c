/* SPDX-License-Identifier: Apache-2.0
 *
 * codec: messages by their tables. Texts and flat rows are not copied: a decoded struct points into protobuf-c's
 * message, which is in the same arena. Counts are compared with their limits before memory is taken for them. */
#include "proto/codec_internal.h"

const struct codec_row proto_u32_row = CODEC_ROW_OF(uint32_t, 4, {CODEC_COLUMN_32, 0, 4});
const struct codec_row proto_u64_row = CODEC_ROW_OF(uint64_t, 8, {CODEC_COLUMN_64, 0, 8});

static size_t codec_count(const struct codec_field *f, const void *m)
{
	const void *n = (const uint8_t *)m + f->count;

	return f->n_bytes == sizeof(uint32_t) ? *(const uint32_t *)n : *(const size_t *)n;
}

static void codec_list_set(const struct codec_field *f, void *m, const void *list, size_t count)
{
	void *n = (uint8_t *)m + f->count;

	memcpy((uint8_t *)m + f->to, &list, sizeof list);
	if (f->n_bytes == sizeof(uint32_t))
		*(uint32_t *)n = (uint32_t)count;
	else
		*(size_t *)n = count;
}

static bool codec_all_zero(const uint8_t *bytes, size_t n)
{
	while (n > 0 && bytes[n - 1] == 0)
		n--;
	return n == 0;
}

/* ---- rows ---- */

/* Out of a row and into one are the same: other bytes first, or not. */
#define COLUMN_COPY(type, get) \
	for (; n > 0; n--, from += from_step, to += to_step) { \
		type value_ = get(from); \
		memcpy(to, &value_, sizeof value_); \
	}

/* One column of some rows. false: a reserved byte is set, or a text is no number. */
static bool column_copy(const struct codec_column *c, bool put, const uint8_t *from, size_t from_step, uint8_t *to,
	size_t to_step, size_t n)
{
	switch (c->kind) {
	case CODEC_COLUMN_16:
		COLUMN_COPY(uint16_t, base_get16)
		return true;
	case CODEC_COLUMN_32:
		COLUMN_COPY(uint32_t, base_get32)
		return true;
	case CODEC_COLUMN_64:
		COLUMN_COPY(uint64_t, base_get64)
		return true;
	case CODEC_COLUMN_BYTES:
		for (; n > 0; n--, from += from_step, to += to_step)
			memcpy(to, from, c->bytes);
		return true;
	case CODEC_COLUMN_HEX:
		for (; n > 0; n--, from += from_step, to += to_step)
			if (!put)
				proto_launch_format(from, (char *)to);
			else if (!proto_launch_parse((const char *)from, to))
				return false;
		return true;
	case CODEC_COLUMN_ZERO:
		for (; n > 0; n--, from += from_step, to += to_step)
			if (put)
				memset(to, 0, c->bytes);
			else if (!codec_all_zero(from, c->bytes))
				return false;
	}
	return true;
}

static bool rows_copy(const struct codec_row *row, bool put, const uint8_t *from, uint8_t *to, size_t n)
{
	size_t from_step = put ? row->bytes : row->stored_bytes, to_step = put ? row->stored_bytes : row->bytes, at = 0;
	bool good = true;

	if (n == 0) /* NULL: no columns begin in it */
		return true;
	if (row->flat && to != from)
		memcpy(to, from, n * row->bytes);
	for (const struct codec_column *c = row->columns; good && c < row->columns + row->ncolumns; at += c++->bytes)
		if (!row->flat || c->kind == CODEC_COLUMN_ZERO)
			good = column_copy(c, put, from + (put ? c->to : at), from_step, to + (put ? at : c->to),
				to_step, n);
	return good;
}

static int rows_pack(const struct codec_row *row, const uint8_t *rows, size_t n, struct proto_arena *arena,
	ProtobufCBinaryData *ret_field)
{
	uint8_t *bytes = proto_arena_take(arena, n, row->stored_bytes);

	if (!bytes)
		return proto_no_memory(arena);
	*ret_field = (ProtobufCBinaryData){n * row->stored_bytes, bytes};
	return rows_copy(row, true, rows, bytes, n) ? 0 : -BASE_EFORMAT;
}

static int rows_unpack(const struct codec_field *f, const ProtobufCBinaryData *field, struct proto_arena *arena,
	void *m)
{
	const struct codec_row *row = f->row;
	uint8_t *rows;
	uint32_t n;
	bool good;
	int r;

	if (!proto_rows(field, row->stored_bytes, f->max ? f->max : UINT32_MAX, &n) ||
		(f->paired && n != codec_count(f, m)))
		return -BASE_EFORMAT;
	rows = row->flat && n ? field->data : proto_arena_array(arena, n, row->bytes);
	if (!rows)
		return proto_no_memory(arena);
	codec_list_set(f, m, rows, n);
	good = rows_copy(row, false, field->data, rows, n);
	r = f->rows_unpack ? f->rows_unpack(rows, n) : 0;
	return r < 0 || good ? r : -BASE_EFORMAT;
}

/* ---- messages: each is checked while it is packed or unpacked ---- */

static int message_pack(const struct codec_message *c, const void *m, struct proto_arena *arena, void *message)
{
	int r;

	protobuf_c_message_init(c->descriptor, message);
	r = codec_fields_pack(c->fields, c->nfields, m, arena, message);
	if (r == 0 && c->check)
		r = c->check(m);
	return r == 0 && c->pack ? c->pack(m, arena, message) : r;
}

static int message_unpack(const struct codec_message *c, const void *message, struct proto_arena *arena, void *m)
{
	int r = codec_fields_unpack(c->fields, c->nfields, message, arena, m);

	if (r == 0 && c->unpack)
		r = c->unpack(message, arena, m);
	return r == 0 && c->check ? c->check(m) : r;
}

static int one_pack(const struct codec_message *c, const void *m, struct proto_arena *arena, void *ret_message)
{
	void *message = proto_arena_take(arena, 1, c->descriptor->sizeof_message);

	memcpy(ret_message, &message, sizeof message);
	return message ? message_pack(c, m, arena, message) : proto_no_memory(arena);
}

static int list_pack(const struct codec_field *f, const void *m, struct proto_arena *arena, uint8_t *to)
{
	size_t n = codec_count(f, m), bytes = f->message->descriptor->sizeof_message;
	const uint8_t *from;
	uint8_t *all;
	void **list;
	int r;

	if (f->max && n > f->max)
		return -BASE_EFORMAT;
	all = proto_arena_take(arena, n, bytes);
	list = proto_arena_take(arena, n, sizeof *list);
	r = all && list ? 0 : proto_no_memory(arena);
	memcpy(&from, (const uint8_t *)m + f->to, sizeof from);
	for (size_t i = 0; i < n && r == 0; i++) {
		list[i] = all + i * bytes;
		r = message_pack(f->message, from + i * f->message->bytes, arena, list[i]);
	}
	memcpy(to - sizeof n, &n, sizeof n);
	memcpy(to, &list, sizeof list);
	return r;
}

static int list_unpack(const struct codec_field *f, void *const *messages, size_t n, struct proto_arena *arena, void *m)
{
	size_t bytes = f->message->bytes;
	uint8_t *list;
	int r = 0;

	if (f->max && n > f->max)
		return -BASE_EFORMAT;
	list = proto_arena_array(arena, n, bytes);
	if (!list)
		return proto_no_memory(arena);
	for (size_t i = 0; i < n && r == 0; i++)
		r = message_unpack(f->message, messages[i], arena, list + i * bytes);
	codec_list_set(f, m, list, n);
	return r;
}

/* ---- fields ---- */

/* Of a number, or a pointer: 4 bytes or 8. */
static inline void word_copy(void *to, const void *from, unsigned bytes)
{
	if (bytes == sizeof(uint32_t))
		*(uint32_t *)to = *(const uint32_t *)from;
	else
		*(uint64_t *)to = *(const uint64_t *)from;
}

/* In our struct. NEXT: or PROTO_NONE. */
static inline int number_check(const struct codec_field *f, const void *at)
{
	uint64_t number;

	if (f->max == 0)
		return 0;
	number = f->bytes == sizeof(uint32_t) ? *(const uint32_t *)at : *(const uint64_t *)at;
	return number <= f->max || (f->kind == CODEC_NEXT && number == PROTO_NONE) ? 0 : -BASE_EFORMAT;
}

static int text_check(const struct codec_field *f, const char *text)
{
	bool good = f->valid ? f->valid(text) : f->text.max == 0 || proto_text_valid(text, f->text.min, f->text.max);

	return good ? 0 : -BASE_EFORMAT;
}

static int texts_check(const struct codec_field *f, char *const *texts, size_t n)
{
	int r = f->max && n > f->max ? -BASE_EFORMAT : 0;

	for (size_t i = 0; i < n && r == 0; i++) {
		r = text_check(f, texts[i]);
		if (r == 0 && f->sorted && i > 0 && strcmp(texts[i - 1], texts[i]) >= 0)
			r = -BASE_EFORMAT;
	}
	return r;
}

static inline bool codec_has(const struct codec_field *f, const void *m)
{
	return f->has == 0 || *((const bool *)m + f->has);
}

static inline int field_pack(const struct codec_field *f, const void *m, struct proto_arena *arena, void *message)
{
	const void *from = (const uint8_t *)m + f->to;
	void *to = (uint8_t *)message + f->at;
	size_t n;

	switch (f->kind) {
	case CODEC_NUMBER:
		word_copy(to, from, f->bytes);
		return number_check(f, from);
	case CODEC_NEXT:
		*(uint64_t *)to = *(const uint64_t *)from + 1;
		return number_check(f, from);
	case CODEC_BOOL:
		*(protobuf_c_boolean *)to = *(const bool *)from;
		return 0;
	case CODEC_TEXT:
		if (*(char *const *)from)
			word_copy(to, from, sizeof(char *));
		return text_check(f, *(char *const *)from);
	case CODEC_BYTES_OR_NONE:
		if (codec_all_zero(from, f->bytes))
			return 0;
		__attribute__((fallthrough));
	case CODEC_BYTES:
		*(ProtobufCBinaryData *)to = (ProtobufCBinaryData){f->bytes, (uint8_t *)(uintptr_t)from};
		return 0;
	case CODEC_ROW:
		return codec_has(f, m) ? rows_pack(f->row, from, 1, arena, to) : 0;
	case CODEC_ROWS:
		n = codec_count(f, m);
		return f->max && n > f->max ? -BASE_EFORMAT
			: rows_pack(f->row, *(const uint8_t *const *)from, n, arena, to);
	case CODEC_TEXTS:
		n = codec_count(f, m);
		memcpy((uint8_t *)to - sizeof n, &n, sizeof n);
		memcpy(to, from, sizeof(char **));
		return texts_check(f, *(char **const *)from, n);
	case CODEC_MESSAGE:
		return codec_has(f, m) ? one_pack(f->message, from, arena, to) : 0;
	case CODEC_MESSAGES:
		return list_pack(f, m, arena, to);
	case CODEC_PACKS:
		return proto_packs_pack(*(const struct proto_pack_use *const *)from, (uint32_t)codec_count(f, m), arena,
			to);
	}
	return -BASE_EFORMAT;
}

static int bytes_unpack(const struct codec_field *f, const ProtobufCBinaryData *field, uint8_t *to)
{
	if (field->len == 0 && f->kind == CODEC_BYTES_OR_NONE)
		return 0;
	if (field->len != f->bytes || (f->kind == CODEC_BYTES_OR_NONE && codec_all_zero(field->data, field->len)))
		return -BASE_EFORMAT;
	memcpy(to, field->data, f->bytes);
	return 0;
}

bool codec_message_there(const struct codec_field *f, const void *message)
{
	return *(void *const *)(const void *)((const uint8_t *)message + f->at) != NULL;
}

/* Says whether the field is there, where it may be left out. 1, 0, -BASE_EFORMAT */
static int codec_there(const struct codec_field *f, bool there, void *m)
{
	if (!f->has)
		return there ? 1 : -BASE_EFORMAT;
	*((bool *)m + f->has) = there;
	return there;
}

static inline int field_unpack(const struct codec_field *f, const void *message, struct proto_arena *arena, void *m)
{
	const void *from = (const uint8_t *)message + f->at;
	const ProtobufCBinaryData *field = from; /* of BYTES, ROW and ROWS */
	const size_t *n = (const size_t *)from - 1; /* of TEXTS and MESSAGES */
	void *to = (uint8_t *)m + f->to;
	int r;

	switch (f->kind) {
	case CODEC_NUMBER:
		word_copy(to, from, f->bytes);
		return number_check(f, to);
	case CODEC_TEXT:
		word_copy(to, from, sizeof(char *));
		return text_check(f, *(char *const *)to);
	case CODEC_NEXT:
		*(uint64_t *)to = *(const uint64_t *)from - 1;
		return number_check(f, to);
	case CODEC_BOOL:
		*(bool *)to = *(const protobuf_c_boolean *)from;
		return 0;
	case CODEC_BYTES:
	case CODEC_BYTES_OR_NONE:
		return bytes_unpack(f, field, to);
	case CODEC_ROW:
		r = codec_there(f, field->len > 0, m);
		if (r <= 0)
			return r;
		return field->len == f->row->stored_bytes && rows_copy(f->row, false, field->data, to, 1) ? 0
			: -BASE_EFORMAT;
	case CODEC_ROWS:
		return rows_unpack(f, field, arena, m);
	case CODEC_TEXTS:
		codec_list_set(f, m, *(char **const *)from, *n);
		return texts_check(f, *(char **const *)from, *n);
	case CODEC_MESSAGE:
		r = codec_there(f, codec_message_there(f, message), m);
		return r > 0 ? message_unpack(f->message, *(void *const *)from, arena, to) : r;
	case CODEC_MESSAGES:
		return list_unpack(f, *(void *const *const *)from, *n, arena, m);
	case CODEC_PACKS:
		return proto_packs_unpack(*(Vckpt__Packs *const *)from, arena, to,
			(uint32_t *)((uint8_t *)m + f->count));
	}
	return -BASE_EFORMAT;
}

int codec_fields_pack(const struct codec_field *f, unsigned n, const void *m, struct proto_arena *arena, void *message)
{
	int r = 0;

	for (unsigned i = 0; i < n && r == 0; i++)
		r = field_pack(&f[i], m, arena, message);
	return r;
}

int codec_fields_unpack(const struct codec_field *f, unsigned n, const void *message, struct proto_arena *arena,
	void *m)
{
	int r = 0;

	for (unsigned i = 0; i < n && r == 0; i++)
		r = field_unpack(&f[i], message, arena, m);
	return r;
}

/* ---- records ---- */

static int record_pack(const struct codec_message *c, const void *m, struct proto_arena *arena, struct base_buf *b)
{
	Vckpt__Head *head;      /* how each of them begins (wire.c) */
	int r = one_pack(c, m, arena, &head);

	if (r < 0)
		return r;
	head->version = head->version ? head->version : PROTO_VERSION;
	head->features = proto_words(c->words ? c->words(m) : 0, &head->n_features);
	return proto_pack(head, b);
}

int codec_encode(const struct codec_message *c, const void *m, struct base_buf *b)
{
	struct proto_arena arena;
	int r;

	proto_arena_init(&arena, UINT64_MAX);
	r = record_pack(c, m, &arena, b);
	proto_arena_release(&arena);
	return r;
}

int codec_decode(const struct codec_message *c, const void *body, size_t len, void *ret_m, void **ret_arena)
{
	struct proto_arena *arena;
	const Vckpt__Head *head;
	int r = proto_unpack(c->descriptor, body, len, &arena, &head);

	memset(ret_m, 0, c->bytes);
	if (r < 0)
		return r;
	r = message_unpack(c, head, arena, ret_m);
	if (r == 0 && !proto_words_are(head->features, head->n_features, c->words ? c->words(ret_m) : 0))
		r = -BASE_EFORMAT;
	if (r < 0) {
		proto_arena_free(arena);
		memset(ret_m, 0, c->bytes);
		return r;
	}
	*ret_arena = arena;
	return 0;
}
