/* SPDX-License-Identifier: Apache-2.0
 *
 * queue: a stream's thread takes one piece of work after another. A wait lets nothing behind it pass until the event
 * was recorded as often as it had been when the wait was queued. A copy that is to fail breaks its context: what is
 * queued there after it is not executed, and the thread goes on only to empty the queue.
 *
 * Numbers of streams are used again when a stream has ended; their ticks go on, so that clocks stay true. */
#include "internal.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct standin_stream *queue_streams;
static uint64_t queue_ticks[STANDIN_CLOCKS];
static bool queue_taken[STANDIN_CLOCKS];

static void queue_sleep(unsigned us)
{
	struct timespec t = {us / 1000000, us % 1000000 * 1000L};

	if (us)
		nanosleep(&t, NULL);
}

/* Without the lock; false: memory was touched. */
static bool queue_execute(struct standin_work *w)
{
	if (w->kind == STANDIN_WRITE)
		memcpy(w->to.at, w->bytes, w->to.width);
	if (w->kind == STANDIN_CALL)
		w->call(w->arg);
	return w->kind != STANDIN_COPY || standin_order_execute(w->flight, &w->device);
}

/* With the lock, which is let go while memory is moved. */
static void queue_do(struct standin_stream *s, struct standin_work *w)
{
	unsigned delay = w->delay_us + (standin_delay_us ? (unsigned)(standin_random() % standin_delay_us) : 0);
	int code = 0;
	bool intact;

	while (w->kind == STANDIN_WAIT && w->event->done < w->nth)
		pthread_cond_wait(&standin_changed, &standin_lock);
	if (w->kind == STANDIN_COPY && !s->context->sticky && standin_copy_fails(&code))
		s->context->sticky = code;
	if (!s->context->sticky) {
		pthread_mutex_unlock(&standin_lock);
		queue_sleep(delay);
		intact = queue_execute(w);
		pthread_mutex_lock(&standin_lock);
		standin_counts[STANDIN_TOUCHED] += !intact && !w->flight->shared;
		if (w->kind == STANDIN_COPY)
			w->flight->executed = true;
	}
	if (w->kind == STANDIN_RECORD && w->event->done < w->nth)
		w->event->done = w->nth;
}

static void *queue_main(void *arg)
{
	struct standin_stream *s = arg;

	pthread_mutex_lock(&standin_lock);
	for (;;) {
		struct standin_work *w = s->first;

		if (!w && s->destroyed)
			break;
		if (!w) {
			pthread_cond_wait(&standin_changed, &standin_lock);
			continue;
		}
		s->first = w->next;
		if (!s->first)
			s->last = &s->first;
		s->working = true;
		queue_do(s, w);
		s->working = false;
		free(w);
		pthread_cond_broadcast(&standin_changed);
	}
	s->ended = true;
	queue_ticks[s->number] = s->clock.at[s->number];
	queue_taken[s->number] = false;
	pthread_cond_broadcast(&standin_changed);
	pthread_mutex_unlock(&standin_lock);
	return NULL;
}

struct standin_stream *standin_stream_start(struct standin_context *c)
{
	struct standin_stream *s = calloc(1, sizeof *s);
	sigset_t all, before;
	pthread_t thread;
	int r;

	if (!s)
		return NULL;
	while (s->number < STANDIN_CLOCKS && queue_taken[s->number])
		s->number++;
	if (s->number == STANDIN_CLOCKS) {
		free(s);
		return NULL;
	}
	s->context = c;
	s->last = &s->first;
	s->clock.at[s->number] = queue_ticks[s->number];
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	r = pthread_create(&thread, NULL, queue_main, s);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (r != 0) {
		free(s);
		return NULL;
	}
	pthread_detach(thread);
	queue_taken[s->number] = true;
	s->next = queue_streams;
	queue_streams = s;
	return s;
}

void standin_stream_end(struct standin_stream *s)
{
	s->destroyed = true;
	pthread_cond_broadcast(&standin_changed);
}

struct standin_stream *standin_stream_list(void)
{
	return queue_streams;
}

void standin_stream_queue(struct standin_stream *s, struct standin_work *w)
{
	w->next = NULL;
	*s->last = w;
	s->last = &w->next;
	pthread_cond_broadcast(&standin_changed);
}

void standin_stream_drain(struct standin_stream *s)
{
	while (s->first || s->working)
		pthread_cond_wait(&standin_changed, &standin_lock);
}

void standin_streams_reset(void)
{
	for (struct standin_stream *s; (s = queue_streams); free(s)) {
		standin_stream_end(s);
		while (!s->ended)
			pthread_cond_wait(&standin_changed, &standin_lock);
		queue_streams = s->next;
	}
	memset(queue_ticks, 0, sizeof queue_ticks);
}
