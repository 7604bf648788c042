/* SPDX-License-Identifier: Apache-2.0
 *
 * update: adding, removing and evicting commits.
 *
 * A commit gets the next number. Its places are put under that number, including those that an older commit had, which
 * `shadows` records. Its row in `numbers` comes last and makes the places count. If there are more places than a batch
 * they go in several transactions (this version of LMDB loses pages when a transaction spills): after a failure they
 * have a number without a row, so they are never found, and are swept later.
 *
 * Eviction: places count as INDEX_PLACE_BYTES each (not by pages: keys are digests, so deleting some leaves room in all
 * pages, which later ones fill). Places in the index and those to be added stay under five eighths of the bound, so
 * that the file, which LMDB never shrinks, stays under the bound even with half-empty pages and copies on write. Whole
 * commits are evicted, lowest numbers first; then one sweep over `places` deletes the dead ones. An evicted commit
 * keeps its row in `commits`: it is known and not offered again, or a store larger than its index would evict and add
 * without end. A removed commit loses its row, and commits whose places it took over are marked incomplete, so that the
 * next update adds them again. */
#include "index/index_internal.h"

#include <stdio.h>

#include "core/base/array.h"
#include "core/base/bisect.h"

#define BATCH 32768u

struct numbers { uint64_t *all; size_t n, room; };

static int numbers_add(struct numbers *l, uint64_t v)
{
	if (base_array_room(l->all, l->room, l->n + 1) < 0)
		return ENOMEM;
	l->all[l->n++] = v;
	return 0;
}

static bool numbers_have(const struct numbers *l, uint64_t v)
{
	size_t at = base_bisect(i, 0, l->n, l->all[i] < v);
	return at < l->n && l->all[at] == v;
}

/* Into a list that is sorted and short (commits that one commit shadows). */
static int numbers_insert(struct numbers *l, uint64_t v)
{
	int r;

	if (numbers_have(l, v))
		return 0;
	r = numbers_add(l, v);
	for (size_t n = l->n; r == 0 && n-- > 1 && l->all[n - 1] > l->all[n];) {
		uint64_t t = l->all[n];
		l->all[n] = l->all[n - 1];
		l->all[n - 1] = t;
	}
	return r;
}

static int delete_key(MDB_txn *txn, MDB_dbi dbi, const void *key, size_t len)
{
	MDB_val k = {len, (void *)key};
	int r = mdb_del(txn, dbi, &k, NULL);
	return r == MDB_NOTFOUND ? 0 : r;
}

/* The first key of a table at or after be64(number) that begins with it; MDB_NOTFOUND. */
static int first_of(MDB_txn *txn, MDB_dbi dbi, uint64_t number, uint8_t key[INDEX_KEY_MAX], size_t *ret_len)
{
	uint8_t prefix[8];
	MDB_cursor *c;
	int r;
	MDB_val k, v;

	index_be64(prefix, number);
	r = mdb_cursor_open(txn, dbi, &c);
	if (r != 0)
		return r;
	k = (MDB_val){8, prefix};
	r = mdb_cursor_get(c, &k, &v, MDB_SET_RANGE);
	if (r == 0 && (k.mv_size < 8 || k.mv_size > INDEX_KEY_MAX || memcmp(k.mv_data, prefix, 8) != 0))
		r = MDB_NOTFOUND;
	if (r == 0) {
		memcpy(key, k.mv_data, k.mv_size);
		*ret_len = k.mv_size;
	}
	mdb_cursor_close(c);
	return r;
}

static int delete_prefix(MDB_txn *txn, MDB_dbi dbi, uint64_t number)
{
	uint8_t key[INDEX_KEY_MAX];
	size_t len;
	int r;
	while ((r = first_of(txn, dbi, number, key, &len)) == 0)
		if ((r = delete_key(txn, dbi, key, len)) != 0)
			return r;
	return r == MDB_NOTFOUND ? 0 : r;
}

/* Deletes all rows of a number except its places. */
static int drop_number(struct index *i, MDB_txn *txn, uint64_t number)
{
	int r = delete_prefix(txn, i->dbi[INDEX_NUMBERS], number);
	if (r == 0)
		r = delete_prefix(txn, i->dbi[INDEX_PACKS], number);
	if (r == 0)
		r = delete_prefix(txn, i->dbi[INDEX_SHADOWS], number);
	return r;
}

/* ---- eviction ---- */

struct dead { uint8_t (*keys)[BASE_DIGEST_BYTES]; size_t n; uint8_t next[BASE_DIGEST_BYTES]; bool more; };

/* Collects up to BATCH dead places from key d->next on. */
static int find_dead(struct index *i, const struct numbers *live, uint64_t keep, struct dead *d)
{
	MDB_txn *txn;
	MDB_cursor *c;
	int r = mdb_txn_begin(i->env, NULL, MDB_RDONLY, &txn);
	MDB_val k, v;
	struct index_body b;

	if (r != 0)
		return r;
	r = mdb_cursor_open(txn, i->dbi[INDEX_PLACES], &c);
	if (r != 0)
		return index_end(txn, r);
	k = (MDB_val){sizeof d->next, d->next};
	d->n = 0;
	d->more = false;
	for (r = mdb_cursor_get(c, &k, &v, MDB_SET_RANGE); r == 0; r = mdb_cursor_get(c, &k, &v, MDB_NEXT)) {
		if (k.mv_size != BASE_DIGEST_BYTES) {
			r = MDB_CORRUPTED;
			break;
		}
		if (index_value_ok(INDEX_PLACES, k.mv_data, k.mv_size, v.mv_data, v.mv_size, &b) &&
			b.len == INDEX_PLACE_BODY_BYTES &&
			(base_get64(b.bytes) >= keep || numbers_have(live, base_get64(b.bytes))))
			continue;
		if (d->n == BATCH) {
			memcpy(d->next, k.mv_data, sizeof d->next);
			d->more = true;
			break;
		}
		memcpy(d->keys[d->n++], k.mv_data, BASE_DIGEST_BYTES);
	}
	mdb_cursor_close(c);
	mdb_txn_abort(txn);
	return r == MDB_NOTFOUND ? 0 : r;
}

/* Deletes the places of all numbers that are neither live nor at least `keep`. */
static int sweep(struct index *i, const struct numbers *live, uint64_t keep)
{
	struct dead d = {malloc(BATCH * BASE_DIGEST_BYTES), 0, {0}, true};
	int r = d.keys ? 0 : ENOMEM;
	while (r == 0 && d.more) {
		MDB_txn *txn;

		r = find_dead(i, live, keep, &d);
		if (r != 0 || d.n == 0 || (r = mdb_txn_begin(i->env, NULL, 0, &txn)) != 0)
			break;
		for (size_t n = 0; r == 0 && n < d.n; n++)
			r = delete_key(txn, i->dbi[INDEX_PLACES], d.keys[n], BASE_DIGEST_BYTES);
		r = index_end(txn, r);
	}
	free(d.keys);
	return r;
}

/* Marks commits as evicted, lowest numbers first, until they had `places` places. The other numbers go to `live`. */
static int evict_commits(struct index *i, uint64_t places, struct numbers *live)
{
	base_cleanup_free uint64_t *gone = NULL;
	struct numbers out = {0};
	MDB_txn *txn;
	MDB_cursor *c;
	int r = mdb_txn_begin(i->env, NULL, 0, &txn);
	MDB_val k, v;
	struct index_body b;
	uint64_t freed = 0;

	if (r != 0)
		return r;
	r = mdb_cursor_open(txn, i->dbi[INDEX_NUMBERS], &c);
	if (r != 0)
		return index_end(txn, r);
	live->n = 0;
	for (r = mdb_cursor_get(c, &k, &v, MDB_FIRST); r == 0; r = mdb_cursor_get(c, &k, &v, MDB_NEXT)) {
		bool ok = k.mv_size == 8 && index_value_ok(INDEX_NUMBERS, k.mv_data, 8, v.mv_data, v.mv_size, &b) &&
			b.len > 48;
		bool goes = !ok || freed < places;
		if (k.mv_size != 8) {
			r = MDB_CORRUPTED;
			break;
		}
		freed += ok && goes ? base_get64(b.bytes + 40) + 1 : 0;
		if ((r = numbers_add(goes ? &out : live, index_get_be64(k.mv_data))) != 0)
			break;
	}
	mdb_cursor_close(c);
	gone = out.all;
	r = r == MDB_NOTFOUND ? 0 : r;
	for (size_t n = 0; r == 0 && n < out.n; n++) {
		uint8_t key[8], body[9];
		index_be64(key, out.all[n]);
		if (index_get(txn, i->dbi, INDEX_NUMBERS, key, 8, &b) == 0 && b.len > 48) {
			struct index_body known;
			bool is;

			base_put64(body, out.all[n]);
			is = index_get(txn, i->dbi, INDEX_COMMITS, b.bytes, 32, &known) == 0 && known.len == 9;
			body[8] = INDEX_EVICTED | (is ? known.bytes[8] & INDEX_OWN : 0);
			if (is && index_state(known.bytes[8]) == INDEX_HELD)
				r = index_put(txn, i->dbi, INDEX_COMMITS, b.bytes, 32, body, sizeof body);
		}
		if (r == 0)
			r = drop_number(i, txn, out.all[n]);
	}
	return index_end(txn, r);
}

static int clear_places(struct index *i)
{
	MDB_txn *txn;
	int r = mdb_txn_begin(i->env, NULL, 0, &txn);
	if (r != 0)
		return r;
	r = mdb_drop(txn, i->dbi[INDEX_PLACES], 0);
	return index_end(txn, r);
}

/* What counts against the bound. */
static int used_bytes(struct index *i, uint64_t *ret_bytes)
{
	MDB_txn *txn;
	int r = mdb_txn_begin(i->env, NULL, MDB_RDONLY, &txn);
	MDB_stat places;

	if (r != 0)
		return r;
	r = mdb_stat(txn, i->dbi[INDEX_PLACES], &places);
	if (r == 0) {
		uint64_t pages = places.ms_branch_pages + places.ms_leaf_pages + places.ms_overflow_pages;
		*ret_bytes = index_used_bytes(txn, i->dbi) - pages * places.ms_psize +
			places.ms_entries * INDEX_PLACE_BYTES;
	}
	mdb_txn_abort(txn);
	return r;
}

/* Makes room for `need` bytes under `limit`. Numbers from `keep` on belong to the commit that is being added. */
static int evict(struct index *i, uint64_t need, uint64_t limit, uint64_t keep)
{
	struct numbers live = {0};
	uint64_t used;
	int r = used_bytes(i, &used);
	while (r == 0 && used + need > limit) {
		r = evict_commits(i, (used + need - limit) / INDEX_PLACE_BYTES + 1, &live);
		if (r == 0)
			r = live.n == 0 && keep == UINT64_MAX ? clear_places(i) : sweep(i, &live, keep);
		if (r == 0)
			r = used_bytes(i, &used);
		if (live.n == 0)
			break; /* the rest is the new commit's, or rows of known commits */
	}
	free(live.all);
	return r;
}

/* ---- adding ---- */

struct adding {
	struct index *i;
	const char *run; uint64_t entry; const struct base_digest *manifest;
	const struct index_place **sorted; uint64_t n; /* by digest: neighbours share pages */
	const char **packs; uint32_t npacks;           /* sorted */
	uint64_t number;
	bool own;                                      /* all its places are, or were when it was added before */
	struct numbers shadows;
};

static int by_digest(const void *a, const void *b)
{
	const struct index_place *const *p = a, *const *q = b;
	return base_digest_compare(&(*p)->digest, &(*q)->digest);
}

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static int prepare(struct adding *a, const struct index_place *places, uint64_t n)
{
	size_t run_len = strlen(a->run);
	uint64_t packs = 0;

	if (run_len == 0 || run_len > INDEX_RUN_MAX || n > UINT32_MAX)
		return EINVAL;
	a->sorted = malloc((n + 1) * sizeof *a->sorted);
	a->packs = malloc((n + 1) * sizeof *a->packs);
	if (!a->sorted || !a->packs)
		return ENOMEM;
	a->n = n;
	a->own = n > 0;
	for (uint64_t p = 0; p < n; p++) {
		size_t len;

		a->own = a->own && places[p].own;
		len = strnlen(places[p].pack, sizeof places[p].pack);
		if (len == 0 || len > INDEX_PACK_MAX)
			return EINVAL;
		a->sorted[p] = &places[p];
		if (packs == 0 || strcmp(a->packs[packs - 1], places[p].pack) != 0)
			a->packs[packs++] = places[p].pack;
	}
	qsort(a->sorted, n, sizeof *a->sorted, by_digest);
	qsort(a->packs, packs, sizeof *a->packs, by_text);
	for (uint64_t p = 0; p < packs; p++)
		if (a->npacks == 0 || strcmp(a->packs[a->npacks - 1], a->packs[p]) != 0)
			a->packs[a->npacks++] = a->packs[p];
	return 0;
}

/* Takes a number, deletes the rows of an earlier addition of this commit except places, and adds the names of packs. */
static int add_begin(struct adding *a)
{
	struct index_body b;
	MDB_txn *txn;
	uint8_t next[8], key[12];
	int r = mdb_txn_begin(a->i->env, NULL, 0, &txn);
	if (r != 0)
		return r;
	r = index_get(txn, a->i->dbi, INDEX_META, "next", 4, &b);
	if (r == 0 && (b.len != 8 || base_get64(b.bytes) >= UINT64_MAX - 1))
		r = MDB_CORRUPTED;
	if (r == 0) {
		a->number = base_get64(b.bytes);
		base_put64(next, a->number + 1);
		r = index_put(txn, a->i->dbi, INDEX_META, "next", 4, next, 8);
	}
	if (r == 0 && index_get(txn, a->i->dbi, INDEX_COMMITS, a->manifest->bytes, 32, &b) == 0 && b.len == 9) {
		a->own = a->own || b.bytes[8] & INDEX_OWN;
		r = drop_number(a->i, txn, base_get64(b.bytes));
	}
	for (uint32_t n = 0; r == 0 && n < a->npacks; n++) {
		index_pack_key(key, a->number, n);
		r = index_put(txn, a->i->dbi, INDEX_PACKS, key, sizeof key, a->packs[n], strlen(a->packs[n]));
	}
	return index_end(txn, r);
}

/* Is it the same object that an own place names? Then it is an own place, too. */
static bool same_as_own(const struct adding *a, MDB_txn *txn, const struct index_body *old, const struct index_place *p,
	const uint8_t body[static INDEX_PLACE_BODY_BYTES])
{
	uint8_t key[12];
	struct index_body pack;
	if (!old->bytes[47] || memcmp(old->bytes + 8, body + 8, 32) != 0 || memcmp(old->bytes + 44, body + 44, 3) != 0)
		return false;
	index_pack_key(key, base_get64(old->bytes), base_get32(old->bytes + 40));
	return index_get(txn, a->i->dbi, INDEX_PACKS, key, sizeof key, &pack) == 0 && pack.len == strlen(p->pack) &&
		memcmp(pack.bytes, p->pack, pack.len) == 0;
}

static int add_place(struct adding *a, MDB_txn *txn, const struct index_place *p)
{
	struct index_body old;
	uint8_t body[INDEX_PLACE_BODY_BYTES] = {0};
	const char *pack = p->pack, **found = bsearch(&pack, a->packs, a->npacks, sizeof *a->packs, by_text);
	base_put64(body, a->number);
	base_put64(body + 8, p->offset);
	base_put64(body + 16, p->checks);
	base_put64(body + 24, p->raw_len);
	base_put64(body + 32, p->stored_len);
	base_put32(body + 40, (uint32_t)(found - a->packs));
	base_put16(body + 44, p->codec);
	body[46] = p->kind;
	body[47] = a->own || p->own;
	if (index_get(txn, a->i->dbi, INDEX_PLACES, p->digest.bytes, 32, &old) == 0 && old.len == INDEX_PLACE_BODY_BYTES
	    && base_get64(old.bytes) != a->number) {
		int r = numbers_insert(&a->shadows, base_get64(old.bytes));
		if (r != 0)
			return r;
		body[47] = body[47] || same_as_own(a, txn, &old, p, body);
	}
	return index_put(txn, a->i->dbi, INDEX_PLACES, p->digest.bytes, 32, body, sizeof body);
}

static int add_batch(struct adding *a, uint64_t first, uint64_t end)
{
	MDB_txn *txn;
	int r = mdb_txn_begin(a->i->env, NULL, 0, &txn);
	if (r != 0)
		return r;
	for (uint64_t n = first; r == 0 && n < end; n++)
		r = add_place(a, txn, a->sorted[n]);
	return index_end(txn, r);
}

/* Adds the rows that make the commit count. held: false if it is too large for the index, and only known. */
static int add_end(struct adding *a, bool held)
{
	uint8_t key[16], body[INDEX_BODY_MAX];
	size_t run_len = strlen(a->run);
	MDB_txn *txn;
	int r = mdb_txn_begin(a->i->env, NULL, 0, &txn);
	if (r != 0)
		return r;
	base_put64(body, a->number);
	body[8] = (held ? INDEX_HELD : INDEX_EVICTED) | (a->own ? INDEX_OWN : 0);
	r = index_put(txn, a->i->dbi, INDEX_COMMITS, a->manifest->bytes, 32, body, 9);
	memcpy(body, a->manifest->bytes, 32);
	base_put64(body + 32, a->entry);
	base_put64(body + 40, a->n);
	memcpy(body + 48, a->run, run_len);
	index_be64(key, a->number);
	if (r == 0 && held)
		r = index_put(txn, a->i->dbi, INDEX_NUMBERS, key, 8, body, 48 + run_len);
	for (size_t n = 0; r == 0 && held && n < a->shadows.n; n++) {
		index_be64(key + 8, a->shadows.all[n]);
		r = index_put(txn, a->i->dbi, INDEX_SHADOWS, key, 16, NULL, 0);
	}
	return index_end(txn, r);
}

static int add_all(struct adding *a)
{
	uint64_t limit = a->i->max_bytes / 8 * 5, need = a->n * INDEX_PLACE_BYTES + a->npacks * 256;
	bool held = need <= limit;
	int r = held ? evict(a->i, need, limit, UINT64_MAX) : 0;
	if (!held)
		a->npacks = 0;
	if (r == 0)
		r = add_begin(a);
	for (uint64_t first = 0; r == 0 && held && first < a->n; first += BATCH) {
		uint64_t end = base_min(first + BATCH, a->n);
		r = add_batch(a, first, end);
		if (r != MDB_MAP_FULL)
			continue;
		r = evict(a->i, need, limit / 2, a->number);
		if (r == 0)
			r = add_batch(a, first, end);
	}
	return r == 0 ? add_end(a, held) : r;
}

int index_add_commit(struct index *i, const char *run, uint64_t entry, const struct base_digest *manifest,
	const struct index_place *places, uint64_t n)
{
	struct adding a;
	int r;

	if (i->flags & INDEX_READ_ONLY)
		return -EROFS;
	a = (struct adding){.i = i, .run = run, .entry = entry, .manifest = manifest};
	r = prepare(&a, places, n);
	if (r == 0)
		r = add_all(&a);
	free(a.sorted);
	free(a.packs);
	free(a.shadows.all);
	return index_write_error(i, r);
}

/* ---- removing ---- */

/* Marks a commit whose places were taken over, and removed with their new owner: it should be added again. */
static int unshadow(struct index *i, MDB_txn *txn, uint64_t older)
{
	struct index_body b, c;
	uint8_t key[8];
	index_be64(key, older);
	if (index_get(txn, i->dbi, INDEX_NUMBERS, key, 8, &b) != 0 || b.len <= 48)
		return 0;
	if (index_get(txn, i->dbi, INDEX_COMMITS, b.bytes, 32, &c) != 0 || c.len != 9 || base_get64(c.bytes) != older)
		return 0;
	c.bytes[8] = INDEX_INCOMPLETE | (c.bytes[8] & INDEX_OWN);
	return index_put(txn, i->dbi, INDEX_COMMITS, b.bytes, 32, c.bytes, 9);
}

int index_remove_commit(struct index *i, const struct base_digest *manifest)
{
	struct index_body b;
	MDB_txn *txn;
	int r, found;
	uint64_t number;
	uint8_t key[INDEX_KEY_MAX];
	size_t len;

	if (i->flags & INDEX_READ_ONLY)
		return -EROFS;
	r = mdb_txn_begin(i->env, NULL, 0, &txn);
	if (r != 0)
		return index_write_error(i, r);
	r = index_get(txn, i->dbi, INDEX_COMMITS, manifest->bytes, 32, &b);
	number = r == 0 && b.len == 9 ? base_get64(b.bytes) : 0;
	while (r == 0 && (found = first_of(txn, i->dbi[INDEX_SHADOWS], number, key, &len)) != MDB_NOTFOUND) {
		r = found != 0 ? found : len == 16 ? unshadow(i, txn, index_get_be64(key + 8)) : 0;
		if (r == 0)
			r = delete_key(txn, i->dbi[INDEX_SHADOWS], key, len);
	}
	if (r == 0)
		r = drop_number(i, txn, number);
	if (r == 0)
		r = delete_key(txn, i->dbi[INDEX_COMMITS], manifest->bytes, 32);
	return index_write_error(i, index_end(txn, r));
}
