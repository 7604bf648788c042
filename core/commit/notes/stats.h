/* SPDX-License-Identifier: Apache-2.0
 *
 * stats: what the ranks measured of a save, stats/<run>/<step>.<entry>/<rank> (docs/format/stats.md). For people: no
 * step needs them, and nothing is decided by them. They go with their step. Any thread; all functions block. */
#ifndef CORE_COMMIT_NOTES_STATS_H
#define CORE_COMMIT_NOTES_STATS_H

#include "core/step/store.h"

/* Puts what m->rank measured of the step that entry `entry` of m->run's list committed. Best effort: a failure loses
 * measures only. -EEXIST: other measures of that rank are there. */
int commit_stats_put(struct store *s, const struct proto_stats *m, uint64_t entry, struct base_error *err);

/* Reads those of all ranks, by ascending rank; commit_stats_free. A step without any gives 0 of them. Files that cannot
 * be read or say something else than their name are left out and counted (ret_damaged may be NULL). */
int commit_stats_read(struct store *s, const char *run, uint64_t step, uint64_t entry, struct proto_stats **ret_all,
	uint32_t *ret_n, uint32_t *ret_damaged, struct base_error *err);
void commit_stats_free(struct proto_stats *all, uint32_t n);

struct commit_stats_name { char run[PROTO_RUN_MAX + 1]; uint64_t step, entry; uint32_t rank; };
/* false: not the name of a stats file */
bool commit_stats_name_parse(const char *name, struct commit_stats_name *ret_n);
/* Does the record say what its name says? */
bool commit_stats_named(const struct proto_stats *m, const struct commit_stats_name *n);

#endif
