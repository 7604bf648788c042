/* SPDX-License-Identifier: Apache-2.0
 *
 * prepare: makes work of the declarations. It sorts the tensors in the order of the layout, on which all ranks agree,
 * and makes the layout and this rank's plan. Layout and plan are kept for the next save of equal declarations, under a
 * digest of everything that they depend on. The caller waits for all this, so only the layout's tables are made, which
 * are enough for copying; the persister makes the layout object meanwhile, and the blocks that show that replicas hold
 * the same are chosen when the last bands have been handed out.
 *
 * The layout object is stored by the lowest rank of those that are in all meshes of the layout. All ranks with this
 * layout are among these, since each lists the tensors of its own meshes. If that rank has other tensors as well, its
 * layout is another one, and no rank would store this one. So every other rank refers to the copy in a base, or stores
 * the layout too (persist.c). */
#include <stdio.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/save/saver/saver_internal.h"

#define PREPARE_RETRY 16u

static int tensor_compare(const struct save_tensor *a, const struct save_tensor *b)
{
	int order = a->component == b->component ? 0 : strcmp(a->component, b->component);

	return order ? order : strcmp(a->name, b->name);
}

static int tensor_order(const void *pa, const void *pb)
{
	const struct save_tensor *a = pa, *b = pb;
	int order = tensor_compare(a, b);

	/* boxes of one tensor: by their first offsets, whatever order they were declared in */
	for (uint32_t d = 0; order == 0 && d < a->sharding.shape.ndim && a->boxes->n && b->boxes->n; d++)
		order = (a->boxes->pairs[2 * d] > b->boxes->pairs[2 * d])
			- (a->boxes->pairs[2 * d] < b->boxes->pairs[2 * d]);
	return order;
}

static bool tensors_are_sorted(const struct save_flight *f)
{
	for (uint32_t i = 1; i < f->ntensors; i++)
		if (tensor_compare(&f->tensors[i - 1], &f->tensors[i]) >= 0)
			return false;
	return true;
}

/* ---- the layout ---- */

/* The lowest rank of the smallest mesh that is in all other meshes too; UINT32_MAX: there is none. */
static uint32_t layout_lowest_rank(const struct save_flight *f)
{
	const struct tensor_mesh *meshes[64], *smallest = NULL;
	uint32_t n = 0, lowest = UINT32_MAX, at[TENSOR_MAX_DIMS];

	for (uint32_t i = 0; i < f->ntensors; i++) {
		const struct tensor_mesh *m = f->tensors[i].sharding.mesh;
		uint32_t k = n;

		if (!m)
			return f->s->options.rank;
		while (k > 0 && meshes[k - 1] != m)
			k--;
		if (k)
			continue;
		if (n == 64)
			return UINT32_MAX;
		meshes[n++] = m;
		if (!smallest || m->count < smallest->count)
			smallest = m;
	}
	for (uint32_t p = 0; smallest && p < smallest->count; p++) {
		uint32_t rank = tensor_mesh_rank_at(smallest, p), k = 0;

		while (rank < lowest && k < n && tensor_mesh_coordinate(meshes[k], rank, at) == 0)
			k++;
		if (k == n)
			lowest = base_min(lowest, rank);
	}
	return lowest;
}

/* Checks the boxes of tensor i in all its entries, which are next to each other: a box that was given twice would be
 * stored twice. */
static int layout_check_parts(const struct save_flight *f, uint32_t i, struct base_error *err)
{
	const struct tensor_shape *shape = &f->tensors[i].sharding.shape;
	struct tensor_boxes all = {.ndim = shape->ndim};
	uint32_t end = i;
	size_t at = 0;
	int r;

	for (; end < f->ntensors && tensor_compare(&f->tensors[i], &f->tensors[end]) == 0; end++)
		all.n += f->tensors[end].boxes->n;
	all.room = all.n;
	all.pairs = calloc(all.n + 1, 2 * (shape->ndim + 1) * sizeof *all.pairs);
	if (!all.pairs)
		return base_no_memory(err);
	for (uint32_t k = i; k < end; k++) {
		const struct tensor_boxes *part = f->tensors[k].boxes;

		memcpy(all.pairs + at, part->pairs, part->n * shape->ndim * 2 * sizeof *part->pairs);
		at += part->n * shape->ndim * 2;
	}
	r = tensor_shard_list_check(shape, &all, err);
	free(all.pairs);
	return r == 0 ? 0 : base_error_prefix(err, r, "tensor %s/%.*s is given twice", f->tensors[i].component,
		store_layout_shown(f->tensors[i].name, f->tensors[i].name_len), f->tensors[i].name);
}

static struct store_layout_builder *layout_builder(const struct save_flight *f)
{
	struct store_layout_builder *b = store_layout_builder_new(f->s->store->info.grid);
	size_t name_bytes = 0;

	for (uint32_t i = 0; i < f->ntensors; i++)
		name_bytes += f->tensors[i].name_len;
	if (!b || store_layout_builder_reserve(b, f->ntensors, name_bytes) == 0)
		return b;
	store_layout_builder_free(b);
	return NULL;
}

/* Sorts the tensors; the entries of a tensor that was given in several come next to each other. */
static int layout_build(const struct save_flight *f, struct save_planned *p, struct base_error *err)
{
	struct store_layout_builder *b = layout_builder(f);
	base_cleanup_free uint32_t *tags = NULL;
	uint32_t number = 0;
	int r = b ? 0 : base_no_memory(err);

	for (uint32_t i = 0; r == 0 && i < f->ntensors; i++) {
		const struct save_tensor *from = &f->tensors[i];
		const struct tensor_sharding *s = &from->sharding;
		struct store_layout_held held = {.buffer = from->buffer, .mesh = s->mesh,
			.placements = s->placement, .nplacements = s->mesh ? s->mesh->ndim : 0};

		if (from->boxes || from->flat) /* rows say which rank stored what */
			held.mesh = NULL, held.placements = NULL, held.nplacements = 0;
		if (i && from->boxes && tensor_compare(&f->tensors[i - 1], from) == 0) {
			p->numbers[i] = number - 1;
			if (i == 1 || tensor_compare(&f->tensors[i - 2], from) != 0) /* its second part */
				r = layout_check_parts(f, i - 1, err);
			continue;
		}
		p->numbers[i] = number;
		r = store_layout_builder_add_held(b, from->component, from->name, from->name_len, from->dtype,
			&s->shape, number++, &held, err);
	}
	if (r == 0)
		r = store_layout_builder_tables(b, &p->layout, &tags, err);
	store_layout_builder_free(b);
	return r;
}

/* ---- plan and layout together ---- */

static int planned_make(const struct save_flight *f, struct save_planned *p, struct base_error *err)
{
	uint32_t lowest = layout_lowest_rank(f);
	int r;

	p->stores_layout = lowest == UINT32_MAX || lowest == f->s->options.rank;
	p->numbers = malloc((f->ntensors + 1) * sizeof *p->numbers);
	r = p->numbers ? layout_build(f, p, err) : base_no_memory(err);
	return r < 0 ? r : save_plan_make(f->tensors, f->ntensors, f->s->store->info.grid, f->s->options.rank, &p->plan,
		err);
}

static int prepare_planned(struct save_flight *f, const struct base_digest *key, struct base_error *err)
{
	struct save_planned made = {0};
	int r;

	f->planned = save_plan_cache_get(f->s->plans, key);
	if (f->planned)
		return 1;
	r = planned_make(f, &made, err);
	if (r == 0) {
		f->planned = save_plan_cache_put(f->s->plans, key, &made);
		if (!f->planned)
			r = base_no_memory(err);
	}
	save_planned_release(&made);
	return r;
}

/* ---- samples ---- */

/* The blocks to compare follow from what all ranks of the save have in common, not from how many saves this rank has
 * begun. The attempt may not have its name yet. */
int saver_prepare_samples(struct save_flight *f, struct base_error *err)
{
	char seed[PROTO_ATTEMPT_MAX];
	int r;

	snprintf(seed, sizeof seed, "%s-%llu", commit_launch_name(f->s->launch), (unsigned long long)f->options.step);
	r = save_replicas_make(f->tensors, f->ntensors, f->s->options.rank, seed, f->s->options.replicas, &f->replicas,
		err);
	if (r < 0)
		return r;
	f->sample_hashes = calloc(f->replicas.nentries + 1, sizeof *f->sample_hashes);
	return f->sample_hashes ? 0 : base_no_memory(err);
}

/* ---- what encoding was worth ---- */

/* Of a tensor of which no piece got smaller the last time, one piece of PREPARE_RETRY is tried, another one at each
 * save; if that one gets smaller, the next save tries all. */
static void prepare_worth(struct save_flight *f)
{
	const enum save_worth *before = f->before ? f->before->worth : NULL;
	enum save_worth *worth = f->pieces->worth;
	uint64_t piece = 0;

	for (uint64_t at = 0; before && at < f->plan->nboxes; at++) {
		uint64_t n = f->plan->boxes[at].pieces, end = piece + n;
		bool all = memchr(before + piece, SAVE_WORTH_IT, n);

		for (; piece < end; piece++) {
			bool again = all || (piece + f->number) % PREPARE_RETRY == 0;

			worth[piece] = again && before[piece] == SAVE_WORTH_NOTHING ? SAVE_WORTH_UNKNOWN
				: before[piece];
		}
	}
}

int saver_prepare(struct save_flight *f, struct base_error *err)
{
	uint64_t begin = base_realtime_ns(), end;
	struct base_digest key;
	int r;

	if (f->ntensors && !tensors_are_sorted(f))
		qsort(f->tensors, f->ntensors, sizeof *f->tensors, tensor_order);
	if (save_plan_key(f->tensors, f->ntensors, &key) < 0)
		return base_no_memory(err);
	r = prepare_planned(f, &key, err);
	if (r < 0)
		return r;
	f->plan = &f->planned->plan;
	if (saver_same_prepare(f, &key, err) < 0)
		return -ENOMEM;
	end = base_realtime_ns();
	save_writer_prepared(f->w, f->planned);
	pthread_mutex_lock(&f->s->lock);
	saver_same_ask(f);
	saver_phase_note(f, SAVE_PLAN, begin, end - begin, 0);
	f->info.plan_ns = end - begin;
	f->info.stats.bytes_held = f->plan->held_bytes;
	f->info.stats.bytes_staged = save_writer_blob_bytes(f->w); /* copied when they were declared */
	f->info.bytes_total = f->plan->bytes + f->info.stats.bytes_staged;
	f->info.stats.plan_cached = (uint32_t)r;
	pthread_mutex_unlock(&f->s->lock);
	prepare_worth(f);
	saver_node_count(f->s);
	return 0;
}
