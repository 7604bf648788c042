/* SPDX-License-Identifier: Apache-2.0
 *
 * store: the body of vckpt.store. */
#include "proto/codec_internal.h"

static const struct codec_field store_fields[] = {
	CODEC_FIELD(NUMBER, Store, store, version),
	CODEC_FIELD(BYTES, Store, store, id),
	CODEC_FIELD(NUMBER, Store, store, seed),
	CODEC_FIELD_AS(NUMBER, Store, min_bytes, store, grid.min_bytes),
	CODEC_FIELD_AS(NUMBER, Store, target_bytes, store, grid.target_bytes),
	CODEC_FIELD_AS(NUMBER, Store, row_bytes, store, grid.row_bytes),
	CODEC_FIELD(NUMBER, Store, store, reserve_bytes, .max = PROTO_FILE_MAX_BYTES),
	CODEC_FIELD_AS(NUMBER, Store, small_bytes, store, grid.small_bytes),
};

static unsigned store_words(const void *m)
{
	const struct proto_store *store = m;

	return (store->grid.small_bytes ? PROTO_GRID_2 : 0) | (store->list_2 ? PROTO_LIST_2 : 0) |
		(store->list_3 ? PROTO_LIST_3 : 0) | (store->list_4 ? PROTO_LIST_4 : 0);
}

static int store_unpack(const void *message, struct proto_arena *arena, void *m)
{
	const Vckpt__Store *s = message;
	struct proto_store *store = m;

	(void)arena;
	for (size_t i = 0; i < s->n_features; i++) {
		store->list_2 |= strcmp(s->features[i], "list-2") == 0;
		store->list_3 |= strcmp(s->features[i], "list-3") == 0;
		store->list_4 |= strcmp(s->features[i], "list-4") == 0;
	}
	return 0;
}

static int store_check(const void *m)
{
	const struct proto_store *store = m;
	bool known = store->version > 0 && store->version <= PROTO_VERSION;

	return known && (store->list_2 || !store->list_3) && (store->list_3 || !store->list_4) &&
		proto_grid_valid(&store->grid) ? 0 : -BASE_EFORMAT;
}

static const struct codec_message store_message = CODEC_MESSAGE_OF(store, struct proto_store, store_fields,
	.words = store_words, .unpack = store_unpack, .check = store_check);
CODEC_RECORD(store, struct proto_store)
