/* SPDX-License-Identifier: Apache-2.0
 *
 * gc_internal: state of one collection, shared by gc.c (order, the dead), gc_reach.c (what is reached) and gc_sweep.c
 * (marks, deletion). One thread. */
#ifndef CORE_UPKEEP_GC_INTERNAL_H
#define CORE_UPKEEP_GC_INTERNAL_H

#include "core/base/table.h"
#include "core/commit/incoming/heartbeat.h"
#include "core/commit/incoming/incoming.h"
#include "core/upkeep/gc.h"

/* A set of strings, which it owns. */
struct gc_names { char **all; size_t n; struct base_table by_name; };
bool gc_names_has(const struct gc_names *s, const char *name);
int gc_names_add(struct gc_names *s, const char *name);
void gc_names_release(struct gc_names *s);

struct gc_launches { struct commit_launch_info *all; size_t n; }; /* sorted by launch */
/* Looks at all heartbeats. `again`: compares them with the look before, which `l` has: a launch of another host is
 * alive if its heartbeat has moved or is new. *ret_unknown: some launch cannot be judged yet; a later look may do. */
int gc_launches_look(struct store *s, bool again, struct gc_launches *l, bool *ret_unknown, struct base_error *err);

/* What is known of the list with the same number. */
struct gc_list {
	uint64_t first;                 /* number of entries at the first reading of the main pass */
	uint64_t before;                /* number of entries before files and folders were listed */
};

struct gc {
	struct store *store;
	const struct upkeep_gc_options *o;
	struct upkeep_gc_result result;
	struct base_error *err;
	int64_t now_ns;
	int fault;                      /* first failure to mark or delete: the result of the collection */
	uint64_t done, total;           /* for `progress` */

	/* the whole store, listed before the main pass reads anything: candidates and marks */
	struct commit_files files;
	struct gc_launches launches;                                   /* judged: none is UNKNOWN any more */
	struct commit_list **lists; struct gc_list *known; size_t nlists; /* of all runs, whole */
	size_t hint;                    /* the list that knew the last attempt asked for */
	struct commit_folders folders;
	struct gc_names packs_kept;     /* names of packs that are reached */
	/* paths of manifests that a visible commit, or a base of an undecided attempt, names */
	struct gc_names manifests_kept;
	struct gc_names manifests_gone; /* paths of those that were deleted */
	char measures[STORAGE_NAME_MAX]; uint64_t measures_bytes; /* a directory whose measures are deleted, or "" */
	struct gc_names aborted;        /* dry run: "<attempt>" that would have been aborted */
};

void gc_report(struct gc *g, const char *what, const char *name, uint64_t bytes, const char *detail);
/* Adds to the result's reasons, of which the last one takes what there is no room for. due_ns: as there. */
void gc_reason(struct gc *g, const char *what, const char *why, uint64_t files, uint64_t bytes, int64_t due_ns);
void gc_progress(struct gc *g); /* one more manifest or file is done */
bool gc_launch_alive(const struct gc *g, const char *launch);
/* Is this attempt decided in what has been read so far? first: in the first reading of the main pass. */
bool gc_decided(struct gc *g, const char *attempt, bool first);

/* gc_reach.c */
int gc_lists_read(struct gc *g, bool first);    /* opens new runs, refreshes the others; -BASE_EDAMAGED names a run */
int gc_reach_commits(struct gc *g);             /* keeps what visible commits reach now */
int gc_reach_bases(struct gc *g);               /* keeps what the bases of undecided attempts reach */

/* gc_sweep.c */
void gc_sweep(struct gc *g);
void gc_fault(struct gc *g, int r, const char *name, const char *verb); /* the first one is the result */

/* gc_list.c */
void gc_entries(struct gc *g);  /* after the sweep */

#endif
