/* SPDX-License-Identifier: Apache-2.0
 *
 * shard: which boxes of a logical tensor a rank holds, and where their items lie in its local buffer. All numbers count
 * items. Pure functions of integers, any thread, no I/O. Only tensor_shard_list_check and error sentences allocate
 * memory.
 *
 * A sharding (shape, mesh, placements) is checked once; a shard is what one rank holds of it. Placements apply from
 * left to right, each to the size that those before it left (so offsets on one dimension add up); a ragged one applies
 * last, to the tensor that all others left. A flat range of the flattened local tensor may come on top. The rules, with
 * n the size of the dimension, p that of the mesh dimension, and i the coordinate on it:
 *
 *   Shard             c = ceil(n/p): [c*i, c*(i+1)) within n; trailing ranks may be empty          (torch.chunk)
 *   StridedShard      n cut into `split` chunks by Shard's rule, each of them cut again by p; rank i holds the i-th of
 *                     each, in order                    (torch.distributed.tensor.placement_types._StridedShard)
 *   InterleavedShard  m = n/k/p: [j*(n/k) + i*m, + m) for j = 0..k-1; k divides n, p divides n/k        (veScale)
 *   RaggedShard       P = product of the leading dimensions that are left, U = sum of the units, which divides P:
 *                     rows [P/U * (u_0 + .. + u_{i-1}), + P/U * u_i) of those dimensions flattened     (veScale)
 *
 * In each dimension a rank holds an ascending set of indices. So what it holds of any box (a window) is again a box in
 * local coordinates, and is found without a walk over all boxes. */
#ifndef CORE_TENSOR_SHARD_H
#define CORE_TENSOR_SHARD_H

#include "core/tensor/boxes.h"
#include "core/tensor/mesh.h"
#include "core/tensor/placement.h"

#define TENSOR_SHARD_STRETCHES_MAX (UINT64_C(1) << 24) /* separate stretches of indices in one dimension of one shard */

struct tensor_sharding {                /* the caller's memory; read-only */
	struct tensor_shape shape;
	unsigned item_bytes;
	const struct tensor_mesh *mesh;
	const struct tensor_placement *placement; /* mesh->ndim of them */
};
/* Checks all ranks at once: -EINVAL, -EOVERFLOW, -BASE_ELIMIT, -EOPNOTSUPP (partial); err names the placement, the
 * dimension and the mesh dimension. */
int tensor_sharding_check(const struct tensor_sharding *s, unsigned nplacements, struct base_error *err);
/* Mesh dimensions of more than one rank on which it is replicated (a mask). */
uint32_t tensor_sharding_replicated(const struct tensor_sharding *s);

/* Items [from, to) of the flattened local tensor. len: that of the padded bucket, at least the local tensor's items;
 * 0: not padded. Items of the range past the local tensor hold nothing. */
struct tensor_flat { uint64_t from, to, len; };

/* One placement's effect on one dimension: it holds `full` stretches of `stretch` indices each, the first at `start`
 * and each `stride` after the one before, and then `tail` more from `tail_start` on. */
struct tensor_cut { uint32_t dim; uint64_t stretch, stride, start, full, tail_start, tail; };

struct tensor_shard {
	struct tensor_shape shape;      /* of the logical tensor */
	bool absent;                    /* the rank is not in the mesh: it holds nothing, and local_shape has no
					 * meaning */
	struct tensor_shape local_shape; /* of the buffer. ragged: [rows, the other dimensions...]; flat: [to - from] */
	/* private */
	uint32_t ncuts;
	struct tensor_cut cut[TENSOR_MAX_DIMS];
	struct tensor_shape inner;      /* what the cuts leave */
	uint64_t from, to;              /* the range of it, flattened, that is held; from = where the buffer begins */
};
/* sharding: checked. flat: NULL, or the rank's range: -EINVAL if from > to, len too short, or `to` past the end. */
int tensor_shard_of(const struct tensor_sharding *s, uint32_t rank, const struct tensor_flat *flat,
	struct tensor_shard *ret_shard, struct base_error *err);

struct tensor_shard_box {
	struct tensor_box box;          /* of the logical tensor; not empty */
	uint64_t local_offset;          /* of its first item in the buffer */
	uint64_t local_stride[TENSOR_MAX_DIMS]; /* items between neighbours in each dimension of the tensor */
};
/* The boxes in the order of their first items in the buffer; with a window, only what is in it. A flat range of a
 * d-dimensional box gives at most 2d-1. A box ends in a dimension only where the rank's indices there are not
 * neighbours. An empty shard has no box; a scalar has one. */
struct tensor_shard_iter {
	const struct tensor_shard *shard;
	bool done;
	struct tensor_shard_box at;     /* the current one */
	/* private */
	struct tensor_box window;       /* in coordinates of `inner` */
	struct tensor_box slab, local;  /* of the flat range; of it, the current box */
	uint64_t next;                  /* where the next slab begins */
};
void tensor_shard_first(struct tensor_shard_iter *it, const struct tensor_shard *shard,
	const struct tensor_box *window);
void tensor_shard_next(struct tensor_shard_iter *it);
uint64_t tensor_shard_box_count(const struct tensor_shard *shard); /* boxes of all of it */
uint64_t tensor_shard_items(const struct tensor_shard *shard);     /* items held, padding not counted */
/* Is all of the box held? (Of a box that is cut into very many stretches the answer may be no.) */
bool tensor_shard_has(const struct tensor_shard *shard, const struct tensor_box *box);

/* Raw box lists, for callers that know their own layout: the buffer holds the boxes one after another, each row-major.
 * Boxes of size 0 hold nothing. check: -EINVAL names a box that is not inside the tensor, or two that overlap; -ENOMEM.
 * The walk is as above, with local_offset a running sum; O(1) a box. */
int tensor_shard_list_check(const struct tensor_shape *s, const struct tensor_boxes *boxes, struct base_error *err);
struct tensor_shard_list {
	const struct tensor_boxes *boxes;
	bool done;
	struct tensor_shard_box at;     /* the current one: number i */
	size_t i;
	uint64_t next;                  /* private: where the next box begins in the buffer */
};
void tensor_shard_list_first(struct tensor_shard_list *it, const struct tensor_boxes *boxes);
void tensor_shard_list_next(struct tensor_shard_list *it);

/* Where that box is in a local tensor that need not be contiguous: its first item `ret_from` bytes after the tensor's
 * first, neighbours `ret_stride` bytes apart in each dimension of the tensor (0 where the box has one item). `local`:
 * its shape, as of a shard, or the items of all boxes of a list; strides: of each of its dimensions, in bytes; NULL:
 * contiguous. */
void tensor_shard_memory(const struct tensor_shard_box *at, uint32_t ndim, const struct tensor_shape *local,
	unsigned item_bytes, const int64_t *strides, int64_t *ret_from, int64_t ret_stride[static TENSOR_MAX_DIMS]);
/* What a caller says of a local tensor with items: its shape (NULL: nothing) and strides (NULL: contiguous) of `ndim`
 * dimensions. -EINVAL: the local tensor of the rank has another shape, or another number of dimensions. */
int tensor_shard_check_local(const struct tensor_shape *local, uint32_t rank, uint32_t ndim, const uint64_t *shape,
	const int64_t *strides, struct base_error *err);
/* Strides of memory of that shape that is to be written, in bytes; no size is 0. -EINVAL names the dimension: two items
 * would share a byte. */
int tensor_strides_check(const struct tensor_shape *s, unsigned item_bytes, const int64_t *strides,
	struct base_error *err);

/* Calls f for every rank whose shard (no flat range) overlaps the window, in no order, without trying every rank: it
 * narrows one cutting mesh dimension after the other. replicas false: calls f only for the first, in mesh order, of
 * ranks that hold the same. What f returns, if not 0, ends the walk and is returned. */
int tensor_sharding_holders(const struct tensor_sharding *s, const struct tensor_box *window, bool replicas,
	int (*f)(void *arg, uint32_t rank, const uint32_t *coordinate), void *arg);

#endif
