/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest: everything that a step consists of (docs/format/manifest.md).
 *
 *   rank, 96 bytes: rank u32 | layout u32 | host u32 | first of map u32 | packs u32 | 0 u32 | reference to its part
 *
 * The numbers of every table are checked against the table that they point into; the ranks' parts of `map` follow each
 * other without gaps. References name packs by their number in the manifest's own table. */
#include "proto/codec_internal.h"

#define MANIFEST_LAYOUTS_MAX (UINT32_C(1) << 16)
#define MANIFEST_RANGE_ROW_BYTES 8u

static const struct codec_row layout_row = CODEC_ROW_OF(struct proto_manifest_layout, PROTO_REF_BYTES,
	CODEC_REF_COLUMNS(struct proto_manifest_layout, ref.));

static const struct codec_row rank_row = CODEC_ROW_OF(struct proto_manifest_rank, PROTO_RANK_ROW_BYTES,
	CODEC_NUMBERS(struct proto_manifest_rank, rank), CODEC_NUMBERS(struct proto_manifest_rank, layout),
	CODEC_NUMBERS(struct proto_manifest_rank, host), CODEC_NUMBERS(struct proto_manifest_rank, first_map),
	CODEC_NUMBERS(struct proto_manifest_rank, npacks), CODEC_ZEROS(4),
	CODEC_REF_COLUMNS(struct proto_manifest_rank, part.));

static const struct codec_row range_row = CODEC_ROW_OF(struct proto_rank_range, MANIFEST_RANGE_ROW_BYTES,
	CODEC_NUMBERS(struct proto_rank_range, first), CODEC_NUMBERS(struct proto_rank_range, n));

static const struct codec_field blob_name_fields[] = {
	CODEC_FIELD(TEXT, BlobName, blob_name, name, .text = {1, PROTO_NAME_MAX}),
	CODEC_FIELD(BOOL, BlobName, blob_name, per_rank),
	CODEC_LIST_AS(ROWS, BlobName, ranks, blob_name, ranges, nranges, .row = &range_row, .max = PROTO_WORLD_MAX),
};
static const struct codec_message blob_name_message = CODEC_MESSAGE_OF(blob_name, struct proto_blob_name,
	blob_name_fields);

static const struct codec_field blob_names_fields[] = {
	CODEC_LIST_AS(MESSAGES, BlobNames, names, manifest, blobs, nblobs, .max = PROTO_BLOB_NAMES_MAX,
		.message = &blob_name_message),
};
static const struct codec_message blob_names_message = CODEC_MESSAGE_OF(blob_names, struct proto_manifest,
	blob_names_fields);

static const struct codec_field manifest_fields[] = {
	CODEC_FIELD(TEXT, Manifest, manifest, run, .valid = proto_run_valid),
	CODEC_FIELD(TEXT, Manifest, manifest, attempt, .valid = proto_attempt_valid),
	CODEC_FIELD(NUMBER, Manifest, manifest, step, .max = PROTO_STEP_MAX),
	CODEC_FIELD(NUMBER, Manifest, manifest, world, .max = PROTO_WORLD_MAX),
	CODEC_LIST(MESSAGES, Manifest, manifest, attributes, .max = PROTO_ATTRIBUTES_MAX,
		.message = &proto_attribute_message),
	CODEC_LIST(ROWS, Manifest, manifest, layouts, .row = &layout_row, .max = MANIFEST_LAYOUTS_MAX),
	CODEC_LIST(MESSAGES, Manifest, manifest, headers, .max = PROTO_HEADERS_MAX,
		.message = &proto_view_header_message),
	CODEC_LIST(TEXTS, Manifest, manifest, hosts, .max = PROTO_WORLD_MAX, .valid = proto_host_valid, .sorted = true),
	CODEC_LIST(ROWS, Manifest, manifest, ranks, .row = &rank_row, .max = PROTO_WORLD_MAX),
	CODEC_LIST(ROWS, Manifest, manifest, map, .row = &proto_u32_row),
	CODEC_LIST(PACKS, Manifest, manifest, packs),
	CODEC_FIELD(NUMBER, Manifest, manifest, tensors),
	CODEC_FIELD(NUMBER, Manifest, manifest, bytes),
	CODEC_FIELD(NUMBER, Manifest, manifest, new_bytes),
	CODEC_WHOLE(Manifest, blobs, &blob_names_message, .has = offsetof(struct proto_manifest, names_blobs)),
	CODEC_LIST(TEXTS, Manifest, manifest, thinned, .max = PROTO_THINNED_MAX, .valid = proto_component_valid,
		.sorted = true),
};

static bool manifest_layouts_check(const struct proto_manifest *m)
{
	for (uint32_t i = 0; i < m->nlayouts; i++) {
		const struct proto_manifest_layout *l = &m->layouts[i];

		if (!base_digest_equal(&l->digest, &l->ref.digest) ||
			!proto_ref_check(&l->ref, PROTO_KIND_LAYOUT, m->packs, m->npacks))
			return false;
		if (i > 0 && base_digest_compare(&m->layouts[i - 1].digest, &l->digest) >= 0)
			return false;
	}
	return m->nlayouts > 0;
}

/* Marks what the ranks use: each host and each pack has to be named by one. */
static bool manifest_ranks_check(const struct proto_manifest *m, uint8_t *hosts, uint8_t *packs)
{
	uint32_t at = 0;

	for (uint32_t i = 0; i < m->nranks; i++) {
		const struct proto_manifest_rank *k = &m->ranks[i];

		if (k->rank != i || k->layout >= m->nlayouts || k->host >= m->nhosts)
			return false;
		if (k->first_map != at || k->npacks > m->nmap - at ||
			!proto_ref_check(&k->part, PROTO_KIND_PART, m->packs, m->npacks))
			return false;
		at += k->npacks;
		hosts[k->host] = 1;
	}
	if (at != m->nmap)
		return false;
	for (uint32_t i = 0; i < m->nmap; i++) {
		if (m->map[i] >= m->npacks)
			return false;
		packs[m->map[i]] = 1;
	}
	return (m->nhosts == 0 || memchr(hosts, 0, m->nhosts) == NULL) &&
		(m->npacks == 0 || memchr(packs, 0, m->npacks) == NULL);
}

static int manifest_tables_check(const struct proto_manifest *m)
{
	base_cleanup_free uint8_t *hosts = calloc((size_t)m->nhosts + 1, 1);
	base_cleanup_free uint8_t *packs = calloc((size_t)m->npacks + 1, 1);

	if (!hosts || !packs)
		return -ENOMEM;
	return manifest_ranks_check(m, hosts, packs) ? 0 : -BASE_EFORMAT;
}

/* Of one name: ranges of ranks of the world, ascending, none touching the next. */
static bool manifest_ranges_check(const struct proto_manifest *m, const struct proto_blob_name *b)
{
	uint64_t end = 0;

	for (uint32_t i = 0; i < b->nranges; i++) {
		const struct proto_rank_range *k = &b->ranges[i];

		if (k->n == 0 || k->first >= m->world || k->n > m->world - k->first || (i > 0 && k->first <= end))
			return false;
		end = (uint64_t)k->first + k->n;
	}
	return b->nranges > 0 && (b->per_rank || (b->nranges == 1 && b->ranges[0].n == 1));
}

static bool manifest_blobs_check(const struct proto_manifest *m)
{
	if (m->nblobs && !m->names_blobs)
		return false;
	for (uint32_t i = 0; i < m->nblobs; i++) {
		const struct proto_blob_name *b = &m->blobs[i], *last = i ? b - 1 : NULL;
		int c = last ? (int)last->per_rank - (int)b->per_rank : -1;

		if (!manifest_ranges_check(m, b) || c > 0 || (c == 0 && strcmp(last->name, b->name) >= 0))
			return false;
	}
	return true;
}

/* A layout's digest is that of its reference. */
static int manifest_unpack(const void *message, struct proto_arena *arena, void *m)
{
	struct proto_manifest *manifest = m;
	struct proto_manifest_layout *layouts = (struct proto_manifest_layout *)(uintptr_t)manifest->layouts;

	(void)message;
	(void)arena;
	for (uint32_t i = 0; i < manifest->nlayouts; i++)
		layouts[i].digest = layouts[i].ref.digest;
	return 0;
}

static int manifest_check(const void *m)
{
	const struct proto_manifest *manifest = m;
	int r;

	if (manifest->world == 0 || manifest->nranks != manifest->world ||
		!proto_attributes_check(manifest->attributes, manifest->nattributes))
		return -BASE_EFORMAT;
	r = proto_packs_check(manifest->packs, manifest->npacks, true, false);
	if (r < 0)
		return r;
	if (!manifest_layouts_check(manifest) || !manifest_blobs_check(manifest) ||
		!proto_headers_check(manifest->headers, manifest->nheaders, manifest->nlayouts, manifest->packs,
			manifest->npacks))
		return -BASE_EFORMAT;
	return manifest_tables_check(manifest);
}

static const struct codec_message manifest_message = CODEC_MESSAGE_OF(manifest, struct proto_manifest, manifest_fields,
	.unpack = manifest_unpack, .check = manifest_check);
CODEC_RECORD(manifest, struct proto_manifest)
