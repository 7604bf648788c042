/* SPDX-License-Identifier: Apache-2.0
 *
 * frees: how much of a store visible steps need, and how much of that no other step would need if some of them went
 * (vckpt rm, vckpt info). Whole packs, as the collector counts. It reads the manifest of each visible step; nothing is
 * changed, and what undecided saves use is not asked for: a collection may keep more. */
#ifndef CORE_UPKEEP_FREES_H
#define CORE_UPKEEP_FREES_H

#include "core/commit/list/list.h"

struct store_needs {
	uint64_t runs, steps, bytes;           /* that are visible; the logical bytes of the steps */
	uint64_t kept_packs, kept_bytes;       /* named by steps that stay */
	uint64_t freed_packs, freed_bytes;     /* named by steps that go, and by no other */
};
/* goes: does this step go? NULL: none does. A manifest that cannot be read is an error. */
int store_needs(struct store *s, bool (*goes)(void *arg, const char *run, const struct store_list_step *step),
	void *arg, struct store_needs *ret_n, struct base_error *err);
/* Bytes and number of the packs that there are, whoever needs them. */
int store_packs_bytes(struct store *s, uint64_t *ret_packs, uint64_t *ret_bytes, struct base_error *err);

#endif
