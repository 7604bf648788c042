/* SPDX-License-Identifier: Apache-2.0
 *
 * cover: do the boxes that several writers stored of one tensor cover it exactly (invariant 4)? tensor_boxes_cover,
 * with ranks and digests. Pure functions over memory; any thread. manifest_cover.c gathers the boxes. */
#ifndef CORE_COMMIT_CHECK_COVER_H
#define CORE_COMMIT_CHECK_COVER_H

#include <stddef.h>

#include "core/base/digest.h"
#include "core/base/error.h"
#include "core/tensor/box.h"

struct check_cover_box {
	const uint64_t *pairs;          /* offset, size for each dimension; inside the shape; the caller's memory */
	uint32_t rank;
	struct base_digest digest;      /* over the digests of the box's pieces */
};
/* Identical boxes count once (the lowest rank's) and must have equal digests. -BASE_EFORMAT names `tensor`, box and
 * ranks; -ENOMEM. Sorts `boxes`. */
int check_cover_boxes(const struct tensor_shape *s, const char *tensor, struct check_cover_box *boxes, size_t n,
	struct base_error *err);

#endif
