/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the shared memory transport share: the segment that each rank has.
 *
 * A segment is a memfd of a sealed size, so that no one can make it shorter under a reader. Its rank alone writes it;
 * the others map it read-only. So a peer can be wrong only in the values that are read, and each of these is checked:
 * a number of a room, lengths, a text. */
#ifndef CORE_COMM_SHARED_INTERNAL_H
#define CORE_COMM_SHARED_INTERNAL_H

#include <stdbool.h>
#include <sys/types.h>

#include "core/comm/shared.h"

#define SHARED_ROOT "/dev/shm"
#define SHARED_MAGIC UINT64_C(0x3176656d6d6f6376) /* "vcommev1" */
#define SHARED_GATHER_BYTES (64u << 10)  /* what a rank gives in one step of a gather */

enum shared_state { SHARED_LIVES, SHARED_ABORTED, SHARED_CLOSED };

struct shared_slot { uint32_t room, reserved; uint64_t len; };

struct shared_head {
	uint64_t magic, nonce;           /* nonce: of this communicator at this rank, not 0 */
	uint32_t rank, size;
	uint64_t start;                  /* of the process, as /proc says */
	int32_t pid;
	_Atomic uint32_t bell;           /* a futex: grows whenever something below has changed */
	_Atomic uint32_t state;          /* enum shared_state */
	_Atomic uint64_t gathered;       /* steps of gathers that this rank has given */
	_Atomic uint64_t passed;         /* passes that this rank owns and has started */
	struct shared_slot slot[COMM_ROOMS]; /* of pass n: slot[n % COMM_ROOMS] */
	char why[1000];                  /* of an abort: a sentence that names the rank at fault */
};
/* After the head: shared_met: of each rank, the nonce of the segment that this rank has mapped; shared_done: of each
 * rank's pass n, at [n % COMM_ROOMS]: n + 1, once this rank has used it. Then two halves for gathers, then rooms. */
struct shared_seat { _Atomic uint64_t met, done[COMM_ROOMS]; };

struct shared_peer {
	struct shared_head *head;        /* NULL: not mapped. Read-only, but this rank's own */
	bool agreed;                     /* while meeting: it has mapped this rank's segment */
	uint64_t passed;                 /* of its passes, how many this rank has started, wanted or not */
};

struct shared {
	struct comm comm;
	char folder[160];
	bool shown;                      /* this rank's file is in it, */
	int seat;                        /* and held by this */
	int fd;                          /* of the own segment; -1 */
	size_t seats_at, gather_at, rooms_at, bytes; /* of every segment */
	struct shared_peer *peers;       /* by rank */
	uint64_t steps;                  /* of gathers */
	_Atomic bool relays;             /* a peer said, or showed, why it ends: its words are passed on */
};

static inline struct shared_seat *shared_seats(const struct shared *s, struct shared_head *head)
{
	return (struct shared_seat *)((uint8_t *)head + s->seats_at);
}

/* Allocates memory of the own segment before it is touched: a lack of it is an error then, and no signal. -ENOMEM,
 * -ENOSPC */
int shared_have(const struct shared *s, size_t from, size_t len);
/* Makes the own segment, finds those of the others, and waits until all have each other's. */
int shared_meet(struct shared *s, struct base_error *err);
/* Takes this rank's file away, and the folder if nothing else is in it. */
void shared_hide(struct shared *s);
/* Is that process gone, or another one by now? */
bool shared_dead(int32_t pid, uint64_t start);
void shared_ring(struct shared_head *own);
void shared_sleep(struct shared_head *head, uint32_t bell, uint32_t ms); /* until the bell differs */

#endif
