/* SPDX-License-Identifier: Apache-2.0
 *
 * base_row: what a base has of a tensor in a box, gathered from the parts of the ranks that stored it.
 *
 * An item of a tensor is stored by one rank (identical boxes of several count once: the cover check of the commit). So
 * once the boxes that were found cover the wanted box, no other part has anything to add, and the gathering ends. It
 * asks in this order:
 *
 *   the line of the rank that saves     in an unchanged layout that is all: one part's head, and its chunks
 *   lines that can hold the box         by mesh and placements of the base's layout, replicas included, for of these
 *                                       each stores a span; if the layout does not record any, all lines
 *
 * the latter outwards from the line that had something the last time, because spans of replicas follow the order of the
 * tensors, and so does a save. A line that has nothing costs reading a part's head and maybe a chunk; after
 * GATHER_MISSES of them the search for one row ends. So a rank's work depends on what it stores and what changed, not
 * on the number of ranks. If a limit is reached, the order in which rows are asked for may change which pieces are
 * recognised; what is stored is right in any case.
 *
 * A piece is found by its box: an index gives the box around it, arithmetic its number there (reshard.h), and
 * then the two must be the same box. */
#include "core/save/write/base_internal.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/table.h"

#define GATHER_MISSES 64u               /* lines asked in vain */
#define GATHER_BOXES (UINT32_C(1) << 20) /* of one row */

struct gather {
	struct save_base *base;
	struct base_row *row;
	uint64_t items, have;           /* of the box that is asked for */
	uint32_t parts_room, from_room, misses;
	struct base_table by_box;       /* the row's boxes */
};

void save_base_row_free(struct base_row *row)
{
	for (uint32_t i = 0; i < row->nparts; i++)
		store_row_release(&row->parts[i].row);
	free(row->parts);
	free(row->from);
	tensor_box_index_free(row->index);
	tensor_boxes_release(&row->boxes);
	free(row);
}

/* ---- asking a row ---- */

static bool box_equal(const struct base_row *row, const struct tensor_box *a, const struct tensor_box *b)
{
	size_t len = row->boxes.ndim * sizeof a->offset[0];

	return memcmp(a->offset, b->offset, len) == 0 && memcmp(a->size, b->size, len) == 0;
}

struct find {
	const struct base_row *row;
	const struct tensor_box *box;
	uint64_t number, items;
	size_t at;
};

static int find_in_box(void *arg, size_t n)
{
	struct find *f = arg;
	struct tensor_piece_window w;
	struct tensor_box box;

	tensor_boxes_get(&f->row->boxes, n, &box);
	tensor_piece_window_first(&w, &f->row->grid, &box, f->box);
	if (w.done || !box_equal(f->row, &w.piece, f->box))
		return 0;
	f->number = w.number;
	f->at = n;
	return 1;
}

static int row_ask(const struct base_row *row, const struct tensor_box *box, int (*f)(void *arg, size_t n), void *arg)
{
	if (row->index)
		return tensor_box_index_find(row->index, box, f, arg);
	return row->boxes.n ? f(arg, 0) : 0;
}

bool save_base_row_find(const struct base_row *row, const struct tensor_box *piece, size_t *ret_box,
	uint64_t *ret_number)
{
	struct find f = {.row = row, .box = piece};

	if (row_ask(row, piece, find_in_box, &f) != 1)
		return false;
	*ret_box = f.at;
	*ret_number = f.number;
	return true;
}

static uint64_t common_items(const struct base_row *row, const struct tensor_box *a, const struct tensor_box *b)
{
	struct tensor_box both;

	return tensor_box_intersect(row->boxes.ndim, a, b, &both) ? tensor_box_items(&row->grid.shape, &both) : 0;
}

static int find_common(void *arg, size_t n)
{
	struct find *f = arg;
	struct tensor_box box;

	tensor_boxes_get(&f->row->boxes, n, &box);
	f->items += common_items(f->row, &box, f->box);
	return 0;
}

static bool row_has(const struct base_row *row, const struct tensor_box *box, uint64_t items)
{
	struct find f = {.row = row, .box = box};

	row_ask(row, box, find_common, &f);
	return f.items >= items;
}

bool save_base_row_full(const struct base_row *row)
{
	return row_has(row, &row->box, tensor_box_items(&row->grid.shape, &row->box));
}

bool save_base_row_covers(const struct base_row *row, const struct tensor_box *box)
{
	uint64_t items = tensor_box_items(&row->grid.shape, box);

	return common_items(row, &row->box, box) == items || row_has(row, box, items);
}

/* ---- adding a line's row ---- */

/* Appends the box unless it is there. 1: it was new. */
static int gather_new_box(struct gather *g, const struct tensor_box *box)
{
	struct tensor_boxes *all = &g->row->boxes;
	size_t n = all->n, len = 2 * all->ndim * sizeof *all->pairs, at = 0;
	uint32_t hash, i;

	if (base_table_reserve(&g->by_box, 1) < 0 || tensor_boxes_add(all, box) < 0)
		return -ENOMEM;
	hash = base_table_hash(all->pairs + 2 * all->ndim * n, len);
	while ((i = base_table_next(&g->by_box, hash, &at)) != BASE_TABLE_NONE)
		if (memcmp(all->pairs + 2 * all->ndim * i, all->pairs + 2 * all->ndim * n, len) == 0) {
			all->n--;
			return 0;
		}
	base_table_add(&g->by_box, hash, (uint32_t)n);
	return 1;
}

static int gather_box(struct gather *g, const struct tensor_box *box, uint32_t part, uint64_t first)
{
	struct base_row *row = g->row;
	int r = 0;

	if (tensor_box_empty(row->boxes.ndim, box) || !tensor_box_inside(&row->grid.shape, box))
		return 0;
	if (base_array_room(row->from, g->from_room, row->boxes.n + 1) < 0)
		return -ENOMEM;
	r = gather_new_box(g, box);
	if (r == 1) {
		row->from[row->boxes.n - 1] = (struct base_from){part, first};
		g->have += common_items(row, box, &row->box);
	}
	return r < 0 ? r : 0;
}

/* Takes over what the line says of the tensor. */
static int gather_add(struct gather *g, struct store_row *from, uint32_t line)
{
	struct base_row *row = g->row;
	uint64_t first = 0, n;
	int r = 0;

	if (base_array_room(row->parts, g->parts_room, (size_t)row->nparts + 1) < 0) {
		store_row_release(from);
		return -ENOMEM;
	}
	row->parts[row->nparts++] = (struct base_part){*from, g->base->lines[line].opened.packs,
		g->base->lines[line].trusted};
	row->row.trusted |= g->base->lines[line].trusted;
	for (uint32_t i = 0; r == 0 && i < from->nboxes; i++, first += n) {
		n = tensor_piece_count(&row->grid, &from->boxes[i]);
		if (n > from->npieces - first)
			break;
		r = gather_box(g, &from->boxes[i], row->nparts - 1, first);
	}
	return r;
}

/* Asks one line; 1: the box is covered, or there were misses enough. `tensor`: in the line's layout. */
static int gather_line(struct gather *g, uint32_t number, const struct store_layout *l, uint32_t tensor)
{
	struct save_base *b = g->base;
	const struct store_opened_part *line = save_base_part(b, number);
	uint64_t had = g->have;
	struct base_error why = {0};
	struct store_row row;
	int r = 0;

	if (line)
		r = store_part_read_row_cached(b->chunks, b->store, l, &line->part, line->packs,
			b->m.ranks[number].npacks, tensor, &row, &why);
	if (r < 0 && r != -ENODATA)
		save_base_unread(b, &why);
	if (line && r == 0) {
		if (row.nboxes > GATHER_BOXES - g->row->boxes.n)
			store_row_release(&row);
		else
			r = gather_add(g, &row, number);
		if (r < 0)
			return r;
	}
	if (g->have > had)
		b->near = number;
	else
		g->misses++;
	return g->have >= g->items || g->misses >= GATHER_MISSES;
}

/* ---- which lines ---- */

struct holders { const struct save_base *base; uint64_t *bits; };

static int holders_add(void *arg, uint32_t rank, const uint32_t *coordinate)
{
	struct holders *h = arg;
	uint32_t line = save_base_find_line(h->base, rank);

	(void)coordinate;
	if (line != BASE_NO_LINE)
		h->bits[line / 64] |= UINT64_C(1) << line % 64;
	return 0;
}

/* The lines of ranks that can hold some of the box, as bits; NULL: not known, any may. */
static uint64_t *gather_holders(struct gather *g, uint32_t layout, uint32_t tensor)
{
	struct save_base *b = g->base;
	base_cleanup_free struct tensor_placements *p = NULL;
	base_cleanup_free uint64_t *bits = NULL;
	struct tensor_sharding s = {.shape = g->row->grid.shape, .item_bytes = g->row->grid.item_bytes,
		.mesh = save_base_mesh(b, layout, tensor)};
	struct holders h = {.base = b};

	if (!s.mesh || store_layout_placements(b->layouts[layout].layout, tensor, &p, NULL) < 0)
		return NULL;
	s.placement = p->at;
	if (tensor_sharding_check(&s, p->n, NULL) < 0)
		return NULL;
	h.bits = bits = calloc(b->m.nranks / 64 + 1, sizeof *bits);
	if (!bits || tensor_sharding_holders(&s, &g->row->box, true, holders_add, &h) < 0)
		return NULL;
	return base_steal(bits);
}

/* Lines of the layout, outwards from the one that had something the last time. 1: enough. */
static int gather_layout(struct gather *g, uint32_t layout, uint32_t tensor)
{
	const struct save_base *b = g->base;
	base_cleanup_free uint64_t *bits = gather_holders(g, layout, tensor);
	uint32_t near = b->near, n = b->m.nranks;
	int r = 0;

	for (uint32_t away = 0; r == 0 && (away <= near || away < n - near); away++) {
		uint32_t both[2] = {near + away, near - away};

		for (unsigned i = 0; r == 0 && i < (away ? 2 : 1); i++)
			if (both[i] < n && both[i] != b->own_line && b->m.ranks[both[i]].layout == layout &&
				(!bits || bits[both[i] / 64] >> both[i] % 64 & 1))
				r = gather_line(g, both[i], b->layouts[layout].layout, tensor);
	}
	return r;
}

/* Number of the tensor in that layout of the base, if it is the same one: name, dtype, shape, grid. */
static int64_t gather_tensor(struct gather *g, uint32_t layout, const struct store_layout *l, uint32_t tensor)
{
	const struct store_layout *from = save_base_open_layout(g->base, layout);
	struct tensor_shape shape;
	uint32_t len;
	const char *name = store_layout_name(l, tensor, &len);
	int64_t n = from ? store_layout_find(from, store_layout_component(l, tensor), name, len) : -ENOENT;

	if (n < 0 || !tensor_grid_params_equal(&from->m.grid, &l->m.grid))
		return -ENOENT;
	store_layout_shape(from, (uint32_t)n, &shape);
	if (!tensor_shape_equal(&shape, &g->row->grid.shape)
		|| store_layout_dtype(from, (uint32_t)n) != store_layout_dtype(l, tensor))
		return -ENOENT;
	return n;
}

static int gather_all(struct gather *g, const struct store_layout *l, uint32_t tensor)
{
	const struct save_base *b = g->base;
	uint32_t own = b->own_line == BASE_NO_LINE ? UINT32_MAX : b->m.ranks[b->own_line].layout;
	int64_t n = own == UINT32_MAX ? -ENOENT : gather_tensor(g, own, l, tensor);
	int r = 0;

	if (n >= 0) {
		r = gather_line(g, b->own_line, b->layouts[own].layout, (uint32_t)n);
		if (r == 0)
			r = gather_layout(g, own, (uint32_t)n);
	}
	for (uint32_t i = 0; r == 0 && i < b->m.nlayouts; i++) {
		n = i == own ? -ENOENT : gather_tensor(g, i, l, tensor);
		if (n >= 0)
			r = gather_layout(g, i, (uint32_t)n);
	}
	return r;
}

struct base_row *save_base_gather(struct save_base *b, const struct store_layout *l, uint32_t tensor,
	const struct tensor_box *box)
{
	struct base_row *row = calloc(1, sizeof *row);
	struct gather g = {.base = b, .row = row};
	int r;

	if (!row)
		return NULL;
	atomic_init(&row->row.refs, 1);
	row->row.base = b;
	row->tensor = tensor;
	row->box = *box;
	store_layout_grid(l, tensor, &row->grid);
	row->boxes.ndim = row->grid.shape.ndim;
	g.items = tensor_box_items(&row->grid.shape, box);
	r = g.items ? gather_all(&g, l, tensor) : 0;
	if (r >= 0 && row->boxes.n > 1)
		r = tensor_box_index_new(&row->boxes, &row->index);
	base_table_release(&g.by_box);
	if (r >= 0)
		return row;
	save_base_row_free(row);
	return NULL;
}
