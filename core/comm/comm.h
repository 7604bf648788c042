/* SPDX-License-Identifier: Apache-2.0
 *
 * comm: a communicator: a few ranks that make the same calls in the same order. It gathers small byte strings, and it
 * passes buckets of bytes from the rank that owns them to those that want them, several at once. What carries them is a
 * transport: the shared memory of one host, or functions of the caller.
 *
 *   comm_gather            every rank gives a string, and gets those of all; blocks
 *   room -> fill -> start -> finish        at the rank that owns a bucket
 *           start -> finish -> use -> done at a rank that wants it; the others call start alone
 *
 * Order: all ranks call gather and start in one order, with the same owner, ranks and len. Each rank finishes the
 * passes that it owns or wants in the order in which it started them, and may have started later ones before; it
 * finishes all of them before the next gather. So NCCL's groups, MPI's requests and a process group's collectives all
 * can carry them, and no two ranks wait for each other. Gathers check that the ranks keep the order: each says how many
 * calls its rank has made.
 *
 * Failure: after the first call that fails the communicator is broken, every later call says why, and the transport
 * informs the other ranks at once if it can, as comm_abort does. A rank that is dead, or does not come, makes
 * the calls of the others fail within the time-out; nothing hangs. What a peer sends is not to be trusted: its lengths
 * are checked here, its bytes are the caller's to check.
 *
 * Threads: gather, start and finish come from one thread at a time; room, done and abort from any. */
#ifndef CORE_COMM_COMM_H
#define CORE_COMM_COMM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

#define COMM_RANKS_MAX 65536u
#define COMM_PASS_BYTES ((2u << 20) + 4096u) /* of one bucket at most */
#define COMM_ROOMS 8u                    /* buckets that a rank owns at one time: filled, or on their way */
#define COMM_TIMEOUT_MS 300000u          /* the meaning of 0 */

/* A bucket on its way. Zero-initialise it, set owner, ranks and len, and do not move it until it is finished or a call
 * has failed. The functions of a caller (functions.h) see what is before `request`, as struct vckpt_comm_pass. */
struct comm_pass {
	uint64_t number;                 /* of passes that were started before, by all owners; start sets it */
	uint64_t len;                    /* 1 to COMM_PASS_BYTES, the same at all ranks */
	/* Host memory. At the owner: its room, which is read until finish. At a rank that wants it: where the bytes are
	 * from finish until done; no one else may write there. Elsewhere NULL. */
	uint8_t *bytes;
	const uint32_t *ranks;           /* that want it: ascending, one at least, not the owner; the caller's */
	uint32_t nranks, owner;
	void *request;                   /* the transport's */
	uint64_t word[2];                /* the transport's */
};

struct comm;
struct comm_buffer { uint8_t *bytes; bool taken, made; }; /* COMM_PASS_BYTES */

/* What a transport does. Lengths and ranks have been checked. A wait is c->timeout_ms long at most, and ends soon with
 * -ECANCELED, where the transport can see that *c->stop has become true. `err` gets a sentence. */
struct comm_ops {
	/* Each rank gives lens[rank] bytes, and gets those of all, one after another. `lens` is the same at all
	 * ranks, some of it 0, not all of it. */
	int (*gather)(struct comm *c, const void *mine, const uint64_t *lens, uint8_t *ret_all,
		struct base_error *err);
	/* Makes the memory of a lent room, before it is taken for the first time. May be NULL; any thread */
	int (*room)(struct comm *c, const uint8_t *bytes);
	/* Begins; does not wait for the others. At the owner and at ranks that want it p->bytes is set, but where
	 * c->lends: then a rank that wants it has NULL, and the transport sets it in finish. */
	int (*start)(struct comm *c, struct comm_pass *p, struct base_error *err);
	/* Waits. Owner: no one reads p->bytes any more. A rank that wants it: they have come. Others: not called. */
	int (*finish)(struct comm *c, struct comm_pass *p, struct base_error *err);
	void (*done)(struct comm *c, struct comm_pass *p); /* the bytes are used. May be NULL; any thread */
	int (*listen)(struct comm *c, struct base_error *err); /* -BASE_EABORTED: another rank has given up; does not
	                                                           wait. May be NULL; as gather, start and finish */
	void (*abort)(struct comm *c, const char *why);    /* informs the others. May be NULL; any thread, once */
	void (*free)(struct comm *c);                      /* what the transport has, c included; passes may be open */
};

/* The first member of each transport's own struct. */
struct comm {
	const struct comm_ops *ops;
	uint32_t rank, size;
	uint32_t timeout_ms;
	bool lends;                      /* finish gives memory of the transport's own */
	atomic_bool taken;               /* by a load, a call, or another communicator */
	const atomic_bool *stop;         /* NULL, or ends waits: the caller's, set between calls */
	uint64_t gathers, passes;        /* calls so far */
	uint64_t flying;                 /* passes that this rank owns or wants, started and not finished */
	pthread_mutex_t lock;            /* protects what follows */
	struct comm_buffer rooms[COMM_ROOMS];
	bool rooms_lent;                 /* the transport's memory */
	struct comm_buffer *buffers; size_t nbuffers, buffers_room; /* for what comes; none, where it lends */
	struct base_error broken;        /* .code 0: it works */
};

/* ---- for users ---- */

/* For one load or call, until comm_give. -EBUSY: it is taken. */
int comm_take(struct comm *c, struct base_error *err);
static inline void comm_give(struct comm *c) { atomic_store(&c->taken, false); }

/* What every rank gave; comm_gathered_release. */
struct comm_gathered { uint64_t *len; uint8_t **bytes; };
void comm_gathered_release(struct comm_gathered *g); /* may be zeros */
/* `what`: what the strings are, in a word or two, the same at all ranks: ranks whose words differ are out of step, an
 * error at all of them. All strings together: at most `max` bytes, else -BASE_ELIMIT at all ranks, and nothing is
 * broken. */
int comm_gather(struct comm *c, const char *what, const void *mine, uint64_t len, uint64_t max,
	struct comm_gathered *ret_all, struct base_error *err);

/* Memory of COMM_PASS_BYTES for a bucket of this rank's, its until the pass is finished. -EAGAIN: all COMM_ROOMS are
 * taken, finish a pass. -ENOMEM, -ENOSPC: there is no memory for one more. */
int comm_room(struct comm *c, uint8_t **ret_bytes);
void comm_room_free(struct comm *c, const uint8_t *bytes); /* of one that was never passed on; NULL-safe */
int comm_pass_start(struct comm *c, struct comm_pass *p, struct base_error *err);
/* Frees the owner's room. At a rank that neither owns nor wants it: nothing. */
int comm_pass_finish(struct comm *c, struct comm_pass *p, struct base_error *err);
void comm_pass_done(struct comm *c, struct comm_pass *p); /* by a rank that wanted it, once after each finish */
bool comm_pass_wants(const struct comm *c, const struct comm_pass *p); /* does this rank? */

/* Breaks the communicator, here and, where the transport can inform them, at all other ranks: their calls fail soon
 * with `why`. Only the first one counts. */
void comm_abort(struct comm *c, const char *why);
void comm_free(struct comm *c);          /* NULL-safe */

/* ---- for transports ---- */

/* timeout_ms 0: COMM_TIMEOUT_MS. -EINVAL: no such rank, or a size that is none. The rest of c is zeros. */
int comm_init(struct comm *c, const struct comm_ops *ops, uint32_t rank, uint32_t size, uint32_t timeout_ms,
	struct base_error *err);
/* The rooms are this memory, COMM_ROOMS * COMM_PASS_BYTES of it; without a call they are malloc'ed as needed. */
void comm_lend_rooms(struct comm *c, uint8_t *bytes);
void comm_release(struct comm *c);       /* what comm_init made; ops->free calls it */

#endif
