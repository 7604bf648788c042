/* SPDX-License-Identifier: Apache-2.0
 *
 * convert: items of one dtype as items of another. Pure functions, any thread; the floating-point state that a program
 * set for its threads (rounding, flushing of subnormals) has no effect.
 *
 *   float to float      the nearest value, ties to even, in one rounding; NaN stays NaN (f16 and bf16 keep what fits of
 *                       its bits). What is too large becomes infinity, or NaN in types without one (f8_e4m3fn, ...fnuz)
 *   integer to float    likewise
 *   integer to integer  the low bits, as numpy and torch do
 *   float to integer    towards zero; what does not fit becomes the nearest number that does, NaN becomes 0
 *   bool                0 or 1; from any other type: whether it is not zero (NaN is not zero)
 *   c64, c128           to each other, both parts
 *   f8_e8m0fnu          only from it: it holds powers of two alone
 *   f4_e2m1fn_x2        not at all */
#ifndef CORE_TENSOR_CONVERT_H
#define CORE_TENSOR_CONVERT_H

#include "core/tensor/dtype.h"

/* Is there such a conversion? Always, if both are the same. */
bool tensor_convert_possible(enum tensor_dtype from, enum tensor_dtype to);
/* n items that lie one after another at `in` become as many at `out`; the memory does not overlap, and need not be
 * aligned. The conversion is possible. */
void tensor_convert(enum tensor_dtype from, enum tensor_dtype to, const void *in, void *out, size_t n);

#endif
