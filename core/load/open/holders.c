/* SPDX-License-Identifier: Apache-2.0
 *
 * holders: which parts may have rows of a box, by the layouts alone. A layout records mesh and placements of its
 * tensors. They give each rank of the mesh a shard, and a rank stores nothing outside its own (docs/format/layout.md).
 * So only those ranks are asked whose shards meet a wanted box, and they are computed from the box
 * (core/tensor/shard.h) without a walk over all ranks. Every part of the layout may have rows of a tensor of which
 * nothing is recorded (flat ranges, lists of boxes, a writer without a mesh), or nothing that can be understood.
 *
 * A row with items outside its rank's shard would not be found so; it is refused where it is read. */
#include <stdlib.h>

#include "core/base/bisect.h"
#include "core/base/cleanup.h"
#include "core/load/open/step_internal.h"

/* ---- what a layout records ---- */

void load_step_layouts_free(struct load_step *step)
{
	for (uint32_t i = 0; step->layouts && i < step->manifest.nlayouts; i++) {
		struct step_layout *l = &step->layouts[i];

		for (uint32_t m = 0; l->meshes && m < l->layout->m.nmeshes; m++)
			tensor_mesh_free(atomic_load_explicit(&l->meshes[m], memory_order_relaxed));
		for (uint32_t p = 0; l->placements && p < l->layout->m.nplacements; p++)
			free(atomic_load_explicit(&l->placements[p], memory_order_relaxed));
		free(l->meshes);
		free(l->placements);
		store_layout_free(l->layout);
	}
	free(step->layouts);
}

/* Both: 0, or why there is none. */
static int layout_mesh(const struct step_layout *l, uint32_t tensor, const struct tensor_mesh **ret_mesh)
{
	struct tensor_mesh *_Atomic *at = &l->meshes[l->layout->m.tensors[tensor].mesh - 1];
	struct tensor_mesh *mesh = atomic_load_explicit(at, memory_order_acquire), *mine;
	int r = mesh ? 0 : store_layout_mesh(l->layout, tensor, &mine, NULL);

	if (!mesh && r == 0)
		mesh = step_publish(at, mine, tensor_mesh_free);
	*ret_mesh = mesh;
	return r;
}

static int layout_placements(const struct step_layout *l, uint32_t tensor, const struct tensor_placements **ret_p)
{
	struct tensor_placements *_Atomic *at = &l->placements[l->layout->m.tensors[tensor].placement - 1];
	struct tensor_placements *p = atomic_load_explicit(at, memory_order_acquire), *mine;
	int r = p ? 0 : store_layout_placements(l->layout, tensor, &mine, NULL);

	if (!p && r == 0)
		p = step_publish(at, mine, free);
	*ret_p = p;
	return r;
}

/* 1: recorded, and checked; 0: not; -ENOMEM. */
static int layout_sharding(const struct step_layout *l, uint32_t tensor, struct tensor_sharding *ret_s)
{
	const struct proto_layout_tensor *t = &l->layout->m.tensors[tensor];
	const struct tensor_placements *p = NULL;
	int r;

	if (t->mesh == 0 || t->placement == 0)
		return 0;
	*ret_s = (struct tensor_sharding){.item_bytes = tensor_dtype_bytes(store_layout_dtype(l->layout, tensor))};
	store_layout_shape(l->layout, tensor, &ret_s->shape);
	r = layout_mesh(l, tensor, &ret_s->mesh);
	if (r == 0)
		r = layout_placements(l, tensor, &p);
	if (r == 0) {
		ret_s->placement = p->at;
		r = tensor_sharding_check(ret_s, p->n, NULL);
	}
	return r == -ENOMEM ? r : r == 0;
}

/* ---- parts ---- */

struct holders { const struct load_step *step; uint32_t layout; uint64_t *lines; };

static void lines_mark(uint64_t *lines, uint32_t line) { lines[line / 64] |= UINT64_C(1) << line % 64; }

static int holder_mark(void *arg, uint32_t rank, const uint32_t *coordinate)
{
	const struct holders *h = arg;
	const struct proto_manifest *m = &h->step->manifest;
	uint32_t line = rank;

	(void)coordinate;
	if (line >= m->nranks || m->ranks[line].rank != rank)
		line = base_bisect(i, 0, m->nranks, m->ranks[i].rank < rank);
	if (line < m->nranks && m->ranks[line].rank == rank && m->ranks[line].layout == h->layout)
		lines_mark(h->lines, line);
	return 0;
}

static int holders_in(struct holders *h, uint32_t number, const struct tensor_boxes *boxes)
{
	struct tensor_sharding s;
	struct tensor_box box;
	int r = layout_sharding(&h->step->layouts[h->layout], number, &s);

	if (r < 0)
		return r;
	if (r == 0) {
		for (uint32_t i = 0; i < h->step->manifest.nranks; i++)
			if (h->step->manifest.ranks[i].layout == h->layout)
				lines_mark(h->lines, i);
		return 0;
	}
	tensor_box_whole(&s.shape, &box);
	for (size_t i = 0; r >= 0 && i < (boxes ? boxes->n : 1); i++) {
		if (boxes)
			tensor_boxes_get(boxes, i, &box);
		r = tensor_sharding_holders(&s, &box, true, holder_mark, h);
	}
	return r < 0 ? r : 0;
}

int load_step_holders(const struct load_step *step, uint32_t tensor, const struct tensor_boxes *boxes,
	uint64_t *ret_lines)
{
	const struct load_tensor_place *p = &step->tensors[tensor];
	const struct step_other *others = (const struct step_other *)step->others.data;
	size_t n = step->others.len / sizeof *others;
	struct holders h = {step, p->layout, ret_lines};
	int r = holders_in(&h, p->tensor, boxes);

	for (size_t i = base_bisect(k, 0, n, others[k].number < tensor);
		r == 0 && i < n && others[i].number == tensor; i++) {
		h.layout = others[i].place.layout;
		r = holders_in(&h, others[i].place.tensor, boxes);
	}
	return r;
}

/* ---- rows ---- */

int load_step_shard(const struct load_step *step, uint32_t line, uint32_t number, struct tensor_shard *ret_shard)
{
	const struct proto_manifest_rank *rank = &step->manifest.ranks[line];
	struct tensor_sharding s;
	int r = layout_sharding(&step->layouts[rank->layout], number, &s);

	if (r > 0 && tensor_shard_of(&s, rank->rank, NULL, ret_shard, NULL) < 0)
		r = 0;
	return r;
}
