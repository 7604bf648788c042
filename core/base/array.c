/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/array.h"

#include <stdlib.h>
#include <string.h>

enum { ARRAY_FIRST = 8 };

void *base_array_grow(void *array, size_t *room, size_t need, size_t item_bytes, size_t most)
{
	size_t want = *room ? *room > most / 2 ? most : 2 * *room : ARRAY_FIRST;
	void *grown;

	if (need > most)
		return NULL;
	if (want < need)
		want = need;
	if (want > most)
		want = most;
	grown = reallocarray(array, want, item_bytes);
	if (grown)
		*room = want;
	return grown;
}

size_t base_array_unique(void *items, size_t n, size_t item_bytes, int (*compare)(const void *a, const void *b))
{
	char *at = items;
	size_t kept = 0;

	if (n)
		qsort(items, n, item_bytes, compare);
	for (size_t i = 0; i < n; i++)
		if (kept == 0 || compare(at + (kept - 1) * item_bytes, at + i * item_bytes) != 0) {
			if (i > kept)
				memcpy(at + kept * item_bytes, at + i * item_bytes, item_bytes);
			kept++;
		}
	return kept;
}

int base_compare_32(const void *a, const void *b)
{
	const uint32_t *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

int base_compare_64(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}
