/* SPDX-License-Identifier: Apache-2.0
 *
 * dedup: one table of all objects that this save refers to, by digest and kind: those that it wrote (so that an
 * equal piece that comes later refers to the first) and those of other commits. Objects lie in slabs and never
 * move: the pack writer completes their references when an extent ends.
 *
 * Only the appender's thread calls these functions, in the order of pieces: what is reused, and from where, does not
 * depend on threads. */
#include "core/save/write/write_internal.h"
#include "core/base/array.h"

#define DEDUP_SLAB 1024u

void save_dedup_release(struct save_dedup *d)
{
	for (uint32_t i = 0; i < (d->count + DEDUP_SLAB - 1) / DEDUP_SLAB; i++)
		free(d->slabs[i]);
	free(d->slabs);
	base_table_release(&d->by_digest);
	free(d->packs);
	free(d->bases);
	*d = (struct save_dedup){0};
}

static struct save_known *dedup_at(const struct save_dedup *d, uint32_t i)
{
	return &d->slabs[i / DEDUP_SLAB][i % DEDUP_SLAB];
}

/* A digest is a hash already; docs/decisions.md says why it is not hashed again with the seed. */
static uint32_t dedup_hash(const struct base_digest *digest)
{
	return base_get32(digest->bytes);
}

struct save_known *save_dedup_find(const struct save_dedup *d, const struct base_digest *digest,
	enum pack_object_kind kind)
{
	uint32_t hash = dedup_hash(digest), i;
	size_t at = 0;

	while ((i = base_table_next(&d->by_digest, hash, &at)) != BASE_TABLE_NONE) {
		struct save_known *k = dedup_at(d, i);

		if (k->ref.kind == kind && base_digest_equal(&k->ref.digest, digest))
			return k;
	}
	return NULL;
}

static bool dedup_add_slab(struct save_dedup *d)
{
	uint32_t n = d->count / DEDUP_SLAB;

	if (base_array_more(d->slabs, n) < 0)
		return false;
	d->slabs[n] = malloc(DEDUP_SLAB * sizeof **d->slabs);
	return d->slabs[n] != NULL;
}

struct save_known *save_dedup_add(struct save_dedup *d, const struct base_digest *digest, enum pack_object_kind kind)
{
	struct save_known *k;

	if (base_table_reserve(&d->by_digest, 1) < 0)
		return NULL;
	if (d->count % DEDUP_SLAB == 0 && !dedup_add_slab(d))
		return NULL;
	k = dedup_at(d, d->count);
	*k = (struct save_known){.ref = {.digest = *digest, .kind = kind}};
	base_table_add(&d->by_digest, dedup_hash(digest), d->count++);
	return k;
}

int64_t save_dedup_pack(struct save_dedup *d, const char *name, bool own)
{
	for (uint32_t i = d->npacks; i-- > 0;)
		if (strcmp(d->packs[i].name, name) == 0)
			return i;
	if (base_array_room(d->packs, d->packs_room, (size_t)d->npacks + 1) < 0)
		return -ENOMEM;
	d->packs[d->npacks] = (struct save_pack){.own = own};
	memccpy(d->packs[d->npacks].name, name, 0, PACK_NAME_MAX - 1);
	return d->npacks++;
}

static bool dedup_has_attempt(const struct save_dedup *d, const char *attempt)
{
	for (uint32_t i = 0; i < d->nattempts; i++)
		if (strcmp(d->attempts[i], attempt) == 0)
			return true;
	return false;
}

/* The lifetimes rule: packs of at most SAVE_KEEP_MAX other attempts. */
static bool dedup_may_attempt(const struct save_dedup *d, const char *pack, struct pack_name *ret_name)
{
	if (pack_name_parse(pack, ret_name) < 0)
		return false;
	return d->nattempts < SAVE_KEEP_MAX || dedup_has_attempt(d, ret_name->attempt);
}

bool save_dedup_may(const struct save_dedup *d, const char *pack)
{
	struct pack_name name;

	return save_bases_keep(d->decided, pack, false) &&
		(!atomic_load_explicit(&d->full, memory_order_acquire) || dedup_may_attempt(d, pack, &name));
}

static void dedup_add_attempt(struct save_dedup *d, const char *attempt)
{
	if (dedup_has_attempt(d, attempt))
		return;
	memccpy(d->attempts[d->nattempts++], attempt, 0, sizeof d->attempts[0] - 1);
	if (d->nattempts == SAVE_KEEP_MAX)
		atomic_store_explicit(&d->full, true, memory_order_release);
}

int save_dedup_name(struct save_dedup *d, struct commit_attempt *a, const char *run, uint64_t entry,
	const struct base_digest *manifest, struct base_error *err)
{
	int r;

	for (uint32_t i = d->nbases; i-- > 0;)
		if (base_digest_equal(&d->bases[i].manifest, manifest))
			return d->bases[i].usable ? 0 : -ENOENT;
	if (base_array_more(d->bases, d->nbases) < 0)
		return base_no_memory(err);
	r = commit_attempt_base(a, run, entry, manifest, err);
	if (r < 0 && r != -ESTALE)
		return r;
	d->bases[d->nbases++] = (struct save_named){*manifest, r >= 0};
	return r < 0 ? -ENOENT : 0;
}

/* A pack enters the table only once it is known to be there. */
static int64_t dedup_admit_pack(struct save_dedup *d, struct store *s, const char *name)
{
	struct pack *pack;
	int64_t number;

	for (uint32_t i = d->npacks; i-- > 0;)
		if (strcmp(d->packs[i].name, name) == 0)
			return i;
	if (store_pack_get(s, name, &pack, NULL) < 0)
		return -ENOENT;
	number = save_dedup_pack(d, name, false);
	if (number >= 0)
		d->packs[number].size = pack_size(pack);
	store_pack_put(s, pack);
	return number;
}

static bool dedup_place_fits(const struct index_place *p, uint64_t raw_len, uint64_t size)
{
	uint64_t checks = pack_object_checks_bytes(p->codec, p->raw_len);
	uint64_t end = size - base_min(size, PACK_TAIL_BYTES);

	return pack_codec_valid(p->codec) && p->raw_len == raw_len && p->stored_len <= p->raw_len
		&& p->offset >= PACK_HEAD_BYTES
		&& p->stored_len <= end && p->offset <= end - p->stored_len && checks <= end
			&& p->checks <= end - checks;
}

static bool dedup_noted(const struct save_dedup *d, const struct index_place *p)
{
	const struct pack_object_ref ref = save_place_ref(p);

	return commit_notes_name(d->notes, p->pack, &ref);
}

bool save_dedup_fits(const struct save_dedup *d, struct store *s, const struct index_place *place, uint64_t raw_len)
{
	struct pack *pack;
	bool fits;

	if (dedup_noted(d, place) || !save_dedup_may(d, place->pack) || store_pack_get(s, place->pack, &pack, NULL) < 0)
		return false;
	fits = dedup_place_fits(place, raw_len, pack_size(pack));
	store_pack_put(s, pack);
	return fits;
}

int save_dedup_admit(struct save_dedup *d, struct store *s, struct commit_attempt *a, const struct index_place *place,
	enum pack_object_kind kind,
	uint64_t raw_len, struct save_known **ret_known, struct base_error *err)
{
	struct pack_name name;
	struct save_known *k;
	int64_t number;
	int r;

	if (place->kind != kind || dedup_noted(d, place))
		return -ENOENT;
	if (!save_bases_keep(d->decided, place->pack, kind == PACK_OBJECT_LAYOUT) ||
		!dedup_may_attempt(d, place->pack, &name)) {
		d->refused = true;
		return -ENOENT;
	}
	r = save_dedup_name(d, a, place->run, place->entry, &place->manifest, err);
	if (r < 0)
		return r;
	number = dedup_admit_pack(d, s, place->pack);
	if (number == -ENOENT || (number >= 0 && !dedup_place_fits(place, raw_len, d->packs[number].size)))
		return -ENOENT;
	k = number < 0 ? NULL : save_dedup_add(d, &place->digest, kind);
	if (!k)
		return base_no_memory(err);
	k->ref = save_place_ref(place); /* of that length and kind */
	k->pack = (uint32_t)number;
	dedup_add_attempt(d, name.attempt);
	d->packs[number].live_bytes += place->stored_len;
	*ret_known = k;
	return 0;
}
