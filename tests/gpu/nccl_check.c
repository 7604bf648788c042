/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl_check: what core/comm says of NCCL, against NCCL's own header; to be compiled, not run
 * (test_nccl_header.py). The header wants some of CUDA's, for which the test has empty ones. */
#include <stddef.h>

typedef void *cudaStream_t, *cudaEvent_t;
#include <nccl.h>

#include "core/comm/nccl_internal.h"

_Static_assert(sizeof(nccl_id) == sizeof(ncclUniqueId) && NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "ncclUniqueId");
_Static_assert(sizeof(nccl_result) == sizeof(ncclResult_t) && sizeof(nccl_type) == sizeof(ncclDataType_t), "enums");
_Static_assert(NCCL_SUCCESS == (int)ncclSuccess && NCCL_UNHANDLED_CUDA_ERROR == (int)ncclUnhandledCudaError &&
	NCCL_SYSTEM_ERROR == (int)ncclSystemError && NCCL_INTERNAL_ERROR == (int)ncclInternalError &&
	NCCL_INVALID_ARGUMENT == (int)ncclInvalidArgument && NCCL_INVALID_USAGE == (int)ncclInvalidUsage &&
	NCCL_REMOTE_ERROR == (int)ncclRemoteError && NCCL_IN_PROGRESS == (int)ncclInProgress, "ncclResult_t");
_Static_assert(NCCL_UINT8 == (int)ncclUint8, "ncclDataType_t");
_Static_assert(offsetof(nccl_config, magic) == offsetof(ncclConfig_t, magic) &&
	offsetof(nccl_config, version) == offsetof(ncclConfig_t, version) &&
	offsetof(nccl_config, blocking) == offsetof(ncclConfig_t, blocking), "ncclConfig_t");
_Static_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN && NCCL_VERSION(2, 14, 0) == 21400, "ncclConfig_t");

/* From here our words mean NCCL's types: an argument that differs is an error. */
#define nccl_comm ncclComm_t
#define nccl_id ncclUniqueId
#define nccl_stream cudaStream_t
#define nccl_result ncclResult_t
#define nccl_type ncclDataType_t
#define nccl_config ncclConfig_t
#define CHECK(member, symbol, arguments) extern nccl_result (*check_##member) arguments; \
	nccl_result (*check_##member) arguments = symbol;
NCCL_FUNCTIONS(CHECK)
CHECK(split, ncclCommSplit, (nccl_comm c, int color, int key, nccl_comm *ret_c, nccl_config *config))
extern const char *(*check_error_string)(nccl_result r);
const char *(*check_error_string)(nccl_result r) = ncclGetErrorString;
