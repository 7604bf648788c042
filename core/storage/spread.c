/* SPDX-License-Identifier: Apache-2.0
 *
 * spread: the calling thread and up to 15 more take numbers from a counter. Threads are made for each call and joined:
 * some 20 us each, against requests that wait. Few numbers, or no thread to be had: the caller does all. */
#include "core/storage/spread.h"

#include <pthread.h>
#include <stdatomic.h>

#include "core/base/pool.h"

#define SPREAD_THREADS 16u
#define SPREAD_EACH 8u          /* numbers that a thread is worth */

struct spread {
	uint32_t n;
	store_spread_func f;
	void *arg;
	_Atomic uint64_t next;
	pthread_mutex_t lock;   /* protects all below */
	uint32_t failed;        /* the lowest; n: none */
	int r;
	struct base_error err;
};

static void *spread_main(void *arg)
{
	struct spread *s = arg;

	for (;;) {
		uint64_t i = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
		struct base_error err = {0};
		int r;

		if (i >= s->n)
			return NULL;
		r = s->f(s->arg, (uint32_t)i, &err);
		if (r >= 0)
			continue;
		atomic_store_explicit(&s->next, s->n, memory_order_relaxed); /* all below i are done or under way */
		pthread_mutex_lock(&s->lock);
		if (i < s->failed) {
			s->failed = (uint32_t)i;
			s->r = r;
			s->err = err;
		}
		pthread_mutex_unlock(&s->lock);
	}
}

int store_spread(uint32_t n, store_spread_func f, void *arg, struct base_error *err)
{
	struct spread s = {.n = n, .f = f, .arg = arg, .failed = n};
	pthread_t threads[SPREAD_THREADS - 1];
	unsigned count = 0;

	pthread_mutex_init(&s.lock, NULL);
	while (count < SPREAD_THREADS - 1 && count + 1 < n / SPREAD_EACH
	       && base_thread_start(&threads[count], spread_main, &s) == 0)
		count++;
	spread_main(&s);
	for (unsigned i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	pthread_mutex_destroy(&s.lock);
	return s.r < 0 ? base_error_set(err, s.r, "%s", s.err.text) : 0;
}
