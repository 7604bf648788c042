/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads what save.c saved, elsewhere and cut in another way: as one rank of three, which holds two of the six rows of
 * the weight, and the whole bias.
 *
 *     cc load.c $(pkg-config --cflags --libs vckpt) -o load
 *     ./load /data/store 0
 */
#include <stdio.h>
#include <stdlib.h>
#include <vckpt.h>

enum { RANKS = 3, ROWS = 6, COLUMNS = 4 };

static float weight[ROWS / RANKS][COLUMNS], bias[ROWS];

static void check(int r, const struct vckpt_error *err)
{
	if (r < 0) {
		fprintf(stderr, "load: %s\n", err->text);
		exit(1);
	}
}

/* The descriptions are those of a save: this rank's part of each tensor, and where it is in memory. */
static void declare(struct vckpt_load *load, const struct vckpt_mesh *mesh)
{
	struct vckpt_tensor tensors[] = {
		{.component = "model", .name = "weight", .dtype = VCKPT_F32, .ndim = 2,
		  .shape = (uint64_t[]){ ROWS, COLUMNS }, .mesh = mesh, .placements = "S(0)", .data = weight},
		{.component = "model", .name = "bias", .dtype = VCKPT_F32, .ndim = 1,
		  .shape = (uint64_t[]){ ROWS }, .data = bias},
	};
	struct vckpt_error err;

	check(vckpt_load_tensors(load, tensors, 2, &err), &err);
	check(vckpt_load_expect(load, "model", &err), &err); /* a tensor of the step that is not above is an error */
}

/* A rank that is not in the mesh would load nothing of the weight. */
static void load_step(struct vckpt_step *step, uint32_t rank)
{
	struct vckpt_load_options options = {.size = sizeof options, .rank = rank};
	struct vckpt_error err;
	struct vckpt_load *load;
	struct vckpt_mesh *mesh;

	check(vckpt_mesh_new("tp=3", NULL, 0, &mesh, &err), &err);
	check(vckpt_load_begin(step, &options, &load, &err), &err);
	declare(load, mesh);
	vckpt_mesh_free(mesh);
	check(vckpt_load_start(load, &err), &err); /* reads in threads of its own */
	check(vckpt_load_wait(load, -1, &err), &err); /* from here on the tensors may be used */
	vckpt_load_free(load);
}

int main(int argc, char **argv)
{
	struct vckpt_blob_info blob = {.bytes = 0};
	struct vckpt_step *step;
	struct vckpt_error err;
	char epoch[20] = "";

	if (argc != 3 || strtoul(argv[2], NULL, 10) >= RANKS) {
		fprintf(stderr, "usage: load STORE RANK (below %d)\n", RANKS);
		return 2;
	}
	/* The newest step, as this rank sees it. In a job one rank opens it, and sends the others its
	 * vckpt_step_commit, which they open by vckpt_step_open_commit. */
	check(vckpt_step_open(argv[1], "example", VCKPT_NONE, &step, &err), &err);
	load_step(step, (uint32_t)strtoul(argv[2], NULL, 10));
	check(vckpt_step_blob_find(step, "state/epoch", -1, &blob, &err), &err);
	if (blob.bytes && blob.bytes < sizeof epoch)
		check(vckpt_step_blob_get(step, "state/epoch", -1, epoch, &err), &err);
	printf("loaded example/%llu, epoch %s\n", (unsigned long long)vckpt_step_number(step), epoch);
	vckpt_step_close(step); /* not before the load is freed */
	for (int i = 0; i < ROWS / RANKS; i++)
		printf("%g %g %g %g\n", weight[i][0], weight[i][1], weight[i][2], weight[i][3]);
	return 0;
}
