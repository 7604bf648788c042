/* SPDX-License-Identifier: Apache-2.0
 *
 * bisect: binary search over numbers [from, to), which ascend in what is asked of them. `i` names the number in the
 * expression; its type is that of `to + 0`. The expression is evaluated about log2(to - from) times. */
#ifndef CORE_BASE_BISECT_H
#define CORE_BASE_BISECT_H

#include <errno.h>
#include <stdint.h>

/* The first i of which `before` does not hold, or `to`. It holds for all numbers before that one and for none behind.
 *
 *     at = base_bisect(i, 0, n, items[i].number < number); */
#define base_bisect(i, from, to, before) ({ \
	__typeof__((to) + 0) bisect_high_ = (to), bisect_low_ = (from); \
	while (bisect_low_ < bisect_high_) { \
		__typeof__(bisect_high_) i = bisect_low_ + (bisect_high_ - bisect_low_) / 2; \
		if (before) \
			bisect_low_ = i + 1; \
		else \
			bisect_high_ = i; \
	} \
	bisect_low_; })

/* The i (int64_t) of which `order` is 0, or -ENOENT. It is negative for all numbers before that one and positive for
 * all behind.
 *
 *     number = base_search(i, 0, n, strcmp(names[i], name)); */
#define base_search(i, from, to, order) ({ \
	__typeof__((to) + 0) search_high_ = (to), search_low_ = (from); \
	int64_t search_found_ = -ENOENT; \
	while (search_low_ < search_high_) { \
		__typeof__(search_high_) i = search_low_ + (search_high_ - search_low_) / 2; \
		int search_order_ = (order); \
		if (search_order_ == 0) { \
			search_found_ = (int64_t)i; \
			break; \
		} \
		if (search_order_ < 0) \
			search_low_ = i + 1; \
		else \
			search_high_ = i; \
	} \
	search_found_; })

#endif
