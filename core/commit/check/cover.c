/* SPDX-License-Identifier: Apache-2.0
 *
 * cover: what the store adds to the cover of a tensor by boxes (core/tensor/boxes_cover.c): identical boxes of several
 * ranks fold into one, if their digests are equal, and a fault becomes a sentence with the ranks in it. */
#include "core/commit/check/cover.h"

#include <string.h>

#include "core/base/cleanup.h"
#include "core/tensor/boxes.h"

#define BOX_TEXT 800u   /* 16 dimensions of two numbers of 20 digits */

struct cover { const struct tensor_shape *shape; const char *tensor; struct base_error *err; };

static struct tensor_box box_of(const struct cover *c, const struct check_cover_box *b)
{
	struct tensor_box box;

	for (unsigned d = 0; d < c->shape->ndim; d++) {
		box.offset[d] = b->pairs[2 * d];
		box.size[d] = b->pairs[2 * d + 1];
	}
	return box;
}

static void cover_text(const struct cover *c, const struct check_cover_box *b, char text[static BOX_TEXT])
{
	struct tensor_box box = box_of(c, b);

	tensor_box_text(c->shape->ndim, &box, text, BOX_TEXT);
}

static int box_order(const void *pa, const void *pb, void *arg)
{
	const struct check_cover_box *a = pa, *b = pb;
	const struct tensor_shape *s = arg;

	for (unsigned i = 0; i < 2 * s->ndim; i++)
		if (a->pairs[i] != b->pairs[i])
			return a->pairs[i] < b->pairs[i] ? -1 : 1;
	return (a->rank > b->rank) - (a->rank < b->rank);
}

/* Moves distinct boxes to the front, in order, and puts them into `list`. Returns how many, or an error. */
static int64_t cover_fold(const struct cover *c, struct check_cover_box *boxes, size_t n, struct tensor_boxes *list)
{
	size_t count = 0, len = c->shape->ndim * 2 * sizeof(uint64_t);
	char text[BOX_TEXT];

	qsort_r(boxes, n, sizeof *boxes, box_order, (void *)c->shape);
	for (size_t i = 0; i < n; i++) {
		const struct check_cover_box *last = count ? &boxes[count - 1] : NULL;

		if (!last || (len && memcmp(last->pairs, boxes[i].pairs, len) != 0)) {
			struct tensor_box box = box_of(c, &boxes[i]);

			if (tensor_boxes_add(list, &box) < 0)
				return base_no_memory(c->err);
			boxes[count++] = boxes[i];
			continue;
		}
		if (base_digest_equal(&last->digest, &boxes[i].digest))
			continue;
		cover_text(c, last, text);
		return base_error_set(c->err, -BASE_EFORMAT,
			"tensor \"%s\": ranks %u and %u stored different bytes for box %s", c->tensor, last->rank,
			boxes[i].rank, text);
	}
	return (int64_t)count;
}

static int cover_sentence(const struct cover *c, const struct check_cover_box *boxes, int code,
	const struct tensor_cover *fault)
{
	const struct check_cover_box *a = &boxes[fault->a], *b = &boxes[fault->b];
	char first[BOX_TEXT], second[BOX_TEXT];

	switch (code) {
	case -EEXIST:
		cover_text(c, a, first);
		cover_text(c, b, second);
		return base_error_set(c->err, -BASE_EFORMAT,
			"tensor \"%s\": box %s of rank %u and box %s of rank %u overlap", c->tensor, first, a->rank,
			second, b->rank);
	case -ENOENT:
		tensor_box_text(c->shape->ndim, &fault->box, first, sizeof first);
		return base_error_set(c->err, -BASE_EFORMAT, "tensor \"%s\": no rank stored box %s", c->tensor,
			first);
	case -ERANGE:
		cover_text(c, a, first);
		return base_error_set(c->err, -BASE_EFORMAT, "tensor \"%s\": box %s of rank %u is not inside the "
			"tensor", c->tensor, first, a->rank);
	default:
		return base_error_set(c->err, code, "tensor \"%s\": cover not checked: %s", c->tensor,
			base_error_name(code));
	}
}

int check_cover_boxes(const struct tensor_shape *s, const char *tensor, struct check_cover_box *boxes, size_t n,
	struct base_error *err)
{
	base_cleanup(tensor_boxes_release) struct tensor_boxes list = {.ndim = s->ndim};
	struct cover c = {s, tensor, err};
	struct tensor_cover fault;
	int64_t count = cover_fold(&c, boxes, n, &list);
	int r;

	if (count < 0)
		return (int)count;
	r = tensor_boxes_cover(s, &list, &fault);
	if (r == 0 && count == 0) { /* a tensor without items has to be stored too */
		tensor_box_whole(s, &fault.box);
		r = -ENOENT;
	}
	return r == 0 ? 0 : cover_sentence(&c, boxes, r, &fault);
}
