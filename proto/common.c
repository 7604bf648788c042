/* SPDX-License-Identifier: Apache-2.0
 *
 * common: what ranks of a job declare to hold alike, as `begin` and announcements tell it.
 *
 *   value, 16 bytes: the first of its SHA-256, in the order of the names */
#include "proto/proto_internal.h"

static bool common_names_check(const struct proto_common *c)
{
	for (uint32_t i = 0; i < c->nnames; i++)
		if (!proto_text_valid(c->names[i], 1, PROTO_NAME_MAX)
			|| (i && strcmp(c->names[i - 1], c->names[i]) >= 0))
			return false;
	return true;
}

bool proto_commons_check(const struct proto_common *c, uint32_t n)
{
	if (n > PROTO_COMMONS_MAX)
		return false;
	for (uint32_t i = 0; i < n; i++)
		if (!proto_text_valid(c[i].group, 1, PROTO_COMMON_GROUP_MAX) || !common_names_check(&c[i])
			|| (i && strcmp(c[i - 1].group, c[i].group) >= 0))
			return false;
	return true;
}

int proto_commons_pack(const struct proto_common *c, uint32_t n, bool names, struct proto_arena *arena, size_t *ret_n,
	Vckpt__Common ***ret_messages)
{
	Vckpt__Common **list = proto_arena_array(arena, n, sizeof *list),
		      *all = proto_arena_array(arena, n, sizeof *all);

	if (!list || !all)
		return proto_no_memory(arena);
	for (uint32_t i = 0; i < n; i++) {
		vckpt__common__init(&all[i]);
		all[i].group = (char *)c[i].group;
		all[i].digest = proto_digest_field(&c[i].digest);
		if (names && c[i].nnames) {
			all[i].n_names = c[i].nnames;
			all[i].names = (char **)c[i].names;
			all[i].digests = (ProtobufCBinaryData){(size_t)c[i].nnames * PROTO_COMMON_ROW_BYTES,
				(uint8_t *)c[i].digests};
		}
		list[i] = &all[i];
	}
	*ret_n = n;
	*ret_messages = list;
	return 0;
}

int proto_commons_unpack(Vckpt__Common **messages, size_t n, struct proto_arena *arena,
	const struct proto_common **ret_c, uint32_t *ret_n)
{
	struct proto_common *c;
	uint32_t rows;

	if (n > PROTO_COMMONS_MAX)
		return -BASE_EFORMAT;
	c = proto_arena_array(arena, n, sizeof *c);
	if (!c)
		return proto_no_memory(arena);
	for (size_t i = 0; i < n; i++) {
		const Vckpt__Common *m = messages[i];

		if (!proto_digest_get(&m->digest, &c[i].digest)
			|| !proto_rows(&m->digests, PROTO_COMMON_ROW_BYTES, UINT32_MAX, &rows) || rows != m->n_names)
			return -BASE_EFORMAT;
		c[i].group = m->group;
		c[i].names = (const char *const *)m->names;
		c[i].digests = m->digests.data;
		c[i].nnames = rows;
	}
	*ret_c = c;
	*ret_n = (uint32_t)n;
	return 0;
}
