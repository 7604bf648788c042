/* SPDX-License-Identifier: Apache-2.0
 *
 * announcement: incoming/<run>/<attempt>/part.<rank>, what the manifest will say of one rank.
 *
 *   replica, 32 bytes: group 16 | digest 16 */
#include "proto/codec_internal.h"

static const struct codec_row replica_row = CODEC_ROW_OF(struct proto_replica, PROTO_REPLICA_ROW_BYTES,
	CODEC_OCTETS(struct proto_replica, group), CODEC_OCTETS(struct proto_replica, digest));

static const struct codec_field announcement_fields[] = {
	CODEC_FIELD(TEXT, Announcement, announcement, run, .valid = proto_run_valid),
	CODEC_FIELD(TEXT, Announcement, announcement, attempt, .valid = proto_attempt_valid),
	CODEC_FIELD(NUMBER, Announcement, announcement, step, .max = PROTO_STEP_MAX),
	CODEC_FIELD(NUMBER, Announcement, announcement, rank),
	CODEC_FIELD(NUMBER, Announcement, announcement, world, .max = PROTO_WORLD_MAX),
	CODEC_FIELD(TEXT, Announcement, announcement, host, .valid = proto_host_valid),
	CODEC_FIELD(BYTES, Announcement, announcement, layout),
	CODEC_FIELD(ROW, Announcement, announcement, layout_ref, .row = &proto_ref_row,
		.has = offsetof(struct proto_announcement, stores_layout)),
	CODEC_LIST(MESSAGES, Announcement, announcement, headers, .max = PROTO_HEADERS_MAX,
		.message = &proto_view_header_message),
	CODEC_FIELD(ROW, Announcement, announcement, part, .row = &proto_ref_row),
	CODEC_LIST(PACKS, Announcement, announcement, packs),
	CODEC_FIELD(NUMBER, Announcement, announcement, tensors),
	CODEC_FIELD(NUMBER, Announcement, announcement, bytes),
	CODEC_FIELD(NUMBER, Announcement, announcement, new_bytes),
	CODEC_LIST(MESSAGES, Announcement, announcement, attributes, .max = PROTO_ATTRIBUTES_MAX,
		.message = &proto_attribute_message),
	CODEC_LIST(ROWS, Announcement, announcement, replicas, .row = &replica_row, .max = PROTO_REPLICAS_MAX),
	CODEC_LIST(MESSAGES, Announcement, announcement, commons, .max = PROTO_COMMONS_MAX,
		.message = &proto_common_bare_message),
};

static bool announcement_refs_check(const struct proto_announcement *a)
{
	if (!proto_ref_check(&a->part, PROTO_KIND_PART, a->packs, a->npacks))
		return false;
	return !a->stores_layout || (proto_ref_check(&a->layout_ref, PROTO_KIND_LAYOUT, a->packs, a->npacks) &&
		base_digest_equal(&a->layout, &a->layout_ref.digest));
}

static int announcement_check(const void *m)
{
	const struct proto_announcement *a = m;

	if (a->rank >= a->world || !announcement_refs_check(a) ||
		!proto_attributes_check(a->attributes, a->nattributes) ||
		!proto_headers_check(a->headers, a->nheaders, 1, a->packs, a->npacks) ||
		!proto_commons_sorted(a->commons, a->ncommons))
		return -BASE_EFORMAT;
	for (uint32_t i = 1; i < a->nreplicas; i++)
		if (memcmp(a->replicas[i - 1].group, a->replicas[i].group, sizeof a->replicas[i].group) >= 0)
			return -BASE_EFORMAT;
	return proto_packs_check(a->packs, a->npacks, false, false);
}

static const struct codec_message announcement_message = CODEC_MESSAGE_OF(announcement, struct proto_announcement,
	announcement_fields, .check = announcement_check);
CODEC_RECORD(announcement, struct proto_announcement)
