/* SPDX-License-Identifier: Apache-2.0
 *
 * alike: which tensors the rows of two steps say alike, without opening them. For steps of the same layouts and ranks
 * all chunks of both are read once, side by side. Tensors are put into classes: those of one class have the same
 * dtype, shape, mesh and placements, and in both steps the same ranks stored the same boxes of them. So if one tensor
 * of a class can be opened, on both sides, all of it can (what else load_tensor_open asks for depends on nothing but
 * the above, and on what a chunk's decoder has checked), and both sides cut it alike. */
#ifndef CORE_LOAD_OPEN_ALIKE_H
#define CORE_LOAD_OPEN_ALIKE_H

#include "core/load/open/step.h"

#define LOAD_ALIKE_NONE UINT32_MAX

/* Made by one thread, then read-only. NULL for ret_a: there is nothing to gain, or rows cannot be read, of which a
 * caller that opens the tensors hears. component: only its tensors; NULL: all. -ENOMEM. The steps outlive it. */
struct load_alike;
int load_alike_new(struct load_step *a, struct load_step *b, const char *component, struct load_alike **ret_a);
void load_alike_free(struct load_alike *k); /* NULL-safe */
/* The class of a tensor (both steps number them alike), or LOAD_ALIKE_NONE: only load_tensor_open can say. ret_equal:
 * every row has the same digest in both. If not, the tensor differs, unless load_tensor_open leaves out rows: then it
 * has less than `pieces` pieces, as has every tensor of the class. */
uint32_t load_alike_class(const struct load_alike *k, uint32_t tensor, bool *ret_equal, uint64_t *ret_pieces);
uint32_t load_alike_classes(const struct load_alike *k); /* classes are below this number */

#endif
