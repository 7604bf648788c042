/* SPDX-License-Identifier: Apache-2.0
 *
 * tensors: the tensors of a step that an argument names. One thread. */
#ifndef TOOLS_VCKPT_LIST_TENSORS_H
#define TOOLS_VCKPT_LIST_TENSORS_H

#include "core/load/open/step.h"

/* The tensor at a path: COMPONENT/NAME as the mount shows it, or with the true name. -ENOENT, without a sentence, or
 * another error, with one. */
int64_t tool_tensor_find(struct load_step *step, const char *path, struct base_error *err);
/* Calls f for the tensor at the path; or, if there is none, for each whose COMPONENT/NAME matches it as a pattern of
 * fnmatch(3), in which * goes past slashes, too. -ENOENT: none does; or what f returned, if that was not 0. */
int tool_tensors_match(struct load_step *step, const char *path, int (*f)(void *arg, uint32_t tensor), void *arg,
	struct base_error *err);

#endif
