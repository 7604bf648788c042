/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt_load: all that a rank holds of a step, in one go. A part of vckpt.h, which includes it.
 *
 *   step_open -> load_begin -> load_tensors, load_expect, ... -> load_start -> load_wait -> load_free
 * A load takes the descriptions of tensors that a save takes. It reads each block of the step that is wanted once,
 * checks it, decodes it, and writes it where the descriptions say that the rank has it.
 *
 * Any thread may call any function, but begin, tensors, expect and start of one load come from one thread at a time,
 * and no call comes after vckpt_load_free. In a child after a fork calls answer -VCKPT_EFORKED, and stop and free do
 * nothing. */
#ifndef VCKPT_LOAD_H
#define VCKPT_LOAD_H

#include <stddef.h>
#include <stdint.h>

#include "vckpt_comm.h"                  /* what carries bytes between the ranks of a load */

#ifdef __cplusplus
extern "C" {
#endif

struct vckpt_blob_info;
struct vckpt_error;
struct vckpt_step;
struct vckpt_tensor;

enum {
	VCKPT_LOAD_REHASH = 1 << 0,      /* reads whole pieces, and compares their SHA-256 as well */
	VCKPT_LOAD_SKIP_DAMAGED = 1 << 1, /* what cannot be read is listed (vckpt_load_lost), and the rest arrives */
	VCKPT_LOAD_NOT_STRICT = 1 << 2,  /* names that only one side has are no error; both lists come back */
	/* Neither of these two: a load of 1 GiB and more does so if no other rank of the node loads beside it. */
	VCKPT_LOAD_DIRECT = 1 << 3,      /* what the page cache lacks is read past it, where the file system can */
	VCKPT_LOAD_CACHED = 1 << 4,      /* every read goes through the page cache */
};
struct vckpt_load;
struct vckpt_load_options {
	size_t size;                     /* sizeof (struct vckpt_load_options) */
	uint32_t rank;                   /* whose shards the descriptions are about */
	uint32_t threads;                /* at most 256; 0: usable processors / ranks of the node (docs/load.md) */
	uint32_t flags;
	uint32_t world;                  /* ranks that load at the same time; 0: this one alone */
	/* A version of this struct ended here; its size is accepted. */
	struct vckpt_comm *comm;         /* of these ranks; NULL: this one reads all it needs. See below */
	uint32_t exchange, reserved;     /* VCKPT_EXCHANGE_... */
};
/* With a communicator, all its ranks have to begin and start such a load: of the same step, with the same flags and
 * exchange. What several of them want is read by one and passed on (docs/load.md, "Exchange"): always, never, or where
 * a short measurement says that it pays. The load succeeds at all ranks or fails at all, with the sentence of a rank
 * that failed. A load that is freed without a start breaks its communicator, so that nobody waits for it. */
enum { VCKPT_EXCHANGE_AUTO, VCKPT_EXCHANGE_NEVER, VCKPT_EXCHANGE_ALWAYS };
/* Begins a load of an open step. The step must stay open until vckpt_load_free: to close it before is a mistake that
 * nothing here can see. o may be NULL: rank 0. */
int vckpt_load_begin(struct vckpt_step *step, const struct vckpt_load_options *o, struct vckpt_load **ret_load,
	struct vckpt_error *err);
/* Declares n tensors, each described as for vckpt_save_tensors: component, name, dtype, shape; mesh and placements
 * (mesh NULL: the rank has all of it), flat range, boxes or VCKPT_TENSOR_ALONE; strides and local_shape, which is
 * compared. `data` is written: it must stay the load's until load_wait has told the end, and no two tensors may share a
 * byte of it. Bytes that the description does not name stay as they are. Strides must be positive, and no two items may
 * share a byte. same_dims and VCKPT_TENSOR_BUFFER have no effect. With VCKPT_TENSOR_DEVICE data is
 * memory of a CUDA device (vckpt_load_stream). Checked now: shape
 * and dtype must be the step's. The same tensor may be declared several times. One that the step lacks is missing:
 * load_start names it. After an error the load holds what it held before. */
int vckpt_load_tensors(struct vckpt_load *load, const struct vckpt_tensor *tensors, size_t n, struct vckpt_error *err);
/* Device memory may still be in use when load_start is called: what this CUstream (NULL: the default stream of each
 * context) has been given until then is finished before the memory is written. May be called for several streams;
 * without any it is the default streams. load_start must come from a thread of the program that uses them; it fails
 * with -ENOENT where there is no CUDA driver, with -EBUSY where a stream is being captured into a graph. When load_wait
 * has told the end every stream may use the memory. */
int vckpt_load_stream(struct vckpt_load *load, void *stream, struct vckpt_error *err);
/* Says that the load is meant to take all tensors of a component: those that are not declared are unexpected. */
int vckpt_load_expect(struct vckpt_load *load, const char *component, struct vckpt_error *err);
/* Begins to read, in threads of the load's own, and returns at once. -EINVAL: missing or unexpected names (the sentence
 * tells up to ten of each), unless VCKPT_LOAD_NOT_STRICT; destinations that overlap (two of them are named; the search
 * ends after 2^24 steps, which only strides that nearly agree make up); or the load has begun to read before. -EBUSY:
 * the communicator serves another load. */
int vckpt_load_start(struct vckpt_load *load, struct vckpt_error *err);
/* timeout_ms < 0: waits for ever. 0: everything has arrived, but what vckpt_load_lost lists. -VCKPT_ETIMEDOUT: not yet.
 * Else the load is over, and nothing in the destinations is to be used; of several damaged pieces the first by pack and
 * offset is named. */
int vckpt_load_wait(struct vckpt_load *load, int64_t timeout_ms, struct vckpt_error *err);
/* The blocking form: starts, and waits for the end. */
int vckpt_load_run(struct vckpt_load *load, struct vckpt_error *err);
/* Ends the load soon: load_wait says -VCKPT_EABORTED, unless it was over before. NULL-safe. */
void vckpt_load_stop(struct vckpt_load *load);
struct vckpt_load_progress {
	uint64_t bytes_wanted, bytes_placed; /* of the destinations, in the step's dtype; 0 before load_start */
	uint64_t bytes_read, pieces;     /* from packs, checks included; pieces that are done */
	uint64_t open_ns, plan_ns, read_ns; /* open: rows of the tensors; 0 before the end */
	uint32_t threads, over;          /* threads: that read, 0 before the end; over: 1 after the end */
};
int vckpt_load_progress(struct vckpt_load *load, struct vckpt_load_progress *ret_progress);
/* Names "COMPONENT/NAME", sorted, that only the caller (missing) or only the step (unexpected) has. As load_start found
 * them, also where it failed; the array is valid until the next load_start or load_free. */
size_t vckpt_load_missing(const struct vckpt_load *load, const char *const **ret_names);
size_t vckpt_load_unexpected(const struct vckpt_load *load, const char *const **ret_names);
/* With VCKPT_LOAD_SKIP_DAMAGED, after load_wait has told the end: what did not arrive. Its place holds anything. Points
 * into the load; `box` has ndim pairs (offset, size) in the tensor; `why` is a sentence. Two may overlap where a tensor
 * was declared twice. */
struct vckpt_load_lost {
	const char *component, *name; const uint64_t *box; uint32_t ndim; int32_t code; const char *why;
};
size_t vckpt_load_lost_count(const struct vckpt_load *load); /* 0 before the end */
int vckpt_load_lost(const struct vckpt_load *load, size_t i, struct vckpt_load_lost *ret_lost); /* -ENOENT */
/* What a load with a communicator did, after load_wait has told the end; zeros before, and without a communicator. */
struct vckpt_load_exchange {
	size_t size;                     /* sizeof (struct vckpt_load_exchange), set by the caller */
	uint32_t chosen, ranks;          /* VCKPT_EXCHANGE_NEVER or _ALWAYS; _AUTO: it did not get so far */
	uint64_t bytes_sent, bytes_got;  /* buckets that this rank read for others, and that it got; decoded bytes */
	uint64_t bytes_shared, bytes_wanted; /* of all ranks: what several want, once; and as often as it is wanted */
	const char *why;                 /* why it was chosen, in a sentence; the load's */
};
int vckpt_load_exchanged(struct vckpt_load *load, struct vckpt_load_exchange *ret_exchange);
/* Stops a load that is under way, waits for its threads and for calls that wait for it, and frees it. NULL-safe. */
void vckpt_load_free(struct vckpt_load *load);

/* ---- what is in a step ---- */
/* Which commit an open step is: its entry in the run's list, and the digest of its manifest, which names all data. A
 * number is not enough for several ranks to open the same: a step may be replaced, and a newer one appear, between two
 * looks. One rank opens a step and sends these bytes to the others; they open that commit, or fail. It may have been
 * removed or replaced since: it opens as long as the collector has left its data, which is the grace period at least.
 * -ENOENT: that entry is missing here, or another commit. */
struct vckpt_commit { uint64_t step, entry; uint8_t manifest[32]; };
void vckpt_step_commit(const struct vckpt_step *step, struct vckpt_commit *ret_commit);
int vckpt_step_open_commit(const char *store, const char *run, const struct vckpt_commit *commit,
	struct vckpt_step **ret_step, struct vckpt_error *err);
/* The number of the newest visible step of a run. -ENOENT: there is no such run, or it has no step. */
int vckpt_run_latest(const char *store, const char *run, uint64_t *ret_step, struct vckpt_error *err);
/* A component that has tensors: they have the numbers first .. first + count - 1, sorted by name, and so many bytes. */
struct vckpt_component_info { const char *name; uint32_t first, count; uint64_t bytes; };
uint32_t vckpt_step_component_count(const struct vckpt_step *step);
int vckpt_step_component(const struct vckpt_step *step, uint32_t component,
	struct vckpt_component_info *ret_info); /* -ENOENT; points into the step */
/* The number of the first blob from number `from` on whose name begins with "COMPONENT/" (NULL: of any name). Global
 * blobs come first, by name, then those of each rank. -ENOENT: there is no more. It reads of each rank, once. */
int64_t vckpt_step_next_blob(struct vckpt_step *step, const char *component, uint32_t from, struct vckpt_error *err);
/* Looks before memory is taken for a blob: -ENOMEM if this process could not allocate its bytes now; of a long one
 * reads the first and the last bytes. */
int vckpt_step_blob_look(struct vckpt_step *step, uint32_t blob, struct vckpt_error *err);
/* A blob by its name. rank: whose own it is, -1: no rank's. Something of the rank that has it is read, and not of all
 * ranks, where the step's manifest says which rank that is. find: 1: *ret_info is set, and a long blob was looked at;
 * 0: there is none. get: -ENOENT. */
int vckpt_step_blob_find(struct vckpt_step *step, const char *name, int64_t rank, struct vckpt_blob_info *ret_info,
	struct vckpt_error *err);
int vckpt_step_blob_get(struct vckpt_step *step, const char *name, int64_t rank, void *bytes, struct vckpt_error *err);
/* 1: *ret_rank is the first rank from `from` on that has one of its own of that name; 0: none has. */
int vckpt_step_blob_rank(struct vckpt_step *step, const char *name, uint32_t from, uint32_t *ret_rank,
	struct vckpt_error *err);
/* The digest of a tensor of an open step, 32 bytes. Tensors of one store with equal digests have equal dtypes, shapes
 * and bytes; with equal bytes they may have different digests if ranks cut them differently. It reads where the pieces
 * of the tensor lie, not the pieces. -ENOENT: there is no such tensor. */
int vckpt_step_digest(struct vckpt_step *step, uint32_t tensor, uint8_t *ret_digest, struct vckpt_error *err);

#ifdef __cplusplus
}
#endif
#endif
