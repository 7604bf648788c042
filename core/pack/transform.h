/* SPDX-License-Identifier: Apache-2.0
 *
 * transform: reversible rearrangements of one block (docs/format/codec.md), private to the store. Pure functions:
 * `in`, `out` and `scratch` hold len <= 16384 bytes each and do not overlap. */
#ifndef CORE_PACK_TRANSFORM_H
#define CORE_PACK_TRANSFORM_H

#include <stddef.h>
#include <stdint.h>

/* Of words of `width` bytes: 1, 2, 4 or 8. */
void transform_bitplane_encode(unsigned width, const uint8_t *in, size_t len, uint8_t *out, uint8_t *scratch);
void transform_bitplane_decode(unsigned width, const uint8_t *in, size_t len, uint8_t *out, uint8_t *scratch);

/* Which implementation runs: -1 the best of this CPU (the default), 0 portable, 1 AVX2, 2 AVX-512 with VBMI and GFNI;
 * the best below where this CPU lacks it. For tests: all give the same bytes. Returns what is used from now on. Not to
 * be called while others transform. */
int transform_select(int which);

#endif
