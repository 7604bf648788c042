/* SPDX-License-Identifier: Apache-2.0
 *
 * stalls: what the files of `vckpt stalls` share: the measures of a step's ranks as one table. One thread. */
#ifndef TOOLS_VCKPT_STALLS_STALLS_H
#define TOOLS_VCKPT_STALLS_STALLS_H

#include "core/commit/notes/stats.h"
#include "tools/vckpt/tool.h"

#define STALLS_PHASES_MAX 64u   /* names of phases; further ones are left out and counted */
#define STALLS_SLOWEST 5u

enum stalls_source {
	STALLS_NONE,            /* nothing is known of this rank */
	STALLS_PART,            /* its part's timings: phases up to the part, no bytes, no milestones */
	STALLS_STATS,
};
/* In order of a save. Since submitted; announced: when it began to wait for the others. */
enum stalls_milestone { STALLS_STAGED, STALLS_ANNOUNCED, STALLS_COMMITTED, STALLS_MILESTONES };
enum stalls_bytes {
	STALLS_HELD, STALLS_COPIED, STALLS_UNCHANGED, STALLS_DEDUPLICATED, STALLS_AGAIN, STALLS_NO_BASE, STALLS_ENCODED,
	STALLS_WRITTEN, STALLS_BYTES
};
extern const char *const stalls_bytes_names[STALLS_BYTES];

/* Times of day are of the rank's clock, in ns; 0: not recorded. */
struct stalls_time { unsigned phase; uint64_t busy_ns, bytes, start_ns, end_ns; };
struct stalls_rank {
	uint32_t rank;
	const char *host;
	enum stalls_source source;
	struct stalls_time *times; unsigned ntimes; /* each phase once */
	uint64_t submitted_ns, at_ns[STALLS_MILESTONES];
	uint64_t bytes[STALLS_BYTES], pieces, pieces_new, ring_waits;
	uint32_t plan_cached;
};
struct stalls {
	const char *run, *attempt;
	uint64_t step, entry;
	struct stalls_rank *ranks; uint32_t nranks;     /* ascending */
	char *phases[STALLS_PHASES_MAX]; unsigned nphases;
	uint64_t phases_left_out;
	uint32_t damaged;               /* measures or parts that cannot be read */
	struct proto_manifest manifest; /* these two own the names of hosts */
	struct proto_stats *measures; uint32_t nmeasures;
};
/* Reads the measures of a step, whose strings must live as long as the table. Release it whatever this returns. */
int stalls_read(struct stalls *st, struct store *s, const char *run, const struct commit_list_step *step,
	struct base_error *err);
void stalls_release(struct stalls *st);

/* One value of each rank that has it. */
struct stalls_sum { uint32_t n, slowest; uint64_t median, max, min; }; /* slowest: number in ranks */
struct stalls_value { uint64_t ns; uint32_t rank; };    /* rank: number in ranks */
/* Milestones are since submitted. false: not recorded, or the clock was set back meanwhile. */
bool stalls_since(const struct stalls_rank *rank, enum stalls_milestone m, uint64_t *ret_ns);
/* What is summed over the ranks: the milestones, then the phases. */
const char *stalls_row_name(const struct stalls *st, unsigned row);
/* What the rank with that number in ranks has there; false: nothing. */
bool stalls_row_value(const struct stalls *st, uint32_t i, unsigned row, uint64_t *ret_ns);
/* n 0: no rank has it. -ENOMEM. */
int stalls_sum(const struct stalls *st, unsigned row, struct stalls_sum *ret_s);
/* The last ones to reach a milestone, slowest first. Returns how many, or -ENOMEM. */
int stalls_slowest(const struct stalls *st, enum stalls_milestone m, struct stalls_value top[static STALLS_SLOWEST]);
/* The phase that took most of the time to a milestone; NULL: no phase is known. */
const struct stalls_time *stalls_largest(const struct stalls_rank *rank, enum stalls_milestone m, uint64_t *ret_ns);
uint64_t stalls_bytes_total(const struct stalls *st, enum stalls_bytes b);
/* Bytes a second over the longest time to the milestone that ends this; false: not known. */
bool stalls_rate(const struct stalls *st, enum stalls_bytes b, uint64_t *ret_bytes_per_s);
/* Ranks of one source, ascending; free() the array. -ENOMEM. */
int stalls_ranks_of(const struct stalls *st, enum stalls_source source, uint32_t **ret_ranks, uint32_t *ret_n);

int stalls_print(const struct stalls *st);      /* 0 or -ENOMEM */
json_t *stalls_json(const struct stalls *st);   /* NULL: out of memory */
/* Where the timeline begins: the first submit; where no rank has one, the first start. */
uint64_t stalls_origin(const struct stalls *st);
/* Writes the Chrome trace-event file. A negative errno, and the sentence. */
int stalls_trace(const struct stalls *st, const char *path, struct base_error *err);

#endif
