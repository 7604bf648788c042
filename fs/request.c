/* SPDX-License-Identifier: Apache-2.0
 *
 * request: one answer to each request, although two threads may give it.
 *
 * When a caller gets any signal the kernel sends INTERRUPT, and it lets the caller go only once the request is
 * answered: a handler that waits for a dead network filesystem, or loops in a decoder, would keep the caller forever,
 * SIGKILL or not. But programs do not expect EINTR from a file, and some get signals all the time (Go's), so an
 * interrupted request goes on for FS_INTERRUPT_MS, within which nearly all are done. After that a thread with no other
 * task answers EINTR, and the handler finds its request gone.
 *
 *   OPEN       either may answer
 *   TAKEN      the handler answers
 *   ANSWERING  the thread answers; the last thing that it does with the request is to set LEFT
 *
 * Interrupted requests are in a list, the first one first. libfuse calls `interrupted` with the request's own lock
 * held, so no function takes that lock while it holds the list's.
 *
 * One of libfuse's threads has to read the interrupt: while all of them wait, it waits, too. */
#include <sched.h>
#include <string.h>

#include "core/base/clock.h"
#include "fs/mount.h"

#define FS_INTERRUPT_MS 2000

enum state { OPEN, TAKEN, ANSWERING, LEFT };

static _Thread_local struct fs_request *current; /* of this handler, from its beginning to its end */

/* ---- the list; all under its lock ---- */

static void list_add(struct fs_interrupts *all, struct fs_request *q)
{
	q->due_ms = base_monotonic_ms() + FS_INTERRUPT_MS;
	TAILQ_INSERT_TAIL(&all->interrupted, q, by_due);
	q->listed = true;
}

static void list_remove(struct fs_interrupts *all, struct fs_request *q)
{
	TAILQ_REMOVE(&all->interrupted, q, by_due);
	q->listed = false;
}

/* ---- the thread ---- */

static void interrupted(fuse_req_t req, void *data)
{
	struct fs_request *q = data;
	struct fs_interrupts *all = &q->m->interrupts;
	(void)req;

	if (!all->running)
		return;
	pthread_mutex_lock(&all->lock);
	if (!q->listed && atomic_load(&q->state) == OPEN) {
		list_add(all, q);
		pthread_cond_signal(&all->changed);
	}
	pthread_mutex_unlock(&all->lock);
}

/* Takes out the first request that is due and that its handler is not answering. A handler that is answering takes its
 * request out itself. NULL: *ret_next_ms says when to look again; 0: when the list changes. */
static struct fs_request *list_take(struct fs_interrupts *all, uint64_t *ret_next_ms)
{
	uint64_t now = base_monotonic_ms();
	struct fs_request *q;

	*ret_next_ms = 0;
	TAILQ_FOREACH(q, &all->interrupted, by_due) {
		unsigned state = OPEN;

		if (q->due_ms > now) {
			*ret_next_ms = q->due_ms - now;
			return NULL;
		}
		if (atomic_compare_exchange_strong(&q->state, &state, ANSWERING)) {
			list_remove(all, q);
			return q;
		}
	}
	return NULL;
}

static void answer(struct fs_request *q)
{
	atomic_fetch_add_explicit(&q->m->stats.interrupted, 1, memory_order_relaxed);
	fuse_req_interrupt_func(q->req, NULL, NULL);
	fuse_reply_err(q->req, EINTR);
	atomic_store(&q->state, LEFT);
}

static void *interrupts_main(void *arg)
{
	struct fs_interrupts *all = arg;
	uint64_t next_ms;

	pthread_mutex_lock(&all->lock);
	while (!all->ending) {
		struct fs_request *q = list_take(all, &next_ms);

		if (q) {
			pthread_mutex_unlock(&all->lock);
			answer(q);
			pthread_mutex_lock(&all->lock);
		} else if (next_ms) {
			struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, next_ms);
			pthread_cond_clockwait(&all->changed, &all->lock, CLOCK_MONOTONIC, &until);
		} else {
			pthread_cond_wait(&all->changed, &all->lock);
		}
	}
	pthread_mutex_unlock(&all->lock);
	return NULL;
}

void fs_interrupts_init(struct fs_interrupts *all)
{
	TAILQ_INIT(&all->interrupted);
	pthread_cond_init(&all->changed, NULL);
	pthread_mutex_init(&all->lock, NULL);
}

void fs_interrupts_release(struct fs_interrupts *all)
{
	pthread_cond_destroy(&all->changed);
	pthread_mutex_destroy(&all->lock);
}

void fs_interrupts_start(struct fs_mount *m)
{
	int r = pthread_create(&m->interrupts.thread, NULL, interrupts_main, &m->interrupts);

	m->interrupts.running = r == 0;
	fs_mount_feature(m, "interrupts", r == 0, "%s", r ? strerror(r) : "after 2 s");
}

void fs_interrupts_stop(struct fs_mount *m)
{
	struct fs_interrupts *all = &m->interrupts;

	if (!all->running)
		return;
	pthread_mutex_lock(&all->lock);
	all->ending = true;
	pthread_cond_signal(&all->changed);
	pthread_mutex_unlock(&all->lock);
	pthread_join(all->thread, NULL);
	all->running = false;
}

/* ---- handlers ---- */

void fs_request_begin_short(struct fs_request *q, fuse_req_t req, enum fs_op op)
{
	*q = (struct fs_request){.m = fuse_req_userdata(req), .req = req, .op = op,
		.start_ns = (int64_t)base_monotonic_ns(), .state = TAKEN};
}

void fs_request_begin(struct fs_request *q, fuse_req_t req, enum fs_op op)
{
	fs_request_begin_short(q, req, op);
	atomic_store(&q->state, OPEN);
	current = q;
	fuse_req_interrupt_func(req, interrupted, q);
}

bool fs_request_claim(struct fs_request *q)
{
	struct fs_interrupts *all = &q->m->interrupts;
	unsigned state = OPEN;

	if (!atomic_compare_exchange_strong(&q->state, &state, TAKEN)) {
		while (state != TAKEN && atomic_load(&q->state) != LEFT)
			sched_yield();
		return state == TAKEN;
	}
	fuse_req_interrupt_func(q->req, NULL, NULL);  /* from here on it is not put into the list */
	if (q->listed) {
		pthread_mutex_lock(&all->lock);
		list_remove(all, q);
		pthread_mutex_unlock(&all->lock);
	}
	return true;
}

bool fs_request_abandoned(void)
{
	return current && atomic_load(&current->state) >= ANSWERING;
}

static int request_errno(int error)
{
	switch (-error) {
	case ENOENT: case ENOTDIR: case EISDIR: case ESTALE: case ENOMEM: case EINTR: case EMFILE: case ENFILE:
	case EACCES: case EPERM: case EROFS:
	case ENODATA: case ERANGE: case E2BIG: case EOPNOTSUPP: case ENOSYS: case EINVAL:
		return -error;
	default:
		return EIO;  /* damage, broken records, whatever the storage says */
	}
}

void fs_request_end(struct fs_request *q, int r)
{
	struct fs_stats *s = &q->m->stats;

	if (r && fs_request_claim(q))
		fuse_reply_err(q->req, request_errno(r));
	current = NULL;
	atomic_fetch_add_explicit(&s->requests[q->op], 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&s->ns[q->op], base_monotonic_ns() - (uint64_t)q->start_ns, memory_order_relaxed);
	if (r)
		atomic_fetch_add_explicit(&s->errors[q->op], 1, memory_order_relaxed);
}
