/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt: the public interface of libvckpt: a store for the checkpoints of training jobs.
 *
 * A store is a directory. It holds runs, a run is a sequence of numbered steps, and a step holds tensors and blobs. All
 * ranks of a job save a step together, each the shards that it holds, and the step becomes visible whole or not at all.
 * A job of any other size and layout reads it back: each rank asks for the shards that it holds now.
 *
 * The sections below are in the order in which a program needs them:
 *
 *   errors             what every call returns
 *   dtypes             the types of items
 *   stores             a directory becomes a store
 *   meshes             named dimensions over the ranks, and questions about them
 *   tensors            the description of what a rank holds, the same for saves and loads
 *   communicators      what carries bytes between ranks: for a launch id, and for loads that share what they read
 *   launches           an id that all ranks of one start of a job share
 *   savers             one for each rank, for a whole training run
 *   saves              saver_open -> save_begin -> save_tensors, save_blob, ... -> save_submit -> wait -> saver_close
 *   runs and steps     which steps there are; step_open
 *   what a step has    tensors, components, attributes
 *   facts of steps     pins, tags, attributes that are set after the save
 *   reading a tensor   one box of one tensor
 *   blobs              byte strings of a step
 *   differences        what is different between two steps
 *   loads              all that a rank holds, in one go: load_begin -> load_tensors, ... -> load_start -> load_wait
 *   targets            loads into slices, other names, other dtypes and other sizes
 *
 * Three complete programs are in docs/c.md, and vckpt(3) is the manual. Words: docs/glossary.md; how a save runs:
 * docs/save.md; how a load runs: docs/load.md; how a tensor is cut: docs/layouts.md.
 *
 * Results. A function returns 0 or a positive result, or a negative errno; then it fills `err` (may be NULL) with one
 * sentence that names the thing at fault. Results that are not the return value come last and are called ret_*; they
 * are set on success only.
 *
 * Memory. Strings are UTF-8 and end with NUL. What a call is given it copies, unless its comment says otherwise; the
 * data of tensors is never copied. What "points into the step" (the load) is valid until the step is closed (the load
 * is freed). Every free takes NULL, and so does vckpt_step_close.
 *
 * Structs. One that carries options or measures begins with `size`: set it to its sizeof and zero the rest, then fill
 * in what you need. So a program and a library of different versions notice it: the call returns -EINVAL, and names
 * both sizes where it has an `err`. Structs without a size (they come in arrays, or are small) keep their members
 * within a version 0.x. Members called `reserved` must be 0. Between 0.x versions structs may change: build again.
 *
 * Threads. Any thread may call any function, several at once, with three exceptions: one save (one load) is declared
 * and submitted (started) by one thread at a time; nothing is called with a handle while it is freed or afterwards; a
 * communicator has rules of its own. After a fork, calls of the child that read, save, load or communicate by a handle
 * of its parent return -VCKPT_EFORKED, and close and free do nothing; an open step and a mesh still say what they
 * know without a read. */
#ifndef VCKPT_H
#define VCKPT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors ------------------------------------------------------------------------------------------------------ */

/* -EINVAL, -ENOMEM, -ENOENT, -EEXIST, -ENOSPC, -EIO ... mean what errno(3) says. These have a meaning of their own: */
enum {
	VCKPT_EDAMAGED = 74,             /* EBADMSG: stored bytes do not match their check or digest */
	VCKPT_EFORMAT = 71,              /* EPROTO: a record breaks its format; a step's boxes do not cover a tensor */
	VCKPT_EVERSION = 93,             /* EPROTONOSUPPORT: a newer format version or unknown required feature */
	VCKPT_ENOSTORE = 124,            /* EMEDIUMTYPE: the directory is not a store */
	VCKPT_EABORTED = 125,            /* ECANCELED: this rank or another gave up; the text says why */
	VCKPT_EUNDECIDED = 115,          /* EINPROGRESS: the store failed this rank; others may still commit */
	VCKPT_EPINNED = 68,              /* EADV: the step is pinned, so it is neither removed nor replaced */
	VCKPT_ETIMEDOUT = 110,           /* a wait: not over yet, call again. A communicator: a rank did nothing */
	VCKPT_EFORKED = 10,              /* ECHILD: this process is a child of the one that opened it */
};

struct vckpt_error {
	int code;                        /* the negative errno that the call returned; 0: it did not fail */
	char text[1000];                 /* one sentence, without a full stop */
};

/* Of the library that is loaded: "0.1.0". */
const char *vckpt_version(void);

/* ---- dtypes ------------------------------------------------------------------------------------------------------ */

/* The numbers are those of docs/format/layout.md. */
enum vckpt_dtype {
	VCKPT_BOOL = 1,
	VCKPT_U8,
	VCKPT_U16,
	VCKPT_U32,
	VCKPT_U64,
	VCKPT_I8,
	VCKPT_I16,
	VCKPT_I32,
	VCKPT_I64,
	VCKPT_F16,
	VCKPT_BF16,
	VCKPT_F32,
	VCKPT_F64,
	VCKPT_C64,
	VCKPT_C128,
	VCKPT_F8_E4M3FN,
	VCKPT_F8_E5M2,
	VCKPT_F8_E4M3FNUZ,
	VCKPT_F8_E5M2FNUZ,
	VCKPT_F8_E8M0FNU,
	VCKPT_F4_E2M1FN_X2,              /* counts pairs, a byte each */
};

/* Converts n items of one dtype into another, by the rules of docs/load.md: what VCKPT_TARGET_CONVERT does, for memory
 * that the caller has. The memory must not overlap, and need not be aligned. -EINVAL: there is no such conversion
 * (n = 0 asks only that). */
int vckpt_convert(uint32_t from, uint32_t to, const void *in, void *out, size_t n, struct vckpt_error *err);

/* ---- stores ------------------------------------------------------------------------------------------------------ */

/* Makes an empty store. -EEXIST: the directory is a store already; -EINVAL: it is inside another store. */
int vckpt_store_init(const char *path, struct vckpt_error *err);

/* 0: the directory is a store that this library can open. -VCKPT_ENOSTORE: it is no store. */
int vckpt_store_check(const char *path, struct vckpt_error *err);

/* ---- meshes ------------------------------------------------------------------------------------------------------ */

/* A mesh gives names to the dimensions in which the ranks of a job are arranged: "dp=2,tp=4" are 8 ranks, the
 * coordinate of a rank is (dp, tp). It communicates with no one. A mesh is read-only once it is made, and savers, saves
 * and loads keep what they need of it. */
struct vckpt_mesh;

#define VCKPT_DIMS_MAX 16u               /* dimensions of a mesh, and of a tensor */

/* `text`: "dp=2,tp=4", the outermost dimension first. `ranks`: nranks numbers in row-major order; NULL: 0, 1, 2, ... */
int vckpt_mesh_new(const char *text, const uint32_t *ranks, uint32_t nranks, struct vckpt_mesh **ret_mesh,
	struct vckpt_error *err);
void vckpt_mesh_free(struct vckpt_mesh *mesh);

/* Dimensions are asked for by name: "dp", or several of them, "dp,tp", in any order. Functions without `err` take no
 * wrong argument but NULL. */
uint32_t vckpt_mesh_ndim(const struct vckpt_mesh *mesh);

/* The name of dimension 0 (the outermost) to ndim - 1; points into the mesh. NULL: there is no such dimension. */
const char *vckpt_mesh_dim(const struct vckpt_mesh *mesh, uint32_t dim);

/* How many ranks there are along these dimensions, which is the size of a group; dims NULL: in the whole mesh. */
int vckpt_mesh_size(const struct vckpt_mesh *mesh, const char *dims, uint32_t *ret_size, struct vckpt_error *err);

/* Where a rank is: ndim numbers, all 0 for the first rank. -ENOENT: the rank is not in the mesh. */
int vckpt_mesh_coordinate(const struct vckpt_mesh *mesh, uint32_t rank, uint32_t *ret_coordinate,
	struct vckpt_error *err);

/* Which rank is there. -EINVAL: the coordinate is outside the mesh. */
int vckpt_mesh_rank(const struct vckpt_mesh *mesh, const uint32_t *coordinate, uint32_t *ret_rank,
	struct vckpt_error *err);

/* The group of a rank: the ranks that differ from it in no dimension but these, itself among them, in the order of the
 * mesh. ret_ranks: vckpt_mesh_size(mesh, dims) of them. -ENOENT: the rank is not in the mesh. */
int vckpt_mesh_group(const struct vckpt_mesh *mesh, const char *dims, uint32_t rank, uint32_t *ret_ranks,
	struct vckpt_error *err);

/* The same ranks as a mesh of these dimensions, which are in the order of `mesh`; vckpt_mesh_free. */
int vckpt_mesh_sub(const struct vckpt_mesh *mesh, const char *dims, uint32_t rank, struct vckpt_mesh **ret_mesh,
	struct vckpt_error *err);

/* The rank that is `distance` further along one dimension, all else equal; below 0: back. wrap: the dimension is a
 * ring. 1: *ret_rank is set; 0: the mesh ends before (a first pipeline stage has none at -1). -ENOENT: the rank is not
 * in the mesh. */
int vckpt_mesh_neighbour(const struct vckpt_mesh *mesh, const char *dim, uint32_t rank, int64_t distance, int wrap,
	uint32_t *ret_rank, struct vckpt_error *err);

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

enum {
	VCKPT_TENSOR_DEVICE = 1 << 0,    /* data is CUDA device memory, of any device and context */
	VCKPT_TENSOR_BUFFER = 1 << 1,    /* saves: may differ between replicas: the group's first rank's counts */
	VCKPT_TENSOR_BOXES = 1 << 2,     /* this rank holds `boxes` (placements must be NULL). More boxes of the same
	                                    tensor may be given by more entries of its name */
	VCKPT_TENSOR_ALONE = 1 << 3,     /* this rank alone holds it, whole (mesh must be NULL) */
};

/* What one rank holds of one tensor: vckpt_save_tensors reads it from memory, vckpt_load_tensors writes it there. The
 * tensor is described as a whole (shape), then how the ranks share it (mesh and placements, a flat range or boxes),
 * then where this rank has its part (data, strides). */
struct vckpt_tensor {
	const char *component, *name;    /* "model", "layers.0.weight" */
	const uint64_t *shape;           /* of the whole tensor, unsharded: ndim sizes */
	const struct vckpt_mesh *mesh;   /* NULL: the saver's; in a load: this rank has all of it */
	const char *placements;          /* a word for each dimension of the mesh, "R,S(0)"; NULL: replicated */
	const uint64_t *flat;            /* from, to, len: items of the flattened local tensor; len 0: not padded */
	const uint64_t *boxes;           /* nboxes * ndim pairs (offset, size), disjoint, one after another in data */
	const char *same_dims;           /* flat or boxes: mesh dimensions along which ranks hold the same, "dp" */
	const void *data;                /* the first item of the local tensor; may be NULL where it has none. A load
	                                    writes it */
	const int64_t *strides;          /* in bytes, one for each dimension of the local tensor; NULL: contiguous */
	const uint64_t *local_shape;     /* to be compared with what placements give; NULL: not compared */
	uint32_t ndim, local_ndim;
	uint32_t dtype;                  /* enum vckpt_dtype */
	uint32_t flags;                  /* VCKPT_TENSOR_... */
	uint32_t nboxes, reserved;
};

/* What `rank` holds of a tensor that is described with a mesh: *ret_n boxes. Each has ndim pairs (offset, size), the
 * place of its first item in the row-major local tensor, and ndim strides there, in items. free() the array. */
int vckpt_tensor_boxes(const struct vckpt_tensor *tensor, uint32_t rank, uint64_t **ret_boxes, size_t *ret_n,
	struct vckpt_error *err);

/* ---- communicators ----------------------------------------------------------------------------------------------- */

/* Ranks that make the same calls in the same order. With a communicator they can agree on a launch id
 * (vckpt_launch_id), and share what a load reads: each stored byte that several of them want is read by one and passed
 * on (docs/load.md, "Exchange"). It is made once, by all its ranks. After a call that failed because a rank died, did
 * not come or was stopped, it cannot be used any more: free it and make another.
 *
 * Threads: one call or load at a time uses a communicator, else -EBUSY. vckpt_comm_abort may be called by any thread
 * at any time before vckpt_comm_free.
 *
 * timeout_ms, here and below: how long a call waits for a rank that does nothing; 0: 5 minutes. */
struct vckpt_comm;

/* Ranks of one host, over shared memory: processes of one user, or threads. They meet under a name that they alone
 * have: 1 to 100 letters, digits, '.', '_' or '-'. Blocks until all have come. A rank that dies is noticed at once. */
int vckpt_comm_shared(const char *name, uint32_t rank, uint32_t size, uint32_t timeout_ms,
	struct vckpt_comm **ret_comm, struct vckpt_error *err);

/* Ranks of an MPI job, on one host or many, over Open MPI or MPICH (and its kin), 3.0 or later, loaded at run time: the
 * library that the process has, or the one whose path VCKPT_LIBMPI is. `mpi_comm` is the address of an MPI_Comm, which
 * is duplicated (NULL: MPI_COMM_WORLD); the ranks are its ranks. All of them call this. MPI has to be initialised for
 * MPI_THREAD_MULTIPLE; or for MPI_THREAD_SERIALIZED, and then the program calls MPI from no thread while a load runs.
 * With VCKPT_MPI_INIT it is loaded and initialised by this call, if it is not yet, and finalised when the process exits
 * with status 0 and all communicators are freed. -ENOENT: no MPI. -EINVAL: MPI is not initialised, or not so. */
enum {
	VCKPT_MPI_INIT = 1 << 0,
};
int vckpt_comm_mpi(const void *mpi_comm, uint32_t flags, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err);

/* Ranks with a CUDA device each, over NCCL 2.14 or later, loaded at run time: the process's libnccl.so.2, or the one
 * whose path VCKPT_LIBNCCL is. All ranks of `base` call this, each with the CUDA context of its own device current.
 * `base` goes on carrying what is small. It is taken, and must be freed after this one. An error, at whatever rank, is
 * an error of all ranks, and `base` is free again then, so that loads may use it. -ENOENT: no NCCL, or no CUDA
 * driver. -EBUSY: `base` is in use. */
int vckpt_comm_nccl(struct vckpt_comm *base, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err);

/* The same without another communicator, for NCCL 2.18 or later: split from the caller's ncclComm_t, by all its ranks.
 * The caller's is not used later, and never aborted. */
int vckpt_comm_nccl_split(void *nccl_comm, uint32_t timeout_ms, struct vckpt_comm **ret_comm,
	struct vckpt_error *err);

/* A bucket on its way, as functions of the caller see it at one rank. */
struct vckpt_comm_pass {
	uint64_t number;                 /* of buckets before it, of all owners: the same at all ranks */
	uint64_t len;                    /* bytes, 1 to 2 MiB + 4 KiB */
	void *bytes;                     /* owner: to be sent. A rank that wants it: to be filled. Others: NULL */
	const uint32_t *ranks;           /* nranks that want it, ascending, without the owner; valid until finish */
	uint32_t nranks, owner;
};

/* A communicator over functions of the caller. Each returns 0 or a negative errno, after which the communicator cannot
 * be used any more. gather, start and finish are called from one thread at a time: the thread that calls
 * vckpt_launch_id or vckpt_comm_nccl, or one of a load's. All ranks call gather and start in the same order, with the
 * same lens, number, len, ranks and owner. None of them may call this library. */
struct vckpt_comm_functions {
	size_t size;                     /* sizeof (struct vckpt_comm_functions) */
	void *arg;                       /* their first argument */
	/* Each rank gives lens[its rank] bytes; ret_all gets those of all ranks, one after another. Blocks. */
	int (*gather)(void *arg, const void *mine, const uint64_t *lens, void *ret_all, uint32_t timeout_ms);
	/* Begins to send or to receive, without waiting for the other ranks. A rank that neither owns nor wants the
	 * bucket is called too, since some collectives need all ranks. */
	int (*start)(void *arg, const struct vckpt_comm_pass *pass, void **ret_request);
	/* Waits until pass->bytes have arrived, or may be used again. Each rank finishes the buckets that it owns or
	 * wants, in order; it may have started others in between. */
	int (*finish)(void *arg, const struct vckpt_comm_pass *pass, void *request, uint32_t timeout_ms);
	void (*abort)(void *arg, const char *why); /* says why to the others; NULL: they find out by their time-outs */
	void (*free)(void *arg);                 /* at vckpt_comm_free, once; may be NULL */
};
int vckpt_comm_functions(const struct vckpt_comm_functions *functions, uint32_t rank, uint32_t size,
	uint32_t timeout_ms, struct vckpt_comm **ret_comm, struct vckpt_error *err);

/* Ends the communicator at all ranks: their calls and loads fail with the sentence `why`, at once where the transport
 * can reach them. So a rank that fails before its load has started keeps no other waiting. Takes NULL. */
void vckpt_comm_abort(struct vckpt_comm *comm, const char *why);

/* Loads that use it must be freed before. */
void vckpt_comm_free(struct vckpt_comm *comm);

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* One start of a job is a launch. All its ranks give their savers the same launch id, and no start gives one that an
 * earlier start of the run has used: such an id is refused at all ranks. So what is left of an earlier start is never
 * taken for work of this one (docs/training.md, "Launch ids"). */
#define VCKPT_LAUNCH_ID_BYTES 33u        /* with the NUL */

/* Makes such an id: rank 0 of the communicator draws it, and all ranks get it. All of them call this, in the same order
 * as their other calls with the communicator; blocks until they have. ret_id: VCKPT_LAUNCH_ID_BYTES of memory. If a
 * rank dies, does not come, or gives up by vckpt_comm_abort, this fails at all others. -EBUSY: the communicator is in
 * use. A program without a communicator sends 16 random bytes to its ranks itself, as text. */
int vckpt_launch_id(struct vckpt_comm *comm, char *ret_id, struct vckpt_error *err);

/* ---- savers ------------------------------------------------------------------------------------------------------ */

/* A saver belongs to one rank and lives for a whole training run. Every rank of the job (threads, processes or hosts)
 * opens one with the same launch id, and saves the same steps as all others; it needs no other message. */
struct vckpt_saver;

enum {
	VCKPT_PIN_AUTO,                  /* where device memory is saved the ring is pinned, else locked, if possible */
	VCKPT_PIN_NO,
	VCKPT_PIN_YES,                   /* fails where memory cannot be pinned or locked */
	VCKPT_PIN_ALLOCATE,              /* as AUTO, but the CUDA driver allocates it: where registering is slow */
};
enum {
	VCKPT_REPLICAS_SAMPLE,           /* compares one block of each tensor that several ranks hold */
	VCKPT_REPLICAS_FULL,             /* compares every byte */
	VCKPT_REPLICAS_OFF,
};
enum {
	VCKPT_SAVER_LOW_PRIORITY = 1 << 0, /* threads that do not copy: nice 19, idle class of I/O */
	VCKPT_SAVER_NO_BASES = 1 << 1,   /* recognise nothing of earlier steps */
	VCKPT_SAVER_KEEP_CACHED = 1 << 2, /* keep what is written in the page cache: it is read here at once */
};

struct vckpt_saver_options {
	size_t size;                     /* sizeof (struct vckpt_saver_options) */
	const char *store;               /* the path of a store (vckpt_store_init) */
	const char *run;
	const char *launch_id;           /* the same at all ranks, new at every start (vckpt_launch_id); may be NULL if
	                                    world is 1 */
	uint32_t rank, world;            /* this rank, and how many there are */
	const struct vckpt_mesh *mesh;   /* of tensors that name none: they are replicated over it. NULL: all ranks */
	uint64_t heartbeat_ms;           /* 0: 20 s */
	uint64_t start_ms;               /* how long to wait for rank 0, and how long to ask a store again that fails;
	                                    0: 60 s */
	uint64_t deadline_ms;            /* how long the committing rank, having announced its own part, waits for that
	                                    of a rank that lives; then it aborts the save. 0: no limit */
	uint64_t ring_bytes;             /* 0: one whole save, grows; at most half of free memory / ranks of the node */
	int pin;                         /* VCKPT_PIN_... */
	int check_replicas;              /* VCKPT_REPLICAS_... */
	uint32_t threads;                /* at most 1024; 0: usable cores / ranks of the node (docs/save.md) */
	uint32_t flags;                  /* VCKPT_SAVER_... */
	uint64_t warn_free;              /* after a save, rank 0 logs a warning if the file system has less free than so
	                                    many bytes; 0: than the run's policy says (warn-free), or where it does not,
	                                    than two more such saves need; VCKPT_NONE: none is logged */
	const char *const *keep;         /* nkeep rules (docs/prune.md): after each commit rank 0 removes the steps that
	                                    neither they nor the run's policy keep, in the background */
	size_t nkeep;
};

/* Shows a heartbeat and meets the other ranks: rank 0 appends the launch entry, the others wait for it. Blocks. */
int vckpt_saver_open(const struct vckpt_saver_options *o, struct vckpt_saver **ret_saver, struct vckpt_error *err);

/* Waits until every save is decided and ends the threads. 0, or the error of the first failed save whose error no call
 * has returned. A second call does nothing. Existing saves can still be queried; vckpt_save_begin fails. */
int vckpt_saver_close(struct vckpt_saver *saver, struct vckpt_error *err);

/* Closes it first, if that was not done. */
void vckpt_saver_free(struct vckpt_saver *saver);

/* ---- saves ------------------------------------------------------------------------------------------------------- */

/* A save takes the shards that the rank holds, copies them into a ring of (pinned or locked) memory, and from then on
 * works in the background: digest, encode, write, commit. Saves are decided in the order in which they were begun. */
struct vckpt_save;

#define VCKPT_NONE UINT64_MAX            /* no step given: the next one (a save), the newest one (a read) */

struct vckpt_attribute {
	const char *key, *value;
};

enum {
	VCKPT_SAVE_REPLACE = 1 << 0,     /* a step of that number is replaced, atomically */
};
struct vckpt_save_options {
	size_t size;                     /* sizeof (struct vckpt_save_options) */
	uint64_t step;                   /* below 2^44; VCKPT_NONE: the next one, of one rank alone */
	const struct vckpt_attribute *attributes; /* nattributes short texts of the step, equal on all ranks */
	size_t nattributes;
	const char *const *bases;        /* nbases further steps, "RUN/STEP", whose data may be reused */
	size_t nbases;
	void *stream;                    /* CUstream that the data is ready on (docs/save.md); NULL: default streams */
	uint32_t flags;                  /* VCKPT_SAVE_... */
	uint32_t reserved;
};

/* Begins a save of the step. -EINVAL: nothing begins, because the number is too high, or missing with world above 1. A
 * save that is refused for another reason fails at all ranks. Later saves wait until this one is submitted or freed. */
int vckpt_save_begin(struct vckpt_saver *saver, const struct vckpt_save_options *o, struct vckpt_save **ret_save,
	struct vckpt_error *err);

/* Declares n tensors; checked now (names, shapes, dtypes, placements, strides). The data must live, unchanged, from
 * submit until staged. After an error the save holds what it held before. -EEXIST: a tensor is given twice. */
int vckpt_save_tensors(struct vckpt_save *save, const struct vckpt_tensor *tensors, size_t n, struct vckpt_error *err);

/* Adds a byte string. per_rank 0: one for the whole step; if several ranks give it, the lowest rank's counts. Else each
 * rank has one of its own by that name. The bytes are copied. */
int vckpt_save_blob(struct vckpt_save *save, const char *name, int per_rank, const void *bytes, size_t len,
	struct vckpt_error *err);

/* Declares a value that ranks have to hold alike: all ranks that declare any value in `group` (1 to 255 bytes) must
 * declare the same names with the same bytes, else the save fails at all of them. The value itself is not stored. */
int vckpt_save_common(struct vckpt_save *save, const char *group, const char *name, const void *bytes, size_t len,
	struct vckpt_error *err);

/* Hands the save to the saver's threads and returns at once. -EEXIST: a value is declared twice. */
int vckpt_save_submit(struct vckpt_save *save, struct vckpt_error *err);

/* Waits until the data is the caller's again: 0, or an error of the save, and then the data is the caller's too.
 * timeout_ms < 0: waits for ever. -VCKPT_ETIMEDOUT: not yet (a save never fails with it). */
int vckpt_save_wait_staged(struct vckpt_save *save, int64_t timeout_ms, struct vckpt_error *err);

struct vckpt_committed {
	uint64_t step;                   /* its number */
	uint64_t entry;                  /* of the commit in the run's list */
};
/* Waits until the save is decided. 0: the step is visible and durable. -VCKPT_ETIMEDOUT: not decided yet.
 * -VCKPT_EUNDECIDED: the store failed this rank for start_ms; others may still commit it, or a later launch aborts it.
 * Another error: it never becomes visible. ret_committed may be NULL. */
int vckpt_save_wait_committed(struct vckpt_save *save, int64_t timeout_ms, struct vckpt_committed *ret_committed,
	struct vckpt_error *err);

/* Frees the handle. A submitted save, and calls that wait for it, go on; any other save is given up. */
void vckpt_save_free(struct vckpt_save *save);

/* Frees one that was not submitted; the other ranks report `reason`. */
void vckpt_save_give_up(struct vckpt_save *save, const char *reason);

enum vckpt_state {
	VCKPT_OPEN,
	VCKPT_QUEUED,
	VCKPT_STAGING,
	VCKPT_STAGED,
	VCKPT_ANNOUNCED,
	VCKPT_COMMITTED,
	VCKPT_FAILED,
};
struct vckpt_progress {
	size_t size;                     /* sizeof (struct vckpt_progress), set by the caller */
	uint32_t state;                  /* enum vckpt_state */
	int32_t error;                   /* of a save that failed; the wait functions have the sentence */
	uint64_t bytes_total;            /* of what this rank stores */
	uint64_t bytes_staged;
	uint64_t bytes_done;
};
/* Where a save is, without a wait. -EINVAL: `size` is wrong. */
int vckpt_save_progress(struct vckpt_save *save, struct vckpt_progress *ret_progress);

/* What a save of this rank did. Times are of CLOCK_REALTIME, in ns; busy sums the threads. `write` is the time to hand
 * bytes to the packs and to wait for them; the packs' own threads are not counted. */
#define VCKPT_PHASES 9
struct vckpt_phase {
	const char *name;
	uint64_t start_ns, end_ns, busy_ns, bytes;
};
struct vckpt_timings {
	size_t size;                     /* sizeof (struct vckpt_timings), set by the caller */
	struct vckpt_phase phase[VCKPT_PHASES]; /* plan room copy digest encode write seal wait commit */
	uint64_t submitted_ns, staged_ns, committed_ns; /* 0: not yet */
	uint64_t bytes_held;             /* of the tensors that this rank has */
	uint64_t bytes_staged;           /* of its share of them, and of its blobs */
	uint64_t bytes_unchanged;        /* of these: as an earlier step has them */
	uint64_t bytes_deduplicated;     /* of these: twice in this save */
	uint64_t bytes_encoded, bytes_written;
	uint64_t pieces, pieces_new;
	uint64_t plan_ns;                /* of the caller's and the saver's thread together */
	uint32_t plan_cached;            /* 1: the plan was made by an earlier save */
	uint32_t plan_hits, plan_misses; /* of this saver, so far */
	uint32_t ring_waits;             /* bands that waited for room in the ring */
	uint64_t bytes_again;            /* unchanged, and written again */
	uint64_t bytes_no_base;          /* of these, because an earlier step was of no use */
};
/* -EINVAL: `size` is wrong. */
int vckpt_save_timings(struct vckpt_save *save, struct vckpt_timings *ret_timings);

/* ---- runs and steps ---------------------------------------------------------------------------------------------- */

/* The numbers of the visible steps of a run, ascending; free() the array. -ENOENT: there is no such run. */
int vckpt_run_steps(const char *store, const char *run, uint64_t **ret_steps, size_t *ret_n, struct vckpt_error *err);

/* The number of the newest visible step of a run. -ENOENT: there is no such run, or it has no step. */
int vckpt_run_latest(const char *store, const char *run, uint64_t *ret_step, struct vckpt_error *err);

/* The steps of all runs that an expression holds for (docs/expressions.md), newest first, at most `limit` (0: all).
 * Free *ret_found, one piece of memory. What steps consist of is read once, and kept in the user's index of the store.
 * A step or run that cannot be read is an error. -EINVAL: the expression is wrong, and the sentence has the column. */
struct vckpt_found {
	const char *run;
	uint64_t step;
};
int vckpt_find(const char *store, const char *expression, uint64_t limit, struct vckpt_found **ret_found, size_t *ret_n,
	struct vckpt_error *err);

/* Opens a step for reading; VCKPT_NONE: the newest. It stays readable until it is closed, even if it is removed or
 * replaced meanwhile, as long as the collector has left its data. */
struct vckpt_step;
int vckpt_step_open(const char *store, const char *run, uint64_t step, struct vckpt_step **ret_step,
	struct vckpt_error *err);
void vckpt_step_close(struct vckpt_step *step);

/* Which commit an open step is: its entry in the run's list, and the digest of its manifest, which names all data. A
 * number is not enough for several ranks to open the same step: it may be replaced, and a newer one appear, between two
 * looks. One rank opens a step and sends these bytes to the others; they open that commit, or fail. It may have been
 * removed or replaced since: it opens as long as the collector has left its data, which is the grace period at least.
 * -ENOENT: that entry is missing here, or is another commit. */
struct vckpt_commit {
	uint64_t step, entry;
	uint8_t manifest[32];
};
void vckpt_step_commit(const struct vckpt_step *step, struct vckpt_commit *ret_commit);
int vckpt_step_open_commit(const char *store, const char *run, const struct vckpt_commit *commit,
	struct vckpt_step **ret_step, struct vckpt_error *err);

/* ---- what a step has --------------------------------------------------------------------------------------------- */

uint64_t vckpt_step_number(const struct vckpt_step *step);

/* By how many ranks it was saved. */
uint32_t vckpt_step_world(const struct vckpt_step *step);

/* How many attributes it has, with those that were set later (vckpt_facts_change) when it was opened; *ret_attributes
 * points into the step. */
size_t vckpt_step_attributes(const struct vckpt_step *step, const struct vckpt_attribute **ret_attributes);

/* Tensors have the numbers 0 to count - 1, sorted by component and name. */
uint32_t vckpt_step_tensor_count(const struct vckpt_step *step);
struct vckpt_tensor_info {               /* points into the step */
	const char *component;
	const char *name;                /* name_len bytes: not followed by a NUL */
	uint32_t name_len, dtype, ndim;
	const uint64_t *shape;
	uint64_t bytes;
};
/* One, and n from number `first` on. -ENOENT: there are not so many. */
int vckpt_step_tensor(const struct vckpt_step *step, uint32_t tensor, struct vckpt_tensor_info *ret_info);
int vckpt_step_tensors(const struct vckpt_step *step, uint32_t first, uint32_t n, struct vckpt_tensor_info *ret_infos);

/* The number of a tensor. -ENOENT: there is none of that name. */
int64_t vckpt_step_find(const struct vckpt_step *step, const char *component, const char *name);

/* A component that has tensors: they have the numbers first .. first + count - 1, and so many bytes. */
uint32_t vckpt_step_component_count(const struct vckpt_step *step);
struct vckpt_component_info {            /* points into the step */
	const char *name;
	uint32_t first, count;
	uint64_t bytes;
};
int vckpt_step_component(const struct vckpt_step *step, uint32_t component,
	struct vckpt_component_info *ret_info); /* -ENOENT */
/* The name of a component that it has lost since it was saved (vckpt prune --thin), by number from 0 on; NULL: there
 * are no more. */
const char *vckpt_step_thinned(const struct vckpt_step *step, uint32_t number);

/* ---- facts of steps --------------------------------------------------------------------------------------------- */

/* The facts of a step after its save: in its run's list, so that every host sees the same. All of one change is
 * made in one moment, on what other writers have said. */
struct vckpt_facts_change {
	size_t size;                     /* sizeof (struct vckpt_facts_change) */
	int32_t pin;                     /* 1: pin: no one removes or replaces the step; -1: unpin; 0: neither */
	uint32_t reserved;
	const char *reason;              /* of the pin, for people, at most 1,024 bytes; NULL: none, or as it is */
	const char *const *tags; size_t ntags;     /* names of the step; another step that has one loses it */
	const char *const *untags; size_t nuntags; /* names that it has no longer */
	/* Added, or in place of what was given with the save or set before. value NULL: no longer set later */
	const struct vckpt_attribute *attributes; size_t nattributes;
	const struct vckpt_commit *commit; /* that is to be the step still; NULL: whatever has its number */
};
/* Changes the facts of a visible step. 1: nothing would change. -ENOENT: there is no such step, or an attribute
 * that is to be unset was not set later; -ESTALE: the step is not `commit` any more; -EINVAL: what cannot be a tag, a
 * key, a value or a reason, or too many; -ENOTSUP: an earlier version made the store; -VCKPT_EUNDECIDED: the store
 * failed, and the change may have been made or not. */
int vckpt_facts_change(const char *store, const char *run, uint64_t step, const struct vckpt_facts_change *change,
	struct vckpt_error *err);

struct vckpt_facts {                     /* points into the step */
	size_t size;                     /* sizeof (struct vckpt_facts) */
	uint32_t pinned, reserved;
	const char *reason;              /* of the pin; "": none */
	int64_t pinned_ns;               /* since the epoch, by the clock of the host `pinned_by` */
	const char *pinned_by;
	const char *const *tags; size_t ntags; /* sorted */
};
/* What was said of it when it was opened. -EINVAL: ret_facts->size is another one. */
int vckpt_step_facts(const struct vckpt_step *step, struct vckpt_facts *ret_facts);

struct vckpt_tag { const char *tag; uint64_t step; };
/* The tags of a run, sorted; free() the array, which has the texts, too. -ENOENT: there is no such run. */
int vckpt_run_tags(const char *store, const char *run, struct vckpt_tag **ret_tags, size_t *ret_n,
	struct vckpt_error *err);

/* ---- reading a tensor -------------------------------------------------------------------------------------------- */

/* Reads a box (ndim pairs of offset, size; NULL: all of it) into memory with the given byte strides, one for each
 * dimension (NULL: row-major). Every byte is verified. A program that wants many tensors uses a load, below. */
int vckpt_step_read(struct vckpt_step *step, uint32_t tensor, const uint64_t *box, void *data, const int64_t *strides,
	struct vckpt_error *err);

/* The digest of a tensor, 32 bytes. Tensors of one store with equal digests have equal dtypes, shapes and bytes; with
 * equal bytes they may have different digests if ranks cut them differently. It reads where the pieces of the tensor
 * are, not the pieces. -ENOENT: there is no such tensor. */
int vckpt_step_digest(struct vckpt_step *step, uint32_t tensor, uint8_t *ret_digest, struct vckpt_error *err);

/* ---- blobs ------------------------------------------------------------------------------------------------------- */

struct vckpt_blob_info {                 /* points into the step */
	const char *name;
	uint64_t bytes;
	uint32_t per_rank;               /* 1: a rank's own */
	uint32_t rank;                   /* whose it is, where per_rank is 1 */
};

/* A blob by its name. rank: whose own it is, -1: one of the whole step. Reads something of the rank that has it, and
 * not of all ranks, where the step's manifest says which rank that is. find: 1: *ret_info is set, and a long blob was
 * looked at (vckpt_step_blob_look); 0: there is none. get: reads all of it into `bytes`, which has room for
 * vckpt_blob_info.bytes; -ENOENT. */
int vckpt_step_blob_find(struct vckpt_step *step, const char *name, int64_t rank, struct vckpt_blob_info *ret_info,
	struct vckpt_error *err);
int vckpt_step_blob_get(struct vckpt_step *step, const char *name, int64_t rank, void *bytes, struct vckpt_error *err);

/* 1: *ret_rank is the first rank from `from` on that has a blob of its own by that name; 0: none has. */
int vckpt_step_blob_rank(struct vckpt_step *step, const char *name, uint32_t from, uint32_t *ret_rank,
	struct vckpt_error *err);

/* All blobs by number: those of the whole step first, by name, then those of each rank. The first call of these reads
 * something of every rank. */
int64_t vckpt_step_blob_count(struct vckpt_step *step, struct vckpt_error *err);
int vckpt_step_blob(struct vckpt_step *step, uint32_t blob, struct vckpt_blob_info *ret_info); /* -ENOENT */
/* `bytes` has room for all of it. */
int vckpt_step_blob_read(struct vckpt_step *step, uint32_t blob, void *bytes, struct vckpt_error *err);

/* The number of the first blob from number `from` on whose name begins with "COMPONENT/" (NULL: of any name). -ENOENT:
 * there is no further one. */
int64_t vckpt_step_next_blob(struct vckpt_step *step, const char *component, uint32_t from, struct vckpt_error *err);

/* Looks before memory is taken for a blob: -ENOMEM if this process could not allocate its bytes now; of a long one
 * reads the first and the last bytes. */
int vckpt_step_blob_look(struct vckpt_step *step, uint32_t blob, struct vckpt_error *err);

/* ---- differences ------------------------------------------------------------------------------------------------- */

/* What is different from step A to step B, of one store or of two. Names, dtypes, shapes and digests decide, and no
 * data is read, but of tensors that the two steps cut differently: these are compared byte for byte. */
struct vckpt_diff;
enum {
	VCKPT_DIFF_VALUES = 1 << 0,      /* measure how values changed: reads the pieces that differ */
};
struct vckpt_diff_options {
	size_t size;                     /* sizeof (struct vckpt_diff_options) */
	const char *component;           /* only this one, with the blobs COMPONENT.json and COMPONENT/...; NULL: all */
	uint32_t flags;                  /* VCKPT_DIFF_... */
	uint32_t reserved;
};
/* Both steps must stay open until vckpt_diff_free. o may be NULL. It may take long, and cannot be stopped. -ENOENT:
 * neither step has the component. -VCKPT_EDAMAGED: also, that two pieces have other digests and equal bytes. */
int vckpt_diff_steps(struct vckpt_step *a, struct vckpt_step *b, const struct vckpt_diff_options *o,
	struct vckpt_diff **ret_diff, struct vckpt_error *err);
void vckpt_diff_free(struct vckpt_diff *diff);

/* The tensors and blobs that are different: tensors before blobs, by component and name. With values, those that have
 * some come after the other tensors, by what changed most: a tensor that got a NaN or an infinity first, then by
 * `relative`. */
enum {
	VCKPT_DIFF_ADDED,                /* only B has it */
	VCKPT_DIFF_REMOVED,              /* only A has it */
	VCKPT_DIFF_RETYPED,              /* another dtype, and maybe another shape */
	VCKPT_DIFF_RESHAPED,
	VCKPT_DIFF_CHANGED,              /* other bytes */
};
struct vckpt_diff_row {                  /* texts belong to the steps */
	const char *component;           /* NULL: a blob */
	const char *name;                /* name_len bytes: not followed by a NUL where it is a tensor's */
	uint32_t name_len;
	uint32_t change;                 /* VCKPT_DIFF_ADDED, ... */
	int64_t rank;                    /* of a blob: whose own it is; -1: none's */
	int64_t a, b;                    /* the number of the tensor or blob in each step; -1: it has none */
	/* Of the values of pieces that differ; all 0 without VCKPT_DIFF_VALUES, of blobs, and unless it is CHANGED. The
	 * two parts of a complex number are two values. */
	uint64_t changed;                /* values whose bits differ */
	uint64_t nan_a, nan_b, inf_a, inf_b; /* values in A and in B that are not finite */
	double max;                      /* of |B - A|, where both are finite, as below */
	double rms;                      /* of B - A over all values of the tensor */
	double relative;                 /* the norm of B - A by that of A; may be infinite */
};
size_t vckpt_diff_count(const struct vckpt_diff *diff);
int vckpt_diff_row(const struct vckpt_diff *diff, size_t i, struct vckpt_diff_row *ret_row); /* -ENOENT */

/* ---- loads ------------------------------------------------------------------------------------------------------- */

/* All that a rank holds of a step, in one go. A load takes the descriptions of tensors that a save takes. It reads each
 * block of the step that is wanted once, checks it, decodes it, and writes it where the descriptions say that the rank
 * has it. */
struct vckpt_load;

enum {
	VCKPT_LOAD_REHASH = 1 << 0,      /* reads whole pieces, and compares their SHA-256 as well */
	VCKPT_LOAD_SKIP_DAMAGED = 1 << 1, /* what cannot be read is listed (vckpt_load_lost), and the rest arrives */
	VCKPT_LOAD_NOT_STRICT = 1 << 2,  /* names that only one side has are no error; both lists come back */
	/* Neither of these two: a load of 1 GiB and more does so if no other rank of the node loads beside it. */
	VCKPT_LOAD_DIRECT = 1 << 3,      /* what the page cache lacks is read past it, where the file system can */
	VCKPT_LOAD_CACHED = 1 << 4,      /* every read goes through the page cache */
};

/* With a communicator, all its ranks have to begin and start such a load: of the same step, with the same flags and
 * exchange. What several of them want is read by one and passed on (docs/load.md, "Exchange"): always, never, or where
 * a short measurement says that it pays. The load succeeds at all ranks or fails at all, with the sentence of a rank
 * that failed. A load that is freed without a start breaks its communicator, so that no other rank waits for it. */
enum {
	VCKPT_EXCHANGE_AUTO,
	VCKPT_EXCHANGE_NEVER,
	VCKPT_EXCHANGE_ALWAYS,
};

struct vckpt_load_options {
	size_t size;                     /* sizeof (struct vckpt_load_options) */
	uint32_t rank;                   /* whose shards the descriptions are about */
	uint32_t threads;                /* at most 256; 0: usable processors / ranks of the node (docs/load.md) */
	uint32_t flags;                  /* VCKPT_LOAD_... */
	uint32_t world;                  /* ranks that load at the same time; 0: this one alone */
	struct vckpt_comm *comm;         /* of these ranks; NULL: this one reads all it needs */
	uint32_t exchange;               /* VCKPT_EXCHANGE_... */
	uint32_t reserved;
};

/* Begins a load of an open step. The step must stay open until vckpt_load_free: to close it before is a mistake that
 * nothing here can see. o may be NULL: rank 0. */
int vckpt_load_begin(struct vckpt_step *step, const struct vckpt_load_options *o, struct vckpt_load **ret_load,
	struct vckpt_error *err);

/* Declares n tensors. `data` is written: it belongs to the load from load_start until load_wait has reported the end,
 * and no two tensors may share a byte of it. Bytes that the description does not name stay as they are. Strides must be
 * positive, and no two items may share a byte. same_dims and VCKPT_TENSOR_BUFFER have no effect. Checked now: shape and
 * dtype must be the step's (vckpt_load_targets converts). The same tensor may be declared several times. One that the
 * step lacks is missing: load_start names it. After an error the load holds what it held before. */
int vckpt_load_tensors(struct vckpt_load *load, const struct vckpt_tensor *tensors, size_t n, struct vckpt_error *err);

/* Says that the load is meant to take all tensors of a component: those that are not declared are unexpected. */
int vckpt_load_expect(struct vckpt_load *load, const char *component, struct vckpt_error *err);

/* Device memory may still be in use when load_start is called: what this CUstream (NULL: the default stream of each
 * context) has been given until then is finished before the memory is written. May be called for several streams;
 * without any it is the default streams. load_start must come from a thread of the program that uses them; it fails
 * with -ENOENT where there is no CUDA driver, with -EBUSY where a stream is being captured into a graph. When load_wait
 * has reported the end every stream may use the memory. */
int vckpt_load_stream(struct vckpt_load *load, void *stream, struct vckpt_error *err);

/* Begins to read, in threads of the load's own, and returns at once. -EINVAL: missing or unexpected names (the sentence
 * has up to ten of each), unless VCKPT_LOAD_NOT_STRICT; destinations that overlap (two of them are named; the search
 * ends after 2^24 steps, which only strides that nearly agree make up); or the load has begun to read before. -EBUSY:
 * the communicator is in use. */
int vckpt_load_start(struct vckpt_load *load, struct vckpt_error *err);

/* Waits for the end. timeout_ms < 0: for ever. 0: everything has arrived, but what vckpt_load_lost lists.
 * -VCKPT_ETIMEDOUT: not yet (a load never fails with it). Another error: the load is over, and nothing in the
 * destinations is to be used; of several damaged pieces the first by pack and offset is named. */
int vckpt_load_wait(struct vckpt_load *load, int64_t timeout_ms, struct vckpt_error *err);

/* The blocking form: starts, and waits for the end. */
int vckpt_load_run(struct vckpt_load *load, struct vckpt_error *err);

/* Ends the load soon: load_wait returns -VCKPT_EABORTED, unless it was over before. Takes NULL. */
void vckpt_load_stop(struct vckpt_load *load);

/* Stops a load that is under way, waits for its threads and for calls that wait for it, and frees it. */
void vckpt_load_free(struct vckpt_load *load);

struct vckpt_load_progress {
	size_t size;                     /* sizeof (struct vckpt_load_progress), set by the caller */
	uint64_t bytes_wanted, bytes_placed; /* of the destinations, in the step's dtype; 0 before load_start */
	uint64_t bytes_read;             /* from packs, checks included */
	uint64_t pieces;                 /* that are done */
	uint64_t open_ns, plan_ns, read_ns; /* open: rows of the tensors; 0 before the end */
	uint32_t threads;                /* that read; 0 before the end */
	uint32_t over;                   /* 1 after the end */
};
/* Where a load is, without a wait. -EINVAL: `size` is wrong. */
int vckpt_load_progress(struct vckpt_load *load, struct vckpt_load_progress *ret_progress);

/* Names "COMPONENT/NAME", sorted, that only the caller (missing) or only the step (unexpected) has. As load_start found
 * them, also where it failed; the array is valid until the next load_start or load_free. */
size_t vckpt_load_missing(const struct vckpt_load *load, const char *const **ret_names);
size_t vckpt_load_unexpected(const struct vckpt_load *load, const char *const **ret_names);

/* With VCKPT_LOAD_SKIP_DAMAGED, after load_wait has reported the end: what did not arrive. Its place holds anything.
 * Points into the load. Two may overlap where a tensor was declared twice. */
struct vckpt_load_lost {
	const char *component, *name;
	const uint64_t *box;             /* ndim pairs (offset, size) in the tensor */
	uint32_t ndim;
	int32_t code;                    /* a negative errno */
	const char *why;                 /* a sentence */
};
size_t vckpt_load_lost_count(const struct vckpt_load *load); /* 0 before the end */
int vckpt_load_lost(const struct vckpt_load *load, size_t i, struct vckpt_load_lost *ret_lost); /* -ENOENT */

/* What a load with a communicator did, after load_wait has reported the end; zeros before, and without a
 * communicator. */
struct vckpt_load_exchange {
	size_t size;                     /* sizeof (struct vckpt_load_exchange), set by the caller */
	uint32_t chosen;                 /* VCKPT_EXCHANGE_NEVER or _ALWAYS; _AUTO: it did not get so far */
	uint32_t ranks;
	uint64_t bytes_sent, bytes_got;  /* buckets that this rank read for others, and that it got; decoded bytes */
	uint64_t bytes_shared, bytes_wanted; /* of all ranks: what several want, once; and as often as it is wanted */
	const char *why;                 /* why it was chosen, in a sentence; points into the load */
};
/* -EINVAL: `size` is wrong. */
int vckpt_load_exchanged(struct vckpt_load *load, struct vckpt_load_exchange *ret_exchange);

/* ---- targets ----------------------------------------------------------------------------------------------------- */

/* A target sends a slice of one stored tensor into a slice of one destination. So a merged QKV weight loads into three
 * tensors (three targets with the same stored name), and three weights into a merged one (three targets whose
 * destination is described alike). The destination is described as for vckpt_load_tensors: over all ranks, with mesh
 * and placements, a flat range or boxes, so that each rank gets what it holds of it. */
enum {
	VCKPT_TARGET_CONVERT = 1 << 0,   /* the dtypes may differ: items are converted (docs/load.md) */
	VCKPT_TARGET_RESIZE = 1 << 1,    /* sizes may differ, as those of padded vocabularies do: what fits is loaded */
	VCKPT_TARGET_ZERO = 1 << 2,      /* the rest of the destination becomes zero; else it stays as it is */
};
struct vckpt_target {
	size_t size;                     /* sizeof (struct vckpt_target) */
	const struct vckpt_tensor *to;   /* the destination: shape, dtype, holding and memory are its own */
	const char *component, *name;    /* of the stored tensor; NULL: those of `to` */
	const uint64_t *from;            /* from_ndim pairs (offset, size) in the stored tensor; NULL: all of it */
	const uint64_t *at;              /* where in `to` the slice begins: an offset for each dimension of `to`.
	                                    NULL: it fills all of `to` */
	uint32_t from_ndim;              /* must be the stored tensor's, where `from` is given */
	uint32_t flags;                  /* VCKPT_TARGET_... */
};

/* Declares n targets, with the rules of vckpt_load_tensors: what they point to is copied, the memory is the load's from
 * load_start until load_wait has reported the end, and after an error the load holds what it held before. Without
 * RESIZE the slice must have just the shape of `to`, or be within it where `at` is given; -EINVAL names both shapes.
 * Where `from` is given, dimensions in which the slice has one index may be missing in `to`: one expert of a stack of
 * experts. Where `at` is given, `to` may have more dimensions in front, in which the slice takes one index: an expert
 * into a stack. -EINVAL also names dtypes between which there is no conversion. ZERO writes first, so that several
 * targets may zero the rest of one destination. */
int vckpt_load_targets(struct vckpt_load *load, const struct vckpt_target *targets, size_t n, struct vckpt_error *err);

/* A rule for names: one that begins with `from` at the caller begins with `to` in the step: {NULL, "_orig_mod.", "",
 * 0}. ANYWHERE: every `from` in the name becomes `to`. */
enum {
	VCKPT_RENAME_ANYWHERE = 1 << 0,
};
struct vckpt_rename {
	const char *component;           /* of the tensors; NULL: of all */
	const char *from, *to;
	uint32_t flags;                  /* VCKPT_RENAME_... */
};
/* For all tensors that are declared later, but targets that name the stored tensor: the first rule that fits is used,
 * once. Rules of a second call come after those of the first. -EINVAL names the rule. */
int vckpt_load_rename(struct vckpt_load *load, const struct vckpt_rename *rules, size_t n, struct vckpt_error *err);

/* The same by a function (NULL: none), which comes before all rules. It is called in the thread that declares: 0: the
 * name is not changed, and rules count; 1: it wrote the step's name to ret_name, of `room` bytes; a negative errno:
 * that tensor is refused with it. vckpt_load_missing lists the caller's names, and the sentence of load_start has
 * both. */
int vckpt_load_rename_by(struct vckpt_load *load,
	int (*f)(void *arg, const char *component, const char *name, char *ret_name, size_t room), void *arg,
	struct vckpt_error *err);

#ifdef __cplusplus
}
#endif
#endif
