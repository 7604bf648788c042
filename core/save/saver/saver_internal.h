/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of a saver share (docs/save.md).
 *
 *   saver.c     open, close, threads                flight.c   begin, submit, wait
 *   declare.c   tensors, blobs, values              prepare.c  order, layout, plan
 *   workers.c   what a worker does next             stage.c    one batch: memory -> slot
 *   bands.c     staged bands, for the engine         persist.c  one flight at a time: begin ... commit, stats
 *   lanes.c     device memory: fence, streams
 *   room.c      the ring's size, workers, by the ranks of this node
 *   same.c      pieces that are as the last step has them, which are not copied
 *
 * Flights are in a queue in the order in which they were begun. Three stages move along it, each at a flight of its
 * own:
 *
 *   prepare  layout and plan                                            a worker
 *   stage    batches of bands compared where they are, and copied       workers, before anything else
 *            into slots of the ring, in order
 *   persist  bands processed (workers) and appended in order            the persister's thread, with the workers
 *
 * Owners of a slot: the worker that copies (BATCH_COPYING), then the batch (BATCH_STAGED), of which bands are given out
 * to workers one after another, each of which owns its own part; when the last band was appended, the packs that write
 * pieces from where they are (`lent`). Then the slot goes back to the ring. Nothing else points into a slot. */
#ifndef CORE_SAVE_SAVER_SAVER_INTERNAL_H
#define CORE_SAVE_SAVER_SAVER_INTERNAL_H

#include "core/base/table.h"
#include "core/commit/launch/launch.h"
#include "core/device/ring.h"
#include "core/save/plan/plan_cache.h"
#include "core/save/saver/keep_internal.h"
#include "core/save/saver/lanes_internal.h"
#include "core/save/saver/same_internal.h"
#include "core/save/saver/saver.h"
#include "core/save/write/rank.h"
#include "core/save/write/space.h"

#define SAVER_BATCH_BYTES (UINT64_C(2) << 20)    /* small bands are copied together up to that */
#define SAVER_RING_MIN_BYTES (UINT64_C(64) << 20)

/* Before READY it is not known what has to be copied: some of it may be as the last step has it (same.c). */
enum saver_batch_state { BATCH_TO_COMPARE, BATCH_COMPARING, BATCH_COMPARED, BATCH_READY, BATCH_COPYING, BATCH_STAGED };
struct saver_batch {
	struct saver_batch *next; struct save_saver *s;
	struct storage_lent lent;         /* the slot's users: the batch, and packs */
	enum saver_batch_state state;
	struct save_cursor from;        /* its first band; what samples: their first entry */
	uint64_t nbands, given, left;   /* given to workers; not appended yet */
	uint64_t offset;                /* in the slot, of the next band that is given */
	uint64_t bytes, data_bytes;     /* to be copied, with and without what is between bands */
	uint64_t whole_bytes;           /* of its bands */
	uint64_t steady_bytes;          /* of its pieces that may be the same the next time */
	uint8_t *slot;                  /* NULL once it is staged: nothing was copied */
	bool waited; uint64_t waits_ns; /* for room in the ring, since when */
	uint64_t first_piece, npieces;  /* of all bands, by number in the plan */
	uint64_t next_piece;            /* of the next band that is given, likewise */
	bool cut;                       /* in the slot: piece after piece, as stored, hashed; else boxes, row-major */
	bool same, differs;             /* a piece of it is the same; one is not: there is a slot */
	bool samples; uint64_t first_entry, nentries;
};

struct saver_blob { void *bytes; size_t len; };
struct saver_arena;                     /* what the save copied: memory of its own */

struct save_flight {
	struct save_saver *s;
	struct save_flight *next;       /* in the queue; after it, in the saver's list `unseen` */
	/* protected by the saver's lock */
	unsigned refs;
	enum save_flight_state state;
	bool submitted, given_up, prepared, handed_out, forming, staged, failed, over, seen;
	bool ring_seen, ring_fits;      /* the ring was looked at; its size was decided for this one (room.c) */
	enum saver_same same; uint64_t same_until_ns; /* asked for until then, on CLOCK_MONOTONIC; 0: no one waits */
	struct saver_pieces *before;    /* of the save to compare with; NULL: there is none */
	unsigned copying;               /* workers that are at its data */
	int r; struct base_error err;   /* the first error */
	uint64_t step, entry;
	struct save_flight_info info;
	struct saver_batch *first, *last;       /* not wholly appended */
	struct saver_batch *formed; bool walked; /* have no slots yet; there are no more after these */
	struct save_cursor former; uint64_t former_piece; /* the next batch begins here */
	uint64_t next_entry;                    /* of the samples */

	/* of the declaring thread, then of the one that prepares, then read-only */
	uint64_t number;                /* count of the attempt */
	struct save_flight_options options;
	char **bases; size_t nbases;
	struct check_commons commons;   /* finished at submit */
	struct save_tensor *tensors; uint32_t ntensors, tensors_room; /* pointers into the arena */
	struct base_table by_name;      /* the first of each component and name */
	struct saver_words { char *words; struct tensor_placements *placements; } *words; size_t nwords;
	struct { const struct tensor_mesh *from, *to; } last_mesh;
	struct saver_arena *arena;
	struct device_fence *fence;     /* NULL: no device memory */
	bool device;
	struct save_planned *planned; const struct save_plan *plan; /* of the cache; the plan in it */
	struct saver_pieces *pieces;
	struct save_replicas replicas; struct base_xxh128 *sample_hashes;
	struct save_writer *w;
	struct commit_attempt *attempt; uint64_t persisted_ns, disk_before_ns; /* the persister's: clocks as it began */
};

struct saver_worker {                   /* one thread's own */
	struct save_saver *s;
	pthread_t thread; bool started, copies, digests, surplus; /* surplus: ends; protected by the saver's lock */
	struct saver_lane lanes[SAVER_LANES]; unsigned nlanes;
	struct save_band walker;        /* to walk bands without processing them */
	struct base_xxh128_state *hash; uint8_t *room; /* what is copied, on its way through the nearest cache */
	uint64_t until_ns;              /* it waits no longer; 0: for ever */
};

struct save_saver {
	struct store *store;
	pid_t pid;
	struct save_saver_options options;
	char *run;
	struct commit_launch *launch;
	struct save_plan_cache *plans;
	pthread_mutex_t meshes_lock;    /* protects the next two */
	struct tensor_mesh **meshes; size_t nmeshes;
	const struct tensor_mesh *mesh; /* of tensors that name none: one of them */

	pthread_mutex_t lock;           /* protects all below and what flights say */
	pthread_cond_t work, ready, callers; /* workers; the persister; callers */
	struct save_flight *first, *last, *preparing; uint64_t count; /* preparing: at most one */
	bool closing, closed, stop;
	/* sizing: a thread is changing the ring, and no slot is taken meanwhile; that thread's: pin_warned */
	struct device_ring *ring; bool sizing, pin_warned;
	unsigned node_ranks; bool node_known; /* 0: not known; set by the thread that prepares */
	/* the persister's; added: by all ranks' last save, 0: there was none */
	bool room_warned, again_warned, no_base_warned; struct save_past past;
	struct save_space space; struct saver_keep keep; uint64_t added;
	/* same.c: of the last commit; how many saves are copied whole; what the last answer took */
	struct saver_pieces *pieces; unsigned same_rest; uint64_t answer_ns;
	/* the flight whose bands are wanted, and its bands */
	struct save_flight *persisting; struct saver_batch *batch;
	struct save_engine engine;
	/* failed flights whose error no caller has seen, ascending, while their handles live; and the first of those
	 * whose handle is gone */
	struct save_flight *unseen; int first_r; struct base_error first_err; uint64_t first_failed;

	struct saver_worker *workers; unsigned nworkers, threads; /* threads: of each kind, as started */
	pthread_t persister; bool persister_started;
};

/* The saver's lock is held for these. The first is the persister's. */
uint64_t saver_disk_ns(const struct save_flight *f);
void saver_phase_note(struct save_flight *f, enum save_phase phase, uint64_t start_ns, uint64_t busy_ns,
	uint64_t bytes);
void saver_flight_fail(struct save_flight *f, int r, const struct base_error *err);
int saver_flight_error(const struct save_flight *f, struct base_error *err); /* why it failed; 0: it did not */
bool saver_flight_drop(struct save_flight *f); /* a holder less; true: the last, to release it without the lock */
void saver_flight_release(struct save_flight *f); /* the lock is not held */
struct saver_name { char text[PROTO_RUN_MAX + 40]; } saver_name(const struct save_flight *f); /* "RUN/STEP" */
int saver_check(const struct save_saver *s, struct base_error *err); /* -BASE_EFORKED after a fork */

/* declare.c; no lock */
void saver_declared_release(struct save_flight *f);
/* Equal meshes of all saves are one copy, which lives as long as the saver: callers may free theirs. NULL: err. */
const struct tensor_mesh *saver_mesh(struct save_saver *s, const struct tensor_mesh *m, struct base_error *err);

/* prepare.c; no lock. The second once, when all bands have been handed out. */
int saver_prepare(struct save_flight *f, struct base_error *err);
int saver_prepare_samples(struct save_flight *f, struct base_error *err);

/* stage.c */
/* Where the walker's band is in the caller's memory, and how far apart neighbours are. */
void saver_band_gather(const struct save_flight *f, const struct saver_worker *w, struct device_gather *ret_g,
	uint64_t stride[static TENSOR_MAX_DIMS]);
int saver_batch_form(struct save_flight *f, struct saver_worker *w, struct saver_batch **ret_b, struct base_error *err);
/* Gives the worker the memory that it cuts and hashes with, which it keeps; false: there is none at the moment. */
bool saver_worker_room(struct saver_worker *w);
int saver_batch_copy(struct save_flight *f, struct saver_worker *w, struct saver_batch *b, struct base_error *err);
uint64_t saver_band_room(uint64_t bytes); /* of a band in a slot */
/* Are all pieces of a band, from that number on, the same? */
bool saver_band_same(const struct save_flight *f, uint64_t first, uint32_t npieces);

/* workers.c */
void *saver_worker_main(void *arg);
void saver_yield_to_others(void); /* the calling thread, from now on */
/* The oldest flight that is prepared and not all handed out; NULL: none. The lock is held. */
struct save_flight *saver_to_stage(const struct save_saver *s);

/* bands.c */
/* Persister: the flight's bands, in order, to its packs. */
int saver_bands_append(struct save_flight *f, struct base_error *err);
void saver_bands_drop(struct save_flight *f); /* gives all slots back, once no worker is at them */
void saver_batch_back(struct storage_lent *l);

/* room.c */
unsigned saver_node_threads(unsigned given, unsigned ranks);
void saver_node_count(struct save_saver *s);
/* Bytes of a ring for a save that needs so many, where there is one of `have` (0: none), and `memory` is free. */
uint64_t saver_room_size(uint64_t needed, uint64_t have, uint64_t memory, unsigned ranks);
/* Decides the ring's size where it is empty, and registers it for device memory. One thread at a time; no lock. */
int saver_room_fit(struct save_flight *f, bool empty, struct base_error *err);
void saver_room_warn(struct save_flight *f); /* that it waited, by the persister */
void *saver_persister_main(void *arg);       /* persist.c */

#endif
