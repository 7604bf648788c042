/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda driver: the functions of libcuda.so.1 that are used here, with their types as cuda.h of CUDA 12 declares them
 * (docs.nvidia.com/cuda/cuda-driver-api). The symbols are the versioned ones, whose meaning never changes; all of them
 * exist since CUDA 6.5. No header of CUDA is needed to build. */
#ifndef CORE_DEVICE_CUDA_INTERNAL_H
#define CORE_DEVICE_CUDA_INTERNAL_H

#include <stddef.h>

#include "core/base/error.h"

typedef int cuda_result;                 /* CUresult */
typedef struct cuda_context_ *cuda_context; /* CUcontext */
typedef struct cuda_stream_ *cuda_stream; /* CUstream; NULL: the default stream */
typedef struct cuda_event_ *cuda_event;  /* CUevent */
typedef unsigned long long cuda_address; /* CUdeviceptr */

enum {                                   /* CUresult */
	CUDA_SUCCESS = 0, CUDA_INVALID_VALUE = 1, CUDA_OUT_OF_MEMORY = 2, CUDA_NOT_INITIALIZED = 3,
	CUDA_DEINITIALIZED = 4, CUDA_NO_DEVICE = 100, CUDA_INVALID_CONTEXT = 201, CUDA_INVALID_HANDLE = 400,
	CUDA_ILLEGAL_ADDRESS = 700, CUDA_CONTEXT_IS_DESTROYED = 709, CUDA_HOST_ALREADY_REGISTERED = 712,
	CUDA_NOT_PERMITTED = 800, CUDA_NOT_SUPPORTED = 801,
};
enum { CUDA_HOST_REGISTER_PORTABLE = 1, CUDA_STREAM_NON_BLOCKING = 1, CUDA_EVENT_BLOCKING_SYNC = 1,
	CUDA_EVENT_DISABLE_TIMING = 2, CUDA_MEMORY_HOST = 1, CUDA_MEMORY_DEVICE = 2 };

struct cuda_copy_2d {                    /* CUDA_MEMCPY2D_v2 */
	size_t src_x_bytes, src_y;
	unsigned src_type;
	const void *src_host;
	cuda_address src_device;
	void *src_array;
	size_t src_pitch;
	size_t dst_x_bytes, dst_y;
	unsigned dst_type;
	void *dst_host;
	cuda_address dst_device;
	void *dst_array;
	size_t dst_pitch;
	size_t width_bytes, height;
};

/* F(member, symbol, arguments) for each. */
#define CUDA_FUNCTIONS(F)                                                                              \
	F(init, cuInit, (unsigned flags))                                                              \
	F(device_count, cuDeviceGetCount, (int *ret_n))                                                \
	F(error_name, cuGetErrorName, (cuda_result rc, const char **ret_name))                         \
	F(context_current, cuCtxGetCurrent, (cuda_context *ret_c))                                     \
	F(context_push, cuCtxPushCurrent_v2, (cuda_context c))                                         \
	F(context_pop, cuCtxPopCurrent_v2, (cuda_context *ret_c))                                      \
	F(host_register, cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags))           \
	F(host_unregister, cuMemHostUnregister, (void *memory))                                        \
	F(stream_create, cuStreamCreate, (cuda_stream *ret_s, unsigned flags))                         \
	F(stream_destroy, cuStreamDestroy_v2, (cuda_stream s))                                         \
	F(stream_wait, cuStreamWaitEvent, (cuda_stream s, cuda_event e, unsigned flags))               \
	F(stream_synchronize, cuStreamSynchronize, (cuda_stream s))                                    \
	F(event_create, cuEventCreate, (cuda_event *ret_e, unsigned flags))                            \
	F(event_record, cuEventRecord, (cuda_event e, cuda_stream s))                                  \
	F(event_synchronize, cuEventSynchronize, (cuda_event e))                                       \
	F(event_destroy, cuEventDestroy_v2, (cuda_event e))                                            \
	F(copy_to_host, cuMemcpyDtoHAsync_v2, (void *to, cuda_address from, size_t bytes, cuda_stream s)) \
	F(copy_2d, cuMemcpy2DAsync_v2, (const struct cuda_copy_2d *copy, cuda_stream s))

#define CUDA_MEMBER(member, symbol, arguments) cuda_result (*member) arguments;
struct cuda_driver { CUDA_FUNCTIONS(CUDA_MEMBER) };
#undef CUDA_MEMBER

/* The loaded driver; constant once device_cuda_load has returned 0. */
extern struct cuda_driver cuda_driver;
/* The errno of a driver's answer; 0 stays 0. The sentence is "WHAT: CUDA_ERROR_...". */
int cuda_translate(cuda_result rc, const char *what, struct base_error *err);

#endif
