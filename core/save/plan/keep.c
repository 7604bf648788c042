/* SPDX-License-Identifier: Apache-2.0 */
#include "core/save/plan/keep.h"

#include <errno.h>
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"

/* The larger first; of equal ones the one that was given first. */
static int keep_compare(const void *a, const void *b)
{
	const struct save_keep *x = *(struct save_keep *const *)a, *y = *(struct save_keep *const *)b;

	if (x->bytes != y->bytes)
		return x->bytes < y->bytes ? 1 : -1;
	return x < y ? -1 : x > y;
}

static int keep_largest(struct save_keep *all, size_t n, size_t most)
{
	base_cleanup_free struct save_keep **order = malloc(n * sizeof *order);

	if (!order)
		return -ENOMEM;
	for (size_t i = 0; i < n; i++) {
		all[i].kept = false;
		order[i] = &all[i];
	}
	qsort(order, n, sizeof(struct save_keep *), keep_compare);
	for (size_t i = 0; i < base_min(n, most); i++)
		order[i]->kept = true;
	return 0;
}

int save_keep_choose(struct save_keep *all, size_t n, size_t room)
{
	uint64_t total = 0;
	size_t left = 0, named = 0;

	for (size_t i = 0; i < n; i++) {
		if (base_add_overflows(total, all[i].bytes, &total))
			total = UINT64_MAX;
		all[i].kept = true;
		named += all[i].named;
	}
	if (n <= room)
		return 0;
	for (size_t i = 0; i < n; i++) {
		all[i].kept = all[i].named || all[i].bytes > total / SAVE_KEEP_DUST;
		left += all[i].kept;
	}
	return left <= room ? 0 : keep_largest(all, n, base_min(room - base_min(room, named), SAVE_KEEP_LARGE));
}
