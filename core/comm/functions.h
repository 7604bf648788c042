/* SPDX-License-Identifier: Apache-2.0
 *
 * functions: a communicator whose bytes the caller's functions carry: a process group of torch, or whatever a trainer
 * has between its ranks already. The functions have their own rules about threads: gather, start and finish are called
 * by one thread at a time, which is not the one that made the communicator. */
#ifndef CORE_COMM_FUNCTIONS_H
#define CORE_COMM_FUNCTIONS_H

#include "core/comm/comm.h"

/* As struct vckpt_comm_functions says. */
struct comm_functions {
	size_t size;
	void *arg;
	int (*gather)(void *arg, const void *mine, const uint64_t *lens, void *ret_all, uint32_t timeout_ms);
	int (*start)(void *arg, const struct comm_pass *pass, void **ret_request);
	int (*finish)(void *arg, const struct comm_pass *pass, void *request, uint32_t timeout_ms);
	void (*abort)(void *arg, const char *why);
	void (*free)(void *arg);
};

/* `f` is copied. After an error f->free has not been called. */
int comm_functions_new(const struct comm_functions *f, uint32_t rank, uint32_t size, uint32_t timeout_ms,
	struct comm **ret_comm, struct base_error *err);

#endif
