/* SPDX-License-Identifier: Apache-2.0
 *
 * prepare: from what was declared to what is to be done: tensors in the order of the layout, which all ranks agree on;
 * the layout; this rank's plan. Plans come out of a cache by a digest of everything that they depend on; the layout of
 * equal declarations is kept for the next save under the same digest. A caller waits for all this, so the layout is
 * made as tables only, which is what copying asks; its object, which is stored, is made by the persister meanwhile, and
 * what is hashed to show that replicas hold the same is chosen when the last bands have been handed out.
 *
 * Who stores the layout object: the lowest rank of those that are in every mesh of it. All ranks with this layout are
 * among these, since each lists the tensors of its own meshes. Should that rank have tensors besides (its layout is
 * another one then), the layout would be stored by nobody: so every other rank refers to the copy in a base, or stores
 * it too (persist.c). */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/save/saver_internal.h"

static int tensor_compare(const struct saver_tensor *a, const struct saver_tensor *b)
{
	int order = a->component == b->component ? 0 : strcmp(a->component, b->component);

	return order ? order : strcmp(a->name, b->name);
}

static int tensor_order(const void *pa, const void *pb)
{
	const struct saver_tensor *a = pa, *b = pb;
	int order = tensor_compare(a, b);

	/* boxes of one tensor: by their first offsets, whatever order they were declared in */
	for (uint32_t d = 0; order == 0 && d < a->plan.sharding.shape.ndim && a->plan.boxes->n && b->plan.boxes->n; d++)
		order = (a->plan.boxes->pairs[2 * d] > b->plan.boxes->pairs[2 * d])
			- (a->plan.boxes->pairs[2 * d] < b->plan.boxes->pairs[2 * d]);
	return order;
}

static bool tensors_are_sorted(const struct save_flight *f)
{
	for (uint32_t i = 1; i < f->ntensors; i++)
		if (tensor_compare(&f->tensors[i - 1], &f->tensors[i]) >= 0)
			return false;
	return true;
}

static int prepare_order(struct save_flight *f, struct base_error *err)
{
	if (f->ntensors && !tensors_are_sorted(f))
		qsort(f->tensors, f->ntensors, sizeof *f->tensors, tensor_order);
	if (f->ntensors)
		f->plan_tensors = (struct save_plan_tensors){&f->tensors[0].plan, sizeof f->tensors[0], f->ntensors};
	f->names = malloc((f->ntensors + 1) * sizeof *f->names);
	if (!f->names)
		return base_error_set(err, -ENOMEM, "out of memory");
	for (uint32_t i = 0; i < f->ntensors; i++)
		f->names[i] = (struct save_replica_name){f->tensors[i].component, f->tensors[i].name};
	return 0;
}

static int prepare_key(struct save_flight *f, struct save_plan_key *ret_key, struct base_error *err)
{
	struct save_plan_key_builder b;

	save_plan_key_init(&b, f->s->options.rank, f->s->options.world, f->s->mesh);
	for (uint32_t i = 0; i < f->ntensors; i++) {
		const struct saver_tensor *t = &f->tensors[i];
		struct save_plan_key_tensor more = {.component = t->component, .name = t->name, .dtype = t->dtype,
			.local_ndim = t->local.ndim, .local_shape = t->local.dim, .strides = t->strides};

		save_plan_key_tensor(&b, &t->plan, &more);
	}
	return save_plan_key_final(&b, ret_key) < 0 ? base_error_set(err, -ENOMEM, "out of memory") : 0;
}

/* ---- the layout ---- */

static void structure_free(struct saver_structure *t)
{
	if (!t)
		return;
	store_layout_free(t->layout);
	base_buf_release(&t->layout_object);
	free(t->numbers);
	free(t);
}

void saver_structure_unref(struct save_saver *s, struct saver_structure *t)
{
	bool last;

	if (!t)
		return;
	pthread_mutex_lock(&s->lock);
	last = --t->refs == 0;
	pthread_mutex_unlock(&s->lock);
	if (last)
		structure_free(t);
}

/* Out of those that are kept; or NULL. */
static struct saver_structure *structure_find(struct save_saver *s, const struct save_plan_key *key)
{
	struct saver_structure *found = NULL;

	pthread_mutex_lock(&s->lock);
	for (unsigned i = 0; i < SAVER_STRUCTURES && !found; i++)
		if (s->structures[i] && base_digest_equal(&s->structures[i]->key.digest, &key->digest))
			found = s->structures[i];
	if (found) {
		found->refs++;
		found->used = ++s->clock;
	}
	pthread_mutex_unlock(&s->lock);
	return found;
}

/* Takes the place of the one that was used the longest ago. */
static void structure_keep(struct save_saver *s, struct saver_structure *t)
{
	struct saver_structure *old;
	unsigned at = 0;

	pthread_mutex_lock(&s->lock);
	for (unsigned i = 1; i < SAVER_STRUCTURES && s->structures[at]; i++)
		if (!s->structures[i] || s->structures[i]->used < s->structures[at]->used)
			at = i;
	old = s->structures[at];
	s->structures[at] = t;
	t->refs++;
	t->used = ++s->clock;
	pthread_mutex_unlock(&s->lock);
	saver_structure_unref(s, old);
}

/* The lowest rank of the smallest mesh that is in all others; UINT32_MAX: there is none. */
static uint32_t layout_lowest_rank(const struct save_flight *f)
{
	const struct tensor_mesh *meshes[64], *smallest = NULL;
	uint32_t n = 0, lowest = UINT32_MAX, at[TENSOR_MAX_DIMS];

	for (uint32_t i = 0; i < f->ntensors; i++) {
		const struct tensor_mesh *m = f->tensors[i].plan.sharding.mesh;
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

/* The boxes of tensor i in all its parts, which stand together. One that was given twice would be stored twice. */
static int layout_check_parts(const struct save_flight *f, uint32_t i, struct base_error *err)
{
	const struct tensor_shape *shape = &f->tensors[i].plan.sharding.shape;
	struct tensor_boxes all = {.ndim = shape->ndim};
	uint32_t end = i;
	size_t at = 0;
	int rc;

	for (; end < f->ntensors && tensor_compare(&f->tensors[i], &f->tensors[end]) == 0; end++)
		all.n += f->tensors[end].plan.boxes->n;
	all.room = all.n;
	all.pairs = calloc(all.n + 1, 2 * (shape->ndim + 1) * sizeof *all.pairs);
	if (!all.pairs)
		return base_error_set(err, -ENOMEM, "out of memory");
	for (uint32_t k = i; k < end; k++) {
		const struct tensor_boxes *part = f->tensors[k].plan.boxes;

		memcpy(all.pairs + at, part->pairs, part->n * shape->ndim * 2 * sizeof *part->pairs);
		at += part->n * shape->ndim * 2;
	}
	rc = tensor_shard_list_check(shape, &all, err);
	free(all.pairs);
	return rc == 0 ? 0 : base_error_prefix(err, rc, "tensor %s/%.*s is given twice", f->tensors[i].component,
		store_layout_shown(f->tensors[i].name, f->tensors[i].name_len), f->tensors[i].name);
}

static struct store_layout_builder *layout_builder(const struct save_flight *f)
{
	const struct proto_store *info = &f->s->store->info;
	struct store_layout_builder *b = store_layout_builder_new(
		(struct tensor_grid_params){info->min_bytes, info->target_bytes, info->row_bytes});
	size_t name_bytes = 0;

	for (uint32_t i = 0; i < f->ntensors; i++)
		name_bytes += f->tensors[i].name_len;
	if (!b || store_layout_builder_reserve(b, f->ntensors, name_bytes) == 0)
		return b;
	store_layout_builder_free(b);
	return NULL;
}

/* Tensors in their order; the boxes of one that was given in several parts stand together. */
static int layout_build(struct save_flight *f, struct saver_structure *t, struct base_error *err)
{
	struct store_layout_builder *b = layout_builder(f);
	base_cleanup_free uint32_t *tags = NULL;
	uint32_t number = 0;
	int rc = b ? 0 : base_error_set(err, -ENOMEM, "out of memory");

	for (uint32_t i = 0; rc == 0 && i < f->ntensors; i++) {
		const struct saver_tensor *from = &f->tensors[i];
		const struct tensor_sharding *s = &from->plan.sharding;
		struct store_layout_held held = {.buffer = from->plan.buffer, .mesh = s->mesh,
			.placements = s->placement, .nplacements = s->mesh ? s->mesh->ndim : 0};

		if (from->boxes || from->plan.flat) /* rows say who stored what */
			held.mesh = NULL, held.placements = NULL, held.nplacements = 0;
		if (i && from->boxes && tensor_compare(&f->tensors[i - 1], from) == 0) {
			t->numbers[i] = number - 1;
			if (i == 1 || tensor_compare(&f->tensors[i - 2], from) != 0) /* its second part */
				rc = layout_check_parts(f, i - 1, err);
			continue;
		}
		t->numbers[i] = number;
		rc = store_layout_builder_add_held(b, from->component, from->name, from->name_len, from->dtype,
			&s->shape, number++, &held, err);
	}
	if (rc == 0)
		rc = store_layout_builder_tables(b, &t->layout, &tags, err);
	store_layout_builder_free(b);
	return rc;
}

int saver_structure_encode(struct saver_structure *t, struct base_error *err)
{
	int rc = store_layout_encode(t->layout, &t->layout_object, err);

	if (rc < 0)
		base_buf_release(&t->layout_object);
	return rc;
}

static int prepare_structure(struct save_flight *f, const struct save_plan_key *key, struct base_error *err)
{
	struct saver_structure *t = structure_find(f->s, key);
	uint32_t lowest;
	int rc;

	f->structure = t;
	if (t)
		return 0;
	t = calloc(1, sizeof *t);
	if (!t)
		return base_error_set(err, -ENOMEM, "out of memory");
	t->key = *key;
	t->refs = 1;
	t->numbers = malloc((f->ntensors + 1) * sizeof *t->numbers);
	rc = t->numbers ? layout_build(f, t, err) : base_error_set(err, -ENOMEM, "out of memory");
	if (rc < 0) {
		structure_free(t);
		return rc;
	}
	lowest = layout_lowest_rank(f);
	t->stores_layout = lowest == UINT32_MAX || lowest == f->s->options.rank;
	structure_keep(f->s, t);
	f->structure = t;
	return 0;
}

/* ---- plan, samples ---- */

static int prepare_plan(struct save_flight *f, const struct save_plan_key *key, uint32_t *ret_cached,
	struct base_error *err)
{
	int cached = save_plan_cache_get(f->s->plans, key, &f->plan_tensors, &f->plan);
	struct save_plan made = {0};
	int rc;

	*ret_cached = (uint32_t)cached;
	if (cached)
		return 0;
	rc = save_plan_make(&f->plan_tensors, f->s->options.rank, &made, err);
	if (rc < 0)
		return rc;
	f->plan = save_plan_cache_put(f->s->plans, key, &f->plan_tensors, &made);
	if (f->plan)
		return 0;
	save_plan_release(&made);
	return base_error_set(err, -ENOMEM, "out of memory");
}

/* Which blocks are compared follows from what all ranks of the save have in common: not from how many saves this one
 * has begun. The attempt may not have its name yet. */
int saver_prepare_samples(struct save_flight *f, struct base_error *err)
{
	char seed[PROTO_ATTEMPT_MAX];
	int rc;

	snprintf(seed, sizeof seed, "%s-%llu", store_launch_name(f->s->launch), (unsigned long long)f->options.step);
	rc = save_replicas_make(&f->plan_tensors, f->names, f->s->options.rank, seed,
		f->s->options.replicas, &f->replicas, err);
	if (rc < 0)
		return rc;
	f->sample_hashes = calloc(f->replicas.nentries + 1, sizeof *f->sample_hashes);
	return f->sample_hashes ? 0 : base_error_set(err, -ENOMEM, "out of memory");
}

int saver_prepare(struct save_flight *f, struct base_error *err)
{
	uint64_t begin = base_realtime_ns(), end;
	struct save_plan_key key;
	uint32_t cached = 0;
	int rc = prepare_order(f, err);

	if (rc == 0)
		rc = prepare_key(f, &key, err);
	if (rc == 0)
		rc = prepare_structure(f, &key, err);
	if (rc == 0)
		rc = prepare_plan(f, &key, &cached, err);
	if (rc < 0)
		return rc;
	end = base_realtime_ns();
	f->w->layout = f->structure->layout;
	f->w->plan = f->plan;
	f->w->plan_tensor = f->structure->numbers;
	f->w->tensor_bytes = f->plan->bytes;
	f->w->rank = f->s->options.rank;
	f->w->world = f->s->options.world;
	pthread_mutex_lock(&f->s->lock);
	saver_phase_note(f, SAVE_PLAN, begin, end - begin, 0);
	f->info.plan_ns = end - begin;
	f->info.bytes_held = f->plan->held_bytes;
	f->info.bytes_total = f->plan->bytes + f->w->blob_bytes;
	f->info.bytes_staged = f->w->blob_bytes; /* copied when they were declared */
	f->info.plan_cached = cached;
	pthread_mutex_unlock(&f->s->lock);
	saver_node_meet(f->s);
	return 0;
}
