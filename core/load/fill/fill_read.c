/* SPDX-License-Identifier: Apache-2.0
 *
 * fill_read: one piece, read, checked and placed.
 *
 * If some box wants all of a piece, and its memory has the bytes in the stored order, they are read and decoded
 * straight to their place. Else the blocks that all boxes together want are read into the thread's room, and the part
 * of each box is copied from there. */
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/load/fill/fill_work.h"
#include "core/load/fill/place.h"
#include "core/tensor/reshard.h"

void fill_worker_release(struct fill_worker *w)
{
	if (w->pack)
		store_pack_put(load_step_store(w->f->step), w->pack);
	free(w->room);
	free(w->burst);
	free(w->checks);
	free(w->blocks);
}

void fill_need_boxes(const struct load_fill *f, const struct fill_need *need, struct tensor_box *ret_piece,
	struct tensor_box *ret_part)
{
	const struct load_object *o = need_object(f, need);
	struct tensor_box stored;

	tensor_boxes_get(&o->boxes->list, need->stored, &stored);
	tensor_piece_at(&o->grid, &stored, o->numbers[need->piece], ret_piece);
	tensor_box_intersect(o->grid.shape.ndim, ret_piece, &f->boxes[need->box].box, ret_part);
}

uint8_t *fill_need_place(const struct load_fill *f, const struct fill_need *need)
{
	const struct load_object *o = need_object(f, need);
	const struct fill_box *b = &f->boxes[need->box];
	size_t len = o->grid.shape.ndim * sizeof(uint64_t);
	struct tensor_box piece, part;
	uint8_t *at = b->data;

	if (!place_is_plain(b))
		return NULL;
	fill_need_boxes(f, need, &piece, &part);
	if (memcmp(piece.size, part.size, len) != 0 || !tensor_piece_lies(&o->grid, &piece, b->stride))
		return NULL;
	for (unsigned d = 0; d < o->grid.shape.ndim; d++)
		at += (piece.offset[d] - b->box.offset[d]) * b->stride[d];
	return at;
}

uint8_t *fill_group_place(const struct load_fill *f, size_t first, size_t end)
{
	uint8_t *place = NULL;

	for (size_t i = first; i < end && !place; i++)
		place = fill_need_place(f, &f->needs[i]);
	return place;
}

bool fill_group_is_whole(const struct load_fill *f, size_t first, size_t end)
{
	struct tensor_box piece, part;
	bool whole = false;

	for (size_t i = first; i < end && !whole; i++) {
		const struct tensor_shape *s = &need_object(f, &f->needs[i])->grid.shape;

		fill_need_boxes(f, &f->needs[i], &piece, &part);
		whole = tensor_box_items(s, &piece) == tensor_box_items(s, &part);
	}
	return whole;
}

int fill_pack(struct fill_worker *w, uint32_t number)
{
	struct store *s = load_step_store(w->f->step);
	int r;

	if (w->pack && w->pack_number == number)
		return 0;
	if (w->pack)
		store_pack_put(s, base_steal(w->pack));
	if (number >= w->f->npacks)
		return base_error_set(&w->err, -BASE_EFORMAT, "pack %u of %u", number, w->f->npacks);
	r = store_pack_get(s, w->f->packs[number], &w->pack, &w->err);
	if (r < 0)
		w->pack = NULL;
	w->pack_number = number;
	return r;
}

int fill_room(struct fill_worker *w, uint64_t len)
{
	if (len > w->room_bytes) {
		free(w->room);
		w->room = malloc(len);
		w->room_bytes = w->room ? len : 0;
	}
	if (!w->room)
		return base_no_memory_for(&w->err, "a piece of %llu bytes", (unsigned long long)len);
	return 0;
}

/* Unmarks all blocks of a piece. */
static int blocks_clear(struct fill_worker *w, uint64_t len)
{
	size_t words = base_div_up(base_block_count(len), 64);

	if (base_array_room(w->blocks, w->blocks_room, words) < 0)
		return base_no_memory_for(&w->err, "a piece of %llu bytes", (unsigned long long)len);
	memset(w->blocks, 0, words * sizeof *w->blocks);
	return 0;
}

static int block_mark(void *arg, uint64_t offset, uint64_t len)
{
	uint64_t *blocks = arg;

	for (uint64_t b = offset / BASE_BLOCK_BYTES; b <= (offset + len - 1) / BASE_BLOCK_BYTES; b++)
		blocks[b / 64] |= UINT64_C(1) << b % 64;
	return 0;
}

static bool block_marked(const uint64_t *blocks, uint64_t b) { return blocks[b / 64] >> b % 64 & 1; }

int fill_wanted_runs(struct fill_worker *w, size_t first, size_t end,
	int (*f)(void *arg, uint64_t first, uint64_t n), void *arg)
{
	uint64_t n = base_block_count(need_ref(w->f, &w->f->needs[first])->raw_len), from = 0, to;
	int r = blocks_clear(w, need_ref(w->f, &w->f->needs[first])->raw_len);

	for (size_t i = first; r == 0 && i < end; i++) {
		struct tensor_box piece, part;

		fill_need_boxes(w->f, &w->f->needs[i], &piece, &part);
		tensor_piece_ranges(&need_object(w->f, &w->f->needs[i])->grid, &piece, &part, block_mark, w->blocks);
	}
	for (; r == 0 && from < n; from = to) {
		bool wanted = block_marked(w->blocks, from);

		for (to = from + 1; to < n && block_marked(w->blocks, to) == wanted;)
			to++;
		if (wanted)
			r = f(arg, from, to - from);
	}
	return r;
}

struct room_run { struct fill_worker *w; const struct pack_object_ref *ref; };

/* Each block to its place in the room. */
static int room_read(void *arg, uint64_t first, uint64_t n)
{
	const struct room_run *run = arg;

	return pack_object_read_blocks(run->w->pack, run->ref, first, n, run->w->room + first * BASE_BLOCK_BYTES,
		&run->w->err);
}

static int piece_wanted(struct fill_worker *w, size_t first, size_t end, const struct pack_object_ref *ref)
{
	int r = fill_room(w, ref->raw_len);

	return r < 0 ? r : fill_wanted_runs(w, first, end, room_read, &(struct room_run){w, ref});
}

int fill_piece_whole(struct fill_worker *w, const struct pack_object_ref *ref, uint8_t *to)
{
	struct base_digest digest;
	int r = pack_object_read(w->pack, ref, to, &w->err);

	if (r < 0 || !(w->f->flags & LOAD_FILL_REHASH))
		return r;
	base_digest_of(to, ref->raw_len, &digest);
	if (base_digest_equal(&digest, &ref->digest))
		return 0;
	return base_error_set(&w->err, -BASE_EDAMAGED, "pack %s, object at offset %llu: its bytes are not those of its "
		"digest", pack_name(w->pack), (unsigned long long)ref->offset);
}

/* The bytes of the piece as far as they are wanted. */
static int piece_read(struct fill_worker *w, size_t first, size_t end, uint8_t *place, const uint8_t **ret_bytes)
{
	const struct fill_need *need = &w->f->needs[first];
	const struct pack_object_ref *ref = need_ref(w->f, need);
	int r = fill_pack(w, need->pack);

	if (r < 0)
		return r;
	if (!place && !(w->f->flags & LOAD_FILL_REHASH)) {
		r = piece_wanted(w, first, end, ref);
		*ret_bytes = w->room;
		return r;
	}
	if (!place)
		r = fill_room(w, ref->raw_len);
	*ret_bytes = place ? place : w->room;
	return r < 0 ? r : fill_piece_whole(w, ref, place ? place : w->room);
}

static void piece_place(struct load_fill *f, const struct fill_need *need, const uint8_t *bytes)
{
	const struct load_object *o = need_object(f, need);
	const struct fill_box *b = &f->boxes[need->box];
	struct tensor_box piece, part;

	fill_need_boxes(f, need, &piece, &part);
	if (place_is_plain(b))
		tensor_piece_scatter_past(&o->grid, &piece, &part, bytes, b->data, b->box.offset, b->stride);
	else
		place_part(f, b, &o->grid, &piece, &part, bytes);
}

static void piece_count(struct load_fill *f, size_t first, size_t end)
{
	uint64_t bytes = 0;

	for (size_t i = first; i < end; i++) {
		const struct load_object *o = need_object(f, &f->needs[i]);
		struct tensor_box piece, part;

		fill_need_boxes(f, &f->needs[i], &piece, &part);
		bytes += tensor_box_items(&o->grid.shape, &part) * o->grid.item_bytes;
	}
	atomic_fetch_add_explicit(&f->placed, bytes, memory_order_relaxed);
	atomic_fetch_add_explicit(&f->pieces, 1, memory_order_relaxed);
}

void fill_place(struct load_fill *f, size_t first, size_t end, const uint8_t *bytes, const uint8_t *place)
{
	for (size_t i = first; i < end; i++)
		if (!place || fill_need_place(f, &f->needs[i]) != place)
			piece_place(f, &f->needs[i], bytes);
	piece_count(f, first, end);
}

int fill_piece_failed(struct fill_worker *w, const struct fill_need *need, int r)
{
	const struct load_object *o = need_object(w->f, need);
	unsigned long long number = o->numbers[need->piece];
	struct tensor_box stored;
	char text[800];

	tensor_boxes_get(&o->boxes->list, need->stored, &stored);
	if (tensor_box_items(&o->grid.shape, &stored) == tensor_box_items(&o->grid.shape, &o->whole)) {
		base_error_prefix(&w->err, r, "piece %llu", number);
	} else {
		tensor_box_text(o->grid.shape.ndim, &stored, text, sizeof text);
		base_error_prefix(&w->err, r, "piece %llu of box %s", number, text);
	}
	return load_object_fail(o, r, &w->err);
}

int fill_piece(struct fill_worker *w, size_t first, size_t end)
{
	const struct fill_need *needs = w->f->needs;
	const uint8_t *bytes = need_object(w->f, &needs[first])->pieces[needs[first].piece].inline_bytes;
	uint8_t *place = bytes ? NULL : fill_group_place(w->f, first, end);

	if (!bytes) {
		int r = piece_read(w, first, end, place, &bytes);

		if (r < 0)
			return fill_piece_failed(w, &needs[first], r);
	}
	fill_place(w->f, first, end, bytes, place);
	return 0;
}
