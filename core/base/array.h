/* SPDX-License-Identifier: Apache-2.0
 *
 * array: malloc'ed arrays that grow as items are appended, by doubling. One array belongs to one thread at a time. Both
 * macros evaluate to 0 or -ENOMEM; on failure the array is as it was. They evaluate `array` and `room` more than once.
 *
 *     if (base_array_room(l->items, l->room, l->n + 1) < 0)
 *             return -ENOMEM;
 *     l->items[l->n++] = item; */
#ifndef CORE_BASE_ARRAY_H
#define CORE_BASE_ARRAY_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>

/* Room for `n` items. `room` is a variable of any unsigned type: how many items there is room for, 0 with a NULL
 * array. The new room is at least 8 items and twice the old one, and at most what that type can hold. */
#define base_array_room(array, room, n) ({ \
	size_t array_need_ = (n), array_room_ = (room); \
	int array_rc_ = 0; \
	if (array_need_ > array_room_) { \
		void *array_grown_ = base_array_grow((array), &array_room_, array_need_, sizeof *(array), \
			(__typeof__(room))-1); \
		if (array_grown_) \
			(array) = array_grown_, (room) = (__typeof__(room))array_room_; \
		else \
			array_rc_ = -ENOMEM; \
	} \
	array_rc_; })

/* Room for one more after `n` items, in an array whose room is kept nowhere: it is the next power of two, since the
 * array grows by this alone, one item at a time. NULL for n = 0. */
#define base_array_more(array, n) ({ \
	size_t array_have_ = (n), array_room_ = array_have_; \
	int array_rc_ = 0; \
	if ((array_have_ & (array_have_ - 1)) == 0) { \
		size_t array_need_ = array_have_ ? 2 * array_have_ : 1; \
		void *array_grown_ = base_array_grow((array), &array_room_, array_need_, sizeof *(array), \
			array_need_); \
		if (array_grown_) \
			(array) = array_grown_; \
		else \
			array_rc_ = -ENOMEM; \
	} \
	array_rc_; })

/* What the macros call: realloc for `need` items of `item_bytes` at least, and for twice *room (8 if that is 0) if that
 * is more, but for `most` at most. NULL: no memory, too many bytes, or need > most; nothing has changed then. */
void *base_array_grow(void *array, size_t *room, size_t need, size_t item_bytes, size_t most);

/* Sorts `n` items of `item_bytes` and drops those that equal the one before. Returns how many are left. */
size_t base_array_unique(void *items, size_t n, size_t item_bytes, int (*compare)(const void *a, const void *b));
int base_compare_32(const void *a, const void *b); /* of uint32_t, and of uint64_t: for qsort */
int base_compare_64(const void *a, const void *b);

#endif
