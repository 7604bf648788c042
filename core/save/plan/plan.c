/* SPDX-License-Identifier: Apache-2.0
 *
 * plan: two walks over the tensors. The first finds the group of each (groups.c) and adds up what the groups hold; then
 * every group's span of this rank is known. The second walks the sequences again and stores what begins in the span. */
#include "core/save/plan/groups_internal.h"
#include "core/save/plan/plan_internal.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"

#define PLAN_ALL UINT32_MAX        /* in place of a group: this rank stores all it holds */
#define PLAN_NONE (UINT32_MAX - 1) /* nothing: it holds nothing, or another one stores it */
#define PLAN_TENSORS_MAX (UINT32_C(1) << 30)

struct plan_group {
	const struct tensor_mesh *mesh; /* of its first tensor */
	uint32_t dims, size;            /* replicated dimensions of that mesh; ranks */
	uint64_t total, at;             /* bytes of the sequence; where the second walk is in it */
	struct tensor_span span;        /* of this rank */
};

struct plan_making {
	const struct save_tensor *tensors;
	uint32_t n, rank;
	struct tensor_grid_params params;
	struct tensor_mesh alone;       /* of this rank only: for tensors without a mesh */
	struct save_groups known;
	struct plan_group *groups; uint32_t ngroups, groups_room; /* of the same numbers */
	uint32_t zero;
	uint32_t *group_of;             /* by tensor: a group's number, PLAN_ALL or PLAN_NONE */
	uint64_t *bytes;                /* by tensor: held by this rank */
	struct save_plan plan;
	uint64_t boxes_room;
	struct base_error *err;
};

static const struct tensor_placement plan_replicate[TENSOR_MAX_DIMS];

static void making_release(struct plan_making *m)
{
	save_groups_release(&m->known);
	free(m->groups);
	free(m->group_of);
	free(m->bytes);
	save_plan_release(&m->plan);
}

static int making_init(struct plan_making *m)
{
	m->alone.ndim = m->alone.size[0] = m->alone.count = 1;
	m->alone.ranks = &m->rank;
	m->alone.order = &m->zero;
	m->group_of = calloc((size_t)m->n + 1, sizeof *m->group_of);
	m->bytes = calloc((size_t)m->n + 1, sizeof *m->bytes);
	if (!m->group_of || !m->bytes)
		return base_no_memory_for(m->err, "the plan of %u tensors", m->n);
	return 0;
}

static int group_find(struct plan_making *m, const struct tensor_mesh *mesh, uint32_t dims, uint32_t *ret_group)
{
	int r = save_groups_find(&m->known, mesh, dims, ret_group);

	if (r < 0 || *ret_group < m->ngroups)
		return r;
	if (base_array_room(m->groups, m->groups_room, m->ngroups + 1) < 0)
		return -ENOMEM;
	m->groups[m->ngroups++] = (struct plan_group){.mesh = mesh, .dims = dims,
		.size = tensor_mesh_group_size(mesh, dims)};
	return 0;
}

/* Without a mesh the tensor is replicated over the mesh of this rank alone. */
static struct tensor_sharding plan_sharding(const struct plan_making *m, uint32_t t)
{
	struct tensor_sharding s = m->tensors[t].sharding;

	if (!s.mesh) {
		s.mesh = &m->alone;
		s.placement = plan_replicate;
	}
	return s;
}

int save_held_init(struct save_held *h, const struct save_tensor *tensor, const struct tensor_sharding *s,
	uint32_t rank, struct base_error *err)
{
	int r;

	h->boxes = tensor->boxes;
	for (uint32_t i = 0; h->boxes && i < s->mesh->ndim; i++)
		if (tensor->flat || s->placement[i].kind != TENSOR_REPLICATE)
			return base_error_set(err, -EINVAL, "with a list of boxes there is no flat range, and all "
				"placements are R");
	r = tensor_shard_of(s, rank, tensor->flat, &h->shard, err);
	return r == 0 && h->boxes ? tensor_shard_list_check(&s->shape, h->boxes, err) : r;
}

const struct tensor_shard_box *save_held_first(struct save_held *h)
{
	if (h->shard.absent)
		return NULL;
	if (h->boxes) {
		tensor_shard_list_first(&h->list, h->boxes);
		return h->list.done ? NULL : &h->list.at;
	}
	tensor_shard_first(&h->it, &h->shard, NULL);
	return h->it.done ? NULL : &h->it.at;
}

const struct tensor_shard_box *save_held_next(struct save_held *h)
{
	if (h->boxes) {
		tensor_shard_list_next(&h->list);
		return h->list.done ? NULL : &h->list.at;
	}
	tensor_shard_next(&h->it);
	return h->it.done ? NULL : &h->it.at;
}

uint64_t save_held_items(struct save_held *h)
{
	uint64_t items = 0;

	if (!h->boxes)
		return tensor_shard_items(&h->shard);
	for (const struct tensor_shard_box *at = save_held_first(h); at; at = save_held_next(h))
		items += tensor_box_items(&h->shard.shape, &at->box); /* they do not overlap: no more than the tensor */
	return items;
}

static int held_init(struct save_held *h, const struct plan_making *m, uint32_t t, const struct tensor_sharding *s)
{
	int r = save_held_init(h, &m->tensors[t], s, m->rank, m->err);

	return r < 0 ? base_error_prefix(m->err, r, "tensor %u", t) : 0;
}

uint32_t save_held_alike(const struct save_tensor *tensor, const struct tensor_sharding *s)
{
	uint32_t dims = tensor_sharding_replicated(s);

	return tensor->flat || tensor->boxes ? dims & tensor->same_dims : dims;
}

/* First walk: what this rank holds of a tensor, and who stores it. */
static int plan_survey(struct plan_making *m, uint32_t t)
{
	struct tensor_sharding s = plan_sharding(m, t);
	const struct save_tensor *tensor = &m->tensors[t];
	struct save_held held;
	uint32_t *group = &m->group_of[t], dims;
	uint64_t items;
	int r = tensor_shape_items(&s.shape, s.item_bytes, &items);

	*group = PLAN_NONE;
	if (r < 0)
		return base_error_set(m->err, r, "tensor %u: its shape has too many dimensions or bytes", t);
	r = held_init(&held, m, t, &s);
	if (r < 0 || held.shard.absent)
		return r;
	if (items == 0) { /* no rank holds items of it, but the step must have it */
		if (tensor_mesh_rank_at(s.mesh, 0) == m->rank)
			*group = PLAN_ALL;
		return 0;
	}
	m->bytes[t] = save_held_items(&held) * s.item_bytes;
	if (base_add_overflows(m->plan.held_bytes, m->bytes[t], &m->plan.held_bytes))
		return base_error_set(m->err, -EOVERFLOW, "tensor %u: all tensors together exceed 2^64 bytes", t);
	dims = save_held_alike(tensor, &s);
	*group = PLAN_ALL;
	if (dims == 0)
		return 0;
	if (tensor->buffer) {
		if (tensor_mesh_group_position(s.mesh, m->rank, dims) != 0)
			*group = PLAN_NONE;
		return 0;
	}
	r = group_find(m, s.mesh, dims, group);
	if (r < 0)
		return base_error_set(m->err, r, "tensor %u: %s", t, base_error_name(r));
	m->groups[*group].total += m->bytes[t]; /* at most held_bytes */
	return 0;
}

static int plan_add(struct plan_making *m, uint32_t t, const struct tensor_grid *g, const struct tensor_shard_box *held,
	const struct tensor_box *stored)
{
	struct save_plan *p = &m->plan;
	struct save_plan_box *box;

	if (base_array_room(p->boxes, m->boxes_room, p->nboxes + 1) < 0)
		return base_no_memory_for(m->err, "tensor %u", t);
	box = &p->boxes[p->nboxes++];
	*box = (struct save_plan_box){.tensor = t, .at = *held, .pieces = tensor_piece_count(g, stored)};
	box->at.box = *stored;
	for (unsigned d = 0; d < g->shape.ndim; d++)
		box->at.local_offset += (stored->offset[d] - held->box.offset[d]) * held->local_stride[d];
	p->pieces += box->pieces;
	p->bytes += tensor_box_items(&g->shape, stored) * g->item_bytes;
	return 0;
}

/* Stores of one box, whose bytes begin at `at` of the sequence, what begins in the span. */
static int plan_share(struct plan_making *m, uint32_t t, const struct tensor_grid *g,
	const struct tensor_shard_box *held, const struct plan_group *group, uint64_t at)
{
	struct tensor_box boxes[TENSOR_SHARE_BOXES_MAX];
	uint64_t first, end, before = m->plan.bytes;
	uint32_t n;

	tensor_share_pieces(g, &held->box, at, group->at, m->bytes[t], group->span, &first, &end);
	n = tensor_share_boxes(g, &held->box, first, end, boxes);
	for (uint32_t i = 0; i < n; i++) {
		int r = plan_add(m, t, g, held, &boxes[i]);

		if (r < 0)
			return r;
	}
	m->plan.shared_bytes += m->plan.bytes - before;
	return 0;
}

/* Second walk: the boxes of a tensor that this rank stores; group NULL: all. */
static int plan_store(struct plan_making *m, uint32_t t, const struct plan_group *group)
{
	struct tensor_sharding s = plan_sharding(m, t);
	struct tensor_shard_box whole = {.local_offset = 0};
	const struct tensor_shard_box *box;
	struct save_held held;
	struct tensor_grid g;
	uint64_t at = group ? group->at : 0;
	int r = tensor_grid_init(&g, &s.shape, s.item_bytes, m->params);

	if (r < 0)
		return base_error_set(m->err, r, "tensor %u: bad grid parameters or shape", t);
	tensor_box_whole(&s.shape, &whole.box);
	if (tensor_box_empty(s.shape.ndim, &whole.box))
		return plan_add(m, t, &g, &whole, &whole.box);
	r = held_init(&held, m, t, &s);
	for (box = save_held_first(&held); box && r == 0; box = save_held_next(&held)) {
		r = group ? plan_share(m, t, &g, box, group, at) : plan_add(m, t, &g, box, &box->box);
		at += tensor_box_items(&s.shape, &box->box) * s.item_bytes;
	}
	return r;
}

static int plan_walk(struct plan_making *m)
{
	for (uint32_t t = 0; t < m->n; t++) {
		int r = plan_survey(m, t);

		if (r < 0)
			return r;
	}
	for (uint32_t i = 0; i < m->ngroups; i++) {
		struct plan_group *g = &m->groups[i];
		int64_t replica = tensor_mesh_group_position(g->mesh, m->rank, g->dims);

		g->span = tensor_share_span(g->total, (uint32_t)replica, g->size);
	}
	for (uint32_t t = 0; t < m->n; t++) {
		struct plan_group *g = m->group_of[t] < m->ngroups ? &m->groups[m->group_of[t]] : NULL;
		int r = 0;

		if (g ? g->at < g->span.to && g->at + m->bytes[t] > g->span.from : m->group_of[t] == PLAN_ALL)
			r = plan_store(m, t, g);
		if (r < 0)
			return r;
		if (g)
			g->at += m->bytes[t];
	}
	return 0;
}

int save_plan_make(const struct save_tensor *tensors, uint32_t n, struct tensor_grid_params params, uint32_t rank,
	struct save_plan *ret_plan, struct base_error *err)
{
	base_cleanup(making_release) struct plan_making m = {.tensors = tensors, .n = n, .params = params,
		.rank = rank, .known.rank = rank, .err = err};
	int r;

	if (n > PLAN_TENSORS_MAX)
		return base_error_set(err, -BASE_ELIMIT, "%u tensors: at most %u", n, PLAN_TENSORS_MAX);
	r = making_init(&m);
	if (r == 0)
		r = plan_walk(&m);
	if (r < 0)
		return r;
	*ret_plan = m.plan;
	m.plan = (struct save_plan){0};
	return 0;
}

void save_plan_release(struct save_plan *p)
{
	if (!p)
		return;
	free(p->boxes);
	*p = (struct save_plan){0};
}
