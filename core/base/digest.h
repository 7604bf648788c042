/* SPDX-License-Identifier: Apache-2.0
 *
 * digest: the identity of an object and the checks of its stored blocks (docs/format/objects.md).
 *
 *   block i of an object     its raw bytes [16384 i, 16384 (i+1)), the last one shorter
 *   leaf_i                   SHA-256(0x00 | block i)
 *   digest                   SHA-256(0x01 | le64(length) | leaf_0 | leaf_1 | ...); no leaf for an empty object
 *   check_i                  XXH3-64(stored bytes of block i, seed = le64(digest[0..8]) + i mod 2^64)
 *
 * SHA-256 is libcrypto's, and of several leaves at once digest_many.c's; XXH3 is libxxhash's. A caller that has much to
 * hash hands it over at once: 16 leaves, be they of one object or of many, take less than half the time that they take
 * one by one. All functions may be called from any thread; a `base_hasher`
 * belongs to one thread at a time. */
#ifndef CORE_BASE_DIGEST_H
#define CORE_BASE_DIGEST_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <stdbool.h>

#define BASE_DIGEST_BYTES 32
#define BASE_DIGEST_HEX 65 /* 64 digits and NUL */
#define BASE_BLOCK_BYTES 16384u

struct base_digest { uint8_t bytes[BASE_DIGEST_BYTES]; };
struct base_xxh128 { uint8_t bytes[16]; }; /* canonical (big-endian) XXH3-128 */

static inline bool base_digest_equal(const struct base_digest *a, const struct base_digest *b)
{
	return memcmp(a, b, sizeof *a) == 0;
}
static inline int base_digest_compare(const struct base_digest *a, const struct base_digest *b)
{
	return memcmp(a, b, sizeof *a);
}
void base_digest_hex(const struct base_digest *d, char hex[static BASE_DIGEST_HEX]);
int base_digest_parse(const char *hex, size_t len, struct base_digest *ret_d); /* 0 or -EINVAL; lower case only */

/* Plain SHA-256 (records, names). */
void base_sha256(const void *bytes, size_t len, struct base_digest *ret_d);
/* The same of bytes that follow others. */
void base_sha256_after(const void *before, size_t before_len, const void *bytes, size_t len,
	struct base_digest *ret_d);

/* SHA-256 of each of n messages of equal length, by whatever is quickest on this processor (digest_many.c): of the byte
 * `first` and then the `len` bytes at at[i]. */
void base_sha256_many(uint8_t first, const uint8_t *const *at, size_t len, size_t n, struct base_digest *ret_d);

/* Digest of an object whose bytes lie in memory. */
void base_digest_of(const void *bytes, size_t len, struct base_digest *ret_d);
/* The same of n objects, whose leaves are hashed together. */
struct base_object { const void *bytes; size_t len; struct base_digest digest; };
void base_digests_of(struct base_object *objects, size_t n);

/* Digest of an object that arrives in pieces of any size. */
struct base_hasher;
struct base_hasher *base_hasher_new(void);                /* NULL: out of memory */
void base_hasher_free(struct base_hasher *h);             /* NULL-safe */
void base_hasher_reset(struct base_hasher *h);            /* ready for another object */
void base_hasher_update(struct base_hasher *h, const void *bytes, size_t len);
/* Also resets the hasher. -ENOMEM: it could not compute a digest. */
int base_hasher_final(struct base_hasher *h, struct base_digest *ret_d) __attribute__((warn_unused_result));

static inline uint64_t base_block_count(uint64_t len) { return len / BASE_BLOCK_BYTES + (len % BASE_BLOCK_BYTES != 0); }
/* Check of block `i` of the object `d`, over the `len` bytes that are stored for it. */
uint64_t base_block_check(const struct base_digest *d, uint64_t i, const void *stored, size_t len);

/* XXH3-128 of raw bytes under the store's seed. */
void base_xxh128_of(uint64_t seed, const void *bytes, size_t len, struct base_xxh128 *ret_x);
/* The same of bytes that come in parts. A state belongs to one thread at a time. */
struct base_xxh128_state;
struct base_xxh128_state *base_xxh128_state_new(void);    /* NULL: out of memory */
void base_xxh128_state_free(struct base_xxh128_state *s); /* NULL-safe */
void base_xxh128_begin(struct base_xxh128_state *s, uint64_t seed);
void base_xxh128_update(struct base_xxh128_state *s, const void *bytes, size_t len);
void base_xxh128_final(const struct base_xxh128_state *s, struct base_xxh128 *ret_x);
/* Is this one of the seeds (about 2^-21 of all) under which XXH3-128 misses some moved bits? (digest_seed.c) */
bool base_xxh128_seed_weak(uint64_t seed);
uint64_t base_xxh64_of(uint64_t seed, const void *bytes, size_t len); /* XXH3-64 with seed */

/* Cryptographic random bytes (getrandom). 0, or a negative errno where the kernel or a seccomp filter refuses the
 * call. */
int base_random(void *bytes, size_t len) __attribute__((warn_unused_result));

#endif
