/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads a row of one tensor of the newest step of a run, and prints the names of all tensors.
 *
 *     cc read.c $(pkg-config --cflags --libs vckpt) -o read
 *     ./read /data/store 3
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <vckpt.h>

static void check(int r, const struct vckpt_error *err)
{
	if (r < 0) {
		fprintf(stderr, "read: %s\n", err->text);
		exit(1);
	}
}

static void print_names(const struct vckpt_step *step)
{
	for (uint32_t i = 0; i < vckpt_step_tensor_count(step); i++) {
		struct vckpt_tensor_info info;

		if (vckpt_step_tensor(step, i, &info) == 0)
			printf("%s/%.*s: %" PRIu64 " bytes\n", info.component, (int)info.name_len, info.name,
				info.bytes);
	}
}

/* Only the blocks that the row is in are read. */
static void print_row(struct vckpt_step *step, uint32_t tensor, uint64_t row)
{
	struct vckpt_tensor_info info;
	struct vckpt_error err;
	float *items;

	if (vckpt_step_tensor(step, tensor, &info) < 0 || info.dtype != VCKPT_F32 || info.ndim != 2) {
		fprintf(stderr, "read: the weight is no matrix of floats\n");
		exit(1);
	}
	items = calloc(info.shape[1] + 1, sizeof *items);
	if (!items)
		exit(1);
	check(vckpt_step_read(step, tensor, (uint64_t[]){ row, 1, 0, info.shape[1] }, items, NULL, &err), &err);
	for (uint64_t i = 0; i < info.shape[1]; i++)
		printf("%g%s", items[i], i + 1 < info.shape[1] ? " " : "\n");
	free(items);
}

int main(int argc, char **argv)
{
	struct vckpt_step *step;
	struct vckpt_error err;
	int64_t tensor;

	if (argc != 3) {
		fprintf(stderr, "usage: read STORE ROW\n");
		return 2;
	}
	check(vckpt_step_open(argv[1], "example", VCKPT_NONE, &step, &err), &err);
	print_names(step);
	tensor = vckpt_step_find(step, "model", "weight");
	if (tensor < 0) {
		fprintf(stderr, "read: example/%" PRIu64 " has no tensor model/weight\n", vckpt_step_number(step));
		return 1;
	}
	print_row(step, (uint32_t)tensor, strtoull(argv[2], NULL, 10));
	vckpt_step_close(step);
	return 0;
}
