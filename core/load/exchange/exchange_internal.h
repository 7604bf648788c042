/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of an exchange share. exchange.c has the idea.
 *
 * What a rank wants of an object is counted in blocks. All ranks know an object by its place: pack, offset, length, and
 * a hash of the rest of its reference, so that references that differ in anything are different objects. A segment is
 * blocks of one object that the same ranks want; after the plan has cut it, one of them owns it. A bucket is segments
 * of one owner that the same ranks want, at most EXCHANGE_BUCKET_BYTES of raw bytes. */
#ifndef CORE_LOAD_EXCHANGE_EXCHANGE_INTERNAL_H
#define CORE_LOAD_EXCHANGE_EXCHANGE_INTERNAL_H

#include "core/base/buf.h"
#include "core/comm/comm.h"
#include "core/load/exchange/exchange.h"
#include "core/load/fill/fill_work.h"

#define EXCHANGE_HEAD_BYTES 128u         /* of a bucket, before its raw bytes */
#define EXCHANGE_BUCKET_BYTES (2u << 20)
#define EXCHANGE_BUCKET_SEGMENTS 256u
#define EXCHANGE_PROBE_BYTES (UINT64_C(6) << 20) /* of a rank, read before any is passed on; they fit into its rooms */
#define EXCHANGE_NONE UINT32_MAX
#define EXCHANGE_TEXT_MAX 1000u

_Static_assert(EXCHANGE_HEAD_BYTES + EXCHANGE_BUCKET_BYTES <= COMM_PASS_BYTES, "a bucket is one pass");

/* ---- exchange_list.c: what a rank wants, in few bytes ---- */

struct exchange_key { uint64_t offset, raw_len, hash; uint32_t pack; };
struct exchange_run { uint32_t first, n; }; /* blocks */

static inline int exchange_key_compare(const struct exchange_key *a, const struct exchange_key *b)
{
	if (a->pack != b->pack)
		return a->pack < b->pack ? -1 : 1;
	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	if (a->raw_len != b->raw_len)
		return a->raw_len < b->raw_len ? -1 : 1;
	return (a->hash > b->hash) - (a->hash < b->hash);
}

/* Raw bytes of n blocks from `first` on of an object of that length, which has them. */
static inline uint64_t exchange_bytes(uint64_t raw_len, uint64_t first, uint64_t n)
{
	return base_min((first + n) * BASE_BLOCK_BYTES, raw_len) - first * BASE_BLOCK_BYTES;
}

/* Appends an object that comes after `last` (zeros: the first one) and the blocks that are wanted of it, as ascending
 * runs that do not touch. Errors stay in the buffer. */
void exchange_list_add(struct base_buf *list, struct exchange_key *last, const struct exchange_key *key,
	const struct exchange_run *runs, uint32_t nruns);

/* Reads a list that a peer sent. Checked: objects ascend, numbers are in their range, runs are inside their object. */
struct exchange_cursor {
	const uint8_t *at, *end;
	uint32_t npacks;                 /* packs that there are */
	struct exchange_key key;         /* the current object */
	struct exchange_run *runs; uint32_t nruns, runs_room; /* of it */
	bool begun;
};
void exchange_cursor_init(struct exchange_cursor *c, const uint8_t *list, uint64_t len, uint32_t npacks);
/* 1: there is another object; 0: the end; -BASE_EFORMAT; -ENOMEM. */
int exchange_cursor_next(struct exchange_cursor *c);
void exchange_cursor_release(struct exchange_cursor *c);

/* ---- exchange_plan.c: who reads what, the same at all ranks ---- */

struct exchange_object { struct exchange_key key; uint32_t mine; }; /* mine: its number in this rank's list, or NONE */
struct exchange_segment { uint32_t object, first, n, group, owner; };
struct exchange_group { uint32_t *ranks; uint32_t n; uint64_t bytes, objects; }; /* ranks: ascending */
struct exchange_bucket {
	uint32_t owner, group;
	uint32_t own;                    /* its number among those of its owner */
	uint32_t nsegments;
	uint64_t first;                  /* segment */
	uint64_t bytes;                  /* raw */
};
/* Blocks of an object in this rank's list which it reads for itself alone, while it shares others. */
struct exchange_alone { uint32_t mine, first, n; };

struct exchange_plan {
	struct exchange_object *objects; size_t nobjects, objects_room; /* that more than one rank wants something of */
	struct exchange_segment *segments; size_t nsegments, segments_room;
	struct exchange_group *groups; uint32_t ngroups, groups_room;
	struct exchange_bucket *buckets; size_t nbuckets, buckets_room; /* in the order of their passes */
	struct exchange_alone *alone; size_t nalone, alone_room;
	uint64_t distinct, wanted;       /* raw bytes that are shared: once; for each rank that wants them */
	uint64_t sum;                    /* of the whole plan: equal at all ranks */
	uint64_t *reads;                 /* raw bytes that each rank reads */
};

/* One list, and the ranks that sent it (ascending). */
struct exchange_list { const uint8_t *bytes; uint64_t len; const uint32_t *ranks; uint32_t nranks; };
struct exchange_terms {
	uint32_t rank, size, npacks;
	bool whole;                      /* objects are not cut */
	bool small;                      /* buckets small enough for a probe of a tenth */
};
/* -BASE_EFORMAT names the rank whose list breaks its format. */
int exchange_plan_make(const struct exchange_list *lists, uint32_t nlists, const struct exchange_terms *terms,
	struct exchange_plan *ret_plan, struct base_error *err);
void exchange_plan_release(struct exchange_plan *p);

/* The merge of the lists is one step of it (exchange_merge.c): objects, segments without owners, groups, alone, and
 * reads of what each rank wants alone. */
int exchange_merge(const struct exchange_list *lists, uint32_t nlists, const struct exchange_terms *terms,
	struct exchange_plan *p, struct base_error *err);

/* ---- exchange.c, exchange_turns.c, exchange_work.c: one rank's exchange while it runs ---- */

#define EXCHANGE_OWN_FLYING (COMM_ROOMS / 2) /* the other rooms are being filled */
#define EXCHANGE_THREADS 256u
#define EXCHANGE_ROUND 32u               /* buckets of each rank between two votes */
#define EXCHANGE_FLYING 32u              /* passes that are started and not finished */

struct exchange_mine {                   /* an object in this rank's list */
	size_t first, end;               /* needs, in exchange.needs */
	atomic_uint left;                /* blocks that have not come */
	atomic_bool lost;                /* its boxes have been listed as lost */
};
struct exchange_pass { struct comm_pass pass; struct exchange_pass *next; uint32_t bucket, ranks[]; };
struct exchange_own { uint8_t *room; bool ready; }; /* of bucket n of this rank's: at [n % COMM_ROOMS] */

struct load_exchange {
	struct load_fill *f;
	struct comm *comm;
	enum load_exchange_mode mode;
	struct base_buf list;            /* what this rank wants */
	struct exchange_mine *mine; size_t nmine, mine_room;
	struct exchange_plan plan;
	struct fill_need *needs;         /* of `mine`: the fill's own until they are split off */
	struct fill_need *split; size_t nsplit;
	uint32_t *own; uint32_t nowned;    /* this rank's buckets */
	struct load_exchange_result result;
	char why[400];
	pthread_t threads[EXCHANGE_THREADS]; unsigned nthreads;
	atomic_uint_fast64_t bucket_ns;  /* what threads spent on buckets of this rank's */
	atomic_uint_fast64_t pass_ns;    /* of it, for the others: a rank that reads for itself alone saves it */

	pthread_mutex_t lock;            /* protects what follows */
	pthread_cond_t work, news;       /* for workers; for the thread that makes the calls */
	uint32_t own_next, own_limit;    /* buckets of this rank's: to be read next, and up to which they may be */
	struct exchange_own ready[COMM_ROOMS];
	struct exchange_pass *arrived, **arrived_end;
	unsigned placing;                /* passes that have arrived and are not placed */
	bool private_too;                /* what this rank alone wants may be read */
	size_t alone_next;               /* of plan.alone */
	bool tasks_over;
	unsigned busy;                   /* workers that read such */
	bool over;                       /* workers end */
	struct base_error error;         /* the first one of this rank's */
};

/* exchange_wants.c. Makes x->list, x->mine and x->needs. -ENOMEM. */
int exchange_wants(struct load_exchange *x);
/* Only the first n buckets are passed on: the needs of their objects go from the fill to x->needs. -ENOMEM. */
int exchange_split(struct load_exchange *x, size_t n);

/* exchange_votes.c. Each rank sends the others whether it has failed, and four numbers (NULL: zeros). An error is the
 * communicator's, or that of the lowest rank that has failed; at a rank that has failed itself, its own. Free the votes
 * (NULL: not wanted). */
struct exchange_greeting;
struct exchange_vote;
int exchange_agree(struct load_exchange *x, const char *what, const uint64_t *numbers,
	struct exchange_vote **ret_votes, struct base_error *err);
/* Compares what the ranks ask for. failed: with .code, what this rank has failed with. ret_all: of each rank. */
int exchange_greet(struct load_exchange *x, const struct base_error *failed, struct exchange_greeting *ret_all,
	struct base_error *err);
/* Gathers the lists and makes the plan. -BASE_ELIMIT at all ranks: it is too much to be shared. */
int exchange_lists(struct load_exchange *x, const struct exchange_greeting *all, struct base_error *err);
/* This rank has no memory to take part: breaks the communicator. -ENOMEM. */
int exchange_short(struct load_exchange *x, struct base_error *err);

/* exchange_probe.c. Puts the buckets of the probe before all others; 0 of them: there is too little. -ENOMEM. */
int exchange_probe_order(struct load_exchange *x, size_t *ret_n, uint64_t *ret_bytes);
/* Reads and passes on the buckets [0, n), of so many bytes, and decides whether all are shared. */
int exchange_probe(struct load_exchange *x, size_t n, uint64_t bytes, bool *ret_shares, struct base_error *err);

/* Takes that many rooms once, while none is taken, and writes to them: so a lack of memory is an error of this
 * exchange, which the next vote reports, and none is allocated while something is measured. */
void exchange_rooms(struct load_exchange *x, unsigned want);
void *exchange_worker(void *arg);        /* arg: the exchange */
/* Remembers the first error, and ends the fill's own tasks. Any thread. */
void exchange_fail(struct load_exchange *x, const struct base_error *err);
/* The first error here so far, or 0. err is zeros. */
int exchange_failed(struct load_exchange *x, struct base_error *err);
/* Passes on the buckets [from, to) of the plan, and finishes all of them. An error is the communicator's. */
int exchange_turns(struct load_exchange *x, size_t from, size_t to, struct base_error *err);

#endif
