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

static inline uint64_t base_monotonic_ms(void) { return base_monotonic_ns() / 1000000; }

#endif
