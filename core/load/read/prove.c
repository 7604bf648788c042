/* SPDX-License-Identifier: Apache-2.0
 *
 * prove: piece by piece. The items of a piece are read run by run (a run is contiguous in the tensor), row-major; then
 * they are put in stored order and hashed. Memory: a piece, twice; for a blob 1 MiB. */
#include "core/load/read/prove.h"

#include <inttypes.h>
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/load/read/read_internal.h"

struct prove {
	const struct load_object *o;
	load_prove_read read;
	void *arg;
	struct base_error *err;
	uint8_t *rows, *stored;          /* a piece, row-major and in stored order */
};

static void prove_release(struct prove *p)
{
	free(p->rows);
	free(p->stored);
}

/* From which dimension on the piece is contiguous in the tensor, and the bytes of one such run. */
static unsigned prove_run(const struct prove *p, const struct tensor_box *piece, uint64_t *ret_len)
{
	const struct tensor_shape *s = &p->o->grid.shape;
	unsigned d = s->ndim;

	*ret_len = p->o->grid.item_bytes;
	while (d > 0) {
		*ret_len *= piece->size[--d];
		if (piece->size[d] != s->dim[d])
			break;
	}
	return d;
}

/* The next index over dimensions [0, n), the last of them fastest; false: that was the last. */
static bool prove_next(const struct tensor_box *piece, unsigned n, uint64_t *at)
{
	while (n-- > 0) {
		if (++at[n] < piece->size[n])
			return true;
		at[n] = 0;
	}
	return false;
}

static int prove_rows(const struct prove *p, const struct tensor_box *piece)
{
	uint64_t at[TENSOR_MAX_DIMS] = {0}, len, offset;
	unsigned outer = prove_run(p, piece, &len);
	uint8_t *out = p->rows;
	int r;

	do {
		offset = 0;
		for (unsigned d = 0; d < p->o->grid.shape.ndim; d++)
			offset += (piece->offset[d] + at[d]) * p->o->stride[d];
		r = p->read(p->arg, offset, len, out, p->err);
		out += len;
	} while (r == 0 && prove_next(piece, outer, at));
	return r;
}

static void prove_order(const struct prove *p, const struct tensor_box *piece)
{
	const struct tensor_grid *g = &p->o->grid;
	uint64_t stride[TENSOR_MAX_DIMS], bytes = g->item_bytes;

	for (unsigned d = g->shape.ndim; d-- > 0;) {
		stride[d] = bytes;
		bytes *= piece->size[d];
	}
	tensor_piece_gather(g, piece, NULL, p->stored, p->rows, piece->offset, stride);
}

static int prove_piece(const struct prove *p, const struct tensor_box *piece, uint64_t number)
{
	uint64_t len = tensor_box_items(&p->o->grid.shape, piece) * p->o->grid.item_bytes;
	struct base_digest d;
	int r = len ? prove_rows(p, piece) : 0;

	if (r < 0 || len == 0)
		return r;
	prove_order(p, piece);
	base_digest_of(p->stored, len, &d);
	if (base_digest_equal(&d, &p->o->pieces[number].ref.digest))
		return 0;
	return base_error_set(p->err, -BASE_EDAMAGED, "the bytes read of piece %" PRIu64 " do not have its digest",
		number);
}

/* The pieces of one box that was stored by itself, or of the whole tensor. */
static int prove_box(const struct prove *p, const struct tensor_box *box, uint64_t first)
{
	struct tensor_piece_iter it;
	int r = 0;

	for (tensor_piece_first(&it, &p->o->grid, box); !it.done && r == 0; tensor_piece_next(&it))
		r = prove_piece(p, &it.piece, first + it.number);
	return r;
}

static int prove_tensor(struct prove *p)
{
	const struct load_boxes *b = p->o->boxes;
	struct tensor_box box;
	int r = 0;

	p->rows = malloc(p->o->max_piece + 1);
	p->stored = malloc(p->o->max_piece + 1);
	if (!p->rows || !p->stored)
		return base_no_memory(p->err);
	if (!b)
		return prove_box(p, &p->o->whole, 0);
	for (size_t i = 0; r == 0 && i < b->list.n; i++) {
		tensor_boxes_get(&b->list, i, &box);
		r = prove_box(p, &box, b->first_piece[i]);
	}
	return r;
}

static int prove_blob(struct prove *p)
{
	struct base_hasher *h = base_hasher_new();
	struct base_digest d;
	int r = 0;

	p->rows = malloc(LOAD_SEGMENT_BYTES);
	if (!p->rows || !h) {
		base_hasher_free(h);
		return base_no_memory(p->err);
	}
	for (uint64_t at = 0, n; r == 0 && at < p->o->bytes; at += n) {
		n = base_min(LOAD_SEGMENT_BYTES, p->o->bytes - at);
		r = p->read(p->arg, at, n, p->rows, p->err);
		if (r == 0)
			base_hasher_update(h, p->rows, n);
	}
	if (r == 0 && base_hasher_final(h, &d) < 0)
		r = base_no_memory(p->err);
	base_hasher_free(h);
	if (r == 0 && !base_digest_equal(&d, &p->o->digest))
		r = base_error_set(p->err, -BASE_EDAMAGED, "the bytes read of it do not have its digest");
	return r;
}

int load_object_prove(const struct load_object *o, load_prove_read read, void *arg, struct base_error *err)
{
	base_cleanup(prove_release) struct prove p = {.o = o, .read = read, .arg = arg, .err = err};

	return o->blob ? prove_blob(&p) : prove_tensor(&p);
}
