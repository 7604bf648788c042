/* SPDX-License-Identifier: Apache-2.0
 *
 * heartbeat: signs of life (hosts/) and the collector's marks (trash/).
 *
 *   rank that a heartbeat speaks for, 24 bytes: rank u32 | 0 u32 | pid u64 | start time u64 */
#include "proto/codec_internal.h"

#define HEARTBEAT_PERIOD_MAX_MS 600000u
#define TRASH_HEARTBEATS_MAX (UINT32_C(1) << 20)

static bool heartbeat_boot_id_valid(const char *id)
{
	return !id || (strlen(id) <= 36 && id[strspn(id, "0123456789abcdef-")] == 0);
}

static const struct codec_row alive_row = CODEC_ROW_OF(struct proto_alive, PROTO_ALIVE_ROW_BYTES,
	CODEC_NUMBERS(struct proto_alive, rank), CODEC_ZEROS(4),
	CODEC_NUMBERS(struct proto_alive, pid), CODEC_NUMBERS(struct proto_alive, start_time));

static const struct codec_field heartbeat_fields[] = {
	CODEC_FIELD(TEXT, Heartbeat, heartbeat, launch, .valid = proto_launch_valid),
	CODEC_FIELD(TEXT, Heartbeat, heartbeat, host, .valid = proto_host_valid),
	CODEC_FIELD(TEXT, Heartbeat, heartbeat, run, .valid = proto_run_valid),
	CODEC_FIELD(TEXT, Heartbeat, heartbeat, boot_id, .valid = heartbeat_boot_id_valid),
	CODEC_FIELD(NUMBER, Heartbeat, heartbeat, number),
	CODEC_FIELD(NUMBER, Heartbeat, heartbeat, time_ns),
	CODEC_LIST(ROWS, Heartbeat, heartbeat, ranks, .row = &alive_row, .max = PROTO_WORLD_MAX),
	CODEC_FIELD(BYTES_OR_NONE, Heartbeat, heartbeat, nonce),
	CODEC_FIELD(NUMBER, Heartbeat, heartbeat, period_ms, .max = HEARTBEAT_PERIOD_MAX_MS),
};

static int heartbeat_check(const void *m)
{
	const struct proto_heartbeat *heartbeat = m;

	for (uint32_t i = 1; i < heartbeat->nranks; i++)
		if (heartbeat->ranks[i - 1].rank >= heartbeat->ranks[i].rank)
			return -BASE_EFORMAT;
	return 0;
}

static const struct codec_message heartbeat_message = CODEC_MESSAGE_OF(heartbeat, struct proto_heartbeat,
	heartbeat_fields, .check = heartbeat_check);
CODEC_RECORD(heartbeat, struct proto_heartbeat)

static const struct codec_field trash_fields[] = {
	CODEC_FIELD(TEXT, Trash, trash, name, .text = {1, PROTO_FILE_NAME_MAX}),
	CODEC_FIELD(NUMBER, Trash, trash, time_ns),
	CODEC_LIST(TEXTS, Trash, trash, heartbeats, .max = TRASH_HEARTBEATS_MAX, .text = {1, PROTO_FILE_NAME_MAX}),
};
static const struct codec_message trash_message = CODEC_MESSAGE_OF(trash, struct proto_trash, trash_fields);
CODEC_RECORD(trash, struct proto_trash)
