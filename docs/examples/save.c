/* SPDX-License-Identifier: Apache-2.0
 *
 * Saves two tensors of one rank as a step, and reads one of them back.
 *
 *     cc save.c $(pkg-config --cflags --libs vckpt) -o save
 *     ./save /data/store
 */
#include <stdio.h>
#include <stdlib.h>
#include <vckpt.h>

static float weight[3][4], bias[3];

static void check(int r, const struct vckpt_error *err)
{
	if (r < 0) {
		fprintf(stderr, "save: %s\n", err->text);
		exit(1);
	}
}

/* Makes the store when it is not there yet. */
static void prepare_store(const char *path)
{
	struct vckpt_error err;

	if (vckpt_store_check(path, &err) < 0)
		check(vckpt_store_init(path, &err), &err);
}

/* Declares both tensors, and hands the save to the saver's threads. */
static struct vckpt_save *submit_step(struct vckpt_saver *saver)
{
	struct vckpt_save_options options = {.size = sizeof options, .step = VCKPT_NONE};
	struct vckpt_tensor tensors[] = {
		{.component = "model", .name = "weight", .dtype = VCKPT_F32, .ndim = 2,
		  .shape = (uint64_t[]){ 3, 4 }, .data = weight},
		{.component = "model", .name = "bias", .dtype = VCKPT_F32, .ndim = 1,
		  .shape = (uint64_t[]){ 3 }, .data = bias},
	};
	struct vckpt_save *save;
	struct vckpt_error err;

	check(vckpt_save_begin(saver, &options, &save, &err), &err);
	check(vckpt_save_tensors(save, tensors, 2, &err), &err);
	check(vckpt_save_submit(save, &err), &err);
	return save;
}

/* A job keeps its saver for the whole run and trains on as soon as a save is staged; this one waits for the commit. */
static uint64_t save_step(const char *store)
{
	struct vckpt_saver_options options = {.size = sizeof options, .store = store, .run = "example", .world = 1};
	struct vckpt_committed committed;
	struct vckpt_saver *saver;
	struct vckpt_save *save;
	struct vckpt_error err;

	check(vckpt_saver_open(&options, &saver, &err), &err);
	save = submit_step(saver);
	check(vckpt_save_wait_staged(save, -1, &err), &err); /* from here on the tensors may change */
	check(vckpt_save_wait_committed(save, -1, &committed, &err), &err);
	vckpt_save_free(save);
	check(vckpt_saver_close(saver, &err), &err);
	vckpt_saver_free(saver);
	return committed.step;
}

static void print_weight(const char *store, uint64_t number)
{
	struct vckpt_step *step;
	struct vckpt_error err;
	float read[3][4];
	int64_t tensor;

	check(vckpt_step_open(store, "example", number, &step, &err), &err);
	tensor = vckpt_step_find(step, "model", "weight");
	if (tensor < 0) {
		fprintf(stderr, "save: the step has no tensor model weight\n");
		exit(1);
	}
	check(vckpt_step_read(step, (uint32_t)tensor, NULL, read, NULL, &err), &err);
	vckpt_step_close(step);
	for (int i = 0; i < 3; i++)
		printf("%g %g %g %g\n", read[i][0], read[i][1], read[i][2], read[i][3]);
}

int main(int argc, char **argv)
{
	uint64_t number;

	if (argc != 2) {
		fprintf(stderr, "usage: save STORE\n");
		return 2;
	}
	for (int i = 0; i < 12; i++)
		weight[i / 4][i % 4] = (float)i;
	prepare_store(argv[1]);
	number = save_step(argv[1]);
	printf("saved example/%llu\n", (unsigned long long)number);
	print_weight(argv[1], number);
	return 0;
}
