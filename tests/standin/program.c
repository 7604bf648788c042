/* SPDX-License-Identifier: Apache-2.0
 *
 * program: the driver's functions that a training program calls and a saver does not: memory, contexts, what runs on a
 * stream. With them the tests for real devices (tests/gpu) run on the stand-in, too. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

CUresult cuDeviceGet(int *device, int ordinal);
CUresult cuDeviceGetName(char *name, int len, int device);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, int device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuMemAlloc_v2(CUdeviceptr *memory, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr memory);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, struct standin_stream *stream);
CUresult cuLaunchHostFunc(struct standin_stream *stream, void (*call)(void *), void *arg);

CUresult cuDeviceGet(int *device, int ordinal)
{
	*device = ordinal;
	return ordinal >= 0 && ordinal < standin_device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetName(char *name, int len, int device)
{
	snprintf(name, (size_t)len, "stand-in");
	return device >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, int device)
{
	(void)flags;
	pthread_mutex_lock(&standin_lock);
	*context = standin_context_on(device);
	pthread_mutex_unlock(&standin_lock);
	return standin_push(*context);
}

CUresult cuCtxDestroy_v2(CUcontext context)
{
	standin_context_destroy(context);
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
	standin_context_set(context);
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *memory, size_t bytes)
{
	if (!standin_current())
		return CUDA_ERROR_INVALID_CONTEXT;
	*memory = (uintptr_t)standin_memory_new(bytes);
	return *memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* It goes with the next reset. */
CUresult cuMemFree_v2(CUdeviceptr memory)
{
	return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
	if (!standin_current())
		return CUDA_ERROR_INVALID_CONTEXT;
	memcpy((void *)(uintptr_t)to, from, bytes);
	return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
	if (!standin_current())
		return CUDA_ERROR_INVALID_CONTEXT;
	memcpy(to, (void *)(uintptr_t)from, bytes);
	return CUDA_SUCCESS;
}

/* `from` is read at once: programs here do not write it while that may matter. */
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, struct standin_stream *stream)
{
	return standin_write(stream, (void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes, 0) == 0 ? CUDA_SUCCESS
		: CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchHostFunc(struct standin_stream *stream, void (*call)(void *), void *arg)
{
	struct standin_work *w = standin_current() ? calloc(1, sizeof *w) : NULL;

	if (!w)
		return standin_current() ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_CONTEXT;
	w->kind = STANDIN_CALL;
	w->call = call;
	w->arg = arg;
	pthread_mutex_lock(&standin_lock);
	standin_stream_queue(stream ? stream : standin_current()->standard, w);
	pthread_mutex_unlock(&standin_lock);
	return CUDA_SUCCESS;
}
