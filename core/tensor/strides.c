/* SPDX-License-Identifier: Apache-2.0
 *
 * strides: of memory that a read or a load is to write: no two items may share a byte. */
#include <inttypes.h>

#include "core/tensor/shard.h"

/* The dimensions of more than one item, by ascending stride. */
static uint32_t strides_order(uint32_t ndim, const uint64_t *size, const int64_t *strides,
	uint32_t order[static TENSOR_MAX_DIMS])
{
	uint32_t n = 0;

	for (uint32_t d = ndim; d-- > 0;) {
		uint32_t at = n;

		if (size[d] == 1)
			continue;
		for (; at > 0 && strides[order[at - 1]] > strides[d]; at--)
			order[at] = order[at - 1];
		order[at] = d;
		n++;
	}
	return n;
}

/* Enough, if not needed: ordered by stride, each dimension steps over all that those below it span. */
int tensor_strides_check(const struct tensor_shape *s, unsigned item_bytes, const int64_t *strides,
	struct base_error *err)
{
	uint32_t order[TENSOR_MAX_DIMS], n;
	uint64_t span = item_bytes;

	for (uint32_t d = 0; d < s->ndim; d++)
		if (strides[d] < 0)
			return base_error_set(err, -EINVAL, "the stride in dimension %" PRIu32 " is negative (%" PRId64
				")", d, strides[d]);
	n = strides_order(s->ndim, s->dim, strides, order);
	for (uint32_t i = 0; i < n; i++) {
		uint64_t stride = (uint64_t)strides[order[i]], far;

		if (stride < span)
			return base_error_set(err, -EINVAL, "with a stride of %" PRIu64 " bytes in dimension %" PRIu32
				" items would overlap", stride, order[i]);
		if (__builtin_mul_overflow(s->dim[order[i]] - 1, stride, &far)
			|| __builtin_add_overflow(far, span, &span) || span > INT64_MAX)
			return base_error_set(err, -EINVAL, "a stride of %" PRIu64 " bytes in dimension %" PRIu32
				" leads out of memory", stride, order[i]);
	}
	return 0;
}
