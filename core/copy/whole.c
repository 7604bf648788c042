/* SPDX-License-Identifier: Apache-2.0
 *
 * whole: see whole.h. It is an import whose source is the step itself: the layout and the plan of one writer, bands of
 * them read by fills of a box, and the writer's own way from there (core/save/write).
 *
 * The layout has the tensors of all ranks, and no meshes: a rank stores nothing outside its shard, and rank 0 stores
 * everything now (docs/format/layout.md). Who holds what is said by the layouts of the other ranks, which stay. What
 * rank 0's own layout says alone is said here again, where it gives rank 0 the whole tensor. */
#include "core/copy/whole.h"

#include "core/copy/copy_internal.h"
#include "core/load/fill/fill.h"
#include "core/step/open.h"
#include "core/tensor/shard.h"

struct whole {
	struct upkeep_whole *q;
	struct load_step *step;
	struct save_planned planned;            /* tensors have the numbers that they have in the step */
	const struct proto_manifest_layout *lost; /* rank 0's layout, if no other rank has it */
	struct store_opened_part part;          /* rank 0's, as it is */
	struct tensor_mesh **meshes; uint32_t nmeshes; /* of that layout, by number; NULL: not made yet */
	struct whole_blob *blobs;
	uint64_t done;
};

struct whole_blob { struct store *store; const char *pack; struct pack_object_ref ref; };

static void whole_release(struct whole *w)
{
	save_planned_release(&w->planned);
	store_opened_part_release(&w->part);
	load_step_unref(w->step);
	for (uint32_t i = 0; i < w->nmeshes; i++)
		tensor_mesh_free(w->meshes[i]);
	free(w->meshes);
	free(w->blobs);
}

/* ---- the layout ---- */

/* Does it give rank 0 all of the tensor? */
static bool held_whole(const struct store_layout *l, uint32_t number, const struct store_layout_held *held)
{
	struct tensor_sharding s = {.item_bytes = tensor_dtype_bytes(store_layout_dtype(l, number)),
		.mesh = held->mesh, .placement = held->placements};
	struct tensor_shard shard;
	struct tensor_box box;

	store_layout_shape(l, number, &s.shape);
	tensor_box_whole(&s.shape, &box);
	return tensor_sharding_check(&s, held->nplacements, NULL) == 0 &&
		tensor_shard_of(&s, 0, NULL, &shard, NULL) == 0 && !shard.absent && tensor_shard_has(&shard, &box);
}

/* What rank 0's layout says of a tensor that it alone lists so; placements are the caller's to free. */
static int layout_lost(struct whole *w, uint32_t tensor, struct store_layout_held *held,
	struct tensor_placements **ret_p, struct base_error *err)
{
	uint32_t number, at = 0;
	const struct store_layout *l = load_step_layout(w->step, tensor, &number);
	const struct store_layout *more = load_step_layout_more(w->step, tensor, &at);
	const uint32_t mesh = l->m.tensors[number].mesh - 1;
	int r = 0;

	if (!w->meshes && (w->meshes = calloc(l->m.nmeshes, sizeof *w->meshes)))
		w->nmeshes = l->m.nmeshes;
	if (!w->meshes)
		return base_no_memory(err);
	if (!w->meshes[mesh])
		r = store_layout_mesh(l, number, &w->meshes[mesh], err);
	if (r == 0)
		r = store_layout_placements(l, number, ret_p, err);
	if (r < 0)
		return r;
	*held = (struct store_layout_held){held->buffer, w->meshes[mesh], (*ret_p)->at, (*ret_p)->n};
	if (held_whole(l, number, held))
		return 0;
	held->mesh = NULL;
	return more && more->m.tensors[at].mesh ? 0 : -ENOTSUP;
}

static int layout_add(struct whole *w, struct store_layout_builder *b, uint32_t tensor, struct base_error *err)
{
	uint32_t number;
	const struct store_layout *l = load_step_layout(w->step, tensor, &number);
	const struct proto_layout_tensor *x = &l->m.tensors[number];
	base_cleanup_free struct tensor_placements *p = NULL;
	struct store_layout_held held = {.buffer = x->flags & 1};
	struct load_tensor_info t;
	int r = 0;

	load_step_tensor_info(w->step, tensor, &t);
	if (w->lost && x->mesh && x->placement && base_digest_equal(&l->digest, &w->lost->digest))
		r = layout_lost(w, tensor, &held, &p, err);
	if (r == -ENOTSUP)
		base_error_set(err, r, "only the layout of rank 0 says how ranks hold tensor %s/%.*s, and whole "
			"tensors would lose that: it stays as it is", t.component,
			store_layout_shown(t.name, t.name_len), t.name);
	return r < 0 ? r : store_layout_builder_add_held(b, t.component, t.name, t.name_len, t.dtype, &t.shape, tensor,
		&held, err);
}

BASE_CLEANUP_DEFINE(struct store_layout_builder *, store_layout_builder_free)

static int layout_make(struct whole *w, struct base_error *err)
{
	const struct proto_manifest *m = w->q->m;
	uint32_t number, n = 1;
	const struct tensor_grid_params grid = load_step_layout(w->step, 0, &number)->m.grid;
	base_cleanup(store_layout_builder_free_p) struct store_layout_builder *b = store_layout_builder_new(grid);
	base_cleanup_free uint32_t *tags = NULL;
	int r = b ? 0 : base_no_memory(err);

	while (n < m->nranks && m->ranks[n].layout != m->ranks[0].layout)
		n++;
	w->lost = n == m->nranks ? &m->layouts[m->ranks[0].layout] : NULL;
	for (uint32_t i = 0; r == 0 && i < load_step_tensor_count(w->step); i++)
		if (tensor_grid_params_equal(&load_step_layout(w->step, i, &number)->m.grid, &grid))
			r = layout_add(w, b, i, err);
		else
			r = base_error_set(err, -ENOTSUP, "its layouts have several grids, and "
				"whole tensors have one: it stays as it is");
	return r < 0 ? r : store_layout_builder_finish(b, &w->planned.layout, &w->planned.layout_object, &tags, err);
}

/* ---- bytes ---- */

static int whole_read_box(void *arg, struct save_band *b)
{
	const struct whole *w = arg;
	struct load_fill *f = load_fill_new(w->step, 1, LOAD_FILL_REHASH);
	uint64_t stride[TENSOR_MAX_DIMS], bytes = b->grid.item_bytes;
	int r;

	for (unsigned d = b->grid.shape.ndim; d-- > 0; bytes *= b->box.size[d])
		stride[d] = bytes;
	r = f ? load_fill_add(f, b->tensor, &b->box, b->in, stride, &b->err) : base_no_memory(&b->err);
	if (r == 0)
		r = load_fill_run(f, &b->err);
	load_fill_free(f);
	return r;
}

static int whole_read(void *arg, struct save_band *b)
{
	const struct whole *w = arg;

	if (w->q->cancelled && w->q->cancelled())
		return base_error_set(&b->err, -EINTR, "interrupted");
	return save_band_read_by(b, whole_read_box, arg);
}

static void whole_appended(void *arg, const struct save_band *b, const struct save_engine_appended *cost)
{
	struct whole *w = arg;

	(void)cost;
	w->done += b->len;
	if (w->q->progress)
		w->q->progress(w->q->arg, w->done, w->planned.plan.bytes);
}

static int blob_read(void *arg, uint64_t offset, void *bytes, size_t len, struct base_error *err)
{
	const struct whole_blob *b = arg;

	return copy_read_blob(b->store, b->pack, &b->ref, offset, bytes, len, err);
}

static int add_blobs(struct whole *w, struct save_writer *writer, struct base_error *err)
{
	const struct proto_part *part = &w->part.part;
	int r = 0;

	w->blobs = calloc((size_t)part->nblobs + 1, sizeof *w->blobs);
	if (!w->blobs)
		return base_no_memory(err);
	for (uint32_t i = 0; r == 0 && i < part->nblobs; i++) {
		const struct proto_blob *b = &part->blobs[i];
		struct pack_object_ref ref = pack_object_ref_from(&b->ref);

		if (b->len && (ref.pack >= w->part.npacks || ref.raw_len != b->len))
			return base_error_set(err, -BASE_EFORMAT, "the reference to blob %.400s in the part of rank 0 "
				"is wrong", b->name);
		w->blobs[i] = (struct whole_blob){w->q->store, b->len ? w->part.packs[ref.pack] : NULL, ref};
		r = save_writer_blob_given(writer, b->name, b->per_rank, b->len, &ref.digest,
			(struct save_source){blob_read, &w->blobs[i]}, err);
	}
	return r;
}

/* ---- the writer ---- */

/* What rank 0 measured, and its samples, by the numbers of the new layout: both sort tensors alike. */
static int write_part(struct whole *w, struct save_writer *writer, struct base_error *err)
{
	const struct proto_part *part = &w->part.part;
	const struct proto_manifest *m = w->q->m;
	base_cleanup_free struct proto_sample *samples = calloc((size_t)part->nsamples + 1, sizeof *samples);
	struct save_measured said = {.timings = part->timings, .ntimings = part->ntimings, .samples = samples,
		.host = m->hosts[m->ranks[0].host]};
	struct store_layout *l = NULL;
	int r = samples ? store_open_layout(w->q->store, m, m->ranks[0].layout, &l, err) : base_no_memory(err);

	for (uint32_t i = 0; r == 0 && i < part->nsamples; i++) {
		const char *name;
		uint32_t len;
		int64_t at;

		if (part->samples[i].tensor >= l->m.ntensors)
			continue;
		name = store_layout_name(l, part->samples[i].tensor, &len);
		at = store_layout_find(w->planned.layout, store_layout_component(l, part->samples[i].tensor), name,
			len);
		samples[said.nsamples] = part->samples[i];
		samples[said.nsamples].tensor = (uint32_t)at;
		said.nsamples += at >= 0;
	}
	store_layout_free(l);
	return r < 0 ? r : save_writer_finish(writer, &said, NULL, err);
}

static int whole_write(struct whole *w, struct save_writer *writer, struct base_error *err)
{
	const struct save_engine_source source = {.read = whole_read, .appended = whole_appended, .arg = w};
	int r = add_blobs(w, writer, err);

	if (r < 0)
		return r;
	save_writer_prepared(writer, &w->planned);
	commit_attempt_rank(w->q->attempt, 0);
	r = save_writer_begin(writer, w->q->attempt, err);
	for (unsigned i = 0; r == 0 && i < w->q->nbases; i++)
		r = save_writer_base(writer, w->q->bases[i].run, w->q->bases[i].entry, &w->q->bases[i].manifest, err);
	if (r == 0)
		r = save_writer_append_all(writer, w->q->threads, &source, err);
	if (r == 0)
		r = save_writer_seal(writer, err);
	if (r == 0)
		r = write_part(w, writer, err);
	w->q->objects = save_writer_result(writer)->pieces_new;
	w->q->bytes = save_writer_result(writer)->piece_bytes_new;
	save_writer_end(writer);
	return r;
}

int copy_whole(struct upkeep_whole *q, struct base_error *err)
{
	base_cleanup(whole_release) struct whole w = {.q = q};
	struct save_writer *writer;
	int r = load_step_open(q->store, q->run, q->step, &w.step, err);

	if (r == 0)
		r = store_open_part(q->store, q->m, 0, &w.part, err);
	if (r == 0)
		r = layout_make(&w, err);
	if (r == 0)
		r = save_planned_whole(&w.planned, err);
	if (r == 0)
		r = save_writer_new(q->store, q->run, q->m->attributes, q->m->nattributes, 0, q->m->world, &writer,
			err);
	if (r < 0)
		return r;
	r = whole_write(&w, writer, err);
	save_writer_close(writer);
	return r;
}
