/* SPDX-License-Identifier: Apache-2.0
 *
 * damage: notes of what verify found damaged in a pack (damaged/).
 *
 *   range, 16 bytes: offset u64 | length u64; one of 0, 0 alone means the whole pack */
#include "proto/codec_internal.h"

static const struct codec_row range_row = CODEC_ROW_OF(struct proto_range, PROTO_RANGE_ROW_BYTES,
	CODEC_NUMBERS(struct proto_range, offset), CODEC_NUMBERS(struct proto_range, len));

static const struct codec_field damage_fields[] = {
	CODEC_FIELD(TEXT, Damage, damage, pack, .text = {1, PROTO_FILE_NAME_MAX}),
	CODEC_LIST(ROWS, Damage, damage, ranges, .row = &range_row, .max = PROTO_RANGES_MAX),
};

static bool damage_whole(const struct proto_damage *m)
{
	return m->nranges == 1 && m->ranges[0].offset == 0 && m->ranges[0].len == 0;
}

static int damage_check(const void *m)
{
	const struct proto_damage *damage = m;
	uint64_t end = 0;

	for (uint32_t i = 0; i < damage->nranges && !damage_whole(damage); i++) {
		const struct proto_range *range = &damage->ranges[i];

		if (range->len == 0 || (i && range->offset <= end) ||
			base_add_overflows(range->offset, range->len, &end) || end > PROTO_FILE_MAX_BYTES)
			return -BASE_EFORMAT;
	}
	return damage->nranges ? 0 : -BASE_EFORMAT;
}

static const struct codec_message damage_message = CODEC_MESSAGE_OF(damage, struct proto_damage, damage_fields,
	.check = damage_check);
CODEC_RECORD(damage, struct proto_damage)
