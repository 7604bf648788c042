/* SPDX-License-Identifier: Apache-2.0
 *
 * place: the driver's functions of contexts, of what a pointer belongs to, and of host memory (driver.c). */
#include "internal.h"

enum { PLACE_CONTEXT = 1, PLACE_MEMORY_TYPE = 2, PLACE_DEVICE_ORDINAL = 9, PLACE_RANGE_START = 11,
	PLACE_RANGE_SIZE = 12 };
#define PLACE_NO_DEVICE (-2)             /* CU_DEVICE_INVALID */

CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext *context);
CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags);
CUresult cuMemHostUnregister(void *memory);
CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned flags);
CUresult cuMemFreeHost(void *memory);
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, int device);
CUresult cuDevicePrimaryCtxRelease_v2(int device);
CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **data, CUdeviceptr at);

CUresult cuCtxGetCurrent(CUcontext *context)
{
	CUresult r = driver_begin("cuCtxGetCurrent");

	if (r)
		return r;
	*context = standin_current();
	return driver_end(CUDA_SUCCESS);
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	CUresult r = driver_begin("cuCtxPushCurrent");
	struct standin_context *c;

	if (r)
		return r;
	for (c = standin_context_list(); c && c != context;)
		c = c->next;
	if (!c)
		return driver_end(driver_fault(STANDIN_FOREIGN, CUDA_ERROR_INVALID_CONTEXT));
	return driver_end(c->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : standin_push(c));
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	CUresult r = driver_begin("cuCtxPopCurrent");

	return r ? r : driver_end(standin_pop(context));
}

CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags)
{
	CUresult r = driver_begin_unsafe("cuMemHostRegister");

	if (r)
		return r;
	if (flags != 1) /* another context's copies would find it pageable */
		return driver_end(CUDA_ERROR_INVALID_VALUE);
	return driver_end(standin_host_add(memory, bytes));
}

CUresult cuMemHostUnregister(void *memory)
{
	CUresult r = driver_begin_unsafe("cuMemHostUnregister");

	return r ? r : driver_end(standin_host_remove(memory));
}

CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
	CUresult r = driver_begin_unsafe("cuMemHostAlloc");

	if (r)
		return r;
	return driver_end(flags != 1 || !bytes ? CUDA_ERROR_INVALID_VALUE : standin_host_alloc(memory, bytes));
}

CUresult cuMemFreeHost(void *memory)
{
	CUresult r = driver_begin_unsafe("cuMemFreeHost");

	return r ? r : driver_end(standin_host_free(memory));
}

/* ---- what a pointer, a stream belongs to ---- */

/* Wants no context. Whose memory it is not: defaults. */
CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **data, CUdeviceptr at)
{
	CUresult r = driver_begin("cuPointerGetAttributes");
	struct standin_memory m = {.device = PLACE_NO_DEVICE};
	bool found;

	if (r)
		return r;
	found = standin_memory_find((void *)(uintptr_t)at, &m);
	for (unsigned i = 0; i < n && r == CUDA_SUCCESS; i++)
		switch (attributes[i]) {
		case PLACE_CONTEXT: *(CUcontext *)data[i] = m.context; break;
		case PLACE_MEMORY_TYPE: *(unsigned *)data[i] = found ? CU_MEMORYTYPE_DEVICE : 0; break;
		case PLACE_DEVICE_ORDINAL: *(int *)data[i] = m.device; break;
		case PLACE_RANGE_START: *(CUdeviceptr *)data[i] = (uintptr_t)m.at; break;
		case PLACE_RANGE_SIZE: *(size_t *)data[i] = m.bytes; break;
		default: r = CUDA_ERROR_INVALID_VALUE;
		}
	return driver_end(r);
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
	CUresult r = driver_begin("cuStreamGetCtx");
	struct standin_stream *s = standin_stream_list();

	if (r)
		return r;
	if ((uintptr_t)stream <= 2) {
		*context = standin_current();
		return driver_end(*context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT);
	}
	while (s && s != stream)
		s = s->next;
	if (!s || s->destroyed)
		return driver_end(driver_fault(s ? STANDIN_DESTROYED : STANDIN_FOREIGN, CUDA_ERROR_INVALID_HANDLE));
	*context = s->context;
	return driver_end(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, int device)
{
	CUresult r = driver_begin("cuDevicePrimaryCtxRetain");

	if (r)
		return r;
	*context = standin_primary(device);
	standin_counts[STANDIN_PRIMARIES] += *context != NULL;
	return driver_end(*context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuDevicePrimaryCtxRelease_v2(int device)
{
	CUresult r = driver_begin("cuDevicePrimaryCtxRelease");

	if (r)
		return r;
	if (!standin_primary(device) || !standin_counts[STANDIN_PRIMARIES])
		return driver_end(driver_fault(STANDIN_FOREIGN, CUDA_ERROR_INVALID_VALUE));
	standin_counts[STANDIN_PRIMARIES]--;
	return driver_end(CUDA_SUCCESS);
}
