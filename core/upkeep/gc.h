/* SPDX-License-Identifier: Apache-2.0
 *
 * gc: deletes what no live commit, no undecided attempt and no base named by one can reach (invariant 7; docs/gc.md).
 * It deletes whole files only. A collection marks files in trash/; one that comes at least a grace period later deletes
 * them. */
#ifndef CORE_UPKEEP_GC_H
#define CORE_UPKEEP_GC_H

#include "core/commit/attempt/attempt.h"

struct upkeep_gc_result;
struct upkeep_gc_options {
	bool dry_run;                   /* changes nothing, reports what would be marked and deleted now */
	/* default 86400; 0: mark and delete at once, -BASE_EBUSY while a writer is alive */
	uint64_t grace_s;
	uint64_t heartbeat_s;           /* a heartbeat of another host is dead after so long without a move: 20 s */
	/* Called for each file or attempt; `what` is "abort" (a dead attempt), "mark", "delete", "keep" (marked, the
	 * grace period is not over), "damage" (left alone; `detail` says why). */
	void (*report)(void *arg, const char *what, const char *name, uint64_t bytes, const char *detail);
	void *arg;
	/* counts manifests to read and files to look at; may be NULL. Called from the caller's thread, as report is */
	void (*progress)(void *arg, uint64_t done, uint64_t total);
	/* May be NULL: called once, when it is known what will be marked and deleted and nothing has been yet, with
	 * what the result would be. */
	void (*plan)(void *arg, const struct upkeep_gc_result *would);
};
/* Files by what is done with them (`what` as above, or "collect": entries of lists) and why. */
#define UPKEEP_GC_REASONS 16u
struct upkeep_gc_reason {
	const char *what; char why[80];
	uint64_t files, bytes;
	/* of those that wait or are marked: since the epoch, when a collection may delete the last of them; 0: not
	 * before a writer has ended */
	int64_t due_ns;
};
/* entries: list entries that were collected; entries_bytes: of their files */
struct upkeep_gc_result {
	uint64_t aborted, marked, marked_bytes, deleted, deleted_bytes, waiting, waiting_bytes, entries, entries_bytes;
	struct upkeep_gc_reason reasons[UPKEEP_GC_REASONS]; unsigned nreasons;
};
/* -BASE_EDAMAGED: the list of a run, or a manifest that a visible step names, cannot be read. What is reached is then
 * unknown, and no pack of the store is deleted. */
int upkeep_gc(struct store *s, const struct upkeep_gc_options *o, struct upkeep_gc_result *ret_r,
	struct base_error *err);

#endif
