/* SPDX-License-Identifier: Apache-2.0
 *
 * file_fill: fills memory with a whole file, one stretch after another, so that what is there can be read: from where
 * the file's reader is to its end, and then from its beginning. The tensors of a stretch are loaded as by a load
 * (core/load/fill/fill.h): sorted by pack and offset, read by all cores, checked and placed directly, without the cache
 * of decoded pieces. They are read past the page cache, too, because this memory keeps the bytes. A stretch is a share
 * of the file, so that each of many cores has enough to do in it. */
#include <stdatomic.h>
#include <string.h>

#include "core/base/pool.h"
#include "core/load/fill/fill.h"
#include "core/storage/spread.h"
#include "core/view/view_internal.h"

#define STRETCHES 64u
#define CORE_BYTES (UINT64_C(8) << 20)   /* of a stretch, for each core at least */
#define BLOB_PART_BLOCKS 64u             /* 1 MiB */

struct filling {
	struct view_file *f;
	const struct view_filling *out;
	uint8_t *to;
	uint64_t stretch_bytes;
	struct load_fill *fill;          /* of the current stretch; NULL: it has no tensor yet */
	uint64_t begin;                  /* where the stretch begins in the file */
	uint64_t done;                   /* bytes that are there */
};

static void filled_to(struct filling *g, uint64_t end)
{
	g->done += end - g->begin;
	atomic_store_explicit(g->out->ready, g->done, memory_order_release);
	g->begin = end;
}

static int fill_begins(struct filling *g, uint64_t end, struct base_error *err)
{
	return g->out->begin ? g->out->begin(g->out->arg, g->begin, end, err) : 0;
}

static int run_stretch(struct filling *g, uint64_t end, struct base_error *err)
{
	int r = fill_begins(g, end, err);

	if (r == 0 && g->fill)
		r = load_fill_run(g->fill, err);
	load_fill_free(g->fill);
	g->fill = NULL;
	if (r == 0)
		filled_to(g, end);
	return r;
}

static int add_box(struct filling *g, const struct view_place *p, const struct tensor_box *box, const uint64_t *stride,
	uint64_t at, struct base_error *err)
{
	if (!g->fill && (g->fill = load_fill_new(view_tree_step(g->f->tree), 0, 0)))
		load_fill_past_cache(g->fill);
	return g->fill ? load_fill_add(g->fill, p->item, box, g->to + at, stride, err) : base_no_memory(err);
}

/* Cuts the tensor into boxes that follow each other in the file, each about as large as the room in the stretch: they
 * cut the first dimension whose items are shorter than a stretch, and have one item of each dimension before it. */
static int fill_tensor(struct filling *g, const struct view_place *p, struct base_error *err)
{
	struct load_tensor_info info;
	struct tensor_box box = {0};
	uint64_t stride[TENSOR_MAX_DIMS] = {0}, at = g->f->head_len + p->begin, end = g->f->head_len + p->end;
	uint64_t bytes, row, n;
	unsigned cut = 0;
	int r = 0;

	load_step_tensor_info(view_tree_step(g->f->tree), p->item, &info);
	if (info.bytes != end - at)
		return base_error_set(err, -BASE_EFORMAT, "a tensor has another length than its file");
	bytes = tensor_dtype_bytes(info.dtype);
	for (unsigned d = info.shape.ndim; d-- > 0; bytes *= info.shape.dim[d]) {
		stride[d] = bytes;
		cut = bytes <= g->stretch_bytes ? d : cut;
	}
	for (unsigned d = 0; d < info.shape.ndim; d++)
		box.size[d] = d < cut ? 1 : info.shape.dim[d];
	row = info.shape.ndim ? stride[cut] : end - at;
	n = info.shape.ndim ? info.shape.dim[cut] : 1;
	while (r == 0 && at < end) {
		uint64_t room = (g->begin + g->stretch_bytes - at) / row;

		box.size[cut] = base_min(n - box.offset[cut], base_max(room, 1));
		r = add_box(g, p, &box, stride, at, err);
		at += box.size[cut] * row;
		box.offset[cut] += box.size[cut];
		for (unsigned d = cut; d > 0 && box.offset[d] == info.shape.dim[d]; d--) {
			box.offset[d] = 0;
			box.offset[d - 1]++;
		}
		if (r == 0 && at - g->begin >= g->stretch_bytes)
			r = run_stretch(g, at, err);
	}
	return r;
}

/* The tensors that begin in [g->begin, end). */
static int fill_tensors(struct filling *g, uint64_t end, struct base_error *err)
{
	uint64_t begin = g->begin;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < g->f->nplaces; i++) {
		uint64_t at = g->f->head_len + g->f->places[i].begin;

		if (at >= begin && at < end)
			r = fill_tensor(g, &g->f->places[i], err);
	}
	if (r == 0)
		r = run_stretch(g, end, err);
	load_fill_free(g->fill);
	return r;
}

struct blob_part { struct load_object *o; uint8_t *to; uint64_t first, end; };

static int fill_blob_part(void *arg, uint32_t i, struct base_error *err)
{
	const struct blob_part *b = arg;
	uint64_t first = b->first + (uint64_t)i * BLOB_PART_BLOCKS, n = base_min(BLOB_PART_BLOCKS, b->end - first);

	return load_blob_read_blocks(b->o, first, n, b->to + first * BASE_BLOCK_BYTES, err);
}

static int fill_blob_stretches(struct filling *g, struct load_object *o, struct base_error *err)
{
	uint64_t blocks = base_block_count(g->f->size), most = base_block_count(g->stretch_bytes);
	int r = load_blob_look(o, err);

	for (uint64_t first = 0; r == 0 && first < blocks; first += most) {
		struct blob_part b = {o, g->to, first, base_min(first + most, blocks)};

		r = fill_begins(g, base_min(b.end * BASE_BLOCK_BYTES, g->f->size), err);
		if (r == 0)
			r = storage_spread((uint32_t)base_div_up(b.end - first, BLOB_PART_BLOCKS), fill_blob_part, &b,
				err);
		if (r == 0)
			filled_to(g, base_min(b.end * BASE_BLOCK_BYTES, g->f->size));
	}
	return r;
}

static int fill_blob(struct filling *g, struct base_error *err)
{
	struct load_object *o;
	int r = load_blob_open(view_tree_step(g->f->tree), g->f->places[0].item, &o, err);

	if (r < 0)
		return r;
	if (load_object_bytes(o) != g->f->size)
		r = base_error_set(err, -BASE_EFORMAT, "a blob has another length than its file");
	else
		r = fill_blob_stretches(g, o, err);
	load_object_unref(o);
	return r;
}

static int copy_put(void *arg, const void *bytes, size_t len, struct base_error *err)
{
	struct filling *g = arg;
	int r;

	if (len > g->f->size - g->begin)
		return base_error_set(err, -BASE_EFORMAT, "a file has more bytes than its size says");
	r = fill_begins(g, g->begin + len, err);
	if (r < 0)
		return r;
	memcpy(g->to + g->begin, bytes, len);
	filled_to(g, g->begin + len);
	return 0;
}

uint64_t view_file_from(const struct view_file *f, uint64_t offset)
{
	int64_t i = view_file_tensor(f, base_min(offset, f->size - base_min(f->size, 1)));

	return f->mesh || i <= 0 ? 0 : f->head_len + f->places[i].begin;
}

/* The header, and tensors or blob behind it up to `end`. */
static int fill_from_head(struct filling *g, uint64_t end, struct base_error *err)
{
	int r = fill_begins(g, g->f->head_len, err);

	if (r < 0)
		return r;
	if (g->f->head_len)
		memcpy(g->to, g->f->head, g->f->head_len);
	filled_to(g, g->f->head_len);
	if (g->f->nplaces == 0)
		return 0;
	return g->f->kind == VIEW_BLOB ? fill_blob(g, err) : fill_tensors(g, end, err);
}

int view_file_fill(struct view_file *f, struct load_cache *c, const struct view_filling *to, struct base_error *err)
{
	struct filling g = {.f = f, .out = to, .to = to->to, .begin = to->from,
		.stretch_bytes = base_max(CORE_BYTES * base_cpu_count(), f->size / STRETCHES)};
	int r = 0;

	filled_to(&g, to->from);
	if (f->mesh) {
		r = view_file_stream(f, c, 0, 0, copy_put, &g, err);
		return r == 0 && g.begin != f->size ? base_error_set(err, -BASE_EFORMAT, "a file ends early") : r;
	}
	if (to->from)
		r = fill_tensors(&g, f->size, err);
	g.begin = 0;
	return r < 0 ? r : fill_from_head(&g, to->from ? to->from : f->size, err);
}
