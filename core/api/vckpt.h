/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt: the public interface of libvckpt: saving the steps of a training run from its ranks, and reading steps back.
 *
 * A saver belongs to one rank and lives for a whole training run. Each rank of a job (threads, processes or hosts)
 * opens one with the same launch id and saves the same steps as all others; nobody sends a message. A save takes the
 * shards that the rank holds, copies them into a ring of (pinned or locked) memory, and from then on works in the
 * background: digest, encode, write, commit. The step appears whole or not at all.
 *
 *   saver_open -> save_begin -> save_tensors, save_blob, ... -> save_submit -> wait_staged -> wait_committed -> close
 * Functions return 0 or a positive result, or a negative errno, and fill `err` (NULL: nothing) with one sentence that
 * names the thing at fault. Strings are UTF-8 and NUL-terminated; what a call is given is copied unless it says
 * otherwise. Structs that callers fill begin with their size, so that later versions can add to them: zero them first.
 * Threads: any thread may call any function; calls on one saver or save may run side by side, but begin, tensors, blob
 * and submit of one save come from one thread at a time. After a fork the child's calls answer -VCKPT_EFORKED and
 * touch nothing. Words: docs/glossary.md; how a save runs: docs/save.md; layouts: docs/layouts.md. */
#ifndef VCKPT_H
#define VCKPT_H

#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define VCKPT_NONE UINT64_MAX            /* no step given: the next one (a save), the newest one (a read) */

/* -EINVAL, -ENOMEM, -ENOENT, -EEXIST, -ENOSPC, -EIO ... mean what errno(3) says; these have one meaning here: */
enum {
	VCKPT_EDAMAGED = 74,             /* EBADMSG: stored bytes do not match their check or digest */
	VCKPT_EFORMAT = 71,              /* EPROTO: a record breaks its format; a step's boxes do not cover a tensor */
	VCKPT_EVERSION = 93,             /* EPROTONOSUPPORT: a newer format version or unknown required feature */
	VCKPT_ENOSTORE = 124,            /* EMEDIUMTYPE: the directory is not a store */
	VCKPT_EABORTED = 125,            /* ECANCELED: this rank or another gave the save up; the text says why */
	VCKPT_EUNDECIDED = 115,          /* EINPROGRESS: the store failed this rank; others may still commit */
	VCKPT_ETIMEDOUT = 110,           /* not decided within the time-out: call again */
	VCKPT_EFORKED = 10,              /* ECHILD: this process is a child of the one that opened it */
};
struct vckpt_error { int code; char text[1000]; };
const char *vckpt_version(void);
enum vckpt_dtype {                       /* the numbers are those of docs/format/layout.md */
	VCKPT_BOOL = 1, VCKPT_U8, VCKPT_U16, VCKPT_U32, VCKPT_U64, VCKPT_I8, VCKPT_I16, VCKPT_I32, VCKPT_I64, VCKPT_F16,
	VCKPT_BF16, VCKPT_F32, VCKPT_F64, VCKPT_C64, VCKPT_C128, VCKPT_F8_E4M3FN, VCKPT_F8_E5M2, VCKPT_F8_E4M3FNUZ,
	VCKPT_F8_E5M2FNUZ, VCKPT_F8_E8M0FNU, VCKPT_F4_E2M1FN_X2 /* counts pairs, a byte each */
};

/* ---- meshes ---- */
struct vckpt_mesh;
/* "dp=2,tp=4", outermost first, over `ranks` in row-major order (NULL: 0, 1, ...). Read-only, any thread. */
int vckpt_mesh_new(const char *text, const uint32_t *ranks, uint32_t nranks, struct vckpt_mesh **ret_mesh,
	struct vckpt_error *err);
void vckpt_mesh_free(struct vckpt_mesh *mesh); /* NULL-safe; savers and saves keep what they need */

/* ---- stores ---- */
int vckpt_store_init(const char *path, struct vckpt_error *err); /* -EEXIST: it is one; -EINVAL: in another */
int vckpt_store_check(const char *path, struct vckpt_error *err); /* 0: a store that opens; -VCKPT_ENOSTORE ... */
/* Visible steps of a run, ascending; free() the array. -ENOENT: no such run. */
int vckpt_run_steps(const char *store, const char *run, uint64_t **ret_steps, size_t *ret_n, struct vckpt_error *err);

/* ---- saving ---- */
enum { VCKPT_PIN_AUTO, VCKPT_PIN_NO, VCKPT_PIN_YES /* fails where memory cannot be pinned or locked */,
	VCKPT_PIN_ALLOCATE /* as AUTO, but the CUDA driver allocates it: where registering is slow */ };
enum { VCKPT_REPLICAS_SAMPLE, VCKPT_REPLICAS_FULL, VCKPT_REPLICAS_OFF };
enum {
	VCKPT_SAVER_LOW_PRIORITY = 1 << 0, /* threads that do not copy: nice 19, idle class of I/O */
	VCKPT_SAVER_NO_BASES = 1 << 1,   /* recognise nothing of earlier steps */
	VCKPT_SAVER_KEEP_CACHED = 1 << 2, /* what is written stays in the page cache, for who reads it here at once */
};
struct vckpt_saver;
struct vckpt_saver_options {
	size_t size;                     /* sizeof (struct vckpt_saver_options) */
	const char *store, *run;
	const char *launch_id;           /* shared by all ranks, new at every start; may be NULL if world is 1 */
	uint32_t rank, world;
	const struct vckpt_mesh *mesh;   /* of tensors that name none: they are replicated over it. NULL: all ranks */
	uint64_t heartbeat_ms, start_ms; /* 0: 20 s, 60 s; a store that fails is asked again for start_ms */
	uint64_t ring_bytes;             /* 0: one whole save, grows; at most half of free memory / ranks of the node */
	int pin, check_replicas;
	uint32_t threads, flags;         /* threads 0: usable cores / ranks of the node (docs/save.md) */
	const char *ignored;             /* was the directory of a cache of plans, which stay in memory now */
	uint64_t deadline_ms;            /* how long the committing rank, having announced its own part, waits for that
	                                    of a rank that lives; then it aborts the save. 0: no limit */
};
/* Shows a heartbeat and meets the other ranks: rank 0 appends the launch entry, the others wait for it. Blocks. */
int vckpt_saver_open(const struct vckpt_saver_options *o, struct vckpt_saver **ret_saver, struct vckpt_error *err);
/* Waits until every save is decided and ends the threads. 0, or the error of the first failed save whose error no call
 * has returned. A second call does nothing. Existing saves can still be queried; vckpt_save_begin fails. */
int vckpt_saver_close(struct vckpt_saver *saver, struct vckpt_error *err);
void vckpt_saver_free(struct vckpt_saver *saver); /* closes; NULL-safe */
enum {
	VCKPT_TENSOR_DEVICE = 1 << 0,    /* data is CUDA device memory, of any device and context */
	VCKPT_TENSOR_BUFFER = 1 << 1,    /* may differ between replicas: the group's first rank's counts */
	VCKPT_TENSOR_BOXES = 1 << 2,     /* this rank holds `boxes` (placements must be NULL). More boxes of the
	                                    same tensor may be given by more entries of its name */
	VCKPT_TENSOR_ALONE = 1 << 3,     /* this rank alone holds it, whole (mesh must be NULL) */
};
struct vckpt_tensor {
	const char *component, *name;
	const uint64_t *shape;           /* logical, unsharded; ndim of them */
	const struct vckpt_mesh *mesh;   /* NULL: the saver's */
	const char *placements;          /* a word for each dimension of the mesh, "R,S(0)"; NULL: replicated */
	const uint64_t *flat;            /* from, to, len: items of the flattened local tensor; len 0: not padded */
	const uint64_t *boxes;           /* nboxes * ndim pairs (offset, size), disjoint, one after another in data */
	const char *same_dims;           /* flat or boxes: mesh dimensions along which ranks hold the same, "dp" */
	const void *data;                /* the first item of the local tensor; may be NULL where it has none */
	const int64_t *strides;          /* in bytes, one for each dimension of the local tensor; NULL: contiguous */
	const uint64_t *local_shape;     /* to be compared with what placements give; NULL: not compared */
	uint32_t ndim, local_ndim, dtype, flags, nboxes, reserved;
};
struct vckpt_attribute { const char *key, *value; };
enum { VCKPT_SAVE_REPLACE = 1 << 0 };    /* a step of that number is replaced, atomically */
struct vckpt_save;
struct vckpt_save_options {
	size_t size;
	uint64_t step;                   /* below 2^44; VCKPT_NONE: the next one, of one rank alone */
	const struct vckpt_attribute *attributes; size_t nattributes; /* equal on all ranks */
	const char *const *bases; size_t nbases; /* "RUN/STEP": further steps whose data may be reused */
	void *stream;                    /* CUstream that the data is ready on (docs/save.md); NULL: default streams */
	uint32_t flags, reserved;
};
/* Begins a save of the step. -EINVAL: nothing begins, for the number is too high, or missing with world above 1. A save
 * that is refused for another reason fails at all ranks. Later saves wait until this one is submitted or freed. */
int vckpt_save_begin(struct vckpt_saver *saver, const struct vckpt_save_options *o, struct vckpt_save **ret_save,
	struct vckpt_error *err);
/* Declares n tensors; checked now (names, shapes, dtypes, placements, strides). The data must live, unchanged, from
 * submit until staged. After an error the save holds what it held before. -EEXIST: a tensor is given twice. */
int vckpt_save_tensors(struct vckpt_save *save, const struct vckpt_tensor *tensors, size_t n, struct vckpt_error *err);
/* The bytes are copied. If several ranks give a global blob, the lowest rank's counts. */
int vckpt_save_blob(struct vckpt_save *save, const char *name, int per_rank, const void *bytes, size_t len,
	struct vckpt_error *err);
/* Declares a value that ranks have to hold alike: all ranks that declare any value in `group` (1 to 255 bytes) must
 * declare the same names with the same bytes, else the save fails at all of them. The value itself is not stored. */
int vckpt_save_common(struct vckpt_save *save, const char *group, const char *name, const void *bytes, size_t len,
	struct vckpt_error *err);
/* Hands the save to the saver's threads and returns at once. -EEXIST: a value is declared twice. */
int vckpt_save_submit(struct vckpt_save *save, struct vckpt_error *err);
/* timeout_ms < 0: waits for ever. Returns 0 when the data is the caller's again; an error of the save, and then the
 * data is the caller's too; -ETIMEDOUT: not yet (a save never fails with it). */
int vckpt_save_wait_staged(struct vckpt_save *save, int64_t timeout_ms, struct vckpt_error *err);
struct vckpt_committed { uint64_t step, entry; };
/* 0: the step is visible and durable. -VCKPT_ETIMEDOUT: not decided yet. -VCKPT_EUNDECIDED: the store failed this rank
 * for start_ms; others may still commit it, or a later launch aborts it. Another error: it never becomes visible. */
int vckpt_save_wait_committed(struct vckpt_save *save, int64_t timeout_ms, struct vckpt_committed *ret_committed,
	struct vckpt_error *err);
/* Frees the handle. A submitted save and waits for it go on; any other save is given up. NULL-safe. */
void vckpt_save_free(struct vckpt_save *save);
void vckpt_save_give_up(struct vckpt_save *save, const char *reason); /* frees one not submitted, and tells why */
enum vckpt_state { VCKPT_OPEN, VCKPT_QUEUED, VCKPT_STAGING, VCKPT_STAGED, VCKPT_ANNOUNCED, VCKPT_COMMITTED,
	VCKPT_FAILED };
struct vckpt_progress {
	uint32_t state; int32_t error;   /* of this save; the sentence is told by the wait functions */
	uint64_t bytes_total, bytes_staged, bytes_done; /* of what this rank stores */
};
int vckpt_save_progress(struct vckpt_save *save, struct vckpt_progress *ret_progress);
/* What a save of this rank did. Times are of CLOCK_REALTIME, in ns; busy sums the threads. `write` is the time to hand
 * bytes to the packs and to wait for them; the packs' own threads are not counted. */
#define VCKPT_PHASES 9
struct vckpt_phase { const char *name; uint64_t start_ns, end_ns, busy_ns, bytes; };
struct vckpt_timings {
	size_t size;                     /* sizeof (struct vckpt_timings), set by the caller; another: -EINVAL */
	struct vckpt_phase phase[VCKPT_PHASES]; /* plan room copy digest encode write seal wait commit */
	uint64_t submitted_ns, staged_ns, committed_ns; /* 0: not yet */
	uint64_t bytes_held, bytes_staged, bytes_unchanged, bytes_deduplicated, bytes_encoded, bytes_written;
	uint64_t pieces, pieces_new, plan_ns; /* plan_ns: of the caller's and the saver's thread together */
	uint32_t plan_cached, plan_hits, plan_misses, ring_waits; /* 1: made before; so far; bands that waited */
	uint64_t bytes_again, bytes_no_base; /* unchanged, written again; of it, since an earlier step was of no use */
};
int vckpt_save_timings(struct vckpt_save *save, struct vckpt_timings *ret_timings);

/* ---- reading: any thread, several at once ---- */
/* What a rank holds of a tensor that is described as for a save with a mesh: n boxes. Each has ndim pairs (offset,
 * size), the place of its first item in the row-major local tensor, and ndim strides there, in items; free(). */
int vckpt_tensor_boxes(const struct vckpt_tensor *tensor, uint32_t rank, uint64_t **ret_boxes, size_t *ret_n,
	struct vckpt_error *err);
struct vckpt_step;
int vckpt_step_open(const char *store, const char *run, uint64_t step, struct vckpt_step **ret_step,
	struct vckpt_error *err);
void vckpt_step_close(struct vckpt_step *step); /* NULL-safe */
uint64_t vckpt_step_number(const struct vckpt_step *step);
uint32_t vckpt_step_world(const struct vckpt_step *step); /* by how many ranks it was saved */
size_t vckpt_step_attributes(const struct vckpt_step *step, const struct vckpt_attribute **ret_attributes);
struct vckpt_tensor_info { const char *component, *name; uint32_t name_len, dtype, ndim; /* points into the step */
	const uint64_t *shape; uint64_t bytes; };
uint32_t vckpt_step_tensor_count(const struct vckpt_step *step);
int vckpt_step_tensor(const struct vckpt_step *step, uint32_t tensor, struct vckpt_tensor_info *ret_info); /* -ENOENT */
int vckpt_step_tensors(const struct vckpt_step *step, uint32_t first, uint32_t n, struct vckpt_tensor_info *ret_infos);
int64_t vckpt_step_find(const struct vckpt_step *step, const char *component, const char *name); /* or -ENOENT */
/* Reads a box (ndim pairs of offset, size; NULL: all of it) into memory with the given byte strides, one for each
 * dimension (NULL: row-major). Every byte is verified. */
int vckpt_step_read(struct vckpt_step *step, uint32_t tensor, const uint64_t *box, void *data, const int64_t *strides,
	struct vckpt_error *err);
struct vckpt_blob_info { const char *name; uint64_t bytes; uint32_t per_rank, rank; };
int64_t vckpt_step_blob_count(struct vckpt_step *step, struct vckpt_error *err); /* reads of each rank, once */
int vckpt_step_blob(struct vckpt_step *step, uint32_t blob, struct vckpt_blob_info *ret_info); /* -ENOENT */
int vckpt_step_blob_read(struct vckpt_step *step, uint32_t blob, void *bytes, struct vckpt_error *err);
#ifdef __cplusplus
}
#endif
#include "vckpt_load.h"                  /* all that a rank holds of a step, in one go */
#include "vckpt_target.h"                /* ... into slices, other names, dtypes and sizes */
#endif
