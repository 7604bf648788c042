/* SPDX-License-Identifier: Apache-2.0
 *
 * part: a part object: which chunks hold a writer's rows, its blobs, the packs that these are in (docs/format/part.md).
 *
 *   chunk, 88 bytes: first tensor u32 | last tensor u32 | rows u32 | 0 u32 | reference
 *   sample, 36 bytes: tensor u32 | group 16 | hash 16 */
#include "proto/codec_internal.h"

#define PART_BLOBS_MAX (UINT32_C(1) << 22)

static const struct codec_row chunk_row = CODEC_ROW_OF(struct proto_chunk, PROTO_CHUNK_ROW_BYTES,
	CODEC_NUMBERS(struct proto_chunk, first_tensor), CODEC_NUMBERS(struct proto_chunk, last_tensor),
	CODEC_NUMBERS(struct proto_chunk, nrows), CODEC_ZEROS(4), CODEC_REF_COLUMNS(struct proto_chunk, ref.));

static const struct codec_row sample_row = CODEC_ROW_OF(struct proto_sample, PROTO_SAMPLE_ROW_BYTES,
	CODEC_NUMBERS(struct proto_sample, tensor), CODEC_OCTETS(struct proto_sample, group),
	CODEC_OCTETS(struct proto_sample, hash));

static const struct codec_field blob_fields[] = {
	CODEC_FIELD(TEXT, Blob, blob, name, .text = {1, PROTO_NAME_MAX}),
	CODEC_FIELD(BOOL, Blob, blob, per_rank),
	CODEC_FIELD(NUMBER, Blob, blob, len),
	CODEC_FIELD(ROW, Blob, blob, ref, .row = &proto_ref_row),
};

/* A blob of no bytes has only a digest. */
static int blob_pack(const void *m, struct proto_arena *arena, void *message)
{
	Vckpt__Blob *s = message;

	(void)m;
	(void)arena;
	if (s->len == 0)
		memset(s->ref.data + BASE_DIGEST_BYTES, 0, PROTO_REF_BYTES - BASE_DIGEST_BYTES);
	return 0;
}

static int blob_unpack(const void *message, struct proto_arena *arena, void *m)
{
	static const uint8_t none[PROTO_REF_BYTES - BASE_DIGEST_BYTES];
	const Vckpt__Blob *s = message;

	(void)arena;
	(void)m;
	return s->len || memcmp(s->ref.data + BASE_DIGEST_BYTES, none, sizeof none) == 0 ? 0 : -BASE_EFORMAT;
}

static const struct codec_message blob_message = CODEC_MESSAGE_OF(blob, struct proto_blob, blob_fields,
	.pack = blob_pack, .unpack = blob_unpack);

static const struct codec_field part_fields[] = {
	CODEC_FIELD(NUMBER, Part, part, rank),
	CODEC_FIELD(NUMBER, Part, part, world, .max = PROTO_WORLD_MAX),
	CODEC_FIELD(TEXT, Part, part, host, .valid = proto_host_valid),
	CODEC_FIELD(BYTES, Part, part, layout),
	CODEC_LIST(PACKS, Part, part, packs),
	CODEC_LIST(ROWS, Part, part, chunks, .row = &chunk_row, .max = PROTO_LAYOUT_MAX_TENSORS),
	CODEC_LIST(MESSAGES, Part, part, blobs, .max = PART_BLOBS_MAX, .message = &blob_message),
	CODEC_LIST(MESSAGES, Part, part, timings, .max = PROTO_TIMINGS_MAX, .message = &proto_timing_message),
	CODEC_LIST(ROWS, Part, part, samples, .row = &sample_row, .max = PROTO_LAYOUT_MAX_TENSORS),
};

static bool part_chunks_check(const struct proto_part *part)
{
	for (uint32_t i = 0; i < part->nchunks; i++) {
		const struct proto_chunk *c = &part->chunks[i];

		if (c->first_tensor > c->last_tensor || c->last_tensor >= PROTO_LAYOUT_MAX_TENSORS)
			return false;
		if (c->nrows == 0 || c->nrows - 1 > c->last_tensor - c->first_tensor)
			return false;
		if (i > 0 && c->first_tensor <= part->chunks[i - 1].last_tensor)
			return false;
		if (!proto_ref_check(&c->ref, PROTO_KIND_CHUNK, part->packs, part->npacks))
			return false;
	}
	return true;
}

static bool part_blobs_check(const struct proto_part *part)
{
	uint64_t all = 0;
	int c;

	for (uint32_t i = 0; i < part->nblobs; i++) {
		const struct proto_blob *b = &part->blobs[i];
		size_t slashes = proto_name_slashes(b->name);

		if (slashes >= STORE_BLOB_PARTS_MAX)
			return false;
		all += slashes;
		if (b->len && (b->ref.raw_len != b->len ||
			!proto_ref_check(&b->ref, PROTO_KIND_BLOB, part->packs, part->npacks)))
			return false;
		c = i ? (int)part->blobs[i - 1].per_rank - (int)b->per_rank : -1;
		if (c > 0 || (c == 0 && strcmp(part->blobs[i - 1].name, b->name) >= 0))
			return false;
	}
	return proto_blob_slashes_valid(all, part->nblobs);
}

static bool part_samples_check(const struct proto_part *part)
{
	for (uint32_t i = 0; i < part->nsamples; i++) {
		const struct proto_sample *s = &part->samples[i];

		if (s->tensor >= PROTO_LAYOUT_MAX_TENSORS || (i > 0 && s->tensor < s[-1].tensor))
			return false;
		if (i > 0 && s->tensor == s[-1].tensor && memcmp(s[-1].group, s->group, sizeof s->group) >= 0)
			return false;
	}
	return true;
}

static int part_check(const void *m)
{
	const struct proto_part *part = m;

	if (part->rank >= part->world || !part_chunks_check(part) || !part_blobs_check(part) ||
		!part_samples_check(part))
		return -BASE_EFORMAT;
	return proto_packs_check(part->packs, part->npacks, false, true);
}

static const struct codec_message part_message = CODEC_MESSAGE_OF(part, struct proto_part, part_fields,
	.check = part_check);
CODEC_RECORD(part, struct proto_part)
