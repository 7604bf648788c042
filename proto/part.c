/* SPDX-License-Identifier: Apache-2.0
 *
 * part: a part object: which chunks hold a writer's rows, its blobs, the packs that they lie in (docs/format/part.md).
 *
 *   chunk, 88 bytes: first tensor u32 | last tensor u32 | rows u32 | 0 u32 | reference
 *   sample, 36 bytes: tensor u32 | group 16 | hash 16 */
#include "proto/proto_internal.h"

#define PART_BLOBS_MAX (UINT32_C(1) << 22)

static bool part_ref_check(const struct proto_part *m, const struct proto_ref *ref, unsigned kind)
{
	return ref->pack < m->npacks && proto_ref_check(ref, kind, m->npacks, m->packs[ref->pack].size);
}

static bool part_chunks_check(const struct proto_part *m)
{
	for (uint32_t i = 0; i < m->nchunks; i++) {
		const struct proto_chunk *c = &m->chunks[i];

		if (c->first_tensor > c->last_tensor || c->last_tensor >= PROTO_LAYOUT_MAX_TENSORS)
			return false;
		if (c->nrows == 0 || c->nrows - 1 > c->last_tensor - c->first_tensor)
			return false;
		if (i > 0 && c->first_tensor <= m->chunks[i - 1].last_tensor)
			return false;
		if (!part_ref_check(m, &c->ref, PROTO_KIND_CHUNK))
			return false;
	}
	return true;
}

/* A blob of no bytes has only a digest. */
static bool part_empty_ref(const struct proto_ref *ref)
{
	return ref->offset == 0 && ref->checks == 0 && ref->raw_len == 0 && ref->stored_len == 0 && ref->pack == 0 &&
		ref->codec == 0 && ref->kind == 0;
}

static bool part_blobs_check(const struct proto_part *m)
{
	uint64_t all = 0;
	int c;

	if (m->nblobs > PART_BLOBS_MAX)
		return false;
	for (uint32_t i = 0; i < m->nblobs; i++) {
		const struct proto_blob *b = &m->blobs[i];

		if (!proto_text_valid(b->name, 1, PROTO_NAME_MAX))
			return false;
		size_t slashes = proto_name_slashes(b->name);
		if (slashes >= STORE_BLOB_PARTS_MAX)
			return false;
		all += slashes;
		if (b->len && (b->ref.raw_len != b->len || !part_ref_check(m, &b->ref, PROTO_KIND_BLOB)))
			return false;
		c = i ? (int)m->blobs[i - 1].per_rank - (int)b->per_rank : -1;
		if (c > 0 || (c == 0 && strcmp(m->blobs[i - 1].name, b->name) >= 0))
			return false;
	}
	return proto_blob_slashes_valid(all, m->nblobs);
}

static bool part_samples_check(const struct proto_part *m)
{
	if (m->nsamples > PROTO_LAYOUT_MAX_TENSORS)
		return false;
	for (uint32_t i = 0; i < m->nsamples; i++) {
		const struct proto_sample *s = &m->samples[i];

		if (s->tensor >= PROTO_LAYOUT_MAX_TENSORS || (i > 0 && s->tensor < s[-1].tensor))
			return false;
		if (i > 0 && s->tensor == s[-1].tensor && memcmp(s[-1].group, s->group, sizeof s->group) >= 0)
			return false;
	}
	return true;
}

static int part_check(const struct proto_part *m)
{
	if (m->world == 0 || m->world > PROTO_WORLD_MAX || m->rank >= m->world || !proto_host_valid(m->host))
		return -BASE_EFORMAT;
	if (!part_chunks_check(m) || !part_blobs_check(m) || !part_samples_check(m) ||
		!proto_timings_check(m->timings, m->ntimings))
		return -BASE_EFORMAT;
	return proto_packs_check(m->packs, m->npacks, false, true);
}

static int part_blobs_pack(const struct proto_part *m, struct proto_arena *arena, struct base_buf *refs, Vckpt__Part *s)
{
	Vckpt__Blob *all = proto_arena_array(arena, m->nblobs, sizeof *all);

	s->blobs = proto_arena_array(arena, m->nblobs, sizeof *s->blobs);
	if (!all || !s->blobs)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < m->nblobs; i++) {
		struct proto_ref ref = {.digest = m->blobs[i].ref.digest};

		proto_ref_put(refs, m->blobs[i].len ? &m->blobs[i].ref : &ref);
	}
	if (refs->error)
		return refs->error;
	for (uint32_t i = 0; i < m->nblobs; i++) {
		vckpt__blob__init(&all[i]);
		all[i].name = (char *)m->blobs[i].name;
		all[i].per_rank = m->blobs[i].per_rank;
		all[i].len = m->blobs[i].len;
		all[i].ref = (ProtobufCBinaryData){PROTO_REF_BYTES, refs->data + (size_t)i * PROTO_REF_BYTES};
		s->blobs[i] = &all[i];
	}
	s->n_blobs = m->nblobs;
	return 0;
}

static void part_rows_put(const struct proto_part *m, struct base_buf *chunks, struct base_buf *samples)
{
	for (uint32_t i = 0; i < m->nchunks; i++) {
		base_buf_put32(chunks, m->chunks[i].first_tensor);
		base_buf_put32(chunks, m->chunks[i].last_tensor);
		base_buf_put32(chunks, m->chunks[i].nrows);
		base_buf_put32(chunks, 0);
		proto_ref_put(chunks, &m->chunks[i].ref);
	}
	for (uint32_t i = 0; i < m->nsamples; i++) {
		base_buf_put32(samples, m->samples[i].tensor);
		base_buf_append(samples, m->samples[i].group, sizeof m->samples[i].group);
		base_buf_append(samples, m->samples[i].hash, sizeof m->samples[i].hash);
	}
}

static int part_pack(const struct proto_part *m, struct proto_arena *arena, struct base_buf *b)
{
	base_cleanup_buf struct base_buf refs = BASE_BUF_INIT, chunks = BASE_BUF_INIT, samples = BASE_BUF_INIT;
	Vckpt__Part s = VCKPT__PART__INIT;
	int r = proto_packs_pack(m->packs, m->npacks, arena, &s.packs);

	if (r == 0)
		r = part_blobs_pack(m, arena, &refs, &s);
	if (r == 0)
		r = proto_timings_pack(m->timings, m->ntimings, arena, &s.n_timings, &s.timings);
	if (r < 0)
		return r;
	part_rows_put(m, &chunks, &samples);
	if (chunks.error || samples.error)
		return chunks.error ? chunks.error : samples.error;
	s.version = PROTO_VERSION;
	s.rank = m->rank;
	s.world = m->world;
	s.host = (char *)m->host;
	s.layout = proto_digest_field(&m->layout);
	s.chunks = proto_bytes(&chunks);
	s.samples = proto_bytes(&samples);
	return proto_pack(&s, b);
}

int proto_part_encode(const struct proto_part *m, struct base_buf *b)
{
	struct proto_arena *arena;
	int r = part_check(m);

	if (r < 0)
		return r;
	arena = proto_arena_new(UINT64_MAX);
	if (!arena)
		return -ENOMEM;
	r = part_pack(m, arena, b);
	proto_arena_free(arena);
	return r;
}

static int part_chunks_get(const Vckpt__Part *s, struct proto_arena *arena, struct proto_part *m)
{
	struct proto_chunk *chunks;
	uint32_t n;

	if (!proto_rows(&s->chunks, PROTO_CHUNK_ROW_BYTES, PROTO_LAYOUT_MAX_TENSORS, &n))
		return -BASE_EFORMAT;
	chunks = proto_arena_array(arena, n, sizeof *chunks);
	if (!chunks)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = s->chunks.data + (size_t)i * PROTO_CHUNK_ROW_BYTES;

		chunks[i].first_tensor = base_get32(row);
		chunks[i].last_tensor = base_get32(row + 4);
		chunks[i].nrows = base_get32(row + 8);
		if (base_get32(row + 12) != 0 || !proto_ref_get(row + 16, &chunks[i].ref))
			return -BASE_EFORMAT;
	}
	m->chunks = chunks;
	m->nchunks = n;
	return 0;
}

static int part_blobs_get(const Vckpt__Part *s, struct proto_arena *arena, struct proto_part *m)
{
	struct proto_blob *blobs;

	if (s->n_blobs > PART_BLOBS_MAX)
		return -BASE_EFORMAT;
	blobs = proto_arena_array(arena, s->n_blobs, sizeof *blobs);
	if (!blobs)
		return proto_no_memory(arena);
	for (size_t i = 0; i < s->n_blobs; i++) {
		blobs[i].name = s->blobs[i]->name;
		blobs[i].per_rank = s->blobs[i]->per_rank;
		blobs[i].len = s->blobs[i]->len;
		if (!proto_ref_field_get(&s->blobs[i]->ref, &blobs[i].ref) ||
			(blobs[i].len == 0 && !part_empty_ref(&blobs[i].ref)))
			return -BASE_EFORMAT;
	}
	m->blobs = blobs;
	m->nblobs = (uint32_t)s->n_blobs;
	return 0;
}

static int part_samples_get(const Vckpt__Part *s, struct proto_arena *arena, struct proto_part *m)
{
	struct proto_sample *samples;
	uint32_t n;

	if (!proto_rows(&s->samples, PROTO_SAMPLE_ROW_BYTES, PROTO_LAYOUT_MAX_TENSORS, &n))
		return -BASE_EFORMAT;
	samples = proto_arena_array(arena, n, sizeof *samples);
	if (!samples)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = s->samples.data + (size_t)i * PROTO_SAMPLE_ROW_BYTES;

		samples[i].tensor = base_get32(row);
		memcpy(samples[i].group, row + 4, sizeof samples[i].group);
		memcpy(samples[i].hash, row + 20, sizeof samples[i].hash);
	}
	m->samples = samples;
	m->nsamples = n;
	return 0;
}

static int part_get(const Vckpt__Part *s, struct proto_arena *arena, struct proto_part *m)
{
	int r;

	m->rank = s->rank;
	m->world = s->world;
	m->host = s->host;
	if (!proto_digest_get(&s->layout, &m->layout))
		return -BASE_EFORMAT;
	r = proto_packs_unpack(s->packs, arena, &m->packs, &m->npacks);
	if (r == 0)
		r = part_chunks_get(s, arena, m);
	if (r == 0)
		r = part_blobs_get(s, arena, m);
	if (r == 0)
		r = proto_timings_unpack(s->timings, s->n_timings, arena, &m->timings, &m->ntimings);
	if (r == 0)
		r = part_samples_get(s, arena, m);
	return r < 0 ? r : part_check(m);
}

int proto_part_decode(const void *body, size_t len, struct proto_part *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Part *s;
	int r = proto_unpack(&vckpt__part__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	r = part_get(s, arena, ret_m);
	if (r < 0)
		proto_part_release(ret_m);
	return r;
}

void proto_part_release(struct proto_part *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
