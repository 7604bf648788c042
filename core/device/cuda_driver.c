/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda driver: the library is opened when device memory is first used, and stays: unloading a driver that a program's
 * other parts may use as well is never right. A load that failed is tried again by the next call. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/device/cuda.h"
#include "core/device/cuda_internal.h"

#define CUDA_LIBRARY "libcuda.so.1"
#define CUDA_LIBRARY_ENV "VCKPT_LIBCUDA"

struct cuda_driver cuda_driver;
static pthread_mutex_t cuda_lock = PTHREAD_MUTEX_INITIALIZER; /* protects the next, and cuda_driver until loaded */
static bool cuda_loaded;

static int cuda_errno(cuda_result r)
{
	switch (r) {
	case CUDA_SUCCESS: return 0;
	case CUDA_OUT_OF_MEMORY: return -ENOMEM;
	case CUDA_INVALID_VALUE:
	case CUDA_INVALID_CONTEXT:
	case CUDA_INVALID_HANDLE: return -EINVAL;
	case CUDA_NOT_INITIALIZED:
	case CUDA_DEINITIALIZED:
	case CUDA_NO_DEVICE:
	case CUDA_CONTEXT_IS_DESTROYED: return -ENODEV;
	case CUDA_ILLEGAL_ADDRESS: return -EFAULT;
	case CUDA_HOST_ALREADY_REGISTERED: return -EEXIST;
	case CUDA_NOT_PERMITTED: return -EPERM;
	case CUDA_NOT_SUPPORTED: return -EOPNOTSUPP;
	default: return r >= CUDA_CAPTURE_UNSUPPORTED && r <= CUDA_CAPTURE_WRONG_THREAD ? -EBUSY : -EIO;
	}
}

int cuda_translate(cuda_result r, const char *what, struct base_error *err)
{
	const char *name = NULL;

	if (r == CUDA_SUCCESS)
		return 0;
	if (cuda_driver.error_name(r, &name) == CUDA_SUCCESS && name)
		return base_error_set(err, cuda_errno(r), "%s: %s", what, name);
	return base_error_set(err, cuda_errno(r), "%s: the CUDA driver answers %d", what, r);
}

static int cuda_find_symbols(void *library, struct cuda_driver *d, const char *name, struct base_error *err)
{
#define CUDA_FIND(member, symbol, arguments)                                                           \
	*(void **)&d->member = dlsym(library, #symbol);                                                \
	if (!d->member)                                                                                \
		return base_error_set(err, -ENOENT, "the CUDA driver %s has no %s", name, #symbol);
	CUDA_FUNCTIONS(CUDA_FIND)
#undef CUDA_FIND
	return 0;
}

/* Called with the lock held. */
static int cuda_open(struct base_error *err)
{
	const char *name = secure_getenv(CUDA_LIBRARY_ENV);
	struct base_error why = {0};
	void *library;
	int devices = 0, r;

	name = name && *name ? name : CUDA_LIBRARY;
	library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return base_error_set(err, -ENOENT, "no CUDA driver: %s", dlerror());
	r = cuda_find_symbols(library, &cuda_driver, name, err);
	if (r < 0) {
		dlclose(library);
		return r;
	}
	r = cuda_translate(cuda_driver.init(0), "cuInit", &why);
	if (r == 0)
		r = cuda_translate(cuda_driver.device_count(&devices), "cuDeviceGetCount", &why);
	if (r < 0)
		return base_error_set(err, -ENOENT, "the CUDA driver cannot be used: %s", why.text);
	if (devices == 0)
		return base_error_set(err, -ENOENT, "the CUDA driver knows no device");
	return 0;
}

int device_cuda_load(struct base_error *err)
{
	int r = 0;

	pthread_mutex_lock(&cuda_lock);
	if (!cuda_loaded)
		r = cuda_open(err);
	cuda_loaded = r == 0;
	pthread_mutex_unlock(&cuda_lock);
	return r;
}
