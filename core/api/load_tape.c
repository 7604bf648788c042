/* SPDX-License-Identifier: Apache-2.0
 *
 * load_tape: what was declared, until the load starts (api_load_internal.h). */
#include <string.h>

#include "core/api/api_load_internal.h"
#include "core/base/array.h"

bool load_tape_next(const struct vckpt_load *load, size_t *at, struct load_entry *ret_entry)
{
	const uint64_t *head = load->tape + *at;

	if (*at >= load->ntape)
		return false;
	*ret_entry = (struct load_entry){.head = head, .tensor = head[0], .nboxes = head[1], .ndim = (uint32_t)head[2],
		.kind = (uint32_t)head[3]};
	*at += LOAD_TAPE_HEAD + ret_entry->nboxes * load_box_words(ret_entry->ndim);
	return true;
}

/* ---- writing ---- */

/* What one holding has, and what of it is wanted, in coordinates of the destination. */
struct tape_writer {
	struct vckpt_load *load;
	const struct load_holding *h;
	const struct load_slice *slice;  /* NULL: coordinates stay the destination's */
	struct tensor_box window;
	uint64_t n;                      /* boxes written */
};

static void tape_translate(const struct load_slice *s, const struct tensor_box *part, const int64_t *stride,
	uint64_t *to)
{
	for (uint32_t d = 0; d < s->ndim; d++) {
		uint32_t k = s->dim[d];
		bool one = k == TENSOR_MAX_DIMS;

		to[d] = s->from[d] + (one ? 0 : part->offset[k] - s->window.offset[k]);
		to[s->ndim + d] = one ? 1 : part->size[k];
		to[2 * s->ndim + d] = one ? 0 : (uint64_t)stride[k];
	}
}

static int tape_box(struct tape_writer *w, const struct tensor_shard_box *at)
{
	uint32_t ndim = w->h->shape.ndim, words = w->slice ? w->slice->ndim : ndim;
	int64_t from, stride[TENSOR_MAX_DIMS];
	struct vckpt_load *load = w->load;
	struct tensor_box part;
	uint64_t *to;

	if (!tensor_box_intersect(ndim, &at->box, &w->window, &part))
		return 0;
	if (base_array_room(load->tape, load->tape_room, load->ntape + load_box_words(words)) < 0)
		return -ENOMEM;
	to = load->tape + load->ntape;
	tensor_shard_memory(at, ndim, &w->h->local, w->h->item_bytes, w->h->t->strides, &from, stride);
	for (uint32_t d = 0; d < ndim; d++)
		from += (int64_t)(part.offset[d] - at->box.offset[d]) * stride[d];
	*to++ = (uint64_t)(uintptr_t)w->h->t->data + (uint64_t)from;
	if (w->slice)
		tape_translate(w->slice, &part, stride, to);
	for (uint32_t d = 0; d < ndim && !w->slice; d++) {
		to[d] = part.offset[d];
		to[ndim + d] = part.size[d];
		to[2 * ndim + d] = (uint64_t)stride[d];
	}
	load->ntape += load_box_words(words);
	w->n++;
	return 0;
}

/* What the rank holds of w->window. */
static int tape_boxes(struct tape_writer *w)
{
	const struct load_holding *h = w->h;
	struct tensor_shard_list list;
	struct tensor_shard_iter it;
	int r = 0;

	if (tensor_box_empty(h->shape.ndim, &w->window))
		return 0;
	if (h->t->flags & VCKPT_TENSOR_BOXES) {
		for (tensor_shard_list_first(&list, &h->boxes); r == 0 && !list.done; tensor_shard_list_next(&list))
			r = tape_box(w, &list.at);
	} else if (!h->shard.absent && tensor_shard_items(&h->shard)) {
		for (tensor_shard_first(&it, &h->shard, &w->window); r == 0 && !it.done; tensor_shard_next(&it))
			r = tape_box(w, &it.at);
	}
	return r;
}

/* Room for a head, which is written when the boxes are known. */
static int tape_begin(struct vckpt_load *load, size_t *ret_head)
{
	*ret_head = load->ntape;
	if (base_array_room(load->tape, load->tape_room, load->ntape + LOAD_TAPE_HEAD) < 0)
		return -ENOMEM;
	load->ntape += LOAD_TAPE_HEAD;
	return 0;
}

static void tape_end(const struct tape_writer *w, size_t head, uint32_t tensor, uint32_t kind)
{
	uint64_t *to = w->load->tape + head;

	to[0] = tensor;
	to[1] = w->n;
	to[2] = w->slice ? w->slice->ndim : w->h->shape.ndim;
	to[3] = kind | w->h->t->dtype | (w->h->t->flags & VCKPT_TENSOR_DEVICE ? LOAD_TAPE_DEVICE : 0);
}

int load_tape_slice(struct vckpt_load *load, uint32_t tensor, const struct load_holding *h,
	const struct load_slice *slice)
{
	struct tape_writer w = {load, h, slice, slice->window, 0};
	size_t head;
	int r = tape_begin(load, &head);

	if (r == 0)
		r = tape_boxes(&w);
	if (r == 0)
		tape_end(&w, head, tensor, 0);
	return r;
}

/* Below and above the window in each dimension, where those before it lie in the window. */
int load_tape_rest(struct vckpt_load *load, uint32_t tensor, const struct load_holding *h,
	const struct tensor_box *window)
{
	struct tape_writer w = {load, h, NULL, {{0}, {0}}, 0};
	struct tensor_box rest;
	size_t head;
	int r = tape_begin(load, &head);

	tensor_box_whole(&h->shape, &rest);
	for (uint32_t d = 0; r == 0 && d < h->shape.ndim; d++) {
		uint64_t end = window->offset[d] + window->size[d];

		w.window = rest;
		w.window.size[d] = window->offset[d];
		r = tape_boxes(&w);
		w.window.offset[d] = end;
		w.window.size[d] = h->shape.dim[d] - end;
		if (r == 0)
			r = tape_boxes(&w);
		rest.offset[d] = window->offset[d];
		rest.size[d] = window->size[d];
	}
	if (r == 0)
		tape_end(&w, head, tensor, LOAD_TAPE_ZEROS);
	return r;
}

/* ---- reading ---- */

static int tape_add(struct vckpt_load *load, const struct load_entry *e, const uint64_t *words, size_t *n, size_t *room,
	struct base_error *err)
{
	const struct load_fill_memory memory = {.data = (void *)(uintptr_t)words[0],
		.stride = words + 1 + 2 * (size_t)e->ndim, .dtype = (enum tensor_dtype)(e->kind & LOAD_TAPE_DTYPE),
		.device = e->kind & LOAD_TAPE_DEVICE};
	struct tensor_shape size = {.ndim = e->ndim};
	struct tensor_box box = {0};
	int r;

	memcpy(box.offset, words + 1, e->ndim * sizeof *words);
	memcpy(box.size, words + 1 + e->ndim, e->ndim * sizeof *words);
	memcpy(size.dim, box.size, sizeof size.dim);
	if (e->kind & LOAD_TAPE_ZEROS)
		return load_fill_zero(load->fill, (uint32_t)e->tensor, &size, &memory) < 0 ? base_no_memory(err) : 0;
	r = load_fill_add_to(load->fill, (uint32_t)e->tensor, &box, &memory, err);
	if (r < 0)
		return r;
	if (base_array_room(load->tensors, *room, *n + 1) < 0)
		return base_no_memory(err);
	load->tensors[(*n)++] = (uint32_t)e->tensor;
	return 0;
}

int load_fill_tape(struct vckpt_load *load, struct base_error *err)
{
	size_t nboxes = 0, room = 0;
	struct load_entry e;
	int r = 0;

	for (size_t at = 0; r == 0 && load_tape_next(load, &at, &e);)
		for (uint64_t i = 0; r == 0 && i < e.nboxes; i++)
			r = tape_add(load, &e, e.head + LOAD_TAPE_HEAD + i * load_box_words(e.ndim), &nboxes, &room,
				err);
	return r;
}
