/* SPDX-License-Identifier: Apache-2.0
 *
 * The handle of a communicator, which comm.c makes and load.c takes. */
#ifndef CORE_API_API_COMM_INTERNAL_H
#define CORE_API_API_COMM_INTERNAL_H

#include "core/api/api_internal.h"
#include "core/comm/comm.h"

struct vckpt_comm {
	struct comm *comm;
	pid_t pid;                       /* that made it */
	struct vckpt_comm *base;         /* that this one has taken; or NULL */
};
/* Takes it for one call (comm_take), which gives it back (comm_give). -EINVAL: NULL; -BASE_EFORKED; -EBUSY. */
int api_comm_take(struct vckpt_comm *comm, struct base_error *err);
/* -BASE_EFORKED in a child of the process that made it. */
int api_comm_alive(const struct vckpt_comm *comm, struct base_error *err);

#endif
