/* SPDX-License-Identifier: Apache-2.0
 *
 * space: has the store's file system room for this save, and for the next ones? What a save will add is not known
 * before its pieces are compared and encoded: so it is refused only where not even its records fit, and what is likely
 * is a warning. Quotas are not seen. One thread at a time. */
#ifndef CORE_SAVE_WRITE_SPACE_H
#define CORE_SAVE_WRITE_SPACE_H

#include "core/step/store.h"

#define SAVE_SPACE_LEAST (UINT64_C(64) << 10) /* for records, each in blocks of its own */
#define SAVE_SPACE_QUIET UINT64_MAX            /* of warn_free: no warnings */

/* Of a launch: what it was warned of. {0}: nothing yet. */
struct save_space {
	uint64_t warn_free;     /* warn below so many free bytes; 0: below twice what the save added */
	bool low;               /* it was warned that little is free, and more has not been since */
	bool tight;             /* the same of one save that may not fit */
};
/* Before anything is written. expect: what it is likely to add, at most. -ENOSPC, with a sentence as below. */
int save_space_check(struct store *s, struct save_space *sp, const char *run, uint64_t expect, struct base_error *err);
/* After a commit that added so many bytes. */
void save_space_warn(struct store *s, struct save_space *sp, const char *run, uint64_t new_bytes);
/* Returns r (-ENOSPC or -EDQUOT): says which file system is full, how much it has free, and how much was needed, unless
 * err says so already. */
int save_space_full(struct store *s, int r, uint64_t needed, struct base_error *err);

#endif
