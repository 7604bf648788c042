/* SPDX-License-Identifier: Apache-2.0
 *
 * announcement: incoming/<run>/<attempt>/part.<rank>, what the manifest will say of one rank.
 *
 *   replica, 32 bytes: group 16 | digest 16 */
#include "proto/proto_internal.h"

static bool announcement_ref_check(const struct proto_announcement *m, const struct proto_ref *ref, unsigned kind)
{
	return ref->pack < m->npacks && proto_ref_check(ref, kind, m->npacks, m->packs[ref->pack].size);
}

static bool announcement_replicas_check(const struct proto_announcement *m)
{
	if (m->nreplicas > PROTO_REPLICAS_MAX)
		return false;
	for (uint32_t i = 1; i < m->nreplicas; i++)
		if (memcmp(m->replicas[i - 1].group, m->replicas[i].group, sizeof m->replicas[i].group) >= 0)
			return false;
	return true;
}

static int announcement_check(const struct proto_announcement *m)
{
	struct proto_attempt_number a;

	if (!proto_run_valid(m->run) || !proto_attempt_parse(m->attempt, &a) || m->step > PROTO_STEP_MAX ||
		!proto_host_valid(m->host))
		return -BASE_EFORMAT;
	if (m->world == 0 || m->world > PROTO_WORLD_MAX || m->rank >= m->world ||
		!proto_attributes_check(m->attributes, m->nattributes))
		return -BASE_EFORMAT;
	if (!announcement_ref_check(m, &m->part, PROTO_KIND_PART))
		return -BASE_EFORMAT;
	if (m->stores_layout &&
		(!announcement_ref_check(m, &m->layout_ref, PROTO_KIND_LAYOUT) ||
			!base_digest_equal(&m->layout, &m->layout_ref.digest)))
		return -BASE_EFORMAT;
	if (!proto_headers_check(m->headers, m->nheaders, 1, m->packs, m->npacks) || !announcement_replicas_check(m)
		|| !proto_commons_check(m->commons, m->ncommons))
		return -BASE_EFORMAT;
	return proto_packs_check(m->packs, m->npacks, false, false);
}

static int announcement_pack(const struct proto_announcement *m, struct proto_arena *arena, struct base_buf *refs,
	struct base_buf *replicas, struct base_buf *b)
{
	Vckpt__Announcement s = VCKPT__ANNOUNCEMENT__INIT;
	int r = proto_packs_pack(m->packs, m->npacks, arena, &s.packs);

	if (r == 0)
		r = proto_headers_pack(m->headers, m->nheaders, arena, &s.n_headers, &s.headers);
	if (r == 0)
		r = proto_attributes_pack(m->attributes, m->nattributes, arena, &s.n_attributes, &s.attributes);
	if (r == 0)
		r = proto_commons_pack(m->commons, m->ncommons, false, arena, &s.n_commons, &s.commons);
	if (r < 0)
		return r;
	proto_ref_put(refs, &m->part);
	if (m->stores_layout)
		proto_ref_put(refs, &m->layout_ref);
	for (uint32_t i = 0; i < m->nreplicas; i++) {
		base_buf_append(replicas, m->replicas[i].group, sizeof m->replicas[i].group);
		base_buf_append(replicas, m->replicas[i].digest, sizeof m->replicas[i].digest);
	}
	if (refs->error || replicas->error)
		return refs->error ? refs->error : replicas->error;
	s.version = PROTO_VERSION;
	s.run = (char *)m->run;
	s.attempt = (char *)m->attempt;
	s.step = m->step;
	s.rank = m->rank;
	s.world = m->world;
	s.host = (char *)m->host;
	s.layout = proto_digest_field(&m->layout);
	s.part = (ProtobufCBinaryData){PROTO_REF_BYTES, refs->data};
	if (m->stores_layout)
		s.layout_ref = (ProtobufCBinaryData){PROTO_REF_BYTES, refs->data + PROTO_REF_BYTES};
	s.tensors = m->tensors;
	s.bytes = m->bytes;
	s.new_bytes = m->new_bytes;
	s.replicas = proto_bytes(replicas);
	return proto_pack(&s, b);
}

int proto_announcement_encode(const struct proto_announcement *m, struct base_buf *b)
{
	base_cleanup_buf struct base_buf refs = BASE_BUF_INIT, replicas = BASE_BUF_INIT;
	struct proto_arena *arena;
	int r = announcement_check(m);

	if (r < 0)
		return r;
	arena = proto_arena_new(UINT64_MAX);
	if (!arena)
		return -ENOMEM;
	r = announcement_pack(m, arena, &refs, &replicas, b);
	proto_arena_free(arena);
	return r;
}

static int announcement_replicas_get(const Vckpt__Announcement *s, struct proto_arena *arena,
	struct proto_announcement *m)
{
	struct proto_replica *replicas;
	uint32_t n;

	if (!proto_rows(&s->replicas, PROTO_REPLICA_ROW_BYTES, PROTO_REPLICAS_MAX, &n))
		return -BASE_EFORMAT;
	replicas = proto_arena_array(arena, n, sizeof *replicas);
	if (!replicas)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = s->replicas.data + (size_t)i * PROTO_REPLICA_ROW_BYTES;

		memcpy(replicas[i].group, row, sizeof replicas[i].group);
		memcpy(replicas[i].digest, row + 16, sizeof replicas[i].digest);
	}
	m->replicas = replicas;
	m->nreplicas = n;
	return 0;
}

static int announcement_get(const Vckpt__Announcement *s, struct proto_arena *arena, struct proto_announcement *m)
{
	int r;

	m->run = s->run;
	m->attempt = s->attempt;
	m->step = s->step;
	m->rank = s->rank;
	m->world = s->world;
	m->host = s->host;
	m->stores_layout = s->layout_ref.len != 0;
	m->tensors = s->tensors;
	m->bytes = s->bytes;
	m->new_bytes = s->new_bytes;
	if (!proto_digest_get(&s->layout, &m->layout) || !proto_ref_field_get(&s->part, &m->part))
		return -BASE_EFORMAT;
	if (m->stores_layout && !proto_ref_field_get(&s->layout_ref, &m->layout_ref))
		return -BASE_EFORMAT;
	r = proto_packs_unpack(s->packs, arena, &m->packs, &m->npacks);
	if (r == 0)
		r = proto_headers_unpack(s->headers, s->n_headers, arena, &m->headers, &m->nheaders);
	if (r == 0)
		r = proto_attributes_unpack(s->attributes, s->n_attributes, arena, &m->attributes, &m->nattributes);
	if (r == 0)
		r = announcement_replicas_get(s, arena, m);
	if (r == 0)
		r = proto_commons_unpack(s->commons, s->n_commons, arena, &m->commons, &m->ncommons);
	return r < 0 ? r : announcement_check(m);
}

int proto_announcement_decode(const void *body, size_t len, struct proto_announcement *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Announcement *s;
	int r = proto_unpack(&vckpt__announcement__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	r = announcement_get(s, arena, ret_m);
	if (r < 0)
		proto_announcement_release(ret_m);
	return r;
}

void proto_announcement_release(struct proto_announcement *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
