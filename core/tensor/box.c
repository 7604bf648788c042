/* SPDX-License-Identifier: Apache-2.0
 *
 * box: see the header. Every product is checked here once; a shape that passed needs no checks further on. */
#include "core/tensor/box.h"

#include <errno.h>
#include <string.h>

#include "core/base/le.h"

int tensor_shape_items(const struct tensor_shape *s, unsigned item_bytes, uint64_t *ret_items)
{
	uint64_t bytes = item_bytes;
	bool empty = false;

	if (s->ndim > TENSOR_MAX_DIMS || item_bytes == 0)
		return -EINVAL;
	for (unsigned d = 0; d < s->ndim; d++) {
		if (s->dim[d] == 0)
			empty = true;
		else if (base_mul_overflows(bytes, s->dim[d], &bytes) || bytes > TENSOR_MAX_BYTES)
			return -EOVERFLOW;
	}
	*ret_items = empty ? 0 : bytes / item_bytes;
	return 0;
}

bool tensor_shape_empty(const struct tensor_shape *s)
{
	for (uint32_t d = 0; d < s->ndim; d++)
		if (s->dim[d] == 0)
			return true;
	return false;
}

bool tensor_shape_equal(const struct tensor_shape *a, const struct tensor_shape *b)
{
	return a->ndim == b->ndim && memcmp(a->dim, b->dim, a->ndim * sizeof a->dim[0]) == 0;
}

void tensor_box_whole(const struct tensor_shape *s, struct tensor_box *ret_box)
{
	memset(ret_box, 0, sizeof *ret_box);
	memcpy(ret_box->size, s->dim, s->ndim * sizeof s->dim[0]);
}

uint64_t tensor_box_items(const struct tensor_shape *s, const struct tensor_box *b)
{
	uint64_t items = 1;

	for (unsigned d = 0; d < s->ndim; d++)
		items *= b->size[d];
	return items;
}

uint64_t tensor_box_run(const struct tensor_shape *s, uint64_t at, uint64_t end, struct tensor_box *ret_box)
{
	uint64_t unit = 1, best_unit = 1, rest = at, items;
	uint32_t best = s->ndim;
	bool aligned = true; /* with a unit of this dimension */

	memset(ret_box, 0, sizeof *ret_box);
	for (uint32_t d = s->ndim; d-- > 0; rest /= s->dim[d], unit *= s->dim[d]) {
		ret_box->offset[d] = rest % s->dim[d];
		ret_box->size[d] = 1;
		if (aligned && end - at >= unit) {
			best = d;
			best_unit = unit;
		}
		aligned = aligned && ret_box->offset[d] == 0;
	}
	if (best == s->ndim)
		return end - at; /* a scalar */
	items = base_min((end - at) / best_unit, s->dim[best] - ret_box->offset[best]);
	ret_box->size[best] = items;
	for (uint32_t d = best + 1; d < s->ndim; d++)
		ret_box->size[d] = s->dim[d];
	return items * best_unit;
}

bool tensor_box_inside(const struct tensor_shape *s, const struct tensor_box *b)
{
	for (unsigned d = 0; d < s->ndim; d++)
		if (b->offset[d] > s->dim[d] || b->size[d] > s->dim[d] - b->offset[d])
			return false;
	return true;
}
