/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/array.h"

#include <stdlib.h>

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
