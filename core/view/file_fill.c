/* SPDX-License-Identifier: Apache-2.0
 *
 * A whole file into memory. Tensors go there as a load puts them (core/load/fill.h): sorted by pack and offset, read by
 * all cores, each checked before it counts and placed where it belongs, without the cache of decoded pieces. */
#include <string.h>

#include "core/load/fill.h"
#include "core/view/view_internal.h"

static int add_tensor(struct load_fill *fill, const struct view_file *f, const struct view_place *p, uint8_t *to,
	struct base_error *err)
{
	struct load_tensor_info info;
	struct tensor_box box = {0};
	uint64_t stride[TENSOR_MAX_DIMS] = {0};

	load_step_tensor_info(view_tree_step(f->tree), p->item, &info);
	if (info.bytes != p->end - p->begin)
		return base_error_set(err, -BASE_EFORMAT, "a tensor has another length than its file");
	uint64_t bytes = tensor_dtype_bytes(info.dtype);
	for (unsigned d = info.shape.ndim; d-- > 0; bytes *= info.shape.dim[d]) {
		box.size[d] = info.shape.dim[d];
		stride[d] = bytes;
	}
	return load_fill_add(fill, p->item, &box, to + f->head_len + p->begin, stride, err);
}

static int fill_tensors(struct view_file *f, uint8_t *to, struct base_error *err)
{
	struct load_fill *fill = load_fill_new(view_tree_step(f->tree), 0, 0);
	int r = fill ? 0 : base_no_memory(err);

	for (uint32_t i = 0; r == 0 && i < f->nplaces; i++)
		r = add_tensor(fill, f, &f->places[i], to, err);
	if (r == 0)
		r = load_fill_run(fill, err);
	load_fill_free(fill);
	return r;
}

static int fill_blob(struct view_file *f, uint8_t *to, struct base_error *err)
{
	struct load_object *o;
	int r = load_blob_open(view_tree_step(f->tree), f->places[0].item, &o, err);

	if (r < 0)
		return r;
	if (load_object_bytes(o) != f->size)
		r = base_error_set(err, -BASE_EFORMAT, "a blob has another length than its file");
	else if (!(r = load_blob_look(o, err)))
		r = load_blob_read(o, to, err);
	load_object_unref(o);
	return r;
}

struct copy { uint8_t *to; size_t left; };

static int copy_put(void *arg, const void *bytes, size_t len, struct base_error *err)
{
	struct copy *c = arg;

	if (len > c->left)
		return base_error_set(err, -BASE_EFORMAT, "a file has more bytes than its size says");
	memcpy(c->to, bytes, len);
	c->to += len;
	c->left -= len;
	return 0;
}

int view_file_fill(struct view_file *f, struct load_cache *c, void *to, struct base_error *err)
{
	struct copy copy = {to, f->size};

	if (f->mesh) {
		int r = view_file_stream(f, c, 0, 0, copy_put, &copy, err);
		return r == 0 && copy.left ? base_error_set(err, -BASE_EFORMAT, "a file ends early") : r;
	}
	if (f->head_len)
		memcpy(to, f->head, f->head_len);
	if (f->nplaces == 0)
		return 0;
	return f->kind == VIEW_BLOB ? fill_blob(f, to, err) : fill_tensors(f, to, err);
}
