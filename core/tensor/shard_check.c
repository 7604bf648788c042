/* SPDX-License-Identifier: Apache-2.0
 *
 * shard_check: whether placements fit a shape and a mesh, for every rank at once, so that no rank finds later what
 * another does not.
 *
 * Interleaved and ragged placements ask for divisibility of sizes that earlier placements may have left different
 * from rank to rank. The sizes that occur are few: of one size a cut leaves at most five different ones, and it
 * leaves the same to all coordinates between its break points. Cuts of different dimensions lie on different mesh
 * dimensions, so any combination of their sizes occurs. */
#include "core/tensor/shard_internal.h"

#include <string.h>

#include "core/base/plural.h"

#define SIZES_MAX 128u        /* different sizes of one dimension over all ranks: 1 + 4 a cut in practice */

struct check {
	const struct tensor_sharding *s;
	struct base_error *err;
	struct { uint64_t at[SIZES_MAX]; uint32_t n; } sizes[TENSOR_MAX_DIMS];
	uint64_t stretches[TENSOR_MAX_DIMS]; /* upper bound of the separate stretches of one shard */
};

static int check_bad(const struct check *c, uint32_t m, int code, const char *why)
{
	char text[48];

	tensor_placement_text(&c->s->placement[m], text);
	return base_error_set(c->err, code, "placement %s on mesh dimension \"%s\" of %u: %s", text,
		c->s->mesh->name[m], c->s->mesh->size[m], why);
}

static bool size_add(struct check *c, uint32_t d, uint64_t size)
{
	for (uint32_t i = 0; i < c->sizes[d].n; i++)
		if (c->sizes[d].at[i] == size)
			return true;
	if (c->sizes[d].n == SIZES_MAX)
		return false;
	c->sizes[d].at[c->sizes[d].n++] = size;
	return true;
}

/* Coordinates around which the size that a cut leaves can change. */
static uint32_t cut_breaks(const struct tensor_placement *p, uint64_t n, uint32_t size, uint32_t breaks[static 8])
{
	uint64_t first = p->kind == TENSOR_STRIDED_SHARD ? base_div_up(n, p->split) : n;
	const uint64_t parts[2] = {first, first ? n % first : 0};
	uint32_t count = 0;

	breaks[count++] = 0;
	breaks[count++] = size - 1;
	for (unsigned i = 0; i < 2; i++) {
		uint64_t c = base_div_up(parts[i], size), at = c ? parts[i] / c : 0;

		for (uint64_t b = at; b <= at + 1; b++)
			if (b < size)
				breaks[count++] = (uint32_t)b;
	}
	return count;
}

static int check_cut(struct check *c, uint32_t m)
{
	const struct tensor_placement *p = &c->s->placement[m];
	uint32_t size = c->s->mesh->size[m], d = p->dim, breaks[8];
	uint64_t sizes[SIZES_MAX];
	uint32_t n;

	if (d >= c->s->shape.ndim)
		return base_error_set(c->err, -EINVAL, "placement on mesh dimension \"%s\": the tensor has %u "
			"dimensions, there is no dimension %u", c->s->mesh->name[m], c->s->shape.ndim, d);
	if (p->kind != TENSOR_SHARD && p->split == 0)
		return check_bad(c, m, -EINVAL, "a split of 0");
	n = c->sizes[d].n;
	memcpy(sizes, c->sizes[d].at, n * sizeof sizes[0]);
	if (p->kind == TENSOR_INTERLEAVED_SHARD)
		for (uint32_t i = 0; i < n; i++) {
			if (sizes[i] % p->split)
				return check_bad(c, m, -EINVAL, "its k does not divide the dimension's size");
			if (sizes[i] / p->split % size)
				return check_bad(c, m, -EINVAL, "the mesh dimension does not divide its parts");
		}
	if (size == 1)
		return 0;
	if (p->kind != TENSOR_SHARD && c->s->shape.dim[d] > 0)
		c->stretches[d] += base_min(p->split, c->s->shape.dim[d]) - 1;
	if (c->stretches[d] > TENSOR_SHARD_STRETCHES_MAX)
		return check_bad(c, m, -BASE_ELIMIT, "more than 16,777,216 separate stretches in one dimension");
	c->sizes[d].n = 0;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t nbreaks = cut_breaks(p, sizes[i], size, breaks);

		for (uint32_t b = 0; b < nbreaks; b++) {
			struct tensor_cut cut;

			tensor_cut_make(p, sizes[i], size, breaks[b], &cut);
			if (!size_add(c, d, tensor_cut_size(&cut)))
				return check_bad(c, m, -BASE_ELIMIT, "too many different sizes of shards");
		}
	}
	return 0;
}

/* Whether `units` divides every product of sizes of the leading dimensions. */
static bool units_divide(const struct check *c, uint32_t ndims, uint64_t units)
{
	uint32_t at[TENSOR_MAX_DIMS] = {0}, d;

	do {
		uint64_t rows = 1;

		for (d = 0; d < ndims; d++)
			rows *= c->sizes[d].at[at[d]];
		if (rows % units)
			return false;
		for (d = 0; d < ndims && ++at[d] == c->sizes[d].n; d++)
			at[d] = 0;
	} while (d < ndims);
	return true;
}

static int check_ragged(struct check *c, uint32_t m)
{
	const struct tensor_placement *p = &c->s->placement[m];

	for (uint32_t i = 0; i < c->s->mesh->ndim; i++)
		if (i != m && c->s->placement[i].kind == TENSOR_RAGGED_SHARD)
			return check_bad(c, m, -EINVAL, "a second ragged placement");
	if (p->dim > c->s->shape.ndim)
		return base_error_set(c->err, -EINVAL, "placement on mesh dimension \"%s\": the tensor has %u "
			"dimensions, not %u leading ones", c->s->mesh->name[m], c->s->shape.ndim, p->dim);
	if (p->dim == 0 && c->s->shape.ndim == TENSOR_MAX_DIMS)
		return check_bad(c, m, -BASE_ELIMIT, "its local tensor would have 17 dimensions");
	if (p->nends != c->s->mesh->size[m])
		return check_bad(c, m, -EINVAL, "there must be one number of units for each coordinate");
	for (uint32_t i = 1; i < p->nends; i++)
		if (p->ends[i] < p->ends[i - 1])
			return check_bad(c, m, -EINVAL, "its ends do not ascend");
	if (p->ends[p->nends - 1] == 0)
		return check_bad(c, m, -EINVAL, "the units sum to 0");
	if (!units_divide(c, p->dim, p->ends[p->nends - 1]))
		return check_bad(c, m, -EINVAL, "the units' sum does not divide the product of the leading "
			"dimensions");
	return 0;
}

static int check_shape(const struct tensor_sharding *s, struct base_error *err)
{
	uint64_t items;
	int r;

	if (s->shape.ndim > TENSOR_MAX_DIMS)
		return base_error_set(err, -BASE_ELIMIT, "shape: %u dimensions, at most %u are possible", s->shape.ndim,
			TENSOR_MAX_DIMS);
	r = tensor_shape_items(&s->shape, s->item_bytes, &items);
	if (r == -EOVERFLOW)
		return base_error_set(err, r, "shape: the tensor has more than 2^62 bytes");
	return r < 0 ? base_error_set(err, r, "shape: items of %u bytes", s->item_bytes) : 0;
}

int tensor_sharding_check(const struct tensor_sharding *s, unsigned nplacements, struct base_error *err)
{
	struct check c = {.s = s, .err = err};
	int r = check_shape(s, err);

	if (r < 0)
		return r;
	if (nplacements != s->mesh->ndim)
		return base_error_set(err, -EINVAL, "placement: %u %s for a mesh of %u %s, one for each is needed",
			nplacements, base_plural(nplacements, "word", "words"), s->mesh->ndim,
			base_plural(s->mesh->ndim, "dimension", "dimensions"));
	for (uint32_t d = 0; d < s->shape.ndim; d++) {
		size_add(&c, d, s->shape.dim[d]);
		c.stretches[d] = 1;
	}
	for (uint32_t m = 0; m < s->mesh->ndim && r == 0; m++) {
		if ((unsigned)s->placement[m].kind > TENSOR_PARTIAL)
			r = base_error_set(err, -EINVAL, "placement on mesh dimension \"%s\": there is no kind %d",
				s->mesh->name[m], (int)s->placement[m].kind);
		else if (s->placement[m].kind == TENSOR_PARTIAL)
			r = check_bad(&c, m, -EOPNOTSUPP, "a partial tensor waits for a reduction: reduce it first");
		else if (tensor_placement_cuts(&s->placement[m]))
			r = check_cut(&c, m);
	}
	for (uint32_t m = 0; m < s->mesh->ndim && r == 0; m++)
		if (s->placement[m].kind == TENSOR_RAGGED_SHARD)
			r = check_ragged(&c, m);
	return r;
}
