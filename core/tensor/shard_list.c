/* SPDX-License-Identifier: Apache-2.0
 *
 * shard_list: shards that are given as a list of boxes. */
#include "core/tensor/shard.h"

#include <string.h>

#include "core/base/plural.h"

int tensor_shard_list_check(const struct tensor_shape *s, const struct tensor_boxes *boxes, struct base_error *err)
{
	struct tensor_cover fault;
	struct tensor_box box;
	char text[300];
	int r;

	if (boxes->ndim != s->ndim)
		return base_error_set(err, -EINVAL, "boxes of %u %s for a tensor of %u", boxes->ndim,
			base_plural(boxes->ndim, "dimension", "dimensions"), s->ndim);
	r = tensor_boxes_cover(s, boxes, &fault);
	switch (r) {
	case -ERANGE:
		tensor_boxes_get(boxes, fault.a, &box);
		tensor_box_text(s->ndim, &box, text, sizeof text);
		return base_error_set(err, -EINVAL, "box %zu, %s, is not inside the tensor", fault.a, text);
	case -EEXIST:
		tensor_box_text(s->ndim, &fault.box, text, sizeof text);
		return base_error_set(err, -EINVAL, "boxes %zu and %zu overlap in %s", fault.a, fault.b, text);
	case -ENOENT:
		return 0; /* others hold the rest */
	}
	return r < 0 ? base_error_set(err, r, "boxes: %s", r == -EOVERFLOW ? "the tensor has more than 2^62 items"
									    : base_error_name(r)) : 0;
}

/* From number i on, the first box that holds something. */
static void list_settle(struct tensor_shard_list *it)
{
	uint32_t ndim = it->boxes->ndim;
	uint64_t stride = 1;

	for (; it->i < it->boxes->n; it->i++) {
		tensor_boxes_get(it->boxes, it->i, &it->at.box);
		if (!tensor_box_empty(ndim, &it->at.box))
			break;
	}
	it->done = it->i >= it->boxes->n;
	if (it->done)
		return;
	it->at.local_offset = it->next;
	for (uint32_t d = ndim; d-- > 0; stride *= it->at.box.size[d])
		it->at.local_stride[d] = stride;
	it->next += stride;
}

void tensor_shard_list_first(struct tensor_shard_list *it, const struct tensor_boxes *boxes)
{
	memset(it, 0, sizeof *it);
	it->boxes = boxes;
	list_settle(it);
}

void tensor_shard_list_next(struct tensor_shard_list *it)
{
	if (it->done)
		return;
	it->i++;
	list_settle(it);
}
