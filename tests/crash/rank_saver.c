/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank over the public interface: tensors that are sharded over all ranks, replicated on all, and one that rank 0
 * has alone; a blob of everybody and one of each rank. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/api/vckpt.h"
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

int rank_open(const struct rank_job *job, struct rank **ret_r, char text[static RANK_TEXT])
{
	struct vckpt_saver_options o = {.size = sizeof o, .store = job->store, .run = job->run, .launch_id = job->id,
		.rank = job->rank, .world = job->world, .heartbeat_ms = job->heartbeat_ms, .start_ms = job->start_ms,
		.pin = VCKPT_PIN_NO, .threads = job->workers ? job->workers : 1,
		.ring_bytes = job->bytes > 100000 ? 0 : 1 << 20};
	struct vckpt_error err = {0};
	struct rank *r = calloc(1, sizeof *r);
	char words[32];
	int e;

	if (!r || !(r->data = malloc(job->bytes + 2 * MOMENTS_BYTES)))
		return -ENOMEM;
	r->job = *job;
	snprintf(words, sizeof words, "dp=%u", job->world);
	e = vckpt_mesh_new(words, NULL, 0, &r->mesh, &err);
	o.mesh = r->mesh;
	if (e == 0)
		e = vckpt_saver_open(&o, &r->saver, &err);
	*ret_r = r;
	if (e < 0) {
		rank_close(r, text);
		failed(text, e, &err);
	}
	return e;
}

static int declare(struct rank *r, struct vckpt_save *save, unsigned number, struct vckpt_error *err)
{
	const uint64_t shape[1] = {r->job.bytes * r->job.world}, small[1] = {MOMENTS_BYTES};
	uint8_t *m = r->data + r->job.bytes, *alone = m + MOMENTS_BYTES;
	struct vckpt_tensor tensors[3] = {
		{.component = "model", .name = "w", .shape = shape, .placements = "S(0)", .data = r->data, .ndim = 1,
			.dtype = VCKPT_U8},
		{.component = "optimizer", .name = "m", .shape = small, .data = m, .ndim = 1, .dtype = VCKPT_U8},
		{.component = "model", .name = "alone", .shape = small, .data = alone, .ndim = 1, .dtype = VCKPT_U8,
			.flags = VCKPT_TENSOR_ALONE}};
	int e;

	rank_fill(r->data, r->job.bytes, r->job.id, number * UINT64_C(1000) + r->job.rank);
	rank_fill(m, MOMENTS_BYTES, "", number * UINT64_C(1000) + 999);
	rank_fill(alone, MOMENTS_BYTES, r->job.id, number * UINT64_C(1000) + 998);
	e = vckpt_save_tensors(save, tensors, r->job.rank == 0 ? 3 : 2, err);
	if (e == 0)
		e = vckpt_save_blob(save, "config.json", 0, "{}", 2, err);
	return e < 0 ? e : vckpt_save_blob(save, "rng", 1, r->data, 100, err);
}

/* Saves that nobody waits for are still copied from: each has data of its own, which stays. */
static int keep_data(struct rank *r)
{
	uint8_t **all = realloc(r->dropped, (r->ndropped + 1) * sizeof *all), *fresh;

	if (all)
		r->dropped = all;
	fresh = all ? malloc(r->job.bytes + 2 * MOMENTS_BYTES) : NULL;
	if (!fresh)
		return -ENOMEM;
	r->dropped[r->ndropped++] = r->data;
	r->data = fresh;
	return 0;
}

/* Answers as if it had been committed: what became of it is told by closing. */
static int drop(struct rank *r, struct vckpt_save *save, int e)
{
	static const useconds_t moments[] = {0, 0, 300, 1000, 3000, 10000, 30000, 100000};
	uint8_t pick;

	rank_fill(&pick, 1, r->job.id, r->job.rank + 77 * r->ndropped);
	usleep(moments[pick % 8]);
	vckpt_save_free(save);
	return e < 0 ? e : keep_data(r);
}

int rank_save(struct rank *r, unsigned number, uint64_t *ret_step, uint64_t *ret_entry, char text[static RANK_TEXT])
{
	struct vckpt_save_options o = {.size = sizeof o,
		.step = r->job.step == RANK_NO_STEP ? VCKPT_NONE : r->job.step + number,
		.flags = r->job.replace ? VCKPT_SAVE_REPLACE : 0};
	struct vckpt_committed done = {0};
	struct vckpt_error err = {0};
	struct vckpt_save *save;
	int e = vckpt_save_begin(r->saver, &o, &save, &err);

	if (e < 0)
		return failed(text, e, &err);
	e = declare(r, save, number, &err);
	if (e == 0)
		e = vckpt_save_submit(save, &err);
	if (r->job.drop) {
		*ret_step = *ret_entry = 0;
		e = drop(r, save, e);
		return e < 0 ? failed(text, e, &err) : 0;
	}
	if (e == 0)
		e = vckpt_save_wait_staged(save, -1, &err);
	if (e == 0) {
		memset(r->data, 0xee, r->job.bytes + 2 * MOMENTS_BYTES); /* it is the caller's again */
		e = vckpt_save_wait_committed(save, -1, &done, &err);
	}
	vckpt_save_free(save);
	*ret_step = done.step;
	*ret_entry = done.entry;
	return e < 0 ? failed(text, e, &err) : 0;
}

int rank_close(struct rank *r, char text[static RANK_TEXT])
{
	struct vckpt_error err = {0};
	int e = r->saver ? vckpt_saver_close(r->saver, &err) : 0;

	failed(text, e, &err);
	vckpt_saver_free(r->saver);
	vckpt_mesh_free(r->mesh);
	while (r->ndropped)
		free(r->dropped[--r->ndropped]);
	free(r->dropped);
	free(r->data);
	free(r);
	return e;
}
