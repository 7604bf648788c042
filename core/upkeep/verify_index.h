/* SPDX-License-Identifier: Apache-2.0
 *
 * verify_index: which faults touch these bytes of a file. Not thread-safe, not even two questions at once. */
#ifndef CORE_UPKEEP_VERIFY_INDEX_H
#define CORE_UPKEEP_VERIFY_INDEX_H

#include <stddef.h>
#include <stdint.h>

struct verify_place;
struct verify_index {
	struct verify_place *places; size_t n;
	uint64_t looked;                /* how many places all questions looked at */
};
/* len 0: the whole file. -ENOMEM. */
int verify_index_add(struct verify_index *x, const char *file, uint64_t offset, uint64_t len, size_t fault);
/* Calls f with the number of each fault, in no order, until it returns another number than 0, and returns that. Files
 * are compared by hash alone: f has to compare names. */
typedef int (*verify_index_func)(void *arg, size_t fault);
/* Those of the whole file. */
int verify_index_whole(struct verify_index *x, const char *file, verify_index_func f, void *arg);
/* The others that begin before `end` and end behind `begin`. */
int verify_index_range(struct verify_index *x, const char *file, uint64_t begin, uint64_t end, verify_index_func f,
	void *arg);
void verify_index_release(struct verify_index *x);

#endif
