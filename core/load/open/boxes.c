/* SPDX-License-Identifier: Apache-2.0
 *
 * boxes: a tensor that several writers hold in boxes, put together when it is opened.
 *
 * The rows of all parts that have the tensor come by ascending rank. Their boxes are sorted by place; of equal ones the
 * lowest rank's stays. What stays must cover the tensor exactly, no item twice: only then some rank stored every byte
 * that a caller asks for. Their pieces are copied into one row, with packs by number in the manifest.
 *
 * Boxes along the lines of the grid (most shards, by its design) are cut into the same pieces as the whole tensor. Then
 * the pieces are put in the order of the whole, and the object is like one that a single writer stored: it is read in
 * the same way, and has the same digest. Otherwise an index finds the boxes that a range touches.
 *
 * Memory: all rows and one copy while they are gathered; then what the pieces need, and a place and an entry in the
 * index for each box. One thread; the result is read-only. */
#include <stdlib.h>

#include "core/load/open/gather_internal.h"
#include "core/load/open/step_internal.h"

void load_gather_release(struct load_gather *g)
{
	base_buf_release(&g->from);
	tensor_boxes_release(&g->list);
}

void load_boxes_free(struct load_boxes *b)
{
	if (!b)
		return;
	tensor_box_index_free(b->index);
	tensor_boxes_release(&b->list);
	free(b->first_piece);
	free(b);
}

size_t load_boxes_memory(const struct load_boxes *b)
{
	/* the index has bounds of a node for about four to eight boxes, and a number for each box */
	return b ? sizeof *b + b->list.n * (3 * sizeof(uint64_t) + 3 * b->list.ndim * sizeof(uint64_t)) : 0;
}

static int gather_memory(const struct load_gather *g)
{
	return base_no_memory(g->err);
}

static int gather_row(struct load_gather *g, uint32_t number)
{
	const struct store_row *row = &g->rows[number].row;
	struct load_gather_from from = {.row = number};
	int r = 0;

	for (; r == 0 && from.box < row->nboxes; from.box++, from.first += from.n) {
		const struct tensor_box *box = &row->boxes[from.box];

		from.n = tensor_piece_count(&g->o->grid, box);
		if (from.n > row->npieces - from.first)
			return base_error_set(g->err, -BASE_EFORMAT, "its row has fewer pieces than its boxes");
		r = load_pieces_check(g->o, box, row->pieces + from.first, from.n, g->rows[number].npacks,
			g->err);
		base_buf_append(&g->from, &from, sizeof from);
	}
	if (g->from.error)
		return gather_memory(g);
	if (r == 0 && from.first != row->npieces)
		r = base_error_set(g->err, -BASE_EFORMAT, "its row has more pieces than its boxes");
	return r;
}

/* ---- each box once, and all of the tensor ---- */

static int box_compare(const struct load_gather *g, const struct load_gather_from *x, const struct load_gather_from *y)
{
	const struct tensor_box *a = load_gather_box(g, x), *b = load_gather_box(g, y);
	unsigned ndim = g->o->grid.shape.ndim;

	for (unsigned d = 0; d < ndim; d++)
		if (a->offset[d] != b->offset[d])
			return a->offset[d] < b->offset[d] ? -1 : 1;
	for (unsigned d = 0; d < ndim; d++)
		if (a->size[d] != b->size[d])
			return a->size[d] < b->size[d] ? -1 : 1;
	return 0;
}

static int from_compare(const void *a, const void *b, void *arg)
{
	const struct load_gather_from *x = a, *y = b;
	int d = box_compare(arg, x, y);

	if (d == 0)
		d = (x->row > y->row) - (x->row < y->row);
	return d ? d : (x->box > y->box) - (x->box < y->box);
}

int load_gather_fold(struct load_gather *g)
{
	struct load_gather_from *from = load_gather_from(g);
	size_t n = g->from.len / sizeof *from, kept = 0;

	qsort_r(from, n, sizeof *from, from_compare, g);
	for (size_t i = 0; i < n; i++) {
		if (kept && box_compare(g, &from[kept - 1], &from[i]) == 0)
			continue;
		from[kept++] = from[i];
		if (tensor_boxes_add(&g->list, load_gather_box(g, &from[i])) < 0)
			return gather_memory(g);
	}
	g->from.len = kept * sizeof *from;
	return 0;
}

static uint32_t gather_rank(const struct load_gather *g, size_t box)
{
	return load_step_manifest(g->o->step)->ranks[g->rows[load_gather_from(g)[box].row].line].rank;
}

static void gather_text(const struct load_gather *g, size_t box, char text[static BOX_TEXT])
{
	tensor_box_text(g->list.ndim, load_gather_box(g, &load_gather_from(g)[box]), text, BOX_TEXT);
}

int load_gather_fault(const struct load_gather *g, int r, const struct tensor_cover *where)
{
	const struct tensor_cover fault = *where;
	char first[BOX_TEXT], second[BOX_TEXT];

	switch (r) {
	case 0:
		return 0;
	case -ERANGE:
		gather_text(g, fault.a, first);
		return base_error_set(g->err, -BASE_EFORMAT, "box %s of rank %u is not inside the tensor", first,
			gather_rank(g, fault.a));
	case -EEXIST:
		gather_text(g, fault.a, first);
		gather_text(g, fault.b, second);
		return base_error_set(g->err, -BASE_EFORMAT, "box %s of rank %u and box %s of rank %u overlap", first,
			gather_rank(g, fault.a), second, gather_rank(g, fault.b));
	case -ENOENT:
		tensor_box_text(g->list.ndim, &fault.box, first, sizeof first);
		return base_error_set(g->err, -BASE_EFORMAT, "no rank stored box %s", first);
	default:
		return base_error_set(g->err, r, "its boxes cannot be checked: %s", base_error_name(r));
	}
}

static int gather_cover(const struct load_gather *g)
{
	struct tensor_cover fault;

	return load_gather_fault(g, tensor_boxes_cover(&g->o->grid.shape, &g->list, &fault), &fault);
}

/* ---- one row of them ---- */

/* Are the pieces of the boxes those of the whole tensor? As the boxes cover it, it is enough that each piece is one. */
static bool gather_aligned(const struct load_gather *g)
{
	const struct load_object *o = g->o;
	const struct load_gather_from *from = load_gather_from(g);
	size_t len = o->grid.shape.ndim * sizeof(uint64_t);
	struct tensor_piece_iter it;
	struct tensor_box piece;

	for (size_t i = 0; i < g->list.n; i++)
		for (tensor_piece_first(&it, &o->grid, load_gather_box(g, &from[i])); !it.done; tensor_piece_next(&it))
			if (tensor_piece_at(&o->grid, &o->whole, tensor_piece_find(&o->grid, it.piece.offset),
				&piece) < 0 || memcmp(piece.offset, it.piece.offset, len) != 0 ||
				memcmp(piece.size, it.piece.size, len) != 0)
				return false;
	return true;
}

int load_gather_room(struct load_gather *g, uint8_t **ret_inlined)
{
	struct store_row *row = &g->o->row;
	uint64_t inlined = 0;

	for (size_t i = 0; i < g->list.n; i++) {
		const struct load_gather_from *from = &load_gather_from(g)[i];
		const struct store_piece *p = g->rows[from->row].row.pieces + from->first;

		row->npieces += from->n; /* no more than there are in memory */
		for (uint64_t k = 0; k < from->n; k++)
			inlined += p[k].inline_bytes ? p[k].ref.raw_len : 0;
	}
	row->memory = malloc(row->npieces * sizeof *row->pieces + inlined + 1);
	if (!row->memory)
		return gather_memory(g);
	g->o->pieces = row->pieces = row->memory;
	g->o->npieces = row->npieces;
	*ret_inlined = (uint8_t *)(row->pieces + row->npieces);
	return 0;
}

void load_gather_piece(const struct load_gather *g, const struct load_gather_from *from, uint64_t i,
	struct store_piece *to, uint8_t **inlined)
{
	const struct load_row *row = &g->rows[from->row];

	*to = row->row.pieces[from->first + i];
	if (!to->inline_bytes) {
		to->ref.pack = load_step_pack(g->o->step, row->line, to->ref.pack);
		return;
	}
	to->inline_bytes = memcpy(*inlined, to->inline_bytes, to->ref.raw_len);
	*inlined += to->ref.raw_len;
}

/* Copies the pieces of all boxes: in the order of the whole tensor, or box after box. */
static void row_fill(struct load_gather *g, bool aligned, uint8_t *inlined)
{
	struct load_object *o = g->o;
	struct tensor_piece_iter it;
	uint64_t next = 0;

	for (size_t i = 0; i < g->list.n; i++) {
		const struct load_gather_from *from = &load_gather_from(g)[i];

		if (!aligned)
			o->boxes->first_piece[i] = next;
		for (tensor_piece_first(&it, &o->grid, load_gather_box(g, from)); !it.done; tensor_piece_next(&it)) {
			uint64_t to = aligned ? tensor_piece_find(&o->grid, it.piece.offset) : next;

			next++;
			load_gather_piece(g, from, it.number, &o->row.pieces[to], &inlined);
		}
	}
}

static int boxes_make(struct load_gather *g)
{
	struct load_boxes *b = g->o->boxes = calloc(1, sizeof *b);

	if (!b)
		return gather_memory(g);
	b->list = g->list;
	g->list = (struct tensor_boxes){.ndim = b->list.ndim, .n = b->list.n};
	b->first_piece = calloc(b->list.n, sizeof *b->first_piece);
	return b->first_piece && tensor_box_index_new(&b->list, &b->index) == 0 ? 0 : gather_memory(g);
}

/* The mean fragment: about all bytes divided by the number of fragments. */
static void boxes_measure(struct load_object *o)
{
	uint64_t fragments = 0;

	for (size_t i = 0; i < o->boxes->list.n; i++) {
		struct tensor_box box;

		tensor_boxes_get(&o->boxes->list, i, &box);
		fragments += base_div_up(tensor_box_items(&o->grid.shape, &box) * o->grid.item_bytes,
			load_box_fragment_bytes(&o->grid, &box));
	}
	o->fragment_bytes = base_max(o->bytes / fragments, 1);
}

static int boxes_digest(struct load_object *o)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	const struct tensor_boxes *list = &o->boxes->list;

	base_buf_append(&b, "\3", 1);
	base_buf_put64(&b, list->n);
	for (size_t i = 0; i < 2 * list->ndim * list->n; i++)
		base_buf_put64(&b, list->pairs[i]);
	base_buf_append(&b, o->digest.bytes, sizeof o->digest.bytes);
	if (b.error)
		return -ENOMEM;
	base_sha256(b.data, b.len, &o->digest);
	return 0;
}

static int gather_finish(struct load_gather *g)
{
	struct load_object *o = g->o;
	bool aligned = gather_aligned(g);
	uint8_t *inlined;
	int r = load_gather_room(g, &inlined);

	if (r == 0 && !aligned)
		r = boxes_make(g);
	if (r < 0)
		return r;
	row_fill(g, aligned, inlined);
	r = load_step_packs(o->step, &o->packs, &o->npacks);
	if (r == 0)
		r = store_row_digest(o->pieces, o->npieces, &o->digest);
	if (r == 0 && !aligned) {
		boxes_measure(o);
		r = boxes_digest(o);
	}
	return r < 0 ? gather_memory(g) : 0;
}

int load_boxes_gather(struct load_object *o, const struct load_row *rows, size_t n, struct base_error *err)
{
	base_cleanup(load_gather_release) struct load_gather g = {.o = o, .err = err, .rows = rows,
		.list.ndim = o->grid.shape.ndim};
	int r = 0;

	for (size_t i = 0; r == 0 && i < n; i++)
		r = gather_row(&g, (uint32_t)i);
	if (r == 0)
		r = load_gather_fold(&g);
	if (r == 0)
		r = gather_cover(&g);
	return r < 0 ? r : gather_finish(&g);
}

/* ---- asking ---- */

static int fragment_found(void *arg, size_t box)
{
	*(size_t *)arg = box;
	return 1;
}

bool load_boxes_fragment(const struct load_object *o, uint64_t at, uint64_t end, struct tensor_fragment *ret_f)
{
	const struct tensor_grid *g = &o->grid;
	struct tensor_box item = {0}, box;
	uint64_t n = at / g->item_bytes;
	size_t number = 0;

	for (unsigned d = g->shape.ndim; d-- > 0; n /= g->shape.dim[d]) {
		item.offset[d] = n % g->shape.dim[d];
		item.size[d] = 1;
	}
	if (tensor_box_index_find(o->boxes->index, &item, fragment_found, &number) == 0)
		return false;
	tensor_boxes_get(&o->boxes->list, number, &box);
	tensor_fragment_in(g, &box, at, end, ret_f);
	ret_f->piece += o->boxes->first_piece[number];
	return true;
}
