/* SPDX-License-Identifier: Apache-2.0
 *
 * stats: the measures of one rank's save, stats/<run>/<step>.<entry>/<rank>; and the timings that a part has, too. */
#include "proto/codec_internal.h"

static const struct codec_field timing_fields[] = {
	CODEC_FIELD(TEXT, Timing, timing, phase, .text = {1, PROTO_WORD_MAX}),
	CODEC_FIELD(NUMBER, Timing, timing, ns),
	CODEC_FIELD(NUMBER, Timing, timing, bytes),
	CODEC_FIELD(NUMBER, Timing, timing, start_ns),
	CODEC_FIELD(NUMBER, Timing, timing, end_ns),
};
const struct codec_message proto_timing_message = CODEC_MESSAGE_OF(timing, struct proto_timing, timing_fields);

static const struct codec_field stats_fields[] = {
	CODEC_FIELD(NUMBER, Stats, stats, version),
	CODEC_FIELD(TEXT, Stats, stats, run, .valid = proto_run_valid),
	CODEC_FIELD(TEXT, Stats, stats, attempt, .valid = proto_attempt_valid),
	CODEC_FIELD(NUMBER, Stats, stats, step, .max = PROTO_STEP_MAX),
	CODEC_FIELD(NUMBER, Stats, stats, rank),
	CODEC_FIELD(NUMBER, Stats, stats, world, .max = PROTO_WORLD_MAX),
	CODEC_FIELD(TEXT, Stats, stats, host, .valid = proto_host_valid),
	CODEC_LIST(MESSAGES, Stats, stats, timings, .max = PROTO_TIMINGS_MAX, .message = &proto_timing_message),
	CODEC_FIELD(NUMBER, Stats, stats, submitted_ns),
	CODEC_FIELD(NUMBER, Stats, stats, staged_ns),
	CODEC_FIELD(NUMBER, Stats, stats, committed_ns),
	CODEC_FIELD(NUMBER, Stats, stats, bytes_held),
	CODEC_FIELD(NUMBER, Stats, stats, bytes_staged),
	CODEC_FIELD(NUMBER, Stats, stats, bytes_unchanged),
	CODEC_FIELD(NUMBER, Stats, stats, bytes_deduplicated),
	CODEC_FIELD(NUMBER, Stats, stats, bytes_encoded),
	CODEC_FIELD(NUMBER, Stats, stats, bytes_written),
	CODEC_FIELD(NUMBER, Stats, stats, pieces),
	CODEC_FIELD(NUMBER, Stats, stats, pieces_new),
	CODEC_FIELD(NUMBER, Stats, stats, plan_cached),
	CODEC_FIELD(NUMBER, Stats, stats, ring_waits),
	CODEC_FIELD(NUMBER, Stats, stats, entry, .max = PROTO_NONE - 1),
};

static int stats_check(const void *m)
{
	const struct proto_stats *stats = m;

	return stats->rank < stats->world && (stats->version != 1 || stats->entry == 0) ? 0 : -BASE_EFORMAT;
}

static const struct codec_message stats_message = CODEC_MESSAGE_OF(stats, struct proto_stats, stats_fields,
	.check = stats_check);
CODEC_RECORD(stats, struct proto_stats)
