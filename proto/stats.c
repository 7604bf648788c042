/* SPDX-License-Identifier: Apache-2.0
 *
 * stats: the measures of one rank's save, stats/<run>/<step>.<entry>/<rank>; and the timings that a part has, too. */
#include "proto/proto_internal.h"

bool proto_timings_check(const struct proto_timing *t, uint32_t n)
{
	if (n > PROTO_TIMINGS_MAX)
		return false;
	for (uint32_t i = 0; i < n; i++)
		if (!proto_text_valid(t[i].phase, 1, PROTO_WORD_MAX))
			return false;
	return true;
}

int proto_timings_pack(const struct proto_timing *t, uint32_t n, struct proto_arena *arena, size_t *ret_n,
	Vckpt__Timing ***ret_messages)
{
	Vckpt__Timing *all = proto_arena_array(arena, n, sizeof *all);
	Vckpt__Timing **messages = proto_arena_array(arena, n, sizeof *messages);

	if (!all || !messages)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		vckpt__timing__init(&all[i]);
		all[i].phase = (char *)t[i].phase;
		all[i].ns = t[i].ns;
		all[i].bytes = t[i].bytes;
		all[i].start_ns = t[i].start_ns;
		all[i].end_ns = t[i].end_ns;
		messages[i] = &all[i];
	}
	*ret_messages = messages;
	*ret_n = n;
	return 0;
}

int proto_timings_unpack(Vckpt__Timing **messages, size_t n, struct proto_arena *arena,
	const struct proto_timing **ret_t, uint32_t *ret_n)
{
	struct proto_timing *t;

	if (n > PROTO_TIMINGS_MAX)
		return -BASE_EFORMAT;
	t = proto_arena_array(arena, n, sizeof *t);
	if (!t)
		return proto_no_memory(arena);
	for (size_t i = 0; i < n; i++)
		t[i] = (struct proto_timing){.phase = messages[i]->phase, .ns = messages[i]->ns,
			.bytes = messages[i]->bytes, .start_ns = messages[i]->start_ns, .end_ns = messages[i]->end_ns};
	*ret_t = t;
	*ret_n = (uint32_t)n;
	return 0;
}

/* ---- the record ---- */

static int stats_check(const struct proto_stats *m)
{
	struct proto_attempt_number a;

	if (!proto_run_valid(m->run) || !proto_attempt_parse(m->attempt, &a) || m->step > PROTO_STEP_MAX ||
		!proto_host_valid(m->host))
		return -BASE_EFORMAT;
	if (m->world == 0 || m->world > PROTO_WORLD_MAX || m->rank >= m->world)
		return -BASE_EFORMAT;
	if (m->entry == PROTO_NONE || (m->version == 1 && m->entry != 0))
		return -BASE_EFORMAT;
	return proto_timings_check(m->timings, m->ntimings) ? 0 : -BASE_EFORMAT;
}

static int stats_pack(const struct proto_stats *m, struct proto_arena *arena, struct base_buf *b)
{
	Vckpt__Stats s = VCKPT__STATS__INIT;
	int r = proto_timings_pack(m->timings, m->ntimings, arena, &s.n_timings, &s.timings);

	if (r < 0)
		return r;
	s.version = m->version ? m->version : PROTO_VERSION;
	s.run = (char *)m->run;
	s.attempt = (char *)m->attempt;
	s.step = m->step;
	s.rank = m->rank;
	s.world = m->world;
	s.host = (char *)m->host;
	s.submitted_ns = m->submitted_ns;
	s.staged_ns = m->staged_ns;
	s.committed_ns = m->committed_ns;
	s.bytes_held = m->bytes_held;
	s.bytes_staged = m->bytes_staged;
	s.bytes_unchanged = m->bytes_unchanged;
	s.bytes_deduplicated = m->bytes_deduplicated;
	s.bytes_encoded = m->bytes_encoded;
	s.bytes_written = m->bytes_written;
	s.pieces = m->pieces;
	s.pieces_new = m->pieces_new;
	s.plan_cached = m->plan_cached;
	s.ring_waits = m->ring_waits;
	s.entry = m->entry;
	return proto_pack(&s, b);
}

int proto_stats_encode(const struct proto_stats *m, struct base_buf *b)
{
	struct proto_arena *arena;
	int r = stats_check(m);

	if (r < 0)
		return r;
	arena = proto_arena_new(UINT64_MAX);
	if (!arena)
		return -ENOMEM;
	r = stats_pack(m, arena, b);
	proto_arena_free(arena);
	return r;
}

static int stats_get(const Vckpt__Stats *s, struct proto_arena *arena, struct proto_stats *m)
{
	int r;

	*m = (struct proto_stats){.run = s->run, .attempt = s->attempt, .step = s->step, .rank = s->rank,
		.world = s->world, .host = s->host, .submitted_ns = s->submitted_ns, .staged_ns = s->staged_ns,
		.committed_ns = s->committed_ns, .bytes_held = s->bytes_held, .bytes_staged = s->bytes_staged,
		.bytes_unchanged = s->bytes_unchanged, .bytes_deduplicated = s->bytes_deduplicated,
		.bytes_encoded = s->bytes_encoded, .bytes_written = s->bytes_written, .pieces = s->pieces,
		.pieces_new = s->pieces_new, .plan_cached = s->plan_cached, .ring_waits = s->ring_waits,
		.entry = s->entry, .version = s->version, .arena = arena};
	r = proto_timings_unpack(s->timings, s->n_timings, arena, &m->timings, &m->ntimings);
	return r < 0 ? r : stats_check(m);
}

int proto_stats_decode(const void *body, size_t len, struct proto_stats *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Stats *s;
	int r = proto_unpack(&vckpt__stats__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	r = stats_get(s, arena, ret_m);
	if (r < 0)
		proto_stats_release(ret_m);
	return r;
}

void proto_stats_release(struct proto_stats *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
