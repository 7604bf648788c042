/* SPDX-License-Identifier: Apache-2.0
 *
 * shard_walk: the boxes of a shard, and the ranks that hold something of a box.
 *
 * A shard is a range of flattened `inner`. It is walked slab by slab (boxes of inner, each the longest that begins
 * where the last one ended: at most 2d-1), each slab stretch by stretch: in one dimension, a stretch is what the cuts
 * leave of neighbouring indices together. Runs are found one at a time by going back through the cuts, never listed. */
#include <string.h>

#include "core/base/bisect.h"
#include "core/tensor/shard_internal.h"

/* The index of the tensor that local index `i` of dimension `d` is; *ret_stretch: how many from there on are
 * neighbours, at most `most`. */
static uint64_t stretch_at(const struct tensor_shard *shard, uint32_t d, uint64_t i, uint64_t most,
	uint64_t *ret_stretch)
{
	for (uint32_t n = shard->ncuts; n-- > 0;) {
		const struct tensor_cut *c = &shard->cut[n];
		uint64_t in;

		if (c->dim != d)
			continue;
		if (i < c->full * c->stretch) {
			in = i % c->stretch;
			most = base_min(most, c->stretch - in);
			i = i / c->stretch * c->stride + c->start + in;
		} else {
			in = i - c->full * c->stretch;
			most = base_min(most, c->tail - in);
			i = c->tail_start + in;
		}
	}
	*ret_stretch = most;
	return i;
}

/* The window in coordinates of `inner`; false: they have nothing in common. */
static bool window_local(const struct tensor_shard *shard, const struct tensor_box *window,
	struct tensor_box *ret_local)
{
	tensor_box_whole(&shard->inner, ret_local);
	for (uint32_t d = 0; d < shard->shape.ndim; d++) {
		uint64_t low = 0, high = shard->shape.dim[d];

		if (window) {
			low = base_min(window->offset[d], high);
			high = low + base_min(window->size[d], high - low);
		}
		for (uint32_t n = 0; n < shard->ncuts; n++) {
			if (shard->cut[n].dim != d)
				continue;
			low = tensor_cut_below(&shard->cut[n], low);
			high = tensor_cut_below(&shard->cut[n], high);
		}
		if (low >= high)
			return false;
		ret_local->offset[d] = low;
		ret_local->size[d] = high - low;
	}
	return true;
}

/* Sets the current box's size in dimension d, from local.offset[d] on. */
static void iter_stretch(struct tensor_shard_iter *it, uint32_t d)
{
	uint64_t end = it->slab.offset[d] + it->slab.size[d];

	it->at.box.offset[d] = stretch_at(it->shard, d, it->local.offset[d], end - it->local.offset[d],
		&it->local.size[d]);
	it->at.box.size[d] = it->local.size[d];
}

static void iter_offset(struct tensor_shard_iter *it)
{
	uint64_t offset = 0;

	for (uint32_t d = 0; d < it->shard->inner.ndim; d++)
		offset += it->local.offset[d] * it->at.local_stride[d];
	it->at.local_offset = offset - it->shard->from;
}

/* The next slab that has something in the window. */
static void iter_slab(struct tensor_shard_iter *it)
{
	const struct tensor_shard *shard = it->shard;
	uint32_t ndim = shard->inner.ndim;

	for (;;) {
		bool overlaps = true;

		it->done = it->next >= shard->to;
		if (it->done)
			return;
		it->next += tensor_box_run(&shard->inner, it->next, shard->to, &it->slab);
		for (uint32_t d = 0; d < ndim && overlaps; d++) {
			uint64_t low = base_max(it->slab.offset[d], it->window.offset[d]);
			uint64_t high = base_min(it->slab.offset[d] + it->slab.size[d],
				it->window.offset[d] + it->window.size[d]);

			overlaps = low < high;
			it->slab.offset[d] = it->local.offset[d] = low;
			it->slab.size[d] = high - low;
		}
		if (overlaps)
			break;
	}
	for (uint32_t d = 0; d < ndim; d++)
		iter_stretch(it, d);
	iter_offset(it);
}

void tensor_shard_first(struct tensor_shard_iter *it, const struct tensor_shard *shard, const struct tensor_box *window)
{
	uint64_t stride = 1;

	memset(it, 0, sizeof *it);
	it->shard = shard;
	it->done = shard->absent || shard->from >= shard->to || !window_local(shard, window, &it->window);
	if (it->done)
		return;
	for (uint32_t d = shard->inner.ndim; d-- > 0; stride *= shard->inner.dim[d])
		it->at.local_stride[d] = stride;
	it->next = shard->from;
	iter_slab(it);
}

void tensor_shard_next(struct tensor_shard_iter *it)
{
	if (it->done)
		return;
	for (uint32_t d = it->shard->inner.ndim; d-- > 0;) {
		it->local.offset[d] += it->local.size[d];
		if (it->local.offset[d] < it->slab.offset[d] + it->slab.size[d]) {
			iter_stretch(it, d);
			iter_offset(it);
			return;
		}
		it->local.offset[d] = it->slab.offset[d];
		iter_stretch(it, d);
	}
	iter_slab(it);
}

/* The innermost cut of a dimension among the first `n` that parts what it holds; others only move it. -1: none. */
static int cut_parting(const struct tensor_shard *shard, uint32_t d, uint32_t n)
{
	while (n-- > 0)
		if (shard->cut[n].dim == d && shard->cut[n].full + (shard->cut[n].tail > 0) > 1)
			return (int)n;
	return -1;
}

/* Stretches of local indices [from, from + n) of a dimension. Where one cut parts it that is arithmetic, and where
 * several do a walk. */
static uint64_t stretch_count(const struct tensor_shard *shard, uint32_t d, uint64_t from, uint64_t n)
{
	int parting = cut_parting(shard, d, shard->ncuts);
	uint64_t count = 0, stretch;

	if (parting < 0 || n == 0)
		return n > 0;
	if (cut_parting(shard, d, (uint32_t)parting) < 0) {
		const struct tensor_cut *c = &shard->cut[parting];

		for (uint32_t i = shard->ncuts; i-- > (uint32_t)parting + 1;) /* where these begin in what it holds */
			if (shard->cut[i].dim == d)
				from += shard->cut[i].full ? shard->cut[i].start : shard->cut[i].tail_start;
		return base_min((from + n - 1) / c->stretch, c->full) - base_min(from / c->stretch, c->full) + 1;
	}
	for (; n > 0; n -= stretch, from += stretch, count++)
		stretch_at(shard, d, from, n, &stretch);
	return count;
}

uint64_t tensor_shard_box_count(const struct tensor_shard *shard)
{
	uint64_t whole[TENSOR_MAX_DIMS], total = 0, at = shard->from;
	struct tensor_box slab;

	if (shard->absent)
		return 0;
	for (uint32_t d = 0; d < shard->inner.ndim; d++)
		whole[d] = stretch_count(shard, d, 0, shard->inner.dim[d]);
	while (at < shard->to) {
		uint64_t count = 1;

		at += tensor_box_run(&shard->inner, at, shard->to, &slab);
		for (uint32_t d = 0; d < shard->inner.ndim; d++)
			count *= slab.size[d] == shard->inner.dim[d]
				? whole[d] : stretch_count(shard, d, slab.offset[d], slab.size[d]);
		total += count;
	}
	return total;
}

/* ---- holders ---- */

struct holders {
	const struct tensor_sharding *s;
	bool replicas;
	int (*f)(void *arg, uint32_t rank, const uint32_t *coordinate);
	void *arg;
	uint32_t ragged;                        /* its mesh dimension, which comes last; ndim: none */
	uint32_t coordinate[TENSOR_MAX_DIMS];
};

static int holders_leaf(struct holders *h)
{
	uint32_t rank;
	int r = tensor_mesh_rank(h->s->mesh, h->coordinate, &rank);

	return r < 0 ? r : h->f(h->arg, rank, h->coordinate);
}

/* The first item of a box of `inner`, flattened, at or behind item *at, which is one of inner; false: there is none. */
static bool box_item_from(const struct tensor_shape *inner, const struct tensor_box *box, uint64_t *at)
{
	uint64_t index[TENSOR_MAX_DIMS], rest = *at;
	uint32_t d, from;

	for (d = inner->ndim; d-- > 0; rest /= inner->dim[d])
		index[d] = rest % inner->dim[d];
	for (d = 0; d < inner->ndim; d++) /* the first dimension in which it is outside */
		if (index[d] < box->offset[d] || index[d] - box->offset[d] >= box->size[d])
			break;
	from = d;
	if (d < inner->ndim && index[d] >= box->offset[d]) { /* behind: on in the next index of one further out */
		do {
			if (d == 0)
				return false;
			d--;
		} while (index[d] - box->offset[d] + 1 >= box->size[d]);
		index[d]++;
		from = d + 1;
	}
	for (d = from; d < inner->ndim; d++)
		index[d] = box->offset[d];
	for (*at = 0, d = 0; d < inner->ndim; d++)
		*at = *at * inner->dim[d] + index[d];
	return true;
}

/* What is left of tensor (inner) and window (local) after all cuts: from the window's first item to the coordinate that
 * has it, and on to the first item behind what that one has. */
static int holders_ragged(struct holders *h, const struct tensor_shape *inner, const struct tensor_box *local)
{
	const struct tensor_placement *p = &h->s->placement[h->ragged];
	uint64_t rest = tensor_shape_product(inner, p->dim, inner->ndim), items, at = 0, unit;
	uint32_t low = 0;
	int r = 0;

	items = tensor_shape_product(inner, 0, p->dim) * rest;
	unit = items / p->ends[p->nends - 1];
	while (r == 0 && at < items && box_item_from(inner, local, &at)) {
		/* the first coordinate that ends behind it */
		low = base_bisect(i, low, p->nends, unit * p->ends[i] <= at);
		h->coordinate[h->ragged] = low;
		r = holders_leaf(h);
		at = unit * p->ends[low];
	}
	return r;
}

static int holders_walk(struct holders *h, uint32_t m, const struct tensor_shape *inner,
	const struct tensor_box *local);

/* Coordinates [first, last] of mesh dimension m. */
static int holders_range(struct holders *h, uint32_t m, const struct tensor_shape *inner,
	const struct tensor_box *local, uint32_t first, uint32_t last)
{
	const struct tensor_placement *p = &h->s->placement[m];
	int r = 0;

	for (uint32_t i = first; i <= last && r == 0; i++) {
		struct tensor_shape left = *inner;
		struct tensor_box part = *local;

		h->coordinate[m] = i;
		if (tensor_placement_cuts(p) && h->s->mesh->size[m] > 1) {
			struct tensor_cut cut;
			uint32_t d = p->dim;
			uint64_t high;

			tensor_cut_make(p, inner->dim[d], h->s->mesh->size[m], i, &cut);
			left.dim[d] = tensor_cut_size(&cut);
			high = tensor_cut_below(&cut, part.offset[d] + part.size[d]);
			part.offset[d] = tensor_cut_below(&cut, part.offset[d]);
			part.size[d] = high - part.offset[d];
			if (part.size[d] == 0)
				continue;
		}
		r = holders_walk(h, m + 1, &left, &part);
	}
	return r;
}

static int holders_walk(struct holders *h, uint32_t m, const struct tensor_shape *inner, const struct tensor_box *local)
{
	const struct tensor_placement *p;
	uint32_t first[2] = {0}, last[2] = {0};
	unsigned n = 1;
	int r;

	if (m == h->s->mesh->ndim)
		return h->ragged < m ? holders_ragged(h, inner, local) : holders_leaf(h);
	p = &h->s->placement[m];
	if (m == h->ragged)
		return holders_walk(h, m + 1, inner, local);
	if (tensor_placement_cuts(p))
		n = tensor_cut_holders(p, inner->dim[p->dim], h->s->mesh->size[m], local->offset[p->dim],
			local->offset[p->dim] + local->size[p->dim], first, last);
	else if (h->replicas)
		last[0] = h->s->mesh->size[m] - 1;
	r = holders_range(h, m, inner, local, first[0], last[0]);
	return r == 0 && n > 1 ? holders_range(h, m, inner, local, first[1], last[1]) : r;
}

int tensor_sharding_holders(const struct tensor_sharding *s, const struct tensor_box *window, bool replicas,
	int (*f)(void *arg, uint32_t rank, const uint32_t *coordinate), void *arg)
{
	struct holders h = {.s = s, .replicas = replicas, .f = f, .arg = arg, .ragged = s->mesh->ndim};
	struct tensor_box local = *window;

	for (uint32_t d = 0; d < s->shape.ndim; d++) {
		local.offset[d] = base_min(local.offset[d], s->shape.dim[d]);
		local.size[d] = base_min(local.size[d], s->shape.dim[d] - local.offset[d]);
		if (local.size[d] == 0)
			return 0;
	}
	for (uint32_t m = 0; m < s->mesh->ndim; m++)
		if (s->placement[m].kind == TENSOR_RAGGED_SHARD)
			h.ragged = m;
	return holders_walk(&h, 0, &s->shape, &local);
}

/* A shard of cuts has a box that it holds as one; one of a range of rows as at most two boxes a dimension. */
bool tensor_shard_has(const struct tensor_shard *shard, const struct tensor_box *box)
{
	uint64_t items = tensor_box_items(&shard->shape, box), found = 0;
	struct tensor_shard_iter it;
	unsigned n = 0;

	if (shard->absent)
		return false;
	for (tensor_shard_first(&it, shard, box); !it.done && n < 2 * TENSOR_MAX_DIMS; tensor_shard_next(&it), n++)
		found += tensor_box_items(&shard->shape, &it.at.box);
	return found == items;
}
