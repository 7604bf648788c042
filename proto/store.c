/* SPDX-License-Identifier: Apache-2.0
 *
 * store: the body of vckpt.store. */
#include "proto/proto_internal.h"

static int store_check(const struct proto_store *m)
{
	if (m->version == 0 || m->version > PROTO_VERSION || (m->list_3 && !m->list_2))
		return -BASE_EFORMAT;
	return proto_grid_valid(&m->grid) && m->reserve_bytes <= PROTO_FILE_MAX_BYTES ? 0 : -BASE_EFORMAT;
}

static unsigned store_words(const struct proto_store *m)
{
	return (m->grid.small_bytes ? PROTO_GRID_2 : 0) | (m->list_2 ? PROTO_LIST_2 : 0) |
		(m->list_3 ? PROTO_LIST_3 : 0);
}

int proto_store_encode(const struct proto_store *m, struct base_buf *b)
{
	Vckpt__Store s = VCKPT__STORE__INIT;
	int r = store_check(m);

	if (r < 0)
		return r;
	s.version = m->version;
	s.features = proto_words(store_words(m), &s.n_features);
	s.id = (ProtobufCBinaryData){sizeof m->id, (uint8_t *)m->id};
	s.seed = m->seed;
	s.min_bytes = m->grid.min_bytes;
	s.target_bytes = m->grid.target_bytes;
	s.row_bytes = m->grid.row_bytes;
	s.small_bytes = m->grid.small_bytes;
	s.reserve_bytes = m->reserve_bytes;
	return proto_pack(&s, b);
}

int proto_store_decode(const void *body, size_t len, struct proto_store *ret_m)
{
	struct proto_arena *arena;
	Vckpt__Store *s;
	int r = proto_unpack(&vckpt__store__descriptor, body, len, &arena, &s);

	memset(ret_m, 0, sizeof *ret_m);
	if (r < 0)
		return r;
	ret_m->arena = arena;
	ret_m->version = s->version;
	ret_m->seed = s->seed;
	ret_m->grid = (struct tensor_grid_params){s->min_bytes, s->target_bytes, s->row_bytes, s->small_bytes};
	ret_m->reserve_bytes = s->reserve_bytes;
	if (s->id.len == sizeof ret_m->id)
		memcpy(ret_m->id, s->id.data, sizeof ret_m->id);
	for (size_t i = 0; i < s->n_features; i++) {
		ret_m->list_2 |= strcmp(s->features[i], "list-2") == 0;
		ret_m->list_3 |= strcmp(s->features[i], "list-3") == 0;
	}
	r = s->id.len == sizeof ret_m->id && proto_words_are(s->features, s->n_features, store_words(ret_m))
		? store_check(ret_m) : -BASE_EFORMAT;
	if (r < 0)
		proto_store_release(ret_m);
	return r;
}

void proto_store_release(struct proto_store *m)
{
	if (!m)
		return;
	proto_arena_free(m->arena);
	memset(m, 0, sizeof *m);
}
