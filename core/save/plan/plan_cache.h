/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_cache: what earlier saves of equal declarations were prepared to: plan and layout, in memory, found by one key
 * (plan_key.h). One cache belongs to a saver; the last few saves are kept, and whatever is in use. Any thread. */
#ifndef CORE_SAVE_PLAN_PLAN_CACHE_H
#define CORE_SAVE_PLAN_PLAN_CACHE_H

#include "core/save/plan/plan_key.h"
#include "core/save/plan/planned.h"

#define SAVE_PLAN_CACHE_KEPT 4u         /* the last used */

struct save_plan_cache;
struct save_plan_cache_stats { uint32_t hits, misses; };
struct save_plan_cache *save_plan_cache_new(void);      /* NULL: out of memory */
void save_plan_cache_free(struct save_plan_cache *c);   /* NULL-safe; everything was given back before */
/* To be given back; NULL: a miss. */
struct save_planned *save_plan_cache_get(struct save_plan_cache *c, const struct base_digest *key);
/* Takes what was made (zeroes it) and returns it, or what another thread put under this key before; to be given back.
 * NULL: out of memory, `made` is as it was. */
struct save_planned *save_plan_cache_put(struct save_plan_cache *c, const struct base_digest *key,
	struct save_planned *made);
void save_plan_cache_give(struct save_plan_cache *c, struct save_planned *p); /* NULL-safe */
void save_plan_cache_stats(struct save_plan_cache *c, struct save_plan_cache_stats *ret_stats);

#endif
