/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda driver: the functions of libcuda.so.1 that are used here, with their types as cuda.h of CUDA 12 declares them
 * (docs.nvidia.com/cuda/cuda-driver-api). The symbols are the versioned ones, whose meaning never changes; all of them
 * exist since CUDA 11.0. No header of CUDA is needed to build. */
#ifndef CORE_DEVICE_CUDA_INTERNAL_H
#define CORE_DEVICE_CUDA_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"
#include "core/device/cuda.h"

typedef int cuda_result;                 /* CUresult */
typedef struct cuda_context_ *cuda_context; /* CUcontext */
typedef struct cuda_stream_ *cuda_stream; /* CUstream; NULL: the default stream */
typedef struct cuda_event_ *cuda_event;  /* CUevent */
typedef unsigned long long cuda_address; /* CUdeviceptr */

enum {                                   /* CUresult */
	CUDA_SUCCESS = 0, CUDA_INVALID_VALUE = 1, CUDA_OUT_OF_MEMORY = 2, CUDA_NOT_INITIALIZED = 3,
	CUDA_DEINITIALIZED = 4, CUDA_NO_DEVICE = 100, CUDA_INVALID_CONTEXT = 201, CUDA_INVALID_HANDLE = 400,
	CUDA_NOT_READY = 600,
	CUDA_ILLEGAL_ADDRESS = 700, CUDA_CONTEXT_IS_DESTROYED = 709, CUDA_HOST_ALREADY_REGISTERED = 712,
	CUDA_NOT_PERMITTED = 800, CUDA_NOT_SUPPORTED = 801,
	CUDA_CAPTURE_UNSUPPORTED = 900, CUDA_CAPTURE_IMPLICIT = 906, CUDA_CAPTURE_WRONG_THREAD = 908,
};
enum { CUDA_NOT_CAPTURING = 0 };         /* CUstreamCaptureStatus */
enum { CUDA_CAPTURE_RELAXED = 2 };       /* CUstreamCaptureMode */
enum { CUDA_POINTER_CONTEXT = 1, CUDA_POINTER_MEMORY_TYPE = 2, CUDA_POINTER_DEVICE = 9, CUDA_POINTER_START = 11,
	CUDA_POINTER_SIZE = 12 };        /* CUpointer_attribute */
enum { CUDA_HOST_PORTABLE = 1, CUDA_STREAM_NON_BLOCKING = 1, CUDA_EVENT_BLOCKING_SYNC = 1,
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

struct cuda_copy_3d {                    /* CUDA_MEMCPY3D_v2 */
	size_t src_x_bytes, src_y, src_z, src_lod;
	unsigned src_type;
	const void *src_host;
	cuda_address src_device;
	void *src_array, *src_reserved;
	size_t src_pitch, src_height;
	size_t dst_x_bytes, dst_y, dst_z, dst_lod;
	unsigned dst_type;
	void *dst_host;
	cuda_address dst_device;
	void *dst_array, *dst_reserved;
	size_t dst_pitch, dst_height;
	size_t width_bytes, height, depth;
};

/* F(member, symbol, arguments) for each. */
#define CUDA_FUNCTIONS(F)                                                                              \
	F(init, cuInit, (unsigned flags))                                                              \
	F(device_count, cuDeviceGetCount, (int *ret_n))                                                \
	F(error_name, cuGetErrorName, (cuda_result r, const char **ret_name))                          \
	F(context_current, cuCtxGetCurrent, (cuda_context *ret_c))                                     \
	F(pointer_attributes, cuPointerGetAttributes, (unsigned n, int *which, void **ret, cuda_address at)) \
	F(primary_retain, cuDevicePrimaryCtxRetain, (cuda_context *ret_c, int device))                 \
	F(primary_release, cuDevicePrimaryCtxRelease_v2, (int device))                                 \
	F(capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))                                \
	F(context_push, cuCtxPushCurrent_v2, (cuda_context c))                                         \
	F(context_pop, cuCtxPopCurrent_v2, (cuda_context *ret_c))                                      \
	F(host_register, cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags))           \
	F(host_unregister, cuMemHostUnregister, (void *memory))                                        \
	F(host_alloc, cuMemHostAlloc, (void **ret_memory, size_t bytes, unsigned flags))               \
	F(host_free, cuMemFreeHost, (void *memory))                                                    \
	F(stream_create, cuStreamCreate, (cuda_stream *ret_s, unsigned flags))                         \
	F(stream_context, cuStreamGetCtx, (cuda_stream s, cuda_context *ret_c))                        \
	F(stream_is_capturing, cuStreamIsCapturing, (cuda_stream s, int *ret_status))                  \
	F(stream_destroy, cuStreamDestroy_v2, (cuda_stream s))                                         \
	F(stream_wait, cuStreamWaitEvent, (cuda_stream s, cuda_event e, unsigned flags))               \
	F(stream_synchronize, cuStreamSynchronize, (cuda_stream s))                                    \
	F(event_create, cuEventCreate, (cuda_event *ret_e, unsigned flags))                            \
	F(event_record, cuEventRecord, (cuda_event e, cuda_stream s))                                  \
	F(event_query, cuEventQuery, (cuda_event e))                                                   \
	F(event_synchronize, cuEventSynchronize, (cuda_event e))                                       \
	F(event_destroy, cuEventDestroy_v2, (cuda_event e))                                            \
	F(copy_to_host, cuMemcpyDtoHAsync_v2, (void *to, cuda_address from, size_t bytes, cuda_stream s)) \
	F(copy_to_device, cuMemcpyHtoDAsync_v2, (cuda_address to, const void *from, size_t bytes, cuda_stream s)) \
	F(copy_2d, cuMemcpy2DAsync_v2, (const struct cuda_copy_2d *copy, cuda_stream s))               \
	F(copy_3d, cuMemcpy3DAsync_v2, (const struct cuda_copy_3d *copy, cuda_stream s))

#define CUDA_MEMBER(member, symbol, arguments) cuda_result (*member) arguments;
struct cuda_driver { CUDA_FUNCTIONS(CUDA_MEMBER) };
#undef CUDA_MEMBER

/* The loaded driver; constant once device_cuda_load has returned 0. */
extern struct cuda_driver cuda_driver;
/* The errno of a driver's answer; 0 stays 0. The sentence is "WHAT: CUDA_ERROR_...". */
int cuda_translate(cuda_result r, const char *what, struct base_error *err);
#define CUDA_COPIES "copies from device memory" /* the name of a wait for them */
#define CUDA_COPIES_BACK "copies to device memory"

/* Calls that may be unsafe while the program captures a stream (cuThreadExchangeStreamCaptureMode) are made between
 * these two, so that they do not concern any capture. Do not nest them. */
int cuda_relax(struct base_error *err);
void cuda_restore(void);
/* The same for calls that need a current context. */
int cuda_enter(cuda_context c, struct base_error *err);
void cuda_leave(void);
/* `call`, an int expression, between these two. */
#define cuda_within(context, err, call) ({ \
	int within_r_ = cuda_enter(context, err); \
	if (within_r_ == 0) { \
		within_r_ = (call); \
		cuda_leave(); \
	} \
	within_r_; })
int cuda_event_new(cuda_event *ret_e, struct base_error *err);
void cuda_event_free(cuda_context c, cuda_event e);

#define CUDA_OWNERS_MAX 64u
struct device_fence {
	struct cuda_owner {
		cuda_context context;
		uintptr_t start; size_t bytes; /* memory that is known to be of it */
		int device;              /* whose primary context was retained; -1: none was */
	} owners[CUDA_OWNERS_MAX]; unsigned nowners;
	struct cuda_point { cuda_context context; cuda_event event; } *points; unsigned npoints;
};

struct cuda_reorder;
struct device_stream {
	cuda_context context;
	cuda_stream stream;
	enum device_pin pin;
	bool back;                       /* it copied to the device */
	struct cuda_reorder *reorder;      /* NULL as long as nothing was reordered */
};

/* The stream's context is current for all of these. g is folded. */
int cuda_copy(cuda_stream stream, void *to, const struct device_gather *g, struct base_error *err);
#define CUDA_REORDER_BYTES (UINT64_C(2) << 20) /* the largest item; of half the memory */
int cuda_reorder(struct device_stream *s, void *to, const struct device_gather *g, struct base_error *err);
uint64_t cuda_reorders_given(const struct device_stream *s);
void cuda_reorder_all(struct device_stream *s, uint64_t end); /* those before number `end`, whose copies are done */
void cuda_reorder_none(struct device_stream *s); /* what was not reordered yet never will be */
/* Copies are done, or their context is gone, and with it what the driver gave. NULL-safe. */
void cuda_reorder_free(struct cuda_reorder *t, bool context);

#endif
