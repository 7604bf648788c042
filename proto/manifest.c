/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest: everything that a step consists of (docs/format/manifest.md).
 *
 *   rank, 96 bytes: rank u32 | layout u32 | host u32 | first of map u32 | packs u32 | 0 u32 | reference to its part
 *
 * The numbers of every table are checked against the table that they point into; the ranks' parts of `map` follow each
 * other without gaps. References name packs by their number in the manifest's own table. */
#include "proto/proto_internal.h"

#define MANIFEST_LAYOUTS_MAX (UINT32_C(1) << 16)
#define MANIFEST_RANGE_ROW_BYTES 8u

_Static_assert(sizeof(struct proto_manifest_pack) == sizeof(struct proto_pack_use) &&
		offsetof(struct proto_manifest_pack, size) == offsetof(struct proto_pack_use, size) &&
		offsetof(struct proto_manifest_pack, live_bytes) == offsetof(struct proto_pack_use, live_bytes),
	"one table of packs for all records");

static const struct proto_pack_use *manifest_packs(const struct proto_manifest *m)
{
	return (const struct proto_pack_use *)m->packs;
}

static bool manifest_ref_check(const struct proto_manifest *m, const struct proto_ref *ref, unsigned kind)
{
	return ref->pack < m->npacks && proto_ref_check(ref, kind, m->npacks, m->packs[ref->pack].size);
}

static bool manifest_layouts_check(const struct proto_manifest *m)
{
	if (m->nlayouts == 0 || m->nlayouts > MANIFEST_LAYOUTS_MAX)
		return false;
	for (uint32_t i = 0; i < m->nlayouts; i++) {
		const struct proto_manifest_layout *l = &m->layouts[i];

		if (!base_digest_equal(&l->digest, &l->ref.digest) ||
			!manifest_ref_check(m, &l->ref, PROTO_KIND_LAYOUT))
			return false;
		if (i > 0 && base_digest_compare(&m->layouts[i - 1].digest, &l->digest) >= 0)
			return false;
	}
	return true;
}

/* Marks what the ranks use: each host and each pack has to be named by one. */
static bool manifest_ranks_check(const struct proto_manifest *m, uint8_t *hosts, uint8_t *packs)
{
	uint32_t at = 0;

	for (uint32_t i = 0; i < m->nranks; i++) {
		const struct proto_manifest_rank *k = &m->ranks[i];

		if (k->rank != i || k->layout >= m->nlayouts || k->host >= m->nhosts)
			return false;
		if (k->first_map != at || k->npacks > m->nmap - at || !manifest_ref_check(m, &k->part, PROTO_KIND_PART))
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
	for (uint32_t i = 0; i < m->nhosts; i++)
		if (!proto_host_valid(m->hosts[i]) || (i > 0 && strcmp(m->hosts[i - 1], m->hosts[i]) >= 0))
			return -BASE_EFORMAT;
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
	if (m->nblobs > PROTO_BLOB_NAMES_MAX || (m->nblobs && !m->names_blobs))
		return false;
	for (uint32_t i = 0; i < m->nblobs; i++) {
		const struct proto_blob_name *b = &m->blobs[i], *last = i ? b - 1 : NULL;
		int c = last ? (int)last->per_rank - (int)b->per_rank : -1;

		if (!proto_text_valid(b->name, 1, PROTO_NAME_MAX) || !manifest_ranges_check(m, b) || c > 0 ||
			(c == 0 && strcmp(last->name, b->name) >= 0))
			return false;
	}
	return true;
}

static int manifest_check(const struct proto_manifest *m)
{
	struct proto_attempt_number a;
	int r;

	if (!proto_run_valid(m->run) || !proto_attempt_parse(m->attempt, &a) || m->step > PROTO_STEP_MAX)
		return -BASE_EFORMAT;
	if (m->world == 0 || m->world > PROTO_WORLD_MAX || m->nranks != m->world ||
		!proto_attributes_check(m->attributes, m->nattributes))
		return -BASE_EFORMAT;
	r = proto_packs_check(manifest_packs(m), m->npacks, true, false);
	if (r < 0)
		return r;
	if (!manifest_layouts_check(m) || !manifest_blobs_check(m) ||
		!proto_headers_check(m->headers, m->nheaders, m->nlayouts, manifest_packs(m), m->npacks))
		return -BASE_EFORMAT;
	return manifest_tables_check(m);
}

static int manifest_rows_put(const struct proto_manifest *m, struct base_buf *layouts, struct base_buf *ranks,
	struct base_buf *map)
{
	for (uint32_t i = 0; i < m->nlayouts; i++)
		proto_ref_put(layouts, &m->layouts[i].ref);
	for (uint32_t i = 0; i < m->nranks; i++) {
		const struct proto_manifest_rank *k = &m->ranks[i];

		base_buf_put32(ranks, k->rank);
		base_buf_put32(ranks, k->layout);
		base_buf_put32(ranks, k->host);
		base_buf_put32(ranks, k->first_map);
		base_buf_put32(ranks, k->npacks);
		base_buf_put32(ranks, 0);
		proto_ref_put(ranks, &k->part);
	}
	for (uint32_t i = 0; i < m->nmap; i++)
		base_buf_put32(map, m->map[i]);
	return layouts->error || ranks->error || map->error ? -ENOMEM : 0;
}

static int manifest_blobs_pack(const struct proto_manifest *m, struct proto_arena *arena, Vckpt__BlobNames **ret_names)
{
	Vckpt__BlobNames *names = proto_arena_array(arena, 1, sizeof *names);
	Vckpt__BlobName *all = proto_arena_array(arena, m->nblobs, sizeof *all);

	if (!m->names_blobs)
		return 0;
	if (!names || !all)
		return proto_no_memory(arena);
	vckpt__blob_names__init(names);
	names->names = proto_arena_array(arena, m->nblobs, sizeof *names->names);
	if (!names->names)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < m->nblobs; i++) {
		const struct proto_blob_name *b = &m->blobs[i];
		uint8_t *rows = proto_arena_array(arena, b->nranges, MANIFEST_RANGE_ROW_BYTES);

		if (!rows)
			return proto_no_memory(arena);
		for (uint32_t k = 0; k < b->nranges; k++) {
			base_put32(rows + (size_t)k * MANIFEST_RANGE_ROW_BYTES, b->ranges[k].first);
			base_put32(rows + (size_t)k * MANIFEST_RANGE_ROW_BYTES + 4, b->ranges[k].n);
		}
		vckpt__blob_name__init(&all[i]);
		all[i].name = (char *)b->name;
		all[i].per_rank = b->per_rank;
		all[i].ranks = (ProtobufCBinaryData){(size_t)b->nranges * MANIFEST_RANGE_ROW_BYTES, rows};
		names->names[i] = &all[i];
	}
	names->n_names = m->nblobs;
	*ret_names = names;
	return 0;
}

static int manifest_pack(const struct proto_manifest *m, struct proto_arena *arena, struct base_buf *b)
{
	base_cleanup_buf struct base_buf layouts = BASE_BUF_INIT, ranks = BASE_BUF_INIT, map = BASE_BUF_INIT;
	Vckpt__Manifest s = VCKPT__MANIFEST__INIT;
	int r = proto_packs_pack(manifest_packs(m), m->npacks, arena, &s.packs);

	if (r == 0)
		r = proto_headers_pack(m->headers, m->nheaders, arena, &s.n_headers, &s.headers);
	if (r == 0)
		r = proto_attributes_pack(m->attributes, m->nattributes, arena, &s.n_attributes, &s.attributes);
	if (r == 0)
		r = manifest_blobs_pack(m, arena, &s.blobs);
	if (r == 0)
		r = manifest_rows_put(m, &layouts, &ranks, &map);
	if (r < 0)
		return r;
	s.version = PROTO_VERSION;
	s.run = (char *)m->run;
	s.attempt = (char *)m->attempt;
	s.step = m->step;
	s.world = m->world;
	s.layouts = proto_bytes(&layouts);
	s.n_hosts = m->nhosts;
	s.hosts = (char **)m->hosts;
	s.ranks = proto_bytes(&ranks);
	s.map = proto_bytes(&map);
	s.tensors = m->tensors;
	s.bytes = m->bytes;
	s.new_bytes = m->new_bytes;
	return proto_pack(&s, b);
}

int proto_manifest_encode(const struct proto_manifest *m, struct base_buf *b)
{
	struct proto_arena *arena;
	int r = manifest_check(m);

	if (r < 0)
		return r;
	arena = proto_arena_new(UINT64_MAX);
	if (!arena)
		return -ENOMEM;
	r = manifest_pack(m, arena, b);
	proto_arena_free(arena);
	return r;
}

static int manifest_layouts_get(const Vckpt__Manifest *s, struct proto_arena *arena, struct proto_manifest *m)
{
	struct proto_manifest_layout *layouts;
	uint32_t n;

	if (!proto_rows(&s->layouts, PROTO_REF_BYTES, MANIFEST_LAYOUTS_MAX, &n))
		return -BASE_EFORMAT;
	layouts = proto_arena_array(arena, n, sizeof *layouts);
	if (!layouts)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		if (!proto_ref_get(s->layouts.data + (size_t)i * PROTO_REF_BYTES, &layouts[i].ref))
			return -BASE_EFORMAT;
		layouts[i].digest = layouts[i].ref.digest;
	}
	m->layouts = layouts;
	m->nlayouts = n;
	return 0;
}

static int manifest_ranks_get(const Vckpt__Manifest *s, struct proto_arena *arena, struct proto_manifest *m)
{
	struct proto_manifest_rank *ranks;
	uint32_t n;

	if (!proto_rows(&s->ranks, PROTO_RANK_ROW_BYTES, PROTO_WORLD_MAX, &n))
		return -BASE_EFORMAT;
	ranks = proto_arena_array(arena, n, sizeof *ranks);
	if (!ranks)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = s->ranks.data + (size_t)i * PROTO_RANK_ROW_BYTES;

		ranks[i].rank = base_get32(row);
		ranks[i].layout = base_get32(row + 4);
		ranks[i].host = base_get32(row + 8);
		ranks[i].first_map = base_get32(row + 12);
		ranks[i].npacks = base_get32(row + 16);
		if (base_get32(row + 20) != 0 || !proto_ref_get(row + 24, &ranks[i].part))
			return -BASE_EFORMAT;
	}
	m->ranks = ranks;
	m->nranks = n;
	return 0;
}

static int manifest_blobs_get(const Vckpt__BlobNames *s, struct proto_arena *arena, struct proto_manifest *m)
{
	struct proto_blob_name *blobs;

	if (!s)
		return 0;
	if (s->n_names > PROTO_BLOB_NAMES_MAX)
		return -BASE_EFORMAT;
	blobs = proto_arena_array(arena, s->n_names, sizeof *blobs);
	if (!blobs)
		return proto_no_memory(arena);
	for (size_t i = 0; i < s->n_names; i++) {
		const Vckpt__BlobName *from = s->names[i];
		struct proto_rank_range *ranges;

		blobs[i] = (struct proto_blob_name){.name = from->name, .per_rank = from->per_rank};
		if (!proto_rows(&from->ranks, MANIFEST_RANGE_ROW_BYTES, PROTO_WORLD_MAX, &blobs[i].nranges))
			return -BASE_EFORMAT;
		blobs[i].ranges = ranges = proto_arena_array(arena, blobs[i].nranges, sizeof *ranges);
		if (!ranges)
			return proto_no_memory(arena);
		for (uint32_t k = 0; k < blobs[i].nranges; k++)
			ranges[k] = (struct proto_rank_range){
				base_get32(from->ranks.data + (size_t)k * MANIFEST_RANGE_ROW_BYTES),
				base_get32(from->ranks.data + (size_t)k * MANIFEST_RANGE_ROW_BYTES + 4)};
	}
	m->names_blobs = true;
	m->blobs = blobs;
	m->nblobs = (uint32_t)s->n_names;
	return 0;
}

static int manifest_get(const Vckpt__Manifest *s, struct proto_arena *arena, struct proto_manifest *m)
{
	int r;

	m->run = s->run;
	m->attempt = s->attempt;
	m->step = s->step;
	m->world = s->world;
	m->tensors = s->tensors;
	m->bytes = s->bytes;
	m->new_bytes = s->new_bytes;
	if (s->n_hosts > PROTO_WORLD_MAX)
		return -BASE_EFORMAT;
	m->hosts = (const char *const *)s->hosts;
	m->nhosts = (uint32_t)s->n_hosts;
	r = proto_packs_unpack(s->packs, arena, (const struct proto_pack_use **)&m->packs, &m->npacks);
	if (r == 0)
		r = proto_headers_unpack(s->headers, s->n_headers, arena, &m->headers, &m->nheaders);
	if (r == 0)
		r = proto_attributes_unpack(s->attributes, s->n_attributes, arena, &m->attributes, &m->nattributes);
	if (r == 0)
		r = manifest_layouts_get(s, arena, m);
	if (r == 0)
		r = manifest_ranks_get(s, arena, m);
	if (r == 0)
		r = proto_u32_table(&s->map, arena, &m->map, &m->nmap);
	if (r == 0)
		r = manifest_blobs_get(s->blobs, arena, m);
	return r < 0 ? r : manifest_check(m);
}

int proto_manifest_decode(const void *body, size_t len, struct proto_manifest *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Manifest *s;
	int r = proto_unpack(&vckpt__manifest__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	r = manifest_get(s, arena, ret_m);
	if (r < 0)
		proto_manifest_release(ret_m);
	return r;
}

void proto_manifest_release(struct proto_manifest *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
