/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_verify: looks at every byte of a pack once, from front to back. Each byte is one of: head (compared with what a
 * writer makes), stored bytes and checks of an object (checked against each other, decoded, hashed against its digest),
 * padding (zero), footer (SHA-256 in the tail, places by the arithmetic of extents), tail. So no change goes unseen.
 *
 * Of an extent only the checks are kept (at most 12 bytes for each 16 KiB). Stored bytes pass through one buffer in
 * steps of up to 512 KiB, which fit into the second-level cache together with the decoded bytes. Objects that are no
 * longer than a step wait there, checked and decoded, until it is full: then they are hashed together
 * (core/base/digest.h). */
#include <string.h>

#include "core/base/cleanup.h"
#include "core/pack/pack_format.h"

enum { VERIFY_STEP_BLOCKS = 32, VERIFY_STEP_BYTES = VERIFY_STEP_BLOCKS * BASE_BLOCK_BYTES };

struct waiting { const struct pack_object_ref *ref; struct base_xxh128 xxh; };

struct verify {
	struct pack *p;
	const struct pack_verify_calls *calls;
	struct base_hasher *hasher;
	struct base_xxh128_state *xxh;
	uint8_t *stored, *raw, *scratch; /* a step's stored bytes, its raw ones, the codec's */
	size_t used; /* bytes of both that belong to objects that wait */
	struct waiting waiting[VERIFY_STEP_BLOCKS]; struct base_object objects[VERIFY_STEP_BLOCKS]; size_t nwaiting;
};

static void seen(struct verify *v, uint64_t bytes)
{
	if (v->calls->progress && bytes)
		v->calls->progress(v->calls->arg, bytes);
}

/* Reads. 0; 1: they could not be read, which was reported as damage; or -ENOMEM. */
static int fetch(struct verify *v, uint64_t offset, void *bytes, size_t len, const struct pack_object_ref *object)
{
	struct base_error err = { 0 };
	int r = pack_read(v->p, offset, bytes, len, &err);
	seen(v, len);
	if (r == 0 || r == -ENOMEM)
		return r;
	v->calls->damage(v->calls->arg, offset, len, object, err.text);
	return 1;
}

static int verify_padding(struct verify *v, uint64_t from, uint64_t to)
{
	while (from < to) {
		size_t n = base_min(to - from, 4096);
		int r = fetch(v, from, v->scratch, n, NULL);
		if (r < 0)
			return r;
		for (size_t i = 0; r == 0 && i < n; i++)
			if (v->scratch[i] != 0) {
				v->calls->damage(v->calls->arg, from + i, 1, NULL, "padding is not zero");
				break;
			}
		from += n;
	}
	return 0;
}

/* How many blocks there are from `block` on (at most a step), and how many stored bytes they have. */
static uint64_t step_of(
	const struct pack_object_ref *ref, const uint8_t *lens, uint64_t block, uint64_t blocks, size_t *ret_len)
{
	uint64_t n = base_min(blocks - block, VERIFY_STEP_BLOCKS);
	*ret_len = 0;
	for (uint64_t i = 0; i < n; i++)
		*ret_len += lens ? base_get32(lens + 4 * (block + i)) & ~PACK_BLOCK_RAW
				 : base_min(ref->raw_len - (block + i) * BASE_BLOCK_BYTES, BASE_BLOCK_BYTES);
	return n;
}

/* Checks the stored lengths of an encoded object: each must be possible, and their sum must be the one in the
 * footer. */
static bool lens_good(const struct pack_object_ref *ref, const uint8_t *lens)
{
	uint64_t sum = 0;
	for (uint64_t i = 0; i < base_block_count(ref->raw_len); i++) {
		uint32_t word = base_get32(lens + 4 * i), len = word & ~PACK_BLOCK_RAW;
		uint64_t raw_len = base_min(ref->raw_len - i * BASE_BLOCK_BYTES, BASE_BLOCK_BYTES);
		if (len == 0 || (word & PACK_BLOCK_RAW ? len != raw_len : len >= raw_len))
			return false;
		sum += len;
	}
	return sum == ref->stored_len;
}

/* Checks and decodes a block. false: it reported damage. */
static bool verify_block(struct verify *v, const struct pack_object_ref *ref, uint64_t block, const uint8_t *stored,
	uint64_t offset, uint32_t word, uint64_t check, uint8_t *raw)
{
	uint32_t len = word & ~PACK_BLOCK_RAW;
	size_t raw_len = base_min(ref->raw_len - block * BASE_BLOCK_BYTES, BASE_BLOCK_BYTES);
	if (base_block_check(&ref->digest, block, stored, len) != check) {
		v->calls->damage(v->calls->arg, offset, len, ref, "the stored bytes and their check do not agree");
		return false;
	}
	if (ref->codec != PACK_CODEC_RAW &&
	    pack_codec_decode_block(ref->codec, stored, word, raw, raw_len, v->scratch) < 0) {
		v->calls->damage(v->calls->arg, offset, len, ref, "the stored bytes do not decode");
		return false;
	}
	return true;
}

/* Checks and decodes the blocks of a step, [block, block + n), whose stored bytes have been read. Returns their raw
 * bytes, or NULL when it reported damage. */
static const uint8_t *verify_step(struct verify *v, const struct pack_object_ref *ref, const uint8_t *checks,
	const uint8_t *lens, uint64_t block, uint64_t n, uint64_t offset)
{
	uint8_t *stored = v->stored + v->used, *raw = v->raw + v->used, *at = stored;
	bool good = true;
	for (uint64_t k = 0; k < n; k++) {
		uint64_t i = block + k;
		uint32_t word = lens ? base_get32(lens + 4 * i)
				     : (uint32_t)base_min(ref->raw_len - i * BASE_BLOCK_BYTES, BASE_BLOCK_BYTES);
		if (!verify_block(v, ref, i, at, offset + (uint64_t)(at - stored), word, base_get64(checks + 8 * i),
			    raw + k * BASE_BLOCK_BYTES))
			good = false;
		at += word & ~PACK_BLOCK_RAW;
	}
	if (!good)
		return NULL;
	return ref->codec == PACK_CODEC_RAW ? stored : raw;
}

/* xxh: NULL when damage of the object was reported. */
static void verify_hashes(struct verify *v, const struct pack_object_ref *ref, const struct base_digest *digest,
	const struct base_xxh128 *xxh)
{
	if (xxh && !base_digest_equal(digest, &ref->digest)) {
		xxh = NULL;
		v->calls->damage(v->calls->arg, ref->offset, ref->stored_len, ref,
			"the bytes are not those of the object's digest");
	}
	if (v->calls->object)
		v->calls->object(v->calls->arg, ref, ref->kind == PACK_OBJECT_PIECE ? xxh : NULL);
}

/* Hashes the objects that wait. */
static void verify_waiting(struct verify *v)
{
	base_digests_of(v->objects, v->nwaiting);
	for (size_t i = 0; i < v->nwaiting; i++)
		verify_hashes(v, v->waiting[i].ref, &v->objects[i].digest, &v->waiting[i].xxh);
	v->nwaiting = 0;
	v->used = 0;
}

/* An object of one step, of which all blocks are good. */
static void verify_wait(struct verify *v, const struct pack_object_ref *ref, const uint8_t *raw)
{
	struct waiting *w = &v->waiting[v->nwaiting];
	*w = (struct waiting){.ref = ref};
	if (ref->kind == PACK_OBJECT_PIECE)
		base_xxh128_of(v->calls->seed, raw, ref->raw_len, &w->xxh);
	v->objects[v->nwaiting++] = (struct base_object){.bytes = raw, .len = ref->raw_len};
	v->used += base_align(ref->raw_len, 64);
}

/* 1: it fits into one step, and waits to be hashed. 0: it was hashed step by step, or is damaged. -ENOMEM. */
static int verify_blocks(struct verify *v, const struct pack_object_ref *ref, const uint8_t *checks,
	const uint8_t *lens, bool *ret_good)
{
	uint64_t blocks = base_block_count(ref->raw_len), offset = ref->offset;
	*ret_good = true;
	for (uint64_t block = 0, n; block < blocks; block += n) {
		const uint8_t *raw;
		size_t len, raw_len;
		int r;

		n = step_of(ref, lens, block, blocks, &len);
		raw_len = base_min(ref->raw_len - block * BASE_BLOCK_BYTES, n * BASE_BLOCK_BYTES);
		r = fetch(v, offset, v->stored + v->used, len, ref);
		if (r < 0)
			return r;
		raw = r == 0 ? verify_step(v, ref, checks, lens, block, n, offset) : NULL;
		if (!raw) {
			*ret_good = false;
		} else if (n == blocks) {
			verify_wait(v, ref, raw);
			return 1;
		} else {
			base_hasher_update(v->hasher, raw, raw_len);
			if (ref->kind == PACK_OBJECT_PIECE)
				base_xxh128_update(v->xxh, raw, raw_len);
		}
		offset += len;
	}
	return 0;
}

/* `checks`: those of this object, or NULL when they could not be read (and that was reported). */
static int verify_object(struct verify *v, const struct pack_object_ref *ref, const uint8_t *checks)
{
	uint64_t blocks = base_block_count(ref->raw_len);
	const uint8_t *lens = ref->codec == PACK_CODEC_RAW || !checks ? NULL : checks + 8 * blocks;
	struct base_digest digest;
	struct base_xxh128 xxh;
	bool good;
	int r;

	if (lens && !lens_good(ref, lens)) {
		v->calls->damage(v->calls->arg, ref->checks + 8 * blocks, 4 * blocks, ref,
			"the stored lengths are damaged");
		checks = NULL;
	}
	if (!checks) {
		seen(v, ref->stored_len);
		verify_hashes(v, ref, NULL, NULL);
		return 0;
	}
	if (v->nwaiting == VERIFY_STEP_BLOCKS ||
	    v->used + base_min(ref->raw_len, VERIFY_STEP_BYTES) > VERIFY_STEP_BYTES)
		verify_waiting(v);
	base_hasher_reset(v->hasher);
	base_xxh128_begin(v->xxh, v->calls->seed);
	r = verify_blocks(v, ref, checks, lens, &good);
	if (r != 0)
		return base_min(r, 0);
	r = base_hasher_final(v->hasher, &digest);
	base_xxh128_final(v->xxh, &xxh);
	if (r == 0)
		verify_hashes(v, ref, &digest, good ? &xxh : NULL);
	return r;
}

/* Objects [first, next), their padding and their checks, which end at `end`; `at` is where the bytes before them ended.
 */
static int verify_extent(struct verify *v, const struct pack_object_ref *objects, uint64_t first, uint64_t next,
	uint64_t at, uint64_t end)
{
	uint64_t start = objects[first].checks;
	base_cleanup_free uint8_t *checks = malloc(end > start ? end - start : 1);
	bool known = true;

	if (!checks)
		return -ENOMEM;
	for (uint64_t done = 0; done < end - start;) { /* a single object may have many */
		size_t n = base_min(end - start - done, VERIFY_STEP_BYTES);
		int r = fetch(v, start + done, checks + done, n, &objects[first]);
		if (r < 0)
			return r;
		known = known && r == 0;
		done += n;
	}
	for (uint64_t i = first; i < next; i++) {
		const struct pack_object_ref *ref = &objects[i];
		int r = verify_padding(v, at, ref->offset);
		if (r == 0)
			r = verify_object(v, ref, known ? checks + (ref->checks - start) : NULL);
		if (r < 0)
			return r;
		at = ref->offset + ref->stored_len;
	}
	return verify_padding(v, at, start);
}

/* The footer or the tail is damaged. What is before it is not known then, and not reported as damaged. */
static void footer_damaged(struct verify *v, const char *what)
{
	uint64_t at = v->p->size - PACK_TAIL_BYTES;
	uint8_t bytes[PACK_TAIL_BYTES];
	struct pack_tail tail;

	if (pack_read(v->p, at, bytes, sizeof bytes, NULL) == 0 && pack_tail_decode(bytes, v->p->size, &tail) == 0)
		at = tail.footer_offset;
	v->calls->damage(v->calls->arg, at, v->p->size - at, NULL, what);
}

static int verify_all(struct verify *v)
{
	struct base_error err = { 0 };
	uint64_t at = PACK_HEAD_BYTES;
	struct pack_tail tail;
	base_cleanup_free uint8_t *raw = NULL;
	int r = pack_footer_load(v->p, &tail, &raw, &err);
	base_cleanup_free struct pack_object_ref *objects =
		r < 0 ? NULL : calloc(tail.count ? tail.count : 1, sizeof *objects);

	if (r == 0)
		r = objects ? pack_footer_decode(raw, &tail, objects) : -ENOMEM;
	if (r == -ENOMEM || r == -BASE_EVERSION)
		return r;
	if (r < 0) {
		footer_damaged(v, err.code ? err.text : "the footer names places that no writer makes");
		return 0;
	}
	seen(v, tail.footer_len + PACK_TAIL_BYTES);
	for (uint64_t i = 0, next; r == 0 && i < tail.count; i = next) {
		uint64_t end;
		r = pack_extent_bounds(objects, tail.count, i, &next, &end);
		if (r == 0)
			r = verify_extent(v, objects, i, next, at, end);
		at = end;
	}
	verify_waiting(v);
	return r < 0 ? r : verify_padding(v, at, tail.footer_offset);
}

int pack_verify(struct pack *p, const struct pack_verify_calls *calls)
{
	struct verify v = {.p = p, .calls = calls, .hasher = base_hasher_new(), .xxh = base_xxh128_state_new()};
	uint8_t head[PACK_HEAD_BYTES], good[PACK_HEAD_BYTES];
	/* from a page on: elsewhere the kernel's copy is slower (docs/save.md) */
	base_cleanup_free uint8_t *memory = aligned_alloc(
		4096, base_align(2 * VERIFY_STEP_BYTES + PACK_CODEC_SCRATCH, 4096));
	int r = memory && v.hasher && v.xxh ? 0 : -ENOMEM;

	if (r == 0) {
		v.stored = memory;
		v.raw = memory + VERIFY_STEP_BYTES;
		v.scratch = v.raw + VERIFY_STEP_BYTES;
		pack_head_encode(p->store_id, p->name, good);
		r = fetch(&v, 0, head, sizeof head, NULL);
		if (r == 0 && memcmp(head, good, sizeof head) != 0)
			calls->damage(calls->arg, 0, sizeof head, NULL, "the head is damaged");
		if (r >= 0)
			r = verify_all(&v);
	}
	base_hasher_free(v.hasher);
	base_xxh128_state_free(v.xxh);
	return r;
}
