/* SPDX-License-Identifier: Apache-2.0
 *
 * transform_bitplane: the bits of equal weight of a block's words, put together. In trained weights the sign and
 * the mantissa are noise and the high bits of the exponent hardly change: apart, the latter become long runs that LZ4
 * takes almost for nothing, while mixed with the noise they hide from it.
 *
 * Of `len` bytes the first 8 * floor(len / word / 8) words are transposed; the bytes after them stay as they are.
 * Two steps, in the first level cache: words <-> byte planes, then each byte plane <-> eight bit planes; AVX-512
 * decodes words of two bytes in one. Planes are ordered by falling noise: byte 0 bit 0 (the end of the mantissa) first,
 * the sign last. Bit j of byte i of a plane belongs to word 8 i + j.
 *
 * The vector versions give the same bytes as the portable one: AVX2, and AVX-512 with VBMI and GFNI (Intel from Ice
 * Lake, AMD from Zen 4 on), which has instructions that transpose bits and that permute the bytes of a register. They
 * do not count on the compiler to vectorize, which gcc -O2 does for few loops. SSE2 would help CPUs older than 2013
 * only: they run the portable code. */
#include "core/pack/transform.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "core/base/le.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi,gfni")))
#define UNROLL _Pragma("GCC unroll 8") /* registers in arrays stay registers, with -O2 too */
#endif

/* ---- words <-> byte planes: words [from, words) ---- */

#define INLINE static inline __attribute__((always_inline))

INLINE void split_body(const uint8_t *restrict in, size_t from, size_t words, unsigned width, uint8_t *restrict out)
{
	for (size_t i = from; i < words; i++)
		for (unsigned b = 0; b < width; b++)
			out[b * words + i] = in[i * width + b];
}

INLINE void join_body(const uint8_t *restrict in, size_t from, size_t words, unsigned width, uint8_t *restrict out)
{
	for (size_t i = from; i < words; i++)
		for (unsigned b = 0; b < width; b++)
			out[i * width + b] = in[b * words + i];
}

/* ---- byte plane <-> bit planes ---- */

/* Transposes an 8 x 8 matrix of bits: bit j of byte i <-> bit i of byte j. Its own inverse. */
INLINE uint64_t transpose8(uint64_t x)
{
	uint64_t t = (x ^ (x >> 7)) & UINT64_C(0x00AA00AA00AA00AA);
	x ^= t ^ (t << 7);
	t = (x ^ (x >> 14)) & UINT64_C(0x0000CCCC0000CCCC);
	x ^= t ^ (t << 14);
	t = (x ^ (x >> 28)) & UINT64_C(0x00000000F0F0F0F0);
	return x ^ t ^ (t << 28);
}

/* Bytes [from, n) of a byte plane of n bytes, n a multiple of 8; bit plane k begins at out + k * n / 8. */
INLINE void spread_portable(const uint8_t *in, size_t from, size_t n, uint8_t *out)
{
	for (size_t i = from; i < n; i += 8) {
		uint64_t x = transpose8(base_get64(in + i));
		for (unsigned k = 0; k < 8; k++)
			out[k * (n / 8) + i / 8] = (uint8_t)(x >> 8 * k);
	}
}

/* Eight bytes of a byte plane. `in`: their bits in bit plane 0; the planes are `plane` bytes apart. */
INLINE uint64_t gather8(const uint8_t *in, size_t plane)
{
	uint64_t x = 0;

	for (unsigned k = 0; k < 8; k++)
		x |= (uint64_t)in[k * plane] << 8 * k;
	return transpose8(x);
}

INLINE void gather_portable(const uint8_t *in, size_t from, size_t n, uint8_t *out)
{
	for (size_t i = from; i < n; i += 8)
		base_put64(out + i, gather8(in + i / 8, n / 8));
}

/* n: bytes of a plane, or words of which one is split or joined. */
typedef void (*loop_func)(const uint8_t *restrict in, size_t n, uint8_t *restrict out);
struct level {
	loop_func spread, gather, split[3], join[3]; /* of words of 2, 4 and 8 bytes */
	loop_func gather_join2; /* both at once; NULL: one after the other */
};

#define PORTABLE(name, ...)                                                                                            \
	static void name(const uint8_t *restrict in, size_t n, uint8_t *restrict out) { __VA_ARGS__; }
PORTABLE(spread, spread_portable(in, 0, n, out))
PORTABLE(gather, gather_portable(in, 0, n, out))
PORTABLE(split2, split_body(in, 0, n, 2, out))
PORTABLE(split4, split_body(in, 0, n, 4, out))
PORTABLE(split8, split_body(in, 0, n, 8, out))
PORTABLE(join2, join_body(in, 0, n, 2, out))
PORTABLE(join4, join_body(in, 0, n, 4, out))
PORTABLE(join8, join_body(in, 0, n, 8, out))

#if defined(__x86_64__)
AVX2 static void spread_avx2(const uint8_t *in, size_t n, uint8_t *out)
{
	size_t plane = n / 8, i = 0;
	for (; i + 32 <= n; i += 32) {
		__m256i v = _mm256_loadu_si256((const __m256i *)(in + i));
		for (int k = 7; k >= 0; k--) {
			base_put32(out + (size_t)k * plane + i / 8, (uint32_t)_mm256_movemask_epi8(v));
			v = _mm256_add_epi8(v, v);
		}
	}
	spread_portable(in, i, n, out);
}

AVX2 INLINE __m256i load(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }
AVX2 INLINE void store(uint8_t *at, __m256i v) { _mm256_storeu_si256((__m256i *)at, v); }

/* The 256 bytes of eight registers by turns: 4 q and 4 q + 1 of all registers to low, 4 q + 2 and 4 q + 3 to high.
 * Three rounds of unpacking, which work in each half of a register by itself: bytes 0 to 15, and 16 to 31. */
AVX2 INLINE void interleave8(const __m256i *r, __m256i *ret_low, __m256i *ret_high)
{
	__m256i a[8], b[8];

	UNROLL
	for (int k = 0; k < 4; k++) {
		a[2 * k] = _mm256_unpacklo_epi8(r[2 * k], r[2 * k + 1]); /* of 2k, 2k+1: bytes 0..7 of each half */
		a[2 * k + 1] = _mm256_unpackhi_epi8(r[2 * k], r[2 * k + 1]); /* bytes 8..15 */
	}
	UNROLL
	for (int h = 0; h < 2; h++) { /* registers 0..3 and 4..7 */
		UNROLL
		for (int q = 0; q < 2; q++) {
			b[4 * h + 2 * q] = _mm256_unpacklo_epi16(a[4 * h + q], a[4 * h + 2 + q]);
			b[4 * h + 2 * q + 1] = _mm256_unpackhi_epi16(a[4 * h + q], a[4 * h + 2 + q]);
		}
	}
	UNROLL
	for (int q = 0; q < 4; q++) {
		ret_low[q] = _mm256_unpacklo_epi32(b[q], b[4 + q]);
		ret_high[q] = _mm256_unpackhi_epi32(b[q], b[4 + q]);
	}
}

/* What interleave8 has made, to its place. */
AVX2 INLINE void halves_store(uint8_t *out, int q, __m256i low, __m256i high)
{
	store(out + 32 * q, _mm256_permute2x128_si256(low, high, 0x20));
	store(out + 128 + 32 * q, _mm256_permute2x128_si256(low, high, 0x31));
}

/* Exchanges the bits of b that are in `mask` with the bits of a that are n higher. */
AVX2 INLINE void bits_swap(__m256i *a, __m256i *b, int n, __m256i mask)
{
	__m256i t = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(*a, n), *b), mask);

	*b = _mm256_xor_si256(*b, t);
	*a = _mm256_xor_si256(*a, _mm256_slli_epi16(t, n));
}

/* Bit i of byte n of register k <-> bit k of byte n of register i. */
AVX2 INLINE void transpose8_avx2(__m256i *r)
{
	UNROLL
	for (int k = 0; k < 4; k++)
		bits_swap(&r[k], &r[k + 4], 4, _mm256_set1_epi8(0x0f));
	UNROLL
	for (int k = 0; k < 4; k++)
		bits_swap(&r[k + (k & 2)], &r[k + (k & 2) + 2], 2, _mm256_set1_epi8(0x33));
	UNROLL
	for (int k = 0; k < 4; k++)
		bits_swap(&r[2 * k], &r[2 * k + 1], 1, _mm256_set1_epi8(0x55));
}

AVX2 static void gather_avx2(const uint8_t *in, size_t n, uint8_t *out)
{
	size_t i = 0;

	for (; i + 256 <= n; i += 256) {
		__m256i r[8], low[4], high[4];

		UNROLL
		for (size_t k = 0; k < 8; k++)
			r[k] = load(in + k * (n / 8) + i / 8);
		transpose8_avx2(r);
		interleave8(r, low, high);
		UNROLL
		for (int q = 0; q < 4; q++)
			halves_store(out + i, q, low[q], high[q]);
	}
	gather_portable(in, i, n, out);
}

AVX2 static void split2_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	const __m256i mask = _mm256_set1_epi16(0xff);
	size_t i = 0;

	for (; i + 32 <= words; i += 32) {
		__m256i a = load(in + 2 * i), b = load(in + 2 * i + 32);
		__m256i low = _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
		__m256i high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));

		store(out + i, _mm256_permute4x64_epi64(low, 0xd8));
		store(out + words + i, _mm256_permute4x64_epi64(high, 0xd8));
	}
	split_body(in, i, words, 2, out);
}

AVX2 static void join2_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	size_t i = 0;

	for (; i + 32 <= words; i += 32) {
		__m256i low = load(in + i), high = load(in + words + i);
		__m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);

		store(out + 2 * i, _mm256_permute2x128_si256(a, b, 0x20));
		store(out + 2 * i + 32, _mm256_permute2x128_si256(a, b, 0x31));
	}
	join_body(in, i, words, 2, out);
}

/* 8 words a register: their bytes of equal weight to 32 bits of each half, then those of four registers together. */
AVX2 static void split4_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	const __m256i weights = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1,
		5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
	size_t i = 0;

	for (; i + 32 <= words; i += 32) {
		__m256i v[4], a[4];

		UNROLL
		for (size_t k = 0; k < 4; k++)
			v[k] = _mm256_shuffle_epi8(load(in + 4 * i + 32 * k), weights);
		a[0] = _mm256_unpacklo_epi32(v[0], v[1]);
		a[1] = _mm256_unpacklo_epi32(v[2], v[3]);
		a[2] = _mm256_unpackhi_epi32(v[0], v[1]);
		a[3] = _mm256_unpackhi_epi32(v[2], v[3]);
		UNROLL
		for (size_t k = 0; k < 2; k++) {
			__m256i even = _mm256_unpacklo_epi64(a[2 * k], a[2 * k + 1]);
			__m256i odd = _mm256_unpackhi_epi64(a[2 * k], a[2 * k + 1]);

			store(out + 2 * k * words + i, _mm256_permutevar8x32_epi32(even, order));
			store(out + (2 * k + 1) * words + i, _mm256_permutevar8x32_epi32(odd, order));
		}
	}
	split_body(in, i, words, 4, out);
}

AVX2 static void join4_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	size_t i = 0;

	for (; i + 32 <= words; i += 32) {
		__m256i v[4], low[2], high[2], r[4];

		UNROLL
		for (size_t k = 0; k < 4; k++)
			v[k] = load(in + k * words + i);
		UNROLL
		for (int k = 0; k < 2; k++) { /* bytes 0, 1 and bytes 2, 3 of words 0..7 and 8..15 of each half */
			low[k] = _mm256_unpacklo_epi8(v[2 * k], v[2 * k + 1]);
			high[k] = _mm256_unpackhi_epi8(v[2 * k], v[2 * k + 1]);
		}
		r[0] = _mm256_unpacklo_epi16(low[0], low[1]); /* words 0..3 of each half, and so on */
		r[1] = _mm256_unpackhi_epi16(low[0], low[1]);
		r[2] = _mm256_unpacklo_epi16(high[0], high[1]);
		r[3] = _mm256_unpackhi_epi16(high[0], high[1]);
		UNROLL
		for (size_t k = 0; k < 2; k++) {
			store(out + 4 * i + 32 * k, _mm256_permute2x128_si256(r[2 * k], r[2 * k + 1], 0x20));
			store(out + 4 * i + 64 + 32 * k, _mm256_permute2x128_si256(r[2 * k], r[2 * k + 1], 0x31));
		}
	}
	join_body(in, i, words, 4, out);
}

/* Words of 8 bytes are rare: a loop that gcc -O3 vectorizes. */
AVX2 static void split8_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	split_body(in, 0, words, 8, out);
}
AVX2 static void join8_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	join_body(in, 0, words, 8, out);
}

/* ---- the same with registers of 64 bytes ---- */

AVX512 INLINE __m512i load64(const uint8_t *at) { return _mm512_loadu_si512(at); }
AVX512 INLINE void store64(uint8_t *at, __m512i v) { _mm512_storeu_si512(at, v); }

/* Byte 8 i + j <-> byte 8 j + i. */
AVX512 INLINE __m512i transpose_bytes(__m512i v)
{
	const __m512i from = _mm512_set_epi64(0x3f372f271f170f07, 0x3e362e261e160e06, 0x3d352d251d150d05,
		0x3c342c241c140c04, 0x3b332b231b130b03, 0x3a322a221a120a02, 0x3931292119110901, 0x3830282018100800);

	return _mm512_permutexvar_epi8(from, v);
}

/* Bit j of byte i <-> bit i of byte 7 - j, of each 8 bytes. The instruction multiplies each byte with a matrix of 8 x 8
 * bits, here the bytes that have only bit i with what is to be transposed. It counts rows from the last byte on. */
AVX512 INLINE __m512i transpose_bits(__m512i v)
{
	return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64((int64_t)UINT64_C(0x8040201008040201)), v, 0);
}

/* Bit j of each byte <-> bit 7 - j. */
AVX512 INLINE __m512i reverse_bits(__m512i v)
{
	return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64((int64_t)UINT64_C(0x8040201008040201)), 0);
}

/* Each 8 bytes j of register i <-> 8 bytes i of register j. */
AVX512 INLINE void transpose8_avx512(__m512i *r)
{
	__m512i a[8], b[8];

	UNROLL
	for (int i = 0; i < 4; i++) {
		a[2 * i] = _mm512_unpacklo_epi64(r[2 * i], r[2 * i + 1]);
		a[2 * i + 1] = _mm512_unpackhi_epi64(r[2 * i], r[2 * i + 1]);
	}
	UNROLL
	for (int i = 0; i < 2; i++) { /* quarters of registers: 0 and 2, or 1 and 3, of two */
		b[i] = _mm512_shuffle_i32x4(a[i], a[2 + i], 0x88);
		b[2 + i] = _mm512_shuffle_i32x4(a[i], a[2 + i], 0xdd);
		b[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[6 + i], 0x88);
		b[6 + i] = _mm512_shuffle_i32x4(a[4 + i], a[6 + i], 0xdd);
	}
	UNROLL
	for (int i = 0; i < 4; i++) {
		r[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
		r[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
	}
}

AVX512 static void spread_avx512(const uint8_t *in, size_t n, uint8_t *out)
{
	size_t i = 0;

	for (; i + 512 <= n; i += 512) {
		__m512i r[8];

		UNROLL
		for (size_t k = 0; k < 8; k++)
			r[k] = transpose_bytes(reverse_bits(transpose_bits(load64(in + i + 64 * k))));
		transpose8_avx512(r);
		UNROLL
		for (size_t k = 0; k < 8; k++)
			store64(out + k * (n / 8) + i / 8, r[k]);
	}
	spread_portable(in, i, n, out);
}

/* 64 bytes of each of eight bit planes: the 512 bytes that they are the bits of. `order` is a permutation of these 64.
 * Three rounds then shuffle registers into each other, in each quarter by itself. What is byte
 * 16 q + 4 (k mod 4) + 2 h + k / 4 of the permuted planes becomes half h of quarter q of register k. One port of a core
 * permutes bytes of such registers and is what this waits for, so the first round shifts and selects instead, which
 * leaves that port free. */
AVX512 INLINE void gather8_avx512(const uint8_t *in, size_t plane, __m512i order, __m512i *r)
{
	const __m512i even = _mm512_set1_epi16(0xff);
	__m512i a[8], b[8];

	UNROLL
	for (size_t k = 0; k < 8; k++) /* the last plane first, as transpose_bits wants it */
		r[k] = _mm512_permutexvar_epi8(order, load64(in + (7 - k) * plane));
	UNROLL
	for (int k = 0; k < 8; k += 2) { /* 0xe4: the first where `even` has a bit, else the second */
		a[k] = _mm512_ternarylogic_epi32(r[k], _mm512_slli_epi16(r[k + 1], 8), even, 0xe4);
		a[k + 1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(r[k], 8), r[k + 1], even, 0xe4);
	}
	UNROLL
	for (int k = 0; k < 4; k++) {
		b[2 * k] = _mm512_unpacklo_epi16(a[k + (k & 2)], a[k + (k & 2) + 2]);
		b[2 * k + 1] = _mm512_unpackhi_epi16(a[k + (k & 2)], a[k + (k & 2) + 2]);
	}
	UNROLL
	for (int k = 0; k < 4; k++) {
		r[2 * k] = transpose_bits(_mm512_unpacklo_epi32(b[k], b[4 + k]));
		r[2 * k + 1] = transpose_bits(_mm512_unpackhi_epi32(b[k], b[4 + k]));
	}
}

AVX512 static void gather_avx512(const uint8_t *in, size_t n, uint8_t *out)
{
	const __m512i order = _mm512_set_epi64(0x3f1f3e1e37173616, 0x2f0f2e0e27072606,
		0x3d1d3c1c35153414, 0x2d0d2c0c25052404, 0x3b1b3a1a33133212, 0x2b0b2a0a23032202,
		0x3919381831113010, 0x2909280821012000);
	size_t i = 0;

	for (; i + 512 <= n; i += 512) {
		__m512i r[8];

		gather8_avx512(in + i / 8, n / 8, order, r);
		UNROLL
		for (size_t k = 0; k < 8; k++)
			store64(out + i + 64 * k, r[k]);
	}
	gather_portable(in, i, n, out);
}

AVX512 static void gather_join2_avx512(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	const __m512i order = _mm512_set_epi64(0x3f1f3b1b37173313, 0x2f0f2b0b27072303,
		0x3e1e3a1a36163212, 0x2e0e2a0a26062202, 0x3d1d391935153111, 0x2d0d290925052101,
		0x3c1c381834143010, 0x2c0c280824042000);
	size_t i = 0;

	for (; i + 512 <= words; i += 512) {
		__m512i low[8], high[8];

		gather8_avx512(in + i / 8, words / 8, order, low);
		gather8_avx512(in + words + i / 8, words / 8, order, high);
		UNROLL
		for (size_t k = 0; k < 8; k++) {
			store64(out + 2 * i + 128 * k, _mm512_unpacklo_epi8(low[k], high[k]));
			store64(out + 2 * i + 128 * k + 64, _mm512_unpackhi_epi8(low[k], high[k]));
		}
	}
	for (; i < words; i += 8) {
		uint64_t low = gather8(in + i / 8, words / 8), high = gather8(in + words + i / 8, words / 8);

		for (size_t j = 0; j < 8; j++) {
			out[2 * (i + j)] = (uint8_t)(low >> 8 * j);
			out[2 * (i + j) + 1] = (uint8_t)(high >> 8 * j);
		}
	}
}

AVX512 static void split2_avx512(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	const __m512i even = _mm512_set_epi64(0x7e7c7a7876747270, 0x6e6c6a6866646260, 0x5e5c5a5856545250,
		0x4e4c4a4846444240, 0x3e3c3a3836343230, 0x2e2c2a2826242220, 0x1e1c1a1816141210, 0x0e0c0a0806040200);
	const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
	size_t i = 0;

	for (; i + 64 <= words; i += 64) {
		__m512i a = load64(in + 2 * i), b = load64(in + 2 * i + 64);

		store64(out + i, _mm512_permutex2var_epi8(a, even, b));
		store64(out + words + i, _mm512_permutex2var_epi8(a, odd, b));
	}
	split_body(in, i, words, 2, out);
}
#endif

/* ---- choice of the implementation ---- */

static atomic_int selected = -1; /* -1: not yet asked */

int transform_select(int which)
{
	int use = 0;
#if defined(__x86_64__)
	if (__builtin_cpu_supports("avx2"))
		use = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw") &&
			__builtin_cpu_supports("gfni") ? 2 : 1;
#endif
	if (which >= 0 && which < use)
		use = which;
	atomic_store_explicit(&selected, use, memory_order_relaxed);
	return use;
}

static const struct level levels[] = {
	{spread, gather, {split2, split4, split8}, {join2, join4, join8}, NULL},
#if defined(__x86_64__)
	{spread_avx2, gather_avx2, {split2_avx2, split4_avx2, split8_avx2}, {join2_avx2, join4_avx2, join8_avx2}, NULL},
	{spread_avx512, gather_avx512, {split2_avx512, split4_avx2, split8_avx2},
		{join2_avx2, join4_avx2, join8_avx2}, gather_join2_avx512},
#endif
};

static const struct level *level(void)
{
	int use = atomic_load_explicit(&selected, memory_order_relaxed);

	return &levels[use < 0 ? transform_select(-1) : use];
}

/* Only so many words are transposed, so that planes have whole bytes; the bytes behind them stay as they are. */
static size_t whole_words(size_t len, unsigned width) { return len / width & ~(size_t)7; }

void transform_bitplane_encode(unsigned width, const uint8_t *in, size_t len, uint8_t *out, uint8_t *scratch)
{
	const struct level *l = level();
	size_t words = whole_words(len, width), done = words * width;
	const uint8_t *bytes = width > 1 ? scratch : in;

	if (width > 1)
		l->split[width / 4](in, words, scratch);
	for (unsigned b = 0; b < width; b++)
		l->spread(bytes + b * words, words, out + b * words);
	memcpy(out + done, in + done, len - done);
}

void transform_bitplane_decode(unsigned width, const uint8_t *in, size_t len, uint8_t *out, uint8_t *scratch)
{
	const struct level *l = level();
	size_t words = whole_words(len, width), done = words * width;
	uint8_t *bytes = width > 1 ? scratch : out;

	if (width == 2 && l->gather_join2) {
		l->gather_join2(in, words, out);
	} else {
		for (unsigned b = 0; b < width; b++)
			l->gather(in + b * words, words, bytes + b * words);
		if (width > 1)
			l->join[width / 4](scratch, words, out);
	}
	memcpy(out + done, in + done, len - done);
}
