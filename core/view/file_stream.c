/* SPDX-License-Identifier: Apache-2.0
 *
 * A whole file in order, read ahead by several threads.
 *
 * A ring of buffers: the caller passes a full buffer to the sink and then has the pool fill it with the bytes behind
 * the last buffer. Jobs run in the order in which they were given, so the buffer that the caller waits for is never
 * behind one that is needed later. */
#include <pthread.h>

#include "core/base/pool.h"
#include "core/view/view_internal.h"

#define BUFFER_BYTES (4u << 20)

struct buffer {
	struct stream *stream;
	uint64_t offset;
	size_t len;
	uint8_t *bytes;
	bool ready;                     /* protected by stream->lock; the rest is its reader's until then */
	int code;
	struct base_error err;
};

struct stream {
	struct view_file *f;
	struct load_cache *c;
	struct base_pool *pool;         /* NULL: the caller fills the only buffer itself */
	uint64_t at;                    /* of the next buffer */
	pthread_mutex_t lock;
	pthread_cond_t read;
	unsigned nbuffers;
	struct buffer *buffers;
};

static void fill_buffer(void *arg, unsigned worker)
{
	struct buffer *k = arg;
	struct stream *s = k->stream;
	int64_t n;

	(void)worker;
	n = view_file_read(s->f, s->c, k->offset, k->len, k->bytes, &k->err);
	pthread_mutex_lock(&s->lock);
	k->code = n < 0 ? (int)n : 0;
	k->ready = true;
	pthread_cond_signal(&s->read);
	pthread_mutex_unlock(&s->lock);
}

/* Starts to fill the buffer with the next bytes; none at the end of the file. */
static void start_buffer(struct stream *s, struct buffer *k)
{
	uint64_t size = view_file_size(s->f);
	k->offset = s->at;
	k->len = s->at >= size ? 0 : base_min(BUFFER_BYTES - s->at % BUFFER_BYTES, size - s->at);
	k->ready = false;
	k->err = (struct base_error){0};
	s->at += k->len;
	if (k->len && s->pool)
		base_pool_run(s->pool, fill_buffer, k);
	else if (k->len)
		fill_buffer(k, 0);
}

static int stream_ring(struct stream *s, int (*sink)(void *arg, const void *bytes, size_t len, struct base_error *err),
	void *arg, struct base_error *err)
{
	int r = 0;
	for (unsigned i = 0; i < s->nbuffers; i++)
		start_buffer(s, &s->buffers[i]);
	for (unsigned i = 0; r >= 0 && s->buffers[i].len; i = (i + 1) % s->nbuffers) {
		struct buffer *k = &s->buffers[i];
		pthread_mutex_lock(&s->lock);
		while (!k->ready)
			pthread_cond_wait(&s->read, &s->lock);
		pthread_mutex_unlock(&s->lock);
		if (k->code < 0 && err)
			*err = k->err;
		r = k->code < 0 ? k->code : sink(arg, k->bytes, k->len, err);
		if (r >= 0)
			start_buffer(s, k);
	}
	if (s->pool)
		base_pool_wait(s->pool);
	return r < 0 ? r : 0;
}

int view_file_stream(struct view_file *f, struct load_cache *c, uint64_t offset, unsigned threads,
	int (*sink)(void *arg, const void *bytes, size_t len, struct base_error *err),
	void *arg, struct base_error *err)
{
	uint64_t room;
	bool alone;
	struct stream s;
	base_cleanup_free struct buffer *buffers = NULL;
	base_cleanup_free uint8_t *bytes = NULL;
	int r;

	if (offset >= view_file_size(f))
		return 0;
	room = base_min(BUFFER_BYTES, view_file_size(f) - offset);
	threads = threads ? threads : base_cpu_count();
	alone = threads == 1 || view_file_size(f) - offset <= BUFFER_BYTES;
	s = (struct stream){.f = f, .c = c, .at = offset, .nbuffers = alone ? 1 : threads + 2};
	buffers = s.buffers = calloc(s.nbuffers, sizeof *buffers);
	bytes = malloc(s.nbuffers * room);
	s.pool = alone ? NULL : base_pool_new(threads, s.nbuffers);
	if (!buffers || !bytes || (!alone && !s.pool)) {
		base_pool_free(s.pool);
		return base_no_memory_for(err, "%u threads and their buffers", threads);
	}
	for (unsigned i = 0; i < s.nbuffers; i++)
		buffers[i] = (struct buffer){.stream = &s, .bytes = bytes + i * room};
	pthread_mutex_init(&s.lock, NULL);
	pthread_cond_init(&s.read, NULL);
	r = stream_ring(&s, sink, arg, err);
	pthread_cond_destroy(&s.read);
	pthread_mutex_destroy(&s.lock);
	base_pool_free(s.pool);
	return r;
}
