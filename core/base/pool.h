/* SPDX-License-Identifier: Apache-2.0
 *
 * pool: a fixed set of threads that run jobs from a bounded queue, in the order in which they were given.
 * Every function may be called from any thread but the pool's own. Threads block all signals. */
#ifndef CORE_BASE_POOL_H
#define CORE_BASE_POOL_H

#include <pthread.h>
#include <stddef.h>

struct base_pool;
typedef void (*base_pool_func)(void *arg, unsigned worker); /* worker: 0 .. threads-1 */

/* threads = 0: one per usable CPU. queue_len bounds jobs waiting. NULL: out of memory or threads. */
struct base_pool *base_pool_new(unsigned threads, size_t queue_len);
void base_pool_free(struct base_pool *pool);                            /* runs what is queued, joins; NULL-safe */
void base_pool_run(struct base_pool *pool, base_pool_func f, void *arg); /* blocks while the queue is full */
void base_pool_wait(struct base_pool *pool);                            /* until nothing is queued or running */
/* Starts one thread of the library's own. It blocks all signals, so that the caller's threads get them. 0 or a negative
 * errno. */
int base_thread_start(pthread_t *ret_thread, void *(*f)(void *), void *arg);
unsigned base_cpu_count(void);                          /* usable CPUs (affinity, control groups), >= 1 */

#endif
