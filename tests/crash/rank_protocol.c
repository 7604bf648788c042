/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank over core/commit alone: the order of a save (core/commit/attempt/attempt.c) with nothing around it. Every rank
 * stores its share of model/w, a vector that is sharded over all ranks, and rank 1 (or 0, alone) optimizer/m, which
 * all hold. Each is small enough for one tile, so that a box is one piece. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/commit/attempt/attempt.h"
#include "core/step/layout.h"
#include "core/step/part.h"
#include "rank.h"

#define MOMENTS_BYTES 500u
#define PACKS 3u

struct rank {
	struct rank_job job;
	struct store *store;
	struct commit_launch *launch;
	struct store_layout *layout;
	struct base_buf object;         /* the layout's bytes */
};

/* What one save of this rank writes: packs model, optimizer (perhaps), meta. */
struct share {
	struct commit_attempt *attempt;
	char names[PACKS][PACK_NAME_MAX];
	struct proto_pack_use packs[PACKS];
	uint32_t npacks;
	struct store_piece piece[2];    /* of w and m */
	bool has_moments;
	uint64_t bytes;
	struct pack_object_ref layout_ref, part_ref;
};

static int layout_make(struct rank *rank, struct base_error *err)
{
	struct tensor_grid_params params = {128 << 10, 1 << 20, 512};
	struct tensor_shape w = {1, {rank->job.bytes * rank->job.world}}, m = {1, {MOMENTS_BYTES}};
	struct store_layout_builder *b = store_layout_builder_new(params);
	base_cleanup_free uint32_t *tags = NULL;
	int r = b ? store_layout_builder_add(b, "model", "w", 1, TENSOR_U8, &w, 0, err) : -ENOMEM;

	if (r == 0)
		r = store_layout_builder_add(b, "optimizer", "m", 1, TENSOR_U8, &m, 0, err);
	if (r == 0)
		r = store_layout_builder_finish(b, &rank->layout, &rank->object, &tags, err);
	store_layout_builder_free(b);
	return r;
}

int rank_open(const struct rank_job *job, struct rank **ret_r, char text[static RANK_TEXT])
{
	struct commit_launch_options o = {.run = job->run, .id = job->id, .rank = job->rank, .world = job->world,
		.heartbeat_ms = job->heartbeat_ms, .start_ms = job->start_ms};
	struct base_error err = {0};
	struct rank *rank = calloc(1, sizeof *rank);
	int r;

	if (!rank)
		return -ENOMEM;
	rank->job = *job;
	r = store_open(job->store, 0, &rank->store, &err);
	if (r == 0)
		r = layout_make(rank, &err);
	if (r == 0)
		r = commit_launch_open(rank->store, &o, &rank->launch, &err);
	*ret_r = rank;
	if (r < 0) {
		rank_close(rank, text);
		snprintf(text, RANK_TEXT, "%s", err.text);
	}
	return r;
}

static int open_pack(struct share *s, const char *class, struct pack_writer **ret_w)
{
	int r = commit_attempt_pack_open(s->attempt, class, s->names[s->npacks], ret_w);

	s->packs[s->npacks].pack = s->names[s->npacks];
	s->npacks++;
	return r;
}

/* A pack of one piece. */
static int piece_write(struct rank *rank, struct share *s, const char *class, size_t len, uint64_t seed,
	struct store_piece *ret_piece)
{
	base_cleanup_free uint8_t *bytes = malloc(len + 1);
	struct pack_writer *w;
	uint64_t size;
	int r = bytes ? open_pack(s, class, &w) : -ENOMEM;

	if (r < 0)
		return r;
	rank_fill(bytes, len, rank->job.id, seed);
	r = pack_append_raw(w, PACK_OBJECT_PIECE, bytes, len, &ret_piece->ref);
	if (r < 0)
		pack_abandon(w);
	else
		r = commit_attempt_pack_seal(s->attempt, w, &size);
	ret_piece->ref.pack = s->npacks - 1;
	ret_piece->base = STORE_PIECE_NO_BASE;
	base_xxh128_of(rank->store->info.seed, bytes, len, &ret_piece->xxh);
	s->packs[s->npacks - 1].size = r < 0 ? 0 : size;
	s->packs[s->npacks - 1].live_bytes = len;
	s->bytes += len;
	return r;
}

static int rows_add(struct rank *rank, struct share *s, struct store_part_builder *b, struct base_error *err)
{
	struct tensor_box box = {.offset = {rank->job.rank * rank->job.bytes}, .size = {rank->job.bytes}};
	bool whole = rank->job.world == 1;
	int r = store_part_add_row(b, 0, whole ? NULL : &box, whole ? 0 : 1, &s->piece[0], 1, err);

	return r < 0 || !s->has_moments ? r : store_part_add_row(b, 1, NULL, 0, &s->piece[1], 1, err);
}

static int meta_write(struct rank *rank, struct share *s, struct base_error *err)
{
	struct pack_writer *w;
	struct store_part_builder *b = NULL;
	struct proto_part part = {.rank = rank->job.rank, .world = rank->job.world, .host = store_hostname(),
		.layout = rank->layout->digest, .packs = s->packs};
	uint64_t size, live;
	int r = open_pack(s, "meta", &w);

	if (r < 0)
		return r;
	if (rank->job.rank == 0)
		r = pack_append_raw(w, PACK_OBJECT_LAYOUT, rank->object.data, rank->object.len, &s->layout_ref);
	b = r == 0 ? store_part_builder_new(rank->layout, w, s->npacks - 1) : NULL;
	if (r == 0)
		r = b ? rows_add(rank, s, b, err) : -ENOMEM;
	if (r == 0)
		r = pack_extent_end(w);
	part.npacks = s->npacks;
	if (r == 0)
		r = store_part_finish(b, &part, &s->part_ref, err);
	live = s->part_ref.stored_len + s->layout_ref.stored_len;
	for (uint32_t i = 0; r == 0 && i < part.nchunks; i++)
		live += part.chunks[i].ref.stored_len;
	store_part_builder_free(b);
	if (r < 0)
		pack_abandon(w);
	else
		r = commit_attempt_pack_seal(s->attempt, w, &size);
	s->layout_ref.pack = s->part_ref.pack = s->npacks - 1;
	if (r == 0)
		s->packs[s->npacks - 1] = (struct proto_pack_use){s->names[s->npacks - 1], size, live};
	return r;
}

static struct proto_ref ref_of(const struct pack_object_ref *ref)
{
	return (struct proto_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .pack = ref->pack, .codec = ref->codec,
		.kind = ref->kind};
}

static int share_write(struct rank *rank, struct share *s, unsigned number, struct base_error *err)
{
	int r;

	s->has_moments = rank->job.rank == (rank->job.world > 1);
	r = piece_write(rank, s, "model", rank->job.bytes, number * UINT64_C(1000) + rank->job.rank, &s->piece[0]);
	if (r == 0 && s->has_moments)
		r = piece_write(rank, s, "optimizer", MOMENTS_BYTES, number * UINT64_C(1000) + 999, &s->piece[1]);
	if (r == 0)
		r = meta_write(rank, s, err);
	return r < 0 && !err->text[0] ? base_error_set(err, r, "its packs: %s", base_error_name(r)) : r;
}

static uint64_t share_new_bytes(const struct share *s)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < s->npacks; i++)
		bytes += s->packs[i].size;
	return bytes;
}

static int share_announce(struct rank *rank, struct share *s, struct base_error *err)
{
	struct proto_announcement a = {.layout = rank->layout->digest, .stores_layout = rank->job.rank == 0,
		.part = ref_of(&s->part_ref), .packs = s->packs, .npacks = s->npacks, .tensors = 1 + s->has_moments,
		.bytes = s->bytes, .new_bytes = share_new_bytes(s)};

	if (rank->job.rank == 0)
		a.layout_ref = ref_of(&s->layout_ref);
	return commit_attempt_announce(s->attempt, &a, err);
}

static bool undecided(const struct share *s)
{
	return commit_attempt_announced(s->attempt) && commit_attempt_undecided(s->attempt);
}

int rank_save(struct rank *rank, unsigned number, uint64_t *ret_step, uint64_t *ret_entry, char text[static RANK_TEXT])
{
	struct commit_attempt_save o = {.step = rank->job.step == RANK_NO_STEP ? PROTO_NONE : rank->job.step + number,
		.replace = rank->job.replace};
	struct share s = {0};
	struct base_error err = {0};
	int r = commit_attempt_begin(rank->launch, &o, &s.attempt, &err);

	if (r == 0) {
		*ret_step = commit_attempt_step(s.attempt);
		r = share_write(rank, &s, number, &err);
		if (r < 0)
			commit_attempt_abort(s.attempt, err.text, NULL, NULL);
		else
			r = share_announce(rank, &s, &err);
		/* an announcement that failed undecided is waited for: somebody decides it */
		if (r == 0 || undecided(&s))
			r = commit_attempt_wait(s.attempt, -1, ret_entry, &err);
		if (r < 0 && undecided(&s))
			r = -BASE_EUNDECIDED;
	}
	snprintf(text, RANK_TEXT, "%s", err.text);
	commit_attempt_free(s.attempt);
	return r;
}

int rank_close(struct rank *rank, char text[static RANK_TEXT])
{
	text[0] = 0;
	if (rank->launch)
		commit_launch_close(rank->launch);
	store_layout_free(rank->layout);
	base_buf_release(&rank->object);
	store_close(rank->store);
	free(rank);
	return 0;
}
