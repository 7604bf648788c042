/* SPDX-License-Identifier: Apache-2.0
 *
 * diff: the sorted names of both sides are merged into pairs. Of each pair dtype, shape and digest say whether it
 * differs, or that only its bytes can say so: many pairs at once, since each asks the parts of its steps. */
#include "core/diff/diff.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/diff/diff_internal.h"
#include "core/load/open/alike.h"
#include "core/load/open/object.h"
#include "core/storage/spread.h"

const char *const diff_change_words[] = {"added", "removed", "retyped", "reshaped", "changed"};

enum { PAIR_EQUAL = DIFF_CHANGED + 1, PAIR_COMPARE };   /* beside enum diff_change */

/* known: it has been decided, as far as digests decide, or can be by its class, of which another is the first. */
struct diff_pair { uint32_t a, b; uint8_t what; bool blob, known; };
/* Of a class of tensors (core/load/open/alike.h). first: 1 + the number of a pair. */
struct diff_class { uint32_t first; bool all; /* every row counts */ };

struct diffing {
	const struct diff_side *a, *b;
	const struct diff_options *options;
	struct diff_pair *pairs; size_t n, room;
	struct diff_compared *compared; size_t ncompared;
	bool found;                     /* the component */
	struct load_alike *alike;       /* or NULL */
	struct diff_class *classes;
};

static void diffing_release(struct diffing *d)
{
	free(d->pairs);
	free(d->compared);
	free(d->classes);
	load_alike_free(d->alike);
}

void diff_free(struct diff *d)
{
	if (!d)
		return;
	free(d->rows);
	free(d->counts);
	free(d);
}

void diff_side_tensor(const struct diff_side *s, uint32_t i, struct load_tensor_info *ret_info)
{
	if (s->step)
		load_step_tensor_info(s->step, i, ret_info);
	else
		s->other->tensor(s->other->arg, i, ret_info);
}

void diff_side_blob(const struct diff_side *s, uint32_t i, struct load_blob_info *ret_info)
{
	if (s->step)
		load_step_blob_info(s->step, i, ret_info);
	else
		s->other->blob(s->other->arg, i, ret_info);
}

/* ---- pairs ---- */

int diff_names_compare(const struct load_tensor_info *a, const struct load_tensor_info *b)
{
	int d = strcmp(a->component, b->component);

	if (d == 0)
		d = memcmp(a->name, b->name, base_min(a->name_len, b->name_len));
	if (d == 0)
		d = (a->name_len > b->name_len) - (a->name_len < b->name_len);
	return d;
}

static int pair_add(struct diffing *d, uint32_t a, uint32_t b, uint8_t what, bool blob)
{
	if (base_array_room(d->pairs, d->room, d->n + 1) < 0)
		return -ENOMEM;
	d->found = true;
	d->pairs[d->n++] = (struct diff_pair){a, b, what, blob};
	return 0;
}

static uint8_t tensors_differ(const struct load_tensor_info *x, const struct load_tensor_info *y)
{
	if (x->dtype != y->dtype)
		return DIFF_RETYPED;
	if (!tensor_shape_equal(&x->shape, &y->shape))
		return DIFF_RESHAPED;
	return x->bytes ? PAIR_COMPARE : PAIR_EQUAL;
}

static int pairs_tensors(struct diffing *d)
{
	uint32_t na = d->a->step ? load_step_tensor_count(d->a->step) : d->a->other->ntensors, a = 0;
	uint32_t nb = d->b->step ? load_step_tensor_count(d->b->step) : d->b->other->ntensors, b = 0;
	const char *only = d->options->component;
	struct load_tensor_info x, y;
	int r = 0;

	while (r == 0 && (a < na || b < nb)) {
		int order = a == na ? 1 : b == nb ? -1 : 0;

		if (a < na)
			diff_side_tensor(d->a, a, &x);
		if (b < nb)
			diff_side_tensor(d->b, b, &y);
		if (order == 0)
			order = diff_names_compare(&x, &y);
		if (!only || strcmp((order <= 0 ? &x : &y)->component, only) == 0)
			r = pair_add(d, order <= 0 ? a : DIFF_NONE, order >= 0 ? b : DIFF_NONE,
				order < 0 ? DIFF_REMOVED : order > 0 ? DIFF_ADDED : tensors_differ(&x, &y), false);
		a += order <= 0;
		b += order >= 0;
	}
	return r;
}

struct blob_item { struct load_blob_info info; uint32_t number; };

static int blob_compare(const void *a, const void *b)
{
	const struct load_blob_info *x = a, *y = b; /* the first member */

	if (x->per_rank != y->per_rank)
		return x->per_rank ? 1 : -1;
	if (x->per_rank && x->rank != y->rank)
		return x->rank < y->rank ? -1 : 1;
	return strcmp(x->name, y->name);
}

static bool blob_in(const char *name, const char *component)
{
	size_t len = component ? strlen(component) : 0;

	return !component || (strncmp(name, component, len) == 0 && (name[len] == '/' || !strcmp(name + len, ".json")));
}

/* Those of a side, sorted. */
static int blobs_of(const struct diff_side *s, const char *component, struct blob_item **ret_items, uint32_t *ret_n,
	struct base_error *err)
{
	int r = s->step ? load_step_blobs(s->step, err) : 0;
	uint32_t n = s->step ? load_step_blob_count(s->step) : s->other->nblobs;
	struct blob_item *items;

	if (r < 0)
		return r;
	items = malloc(((size_t)n + 1) * sizeof *items);
	if (!items)
		return base_no_memory(err);
	*ret_items = items;
	*ret_n = 0;
	for (uint32_t i = 0; i < n; i++) {
		diff_side_blob(s, i, &items[*ret_n].info);
		items[*ret_n].number = i;
		*ret_n += blob_in(items[*ret_n].info.name, component);
	}
	qsort(items, *ret_n, sizeof *items, blob_compare);
	return 0;
}

static int pairs_blobs(struct diffing *d, struct base_error *err)
{
	base_cleanup_free struct blob_item *x = NULL;
	base_cleanup_free struct blob_item *y = NULL;
	uint32_t nx, ny, a = 0, b = 0;
	int r = blobs_of(d->a, d->options->component, &x, &nx, err);

	if (r == 0)
		r = blobs_of(d->b, d->options->component, &y, &ny, err);
	while (r == 0 && (a < nx || b < ny)) {
		int order = a == nx ? 1 : b == ny ? -1 : blob_compare(&x[a], &y[b]);
		uint8_t what = order < 0 ? DIFF_REMOVED : order > 0 ? DIFF_ADDED : PAIR_EQUAL;

		if (order == 0 && (x[a].info.bytes != y[b].info.bytes ||
			!base_digest_equal(&x[a].info.digest, &y[b].info.digest)))
			what = DIFF_CHANGED;
		if (pair_add(d, order <= 0 ? x[a].number : DIFF_NONE, order >= 0 ? y[b].number : DIFF_NONE, what, true))
			return base_no_memory(err);
		a += order <= 0;
		b += order >= 0;
	}
	return r;
}

/* ---- what digests say ---- */

BASE_CLEANUP_DEFINE(struct load_object *, load_object_unref)

/* 1: by the digests of rows that have all of the tensor; 0: only opened tensors can say. */
static int pair_decide_rows(const struct diffing *d, struct diff_pair *pair, struct base_error *err)
{
	struct base_digest x, y;
	uint32_t at;
	int r = 0;

	if (!tensor_grid_params_equal(&load_step_layout(d->a->step, pair->a, &at)->m.grid,
		&load_step_layout(d->b->step, pair->b, &at)->m.grid))
		return 0;
	r = load_tensor_row_digest(d->a->step, pair->a, &x, err);
	if (r == 1)
		r = load_tensor_row_digest(d->b->step, pair->b, &y, err);
	if (r == 1)
		pair->what = base_digest_equal(&x, &y) ? PAIR_EQUAL : DIFF_CHANGED;
	return r;
}

/* NULL: only opened tensors can say. */
static struct diff_class *pair_class(const struct diffing *d, const struct diff_pair *pair, bool *ret_equal,
	uint64_t *ret_pieces)
{
	uint32_t class = d->alike && !pair->blob ? load_alike_class(d->alike, pair->a, ret_equal, ret_pieces)
		: LOAD_ALIKE_NONE;

	return class == LOAD_ALIKE_NONE ? NULL : &d->classes[class];
}

static int pair_decide(void *arg, uint32_t number, struct base_error *err)
{
	struct diffing *d = arg;
	struct diff_pair *pair = &d->pairs[number];
	base_cleanup(load_object_unref_p) struct load_object *x = NULL;
	base_cleanup(load_object_unref_p) struct load_object *y = NULL;
	struct diff_class *class;
	uint64_t pieces;
	bool equal;
	int r;

	if (pair->what != PAIR_COMPARE || !d->b->step || pair->known)
		return 0;
	class = pair_class(d, pair, &equal, &pieces);
	r = class ? 0 : pair_decide_rows(d, pair, err);
	if (r)
		return r < 0 ? r : 0;
	r = load_tensor_open(d->a->step, pair->a, &x, err);
	if (r == 0)
		r = load_tensor_open(d->b->step, pair->b, &y, err);
	if (r == 0 && class && class->first == number + 1)
		class->all = x->npieces == pieces;
	if (r == 0 && diff_cut_alike(x, y))
		pair->what = base_digest_equal(&x->digest, &y->digest) ? PAIR_EQUAL : DIFF_CHANGED;
	return r;
}

/* The first of each class is opened, whatever its rows say. If it can be, so can the others. */
static int pairs_decide(struct diffing *d, struct base_error *err)
{
	uint64_t pieces;
	bool equal;
	int r = d->b->step ? load_alike_new(d->a->step, d->b->step, d->options->component, &d->alike) : 0;

	d->classes = calloc(d->alike ? load_alike_classes(d->alike) : 1, sizeof *d->classes);
	if (r < 0 || !d->classes)
		return base_no_memory(err);
	for (size_t i = 0; d->alike && i < d->n; i++) {
		struct diff_pair *p = &d->pairs[i];
		struct diff_class *class = p->what == PAIR_COMPARE ? pair_class(d, p, &equal, &pieces) : NULL;

		p->known = class && class->first;
		if (class && !class->first)
			class->first = (uint32_t)i + 1;
	}
	r = storage_spread((uint32_t)d->n, pair_decide, d, err);
	for (size_t i = 0; r == 0 && i < d->n; i++) {
		struct diff_pair *p = &d->pairs[i];
		const struct diff_class *class = p->known ? pair_class(d, p, &equal, &pieces) : NULL;

		if (class && (equal || class->all))
			p->what = equal ? PAIR_EQUAL : DIFF_CHANGED;
		p->known = class ? p->what != PAIR_COMPARE : true;
	}
	return r < 0 || !d->alike ? r : storage_spread((uint32_t)d->n, pair_decide, d, err);
}

/* ---- what bytes say ---- */

static int pairs_compare(struct diffing *d, struct base_error *err)
{
	int r;

	d->compared = calloc(d->n + 1, sizeof *d->compared);
	if (!d->compared)
		return base_no_memory(err);
	for (size_t i = 0; i < d->n; i++) {
		const struct diff_pair *p = &d->pairs[i];

		if (p->what == PAIR_COMPARE || (p->what == DIFF_CHANGED && !p->blob && d->options->values))
			d->compared[d->ncompared++] = (struct diff_compared){.a = p->a, .b = p->b, .pair = (uint32_t)i};
	}
	r = d->ncompared ? diff_compare(d->a, d->b, d->options, d->compared, d->ncompared, err) : 0;
	for (size_t i = 0; r == 0 && i < d->ncompared; i++)
		d->pairs[d->compared[i].pair].what = d->compared[i].different ? DIFF_CHANGED : PAIR_EQUAL;
	return r;
}

static void row_values(const struct diffing *d, const struct diff_compared *c, struct diff_row *row)
{
	const struct diff_measure *m = &c->m;
	struct load_tensor_info info;
	struct diff_type type;
	double n;

	diff_side_tensor(d->a, c->a, &info);
	diff_type_init(&type, info.dtype);
	n = (double)(info.bytes / type.item_bytes * type.values - (m->values - m->finite));
	row->has_values = true;
	row->values = (struct diff_values){.changed = m->changed, .nan_a = m->nan_a, .nan_b = m->nan_b,
		.inf_a = m->inf_a, .inf_b = m->inf_b, .max = m->max, .rms = n > 0 ? sqrt(m->squares / n) : 0,
		.relative = m->squares > 0 ? sqrt(m->squares) / sqrt(m->squares_a) : 0};
	if (isnan(row->values.relative)) /* both sums are too large for a double */
		row->values.relative = INFINITY;
}

static bool got_worse(const struct diff_values *v) { return v->nan_b > v->nan_a || v->inf_b > v->inf_a; }

static int row_compare(const void *a, const void *b)
{
	const struct diff_row *x = a, *y = b;

	if (got_worse(&x->values) != got_worse(&y->values))
		return got_worse(&x->values) ? -1 : 1;
	if (x->values.relative != y->values.relative)
		return x->values.relative > y->values.relative ? -1 : 1;
	return x->a < y->a ? -1 : x->a > y->a;
}

/* Of tensors or of blobs; those that have values, or those that have none. */
static void rows_add(const struct diffing *d, bool blobs, bool values, struct diff *made)
{
	size_t c = 0;

	for (size_t i = 0; i < d->n; i++) {
		const struct diff_pair *p = &d->pairs[i];
		bool compared;

		for (; c < d->ncompared && d->compared[c].pair < i; c++)
			;
		compared = d->options->values && c < d->ncompared && d->compared[c].pair == i;
		if (p->what == PAIR_EQUAL || p->blob != blobs || compared != values)
			continue;
		made->rows[made->n] = (struct diff_row){.change = p->what, .blob = p->blob, .a = p->a, .b = p->b};
		if (values)
			row_values(d, &d->compared[c], &made->rows[made->n]);
		made->n++;
	}
}

/* Pairs are in the order of components. */
static int counts_make(const struct diffing *d, struct diff *made)
{
	struct load_tensor_info info;

	for (size_t i = 0; i < d->n; i++) {
		const struct diff_pair *p = &d->pairs[i];
		struct diff_count *last = made->ncounts ? &made->counts[made->ncounts - 1] : NULL;

		info.component = NULL;
		if (!p->blob)
			diff_side_tensor(p->a == DIFF_NONE ? d->b : d->a, p->a == DIFF_NONE ? p->b : p->a, &info);
		if (!last || !info.component != !last->component ||
			(last->component && strcmp(info.component, last->component) != 0)) {
			if (base_array_more(made->counts, made->ncounts) < 0)
				return -ENOMEM;
			last = &made->counts[made->ncounts++];
			*last = (struct diff_count){.component = info.component};
		}
		last->n[p->what]++;
	}
	return 0;
}

BASE_CLEANUP_DEFINE(struct diff *, diff_free)

static int rows_make(const struct diffing *d, struct diff **ret_d, struct base_error *err)
{
	base_cleanup(diff_free_p) struct diff *made = calloc(1, sizeof *made);
	size_t first;

	if (!made || !(made->rows = calloc(d->n + 1, sizeof *made->rows)) || counts_make(d, made) < 0)
		return base_no_memory(err);
	rows_add(d, false, false, made);
	first = made->n;
	rows_add(d, false, true, made);
	qsort(made->rows + first, made->n - first, sizeof *made->rows, row_compare);
	rows_add(d, true, false, made);
	*ret_d = base_steal(made);
	return 0;
}

int diff_run(const struct diff_side *a, const struct diff_side *b, const struct diff_options *options,
	struct diff **ret_d, struct base_error *err)
{
	base_cleanup(diffing_release) struct diffing d = {.a = a, .b = b, .options = options};
	int r = pairs_tensors(&d);

	if (r < 0)
		return base_no_memory(err);
	r = pairs_blobs(&d, err);
	if (r == 0 && options->component && !d.found)
		return base_error_set(err, -ENOENT, "neither side has a component %s", options->component);
	if (r == 0)
		r = pairs_decide(&d, err);
	if (r == 0)
		r = pairs_compare(&d, err);
	return r < 0 ? r : rows_make(&d, ret_d, err);
}
