/* SPDX-License-Identifier: Apache-2.0
 *
 * given: the bands of a copy. Another store's record says which digest each piece has. That is a name, and no more:
 * what this store has under that name is used where its own record is believed (trust.h), or after its stored bytes
 * were hashed; else the other store's bytes are fetched, and hashed. So no byte enters under a digest that is not its
 * own, whatever either store says, and of unchanged pieces nothing is fetched. The encoded form comes as it is: it was
 * decoded for the hash, and its checks depend on nothing but digest and bytes (docs/security.md, Copies).
 *
 * A piece that is equal to an earlier one of the same save is left to the appender, which has settled that one. */
#include "core/base/clock.h"
#include "core/save/write/write_internal.h"

static int given_wrong(struct save_band *b, const struct save_piece *p)
{
	return base_error_set(&b->err, -BASE_EDAMAGED, "piece %llu is not what its record says: its bytes have another "
		"digest (vckpt verify looks at all of them)",
		(unsigned long long)(b->first_piece + (uint64_t)(p - b->pieces)));
}

/* The bytes in `raw` are those of the pieces' digests. */
static int given_hash(struct save_band *b, uint64_t seed, struct save_piece *const *pieces, unsigned n)
{
	struct base_object objects[SAVE_GIVEN_GROUP];

	for (unsigned i = 0; i < n; i++)
		objects[i] = (struct base_object){.bytes = b->raw + pieces[i]->offset, .len = pieces[i]->len};
	base_digests_of(objects, n);
	for (unsigned i = 0; i < n; i++) {
		if (!base_digest_equal(&objects[i].digest, &pieces[i]->digest))
			return given_wrong(b, pieces[i]);
		base_xxh128_of(seed, b->raw + pieces[i]->offset, pieces[i]->len, &pieces[i]->xxh);
	}
	return 0;
}

int save_given_fetch(struct save_band *b, const struct save_writer *w, struct save_piece *p)
{
	int r = b->given.fetch(b->given.arg, b, &p, 1);

	if (r == 0)
		r = given_hash(b, w->store->info.seed, &p, 1);
	p->encoded = r == 0;
	return r;
}

/* The index knows no XXH3-128, so what it finds is read in any case. */
static bool given_in_index(struct save_piece *p, const struct save_writer *w)
{
	p->found = save_writer_lookup(w, &p->digest, PACK_OBJECT_PIECE, p->len, &p->place);
	p->looked = true;
	if (!p->found || !save_dedup_may(&w->dedup, p->place.pack))
		return false;
	p->place_compared = save_trust_rehash(w->store, &p->place, &p->xxh);
	p->refuted |= !p->place_compared;
	p->found = p->place_compared;
	return p->place_compared;
}

static bool given_taken(struct save_piece *p, const struct save_writer *w)
{
	p->taken = save_taken_find(w, &p->digest, PACK_OBJECT_PIECE, p->len, &p->xxh, &p->place);
	return p->taken;
}

/* 1: the store has it, or it is in its row; 0: it is fetched. */
static int given_piece(struct save_band *b, const struct save_writer *w, struct save_piece *p, uint32_t i)
{
	const struct store_piece *from = &b->given.pieces[i];

	p->digest = from->ref.digest;
	if (from->inline_bytes) {
		memcpy(b->raw + p->offset, from->inline_bytes, p->len);
		return given_hash(b, w->store->info.seed, &p, 1) < 0 ? -BASE_EDAMAGED : 1;
	}
	p->repeats = b->given.first[i] != NULL;
	return p->repeats || save_band_at_position(b, w, p, true) || save_band_at_position(b, w, p, false) ||
		(!p->refuted && given_in_index(p, w)) || given_taken(p, w);
}

static int given_fetch(struct save_band *b, const struct save_writer *w, struct save_piece **pieces, unsigned n)
{
	uint64_t begin = base_monotonic_ns(), middle;
	int r = b->given.fetch(b->given.arg, b, pieces, n);

	middle = base_monotonic_ns();
	b->read_ns += middle - begin;
	if (r == 0)
		r = given_hash(b, w->store->info.seed, pieces, n);
	b->digest_ns += base_monotonic_ns() - middle;
	for (unsigned i = 0; r == 0 && i < n; i++)
		pieces[i]->encoded = true;
	return r;
}

int save_given_process(struct save_band *b, struct save_writer *w)
{
	struct save_piece *fetched[SAVE_GIVEN_GROUP];
	unsigned n = 0;
	int r = 0;

	b->in = NULL;
	b->cut = true;
	b->raw = b->memory[1];
	b->out = b->memory[0];
	if (b->given.cancelled && b->given.cancelled())
		return base_error_set(&b->err, -EINTR, "interrupted");
	save_band_rows(b, w);
	for (uint32_t i = 0; r >= 0 && i < b->npieces; i++) {
		struct save_piece *p = &b->pieces[i];

		r = given_piece(b, w, p, i);
		if (r == 0)
			fetched[n++] = p;
		if (r >= 0 && (n == SAVE_GIVEN_GROUP || (i + 1 == b->npieces && n))) {
			r = given_fetch(b, w, fetched, n);
			n = 0;
		}
	}
	for (uint32_t i = 0; r >= 0 && i < b->npieces; i++)
		if (!b->pieces[i].repeats)
			b->given.pieces[i].xxh = b->pieces[i].xxh;
	return r < 0 ? r : 0;
}
