/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes of a shard. For a flat range of a rank's local tensor, core/tensor/shard.h gives the boxes of the whole tensor
 * of which it consists, and the place of each in the range. If these boxes are contiguous in the tensor's bytes (as in
 * replicated tensors, and those cut along their first dimension), the range is read as one of the whole tensor; else it
 * is assembled in the caller's memory. If a range begins or ends inside an item, all of that item is read. */
#include <string.h>

#include "core/view/view_internal.h"

struct part {
	struct load_object *o;
	struct load_cache *c;
	struct tensor_shard shard;      /* of the range: whole items */
	uint32_t ndim;
	unsigned item;
	size_t skip;                    /* bytes of the first item before the range */
	uint64_t bytes;                 /* of these items */
};

static int part_find(const struct view_mesh *m, uint32_t tensor, uint32_t rank, struct load_object *o,
	struct load_cache *c, uint64_t offset, size_t len, struct part *ret_p, struct base_error *err)
{
	const struct tensor_grid *g = load_object_grid(o);
	uint64_t item = g->item_bytes, end;
	struct tensor_flat flat;
	int r;

	if (base_add_overflows(offset, len, &end) || end > TENSOR_MAX_BYTES)
		return base_error_set(err, -EINVAL, "a range past the end of a shard");
	flat = (struct tensor_flat){.from = offset / item, .to = base_div_up(end, item)};
	*ret_p = (struct part){.o = o, .c = c, .ndim = g->shape.ndim, .item = g->item_bytes,
		.skip = offset % item, .bytes = (flat.to - flat.from) * item};
	r = view_mesh_shard(m, tensor, &g->shape, g->item_bytes, rank, &flat, &ret_p->shard, err);
	/* the boxes have to fill the range, or the caller's memory would keep old bytes */
	if (r == 0 && tensor_shard_items(&ret_p->shard) != flat.to - flat.from)
		r = base_error_set(err, -EINVAL, "a range past the end of a shard");
	return r;
}

/* Is the box contiguous in the bytes of the whole tensor? *ret_from: where it begins. */
static bool box_together(const struct tensor_shape *s, const struct tensor_box *box, unsigned item, uint64_t *ret_from)
{
	uint64_t stride = item, from = 0;
	bool full = true, together = true;

	for (uint32_t d = s->ndim; d-- > 0; stride *= s->dim[d]) {
		together = together && (full || box->size[d] == 1);
		full = full && box->size[d] == s->dim[d];
		from += box->offset[d] * stride;
	}
	*ret_from = from;
	return together;
}

/* Is the part contiguous in the bytes of the whole tensor? *ret_from: where it begins. */
static bool part_together(const struct part *p, uint64_t *ret_from)
{
	const struct tensor_shape *s = &p->shard.shape;
	struct tensor_shard_iter it;
	uint64_t from, next = 0;
	bool first = true;

	for (tensor_shard_first(&it, &p->shard, NULL); !it.done; tensor_shard_next(&it)) {
		if (!box_together(s, &it.at.box, p->item, &from) || (!first && from != next))
			return false;
		if (first)
			*ret_from = from;
		first = false;
		next = from + tensor_box_items(s, &it.at.box) * p->item;
	}
	return !first;
}

static int part_copy(const struct part *p, uint8_t *out, struct base_error *err)
{
	uint64_t stride[TENSOR_MAX_DIMS] = {0};
	struct tensor_shard_iter it;
	int r = 0;

	for (tensor_shard_first(&it, &p->shard, NULL); !it.done && r == 0; tensor_shard_next(&it)) {
		for (uint32_t d = 0; d < p->ndim; d++)
			stride[d] = it.at.local_stride[d] * p->item;
		r = load_object_read_box(p->o, p->c, &it.at.box, out + it.at.local_offset * p->item, stride, err);
	}
	return r;
}

/* Bytes [skip, skip + len) of the part to `out`. */
static int part_read(const struct part *p, size_t len, void *out, struct base_error *err)
{
	base_cleanup_free uint8_t *items = NULL;
	int r;

	if (p->skip == 0 && p->bytes == len)
		return part_copy(p, out, err);
	items = malloc(p->bytes);
	if (!items)
		return base_no_memory(err);
	r = part_copy(p, items, err);
	if (r == 0)
		memcpy(out, items + p->skip, len);
	return r;
}

int view_mesh_slices(const struct view_mesh *m, uint32_t tensor, uint32_t rank, struct load_object *o,
	struct load_cache *c, uint64_t offset, size_t len, void *scratch, struct load_slices *ret_e,
	struct base_error *err)
{
	struct part p;
	uint64_t from;
	int r;
	struct iovec *iov;

	*ret_e = (struct load_slices){0};
	if (len == 0)
		return 0;
	r = part_find(m, tensor, rank, o, c, offset, len, &p, err);
	if (r == 0 && part_together(&p, &from))
		return load_object_slices(o, c, from + p.skip, len, scratch, ret_e, err);
	if (r == 0)
		r = part_read(&p, len, scratch, err);
	if (r < 0)
		return r;
	iov = malloc(sizeof *iov);
	if (!iov)
		return base_no_memory(err);
	*iov = (struct iovec){scratch, len};
	*ret_e = (struct load_slices){.iov = iov, .niov = 1, .memory = iov};
	return 0;
}

int view_mesh_read(const struct view_mesh *m, uint32_t tensor, uint32_t rank, struct load_object *o,
	struct load_cache *c, uint64_t offset, size_t len, void *out, struct base_error *err)
{
	struct part p;
	uint64_t from;
	int r;

	if (len == 0)
		return 0;
	r = part_find(m, tensor, rank, o, c, offset, len, &p, err);
	if (r == 0 && part_together(&p, &from))
		return load_object_read(o, c, from + p.skip, len, out, err);
	return r < 0 ? r : part_read(&p, len, out, err);
}
