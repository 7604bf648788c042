/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl library: opened when it is first needed, and stays. Where torch is loaded, it is torch's own: dlopen finds a
 * library that the process has by its name.
 *
 * NCCL's calls wait for other ranks without a time-out, unless a communicator is non-blocking; ours are. Three calls
 * may wait all the same: a split of the caller's communicator, which may be a blocking one; and abort and destroy,
 * which in some versions wait for the device. These are made by threads that may be left behind. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "core/base/clock.h"
#include "core/base/pool.h"
#include "core/comm/nccl_internal.h"
#include "core/device/cuda.h"

#define NCCL_LIBRARY "libnccl.so.2"
#define NCCL_LIBRARY_ENV "VCKPT_LIBNCCL"

struct nccl_library nccl;
static pthread_mutex_t nccl_lock = PTHREAD_MUTEX_INITIALIZER; /* protects the next, and nccl until loaded */
static bool nccl_loaded;

static int nccl_errno(nccl_result r)
{
	switch (r) {
	case NCCL_INVALID_ARGUMENT:
	case NCCL_INVALID_USAGE: return -EINVAL;
	case NCCL_REMOTE_ERROR: return -ECONNRESET;
	default: return -EIO;
	}
}

int nccl_translate(nccl_result r, const char *what, struct base_error *err)
{
	const char *text;

	if (r == NCCL_SUCCESS || r == NCCL_IN_PROGRESS)
		return 0;
	text = nccl.error_string(r);
	return base_error_set(err, nccl_errno(r), "%s: %s", what, text ? text : "an error that NCCL has no words for");
}

static int nccl_find_symbols(void *library, const char *name, struct base_error *err)
{
	const char *missing = NULL;

#define NCCL_FIND(member, symbol, arguments)                                                           \
	*(void **)&nccl.member = dlsym(library, #symbol);                                              \
	missing = nccl.member ? missing : #symbol;
	NCCL_FUNCTIONS(NCCL_FIND)
#undef NCCL_FIND
	*(void **)&nccl.split = dlsym(library, "ncclCommSplit");
	*(void **)&nccl.error_string = dlsym(library, "ncclGetErrorString");
	missing = nccl.error_string ? missing : "ncclGetErrorString";
	if (missing)
		return base_error_set(err, -ENOENT, "the NCCL library %s has no %s: NCCL 2.14 or later is needed", name,
			missing);
	return 0;
}

/* Called with the lock held. */
static int nccl_open(struct base_error *err)
{
	const char *name = secure_getenv(NCCL_LIBRARY_ENV);
	void *library;
	int r;

	name = name && *name ? name : NCCL_LIBRARY;
	library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return base_error_set(err, -ENOENT, "no NCCL: %s (install it, or set " NCCL_LIBRARY_ENV " to the path "
			"of " NCCL_LIBRARY ")", dlerror());
	r = nccl_find_symbols(library, name, err);
	if (r < 0)
		dlclose(library);
	return r;
}

int nccl_load(struct base_error *err)
{
	int r = device_cuda_load(err);

	if (r < 0)
		return r;
	pthread_mutex_lock(&nccl_lock);
	if (!nccl_loaded)
		r = nccl_open(err);
	nccl_loaded = r == 0;
	pthread_mutex_unlock(&nccl_lock);
	return r;
}

/* ---- calls that may wait ---- */

enum nccl_kind { NCCL_SPLIT, NCCL_ABORT, NCCL_DESTROY };
struct nccl_call {
	enum nccl_kind kind;
	nccl_comm comm, child;           /* child: what a split gives */
	int rank;
	pthread_mutex_t lock;            /* protects what follows */
	nccl_result answer;
	bool done, left;
	pthread_cond_t changed;
};

static void nccl_call_free(struct nccl_call *call)
{
	pthread_mutex_destroy(&call->lock);
	pthread_cond_destroy(&call->changed);
	free(call);
}

/* Where the parent does not block, NCCL sets the child when it is done, which the parent knows. */
static nccl_result nccl_call_split(struct nccl_call *call)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	nccl_config config = NCCL_CONFIG_NONBLOCKING;
	nccl_result answer = nccl.split(call->comm, 0, call->rank, &call->child, &config), asked;

	while (answer == NCCL_IN_PROGRESS) {
		nanosleep(&pause, NULL);
		asked = nccl.async_error(call->comm, &answer);
		answer = asked == NCCL_SUCCESS ? answer : asked;
	}
	return answer;
}

static void *nccl_call_main(void *arg)
{
	struct nccl_call *call = arg;
	nccl_result answer = call->kind == NCCL_SPLIT ? nccl_call_split(call) :
		call->kind == NCCL_ABORT ? nccl.abort(call->comm) : nccl.destroy(call->comm);
	bool left;

	pthread_mutex_lock(&call->lock);
	call->answer = answer;
	call->done = true;
	left = call->left;
	pthread_cond_signal(&call->changed);
	pthread_mutex_unlock(&call->lock);
	if (left && call->child)
		nccl.abort(call->child);
	if (left)
		nccl_call_free(call);
	return NULL;
}

static struct nccl_call *nccl_call_new(enum nccl_kind kind, nccl_comm comm, int rank)
{
	struct nccl_call *call = calloc(1, sizeof *call);
	pthread_condattr_t attributes;

	if (!call)
		return NULL;
	*call = (struct nccl_call){.kind = kind, .comm = comm, .rank = rank};
	pthread_mutex_init(&call->lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&call->changed, &attributes);
	pthread_condattr_destroy(&attributes);
	return call;
}

/* Frees the call, or leaves it to its thread. */
static int nccl_call_within(unsigned timeout_ms, struct nccl_call *call, const char *what, nccl_comm *ret_child,
	struct base_error *err)
{
	struct timespec until = base_clock_in_ms(CLOCK_MONOTONIC, timeout_ms);
	pthread_t thread;
	bool done;
	int r;

	if (!call)
		return base_no_memory(err);
	r = base_thread_start(&thread, nccl_call_main, call);
	if (r < 0) {
		nccl_call_free(call);
		return base_error_set(err, r, "%s: no thread can be started", what);
	}
	pthread_mutex_lock(&call->lock);
	while (!call->done && pthread_cond_timedwait(&call->changed, &call->lock, &until) == 0)
		;
	done = call->done;
	call->left = !done;
	pthread_mutex_unlock(&call->lock);
	if (!done) {
		pthread_detach(thread);
		return base_error_set(err, -ETIMEDOUT, "%s did not return within %u ms", what, timeout_ms);
	}
	pthread_join(thread, NULL);
	if (ret_child)
		*ret_child = call->child;
	r = nccl_translate(call->answer, what, err);
	nccl_call_free(call);
	return r;
}

int nccl_split_within(unsigned timeout_ms, nccl_comm parent, int rank, nccl_comm *ret_c, struct base_error *err)
{
	return nccl_call_within(timeout_ms, nccl_call_new(NCCL_SPLIT, parent, rank), "ncclCommSplit", ret_c, err);
}

int nccl_abort_within(unsigned timeout_ms, nccl_comm c, struct base_error *err)
{
	return nccl_call_within(timeout_ms, nccl_call_new(NCCL_ABORT, c, 0), "ncclCommAbort", NULL, err);
}

int nccl_destroy_within(unsigned timeout_ms, nccl_comm c, struct base_error *err)
{
	return nccl_call_within(timeout_ms, nccl_call_new(NCCL_DESTROY, c, 0), "ncclCommDestroy", NULL, err);
}
