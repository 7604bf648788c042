/* SPDX-License-Identifier: Apache-2.0
 *
 * open: reads the layouts and parts that a manifest names, and checks them against it. All readers of a step use it,
 * except verify, which goes on after a fault to find others, and the comparison of replicas, which has announcements
 * and no manifest yet. Any thread. */
#ifndef CORE_STEP_OPEN_H
#define CORE_STEP_OPEN_H

#include "core/step/part.h"
#include "core/step/store.h"

/* Layout `number` of the manifest (below m->nlayouts); store_layout_free. -BASE_EFORMAT: it is not the layout that the
 * manifest means. The sentence gives its number. */
int store_open_layout(struct store *s, const struct proto_manifest *m, uint32_t number, struct store_layout **ret_l,
	struct base_error *err);
/* The same, and the object that it was decoded from: ref.raw_len bytes, to be freed. */
int store_open_layout_object(struct store *s, const struct proto_manifest *m, uint32_t number,
	struct store_layout **ret_l, void **ret_object, struct base_error *err);

struct store_opened_part {
	struct proto_part part;
	const char **packs;             /* names by number of the part's pack table; they belong to the manifest */
	uint32_t npacks;
};
/* The part of line `line` of the manifest (below m->nranks), which has to be of that rank, world and layout and to list
 * the same packs: else -BASE_EFORMAT. After an error there is nothing to release. The sentence names the rank. */
int store_open_part(struct store *s, const struct proto_manifest *m, uint32_t line, struct store_opened_part *ret_p,
	struct base_error *err);
/* The same with a part that the caller has decoded already, and keeps. */
int store_open_part_known(const struct proto_manifest *m, uint32_t line, const struct proto_part *known,
	struct store_opened_part *ret_p, struct base_error *err);
void store_opened_part_release(struct store_opened_part *p); /* zeros are fine */

#endif
