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
 * Slots are given out in the order of flights and batches, and that is the order in which they are appended: so the
 * oldest slot is always one that can be given back. */
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

struct save_flight *saver_to_stage(const struct save_saver *s)
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
	pthread_cond_broadcast(&s->callers); /* it may have failed meanwhile: the data is the caller's from here on */
}

static void worker_note_staged(struct save_flight *f)
{
	if (f->failed) /* by another thread, maybe: waiting ends with the last copy */
		pthread_cond_broadcast(&f->s->callers);
	if (f->staged || !f->handed_out || f->copying || f->failed)
		return;
	f->staged = true;
	f->state = SAVE_STAGED;
	f->info.stats.staged_ns = base_realtime_ns();
	pthread_cond_broadcast(&f->s->callers);
}

/* The work on a flight's data, which is done without the lock, begins; it has ended, as `r` and `err` say. */
static void worker_begin(struct save_flight *f)
{
	f->copying++;
	pthread_mutex_unlock(&f->s->lock);
}

static void worker_end(struct save_flight *f, int r, const struct base_error *err)
{
	f->copying--;
	if (r < 0)
		saver_flight_fail(f, r, err);
	worker_note_staged(f);
	pthread_cond_broadcast(&f->s->work);
	pthread_cond_signal(&f->s->ready);
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
	struct base_error err = {0};
	bool end = false;
	int r;

	f->forming = true;
	worker_begin(f);
	r = worker_walk(f, w, &first, &last, &end, &err);
	pthread_mutex_lock(&f->s->lock);
	f->forming = false;
	f->formed = first;
	for (struct saver_batch *b = first; b; b = b->next)
		b->state = saver_same_in(f, b) ? BATCH_TO_COMPARE : BATCH_READY;
	f->walked = r == 0 && end;
	f->handed_out |= f->walked && !f->formed;
	worker_end(f, r, &err);
}

static void worker_copied(struct save_flight *f, struct saver_batch *b)
{
	if (b->samples) {
		device_ring_give(f->s->ring, b->slot);
		free(b);
		return;
	}
	b->state = BATCH_STAGED;
	f->info.stats.bytes_staged += b->whole_bytes;
	f->pieces->steady_bytes += b->steady_bytes;
}

/* Compares the batch, or settles what is copied of it, or both. */
static void worker_compare(struct save_flight *f, struct saver_worker *w, struct saver_batch *b)
{
	struct base_error err = {0};
	uint64_t begin = base_realtime_ns();
	bool compared = b->state == BATCH_COMPARED;
	enum saver_same same = f->same;
	int r;

	b->state = BATCH_COMPARING;
	worker_begin(f);
	r = saver_same_batch(f, w, b, compared, same, &err);
	pthread_mutex_lock(&f->s->lock);
	saver_phase_note(f, SAVE_COPY, begin, base_realtime_ns() - begin, 0);
	b->state = r == 1 ? BATCH_READY : BATCH_COMPARED;
	worker_end(f, r, &err);
}

/* slot NULL: nothing of the batch is to be copied. */
static void worker_copy(struct save_flight *f, struct saver_worker *w, uint8_t *slot)
{
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
	if (!b->samples) {
		*(f->last ? &f->last->next : &f->first) = b;
		f->last = b;
	}
	worker_begin(f);
	if (slot)
		r = saver_batch_copy(f, w, b, &err);
	pthread_mutex_lock(&f->s->lock);
	if (slot)
		saver_phase_note(f, SAVE_COPY, begin, base_realtime_ns() - begin, b->data_bytes);
	worker_copied(f, b);
	worker_end(f, r, &err);
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
	worker_begin(f);
	r = saver_room_fit(f, empty, &err);
	pthread_mutex_lock(&s->lock);
	s->sizing = false;
	f->ring_seen = true;
	f->ring_fits |= empty;
	worker_end(f, r, &err);
}

/* The ring has no room for the next batch: until the flight being persisted gives some back, or ever. */
static void worker_wait_for_room(struct save_saver *s, struct save_flight *f)
{
	struct saver_batch *b = f->formed;
	struct base_error err = {0};

	if (f->ring_fits && b->bytes > device_ring_bytes(s->ring)) {
		base_error_set(&err, -ENOBUFS, "the staging ring of %llu bytes is too small for a band of %llu: "
			"set ring_bytes to at least that, or leave ring_bytes out",
			(unsigned long long)device_ring_bytes(s->ring), (unsigned long long)b->bytes);
		saver_flight_fail(f, -ENOBUFS, &err);
		worker_note_staged(f);
	} else if (!b->waited) {
		b->waited = true;
		b->waits_ns = base_realtime_ns();
		f->info.stats.ring_waits++;
		pthread_cond_broadcast(&s->work); /* workers that digest were held back by it */
		pthread_cond_signal(&s->ready);   /* a pack may keep memory that it does not write yet */
	}
}

/* Another worker is at the batch, or it is not known yet whether it has to be copied. */
static enum worker_did worker_wait_for_answer(struct save_flight *f, struct saver_worker *w,
	const struct saver_batch *b)
{
	if (b->state == BATCH_COMPARED)
		w->until_ns = saver_same_wait(f);
	return b->state == BATCH_COMPARED && !w->until_ns ? WORKER_DID : WORKER_WAIT;
}

/* Forming batches takes little time, so a worker that comes meanwhile waits for it and does not begin to digest. */
static enum worker_did worker_stage(struct save_saver *s, struct saver_worker *w)
{
	struct save_flight *f = worker_to_prepare(s);
	struct saver_batch *b;
	uint8_t *slot = NULL;

	if (f) {
		worker_prepare(s, f);
		return WORKER_DID;
	}
	f = saver_to_stage(s);
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
	struct save_flight *f = saver_to_stage(s);

	return f && !(f->formed && f->formed->waited);
}

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
