/* SPDX-License-Identifier: Apache-2.0
 *
 * heartbeat: signs of life (hosts/) and the collector's marks (trash/).
 *
 *   rank that a heartbeat speaks for, 24 bytes: rank u32 | 0 u32 | pid u64 | start time u64 */
#include "proto/proto_internal.h"

#define HEARTBEAT_RANKS_MAX PROTO_WORLD_MAX
#define HEARTBEAT_PERIOD_MAX_MS 600000u
#define TRASH_HEARTBEATS_MAX (UINT32_C(1) << 20)

static bool heartbeat_boot_id_valid(const char *id)
{
	size_t n = strlen(id);

	return n <= 36 && strspn(id, "0123456789abcdef-") == n;
}

static int heartbeat_check(const struct proto_heartbeat *m)
{
	if (!proto_launch_valid(m->launch) || !proto_host_valid(m->host) || !proto_run_valid(m->run))
		return -BASE_EFORMAT;
	if (memchr(m->boot_id, 0, sizeof m->boot_id) == NULL || !heartbeat_boot_id_valid(m->boot_id) ||
		m->nranks > HEARTBEAT_RANKS_MAX || m->period_ms > HEARTBEAT_PERIOD_MAX_MS)
		return -BASE_EFORMAT;
	for (uint32_t i = 1; i < m->nranks; i++)
		if (m->ranks[i - 1].rank >= m->ranks[i].rank)
			return -BASE_EFORMAT;
	return 0;
}

int proto_heartbeat_encode(const struct proto_heartbeat *m, struct base_buf *b)
{
	base_cleanup_buf struct base_buf rows = BASE_BUF_INIT;
	Vckpt__Heartbeat s = VCKPT__HEARTBEAT__INIT;
	int r = heartbeat_check(m);

	if (r < 0)
		return r;
	for (uint32_t i = 0; i < m->nranks; i++) {
		base_buf_put32(&rows, m->ranks[i].rank);
		base_buf_put32(&rows, 0);
		base_buf_put64(&rows, m->ranks[i].pid);
		base_buf_put64(&rows, m->ranks[i].start_time);
	}
	if (rows.error)
		return rows.error;
	s.version = PROTO_VERSION;
	s.launch = (char *)m->launch;
	s.host = (char *)m->host;
	s.run = (char *)m->run;
	s.boot_id = (char *)m->boot_id;
	s.number = m->number;
	s.time_ns = m->time_ns;
	s.ranks = proto_bytes(&rows);
	s.nonce = proto_nonce_field(m->nonce);
	s.period_ms = m->period_ms;
	return proto_pack(&s, b);
}

static int heartbeat_get(const Vckpt__Heartbeat *s, struct proto_arena *arena, struct proto_heartbeat *m)
{
	struct proto_alive *ranks;
	uint32_t n;

	m->launch = s->launch;
	m->host = s->host;
	m->run = s->run;
	m->number = s->number;
	m->time_ns = s->time_ns;
	m->period_ms = s->period_ms;
	if (strlen(s->boot_id) >= sizeof m->boot_id || !proto_nonce_get(&s->nonce, m->nonce) ||
		!proto_rows(&s->ranks, PROTO_ALIVE_ROW_BYTES, HEARTBEAT_RANKS_MAX, &n))
		return -BASE_EFORMAT;
	memcpy(m->boot_id, s->boot_id, strlen(s->boot_id) + 1);
	ranks = proto_arena_array(arena, n, sizeof *ranks);
	if (!ranks)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = s->ranks.data + (size_t)i * PROTO_ALIVE_ROW_BYTES;

		ranks[i] = (struct proto_alive){base_get32(row), base_get64(row + 8), base_get64(row + 16)};
		if (base_get32(row + 4) != 0)
			return -BASE_EFORMAT;
	}
	m->ranks = ranks;
	m->nranks = n;
	return heartbeat_check(m);
}

int proto_heartbeat_decode(const void *body, size_t len, struct proto_heartbeat *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Heartbeat *s;
	int r = proto_unpack(&vckpt__heartbeat__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	r = heartbeat_get(s, arena, ret_m);
	if (r < 0)
		proto_heartbeat_release(ret_m);
	return r;
}

void proto_heartbeat_release(struct proto_heartbeat *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}

static int trash_check(const struct proto_trash *m)
{
	if (!proto_text_valid(m->name, 1, PROTO_FILE_NAME_MAX) || m->nheartbeats > TRASH_HEARTBEATS_MAX)
		return -BASE_EFORMAT;
	for (uint32_t i = 0; i < m->nheartbeats; i++)
		if (!proto_text_valid(m->heartbeats[i], 1, PROTO_FILE_NAME_MAX))
			return -BASE_EFORMAT;
	return 0;
}

int proto_trash_encode(const struct proto_trash *m, struct base_buf *b)
{
	Vckpt__Trash s = VCKPT__TRASH__INIT;
	int r = trash_check(m);

	if (r < 0)
		return r;
	s.version = PROTO_VERSION;
	s.name = (char *)m->name;
	s.time_ns = m->time_ns;
	s.n_heartbeats = m->nheartbeats;
	s.heartbeats = (char **)m->heartbeats;
	return proto_pack(&s, b);
}

int proto_trash_decode(const void *body, size_t len, struct proto_trash *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Trash *s;
	int r = proto_unpack(&vckpt__trash__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	ret_m->name = s->name;
	ret_m->time_ns = s->time_ns;
	ret_m->heartbeats = (const char *const *)s->heartbeats;
	ret_m->nheartbeats = s->n_heartbeats > TRASH_HEARTBEATS_MAX ? UINT32_MAX : (uint32_t)s->n_heartbeats;
	r = trash_check(ret_m);
	if (r < 0)
		proto_trash_release(ret_m);
	return r;
}

void proto_trash_release(struct proto_trash *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
