/* SPDX-License-Identifier: Apache-2.0
 *
 * value: numbers, durations, dates and sizes that a person or a script writes (docs/expressions.md), whatever the
 * locale is. Pure functions; any thread. Each returns whether the whole text is one. */
#ifndef CORE_QUERY_VALUE_H
#define CORE_QUERY_VALUE_H

#include <stdbool.h>
#include <stdint.h>

/* A decimal number with sign, point and exponent, or inf, infinity, nan. `whole`: it is an integer of 64 bits, which
 * is compared exactly. */
struct query_number { bool whole; int64_t integer; double real; };
bool query_number_parse(const char *text, struct query_number *ret_n);
/* -1, 0, 1; 2: one is no number (NaN), so that they are in no order */
int query_number_compare(const struct query_number *a, const struct query_number *b);

bool query_duration_parse(const char *text, uint64_t *ret_ns); /* 7d, 12h, 30m, 45s, 2w, 1d12h; at most 2^63-1 */
bool query_date_parse(const char *text, int64_t *ret_ns);      /* 2026-11-21, 2026-11-21T03:34, …:56, …Z: UTC */
bool query_bytes_parse(const char *text, uint64_t *ret_bytes); /* 512, 10K, 3M, 1G, 2T, also with iB: powers of 1,024 */

#endif
