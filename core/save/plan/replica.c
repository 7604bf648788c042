/* SPDX-License-Identifier: Apache-2.0
 *
 * replica: which bytes a rank hashes for its replicas to compare, and what it says of them.
 *
 * Blocks: the boxes that a rank holds of a tensor are the same on all its replicas, whatever the local strides. Each
 * box is cut into blocks that are neighbours in its row-major order: whole rows of its inner dimensions, as many as a
 * block has room for. A sample is the block that has the item that a hash of launch, step, component and name points
 * at; all of them together are FULL. So replicas need no message to choose alike, and over many steps every block is
 * sampled.
 *
 * A tensor that was declared in several parts has one hash, the sum of theirs: in which order a rank declared them does
 * not matter. */
#include "core/save/plan/replica.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/save/plan/groups_internal.h"
#include "core/save/plan/plan_internal.h"

struct replica_making {
	const struct save_tensor *tensors;
	uint32_t rank;
	struct save_replicas all;
	uint64_t room;                  /* for entries */
	struct save_groups groups;
	uint64_t seed;                  /* of this step */
	struct base_error *err;
};

static void making_release(struct replica_making *m)
{
	save_groups_release(&m->groups);
	save_replicas_release(&m->all);
}

static int making_memory(const struct replica_making *m)
{
	return base_no_memory_for(m->err, "the comparison of replicas");
}

static int making_init(struct replica_making *m, uint32_t n)
{
	m->all.tensors = calloc((size_t)n + 1, sizeof *m->all.tensors);
	return m->all.tensors ? 0 : making_memory(m);
}

/* ---- blocks ---- */

/* The block of `box` that has its row-major item `at`. */
static void block_at(uint32_t ndim, const struct tensor_box *box, unsigned item_bytes, uint64_t limit_bytes,
	uint64_t at, struct tensor_box *ret_block)
{
	uint64_t limit = limit_bytes / item_bytes, unit = 1, rows;
	uint32_t d = ndim; /* dimensions from d on are whole in a block; of d - 1 it has some, of those before it one */

	*ret_block = *box;
	for (; d > 0 && unit * box->size[d - 1] <= limit; d--)
		unit *= box->size[d - 1];
	if (d == 0)
		return;
	at /= unit;
	rows = limit / unit;
	for (uint32_t i = d; i-- > 0; at /= box->size[i]) {
		uint64_t index = at % box->size[i];

		if (i == d - 1)
			index -= index % rows;
		ret_block->offset[i] += index;
		ret_block->size[i] = i == d - 1 ? base_min(rows, box->size[i] - index) : 1;
	}
}

static int entry_add(struct replica_making *m, uint32_t t, const struct tensor_shard_box *held,
	const struct tensor_box *block)
{
	const struct tensor_sharding *s = &m->tensors[t].sharding;
	struct save_replica_entry *e;

	if (base_array_room(m->all.entries, m->room, m->all.nentries + 1) < 0)
		return making_memory(m);
	e = &m->all.entries[m->all.nentries++];
	e->tensor = t;
	e->at = *held;
	e->at.box = *block;
	for (uint32_t d = 0; d < s->shape.ndim; d++)
		e->at.local_offset += (block->offset[d] - held->box.offset[d]) * held->local_stride[d];
	e->bytes = tensor_box_items(&s->shape, block) * s->item_bytes;
	m->all.bytes += e->bytes;
	return 0;
}

/* The block that holds item `at` of all that is held. */
static int tensor_sample(struct replica_making *m, uint32_t t, struct save_held *held, uint64_t at)
{
	const struct tensor_sharding *s = &m->tensors[t].sharding;
	struct tensor_box block;

	for (const struct tensor_shard_box *box = save_held_first(held); box; box = save_held_next(held)) {
		uint64_t items = tensor_box_items(&s->shape, &box->box);

		if (at < items) {
			block_at(s->shape.ndim, &box->box, s->item_bytes, SAVE_REPLICA_SAMPLE_BYTES, at, &block);
			return entry_add(m, t, box, &block);
		}
		at -= items;
	}
	return 0;
}

static int tensor_full(struct replica_making *m, uint32_t t, struct save_held *held)
{
	const struct tensor_sharding *s = &m->tensors[t].sharding;
	struct tensor_box block;

	for (const struct tensor_shard_box *box = save_held_first(held); box; box = save_held_next(held)) {
		uint64_t items = tensor_box_items(&s->shape, &box->box);

		for (uint64_t at = 0; at < items; at += tensor_box_items(&s->shape, &block)) {
			int r;

			block_at(s->shape.ndim, &box->box, s->item_bytes, SAVE_REPLICA_FULL_BYTES, at, &block);
			r = entry_add(m, t, box, &block);
			if (r < 0)
				return r;
		}
	}
	return 0;
}

static uint64_t text_hash(uint64_t seed, const char *text)
{
	return base_xxh64_of(seed, text, strlen(text));
}

static int tensor_make(struct replica_making *m, uint32_t t)
{
	const struct save_tensor *tensor = &m->tensors[t];
	const struct tensor_sharding *s = &tensor->sharding;
	struct save_replica_tensor *row = &m->all.tensors[m->all.ntensors];
	struct save_held held;
	uint64_t items;
	uint32_t dims;
	bool whole;
	int r;

	dims = s->mesh && !tensor->buffer ? save_held_alike(tensor, s) : 0;
	if (dims == 0 || tensor_mesh_group_size(s->mesh, dims) < 2) /* no rank to be compared with */
		return 0;
	r = save_held_init(&held, tensor, s, m->rank, m->err);
	if (r < 0)
		return base_error_prefix(m->err, r, "tensor %u", t);
	items = held.shard.absent ? 0 : save_held_items(&held);
	if (items == 0)
		return 0;
	*row = (struct save_replica_tensor){.tensor = t, .first = m->all.nentries};
	r = save_groups_find(&m->groups, s->mesh, dims, &row->group);
	if (r < 0)
		return base_error_set(m->err, r, "tensor %u: %s", t, base_error_name(r));
	whole = tensor_dtype_is_integer(tensor->dtype) && items <= SAVE_REPLICA_WHOLE_BYTES / s->item_bytes;
	r = whole || m->all.mode == SAVE_REPLICAS_FULL ? tensor_full(m, t, &held)
		: tensor_sample(m, t, &held, text_hash(text_hash(m->seed, tensor->component), tensor->name) % items);
	row->n = m->all.nentries - row->first;
	m->all.ntensors++;
	return r;
}

int save_replicas_make(const struct save_tensor *tensors, uint32_t n, uint32_t rank, const char *save,
	enum save_replicas_mode mode, struct save_replicas *ret_replicas, struct base_error *err)
{
	base_cleanup(making_release) struct replica_making m = {.tensors = tensors, .rank = rank,
		.groups = {.rank = rank, .mode = mode}, .err = err};
	int r = mode == SAVE_REPLICAS_OFF ? 0 : making_init(&m, n);

	m.all.mode = mode;
	m.seed = text_hash(0, save);
	for (uint32_t t = 0; mode != SAVE_REPLICAS_OFF && t < n && r == 0; t++)
		r = tensor_make(&m, t);
	if (r < 0)
		return r;
	m.all.ngroups = m.groups.n;
	m.all.groups = base_steal(m.groups.names);
	*ret_replicas = m.all;
	m.all = (struct save_replicas){0};
	return 0;
}

void save_replicas_release(struct save_replicas *replicas)
{
	if (!replicas)
		return;
	free(replicas->entries);
	free(replicas->tensors);
	free(replicas->groups);
	*replicas = (struct save_replicas){0};
}

/* ---- what is said ---- */

struct replica_row { uint32_t number, group, tensor; struct base_xxh128 hash; };

static int row_order(const void *pa, const void *pb)
{
	const struct replica_row *a = pa, *b = pb;

	if (a->number != b->number)
		return a->number < b->number ? -1 : 1;
	return (a->group > b->group) - (a->group < b->group);
}

static void hash_add(struct base_xxh128 *to, const struct base_xxh128 *more)
{
	for (unsigned i = 0; i < sizeof *to; i += 8)
		base_put64(to->bytes + i, base_get64(to->bytes + i) + base_get64(more->bytes + i));
}

/* One row a tensor of the layout and group, by number; returns how many. */
static uint32_t rows_make(const struct save_replicas *replicas, const uint32_t *numbers,
	const struct base_xxh128 *hashes, uint64_t seed, struct replica_row *rows)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < replicas->ntensors; i++) {
		const struct save_replica_tensor *t = &replicas->tensors[i];

		rows[i] = (struct replica_row){.number = numbers[t->tensor], .group = t->group, .tensor = t->tensor};
		base_xxh128_of(seed, hashes + t->first, t->n * sizeof *hashes, &rows[i].hash);
	}
	qsort(rows, replicas->ntensors, sizeof *rows, row_order);
	for (uint32_t i = 0; i < replicas->ntensors; i++) {
		if (n && row_order(&rows[n - 1], &rows[i]) == 0)
			hash_add(&rows[n - 1].hash, &rows[i].hash);
		else
			rows[n++] = rows[i];
	}
	return n;
}

static int sample_order(const void *pa, const void *pb)
{
	const struct proto_sample *a = pa, *b = pb;

	if (a->tensor != b->tensor)
		return a->tensor < b->tensor ? -1 : 1;
	return memcmp(a->group, b->group, sizeof a->group);
}

static int replica_order(const void *pa, const void *pb)
{
	const struct proto_replica *a = pa, *b = pb;

	return memcmp(a->group, b->group, sizeof a->group);
}

/* first: where each group's rows begin in `order`, which holds rows by group, and in a group by number. */
static void rows_by_group(const struct replica_row *rows, uint32_t n, uint32_t ngroups, uint32_t *first,
	uint32_t *order)
{
	for (uint32_t i = 0; i < n; i++)
		first[rows[i].group + 1]++;
	for (uint32_t g = 0; g < ngroups; g++)
		first[g + 1] += first[g];
	for (uint32_t i = n; i-- > 0;) /* from the end, so that first[g + 1] goes down to where g begins */
		order[--first[rows[i].group + 1]] = i;
}

static int replicas_digest(const struct save_replicas *replicas, const struct save_tensor *tensors,
	const struct replica_row *rows, uint32_t n, struct proto_replica *ret_replicas)
{
	base_cleanup_free uint32_t *first = calloc((size_t)replicas->ngroups + 2, sizeof *first);
	base_cleanup_free uint32_t *order = calloc((size_t)n + 1, sizeof *order);
	base_cleanup_buf struct base_buf bytes = BASE_BUF_INIT;
	struct base_digest digest;

	if (!first || !order)
		return -ENOMEM;
	rows_by_group(rows, n, replicas->ngroups, first, order);
	for (uint32_t g = 0; g < replicas->ngroups; g++) {
		uint32_t end = g + 1 < replicas->ngroups ? first[g + 2] : n;

		bytes.len = 0;
		for (uint32_t i = first[g + 1]; i < end; i++) {
			const struct replica_row *row = &rows[order[i]];
			const struct save_tensor *t = &tensors[row->tensor];

			base_buf_append(&bytes, t->component, strlen(t->component) + 1);
			base_buf_append(&bytes, t->name, strlen(t->name) + 1);
			base_buf_append(&bytes, row->hash.bytes, sizeof row->hash);
		}
		if (bytes.error)
			return bytes.error;
		base_sha256(bytes.data, bytes.len, &digest);
		memcpy(ret_replicas[g].group, replicas->groups[g], 16);
		memcpy(ret_replicas[g].digest, digest.bytes, 16);
	}
	return 0;
}

int save_replicas_finish(const struct save_replicas *replicas, const struct save_tensor *tensors,
	const uint32_t *numbers, const struct base_xxh128 *hashes, uint64_t seed, struct save_replicas_rows *ret_rows)
{
	base_cleanup_free struct replica_row *rows = calloc((size_t)replicas->ntensors + 1, sizeof *rows);
	base_cleanup(save_replicas_rows_release) struct save_replicas_rows made = {
		.samples = calloc((size_t)replicas->ntensors + 1, sizeof *made.samples),
		.replicas = calloc((size_t)replicas->ngroups + 1, sizeof *made.replicas)};
	int r;

	if (!rows || !made.samples || !made.replicas)
		return -ENOMEM;
	made.nsamples = rows_make(replicas, numbers, hashes, seed, rows);
	for (uint32_t i = 0; i < made.nsamples; i++) {
		made.samples[i].tensor = rows[i].number;
		memcpy(made.samples[i].group, replicas->groups[rows[i].group], 16);
		memcpy(made.samples[i].hash, rows[i].hash.bytes, 16);
	}
	qsort(made.samples, made.nsamples, sizeof *made.samples, sample_order);
	r = replicas_digest(replicas, tensors, rows, made.nsamples, made.replicas);
	if (r < 0)
		return r;
	qsort(made.replicas, replicas->ngroups, sizeof *made.replicas, replica_order);
	made.nreplicas = (uint32_t)base_min(replicas->ngroups, PROTO_REPLICAS_MAX); /* others are not compared */
	*ret_rows = made;
	made = (struct save_replicas_rows){0};
	return 0;
}

void save_replicas_rows_release(struct save_replicas_rows *rows)
{
	if (!rows)
		return;
	free(rows->samples);
	free(rows->replicas);
	*rows = (struct save_replicas_rows){0};
}
