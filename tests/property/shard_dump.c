/* SPDX-License-Identifier: Apache-2.0
 *
 * shard_dump: what core/tensor/shard.h says of all ranks of one sharding, item by item, in one call: test_shard.py
 * compares many shardings, and calls from Python are slow. Items are numbered as the flattened tensor numbers them. */
#include <errno.h>

#include "core/tensor/shard.h"

/* What a fault of the iterator is called; beyond all errnos. */
enum { FAULT_ORDER = -10001, FAULT_TENSOR = -10002, FAULT_BUFFER = -10003, FAULT_TWICE = -10004,
	FAULT_COUNTS = -10005 };

struct buffer {
	int64_t *item;
	uint64_t n;
};

static int box_write(const struct tensor_shape *shape, const struct tensor_shard_box *at, struct buffer *buffer)
{
	uint64_t i[TENSOR_MAX_DIMS] = {0};

	if (!tensor_box_inside(shape, &at->box))
		return FAULT_TENSOR;
	for (uint32_t d = 0; d < shape->ndim; d++)
		if (at->box.size[d] == 0)
			return FAULT_TENSOR;
	for (;;) {
		uint64_t number = 0, cell = at->local_offset;
		uint32_t d;

		for (d = 0; d < shape->ndim; d++) {
			number = number * shape->dim[d] + at->box.offset[d] + i[d];
			cell += i[d] * at->local_stride[d];
		}
		if (cell >= buffer->n)
			return FAULT_BUFFER;
		if (buffer->item[cell] != -1)
			return FAULT_TWICE;
		buffer->item[cell] = (int64_t)number;
		d = shape->ndim;
		while (d > 0 && ++i[d - 1] == at->box.size[d - 1])
			i[--d] = 0;
		if (d == 0)
			return 0;
	}
}

static int shard_write(const struct tensor_shard *shard, const struct tensor_box *window, struct buffer *buffer,
	uint64_t *ret_boxes)
{
	struct tensor_shard_iter it;
	uint64_t boxes = 0, items = 0, last = 0;

	for (tensor_shard_first(&it, shard, window); !it.done; tensor_shard_next(&it)) {
		int r;

		if (boxes++ > 0 && it.at.local_offset <= last)
			return FAULT_ORDER;
		last = it.at.local_offset;
		items += tensor_box_items(&shard->shape, &it.at.box);
		r = box_write(&shard->shape, &it.at, buffer);
		if (r < 0)
			return r;
	}
	*ret_boxes = boxes;
	if (window)
		return 0;
	return boxes == tensor_shard_box_count(shard) && items == tensor_shard_items(shard) ? 0 : FAULT_COUNTS;
}

/* The buffers of all ranks one after another, in mesh order, -1 where nothing was written. flats: NULL, or one a rank;
 * window: NULL or a box. shapes: 17 numbers a rank, of the local shape (ndim, sizes); boxes: one number a rank.
 * Returns the numbers written, or a negative errno or fault. */
int64_t shard_dump(const struct tensor_sharding *s, const struct tensor_flat *flats, const struct tensor_box *window,
	int64_t *items, uint64_t room, uint64_t *shapes, uint64_t *boxes);
int64_t shard_dump(const struct tensor_sharding *s, const struct tensor_flat *flats, const struct tensor_box *window,
	int64_t *items, uint64_t room, uint64_t *shapes, uint64_t *boxes)
{
	uint64_t used = 0;

	for (uint32_t i = 0; i < s->mesh->count; i++) {
		struct tensor_shard shard;
		struct buffer buffer = {items + used, 0};
		uint64_t *shape = shapes + i * (1 + TENSOR_MAX_DIMS);

		int r = tensor_shard_of(s, tensor_mesh_rank_at(s->mesh, i), flats ? &flats[i] : NULL, &shard, NULL);
		if (r < 0)
			return r;
		r = tensor_shape_items(&shard.local_shape, s->item_bytes, &buffer.n);
		if (r < 0)
			return r;
		if (buffer.n > room - used)
			return -ENOSPC;
		shape[0] = shard.local_shape.ndim;
		for (uint32_t d = 0; d < TENSOR_MAX_DIMS; d++)
			shape[1 + d] = shard.local_shape.dim[d];
		for (uint64_t k = 0; k < buffer.n; k++)
			buffer.item[k] = -1;
		r = shard_write(&shard, window, &buffer, &boxes[i]);
		if (r < 0)
			return r;
		used += buffer.n;
	}
	return (int64_t)used;
}

struct holders {
	uint32_t *rank;
	uint32_t n, room;
};

static int holder_note(void *arg, uint32_t rank, const uint32_t *coordinate)
{
	struct holders *h = arg;

	(void)coordinate;
	if (h->n == h->room)
		return -ENOSPC;
	h->rank[h->n++] = rank;
	return 0;
}

/* Who tensor_sharding_holders names, in its order: how many, or what is negative. */
int64_t shard_holders(const struct tensor_sharding *s, const struct tensor_box *window, bool replicas,
	uint32_t *ret_ranks, uint32_t room);
int64_t shard_holders(const struct tensor_sharding *s, const struct tensor_box *window, bool replicas,
	uint32_t *ret_ranks, uint32_t room)
{
	struct holders h = {ret_ranks, 0, room};
	int r = tensor_sharding_holders(s, window, replicas, holder_note, &h);

	return r < 0 ? r : (int64_t)h.n;
}
