/* SPDX-License-Identifier: Apache-2.0
 *
 * aged: makes a run old: appends what a training of many steps leaves in its list, as its writers append it.
 *
 *     aged STORE RUN STEPS KEEP
 *
 * Steps 1 ... STEPS are committed by launches of 1,000 attempts. Each is removed when KEEP newer ones are there, and
 * the last KEEP in the end; KEEP 0: none is removed. Nothing is saved. With KEEP 0 the steps have what step 0 of the
 * run has, if it is there, and a manifest each, so that they can be opened and a collection finds what it looks for.
 * Otherwise a commit names a manifest that is not there, as after a removal and a collection. What is measured
 * (growth.py) is a step of a higher number, which is saved later. */
#include <stdio.h>
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/commit/list/list.h"
#include "core/step/manifest.h"

#define LAUNCH_STEPS 1000u

static void must(int64_t r, const struct base_error *err, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "%s: %s (%s)\n", what, err->text, base_error_name((int)r));
	exit(1);
}

/* What every step has; run NULL: nothing. */
static struct proto_manifest model;

static int manifest_put(struct store *s, struct proto_commit *c, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r;

	model.attempt = c->attempt;
	model.step = c->step;
	c->tensors = model.tensors;
	c->bytes = model.bytes;
	c->new_bytes = model.new_bytes;
	r = proto_manifest_encode(&model, &body);
	if (r < 0)
		return r;
	base_digest_of(body.data, body.len, &c->manifest);
	return store_manifest_put(s, model.run, &body, &c->manifest, err);
}

static int64_t commit(struct store *s, struct commit_list *l, uint64_t step, struct base_error *err)
{
	char attempt[64];
	struct proto_entry e = {.kind = PROTO_ENTRY_COMMIT, .time_ns = 1, .host = "h", .commit = {.step = step,
		.attempt = attempt, .time_ns = 1, .replaces = PROTO_NONE, .tensors = 1, .bytes = 1, .new_bytes = 1}};

	snprintf(attempt, sizeof attempt, "%016llx-%llu", (unsigned long long)((step - 1) / LAUNCH_STEPS + 1),
		(unsigned long long)step);
	for (unsigned i = 0; i < sizeof step; i++)
		e.commit.manifest.bytes[i] = (uint8_t)(step >> 8 * i);
	if (model.run)
		must(manifest_put(s, &e.commit, err), err, "manifest");
	return commit_list_put(l, &e, NULL, NULL, err);
}

static int64_t launch(struct commit_list *l, uint64_t step, struct base_error *err)
{
	char id[32];
	struct proto_entry e = {.kind = PROTO_ENTRY_LAUNCH, .time_ns = 1, .host = "h", .launch = id,
		.newest_step = step > 1 ? step - 1 : PROTO_NONE};

	snprintf(id, sizeof id, "%016llx", (unsigned long long)((step - 1) / LAUNCH_STEPS + 1));
	return commit_list_put(l, &e, NULL, NULL, err);
}

static int64_t removal(struct commit_list *l, uint64_t step, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_REMOVE, .time_ns = 1, .host = "h",
		.removes = commit_list_find(l, step)->entry};

	return commit_list_put(l, &e, NULL, NULL, err);
}

int main(int argc, char **argv)
{
	uint64_t steps, keep;
	struct base_error err = {0};
	struct commit_list *list;
	struct store *store;

	if (argc != 5) {
		fprintf(stderr, "usage: %s STORE RUN STEPS KEEP\n", argv[0]);
		return 2;
	}
	steps = strtoull(argv[3], NULL, 10);
	keep = strtoull(argv[4], NULL, 10);
	must(store_open(argv[1], 0, &store, &err), &err, argv[1]);
	must(commit_list_open(store, argv[2], true, &list, &err), &err, argv[2]);
	if (keep == 0 && commit_list_find(list, 0))
		must(store_manifest_get(store, argv[2], &commit_list_find(list, 0)->commit.manifest, &model, &err),
			&err,
			"step 0");
	model.new_bytes = 0;
	for (uint64_t step = 1; step <= steps; step++) {
		if (step % LAUNCH_STEPS == 1)
			must(launch(list, step, &err), &err, "launch");
		must(commit(store, list, step, &err), &err, "commit");
		if (keep > 0 && step > keep)
			must(removal(list, step - keep, &err), &err, "removal");
	}
	for (uint64_t step = steps - (keep < steps ? keep : steps) + 1; step <= steps; step++)
		must(removal(list, step, &err), &err, "removal");
	proto_manifest_release(&model);
	commit_list_close(list);
	store_close(store);
	return 0;
}
