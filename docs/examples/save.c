/* SPDX-License-Identifier: Apache-2.0
 *
 * Saves a step from two processes: each holds two of the four columns of a weight, and both hold the same bias.
 *
 *     cc save.c $(pkg-config --cflags --libs vckpt) -o save
 *     ./save /data/store 100 0 job-17 & ./save /data/store 100 1 job-17
 */
#include <stdio.h>
#include <stdlib.h>
#include <vckpt.h>

enum { RANKS = 2, ROWS = 6, COLUMNS = 4 };

static float weight[ROWS][COLUMNS / RANKS], bias[ROWS];

static void check(int r, const struct vckpt_error *err)
{
	if (r < 0) {
		fprintf(stderr, "save: %s\n", err->text);
		exit(1);
	}
}

/* The processes meet under a name that they alone have, and agree on an id of this start. A job of several hosts meets
 * by vckpt_comm_mpi. */
static void meet(const char *job, uint32_t rank, char *launch_id)
{
	struct vckpt_comm *comm;
	struct vckpt_error err;

	check(vckpt_comm_shared(job, rank, RANKS, 60000, &comm, &err), &err);
	check(vckpt_launch_id(comm, launch_id, &err), &err);
	vckpt_comm_free(comm);
}

/* A job opens its saver once, before its first step. */
static struct vckpt_saver *open_saver(const char *store, uint32_t rank, const char *launch_id)
{
	struct vckpt_saver_options options = {.size = sizeof options, .store = store, .run = "example",
		.launch_id = launch_id, .rank = rank, .world = RANKS};
	struct vckpt_saver *saver;
	struct vckpt_error err;

	check(vckpt_saver_open(&options, &saver, &err), &err);
	return saver;
}

/* Declares what this rank holds, and hands the save to the saver's threads. */
static struct vckpt_save *submit(struct vckpt_saver *saver, uint64_t step, const struct vckpt_mesh *mesh)
{
	struct vckpt_save_options options = {.size = sizeof options, .step = step};
	struct vckpt_tensor tensors[] = {
		{.component = "model", .name = "weight", .dtype = VCKPT_F32, .ndim = 2,
		  .shape = (uint64_t[]){ ROWS, COLUMNS }, .mesh = mesh, .placements = "S(1)", .data = weight},
		{.component = "model", .name = "bias", .dtype = VCKPT_F32, .ndim = 1,
		  .shape = (uint64_t[]){ ROWS }, .data = bias}, /* no mesh: all ranks hold it */
	};
	struct vckpt_save *save;
	struct vckpt_error err;

	check(vckpt_save_begin(saver, &options, &save, &err), &err);
	check(vckpt_save_tensors(save, tensors, 2, &err), &err);
	check(vckpt_save_blob(save, "state/epoch", 0, "7", 1, &err), &err);
	check(vckpt_save_submit(save, &err), &err);
	return save;
}

int main(int argc, char **argv)
{
	char launch_id[VCKPT_LAUNCH_ID_BYTES];
	struct vckpt_saver *saver;
	struct vckpt_mesh *mesh;
	struct vckpt_save *save;
	struct vckpt_error err;
	uint32_t rank;

	if (argc != 5) {
		fprintf(stderr, "usage: save STORE STEP RANK JOB\n");
		return 2;
	}
	rank = (uint32_t)strtoul(argv[3], NULL, 10);
	if (rank == 0 && vckpt_store_check(argv[1], &err) < 0)
		check(vckpt_store_init(argv[1], &err), &err); /* before the other rank has met this one */
	meet(argv[4], rank, launch_id);
	for (int i = 0; i < ROWS; i++) {
		weight[i][0] = (float)(10 * i) + 2 * (float)rank; /* item (i, j) of the whole weight is 10 i + j */
		weight[i][1] = weight[i][0] + 1;
		bias[i] = (float)i;
	}
	saver = open_saver(argv[1], rank, launch_id);
	check(vckpt_mesh_new("tp=2", NULL, 0, &mesh, &err), &err);
	save = submit(saver, strtoull(argv[2], NULL, 10), mesh);
	check(vckpt_save_wait_staged(save, -1, &err), &err); /* a trainer goes on here: the tensors may change */
	check(vckpt_save_wait_committed(save, -1, NULL, &err), &err);
	vckpt_save_free(save);
	check(vckpt_saver_close(saver, &err), &err); /* at the end of the job */
	vckpt_saver_free(saver);
	vckpt_mesh_free(mesh);
	printf("rank %u saved example/%s\n", (unsigned)rank, argv[2]);
	return 0;
}
