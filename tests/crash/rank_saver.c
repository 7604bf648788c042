/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank over the public interface: tensors that are sharded over all ranks, replicated on all (which never change),
 * and one that rank 0 has alone; a blob of everybody and one of each rank. However little does not change, it asks
 * whether it has to be copied. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/api/vckpt.h"
#include "core/save/saver/same_internal.h"
#include "rank.h"

#define MOMENTS_BYTES 500u

struct rank {
	struct rank_job job;
	struct vckpt_mesh *mesh;
	struct vckpt_saver *saver;
	uint8_t *data;                  /* this rank's of w, then m, then alone */
	uint8_t **dropped; unsigned ndropped; /* the data of saves that nobody waited for */
};

static int failed(char text[static RANK_TEXT], int code, const struct vckpt_error *err)
{
	snprintf(text, RANK_TEXT, "%s", err->text);
	return code;
}

/* Once, before any thread of a rank. */
static void __attribute__((constructor)) be_patient(void)
{
	saver_same_patience = (struct saver_patience){UINT64_C(60000000000), 100000000};
}

int rank_open(const struct rank_job *job, struct rank **ret_r, char text[static RANK_TEXT])
{
	struct vckpt_saver_options o = {.size = sizeof o, .store = job->store, .run = job->run, .launch_id = job->id,
		.rank = job->rank, .world = job->world, .heartbeat_ms = job->heartbeat_ms, .start_ms = job->start_ms,
		.pin = VCKPT_PIN_NO, .threads = job->workers ? job->workers : 1,
		.ring_bytes = job->bytes > 100000 ? 0 : 1 << 20};
	struct vckpt_error err = {0};
	struct rank *rank = calloc(1, sizeof *rank);
	char words[32];
	int r;

	if (!rank || !(rank->data = malloc(job->bytes + 2 * MOMENTS_BYTES)))
		return -ENOMEM;
	rank->job = *job;
	snprintf(words, sizeof words, "dp=%u", job->world);
	r = vckpt_mesh_new(words, NULL, 0, &rank->mesh, &err);
	o.mesh = rank->mesh;
	if (r == 0)
		r = vckpt_saver_open(&o, &rank->saver, &err);
	*ret_r = rank;
	if (r < 0) {
		rank_close(rank, text);
		failed(text, r, &err);
	}
	return r;
}

static int declare(struct rank *rank, struct vckpt_save *save, unsigned number, struct vckpt_error *err)
{
	const uint64_t shape[1] = {rank->job.bytes * rank->job.world}, small[1] = {MOMENTS_BYTES};
	const uint64_t frozen[1] = {MOMENTS_BYTES / 4};
	uint8_t *m = rank->data + rank->job.bytes, *alone = m + MOMENTS_BYTES;
	struct vckpt_tensor tensors[3] = {
		{.component = "model", .name = "w", .shape = shape, .placements = "S(0)", .data = rank->data, .ndim = 1,
			.dtype = VCKPT_U8},
		{.component = "optimizer", .name = "m", .shape = frozen, .data = m, .ndim = 1, .dtype = VCKPT_F32},
		{.component = "model", .name = "alone", .shape = small, .data = alone, .ndim = 1, .dtype = VCKPT_U8,
			.flags = VCKPT_TENSOR_ALONE}};
	int r;

	rank_fill(rank->data, rank->job.bytes, rank->job.id, number * UINT64_C(1000) + rank->job.rank);
	rank_fill(m, MOMENTS_BYTES, "", 999); /* never changes: a second save does not copy it */
	rank_fill(alone, MOMENTS_BYTES, rank->job.id, number * UINT64_C(1000) + 998);
	r = vckpt_save_tensors(save, tensors, rank->job.rank == 0 ? 3 : 2, err);
	if (r == 0)
		r = vckpt_save_blob(save, "config.json", 0, "{}", 2, err);
	return r < 0 ? r : vckpt_save_blob(save, "rng", 1, rank->data, 100, err);
}

/* Saves that nobody waits for are still copied from: each has data of its own, which stays. */
static int keep_data(struct rank *rank)
{
	uint8_t **all = realloc(rank->dropped, (rank->ndropped + 1) * sizeof *all), *fresh;

	if (all)
		rank->dropped = all;
	fresh = all ? malloc(rank->job.bytes + 2 * MOMENTS_BYTES) : NULL;
	if (!fresh)
		return -ENOMEM;
	rank->dropped[rank->ndropped++] = rank->data;
	rank->data = fresh;
	return 0;
}

/* Answers as if it had been committed: what became of it is told by closing. */
static int drop(struct rank *rank, struct vckpt_save *save, int r)
{
	static const useconds_t moments[] = {0, 0, 300, 1000, 3000, 10000, 30000, 100000};
	uint8_t pick;

	rank_fill(&pick, 1, rank->job.id, rank->job.rank + 77 * rank->ndropped);
	usleep(moments[pick % 8]);
	vckpt_save_free(save);
	return r < 0 ? r : keep_data(rank);
}

int rank_save(struct rank *rank, unsigned number, uint64_t *ret_step, uint64_t *ret_entry, char text[static RANK_TEXT])
{
	struct vckpt_save_options o = {.size = sizeof o,
		.step = rank->job.step == RANK_NO_STEP ? VCKPT_NONE : rank->job.step + number,
		.flags = rank->job.replace ? VCKPT_SAVE_REPLACE : 0};
	struct vckpt_committed done = {0};
	struct vckpt_error err = {0};
	struct vckpt_save *save;
	int r = vckpt_save_begin(rank->saver, &o, &save, &err);

	if (r < 0)
		return failed(text, r, &err);
	r = declare(rank, save, number, &err);
	if (r == 0)
		r = vckpt_save_submit(save, &err);
	if (rank->job.drop) {
		*ret_step = *ret_entry = 0;
		r = drop(rank, save, r);
		return r < 0 ? failed(text, r, &err) : 0;
	}
	if (r == 0)
		r = vckpt_save_wait_staged(save, -1, &err);
	if (r == 0) {
		memset(rank->data, 0xee, rank->job.bytes + 2 * MOMENTS_BYTES); /* it is the caller's again */
		r = vckpt_save_wait_committed(save, -1, &done, &err);
	}
	vckpt_save_free(save);
	*ret_step = done.step;
	*ret_entry = done.entry;
	return r < 0 ? failed(text, r, &err) : 0;
}

int rank_close(struct rank *rank, char text[static RANK_TEXT])
{
	struct vckpt_error err = {0};
	int r = rank->saver ? vckpt_saver_close(rank->saver, &err) : 0;

	failed(text, r, &err);
	vckpt_saver_free(rank->saver);
	vckpt_mesh_free(rank->mesh);
	while (rank->ndropped)
		free(rank->dropped[--rank->ndropped]);
	free(rank->dropped);
	free(rank->data);
	free(rank);
	return r;
}
