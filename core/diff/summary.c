/* SPDX-License-Identifier: Apache-2.0
 *
 * summary: see summary.h. Pieces are read one after another. A block of values becomes doubles, of which those that
 * are not finite are counted and left out; its mean and its sum of squared distances from that are added to what was
 * there (Chan, Golub and LeVeque), which loses nothing where the mean is far from zero. */
#include "core/diff/summary.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/diff/read.h"
#include "core/diff/values.h"

#define KEPT_VALUES (UINT64_C(1) << 18)
#define KEY_BITS 22u
#define SUMMARY_CACHE_BYTES (UINT64_C(32) << 20)

const double diff_quantiles[DIFF_QUANTILES] = {0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999};

struct summing {
	struct diff_type type;
	struct diff_summary *s;
	long double squares;            /* of distances from the mean; those of large doubles do not fit one */
	double *kept;                   /* s->finite values; NULL: too many */
	uint64_t *counters;             /* by key */
	bool half;                      /* a 16-bit integer, with a sign or not: the key is its value + 2^15 */
	double items[DIFF_CUT_BYTES / sizeof(double)];
};

/* A number and how often it was there; ascending. */
struct point { double value; uint64_t n; };

static void summing_free(struct summing *g)
{
	free(g->kept);
	free(g->counters);
	free(g);
}

BASE_CLEANUP_DEFINE(struct summing *, summing_free)
BASE_CLEANUP_DEFINE(struct load_object *, load_object_unref)
BASE_CLEANUP_DEFINE(struct load_cache *, load_cache_free)

/* ---- keys: ascending as the values do ---- */

static uint32_t key_of(const struct summing *g, double value)
{
	uint64_t bits;

	if (g->half)
		return (uint32_t)((int32_t)value + 32768);
	memcpy(&bits, &value, sizeof bits);
	bits = bits >> 63 ? ~bits : bits | UINT64_C(1) << 63;
	return (uint32_t)(bits >> (64 - KEY_BITS));
}

/* The value nearest to zero that has the key. */
static double value_of(const struct summing *g, uint32_t key)
{
	uint64_t bits = (uint64_t)key << (64 - KEY_BITS);
	double value;

	if (g->half)
		return (double)key - 32768;
	bits = bits >> 63 ? bits & ~(UINT64_C(1) << 63) : ~(bits | (UINT64_MAX >> KEY_BITS));
	memcpy(&value, &bits, sizeof value);
	return value;
}

/* ---- a block ---- */

/* Leaves the finite ones, and returns how many these are. */
static size_t block_finite(struct diff_summary *s, double *values, size_t n)
{
	size_t kept = 0;

	for (size_t i = 0; i < n; i++) {
		double v = values[i] + 0.0; /* -0 becomes 0 */

		if (isfinite(v)) {
			values[kept++] = v;
			s->zeros += v == 0;
		} else if (isnan(v)) {
			s->nan++;
		} else {
			*(v < 0 ? &s->inf_negative : &s->inf_positive) += 1;
		}
	}
	return kept;
}

/* Rounding may have left the range of doubles. */
static double moment(long double value)
{
	return (double)fminl(fmaxl(value, -DBL_MAX), DBL_MAX);
}

static void block_moments(struct summing *g, const double *values, size_t n)
{
	struct diff_summary *s = g->s;
	double sum = 0, squares = 0, mean, all = (double)(s->finite + n);
	long double apart, wide = 0;

	for (size_t i = 0; i < n; i++)
		sum += values[i] / (double)n;
	mean = moment(sum);
	for (size_t i = 0; i < n; i++) {
		squares += (values[i] - mean) * (values[i] - mean);
		s->min = fmin(s->min, values[i]);
		s->max = fmax(s->max, values[i]);
	}
	for (size_t i = 0; !isfinite(squares) && i < n; i++)
		wide += ((long double)values[i] - mean) * ((long double)values[i] - mean);
	apart = (long double)mean - s->mean;
	g->squares += (isfinite(squares) ? squares : wide) + apart * apart * ((double)s->finite * (double)n / all);
	s->mean = moment(s->mean + apart * ((double)n / all));
}

static void summing_add(struct summing *g, const void *items, size_t n)
{
	struct diff_summary *s = g->s;
	double values[DIFF_BLOCK_VALUES];
	size_t finite;

	diff_widen(&g->type, items, n, values);
	s->values += n;
	finite = block_finite(s, values, n);
	if (finite == 0)
		return;
	block_moments(g, values, finite);
	if (g->kept)
		memcpy(g->kept + s->finite, values, finite * sizeof *values);
	for (size_t i = 0; g->counters && i < finite; i++)
		g->counters[key_of(g, values[i])]++;
	s->finite += finite;
}

#define EXTREMES(type) do { \
	for (size_t i = 0; i < n; i++) { \
		least = ((const type *)items)[i] < (type)least ? ((const type *)items)[i] : (type)least; \
		most = ((const type *)items)[i] > (type)most ? ((const type *)items)[i] : (type)most; \
	} \
} while (0)

/* Of 64-bit integers, which doubles do not hold. */
static void summing_extremes(struct summing *g, const void *items, size_t n)
{
	uint64_t least, most;

	if (g->s->values == 0)
		g->s->least = g->s->most = *(const int64_t *)items;
	least = (uint64_t)g->s->least;
	most = (uint64_t)g->s->most;
	if (g->type.dtype == TENSOR_I64)
		EXTREMES(int64_t);
	else
		EXTREMES(uint64_t);
	g->s->least = (int64_t)least;
	g->s->most = (int64_t)most;
}

static void summing_items(struct summing *g, const void *items, size_t n)
{
	const uint8_t *at = items;
	size_t left = n * g->type.values;

	if (g->type.dtype == TENSOR_I64 || g->type.dtype == TENSOR_U64)
		summing_extremes(g, items, n);
	while (left) {
		size_t some = base_min(left, DIFF_BLOCK_VALUES);

		summing_add(g, at, some);
		at += some / g->type.values * g->type.item_bytes;
		left -= some;
	}
}

/* ---- the end ---- */

static int double_compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static uint32_t key_end(const struct summing *g) { return UINT32_C(1) << (g->half ? 17 : KEY_BITS); }

/* The next point from *at on, by `values` or by counters. */
static bool point_next(const struct summing *g, uint64_t *at, struct point *ret_p)
{
	if (g->kept) {
		if (*at == g->s->finite)
			return false;
		*ret_p = (struct point){g->kept[(*at)++], 1};
		return true;
	}
	while (*at < key_end(g) && !g->counters[*at])
		++*at;
	if (*at == key_end(g))
		return false;
	/* one that was cut is inside of what there was */
	ret_p->value = fmin(fmax(value_of(g, (uint32_t)*at), g->s->min), g->s->max);
	ret_p->n = g->counters[(*at)++];
	return true;
}

static unsigned bin_of(const struct diff_summary *s, double value)
{
	double width = s->max / DIFF_BINS - s->min / DIFF_BINS, from = value - s->min;
	double at = width > 0 ? isfinite(from) ? from / width : (value / 2 - s->min / 2) / (width / 2) : 0;

	return at >= DIFF_BINS ? DIFF_BINS - 1 : (unsigned)at;
}

static void summing_end(struct summing *g)
{
	struct diff_summary *s = g->s;
	unsigned q = 0, bits = 8 * tensor_dtype_word_bytes(g->type.dtype);
	struct point p;
	uint64_t at = 0, n = 0;

	if (s->finite == 0)
		s->min = s->max = 0;
	if (g->kept)
		qsort(g->kept, s->finite, sizeof *g->kept, double_compare);
	while (point_next(g, &at, &p)) {
		n += p.n;
		s->bins[bin_of(s, p.value)] += p.n;
		for (; q < DIFF_QUANTILES && (double)n >= diff_quantiles[q] * (double)s->finite; q++)
			s->quantile[q] = p.value;
	}
	s->std = s->finite ? moment(sqrtl(g->squares / (double)s->finite)) : 0;
	s->integers = tensor_dtype_is_integer(g->type.dtype);
	if (s->integers && bits < 64) {
		s->least = (int64_t)s->min;
		s->most = (int64_t)s->max;
	}
	s->exact = bits <= 16 || (g->kept && (!s->integers || fmax(fabs(s->min), fabs(s->max)) <= 0x1p53));
}

static int summing_new(enum tensor_dtype dtype, uint64_t bytes, struct summing **ret_g, struct base_error *err)
{
	base_cleanup(summing_free_p) struct summing *g = calloc(1, sizeof *g);
	uint64_t n;

	if (!g)
		return base_no_memory(err);
	diff_type_init(&g->type, dtype);
	n = bytes / g->type.item_bytes * g->type.values;
	g->half = dtype == TENSOR_I16 || dtype == TENSOR_U16;
	if (n <= KEPT_VALUES)
		g->kept = malloc((n + 1) * sizeof *g->kept);
	else
		g->counters = calloc(UINT32_C(1) << KEY_BITS, sizeof *g->counters);
	if (!g->kept && !g->counters)
		return base_no_memory(err);
	*ret_g = base_steal(g);
	return 0;
}

int diff_summarise(struct load_step *step, uint32_t tensor, void (*progress)(void *arg, uint64_t done, uint64_t total),
	void *arg, struct diff_summary *ret_s, struct base_error *err)
{
	base_cleanup(summing_free_p) struct summing *g = NULL;
	base_cleanup(load_cache_free_p) struct load_cache *cache = load_cache_new(SUMMARY_CACHE_BYTES);
	base_cleanup(load_object_unref_p) struct load_object *o = NULL;
	struct load_tensor_info info;
	uint64_t done = 0;
	int r = cache ? load_tensor_open(step, tensor, &o, err) : base_no_memory(err);

	if (r < 0)
		return r;
	load_cache_quiet(cache);
	load_step_tensor_info(step, tensor, &info);
	*ret_s = (struct diff_summary){.min = INFINITY, .max = -INFINITY};
	r = summing_new(info.dtype, info.bytes, &g, err);
	if (r == 0)
		g->s = ret_s;
	for (uint64_t i = 0; r == 0 && i < o->npieces; i++) {
		struct tensor_box box;
		struct diff_cut cut;

		diff_piece_box(o, i, &box);
		for (diff_cut_first(&cut, &o->grid, &box); r == 0 && !cut.done; diff_cut_next(&cut))
			if ((r = diff_cut_read(&cut, o, cache, g->items, err)) == 0)
				summing_items(g, g->items, diff_cut_items(&cut));
		done += o->pieces[i].ref.raw_len;
		if (progress)
			progress(arg, done, info.bytes);
	}
	if (r == 0)
		summing_end(g);
	return r;
}
