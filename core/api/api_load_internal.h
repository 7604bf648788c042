/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of a load share: load.c (the handle, its thread), load_tensors.c (descriptions), load_target.c (which
 * slice goes where), load_tape.c (what was declared), load_rename.c (what the step
 * calls a tensor), load_names.c (which names only one side has). */
#ifndef CORE_API_API_LOAD_INTERNAL_H
#define CORE_API_API_LOAD_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "core/api/api_comm_internal.h"
#include "core/load/exchange/exchange.h"
#include "core/tensor/boxes.h"
#include "core/tensor/shard.h"

/* Each string is "COMPONENT/NAME", and behind its end a second one: what the step would call it, or "". */
struct load_names { char **all; size_t n, room; };

struct load_rule;
struct load_renames {
	struct load_rule **rules; size_t n, rules_room;
	int (*function)(void *arg, const char *component, const char *name, char *ret_name, size_t room); void *arg;
	char *room;                      /* the name found last */
};

enum load_state { LOAD_OPEN, LOAD_READING, LOAD_OVER };

struct vckpt_load {
	struct vckpt_step *step;
	pid_t pid;                       /* that began it */
	uint32_t rank, threads, flags;
	bool alone_on_node;              /* no other rank of the node loads at the same time */
	struct vckpt_comm *comm; uint32_t exchange; /* NULL: no other ranks */
	struct tensor_mesh *alone;       /* of this rank only: of tensors without a mesh */
	uint64_t *tape; size_t ntape, tape_room;
	struct load_renames renames;
	void **streams; size_t nstreams, streams_room; /* on which device memory is ready */
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
	struct load_exchange *shared;    /* NULL: without other ranks */
	struct load_fill *fill;          /* since it reads; its own functions may be called without the lock */
	int r;                           /* since it is over: what load_wait says */
	struct base_error error;
	struct vckpt_load_lost *lost; size_t nlost; /* made once, before it is over */
};

/* ---- load_tensors.c ---- */
/* One description: what the rank has of a destination. */
struct load_holding {
	const struct vckpt_tensor *t;
	struct tensor_shape shape, local;
	unsigned item_bytes;
	struct tensor_shard shard;
	struct tensor_boxes boxes;       /* with VCKPT_TENSOR_BOXES: the caller's memory */
};
int load_holding_of(const struct vckpt_load *load, const struct vckpt_tensor *t, struct load_holding *ret_h,
	struct base_error *err);
/* The memory: data, strides, local_shape. */
int load_holding_memory(const struct vckpt_load *load, const struct load_holding *h, struct base_error *err);

/* ---- load_target.c ---- */
/* Which stored items the items of a box of the destination are. */
struct load_slice {
	struct tensor_box window;        /* of the destination: what the step has of it */
	uint32_t ndim;                   /* of the stored tensor */
	uint32_t dim[TENSOR_MAX_DIMS];   /* by stored dimension: the destination's, or TENSOR_MAX_DIMS: one index */
	uint64_t from[TENSOR_MAX_DIMS];  /* the stored item of the window's first */
};
/* Checks the target, number `number` of its call, and appends to the tape which stored boxes go where. */
int load_declare(struct vckpt_load *load, const struct vckpt_target *target, size_t number, struct base_error *err);

/* ---- load_tape.c ---- */
/* What is declared stands on a tape of numbers until the load starts, so that a call that fails takes back what it
 * declared by cutting the tape. An entry has a head: the tensor's number in the step, the number of boxes, the number
 * of their dimensions, and what kind of memory it is. Then each box: the address of its first item, and offsets, sizes
 * and strides. */
#define LOAD_TAPE_HEAD 4u
enum { LOAD_TAPE_DTYPE = 0xff /* of the memory */, LOAD_TAPE_ZEROS = 1 << 8, LOAD_TAPE_DEVICE = 1 << 9 };
struct load_entry { const uint64_t *head; uint64_t tensor, nboxes; uint32_t ndim, kind; };
static inline size_t load_box_words(uint32_t ndim) { return 1 + 3 * (size_t)ndim; }
/* Reads the entry at *at and moves on to the next; false: the end. Its boxes follow its head. */
bool load_tape_next(const struct vckpt_load *load, size_t *at, struct load_entry *ret_entry);
/* Appends what the rank holds of the slice's window, in coordinates of stored tensor `tensor`. -ENOMEM. */
int load_tape_slice(struct vckpt_load *load, uint32_t tensor, const struct load_holding *h,
	const struct load_slice *slice);
/* Appends what the rank holds outside of the window, to be zeroed. -ENOMEM. */
int load_tape_rest(struct vckpt_load *load, uint32_t tensor, const struct load_holding *h,
	const struct tensor_box *window);
/* Adds all that is on the tape to load->fill, and notes load->tensors. */
int load_fill_tape(struct vckpt_load *load, struct base_error *err);

/* ---- load_names.c ---- */
/* Appends "COMPONENT/NAME", and what the step calls it ("": the same); -ENOMEM. */
int load_names_add(struct load_names *names, const char *component, const char *name, size_t name_len,
	const char *stored);
void load_names_cut(struct load_names *names, size_t n); /* to n of them */
/* Makes load->missing and load->unexpected; -EINVAL, if the load is strict and some name is in one of them. */
int load_names_compare(struct vckpt_load *load, struct base_error *err);

/* ---- load_rename.c ---- */
int load_rename_add(struct vckpt_load *load, const struct vckpt_rename *rules, size_t n, struct base_error *err);
/* Sets *name to what the step calls it; valid until the next call. */
int load_renamed(struct vckpt_load *load, const char *component, const char **name, struct base_error *err);
void load_renames_release(struct load_renames *names);

/* ---- load_overlap.c ---- */
/* -EINVAL names two tensors on the tape whose destinations share a byte. */
int load_overlap_check(const struct vckpt_load *load, struct base_error *err);

#endif
