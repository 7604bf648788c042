/* SPDX-License-Identifier: Apache-2.0
 *
 * unlock_delay: to be preloaded: in a call that is made through it the thread sleeps after each mutex that it lets go
 * and after each condition that it was woken by, so that what others may do there they do. Two steps that have to be
 * one hold of a lock are then found apart in every run. */
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

void unlock_delay(unsigned us);                 /* of the calling thread, until it asks for 0 */
int unlock_delayed(unsigned us, int (*call)(void *, long, void *, void *), void *a, long b, void *c, void *d);

static __thread unsigned delay_us;

static void delay(void)
{
	struct timespec t = {delay_us / 1000000, delay_us % 1000000 * 1000L};

	if (delay_us)
		nanosleep(&t, NULL);
}

void unlock_delay(unsigned us) { delay_us = us; }

int unlock_delayed(unsigned us, int (*call)(void *, long, void *, void *), void *a, long b, void *c, void *d)
{
	int r;

	delay_us = us;
	r = call(a, b, c, d);
	delay_us = 0;
	return r;
}

int pthread_mutex_unlock(pthread_mutex_t *m)
{
	static int (*real)(pthread_mutex_t *);
	int r;

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_unlock");
	r = real(m);
	delay();
	return r;
}

/* A thread that is woken late is as good as one that the system runs late. */
int pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
{
	static int (*real)(pthread_cond_t *, pthread_mutex_t *);
	int r;

	if (!real)
		*(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_wait", "GLIBC_2.3.2");
	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_wait");
	r = real(c, m);
	if (delay_us) {
		pthread_mutex_unlock(m);
		pthread_mutex_lock(m);
	}
	return r;
}
