/* SPDX-License-Identifier: Apache-2.0
 *
 * damage: notes of what verify found damaged in a pack (damaged/).
 *
 *   range, 16 bytes: offset u64 | length u64; one of 0, 0 alone stands for the whole pack */
#include "proto/proto_internal.h"

static bool damage_whole(const struct proto_damage *m)
{
	return m->nranges == 1 && m->ranges[0].offset == 0 && m->ranges[0].len == 0;
}

static int damage_check(const struct proto_damage *m)
{
	uint64_t end = 0;

	if (!proto_text_valid(m->pack, 1, PROTO_FILE_NAME_MAX) || m->nranges == 0 || m->nranges > PROTO_RANGES_MAX)
		return -BASE_EFORMAT;
	if (damage_whole(m))
		return 0;
	for (uint32_t i = 0; i < m->nranges; i++) {
		const struct proto_range *range = &m->ranges[i];

		if (range->len == 0 || (i && range->offset <= end) ||
			base_add_overflows(range->offset, range->len, &end) || end > PROTO_FILE_MAX_BYTES)
			return -BASE_EFORMAT;
	}
	return 0;
}

int proto_damage_encode(const struct proto_damage *m, struct base_buf *b)
{
	base_cleanup_buf struct base_buf rows = BASE_BUF_INIT;
	Vckpt__Damage s = VCKPT__DAMAGE__INIT;
	int r = damage_check(m);

	if (r < 0)
		return r;
	for (uint32_t i = 0; i < m->nranges; i++) {
		base_buf_put64(&rows, m->ranges[i].offset);
		base_buf_put64(&rows, m->ranges[i].len);
	}
	if (rows.error)
		return rows.error;
	s.version = PROTO_VERSION;
	s.pack = (char *)m->pack;
	s.ranges = proto_bytes(&rows);
	return proto_pack(&s, b);
}

static int damage_get(const Vckpt__Damage *s, struct proto_arena *arena, struct proto_damage *m)
{
	struct proto_range *ranges;
	uint32_t n;

	m->pack = s->pack;
	if (!proto_rows(&s->ranges, PROTO_RANGE_ROW_BYTES, PROTO_RANGES_MAX, &n))
		return -BASE_EFORMAT;
	ranges = proto_arena_array(arena, n, sizeof *ranges);
	if (!ranges)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *row = s->ranges.data + (size_t)i * PROTO_RANGE_ROW_BYTES;

		ranges[i] = (struct proto_range){base_get64(row), base_get64(row + 8)};
	}
	m->ranges = ranges;
	m->nranges = n;
	return damage_check(m);
}

int proto_damage_decode(const void *body, size_t len, struct proto_damage *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Damage *s;
	int r = proto_unpack(&vckpt__damage__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	r = damage_get(s, arena, ret_m);
	if (r < 0)
		proto_damage_release(ret_m);
	return r;
}

void proto_damage_release(struct proto_damage *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
