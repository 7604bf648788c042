/* SPDX-License-Identifier: Apache-2.0
 *
 * taken: packs that this save has taken over from an attempt that will never be visible (copy_resume.c). They are its
 * own now, and their footers say what is in them. That is a claim: an object is used once its stored bytes were hashed.
 */
#include "core/base/array.h"
#include "core/save/write/write_internal.h"

static uint32_t taken_hash(const struct base_digest *digest)
{
	return base_table_hash(digest->bytes, sizeof digest->bytes);
}

static int taken_add(struct save_taken *t, const struct pack_footer *f, const char *name, uint64_t size)
{
	if (t->n + f->count >= BASE_TABLE_NONE || base_array_more(t->packs, t->npacks) < 0 ||
		base_array_room(t->objects, t->room, t->n + f->count) < 0 ||
		base_table_reserve(&t->by_digest, f->count) < 0)
		return -ENOMEM;
	for (uint64_t i = 0; i < f->count; i++) {
		t->objects[t->n] = f->objects[i];
		t->objects[t->n].pack = t->npacks;
		base_table_add(&t->by_digest, taken_hash(&f->objects[i].digest), (uint32_t)t->n++);
	}
	t->packs[t->npacks].size = size;
	memccpy(t->packs[t->npacks++].name, name, 0, PACK_NAME_MAX);
	return 0;
}

int save_writer_taken(struct save_writer *w, const char *name, struct base_error *err)
{
	struct pack_footer f = {0};
	struct pack *pack;
	int r;

	if (store_pack_get(w->store, name, &pack, NULL) < 0)
		return 0;
	r = pack_footer_read(pack, &f, NULL) == 0 ? taken_add(&w->taken, &f, name, pack_size(pack)) : 0;
	store_pack_put(w->store, pack);
	pack_footer_free(&f);
	return r < 0 ? base_no_memory(err) : 0;
}

bool save_taken_find(const struct save_writer *w, const struct base_digest *digest, enum pack_object_kind kind,
	uint64_t raw_len, struct base_xxh128 *ret_xxh, struct index_place *ret_place)
{
	const struct save_taken *t = &w->taken;
	uint32_t hash = t->n ? taken_hash(digest) : 0, i;
	size_t at = 0;

	while ((i = base_table_next(&t->by_digest, hash, &at)) != BASE_TABLE_NONE) {
		const struct pack_object_ref *ref = &t->objects[i];

		if (ref->kind != kind || ref->raw_len != raw_len || !base_digest_equal(&ref->digest, digest))
			continue;
		save_place_of(ref, t->packs[ref->pack].name, ret_place);
		if (save_trust_rehash(w->store, ret_place, ret_xxh))
			return true;
	}
	return false;
}

int save_taken_admit(struct save_writer *w, const struct index_place *place, struct save_known **ret_known,
	struct base_error *err)
{
	struct save_dedup *d = &w->dedup;
	int64_t number = save_dedup_pack(d, place->pack, true);
	struct save_known *k = number < 0 ? NULL : save_dedup_add(d, &place->digest, place->kind);

	if (!k)
		return base_no_memory(err);
	k->ref = save_place_ref(place);
	k->pack = (uint32_t)number;
	for (uint32_t i = 0; i < w->taken.npacks; i++)
		if (strcmp(w->taken.packs[i].name, place->pack) == 0)
			d->packs[number].size = w->taken.packs[i].size;
	d->packs[number].live_bytes += place->stored_len;
	*ret_known = k;
	return 0;
}

void save_taken_release(struct save_taken *t)
{
	free(t->objects);
	free(t->packs);
	base_table_release(&t->by_digest);
	*t = (struct save_taken){0};
}
