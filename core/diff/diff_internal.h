/* SPDX-License-Identifier: Apache-2.0
 *
 * compare: bytes of tensors that both sides have with one dtype and one shape. Pieces of A are walked; where B is cut
 * alike and its piece has the same digest, none of the two is read. */
#ifndef CORE_DIFF_DIFF_INTERNAL_H
#define CORE_DIFF_DIFF_INTERNAL_H

#include "core/diff/diff.h"
#include "core/diff/values.h"

struct diff_compared {
	uint32_t a, b;                  /* numbers of the tensor */
	uint32_t pair;                  /* the caller's */
	_Atomic bool different;
	struct diff_measure m;          /* with values */
};
/* Do both have the same pieces of the same items, in the same order? */
bool diff_cut_alike(const struct load_object *a, const struct load_object *b);
int diff_compare(const struct diff_side *a, const struct diff_side *b, const struct diff_options *options,
	struct diff_compared *all, size_t n, struct base_error *err);

#endif
