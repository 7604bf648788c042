/* SPDX-License-Identifier: Apache-2.0
 *
 * pool: one mutex, a ring of waiting jobs, three conditions. Jobs here are large (a piece: about a megabyte of
 * hashing), so that one lock for all is not felt. Threads block all signals: they belong to the program's own. */
#include "core/base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/base/machine.h"

struct pool_job {
	base_pool_func f;
	void *arg;
};

struct pool_worker {
	struct base_pool *pool;
	unsigned number;
	pthread_t thread;
};

struct base_pool {
	pthread_mutex_t lock;            /* protects what follows, up to `threads` */
	pthread_cond_t more, room, idle; /* a job is waiting; the queue has room; nothing waits or runs */
	struct pool_job *ring;
	size_t size, head, waiting;      /* ring slots; first waiting job; how many wait */
	unsigned running;
	bool stop;
	unsigned threads;                /* started; constant once base_pool_new has returned */
	struct pool_worker *workers;
};

static void *pool_main(void *arg)
{
	struct pool_worker *w = arg;
	struct base_pool *pool = w->pool;

	pthread_mutex_lock(&pool->lock);
	for (;;) {
		struct pool_job job;

		while (pool->waiting == 0 && !pool->stop)
			pthread_cond_wait(&pool->more, &pool->lock);
		if (pool->waiting == 0)
			break;
		job = pool->ring[pool->head];
		pool->head = (pool->head + 1) % pool->size;
		pool->waiting--;
		pool->running++;
		pthread_cond_signal(&pool->room);
		pthread_mutex_unlock(&pool->lock);
		job.f(job.arg, w->number);
		pthread_mutex_lock(&pool->lock);
		if (--pool->running == 0 && pool->waiting == 0)
			pthread_cond_broadcast(&pool->idle);
	}
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

int base_thread_start(pthread_t *ret_thread, void *(*f)(void *), void *arg)
{
	sigset_t all, before;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	r = pthread_create(ret_thread, NULL, f, arg);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -r;
}

static bool pool_start(struct base_pool *pool, unsigned threads)
{
	while (pool->threads < threads) {
		struct pool_worker *w = &pool->workers[pool->threads];

		w->pool = pool;
		w->number = pool->threads;
		if (base_thread_start(&w->thread, pool_main, w) != 0)
			break;
		pool->threads++;
	}
	return pool->threads == threads;
}


struct base_pool *base_pool_new(unsigned threads, size_t queue_len)
{
	struct base_pool *pool = calloc(1, sizeof *pool);

	if (!pool)
		return NULL;
	if (threads == 0)
		threads = base_cpu_count();
	pool->size = queue_len ? queue_len : 1;
	pthread_mutex_init(&pool->lock, NULL);
	pthread_cond_init(&pool->more, NULL);
	pthread_cond_init(&pool->room, NULL);
	pthread_cond_init(&pool->idle, NULL);
	pool->ring = calloc(pool->size, sizeof *pool->ring);
	pool->workers = calloc(threads, sizeof *pool->workers);
	if (!pool->ring || !pool->workers || !pool_start(pool, threads)) {
		base_pool_free(pool);
		return NULL;
	}
	return pool;
}

void base_pool_free(struct base_pool *pool)
{
	if (!pool)
		return;
	pthread_mutex_lock(&pool->lock);
	pool->stop = true;
	pthread_cond_broadcast(&pool->more);
	pthread_mutex_unlock(&pool->lock);
	for (unsigned i = 0; i < pool->threads; i++)
		pthread_join(pool->workers[i].thread, NULL);
	pthread_cond_destroy(&pool->idle);
	pthread_cond_destroy(&pool->room);
	pthread_cond_destroy(&pool->more);
	pthread_mutex_destroy(&pool->lock);
	free(pool->workers);
	free(pool->ring);
	free(pool);
}

void base_pool_run(struct base_pool *pool, base_pool_func f, void *arg)
{
	pthread_mutex_lock(&pool->lock);
	while (pool->waiting == pool->size)
		pthread_cond_wait(&pool->room, &pool->lock);
	pool->ring[(pool->head + pool->waiting) % pool->size] = (struct pool_job){f, arg};
	pool->waiting++;
	pthread_cond_signal(&pool->more);
	pthread_mutex_unlock(&pool->lock);
}

void base_pool_wait(struct base_pool *pool)
{
	pthread_mutex_lock(&pool->lock);
	while (pool->waiting || pool->running)
		pthread_cond_wait(&pool->idle, &pool->lock);
	pthread_mutex_unlock(&pool->lock);
}

/* The kernel refuses a mask smaller than its own: grow until it fits. */
static unsigned cpu_affinity_count(void)
{
	for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
		size_t bytes = CPU_ALLOC_SIZE(cpus);
		cpu_set_t *set = CPU_ALLOC(cpus);
		int count = 0;

		if (!set)
			break;
		if (sched_getaffinity(0, bytes, set) == 0)
			count = CPU_COUNT_S(bytes, set);
		CPU_FREE(set);
		if (count > 0)
			return (unsigned)count;
	}
	return 1;
}

unsigned base_cpu_count(void)
{
	unsigned affinity = cpu_affinity_count();
	uint64_t allowed = base_machine_cpus("");

	return allowed < affinity ? (unsigned)allowed : affinity;
}
