/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of a load share: load.c (the handle, its thread), load_tensors.c (descriptions), load_names.c (which
 * names only one side has).
 *
 * What is declared stands on a tape of numbers until the load starts: for each tensor its number in the step and the
 * number of its boxes; for each box the address of its first item, and then offsets, sizes and strides of the tensor's
 * dimensions. So a call that fails takes back what it declared by cutting the tape. */
#ifndef CORE_API_API_LOAD_INTERNAL_H
#define CORE_API_API_LOAD_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "core/api/api_internal.h"
#include "core/load/fill.h"

struct load_names { char **all; size_t n, room; };

enum load_state { LOAD_OPEN, LOAD_READING, LOAD_OVER };

struct vckpt_load {
	struct vckpt_step *step;
	pid_t pid;                       /* that began it */
	uint32_t rank, threads, flags;
	bool alone_on_node;              /* no other rank of the node loads at the same time */
	struct tensor_mesh *alone;       /* of this rank only: of tensors without a mesh */
	uint64_t *tape; size_t ntape, tape_room;
	bool *expected;                  /* by component of the step */
	struct load_names lacking;       /* declared, but the step lacks them */
	struct load_names missing, unexpected; /* as the last start found them: sorted, each once */
	uint32_t *tensors;               /* of the step, by box of `fill` */
	pthread_t thread;
	pthread_mutex_t lock;            /* protects what follows */
	pthread_cond_t changed;          /* the load is over; nobody waits any more */
	enum load_state state;
	bool stopped;
	unsigned waiters;
	struct load_fill *fill;          /* since it reads; its own functions may be called without the lock */
	int r;                           /* since it is over: what load_wait says */
	struct base_error error;
	struct vckpt_load_lost *lost; size_t nlost; /* made once, before it is over */
};

/* Checks the description, and appends to the tape where the rank has what of the tensor. */
int load_declare(struct vckpt_load *load, const struct vckpt_tensor *t, struct base_error *err);
/* Adds all that is on the tape to load->fill, and notes load->tensors. */
int load_fill_tape(struct vckpt_load *load, struct base_error *err);

/* Appends "COMPONENT/NAME"; -ENOMEM. */
int load_names_add(struct load_names *names, const char *component, const char *name, size_t name_len);
void load_names_cut(struct load_names *names, size_t n); /* to n of them */
/* Makes load->missing and load->unexpected; -EINVAL, if the load is strict and some name is in one of them. */
int load_names_compare(struct vckpt_load *load, struct base_error *err);

#endif
