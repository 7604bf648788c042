/* SPDX-License-Identifier: Apache-2.0
 *
 * read: any range of an object's row-major bytes, out of the cache.
 *
 * Two ways, by the length of the fragments, which are contiguous both in the tensor and in its cells:
 *   short ones (under LOAD_GATHER_BYTES): the range is cut into at most 2d-1 boxes whose bytes lie one after another;
 *     each box is gathered into the caller's scratch piece by piece (tensor_piece_scatter with a window: one tight copy
 *     loop a piece);
 *   long ones, and blobs: the range is walked fragment by fragment; long fragments are handed out where they lie in
 *     the cache, short ones (edges, inline pieces) copied into scratch at their own place, so that neighbours there
 *     are one slice.
 *
 * Of a tensor with boxes (struct load_boxes) both ways first ask the index which of these have what is wanted; the
 * mean fragment decides between the ways.
 *
 * Scratch is laid out as the range itself: byte i of the range has its place at scratch + i in both ways. */
#include <stdlib.h>

#include "core/base/bisect.h"
#include "core/load/load_internal.h"
#include "core/tensor/reshard.h"

struct read_fragment { uint64_t piece, offset, len; };

/* What one request needs; memory is its own and goes before it returns (pins go into the slices or are let go). */
struct read_request {
	struct load_object *o;
	struct load_cache *c;
	uint64_t offset, end;
	uint8_t *scratch;
	struct read_fragment *fragments; size_t nfragments, fragments_room;
	struct load_want *wants; size_t nwants, wants_room;
	struct read_fragment few_fragments[72];
	struct load_want few_wants[72];
};

static void read_request_release(struct read_request *r)
{
	if (r->fragments != r->few_fragments)
		free(r->fragments);
	if (r->wants != r->few_wants)
		free(r->wants);
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

static bool read_add_want(struct read_request *r, uint64_t piece, uint64_t window)
{
	if (r->nwants && r->wants[r->nwants - 1].piece == piece && r->wants[r->nwants - 1].window == window)
		return true;
	if (r->nwants == r->wants_room) {
		struct load_want *grown = read_grow(r->wants, r->few_wants, r->nwants, &r->wants_room, sizeof *grown);

		if (!grown)
			return false;
		r->wants = grown;
	}
	r->wants[r->nwants++] = (struct load_want){.piece = piece, .window = window};
	return true;
}

static bool read_add_fragment(struct read_request *r, uint64_t piece, uint64_t offset, uint64_t len)
{
	if (r->nfragments == r->fragments_room) {
		struct read_fragment *grown = read_grow(r->fragments, r->few_fragments, r->nfragments,
			&r->fragments_room, sizeof *grown);

		if (!grown)
			return false;
		r->fragments = grown;
	}
	r->fragments[r->nfragments++] = (struct read_fragment){piece, offset, len};
	return true;
}

static int read_want_compare(const void *a, const void *b)
{
	const struct load_want *x = a, *y = b;

	if (x->piece != y->piece)
		return x->piece < y->piece ? -1 : 1;
	return (x->window > y->window) - (x->window < y->window);
}

static void read_sort_wants(struct read_request *r)
{
	size_t kept = 0;
	bool sorted = true;

	for (size_t i = 1; i < r->nwants && sorted; i++)
		sorted = read_want_compare(&r->wants[i - 1], &r->wants[i]) < 0;
	if (sorted)
		return;
	qsort(r->wants, r->nwants, sizeof *r->wants, read_want_compare);
	for (size_t i = 0; i < r->nwants; i++)
		if (kept == 0 || read_want_compare(&r->wants[kept - 1], &r->wants[i]) != 0)
			r->wants[kept++] = r->wants[i];
	r->nwants = kept;
}

/* The bytes of a window of a piece that this request has pinned. */
static const uint8_t *read_bytes(const struct read_request *r, uint64_t piece, uint64_t window)
{
	const struct load_want key = {.piece = piece, .window = window};
	int64_t n;

	if (r->o->pieces[piece].inline_bytes)
		return r->o->pieces[piece].inline_bytes;
	n = base_search(i, 0, r->nwants, read_want_compare(&r->wants[i], &key));
	return n < 0 ? NULL : load_pin_bytes(r->wants[n].pin); /* never NULL: both passes walk the same pieces */
}

static void read_fragment_at(const struct load_object *o, uint64_t at, uint64_t end, struct tensor_fragment *ret_f)
{
	if (o->boxes)
		load_boxes_fragment(o, at, end, ret_f);
	else
		tensor_fragment_at(&o->grid, at, end, ret_f);
}

static void read_unpin(struct read_request *r)
{
	for (size_t i = 0; i < r->nwants; i++)
		load_unpin(r->wants[i].pin);
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

/* The largest box that begins at item `at`, whose items lie one after another, and that does not pass `end`. */
static void walk_box(struct read_walk *w)
{
	const struct load_object *o = w->o;
	const struct tensor_shape *s = &o->grid.shape;
	unsigned d = s->ndim - 1, item = o->grid.item_bytes;
	uint64_t n;

	for (unsigned i = 0; i < s->ndim; i++) {
		w->box.offset[i] = w->at / (o->stride[i] / item) % s->dim[i];
		w->box.size[i] = 1;
	}
	while (d > 0 && w->box.offset[d] == 0 && w->end - w->at >= o->stride[d - 1] / item)
		d--;
	n = base_min((w->end - w->at) / (o->stride[d] / item), s->dim[d] - w->box.offset[d]);
	w->box.size[d] = n;
	for (unsigned i = d + 1; i < s->ndim; i++)
		w->box.size[i] = s->dim[i];
	w->box_first = w->at;
	w->at += n * (o->stride[d] / item);
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
	if (tensor_piece_at(g, &w->o->whole, w->number, &w->piece) < 0)
		return false;
	for (unsigned d = 0; d < g->shape.ndim; d++) {
		uint64_t from = base_max(w->piece.offset[d], w->box.offset[d]);

		w->window.offset[d] = from;
		w->window.size[d] = base_min(w->piece.offset[d] + w->piece.size[d],
			w->box.offset[d] + w->box.size[d]) - from;
	}
	return true;
}

/* Whole items only: the one that an end of the range cuts is copied by itself. */
static void read_copy_partial(struct read_request *r, uint64_t from, uint64_t to)
{
	while (from < to) {
		struct tensor_fragment f;

		read_fragment_at(r->o, from, to, &f);
		memcpy(r->scratch + (from - r->offset), read_bytes(r, f.piece, 0) + f.piece_offset, f.len);
		from += f.len;
	}
}

static bool read_want_partial(struct read_request *r, uint64_t from, uint64_t to)
{
	while (from < to) {
		struct tensor_fragment f;

		read_fragment_at(r->o, from, to, &f);
		if (!read_add_want(r, f.piece, 0))
			return false;
		from += f.len;
	}
	return true;
}

static int read_piece(struct read_request *r, const struct read_walk *w, uint64_t number,
	const struct tensor_box *piece, const struct tensor_box *window, bool copy)
{
	const struct load_object *o = r->o;

	if (!copy)
		return read_add_want(r, number, 0) ? 0 : -ENOMEM;
	tensor_piece_scatter(&o->grid, piece, window, read_bytes(r, number, 0),
		r->scratch + (w->box_first * o->grid.item_bytes - r->offset), w->box.offset, o->stride);
	return 0;
}

/* What the current box of the walk wants of a box that was stored. */
struct read_stored { struct read_request *r; const struct read_walk *w; bool copy; };

static int read_stored(void *arg, size_t box)
{
	const struct read_stored *s = arg;
	const struct load_boxes *b = s->w->o->boxes;
	struct tensor_piece_window p;
	struct tensor_box stored;
	int rc = 0;

	tensor_boxes_get(&b->list, box, &stored);
	for (tensor_piece_window_first(&p, &s->w->o->grid, &stored, &s->w->box); !p.done && rc == 0;
		tensor_piece_window_next(&p))
		rc = read_piece(s->r, s->w, b->first_piece[box] + p.number, &p.piece, &p.part, s->copy);
	return rc;
}

/* Wants, or copies, every piece that the walk comes to. Only wanting can fail: -ENOMEM. */
static int read_walk(struct read_request *r, struct read_walk *w, bool copy)
{
	int rc = 0;

	if (!w->o->boxes) {
		while (rc == 0 && walk_next(w))
			rc = read_piece(r, w, w->number, &w->piece, &w->window, copy);
		return rc;
	}
	while (rc == 0 && w->at < w->end) {
		walk_box(w);
		rc = tensor_box_index_find(w->o->boxes->index, &w->box, read_stored,
			&(struct read_stored){r, w, copy});
	}
	return rc;
}

static int read_gather(struct read_request *r, struct base_error *err)
{
	struct load_object *o = r->o;
	unsigned item = o->grid.item_bytes;
	uint64_t first = base_div_up(r->offset, item), last = r->end / item;
	struct read_walk w = {.o = o, .at = first, .end = last};
	int rc;

	if (first >= last) { /* within one or two items */
		first = last = r->end / item;
		w.at = w.end = 0;
	}
	if (!read_want_partial(r, r->offset, base_min(first * item, r->end)))
		return base_no_memory(err);
	if (read_walk(r, &w, false) < 0)
		return base_no_memory(err);
	if (!read_want_partial(r, base_max(last * item, r->offset), r->end))
		return base_no_memory(err);
	read_sort_wants(r);
	rc = load_cache_pin(r->c, o, r->wants, r->nwants, err);
	if (rc < 0)
		return rc;
	read_copy_partial(r, r->offset, base_min(first * item, r->end));
	w = (struct read_walk){.o = o, .at = first, .end = last};
	read_walk(r, &w, true);
	read_copy_partial(r, base_max(last * item, r->offset), r->end);
	read_unpin(r);
	return 0;
}

/* ---- long fragments and blobs: fragment by fragment ---- */

static bool read_plan_fragments(struct read_request *r)
{
	for (uint64_t at = r->offset; at < r->end;) {
		struct tensor_fragment f = {.piece = 0, .piece_offset = at, .len = r->end - at};

		if (!r->o->blob)
			read_fragment_at(r->o, at, r->end, &f);
		for (uint64_t done = 0; done < f.len;) {
			uint64_t from = f.piece_offset + done, window = from / LOAD_WINDOW_BYTES;
			uint64_t n = base_min(f.len - done, (window + 1) * LOAD_WINDOW_BYTES - from);

			if (!read_add_want(r, f.piece, window) || !read_add_fragment(r, f.piece, from, n))
				return false;
			done += n;
		}
		at += f.len;
	}
	read_sort_wants(r);
	return true;
}

static void read_add_slice(struct load_slices *e, const uint8_t *bytes, size_t len)
{
	struct iovec *last = e->niov ? &e->iov[e->niov - 1] : NULL;

	if (last && (const uint8_t *)last->iov_base + last->iov_len == bytes)
		last->iov_len += len;
	else
		e->iov[e->niov++] = (struct iovec){(void *)bytes, len};
}

static int read_fragments(struct read_request *r, struct load_slices *e, struct base_error *err)
{
	uint8_t *to = r->scratch;
	int rc = read_plan_fragments(r) ? 0 : base_no_memory(err);

	if (rc == 0) {
		e->memory = malloc(r->nfragments * sizeof *e->iov + r->nwants * sizeof *e->pins);
		rc = e->memory ? load_cache_pin(r->c, r->o, r->wants, r->nwants, err) : base_no_memory(err);
	}
	if (rc < 0) {
		free(base_steal(e->memory));
		return rc;
	}
	e->iov = e->memory;
	e->pins = (struct load_pin **)(e->iov + r->nfragments);
	for (size_t i = 0; i < r->nfragments; i++) {
		const struct read_fragment *f = &r->fragments[i];
		const uint8_t *bytes = read_bytes(r, f->piece,
			f->offset / LOAD_WINDOW_BYTES) + f->offset % LOAD_WINDOW_BYTES;

		if (f->len < LOAD_GATHER_BYTES)
			bytes = memcpy(to, bytes, f->len);
		read_add_slice(e, bytes, f->len);
		to += f->len;
	}
	for (size_t i = 0; i < r->nwants; i++)
		if (r->wants[i].pin)
			e->pins[e->npins++] = r->wants[i].pin;
	return 0;
}

int load_object_slices(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *scratch,
	struct load_slices *ret_e,
	struct base_error *err)
{
	struct read_request r;
	int rc;

	*ret_e = (struct load_slices){0};
	if (offset > o->bytes || len > o->bytes - offset)
		return base_error_set(err, -EINVAL, "%s: bytes %llu + %zu are beyond its end", o->label,
			(unsigned long long)offset, len);
	if (len == 0)
		return 0;
	r.o = o;
	r.c = c;
	r.offset = offset;
	r.end = offset + len;
	r.scratch = scratch;
	r.nfragments = r.nwants = 0;
	r.fragments = r.few_fragments;
	r.wants = r.few_wants;
	r.fragments_room = BASE_COUNT(r.few_fragments);
	r.wants_room = BASE_COUNT(r.few_wants);
	if (!o->blob && o->grid.shape.ndim && o->fragment_bytes < LOAD_GATHER_BYTES
		&& o->max_piece <= LOAD_WINDOW_BYTES) {
		ret_e->memory = malloc(sizeof *ret_e->iov);
		rc = ret_e->memory ? read_gather(&r, err) : base_no_memory(err);
		if (rc == 0) {
			ret_e->iov = ret_e->memory;
			ret_e->iov[0] = (struct iovec){scratch, len};
			ret_e->niov = 1;
		} else {
			free(base_steal(ret_e->memory));
		}
	} else {
		rc = read_fragments(&r, ret_e, err);
	}
	read_request_release(&r);
	return rc;
}

void load_slices_release(struct load_slices *e)
{
	for (unsigned i = 0; i < e->npins; i++)
		load_unpin(e->pins[i]);
	free(e->memory);
	*e = (struct load_slices){0};
}

/* By steps that end at multiples of 2 MiB, so that few windows are pinned at once. */
int load_object_read(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *out,
	struct base_error *err)
{
	const size_t step = 2 * LOAD_WINDOW_BYTES;
	uint8_t *to = out;

	if (offset > o->bytes || len > o->bytes - offset)
		return base_error_set(err, -EINVAL, "%s: bytes %llu + %zu are beyond its end", o->label,
			(unsigned long long)offset, len);
	while (len) {
		size_t n = base_min(len, step - offset % step);
		struct load_slices e;
		uint8_t *at = to;
		int rc = load_object_slices(o, c, offset, n, to, &e, err);

		if (rc < 0)
			return rc;
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
