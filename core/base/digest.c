/* SPDX-License-Identifier: Apache-2.0
 *
 * digest: SHA-256 trees by libcrypto, XXH3 by libxxhash.
 *
 * Leaves are 16 KiB: 5 to 10 us of SHA-256 with the CPU's own instructions, so that what surrounds them must stay well
 * below a microsecond. digest_many.c hashes several at once. For one, and for the root, libcrypto's plain functions
 * work on a context of the caller's and cannot fail. EVP's allocate one at every restart, and without memory there
 * would be no digest: a training must not end for that.
 *
 * The root begins with the object's length: a hasher, which learns it last, keeps the leaves (32 bytes for each
 * 16 KiB) until then. There alone memory may be missing, and base_hasher_final says so.
 *
 * libxxhash on x86 brings variants that choose the widest vectors at run time (2.3 times as fast with AVX2 on
 * 16 KiB as the plain ones); it may be built without them, hence the weak references. */
#define OPENSSL_SUPPRESS_DEPRECATED /* SHA256_Init and its kin */
#include "core/base/digest.h"

#include <errno.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <xxhash.h>

#include "core/base/buf.h"

enum { DIGEST_AT_ONCE = 16 }; /* leaves: as many as any method takes */

struct base_hasher {
	SHA256_CTX leaf;
	struct base_buf leaves;
	uint64_t len;  /* bytes seen */
	size_t filled; /* of the current block; 0: its leaf is not begun */
};

static void digest_begin(SHA256_CTX *ctx, const void *prefix, size_t len)
{
	SHA256_Init(ctx);
	SHA256_Update(ctx, prefix, len);
}

static void digest_begin_root(SHA256_CTX *ctx, uint64_t len)
{
	uint8_t head[9] = {1};

	base_put64(head + 1, len);
	digest_begin(ctx, head, sizeof head);
}

void base_digest_hex(const struct base_digest *d, char hex[static BASE_DIGEST_HEX])
{
	static const char digit[] = "0123456789abcdef";

	for (size_t i = 0; i < BASE_DIGEST_BYTES; i++) {
		hex[2 * i] = digit[d->bytes[i] >> 4];
		hex[2 * i + 1] = digit[d->bytes[i] & 15];
	}
	hex[2 * BASE_DIGEST_BYTES] = 0;
}

static int digest_nibble(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int base_digest_parse(const char *hex, size_t len, struct base_digest *ret_d)
{
	struct base_digest d;

	if (len != 2 * BASE_DIGEST_BYTES)
		return -EINVAL;
	for (size_t i = 0; i < BASE_DIGEST_BYTES; i++) {
		int high = digest_nibble(hex[2 * i]), low = digest_nibble(hex[2 * i + 1]);

		if (high < 0 || low < 0)
			return -EINVAL;
		d.bytes[i] = (uint8_t)(high << 4 | low);
	}
	*ret_d = d;
	return 0;
}

void base_sha256_after(const void *before, size_t before_len, const void *bytes, size_t len,
	struct base_digest *ret_d)
{
	SHA256_CTX ctx;

	digest_begin(&ctx, before, before_len);
	SHA256_Update(&ctx, bytes, len);
	SHA256_Final(ret_d->bytes, &ctx);
}

void base_sha256(const void *bytes, size_t len, struct base_digest *ret_d)
{
	base_sha256_after(bytes, len, NULL, 0, ret_d);
}

/* The leaves of objects that are hashed at once, and which object each is of. */
struct digest_batch {
	struct base_object *objects; size_t n;
	size_t taken, offset; /* the next block: of which object, and where in it */
	size_t rooted;        /* the object that `root` is of */
	SHA256_CTX root;
	const uint8_t *at[DIGEST_AT_ONCE]; size_t of[DIGEST_AT_ONCE], count;
};

/* The next whole blocks, whichever objects they are of. false: there are no more. */
static bool batch_take(struct digest_batch *b)
{
	b->count = 0;
	while (b->taken < b->n && b->count < DIGEST_AT_ONCE) {
		const struct base_object *o = &b->objects[b->taken];

		if (o->len - b->offset < BASE_BLOCK_BYTES) {
			b->taken++;
			b->offset = 0;
			continue;
		}
		b->of[b->count] = b->taken;
		b->at[b->count++] = (const uint8_t *)o->bytes + b->offset;
		b->offset += BASE_BLOCK_BYTES;
	}
	return b->count > 0;
}

/* Ends the roots of all objects before `to`, with the leaf of a last block that is a shorter one, and begins that of
 * `to`. */
static void batch_root(struct digest_batch *b, size_t to)
{
	while (b->rooted < to) {
		struct base_object *o = &b->objects[b->rooted++];
		size_t rest = o->len % BASE_BLOCK_BYTES;
		struct base_digest leaf;

		if (rest > 0) {
			const uint8_t *last = (const uint8_t *)o->bytes + o->len - rest;

			base_sha256_many(0, &last, rest, 1, &leaf);
			SHA256_Update(&b->root, leaf.bytes, sizeof leaf.bytes);
		}
		SHA256_Final(o->digest.bytes, &b->root);
		if (b->rooted < b->n)
			digest_begin_root(&b->root, b->objects[b->rooted].len);
	}
}

/* The roots take leaves in as these were taken from the objects, so there is one root at a time. */
void base_digests_of(struct base_object *objects, size_t n)
{
	struct digest_batch b = {.objects = objects, .n = n};
	struct base_digest leaves[DIGEST_AT_ONCE];

	if (n > 0)
		digest_begin_root(&b.root, objects[0].len);
	while (batch_take(&b)) {
		base_sha256_many(0, b.at, BASE_BLOCK_BYTES, b.count, leaves);
		for (size_t i = 0; i < b.count; i++) {
			batch_root(&b, b.of[i]);
			SHA256_Update(&b.root, leaves[i].bytes, sizeof leaves[i].bytes);
		}
	}
	batch_root(&b, n);
}

void base_digest_of(const void *bytes, size_t len, struct base_digest *ret_d)
{
	struct base_object o = {.bytes = bytes, .len = len};

	base_digests_of(&o, 1);
	*ret_d = o.digest;
}

struct base_hasher *base_hasher_new(void)
{
	return calloc(1, sizeof(struct base_hasher));
}

void base_hasher_free(struct base_hasher *h)
{
	if (!h)
		return;
	base_buf_release(&h->leaves);
	free(h);
}

void base_hasher_reset(struct base_hasher *h)
{
	h->leaves.len = 0;
	h->leaves.error = 0;
	h->len = 0;
	h->filled = 0;
}

static void hasher_end_leaf(struct base_hasher *h)
{
	uint8_t *leaf = base_buf_extend(&h->leaves, BASE_DIGEST_BYTES);

	if (leaf) /* else the buffer keeps its error */
		SHA256_Final(leaf, &h->leaf);
	h->filled = 0;
}

/* n whole blocks, between leaves. */
static void hasher_add_blocks(struct base_hasher *h, const uint8_t *at, size_t n)
{
	const uint8_t *blocks[DIGEST_AT_ONCE];

	for (size_t now; n > 0; n -= now) {
		void *leaves;

		now = base_min(n, DIGEST_AT_ONCE);
		for (size_t i = 0; i < now; i++, at += BASE_BLOCK_BYTES)
			blocks[i] = at;
		leaves = base_buf_extend(&h->leaves, now * BASE_DIGEST_BYTES);
		if (leaves)
			base_sha256_many(0, blocks, BASE_BLOCK_BYTES, now, leaves);
	}
}

void base_hasher_update(struct base_hasher *h, const void *bytes, size_t len)
{
	const uint8_t *at = bytes;

	h->len += len;
	while (len > 0) {
		size_t n = base_min(len, BASE_BLOCK_BYTES - h->filled);

		if (n == BASE_BLOCK_BYTES) {
			n = len - len % BASE_BLOCK_BYTES;
			hasher_add_blocks(h, at, n / BASE_BLOCK_BYTES);
		} else {
			if (h->filled == 0)
				digest_begin(&h->leaf, "\0", 1);
			SHA256_Update(&h->leaf, at, n);
			h->filled += n;
			if (h->filled == BASE_BLOCK_BYTES)
				hasher_end_leaf(h);
		}
		at += n;
		len -= n;
	}
}

int base_hasher_final(struct base_hasher *h, struct base_digest *ret_d)
{
	SHA256_CTX root;
	int r;

	if (h->filled > 0)
		hasher_end_leaf(h);
	r = h->leaves.error;
	if (r == 0) {
		digest_begin_root(&root, h->len);
		SHA256_Update(&root, h->leaves.data, h->leaves.len);
		SHA256_Final(ret_d->bytes, &root);
	}
	base_hasher_reset(h);
	return r;
}

extern XXH64_hash_t XXH3_64bits_withSeed_dispatch(const void *bytes, size_t len, XXH64_hash_t seed)
	__attribute__((weak));
extern XXH128_hash_t XXH3_128bits_withSeed_dispatch(const void *bytes, size_t len, XXH64_hash_t seed)
	__attribute__((weak));
extern XXH_errorcode XXH3_128bits_update_dispatch(XXH3_state_t *state, const void *bytes, size_t len)
	__attribute__((weak));

uint64_t base_xxh64_of(uint64_t seed, const void *bytes, size_t len)
{
	if (XXH3_64bits_withSeed_dispatch)
		return XXH3_64bits_withSeed_dispatch(bytes, len, seed);
	return XXH3_64bits_withSeed(bytes, len, seed);
}

static void xxh128_canonical(XXH128_hash_t hash, struct base_xxh128 *ret_x)
{
	XXH128_canonical_t canonical;

	XXH128_canonicalFromHash(&canonical, hash);
	memcpy(ret_x->bytes, canonical.digest, sizeof ret_x->bytes);
}

void base_xxh128_of(uint64_t seed, const void *bytes, size_t len, struct base_xxh128 *ret_x)
{
	XXH128_hash_t hash;

	if (XXH3_128bits_withSeed_dispatch)
		hash = XXH3_128bits_withSeed_dispatch(bytes, len, seed);
	else
		hash = XXH3_128bits_withSeed(bytes, len, seed);
	xxh128_canonical(hash, ret_x);
}

/* The library's own state behind another name, so that no header of it is seen outside. */
static XXH3_state_t *xxh128_state(struct base_xxh128_state *s) { return (XXH3_state_t *)(void *)s; }

struct base_xxh128_state *base_xxh128_state_new(void)
{
	return (struct base_xxh128_state *)(void *)XXH3_createState();
}

void base_xxh128_state_free(struct base_xxh128_state *s) { XXH3_freeState(xxh128_state(s)); }

void base_xxh128_begin(struct base_xxh128_state *s, uint64_t seed)
{
	XXH3_128bits_reset_withSeed(xxh128_state(s), seed);
}

void base_xxh128_update(struct base_xxh128_state *s, const void *bytes, size_t len)
{
	if (XXH3_128bits_update_dispatch)
		XXH3_128bits_update_dispatch(xxh128_state(s), bytes, len);
	else
		XXH3_128bits_update(xxh128_state(s), bytes, len);
}

void base_xxh128_final(const struct base_xxh128_state *s, struct base_xxh128 *ret_x)
{
	xxh128_canonical(XXH3_128bits_digest((const XXH3_state_t *)(const void *)s), ret_x);
}

uint64_t base_block_check(const struct base_digest *d, uint64_t i, const void *stored, size_t len)
{
	return base_xxh64_of(base_get64(d->bytes) + i, stored, len);
}

int base_random(void *bytes, size_t len)
{
	uint8_t *at = bytes;

	while (len > 0) {
		ssize_t n = getrandom(at, len, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		at += n;
		len -= n;
	}
	return 0;
}
