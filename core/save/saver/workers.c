/* SPDX-License-Identifier: Apache-2.0
 *
 * workers: what a worker does next, in this order, under the saver's lock:
 *
 *   prepare  the oldest flight that was submitted and not prepared; one at a time
 *   stage    the oldest flight that is prepared and not all handed out: the ring is made, or made larger, if it is
 *            due; then a batch is compared (same.c), or the batch that waits for a slot gets one, or the next.
 *            The ring gives slots in order; no room means that the flight being persisted has to give some back first
 *   process  the next band of the flight being persisted, if its batch has arrived and a band is free
 *
 * So a trainer waits for copies only: as long as there is something to copy and room for it, no worker digests. With
 * low priority there are two kinds of workers, so that the option costs the trainer nothing: those that copy have the
 * priority of the process, those that digest have the lowest, like the persister. One worker at a time forms batches,
 * several ahead (walking bands costs time that others need the lock in).
 *
 * Bands are processed and appended by the engine (core/save/write/engine.h), of which the staged batches are a
 * source: this file says where a band's bytes lie, and gives slots back. Slots are given out in the order of
 * flights and batches, and that is the order in which they are appended: so the oldest slot is always one that can
 * be given back. */
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/save/saver/saver_internal.h"

#define IOPRIO_WHO_PROCESS 1
#define IOPRIO_IDLE (3 << 13) /* ioprio_set(2): the class idle */

#define WORKER_FORM_BATCHES 64u
#define WORKER_FORM_BANDS 4096u
#define WORKER_TOUCHED 16u
#define WORKER_TOUCHED_BYTES 65536u

enum worker_did { WORKER_DID, WORKER_NOTHING, WORKER_WAIT };

/* ---- staging ---- */

static struct save_flight *worker_to_prepare(struct save_saver *s)
{
	struct save_flight *f = s->preparing ? NULL : s->first;

	while (f && (f->prepared || f->failed || f->given_up))
		f = f->next;
	return f && f->submitted ? f : NULL;
}

static struct save_flight *worker_to_stage(struct save_saver *s)
{
	struct save_flight *f = s->first;

	while (f && (f->handed_out || f->failed || f->given_up))
		f = f->next;
	return f && f->prepared ? f : NULL;
}

static void worker_prepare(struct save_saver *s, struct save_flight *f)
{
	struct base_error err = {0};
	int r;

	s->preparing = f;
	pthread_mutex_unlock(&s->lock);
	r = saver_prepare(f, &err);
	pthread_mutex_lock(&s->lock);
	s->preparing = NULL;
	f->prepared = r == 0;
	if (r < 0)
		saver_flight_fail(f, r, &err);
	else if (!f->failed)
		f->state = SAVE_STAGING;
	pthread_cond_broadcast(&s->work);
	pthread_cond_broadcast(&s->ready);
	pthread_cond_broadcast(&s->told); /* it may have failed meanwhile: the data is the caller's from here on */
}

static void worker_tell_staged(struct save_flight *f)
{
	if (f->failed) /* by somebody else, maybe: waiting ends with the last copy */
		pthread_cond_broadcast(&f->s->told);
	if (f->staged || !f->handed_out || f->copying || f->failed)
		return;
	f->staged = true;
	f->state = SAVE_STAGED;
	f->info.staged_ns = base_realtime_ns();
	pthread_cond_broadcast(&f->s->told);
}

/* Walks the flight's next batches, without the lock; after the last one the flight is handed out. */
static int worker_walk(struct save_flight *f, struct saver_worker *w, struct saver_batch **ret_first,
	struct saver_batch **ret_last, bool *ret_end, struct base_error *err)
{
	uint64_t bands = 0;

	for (unsigned n = 0; n < WORKER_FORM_BATCHES && bands < WORKER_FORM_BANDS; n++) {
		struct saver_batch *b;
		int r = saver_batch_form(f, w, &b, err);

		if (r < 0 || !b) {
			*ret_end = !b;
			return r;
		}
		*(*ret_last ? &(*ret_last)->next : ret_first) = b;
		*ret_last = b;
		bands += b->nbands + b->nentries;
	}
	return 0;
}

static void worker_form(struct save_flight *f, struct saver_worker *w)
{
	struct saver_batch *first = NULL, *last = NULL;
	struct save_saver *s = f->s;
	struct base_error err = {0};
	bool end = false;
	int r;

	f->forming = true;
	f->copying++;
	pthread_mutex_unlock(&s->lock);
	r = worker_walk(f, w, &first, &last, &end, &err);
	pthread_mutex_lock(&s->lock);
	f->forming = false;
	f->copying--;
	f->formed = first;
	for (struct saver_batch *b = first; b; b = b->next)
		b->state = saver_same_in(f, b) ? BATCH_TO_COMPARE : BATCH_READY;
	if (r < 0)
		saver_flight_fail(f, r, &err);
	else
		f->walked = end;
	if (f->walked && !f->formed)
		f->handed_out = true;
	worker_tell_staged(f);
	pthread_cond_broadcast(&s->work);
	pthread_cond_signal(&s->ready);
}

static void worker_copied(struct save_flight *f, struct saver_batch *b)
{
	if (b->samples) {
		device_ring_give(f->s->ring, b->slot);
		free(b);
		return;
	}
	b->state = BATCH_STAGED;
	f->info.bytes_staged += b->whole_bytes;
	f->pieces->steady_bytes += b->steady_bytes;
}

/* Compares the batch, or settles what is copied of it, or both. */
static void worker_compare(struct save_flight *f, struct saver_worker *w, struct saver_batch *b)
{
	struct save_saver *s = f->s;
	struct base_error err = {0};
	uint64_t begin = base_realtime_ns();
	bool compared = b->state == BATCH_COMPARED;
	enum saver_same same = f->same;
	int r;

	b->state = BATCH_COMPARING;
	f->copying++;
	pthread_mutex_unlock(&s->lock);
	r = saver_same_batch(f, w, b, compared, same, &err);
	pthread_mutex_lock(&s->lock);
	f->copying--;
	saver_phase_note(f, SAVE_COPY, begin, base_realtime_ns() - begin, 0);
	b->state = r == 1 ? BATCH_READY : BATCH_COMPARED;
	if (r < 0)
		saver_flight_fail(f, r, &err);
	worker_tell_staged(f);
	pthread_cond_broadcast(&s->work);
	pthread_cond_signal(&s->ready);
}

/* slot NULL: nothing of the batch is to be copied. */
static void worker_copy(struct save_flight *f, struct saver_worker *w, uint8_t *slot)
{
	struct save_saver *s = f->s;
	struct saver_batch *b = f->formed;
	struct base_error err = {0};
	uint64_t begin = base_realtime_ns();
	int r = 0;

	f->formed = b->next;
	f->handed_out = f->walked && !f->formed;
	b->next = NULL;
	b->slot = slot;
	b->state = BATCH_COPYING;
	if (b->waited)
		saver_phase_note(f, SAVE_ROOM, b->waits_ns, begin - base_min(begin, b->waits_ns), b->bytes);
	f->copying++;
	if (!b->samples) {
		*(f->last ? &f->last->next : &f->first) = b;
		f->last = b;
	}
	if (slot) {
		pthread_mutex_unlock(&s->lock);
		r = saver_batch_copy(f, w, b, &err);
		pthread_mutex_lock(&s->lock);
		saver_phase_note(f, SAVE_COPY, begin, base_realtime_ns() - begin, b->data_bytes);
	}
	f->copying--;
	worker_copied(f, b);
	if (r < 0)
		saver_flight_fail(f, r, &err);
	worker_tell_staged(f);
	pthread_cond_broadcast(&s->work);
	pthread_cond_signal(&s->ready);
}

/* The ring is looked at before the flight's first copy, and again whenever it is empty, until its size is decided. */
static bool worker_ring_is_due(const struct save_saver *s, const struct save_flight *f)
{
	return !s->sizing && (!f->ring_seen || (!f->ring_fits && device_ring_used(s->ring) == 0));
}

static void worker_ring(struct save_saver *s, struct save_flight *f)
{
	bool empty = !s->ring || device_ring_used(s->ring) == 0;
	struct base_error err = {0};
	int r;

	s->sizing = true;
	f->copying++;
	pthread_mutex_unlock(&s->lock);
	r = saver_room_fit(f, empty, &err);
	pthread_mutex_lock(&s->lock);
	s->sizing = false;
	f->copying--;
	f->ring_seen = true;
	f->ring_fits |= empty;
	if (r < 0)
		saver_flight_fail(f, r, &err);
	worker_tell_staged(f);
	pthread_cond_broadcast(&s->work);
	pthread_cond_signal(&s->ready);
}

/* No room now: the flight being persisted has to give some back; or never. */
static void worker_wait_for_room(struct save_saver *s, struct save_flight *f)
{
	struct saver_batch *b = f->formed;
	struct base_error err = {0};

	if (f->ring_fits && b->bytes > device_ring_bytes(s->ring)) {
		base_error_set(&err, -ENOBUFS, "the staging ring of %llu bytes is too small for a band of %llu: "
			"set ring_bytes to at least that, or leave ring_bytes out",
			(unsigned long long)device_ring_bytes(s->ring), (unsigned long long)b->bytes);
		saver_flight_fail(f, -ENOBUFS, &err);
		worker_tell_staged(f);
	} else if (!b->waited) {
		b->waited = true;
		b->waits_ns = base_realtime_ns();
		f->info.ring_waits++;
		pthread_cond_broadcast(&s->work); /* workers that digest were held back by it */
		pthread_cond_signal(&s->ready);   /* a pack may keep memory that it does not write yet */
	}
}

/* Another worker is at the batch, or whether it has to be copied is not known yet. */
static enum worker_did worker_wait_for_answer(struct save_flight *f, struct saver_worker *w,
	const struct saver_batch *b)
{
	if (b->state == BATCH_COMPARED)
		w->until_ns = saver_same_wait(f);
	return b->state == BATCH_COMPARED && !w->until_ns ? WORKER_DID : WORKER_WAIT;
}

/* The walk is short, so a worker that comes meanwhile waits for it rather than begin to digest. */
static enum worker_did worker_stage(struct save_saver *s, struct saver_worker *w)
{
	struct save_flight *f = worker_to_prepare(s);
	struct saver_batch *b;
	uint8_t *slot = NULL;

	if (f) {
		worker_prepare(s, f);
		return WORKER_DID;
	}
	f = worker_to_stage(s);
	if (!f)
		return WORKER_NOTHING;
	if (worker_ring_is_due(s, f)) {
		worker_ring(s, f);
		return WORKER_DID;
	}
	if (!f->formed) {
		if (f->forming)
			return WORKER_WAIT;
		worker_form(f, w);
		return WORKER_DID;
	}
	b = saver_same_next(f);
	if (b) {
		worker_compare(f, w, b);
		return WORKER_DID;
	}
	b = f->formed;
	if (b->state != BATCH_READY)
		return worker_wait_for_answer(f, w, b);
	if (s->sizing)
		return WORKER_NOTHING;
	if (b->differs)
		slot = device_ring_take(s->ring, b->bytes);
	if (!slot && b->differs) {
		worker_wait_for_room(s, f);
		return WORKER_NOTHING;
	}
	worker_copy(f, w, slot);
	return WORKER_DID;
}

/* Is something being copied, or waiting to be, that has room? */
static bool worker_copies(struct save_saver *s)
{
	struct save_flight *f = worker_to_stage(s);

	return f && !(f->formed && f->formed->waited);
}

/* ---- the engine's source: what is staged of the flight being persisted ---- */

static bool bands_ready(void *arg)
{
	struct save_saver *s = arg;
	struct save_flight *f = s->persisting;

	if (f->failed)
		return false;
	if (!s->batch)
		s->batch = f->first;
	else if (s->batch->given == s->batch->nbands && s->batch->next)
		s->batch = s->batch->next;
	return s->batch && s->batch->state == BATCH_STAGED && s->batch->given < s->batch->nbands;
}

static void bands_taken(void *arg, struct save_band *b)
{
	const struct save_saver *s = arg;
	struct saver_pieces *found = s->persisting->pieces;
	struct saver_batch *batch = s->batch;
	uint64_t piece = batch->next_piece;
	bool same = saver_band_same(s->persisting, piece, b->npieces);

	b->in = same ? NULL : batch->slot + batch->offset;
	b->staged = batch->cut ? found->xxh + piece : NULL;
	b->absent = batch->same ? found->same + piece : NULL;
	b->lent = same ? NULL : &batch->lent;
	b->worth = found->worth + piece;
	batch->next_piece += b->npieces;
	batch->offset += same ? 0 : saver_band_room(b->len);
	batch->given++;
}

static void bands_processed(void *arg, const struct save_band *b, uint64_t begin)
{
	struct save_flight *f = ((struct save_saver *)arg)->persisting;

	saver_phase_note(f, SAVE_DIGEST, begin, b->digest_ns, b->len);
	if (b->encode_ns)
		saver_phase_note(f, SAVE_ENCODE, begin + b->digest_ns, b->encode_ns, b->len);
}

static void batch_free(struct saver_batch *b)
{
	if (b->slot)
		device_ring_give(b->s->ring, b->slot);
	free(b);
}

/* The saver needs it no more; a pack may. */
static void batch_drop(struct saver_batch *b)
{
	if (store_lent_drop(&b->lent))
		batch_free(b);
}

void saver_batch_back(struct store_lent *l)
{
	struct saver_batch *b = (struct saver_batch *)(void *)((char *)l - offsetof(struct saver_batch, lent));
	struct save_saver *s = b->s;

	batch_free(b);
	pthread_mutex_lock(&s->lock); /* else a worker that has just found no room would not hear of it */
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
}

/* Its part of the slot is not needed any more. Workers wait for a free band, if there was no other, and for room in the
 * ring. */
static void bands_appended(void *arg, const struct save_band *b, const struct save_engine_appended *cost)
{
	struct save_saver *s = arg;
	struct save_flight *f = s->persisting;
	struct saver_batch *first = f->first;
	bool given = --first->left == 0;

	f->info.bytes_done += b->len;
	if (cost->write_ns)
		saver_phase_note(f, SAVE_WRITE, cost->begin_ns, cost->write_ns, cost->stored_bytes);
	if (given) {
		f->first = first->next;
		if (!f->first)
			f->last = NULL;
		if (s->batch == first)
			s->batch = NULL;
		batch_drop(first);
	}
	if (given || cost->starved)
		pthread_cond_broadcast(&s->work);
}

static bool bands_short_of_memory(void *arg)
{
	const struct save_flight *f = worker_to_stage(arg);

	return f && f->formed && f->formed->waited;
}

/* Behind the bands come samples, and copies of what has no bytes. */
static bool bands_staged(void *arg) { return ((struct save_saver *)arg)->persisting->staged; }
static bool bands_failed(void *arg) { return ((struct save_saver *)arg)->persisting->failed; }

/* Best effort: a thread that may not change its priority keeps it. */
void saver_yield_to_others(void)
{
	pid_t thread = (pid_t)syscall(SYS_gettid);

	setpriority(PRIO_PROCESS, (id_t)thread, 19);
	syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, thread, IOPRIO_IDLE);
}

/* What it copies with; where that fails the copy says so. And memory that has been touched, for malloc to give this
 * thread: the first save's plan is made in front of the trainer, and half of its time would go into asking the kernel
 * for one page after another. The room behind it keeps malloc from giving it back. */
static void worker_memory(struct saver_worker *w)
{
	void *touched[WORKER_TOUCHED];

	for (unsigned i = 0; w->copies && i < WORKER_TOUCHED; i++) {
		touched[i] = malloc(WORKER_TOUCHED_BYTES);
		if (touched[i])
			explicit_bzero(touched[i], WORKER_TOUCHED_BYTES);
	}
	saver_worker_room(w); /* without it now, each batch asks again */
	for (unsigned i = 0; w->copies && i < WORKER_TOUCHED; i++)
		free(touched[i]);
}

static void worker_wait(struct save_saver *s, const struct saver_worker *w)
{
	const struct timespec until = {.tv_sec = (time_t)(w->until_ns / 1000000000),
		.tv_nsec = (long)(w->until_ns % 1000000000)};

	if (w->until_ns)
		pthread_cond_timedwait(&s->work, &s->lock, &until);
	else
		pthread_cond_wait(&s->work, &s->lock);
}

void *saver_worker_main(void *arg)
{
	struct saver_worker *w = arg;
	struct save_saver *s = w->s;

	if (s->options.low_priority && w->digests)
		saver_yield_to_others();
	worker_memory(w);
	pthread_mutex_lock(&s->lock);
	while (!s->stop && !w->surplus) {
		enum worker_did did;

		w->until_ns = 0;
		did = w->copies ? worker_stage(s, w) : worker_copies(s) ? WORKER_WAIT : WORKER_NOTHING;

		if (did == WORKER_NOTHING && w->digests && save_engine_step(&s->engine))
			did = WORKER_DID;
		if (did != WORKER_DID)
			worker_wait(s, w);
	}
	pthread_mutex_unlock(&s->lock);
	saver_lanes_drop(w);
	save_band_release(&w->walker);
	base_xxh128_state_free(w->hash);
	free(w->room);
	return NULL;
}

/* ---- the persister's side ---- */

int saver_bands_append(struct save_flight *f, struct base_error *err)
{
	struct save_saver *s = f->s;
	const struct save_engine_source source = {.ready = bands_ready, .taken = bands_taken,
		.processed = bands_processed, .appended = bands_appended, .failed = bands_failed,
		.short_of_memory = bands_short_of_memory, .staged = bands_staged, .arg = s};
	int r;

	pthread_mutex_lock(&s->lock);
	s->persisting = f;
	s->batch = NULL;
	pthread_mutex_unlock(&s->lock);
	r = save_writer_append(f->w, &s->engine, &source, err);
	pthread_mutex_lock(&s->lock);
	s->persisting = NULL;
	if (f->failed && (r == 0 || r == -ECANCELED)) {
		r = f->r;
		if (err)
			*err = f->err;
	}
	if (r < 0)
		saver_flight_fail(f, r, err);
	while (r < 0 && f->copying) /* a worker may be asking the bases, which go next */
		pthread_cond_wait(&s->ready, &s->lock);
	pthread_mutex_unlock(&s->lock);
	return r;
}

void saver_bands_drop(struct save_flight *f)
{
	struct save_saver *s = f->s;

	pthread_mutex_lock(&s->lock);
	while (f->copying || s->preparing == f)
		pthread_cond_wait(&s->ready, &s->lock);
	while (f->first) {
		struct saver_batch *b = f->first;

		f->first = b->next;
		batch_drop(b);
	}
	f->last = NULL;
	while (f->formed) {
		struct saver_batch *b = f->formed;

		f->formed = b->next;
		batch_drop(b);
	}
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
}
