/* SPDX-License-Identifier: Apache-2.0
 *
 * values: items of any dtype as numbers, and how two arrays of them differ. An item holds one value, or two: the parts
 * of a complex number, or the two elements in a byte of f4_e2m1fn_x2. Pure functions but for their arguments; any
 * thread. */
#ifndef CORE_DIFF_VALUES_H
#define CORE_DIFF_VALUES_H

#include "core/tensor/dtype.h"

#define DIFF_BLOCK_VALUES 512u

struct diff_type {
	enum tensor_dtype dtype;
	unsigned item_bytes, values;    /* of an item */
	double table[256];              /* of dtypes whose items have one byte: by code; of f4, by element */
};
void diff_type_init(struct diff_type *t, enum tensor_dtype dtype);
/* n <= DIFF_BLOCK_VALUES values, whole items, aligned as the dtype wants it. 64-bit integers are rounded. */
void diff_widen(const struct diff_type *t, const void *items, size_t n, double *ret_values);

/* What was measured so far. Sums, max: of values that are finite on both sides. */
struct diff_measure {
	uint64_t values;                /* that were compared */
	uint64_t changed;               /* whose bits differ: -0 and 0, two NaNs */
	uint64_t finite;                /* on both sides */
	uint64_t nan_a, nan_b, inf_a, inf_b;
	double max, squares;            /* of |b - a|; of the squares of b - a, summed */
	double squares_a;               /* of a */
};
/* Adds n items of each side, aligned to 8 bytes. */
void diff_measure_add(struct diff_measure *m, const struct diff_type *t, const void *a, const void *b, size_t n);
/* 0: uses no vectors but those that every processor has; 1: those of this one, as without a call. For tests, which
 * compare the two. Returns what is used. */
int diff_measure_select(int which);
void diff_measure_merge(struct diff_measure *m, const struct diff_measure *other);

#endif
