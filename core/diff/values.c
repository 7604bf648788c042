/* SPDX-License-Identifier: Apache-2.0
 *
 * values: a block of values at a time goes into doubles, which hold every value of every type but 64-bit integers
 * exactly; the differences of these are taken before they are rounded. The sums of a block are added up in four
 * sums, and blocks after each other: so the error of a sum grows with the number of blocks, not of values.
 *
 * Values that are not finite are masked out, without a branch; a block that has one is walked again to count them. Of
 * floats, which most tensors have, a block is first added up as if all were finite: its sum says if that is so. */
#include "core/diff/values.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "core/base/le.h"
#include "core/tensor/convert.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif
#define INLINE inline __attribute__((always_inline)) /* so that what uses it decides the instructions */

static const double elements_of_f4[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

void diff_type_init(struct diff_type *t, enum tensor_dtype dtype)
{
	uint8_t codes[256];

	*t = (struct diff_type){.dtype = dtype, .item_bytes = tensor_dtype_bytes(dtype), .values = 1};
	if (dtype == TENSOR_C64 || dtype == TENSOR_C128 || dtype == TENSOR_F4_E2M1FN_X2)
		t->values = 2;
	for (unsigned i = 0; i < 256; i++)
		codes[i] = (uint8_t)i;
	if (dtype == TENSOR_F4_E2M1FN_X2)
		for (unsigned i = 0; i < 16; i++)
			t->table[i] = i & 8 ? -elements_of_f4[i & 7] : elements_of_f4[i];
	else if (t->item_bytes == 1)
		tensor_convert(dtype, TENSOR_F64, codes, t->table, 256);
}

#define WIDEN(type) do { for (size_t i = 0; i < n; i++) out[i] = (double)((const type *)items)[i]; } while (0)

static INLINE void widen(const struct diff_type *t, const void *items, size_t n, double *out)
{
	const uint8_t *codes = items;
	float half[DIFF_BLOCK_VALUES];

	switch (t->dtype) {
	case TENSOR_F64:
	case TENSOR_C128: memcpy(out, items, n * sizeof *out); break;
	case TENSOR_F32:
	case TENSOR_C64: WIDEN(float); break;
	case TENSOR_F16:
	case TENSOR_BF16:
		tensor_convert(t->dtype, TENSOR_F32, items, half, n);
		items = half;
		WIDEN(float);
		break;
	case TENSOR_U16: WIDEN(uint16_t); break;
	case TENSOR_U32: WIDEN(uint32_t); break;
	case TENSOR_U64: WIDEN(uint64_t); break;
	case TENSOR_I16: WIDEN(int16_t); break;
	case TENSOR_I32: WIDEN(int32_t); break;
	case TENSOR_I64: WIDEN(int64_t); break;
	case TENSOR_F4_E2M1FN_X2:
		for (size_t i = 0; i < n; i++)
			out[i] = t->table[codes[i / 2] >> (i % 2 ? 4 : 0) & 15];
		break;
	default:
		for (size_t i = 0; i < n; i++)
			out[i] = t->table[codes[i]];
	}
}

void diff_widen(const struct diff_type *t, const void *items, size_t n, double *ret_values)
{
	widen(t, items, n, ret_values);
}

/* ---- differences ---- */

#define DISTANCES(type) do { \
	const type *from = a, *to = b; \
	for (size_t i = 0; i < n; i++) \
		d[i] = (double)(to[i] > from[i] ? (uint64_t)to[i] - (uint64_t)from[i] \
			: (uint64_t)from[i] - (uint64_t)to[i]); \
} while (0)

static INLINE void distances(const struct diff_type *t, const void *a, const void *b, const double *x, const double *y,
	size_t n, double *d)
{
	if (t->dtype == TENSOR_I64)
		DISTANCES(int64_t);
	else if (t->dtype == TENSOR_U64)
		DISTANCES(uint64_t);
	else
		for (size_t i = 0; i < n; i++)
			d[i] = y[i] - x[i];
}

#define DIFFERENT(type) do { \
	for (size_t i = 0; i < n; i++) \
		changed += ((const type *)a)[i] != ((const type *)b)[i]; \
} while (0)

/* Values of `bytes` bytes each; 0: of half a byte. */
static INLINE size_t different(unsigned bytes, const void *a, const void *b, size_t n)
{
	const uint8_t *x = a, *y = b;
	uint32_t changed = 0;

	switch (bytes) {
	case 8: DIFFERENT(uint64_t); break;
	case 4: DIFFERENT(uint32_t); break;
	case 2: DIFFERENT(uint16_t); break;
	case 1: DIFFERENT(uint8_t); break;
	default:
		for (size_t i = 0; i < n / 2; i++)
			changed += ((x[i] ^ y[i]) & 15 ? 1 : 0) + ((x[i] ^ y[i]) >> 4 ? 1 : 0);
	}
	return changed;
}

struct block_sums { double max, squares, squares_a; uint64_t finite; };

/* Sums of n values, a multiple of 2 * lanes, in vectors of `lanes`. It is inlined into a function for a processor that
 * has such vectors; two sums of each kind, so that an addition need not wait for the one before. */
#define BLOCK_ADD(name, lanes) \
static INLINE struct block_sums name(const double *a, const double *b, \
	const double *distance, size_t n) \
{ \
	typedef double vector __attribute__((vector_size(8 * (lanes)))); \
	typedef int64_t bits __attribute__((vector_size(8 * (lanes)))); \
	const vector most = (vector){0} + DBL_MAX; \
	const bits rest = (bits){0} + INT64_MAX; \
	vector max[2] = {0}, squares[2] = {0}, squares_a[2] = {0}; \
	bits finite[2] = {0}; \
	struct block_sums s = {0}; \
	for (size_t at = 0; at < n; at += 2 * (lanes)) { \
		_Pragma("GCC unroll 2") /* so that the sums stay in registers */ \
		for (size_t k = 0, i = at; k < 2; k++, i += (lanes)) { \
			vector x = (vector)(*(const bits *)&a[i] & rest), y = (vector)(*(const bits *)&b[i] & rest); \
			bits ok = (x <= most) & (y <= most), more; \
			vector d = (vector)(*(const bits *)&distance[i] & rest & ok); \
			x = (vector)((bits)x & ok); \
			finite[k] -= ok; \
			squares[k] += d * d; \
			squares_a[k] += x * x; \
			more = d > max[k]; \
			max[k] = (vector)(((bits)d & more) | ((bits)max[k] & ~more)); \
		} \
	} \
	for (unsigned i = 0; i < 2 * (lanes); i++) { \
		s.max = fmax(s.max, max[i % 2][i / 2]); \
		s.squares += squares[i % 2][i / 2]; \
		s.squares_a += squares_a[i % 2][i / 2]; \
		s.finite += (uint64_t)finite[i % 2][i / 2]; \
	} \
	return s; \
}
BLOCK_ADD(block_add, 2)
#if defined(__x86_64__)
BLOCK_ADD(block_add_wide, 4)
#endif

static void count_others(const double *values, size_t n, uint64_t *nan, uint64_t *inf)
{
	for (size_t i = 0; i < n; i++) {
		*nan += isnan(values[i]) != 0;
		*inf += isinf(values[i]) != 0;
	}
}

/* Of a block of n values, of which the sums have some more, which are 0. */
static INLINE void measure_sums(struct diff_measure *m, const struct diff_type *t, const void *a, const void *b,
	size_t n, size_t more, const struct block_sums *s)
{
	m->max = fmax(m->max, s->max);
	m->squares += s->squares;
	m->squares_a += s->squares_a;
	m->finite += s->finite - more;
	m->changed += different(t->item_bytes / t->values, a, b, n);
}

static size_t block_whole(size_t n) { return (n + 7) & ~(size_t)7; } /* of the widest vectors, two */

static INLINE void measure_block(struct diff_measure *m, const struct diff_type *t,
	const void *a, const void *b, size_t n, struct block_sums (*add)(const double *, const double *, const double *,
	size_t))
{
	double x[DIFF_BLOCK_VALUES] __attribute__((aligned(32))), y[DIFF_BLOCK_VALUES] __attribute__((aligned(32)));
	double d[DIFF_BLOCK_VALUES] __attribute__((aligned(32)));
	size_t whole = block_whole(n);
	struct block_sums s;

	widen(t, a, n, x);
	widen(t, b, n, y);
	distances(t, a, b, x, y, n, d);
	for (size_t i = n; i < whole; i++)
		x[i] = y[i] = d[i] = 0;
	s = add(x, y, d, whole);
	measure_sums(m, t, a, b, n, whole - n, &s);
	if (s.finite == whole)
		return;
	count_others(x, n, &m->nan_a, &m->inf_a);
	count_others(y, n, &m->nan_b, &m->inf_b);
}

static void measure_plain(struct diff_measure *m, const struct diff_type *t, const void *a, const void *b, size_t n)
{
	measure_block(m, t, a, b, n, block_add);
}

#if defined(__x86_64__)
/* n values as floats: the items, or made in `room`, then zeros up to `whole`. */
static AVX2 const float *floats_of(const struct diff_type *t, const void *items, size_t n, size_t whole, float *room)
{
	if (t->item_bytes == 4 * t->values && n == whole)
		return items;
	if (t->item_bytes == 4 * t->values)
		memcpy(room, items, n * sizeof *room);
	else if (t->dtype == TENSOR_BF16)
		for (size_t i = 0; i < n; i++)
			((uint32_t *)room)[i] = (uint32_t)((const uint16_t *)items)[i] << 16;
	else
		tensor_convert(t->dtype, TENSOR_F32, items, room, n);
	for (; n < whole; n++)
		room[n] = 0;
	return room;
}

/* What block_add_wide does, sum for sum, of values that are all finite. If one is not, neither is `squares`. */
static AVX2 struct block_sums floats_add(const float *a, const float *b, size_t n)
{
	__m256d max[2] = {0}, squares[2] = {0}, squares_a[2] = {0};
	struct block_sums s = {.finite = n};

	for (size_t at = 0; at < n; at += 8) {
		_Pragma("GCC unroll 2")
		for (size_t k = 0, i = at; k < 2; k++, i += 4) {
			__m256d x = _mm256_cvtps_pd(_mm_loadu_ps(a + i)), d = _mm256_cvtps_pd(_mm_loadu_ps(b + i)) - x;

			squares[k] += d * d;
			squares_a[k] += x * x;
			max[k] = _mm256_max_pd(max[k], _mm256_andnot_pd(_mm256_set1_pd(-0.0), d));
		}
	}
	for (unsigned i = 0; i < 8; i++) {
		s.max = max[i % 2][i / 2] > s.max ? max[i % 2][i / 2] : s.max;
		s.squares += squares[i % 2][i / 2];
		s.squares_a += squares_a[i % 2][i / 2];
	}
	return s;
}

static AVX2 bool measure_floats(struct diff_measure *m, const struct diff_type *t, const void *a, const void *b,
	size_t n)
{
	float x[DIFF_BLOCK_VALUES], y[DIFF_BLOCK_VALUES];
	size_t whole = block_whole(n);
	struct block_sums s = floats_add(floats_of(t, a, n, whole, x), floats_of(t, b, n, whole, y), whole);

	if (!isfinite(s.squares))
		return false;
	measure_sums(m, t, a, b, n, whole - n, &s);
	return true;
}

static AVX2 void measure_avx2(struct diff_measure *m, const struct diff_type *t, const void *a, const void *b, size_t n)
{
	bool floats = t->dtype == TENSOR_F32 || t->dtype == TENSOR_C64 || t->dtype == TENSOR_F16 ||
		t->dtype == TENSOR_BF16;

	if (!floats || !measure_floats(m, t, a, b, n))
		measure_block(m, t, a, b, n, block_add_wide);
}
static int wide(void) { return __builtin_cpu_supports("avx2") ? 1 : 0; }
#else
#define measure_avx2 measure_plain
static int wide(void) { return 0; }
#endif

static atomic_int selected = 1;

int diff_measure_select(int which)
{
	atomic_store_explicit(&selected, which, memory_order_relaxed);
	return which & wide();
}

void diff_measure_add(struct diff_measure *m, const struct diff_type *t, const void *a, const void *b, size_t items)
{
	bool avx2 = atomic_load_explicit(&selected, memory_order_relaxed) & wide();
	size_t n = items * t->values;
	const uint8_t *x = a, *y = b;

	m->values += n;
	while (n) {
		size_t some = base_min(n, DIFF_BLOCK_VALUES), bytes = some / t->values * t->item_bytes;

		if (avx2)
			measure_avx2(m, t, x, y, some);
		else
			measure_plain(m, t, x, y, some);
		x += bytes;
		y += bytes;
		n -= some;
	}
}

void diff_measure_merge(struct diff_measure *m, const struct diff_measure *other)
{
	m->values += other->values;
	m->changed += other->changed;
	m->finite += other->finite;
	m->nan_a += other->nan_a;
	m->nan_b += other->nan_b;
	m->inf_a += other->inf_a;
	m->inf_b += other->inf_b;
	m->max = fmax(m->max, other->max);
	m->squares += other->squares;
	m->squares_a += other->squares_a;
}
