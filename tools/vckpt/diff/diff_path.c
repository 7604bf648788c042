/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/vckpt/diff/diff_path.h"

#include <string.h>

#include "core/base/cleanup.h"
#include "tools/vckpt/import/import.h"

#define BLOB_READ_BYTES (UINT64_C(1) << 20)

struct diff_path {
	struct import_plan plan;
	struct diff_other side;
	struct base_digest *blobs;      /* digests of the plan's */
};

void diff_path_close(struct diff_path *p)
{
	if (!p)
		return;
	import_plan_release(&p->plan);
	free(p->blobs);
	free(p);
}

const struct diff_other *diff_path_side(const struct diff_path *p) { return &p->side; }

BASE_CLEANUP_DEFINE(struct diff_path *, diff_path_close)
BASE_CLEANUP_DEFINE(struct base_hasher *, base_hasher_free)

static struct load_tensor_info tensor_info(const struct import_tensor *t)
{
	return (struct load_tensor_info){t->component, t->name, t->name_len, t->dtype, t->shape, t->bytes};
}

static void path_tensor(void *arg, uint32_t i, struct load_tensor_info *ret_info)
{
	const struct diff_path *p = arg;

	*ret_info = tensor_info(&p->plan.tensors[i]);
}

static void path_blob(void *arg, uint32_t i, struct load_blob_info *ret_info)
{
	const struct diff_path *p = arg;
	const struct import_blob *b = &p->plan.blobs[i];

	*ret_info = (struct load_blob_info){b->name, b->per_rank, 0, b->bytes, p->blobs[i]};
}

static int tensor_compare(const void *a, const void *b)
{
	struct load_tensor_info x = tensor_info(a), y = tensor_info(b);

	return diff_names_compare(&x, &y);
}

/* Run by run: what is contiguous in the tensor and in the box. */
static int path_read(void *arg, uint32_t tensor, const struct tensor_box *box, void *out, struct base_error *err)
{
	const struct diff_path *p = arg;
	const struct import_tensor *t = &p->plan.tensors[tensor];
	uint64_t len = tensor_dtype_bytes(t->dtype), bytes = len, stride[TENSOR_MAX_DIMS], at[TENSOR_MAX_DIMS] = {0};
	unsigned outer = t->shape.ndim, d;
	uint8_t *to = out;
	int r = 0;

	for (d = t->shape.ndim; d-- > 0; bytes *= t->shape.dim[d])
		stride[d] = bytes;
	while (outer > 0) {
		len *= box->size[--outer];
		if (box->size[outer] != t->shape.dim[outer])
			break;
	}
	do {
		uint64_t from = 0;

		for (d = 0; d < t->shape.ndim; d++)
			from += (box->offset[d] + at[d]) * stride[d];
		r = import_tensor_read(t, from, to, len, err);
		to += len;
		for (d = outer; d > 0 && ++at[d - 1] == box->size[d - 1]; d--)
			at[d - 1] = 0;
	} while (r == 0 && d > 0);
	return r;
}

static int blob_digest(const struct import_blob *b, uint8_t *room, struct base_digest *ret_d, struct base_error *err)
{
	base_cleanup(base_hasher_free_p) struct base_hasher *h = base_hasher_new();

	if (!h)
		return base_no_memory(err);
	for (uint64_t at = 0; at < b->bytes;) {
		size_t n = base_min(BLOB_READ_BYTES, b->bytes - at);
		int r = import_blob_read(b, at, room, n, err);

		if (r < 0)
			return r;
		base_hasher_update(h, room, n);
		at += n;
	}
	return base_hasher_final(h, ret_d) < 0 ? base_no_memory(err) : 0;
}

int diff_path_open(const char *path, const char *component, struct diff_path **ret_p, struct base_error *err)
{
	base_cleanup(diff_path_close_p) struct diff_path *p = calloc(1, sizeof *p);
	base_cleanup_free uint8_t *room = malloc(BLOB_READ_BYTES);
	int r = p && room ? import_add_source(&p->plan, path, component, 0, err) : base_no_memory(err);

	if (r == 0)
		r = import_plan_check(&p->plan, err);
	if (r < 0)
		return r;
	qsort(p->plan.tensors, p->plan.ntensors, sizeof *p->plan.tensors, tensor_compare);
	p->blobs = calloc(p->plan.nblobs + 1, sizeof *p->blobs);
	if (!p->blobs)
		return base_no_memory(err);
	for (size_t i = 0; r == 0 && i < p->plan.nblobs; i++)
		r = blob_digest(&p->plan.blobs[i], room, &p->blobs[i], err);
	p->side = (struct diff_other){p, (uint32_t)p->plan.ntensors, (uint32_t)p->plan.nblobs, path_tensor, path_blob,
		path_read};
	if (r == 0)
		*ret_p = base_steal(p);
	return r;
}
