/* SPDX-License-Identifier: Apache-2.0
 *
 * launch: one rank's part in one start of a job that writes a run. A launch aborts what earlier launches of the run
 * left undecided, names its attempts by step and try so that all ranks name them alike without a message, and shows a
 * heartbeat from open to close. It is not a rendezvous: ranks meet only in the files of the store.
 *
 * Any thread may call any function; several saves may be under way. All functions block on the store. After a fork the
 * child's calls answer -BASE_EFORKED and touch nothing. */
#ifndef CORE_COMMIT_LAUNCH_LAUNCH_H
#define CORE_COMMIT_LAUNCH_LAUNCH_H

#include "core/step/store.h"

#define COMMIT_LAUNCH_HEARTBEAT_MS 20000u
#define COMMIT_LAUNCH_START_MS 60000u

struct commit_launch;
struct commit_launch_options {
	const char *run;
	/* text that all ranks share and that is new at every start; NULL or empty: this rank is the whole world */
	const char *id;
	uint32_t rank, world;
	/* a rank whose heartbeat does not move for this time (an idle one's: for longer, as it states) is given up; 0:
	 * 20 s; at least 400 */
	uint64_t heartbeat_ms;
	uint64_t start_ms;      /* a rank that never shows one is given up after this time; 0: 60 s */
	/* a rank whose heartbeat goes on, and that has not announced its part this long after the committing rank did,
	 * is given up; 0: it is waited for */
	uint64_t deadline_ms;
};
/* Heartbeat first. Rank 0 appends the launch entry: -EEXIST if this id was used in the run before. The others wait for
 * it: -ETIMEDOUT names what is missing. -EINVAL: rank and world, or a world without an id. */
int commit_launch_open(struct store *s, const struct commit_launch_options *o, struct commit_launch **ret_l,
	struct base_error *err);
/* Deletes the heartbeat. Its attempts were freed before. NULL-safe. */
void commit_launch_close(struct commit_launch *l);
const char *commit_launch_name(const struct commit_launch *l); /* 16 hex digits */
uint32_t commit_launch_neighbours(const struct commit_launch *l); /* on this machine, as far as seen */

#endif
