/* SPDX-License-Identifier: Apache-2.0
 *
 * compare: units of one piece each, of many tensors, are collected into batches and compared by several threads. Each
 * unit measures for itself, and a batch is summed up in order, so that sums do not depend on threads. Two pieces that
 * are cut alike are read past the cache, a few blocks at a time: the cache's buffers are too many to stay in the
 * processor's own, and to write them took half of the time. Memory: a batch of units, the cache of decoded pieces, and
 * two boxes a thread. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/diff/diff_internal.h"
#include "core/diff/read.h"
#include "core/storage/spread.h"

#define COMPARE_UNITS 8192u            /* of a batch, ... */
#define COMPARE_BATCH_BYTES (UINT64_C(256) << 20) /* ... which has no more than this, so that the user sees progress */
#define COMPARE_BLOCKS 12u            /* 192 KiB of each side */
#define COMPARE_CACHE_BYTES (UINT64_C(32) << 20)

struct compare_unit {
	struct load_object *a, *b;      /* references; b NULL: it is no step's */
	uint64_t piece;
	struct diff_compared *of;
	bool alike;
	struct diff_measure m;
};

struct compare_room { struct compare_room *next; double a[DIFF_CUT_BYTES / 8], b[DIFF_CUT_BYTES / 8]; };

struct compare {
	const struct diff_side *b;
	const struct diff_options *options;
	struct load_cache *cache;
	struct compare_unit units[COMPARE_UNITS]; unsigned n;
	uint64_t bytes, done, total;    /* bytes: of the units */
	pthread_mutex_t lock;           /* protects the next */
	struct compare_room *rooms;     /* that no thread uses */
};

static void compare_clear(struct compare *c)
{
	for (; c->n; c->n--) {
		load_object_unref(c->units[c->n - 1].a);
		if (c->units[c->n - 1].b)
			load_object_unref(c->units[c->n - 1].b);
	}
}

static void compare_free(struct compare *c)
{
	compare_clear(c);
	while (c->rooms) {
		struct compare_room *room = c->rooms;

		c->rooms = room->next;
		free(room);
	}
	load_cache_free(c->cache);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

static struct compare_room *room_take(struct compare *c)
{
	struct compare_room *room;

	pthread_mutex_lock(&c->lock);
	room = c->rooms;
	if (room)
		c->rooms = room->next;
	pthread_mutex_unlock(&c->lock);
	return room ? room : malloc(sizeof *room);
}

static void room_give(struct compare *c, struct compare_room *room)
{
	pthread_mutex_lock(&c->lock);
	room->next = c->rooms;
	c->rooms = room;
	pthread_mutex_unlock(&c->lock);
}

/* ---- a unit ---- */

static bool unit_over(const struct compare *c, const struct compare_unit *u)
{
	return !c->options->values && atomic_load_explicit(&u->of->different, memory_order_relaxed);
}

static void unit_add(const struct compare *c, struct compare_unit *u, const struct compare_room *room,
	const struct diff_type *type, uint64_t items)
{
	if (c->options->values)
		diff_measure_add(&u->m, type, room->a, room->b, items);
	if (c->options->values ? u->m.changed : memcmp(room->a, room->b, items * u->a->grid.item_bytes) != 0)
		atomic_store_explicit(&u->of->different, true, memory_order_relaxed);
}

static int unit_box(struct compare *c, struct compare_unit *u, const struct diff_cut *cut, struct compare_room *room,
	const struct diff_type *type, struct base_error *err)
{
	uint64_t items = diff_cut_items(cut);
	int r = diff_cut_read(cut, u->a, c->cache, room->a, err);

	if (r == 0)
		r = u->b ? diff_cut_read(cut, u->b, c->cache, room->b, err)
			: c->b->other->read(c->b->other->arg, u->of->b, &cut->box, room->b, err);
	if (r == 0)
		unit_add(c, u, room, type, items);
	return r;
}

static int unit_boxes(struct compare *c, struct compare_unit *u, struct compare_room *room,
	const struct diff_type *type, struct base_error *err)
{
	struct tensor_box box;
	struct diff_cut cut;
	int r = 0;

	diff_piece_box(u->a, u->piece, &box);
	for (diff_cut_first(&cut, &u->a->grid, &box); r == 0 && !cut.done && !unit_over(c, u); diff_cut_next(&cut))
		r = unit_box(c, u, &cut, room, type, err);
	return r;
}

/* The items of two pieces that are cut alike have one order. */
static int unit_blocks(struct compare *c, struct compare_unit *u, struct compare_room *room,
	const struct diff_type *type, struct base_error *err)
{
	uint64_t len = u->a->pieces[u->piece].ref.raw_len, blocks = base_block_count(len), some;
	struct pack *a = NULL, *b = NULL;
	int r = 0;

	for (uint64_t i = 0; r == 0 && i < blocks && !unit_over(c, u); i += some) {
		some = base_min(blocks - i, COMPARE_BLOCKS);
		r = load_piece_read(u->a, u->piece, i, some, &a, room->a, err);
		if (r == 0)
			r = load_piece_read(u->b, u->piece, i, some, &b, room->b, err);
		if (r == 0)
			unit_add(c, u, room, type, base_min(some * BASE_BLOCK_BYTES, len - i * BASE_BLOCK_BYTES) /
				u->a->grid.item_bytes);
	}
	store_pack_put(load_step_store(u->a->step), a);
	store_pack_put(load_step_store(u->b->step), b);
	return r;
}

/* Two pieces of other digests have the same bytes. */
static int unit_lies(const struct compare_unit *u, struct base_error *err)
{
	const struct load_step_info *info = load_step_info(u->b->step);
	int r = base_error_set(err, -BASE_EDAMAGED, "piece %llu has another digest than that of %s/%llu, and the same "
		"bytes: one of the two digests is wrong (vckpt verify finds which)", (unsigned long long)u->piece,
		info->run, (unsigned long long)info->step);

	return load_object_fail(u->a, r, err);
}

static int unit_compare(void *arg, uint32_t number, struct base_error *err)
{
	struct compare *c = arg;
	struct compare_unit *u = &c->units[number];
	struct compare_room *room;
	struct load_tensor_info info;
	struct diff_type type;
	int r;

	if (unit_over(c, u))
		return 0;
	room = room_take(c);
	if (!room)
		return base_no_memory(err);
	load_step_tensor_info(u->a->step, u->of->a, &info);
	diff_type_init(&type, info.dtype);
	r = u->alike ? unit_blocks(c, u, room, &type, err) : unit_boxes(c, u, room, &type, err);
	room_give(c, room);
	if (r == 0 && u->alike && c->options->values && u->m.values && u->m.changed == 0)
		r = unit_lies(u, err);
	return r;
}

/* ---- batches ---- */

static int compare_batch(struct compare *c, struct base_error *err)
{
	int r = storage_spread(c->n, unit_compare, c, err);

	for (unsigned i = 0; r == 0 && i < c->n; i++)
		diff_measure_merge(&c->units[i].of->m, &c->units[i].m);
	c->done += c->bytes;
	c->bytes = 0;
	compare_clear(c);
	if (r == 0 && c->options->progress)
		c->options->progress(c->options->arg, c->done, c->total);
	return r;
}

bool diff_cut_alike(const struct load_object *a, const struct load_object *b)
{
	const struct tensor_grid *g = &a->grid, *h = &b->grid;
	const struct tensor_boxes *x = a->boxes ? &a->boxes->list : NULL, *y = b->boxes ? &b->boxes->list : NULL;

	if (memcmp(g->edge, h->edge, g->shape.ndim * sizeof *g->edge) != 0 || g->k != h->k || g->only_k != h->only_k ||
		g->params.min_bytes != h->params.min_bytes || !x != !y || a->npieces != b->npieces)
		return false;
	return !x || (x->n == y->n && memcmp(x->pairs, y->pairs, 2 * x->n * x->ndim * sizeof *x->pairs) == 0);
}

BASE_CLEANUP_DEFINE(struct load_object *, load_object_unref)
BASE_CLEANUP_DEFINE(struct compare *, compare_free)

static int compare_tensor(struct compare *c, const struct diff_side *a, struct diff_compared *of,
	struct base_error *err)
{
	base_cleanup(load_object_unref_p) struct load_object *x = NULL;
	base_cleanup(load_object_unref_p) struct load_object *y = NULL;
	int r = load_tensor_open(a->step, of->a, &x, err);
	bool alike;

	if (r == 0 && c->b->step)
		r = load_tensor_open(c->b->step, of->b, &y, err);
	if (r < 0)
		return r;
	alike = y && diff_cut_alike(x, y);
	for (uint64_t i = 0; r == 0 && i < x->npieces; i++) {
		struct compare_unit u = {x, NULL, i, of, alike};

		if (alike && base_digest_equal(&x->pieces[i].ref.digest, &y->pieces[i].ref.digest)) {
			c->total -= x->pieces[i].ref.raw_len;
			continue;
		}
		if (unit_over(c, &u))
			break;
		load_object_ref(x);
		u.b = y ? load_object_ref(y) : NULL;
		c->units[c->n++] = u;
		c->bytes += x->pieces[i].ref.raw_len;
		if (c->n == COMPARE_UNITS || c->bytes >= COMPARE_BATCH_BYTES)
			r = compare_batch(c, err);
	}
	return r;
}

int diff_compare(const struct diff_side *a, const struct diff_side *b, const struct diff_options *options,
	struct diff_compared *all, size_t n, struct base_error *err)
{
	base_cleanup(compare_free_p) struct compare *c = calloc(1, sizeof *c);
	struct load_tensor_info info;
	int r = 0;

	if (!c)
		return base_no_memory(err);
	pthread_mutex_init(&c->lock, NULL);
	c->b = b;
	c->options = options;
	c->cache = load_cache_new(COMPARE_CACHE_BYTES);
	if (!c->cache)
		return base_no_memory(err);
	load_cache_quiet(c->cache);
	for (size_t i = 0; i < n; i++) {
		diff_side_tensor(a, all[i].a, &info);
		c->total += info.bytes;
	}
	for (size_t i = 0; r == 0 && i < n; i++)
		r = compare_tensor(c, a, &all[i], err);
	return r == 0 && c->n ? compare_batch(c, err) : r;
}
