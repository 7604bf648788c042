/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange_work: what the threads of an exchange do, the most urgent first: place buckets that have arrived; read the
 * next bucket that this rank owns, if there is room for it; read what this rank alone wants. No thread waits for
 * another rank, so a bucket that has arrived is always placed.
 *
 *   bucket  "VXB1" | code: 4 | number of the bucket: 8 | raw bytes: 8 | a bit for each segment that is lost: 32 |
 *           XXH3-64 of what comes after, seeded with that of what comes before: 8 | zeros | at 128: the blocks of its
 *           segments, decoded
 *
 * Bytes are passed on decoded: all ranks know from the plan how many there are, so a bucket needs no answer and no
 * length that could be wrong, and each block is decoded once. Every block has been checked before. The hash shows that
 * a rank has got what was sent; without it two buckets could be mixed up. The bytes of a lost segment are the sentence
 * that says why, as far as it fits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/text.h"
#include "core/load/fill/burst.h"
#include "core/load/exchange/exchange_internal.h"
#include "core/load/fill/place.h"
#include "core/tensor/reshard.h"

#define BUCKET_MAGIC "VXB1"
#define BUCKET_LOST_AT 24
#define BUCKET_SUM_AT 56

/* ---- errors ---- */

void exchange_fail(struct load_exchange *x, const struct base_error *err)
{
	pthread_mutex_lock(&x->lock);
	if (!x->error.code)
		x->error = *err;
	pthread_cond_broadcast(&x->news);
	pthread_mutex_unlock(&x->lock);
	atomic_store(&x->f->failed, 0); /* a task goes on only before the first need that fails */
}

int exchange_failed(struct load_exchange *x, struct base_error *err)
{
	struct load_fill *f = x->f;

	pthread_mutex_lock(&f->lock);
	if (f->error.code)
		base_error_set(err, f->error.code, "%s", f->error.text);
	pthread_mutex_unlock(&f->lock);
	pthread_mutex_lock(&x->lock);
	if (!err->code && x->error.code)
		base_error_set(err, x->error.code, "%s", x->error.text);
	pthread_mutex_unlock(&x->lock);
	if (!err->code && atomic_load(&f->stopped))
		base_error_set(err, -ECANCELED, "the load was stopped");
	return err->code;
}

static bool exchange_goes_on(const struct load_exchange *x)
{
	return !atomic_load(&x->f->stopped) && atomic_load(&x->f->failed) != 0;
}

/* ---- one object ---- */

static const struct pack_object_ref *mine_ref(const struct load_exchange *x, const struct exchange_mine *m)
{
	return need_ref(x->f, &x->needs[m->first]);
}

struct mine_part {
	struct load_fill *f;
	const struct fill_box *box;
	const struct tensor_grid *grid;
	const struct tensor_box *piece;
	const uint8_t *bytes;            /* where byte 0 of the piece would be */
};

static void mine_part_place(void *arg, const struct tensor_box *part)
{
	const struct mine_part *p = arg;

	place_part(p->f, p->box, p->grid, p->piece, part, p->bytes);
}

/* Places the items that are in the blocks and in the part. Returns how many these are. */
static uint64_t mine_place_box(struct load_fill *f, const struct fill_box *b, const struct tensor_grid *g,
	const struct tensor_box *piece, const struct tensor_box *part, const uint8_t *bytes, uint64_t from,
	uint64_t len)
{
	struct mine_part p = {f, b, g, piece, (const uint8_t *)((uintptr_t)bytes - from)};

	if (place_is_plain(b))
		return tensor_piece_scatter_some(g, piece, part, bytes, from, len, b->data, b->box.offset, b->stride);
	return tensor_piece_some(g, piece, part, from, len, mine_part_place, &p);
}

/* Copies blocks [first, first + n) to wherever the boxes of this rank want them. */
static void mine_place(struct load_exchange *x, struct exchange_mine *m, uint32_t first, uint32_t n,
	const uint8_t *bytes)
{
	struct load_fill *f = x->f;
	uint64_t len = exchange_bytes(mine_ref(x, m)->raw_len, first, n), placed = 0;

	for (size_t i = m->first; i < m->end; i++) {
		const struct fill_need *need = &x->needs[i];
		const struct load_object *o = need_object(f, need);
		const struct fill_box *b = &f->boxes[need->box];
		struct tensor_box piece, part;

		fill_need_boxes(f, need, &piece, &part);
		placed += o->grid.item_bytes * mine_place_box(f, b, &o->grid, &piece, &part, bytes,
			(uint64_t)first * BASE_BLOCK_BYTES, len);
	}
	atomic_fetch_add_explicit(&f->placed, placed, memory_order_relaxed);
	if (atomic_fetch_sub_explicit(&m->left, n, memory_order_relaxed) == n)
		atomic_fetch_add_explicit(&f->pieces, 1, memory_order_relaxed);
}

/* Lists all that the boxes of this rank want of the object. */
static int mine_lose(struct load_exchange *x, struct exchange_mine *m, const struct base_error *why)
{
	int r = 0;

	if (atomic_exchange(&m->lost, true))
		return 0;
	for (size_t i = m->first; r == 0 && i < m->end; i++) {
		struct tensor_box piece, part;

		fill_need_boxes(x->f, &x->needs[i], &piece, &part);
		r = fill_lose(x->f, x->needs[i].box, &part, why->code, why->text);
	}
	return r;
}

/* Blocks of an object into memory, checked and decoded. */
static int mine_read(struct load_exchange *x, struct fill_worker *w, const struct exchange_mine *m, uint32_t first,
	uint32_t n, uint8_t *to)
{
	const struct fill_need *need = &x->needs[m->first];
	const struct pack_object_ref *ref = mine_ref(x, m);
	uint64_t before = pack_bytes_read();
	int r;

	w->err = (struct base_error){0};
	r = fill_pack(w, need->pack);
	if (r == 0 && x->f->flags & LOAD_FILL_REHASH)
		r = fill_piece_whole(w, ref, to);
	else if (r == 0)
		r = pack_object_read_blocks(w->pack, ref, first, n, to, &w->err);
	atomic_fetch_add_explicit(&x->f->read, pack_bytes_read() - before, memory_order_relaxed);
	return r < 0 ? fill_piece_failed(w, need, r) : 0;
}

/* ---- a bucket of this rank's ---- */

/* The bytes of a bucket do not count if its owner has failed. */
static uint64_t bucket_sum(const uint8_t *head, uint64_t bytes)
{
	return base_xxh64_of(base_xxh64_of(0, head, BUCKET_SUM_AT), head + EXCHANGE_HEAD_BYTES,
		base_get32(head + 4) == 0 ? bytes : 0);
}

static void bucket_lose(uint8_t *head, uint32_t segment, uint8_t *to, uint64_t len, const struct base_error *why)
{
	size_t n = base_min(strlen(why->text), len - 1);

	head[BUCKET_LOST_AT + segment / 8] |= (uint8_t)(1 << segment % 8);
	memset(to, 0, len);
	memcpy(to, why->text, n);
}

/* Places what this rank owns and wants itself, from its bucket. Without others it might be read straight to its place:
 * then the time counts as that of passing on. */
static void bucket_mine(struct load_exchange *x, struct exchange_mine *m, uint32_t first, uint32_t n,
	const uint8_t *bytes)
{
	uint64_t from = base_monotonic_ns();

	mine_place(x, m, first, n, bytes);
	if (fill_need_place(x->f, &x->needs[m->first]))
		atomic_fetch_add_explicit(&x->pass_ns, base_monotonic_ns() - from, memory_order_relaxed);
}

/* A segment that this rank owns, to its place in the bucket and in this rank's boxes. */
static int bucket_segment(struct load_exchange *x, struct fill_worker *w, uint8_t *head, uint32_t i,
	const struct exchange_segment *s, uint8_t *to)
{
	const struct exchange_object *o = &x->plan.objects[s->object];
	struct exchange_mine *m = &x->mine[o->mine];
	int r = mine_read(x, w, m, s->first, s->n, to);

	if (r == 0) {
		bucket_mine(x, m, s->first, s->n, to);
		return 0;
	}
	if (!fill_skips(x->f, r))
		return r;
	r = mine_lose(x, m, &w->err);
	bucket_lose(head, i, to, exchange_bytes(o->key.raw_len, s->first, s->n), &w->err);
	return r < 0 ? base_no_memory(&w->err) : 0;
}

/* Reads segments from `first` on, of one pack, with few requests. Returns the number of the first one that was not
 * read, for bucket_segment. */
static uint32_t bucket_burst(struct load_exchange *x, struct fill_worker *w, const struct exchange_bucket *b,
	uint32_t first, uint8_t *to)
{
	const struct exchange_segment *s = &x->plan.segments[b->first];
	const struct exchange_object *o = x->plan.objects;
	uint32_t pack = o[s[first].object].key.pack;
	uint64_t before = pack_bytes_read();
	struct burst burst;

	if (!burst_begin(&burst, w, pack))
		return first;
	for (uint32_t i = first; i < b->nsegments && o[s[i].object].key.pack == pack; i++) {
		const struct pack_object_ref *ref = mine_ref(x, &x->mine[o[s[i].object].mine]);

		if (!burst_add(&burst, ref, s[i].first, s[i].n, to))
			break;
		to += exchange_bytes(ref->raw_len, s[i].first, s[i].n);
	}
	if (burst_read(&burst)) {
		for (unsigned i = 0; i < burst.n && burst_take(&burst, i, NULL); i++, first++)
			bucket_mine(x, &x->mine[o[s[first].object].mine], s[first].first, s[first].n,
				burst.run[i].place);
	}
	atomic_fetch_add_explicit(&x->f->read, pack_bytes_read() - before, memory_order_relaxed);
	return first;
}

/* Raw bytes of so many segments of a bucket. */
static uint64_t bucket_bytes(const struct load_exchange *x, const struct exchange_segment *s, uint32_t n)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < n; i++)
		bytes += exchange_bytes(x->plan.objects[s[i].object].key.raw_len, s[i].first, s[i].n);
	return bytes;
}

/* After a failure buckets are still passed on until the ranks vote, so that all make the same calls. */
static void bucket_read(struct load_exchange *x, struct fill_worker *w, uint32_t bucket, uint8_t *head)
{
	const struct exchange_bucket *b = &x->plan.buckets[bucket];
	uint8_t *to = head + EXCHANGE_HEAD_BYTES;
	uint64_t from = base_monotonic_ns(), sum_from;
	int r = exchange_goes_on(x) ? 0 : -ECANCELED;

	memset(head, 0, EXCHANGE_HEAD_BYTES);
	for (uint32_t i = 0, next; r == 0 && i < b->nsegments; i = next) {
		const struct exchange_segment *s = &x->plan.segments[b->first + i];

		next = bucket_burst(x, w, b, i, to);
		if (next == i)
			r = bucket_segment(x, w, head, next++, s, to);
		if (r < 0)
			exchange_fail(x, &w->err);
		to += bucket_bytes(x, s, next - i);
	}
	memcpy(head, BUCKET_MAGIC, 4);
	base_put32(head + 4, (uint32_t)r);
	base_put64(head + 8, bucket);
	base_put64(head + 16, b->bytes);
	sum_from = base_monotonic_ns();
	base_put64(head + BUCKET_SUM_AT, bucket_sum(head, b->bytes));
	atomic_fetch_add_explicit(&x->pass_ns, base_monotonic_ns() - sum_from, memory_order_relaxed);
	atomic_fetch_add_explicit(&x->bucket_ns, base_monotonic_ns() - from, memory_order_relaxed);
}

/* ---- one that has arrived ---- */

static int bucket_check(const struct load_exchange *x, uint32_t bucket, const uint8_t *head, struct base_error *err)
{
	const struct exchange_bucket *b = &x->plan.buckets[bucket];

	if (memcmp(head, BUCKET_MAGIC, 4) != 0 || base_get64(head + 8) != bucket || base_get64(head + 16) != b->bytes)
		return base_error_set(err, -BASE_EFORMAT, "rank %u passed on something else than its bucket %u",
			b->owner, b->own);
	if (base_get64(head + BUCKET_SUM_AT) != bucket_sum(head, b->bytes))
		return base_error_set(err, -BASE_EDAMAGED, "bucket %u of rank %u was damaged on its way", b->own,
			b->owner);
	return base_get32(head + 4) != 0 ? -ECANCELED : 0;
}

static int segment_lost(struct load_exchange *x, struct exchange_mine *m, uint32_t owner, const uint8_t *text,
	uint64_t len)
{
	struct base_error why = {.code = -BASE_EDAMAGED};
	size_t n = (size_t)snprintf(why.text, sizeof why.text, "rank %u: ", owner);
	size_t more = strnlen((const char *)text, base_min(len, sizeof why.text - n - 1));

	memcpy(why.text + n, text, more);
	why.text[n + more] = 0;
	base_text_clean(why.text);
	if (!(x->f->flags & LOAD_FILL_SKIP_DAMAGED)) {
		exchange_fail(x, &why);
		return 0;
	}
	return mine_lose(x, m, &why);
}

static void bucket_place(struct load_exchange *x, uint32_t bucket, const uint8_t *head)
{
	const struct exchange_bucket *b = &x->plan.buckets[bucket];
	const uint8_t *from = head + EXCHANGE_HEAD_BYTES;
	struct base_error err = {0};
	int r = bucket_check(x, bucket, head, &err);

	/* without a sentence its owner has failed, and the next vote says how */
	if (r < 0 && err.code)
		exchange_fail(x, &err);
	for (uint32_t i = 0; r == 0 && i < b->nsegments; i++) {
		const struct exchange_segment *s = &x->plan.segments[b->first + i];
		const struct exchange_object *o = &x->plan.objects[s->object];
		uint64_t len = exchange_bytes(o->key.raw_len, s->first, s->n);

		if (head[BUCKET_LOST_AT + i / 8] >> i % 8 & 1)
			r = segment_lost(x, &x->mine[o->mine], b->owner, from, len);
		else
			mine_place(x, &x->mine[o->mine], s->first, s->n, from);
		from += len;
	}
	if (r == -ENOMEM) {
		base_no_memory(&err);
		exchange_fail(x, &err);
	}
}

/* ---- what this rank alone wants ---- */

static int alone_read(struct load_exchange *x, struct fill_worker *w, const struct exchange_alone *a)
{
	struct exchange_mine *m = &x->mine[a->mine];
	int r;

	w->err = (struct base_error){0};
	r = fill_room(w, exchange_bytes(mine_ref(x, m)->raw_len, a->first, a->n));
	if (r == 0)
		r = mine_read(x, w, m, a->first, a->n, w->room);
	if (r == 0)
		mine_place(x, m, a->first, a->n, w->room);
	else if (fill_skips(x->f, r))
		r = mine_lose(x, m, &w->err) < 0 ? base_no_memory(&w->err) : 0;
	return r;
}

/* ---- a thread ---- */

struct work { struct load_exchange *x; struct fill_worker w; };

static void work_place(struct work *k)
{
	struct load_exchange *x = k->x;
	struct exchange_pass *p = x->arrived;

	x->arrived = p->next;
	if (!x->arrived)
		x->arrived_end = &x->arrived;
	pthread_mutex_unlock(&x->lock);
	bucket_place(x, p->bucket, p->pass.bytes);
	comm_pass_done(x->comm, &p->pass);
	free(p);
	pthread_mutex_lock(&x->lock);
	x->placing--;
	pthread_cond_broadcast(&x->news);
}

static bool work_read(struct work *k)
{
	struct load_exchange *x = k->x;
	uint8_t *room;
	uint32_t own;

	if (x->own_next == x->own_limit || comm_room(x->comm, &room) < 0)
		return false;
	own = x->own_next++;
	pthread_mutex_unlock(&x->lock);
	bucket_read(x, &k->w, x->own[own], room);
	pthread_mutex_lock(&x->lock);
	x->ready[own % COMM_ROOMS] = (struct exchange_own){room, true};
	pthread_cond_broadcast(&x->news);
	return true;
}

static bool work_alone(struct work *k)
{
	struct load_exchange *x = k->x;
	size_t at = x->alone_next;
	bool more;

	if (!x->private_too || x->tasks_over)
		return false;
	x->busy++;
	if (at < x->plan.nalone)
		x->alone_next++;
	pthread_mutex_unlock(&x->lock);
	if (at < x->plan.nalone && exchange_goes_on(x)) {
		more = true;
		if (alone_read(x, &k->w, &x->plan.alone[at]) < 0)
			exchange_fail(x, &k->w.err);
	} else
		more = fill_take(&k->w);
	pthread_mutex_lock(&x->lock);
	x->busy--;
	x->tasks_over = x->tasks_over || !more;
	if (x->tasks_over && !x->busy)
		pthread_cond_broadcast(&x->news);
	return true;
}

void *exchange_worker(void *arg)
{
	struct work k = {.x = arg, .w.f = ((struct load_exchange *)arg)->f};
	struct load_exchange *x = arg;

	pthread_mutex_lock(&x->lock);
	while (!x->over) {
		if (x->arrived)
			work_place(&k);
		else if (!work_read(&k) && !work_alone(&k))
			pthread_cond_wait(&x->work, &x->lock);
	}
	pthread_mutex_unlock(&x->lock);
	fill_worker_release(&k.w);
	return NULL;
}
