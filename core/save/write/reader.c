/* SPDX-License-Identifier: Apache-2.0
 *
 * reader: bands out of an import's sources, or another source without threads of its own, by as many workers as there
 * are processors; the calling thread appends. */
#include <pthread.h>

#include "core/base/pool.h"
#include "core/save/write/write_internal.h"

struct save_reader {
	struct save_writer *w;
	const struct save_engine_source *from; /* NULL: the writer's sources */
	pthread_mutex_t lock;            /* protects the engine */
	pthread_cond_t ready, work;
	struct save_engine engine;
	bool stop;                      /* protected by the lock */
};

static int reader_read(void *arg, struct save_band *b)
{
	const struct save_reader *reader = arg;
	const struct save_writer *w = reader->w;

	if (reader->from)
		return reader->from->read(reader->from->arg, b);
	return save_band_read(b, &w->sources[w->tags[b->tensor]]);
}

static void reader_appended(void *arg, const struct save_band *b, const struct save_engine_appended *cost)
{
	struct save_reader *reader = arg;

	if (reader->from && reader->from->appended)
		reader->from->appended(reader->from->arg, b, cost);
	pthread_cond_signal(&reader->work);
}

static void reader_taken(void *arg, struct save_band *b)
{
	const struct save_reader *reader = arg;

	reader->from->taken(reader->from->arg, b);
}

static void reader_worker(void *arg, unsigned worker)
{
	struct save_reader *reader = arg;

	(void)worker;
	pthread_mutex_lock(&reader->lock);
	while (!reader->stop)
		if (!save_engine_step(&reader->engine) && !reader->stop)
			pthread_cond_wait(&reader->work, &reader->lock);
	pthread_mutex_unlock(&reader->lock);
}

static int reader_append(struct save_reader *reader, unsigned threads, struct base_error *err)
{
	const struct save_engine_source *from = reader->from;
	const struct save_engine_source source = {.taken = from && from->taken ? reader_taken : NULL,
		.read = !from || from->read ? reader_read : NULL, .appended = reader_appended, .arg = reader};
	struct base_pool *pool = base_pool_new(threads, threads);
	int r = -ENOMEM;

	if (!pool || save_engine_init(&reader->engine, threads, &reader->lock, &reader->ready, &reader->work) < 0) {
		base_error_set(err, r, "out of memory or threads");
	} else {
		for (unsigned i = 0; i < threads; i++)
			base_pool_run(pool, reader_worker, reader);
		r = save_writer_append(reader->w, &reader->engine, &source, err);
		pthread_mutex_lock(&reader->lock);
		reader->stop = true;
		pthread_cond_broadcast(&reader->work);
		pthread_mutex_unlock(&reader->lock);
	}
	base_pool_free(pool);
	save_engine_release(&reader->engine);
	return r;
}

int save_writer_append_all(struct save_writer *w, unsigned threads, const struct save_engine_source *source,
	struct base_error *err)
{
	struct save_reader reader = {.w = w, .from = source};
	int r;

	threads = threads ? threads : base_cpu_count();
	pthread_mutex_init(&reader.lock, NULL);
	pthread_cond_init(&reader.ready, NULL);
	pthread_cond_init(&reader.work, NULL);
	r = reader_append(&reader, threads, err);
	pthread_cond_destroy(&reader.ready);
	pthread_cond_destroy(&reader.work);
	pthread_mutex_destroy(&reader.lock);
	return r;
}
