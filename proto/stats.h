/* SPDX-License-Identifier: Apache-2.0
 *
 * stats: what a rank reports of its own work and of data that others hold too: how long each phase took, digests of its
 * copy of replicated tensors, and the record of a save's measures (docs/format/stats.md). Part of proto/message.h,
 * whose rules hold here too; include that one. Nothing here decides what a step consists of. */
#ifndef PROTO_STATS_H
#define PROTO_STATS_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/buf.h"

/* Not phases, and without times: bytes written again that earlier steps had; and how many of those because an earlier
 * step could not be used. */
#define PROTO_TIMING_AGAIN "again"
#define PROTO_TIMING_NO_BASE "no_base"
/* ns: busy, summed over threads; start_ns, end_ns: of CLOCK_REALTIME, 0: not recorded */
struct proto_timing { const char *phase; uint64_t ns, bytes; uint64_t start_ns, end_ns; };
#define PROTO_TIMINGS_MAX 256u

/* A digest of a rank's copy of the tensors that a group of ranks replicates; the same on all ranks of the group. */
struct proto_replica { uint8_t group[16], digest[16]; };
#define PROTO_REPLICAS_MAX (UINT32_C(1) << 16)
/* One block of a replicated tensor, or all of it: shows which tensor differs when the digests of a group do. The tensor
 * is a number in the part's layout; readers have to check it. */
struct proto_sample { uint32_t tensor; uint8_t group[16]; uint8_t hash[16]; };

/* Measures of one rank's save. Times of CLOCK_REALTIME in ns, 0: not recorded (clocks may go back: no order is
 * promised). */
struct proto_stats {
	const char *run, *attempt; uint64_t step; uint32_t rank, world;
	const char *host;
	const struct proto_timing *timings; uint32_t ntimings;
	uint64_t submitted_ns, staged_ns, committed_ns;
	uint64_t bytes_held, bytes_staged, bytes_unchanged, bytes_deduplicated, bytes_encoded, bytes_written;
	uint64_t pieces, pieces_new;
	uint32_t plan_cached;           /* 0: made; 1: from memory; 2: from disk, not any more */
	uint64_t ring_waits;
	uint64_t entry;                 /* number of the commit entry */
	uint32_t version;               /* 0 to encode: PROTO_VERSION; 1 says nothing of `entry` */
	void *arena;
};
int proto_stats_encode(const struct proto_stats *m, struct base_buf *b);
int proto_stats_decode(const void *body, size_t len, struct proto_stats *ret_m);
void proto_stats_release(struct proto_stats *m);

#endif
