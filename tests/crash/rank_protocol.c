/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank over core/commit alone: the order of a save (core/commit/attempt.c) with nothing around it. Every rank
 * stores its share of model/w, a vector that is sharded over all ranks, and rank 1 (or 0, alone) optimizer/m, which
 * all hold. Each is small enough for one tile, so that a box is one piece. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/commit/launch.h"
#include "core/step/layout.h"
#include "core/step/part.h"
#include "rank.h"

#define MOMENTS_BYTES 500u
#define PACKS 3u

struct rank {
	struct rank_job job;
	struct store *store;
	struct store_launch *launch;
	struct store_layout *layout;
	struct base_buf object;         /* the layout's bytes */
};

/* What one save of this rank writes: packs model, optimizer (perhaps), meta. */
struct share {
	struct store_attempt *attempt;
	char names[PACKS][STORE_PACK_NAME_MAX];
	struct proto_pack_use packs[PACKS];
	uint32_t npacks;
	struct store_piece piece[2];    /* of w and m */
	bool has_moments;
	uint64_t bytes;
	struct store_object_ref layout_ref, part_ref;
};

static int layout_make(struct rank *r, struct base_error *err)
{
	struct tensor_grid_params params = {128 << 10, 1 << 20, 512};
	struct tensor_shape w = {1, {r->job.bytes * r->job.world}}, m = {1, {MOMENTS_BYTES}};
	struct store_layout_builder *b = store_layout_builder_new(params);
	base_cleanup_free uint32_t *tags = NULL;
	int e = b ? store_layout_builder_add(b, "model", "w", 1, TENSOR_U8, &w, 0, err) : -ENOMEM;

	if (e == 0)
		e = store_layout_builder_add(b, "optimizer", "m", 1, TENSOR_U8, &m, 0, err);
	if (e == 0)
		e = store_layout_builder_finish(b, &r->layout, &r->object, &tags, err);
	store_layout_builder_free(b);
	return e;
}

int rank_open(const struct rank_job *job, struct rank **ret_r, char text[static RANK_TEXT])
{
	struct store_launch_options o = {.run = job->run, .id = job->id, .rank = job->rank, .world = job->world,
		.heartbeat_ms = job->heartbeat_ms, .start_ms = job->start_ms};
	struct base_error err = {0};
	struct rank *r = calloc(1, sizeof *r);
	int e;

	if (!r)
		return -ENOMEM;
	r->job = *job;
	e = store_open(job->store, 0, &r->store, &err);
	if (e == 0)
		e = layout_make(r, &err);
	if (e == 0)
		e = store_launch_open(r->store, &o, &r->launch, &err);
	*ret_r = r;
	if (e < 0) {
		rank_close(r, text);
		snprintf(text, RANK_TEXT, "%s", err.text);
	}
	return e;
}

static int pack_open(struct share *s, const char *class, struct store_pack_writer **ret_w)
{
	int e = store_attempt_pack_open(s->attempt, class, s->names[s->npacks], ret_w);

	s->packs[s->npacks].pack = s->names[s->npacks];
	s->npacks++;
	return e;
}

/* A pack of one piece. */
static int piece_write(struct rank *r, struct share *s, const char *class, size_t len, uint64_t seed,
	struct store_piece *ret_piece)
{
	base_cleanup_free uint8_t *bytes = malloc(len + 1);
	struct store_pack_writer *w;
	uint64_t size;
	int e = bytes ? pack_open(s, class, &w) : -ENOMEM;

	if (e < 0)
		return e;
	rank_fill(bytes, len, r->job.id, seed);
	e = store_pack_append_raw(w, STORE_OBJECT_PIECE, bytes, len, &ret_piece->ref);
	if (e < 0)
		store_pack_abandon(w);
	else
		e = store_attempt_pack_seal(s->attempt, w, &size);
	ret_piece->ref.pack = s->npacks - 1;
	ret_piece->base = STORE_PIECE_NO_BASE;
	base_xxh128_of(r->store->info.seed, bytes, len, &ret_piece->xxh);
	s->packs[s->npacks - 1].size = e < 0 ? 0 : size;
	s->packs[s->npacks - 1].live_bytes = len;
	s->bytes += len;
	return e;
}

static int rows_add(struct rank *r, struct share *s, struct store_part_builder *b, struct base_error *err)
{
	struct tensor_box box = {.offset = {r->job.rank * r->job.bytes}, .size = {r->job.bytes}};
	bool whole = r->job.world == 1;
	int e = store_part_add_row(b, 0, whole ? NULL : &box, whole ? 0 : 1, &s->piece[0], 1, err);

	return e < 0 || !s->has_moments ? e : store_part_add_row(b, 1, NULL, 0, &s->piece[1], 1, err);
}

static int meta_write(struct rank *r, struct share *s, struct base_error *err)
{
	struct store_pack_writer *w;
	struct store_part_builder *b = NULL;
	struct proto_part part = {.rank = r->job.rank, .world = r->job.world, .host = store_hostname(),
		.layout = r->layout->digest, .packs = s->packs};
	uint64_t size, live;
	int e = pack_open(s, "meta", &w);

	if (e < 0)
		return e;
	if (r->job.rank == 0)
		e = store_pack_append_raw(w, STORE_OBJECT_LAYOUT, r->object.data, r->object.len, &s->layout_ref);
	b = e == 0 ? store_part_builder_new(r->layout, w, s->npacks - 1) : NULL;
	if (e == 0)
		e = b ? rows_add(r, s, b, err) : -ENOMEM;
	if (e == 0)
		e = store_pack_extent_end(w);
	part.npacks = s->npacks;
	if (e == 0)
		e = store_part_finish(b, &part, &s->part_ref, err);
	live = s->part_ref.stored_len + s->layout_ref.stored_len;
	for (uint32_t i = 0; e == 0 && i < part.nchunks; i++)
		live += part.chunks[i].ref.stored_len;
	store_part_builder_free(b);
	if (e < 0)
		store_pack_abandon(w);
	else
		e = store_attempt_pack_seal(s->attempt, w, &size);
	s->layout_ref.pack = s->part_ref.pack = s->npacks - 1;
	if (e == 0)
		s->packs[s->npacks - 1] = (struct proto_pack_use){s->names[s->npacks - 1], size, live};
	return e;
}

static struct proto_ref ref_of(const struct store_object_ref *r)
{
	return (struct proto_ref){.digest = r->digest, .offset = r->offset, .checks = r->checks, .raw_len = r->raw_len,
		.stored_len = r->stored_len, .pack = r->pack, .codec = r->codec, .kind = r->kind};
}

static int share_write(struct rank *r, struct share *s, unsigned number, struct base_error *err)
{
	int e;

	s->has_moments = r->job.rank == (r->job.world > 1);
	e = piece_write(r, s, "model", r->job.bytes, number * UINT64_C(1000) + r->job.rank, &s->piece[0]);
	if (e == 0 && s->has_moments)
		e = piece_write(r, s, "optimizer", MOMENTS_BYTES, number * UINT64_C(1000) + 999, &s->piece[1]);
	if (e == 0)
		e = meta_write(r, s, err);
	return e < 0 && !err->text[0] ? base_error_set(err, e, "its packs: %s", base_error_name(e)) : e;
}

static uint64_t share_new_bytes(const struct share *s)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < s->npacks; i++)
		bytes += s->packs[i].size;
	return bytes;
}

static int share_announce(struct rank *r, struct share *s, struct base_error *err)
{
	struct proto_announcement a = {.layout = r->layout->digest, .stores_layout = r->job.rank == 0,
		.part = ref_of(&s->part_ref), .packs = s->packs, .npacks = s->npacks, .tensors = 1 + s->has_moments,
		.bytes = s->bytes, .new_bytes = share_new_bytes(s)};

	if (r->job.rank == 0)
		a.layout_ref = ref_of(&s->layout_ref);
	return store_attempt_announce(s->attempt, &a, err);
}

static bool undecided(const struct share *s)
{
	return store_attempt_announced(s->attempt) && store_attempt_undecided(s->attempt);
}

int rank_save(struct rank *r, unsigned number, uint64_t *ret_step, uint64_t *ret_entry, char text[static RANK_TEXT])
{
	struct store_launch_save o = {.step = r->job.step == RANK_NO_STEP ? PROTO_NONE : r->job.step + number,
		.replace = r->job.replace};
	struct share s = {0};
	struct base_error err = {0};
	int e = store_launch_begin(r->launch, &o, &s.attempt, &err);

	if (e == 0) {
		*ret_step = store_attempt_step(s.attempt);
		e = share_write(r, &s, number, &err);
		if (e < 0)
			store_attempt_abort(s.attempt, err.text, NULL, NULL);
		else
			e = share_announce(r, &s, &err);
		/* an announcement that failed undecided is waited for: somebody decides it */
		if (e == 0 || undecided(&s))
			e = store_attempt_wait(s.attempt, -1, ret_entry, &err);
		if (e < 0 && undecided(&s))
			e = -BASE_EUNDECIDED;
	}
	snprintf(text, RANK_TEXT, "%s", err.text);
	store_attempt_free(s.attempt);
	return e;
}

int rank_close(struct rank *r, char text[static RANK_TEXT])
{
	text[0] = 0;
	if (r->launch)
		store_launch_close(r->launch);
	store_layout_free(r->layout);
	base_buf_release(&r->object);
	store_close(r->store);
	free(r);
	return 0;
}
