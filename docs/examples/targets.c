/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads what save.c saved into a model that has changed: its weight is two tensors of double now, the first column and
 * the other three, and its bias has room for one more. A compiled module also calls the bias _orig_mod.bias.
 *
 *     cc targets.c $(pkg-config --cflags --libs vckpt) -o targets
 *     ./targets /data/store
 */
#include <stdio.h>
#include <stdlib.h>
#include <vckpt.h>

static double left[6][1], right[6][3];
static float bias[7];

static void check(int r, const struct vckpt_error *err)
{
	if (r < 0) {
		fprintf(stderr, "targets: %s\n", err->text);
		exit(1);
	}
}

static void declare(struct vckpt_load *load)
{
	const struct vckpt_rename compiled = {.component = "model", .from = "_orig_mod.", .to = ""};
	const struct vckpt_tensor to[] = {
		{.component = "model", .name = "left", .dtype = VCKPT_F64, .ndim = 2,
		  .shape = (uint64_t[]){ 6, 1 }, .data = left},
		{.component = "model", .name = "right", .dtype = VCKPT_F64, .ndim = 2,
		  .shape = (uint64_t[]){ 6, 3 }, .data = right},
		{.component = "model", .name = "_orig_mod.bias", .dtype = VCKPT_F32, .ndim = 1,
		  .shape = (uint64_t[]){ 7 }, .data = bias},
	};
	const struct vckpt_target targets[] = {
		{.size = sizeof *targets, .to = &to[0], .name = "weight", .flags = VCKPT_TARGET_CONVERT,
		  .from = (uint64_t[]){ 0, 6, 0, 1 }, .from_ndim = 2}, /* rows 0 .. 5, column 0 */
		{.size = sizeof *targets, .to = &to[1], .name = "weight", .flags = VCKPT_TARGET_CONVERT,
		  .from = (uint64_t[]){ 0, 6, 1, 3 }, .from_ndim = 2},
		{.size = sizeof *targets, .to = &to[2], .flags = VCKPT_TARGET_RESIZE | VCKPT_TARGET_ZERO},
	};
	struct vckpt_error err;

	check(vckpt_load_rename(load, &compiled, 1, &err), &err);
	check(vckpt_load_targets(load, targets, 3, &err), &err);
}

int main(int argc, char **argv)
{
	struct vckpt_step *step;
	struct vckpt_load *load;
	struct vckpt_error err;

	if (argc != 2) {
		fprintf(stderr, "usage: targets STORE\n");
		return 2;
	}
	check(vckpt_step_open(argv[1], "example", VCKPT_NONE, &step, &err), &err);
	check(vckpt_load_begin(step, NULL, &load, &err), &err);
	declare(load);
	check(vckpt_load_run(load, &err), &err);
	vckpt_load_free(load);
	vckpt_step_close(step);
	for (int i = 0; i < 6; i++)
		printf("%g | %g %g %g\n", left[i][0], right[i][0], right[i][1], right[i][2]);
	printf("%g ... %g %g\n", bias[0], bias[5], bias[6]);
	return 0;
}
