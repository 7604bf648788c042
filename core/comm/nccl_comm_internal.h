/* SPDX-License-Identifier: Apache-2.0
 *
 * A communicator over NCCL, between nccl.c (gathers, passes) and nccl_begin.c (its begin and its end). */
#ifndef CORE_COMM_NCCL_COMM_INTERNAL_H
#define CORE_COMM_NCCL_COMM_INTERNAL_H

#include "core/comm/nccl.h"
#include "core/comm/nccl_internal.h"
#include "core/device/cuda.h"

struct nccl_memory {                     /* pinned */
	uint8_t *bytes;
	size_t len;
	struct device_registration *registration;
};

/* A pass on its way, or room for one. */
struct nccl_flight {
	struct nccl_flight *next;        /* that is free, too */
	struct nccl_flight *older;       /* of all */
	struct device_event *event;      /* it has come, or may be used again */
	struct nccl_memory memory;       /* for what comes; none in those of an owner */
};

struct nccl_transport {
	struct comm c;
	struct comm *base;               /* the caller's, for strings; NULL: NCCL gathers them */
	nccl_comm comm;                  /* NULL: none yet, or aborted */
	nccl_comm starting;              /* set while NCCL makes it, by threads of NCCL's, too */
	bool stuck;                      /* a call of NCCL's never returned: everything has to stay */
	struct device_fence *fence;      /* names the context */
	struct device_stream *stream;
	struct nccl_memory rooms, strings;
	struct device_event *gathered;
	struct nccl_flight *all;
	struct nccl_flight *sends, *receives; /* free ones; protected by the lock */
	pthread_mutex_t lock;
};

extern const struct comm_ops nccl_ops;

/* Waits until the event has come, or (NULL) until NCCL has taken what it was given last. In the stream's context or
 * not. */
int nccl_wait(struct nccl_transport *t, struct device_event *event, const char *what, struct base_error *err);
int nccl_memory_new(struct nccl_transport *t, size_t bytes, struct nccl_memory *ret_m, struct base_error *err);
void nccl_memory_free(struct nccl_memory *m);
void nccl_give_up(struct nccl_transport *t); /* aborts the communicator, so that the device is idle */
void nccl_end(struct comm *c);

#endif
