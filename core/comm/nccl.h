/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl: NCCL as a transport of comm.h, for ranks that have a CUDA device each. libnccl.so.2 is loaded at run time, the
 * one that dlopen(3) finds (torch's, where torch is loaded) or that the environment variable VCKPT_LIBNCCL names by its
 * path (ignored in set-user-ID programs); NCCL 2.14 or later.
 *
 * Buckets stay in host memory, where they are checked and decoded; it is pinned, and NCCL reads and writes it over the
 * bus. They travel as NCCL's do: over NVLink, InfiniBand or sockets. What all other ranks want is broadcast; what some
 * want is sent to each.
 *
 * The communicator is non-blocking and our own: made from a unique id, which rank 0 passes on over another
 * communicator, or split from the caller's, which is not used afterwards. It is aborted, and never the caller's, when
 * a call fails. */
#ifndef CORE_COMM_NCCL_H
#define CORE_COMM_NCCL_H

#include "core/comm/comm.h"

/* For the device of the CUDA context that is current in the calling thread. Strings are gathered over `base`, which has
 * the same ranks, serves nothing else meanwhile, and is not freed before. timeout_ms: of this and any later wait (0:
 * COMM_TIMEOUT_MS). -ENOENT: no NCCL, no driver. */
int comm_nccl_new(struct comm *base, uint32_t timeout_ms, struct comm **ret_c, struct base_error *err);
/* `nccl_comm` is the caller's ncclComm_t, of NCCL 2.18 or later; all its ranks call this. Strings are gathered by NCCL,
 * too. Another thread must not use the caller's meanwhile. */
int comm_nccl_split(void *nccl_comm, uint32_t timeout_ms, struct comm **ret_c, struct base_error *err);

#endif
