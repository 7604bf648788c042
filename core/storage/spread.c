/* SPDX-License-Identifier: Apache-2.0
 *
 * spread: the calling thread and up to 15 more take numbers from a counter. Threads are made for each call and joined:
 * some 20 us each, against requests that wait. The caller begins alone, and starts one more only while the work that is
 * left, judged by what its own numbers took, is much more than that for each thread. So 64 small files in the page
 * cache (5 us each) cost no thread; of as many over a network all but the first are requested at once. More threads
 * than processors are started only while the caller waits for half of the time: what computes gains nothing from them.
 * Long numbers get a thread for each processor at once. If there are few numbers, or no thread can be started, the
 * caller does all. */
#include "core/storage/spread.h"

#include <pthread.h>
#include <stdatomic.h>

#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/base/pool.h"

#define SPREAD_THREADS 16u
#define SPREAD_EACH 8u          /* short numbers that a thread is worth */
#define SPREAD_ALONE_NS 100000u /* the caller measures this long: the first number may take longest */
#define SPREAD_SHARE_NS 500000u /* a thread is started only for as much work as this */

struct spread {
	uint32_t n;
	storage_spread_func f;
	void *arg;
	_Atomic uint64_t next;
	pthread_mutex_t lock;   /* protects all below */
	uint32_t failed;        /* the lowest; n: none */
	int r;
	struct base_error err;
};

/* Does the next number, if there is one: 1. */
static int spread_next(struct spread *s)
{
	uint64_t i = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
	struct base_error err = {0};
	int r;

	if (i >= s->n)
		return 0;
	r = s->f(s->arg, (uint32_t)i, &err);
	if (r >= 0)
		return 1;
	atomic_store_explicit(&s->next, s->n, memory_order_relaxed); /* all below i are done or under way */
	pthread_mutex_lock(&s->lock);
	if (i < s->failed) {
		s->failed = (uint32_t)i;
		s->r = r;
		s->err = err;
	}
	pthread_mutex_unlock(&s->lock);
	return 1;
}

static void *spread_main(void *arg)
{
	while (spread_next(arg))
		;
	return NULL;
}

/* Of the caller: how much it has done, and since when on both clocks. */
struct spread_pace { uint64_t done, begun, begun_cpu; unsigned cpus; };

/* Is there work for one more thread, beside the caller and `count` others? */
static bool spread_worth(const struct spread *s, struct spread_pace *p, unsigned count)
{
	uint64_t next = atomic_load_explicit(&s->next, memory_order_relaxed), left = s->n - base_min(next, s->n);
	uint64_t ns = base_monotonic_ns() - p->begun;

	if (ns < SPREAD_ALONE_NS || left <= count || ns / p->done * left / (count + 1) <= SPREAD_SHARE_NS)
		return false;
	if (!p->cpus)
		p->cpus = base_cpu_count();
	return count + 1 < p->cpus || base_thread_cpu_ns() - p->begun_cpu < ns / 2;
}

/* each: numbers that a thread is worth. */
static int spread_run(uint32_t n, uint32_t each, storage_spread_func f, void *arg, struct base_error *err)
{
	struct spread s = {.n = n, .f = f, .arg = arg, .failed = n};
	unsigned count = 0, most = n / each > 1 ? base_min(n / each, SPREAD_THREADS) - 1 : 0;
	struct spread_pace pace = {0};
	pthread_t threads[SPREAD_THREADS - 1];

	pthread_mutex_init(&s.lock, NULL);
	if (most)
		pace = (struct spread_pace){.begun = base_monotonic_ns(), .begun_cpu = base_thread_cpu_ns()};
	for (unsigned cpus = each == 1 && most ? base_cpu_count() : 0; count < most && count + 1 < cpus; count++)
		if (base_thread_start(&threads[count], spread_main, &s) < 0)
			most = count;
	while (spread_next(&s)) {
		pace.done++;
		while (count < most && spread_worth(&s, &pace, count)) {
			if (base_thread_start(&threads[count], spread_main, &s) < 0)
				most = count;
			else
				count++;
		}
	}
	for (unsigned i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	pthread_mutex_destroy(&s.lock);
	return s.r < 0 ? base_error_set(err, s.r, "%s", s.err.text) : 0;
}

int storage_spread(uint32_t n, storage_spread_func f, void *arg, struct base_error *err)
{
	return spread_run(n, SPREAD_EACH, f, arg, err);
}

int storage_spread_long(uint32_t n, storage_spread_func f, void *arg, struct base_error *err)
{
	return spread_run(n, 1, f, arg, err);
}
