/* SPDX-License-Identifier: Apache-2.0
 *
 * common: what ranks of a job declare to be equal on all of them, in `begin` and in announcements.
 *
 *   value, 16 bytes: the first of its SHA-256, in the order of the names */
#include "proto/codec_internal.h"

static const struct codec_row value_row = CODEC_ROW_OF(uint8_t[PROTO_COMMON_ROW_BYTES], PROTO_COMMON_ROW_BYTES,
	{CODEC_COLUMN_BYTES, 0, PROTO_COMMON_ROW_BYTES});

static const struct codec_field common_fields[] = {
	CODEC_FIELD(TEXT, Common, common, group, .text = {1, PROTO_COMMON_GROUP_MAX}),
	CODEC_FIELD(BYTES, Common, common, digest),
	CODEC_LIST_AS(TEXTS, Common, names, common, names, nnames, .text = {1, PROTO_NAME_MAX}, .sorted = true),
	CODEC_LIST_AS(ROWS, Common, digests, common, digests, nnames, .row = &value_row, .paired = true),
};

const struct codec_message proto_common_message = CODEC_MESSAGE_OF(common, struct proto_common, common_fields);

/* Announcements leave the names out. */
static int common_bare_pack(const void *m, struct proto_arena *arena, void *message)
{
	Vckpt__Common *s = message;

	(void)m;
	(void)arena;
	s->n_names = 0;
	s->digests = (ProtobufCBinaryData){0};
	return 0;
}

const struct codec_message proto_common_bare_message = CODEC_MESSAGE_OF(common, struct proto_common, common_fields,
	.pack = common_bare_pack);

bool proto_commons_sorted(const struct proto_common *c, uint32_t n)
{
	for (uint32_t i = 1; i < n; i++)
		if (strcmp(c[i - 1].group, c[i].group) >= 0)
			return false;
	return true;
}
