/* SPDX-License-Identifier: Apache-2.0
 *
 * rank: one rank of a job in a program without torch, a save of a few KiB in a few milliseconds. Two drivers stand
 * behind these functions: rank_protocol.c makes the calls of core/commit itself, in one thread, so that every run makes
 * the same calls of the kernel in the same order; rank_saver.c goes through libvckpt. */
#ifndef TESTS_CRASH_RANK_H
#define TESTS_CRASH_RANK_H

#include <stddef.h>
#include <stdint.h>

#define RANK_TEXT 1000
#define RANK_NO_STEP UINT64_MAX

struct rank_job {
	const char *store, *run, *id;
	uint32_t rank, world;
	uint64_t heartbeat_ms, start_ms;
	size_t bytes;                   /* of this rank in a sharded tensor */
	uint64_t step;                  /* of the first save; RANK_NO_STEP: the next one */
	int replace;
	uint32_t workers;               /* of a saver; 0: one */
	int drop;                       /* of a saver: nobody waits for a save, its handle goes at a moment of chance */
};
struct rank;

/* 0, or a negative errno and a sentence. */
int rank_open(const struct rank_job *job, struct rank **ret_r, char text[static RANK_TEXT]);
/* model/w is new in every save of every launch, optimizer/m the same in saves of one number: bases have it. */
int rank_save(struct rank *rank, unsigned number, uint64_t *ret_step, uint64_t *ret_entry, char text[static RANK_TEXT]);
int rank_close(struct rank *rank, char text[static RANK_TEXT]);

/* Bytes that are the same wherever they are asked for; id: of a launch, or "". */
void rank_fill(void *out, size_t len, const char *id, uint64_t seed);

#endif
