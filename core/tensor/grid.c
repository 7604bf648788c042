/* SPDX-License-Identifier: Apache-2.0
 *
 * grid: edge lengths of the tiles of a tensor, from its shape and item size alone (docs/format/grid.md).
 *
 *   half(x) = x/2 rounded up (without S: x/2 if x is even, else the largest power of two below x)
 *   M = S if item * prod(shape) < 64 M
 *   e = shape;  k = last dimension
 *   while k > 0 and item * prod(shape[k..]) < 2R:  k -= 1
 *   o = first d <= k with shape[d] > 1, else k
 *   rowok(d) = d != k or o == k or item * e[k] * prod(shape[k+1..]) >= 2R
 *   cut(d, m) = while e[d] > 1 and item * prod(e) >= 2M and rowok(d) and ceil(shape[d] / half(e[d])) <= m:
 *                   e[d] = half(e[d])
 *   if o == k:  cut(k, 64)      else:  cut(o, 8); cut(k, 8); cut(o, 64)
 *   while item * prod(e) > T:  d = first d <= k with e[d] even and rowok(d), else first d with e[d] > 1, else stop
 *                              e[d] = half(e[d])
 *
 * A dimension is halved, never cut at a fixed length, so that every even power-of-two split of a tensor falls on
 * tile lines; rounded up, as sizes that do not divide are cut (ceil(n/p)). The code follows the rule line by line:
 * stored data depends on every one of them. No product here overflows: tensor_shape_items bounds that of the shape,
 * and no edge exceeds its dimension. */
#include "core/tensor/grid.h"

#include <errno.h>
#include <string.h>

#include "core/base/le.h"

struct grid_rule {
	struct tensor_grid *g;
	unsigned o;
	uint64_t bytes;    /* item * prod(e) */
	uint64_t trailing; /* item * prod(shape[k+1..]) */
};

static uint64_t grid_half(const struct tensor_grid *g, uint64_t x)
{
	if (x % 2 == 0 || g->params.small_bytes)
		return base_div_up(x, 2);
	return UINT64_C(1) << (63 - __builtin_clzll(x)); /* x is odd and > 1: below x */
}

static void grid_halve(struct grid_rule *rule, unsigned d)
{
	uint64_t *e = &rule->g->edge[d];
	uint64_t half = grid_half(rule->g, *e);

	rule->bytes = rule->bytes / *e * half;
	*e = half;
}

static bool grid_rowok(const struct grid_rule *rule, unsigned d)
{
	const struct tensor_grid *g = rule->g;

	return d != g->k || rule->o == g->k || g->edge[d] * rule->trailing >= 2 * g->params.row_bytes;
}

static void grid_cut(struct grid_rule *rule, unsigned d, uint64_t most)
{
	const struct tensor_grid *g = rule->g;

	while (g->edge[d] > 1 && rule->bytes >= 2 * g->params.min_bytes && grid_rowok(rule, d)
	       && base_div_up(g->shape.dim[d], grid_half(g, g->edge[d])) <= most)
		grid_halve(rule, d);
}

/* The dimension to halve next while a tile is larger than T; ndim when none is left. */
static unsigned grid_next(const struct grid_rule *rule)
{
	const struct tensor_grid *g = rule->g;

	for (unsigned d = 0; d <= g->k; d++)
		if (g->edge[d] % 2 == 0 && grid_rowok(rule, d))
			return d;
	for (unsigned d = 0; d < g->shape.ndim; d++)
		if (g->edge[d] > 1)
			return d;
	return g->shape.ndim;
}

/* Sets k and the products that the rule needs; the shape has at least one dimension and no zero. */
static void grid_rule_init(struct grid_rule *rule, struct tensor_grid *g)
{
	uint64_t rest = g->item_bytes;

	rule->g = g;
	g->k = g->shape.ndim - 1;
	while (g->k > 0 && rest * g->shape.dim[g->k] < 2 * g->params.row_bytes)
		rest *= g->shape.dim[g->k--];
	rule->trailing = rest;
	for (rule->o = 0; rule->o < g->k && g->shape.dim[rule->o] <= 1; rule->o++)
		;
	rule->bytes = g->item_bytes;
	for (unsigned d = 0; d < g->shape.ndim; d++)
		rule->bytes *= g->shape.dim[d];
	if (g->params.small_bytes && rule->bytes / 64 < g->params.min_bytes)
		g->params.min_bytes = g->params.small_bytes;
}

static void grid_apply(struct grid_rule *rule)
{
	struct tensor_grid *g = rule->g;

	if (rule->o == g->k)
		grid_cut(rule, g->k, 64);
	else {
		grid_cut(rule, rule->o, 8);
		grid_cut(rule, g->k, 8);
		grid_cut(rule, rule->o, 64);
	}
	while (rule->bytes > g->params.target_bytes) {
		unsigned d = grid_next(rule);

		if (d == g->shape.ndim)
			break; /* a single item is larger than T */
		grid_halve(rule, d);
	}
	for (unsigned d = 0; d < g->shape.ndim; d++)
		if (d != g->k && g->edge[d] < g->shape.dim[d])
			g->only_k = false;
}

static bool grid_params_valid(const struct tensor_grid_params *p)
{
	return p->min_bytes && p->target_bytes && p->row_bytes && p->min_bytes <= p->target_bytes
		&& p->target_bytes <= TENSOR_MAX_BYTES && p->row_bytes <= TENSOR_MAX_BYTES
		&& p->small_bytes <= p->min_bytes;
}

bool tensor_grid_params_equal(const struct tensor_grid_params *a, const struct tensor_grid_params *b)
{
	return a->min_bytes == b->min_bytes && a->target_bytes == b->target_bytes && a->row_bytes == b->row_bytes
		&& a->small_bytes == b->small_bytes;
}

int tensor_grid_init(struct tensor_grid *g, const struct tensor_shape *s, unsigned item_bytes,
	struct tensor_grid_params params)
{
	struct grid_rule rule;
	uint64_t items;
	int r = tensor_shape_items(s, item_bytes, &items);

	if (r < 0)
		return r;
	if (!grid_params_valid(&params))
		return -EINVAL;
	memset(g, 0, sizeof *g);
	g->shape.ndim = s->ndim;
	memcpy(g->shape.dim, s->dim, s->ndim * sizeof s->dim[0]);
	g->item_bytes = item_bytes;
	g->params = params;
	g->only_k = true;
	g->edge[0] = 1;
	for (unsigned d = 0; d < s->ndim; d++)
		g->edge[d] = base_max(s->dim[d], 1);
	if (s->ndim == 0)
		return 0;
	g->k = s->ndim - 1;
	if (items == 0)
		return 0;
	grid_rule_init(&rule, g);
	grid_apply(&rule);
	return 0;
}
