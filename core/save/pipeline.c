/* SPDX-License-Identifier: Apache-2.0
 *
 * pipeline: workers take bands in the order of the layout, process them side by side, and the calling thread appends
 * them in that same order.
 *
 *   free band --take, in order, under the lock--> worker: read, cut, digest, look up, encode
 *             --ring[sequence]--> appender --> free band
 *
 * A worker takes a free band first and a sequence number after: every number that was given out has a band that
 * moves towards the appender, which needs nothing but the lowest one; so there is no deadlock, and no more than
 * `nbands` are in flight: that bounds memory. The ring has a slot for each band, and numbers in flight are at most
 * nbands apart, so slots never clash. */
#include <pthread.h>

#include "core/base/pool.h"
#include "core/save/save_internal.h"

struct save_pipeline {
	struct save_appender *appender;
	struct save_writer *w;
	pthread_mutex_t lock;            /* protects all below */
	pthread_cond_t room, ready;      /* a band is free, or all is over; the next band may be there */
	struct save_band *bands, *free_bands, **ring;
	unsigned nbands, running;
	uint64_t taken, next;            /* sequence numbers: given out; to be appended */
	bool exhausted, stop;
	int take_rc;
	struct save_cursor cursor;
};

/* The next band of the plan; false at its end. */
static bool pipeline_take(struct save_pipeline *p, struct save_band *b)
{
	int rc = save_cursor_take(&p->cursor, p->w, b);

	p->take_rc = rc < 0 ? rc : 0;
	return rc == 1;
}

static int pipeline_process(struct save_pipeline *p, struct save_band *b)
{
	int rc = save_band_read(b, &p->w->sources[p->w->tags[b->tensor]]);

	return rc < 0 ? rc : save_band_process(b, p->w);
}

static void pipeline_worker(void *arg, unsigned worker)
{
	struct save_pipeline *p = arg;

	(void)worker;
	pthread_mutex_lock(&p->lock);
	for (;;) {
		struct save_band *b;

		while (!p->free_bands && !p->exhausted && !p->stop)
			pthread_cond_wait(&p->room, &p->lock);
		if (p->exhausted || p->stop)
			break;
		b = p->free_bands;
		p->free_bands = b->next;
		if (!pipeline_take(p, b)) {
			p->exhausted = true;
			pthread_cond_broadcast(&p->room);
			break;
		}
		b->sequence = p->taken++;
		pthread_mutex_unlock(&p->lock);
		b->rc = pipeline_process(p, b);
		pthread_mutex_lock(&p->lock);
		p->ring[b->sequence % p->nbands] = b;
		if (b->sequence == p->next)
			pthread_cond_signal(&p->ready);
	}
	p->running--;
	pthread_cond_signal(&p->ready);
	pthread_mutex_unlock(&p->lock);
}

static int pipeline_append(struct save_pipeline *p, struct save_band *b, struct base_error *err)
{
	struct save_result *r = &p->w->result;
	int rc = b->rc;

	if (rc < 0) {
		uint32_t len;
		const char *name = store_layout_name(p->w->layout, b->tensor, &len);

		if (err)
			*err = b->err;
		return base_error_prefix(err, rc, "tensor %s/%.*s", store_layout_component(p->w->layout, b->tensor),
			(int)base_min(len, 400), name);
	}
	r->read_ns += b->read_ns;
	r->digest_ns += b->digest_ns;
	r->encode_ns += b->encode_ns;
	rc = save_appender_band(p->appender, b, err);
	save_writer_progress(p->w, b->len, false);
	return rc;
}

static int pipeline_sequence(struct save_pipeline *p, struct base_error *err)
{
	int rc = 0;

	pthread_mutex_lock(&p->lock);
	while (rc == 0) {
		struct save_band *b;

		while (!p->ring[p->next % p->nbands] && (p->running || !p->exhausted))
			pthread_cond_wait(&p->ready, &p->lock);
		b = p->ring[p->next % p->nbands];
		if (!b)
			break;
		p->ring[p->next++ % p->nbands] = NULL;
		pthread_mutex_unlock(&p->lock);
		rc = pipeline_append(p, b, err);
		pthread_mutex_lock(&p->lock);
		b->next = p->free_bands;
		p->free_bands = b;
		pthread_cond_signal(&p->room);
	}
	p->stop = true;
	if (rc == 0 && p->take_rc < 0)
		rc = base_error_set(err, p->take_rc, "out of memory");
	pthread_cond_broadcast(&p->room);
	pthread_mutex_unlock(&p->lock);
	return rc;
}

int save_pipeline_run(struct save_appender *a, struct base_error *err)
{
	unsigned threads = a->w->options.threads ? a->w->options.threads : base_cpu_count();
	struct save_pipeline p = {.appender = a, .w = a->w, .nbands = 2 * threads + 2, .running = threads};
	struct base_pool *pool = base_pool_new(threads, threads);
	int rc = -ENOMEM;

	pthread_mutex_init(&p.lock, NULL);
	pthread_cond_init(&p.room, NULL);
	pthread_cond_init(&p.ready, NULL);
	p.bands = calloc(p.nbands, sizeof *p.bands);
	p.ring = calloc(p.nbands, sizeof *p.ring);
	if (pool && p.bands && p.ring) {
		for (unsigned i = p.nbands; i-- > 0;) {
			p.bands[i].next = p.free_bands;
			p.free_bands = &p.bands[i];
		}
		for (unsigned i = 0; i < threads; i++)
			base_pool_run(pool, pipeline_worker, &p);
		rc = pipeline_sequence(&p, err);
	} else {
		base_error_set(err, rc, "out of memory or threads");
	}
	base_pool_free(pool);
	for (unsigned i = 0; p.bands && i < p.nbands; i++)
		save_band_release(&p.bands[i]);
	free(p.bands);
	free(p.ring);
	pthread_cond_destroy(&p.ready);
	pthread_cond_destroy(&p.room);
	pthread_mutex_destroy(&p.lock);
	return rc;
}
