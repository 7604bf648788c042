/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi: MPI as a transport of comm.h, for the ranks of one MPI job, on one host or many. The library is the one that the
 * process has (linked, or loaded by mpi4py); the environment variable VCKPT_LIBMPI names another by its path (ignored
 * in set-user-ID programs). Open MPI, and MPICH with its kin (Intel MPI, MVAPICH, Cray MPICH), with MPI 3.0 or later.
 *
 * MPI has to be initialised for several threads: with MPI_THREAD_SERIALIZED vckpt makes one call at a time, and the
 * program makes none itself while a load runs; MPI_THREAD_MULTIPLE is better.
 *
 * A rank that dies: as launchers are set up, they end the whole job then. If the job lives on, or if a rank only hangs,
 * the calls of the others fail within the time-out. Memory that MPI may still write to then stays allocated. */
#ifndef CORE_COMM_MPI_H
#define CORE_COMM_MPI_H

#include <stdbool.h>

#include "core/comm/comm.h"

/* All ranks of a communicator make one of their own, a duplicate. `mpi_comm` is the address of the caller's MPI_Comm;
 * NULL: MPI_COMM_WORLD. `init`: MPI is initialised by this call where it is not (and finalised when the process exits);
 * without it that is an error. Waits for the others, timeout_ms at most (0: COMM_TIMEOUT_MS), as each call will.
 * -ENOENT: no MPI library. -EINVAL: MPI is not initialised, or not so that it can be used. -ETIMEDOUT. -EIO: what MPI
 * says. */
int comm_mpi_new(const void *mpi_comm, bool init, uint32_t timeout_ms, struct comm **ret_c, struct base_error *err);

#endif
