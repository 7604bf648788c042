/* SPDX-License-Identifier: Apache-2.0
 *
 * shard_memory: from a box of a shard, which counts items of a contiguous local tensor, to bytes of the caller's
 * memory, whatever its strides. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/plural.h"
#include "core/tensor/shard.h"

static int64_t place_stride(const struct tensor_shape *local, unsigned item_bytes, const int64_t *strides, uint32_t dim)
{
	int64_t bytes = item_bytes;

	if (strides)
		return strides[dim];
	for (uint32_t d = local->ndim; d-- > dim + 1;)
		bytes *= (int64_t)local->dim[d];
	return bytes;
}

/* An offset has one coordinate in the local tensor, and a stride is so many steps along one of its dimensions: the one
 * with the largest number of items between neighbours that divides it. */
void tensor_shard_memory(const struct tensor_shard_box *at, uint32_t ndim, const struct tensor_shape *local,
	unsigned item_bytes, const int64_t *strides, int64_t *ret_from, int64_t ret_stride[static TENSOR_MAX_DIMS])
{
	uint64_t items[TENSOR_MAX_DIMS], n = 1, offset = at->local_offset;

	*ret_from = 0;
	for (uint32_t d = local->ndim; d-- > 0; n *= local->dim[d])
		items[d] = n;
	for (uint32_t d = 0; d < local->ndim && n; d++) {
		*ret_from += (int64_t)(offset / items[d]) * place_stride(local, item_bytes, strides, d);
		offset %= items[d];
	}
	for (uint32_t d = 0; d < ndim; d++) {
		ret_stride[d] = 0;
		for (uint32_t j = 0; j < local->ndim && n && at->box.size[d] > 1; j++)
			if (local->dim[j] > 1 && items[j] <= at->local_stride[d]
				&& at->local_stride[d] % items[j] == 0) {
				ret_stride[d] = (int64_t)(at->local_stride[d] / items[j])
					* place_stride(local, item_bytes, strides, j);
				break;
			}
	}
}

static void place_shape_text(uint32_t ndim, const uint64_t *dim, char text[static 160])
{
	text[0] = 0;
	for (uint32_t d = 0; d < ndim && d < TENSOR_MAX_DIMS && strlen(text) < 130; d++)
		sprintf(text + strlen(text), "%s%" PRIu64, d ? "," : "", dim[d]);
}

int tensor_shard_check_local(const struct tensor_shape *local, uint32_t rank, uint32_t ndim, const uint64_t *shape,
	const int64_t *strides, struct base_error *err)
{
	char has[160], want[160];

	if (shape && (ndim != local->ndim || memcmp(shape, local->dim, ndim * sizeof *shape) != 0)) {
		place_shape_text(ndim, shape, has);
		place_shape_text(local->ndim, local->dim, want);
		return base_error_set(err, -EINVAL, "the local tensor is (%s), but rank %" PRIu32
			" holds (%s) of it by its placements", has, rank, want);
	}
	if (strides && ndim != local->ndim)
		return base_error_set(err, -EINVAL, "%" PRIu32 " %s for a local tensor of %" PRIu32 " %s", ndim,
			base_plural(ndim, "stride", "strides"), local->ndim,
			base_plural(local->ndim, "dimension", "dimensions"));
	return 0;
}
