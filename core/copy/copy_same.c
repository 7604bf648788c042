/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_same: two steps by what their records say: names, dtypes, shapes and digests of tensors, blobs, attributes. How
 * ranks cut the tensors does not matter, as long as the grid cuts them alike (docs/format/part.md). No piece is read.
 */
#include "core/copy/copy_internal.h"

#include <string.h>

#include "core/load/open/step.h"

struct same { struct load_step *a, *b; };

static void same_release(struct same *s)
{
	load_step_unref(s->a);
	load_step_unref(s->b);
}

static int same_tensor(const struct same *s, uint32_t i, struct base_error *err)
{
	struct load_tensor_info x, y;
	struct load_object *a = NULL, *b = NULL;
	int r;

	load_step_tensor_info(s->a, i, &x);
	load_step_tensor_info(s->b, i, &y);
	if (strcmp(x.component, y.component) != 0 || x.name_len != y.name_len ||
		memcmp(x.name, y.name, x.name_len) != 0 || x.dtype != y.dtype ||
		!tensor_shape_equal(&x.shape, &y.shape))
		return 0;
	r = load_tensor_open(s->a, i, &a, err);
	if (r == 0)
		r = load_tensor_open(s->b, i, &b, err);
	if (r == 0)
		r = base_digest_equal(load_object_digest(a), load_object_digest(b));
	load_object_unref(a);
	load_object_unref(b);
	return r;
}

static bool same_blob(const struct same *s, uint32_t i)
{
	struct load_blob_info x, y;

	load_step_blob_info(s->a, i, &x);
	load_step_blob_info(s->b, i, &y);
	return strcmp(x.name, y.name) == 0 && x.per_rank == y.per_rank && (!x.per_rank || x.rank == y.rank) &&
		x.bytes == y.bytes && base_digest_equal(&x.digest, &y.digest);
}

static int same_contents(const struct same *s, struct base_error *err)
{
	uint32_t tensors = load_step_tensor_count(s->a), blobs;
	int r = load_step_blobs(s->a, err);

	if (r == 0)
		r = load_step_blobs(s->b, err);
	if (r < 0)
		return r;
	blobs = load_step_blob_count(s->a);
	if (tensors != load_step_tensor_count(s->b) || blobs != load_step_blob_count(s->b))
		return 0;
	r = 1;
	for (uint32_t i = 0; r == 1 && i < blobs; i++)
		r = same_blob(s, i);
	for (uint32_t i = 0; r == 1 && i < tensors; i++)
		r = same_tensor(s, i, err);
	return r;
}

int copy_same(struct store *a, const char *run_a, const struct commit_list_step *step_a, struct store *b,
	const char *run_b, const struct commit_list_step *step_b, struct base_error *err)
{
	base_cleanup(same_release) struct same s = {0};
	int r;

	if (!proto_attributes_equal(step_a->commit.attributes, step_a->commit.nattributes, step_b->commit.attributes,
		step_b->commit.nattributes))
		return 0;
	r = load_step_open(a, run_a, step_a, &s.a, err);
	if (r == 0)
		r = load_step_open(b, run_b, step_b, &s.b, err);
	return r < 0 ? r : same_contents(&s, err);
}
