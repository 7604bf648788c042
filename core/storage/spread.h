/* SPDX-License-Identifier: Apache-2.0
 *
 * spread: many small requests to a store, several at once. Over a network each request waits about a millisecond for
 * its answer, and a commit of 8,192 ranks makes tens of thousands. */
#ifndef CORE_STORAGE_SPREAD_H
#define CORE_STORAGE_SPREAD_H

#include <stdint.h>

#include "core/base/error.h"

/* May be called by several threads at once, for different i. */
typedef int (*storage_spread_func)(void *arg, uint32_t i, struct base_error *err);
/* Calls f for 0 ... n - 1, in that order, up to 16 at once, and waits for all. After a failure it begins no more.
 * Returns the result and the sentence of the lowest i that failed, so that the answer does not depend on threads; else
 * 0. */
int storage_spread(uint32_t n, storage_spread_func f, void *arg, struct base_error *err);
/* The same for numbers that take long, each worth a thread: a whole part, not a file. */
int storage_spread_long(uint32_t n, storage_spread_func f, void *arg, struct base_error *err);

#endif
