/* SPDX-License-Identifier: Apache-2.0
 *
 * engine: workers take bands in the order of the plan, process them side by side, and the appending thread appends
 * them in that same order.
 *
 *   free band --take, in order, under the lock--> worker: read, cut, digest, look up, encode
 *             --order[sequence]--> appender --> free band
 *
 * A worker first takes a free band and then a sequence number. So every number that was given out has a band on its way
 * to the appender, and the appender needs only the lowest number: there is no deadlock. At most `nbands` bands are in
 * flight, which bounds memory. The order has a slot for each band, and numbers in flight are at most nbands apart, so
 * slots never clash. */
#include "core/save/write/engine.h"

#include "core/base/clock.h"
#include "core/save/write/write_internal.h"

int save_engine_init(struct save_engine *e, unsigned threads, pthread_mutex_t *lock, pthread_cond_t *ready,
	pthread_cond_t *work)
{
	*e = (struct save_engine){.lock = lock, .ready = ready, .work = work, .nbands = 2 * threads + 2};
	e->bands = calloc(e->nbands, sizeof *e->bands);
	e->order = calloc(e->nbands, sizeof(struct save_band *));
	if (!e->bands || !e->order)
		return -ENOMEM;
	for (unsigned i = e->nbands; i-- > 0;) {
		e->bands[i].next = e->free;
		e->free = &e->bands[i];
	}
	return 0;
}

void save_engine_release(struct save_engine *e)
{
	for (unsigned i = 0; e->bands && i < e->nbands; i++)
		save_band_release(&e->bands[i]);
	free(e->bands);
	free(e->order);
	*e = (struct save_engine){0};
}

/* ---- workers ---- */

/* Takes the next band of the plan; NULL: none now. */
static struct save_band *engine_take(struct save_engine *e)
{
	const struct save_engine_source *source = e->source;
	struct save_band *b = e->free;

	if (!source || e->over || !b || (source->ready && !source->ready(source->arg)))
		return NULL;
	if (save_cursor_take(&e->cursor, e->w, b) != 1) { /* a band is there, so its pieces found no memory */
		e->over = e->no_memory = true;
		pthread_cond_signal(e->ready);
		pthread_cond_broadcast(e->work);
		return NULL;
	}
	e->free = b->next;
	b->staged = NULL;
	b->absent = NULL;
	b->given = (struct save_given){0};
	b->worth = NULL;
	b->lent = NULL;
	b->read_ns = 0;
	if (source->taken)
		source->taken(source->arg, b);
	b->sequence = e->taken++;
	e->over = e->cursor.at == e->w->planned->plan.nboxes;
	if (e->over)
		pthread_cond_broadcast(e->work);
	return b;
}

bool save_engine_step(struct save_engine *e)
{
	struct save_band *b = engine_take(e);
	const struct save_engine_source *source = e->source;

	if (!b)
		return false;
	e->processing++;
	pthread_mutex_unlock(e->lock);
	b->begin_ns = base_realtime_ns();
	b->r = source->read ? source->read(source->arg, b) : 0;
	if (b->r == 0)
		b->r = save_band_process(b, e->w);
	pthread_mutex_lock(e->lock);
	e->processing--;
	e->order[b->sequence % e->nbands] = b;
	/* the lowest, which is waited for; or the last one at work on a save that is given up */
	if (b->sequence == e->appended || e->processing == 0)
		pthread_cond_signal(e->ready);
	return true;
}

/* ---- the appending thread ---- */

static int engine_append_band(struct save_writer *w, struct save_band *b, struct base_error *err)
{
	struct save_result *result = &w->result;
	const char *name;
	uint32_t len;
	int r = b->r;

	result->read_ns += b->read_ns;
	if (r == 0) {
		result->digest_ns += b->digest_ns;
		result->encode_ns += b->encode_ns;
		r = save_appender_band(w->appender, b, err);
	} else if (err) {
		*err = b->err;
	}
	save_band_forget(b); /* one that failed did not get that far; bases are closed after the last band */
	save_writer_progress(w, b->len, false);
	if (r == 0)
		return 0;
	name = store_layout_name(w->planned->layout, b->tensor, &len);
	return base_error_prefix(err, r, "tensor %s/%.*s", store_layout_component(w->planned->layout, b->tensor),
		store_layout_shown(name, len), name);
}

static void engine_give_back(struct save_engine *e, struct save_band *b)
{
	b->next = e->free;
	e->free = b;
}

/* Appends the band that is next. The lock is held, and let go meanwhile. */
static int engine_next(struct save_engine *e, struct save_band *b, struct base_error *err)
{
	const struct save_result *result = &e->w->result;
	struct save_engine_appended cost;
	uint64_t write_ns = result->write_ns, stored = result->piece_bytes_new;
	int r;

	e->order[e->appended++ % e->nbands] = NULL;
	pthread_mutex_unlock(e->lock);
	cost.begin_ns = base_realtime_ns();
	r = engine_append_band(e->w, b, err);
	pthread_mutex_lock(e->lock);
	cost.write_ns = result->write_ns - write_ns;
	cost.stored_bytes = result->piece_bytes_new - stored;
	cost.starved = !e->free;
	engine_give_back(e, b);
	e->source->appended(e->source->arg, b, &cost);
	return r;
}

/* Nothing can be appended now. Returns once that may have changed, and lets no one wait for memory until then that is
 * only lent because the next band has not come. The lock is held, and let go meanwhile. */
static void engine_wait(struct save_engine *e, bool *kept)
{
	const struct save_engine_source *source = e->source;

	if (*kept || !source->short_of_memory || !source->short_of_memory(source->arg)) {
		pthread_cond_wait(e->ready, e->lock);
		return;
	}
	pthread_mutex_unlock(e->lock);
	save_appender_keep(e->w->appender);
	pthread_mutex_lock(e->lock);
	*kept = true;
}

/* 1: all is appended; negative: appending ends before that. */
static int engine_ends(const struct save_engine *e)
{
	int end = e->no_memory ? -ENOMEM : e->source->end ? e->source->end(e->source->arg) : 1;

	return end < 0 ? end : end && e->over && e->appended == e->taken;
}

/* After that no worker is at a band of this save. The lock is held. */
static void engine_stop(struct save_engine *e)
{
	e->over = true;
	pthread_cond_broadcast(e->work);
	while (e->processing)
		pthread_cond_wait(e->ready, e->lock);
	for (unsigned i = 0; i < e->nbands; i++)
		if (e->order[i]) {
			save_band_forget(e->order[i]);
			engine_give_back(e, base_steal(e->order[i]));
		}
	e->source = NULL;
	e->w = NULL;
}

int save_engine_append(struct save_engine *e, struct save_writer *w, const struct save_engine_source *source,
	struct base_error *err)
{
	bool kept = true;
	int r = 0, end = 0;

	pthread_mutex_lock(e->lock);
	e->w = w;
	e->source = source;
	e->cursor = (struct save_cursor){0};
	e->over = w->planned->plan.nboxes == 0;
	e->taken = e->appended = 0;
	e->no_memory = false;
	pthread_cond_broadcast(e->work);
	while (r == 0 && (end = engine_ends(e)) == 0) {
		struct save_band *b = e->order[e->appended % e->nbands];

		if (!b) {
			engine_wait(e, &kept);
			continue;
		}
		r = engine_next(e, b, err);
		kept = false;
	}
	if (r == 0 && end < 0)
		r = end == -ENOMEM ? base_no_memory(err) : base_error_set(err, end, "the save was given up");
	engine_stop(e);
	pthread_mutex_unlock(e->lock);
	return r;
}
