/* SPDX-License-Identifier: Apache-2.0
 *
 * A whole store of one step, made of the description that the input is (made_step.h), and read in every way: ranges of
 * bytes in several cuts, boxes, loads, the files of the tree, and the proof that verify asks for. What must hold:
 *
 *   - two ways that both answer give the same bytes, and touch no byte beside those that were asked for
 *   - what can be read whole can be read in parts, as boxes, by a load, and from the tree; what cannot be read whole a
 *     load does not deliver whole (but a long row that it reads by ranges: it checks less than a whole chunk)
 *   - without lies all that can be read is what the description says; without damage, too, all of it can be read
 *
 * Threads are not started (the link wraps base_thread_start): where a thread cannot be had, the caller does all. The
 * store is in memory (the link wraps storage_open_posix). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/log.h"
#include "core/base/pool.h"
#include "core/commit/list/list.h"
#include "core/load/fill/fill.h"
#include "core/load/read/prove.h"
#include "core/view/check.h"
#include "core/view/npy.h"
#include "core/view/safetensors.h"
#include "core/view/tree.h"
#include "tests/fuzz/made_step.h"

MADE_NOT_COVERED

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define COMPARED_MAX (UINT64_C(1) << 18)        /* bytes of a tensor or blob; of longer ones little is read */
#define COMPARED_ALL (UINT64_C(1) << 20)        /* of all of them */
#define OBJECTS_MAX 64u
/* Ways that not all inputs take, because they cost more than the others together. */
enum { WAYS_LOAD = 1, WAYS_PROVE = 2, WAYS_CHECK = 4 };
#define CUTS_MAX 16u

static struct storage *opened_storage;

int __wrap_storage_open_posix(const char *path, unsigned flags, struct storage **ret_s,
	struct base_error *err);
int __wrap_base_thread_start(pthread_t *ret_thread, void *(*f)(void *), void *arg);

int __wrap_storage_open_posix(const char *path, unsigned flags, struct storage **ret_s,
	struct base_error *err)
{
	(void)path, (void)flags, (void)err;
	*ret_s = opened_storage;
	return 0;
}

int __wrap_base_thread_start(pthread_t *ret_thread, void *(*f)(void *), void *arg)
{
	(void)ret_thread, (void)f, (void)arg;
	return -EAGAIN;
}

/* ---- what is known of an object ---- */

/* A tensor or a blob: the bytes that some way of reading gave. */
struct known {
	uint64_t len;
	uint8_t *bytes, *given;         /* given: which of them; NULL: the object is too long */
	bool all;                       /* are given */
	const uint8_t *expected;        /* NULL: not known */
	int opened, whole, proved;      /* what opening it, reading all of it, and its proof came to */
	bool grid;                      /* a tensor */
	struct tensor_shape shape; unsigned item;
	uint64_t stride[TENSOR_MAX_DIMS];
};

struct reading {
	struct made *made;
	struct load_step *step;
	struct load_cache *cache;
	struct known tensors[OBJECTS_MAX]; uint32_t ntensors;
	struct known blobs[OBJECTS_MAX]; uint32_t nblobs;
	uint64_t compared, random;
	unsigned ways;
};

/* By the input alone. */
static unsigned ways_of(uint64_t random)
{
	return (random >> 32 & 1 ? WAYS_LOAD : 0) | (random >> 33 & 3 ? 0 : WAYS_PROVE)
		| (random >> 35 & 3 ? 0 : WAYS_CHECK);
}

static uint64_t below(struct reading *g, uint64_t n)
{
	g->random = g->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return n ? (g->random >> 24) % n : 0;
}

/* Bytes from `at` on came from some way of reading. */
static void learn(struct known *k, uint64_t at, const uint8_t *bytes, uint64_t n)
{
	if (!k->given || n == 0)
		return;
	must(at <= k->len && n <= k->len - at);
	must(!k->expected || memcmp(k->expected + at, bytes, n) == 0);
	must(!k->all || memcmp(k->bytes + at, bytes, n) == 0);
	if (k->all)
		return;
	for (uint64_t i = 0; i < n; i++)
		must(!k->given[at + i] || k->bytes[at + i] == bytes[i]);
	memcpy(k->bytes + at, bytes, n);
	memset(k->given + at, 1, n);
	k->all = n == k->len;
}

static void known_init(struct reading *g, struct known *k, uint64_t len, const uint8_t *expected)
{
	k->len = len;
	k->opened = k->whole = k->proved = -ENOENT;
	if (len > COMPARED_MAX || g->compared + len > COMPARED_ALL)
		return;
	g->compared += len;
	k->expected = g->made->honest ? expected : NULL;
	k->bytes = calloc(len + 1, 1);
	k->given = calloc(len + 1, 1);
	must(k->bytes && k->given);
}

/* ---- boxes in a caller's memory ---- */

/* A box and memory for it with some bytes between its items, all of them `fill`. */
struct target { struct tensor_box box; uint64_t stride[TENSOR_MAX_DIMS], items, len; uint8_t *data, fill; };

static void target_init(struct reading *g, const struct known *k, const struct tensor_box *box, struct target *ret_t)
{
	uint64_t bytes = k->item;

	*ret_t = (struct target){.box = *box, .fill = (uint8_t)(1 + below(g, 255)),
		.items = tensor_box_items(&k->shape, box)};
	for (unsigned d = k->shape.ndim; d-- > 0;) {
		bytes += below(g, 4) ? 0 : k->item * below(g, 3);
		ret_t->stride[d] = bytes;
		bytes *= ret_t->items ? box->size[d] : 1; /* or the others may be of any size */
	}
	ret_t->len = bytes;
	ret_t->data = malloc(bytes + 1);
	must(ret_t->data != NULL);
	memset(ret_t->data, ret_t->fill, bytes);
}

static bool all_are(const uint8_t *bytes, uint64_t n, uint8_t fill)
{
	return n == 0 || (bytes[0] == fill && memcmp(bytes, bytes + 1, n - 1) == 0);
}

/* Takes the items that are not in `lost` (NULL: all) out of the memory; then nothing else is to be in it. Rows whose
 * items lie together are taken as one. */
static void target_take(struct known *k, struct target *t, const uint8_t *lost)
{
	unsigned ndim = k->shape.ndim;
	bool rows = ndim > 0 && !lost && t->stride[ndim - 1] == k->item;
	uint64_t at[TENSOR_MAX_DIMS] = {0}, n = rows ? t->box.size[ndim - 1] : 1;

	for (uint64_t i = 0; i < t->items; i += n) {
		uint64_t from = 0, to = 0;
		unsigned d = rows ? ndim - 1 : ndim;

		for (unsigned e = 0; e < k->shape.ndim; e++) {
			from += at[e] * t->stride[e];
			to += (t->box.offset[e] + at[e]) * k->stride[e];
		}
		if (!lost || !lost[i])
			learn(k, to, t->data + from, n * k->item);
		memset(t->data + from, t->fill, n * k->item);
		while (d > 0 && ++at[d - 1] == t->box.size[d - 1])
			at[--d] = 0;
	}
	must(all_are(t->data, t->len, t->fill));
}

static void box_some(struct reading *g, const struct known *k, struct tensor_box *ret_box)
{
	tensor_box_whole(&k->shape, ret_box);
	for (unsigned d = 0; d < k->shape.ndim; d++) {
		uint64_t dim = k->shape.dim[d], most = k->given ? dim : base_min(dim, 2);

		ret_box->offset[d] = below(g, dim);
		ret_box->size[d] = base_min(1 + below(g, most), dim - ret_box->offset[d]);
	}
}

/* ---- ranges and boxes ---- */

/* Some bytes of it, by one way; all of them came, or an error. */
typedef int (*read_some)(void *arg, struct load_cache *c, uint64_t at, size_t len, void *out);

static int object_some(void *arg, struct load_cache *c, uint64_t at, size_t len, void *out)
{
	return load_object_read(arg, c, at, len, out, &(struct base_error){0});
}

static int range_read(struct reading *g, struct known *k, read_some read, void *arg, uint64_t at, uint64_t n)
{
	uint8_t fill = (uint8_t)below(g, 256), *out = malloc(n + 1);
	int r;

	must(out != NULL);
	memset(out, fill, n + 1);
	r = read(arg, g->cache, at, n, out);
	must(out[n] == fill);
	if (r == 0)
		learn(k, at, out, n);
	free(out);
	return r;
}

/* All of it at once, then cut by cut. Returns what all of it came to. */
static int ranges_read(struct reading *g, struct known *k, read_some read, void *arg)
{
	uint64_t step = 1 + below(g, k->len / 7 + 2), at = 0;
	int whole, r;

	if (!k->given) {
		range_read(g, k, read, arg, 0, base_min(k->len, 100));
		range_read(g, k, read, arg, k->len - base_min(k->len, 100), base_min(k->len, 100));
		return -EFBIG;
	}
	whole = range_read(g, k, read, arg, 0, k->len);
	for (unsigned i = 0; i < CUTS_MAX && at < k->len; i++) {
		uint64_t n = base_min(1 + below(g, step), k->len - at);

		r = range_read(g, k, read, arg, at, n);
		must(whole < 0 || r == 0);
		at = below(g, 8) ? at + n : below(g, k->len);
	}
	return whole;
}

static int box_read(struct reading *g, struct known *k, struct load_object *o, const struct tensor_box *box)
{
	struct target t;
	int r;

	target_init(g, k, box, &t);
	r = load_object_read_box(o, g->cache, box, t.data, t.stride, &(struct base_error){0});
	if (r == 0)
		target_take(k, &t, NULL);
	free(t.data);
	return r;
}

static void boxes_read(struct reading *g, struct known *k, struct load_object *o)
{
	struct tensor_box box;
	int r;

	tensor_box_whole(&k->shape, &box);
	if (k->given)
		must((box_read(g, k, o, &box) == 0) == (k->whole == 0));
	for (unsigned i = 0; i < 3 && k->len; i++) {
		box_some(g, k, &box);
		r = box_read(g, k, o, &box);
		must(k->whole < 0 || r == 0);
	}
}

struct proving { struct reading *g; struct known *k; struct load_object *o; };

static int prove_some(void *arg, uint64_t offset, size_t len, void *out, struct base_error *err)
{
	struct proving *p = arg;
	int r = load_object_read(p->o, p->g->cache, offset, len, out, err);

	if (r == 0)
		learn(p->k, offset, out, len);
	return r;
}

static void object_prove(struct reading *g, struct known *k, struct load_object *o)
{
	if (!k->given || !(g->ways & WAYS_PROVE))
		return;
	k->proved = load_object_prove(o, prove_some, &(struct proving){g, k, o}, &(struct base_error){0});
	must(k->whole == 0 || k->proved < 0);
}

static void tensor_read(struct reading *g, uint32_t tensor)
{
	struct known *k = &g->tensors[tensor];
	struct load_object *o;

	k->opened = load_tensor_open(g->step, tensor, &o, &(struct base_error){0});
	if (k->opened < 0)
		return;
	must(load_object_bytes(o) == k->len);
	k->whole = ranges_read(g, k, object_some, o);
	boxes_read(g, k, o);
	object_prove(g, k, o);
	load_object_unref(o);
}

static void blob_read(struct reading *g, uint32_t blob)
{
	struct known *k = &g->blobs[blob];
	struct load_object *o;
	uint8_t *all;
	int r;

	k->opened = load_blob_open(g->step, blob, &o, &(struct base_error){0});
	if (k->opened < 0)
		return;
	k->whole = ranges_read(g, k, object_some, o);
	object_prove(g, k, o);
	load_blob_look(o, NULL);
	if (k->given) {
		all = malloc(k->len + 1);
		must(all != NULL);
		r = load_blob_read(o, all, NULL);
		must((r == 0) == (k->whole == 0));
		if (r == 0)
			learn(k, 0, all, k->len);
		free(all);
	}
	load_object_unref(o);
}

/* ---- loads ---- */

/* Boxes of tensors, numbered as they were added. */
struct load { struct reading *g; struct target *targets; uint32_t *tensors; size_t n; bool whole[2 * OBJECTS_MAX]; };

static void load_add(struct load *l, struct load_fill *f, uint32_t tensor, const struct tensor_box *box, bool whole)
{
	struct target *t = &l->targets[l->n];

	target_init(l->g, &l->g->tensors[tensor], box, t);
	must(load_fill_add(f, tensor, box, t->data, t->stride, NULL) == 0);
	l->tensors[l->n] = tensor;
	l->whole[l->n++] = whole;
}

/* What of a box did not arrive: a byte for each of its items. */
static uint8_t *load_lost(const struct load *l, const struct load_fill *f, size_t added)
{
	const struct target *t = &l->targets[added];
	const struct known *k = &l->g->tensors[l->tensors[added]];
	uint8_t *lost = NULL;

	for (size_t i = 0; i < load_fill_lost_count(f); i++) {
		const struct load_fill_lost *one = load_fill_lost(f, i);
		uint64_t at[TENSOR_MAX_DIMS] = {0};

		if (one->added != added)
			continue;
		lost = lost ? lost : calloc(t->items, 1);
		must(lost != NULL && tensor_box_inside(&k->shape, &one->box));
		for (uint64_t n = tensor_box_items(&k->shape, &one->box); n > 0; n--) {
			uint64_t to = 0;
			unsigned d = k->shape.ndim;

			for (unsigned e = 0; e < k->shape.ndim; e++)
				to = to * t->box.size[e] + one->box.offset[e] - t->box.offset[e] + at[e];
			must(to < t->items);
			lost[to] = 1;
			while (d > 0 && ++at[d - 1] == one->box.size[d - 1])
				at[--d] = 0;
		}
	}
	return lost;
}

static void load_look(const struct load *l, const struct load_fill *f, size_t i, unsigned flags)
{
	struct known *k = &l->g->tensors[l->tensors[i]];
	uint8_t *lost = load_lost(l, f, i);

	if (flags & LOAD_FILL_REHASH)
		must(!l->whole[i] || k->opened < 0 || !lost == (k->proved == 0));
	else
		must(k->whole < 0 || !lost);
	must(!l->whole[i] || lost || k->whole == 0 || (l->g->made->long_rows && k->opened < 0));
	target_take(k, &l->targets[i], lost);
	free(lost);
}

static void load_add_all(struct load *l, struct load_fill *f, bool wholes)
{
	for (uint32_t i = 0; i < l->g->ntensors; i++) {
		const struct known *k = &l->g->tensors[i];
		bool first = below(l->g, 2);
		struct tensor_box whole, box;

		if (k->len == 0)
			continue;
		tensor_box_whole(&k->shape, &whole);
		box_some(l->g, k, &box);
		if (first)
			load_add(l, f, i, &box, false);
		if (k->given && wholes)
			load_add(l, f, i, &whole, true);
		if (!first)
			load_add(l, f, i, &box, false);
	}
}

/* With `wholes` all of each tensor, and of some pieces twice; else a box of each, for which less is read of the rows.
 * Returns whether something was lost, or could not be loaded. */
static bool load_run(struct reading *g, unsigned flags, bool wholes)
{
	struct load l = {.g = g};
	struct load_fill *f = load_fill_new(g->step, 1, flags);
	bool lost;
	int r;

	l.targets = calloc(2 * OBJECTS_MAX, sizeof *l.targets);
	l.tensors = calloc(2 * OBJECTS_MAX, sizeof *l.tensors);
	must(f && l.targets && l.tensors);
	load_add_all(&l, f, wholes);
	r = load_fill_run(f, &(struct base_error){0});
	must(r == 0 || !(flags & LOAD_FILL_SKIP_DAMAGED));
	for (size_t i = 0; r == 0 && i < l.n; i++)
		load_look(&l, f, i, flags);
	lost = r < 0 || load_fill_lost_count(f) > 0;
	for (size_t i = 0; i < l.n; i++)
		free(l.targets[i].data);
	free(l.targets);
	free(l.tensors);
	load_fill_free(f);
	return lost;
}

/* ---- the files of the tree ---- */

static int file_some(void *arg, struct load_cache *c, uint64_t at, size_t len, void *out)
{
	struct load_slices e;
	uint8_t *scratch = malloc(len + 1), *to = out;
	int r;

	must(scratch != NULL);
	r = view_file_slices(arg, c, at, len, scratch, &e, &(struct base_error){0});
	for (unsigned i = 0; r == 0 && i < e.niov; to += e.iov[i++].iov_len) {
		must(e.iov[i].iov_len <= len - (size_t)(to - (uint8_t *)out));
		memcpy(to, e.iov[i].iov_base, e.iov[i].iov_len);
	}
	must(r < 0 || to == (uint8_t *)out + len);
	if (r == 0)
		load_slices_release(&e);
	free(scratch);
	return r;
}

/* Is all of a component to be had? Then its file is, too. (A tensor of no bytes is not opened for that.) */
static bool component_whole(const struct reading *g, uint32_t component)
{
	uint32_t first, end;

	load_step_component(g->step, component, &first, &end);
	for (uint32_t i = first; i < end; i++)
		if (i >= g->ntensors || (g->tensors[i].len && g->tensors[i].whole < 0))
			return false;
	return true;
}

/* Its tensors are those that were read otherwise. */
static void safetensors_look(struct reading *g, const struct known *file, uint32_t component)
{
	struct view_safetensors s;
	uint32_t first, end;
	const char *name = load_step_component(g->step, component, &first, &end);

	must(view_safetensors_parse(file->bytes, file->len, file->len, &s, NULL) == 0);
	for (uint32_t i = 0; i < s.ntensors; i++) {
		const struct view_safetensors_tensor *t = &s.tensors[i];
		int64_t number = load_step_tensor_find(g->step, name, t->name, t->name_len);

		must(number >= 0);
		if (number >= g->ntensors)
			continue;
		must(t->end - t->begin == g->tensors[number].len);
		learn(&g->tensors[number], 0, file->bytes + s.data_offset + t->begin, t->end - t->begin);
	}
	view_safetensors_release(&s);
}

static void file_look(struct reading *g, const struct view_node *n, struct view_file *f)
{
	struct known k = {0}, *of = n->kind == VIEW_TENSOR_NPY && n->item < g->ntensors ? &g->tensors[n->item]
		: n->kind == VIEW_BLOB && n->item < g->nblobs ? &g->blobs[n->item] : NULL;
	uint64_t head = n->kind == VIEW_TENSOR_NPY ? VIEW_NPY_DATA_OFFSET : 0;

	known_init(g, &k, view_file_size(f), NULL);
	k.whole = ranges_read(g, &k, file_some, f);
	if (k.given && of && of->given) {
		must(k.len == head + of->len && (of->len == 0 || (k.whole == 0) == (of->whole == 0)));
		if (k.whole == 0)
			learn(of, 0, k.bytes + head, of->len);
	}
	if (k.given && n->kind == VIEW_SAFETENSORS) {
		must(k.whole == 0 || !component_whole(g, n->item));
		if (k.whole == 0)
			safetensors_look(g, &k, n->item);
	}
	free(k.bytes);
	free(k.given);
}

static void tree_read(struct reading *g)
{
	struct view_tree *tree;

	if (view_tree_build(g->step, VIEW_SHOW_ALL, &tree, &(struct base_error){0}) < 0) {
		must(!g->made->sound);
		return;
	}
	for (uint32_t i = 0; i < view_tree_count(tree) && i < 4 * OBJECTS_MAX; i++) {
		const struct view_node *n = view_tree_node(tree, i);
		struct view_file *f;
		uint64_t size;
		int r = n->kind == VIEW_DIRECTORY ? -EISDIR : view_file_open(tree, i, &f, &(struct base_error){0});

		must(r == 0 || !g->made->sound || !g->made->complete || n->kind == VIEW_DIRECTORY);
		if (r < 0)
			continue;
		must(view_tree_size(tree, i, &size) == 0 && size == view_file_size(f));
		file_look(g, n, f);
		view_file_close(f);
	}
	view_tree_unref(tree);
}

/* ---- the step ---- */

static void tensors_init(struct reading *g)
{
	g->ntensors = (uint32_t)base_min(load_step_tensor_count(g->step), OBJECTS_MAX);
	for (uint32_t i = 0; i < g->ntensors; i++) {
		struct known *k = &g->tensors[i];
		const struct made_tensor *t;
		struct load_tensor_info info;
		uint64_t bytes;

		load_step_tensor_info(g->step, i, &info);
		t = made_tensor_find(g->made, info.component, info.name, info.name_len);
		must(t || !g->made->honest);
		known_init(g, k, info.bytes, t ? t->bytes : NULL);
		k->shape = info.shape;
		bytes = k->item = tensor_dtype_bytes(info.dtype);
		for (unsigned d = k->shape.ndim; d-- > 0; bytes *= k->shape.dim[d])
			k->stride[d] = bytes;
	}
}

static void blobs_init(struct reading *g)
{
	int r = load_step_blobs(g->step, &(struct base_error){0});

	must(r == 0 || !g->made->sound);
	g->nblobs = (uint32_t)base_min(load_step_blob_count(g->step), OBJECTS_MAX);
	for (uint32_t i = 0; i < g->nblobs; i++) {
		const struct made_blob *b;
		struct load_blob_info info;

		load_step_blob_info(g->step, i, &info);
		b = made_blob_find(g->made, info.name, info.per_rank, info.rank);
		must(b || !g->made->honest);
		known_init(g, &g->blobs[i], info.bytes, b ? b->bytes : NULL);
	}
}

static void loads(struct reading *g)
{
	bool lost = load_run(g, LOAD_FILL_SKIP_DAMAGED, true);

	load_run(g, LOAD_FILL_SKIP_DAMAGED, false);
	load_run(g, LOAD_FILL_SKIP_DAMAGED, false);
	if (g->ways & WAYS_LOAD)
		must(load_run(g, 0, true) == lost || !g->made->honest);
	if (g->ways & WAYS_PROVE)
		load_run(g, LOAD_FILL_SKIP_DAMAGED | LOAD_FILL_REHASH, true);
}

static bool is_there(const struct reading *g, const struct known *k)
{
	return !k->given || (k->whole == 0 && (k->proved == 0 || !(g->ways & WAYS_PROVE)));
}

static void all_is_there(const struct reading *g)
{
	for (uint32_t i = 0; i < g->ntensors; i++)
		must(is_there(g, &g->tensors[i]));
	for (uint32_t i = 0; i < g->nblobs; i++)
		must(is_there(g, &g->blobs[i]));
}

static void step_read(struct made *made, struct load_step *step, uint64_t random)
{
	struct reading *g = calloc(1, sizeof *g);

	must(g != NULL);
	*g = (struct reading){.made = made, .step = step, .cache = load_cache_new(random % 3 << 15), .random = random,
		.ways = ways_of(random)};
	must(g->cache != NULL);
	tensors_init(g);
	for (uint32_t i = 0; i < g->ntensors; i++)
		tensor_read(g, i);
	blobs_init(g);
	for (uint32_t i = 0; i < g->nblobs; i++)
		blob_read(g, i);
	if (made->sound && made->complete)
		all_is_there(g);
	loads(g);
	tree_read(g);
	for (uint32_t i = 0; i < OBJECTS_MAX; i++) {
		free(g->tensors[i].bytes);
		free(g->tensors[i].given);
		free(g->blobs[i].bytes);
		free(g->blobs[i].given);
	}
	load_cache_free(g->cache);
	free(g);
}

static void check_wrong(void *arg, int r, const char *text)
{
	const struct made *made = arg;

	must(r < 0 && text[0] && !strchr(text, '\n'));
	must(!made->sound || !made->complete);
}

static void check_read(void *arg, uint64_t bytes)
{
	(void)arg, (void)bytes;
}

/* As every command does: the store, the run's list, the step. */
static void store_read(struct made *made, uint64_t random)
{
	struct store *s;
	struct commit_list *l = NULL;
	struct load_step *step;
	int r;

	opened_storage = &made->m.base;
	must(store_open("/memory", STORE_OPEN_READ_ONLY, &s, NULL) == 0);
	r = commit_list_open(s, MADE_RUN, true, &l, &(struct base_error){0});
	must(!made->honest || (r == 0 && commit_list_count(l) == 1));
	for (size_t i = 0; r >= 0 && i < commit_list_count(l); i++) {
		r = load_step_open(s, MADE_RUN, commit_list_at(l, i), &step, &(struct base_error){0});

		must(r == 0 || !made->sound);
		if (r < 0)
			break;
		step_read(made, step, random);
		load_step_unref(step);
		if (ways_of(random) & WAYS_CHECK)
			must(view_step_check(s, MADE_RUN, commit_list_at(l, i), true, check_wrong, check_read,
				made) == 0);
	}
	commit_list_close(l);
	store_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct made *made = malloc(sizeof *made);

	must(made != NULL);
	base_log_set_level(BASE_LOG_ERROR); /* damage, and names that are shown otherwise, are warnings */
	if (made_step(made, data, size))
		store_read(made, base_xxh64_of(0, data, size));
	made_release(made);
	free(made);
	return 0;
}

MADE_COVERED
