/* SPDX-License-Identifier: Apache-2.0
 *
 * step: version, stores, and reading steps back.
 *
 * An open step owns its store (opened read-only) and the step, both read-only after the open but for caches that have
 * locks of their own: so any thread may read, several at once. What a step returns (names, shapes, attributes) points
 * into it. A read is a fill of one box (core/load/fill/fill.h), with several threads where the box is large: nothing is
 * kept from one read to the next.
 *
 * The process that opened a step is remembered: in a child after a fork locks may be held by threads that are not
 * there, so reads refuse and close leaves everything alone. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/api/api_internal.h"
#include "core/load/fill/fill.h"
#include "core/tensor/boxes.h"

BASE_CLEANUP_DEFINE(struct store *, store_close)
BASE_CLEANUP_DEFINE(struct commit_list *, commit_list_close)

enum { READ_ALONE_BYTES = 8 << 20 };     /* more than that is read by several threads */

const char *vckpt_version(void)
{
	return VCKPT_VERSION;
}

/* ---- stores ---- */

int vckpt_store_init(const char *path, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);

	if (!path || !path[0])
		return base_error_set(e, -EINVAL, "no path of a store is given");
	return api_result(store_init(path, STORE_RESERVE_BYTES, e), e);
}

int vckpt_store_check(const char *path, struct vckpt_error *err)
{
	base_cleanup(store_close_p) struct store *s = NULL;
	struct base_error *e = api_error(err);

	return api_result(api_store_open(path, STORE_OPEN_READ_ONLY, &s, e), e);
}

/* The list of a run that there is, open for its newest steps; commit_list_close. -ENOENT: there is none of that
 * name. */
static int run_open(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err)
{
	int r;

	if (!run || !proto_run_valid(run))
		return base_error_set(err, -EINVAL, "%s cannot be the name of a run", run ? run : "NULL");
	r = commit_list_open_newest(s, run, ret_l, err);
	if (r == 0 && commit_list_next(*ret_l) == 0)
		return base_error_set(err, -ENOENT, "%s has no run %s", s->path, run);
	return r;
}

/* The step of that number, VCKPT_NONE: the newest. ret_entry: in *ret_l, which is the caller's whatever is returned. */
static int run_find(struct store *s, const char *run, uint64_t number, struct commit_list **ret_l,
	const struct commit_list_step **ret_entry, struct base_error *err)
{
	int r = run_open(s, run, ret_l, err);

	if (r == 0 && number != VCKPT_NONE)
		r = commit_list_know_step(*ret_l, number, err);
	if (r < 0)
		return r;
	*ret_entry = number == VCKPT_NONE ? commit_list_latest(*ret_l) : commit_list_find(*ret_l, number);
	if (*ret_entry)
		return 0;
	if (number == VCKPT_NONE)
		return base_error_set(err, -ENOENT, "run %s of %s has no step", run, s->path);
	return base_error_set(err, -ENOENT, "run %s of %s has no step %" PRIu64, run, s->path, number);
}

int vckpt_run_latest(const char *store, const char *run, uint64_t *ret_step, struct vckpt_error *err)
{
	base_cleanup(commit_list_close_p) struct commit_list *l = NULL;
	base_cleanup(store_close_p) struct store *s = NULL;
	struct base_error *e = api_error(err);
	const struct commit_list_step *entry;
	int r = api_given(ret_step, "place for the step's number", e);

	if (r == 0)
		r = api_store_open(store, STORE_OPEN_READ_ONLY, &s, e);
	if (r == 0)
		r = run_find(s, run, VCKPT_NONE, &l, &entry, e);
	if (r == 0)
		*ret_step = entry->step;
	return api_result(r, e);
}

int vckpt_run_steps(const char *store, const char *run, uint64_t **ret_steps, size_t *ret_n, struct vckpt_error *err)
{
	base_cleanup(commit_list_close_p) struct commit_list *l = NULL;
	base_cleanup(store_close_p) struct store *s = NULL;
	struct base_error *e = api_error(err);
	uint64_t *steps;
	int r;

	if (!ret_steps || !ret_n)
		return base_error_set(e, -EINVAL, "no place for the steps is given");
	r = api_store_open(store, STORE_OPEN_READ_ONLY, &s, e);
	if (r == 0)
		r = run_open(s, run, &l, e);
	if (r == 0)
		r = commit_list_know_all(l, e);
	if (r < 0)
		return api_result(r, e);
	steps = malloc((commit_list_count(l) + 1) * sizeof *steps);
	if (!steps)
		return base_no_memory(e);
	for (size_t i = 0; i < commit_list_count(l); i++)
		steps[i] = commit_list_at(l, i)->step;
	*ret_steps = steps;
	*ret_n = commit_list_count(l);
	return 0;
}

/* ---- opening a step ---- */

static void step_free(struct vckpt_step *step)
{
	load_step_unref(step->step);
	store_close(step->store);
	proto_entry_release(&step->said);
	free(step->attributes);
	free(step);
}

BASE_CLEANUP_DEFINE(struct vckpt_step *, step_free)

static int step_find(struct vckpt_step *step, const char *run, uint64_t number, struct base_error *err)
{
	base_cleanup(commit_list_close_p) struct commit_list *l = NULL;
	const struct commit_list_step *entry;
	int r = run_find(step->store, run, number, &l, &entry, err);

	if (r == 0)
		r = api_facts_take(step, l, entry->entry);
	return r < 0 ? r : load_step_open(step->store, run, entry, &step->step, err);
}

static int step_open_commit(struct vckpt_step *step, const char *run, const struct vckpt_commit *commit,
	const struct proto_commit *c, struct base_error *err)
{
	const struct commit_list_step found = {.step = commit->step, .entry = commit->entry, .commit = *c};

	if (c->step == commit->step && memcmp(c->manifest.bytes, commit->manifest, sizeof commit->manifest) == 0)
		return load_step_open(step->store, run, &found, &step->step, err);
	return base_error_set(err, -ENOENT, "run %s of %s has another commit in entry %" PRIu64 " of its list than the "
		"one of step %" PRIu64 " that was asked for: this is another store, or a copy that went on by itself",
		run, step->store->path, commit->entry, commit->step);
}

/* Its entry was collected: what is visible says the same. */
static int step_find_collected(struct vckpt_step *step, const char *run, const struct vckpt_commit *commit,
	struct base_error *err)
{
	base_cleanup(commit_list_close_p) struct commit_list *l = NULL;
	int r = commit_list_open_newest(step->store, run, &l, err);
	uint64_t number;
	const struct commit_list_step *found;

	if (r == 0)
		r = commit_list_know_entry(l, commit->entry, err);
	if (r == 0)
		r = api_facts_take(step, l, commit->entry);
	if (r < 0)
		return r;
	number = commit_list_commit_step(l, commit->entry);
	found = number == PROTO_NONE ? NULL : commit_list_find(l, number);
	if (!found || found->entry != commit->entry)
		return base_error_set(err, -ENOENT, "run %s of %s has no commit entry %" PRIu64, run,
			step->store->path, commit->entry);
	return step_open_commit(step, run, commit, &found->commit, err);
}

/* What was said of a commit that its entry shows alone. Where the list cannot be read now, nothing: the step opens all
 * the same. */
static int step_find_facts(struct vckpt_step *step, const char *run, uint64_t entry)
{
	base_cleanup(commit_list_close_p) struct commit_list *l = NULL;

	if (!step->store->info.list_4 || commit_list_open_newest(step->store, run, &l, NULL) < 0 ||
		commit_list_know_entry(l, entry, NULL) < 0)
		return 0;
	return api_facts_take(step, l, entry);
}

static int step_find_commit(struct vckpt_step *step, const char *run, const struct vckpt_commit *commit,
	struct base_error *err)
{
	struct proto_entry e;
	int r;

	if (!run || !proto_run_valid(run))
		return base_error_set(err, -EINVAL, "%s cannot be the name of a run", run ? run : "NULL");
	r = commit_list_commit_read(step->store, run, commit->entry, &e, err);
	if (r == -ENOENT)
		return step_find_collected(step, run, commit, err);
	if (r < 0)
		return r;
	r = step_open_commit(step, run, commit, &e.commit, err);
	proto_entry_release(&e);
	return r < 0 ? r : step_find_facts(step, run, commit->entry);
}

/* commit NULL: what is visible under the number. */
static int step_open(const char *store, const char *run, uint64_t step, const struct vckpt_commit *commit,
	struct vckpt_step **ret_step, struct base_error *e)
{
	base_cleanup(step_free_p) struct vckpt_step *opened = NULL;
	int r;

	if (!ret_step)
		return base_error_set(e, -EINVAL, "no place for the step is given");
	opened = calloc(1, sizeof *opened);
	if (!opened)
		return base_no_memory(e);
	opened->pid = getpid();
	r = api_store_open(store, STORE_OPEN_READ_ONLY, &opened->store, e);
	if (r == 0)
		r = commit ? step_find_commit(opened, run, commit, e) : step_find(opened, run, step, e);
	if (r == 0)
		r = api_facts_attributes(opened, e);
	if (r == 0)
		*ret_step = base_steal(opened);
	return api_result(r, e);
}

int vckpt_step_open(const char *store, const char *run, uint64_t step, struct vckpt_step **ret_step,
	struct vckpt_error *err)
{
	return step_open(store, run, step, NULL, ret_step, api_error(err));
}

int vckpt_step_open_commit(const char *store, const char *run, const struct vckpt_commit *commit,
	struct vckpt_step **ret_step, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);

	if (!commit)
		return base_error_set(e, -EINVAL, "no commit of a step is given");
	return step_open(store, run, VCKPT_NONE, commit, ret_step, e);
}

void vckpt_step_close(struct vckpt_step *step)
{
	if (step && step->pid == getpid())
		step_free(step);
}

/* ---- what is in it ---- */

uint64_t vckpt_step_number(const struct vckpt_step *step)
{
	return load_step_info(step->step)->step;
}

void vckpt_step_commit(const struct vckpt_step *step, struct vckpt_commit *ret_commit)
{
	const struct load_step_info *info = load_step_info(step->step);

	*ret_commit = (struct vckpt_commit){.step = info->step, .entry = info->entry};
	memcpy(ret_commit->manifest, info->manifest.bytes, sizeof ret_commit->manifest);
}

uint32_t vckpt_step_world(const struct vckpt_step *step)
{
	return load_step_manifest(step->step)->world;
}

size_t vckpt_step_attributes(const struct vckpt_step *step, const struct vckpt_attribute **ret_attributes)
{
	*ret_attributes = step->attributes;
	return step->nattributes;
}

uint32_t vckpt_step_tensor_count(const struct vckpt_step *step)
{
	return load_step_tensor_count(step->step);
}

int vckpt_step_tensors(const struct vckpt_step *step, uint32_t first, uint32_t n, struct vckpt_tensor_info *ret_infos)
{
	uint32_t count = load_step_tensor_count(step->step);
	struct load_tensor_info t;

	if (first > count || n > count - first)
		return -ENOENT;
	for (uint32_t i = 0; i < n; i++) {
		load_step_tensor_info(step->step, first + i, &t);
		ret_infos[i] = (struct vckpt_tensor_info){.component = t.component, .name = t.name,
			.name_len = t.name_len, .dtype = t.dtype, .ndim = t.shape.ndim,
			.shape = load_step_tensor_dims(step->step, first + i), .bytes = t.bytes};
	}
	return 0;
}

int vckpt_step_tensor(const struct vckpt_step *step, uint32_t tensor, struct vckpt_tensor_info *ret_info)
{
	return vckpt_step_tensors(step, tensor, 1, ret_info);
}

int64_t vckpt_step_find(const struct vckpt_step *step, const char *component, const char *name)
{
	if (!component || !name)
		return -ENOENT;
	return load_step_tensor_find(step->step, component, name, strlen(name));
}

int64_t vckpt_step_blob_count(struct vckpt_step *step, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_step_alive(step, e);

	if (r == 0)
		r = load_step_blobs(step->step, e);
	return r < 0 ? api_result(r, e) : (int64_t)load_step_blob_count(step->step);
}

static struct vckpt_blob_info blob_info(const struct load_blob_info *b)
{
	return (struct vckpt_blob_info){.name = b->name, .bytes = b->bytes, .per_rank = b->per_rank, .rank = b->rank};
}

int vckpt_step_blob(struct vckpt_step *step, uint32_t blob, struct vckpt_blob_info *ret_info)
{
	struct load_blob_info b;
	int r = ret_info ? api_step_alive(step, NULL) : -EINVAL;

	if (r == 0)
		r = load_step_blobs(step->step, NULL);
	if (r < 0)
		return r;
	if (blob >= load_step_blob_count(step->step))
		return -ENOENT;
	load_step_blob_info(step->step, blob, &b);
	*ret_info = blob_info(&b);
	return 0;
}

/* ---- reading ---- */

struct step_target {                     /* of a read: all that the caller said, checked */
	struct load_tensor_info info;
	struct tensor_box box;
	uint64_t stride[TENSOR_MAX_DIMS];
};

static int target_box(struct step_target *t, const uint64_t *box, struct base_error *err)
{
	const struct tensor_shape *s = &t->info.shape;

	if (!box) {
		tensor_box_whole(s, &t->box);
		return 0;
	}
	for (uint32_t d = 0; d < s->ndim; d++) {
		t->box.offset[d] = box[2 * d];
		t->box.size[d] = box[2 * d + 1];
		if (box[2 * d + 1] > s->dim[d] || box[2 * d] > s->dim[d] - box[2 * d + 1])
			return base_error_set(err, -EINVAL, "the box has %" PRIu64 " items from %" PRIu64
				" on in dimension %u, which has %" PRIu64, box[2 * d + 1], box[2 * d], d, s->dim[d]);
	}
	return 0;
}

static void target_strides_rows(struct step_target *t)
{
	uint64_t stride = tensor_dtype_bytes(t->info.dtype);

	for (uint32_t d = t->info.shape.ndim; d-- > 0; stride *= t->box.size[d])
		t->stride[d] = stride;
}

static int target_strides(struct step_target *t, const int64_t *strides, struct base_error *err)
{
	struct tensor_shape shape = {.ndim = t->info.shape.ndim};

	if (!strides) {
		target_strides_rows(t);
		return 0;
	}
	for (uint32_t d = 0; d < t->info.shape.ndim; d++)
		t->stride[d] = (uint64_t)strides[d];
	memcpy(shape.dim, t->box.size, sizeof shape.dim);
	return tensor_strides_check(&shape, tensor_dtype_bytes(t->info.dtype), strides, err);
}

int api_step_alive(const struct vckpt_step *step, struct base_error *err)
{
	if (!step)
		return base_error_set(err, -EINVAL, "no step is given");
	if (step->pid != getpid())
		return base_error_set(err, -BASE_EFORKED,
			"the step was opened before this process was forked: open it again");
	return 0;
}

static int target_fill(struct vckpt_step *step, uint32_t tensor, const struct step_target *t, void *data,
	struct base_error *err)
{
	uint64_t bytes = tensor_box_items(&t->info.shape, &t->box) * tensor_dtype_bytes(t->info.dtype);
	struct load_fill *f = load_fill_new(step->step, bytes > READ_ALONE_BYTES ? 0 : 1, 0);
	int r;

	if (!f)
		return base_no_memory(err);
	r = load_fill_add(f, tensor, &t->box, data, t->stride, err);
	if (r == 0)
		r = load_fill_run(f, err);
	load_fill_free(f);
	return r;
}

int vckpt_step_read(struct vckpt_step *step, uint32_t tensor, const uint64_t *box, void *data, const int64_t *strides,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct step_target t = {0};
	int r = api_step_alive(step, e);

	if (r < 0)
		return r;
	if (tensor >= load_step_tensor_count(step->step))
		return base_error_set(e, -ENOENT, "%s/%" PRIu64 ": there is no tensor %" PRIu32,
			load_step_info(step->step)->run, load_step_info(step->step)->step, tensor);
	load_step_tensor_info(step->step, tensor, &t.info);
	r = target_box(&t, box, e);
	if (r == 0 && tensor_box_empty(t.info.shape.ndim, &t.box))
		return 0;
	if (r == 0)
		r = target_strides(&t, strides, e);
	if (r == 0 && !data)
		r = base_error_set(e, -EINVAL, "no memory is given to read into");
	if (r < 0)
		return load_step_tensor_failed(step->step, tensor, r, e);
	return api_result(target_fill(step, tensor, &t, data, e), e);
}

int vckpt_step_digest(struct vckpt_step *step, uint32_t tensor, uint8_t *ret_digest, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct load_object *o;
	int r = api_step_alive(step, e);

	if (r < 0)
		return r;
	if (!ret_digest)
		return base_error_set(e, -EINVAL, "no place for the digest is given");
	r = load_tensor_open(step->step, tensor, &o, e);
	if (r < 0)
		return api_result(r, e);
	memcpy(ret_digest, load_object_digest(o)->bytes, sizeof load_object_digest(o)->bytes);
	load_object_unref(o);
	return 0;
}

static int step_blob_open(struct vckpt_step *step, uint32_t blob, struct load_object **ret_o, struct base_error *e)
{
	int r = api_step_alive(step, e);

	return r < 0 ? r : api_result(load_blob_open(step->step, blob, ret_o, e), e);
}

/* Lets a blob go. Returns r, what it was opened for. */
static int blob_done(struct load_object *o, int r, struct base_error *e)
{
	load_object_unref(o);
	return api_result(r, e);
}

int vckpt_step_blob_look(struct vckpt_step *step, uint32_t blob, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct load_object *o;
	int r = step_blob_open(step, blob, &o, e);

	return r < 0 ? r : blob_done(o, load_blob_look(o, e), e);
}

int vckpt_step_blob_read(struct vckpt_step *step, uint32_t blob, void *bytes, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct load_object *o;
	int r = step_blob_open(step, blob, &o, e);

	return r < 0 ? r : blob_done(o, load_blob_read(o, bytes, e), e);
}

/* rank -1: of no rank's own. */
static int step_blob_named(struct vckpt_step *step, const char *name, int64_t rank, struct load_blob_info *ret_info,
	struct load_object **ret_o, struct base_error *e)
{
	int r = api_step_alive(step, e);

	if (r == 0 && !name)
		r = base_error_set(e, -EINVAL, "no name of a blob is given");
	return api_result(r < 0 ? r : load_blob_open_named(step->step, name, rank < 0 ? -1 : rank, ret_info, ret_o, e),
		e);
}

int vckpt_step_blob_find(struct vckpt_step *step, const char *name, int64_t rank, struct vckpt_blob_info *ret_info,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct load_blob_info b = {0};
	struct load_object *o;
	int r = step_blob_named(step, name, rank, &b, &o, e);

	if (r <= 0)
		return r;
	r = blob_done(o, load_blob_look(o, e), e);
	if (r < 0)
		return r;
	if (ret_info)
		*ret_info = blob_info(&b);
	return 1;
}

int vckpt_step_blob_get(struct vckpt_step *step, const char *name, int64_t rank, void *bytes, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct load_object *o;
	int r = step_blob_named(step, name, rank, NULL, &o, e);

	if (r == 0)
		r = api_result(base_error_set(e, -ENOENT, "%s/%" PRIu64 ": there is no blob %.400s",
			load_step_info(step->step)->run, load_step_info(step->step)->step, name), e);
	return r < 0 ? r : blob_done(o, load_blob_read(o, bytes, e), e);
}

int vckpt_step_blob_rank(struct vckpt_step *step, const char *name, uint32_t from, uint32_t *ret_rank,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	int r = api_step_alive(step, e);

	if (r == 0 && (!name || !ret_rank))
		r = base_error_set(e, -EINVAL, "no name of a blob is given, or no place for a rank");
	return api_result(r < 0 ? r : load_step_blob_rank(step->step, name, from, ret_rank, e), e);
}
