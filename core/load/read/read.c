/* SPDX-License-Identifier: Apache-2.0
 *
 * read: any range of an object's row-major bytes, out of the cache.
 *
 * Two ways, by the length of the fragments, which are contiguous both in the tensor and in its cells:
 *   short ones (under LOAD_GATHER_BYTES): the range is cut into at most 2d-1 boxes whose bytes follow each other; each
 *     box is gathered into the caller's scratch piece by piece (tensor_piece_scatter with a window: one tight copy loop
 *     a piece);
 *   long ones, and blobs: the range is walked fragment by fragment; long fragments are handed out where they are in
 *     the cache, short ones (edges, inline pieces) are copied into scratch at their own place, so that neighbours there
 *     are one slice.
 *
 * For a tensor with boxes (struct load_boxes) both ways first ask the index which boxes have what is wanted; the mean
 * fragment decides between the ways.
 *
 * Scratch is laid out as the range itself: byte i of the range is at scratch + i in both ways. It is not cleared, so a
 * byte that was left out would show what another reader got before. No byte is left out:
 *   boxes      the items that pieces have of them are counted, in both passes; a sum that is not the range's is an
 *     error. No item is counted twice: the grid's pieces are disjoint, and so are the stored boxes of an open tensor
 *   fragments  each begins where the last one ended; one that is empty, or not in its piece, is an error */
#include <stdlib.h>

#include "core/base/array.h"
#include "core/base/bisect.h"
#include "core/load/read/read_internal.h"
#include "core/tensor/reshard.h"

struct read_fragment { uint64_t piece, offset, len; };

/* One request. Its memory is freed before it returns; pins go into the slices or are let go. */
struct read_request {
	struct load_object *o;
	struct load_cache *c;
	uint64_t offset, end;
	uint8_t *scratch;
	uint64_t left;                  /* items that no piece had so far, of those that a pass walks over */
	struct read_fragment *fragments; size_t nfragments, fragments_room;
	struct load_want *wants; size_t nwants, wants_room;
	struct read_fragment few_fragments[72];
	struct load_want few_wants[72];
};

static void read_request_release(struct read_request *request)
{
	if (request->fragments != request->few_fragments)
		free(request->fragments);
	if (request->wants != request->few_wants)
		free(request->wants);
}

static void *read_grow(void *items, const void *few, size_t n, size_t *room, size_t size)
{
	void *grown = malloc(2 * *room * size);

	if (!grown)
		return NULL;
	memcpy(grown, items, n * size);
	if (items != few)
		free(items);
	*room *= 2;
	return grown;
}

static bool read_add_want(struct read_request *request, uint64_t piece, uint64_t segment)
{
	if (request->nwants && request->wants[request->nwants - 1].piece == piece
		&& request->wants[request->nwants - 1].segment == segment)
		return true;
	if (request->nwants == request->wants_room) {
		struct load_want *grown = read_grow(request->wants, request->few_wants, request->nwants,
			&request->wants_room, sizeof *grown);

		if (!grown)
			return false;
		request->wants = grown;
	}
	request->wants[request->nwants++] = (struct load_want){.piece = piece, .segment = segment};
	return true;
}

static bool read_add_fragment(struct read_request *request, uint64_t piece, uint64_t offset, uint64_t len)
{
	if (request->nfragments == request->fragments_room) {
		struct read_fragment *grown = read_grow(request->fragments, request->few_fragments, request->nfragments,
			&request->fragments_room, sizeof *grown);

		if (!grown)
			return false;
		request->fragments = grown;
	}
	request->fragments[request->nfragments++] = (struct read_fragment){piece, offset, len};
	return true;
}

static int read_want_compare(const void *a, const void *b)
{
	const struct load_want *x = a, *y = b;

	if (x->piece != y->piece)
		return x->piece < y->piece ? -1 : 1;
	return (x->segment > y->segment) - (x->segment < y->segment);
}

static void read_sort_wants(struct read_request *request)
{
	bool sorted = true;

	for (size_t i = 1; i < request->nwants && sorted; i++)
		sorted = read_want_compare(&request->wants[i - 1], &request->wants[i]) < 0;
	if (!sorted)
		request->nwants = base_array_unique(request->wants, request->nwants, sizeof *request->wants,
			read_want_compare);
}

/* The bytes of a segment of a piece that this request has pinned, of which it gives `len`. NULL: it is not pinned,
 * although all passes walk the same pieces. */
static const uint8_t *read_bytes(const struct read_request *request, uint64_t piece, uint64_t segment, uint64_t len)
{
	const struct load_want key = {.piece = piece, .segment = segment};
	int64_t n;

	if (request->o->pieces[piece].inline_bytes)
		return request->o->pieces[piece].inline_bytes;
	n = base_search(i, 0, request->nwants, read_want_compare(&request->wants[i], &key));
	if (n < 0 || !request->wants[n].pin)
		return NULL;
	return load_pin_give(request->wants[n].pin, request->end - request->offset < LOAD_STREAM_BYTES ? 0 : len);
}

int load_fragment_at(const struct load_object *o, uint64_t at, uint64_t end, struct tensor_fragment *ret_f)
{
	uint64_t len;

	if (!o->boxes)
		tensor_fragment_at(&o->grid, at, end, ret_f);
	else if (!load_boxes_fragment(o, at, end, ret_f))
		return -BASE_EFORMAT;
	if (ret_f->piece >= o->npieces || ret_f->len == 0 || ret_f->len > end - at)
		return -BASE_EFORMAT;
	len = o->pieces[ret_f->piece].ref.raw_len;
	return ret_f->piece_offset <= len && ret_f->len <= len - ret_f->piece_offset ? 0 : -BASE_EFORMAT;
}

static void read_unpin(struct read_request *request)
{
	for (size_t i = 0; i < request->nwants; i++)
		load_unpin(request->wants[i].pin);
}

/* r: -ENOMEM, or -BASE_EFORMAT: the pieces contradict what was checked when the object was opened. */
static int read_failed(const struct read_request *request, int r, struct base_error *err)
{
	if (r == -ENOMEM)
		return base_no_memory(err);
	base_error_set(err, r, "bytes %llu to %llu are not each in exactly one of its pieces",
		(unsigned long long)request->offset, (unsigned long long)request->end - 1);
	return load_object_fail(request->o, r, err);
}

/* ---- short fragments: box by box ---- */

struct read_walk {
	const struct load_object *o;
	uint64_t at, end;                /* items of the range that are not in a box yet */
	struct tensor_box box; uint64_t box_first; /* its first item */
	uint64_t cursor[TENSOR_MAX_DIMS];
	bool inside;                     /* cursor is in box */
	uint64_t number;
	struct tensor_box piece, window; /* the current piece and what the box has of it */
};

static void walk_box(struct read_walk *w)
{
	w->box_first = w->at;
	w->at += tensor_box_run(&w->o->grid.shape, w->at, w->end, &w->box);
	memcpy(w->cursor, w->box.offset, sizeof w->cursor);
	w->inside = true;
}

/* Moves the cursor past the current piece, inside the box. */
static void walk_advance(struct read_walk *w)
{
	for (unsigned d = w->o->grid.shape.ndim; d-- > 0;) {
		uint64_t next = w->piece.offset[d] + w->piece.size[d];

		if (next < w->box.offset[d] + w->box.size[d]) {
			w->cursor[d] = next;
			return;
		}
		w->cursor[d] = w->box.offset[d];
	}
	w->inside = false;
}

static bool walk_next(struct read_walk *w)
{
	const struct tensor_grid *g = &w->o->grid;

	if (w->inside)
		walk_advance(w);
	if (!w->inside) {
		if (w->at == w->end)
			return false;
		walk_box(w);
	}
	w->number = tensor_piece_find(g, w->cursor);
	return tensor_piece_at(g, &w->o->whole, w->number, &w->piece) == 0 &&
		tensor_box_intersect(g->shape.ndim, &w->piece, &w->box, &w->window);
}

/* An item that an end of the range cuts is wanted, and copied, by itself. */
static int read_partial(struct read_request *request, uint64_t from, uint64_t to, bool copy)
{
	struct tensor_fragment f;

	for (; from < to; from += f.len) {
		const uint8_t *bytes;
		int r = load_fragment_at(request->o, from, to, &f);

		if (r < 0)
			return r;
		if (!copy) {
			if (!read_add_want(request, f.piece, 0))
				return -ENOMEM;
			continue;
		}
		bytes = read_bytes(request, f.piece, 0, f.len);
		if (!bytes)
			return -BASE_EFORMAT;
		memcpy(request->scratch + (from - request->offset), bytes + f.piece_offset, f.len);
	}
	return 0;
}

static int read_piece(struct read_request *request, const struct read_walk *w, uint64_t number,
	const struct tensor_box *piece, const struct tensor_box *window, bool copy)
{
	const struct load_object *o = request->o;
	uint64_t items = tensor_box_items(&o->grid.shape, window);
	const uint8_t *bytes;

	if (number >= o->npieces || items > request->left)
		return -BASE_EFORMAT;
	request->left -= items;
	if (!copy)
		return read_add_want(request, number, 0) ? 0 : -ENOMEM;
	bytes = read_bytes(request, number, 0, items * o->grid.item_bytes);
	if (!bytes)
		return -BASE_EFORMAT;
	tensor_piece_scatter(&o->grid, piece, window, bytes,
		request->scratch + (w->box_first * o->grid.item_bytes - request->offset), w->box.offset, o->stride);
	return 0;
}

/* What the current box of the walk wants of a stored box. */
struct read_stored { struct read_request *request; const struct read_walk *w; bool copy; };

static int read_stored(void *arg, size_t box)
{
	const struct read_stored *s = arg;
	const struct load_boxes *b = s->w->o->boxes;
	struct tensor_piece_window p;
	struct tensor_box stored;
	int r = 0;

	tensor_boxes_get(&b->list, box, &stored);
	for (tensor_piece_window_first(&p, &s->w->o->grid, &stored, &s->w->box); !p.done && r == 0;
		tensor_piece_window_next(&p))
		r = read_piece(s->request, s->w, b->first_piece[box] + p.number, &p.piece, &p.part, s->copy);
	return r;
}

/* Wants, or copies, every piece that has some of the items [first, last), which must all be found. */
static int read_walk(struct read_request *request, uint64_t first, uint64_t last, bool copy)
{
	struct read_walk w = {.o = request->o, .at = first, .end = last};
	int r = 0;

	request->left = last - first;
	if (!w.o->boxes)
		while (r == 0 && walk_next(&w))
			r = read_piece(request, &w, w.number, &w.piece, &w.window, copy);
	while (w.o->boxes && r == 0 && w.at < w.end) {
		walk_box(&w);
		r = tensor_box_index_find(w.o->boxes->index, &w.box, read_stored,
			&(struct read_stored){request, &w, copy});
	}
	return r == 0 && request->left ? -BASE_EFORMAT : r;
}

/* One pass over the range: the item that its beginning cuts, whole ones, the item that its end cuts. */
static int read_pass(struct read_request *request, bool copy)
{
	uint64_t item = request->o->grid.item_bytes;
	uint64_t first = base_div_up(request->offset, item), last = request->end / item;
	int r;

	if (first >= last) /* within one or two items */
		first = last;
	r = read_partial(request, request->offset, base_min(first * item, request->end), copy);
	if (r == 0)
		r = read_walk(request, first, last, copy);
	return r < 0 ? r : read_partial(request, base_max(last * item, request->offset), request->end, copy);
}

static int read_gather(struct read_request *request, struct base_error *err)
{
	int r = read_pass(request, false);

	if (r < 0)
		return read_failed(request, r, err);
	read_sort_wants(request);
	r = load_cache_pin(request->c, request->o, request->wants, request->nwants, err);
	if (r < 0)
		return r;
	r = read_pass(request, true);
	read_unpin(request);
	return r < 0 ? read_failed(request, r, err) : 0;
}

/* ---- long fragments and blobs: fragment by fragment ---- */

/* A blob is one piece of its length: load_step_blob_ref compares them. */
static int read_plan_fragments(struct read_request *request)
{
	for (uint64_t at = request->offset; at < request->end;) {
		struct tensor_fragment f = {.piece = 0, .piece_offset = at, .len = request->end - at};
		int r = request->o->blob ? 0 : load_fragment_at(request->o, at, request->end, &f);

		if (r < 0)
			return r;
		for (uint64_t done = 0; done < f.len;) {
			uint64_t from = f.piece_offset + done, segment = from / LOAD_SEGMENT_BYTES;
			uint64_t n = base_min(f.len - done, (segment + 1) * LOAD_SEGMENT_BYTES - from);

			if (!read_add_want(request, f.piece, segment) || !read_add_fragment(request, f.piece, from, n))
				return -ENOMEM;
			done += n;
		}
		at += f.len;
	}
	read_sort_wants(request);
	return 0;
}

static void read_add_slice(struct load_slices *e, const uint8_t *bytes, size_t len)
{
	struct iovec *last = e->niov ? &e->iov[e->niov - 1] : NULL;

	if (last && (const uint8_t *)last->iov_base + last->iov_len == bytes)
		last->iov_len += len;
	else
		e->iov[e->niov++] = (struct iovec){(void *)bytes, len};
}

/* Gives what is pinned: long fragments where they are, short ones in scratch. */
static int read_give(struct read_request *request, struct load_slices *e)
{
	uint8_t *to = request->scratch;

	for (size_t i = 0; i < request->nfragments; i++) {
		const struct read_fragment *f = &request->fragments[i];
		const uint8_t *bytes = read_bytes(request, f->piece, f->offset / LOAD_SEGMENT_BYTES, f->len);

		if (!bytes)
			return -BASE_EFORMAT;
		bytes += f->offset % LOAD_SEGMENT_BYTES;
		if (f->len < LOAD_GATHER_BYTES)
			bytes = memcpy(to, bytes, f->len);
		read_add_slice(e, bytes, f->len);
		to += f->len;
	}
	for (size_t i = 0; i < request->nwants; i++)
		if (request->wants[i].pin)
			e->pins[e->npins++] = request->wants[i].pin;
	return 0;
}

static int read_fragments(struct read_request *request, struct load_slices *e, struct base_error *err)
{
	int r = read_plan_fragments(request);

	if (r < 0)
		return read_failed(request, r, err);
	e->memory = malloc(request->nfragments * sizeof *e->iov + request->nwants * sizeof *e->pins);
	r = e->memory ? load_cache_pin(request->c, request->o, request->wants, request->nwants, err)
		: base_no_memory(err);
	if (r == 0) {
		e->iov = e->memory;
		e->pins = (struct load_pin **)(e->iov + request->nfragments);
		r = read_give(request, e);
		if (r == 0)
			return 0;
		read_unpin(request);
		read_failed(request, r, err);
	}
	free(e->memory);
	*e = (struct load_slices){0};
	return r;
}

/* All of it is in scratch. */
static int read_scratch(struct load_slices *e, void *scratch, size_t len, struct base_error *err)
{
	e->memory = malloc(sizeof *e->iov);
	if (!e->memory)
		return base_no_memory(err);
	e->iov = e->memory;
	e->iov[0] = (struct iovec){scratch, len};
	e->niov = 1;
	return 0;
}

int load_object_slices(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *scratch,
	struct load_slices *ret_e,
	struct base_error *err)
{
	struct read_request request;
	int r;

	*ret_e = (struct load_slices){0};
	if (offset > o->bytes || len > o->bytes - offset)
		return base_error_set(err, -EINVAL, "%s: bytes %llu + %zu are beyond its end", o->label,
			(unsigned long long)offset, len);
	if (len == 0)
		return 0;
	if (len <= LOAD_PEEK_BYTES && load_object_peek(o, c, offset, len, scratch))
		return read_scratch(ret_e, scratch, len, err);
	request.o = o;
	request.c = c;
	request.offset = offset;
	request.end = offset + len;
	request.scratch = scratch;
	request.left = request.nfragments = request.nwants = 0;
	request.fragments = request.few_fragments;
	request.wants = request.few_wants;
	request.fragments_room = BASE_COUNT(request.few_fragments);
	request.wants_room = BASE_COUNT(request.few_wants);
	if (!o->blob && o->grid.shape.ndim && o->fragment_bytes < LOAD_GATHER_BYTES
		&& o->max_piece <= LOAD_SEGMENT_BYTES) {
		r = read_gather(&request, err);
		if (r == 0)
			r = read_scratch(ret_e, scratch, len, err);
	} else {
		r = read_fragments(&request, ret_e, err);
	}
	read_request_release(&request);
	return r;
}

void load_slices_release(struct load_slices *e)
{
	for (unsigned i = 0; i < e->npins; i++)
		load_unpin(e->pins[i]);
	free(e->memory);
	*e = (struct load_slices){0};
}

/* In steps that end at multiples of 2 MiB, so that few segments are pinned at once. */
int load_object_read(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *out,
	struct base_error *err)
{
	const size_t step = 2 * LOAD_SEGMENT_BYTES;
	uint8_t *to = out;

	if (offset > o->bytes || len > o->bytes - offset)
		return base_error_set(err, -EINVAL, "%s: bytes %llu + %zu are beyond its end", o->label,
			(unsigned long long)offset, len);
	while (len) {
		size_t n = base_min(len, step - offset % step);
		struct load_slices e;
		uint8_t *at = to;
		int r = load_object_slices(o, c, offset, n, to, &e, err);

		if (r < 0)
			return r;
		for (unsigned i = 0; i < e.niov; i++) {
			if (e.iov[i].iov_base != at)
				memcpy(at, e.iov[i].iov_base, e.iov[i].iov_len);
			at += e.iov[i].iov_len;
		}
		load_slices_release(&e);
		to += n;
		offset += n;
		len -= n;
	}
	return 0;
}
