/* SPDX-License-Identifier: Apache-2.0
 *
 * mpi_lacks: MPI libraries that cannot be used (tests/unit/comm/test_comm_mpi.py): an Open MPI from before MPI 3.0, and
 * a library of no known family. */
#include <stdio.h>

int MPI_Initialized(int *flag);
int MPI_Get_library_version(char *version, int *len);

int MPI_Initialized(int *flag)
{
	*flag = 0;
	return 0;
}

#ifdef OLD
#define NONE(name) int name(void); int name(void) { return 1; }
extern char ompi_mpi_comm_world;
char ompi_mpi_comm_world;
NONE(MPI_Finalized)
NONE(MPI_Init_thread)
NONE(MPI_Query_thread)
NONE(MPI_Finalize)
NONE(MPI_Error_string)
NONE(MPI_Comm_rank)
NONE(MPI_Comm_size)
NONE(MPI_Comm_free)
NONE(MPI_Comm_set_errhandler)
NONE(MPI_Isend)
NONE(MPI_Irecv)
NONE(MPI_Iallgatherv)
NONE(MPI_Test)
NONE(MPI_Get_count)
NONE(MPI_Cancel)
#else
int MPI_Get_library_version(char *version, int *len)
{
	*len = sprintf(version, "Other MPI 1");
	return 0;
}
#endif
