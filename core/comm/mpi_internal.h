/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi: the functions of an MPI library that are used here. No header of MPI is needed to build: the two families of
 * libraries in use have the same functions with different types. Open MPI's handles are pointers to objects in the
 * library, those of MPICH (and of MPICH's kin: Intel MPI, MVAPICH, Cray MPICH, ParaStation) are ints with fixed
 * values. A handle here is either; mpi_calls.c calls with the right type.
 *
 * There is one MPI in a process. It is found once and stays. */
#ifndef CORE_COMM_MPI_INTERNAL_H
#define CORE_COMM_MPI_INTERNAL_H

#include <stdbool.h>

#include "core/base/error.h"

union mpi_handle { void *pointer; int number; }; /* MPI_Comm, MPI_Request, MPI_Datatype, MPI_Errhandler */

/* These numbers are the same in both families. */
enum { MPI_SUCCEEDED = 0, MPI_LEVEL_SERIALIZED = 2, MPI_LEVEL_MULTIPLE = 3 }; /* MPI_SUCCESS, MPI_THREAD_* */
#define MPI_TEXT_BYTES 8192              /* more than any MPI_MAX_LIBRARY_VERSION_STRING */

/* F(member, symbol, arguments) for each, where handles have the type H. */
#define MPI_FUNCTIONS(F, H)                                                                            \
	F(initialized, MPI_Initialized, (int *ret_flag))                                               \
	F(finalized, MPI_Finalized, (int *ret_flag))                                                   \
	F(init_thread, MPI_Init_thread, (int *argc, char ***argv, int level, int *ret_level))          \
	F(query_thread, MPI_Query_thread, (int *ret_level))                                            \
	F(finalize, MPI_Finalize, (void))                                                              \
	F(error_string, MPI_Error_string, (int code, char *ret_text, int *ret_len))                    \
	F(comm_rank, MPI_Comm_rank, (H comm, int *ret_rank))                                           \
	F(comm_size, MPI_Comm_size, (H comm, int *ret_size))                                           \
	F(comm_idup, MPI_Comm_idup, (H comm, H *ret_comm, H *ret_request))                             \
	F(comm_free, MPI_Comm_free, (H *comm))                                                         \
	F(comm_set_errhandler, MPI_Comm_set_errhandler, (H comm, H handler))                           \
	F(isend, MPI_Isend, (const void *from, int n, H type, int to, int tag, H comm, H *ret_request)) \
	F(irecv, MPI_Irecv, (void *into, int n, H type, int from, int tag, H comm, H *ret_request))    \
	F(iallgatherv, MPI_Iallgatherv, (const void *from, int n, H type, void *into, const int *into_n, \
		const int *into_at, H into_type, H comm, H *ret_request))                              \
	F(test, MPI_Test, (H *request, int *ret_done, void *ret_status))                               \
	F(get_count, MPI_Get_count, (const void *status, H type, int *ret_n))                          \
	F(cancel, MPI_Cancel, (H *request))

#define MPI_MEMBER(member, symbol, arguments) int (*member) arguments;
struct mpi_library {
	const char *name;                /* as it was loaded */
	bool pointers;                   /* handles are pointers: Open MPI */
	bool serial;                     /* one call at a time */
	union {
		struct { MPI_FUNCTIONS(MPI_MEMBER, void *) } p;
		struct { MPI_FUNCTIONS(MPI_MEMBER, int) } n;
	} call;
	union mpi_handle world, byte, errors_return;
	int any_source;
};
#undef MPI_MEMBER

/* The one of this process, which is initialised; `init`: by this call, if need be. -ENOENT: there is none. -EINVAL: it
 * is not initialised, or finalised, or for one thread alone. Any thread. Each has to be put back before the process
 * exits, or else the process does not finalise MPI by itself. */
int mpi_library_get(bool init, const struct mpi_library **ret_l, struct base_error *err);
void mpi_library_put(void);
bool mpi_library_works(const struct mpi_library *l); /* it was not finalised */

/* Each is the MPI function of its name; bytes are all that is sent. */
int mpi_init_thread(const struct mpi_library *l, int level, int *ret_level);
int mpi_query_thread(const struct mpi_library *l, int *ret_level);
int mpi_finalize(const struct mpi_library *l);
int mpi_comm_rank(const struct mpi_library *l, union mpi_handle comm, int *ret_rank);
int mpi_comm_size(const struct mpi_library *l, union mpi_handle comm, int *ret_size);
int mpi_comm_idup(const struct mpi_library *l, union mpi_handle comm, union mpi_handle *ret_comm,
	union mpi_handle *ret_request);
int mpi_comm_free(const struct mpi_library *l, union mpi_handle *comm);
int mpi_comm_return_errors(const struct mpi_library *l, union mpi_handle comm);
int mpi_isend(const struct mpi_library *l, union mpi_handle comm, const void *from, int n, int to, int tag,
	union mpi_handle *ret_request);
int mpi_irecv(const struct mpi_library *l, union mpi_handle comm, void *into, int n, int from, int tag,
	union mpi_handle *ret_request);
int mpi_iallgatherv(const struct mpi_library *l, union mpi_handle comm, const void *from, int n, void *into,
	const int *into_n, const int *into_at, union mpi_handle *ret_request);
/* *ret_n: the bytes that came, where it was a receive. */
int mpi_test(const struct mpi_library *l, union mpi_handle *request, int *ret_done, int *ret_n);
int mpi_cancel(const struct mpi_library *l, union mpi_handle *request);
/* The negative errno of an MPI function's answer; 0 stays 0. The sentence is "WHAT: MPI's text". */
int mpi_translate(const struct mpi_library *l, int code, const char *what, struct base_error *err);

#endif
