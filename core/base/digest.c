/* SPDX-License-Identifier: Apache-2.0
 *
 * digest: SHA-256 trees by libcrypto, XXH3 by libxxhash.
 *
 * Leaves are 16 KiB: about 10 us of SHA-256 with the CPU's own instructions, so that what surrounds them must stay
 * well below a microsecond. libcrypto's plain functions work on a context of the caller's and cannot fail. EVP's
 * allocate one at every restart, and whoever has no memory then has no digest: a training must not end for that.
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

/* The leaf of one block, as the root takes it in. */
static void digest_add_leaf(SHA256_CTX *root, const void *bytes, size_t len)
{
	uint8_t leaf[BASE_DIGEST_BYTES];
	SHA256_CTX ctx;

	digest_begin(&ctx, "\0", 1);
	SHA256_Update(&ctx, bytes, len);
	SHA256_Final(leaf, &ctx);
	SHA256_Update(root, leaf, sizeof leaf);
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

void base_sha256(const void *bytes, size_t len, struct base_digest *ret_d)
{
	SHA256_CTX ctx;

	digest_begin(&ctx, bytes, len);
	SHA256_Final(ret_d->bytes, &ctx);
}

void base_digest_of(const void *bytes, size_t len, struct base_digest *ret_d)
{
	const uint8_t *at = bytes;
	SHA256_CTX root;

	digest_begin_root(&root, len);
	while (len > 0) {
		size_t n = base_min(len, BASE_BLOCK_BYTES);

		digest_add_leaf(&root, at, n);
		at += n;
		len -= n;
	}
	SHA256_Final(ret_d->bytes, &root);
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

void base_hasher_update(struct base_hasher *h, const void *bytes, size_t len)
{
	const uint8_t *at = bytes;

	h->len += len;
	while (len > 0) {
		size_t n = base_min(len, BASE_BLOCK_BYTES - h->filled);

		if (h->filled == 0)
			digest_begin(&h->leaf, "\0", 1);
		SHA256_Update(&h->leaf, at, n);
		h->filled += n;
		if (h->filled == BASE_BLOCK_BYTES)
			hasher_end_leaf(h);
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

void base_hash_both(struct base_xxh128_state *s, uint64_t seed, const void *bytes, size_t len,
	struct base_digest *ret_d, struct base_xxh128 *ret_x)
{
	const uint8_t *at = bytes;
	SHA256_CTX root;

	base_xxh128_begin(s, seed);
	digest_begin_root(&root, len);
	while (len > 0) {
		size_t n = base_min(len, BASE_BLOCK_BYTES);

		base_xxh128_update(s, at, n);
		digest_add_leaf(&root, at, n);
		at += n;
		len -= n;
	}
	SHA256_Final(ret_d->bytes, &root);
	base_xxh128_final(s, ret_x);
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
