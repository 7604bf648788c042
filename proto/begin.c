/* SPDX-License-Identifier: Apache-2.0
 *
 * begin: what opens an attempt, and the commits whose data it may use: incoming/<run>/<attempt>/begin and base.<n>. */
#include "proto/codec_internal.h"

#define BEGIN_BASES_MAX 4096u

static const struct codec_field base_fields[] = {
	CODEC_FIELD(TEXT, Base, base, run, .valid = proto_run_valid),
	CODEC_FIELD(NUMBER, Base, base, entry, .max = PROTO_NONE - 1),
	CODEC_FIELD(BYTES, Base, base, manifest),
};
static const struct codec_message begin_base = CODEC_MESSAGE_OF(base, struct proto_base, base_fields);

/* An import leaves it out. */
static bool begin_host_valid(const char *host)
{
	return !host || proto_host_valid(host);
}

static const struct codec_field begin_fields[] = {
	CODEC_FIELD(TEXT, Begin, begin, run, .valid = proto_run_valid),
	CODEC_FIELD(TEXT, Begin, begin, attempt, .valid = proto_attempt_valid),
	CODEC_FIELD(NUMBER, Begin, begin, step, .max = PROTO_STEP_MAX),
	CODEC_FIELD(NUMBER, Begin, begin, world, .max = PROTO_WORLD_MAX),
	CODEC_FIELD(BOOL, Begin, begin, alone),
	CODEC_FIELD(NUMBER, Begin, begin, position),
	CODEC_FIELD(BYTES_OR_NONE, Begin, begin, mesh),
	CODEC_LIST(MESSAGES, Begin, begin, bases, .max = BEGIN_BASES_MAX, .message = &begin_base),
	CODEC_FIELD(BOOL, Begin, begin, replace),
	CODEC_FIELD(NEXT, Begin, begin, replaces),
	CODEC_FIELD(NUMBER, Begin, begin, rank),
	CODEC_FIELD(TEXT, Begin, begin, host, .valid = begin_host_valid),
	CODEC_FIELD(NUMBER, Begin, begin, time_ns),
	CODEC_LIST(MESSAGES, Begin, begin, commons, .max = PROTO_COMMONS_MAX, .message = &proto_common_message),
};

/* Without `replace` an encoder may leave `replaces` as it is. */
static int begin_pack(const void *m, struct proto_arena *arena, void *message)
{
	const struct proto_begin *begin = m;
	Vckpt__Begin *s = message;

	(void)arena;
	if (!begin->replace)
		s->replaces = 0;
	return 0;
}

static int begin_unpack(const void *message, struct proto_arena *arena, void *m)
{
	const struct proto_begin *begin = m;

	(void)message;
	(void)arena;
	return begin->replace || begin->replaces == PROTO_NONE ? 0 : -BASE_EFORMAT;
}

static int begin_check(const void *m)
{
	const struct proto_begin *begin = m;

	if (begin->alone && begin->world != 1)
		return -BASE_EFORMAT;
	return begin->rank < begin->world && proto_commons_sorted(begin->commons, begin->ncommons) ? 0 : -BASE_EFORMAT;
}

static const struct codec_message begin_message = CODEC_MESSAGE_OF(begin, struct proto_begin, begin_fields,
	.pack = begin_pack, .unpack = begin_unpack, .check = begin_check);
CODEC_RECORD(begin, struct proto_begin)

static const struct codec_field base_record_fields[] = {
	CODEC_FIELD_AS(MESSAGE, BaseRecord, commit, base_record, base, .message = &begin_base),
};
static const struct codec_message base_message = CODEC_MESSAGE_OF(base_record, struct proto_base_record,
	base_record_fields);
CODEC_RECORD(base, struct proto_base_record)
