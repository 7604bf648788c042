/* SPDX-License-Identifier: Apache-2.0
 *
 * transform_bitplane: the bits of equal weight of a block's words, put together. In trained weights the sign and
 * the mantissa are noise and the high bits of the exponent hardly change: apart, the latter become long runs that LZ4
 * takes almost for nothing, while mixed with the noise they hide from it.
 *
 * Of `len` bytes the first 8 * floor(len / word / 8) words are transposed; the bytes after them stay as they are.
 * Two steps, in the first level cache: words <-> byte planes, then each byte plane <-> eight bit planes. Planes are
 * ordered by falling noise: byte 0 bit 0 (the end of the mantissa) first, the sign last. Bit j of byte i of a plane
 * belongs to word 8 i + j.
 *
 * The AVX2 versions give the same bytes as the portable ones. SSE2 would help CPUs older than 2013 only: they run the
 * portable code. */
#include "core/pack/transform.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "core/base/le.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif

/* ---- words <-> byte planes: plain loops that the compiler turns into shuffles, once for each target ---- */

#define INLINE static inline __attribute__((always_inline))

INLINE void split_body(const uint8_t *restrict in, size_t words, unsigned width, uint8_t *restrict out)
{
	for (size_t i = 0; i < words; i++)
		for (unsigned b = 0; b < width; b++)
			out[b * words + i] = in[i * width + b];
}

INLINE void join_body(const uint8_t *restrict in, size_t words, unsigned width, uint8_t *restrict out)
{
	for (size_t i = 0; i < words; i++)
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

INLINE void gather_portable(const uint8_t *in, size_t from, size_t n, uint8_t *out)
{
	for (size_t i = from; i < n; i += 8) {
		uint64_t x = 0;
		for (unsigned k = 0; k < 8; k++)
			x |= (uint64_t)in[k * (n / 8) + i / 8] << 8 * k;
		base_put64(out + i, transpose8(x));
	}
}

typedef void (*plane_func)(const uint8_t *in, size_t words, unsigned width, uint8_t *out, uint8_t *scratch);

static void encode_portable(const uint8_t *in, size_t words, unsigned width, uint8_t *out, uint8_t *scratch)
{
	const uint8_t *bytes = in;
	if (width > 1) {
		split_body(in, words, width, scratch);
		bytes = scratch;
	}
	for (unsigned b = 0; b < width; b++)
		spread_portable(bytes + b * words, 0, words, out + b * words);
}

static void decode_portable(const uint8_t *in, size_t words, unsigned width, uint8_t *out, uint8_t *scratch)
{
	uint8_t *bytes = width > 1 ? scratch : out;
	for (unsigned b = 0; b < width; b++)
		gather_portable(in + b * words, 0, words, bytes + b * words);
	if (width > 1)
		join_body(scratch, words, width, out);
}

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

AVX2 INLINE __m256i transpose8_avx2(__m256i x)
{
	__m256i t =
		_mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 7)), _mm256_set1_epi64x(0x00AA00AA00AA00AA));
	x = _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, 7)));
	t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 14)), _mm256_set1_epi64x(0x0000CCCC0000CCCC));
	x = _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, 14)));
	t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 28)), _mm256_set1_epi64x(0x00000000F0F0F0F0));
	return _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, 28)));
}

/* 32 bytes of each of eight bit planes -> 256 bytes: a transposition of bytes by three rounds of unpacking, which work
 * in each half of a register by itself (so the halves are stored apart), then of bits. */
AVX2 INLINE void gather_avx2_256(const uint8_t *in, size_t plane, uint8_t *out)
{
	__m256i r[8], a[8], b[8];
	for (size_t k = 0; k < 8; k++)
		r[k] = _mm256_loadu_si256((const __m256i *)(in + k * plane));
	for (int k = 0; k < 4; k++) {
		a[2 * k] = _mm256_unpacklo_epi8(r[2 * k], r[2 * k + 1]); /* planes 2k, 2k+1; bytes 0..7 of each half */
		a[2 * k + 1] = _mm256_unpackhi_epi8(r[2 * k], r[2 * k + 1]); /* bytes 8..15 */
	}
	for (int h = 0; h < 2; h++) { /* planes 0..3 and 4..7 */
		for (int q = 0; q < 2; q++) {
			b[4 * h + 2 * q] = _mm256_unpacklo_epi16(a[4 * h + q], a[4 * h + 2 + q]);
			b[4 * h + 2 * q + 1] = _mm256_unpackhi_epi16(a[4 * h + q], a[4 * h + 2 + q]);
		}
	}
	for (int q = 0; q < 4; q++) { /* bytes 4q .. 4q+3 of each half, all eight planes */
		__m256i low = transpose8_avx2(_mm256_unpacklo_epi32(b[q], b[4 + q]));
		__m256i high = transpose8_avx2(_mm256_unpackhi_epi32(b[q], b[4 + q]));
		_mm256_storeu_si256((__m256i *)(out + 32 * q), _mm256_permute2x128_si256(low, high, 0x20));
		_mm256_storeu_si256((__m256i *)(out + 128 + 32 * q), _mm256_permute2x128_si256(low, high, 0x31));
	}
}

AVX2 static void gather_avx2(const uint8_t *in, size_t n, uint8_t *out)
{
	size_t i = 0;
	for (; i + 256 <= n; i += 256)
		gather_avx2_256(in + i / 8, n / 8, out + i);
	gather_portable(in, i, n, out);
}

AVX2 static void split2_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	split_body(in, words, 2, out);
}
AVX2 static void split4_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	split_body(in, words, 4, out);
}
AVX2 static void split8_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	split_body(in, words, 8, out);
}
AVX2 static void join2_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	join_body(in, words, 2, out);
}
AVX2 static void join4_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	join_body(in, words, 4, out);
}
AVX2 static void join8_avx2(const uint8_t *restrict in, size_t words, uint8_t *restrict out)
{
	join_body(in, words, 8, out);
}

static void encode_avx2(const uint8_t *in, size_t words, unsigned width, uint8_t *out, uint8_t *scratch)
{
	switch (width) {
	case 2: split2_avx2(in, words, scratch); break;
	case 4: split4_avx2(in, words, scratch); break;
	case 8: split8_avx2(in, words, scratch); break;
	}
	const uint8_t *bytes = width > 1 ? scratch : in;
	for (unsigned b = 0; b < width; b++)
		spread_avx2(bytes + b * words, words, out + b * words);
}

static void decode_avx2(const uint8_t *in, size_t words, unsigned width, uint8_t *out, uint8_t *scratch)
{
	uint8_t *bytes = width > 1 ? scratch : out;
	for (unsigned b = 0; b < width; b++)
		gather_avx2(in + b * words, words, bytes + b * words);
	switch (width) {
	case 2: join2_avx2(scratch, words, out); break;
	case 4: join4_avx2(scratch, words, out); break;
	case 8: join8_avx2(scratch, words, out); break;
	}
}
#endif

/* ---- choice of the implementation ---- */

static atomic_int selected = -1; /* -1: not yet asked */

int transform_select(int which)
{
	bool avx2 = false;
#if defined(__x86_64__)
	avx2 = __builtin_cpu_supports("avx2");
#endif
	int use = which == 0 || !avx2 ? 0 : 1;
	atomic_store_explicit(&selected, use, memory_order_relaxed);
	return use;
}

static void encode(const uint8_t *in, size_t len, unsigned width, uint8_t *out, uint8_t *scratch)
{
	int use = atomic_load_explicit(&selected, memory_order_relaxed);
	if (use < 0)
		use = transform_select(-1);
	size_t words = len / width & ~(size_t)7, done = words * width;
	plane_func f = encode_portable;
#if defined(__x86_64__)
	if (use == 1)
		f = encode_avx2;
#endif
	f(in, words, width, out, scratch);
	memcpy(out + done, in + done, len - done);
}

static void decode(const uint8_t *in, size_t len, unsigned width, uint8_t *out, uint8_t *scratch)
{
	int use = atomic_load_explicit(&selected, memory_order_relaxed);
	if (use < 0)
		use = transform_select(-1);
	size_t words = len / width & ~(size_t)7, done = words * width;
	plane_func f = decode_portable;
#if defined(__x86_64__)
	if (use == 1)
		f = decode_avx2;
#endif
	f(in, words, width, out, scratch);
	memcpy(out + done, in + done, len - done);
}

#define BITPLANE(bits)                                                                                                 \
	void transform_bitplane##bits##_encode(const uint8_t *in, size_t len, uint8_t *out, uint8_t *scratch)          \
	{                                                                                                              \
		encode(in, len, bits / 8, out, scratch);                                                               \
	}                                                                                                              \
	void transform_bitplane##bits##_decode(const uint8_t *in, size_t len, uint8_t *out, uint8_t *scratch)          \
	{                                                                                                              \
		decode(in, len, bits / 8, out, scratch);                                                               \
	}
BITPLANE(8)
BITPLANE(16)
BITPLANE(32)
BITPLANE(64)
