/* SPDX-License-Identifier: Apache-2.0
 *
 * blob: global and per-rank byte strings, after the tensors, in the order of (per rank, name).
 *
 * A rank's go into the pack `meta`, if they have BLOB_META_BYTES or less together: a pack of their own would be one
 * more file for each step, and two more fsyncs to wait for. An import's go into the pack `blobs`: its index finds them
 * again, and a pack is kept whole for each object that a later step refers to.
 *
 * Short ones (BLOB_MEMORY_BYTES) are held in memory: read once, digested, looked up, encoded. Long ones are read
 * twice: once for the digest, which says whether the store has them, and once into the pack as they are; the pack
 * writer digests them again, so that a file that changes between the two is found out. */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/save/write/write_internal.h"

#define BLOB_META_BYTES (UINT64_C(1) << 20)
#define BLOB_MEMORY_BYTES (UINT64_C(16) << 20)
#define BLOB_READ_BYTES (UINT64_C(4) << 20)

/* An import's plan is its own, a rank's is borrowed. Versions that do not know the word list-2 would verify a store
 * without it, and take a blob in that pack for a fault. */
static bool blobs_in_meta(const struct save_writer *w)
{
	return w->store->info.list_2 && w->planned != &w->whole && w->blob_bytes <= BLOB_META_BYTES;
}

static void blob_memory_release(struct save_encoding *m)
{
	free(m->raw);
	free(m->out);
	free(m->scratch);
	free(m->checks);
	free(m->lens);
}

static int blob_memory_init(struct save_encoding *m, const struct save_writer *w)
{
	uint64_t most = 0, blocks;

	for (uint32_t i = 0; i < w->nblobs; i++)
		most = base_max(most, w->blobs[i].len > BLOB_MEMORY_BYTES ? BLOB_READ_BYTES : w->blobs[i].len);
	blocks = base_block_count(most);
	m->raw = aligned_alloc(SAVE_ALIGN, base_align(most + 1, SAVE_ALIGN));
	m->out = malloc(most + 1);
	m->scratch = malloc(PACK_CODEC_SCRATCH);
	m->checks = malloc((blocks + 1) * sizeof *m->checks);
	m->lens = malloc((blocks + 1) * sizeof *m->lens);
	return m->raw && m->out && m->scratch && m->checks && m->lens ? 0 : -ENOMEM;
}

static int blob_read(struct save_appender *a, const struct save_blob *b, uint64_t offset, void *bytes, size_t len,
	struct base_error *err)
{
	uint64_t begin = base_monotonic_ns();
	int r = b->source.read(b->source.arg, offset, bytes, len, err);

	a->w->result.read_ns += base_monotonic_ns() - begin;
	return r < 0 ? base_error_prefix(err, r, "blob %s cannot be read", b->name) : 0;
}

/* Passes over a long blob, for its digest or into the pack. */
static int blob_pass(struct save_appender *a, const struct save_blob *b, struct save_encoding *m, struct base_hasher *h,
	struct base_error *err)
{
	for (uint64_t at = 0; at < b->len;) {
		size_t n = base_min(b->len - at, BLOB_READ_BYTES);
		int r = blob_read(a, b, at, m->raw, n, err);

		if (r < 0)
			return r;
		if (h)
			base_hasher_update(h, m->raw, n);
		else if ((r = pack_stream_add(a->pack, m->raw, n)) < 0)
			return save_write_failed(a->w, a->pack_class, r, err);
		at += n;
		save_writer_progress(a->w, h ? n / 2 : n - n / 2, false);
	}
	return 0;
}

static int blob_digest(struct save_appender *a, struct save_blob *b, struct save_encoding *m, struct base_error *err)
{
	struct base_hasher *h;
	int r;

	if (b->len <= BLOB_MEMORY_BYTES) {
		r = b->len ? blob_read(a, b, 0, m->raw, b->len, err) : 0;
		if (r == 0)
			base_digest_of(m->raw, b->len, &b->digest);
		return r;
	}
	h = base_hasher_new();
	if (!h)
		return base_no_memory(err);
	r = blob_pass(a, b, m, h, err);
	if (r == 0 && base_hasher_final(h, &b->digest) < 0)
		r = base_no_memory(err);
	base_hasher_free(h);
	return r;
}

static int blob_append_short(struct save_appender *a, const struct save_blob *b, struct save_encoding *m,
	struct save_known *k, struct base_error *err)
{
	uint64_t stored;
	uint16_t codec = save_encode(m, 1, &b->digest, b->len, &stored);
	bool raw = codec == PACK_CODEC_RAW, meta = blobs_in_meta(a->w);
	int r;

	r = meta ? 0 : save_appender_room(a, stored, err);
	if (r < 0)
		return r;
	r = pack_append(meta ? a->meta : a->pack, &b->digest, PACK_OBJECT_BLOB, codec, raw ? m->raw : m->out,
		stored, b->len, m->checks, raw ? NULL : m->lens, &k->ref);
	return r < 0 ? save_write_failed(a->w, meta ? "meta" : a->pack_class, r, err) : 0;
}

static int blob_append_long(struct save_appender *a, const struct save_blob *b, struct save_encoding *m,
	struct save_known *k, struct base_error *err)
{
	int r = save_appender_room(a, b->len, err);

	if (r < 0)
		return r;
	r = pack_stream_begin(a->pack, &b->digest, PACK_OBJECT_BLOB, b->len);
	if (r < 0)
		return save_write_failed(a->w, a->pack_class, r, err);
	r = blob_pass(a, b, m, NULL, err);
	if (r < 0)
		return r;
	r = pack_stream_end(a->pack, &k->ref);
	if (r == -BASE_EDAMAGED)
		return base_error_set(err, r, "blob %s changed while it was read", b->name);
	return r < 0 ? save_write_failed(a->w, a->pack_class, r, err) : 0;
}

/* Has the store such a blob? Where the step that has it is not the user's own, the blob's bytes are hashed. */
static bool blob_find(struct save_appender *a, const struct save_blob *b, struct index_place *ret_place)
{
	struct save_writer *w = a->w;

	if (!save_writer_lookup(w, &b->digest, PACK_OBJECT_BLOB, b->len, ret_place))
		return false;
	if (ret_place->own)
		return true;
	if (!save_trust_rehash(w->store, ret_place, NULL)) {
		w->result.pieces_refuted++;
		return false;
	}
	w->result.pieces_compared++;
	return true;
}

/* A given one may be in the bases, too. */
static bool blob_at_base(struct save_appender *a, const struct save_blob *b, unsigned base,
	struct index_place *ret_place)
{
	bool trusted;

	return save_base_blob(a->w->bases.all[base], &b->digest, b->len, ret_place, &trusted) &&
		(trusted || save_trust_rehash(a->w->store, ret_place, NULL));
}

/* 0: it refers to what the store has. -ENOENT: it is written. */
static int blob_refer(struct save_appender *a, struct save_blob *b, struct base_error *err)
{
	struct save_writer *w = a->w;
	unsigned bases = b->given && !blobs_in_meta(w) ? save_bases_count(&w->bases) : 0;
	struct index_place place;
	struct save_known *k = save_dedup_find(&w->dedup, &b->digest, PACK_OBJECT_BLOB);
	int r = k ? 0 : -ENOENT;

	w->dedup.refused = false;
	for (unsigned i = 0; r == -ENOENT && i < bases; i++)
		if (blob_at_base(a, b, i, &place))
			r = save_dedup_admit(&w->dedup, w->store, w->attempt, &place, PACK_OBJECT_BLOB, b->len, &k,
				err);
	if (r == -ENOENT && blob_find(a, b, &place))
		r = save_dedup_admit(&w->dedup, w->store, w->attempt, &place, PACK_OBJECT_BLOB, b->len, &k, err);
	if (r == -ENOENT && save_taken_find(w, &b->digest, PACK_OBJECT_BLOB, b->len, NULL, &place))
		r = save_taken_admit(w, &place, &k, err);
	if (r == 0)
		b->known = k;
	return r;
}

static int blob_given_read(struct save_appender *a, struct save_blob *b, struct save_encoding *m,
	struct base_error *err)
{
	struct base_digest given = b->digest;
	int r = blob_digest(a, b, m, err);

	if (r == 0 && !base_digest_equal(&given, &b->digest))
		r = base_error_set(err, -BASE_EDAMAGED, "blob %s is not what its record says: its bytes have another "
			"digest (vckpt verify looks at all of them)", b->name);
	return r;
}

static int blob_save(struct save_appender *a, struct save_blob *b, struct save_encoding *m, struct base_error *err)
{
	struct save_writer *w = a->w;
	struct save_known *k;
	int r = b->given ? 0 : blob_digest(a, b, m, err);

	if (r < 0)
		return r;
	r = b->len ? blob_refer(a, b, err) : b->given ? -ENOENT : 0;
	if (r != -ENOENT)
		return r;
	if (b->given && ((r = blob_given_read(a, b, m, err)) < 0 || b->len == 0))
		return r;
	w->result.bytes_again += w->dedup.refused ? b->len : 0;
	k = save_dedup_add(&w->dedup, &b->digest, PACK_OBJECT_BLOB);
	if (!k)
		return base_no_memory(err);
	r = b->len <= BLOB_MEMORY_BYTES ? blob_append_short(a, b, m, k, err) : blob_append_long(a, b, m, k, err);
	if (r < 0)
		return r;
	save_appender_count(a, blobs_in_meta(w) ? a->meta_number : a->pack_number, k);
	b->known = k;
	return 0;
}

static int blob_compare(const void *a, const void *b)
{
	const struct save_blob *x = a, *y = b;

	return x->per_rank != y->per_rank ? (int)x->per_rank - (int)y->per_rank : strcmp(x->name, y->name);
}

int save_appender_blobs(struct save_appender *a, struct base_error *err)
{
	__attribute__((cleanup(blob_memory_release))) struct save_encoding m = {0};
	struct save_writer *w = a->w;
	int r = blob_memory_init(&m, w);

	if (r < 0)
		return base_no_memory(err);
	if (w->nblobs)
		qsort(w->blobs, w->nblobs, sizeof *w->blobs, blob_compare);
	r = save_appender_class(a, blobs_in_meta(w) ? NULL : "blobs", err);
	for (uint32_t i = 0; r == 0 && i < w->nblobs; i++) {
		if (i && blob_compare(&w->blobs[i - 1], &w->blobs[i]) == 0)
			return base_error_set(err, -EEXIST, "blob %s is given twice", w->blobs[i].name);
		r = blob_save(a, &w->blobs[i], &m, err);
		if (r == 0 && w->blobs[i].len <= BLOB_MEMORY_BYTES)
			save_writer_progress(w, w->blobs[i].len, false);
	}
	if (r == 0 && blobs_in_meta(w) && (r = pack_extent_end(a->meta)) < 0) /* their references are complete */
		save_write_failed(w, "meta", r, err);
	return r;
}
