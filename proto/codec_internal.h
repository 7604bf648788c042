/* SPDX-License-Identifier: Apache-2.0
 *
 * codec: one encoder, one decoder and one check for all messages of proto/vckpt.proto. protobuf-c
 * converts between bytes and its own structs (wire.c), the codec between those and the structs of proto/message.h.
 *
 * A message has a table with one line for each field: the member of protobuf-c's struct, the member of ours, and what
 * it may hold. Fields 1 and 2 of a record, version and words, are the codec's; a record whose struct has the version
 * has a line for it. What a table cannot say is in the functions of the message:
 *
 *   pack     after the table, to encode: fields that are not stored as they are
 *   unpack   after the table, to decode: the same back, and checks that only protobuf-c's struct allows
 *   check    rules between fields, to encode and to decode. The table's own rules have been checked by then
 *
 * To add a field: a line in proto/vckpt.proto, a member, a line here, a row in docs/format/. */
#ifndef PROTO_CODEC_INTERNAL_H
#define PROTO_CODEC_INTERNAL_H

#include "proto/proto_internal.h"

/* ---- rows of fixed width: the tables in `bytes` fields ---- */
enum codec_column_kind {
	CODEC_COLUMN_16, CODEC_COLUMN_32, CODEC_COLUMN_64, /* little-endian */
	CODEC_COLUMN_BYTES,
	CODEC_COLUMN_HEX,       /* 8 bytes; in our struct 16 hexadecimal digits and a NUL */
	CODEC_COLUMN_ZERO       /* reserved */
};
struct codec_column { enum codec_column_kind kind; uint16_t to, bytes; }; /* where in our struct; bytes of the row */
struct codec_row {
	const struct codec_column *columns;
	uint16_t ncolumns, stored_bytes, bytes; /* bytes: of our struct */
	bool flat;              /* in memory as it is stored, but for what the reserved bytes hold: one copy does */
};

#define CODEC_NUMBERS(type, member) {sizeof ((type *)0)->member == 8 ? CODEC_COLUMN_64 : \
	sizeof ((type *)0)->member == 4 ? CODEC_COLUMN_32 : sizeof ((type *)0)->member == 2 ? CODEC_COLUMN_16 : \
	CODEC_COLUMN_BYTES, offsetof(type, member), sizeof ((type *)0)->member}
#define CODEC_OCTETS(type, member) {CODEC_COLUMN_BYTES, offsetof(type, member), sizeof ((type *)0)->member}
#define CODEC_ZEROS(n) {CODEC_COLUMN_ZERO, 0, n}
/* Of a member `ref.`, with its point. */
#define CODEC_REF_COLUMNS(type, ref) CODEC_OCTETS(type, ref digest), CODEC_NUMBERS(type, ref offset), \
	CODEC_NUMBERS(type, ref checks), CODEC_NUMBERS(type, ref raw_len), CODEC_NUMBERS(type, ref stored_len), \
	CODEC_NUMBERS(type, ref pack), CODEC_NUMBERS(type, ref codec), CODEC_NUMBERS(type, ref kind), CODEC_ZEROS(1)
/* A struct as large as its row has its members where the columns are. */
#define CODEC_ROW_OF(type, stored_bytes, ...) {(const struct codec_column[]){__VA_ARGS__}, \
	sizeof((const struct codec_column[]){__VA_ARGS__}) / sizeof(struct codec_column), stored_bytes, sizeof(type), \
	sizeof(type) == (stored_bytes) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__}

/* ---- fields ---- */
enum codec_kind {
	CODEC_NUMBER,           /* 32 or 64 bits */
	CODEC_NEXT,             /* 64 bits, stored + 1: PROTO_NONE is left out */
	CODEC_BOOL,
	CODEC_TEXT,             /* NULL to encode is as empty */
	CODEC_BYTES,            /* an array of bytes */
	CODEC_BYTES_OR_NONE,    /* all zeros are left out */
	CODEC_ROW,              /* `bytes` of one row */
	/* tables: a pointer, and a count of 32 bits or a size_t */
	CODEC_TEXTS,
	CODEC_ROWS,
	CODEC_MESSAGES,
	CODEC_MESSAGE,
	CODEC_PACKS             /* the table of packs (packs.c) */
};
struct codec_message;
struct codec_field {
	enum codec_kind kind;
	uint16_t at, to;        /* where it is in protobuf-c's struct, and in ours */
	uint16_t bytes;         /* of ours */
	uint16_t count, n_bytes; /* where our count is; protobuf-c's is before its pointer */
	uint16_t has;           /* ROW, MESSAGE: our bool that says whether it is there; 0: it has to be */
	bool sorted;            /* TEXTS: ascending, unique */
	bool paired;            /* ROWS: as many as the list of an earlier line, whose count it shares */
	uint64_t max;           /* the highest number, or count; 0: any. NEXT: or PROTO_NONE */
	/* TEXT, TEXTS: the lowest and highest count of bytes of UTF-8; or a function */
	struct { uint32_t min, max; } text;
	bool (*valid)(const char *text);
	const struct codec_row *row;
	int (*rows_unpack)(const void *rows, uint32_t n); /* ROWS: 0, -BASE_EVERSION. May be NULL */
	const struct codec_message *message;
};
struct codec_message {
	const ProtobufCMessageDescriptor *descriptor;
	const struct codec_field *fields;
	uint16_t nfields, bytes; /* of our struct */
	/* Each may be NULL. 0, -BASE_EFORMAT, -BASE_EVERSION, -ENOMEM */
	int (*pack)(const void *m, struct proto_arena *arena, void *message);
	int (*unpack)(const void *message, struct proto_arena *arena, void *m);
	int (*check)(const void *m);
	unsigned (*words)(const void *m); /* a record: those that it needs, and has */
};

/* Lines of tables. M, m: the message's name in vckpt.proto and ours; at, to: of the field; then .max = and so on. Names
 * that are alike on both sides are given once. */
#define CODEC_FIELD(kind, M, m, name, ...) CODEC_FIELD_AS(kind, M, name, m, name, __VA_ARGS__)
#define CODEC_LIST(kind, M, m, name, ...) CODEC_LIST_AS(kind, M, name, m, name, n##name, __VA_ARGS__)
#define CODEC_FIELD_AS(kind, M, at, m, to, ...) {CODEC_##kind, \
	offsetof(Vckpt__##M, at), offsetof(struct proto_##m, to), CODEC_BYTES_OF(CODEC_##kind, \
	((Vckpt__##M *)0)->at, ((struct proto_##m *)0)->to), __VA_ARGS__}
#define CODEC_LIST_AS(kind, M, at, m, to, n, ...) {CODEC_##kind, \
	offsetof(Vckpt__##M, at), offsetof(struct proto_##m, to), .count = offsetof(struct proto_##m, n), \
	.n_bytes = sizeof ((struct proto_##m *)0)->n, __VA_ARGS__}
/* A message whose fields are members of the same struct. */
#define CODEC_WHOLE(M, at, message_, ...) {CODEC_MESSAGE, offsetof(Vckpt__##M, at), .message = message_, __VA_ARGS__}
/* A number has one size on both sides. */
#define CODEC_BYTES_OF(kind, at, to) \
	(sizeof(to) * sizeof(char[(kind) > CODEC_NEXT || sizeof(at) == sizeof(to) ? 1 : -1]))
#define CODEC_MESSAGE_OF(name, type, table, ...) {.descriptor = &vckpt__##name##__descriptor, .bytes = sizeof(type), \
	.fields = table, .nfields = BASE_COUNT(table), __VA_ARGS__}

/* Hidden: in a shared library the loops over tables would call them by its table of symbols. */
#pragma GCC visibility push(hidden)
int codec_fields_pack(const struct codec_field *f, unsigned n, const void *m, struct proto_arena *arena, void *message);
int codec_fields_unpack(const struct codec_field *f, unsigned n, const void *message, struct proto_arena *arena,
	void *m);
bool codec_message_there(const struct codec_field *f, const void *message); /* of kind MESSAGE */
#pragma GCC visibility pop

/* ---- records ---- */
int codec_encode(const struct codec_message *c, const void *m, struct base_buf *b);
/* *ret_arena: a member of *ret_m. On failure both are zeros. */
int codec_decode(const struct codec_message *c, const void *body, size_t len, void *ret_m, void **ret_arena);

/* Define proto_NAME_encode, _decode and _release of that struct, by NAME_message. */
#define CODEC_RECORD(name, type) CODEC_ENCODE(name, type) CODEC_DECODE(name, type) CODEC_RELEASE(name, type)
#define CODEC_ENCODE(name, type) \
	int proto_##name##_encode(const type *m, struct base_buf *b) \
	{ \
		return codec_encode(&name##_message, m, b); \
	}
#define CODEC_DECODE(name, type) \
	int proto_##name##_decode(const void *body, size_t len, type *ret_m) \
	{ \
		return codec_decode(&name##_message, body, len, ret_m, &ret_m->arena); \
	}
#define CODEC_RELEASE(name, type) \
	void proto_##name##_release(type *m) \
	{ \
		if (!m) \
			return; \
		proto_arena_free(m->arena); \
		memset(m, 0, sizeof *m); \
	}

/* ---- what several messages hold ---- */
extern const struct codec_row proto_ref_row, proto_u32_row, proto_u64_row;
extern const struct codec_message proto_attribute_message, proto_view_header_message, proto_timing_message,
	proto_common_message, proto_common_bare_message;

#endif
