/* SPDX-License-Identifier: Apache-2.0
 *
 * manifest_cover: invariant 4 for a whole step: reads every row of every part, gathers the boxes tensor by tensor and
 * has each tensor checked (cover.c).
 *
 * Layouts may share tensors (an embedding that the first and the last stage hold): tensors are numbered over all
 * layouts by component and name, and those that are called the same must look the same.
 *
 * A whole tensor's first row is noted in place; boxes are gathered only for tensors that need it. So a step of one
 * writer costs a bit a tensor, whatever its size; one of many 80 bytes a box of a matrix, all boxes of all ranks at
 * once.
 *
 * Parts are read several at once (spread.c), each by one thread; a row is added under the lock. In which order they
 * come makes no difference to what is refused, nor, but for which two of several ranks are named, to the sentence. */
#include "core/commit/check/manifest_check.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/commit/check/cover.h"
#include "core/step/open.h"
#include "core/step/part.h"
#include "core/storage/spread.h"

struct cover_tensor { uint32_t layout, tensor; };           /* where its name and shape are */
/* whole: by this rank, with this digest */
struct cover_state { bool whole; uint32_t rank; struct base_digest digest; };
/* pairs: index; UINT64_MAX: whole */
struct cover_row { uint32_t tensor, rank; uint64_t pairs; struct base_digest digest; };

struct cover_gather {
	struct store *s;
	const struct proto_manifest *m;
	struct base_error *err;
	struct store_layout **layouts;
	uint32_t **numbers;                 /* [layout][tensor]: number over all layouts */
	struct cover_tensor *tensors; struct cover_state *states; uint32_t ntensors;
	struct check_blob_names *blobs;     /* NULL: not asked */
	pthread_mutex_t lock;               /* of states, rows and pairs while parts are read */
	struct base_buf rows, pairs;        /* struct cover_row; u64 */
};
struct cover_part { struct cover_gather *g; struct base_error *err; uint32_t rank, layout; }; /* being read */

static void gather_release(struct cover_gather *g)
{
	for (uint32_t i = 0; i < g->m->nlayouts; i++) {
		if (g->layouts)
			store_layout_free(g->layouts[i]);
		if (g->numbers)
			free(g->numbers[i]);
	}
	free(g->layouts);
	free(g->numbers);
	free(g->tensors);
	free(g->states);
	base_buf_release(&g->rows);
	base_buf_release(&g->pairs);
	pthread_mutex_destroy(&g->lock);
}

/* ---- tensors over all layouts ---- */

static int tensor_order(const void *pa, const void *pb, void *arg)
{
	const struct cover_tensor *a = pa, *b = pb;
	const struct cover_gather *g = arg;
	uint32_t a_len, b_len;
	const char *a_name = store_layout_name(g->layouts[a->layout], a->tensor, &a_len),
		   *b_name = store_layout_name(g->layouts[b->layout], b->tensor, &b_len);
	int c = strcmp(store_layout_component(g->layouts[a->layout], a->tensor),
		store_layout_component(g->layouts[b->layout], b->tensor));

	if (c == 0)
		c = memcmp(a_name, b_name, a_len < b_len ? a_len : b_len);
	return c ? c : (a_len > b_len) - (a_len < b_len);
}

static void tensor_name(const struct cover_gather *g, const struct cover_tensor *t, char name[static 256])
{
	uint32_t len;
	const char *from = store_layout_name(g->layouts[t->layout], t->tensor, &len);

	len = (uint32_t)store_layout_shown(from, len);
	memcpy(name, from, len);
	name[len] = 0;
}

static bool tensor_same(const struct cover_gather *g, const struct cover_tensor *a, const struct cover_tensor *b)
{
	const struct proto_layout *x = &g->layouts[a->layout]->m, *y = &g->layouts[b->layout]->m;
	struct tensor_shape s, t;

	store_layout_shape(g->layouts[a->layout], a->tensor, &s);
	store_layout_shape(g->layouts[b->layout], b->tensor, &t);
	return tensor_shape_equal(&s, &t) && x->tensors[a->tensor].dtype == y->tensors[b->tensor].dtype &&
		tensor_grid_params_equal(&x->grid, &y->grid);
}

/* "ranks 0, 1, 2, 3 and 4 more": those of the layout. */
static void advice_ranks(const struct cover_gather *g, uint32_t layout, struct base_buf *b)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < g->m->nranks; i++)
		if (g->m->ranks[i].layout == layout && n++ < 4)
			base_buf_printf(b, "%s%u", n > 1 ? ", " : "", g->m->ranks[i].rank);
	if (n > 4)
		base_buf_printf(b, " and %u more", n - 4);
}

/* The lowest rank of a layout. */
static uint32_t rank_of(const struct cover_gather *g, uint32_t layout)
{
	for (uint32_t i = 0; i < g->m->nranks; i++)
		if (g->m->ranks[i].layout == layout)
			return g->m->ranks[i].rank;
	return UINT32_MAX;
}

/* "of ranks 0, 2 it is float32 [3, 4]" */
static void said_text(const struct cover_gather *g, const struct cover_tensor *t, struct base_buf *b)
{
	struct tensor_shape shape;

	store_layout_shape(g->layouts[t->layout], t->tensor, &shape);
	base_buf_append_text(b, "of ranks ");
	advice_ranks(g, t->layout, b);
	base_buf_printf(b, " it is %s [", tensor_dtype_name(store_layout_dtype(g->layouts[t->layout], t->tensor)));
	for (uint32_t d = 0; d < shape.ndim; d++)
		base_buf_printf(b, "%s%llu", d ? ", " : "", (unsigned long long)shape.dim[d]);
	base_buf_append_text(b, "]");
}

static int tensor_disagreed(const struct cover_gather *g, const struct cover_tensor *x, const struct cover_tensor *y)
{
	bool later = rank_of(g, y->layout) < rank_of(g, x->layout);
	const struct cover_tensor *first = later ? y : x, *second = later ? x : y;
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	char name[256];

	tensor_name(g, x, name);
	said_text(g, first, &b);
	base_buf_append_text(&b, ", ");
	said_text(g, second, &b);
	return base_error_set(g->err, -BASE_EFORMAT, "tensor \"%s/%s\" is not the same on all ranks: %.*s",
		store_layout_component(g->layouts[x->layout], x->tensor), name, (int)b.len, (const char *)b.data);
}

static int layout_load(void *arg, uint32_t i, struct base_error *err)
{
	struct cover_gather *g = arg;
	int r = store_open_layout(g->s, g->m, i, &g->layouts[i], err);

	if (r < 0)
		return r;
	g->numbers[i] = calloc((size_t)g->layouts[i]->m.ntensors + 1, sizeof **g->numbers);
	return g->numbers[i] ? 0 : base_no_memory(err);
}

static int layouts_load(struct cover_gather *g, uint64_t *ret_total)
{
	int r;

	g->layouts = calloc((size_t)g->m->nlayouts + 1, sizeof *g->layouts);
	g->numbers = calloc((size_t)g->m->nlayouts + 1, sizeof *g->numbers);
	if (!g->layouts || !g->numbers)
		return base_no_memory(g->err);
	r = storage_spread(g->m->nlayouts, layout_load, g, g->err);
	*ret_total = 0;
	for (uint32_t i = 0; i < g->m->nlayouts && r == 0; i++)
		*ret_total += g->layouts[i]->m.ntensors;
	return r;
}

static int layouts_number(struct cover_gather *g, uint64_t total)
{
	uint32_t n = 0, count = 0;

	if (total > PROTO_LAYOUT_MAX_TENSORS)
		return base_error_set(g->err, -BASE_ELIMIT, "more than %u tensors in one step",
			PROTO_LAYOUT_MAX_TENSORS);
	g->tensors = calloc((size_t)total + 1, sizeof *g->tensors);
	g->states = calloc((size_t)total + 1, sizeof *g->states);
	if (!g->tensors || !g->states)
		return base_no_memory(g->err);
	for (uint32_t i = 0; i < g->m->nlayouts; i++)
		for (uint32_t t = 0; t < g->layouts[i]->m.ntensors; t++)
			g->tensors[count++] = (struct cover_tensor){i, t};
	if (g->m->nlayouts > 1)
		qsort_r(g->tensors, count, sizeof *g->tensors, tensor_order, g);
	for (uint32_t i = 0; i < count; i++) {
		struct cover_tensor t = g->tensors[i];

		if (n == 0 || tensor_order(&g->tensors[n - 1], &t, g) != 0)
			g->tensors[n++] = t;
		else if (!tensor_same(g, &g->tensors[n - 1], &t))
			return tensor_disagreed(g, &g->tensors[n - 1], &t);
		g->numbers[t.layout][t.tensor] = n - 1;
	}
	g->ntensors = n;
	return 0;
}

/* Loads the layouts, numbers their tensors. */
static int layouts_gather(struct cover_gather *g)
{
	uint64_t total = 0;
	int r;

	pthread_mutex_init(&g->lock, NULL);
	r = layouts_load(g, &total);
	return r < 0 ? r : layouts_number(g, total);
}

int check_manifest_layouts(struct store *s, const struct proto_manifest *m, struct base_error *err)
{
	base_cleanup(gather_release) struct cover_gather g = {.s = s, .m = m, .err = err};

	return layouts_gather(&g);
}

/* ---- which ranks list a tensor ---- */

/* Of one layout: its number of the tensor, or -1. */
static int64_t advice_find(const struct cover_gather *g, uint32_t layout, uint32_t number)
{
	for (uint32_t t = 0; t < g->layouts[layout]->m.ntensors; t++)
		if (g->numbers[layout][t] == number)
			return t;
	return -1;
}

static void advice_placement(const struct proto_layout *l, const struct proto_layout_tensor *t, struct base_buf *b)
{
	const struct proto_mesh *mesh = t->mesh ? &l->meshes[t->mesh - 1] : NULL;

	if (mesh && t->placement)
		base_buf_printf(b, " as %.100s over ", l->placements[t->placement - 1]);
	for (uint32_t d = 0; mesh && t->placement && d < mesh->ndims; d++)
		base_buf_printf(b, "%s%s=%u", d ? "," : "", mesh->dim_names[d], mesh->dim_sizes[d]);
}

/* Most often ranks list a tensor alike that not all of them hold, or that differs between them: says what each listed.
 * The sentence so far stays; what does not fit behind it is cut. */
static int advise(const struct cover_gather *g, uint32_t number, int code, struct base_error *err)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	size_t len = err ? strlen(err->text) : 0;
	unsigned shown = 0;

	if (!err || code != -BASE_EFORMAT || g->m->world < 2)
		return code;
	for (uint32_t i = 0; i < g->m->nlayouts && shown < 3; i++) {
		int64_t t = advice_find(g, i, number);

		if (t < 0)
			continue;
		base_buf_append_text(&b, shown++ ? "; ranks " : "; it is listed by ranks ");
		advice_ranks(g, i, &b);
		advice_placement(&g->layouts[i]->m, &g->layouts[i]->m.tensors[t], &b);
	}
	base_buf_append_text(&b, "; if other ranks hold it, or hold other parts of it, name them: mesh= and placements "
		"of the tensor, or mesh= of the save");
	if (!b.error)
		snprintf(err->text + len, sizeof err->text - len, "%.*s", (int)b.len, (const char *)b.data);
	return code;
}

/* ---- rows ---- */

static int row_differs(const struct cover_part *p, uint32_t number, uint32_t other)
{
	char name[256];

	tensor_name(p->g, &p->g->tensors[number], name);
	base_error_set(p->err, -BASE_EFORMAT, "tensor \"%s\": ranks %u and %u stored different bytes for all of it",
		name, (uint32_t)base_min(other, p->rank), (uint32_t)base_max(other, p->rank));
	return advise(p->g, number, -BASE_EFORMAT, p->err);
}

/* The lowest rank's counts. */
static int gather_whole(struct cover_part *p, uint32_t number, const struct store_row *row)
{
	struct cover_state *state = &p->g->states[number], mine = {true, p->rank, row->digest}, was;

	pthread_mutex_lock(&p->g->lock);
	was = *state;
	if (!was.whole || p->rank < was.rank)
		*state = mine;
	pthread_mutex_unlock(&p->g->lock);
	return !was.whole || base_digest_equal(&was.digest, &mine.digest) ? 0 : row_differs(p, number, was.rank);
}

static int gather_box(struct cover_part *p, uint32_t ndim, const struct tensor_box *box, struct cover_row line)
{
	struct cover_gather *g = p->g;
	int r;

	pthread_mutex_lock(&g->lock);
	line.pairs = g->pairs.len / sizeof(uint64_t);
	for (uint32_t d = 0; d < ndim; d++) {
		base_buf_append(&g->pairs, &box->offset[d], sizeof(uint64_t));
		base_buf_append(&g->pairs, &box->size[d], sizeof(uint64_t));
	}
	base_buf_append(&g->rows, &line, sizeof line);
	r = g->rows.error || g->pairs.error ? -ENOMEM : 0;
	pthread_mutex_unlock(&g->lock);
	return r < 0 ? base_no_memory(p->err) : 0;
}

static int gather_boxes(struct cover_part *p, uint32_t number, const struct store_row *row)
{
	const struct store_piece *pieces = row->pieces;
	struct tensor_grid grid;
	int r = 0;

	store_layout_grid(p->g->layouts[p->layout], row->tensor, &grid);
	for (uint32_t i = 0; i < row->nboxes && r == 0; i++) {
		uint64_t n = tensor_piece_count(&grid, &row->boxes[i]);
		struct cover_row line = {.tensor = number, .rank = p->rank};

		r = store_row_digest(pieces, n, &line.digest);
		pieces += n;
		r = r < 0 ? base_no_memory(p->err) : gather_box(p, grid.shape.ndim, &row->boxes[i], line);
	}
	return r;
}

static int gather_row(void *arg, const struct store_row *row)
{
	struct cover_part *p = arg;
	uint32_t number = p->g->numbers[p->layout][row->tensor];

	return row->whole ? gather_whole(p, number, row) : gather_boxes(p, number, row);
}

static int gather_part(void *arg, uint32_t line, struct base_error *err)
{
	struct cover_gather *g = arg;
	const struct proto_manifest_rank *k = &g->m->ranks[line];
	struct cover_part reading = {g, err, k->rank, k->layout};
	base_cleanup(store_opened_part_release) struct store_opened_part o = {0};
	int r = store_open_part(g->s, g->m, line, &o, err);

	if (r == 0 && g->blobs && check_blob_names_add(g->blobs, &o.part) < 0)
		return base_no_memory(err);
	for (uint32_t i = 0; r == 0 && i < o.part.nchunks; i++)
		r = store_part_read_chunk(g->s, g->layouts[k->layout], &o.part, o.packs, o.npacks, i, gather_row,
			&reading, err);
	return r;
}

/* ---- tensors ---- */

static int row_order(const void *pa, const void *pb)
{
	const struct cover_row *a = pa, *b = pb;

	return a->tensor != b->tensor ? (a->tensor > b->tensor) - (a->tensor < b->tensor)
				      : (a->pairs > b->pairs) - (a->pairs < b->pairs);
}

/* One tensor: its n gathered boxes, and the whole one if there is. */
static int tensor_check(const struct cover_gather *g, uint32_t number, const struct cover_row *rows, size_t n)
{
	const struct cover_state *state = &g->states[number];
	base_cleanup_free struct check_cover_box *boxes = NULL;
	uint64_t whole[2 * TENSOR_MAX_DIMS] = {0};
	struct tensor_shape shape;
	char name[256];

	if (state->whole && n == 0)
		return 0;
	boxes = calloc(n + 1, sizeof *boxes);
	if (!boxes)
		return base_no_memory(g->err);
	tensor_name(g, &g->tensors[number], name);
	store_layout_shape(g->layouts[g->tensors[number].layout], g->tensors[number].tensor, &shape);
	for (uint32_t d = 0; d < shape.ndim; d++)
		whole[2 * d + 1] = shape.dim[d];
	for (size_t i = 0; i < n; i++)
		boxes[i] = (struct check_cover_box){
			(const uint64_t *)g->pairs.data + rows[i].pairs, rows[i].rank, rows[i].digest};
	if (state->whole)
		boxes[n++] = (struct check_cover_box){whole, state->rank, state->digest};
	return advise(g, number, check_cover_boxes(&shape, name, boxes, n, g->err), g->err);
}

static int tensors_check(struct cover_gather *g)
{
	struct cover_row *rows = (struct cover_row *)g->rows.data;
	size_t n = g->rows.len / sizeof *rows, at = 0, end;
	int r = 0;

	if (n)
		qsort(rows, n, sizeof *rows, row_order);
	for (uint32_t t = 0; t < g->ntensors && r == 0; t++, at = end) {
		for (end = at; end < n && rows[end].tensor == t; end++)
			;
		r = tensor_check(g, t, n ? rows + at : NULL, end - at);
	}
	return r;
}

static int parts_check(struct store *s, const struct proto_manifest *m, uint64_t *ret_tensors,
	struct check_blob_names *blobs, struct base_error *err)
{
	base_cleanup(gather_release) struct cover_gather g = {.s = s, .m = m, .err = err, .blobs = blobs};
	int r = layouts_gather(&g);

	if (r == 0)
		r = storage_spread(m->nranks, gather_part, &g, err);
	if (r == 0)
		r = tensors_check(&g);
	if (r == 0 && ret_tensors)
		*ret_tensors = g.ntensors;
	return r;
}

int check_manifest_cover(struct store *s, const struct proto_manifest *m, uint64_t *ret_tensors,
	struct base_error *err)
{
	return parts_check(s, m, ret_tensors, NULL, err);
}

int check_manifest_finish(struct store *s, struct proto_manifest *m, struct base_buf *ret_body,
	struct base_digest *ret_digest, struct base_error *err)
{
	base_cleanup(check_blob_names_release) struct check_blob_names blobs;
	size_t before = ret_body->len;
	int r;

	check_blob_names_init(&blobs);
	r = parts_check(s, m, &m->tensors, s->info.list_2 ? &blobs : NULL, err);
	if (r < 0)
		return r;
	if (s->info.list_2 && check_blob_names_set(&blobs, m) < 0)
		return base_no_memory(err);
	r = proto_manifest_encode(m, ret_body);
	m->names_blobs = false; /* they go with `blobs` */
	m->blobs = NULL;
	m->nblobs = 0;
	if (r < 0)
		return base_error_set(err, r, "the manifest cannot be made: %s", base_error_name(r));
	base_digest_of(ret_body->data + before, ret_body->len - before, ret_digest);
	return 0;
}
