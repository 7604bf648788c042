/* SPDX-License-Identifier: Apache-2.0
 *
 * loader: one load of one rank, from the first declared tensor to its end (docs/load.md). core/api/load.c is the public
 * face.
 *
 *   new -> target, rename, expect, ... -> start -> wait -> free
 *
 * One thread declares and starts; any thread may call the other functions. After a fork all calls of the child return
 * -BASE_EFORKED, and free does nothing. */
#ifndef CORE_LOAD_LOADER_LOADER_H
#define CORE_LOAD_LOADER_LOADER_H

#include "core/load/exchange/exchange.h"
#include "core/tensor/description.h"

#define LOADER_THREADS_MAX 256u

/* Beside those of enum load_fill_flag. */
enum loader_flag {
	LOADER_NOT_STRICT = 1 << 2,      /* names that only one side has are no error */
	LOADER_DIRECT = 1 << 3,          /* large reads go past the page cache, ... */
	LOADER_CACHED = 1 << 4,          /* ... or never do; neither: decided by the size of the load */
};
struct loader_options {
	uint32_t rank, world;            /* of those that load at the same time; world 0: this one alone */
	uint32_t threads;                /* 0: usable processors / ranks of the node */
	uint32_t flags;
	struct comm *comm;               /* of these ranks; NULL: none. Taken from start to the end of the load */
	enum load_exchange_mode exchange;
};
struct loader;
/* `step` is the caller's until the loader is freed. */
int loader_new(struct load_step *step, const struct loader_options *o, struct loader **ret_l, struct base_error *err);
/* Stops a load that is under way, waits for its threads and for those that wait for it. NULL-safe. A load that was
 * never started breaks its communicator. */
void loader_free(struct loader *l);
const struct load_step_info *loader_step(const struct loader *l);

/* ---- what is wanted ---- */

/* Declarations after the mark are taken back by loader_cut. -EINVAL: nothing can be declared any more, since the load
 * has begun to read. All that follow here are called after a mark. */
struct loader_mark { struct load_fill_mark fill; size_t ndeclared, nlacking, nrules; };
int loader_mark(struct loader *l, struct loader_mark *ret_mark, struct base_error *err);
void loader_cut(struct loader *l, const struct loader_mark *mark);

/* As struct vckpt_target says. */
struct loader_target {
	const struct tensor_description *to;
	const char *component, *name;    /* NULL: those of the destination */
	const uint64_t *from; uint32_t from_ndim;
	const uint64_t *at;
	bool convert, resize, zero;
};
/* Checks the target and gives its boxes to the fill. err names the step and its tensor. */
int loader_target(struct loader *l, const struct loader_target *target, struct base_error *err);

/* As struct vckpt_rename says; copied. */
struct loader_rename { const char *component, *from, *to; bool anywhere; };
int loader_rename(struct loader *l, const struct loader_rename *rule, struct base_error *err);
typedef int (*loader_rename_function)(void *arg, const char *component, const char *name, char *ret_name, size_t room);
void loader_rename_by(struct loader *l, loader_rename_function f, void *arg);
int loader_stream(struct loader *l, void *stream, struct base_error *err);
void loader_expect(struct loader *l, const char *component); /* all tensors of it are to be declared */

/* ---- the load ---- */

/* -EINVAL: missing or unexpected names, or destinations that overlap. -EBUSY: the communicator is in use. */
int loader_start(struct loader *l, struct base_error *err);
/* timeout_ms < 0: for ever. -ETIMEDOUT: not over yet; else what the load came to. */
int loader_wait(struct loader *l, int64_t timeout_ms, struct base_error *err);
void loader_stop(struct loader *l); /* it ends soon; remembered, if it has not started. NULL-safe */

struct loader_progress { struct load_fill_progress bytes; struct load_fill_times times; bool over; };
int loader_progress(struct loader *l, struct loader_progress *ret_progress); /* -BASE_EFORKED */
int loader_exchanged(struct loader *l, struct load_exchange_result *ret_result); /* zeros before the end */

/* Names as the last start found them, sorted, each once: "COMPONENT/NAME", and after the NUL what the step calls the
 * tensor, or "". */
struct loader_names { char **all; size_t n, room; };
const struct loader_names *loader_missing(const struct loader *l);
const struct loader_names *loader_unexpected(const struct loader *l);

/* What did not arrive; none before the end. The strings and the box are the loader's. */
struct loader_lost { const char *component, *name; const uint64_t *box; uint32_t ndim; int code; const char *why; };
size_t loader_lost(struct loader *l, const struct loader_lost **ret_lost);

#endif
