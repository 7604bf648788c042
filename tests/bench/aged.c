/* SPDX-License-Identifier: Apache-2.0
 *
 * aged: makes a run old: appends what a training of many steps leaves in its list, as its writers append it.
 *
 *     aged STORE RUN STEPS KEEP
 *
 * Steps 0 ... STEPS - 1 are committed by launches of 1,000 attempts. Each is removed when KEEP newer ones are there,
 * and the last KEEP in the end; KEEP 0: none is removed. Nothing is saved: a commit names a manifest that is not there,
 * so no such step can be opened. What is measured (growth.py) is a step of a higher number, which is saved later. */
#include <stdio.h>
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/commit/list/list.h"

#define LAUNCH_STEPS 1000u

static void must(int64_t r, const struct base_error *err, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "%s: %s (%s)\n", what, err->text, base_error_name((int)r));
	exit(1);
}

static int64_t commit(struct store_list *l, uint64_t step, struct base_error *err)
{
	char attempt[64];
	struct proto_entry e = {.kind = PROTO_ENTRY_COMMIT, .time_ns = 1, .host = "h", .commit = {.step = step,
		.attempt = attempt, .time_ns = 1, .replaces = PROTO_NONE, .tensors = 1, .bytes = 1, .new_bytes = 1}};

	snprintf(attempt, sizeof attempt, "%016llx-%llu", (unsigned long long)(step / LAUNCH_STEPS + 1),
		(unsigned long long)step);
	for (unsigned i = 0; i < sizeof step; i++)
		e.commit.manifest.bytes[i] = (uint8_t)(step >> 8 * i);
	return store_list_put(l, &e, NULL, NULL, err);
}

static int64_t launch(struct store_list *l, uint64_t step, struct base_error *err)
{
	char id[32];
	struct proto_entry e = {.kind = PROTO_ENTRY_LAUNCH, .time_ns = 1, .host = "h", .launch = id,
		.newest_step = step ? step - 1 : PROTO_NONE};

	snprintf(id, sizeof id, "%016llx", (unsigned long long)(step / LAUNCH_STEPS + 1));
	return store_list_put(l, &e, NULL, NULL, err);
}

static int64_t removal(struct store_list *l, uint64_t step, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_REMOVE, .time_ns = 1, .host = "h",
		.removes = store_list_find(l, step)->entry};

	return store_list_put(l, &e, NULL, NULL, err);
}

int main(int argc, char **argv)
{
	uint64_t steps, keep;
	struct base_error err = {0};
	struct store_list *list;
	struct store *store;

	if (argc != 5) {
		fprintf(stderr, "usage: %s STORE RUN STEPS KEEP\n", argv[0]);
		return 2;
	}
	steps = strtoull(argv[3], NULL, 10);
	keep = strtoull(argv[4], NULL, 10);
	must(store_open(argv[1], 0, &store, &err), &err, argv[1]);
	must(store_list_open(store, argv[2], true, &list, &err), &err, argv[2]);
	for (uint64_t step = 0; step < steps; step++) {
		if (step % LAUNCH_STEPS == 0)
			must(launch(list, step, &err), &err, "launch");
		must(commit(list, step, &err), &err, "commit");
		if (keep > 0 && step >= keep)
			must(removal(list, step - keep, &err), &err, "removal");
	}
	for (uint64_t step = steps - (keep < steps ? keep : steps); step < steps; step++)
		must(removal(list, step, &err), &err, "removal");
	store_list_close(list);
	store_close(store);
	return 0;
}
