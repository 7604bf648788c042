/* SPDX-License-Identifier: Apache-2.0
 *
 * shared: a communicator of ranks of one host, over shared memory. Ranks may be processes of one user, or threads. What
 * a rank passes on, the others read where it wrote it: nothing is copied on the way.
 *
 * The ranks meet under a name (1 to 100 letters, digits, '.', '_', '-') that they alone have, in the directory
 * /dev/shm/vckpt-UID-NAME, which is theirs alone (mode 0700) and is gone once they have met. A rank that died in a
 * meeting leaves its file there; the next meeting under this name takes no notice of it. */
#ifndef CORE_COMM_SHARED_H
#define CORE_COMM_SHARED_H

#include "core/comm/comm.h"

#define COMM_SHARED_RANKS_MAX 1024u

/* Blocks until all ranks have come, timeout_ms (0: COMM_TIMEOUT_MS) at most: -ETIMEDOUT names those that have not.
 * Memory: COMM_ROOMS * COMM_PASS_BYTES, 17 MiB, of this rank's; what rooms are never used is never had. */
int comm_shared_new(const char *name, uint32_t rank, uint32_t size, uint32_t timeout_ms, struct comm **ret_comm,
	struct base_error *err);

#endif
