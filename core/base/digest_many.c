/* SPDX-License-Identifier: Apache-2.0
 *
 * digest_many: SHA-256 (FIPS 180-4) of several messages of one length at once. One message is a chain: each round needs
 * the one before it, and a core's units wait most of the time. The leaves of a digest tree are messages of their own:
 *
 *   0  libcrypto           one message: what there is on every machine, and what the others are compared with
 *   1  SHA instructions    two, whose rounds take turns
 *   2  AVX2                eight, a message in each element of the vectors
 *   3  AVX-512             sixteen
 *
 * Which is quickest depends on the processor and on how many messages there are: sixteen at once take as long for nine
 * messages as for sixteen. So the first call with several messages has each method that the processor has hash as many
 * as it takes at once, of 2 KiB, and keeps the least of six times (0.3 ms in all). From these follows, for each number
 * of messages, the method that takes the least time for each of them. A method that does not give what libcrypto gives
 * is not used.
 *
 * A message is one byte, and then `len` bytes in memory. So its blocks (64 bytes) begin one byte before those of the
 * memory. The first one, and the last one or two, which have the padding, are put together in `edge`; the others are
 * read where they are. */
#define OPENSSL_SUPPRESS_DEPRECATED /* SHA256_Init and its kin */
#include "core/base/digest_many_internal.h"

#include <errno.h>
#include <openssl/sha.h>
#include <stdatomic.h>

#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/base/log.h"

enum {
	WIDTH = BASE_SHA256_WIDTH,
	BLOCK = 64,
	HEAD = BLOCK - 1, /* bytes in memory of a message's first block */
	AHEAD = 8 * BLOCK, /* sixteen streams are more than a processor fetches ahead by itself */
};

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define SHA __attribute__((target("sha,sse4.1")))
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw")))
#define INLINE static inline __attribute__((always_inline))
#define SWAP_HIGH 0x0c0d0e0f08090a0b /* puts the bytes of words in order, which are big-endian */
#define SWAP_LOW 0x0405060700010203
#define UNROLL _Pragma("GCC unroll 16") /* registers in arrays stay registers, with -O2 too */

static const uint32_t many_k[64] __attribute__((aligned(16))) = { /* 4.2.2 */
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* ---- two messages by SHA instructions ---- */

/* The instructions want the working variables as (a, b, e, f) and (c, d, g, h), the first one on top. */
SHA INLINE __m128i pair_load(base_sha256_state state, int m, int i)
{
	return _mm_set_epi32((int)state[i][m], (int)state[i + 1][m], (int)state[i + 4][m], (int)state[i + 5][m]);
}

SHA INLINE void pair_store(base_sha256_state state, int m, int i, __m128i v)
{
	state[i][m] = (uint32_t)_mm_extract_epi32(v, 3);
	state[i + 1][m] = (uint32_t)_mm_extract_epi32(v, 2);
	state[i + 4][m] = (uint32_t)_mm_extract_epi32(v, 1);
	state[i + 5][m] = (uint32_t)_mm_extract_epi32(v, 0);
}

/* Words 4 t to 4 t + 3 of the schedule, of the sixteen before them. */
SHA INLINE __m128i pair_schedule(const __m128i w[4], int t)
{
	__m128i sum = _mm_sha256msg1_epu32(w[t & 3], w[(t + 1) & 3]);

	sum = _mm_add_epi32(sum, _mm_alignr_epi8(w[(t + 3) & 3], w[(t + 2) & 3], 4));
	return _mm_sha256msg2_epu32(sum, w[(t + 3) & 3]);
}

SHA static void many_pair(base_sha256_state state, const uint8_t *const at[WIDTH], size_t blocks)
{
	const __m128i swap = _mm_set_epi64x(SWAP_HIGH, SWAP_LOW);
	__m128i top[2], low[2], w[2][4];

	UNROLL
	for (int m = 0; m < 2; m++) {
		top[m] = pair_load(state, m, 0);
		low[m] = pair_load(state, m, 2);
	}
	for (size_t block = 0; block < blocks; block++) {
		const __m128i top_before[2] = {top[0], top[1]}, low_before[2] = {low[0], low[1]};

		UNROLL
		for (int i = 0; i < 8; i++)
			w[i & 1][i >> 1] = _mm_shuffle_epi8(_mm_loadu_si128(
				(const void *)(at[i & 1] + BLOCK * block + 16 * (size_t)(i >> 1))), swap);
		UNROLL
		for (int t = 0; t < 16; t++) { /* four rounds each */
			UNROLL
			for (int m = 0; m < 2; m++) {
				__m128i kw = _mm_add_epi32(
					w[m][t & 3], _mm_load_si128((const void *)(many_k + 4 * t)));

				low[m] = _mm_sha256rnds2_epu32(low[m], top[m], kw);
				top[m] = _mm_sha256rnds2_epu32(top[m], low[m], _mm_shuffle_epi32(kw, 0x0e));
				if (t < 12)
					w[m][t & 3] = pair_schedule(w[m], t);
			}
		}
		UNROLL
		for (int m = 0; m < 2; m++) {
			top[m] = _mm_add_epi32(top[m], top_before[m]);
			low[m] = _mm_add_epi32(low[m], low_before[m]);
		}
	}
	UNROLL
	for (int m = 0; m < 2; m++) {
		pair_store(state, m, 0, top[m]);
		pair_store(state, m, 2, low[m]);
	}
}

/* ---- a message in each element of vectors ---- */

typedef uint32_t vector8 __attribute__((vector_size(32)));
typedef uint32_t vector16 __attribute__((vector_size(64)));

#define ROTR(x, n) ((x) >> (n) | (x) << (32 - (n)))

/* Of each bit what two of three have. The second form is one instruction of AVX-512, which compilers do not find. */
#define MAJ(a, b, c) ((b) ^ (((a) ^ (b)) & ((b) ^ (c))))
#define MAJ16(a, b, c) ((vector16)_mm512_ternarylogic_epi32((__m512i)(a), (__m512i)(b), (__m512i)(c), 0xe8))

/* One block (6.2.2) of all messages, for both widths of vectors: `h` are the eight of the state, `w` the sixteen words
 * of the block, which become the last sixteen of the schedule. Variables stay where they are: what is a to h in round t
 * is v[(0 to 7) - t mod 8]. */
#define MANY_BLOCK(vector, maj_of, h, w)                                                                               \
	do {                                                                                                           \
		vector v[8];                                                                                           \
		memcpy(v, h, sizeof v);                                                                                \
		for (int from = 0; from < 64; from += 16) {                                                            \
			UNROLL                                                                                         \
			for (int t = 0; t < 16; t++) {                                                                 \
				vector a = v[-t & 7], b = v[(1 - t) & 7], c = v[(2 - t) & 7];                          \
				vector e = v[(4 - t) & 7], f = v[(5 - t) & 7], g = v[(6 - t) & 7];                     \
				vector sum0 = ROTR(a, 2) ^ ROTR(a, 13) ^ ROTR(a, 22), maj = maj_of(a, b, c);           \
				vector sum1 = ROTR(e, 6) ^ ROTR(e, 11) ^ ROTR(e, 25), ch = g ^ (e & (f ^ g));          \
				vector t1 = v[(7 - t) & 7] + many_k[from + t] + (w[t] + (sum1 + ch));                  \
				v[(3 - t) & 7] += t1;                                                                  \
				v[(7 - t) & 7] = t1 + (sum0 + maj);                                                    \
				if (from < 48) {                                                                       \
					vector x = w[(t + 1) & 15], y = w[(t + 14) & 15];                              \
					w[t] += w[(t + 9) & 15] + ((ROTR(x, 7) ^ ROTR(x, 18) ^ x >> 3) +               \
						(ROTR(y, 17) ^ ROTR(y, 19) ^ y >> 10));                                \
				}                                                                                      \
			}                                                                                              \
		}                                                                                                      \
		UNROLL                                                                                                 \
		for (int i = 0; i < 8; i++)                                                                            \
			h[i] += v[i];                                                                                  \
	} while (0)

/* Sixteen words of each of eight messages, big-endian; w[i] gets word i of all of them. Four words of message m and of
 * message m + 4 make a register, and of four registers each half is a 4 x 4 matrix to be transposed. */
AVX2 INLINE void load8(const uint8_t *const at[WIDTH], size_t offset, vector8 *w)
{
	const __m256i swap = _mm256_set_epi64x(SWAP_HIGH, SWAP_LOW, SWAP_HIGH, SWAP_LOW);
	__m256i a[4], b[4];

	UNROLL
	for (size_t i = 0; i < 16; i += 4) {
		UNROLL
		for (int m = 0; m < 4; m++)
			a[m] = _mm256_shuffle_epi8(_mm256_loadu2_m128i((const void *)(at[m + 4] + offset + 4 * i),
				(const void *)(at[m] + offset + 4 * i)), swap);
		b[0] = _mm256_unpacklo_epi32(a[0], a[1]);
		b[1] = _mm256_unpackhi_epi32(a[0], a[1]);
		b[2] = _mm256_unpacklo_epi32(a[2], a[3]);
		b[3] = _mm256_unpackhi_epi32(a[2], a[3]);
		w[i] = (vector8)_mm256_unpacklo_epi64(b[0], b[2]);
		w[i + 1] = (vector8)_mm256_unpackhi_epi64(b[0], b[2]);
		w[i + 2] = (vector8)_mm256_unpacklo_epi64(b[1], b[3]);
		w[i + 3] = (vector8)_mm256_unpackhi_epi64(b[1], b[3]);
	}
}

AVX2 static void many_avx2(base_sha256_state state, const uint8_t *const at[WIDTH], size_t blocks)
{
	vector8 h[8], w[16];

	for (int i = 0; i < 8; i++)
		memcpy(&h[i], state[i], sizeof h[i]);
	for (size_t block = 0; block < blocks; block++) {
		load8(at, BLOCK * block, w);
		MANY_BLOCK(vector8, MAJ, h, w);
	}
	for (int i = 0; i < 8; i++)
		memcpy(state[i], &h[i], sizeof h[i]);
}

/* The same of sixteen messages. Each of four rounds shuffles registers i and i + 8 into each other, as one does with
 * cards: then the matrix is transposed. */
AVX512 INLINE void load16(const uint8_t *const at[WIDTH], size_t offset, vector16 *w)
{
	const __m512i swap = _mm512_set4_epi64(SWAP_HIGH, SWAP_LOW, SWAP_HIGH, SWAP_LOW);
	const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
	const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
	__m512i a[16], b[16];

	UNROLL
	for (int m = 0; m < 16; m++) {
		_mm_prefetch((const void *)(at[m] + offset + AHEAD), _MM_HINT_T0);
		a[m] = _mm512_shuffle_epi8(_mm512_loadu_si512(at[m] + offset), swap);
	}
	UNROLL
	for (int round = 0; round < 4; round++) {
		UNROLL
		for (int i = 0; i < 8; i++) {
			b[2 * i] = _mm512_permutex2var_epi32(a[i], low, a[i + 8]);
			b[2 * i + 1] = _mm512_permutex2var_epi32(a[i], high, a[i + 8]);
		}
		memcpy(a, b, sizeof a);
	}
	memcpy(w, a, sizeof a);
}

AVX512 static void many_avx512(base_sha256_state state, const uint8_t *const at[WIDTH], size_t blocks)
{
	vector16 h[8], w[16];

	memcpy(h, state, sizeof h);
	for (size_t block = 0; block < blocks; block++) {
		load16(at, BLOCK * block, w);
		MANY_BLOCK(vector16, MAJ16, h, w);
	}
	memcpy(state, h, sizeof h);
}

/* The operating system has to keep the registers, too: __builtin_cpu_supports asks for that. clang 14 does not know
 * "sha", whose registers every system keeps. */
static bool has_sha(void)
{
	unsigned a, b, c, d;

	return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA) != 0;
}
static bool has_avx2(void) { return __builtin_cpu_supports("avx2"); }
static bool has_avx512(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }
#endif

/* ---- messages ---- */

static void many_one(uint8_t first, const uint8_t *bytes, size_t len, struct base_digest *ret_d)
{
	SHA256_CTX ctx;

	SHA256_Init(&ctx);
	SHA256_Update(&ctx, &first, 1);
	SHA256_Update(&ctx, bytes, len);
	SHA256_Final(ret_d->bytes, &ctx);
}

static void many_begin(base_sha256_state state)
{
	static const uint32_t initial[8] = { /* 5.3.3 */
		0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

	for (int i = 0; i < 8; i++)
		for (int m = 0; m < WIDTH; m++)
			state[i][m] = initial[i];
}

/* The last one or two blocks of a message of 1 + len bytes: what is left of it, and the padding (5.1.1). */
static size_t many_last(const uint8_t *bytes, size_t len, uint8_t edge[static 2 * BLOCK])
{
	size_t rest = (len - HEAD) % BLOCK, blocks = rest < BLOCK - 8 ? 1 : 2;

	memset(edge, 0, 2 * BLOCK);
	memcpy(edge, bytes + len - rest, rest);
	edge[rest] = 0x80;
	base_put64(edge + BLOCK * blocks - 8, __builtin_bswap64(8 * ((uint64_t)len + 1)));
	return blocks;
}

/* At most method->width messages, of at least HEAD bytes. Where there are fewer, the first one is hashed in place of
 * those that are not there. */
static void many_at_once(const struct base_sha256_method *method, uint8_t first, const uint8_t *const *message,
	size_t len, size_t n, struct base_digest *ret_d)
{
	const uint8_t *at[WIDTH];
	uint8_t edge[WIDTH][2 * BLOCK];
	base_sha256_state state;
	size_t last = 0;

	many_begin(state);
	for (size_t m = 0; m < method->width; m++) {
		at[m] = edge[m];
		edge[m][0] = first;
		memcpy(edge[m] + 1, message[m < n ? m : 0], HEAD);
	}
	method->blocks(state, at, 1);
	for (size_t m = 0; m < method->width; m++)
		at[m] = message[m < n ? m : 0] + HEAD;
	method->blocks(state, at, (len - HEAD) / BLOCK);
	for (size_t m = 0; m < method->width; m++) {
		at[m] = edge[m];
		last = many_last(message[m < n ? m : 0], len, edge[m]);
	}
	method->blocks(state, at, last);
	for (size_t m = 0; m < n; m++)
		for (size_t i = 0; i < 8; i++)
			base_put32(ret_d[m].bytes + 4 * i, __builtin_bswap32(state[i][m]));
}

/* Up to method->width messages. */
static void many_by(const struct base_sha256_method *method, uint8_t first, const uint8_t *const *at, size_t len,
	size_t n, struct base_digest *ret_d)
{
	if (method->blocks && len >= HEAD)
		many_at_once(method, first, at, len, n, ret_d);
	else
		for (size_t m = 0; m < n; m++)
			many_one(first, at[m], len, &ret_d[m]);
}

/* ---- choice of the method ---- */

static const struct base_sha256_method many_methods[] = {
	{1, NULL, NULL},
#if defined(__x86_64__)
	{2, many_pair, has_sha},
	{8, many_avx2, has_avx2},
	{16, many_avx512, has_avx512},
#endif
};

/* Four bits for each number of messages from 1 to WIDTH: the method, counted from 1. 0: not yet chosen. */
static atomic_uint_least64_t many_chosen;

uint64_t base_sha256_method_ns(const struct base_sha256_method *method)
{
	enum { LEN = 2047, TIMES = 6 };
	struct base_digest want[WIDTH], got[WIDTH];
	uint8_t bytes[WIDTH + LEN];
	const uint8_t *at[WIDTH];
	uint64_t least = UINT64_MAX;

	for (size_t i = 0; i < sizeof bytes; i++)
		bytes[i] = (uint8_t)(i * i >> 3);
	for (size_t m = 0; m < method->width; m++) {
		at[m] = bytes + m;
		many_one(0, at[m], LEN, &want[m]);
	}
	for (int i = 0; i < TIMES; i++) {
		uint64_t begin = base_monotonic_ns();

		many_by(method, 0, at, LEN, method->width, got);
		least = base_min(least, base_monotonic_ns() - begin);
	}
	return memcmp(got, want, method->width * sizeof *got) == 0 ? base_max(least, 1) : 0;
}

/* The method that takes the least time for each of n messages. `ns`: of each method for `width` messages; 0: not to be
 * used. */
static size_t many_best(const uint64_t ns[static BASE_COUNT(many_methods)], size_t n)
{
	size_t best = 0;

	for (size_t k = 1; k < BASE_COUNT(many_methods); k++)
		if (ns[k] && (!ns[best] || ns[k] * base_min(n, many_methods[best].width) <
				ns[best] * base_min(n, many_methods[k].width)))
			best = k;
	return best;
}

/* only < 0: of all. */
static uint64_t many_choose(int only)
{
	uint64_t ns[BASE_COUNT(many_methods)] = {0}, chosen = 0;

	for (size_t k = 0; k < BASE_COUNT(many_methods); k++) {
		if ((only >= 0 && only != (int)k) || (many_methods[k].has && !many_methods[k].has()))
			continue;
		ns[k] = base_sha256_method_ns(&many_methods[k]);
		if (ns[k] == 0)
			base_warning("on this processor SHA-256 of %u messages at once is not what libcrypto gives: "
				"it is not used", many_methods[k].width);
	}
	for (size_t n = WIDTH; n > 0; n--)
		chosen = chosen << 4 | (many_best(ns, n) + 1);
	atomic_store_explicit(&many_chosen, chosen, memory_order_relaxed);
	return chosen;
}

int base_sha256_select(int which)
{
	if (which >= (int)BASE_COUNT(many_methods) || (which > 0 && !many_methods[which].has()))
		return -ENOTSUP;
	many_choose(which);
	return 0;
}

void base_sha256_many(uint8_t first, const uint8_t *const *at, size_t len, size_t n, struct base_digest *ret_d)
{
	uint64_t chosen = atomic_load_explicit(&many_chosen, memory_order_relaxed);

	if (chosen == 0 && n > 1)
		chosen = many_choose(-1);
	while (n > 0) {
		unsigned k = chosen >> 4 * (base_min(n, WIDTH) - 1) & 15;
		const struct base_sha256_method *method = &many_methods[k ? k - 1 : 0];
		size_t now = base_min(n, method->width);

		many_by(method, first, at, len, now, ret_d);
		at += now;
		ret_d += now;
		n -= now;
	}
}
