/* SPDX-License-Identifier: Apache-2.0
 *
 * convert: most pairs go through one of two hubs, a block at a time: doubles, which hold every value of every smaller
 * float exactly, or 64-bit integers, signed or not. From a hub each type is one rounding away: that a 64-bit integer is
 * rounded to a double first must not show, so where the end is a smaller float it is rounded to odd there, and the
 * second rounding sees on which side of a tie the number was.
 *
 * The pairs that models use most, between f32 and the others, have loops of their own that compilers turn into vector
 * code. They give the same bits. */
#include "core/tensor/convert.h"

#include <string.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "core/base/le.h"

#define CONVERT_BLOCK 256u

/* Items may lie anywhere, in memory of any type. */
typedef uint16_t any_u16 __attribute__((may_alias, aligned(1)));
typedef uint32_t any_u32 __attribute__((may_alias, aligned(1)));
typedef uint64_t any_u64 __attribute__((may_alias, aligned(1)));
typedef int16_t any_i16 __attribute__((may_alias, aligned(1)));
typedef int32_t any_i32 __attribute__((may_alias, aligned(1)));
typedef int64_t any_i64 __attribute__((may_alias, aligned(1)));
typedef float any_f32 __attribute__((may_alias, aligned(1)));
typedef double any_f64 __attribute__((may_alias, aligned(1)));

/* ---- the small floats ---- */

struct convert_format {
	unsigned bits, mantissa; int bias;
	uint32_t most, past, nan;        /* codes without sign: the largest number, what is larger, NaN */
	bool unsigned_zero;              /* fnuz: the sign's code alone is NaN, and there is no -0 */
};

static const struct convert_format convert_formats[TENSOR_DTYPE_END] = {
	[TENSOR_F16] = {16, 10, 15, 0x7bff, 0x7c00, 0x7e00, false},
	[TENSOR_BF16] = {16, 7, 127, 0x7f7f, 0x7f80, 0x7fc0, false},
	[TENSOR_F8_E4M3FN] = {8, 3, 7, 0x7e, 0x7f, 0x7f, false},
	[TENSOR_F8_E5M2] = {8, 2, 15, 0x7b, 0x7c, 0x7e, false},
	[TENSOR_F8_E4M3FNUZ] = {8, 3, 8, 0x7f, 0x80, 0x80, true},
	[TENSOR_F8_E5M2FNUZ] = {8, 2, 16, 0x7f, 0x80, 0x80, true},
};

static uint64_t bits_of(double value)
{
	uint64_t bits;

	memcpy(&bits, &value, sizeof bits);
	return bits;
}

static double double_of(uint64_t bits)
{
	double value;

	memcpy(&value, &bits, sizeof value);
	return value;
}

static double two_to(int exponent) { return double_of((uint64_t)(exponent + 1023) << 52); } /* -1022 .. 1023 */

static double widen(uint32_t code, const struct convert_format *t)
{
	uint32_t sign = code >> (t->bits - 1), rest = code & ((1u << (t->bits - 1)) - 1);
	uint64_t negative = (uint64_t)sign << 63;
	int exponent = (int)(rest >> t->mantissa), low = 1 - t->bias - (int)t->mantissa;
	uint32_t fraction = rest & ((1u << t->mantissa) - 1);

	if (t->unsigned_zero ? code == t->nan : rest > t->past || rest == t->nan)
		return double_of(negative | UINT64_C(0x7ff8) << 48 | (uint64_t)fraction << (52 - t->mantissa));
	if (rest == t->past)             /* never with unsigned_zero: the code has one bit more than `rest` */
		return double_of(negative | UINT64_C(0x7ff) << 52);
	if (exponent == 0)
		return double_of(negative | bits_of((double)fraction * two_to(low)));
	return double_of(negative | (uint64_t)(exponent - t->bias + 1023) << 52
		| (uint64_t)fraction << (52 - t->mantissa));
}

static uint32_t narrow_special(uint64_t bits, const struct convert_format *t)
{
	uint64_t fraction = bits & ((UINT64_C(1) << 52) - 1);

	if (!fraction)
		return t->past;
	return t->bits == 16 ? t->nan | (uint32_t)(fraction >> (52 - t->mantissa)) : t->nan;
}

/* Of a finite number that is not 0, without its sign. */
static uint32_t narrow_number(uint64_t bits, const struct convert_format *t)
{
	uint64_t fraction = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52, kept, rest, half;
	int exponent = (int)(bits >> 52 & 0x7ff) - 1023, least = 1 - t->bias;
	unsigned shift = 52 - t->mantissa;
	uint32_t code;

	if (exponent < least)
		shift += (unsigned)(least - exponent);
	if (shift > 54)
		return 0;                /* less than half of the smallest */
	kept = fraction >> shift;
	rest = fraction & ((UINT64_C(1) << shift) - 1);
	half = UINT64_C(1) << (shift - 1);
	kept += rest > half || (rest == half && (kept & 1));
	if (exponent > t->bias + 1)
		return t->past;
	code = (uint32_t)kept;
	if (exponent >= least)
		code += (uint32_t)(exponent + t->bias - 1) << t->mantissa; /* kept has the leading one */
	return code > t->most ? t->past : code;
}

static uint32_t narrow(double value, const struct convert_format *t)
{
	uint64_t bits = bits_of(value), exponent = bits >> 52 & 0x7ff;
	uint32_t sign = (uint32_t)(bits >> 63) << (t->bits - 1), code;

	/* subnormal doubles are below anything that these types have */
	code = exponent == 0x7ff ? narrow_special(bits, t) : exponent ? narrow_number(bits, t) : 0;
	if (t->unsigned_zero)
		return code == 0 || code == t->nan ? code : code | sign;
	return code | sign;
}

static double power_of_two(uint8_t code)
{
	return code == 0xff ? double_of(UINT64_C(0x7ff8) << 48) : two_to((int)code - 127);
}

/* ---- hubs ---- */

union convert_hub { double f[CONVERT_BLOCK]; uint64_t u[CONVERT_BLOCK]; };

static bool is_float(enum tensor_dtype t)
{
	return (t >= TENSOR_F16 && t <= TENSOR_F64) || (t >= TENSOR_F8_E4M3FN && t <= TENSOR_F8_E8M0FNU);
}

#define CONVERT_EACH(expression) do { for (size_t i = 0; i < n; i++) { expression; } } while (0)

static void hub_from_float(enum tensor_dtype from, const void *in, double *out, size_t n)
{
	const struct convert_format *t = &convert_formats[from];

	switch (from) {
	case TENSOR_F64: memcpy(out, in, n * sizeof *out); break;
	case TENSOR_F32: CONVERT_EACH(out[i] = ((const any_f32 *)in)[i]); break;
	case TENSOR_F16:
	case TENSOR_BF16: CONVERT_EACH(out[i] = widen(((const any_u16 *)in)[i], t)); break;
	case TENSOR_F8_E8M0FNU: CONVERT_EACH(out[i] = power_of_two(((const uint8_t *)in)[i])); break;
	default: CONVERT_EACH(out[i] = widen(((const uint8_t *)in)[i], t));
	}
}

static void hub_to_float(enum tensor_dtype to, const double *in, void *out, size_t n)
{
	const struct convert_format *t = &convert_formats[to];

	switch (to) {
	case TENSOR_F64: memcpy(out, in, n * sizeof *in); break;
	case TENSOR_F32: CONVERT_EACH(((any_f32 *)out)[i] = (float)in[i]); break;
	case TENSOR_F16:
	case TENSOR_BF16: CONVERT_EACH(((any_u16 *)out)[i] = (uint16_t)narrow(in[i], t)); break;
	default: CONVERT_EACH(((uint8_t *)out)[i] = (uint8_t)narrow(in[i], t));
	}
}

static void hub_from_integer(enum tensor_dtype from, const void *in, uint64_t *out, size_t n)
{
	switch (from) {
	case TENSOR_BOOL: CONVERT_EACH(out[i] = ((const uint8_t *)in)[i] != 0); break;
	case TENSOR_U8: CONVERT_EACH(out[i] = ((const uint8_t *)in)[i]); break;
	case TENSOR_U16: CONVERT_EACH(out[i] = ((const any_u16 *)in)[i]); break;
	case TENSOR_U32: CONVERT_EACH(out[i] = ((const any_u32 *)in)[i]); break;
	case TENSOR_I8: CONVERT_EACH(out[i] = (uint64_t)(int64_t)((const int8_t *)in)[i]); break;
	case TENSOR_I16: CONVERT_EACH(out[i] = (uint64_t)(int64_t)((const any_i16 *)in)[i]); break;
	case TENSOR_I32: CONVERT_EACH(out[i] = (uint64_t)(int64_t)((const any_i32 *)in)[i]); break;
	default: memcpy(out, in, n * sizeof *out);
	}
}

static void hub_to_integer(enum tensor_dtype to, const uint64_t *in, void *out, size_t n)
{
	switch (to) {
	case TENSOR_BOOL: CONVERT_EACH(((uint8_t *)out)[i] = in[i] != 0); break;
	case TENSOR_U8:
	case TENSOR_I8: CONVERT_EACH(((uint8_t *)out)[i] = (uint8_t)in[i]); break;
	case TENSOR_U16:
	case TENSOR_I16: CONVERT_EACH(((any_u16 *)out)[i] = (uint16_t)in[i]); break;
	case TENSOR_U32:
	case TENSOR_I32: CONVERT_EACH(((any_u32 *)out)[i] = (uint32_t)in[i]); break;
	default: memcpy(out, in, n * sizeof *in);
	}
}

/* ---- from one hub to the other ---- */

/* The double next to it that is not further from zero; its last bit says whether something was cut off. */
static double odd_double(uint64_t magnitude)
{
	unsigned spare = magnitude >> 53 ? 11 - (unsigned)__builtin_clzll(magnitude) : 0;
	uint64_t kept = magnitude >> spare << spare;

	if (spare && kept != magnitude)
		kept |= UINT64_C(1) << spare;
	return (double)kept;
}

static double integer_as_double(uint64_t value, bool has_sign, bool last)
{
	bool negative = has_sign && (int64_t)value < 0;
	uint64_t magnitude = negative ? -value : value;
	double d = last ? (double)magnitude : odd_double(magnitude);

	return negative ? -d : d;
}

static uint64_t double_as_integer(double value, double low, double high, uint64_t least, uint64_t most)
{
	if (value != value)
		return 0;
	if (value <= low)
		return least;
	if (value >= high)
		return most;
	return value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
}

static bool has_sign(enum tensor_dtype t) { return t >= TENSOR_I8 && t <= TENSOR_I64; }

static void hub_integers(enum tensor_dtype to, const double *in, uint64_t *out, size_t n)
{
	int bits = 8 * (int)tensor_dtype_bytes(to), positive = has_sign(to) ? bits - 1 : bits;
	double high = two_to(positive), low = has_sign(to) ? -high : 0;
	uint64_t most = positive == 64 ? UINT64_MAX : (UINT64_C(1) << positive) - 1;
	uint64_t least = has_sign(to) ? ~most : 0;

	if (to == TENSOR_BOOL)
		CONVERT_EACH(out[i] = in[i] != 0);
	else
		CONVERT_EACH(out[i] = double_as_integer(in[i], low, high, least, most));
}

static void convert_block(enum tensor_dtype from, enum tensor_dtype to, const void *in, void *out, size_t n)
{
	union convert_hub hub, other;

	if (is_float(from)) {
		hub_from_float(from, in, hub.f, n);
		if (is_float(to)) {
			hub_to_float(to, hub.f, out, n);
			return;
		}
		hub_integers(to, hub.f, other.u, n);
		hub_to_integer(to, other.u, out, n);
		return;
	}
	hub_from_integer(from, in, hub.u, n);
	if (is_float(to)) {
		CONVERT_EACH(other.f[i] = integer_as_double(hub.u[i], has_sign(from), to == TENSOR_F64));
		hub_to_float(to, other.f, out, n);
	} else {
		hub_to_integer(to, hub.u, out, n);
	}
}

/* ---- pairs with loops of their own ---- */

static float float_of(uint32_t bits)
{
	float value;

	memcpy(&value, &bits, sizeof value);
	return value;
}

static uint32_t float_bits(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof bits);
	return bits;
}

static inline uint32_t f32_of_bf16(uint16_t in)
{
	uint32_t u = (uint32_t)in << 16;

	return (u & 0x7fffffff) > 0x7f800000 ? u | 0x400000 : u;
}

static inline uint16_t bf16_of_f32(uint32_t u)
{
	uint32_t even = u >> 16 & 1;

	return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + even) >> 16);
}

/* The exponent is put right by a multiplication, which makes subnormal numbers normal ones. */
static inline uint32_t f32_of_f16(uint16_t in)
{
	const float scale = float_of(0x77800000); /* 2^112 */
	uint32_t rest = in & 0x7fff, number = float_bits(float_of(rest << 13) * scale);
	uint32_t special = rest << 13 | 0x7f800000 | (rest > 0x7c00 ? 0x400000 : 0);

	return (uint32_t)(in & 0x8000) << 16 | (rest >= 0x7c00 ? special : number);
}

/* Subnormal: adding 0.5 moves the last bit of the result to the last bit of the sum, which is rounded. */
static inline uint16_t f16_of_f32(uint32_t u)
{
	uint32_t rest = u & 0x7fffffff, number = (rest + 0xc8000fff + (rest >> 13 & 1)) >> 13;
	uint32_t small = float_bits(float_of(rest) + 0.5f) - 0x3f000000;
	uint32_t special = rest > 0x7f800000 ? 0x7e00 | (rest >> 13 & 0x3ff) : 0x7c00;

	return (uint16_t)((u >> 16 & 0x8000) | (rest >= 0x47800000 ? special : rest < 0x38800000 ? small : number));
}

/* Both ways of f16_of_f32, for a type of 8 bits. magic: 2^23 times the distance of its subnormal numbers. */
static inline uint8_t f8_of_f32(uint32_t u, const struct convert_format *t, float magic)
{
	unsigned shift = 23 - t->mantissa;
	uint32_t rest = u & 0x7fffffff, sign = u >> 24 & 0x80, least = (uint32_t)(128 - t->bias) << 23;
	uint32_t half = (1u << (shift - 1)) - 1 + (rest >> shift & 1);
	uint32_t number = (rest - ((uint32_t)(127 - t->bias) << 23) + half) >> shift;
	uint32_t small = float_bits(float_of(rest) + magic) - float_bits(magic);
	uint32_t code = rest < least ? small : number;

	code = code > t->most ? t->past : code;
	code = rest > 0x7f800000 ? t->nan : code;
	return (uint8_t)(t->unsigned_zero && (code == 0 || code == t->nan) ? code : code | sign);
}

static void f32_to_f8(enum tensor_dtype to, const any_u32 *in, uint8_t *out, size_t n)
{
	const struct convert_format t = convert_formats[to];
	const float magic = (float)two_to(1 - t.bias - (int)t.mantissa + 23);

	CONVERT_EACH(out[i] = f8_of_f32(in[i], &t, magic));
}

static void bf16_to_f32(const any_u16 *in, any_u32 *out, size_t n) { CONVERT_EACH(out[i] = f32_of_bf16(in[i])); }
static void f32_to_bf16(const any_u32 *in, any_u16 *out, size_t n) { CONVERT_EACH(out[i] = bf16_of_f32(in[i])); }
static void f16_to_f32(const any_u16 *in, any_u32 *out, size_t n) { CONVERT_EACH(out[i] = f32_of_f16(in[i])); }
static void f32_to_f16(const any_u32 *in, any_u16 *out, size_t n) { CONVERT_EACH(out[i] = f16_of_f32(in[i])); }
static void f32_to_f64(const any_f32 *in, any_f64 *out, size_t n) { CONVERT_EACH(out[i] = in[i]); }
static void f64_to_f32(const any_f64 *in, any_f32 *out, size_t n) { CONVERT_EACH(out[i] = (float)in[i]); }

static bool convert_quickly(enum tensor_dtype from, enum tensor_dtype to, const void *in, void *out, size_t n)
{
	if (from == to)
		memcpy(out, in, n * tensor_dtype_bytes(to));
	else if (from == TENSOR_BF16 && to == TENSOR_F32)
		bf16_to_f32(in, out, n);
	else if (from == TENSOR_F32 && to == TENSOR_BF16)
		f32_to_bf16(in, out, n);
	else if (from == TENSOR_F16 && to == TENSOR_F32)
		f16_to_f32(in, out, n);
	else if (from == TENSOR_F32 && to == TENSOR_F16)
		f32_to_f16(in, out, n);
	else if (from == TENSOR_F32 && to == TENSOR_F64)
		f32_to_f64(in, out, n);
	else if (from == TENSOR_F64 && to == TENSOR_F32)
		f64_to_f32(in, out, n);
	else if (from == TENSOR_F32 && to >= TENSOR_F8_E4M3FN && to <= TENSOR_F8_E5M2FNUZ)
		f32_to_f8(to, in, out, n);
	else if (from == TENSOR_C64 && to == TENSOR_C128)
		f32_to_f64(in, out, 2 * n);
	else if (from == TENSOR_C128 && to == TENSOR_C64)
		f64_to_f32(in, out, 2 * n);
	else
		return false;
	return true;
}

/* ---- for callers ---- */

bool tensor_convert_possible(enum tensor_dtype from, enum tensor_dtype to)
{
	bool parts = from == TENSOR_C64 || from == TENSOR_C128, others = to == TENSOR_C64 || to == TENSOR_C128;

	if (!tensor_dtype_valid(from) || !tensor_dtype_valid(to))
		return false;
	if (from == to)
		return true;
	return parts == others && from != TENSOR_F4_E2M1FN_X2 && to != TENSOR_F4_E2M1FN_X2 && to != TENSOR_F8_E8M0FNU;
}

static void convert_all(enum tensor_dtype from, enum tensor_dtype to, const char *in, char *out, size_t n)
{
	if (convert_quickly(from, to, in, out, n))
		return;
	for (size_t part; n > 0; n -= part) {
		part = base_min(n, CONVERT_BLOCK);
		convert_block(from, to, in, out, part);
		in += part * tensor_dtype_bytes(from);
		out += part * tensor_dtype_bytes(to);
	}
}

void tensor_convert(enum tensor_dtype from, enum tensor_dtype to, const void *in, void *out, size_t n)
{
#ifdef __SSE2__
	unsigned before = _mm_getcsr();

	_mm_setcsr(0x1f80); /* rounds to nearest, flushes nothing */
	convert_all(from, to, in, out, n);
	_mm_setcsr(before);
#else
	convert_all(from, to, in, out, n);
#endif
}
