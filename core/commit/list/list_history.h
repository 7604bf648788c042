/* SPDX-License-Identifier: Apache-2.0
 *
 * list_history: what happened to a run, newest first: its entries read backwards from the end, so that the newest few
 * cost what these few are. For people (vckpt log, vckpt metrics); nothing is decided by it. The list may be open for
 * the newest steps only. One thread; blocks. */
#ifndef CORE_COMMIT_LIST_LIST_HISTORY_H
#define CORE_COMMIT_LIST_LIST_HISTORY_H

#include "core/commit/list/list.h"

enum commit_list_event_kind { COMMIT_LIST_SAVED, COMMIT_LIST_REMOVED, COMMIT_LIST_ABORTED, COMMIT_LIST_UNREADABLE };
/* Borrowed for the call. */
struct commit_list_event {
	enum commit_list_event_kind kind;
	uint64_t entry;                 /* that says so */
	int64_t time_ns;                /* when the entry was put; a collected one: the commit's */
	const char *host;               /* of who put it; NULL: not known, the entry was collected */
	/* SAVED, REMOVED: what was saved or removed; NULL: its entry was collected */
	const struct proto_commit *commit;
	uint64_t gone;                  /* SAVED: the entry that removed or replaced it; PROTO_NONE: it is visible */
	bool replaced;                  /* SAVED and gone */
	const char *attempt, *reason;   /* ABORTED (REMOVED: a reason, or NULL); UNREADABLE: why */
	uint32_t rank;                  /* ABORTED: which rank was at fault */
};
struct commit_list_history {
	uint64_t collected;             /* entries below it were collected; 0: none was met */
	uint64_t entries;               /* that were read */
};
/* Calls f for each event of the newest `most` entries (0: of all) until it returns another number than 0, and returns
 * that; 0 at the end, or an error. After the entries that there are come those visible commits whose entries were
 * collected. A commit that never counted is no event. Pointers into the list are void after it. */
int commit_list_history_each(struct commit_list *l, uint64_t most,
	int (*f)(void *arg, const struct commit_list_event *e), void *arg, struct commit_list_history *ret_h,
	struct base_error *err);

#endif
