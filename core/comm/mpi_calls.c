/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi calls: each with the types of the family that the library is of. Where MPI takes calls of one thread at a time
 * only, they go one after another. None of them waits for other ranks, but those that begin and end the use of MPI, so
 * none keeps the lock for long. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "core/comm/mpi_internal.h"

#define MPI_STATUS_BYTES 64              /* more than any MPI_Status */

static pthread_mutex_t mpi_calls_lock = PTHREAD_MUTEX_INITIALIZER;

/* A call, with the arguments for the one family and for the other. */
#define MPI_CALL(l, member, pointers_, numbers) ({ \
	int mpi_code_; \
	if ((l)->serial) \
		pthread_mutex_lock(&mpi_calls_lock); \
	mpi_code_ = (l)->pointers ? (l)->call.p.member pointers_ : (l)->call.n.member numbers; \
	if ((l)->serial) \
		pthread_mutex_unlock(&mpi_calls_lock); \
	mpi_code_; })

int mpi_init_thread(const struct mpi_library *l, int level, int *ret_level)
{
	return MPI_CALL(l, init_thread, (NULL, NULL, level, ret_level), (NULL, NULL, level, ret_level));
}

int mpi_query_thread(const struct mpi_library *l, int *ret_level)
{
	return MPI_CALL(l, query_thread, (ret_level), (ret_level));
}

int mpi_finalize(const struct mpi_library *l)
{
	return MPI_CALL(l, finalize, (), ());
}

int mpi_comm_rank(const struct mpi_library *l, union mpi_handle comm, int *ret_rank)
{
	return MPI_CALL(l, comm_rank, (comm.pointer, ret_rank), (comm.number, ret_rank));
}

int mpi_comm_size(const struct mpi_library *l, union mpi_handle comm, int *ret_size)
{
	return MPI_CALL(l, comm_size, (comm.pointer, ret_size), (comm.number, ret_size));
}

int mpi_comm_idup(const struct mpi_library *l, union mpi_handle comm, union mpi_handle *ret_comm,
	union mpi_handle *ret_request)
{
	return MPI_CALL(l, comm_idup, (comm.pointer, &ret_comm->pointer, &ret_request->pointer),
		(comm.number, &ret_comm->number, &ret_request->number));
}

int mpi_comm_free(const struct mpi_library *l, union mpi_handle *comm)
{
	return MPI_CALL(l, comm_free, (&comm->pointer), (&comm->number));
}

int mpi_comm_return_errors(const struct mpi_library *l, union mpi_handle comm)
{
	return MPI_CALL(l, comm_set_errhandler, (comm.pointer, l->errors_return.pointer),
		(comm.number, l->errors_return.number));
}

int mpi_isend(const struct mpi_library *l, union mpi_handle comm, const void *from, int n, int to, int tag,
	union mpi_handle *ret_request)
{
	return MPI_CALL(l, isend, (from, n, l->byte.pointer, to, tag, comm.pointer, &ret_request->pointer),
		(from, n, l->byte.number, to, tag, comm.number, &ret_request->number));
}

int mpi_irecv(const struct mpi_library *l, union mpi_handle comm, void *into, int n, int from, int tag,
	union mpi_handle *ret_request)
{
	return MPI_CALL(l, irecv, (into, n, l->byte.pointer, from, tag, comm.pointer, &ret_request->pointer),
		(into, n, l->byte.number, from, tag, comm.number, &ret_request->number));
}

int mpi_iallgatherv(const struct mpi_library *l, union mpi_handle comm, const void *from, int n, void *into,
	const int *into_n, const int *into_at, union mpi_handle *ret_request)
{
	return MPI_CALL(l, iallgatherv,
		(from, n, l->byte.pointer, into, into_n, into_at, l->byte.pointer, comm.pointer, &ret_request->pointer),
		(from, n, l->byte.number, into, into_n, into_at, l->byte.number, comm.number, &ret_request->number));
}

int mpi_test(const struct mpi_library *l, union mpi_handle *request, int *ret_done, int *ret_n)
{
	char status[MPI_STATUS_BYTES] __attribute__((aligned(16))) = {0};
	int code = MPI_CALL(l, test, (&request->pointer, ret_done, status), (&request->number, ret_done, status));

	if (code == MPI_SUCCEEDED && *ret_done && ret_n)
		code = MPI_CALL(l, get_count, (status, l->byte.pointer, ret_n), (status, l->byte.number, ret_n));
	return code;
}

int mpi_cancel(const struct mpi_library *l, union mpi_handle *request)
{
	return MPI_CALL(l, cancel, (&request->pointer), (&request->number));
}

int mpi_translate(const struct mpi_library *l, int code, const char *what, struct base_error *err)
{
	char text[MPI_TEXT_BYTES] = "";
	int len = 0;

	if (code == MPI_SUCCEEDED)
		return 0;
	if (MPI_CALL(l, error_string, (code, text, &len), (code, text, &len)) != MPI_SUCCEEDED)
		snprintf(text, sizeof text, "error %d", code);
	for (char *at = text; (at = strchr(at, '\n'));)
		*at = ' ';
	return base_error_set(err, -EIO, "%s: %.500s", what, text);
}
