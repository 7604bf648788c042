/* SPDX-License-Identifier: Apache-2.0
 *
 * digest: SHA-256 trees by libcrypto, XXH3 by libxxhash.
 *
 * Leaves are 16 KiB: about 10 us of SHA-256 with the CPU's own instructions, so that what surrounds them must stay
 * well below a microsecond. EVP_MD is fetched once for the process, contexts are restarted with a NULL type, which
 * neither fetches nor allocates, and each thread keeps two contexts (root and leaf) until it ends.
 *
 * These functions return nothing, so that nobody can use a digest that was not computed: where libcrypto has no
 * SHA-256, or the few hundred bytes of a context cannot be had, the process ends with a sentence.
 *
 * The root begins with the object's length: a hasher, which learns it last, keeps the leaves (32 bytes for each
 * 16 KiB) until then.
 *
 * libxxhash on x86 brings variants that choose the widest vectors at run time (2.3 times as fast with AVX2 on
 * 16 KiB as the plain ones); it may be built without them, hence the weak references. */
#include "core/base/digest.h"

#include <errno.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <xxhash.h>

#include "core/base/buf.h"

struct digest_pair {
	EVP_MD_CTX *root, *leaf;
};

struct base_hasher {
	struct digest_pair ctx;
	struct base_buf leaves;
	uint64_t len;  /* bytes seen */
	size_t filled; /* of the current block; 0: its leaf is not begun */
};

static pthread_once_t digest_once = PTHREAD_ONCE_INIT;
static pthread_key_t digest_key;  /* frees a thread's pair when it ends */
static const EVP_MD *digest_md;   /* constant after digest_once */
static __thread struct digest_pair *digest_mine;

static void digest_die(const char *why)
{
	fprintf(stderr, "vckpt: %s\n", why);
	abort();
}

#define DIGEST_OK(call) do { \
	if (__builtin_expect((call) != 1, 0)) \
		digest_die("libcrypto failed at SHA-256"); \
} while (0)

static void digest_pair_release(struct digest_pair *p)
{
	EVP_MD_CTX_free(p->root);
	EVP_MD_CTX_free(p->leaf);
}

static void digest_thread_end(void *p)
{
	digest_pair_release(p);
	free(p);
	digest_mine = NULL;
}

static void digest_start(void)
{
	digest_md = EVP_MD_fetch(NULL, "SHA256", NULL);
	if (!digest_md)
		digest_md = EVP_sha256();
	if (!digest_md || pthread_key_create(&digest_key, digest_thread_end) != 0)
		digest_die("SHA-256 cannot be set up");
}

/* Contexts that know their type, so that a later EVP_DigestInit_ex2(ctx, NULL, NULL) restarts them. */
static bool digest_pair_init(struct digest_pair *p)
{
	pthread_once(&digest_once, digest_start);
	p->root = EVP_MD_CTX_new();
	p->leaf = EVP_MD_CTX_new();
	if (p->root && p->leaf && EVP_DigestInit_ex2(p->root, digest_md, NULL) == 1
	    && EVP_DigestInit_ex2(p->leaf, digest_md, NULL) == 1)
		return true;
	digest_pair_release(p);
	return false;
}

static struct digest_pair *digest_thread_pair(void)
{
	struct digest_pair *p = digest_mine;

	if (__builtin_expect(p != NULL, 1))
		return p;
	p = calloc(1, sizeof *p);
	if (!p || !digest_pair_init(p) || pthread_setspecific(digest_key, p) != 0)
		digest_die("out of memory at SHA-256");
	digest_mine = p;
	return p;
}

static void digest_begin(EVP_MD_CTX *ctx, const void *prefix, size_t len)
{
	DIGEST_OK(EVP_DigestInit_ex2(ctx, NULL, NULL));
	DIGEST_OK(EVP_DigestUpdate(ctx, prefix, len));
}

static void digest_begin_root(EVP_MD_CTX *ctx, uint64_t len)
{
	uint8_t head[9] = {1};

	base_put64(head + 1, len);
	digest_begin(ctx, head, sizeof head);
}

static void digest_leaf(EVP_MD_CTX *ctx, const void *bytes, size_t len, uint8_t leaf[static BASE_DIGEST_BYTES])
{
	digest_begin(ctx, "\0", 1);
	DIGEST_OK(EVP_DigestUpdate(ctx, bytes, len));
	DIGEST_OK(EVP_DigestFinal_ex(ctx, leaf, NULL));
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
	EVP_MD_CTX *ctx = digest_thread_pair()->leaf;

	digest_begin(ctx, bytes, len);
	DIGEST_OK(EVP_DigestFinal_ex(ctx, ret_d->bytes, NULL));
}

void base_digest_of(const void *bytes, size_t len, struct base_digest *ret_d)
{
	const struct digest_pair *ctx = digest_thread_pair();
	const uint8_t *at = bytes;

	digest_begin_root(ctx->root, len);
	while (len > 0) {
		size_t n = base_min(len, BASE_BLOCK_BYTES);
		uint8_t leaf[BASE_DIGEST_BYTES];

		digest_leaf(ctx->leaf, at, n, leaf);
		DIGEST_OK(EVP_DigestUpdate(ctx->root, leaf, sizeof leaf));
		at += n;
		len -= n;
	}
	DIGEST_OK(EVP_DigestFinal_ex(ctx->root, ret_d->bytes, NULL));
}

struct base_hasher *base_hasher_new(void)
{
	struct base_hasher *h = calloc(1, sizeof *h);

	if (h && !digest_pair_init(&h->ctx)) {
		free(h);
		h = NULL;
	}
	return h;
}

void base_hasher_free(struct base_hasher *h)
{
	if (!h)
		return;
	digest_pair_release(&h->ctx);
	base_buf_release(&h->leaves);
	free(h);
}

void base_hasher_reset(struct base_hasher *h)
{
	h->leaves.len = 0;
	h->len = 0;
	h->filled = 0;
}

static uint8_t *hasher_next_leaf(struct base_hasher *h)
{
	uint8_t *leaf = base_buf_extend(&h->leaves, BASE_DIGEST_BYTES);

	if (!leaf)
		digest_die("out of memory at SHA-256");
	return leaf;
}

void base_hasher_update(struct base_hasher *h, const void *bytes, size_t len)
{
	const uint8_t *at = bytes;

	h->len += len;
	while (len > 0) {
		size_t n = base_min(len, BASE_BLOCK_BYTES - h->filled);

		if (h->filled == 0)
			digest_begin(h->ctx.leaf, "\0", 1);
		DIGEST_OK(EVP_DigestUpdate(h->ctx.leaf, at, n));
		h->filled += n;
		if (h->filled == BASE_BLOCK_BYTES) {
			DIGEST_OK(EVP_DigestFinal_ex(h->ctx.leaf, hasher_next_leaf(h), NULL));
			h->filled = 0;
		}
		at += n;
		len -= n;
	}
}

void base_hasher_final(struct base_hasher *h, struct base_digest *ret_d)
{
	if (h->filled > 0)
		DIGEST_OK(EVP_DigestFinal_ex(h->ctx.leaf, hasher_next_leaf(h), NULL));
	digest_begin_root(h->ctx.root, h->len);
	DIGEST_OK(EVP_DigestUpdate(h->ctx.root, h->leaves.data, h->leaves.len));
	DIGEST_OK(EVP_DigestFinal_ex(h->ctx.root, ret_d->bytes, NULL));
	base_hasher_reset(h);
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

void base_random(void *bytes, size_t len)
{
	uint8_t *at = bytes;

	while (len > 0) {
		ssize_t n = getrandom(at, len, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			digest_die("the kernel gives no random bytes");
		at += n;
		len -= n;
	}
}
