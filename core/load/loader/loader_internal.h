/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of a loader share: loader.c (the handle and its thread), target.c (which slice goes where),
 * destination.c (what the rank has of a destination), rename.c (what the step calls a tensor), names.c (names that only
 * one side has). */
#ifndef CORE_LOAD_LOADER_LOADER_INTERNAL_H
#define CORE_LOAD_LOADER_LOADER_INTERNAL_H

#include <pthread.h>
#include <unistd.h>

#include "core/load/loader/loader.h"
#include "core/tensor/boxes.h"

enum loader_state { LOADER_OPEN, LOADER_READING, LOADER_OVER };

struct loader_rule;
struct loader {
	struct load_step *step;          /* the caller's */
	pid_t pid;                       /* that made it */
	struct loader_options options;
	bool alone_on_node;              /* no other rank of the node loads at the same time */
	struct tensor_mesh *alone;       /* of this rank only: of tensors without a mesh */
	struct load_fill *fill;          /* any thread may stop it and ask for its progress */
	uint32_t *declared; size_t ndeclared, declared_room; /* tensors of the step; a number may come again */
	struct loader_rule **rules; size_t nrules, rules_room;
	loader_rename_function renamer; void *renamer_arg;
	char *renamed;                   /* the name found last */
	void **streams; size_t nstreams, streams_room; /* on which device memory is ready */
	bool *expected;                  /* by component of the step */
	struct loader_names lacking;     /* declared, but the step lacks them */
	struct loader_names missing, unexpected;
	pthread_t thread;
	pthread_mutex_t lock;            /* protects what follows */
	pthread_cond_t changed;          /* the load is over; no thread waits any more */
	enum loader_state state;
	unsigned waiters;
	struct load_exchange *exchange;  /* NULL: without other ranks */
	int r;                           /* since it is over: what loader_wait returns */
	struct base_error error;
	struct loader_lost *lost; size_t nlost; /* made once, before it is over */
};

/* ---- destination.c ---- */

/* One description, checked, and what this rank holds of it. */
struct destination {
	const struct tensor_description *t;
	struct tensor_shape local;
	unsigned item_bytes;
	struct tensor_shard shard;
	struct tensor_boxes boxes;       /* of a description with boxes: the caller's memory */
};
int destination_of(const struct loader *l, const struct tensor_description *t, struct destination *ret_d,
	struct base_error *err);
/* Checks the memory: data, strides, local_shape. */
int destination_memory(const struct loader *l, const struct destination *d, struct base_error *err);
/* Calls f for each box that the rank holds of the window: the part of the box in the window, the address of its first
 * item, and the strides in bytes. Ends with what f returns, if that is not 0. */
int destination_walk(const struct destination *d, const struct tensor_box *window,
	int (*f)(void *arg, const struct tensor_box *part, uint8_t *data, const int64_t *stride), void *arg);

/* ---- rename.c ---- */

/* Sets *name to what the step calls it; valid until the next call. */
int rename_find(struct loader *l, const char *component, const char **name, struct base_error *err);
void rename_cut(struct loader *l, size_t n); /* to n rules */

/* ---- names.c ---- */

/* Appends "COMPONENT/NAME", and what the step calls it ("": the same). -ENOMEM. */
int names_add(struct loader_names *names, const char *component, const char *name, size_t name_len,
	const char *stored);
void names_cut(struct loader_names *names, size_t n); /* to n of them */
/* Makes l->missing and l->unexpected. -EINVAL: the load is strict and some name is in one of them. */
int names_compare(struct loader *l, struct base_error *err);

#endif
