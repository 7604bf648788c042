/* SPDX-License-Identifier: Apache-2.0
 *
 * engine: what the workers do next. In this order, under the saver's lock:
 *
 *   prepare  the oldest flight that was submitted and not prepared; one at a time
 *   stage    the oldest flight that is prepared and not all handed out: the ring is made, or made larger, if it is
 *            due; then the batch that waits for a slot, or the next.
 *            The ring gives slots in order; no room means that the flight being persisted has to give some back first
 *   process  the next band of the flight being persisted, if its batch has arrived and a band is free
 *
 * So a trainer waits for nothing but copies: as long as there is something to copy and room for it, nobody digests.
 * With low priority there are two kinds of workers, so that the option costs the trainer nothing: those that copy have
 * the priority of the process, those that digest have the lowest, like the persister. One worker at a time forms
 * batches, several ahead (walking bands costs time that others need the lock in).
 *
 * A worker takes a free band first and a number after; what was numbered moves towards the persister, which needs only
 * the lowest: no deadlock, and bands in flight are bounded. Slots are given out in the order of flights and batches,
 * and that is the order in which they are appended: so the oldest slot is always one that can be given back. */
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/save/saver_internal.h"

#define IOPRIO_WHO_PROCESS 1
#define IOPRIO_IDLE (3 << 13) /* ioprio_set(2): the class idle */

#define ENGINE_FORM_BATCHES 64u
#define ENGINE_FORM_BANDS 4096u
#define ENGINE_TOUCHED 16u
#define ENGINE_TOUCHED_BYTES 65536u

enum engine_did { ENGINE_DID, ENGINE_NOTHING, ENGINE_WAIT };

/* ---- staging ---- */

static struct save_flight *engine_to_prepare(struct save_saver *s)
{
	struct save_flight *f = s->preparing ? NULL : s->first;

	while (f && (f->prepared || f->failed || f->given_up))
		f = f->next;
	return f && f->submitted ? f : NULL;
}

static struct save_flight *engine_to_stage(struct save_saver *s)
{
	struct save_flight *f = s->first;

	while (f && (f->handed_out || f->failed || f->given_up))
		f = f->next;
	return f && f->prepared ? f : NULL;
}

static void engine_prepare(struct save_saver *s, struct save_flight *f)
{
	struct base_error err = {0};
	int rc;

	s->preparing = f;
	pthread_mutex_unlock(&s->lock);
	rc = saver_prepare(f, &err);
	pthread_mutex_lock(&s->lock);
	s->preparing = NULL;
	f->prepared = rc == 0;
	if (rc < 0)
		saver_flight_fail(f, rc, &err);
	else if (!f->failed)
		f->state = SAVE_STAGING;
	pthread_cond_broadcast(&s->work);
	pthread_cond_broadcast(&s->ready);
	pthread_cond_broadcast(&s->told); /* it may have failed meanwhile: the data is the caller's from here on */
}

static void engine_tell_staged(struct save_flight *f)
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
static int engine_walk(struct save_flight *f, struct saver_worker *w, struct saver_batch **ret_first,
	struct saver_batch **ret_last, bool *ret_end, struct base_error *err)
{
	uint64_t bands = 0;

	for (unsigned n = 0; n < ENGINE_FORM_BATCHES && bands < ENGINE_FORM_BANDS; n++) {
		struct saver_batch *b;
		int rc = saver_batch_form(f, w, &b, err);

		if (rc < 0 || !b) {
			*ret_end = !b;
			return rc;
		}
		*(*ret_last ? &(*ret_last)->next : ret_first) = b;
		*ret_last = b;
		bands += b->nbands + b->nentries;
	}
	return 0;
}

static void engine_form(struct save_flight *f, struct saver_worker *w)
{
	struct saver_batch *first = NULL, *last = NULL;
	struct save_saver *s = f->s;
	struct base_error err = {0};
	bool end = false;
	int rc;

	f->forming = true;
	f->copying++;
	pthread_mutex_unlock(&s->lock);
	rc = engine_walk(f, w, &first, &last, &end, &err);
	pthread_mutex_lock(&s->lock);
	f->forming = false;
	f->copying--;
	f->formed = first;
	if (rc < 0)
		saver_flight_fail(f, rc, &err);
	else
		f->walked = end;
	if (f->walked && !f->formed)
		f->handed_out = true;
	engine_tell_staged(f);
	pthread_cond_broadcast(&s->work);
	pthread_cond_signal(&s->ready);
}

static void engine_copied(struct save_flight *f, struct saver_batch *b)
{
	if (b->samples) {
		device_ring_give(f->s->ring, b->slot);
		saver_batch_free(b);
		return;
	}
	b->state = BATCH_STAGED;
	f->info.bytes_staged += b->data_bytes;
}

static void engine_copy(struct save_flight *f, struct saver_worker *w, uint8_t *slot)
{
	struct save_saver *s = f->s;
	struct saver_batch *b = f->formed;
	struct base_error err = {0};
	uint64_t begin = base_realtime_ns();
	int rc;

	f->formed = b->next;
	f->handed_out = f->walked && !f->formed;
	b->next = NULL;
	b->slot = slot;
	if (b->waited)
		saver_phase_note(f, SAVE_ROOM, b->waits_ns, begin - base_min(begin, b->waits_ns), b->bytes);
	f->copying++;
	if (!b->samples) {
		*(f->last ? &f->last->next : &f->first) = b;
		f->last = b;
	}
	pthread_mutex_unlock(&s->lock);
	rc = saver_batch_copy(f, w, b, &err);
	pthread_mutex_lock(&s->lock);
	f->copying--;
	saver_phase_note(f, SAVE_COPY, begin, base_realtime_ns() - begin, b->data_bytes);
	engine_copied(f, b);
	if (rc < 0)
		saver_flight_fail(f, rc, &err);
	engine_tell_staged(f);
	pthread_cond_broadcast(&s->work);
	pthread_cond_signal(&s->ready);
}

/* The ring is looked at before the flight's first copy, and again whenever it is empty, until its size is decided. */
static bool engine_ring_is_due(const struct save_saver *s, const struct save_flight *f)
{
	return !s->sizing && (!f->ring_seen || (!f->ring_fits && device_ring_used(s->ring) == 0));
}

static void engine_ring(struct save_saver *s, struct save_flight *f)
{
	bool empty = !s->ring || device_ring_used(s->ring) == 0;
	struct base_error err = {0};
	int rc;

	s->sizing = true;
	f->copying++;
	pthread_mutex_unlock(&s->lock);
	rc = saver_room_fit(f, empty, &err);
	pthread_mutex_lock(&s->lock);
	s->sizing = false;
	f->copying--;
	f->ring_seen = true;
	f->ring_fits |= empty;
	if (rc < 0)
		saver_flight_fail(f, rc, &err);
	engine_tell_staged(f);
	pthread_cond_broadcast(&s->work);
	pthread_cond_signal(&s->ready);
}

/* No room now: the flight being persisted has to give some back; or never. */
static void engine_wait_for_room(struct save_saver *s, struct save_flight *f)
{
	struct saver_batch *b = f->formed;
	struct base_error err = {0};

	if (f->ring_fits && b->bytes > device_ring_bytes(s->ring)) {
		base_error_set(&err, -ENOBUFS, "the staging ring of %llu bytes is too small for a band of %llu",
			(unsigned long long)device_ring_bytes(s->ring), (unsigned long long)b->bytes);
		saver_flight_fail(f, -ENOBUFS, &err);
		engine_tell_staged(f);
	} else if (!b->waited) {
		b->waited = true;
		b->waits_ns = base_realtime_ns();
		f->info.ring_waits++;
		pthread_cond_broadcast(&s->work); /* who digests was held back by it */
	}
}

/* Walking is short: whoever comes meanwhile waits for it, rather than begin to digest. */
static enum engine_did engine_stage(struct save_saver *s, struct saver_worker *w)
{
	struct save_flight *f = engine_to_prepare(s);
	uint8_t *slot;

	if (f) {
		engine_prepare(s, f);
		return ENGINE_DID;
	}
	f = engine_to_stage(s);
	if (!f)
		return ENGINE_NOTHING;
	if (engine_ring_is_due(s, f)) {
		engine_ring(s, f);
		return ENGINE_DID;
	}
	if (!f->formed) {
		if (f->forming)
			return ENGINE_WAIT;
		engine_form(f, w);
		return ENGINE_DID;
	}
	if (s->sizing)
		return ENGINE_NOTHING;
	slot = device_ring_take(s->ring, f->formed->bytes);
	if (!slot) {
		engine_wait_for_room(s, f);
		return ENGINE_NOTHING;
	}
	engine_copy(f, w, slot);
	return ENGINE_DID;
}

/* Is something being copied, or waiting to be, that has room? */
static bool engine_copies(struct save_saver *s)
{
	struct save_flight *f = engine_to_stage(s);

	return f && !(f->formed && f->formed->waited);
}

/* ---- processing ---- */

/* Takes the next band of the flight being persisted; NULL: none now. */
static struct save_band *engine_take(struct save_saver *s)
{
	struct save_flight *f = s->persisting;
	struct save_band *b = s->free_bands;
	int rc;

	if (!f || s->exhausted || f->failed || !b)
		return NULL;
	if (!s->batch)
		s->batch = f->first;
	else if (s->batch->given == s->batch->nbands && s->batch->next)
		s->batch = s->batch->next;
	if (!s->batch || s->batch->state != BATCH_STAGED || s->batch->given == s->batch->nbands)
		return NULL;
	rc = save_cursor_take(&s->cursor, f->w, b);
	if (rc != 1) {
		saver_flight_fail(f, rc < 0 ? rc : -EIO, NULL);
		return NULL;
	}
	s->free_bands = b->next;
	b->in = s->batch->slot + s->batch->offset;
	b->read_ns = 0;
	b->staged = s->batch->xxh ? s->batch->xxh + s->batch->next_piece : NULL;
	s->batch->next_piece += b->npieces;
	s->batch->offset += saver_band_room(b->len);
	s->batch->given++;
	b->sequence = s->taken++;
	s->exhausted = s->cursor.at == f->w->plan->nboxes;
	return b;
}

static bool engine_process(struct save_saver *s)
{
	struct save_band *b = engine_take(s);
	struct save_flight *f = s->persisting;
	uint64_t begin;

	if (!b)
		return false;
	f->processing++;
	pthread_mutex_unlock(&s->lock);
	begin = base_realtime_ns();
	b->rc = save_band_process(b, f->w);
	pthread_mutex_lock(&s->lock);
	f->processing--;
	saver_phase_note(f, SAVE_DIGEST, begin, b->digest_ns + b->read_ns, b->len);
	if (b->encode_ns)
		saver_phase_note(f, SAVE_ENCODE, begin + b->digest_ns + b->read_ns, b->encode_ns, b->len);
	s->order[b->sequence % s->nbands] = b;
	if (b->sequence == s->appended || f->failed)
		pthread_cond_signal(&s->ready);
	return true;
}

/* Best effort: who may not, runs as it is. */
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
	void *touched[ENGINE_TOUCHED];

	for (unsigned i = 0; w->copies && i < ENGINE_TOUCHED; i++) {
		touched[i] = malloc(ENGINE_TOUCHED_BYTES);
		if (touched[i])
			explicit_bzero(touched[i], ENGINE_TOUCHED_BYTES);
	}
	saver_worker_room(w); /* without it now, each batch asks again */
	for (unsigned i = 0; w->copies && i < ENGINE_TOUCHED; i++)
		free(touched[i]);
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
		enum engine_did did = w->copies ? engine_stage(s, w) : engine_copies(s) ? ENGINE_WAIT : ENGINE_NOTHING;

		if (did == ENGINE_NOTHING && w->digests && engine_process(s))
			did = ENGINE_DID;
		if (did != ENGINE_DID)
			pthread_cond_wait(&s->work, &s->lock);
	}
	pthread_mutex_unlock(&s->lock);
	saver_lanes_drop(w);
	save_band_release(&w->walker);
	base_xxh128_state_free(w->hash);
	free(w->room);
	return NULL;
}

/* ---- the persister's side ---- */

/* The band was appended: its part of the slot is not needed any more. The lock is held. */
static void engine_give_back(struct save_flight *f, struct save_band *b)
{
	struct save_saver *s = f->s;
	struct saver_batch *first = f->first;

	b->next = s->free_bands;
	s->free_bands = b;
	f->info.bytes_done += b->len;
	if (--first->left == 0) {
		f->first = first->next;
		if (!f->first)
			f->last = NULL;
		if (s->batch == first)
			s->batch = NULL;
		device_ring_give(s->ring, first->slot);
		saver_batch_free(first);
	}
	pthread_cond_broadcast(&s->work);
}

static int engine_append_band(struct save_flight *f, struct save_appender *a, struct save_band *b,
	struct base_error *err)
{
	struct save_result *r = &f->w->result;
	uint64_t begin = base_realtime_ns(), write_ns = r->write_ns, stored = r->piece_bytes_new;
	const char *name;
	uint32_t len;
	int rc = b->rc;

	if (rc == 0)
		rc = save_appender_band(a, b, err);
	else if (err)
		*err = b->err;
	save_band_forget(b); /* one that failed did not get that far; the bases go with the flight */
	if (rc < 0) {
		name = store_layout_name(f->w->layout, b->tensor, &len);
		return base_error_prefix(err, rc, "tensor %s/%.*s", store_layout_component(f->w->layout, b->tensor),
			store_layout_shown(name, len), name);
	}
	pthread_mutex_lock(&f->s->lock);
	if (r->write_ns > write_ns)
		saver_phase_note(f, SAVE_WRITE, begin, r->write_ns - write_ns, r->piece_bytes_new - stored);
	pthread_mutex_unlock(&f->s->lock);
	return 0;
}

static bool engine_over(const struct save_saver *s)
{
	return s->exhausted && s->appended == s->taken;
}

int saver_engine_append(struct save_flight *f, struct save_appender *a, struct base_error *err)
{
	struct save_saver *s = f->s;
	int rc = 0;

	pthread_mutex_lock(&s->lock);
	s->persisting = f;
	s->cursor = (struct save_cursor){0};
	s->batch = NULL;
	s->exhausted = f->w->plan->nboxes == 0;
	s->taken = s->appended = 0;
	pthread_cond_broadcast(&s->work);
	while (rc == 0 && !f->failed && !engine_over(s)) {
		struct save_band *b = s->order[s->appended % s->nbands];

		if (!b) {
			pthread_cond_wait(&s->ready, &s->lock);
			continue;
		}
		s->order[s->appended++ % s->nbands] = NULL;
		pthread_mutex_unlock(&s->lock);
		rc = engine_append_band(f, a, b, err);
		pthread_mutex_lock(&s->lock);
		engine_give_back(f, b);
	}
	while (rc == 0 && !f->failed && !f->staged) /* samples, and copies of what has no bytes */
		pthread_cond_wait(&s->ready, &s->lock);
	if (rc == 0 && f->failed) {
		rc = f->rc;
		if (err)
			*err = f->err;
	}
	if (rc < 0)
		saver_flight_fail(f, rc, err);
	while (f->processing)
		pthread_cond_wait(&s->ready, &s->lock);
	for (unsigned i = 0; i < s->nbands; i++)
		if (s->order[i]) {
			save_band_forget(s->order[i]);
			s->order[i]->next = s->free_bands;
			s->free_bands = base_steal(s->order[i]);
		}
	s->persisting = NULL;
	pthread_mutex_unlock(&s->lock);
	return rc;
}

void saver_engine_drop(struct save_flight *f)
{
	struct save_saver *s = f->s;

	pthread_mutex_lock(&s->lock);
	while (f->copying || s->preparing == f)
		pthread_cond_wait(&s->ready, &s->lock);
	while (f->first) {
		struct saver_batch *b = f->first;

		f->first = b->next;
		device_ring_give(s->ring, b->slot);
		saver_batch_free(b);
	}
	f->last = NULL;
	while (f->formed) {
		struct saver_batch *b = f->formed;

		f->formed = b->next;
		saver_batch_free(b);
	}
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
}
