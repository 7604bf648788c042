/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt_comm: communicators: what carries bytes between the ranks of a load. A part of vckpt.h.
 *
 * Ranks that load the same step at the same time may share what they read: each stored byte that several of them want
 * is read by one and passed on (docs/load.md, "Exchange"). A communicator is made once, by all ranks, and serves one
 * load after another (struct vckpt_load_options): all its ranks begin the same loads in the same order. After a load
 * that failed because a rank died, did not come, or was stopped, it serves no more: free it and make another.
 *
 * Threads: a communicator serves one load at a time. vckpt_comm_abort may be called by any thread at any time before
 * vckpt_comm_free. */
#ifndef VCKPT_COMM_H
#define VCKPT_COMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct vckpt_error;
struct vckpt_comm;

/* Ranks of one host, over shared memory: processes of one user, or threads. They meet under a name that they alone
 * have: 1 to 100 letters, digits, '.', '_' or '-'. Blocks until all have come. timeout_ms: how long this and any later
 * call waits for a rank that does nothing; 0: 5 minutes. A rank that dies is noticed at once. */
int vckpt_comm_shared(const char *name, uint32_t rank, uint32_t size, uint32_t timeout_ms,
	struct vckpt_comm **ret_comm, struct vckpt_error *err);

/* Ranks of an MPI job, on one host or many, over Open MPI or MPICH (and its kin), 3.0 or later, loaded at run time: the
 * library that the process has, or the one whose path VCKPT_LIBMPI is. `mpi_comm` is the address of an MPI_Comm, which
 * is duplicated (NULL: MPI_COMM_WORLD); the ranks are its ranks. All of them call this. MPI has to be initialised for
 * MPI_THREAD_MULTIPLE; or for MPI_THREAD_SERIALIZED, and then the program calls MPI from no thread while a load runs.
 * With VCKPT_MPI_INIT it is loaded and initialised by this call, if it is not yet, and finalised when the process exits
 * with status 0 and all communicators are freed. -ENOENT: no MPI. -EINVAL: MPI is not initialised, or not so. */
enum { VCKPT_MPI_INIT = 1 << 0 };
int vckpt_comm_mpi(const void *mpi_comm, uint32_t flags, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err);

/* Ranks with a CUDA device each, over NCCL 2.14 or later, loaded at run time: the process's libnccl.so.2, or the one
 * whose path VCKPT_LIBNCCL is. All ranks of `base` call this, each with the CUDA context of its own device current.
 * `base` goes on carrying what is small. It is taken, and must be freed after this one. An error, at whatever rank, is
 * an error of all ranks, and `base` is free again then, so that it may serve loads itself. -ENOENT: no NCCL, or no CUDA
 * driver. -EBUSY: `base` is in use. */
int vckpt_comm_nccl(struct vckpt_comm *base, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err);
/* The same without another communicator, for NCCL 2.18 or later: split from the caller's ncclComm_t, by all its ranks.
 * The caller's is not used later, and never aborted. */
int vckpt_comm_nccl_split(void *nccl_comm, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err);

/* A bucket on its way, at one rank. */
struct vckpt_comm_pass {
	uint64_t number;                 /* of buckets before it, of all owners: the same at all ranks */
	uint64_t len;                    /* bytes, 1 to 2 MiB + 4 KiB */
	void *bytes;                     /* owner: to be sent. A rank that wants it: to be filled. Others: NULL */
	const uint32_t *ranks;           /* nranks that want it, ascending, without the owner; valid until finish */
	uint32_t nranks, owner;
};
/* Functions of the caller's. Each returns 0 or a negative errno, after which the communicator serves no more. gather,
 * start and finish are called from one thread at a time, a thread of the load's; all ranks call gather and start in the
 * same order, with the same lens, number, len, ranks and owner. None of them calls this library. */
struct vckpt_comm_functions {
	size_t size;                     /* sizeof (struct vckpt_comm_functions) */
	void *arg;                       /* their first argument */
	/* Each rank gives lens[its rank] bytes; ret_all gets those of all ranks, one after another. Blocks. */
	int (*gather)(void *arg, const void *mine, const uint64_t *lens, void *ret_all, uint32_t timeout_ms);
	/* Begins to send or to receive, without waiting for the other ranks. A rank that neither owns nor wants the
	 * bucket is called too, since some collectives need all ranks. */
	int (*start)(void *arg, const struct vckpt_comm_pass *pass, void **ret_request);
	/* Waits until pass->bytes have arrived, or may be used again. Each rank finishes the buckets that it owns or
	 * wants, in order; it may have started others in between. */
	int (*finish)(void *arg, const struct vckpt_comm_pass *pass, void *request, uint32_t timeout_ms);
	void (*abort)(void *arg, const char *why); /* tells the other ranks; NULL: they find out by their time-outs */
	void (*free)(void *arg);                 /* at vckpt_comm_free, once; may be NULL */
};
int vckpt_comm_functions(const struct vckpt_comm_functions *functions, uint32_t rank, uint32_t size,
	uint32_t timeout_ms, struct vckpt_comm **ret_comm, struct vckpt_error *err);

/* Tells the other ranks that this one does not go on, and why: their loads fail with that sentence, at once where the
 * transport can tell them. So a rank that fails before its load has started keeps nobody waiting. NULL-safe. */
void vckpt_comm_abort(struct vckpt_comm *comm, const char *why);
/* NULL-safe. Loads that use it must be freed before. In a child after a fork it does nothing. */
void vckpt_comm_free(struct vckpt_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
