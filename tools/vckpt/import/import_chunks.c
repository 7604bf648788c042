/* SPDX-License-Identifier: Apache-2.0
 *
 * A read asks for a range of the tensor's row-major bytes. It is taken apart into boxes (at most two a dimension), each
 * box into its parts in the chunks, and such a part is read
 *
 *   straight to its place, if its bytes are contiguous there and in the file;
 *   else with everything between its first and last byte in the file, if that is little, and copied by strides;
 *   else in two halves, cut along the dimension in which its items are farthest apart. */
#include "tools/vckpt/import/import_chunks.h"

#include <string.h>

#include "core/base/array.h"
#include "core/device/gather.h"

struct import_chunks {
	struct tensor_shape shape;
	unsigned item_bytes;
	struct tensor_boxes boxes;
	struct import_chunk *at;
	size_t n;
	struct tensor_box_index *index;
};

int import_chunks_new(const struct tensor_shape *shape, unsigned item_bytes, struct import_chunks **ret_c)
{
	struct import_chunks *c = calloc(1, sizeof *c);

	if (!c)
		return -ENOMEM;
	c->shape = *shape;
	c->item_bytes = item_bytes;
	c->boxes.ndim = shape->ndim;
	*ret_c = c;
	return 0;
}

void import_chunks_free(struct import_chunks *c)
{
	if (!c)
		return;
	tensor_box_index_free(c->index);
	tensor_boxes_release(&c->boxes);
	for (size_t i = 0; i < c->n; i++)
		free(c->at[i].stride);
	free(c->at);
	free(c);
}

int import_chunks_add(struct import_chunks *c, const struct tensor_box *box, const struct import_chunk *chunk)
{
	if (base_array_more(c->at, c->n) < 0 || tensor_boxes_add(&c->boxes, box) < 0)
		return -ENOMEM;
	c->at[c->n++] = *chunk;
	return 0;
}

static int say_fault(const struct import_chunks *c, int r, const struct tensor_cover *fault, struct base_error *err)
{
	struct tensor_box a, b;
	char first[200], second[200], text[200];
	uint32_t ndim = c->shape.ndim;

	if (r != -ERANGE && r != -EEXIST && r != -ENOENT)
		return base_error_set(err, r, "its boxes cannot be put together: %s", strerror(-r));
	tensor_box_text(ndim, &fault->box, text, sizeof text);
	if (r == -ENOENT)
		return base_error_set(err, -BASE_EFORMAT, "no file has its part %s", text);
	tensor_boxes_get(&c->boxes, fault->a, &a);
	tensor_boxes_get(&c->boxes, fault->b, &b);
	tensor_box_text(ndim, &a, first, sizeof first);
	tensor_box_text(ndim, &b, second, sizeof second);
	if (r == -ERANGE)
		return base_error_set(err, -BASE_EFORMAT, "its part %s is outside of it", first);
	return base_error_set(err, -BASE_EFORMAT, "its parts %s (%s) and %s (%s) overlap in %s", first,
		c->at[fault->a].file->path, second, c->at[fault->b].file->path, text);
}

int import_chunks_finish(struct import_chunks *c, struct base_error *err)
{
	struct tensor_cover fault = {0};
	int r = tensor_boxes_cover(&c->shape, &c->boxes, &fault);

	if (r == 0)
		r = tensor_box_index_new(&c->boxes, &c->index);
	if (r == -ENOMEM)
		return base_no_memory(err);
	return r < 0 ? say_fault(c, r, &fault, err) : 0;
}

/* ---- a part in one chunk ---- */

struct part {
	uint32_t ndim;
	unsigned item_bytes;
	uint64_t size[TENSOR_MAX_DIMS];
	uint64_t from[TENSOR_MAX_DIMS], to[TENSOR_MAX_DIMS]; /* strides in the file and in memory, in bytes */
	const struct import_chunk *chunk;
	uint64_t offset; /* in the file */
	char *bytes;
};

/* Are its bytes contiguous, in the order of its items? */
static bool is_dense(const struct part *p, const uint64_t *stride)
{
	uint64_t bytes = p->item_bytes;

	for (uint32_t d = p->ndim; d-- > 0;) {
		if (p->size[d] != 1 && stride[d] != bytes)
			return false;
		bytes *= p->size[d];
	}
	return true;
}

static uint64_t part_bytes(const struct part *p)
{
	uint64_t bytes = p->item_bytes;

	for (uint32_t d = 0; d < p->ndim; d++)
		bytes *= p->size[d];
	return bytes;
}

/* In the file, from its first to its last byte. */
static uint64_t part_span(const struct part *p)
{
	uint64_t span = p->item_bytes;

	for (uint32_t d = 0; d < p->ndim; d++)
		span += (p->size[d] - 1) * p->from[d];
	return span;
}

/* The second half of a part; the first one stays. */
static struct part part_halve(struct part *p)
{
	struct part second;
	uint32_t widest = 0;
	uint64_t most = 0;

	for (uint32_t d = 0; d < p->ndim; d++)
		if (p->size[d] > 1 && p->from[d] >= most) {
			most = p->from[d];
			widest = d;
		}
	second = *p;
	p->size[widest] /= 2;
	second.size[widest] -= p->size[widest];
	second.offset += p->size[widest] * p->from[widest];
	second.bytes += p->size[widest] * p->to[widest];
	return second;
}

/* Each half has at most half of the items and one more, so this recurses at most 128 times. */
static int part_read(struct part *p, char **spare, struct base_error *err)
{
	uint64_t span = part_span(p), bytes = part_bytes(p);
	int r;

	if (is_dense(p, p->from) && is_dense(p, p->to))
		return import_file_read(p->chunk->file, p->offset, p->bytes, bytes, err);
	if (span > IMPORT_SPAN_BYTES || (span > 65536 && span / 8 > bytes)) {
		struct part second = part_halve(p);

		r = part_read(p, spare, err);
		return r < 0 ? r : part_read(&second, spare, err);
	}
	if (!*spare && !(*spare = malloc(IMPORT_SPAN_BYTES)))
		return base_no_memory_for(err, "%s", p->chunk->file->path);
	r = import_file_read(p->chunk->file, p->offset, *spare, span, err);
	if (r == 0) {
		struct device_gather g = {.from = *spare, .item_bytes = p->item_bytes, .ndim = p->ndim};

		memcpy(g.size, p->size, sizeof g.size);
		for (uint32_t d = 0; d < p->ndim; d++)
			g.stride[d] = (int64_t)p->from[d];
		if (p->from[p->ndim - 1] == p->item_bytes) { /* whole rows; a part without dimensions is dense */
			g.item_bytes *= p->size[p->ndim - 1];
			g.size[p->ndim - 1] = 1;
		}
		device_gather_part(p->bytes, p->to, &g);
	}
	return r;
}

/* ---- a box of the tensor ---- */

struct window {
	const struct import_chunks *c;
	struct tensor_box box;
	char *bytes; /* of its first item; strides are those of the whole tensor */
	char *spare;
	struct base_error *err;
};

static int window_chunk(void *arg, size_t number)
{
	struct window *w = arg;
	const struct import_chunks *c = w->c;
	const struct import_chunk *chunk = &c->at[number];
	uint32_t ndim = c->shape.ndim;
	struct tensor_box own, meet;
	struct part p = {.ndim = ndim, .item_bytes = c->item_bytes, .chunk = chunk, .offset = chunk->offset,
		.bytes = w->bytes};
	uint64_t from = 1, to = c->item_bytes;

	tensor_boxes_get(&c->boxes, number, &own);
	if (!tensor_box_intersect(ndim, &w->box, &own, &meet))
		return 0;
	for (uint32_t d = ndim; d-- > 0;) {
		p.size[d] = meet.size[d];
		p.from[d] = (chunk->stride ? chunk->stride[d] : from) * c->item_bytes;
		p.to[d] = to;
		p.offset += (meet.offset[d] - own.offset[d]) * p.from[d];
		p.bytes += (meet.offset[d] - w->box.offset[d]) * to;
		from *= own.size[d];
		to *= c->shape.dim[d];
	}
	return part_read(&p, &w->spare, w->err);
}

int import_chunks_read(const struct import_chunks *c, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	struct window w = {.c = c, .err = err};
	uint64_t at = offset / c->item_bytes, end = at + len / c->item_bytes;
	int r = 0;

	for (uint64_t first = at; r == 0 && at < end;) {
		uint64_t n = tensor_box_run(&c->shape, at, end, &w.box);

		w.bytes = (char *)bytes + (at - first) * c->item_bytes;
		r = tensor_box_index_find(c->index, &w.box, window_chunk, &w);
		at += n;
	}
	free(w.spare);
	return r;
}
