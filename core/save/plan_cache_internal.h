/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_cache_internal: the files behind a cache of plans (plan_file.c), as plan_cache.c uses them. Any thread. */
#ifndef CORE_SAVE_PLAN_CACHE_INTERNAL_H
#define CORE_SAVE_PLAN_CACHE_INTERNAL_H

#include "core/save/plan_cache.h"

/* true: *ret_plan is the plan of that key; it fits the tensors. spare: malloc'ed memory of any size for its boxes,
 * which this takes either way; or NULL. */
bool save_plan_file_read(const char *dir, uint64_t max_bytes, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, struct save_plan_box *spare, struct save_plan *ret_plan);
/* Best effort; older files go where the directory becomes longer than max_bytes. */
void save_plan_file_write(const char *dir, uint64_t max_bytes, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, const struct save_plan *plan);

#endif
