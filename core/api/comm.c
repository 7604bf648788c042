/* SPDX-License-Identifier: Apache-2.0
 *
 * comm: communicators over core/comm. One load or call at a time uses a communicator: a load takes it when it starts,
 * and gives it back when it is over. */
#include <stdlib.h>

#include "core/api/api_comm_internal.h"
#include "core/base/cleanup.h"
#include "core/comm/functions.h"
#include "core/comm/mpi.h"
#include "core/comm/nccl.h"
#include "core/comm/shared.h"

_Static_assert(sizeof(struct vckpt_comm_functions) == sizeof(struct comm_functions) &&
	offsetof(struct vckpt_comm_functions, gather) == offsetof(struct comm_functions, gather) &&
	offsetof(struct vckpt_comm_functions, free) == offsetof(struct comm_functions, free) &&
	sizeof(struct vckpt_comm_pass) == offsetof(struct comm_pass, request) &&
	offsetof(struct vckpt_comm_pass, bytes) == offsetof(struct comm_pass, bytes) &&
	offsetof(struct vckpt_comm_pass, owner) == offsetof(struct comm_pass, owner), "handed through");

#define COMM_PLACE "place for the communicator"

/* r: what made `inner`. */
static int comm_wrap(int r, struct comm *inner, struct vckpt_comm **ret_comm, struct base_error *err)
{
	struct vckpt_comm *comm;

	if (r < 0)
		return api_result(r, err);
	comm = calloc(1, sizeof *comm);
	if (!comm) {
		comm_free(inner);
		return base_no_memory(err);
	}
	comm->comm = inner;
	comm->pid = getpid();
	*ret_comm = comm;
	return 0;
}

int vckpt_comm_shared(const char *name, uint32_t rank, uint32_t size, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct comm *inner = NULL;
	int r = api_given(name, "name for the ranks to meet under", e);

	if (r == 0)
		r = api_given(ret_comm, COMM_PLACE, e);
	if (r < 0)
		return r;
	r = comm_shared_new(name, rank, size, timeout_ms, &inner, e);
	return comm_wrap(r, inner, ret_comm, e);
}

int vckpt_comm_functions(const struct vckpt_comm_functions *functions, uint32_t rank, uint32_t size,
	uint32_t timeout_ms, struct vckpt_comm **ret_comm, struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct comm_functions own;
	struct comm *inner = NULL;
	int r = api_given(functions, "struct vckpt_comm_functions", e);

	if (r == 0)
		r = api_given(ret_comm, COMM_PLACE, e);
	if (r == 0)
		r = api_size_check(functions->size, sizeof own, "vckpt_comm_functions", e);
	if (r < 0)
		return r;
	memcpy(&own, functions, sizeof own);
	r = comm_functions_new(&own, rank, size, timeout_ms, &inner, e);
	return comm_wrap(r, inner, ret_comm, e);
}

int vckpt_comm_mpi(const void *mpi_comm, uint32_t flags, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct comm *inner = NULL;
	int r = api_given(ret_comm, COMM_PLACE, e);

	if (r == 0)
		r = api_flags_check(flags, VCKPT_MPI_INIT, "vckpt_comm_mpi", "VCKPT_MPI_INIT", e);
	if (r < 0)
		return r;
	r = comm_mpi_new(mpi_comm, flags & VCKPT_MPI_INIT, timeout_ms, &inner, e);
	return comm_wrap(r, inner, ret_comm, e);
}

int api_comm_alive(const struct vckpt_comm *comm, struct base_error *err)
{
	return comm->pid == getpid() ? 0 : base_error_set(err, -BASE_EFORKED,
		"the communicator was made before this process was forked: make one of its own");
}

int api_comm_take(struct vckpt_comm *comm, struct base_error *err)
{
	int r = api_given(comm, "communicator", err);

	if (r == 0)
		r = api_comm_alive(comm, err);
	return r < 0 ? r : comm_take(comm->comm, err);
}

int vckpt_comm_nccl(struct vckpt_comm *base, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct comm *inner = NULL;
	int r = api_given(ret_comm, COMM_PLACE, e);

	if (r == 0)
		r = api_comm_take(base, e);
	if (r < 0)
		return r;
	r = comm_nccl_new(base->comm, timeout_ms, &inner, e);
	r = comm_wrap(r, inner, ret_comm, e);
	if (r == 0)
		(*ret_comm)->base = base;
	else
		comm_give(base->comm);
	return r;
}

int vckpt_comm_nccl_split(void *nccl_comm, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err)
{
	struct base_error *e = api_error(err);
	struct comm *inner = NULL;
	int r = api_given(nccl_comm, "ncclComm_t", e);

	if (r == 0)
		r = api_given(ret_comm, COMM_PLACE, e);
	if (r < 0)
		return r;
	r = comm_nccl_split(nccl_comm, timeout_ms, &inner, e);
	return comm_wrap(r, inner, ret_comm, e);
}

void vckpt_comm_abort(struct vckpt_comm *comm, const char *why)
{
	if (comm && comm->pid == getpid())
		comm_abort(comm->comm, why ? why : "no reason was given");
}

void vckpt_comm_free(struct vckpt_comm *comm)
{
	if (!comm || comm->pid != getpid())
		return;
	comm_free(comm->comm);
	if (comm->base)
		comm_give(comm->base->comm);
	free(comm);
}
