/* SPDX-License-Identifier: Apache-2.0
 *
 * box: a box of a tensor, or a whole blob, straight into the caller's memory. Unlike read.c nothing goes through the
 * cache: whoever asks for boxes wants each of them once, and of a piece all that the box has of it, whatever order its
 * bytes would have in a file. Each piece that meets the box is read whole and checked in memory of the call's own, and
 * what the box has of it copied to its place; pieces come in storage order, so that a pack is read forwards.
 *
 * Of a tensor with boxes (struct load_boxes) the index says which of these the wanted one meets; they are disjoint and
 * cover the tensor, so every item comes exactly once. */
#include <stdlib.h>

#include "core/load/load_internal.h"
#include "core/tensor/reshard.h"

/* One request; `pack` is the one read last, kept while pieces follow each other in it. */
struct box_read {
	const struct load_object *o;
	const struct tensor_box *box;
	uint8_t *data;
	const uint64_t *stride;
	uint8_t *piece;                  /* room for the longest one */
	struct store_pack *pack;
	uint32_t pack_number;
	struct base_error *err;
};

static int box_pack(struct box_read *read, uint32_t number)
{
	struct store *s = load_step_store(read->o->step);
	int r;

	if (read->pack && read->pack_number == number)
		return 0;
	store_pack_put(s, base_steal(read->pack));
	if (number >= read->o->npacks)
		return base_error_set(read->err, -BASE_EFORMAT, "pack %u of %u", number, read->o->npacks);
	r = store_pack_get(s, read->o->packs[number], &read->pack, read->err);
	if (r < 0)
		read->pack = NULL;
	read->pack_number = number;
	return r;
}

/* The bytes of a piece, checked, into `out`. */
static int box_piece(struct box_read *read, uint64_t piece, void *out)
{
	const struct store_object_ref *ref = &read->o->pieces[piece].ref;
	const struct load_step_info *info = load_step_info(read->o->step);
	int r = box_pack(read, ref->pack);

	if (r == 0)
		r = store_object_read(read->pack, ref, out, read->err);
	if (r < 0)
		return base_error_prefix(read->err, r, "%s/%llu: %s: piece %llu", info->run,
			(unsigned long long)info->step, read->o->label, (unsigned long long)piece);
	return 0;
}

/* What the request wants of one box that was stored, whose pieces are numbered from `first`. */
static int box_stored(struct box_read *read, const struct tensor_box *stored, uint64_t first)
{
	const struct tensor_grid *g = &read->o->grid;
	struct tensor_piece_window w;

	for (tensor_piece_window_first(&w, g, stored, read->box); !w.done; tensor_piece_window_next(&w)) {
		const void *bytes = read->o->pieces[first + w.number].inline_bytes;
		int r = bytes ? 0 : box_piece(read, first + w.number, read->piece);

		if (r < 0)
			return r;
		tensor_piece_scatter(g, &w.piece, &w.part, bytes ? bytes : read->piece, read->data, read->box->offset,
			read->stride);
	}
	return 0;
}

static int box_found(void *arg, size_t number)
{
	struct box_read *read = arg;
	const struct load_boxes *b = read->o->boxes;
	struct tensor_box stored;

	tensor_boxes_get(&b->list, number, &stored);
	return box_stored(read, &stored, b->first_piece[number]);
}

int load_object_read_box(struct load_object *o, const struct tensor_box *box, void *data, const uint64_t *stride,
	struct base_error *err)
{
	struct box_read read = {.o = o, .box = box, .data = data, .stride = stride, .err = err};
	base_cleanup_free uint8_t *piece = NULL;
	int r;

	if (o->blob || !tensor_box_inside(&o->grid.shape, box))
		return base_error_set(err, -EINVAL, "%s: the box is not inside the tensor", o->label);
	if (tensor_box_empty(o->grid.shape.ndim, box))
		return 0;
	read.piece = piece = malloc(o->max_piece + 1);
	if (!piece)
		return base_no_memory_for(err, "%s: a piece of %llu bytes", o->label,
			(unsigned long long)o->max_piece);
	r = o->boxes ? tensor_box_index_find(o->boxes->index, box, box_found, &read) : box_stored(&read, &o->whole, 0);
	store_pack_put(load_step_store(o->step), read.pack);
	return r;
}

int load_blob_read(struct load_object *o, void *data, struct base_error *err)
{
	struct box_read read = {.o = o, .err = err};
	int r = 0;

	if (!o->blob)
		return base_error_set(err, -EINVAL, "%s is not a blob", o->label);
	if (o->npieces)
		r = box_piece(&read, 0, data);
	store_pack_put(load_step_store(o->step), read.pack);
	return r;
}
