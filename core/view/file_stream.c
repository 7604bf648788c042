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
	pthread_mutex_t lock;
	pthread_cond_t read;
	unsigned nbuffers;
	struct buffer *buffers;
};

static void fill_buffer(void *arg, unsigned worker)
{
	struct buffer *k = arg;
	struct stream *s = k->stream;
	(void)worker;
	int64_t n = view_file_read(s->f, s->c, k->offset, k->len, k->bytes, &k->err);
	pthread_mutex_lock(&s->lock);
	k->code = n < 0 ? (int)n : 0;
	k->ready = true;
	pthread_cond_signal(&s->read);
	pthread_mutex_unlock(&s->lock);
}

/* Starts to fill a buffer from *at on; false at the end of the file. */
static bool start_buffer(struct stream *s, struct base_pool *pool, struct buffer *k, uint64_t *at)
{
	k->offset = *at;
	uint64_t size = view_file_size(s->f);
	k->len = *at >= size ? 0 : base_min(BUFFER_BYTES - *at % BUFFER_BYTES, size - *at);
	k->ready = false;
	k->err = (struct base_error){0};
	if (k->len == 0)
		return false;
	*at += k->len;
	base_pool_run(pool, fill_buffer, k);
	return true;
}

static int stream_ring(struct stream *s, struct base_pool *pool, uint64_t offset,
	int (*sink)(void *arg, const void *bytes, size_t len, struct base_error *err),
	void *arg, struct base_error *err)
{
	uint64_t at = offset;
	int r = 0;
	for (unsigned i = 0; i < s->nbuffers; i++)
		start_buffer(s, pool, &s->buffers[i], &at);
	for (unsigned i = 0; r >= 0; i = (i + 1) % s->nbuffers) {
		struct buffer *k = &s->buffers[i];
		if (k->len == 0)
			break;
		pthread_mutex_lock(&s->lock);
		while (!k->ready)
			pthread_cond_wait(&s->read, &s->lock);
		pthread_mutex_unlock(&s->lock);
		if (k->code < 0 && err)
			*err = k->err;
		r = k->code < 0 ? k->code : sink(arg, k->bytes, k->len, err);
		if (r >= 0)
			start_buffer(s, pool, k, &at);
	}
	base_pool_wait(pool);
	return r < 0 ? r : 0;
}

static int stream_alone(struct view_file *f, struct load_cache *c, uint64_t offset,
	int (*sink)(void *arg, const void *bytes, size_t len, struct base_error *err),
	void *arg, struct base_error *err)
{
	base_cleanup_free void *bytes = malloc(base_min(BUFFER_BYTES, view_file_size(f) - offset) + 1);
	if (!bytes)
		return base_no_memory(err);
	while (offset < view_file_size(f)) {
		int64_t n = view_file_read(f, c, offset, BUFFER_BYTES - offset % BUFFER_BYTES, bytes, err);
		int r = n < 0 ? (int)n : sink(arg, bytes, (size_t)n, err);
		if (r < 0)
			return r;
		offset += (uint64_t)n;
	}
	return 0;
}

int view_file_stream(struct view_file *f, struct load_cache *c, uint64_t offset, unsigned threads,
	int (*sink)(void *arg, const void *bytes, size_t len, struct base_error *err),
	void *arg, struct base_error *err)
{
	if (threads == 0)
		threads = base_cpu_count();
	if (offset >= view_file_size(f))
		return 0;
	if (threads == 1 || view_file_size(f) - offset <= BUFFER_BYTES)
		return stream_alone(f, c, offset, sink, arg, err);
	struct stream s = {.f = f, .c = c, .nbuffers = threads + 2};
	base_cleanup_free struct buffer *buffers = calloc(s.nbuffers, sizeof *buffers);
	base_cleanup_free uint8_t *bytes = malloc((size_t)s.nbuffers * BUFFER_BYTES);
	struct base_pool *pool = base_pool_new(threads, s.nbuffers);
	int r = -ENOMEM;
	if (buffers && bytes && pool) {
		s.buffers = buffers;
		for (unsigned i = 0; i < s.nbuffers; i++)
			buffers[i] = (struct buffer){.stream = &s, .bytes = bytes + (size_t)i * BUFFER_BYTES};
		pthread_mutex_init(&s.lock, NULL);
		pthread_cond_init(&s.read, NULL);
		r = stream_ring(&s, pool, offset, sink, arg, err);
		pthread_cond_destroy(&s.read);
		pthread_mutex_destroy(&s.lock);
	} else {
		base_no_memory_for(err, "%u threads and their buffers", threads);
	}
	base_pool_free(pool);
	return r;
}
