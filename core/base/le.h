/* SPDX-License-Identifier: Apache-2.0
 *
 * le: little-endian integers at any address (everything on disk is little-endian), and checked arithmetic. */
#ifndef CORE_BASE_LE_H
#define CORE_BASE_LE_H

#include <endian.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t base_get16(const void *p) { uint16_t v; memcpy(&v, p, 2); return le16toh(v); }
static inline uint32_t base_get32(const void *p) { uint32_t v; memcpy(&v, p, 4); return le32toh(v); }
static inline uint64_t base_get64(const void *p) { uint64_t v; memcpy(&v, p, 8); return le64toh(v); }
static inline void base_put16(void *p, uint16_t v) { v = htole16(v); memcpy(p, &v, 2); }
static inline void base_put32(void *p, uint32_t v) { v = htole32(v); memcpy(p, &v, 4); }
static inline void base_put64(void *p, uint64_t v) { v = htole64(v); memcpy(p, &v, 8); }

/* true when the result does not fit (as __builtin_*_overflow); *ret is then meaningless. */
static inline bool base_mul_overflows(uint64_t a, uint64_t b, uint64_t *ret)
{
	return __builtin_mul_overflow(a, b, ret);
}
static inline bool base_add_overflows(uint64_t a, uint64_t b, uint64_t *ret)
{
	return __builtin_add_overflow(a, b, ret);
}

static inline uint64_t base_div_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }
/* `to` is a power of two; the caller knows that a + to - 1 fits. */
static inline uint64_t base_align(uint64_t a, uint64_t to) { return (a + to - 1) & ~(to - 1); }
static inline uint64_t base_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t base_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

#define BASE_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#endif
