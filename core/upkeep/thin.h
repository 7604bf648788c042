/* SPDX-License-Identifier: Apache-2.0
 *
 * thin: a step without one of its components (docs/prune.md, "Thinning"). An attempt of a writer alone writes layouts,
 * view headers and parts anew, without the component, into one `meta` pack; pieces and blobs stay where they are. Its
 * commit entry replaces the step's in one moment. One thread. */
#ifndef CORE_UPKEEP_THIN_H
#define CORE_UPKEEP_THIN_H

#include "core/commit/list/list.h"

struct upkeep_thinned {
	uint64_t entry;  /* the new commit entry; of upkeep_thin_look 0 */
	uint64_t bytes;  /* logical bytes that the step no longer has */
	bool before;     /* it has lost the component before */
	bool only;       /* of upkeep_thin_look: it has no other tensors */
};
/* What upkeep_thin would do; nothing is written. keeps(arg, pack) is called for each pack of the step that the thinned
 * one goes on needing; its error ends it. keeps NULL: whether the step has the component is all that is asked, and
 * ret_t->bytes is 0. 1: it has no such component. -EINVAL with ret_t->only: it has no other
 * tensors. */
int upkeep_thin_look(struct store *s, const char *run, const struct commit_list_step *step, const char *component,
	int (*keeps)(void *arg, const char *pack), void *arg, struct upkeep_thinned *ret_t, struct base_error *err);
/* -ESTALE: the step was removed or replaced since `step` was seen. -BASE_EPINNED. -ENOTSUP: the store lacks the
 * word list-4. 1 and -EINVAL as above. After any error the step is as it was, or (-BASE_EUNDECIDED) it may be thinned.
 * `step` is not used after the call. */
int upkeep_thin(struct store *s, const char *run, const struct commit_list_step *step, const char *component,
	struct upkeep_thinned *ret_t, struct base_error *err);

#endif
