/* SPDX-License-Identifier: Apache-2.0
 *
 * frees: how much of a store visible steps need, and how much of that no other step would need if some of them were
 * removed (vckpt rm, vckpt info). Counts whole packs, as the collector does. Reads the manifest of each visible step
 * and changes nothing. It does not count what undecided saves use: a collection may keep more. */
#ifndef CORE_UPKEEP_FREES_H
#define CORE_UPKEEP_FREES_H

#include "core/commit/list/list.h"

struct upkeep_needs {
	uint64_t runs, steps, bytes;           /* that are visible; the logical bytes of the steps */
	uint64_t kept_packs, kept_bytes;       /* named by steps that stay */
	uint64_t freed_packs, freed_bytes;     /* named by steps that go, and by no other */
};
/* goes: would this step be removed? NULL: none would. A manifest that cannot be read is an error. */
int upkeep_needs(struct store *s, bool (*goes)(void *arg, const char *run, const struct commit_list_step *step),
	void *arg, struct upkeep_needs *ret_n, struct base_error *err);
/* Number and bytes of all packs in the store, needed or not. */
int upkeep_packs_bytes(struct store *s, uint64_t *ret_packs, uint64_t *ret_bytes, struct base_error *err);

#endif
