/* SPDX-License-Identifier: Apache-2.0
 *
 * shard: what one rank holds. Every placement that cuts a dimension has one form, the cut: stretches of equal length at
 * equal distance, and a tail. Cuts of one dimension apply one after another, each to indices of what the one before
 * left; each is a strictly ascending map, so their composition is, and "how many held indices are below x" answers
 * windows.
 *
 * Ragged placements and flat ranges are ranges of the flattened tensor that the cuts leave (`inner`): rows of the
 * leading dimensions, whole rows of the rest, are neighbours there. So a shard is its cuts and one range.
 *
 * No product here overflows: the shape's was checked, sizes only shrink, and a mesh dimension is below 2^24 while
 * sizes stay below 2^62. */
#include "core/tensor/shard_internal.h"

#include <stdio.h>
#include <string.h>

static uint64_t clamp_below(uint64_t x, uint64_t start, uint64_t len)
{
	return x <= start ? 0 : base_min(x - start, len);
}

/* [c*i, c*(i+1)) within n, c = ceil(n/p): torch.chunk. Returns its length. */
static uint64_t chunk(uint64_t n, uint32_t p, uint32_t i, uint64_t *ret_start)
{
	uint64_t c = base_div_up(n, p);

	*ret_start = base_min(n, c * i);
	return base_min(n, c * ((uint64_t)i + 1)) - *ret_start;
}

static void cut_stretches(struct tensor_cut *c, uint64_t start, uint64_t stretch, uint64_t stride, uint64_t full)
{
	c->start = start;
	c->stretch = stretch;
	c->stride = base_max(stride, 1);
	c->full = stretch ? full : 0;
}

/* Chunks of c1, the last one shorter; each is chunked again by p. Where c1 is 1 a chunk is never divided: rank 0 holds
 * all of them, which is one stretch. */
static void cut_strided(struct tensor_cut *c, uint64_t n, uint64_t split, uint32_t p, uint32_t i)
{
	uint64_t c1 = base_div_up(n, split), stretch, start, tail_start, rest;

	if (c1 <= 1) {
		cut_stretches(c, 0, i == 0 ? n : 0, n, 1);
		return;
	}
	stretch = chunk(c1, p, i, &start);
	cut_stretches(c, start, stretch, c1, n / c1);
	rest = n % c1;
	c->tail = chunk(rest, p, i, &tail_start);
	c->tail_start = n - rest + tail_start;
}

void tensor_cut_make(const struct tensor_placement *placement, uint64_t n, uint32_t p, uint32_t i,
	struct tensor_cut *ret_cut)
{
	uint64_t start, part;

	memset(ret_cut, 0, sizeof *ret_cut);
	ret_cut->dim = placement->dim;
	if (p == 1)
		cut_stretches(ret_cut, 0, n, n, 1);
	else if (placement->kind == TENSOR_STRIDED_SHARD && placement->split > 1)
		cut_strided(ret_cut, n, placement->split, p, i);
	else if (placement->kind == TENSOR_INTERLEAVED_SHARD) {
		part = n / placement->split;
		cut_stretches(ret_cut, part / p * i, part / p, part, placement->split);
	} else {
		part = chunk(n, p, i, &start);
		cut_stretches(ret_cut, start, part, part, 1);
	}
}

unsigned tensor_cut_holders(const struct tensor_placement *placement, uint64_t n, uint32_t size, uint64_t low,
	uint64_t high, uint32_t first[static 2], uint32_t last[static 2])
{
	uint64_t len = n, of_first, of_last; /* of a chunk; the chunks that the window begins and ends in */
	uint64_t c1, c2;

	if (placement->kind == TENSOR_STRIDED_SHARD)
		len = base_div_up(n, placement->split);
	else if (placement->kind == TENSOR_INTERLEAVED_SHARD)
		len = n / placement->split;
	first[0] = last[0] = 0;
	if (len == 1 && placement->kind == TENSOR_STRIDED_SHARD)
		return 1;
	of_first = low / len;
	of_last = (high - 1) / len;
	last[0] = size - 1;
	if (of_last - of_first > 1)
		return 1;
	c1 = base_div_up(base_min(len, n - of_first * len), size);
	c2 = base_div_up(base_min(len, n - of_last * len), size);
	first[0] = (uint32_t)((low - of_first * len) / c1);
	last[0] = (uint32_t)((high - 1 - of_last * len) / c2);
	if (of_first == of_last)
		return 1;
	first[1] = first[0]; /* to the end of one chunk, and the beginning of the next one */
	first[0] = 0;
	last[1] = size - 1;
	if (first[1] > last[0])
		return 2;
	last[0] = size - 1;
	return 1;
}

uint64_t tensor_cut_below(const struct tensor_cut *c, uint64_t x)
{
	uint64_t whole = x / c->stride, below = c->full * c->stretch;

	if (whole < c->full)
		below = whole * c->stretch + clamp_below(x % c->stride, c->start, c->stretch);
	/* a single stretch may lie behind its stride: [start, start + stretch) with stride = stretch */
	if (c->full == 1)
		below = clamp_below(x, c->start, c->stretch);
	return below + clamp_below(x, c->tail_start, c->tail);
}

void tensor_placement_text(const struct tensor_placement *p, char text[static 48])
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	if (p->kind == TENSOR_RAGGED_SHARD && p->nends > 8)
		snprintf(text, 48, "RS of %u dimensions and %u units", p->dim, p->nends);
	else {
		tensor_placements_print(p, 1, &b);
		snprintf(text, 48, "%.*s", b.error ? 0 : (int)b.len, b.data ? (const char *)b.data : "");
	}
}

uint32_t tensor_sharding_replicated(const struct tensor_sharding *s)
{
	uint32_t dims = 0;

	for (uint32_t m = 0; m < s->mesh->ndim; m++)
		if (s->placement[m].kind == TENSOR_REPLICATE && s->mesh->size[m] > 1)
			dims |= UINT32_C(1) << m;
	return dims;
}

/* The rows of the flattened leading dimensions that a ragged placement gives to coordinate `i`. */
static void shard_ragged(struct tensor_shard *shard, const struct tensor_placement *p, uint32_t i)
{
	uint64_t rest = tensor_shape_product(&shard->inner, p->dim, shard->inner.ndim);
	uint64_t unit = tensor_shape_product(&shard->inner, 0, p->dim) / p->ends[p->nends - 1];

	shard->from = i ? unit * p->ends[i - 1] * rest : 0;
	shard->to = unit * p->ends[i] * rest;
	memset(&shard->local_shape, 0, sizeof shard->local_shape);
	shard->local_shape.ndim = 1 + shard->inner.ndim - p->dim;
	shard->local_shape.dim[0] = unit * (p->ends[i] - (i ? p->ends[i - 1] : 0));
	for (uint32_t d = p->dim; d < shard->inner.ndim; d++)
		shard->local_shape.dim[1 + d - p->dim] = shard->inner.dim[d];
}

static int shard_flat(struct tensor_shard *shard, const struct tensor_flat *f, uint32_t rank, struct base_error *err)
{
	uint64_t items = shard->to - shard->from;
	unsigned long long from = f->from, to = f->to, end = f->len ? f->len : items;

	if (from > to)
		return base_error_set(err, -EINVAL, "flat range %llu:%llu ends before it begins", from, to);
	if (end < items)
		return base_error_set(err, -EINVAL, "flat range: a padded length of %llu is less than the %llu "
			"elements that rank %u holds", end, (unsigned long long)items, rank);
	if (to > end)
		return base_error_set(err, -EINVAL, "flat range %llu:%llu ends past the %llu elements of rank %u%s",
			from, to, end, rank, f->len ? "'s padded bucket" : "");
	shard->to = shard->from + base_min(f->to, items);
	shard->from = base_min(shard->from + base_min(f->from, items), shard->to);
	memset(&shard->local_shape, 0, sizeof shard->local_shape);
	shard->local_shape.ndim = 1;
	shard->local_shape.dim[0] = f->to - f->from;
	return 0;
}

int tensor_shard_of(const struct tensor_sharding *s, uint32_t rank, const struct tensor_flat *flat,
	struct tensor_shard *ret_shard, struct base_error *err)
{
	struct tensor_shard *shard = ret_shard;
	uint32_t coordinate[TENSOR_MAX_DIMS];

	shard->shape = shard->inner = s->shape; /* of the cuts only those in use are set: all are 900 bytes */
	shard->local_shape = (struct tensor_shape){.ndim = 0};
	shard->absent = false;
	shard->ncuts = 0;
	shard->from = shard->to = 0;
	if (tensor_mesh_coordinate(s->mesh, rank, coordinate) < 0) {
		shard->absent = true;
		return 0;
	}
	for (uint32_t m = 0; m < s->mesh->ndim; m++) {
		const struct tensor_placement *p = &s->placement[m];
		struct tensor_cut *cut = &shard->cut[shard->ncuts];

		if (!tensor_placement_cuts(p) || s->mesh->size[m] == 1)
			continue;
		tensor_cut_make(p, shard->inner.dim[p->dim], s->mesh->size[m], coordinate[m], cut);
		shard->inner.dim[p->dim] = tensor_cut_size(cut);
		shard->ncuts++;
	}
	shard->local_shape = shard->inner;
	shard->to = tensor_shape_product(&shard->inner, 0, shard->inner.ndim);
	for (uint32_t m = 0; m < s->mesh->ndim; m++)
		if (s->placement[m].kind == TENSOR_RAGGED_SHARD)
			shard_ragged(shard, &s->placement[m], coordinate[m]);
	return flat ? shard_flat(shard, flat, rank, err) : 0;
}

uint64_t tensor_shard_items(const struct tensor_shard *shard)
{
	return shard->to - shard->from;
}
