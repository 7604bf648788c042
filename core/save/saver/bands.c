/* SPDX-License-Identifier: Apache-2.0
 *
 * bands: the staged batches of the flight being persisted, as a source of the engine (core/save/write/engine.h), which
 * calls with the saver's lock held: where a band's bytes are, and when a slot goes back to the ring. */
#include "core/save/saver/saver_internal.h"

/* ---- slots ---- */

static void batch_free(struct saver_batch *b)
{
	if (b->slot)
		device_ring_give(b->s->ring, b->slot);
	free(b);
}

/* The saver needs it no more; a pack may. */
static void batch_drop(struct saver_batch *b)
{
	if (storage_lent_drop(&b->lent))
		batch_free(b);
}

void saver_batch_back(struct storage_lent *l)
{
	struct saver_batch *b = (struct saver_batch *)(void *)((char *)l - offsetof(struct saver_batch, lent));
	struct save_saver *s = b->s;

	batch_free(b);
	pthread_mutex_lock(&s->lock); /* else a worker that has just found no room would not hear of it */
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
}

/* ---- the engine's source ---- */

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

/* The band's part of the slot is free. Workers may be waiting for a free band, or for room in the ring. */
static void bands_appended(void *arg, const struct save_band *b, const struct save_engine_appended *cost)
{
	struct save_saver *s = arg;
	struct save_flight *f = s->persisting;
	struct saver_batch *first = f->first;
	bool given = --first->left == 0;

	f->info.bytes_done += b->len;
	saver_phase_note(f, SAVE_DIGEST, b->begin_ns, b->digest_ns, b->len);
	if (b->encode_ns)
		saver_phase_note(f, SAVE_ENCODE, b->begin_ns + b->digest_ns, b->encode_ns, b->len);
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
	const struct save_flight *f = saver_to_stage(arg);

	return f && f->formed && f->formed->waited;
}

/* Behind the bands come samples, and copies of what has no bytes. */
static int bands_end(void *arg)
{
	const struct save_flight *f = ((struct save_saver *)arg)->persisting;

	return f->failed ? -ECANCELED : f->staged;
}

/* ---- the persister's calls ---- */

int saver_bands_append(struct save_flight *f, struct base_error *err)
{
	struct save_saver *s = f->s;
	const struct save_engine_source source = {.ready = bands_ready, .taken = bands_taken,
		.appended = bands_appended, .end = bands_end, .short_of_memory = bands_short_of_memory, .arg = s};
	int r;

	pthread_mutex_lock(&s->lock);
	s->persisting = f;
	s->batch = NULL;
	pthread_mutex_unlock(&s->lock);
	r = save_writer_append(f->w, &s->engine, &source, err);
	pthread_mutex_lock(&s->lock);
	s->persisting = NULL;
	if (f->failed && (r == 0 || r == -ECANCELED))
		r = saver_flight_error(f, err);
	if (r < 0)
		saver_flight_fail(f, r, err);
	while (r < 0 && f->copying) /* a worker may be asking the bases, which go next */
		pthread_cond_wait(&s->ready, &s->lock);
	pthread_mutex_unlock(&s->lock);
	return r;
}

/* Drops the batches of a list. */
static void batches_drop(struct saver_batch **list)
{
	while (*list) {
		struct saver_batch *b = *list;

		*list = b->next;
		batch_drop(b);
	}
}

void saver_bands_drop(struct save_flight *f)
{
	struct save_saver *s = f->s;

	pthread_mutex_lock(&s->lock);
	while (f->copying || s->preparing == f)
		pthread_cond_wait(&s->ready, &s->lock);
	batches_drop(&f->first);
	batches_drop(&f->formed);
	f->last = NULL;
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
}
