/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_cache: plans that were made before, found by a digest of everything that they depend on. One cache belongs to a
 * saver: the last few plans in memory, and, with a directory, one file a plan, which another process may read and write
 * at the same time. A cache and nothing else: whatever goes wrong with a file is a miss, and nobody is told. Any thread
 * calls any function; a key's builder belongs to one thread. get may read a file and put may write one: they block, and
 * never on the store. */
#ifndef CORE_SAVE_PLAN_CACHE_H
#define CORE_SAVE_PLAN_CACHE_H

#include "core/base/buf.h"
#include "core/base/digest.h"
#include "core/save/plan.h"

#define SAVE_PLAN_VERSION 1u                        /* of the rules of plan, share, shard and grid, and of the key */
#define SAVE_PLAN_CACHE_BYTES (UINT64_C(1) << 30)   /* of a directory, where nothing else is said */
#define SAVE_PLAN_CACHE_KEPT 4u                     /* plans in memory, the last used */

/* ---- keys ---- */

struct save_plan_key { struct base_digest digest; uint32_t ntensors, rank; };
/* init, tensor for each in the order of the plan, final. Failures are sticky and told by final. Meshes are read once
 * for each pointer, and may be freed only after final. */
struct save_plan_key_builder {
	struct base_hasher *hasher;             /* NULL: nothing was given to it yet */
	struct base_buf bytes, meshes;          /* what it is given next; struct base_digest of each different mesh */
	struct save_plan_key_mesh { const struct tensor_mesh *mesh; uint32_t number; } *table; /* by pointer */
	uint32_t ntable, mask, nmeshes, ntensors, rank;
	struct save_plan_key_mesh last;
	struct tensor_grid_params params;       /* of the last tensor */
	int error;
};
/* What a plan depends on beside struct save_plan_tensor. Strides in bytes over the local tensor (NULL: contiguous;
 * those of dimensions of one item do not matter, and row-major ones are like none). */
struct save_plan_key_tensor {
	const char *component, *name;
	uint32_t dtype, local_ndim;
	const uint64_t *local_shape;            /* may be NULL where strides is */
	const int64_t *strides;
};
/* mesh: the saver's, or NULL. */
void save_plan_key_init(struct save_plan_key_builder *b, uint32_t rank, uint32_t world, const struct tensor_mesh *mesh);
void save_plan_key_tensor(struct save_plan_key_builder *b, const struct save_plan_tensor *t,
	const struct save_plan_key_tensor *more);
void save_plan_key_bytes(struct save_plan_key_builder *b, const void *bytes, size_t len); /* the caller's own */
/* 0 or -ENOMEM; releases the builder. */
int save_plan_key_final(struct save_plan_key_builder *b, struct save_plan_key *ret_key);

/* ---- the cache ---- */

struct save_plan_cache;
struct save_plan_cache_stats { uint32_t memory_hits, disk_hits, misses; };
/* dir: made when first needed; NULL or "": memory only. max_bytes of its files, 0: SAVE_PLAN_CACHE_BYTES; a plan that
 * is longer than a 256th of it is kept in memory only. NULL: out of memory. */
struct save_plan_cache *save_plan_cache_new(const char *dir, uint64_t max_bytes);
void save_plan_cache_free(struct save_plan_cache *c);   /* NULL-safe; every plan was given back before */
/* 1: from memory, 2: from disk, *ret_plan to be given back; 0: a miss. tensors: what the key was made of; a plan from
 * disk is compared with them, so that no file makes anybody read outside a tensor. */
int save_plan_cache_get(struct save_plan_cache *c, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, const struct save_plan **ret_plan);
/* Takes a plan that was made of the tensors (zeroes it) and returns it, to be given back; NULL: out of memory, `plan`
 * is as it was. */
const struct save_plan *save_plan_cache_put(struct save_plan_cache *c, const struct save_plan_key *key,
	const struct save_plan_tensors *tensors, struct save_plan *plan);
void save_plan_cache_give(struct save_plan_cache *c, const struct save_plan *plan); /* NULL-safe */
void save_plan_cache_stats(struct save_plan_cache *c, struct save_plan_cache_stats *ret_stats);
/* "$XDG_CACHE_HOME/vckpt/plans" or "$HOME/.cache/vckpt/plans". -ENOENT: neither is an absolute path; -ENAMETOOLONG. */
int save_plan_cache_dir(char *path, size_t room);

#endif
