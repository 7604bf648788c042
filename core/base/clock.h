/* SPDX-License-Identifier: Apache-2.0
 *
 * clock: the two clocks, each in one unit. Times that others see or that are stored are of the realtime clock, which
 * may be set back; what is measured or waited for is of the monotonic clock. Any thread. */
#ifndef CORE_BASE_CLOCK_H
#define CORE_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t base_realtime_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline uint64_t base_monotonic_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* The processor time of this thread, with that of the kernel for it: it does not depend on other load. */
static inline uint64_t base_thread_cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static inline uint64_t base_monotonic_ms(void) { return base_monotonic_ns() / 1000000; }

/* The time of that clock in `ms` milliseconds, for waits (which are by the monotonic one). ms below 0 counts as 0, what
 * is beyond 68 years as 68 years. */
static inline struct timespec base_clock_in_ms(clockid_t clock, int64_t ms)
{
	const int64_t s = ms < 0 ? 0 : ms / 1000 < INT32_MAX ? ms / 1000 : INT32_MAX;
	struct timespec t;

	clock_gettime(clock, &t);
	t.tv_nsec += ms < 0 ? 0 : (long)(ms % 1000) * 1000000;
	t.tv_sec += (time_t)s + t.tv_nsec / 1000000000;
	t.tv_nsec %= 1000000000;
	return t;
}

#endif
