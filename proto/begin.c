/* SPDX-License-Identifier: Apache-2.0
 *
 * begin: what opens an attempt, and the commits whose data it may use: incoming/<run>/<attempt>/begin and base.<n>. */
#include "proto/proto_internal.h"

#define BEGIN_BASES_MAX 4096u

static bool begin_base_check(const struct proto_base *base)
{
	return proto_run_valid(base->run) && base->entry != PROTO_NONE;
}

static int begin_check(const struct proto_begin *m)
{
	struct proto_attempt_number a;

	if (!proto_run_valid(m->run) || !proto_attempt_parse(m->attempt, &a) || m->step > PROTO_STEP_MAX)
		return -BASE_EFORMAT;
	if (m->world == 0 || m->world > PROTO_WORLD_MAX || (m->alone && m->world != 1))
		return -BASE_EFORMAT;
	if (m->nbases > BEGIN_BASES_MAX || m->rank >= m->world || (m->host && m->host[0] && !proto_host_valid(m->host)))
		return -BASE_EFORMAT;
	for (uint32_t i = 0; i < m->nbases; i++)
		if (!begin_base_check(&m->bases[i]))
			return -BASE_EFORMAT;
	return proto_commons_check(m->commons, m->ncommons) ? 0 : -BASE_EFORMAT;
}

static void begin_base_message(const struct proto_base *base, Vckpt__Base *ret_message)
{
	vckpt__base__init(ret_message);
	ret_message->run = (char *)base->run;
	ret_message->entry = base->entry;
	ret_message->manifest = proto_digest_field(&base->manifest);
}

static bool begin_base_get(const Vckpt__Base *message, struct proto_base *ret_base)
{
	ret_base->run = message->run;
	ret_base->entry = message->entry;
	return proto_digest_get(&message->manifest, &ret_base->manifest);
}

static bool begin_digest_is_zero(const struct base_digest *d)
{
	static const struct base_digest zero;

	return base_digest_equal(d, &zero);
}

static int begin_pack(const struct proto_begin *m, struct proto_arena *arena, struct base_buf *b)
{
	Vckpt__Base *bases = proto_arena_array(arena, m->nbases, sizeof *bases),
		    **list = proto_arena_array(arena, m->nbases, sizeof *list);
	Vckpt__Begin s = VCKPT__BEGIN__INIT;
	int r = bases && list ? 0 : proto_no_memory(arena);

	if (r == 0)
		r = proto_commons_pack(m->commons, m->ncommons, true, arena, &s.n_commons, &s.commons);
	if (r < 0)
		return r;
	for (uint32_t i = 0; i < m->nbases; i++) {
		begin_base_message(&m->bases[i], &bases[i]);
		list[i] = &bases[i];
	}
	s.version = PROTO_VERSION;
	s.run = (char *)m->run;
	s.attempt = (char *)m->attempt;
	s.step = m->step;
	s.world = m->world;
	s.alone = m->alone;
	s.position = m->position;
	if (!begin_digest_is_zero(&m->mesh))
		s.mesh = proto_digest_field(&m->mesh);
	s.n_bases = m->nbases;
	s.bases = list;
	s.replace = m->replace;
	s.replaces = m->replace ? m->replaces + 1 : 0;
	s.rank = m->rank;
	s.host = (char *)(m->host ? m->host : "");
	s.time_ns = m->time_ns;
	return proto_pack(&s, b);
}

int proto_begin_encode(const struct proto_begin *m, struct base_buf *b)
{
	struct proto_arena *arena;
	int r = begin_check(m);

	if (r < 0)
		return r;
	arena = proto_arena_new(UINT64_MAX);
	if (!arena)
		return -ENOMEM;
	r = begin_pack(m, arena, b);
	proto_arena_free(arena);
	return r;
}

static int begin_get(const Vckpt__Begin *s, struct proto_arena *arena, struct proto_begin *m)
{
	struct proto_base *bases;
	int r;

	m->run = s->run;
	m->attempt = s->attempt;
	m->step = s->step;
	m->world = s->world;
	m->alone = s->alone;
	m->position = s->position;
	m->replace = s->replace;
	m->replaces = s->replaces - 1; /* 0: none */
	m->rank = s->rank;
	m->host = s->host;
	m->time_ns = s->time_ns;
	if (!s->replace && s->replaces)
		return -BASE_EFORMAT;
	if (s->mesh.len && (!proto_digest_get(&s->mesh, &m->mesh) || begin_digest_is_zero(&m->mesh)))
		return -BASE_EFORMAT;
	if (s->n_bases > BEGIN_BASES_MAX)
		return -BASE_EFORMAT;
	bases = proto_arena_array(arena, s->n_bases, sizeof *bases);
	if (!bases)
		return proto_no_memory(arena);
	for (size_t i = 0; i < s->n_bases; i++)
		if (!begin_base_get(s->bases[i], &bases[i]))
			return -BASE_EFORMAT;
	m->bases = bases;
	m->nbases = (uint32_t)s->n_bases;
	r = proto_commons_unpack(s->commons, s->n_commons, arena, &m->commons, &m->ncommons);
	return r < 0 ? r : begin_check(m);
}

int proto_begin_decode(const void *body, size_t len, struct proto_begin *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Begin *s;
	int r = proto_unpack(&vckpt__begin__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	r = begin_get(s, arena, ret_m);
	if (r < 0)
		proto_begin_release(ret_m);
	return r;
}

void proto_begin_release(struct proto_begin *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}

int proto_base_encode(const struct proto_base *m, struct base_buf *b)
{
	Vckpt__BaseRecord s = VCKPT__BASE_RECORD__INIT;
	Vckpt__Base base;

	if (!begin_base_check(m))
		return -BASE_EFORMAT;
	begin_base_message(m, &base);
	s.version = PROTO_VERSION;
	s.commit = &base;
	return proto_pack(&s, b);
}

int proto_base_decode(const void *body, size_t len, struct proto_base_record *ret_m)
{
	struct proto_arena *arena;
	Vckpt__BaseRecord *s;
	int r = proto_unpack(&vckpt__base_record__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	if (!s->commit || !begin_base_get(s->commit, &ret_m->base) || !begin_base_check(&ret_m->base))
		r = -BASE_EFORMAT;
	if (r < 0)
		proto_base_release(ret_m);
	return r;
}

void proto_base_release(struct proto_base_record *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
