/* SPDX-License-Identifier: Apache-2.0
 *
 * replica: what a rank hashes to show that it holds the same as its replicas. Every tensor that several ranks hold
 * alike (by mesh and placements; buffers apart) has entries: boxes of what this rank holds, the same ones on every
 * replica, of which the row-major bytes are hashed with base_xxh128_of under the store's seed. Then a digest over all
 * tensors of each replica group goes into the announcement, and a hash for each tensor into the part, which is read
 * only where the digests of a group differ (core/commit/check/manifest_replicas.c).
 *
 * SAMPLE: one block of at most 16 KiB a tensor, another one at each step; but all of a tensor of integers or
 * bools of at most 16 MiB: masks and positions, of which a few items differ. FULL: everything, in boxes of at most
 * 1 MiB. A group is named by the mode and its ranks in mesh order, so ranks that check differently are not compared.
 * Pure but for memory; any thread. */
#ifndef CORE_SAVE_PLAN_REPLICA_H
#define CORE_SAVE_PLAN_REPLICA_H

#include "core/save/plan/plan.h"
#include "proto/message.h"

#define SAVE_REPLICA_SAMPLE_BYTES 16384u
#define SAVE_REPLICA_WHOLE_BYTES (UINT64_C(16) << 20)
#define SAVE_REPLICA_FULL_BYTES (UINT64_C(1) << 20)

enum save_replicas_mode { SAVE_REPLICAS_SAMPLE, SAVE_REPLICAS_FULL, SAVE_REPLICAS_OFF };

/* `at` as in save_plan_box */
struct save_replica_entry { uint32_t tensor; struct tensor_shard_box at; uint64_t bytes; };
struct save_replica_tensor { uint32_t tensor, group; uint64_t first, n; };  /* entries [first, first + n) */
struct save_replicas {
	enum save_replicas_mode mode;
	struct save_replica_entry *entries; uint64_t nentries;  /* by tensor */
	struct save_replica_tensor *tensors; uint32_t ntensors; /* ascending */
	uint8_t (*groups)[16]; uint32_t ngroups;
	uint64_t bytes;                 /* of all entries */
};
/* tensors, rank: as for save_plan_make (which checked them: its errors). save: a text that is the same on all ranks, it
 * chooses the blocks. -ENOMEM. OFF gives nothing. */
int save_replicas_make(const struct save_tensor *tensors, uint32_t n, uint32_t rank, const char *save,
	enum save_replicas_mode mode, struct save_replicas *ret_replicas, struct base_error *err);
void save_replicas_release(struct save_replicas *replicas); /* NULL-safe */

struct save_replicas_rows {
	struct proto_sample *samples; uint32_t nsamples;        /* for the part: by number in the layout */
	struct proto_replica *replicas; uint32_t nreplicas;     /* for the announcement: by group */
};
/* hashes: of each entry. seed: the store's. numbers: of each tensor in the rank's layout. -ENOMEM. */
int save_replicas_finish(const struct save_replicas *replicas, const struct save_tensor *tensors,
	const uint32_t *numbers, const struct base_xxh128 *hashes, uint64_t seed, struct save_replicas_rows *ret_rows);
void save_replicas_rows_release(struct save_replicas_rows *rows); /* NULL-safe */

#endif
