/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl: the functions of libnccl.so.2 that are used here, with their types as nccl.h of NCCL 2.14 and later declares
 * them (tests/gpu/test_nccl_header.py compares them with the real one). No header of NCCL is needed to build. */
#ifndef CORE_COMM_NCCL_INTERNAL_H
#define CORE_COMM_NCCL_INTERNAL_H

#include <limits.h>
#include <stddef.h>

#include "core/base/error.h"

#define NCCL_ID_BYTES 128
typedef struct nccl_comm_ *nccl_comm;    /* ncclComm_t */
typedef struct { char bytes[NCCL_ID_BYTES]; } nccl_id; /* ncclUniqueId */
typedef void *nccl_stream;               /* cudaStream_t */
typedef unsigned nccl_result;            /* ncclResult_t */
typedef unsigned nccl_type;              /* ncclDataType_t */
enum { NCCL_SUCCESS = 0, NCCL_UNHANDLED_CUDA_ERROR = 1, NCCL_SYSTEM_ERROR = 2, NCCL_INTERNAL_ERROR = 3,
	NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5, NCCL_REMOTE_ERROR = 6, NCCL_IN_PROGRESS = 7 };
enum { NCCL_UINT8 = 1 };

/* The first members of ncclConfig_t, which are all that NCCL 2.14 has; a later NCCL sees by the size and the version
 * that the others have their defaults. */
typedef struct {
	size_t size;
	unsigned magic, version;
	int blocking;
	int unset;                       /* a later NCCL's */
} nccl_config;
#define NCCL_CONFIG_NONBLOCKING (nccl_config){sizeof(nccl_config), 0xcafebeef, 21400, 0, INT_MIN}

/* F(member, symbol, arguments) for each. */
#define NCCL_FUNCTIONS(F)                                                                              \
	F(get_unique_id, ncclGetUniqueId, (nccl_id *ret_id))                                           \
	F(init_rank, ncclCommInitRankConfig, (nccl_comm *ret_c, int size, nccl_id id, int rank, nccl_config *config)) \
	F(destroy, ncclCommDestroy, (nccl_comm c))                                                     \
	F(abort, ncclCommAbort, (nccl_comm c))                                                         \
	F(async_error, ncclCommGetAsyncError, (nccl_comm c, nccl_result *ret_r))                       \
	F(count, ncclCommCount, (nccl_comm c, int *ret_size))                                          \
	F(user_rank, ncclCommUserRank, (nccl_comm c, int *ret_rank))                                   \
	F(broadcast, ncclBroadcast, (const void *from, void *into, size_t n, nccl_type type, int root, nccl_comm c, \
		nccl_stream s))                                                                        \
	F(send, ncclSend, (const void *from, size_t n, nccl_type type, int to, nccl_comm c, nccl_stream s)) \
	F(recv, ncclRecv, (void *into, size_t n, nccl_type type, int from, nccl_comm c, nccl_stream s)) \
	F(group_start, ncclGroupStart, (void))                                                         \
	F(group_end, ncclGroupEnd, (void))

#define NCCL_MEMBER(member, symbol, arguments) nccl_result (*member) arguments;
struct nccl_library {
	const char *(*error_string)(nccl_result r); /* ncclGetErrorString */
	/* ncclCommSplit; NULL before NCCL 2.18 */
	nccl_result (*split)(nccl_comm c, int color, int key, nccl_comm *ret_c, nccl_config *config);
	NCCL_FUNCTIONS(NCCL_MEMBER)
};
#undef NCCL_MEMBER

extern struct nccl_library nccl;         /* constant once nccl_load has returned 0 */
/* -ENOENT: there is none, or it is too old; the sentence says so. Loads once; any thread. */
int nccl_load(struct base_error *err);
/* The negative errno of NCCL's answer; 0 and "in progress" stay 0. The sentence is "WHAT: NCCL's text". */
int nccl_translate(nccl_result r, const char *what, struct base_error *err);

/* Calls that may wait for other ranks, or for a device, without end: each is made in a thread of its own, which is left
 * alone after timeout_ms (-ETIMEDOUT). What it was to give is given up then. */
int nccl_split_within(unsigned timeout_ms, nccl_comm parent, int rank, nccl_comm *ret_c, struct base_error *err);
int nccl_abort_within(unsigned timeout_ms, nccl_comm c, struct base_error *err);
int nccl_destroy_within(unsigned timeout_ms, nccl_comm c, struct base_error *err);

#endif
