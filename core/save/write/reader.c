/* SPDX-License-Identifier: Apache-2.0
 *
 * reader: an import's bands, read out of its sources by as many workers as there are processors; the calling thread
 * appends. */
#include <pthread.h>

#include "core/base/pool.h"
#include "core/save/write/write_internal.h"

struct save_reader {
	struct save_writer *w;
	pthread_mutex_t lock;            /* protects the engine */
	pthread_cond_t ready, work;
	struct save_engine engine;
	bool stop;                      /* protected by the lock */
};

static int reader_read(void *arg, struct save_band *b)
{
	const struct save_writer *w = ((struct save_reader *)arg)->w;

	return save_band_read(b, &w->sources[w->tags[b->tensor]]);
}

static void reader_appended(void *arg, const struct save_band *b, const struct save_engine_appended *cost)
{
	struct save_reader *r = arg;

	(void)b;
	(void)cost;
	pthread_cond_signal(&r->work);
}

static void reader_worker(void *arg, unsigned worker)
{
	struct save_reader *r = arg;

	(void)worker;
	pthread_mutex_lock(&r->lock);
	while (!r->stop)
		if (!save_engine_step(&r->engine) && !r->stop)
			pthread_cond_wait(&r->work, &r->lock);
	pthread_mutex_unlock(&r->lock);
}

static int reader_append(struct save_reader *r, unsigned threads, struct base_error *err)
{
	const struct save_engine_source source = {.read = reader_read, .appended = reader_appended, .arg = r};
	struct base_pool *pool = base_pool_new(threads, threads);
	int rc = -ENOMEM;

	if (!pool || save_engine_init(&r->engine, threads, &r->lock, &r->ready, &r->work) < 0) {
		base_error_set(err, rc, "out of memory or threads");
	} else {
		for (unsigned i = 0; i < threads; i++)
			base_pool_run(pool, reader_worker, r);
		rc = save_writer_append(r->w, &r->engine, &source, err);
		pthread_mutex_lock(&r->lock);
		r->stop = true;
		pthread_cond_broadcast(&r->work);
		pthread_mutex_unlock(&r->lock);
	}
	base_pool_free(pool);
	save_engine_release(&r->engine);
	return rc;
}

int save_reader_run(struct save_writer *w, struct base_error *err)
{
	unsigned threads = w->options.threads ? w->options.threads : base_cpu_count();
	struct save_reader r = {.w = w};
	int rc;

	pthread_mutex_init(&r.lock, NULL);
	pthread_cond_init(&r.ready, NULL);
	pthread_cond_init(&r.work, NULL);
	rc = reader_append(&r, threads, err);
	pthread_cond_destroy(&r.ready);
	pthread_cond_destroy(&r.work);
	pthread_mutex_destroy(&r.lock);
	return rc;
}
