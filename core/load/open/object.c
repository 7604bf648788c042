/* SPDX-License-Identifier: Apache-2.0
 *
 * object: an opened tensor or blob: where its pieces are. A tensor's row is checked by its chunk's digest; then every
 * piece must have the length that the grid gives it, so that readers may compute offsets from the grid. If the lowest
 * rank that has the tensor holds only boxes of it, the boxes of all ranks are gathered (boxes.c). */
#include <stdio.h>
#include <stdlib.h>

#include "core/base/plural.h"
#include "core/load/open/rows_internal.h"
#include "core/load/open/step_internal.h"

static void object_free(struct load_object *o)
{
	load_boxes_free(o->boxes);
	store_row_release(&o->row);
	free(o->numbers);
	load_step_unref(o->step);
	free(o->label);
	free(o);
}

BASE_CLEANUP_DEFINE(struct load_object *, load_object_unref)

static struct load_object *object_new(struct load_step *step)
{
	struct load_object *o = calloc(1, sizeof *o);

	if (!o)
		return NULL;
	atomic_init(&o->refs, 1);
	o->step = load_step_ref(step);
	o->line = LOAD_LINE_NONE;
	return o;
}

int load_object_fail(const struct load_object *o, int r, struct base_error *err)
{
	return load_step_failed(o->step, r, o->label ? o->label : "object", err);
}

uint64_t load_box_fragment_bytes(const struct tensor_grid *g, const struct tensor_box *box)
{
	uint64_t bytes = g->item_bytes;

	for (unsigned d = g->shape.ndim; d-- > 0;) {
		uint64_t size = base_min(g->edge[d], box->size[d]);

		bytes *= size;
		if (size < g->shape.dim[d])
			break;
	}
	return bytes;
}

static void object_measure(struct load_object *o)
{
	uint64_t stride = o->grid.item_bytes;

	for (unsigned d = o->grid.shape.ndim; d-- > 0;) {
		o->stride[d] = stride;
		stride *= o->grid.shape.dim[d];
	}
	o->fragment_bytes = load_box_fragment_bytes(&o->grid, &o->whole);
}

int load_pieces_check(struct load_object *o, const struct tensor_box *box, const struct store_piece *pieces,
	uint64_t npieces, uint32_t npacks, struct base_error *err)
{
	struct tensor_piece_iter it;

	if (npieces != tensor_piece_count(&o->grid, box))
		return base_error_set(err, -BASE_EFORMAT, "its row has %llu %s, its shape %llu",
			(unsigned long long)npieces, base_plural(npieces, "piece", "pieces"),
			(unsigned long long)tensor_piece_count(&o->grid, box));
	for (tensor_piece_first(&it, &o->grid, box); !it.done; tensor_piece_next(&it)) {
		const struct store_piece *p = &pieces[it.number];
		uint64_t len = tensor_box_items(&o->grid.shape, &it.piece) * o->grid.item_bytes;

		if (p->ref.raw_len != len || (!p->inline_bytes && len && p->ref.pack >= npacks))
			return base_error_set(err, -BASE_EFORMAT, "piece %llu does not fit its box",
				(unsigned long long)it.number);
		o->max_piece = base_max(o->max_piece, len);
	}
	return 0;
}

/* A tensor without items: what a writer of the whole tensor would have stored. */
static int object_nothing(struct load_object *o)
{
	o->one.ref.kind = PACK_OBJECT_PIECE;
	o->one.ref.pack = UINT32_MAX;
	o->one.inline_bytes = (const uint8_t *)"";
	o->one.base = STORE_PIECE_NO_BASE;
	base_digest_of("", 0, &o->one.ref.digest);
	base_xxh128_of(load_step_store(o->step)->info.seed, "", 0, &o->one.xxh);
	o->pieces = &o->one;
	o->npieces = 1;
	return store_row_digest(o->pieces, 1, &o->digest);
}

/* The row of the lowest rank that has the tensor, if it has all of it; else those of all ranks, put together. */
static int object_row(struct load_object *o, uint32_t tensor, struct base_error *err)
{
	base_cleanup(load_question_release) struct load_question q = {.tensor = tensor, .grid = &o->grid};
	const struct store_opened_part *part;
	int r = load_rows_ask(o->step, &q, 1, NULL, err);

	if (r == 0 && q.r < 0)
		r = base_error_set(err, q.r, "%s", q.why);
	if (r < 0)
		return r;
	if (q.nrows == 0)
		return o->bytes ? base_error_set(err, -BASE_EFORMAT, "no part has a row of it") : object_nothing(o);
	if (!q.rows[0].whole)
		return load_boxes_gather(o, q.rows, q.nrows, err);
	r = load_step_part(o->step, q.rows[0].line, &part, err);
	if (r < 0)
		return r;
	o->row = q.rows[0].row;
	q.rows[0].row = (struct store_row){0};
	o->packs = part->packs;
	o->line = q.rows[0].line;
	o->npacks = part->npacks;
	o->pieces = o->row.pieces;
	o->npieces = o->row.npieces;
	o->digest = o->row.digest;
	return load_pieces_check(o, &o->whole, o->pieces, o->npieces, o->npacks, err);
}

/* The digests of the pieces do not cover dtype and shape; the tensor's own does. */
static int object_digest(struct load_object *o, enum tensor_dtype dtype)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;

	base_buf_append(&b, "\4", 1);
	base_buf_put64(&b, dtype);
	base_buf_put64(&b, o->grid.shape.ndim);
	for (uint32_t d = 0; d < o->grid.shape.ndim; d++)
		base_buf_put64(&b, o->grid.shape.dim[d]);
	base_buf_append(&b, o->digest.bytes, sizeof o->digest.bytes);
	if (b.error)
		return -ENOMEM;
	base_sha256(b.data, b.len, &o->digest);
	return 0;
}

int load_object_new(struct load_step *step, uint32_t tensor, struct load_object **ret_o, struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *o = NULL;
	struct load_tensor_info info;
	uint32_t i;
	const struct store_layout *l;

	if (tensor >= load_step_tensor_count(step))
		return base_error_set(err, -ENOENT, "no tensor %u", tensor);
	load_step_tensor_info(step, tensor, &info);
	o = object_new(step);
	if (!o || asprintf(&o->label, "tensor %s/%.*s", info.component, (int)base_min(info.name_len, 400),
		info.name) < 0)
		return base_no_memory(err);
	l = load_step_layout(step, tensor, &i);
	store_layout_grid(l, i, &o->grid);
	tensor_box_whole(&o->grid.shape, &o->whole);
	o->bytes = info.bytes;
	object_measure(o);
	*ret_o = base_steal(o);
	return 0;
}

int load_tensor_open(struct load_step *step, uint32_t tensor, struct load_object **ret_o, struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *o = NULL;
	struct load_tensor_info info;
	int r = load_object_new(step, tensor, &o, err);

	if (r < 0)
		return r;
	load_step_tensor_info(step, tensor, &info);
	r = object_row(o, tensor, err);
	if (r == 0 && object_digest(o, info.dtype) < 0)
		r = base_no_memory(err);
	if (r < 0)
		return load_object_fail(o, r, err);
	*ret_o = base_steal(o);
	return 0;
}

static int blob_open(struct load_step *step, const struct step_blob *b, struct load_object **ret_o,
	struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *o = object_new(step);
	struct load_blob_info info;
	int r;

	load_step_blob_look(step, b, &info);
	if (!o || asprintf(&o->label, "blob %.400s", info.name) < 0)
		return base_no_memory(err);
	o->blob = true;
	o->bytes = info.bytes;
	o->digest = info.digest;
	r = load_step_blob_ref(step, b, &o->one.ref, &o->packs, &o->npacks, err);
	if (r < 0)
		return load_object_fail(o, r, err);
	o->one.base = STORE_PIECE_NO_BASE;
	o->pieces = &o->one;
	o->npieces = o->bytes ? 1 : 0;
	o->max_piece = o->bytes;
	*ret_o = base_steal(o);
	return 0;
}

int load_blob_open(struct load_step *step, uint32_t blob, struct load_object **ret_o, struct base_error *err)
{
	int r = load_step_blobs(step, err);

	if (r < 0)
		return r;
	if (blob >= load_step_blob_count(step))
		return base_error_set(err, -ENOENT, "no blob %u", blob);
	return blob_open(step, load_step_blob_at(step, blob), ret_o, err);
}

int load_blob_open_named(struct load_step *step, const char *name, int64_t rank, struct load_blob_info *ret_info,
	struct load_object **ret_o, struct base_error *err)
{
	struct step_blob b;
	int r = load_step_blob_find(step, name, rank, &b, err);

	if (r <= 0)
		return r;
	if (ret_info)
		load_step_blob_look(step, &b, ret_info);
	r = blob_open(step, &b, ret_o, err);
	return r < 0 ? r : 1;
}

struct load_object *load_object_ref(struct load_object *o)
{
	atomic_fetch_add_explicit(&o->refs, 1, memory_order_relaxed);
	return o;
}

void load_object_unref(struct load_object *o)
{
	if (o && atomic_fetch_sub_explicit(&o->refs, 1, memory_order_acq_rel) == 1)
		object_free(o);
}

uint64_t load_object_bytes(const struct load_object *o) { return o->bytes; }
const struct base_digest *load_object_digest(const struct load_object *o) { return &o->digest; }
const struct tensor_grid *load_object_grid(const struct load_object *o) { return o->blob ? NULL : &o->grid; }
uint64_t load_object_piece_count(const struct load_object *o) { return o->npieces; }
const struct store_piece *load_object_piece(const struct load_object *o, uint64_t piece) { return &o->pieces[piece]; }
size_t load_object_memory(const struct load_object *o)
{
	return sizeof *o + (o->blob ? 0 : o->npieces * (sizeof *o->pieces + 16)) + load_boxes_memory(o->boxes);
}
