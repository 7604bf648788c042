/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of a fill share.
 *
 * A need says that some box wants something of some piece. Needs are sorted by pack, offset and box, so that those of
 * one piece are neighbours (a group) and a pack is read forwards. They hold numbers only, 32 bytes for a piece of up to
 * 1 MiB: what is wanted of the piece is computed again when it is read. A task, which is what a thread takes at once,
 * is a few groups: about FILL_TASK_BYTES of pieces. */
#ifndef CORE_LOAD_FILL_FILL_WORK_H
#define CORE_LOAD_FILL_FILL_WORK_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/load/fill/fill.h"
#include "core/load/open/object.h"

#define FILL_TASK_BYTES (UINT64_C(4) << 20)
#define FILL_TASK_NEEDS 256u
#define FILL_GROUP_NEEDS 64u             /* an object that is more pieces than this is read once for so many of them */
#define FILL_INLINE UINT32_MAX           /* in place of a pack: the piece's bytes are in its row */

struct fill_box {                        /* what was added; or memory that is to be zero, with offsets of 0 */
	uint32_t tensor, object;         /* object: number in load_fill.objects */
	uint32_t ndim;
	struct tensor_box box;
	uint8_t *data;
	uint64_t stride[TENSOR_MAX_DIMS];
	enum tensor_dtype dtype;         /* of the memory; 0: the step's */
	bool device;
	unsigned place;                  /* of device memory: that of the fence */
	uint32_t destination;            /* overlap.c */
};

struct fill_need {
	uint64_t offset;                 /* in the pack */
	uint64_t piece;                  /* of the object */
	uint32_t pack;                   /* number in the manifest, or FILL_INLINE */
	uint32_t box;                    /* number in load_fill.boxes */
	uint64_t stored;                 /* the box of the object that the piece is of */
};

struct load_fill {
	struct load_step *step;
	unsigned threads, flags;
	struct fill_box *boxes; size_t nboxes, boxes_room;
	struct fill_box *zeros; size_t nzeros, zeros_room;
	uint64_t device_bytes;           /* about so many go to devices */
	struct place_device *device;     /* NULL: none do */
	struct load_wanted *objects; uint32_t nobjects; /* tensors, each with the boxes that are wanted of it */
	struct fill_need *needs; size_t nneeds, needs_room;
	size_t *tasks; size_t ntasks, tasks_room; /* the first need of each, and the end of the last */
	const char *const *packs; uint32_t npacks; /* the manifest's */
	bool past_cache;                 /* large reads go past the page cache */
	uint64_t wanted;
	atomic_uint_fast64_t placed, read, pieces;
	atomic_size_t next;              /* task */
	atomic_bool stopped;
	atomic_size_t failed;            /* the first need that is known to fail; changed with the lock */
	pthread_mutex_t lock;            /* protects what follows while threads run */
	pthread_t *crew; unsigned ncrew, crew_room;
	struct base_error error;         /* of need `failed`, or the fatal one */
	bool fatal;                      /* not because of any piece: memory, a device */
	struct load_fill_lost *lost; size_t nlost, lost_room;
	struct load_fill_times times;
	uint64_t begun_ns;
};

static inline const struct load_object *need_object(const struct load_fill *f, const struct fill_need *need)
{
	return f->objects[f->boxes[need->box].object].object;
}

static inline const struct pack_object_ref *need_ref(const struct load_fill *f, const struct fill_need *need)
{
	return &need_object(f, need)->pieces[need->piece].ref;
}

/* What comes before all reading (the plan, memory for devices, zeros), and after it, even if fill_begin failed. */
int fill_begin(struct load_fill *f, struct base_error *err);
void fill_end(struct load_fill *f);
/* Opens the tensors and makes needs and tasks. */
int fill_plan(struct load_fill *f, struct base_error *err);
/* Makes f->tasks anew; the needs are sorted. -ENOMEM. */
int fill_plan_tasks(struct load_fill *f);

/* One thread's means; zero-initialise with f. */
struct fill_worker {
	struct load_fill *f;
	struct pack *pack;         /* the one read last, kept while pieces follow each other in it */
	uint32_t pack_number;
	uint8_t *room; size_t room_bytes; /* for a piece whose bytes do not go straight to their place */
	uint64_t *blocks; size_t blocks_room; /* a bit for each block of a piece: wanted */
	unsigned through;                 /* so many more bursts go through the page cache, which had the last one */
	uint8_t *burst, *checks;          /* burst.h: stored blocks of a pack, and their checks */
	struct base_error err;
};
void fill_worker_release(struct fill_worker *w);
/* The fill's reads go past the page cache: its threads wait for the disk, so one more is started, up to four times as
 * many as were asked for. */
void fill_crew_grow(struct load_fill *f);
/* Reads the piece of needs [first, end) and places it in their boxes; w->err says why it failed. */
int fill_piece(struct fill_worker *w, size_t first, size_t end);
/* Reads and places what is wanted of pieces of one pack, from need `first` on and before `end`, with few requests.
 * Returns the end of those that have been placed. It is `first` if the piece does not fit, or a read or a check failed:
 * then fill_piece reads it, and finds the error. */
size_t fill_burst(struct fill_worker *w, size_t first, size_t end);
/* Calls f with the runs of blocks that needs [first, end) want of their piece, until it does not return 0. */
int fill_wanted_runs(struct fill_worker *w, size_t first, size_t end,
	int (*f)(void *arg, uint64_t first, uint64_t n), void *arg);
/* Takes the next task, if there is one, and does it. */
bool fill_take(struct fill_worker *w);
/* Reads a whole piece to `to`, and compares its SHA-256 with LOAD_FILL_REHASH. */
int fill_piece_whole(struct fill_worker *w, const struct pack_object_ref *ref, uint8_t *to);
/* w->err, with step, tensor and piece before it. */
int fill_piece_failed(struct fill_worker *w, const struct fill_need *need, int r);
/* The place of the first item of the piece, if the box wants all of it and has the bytes in the stored order; else
 * NULL. */
uint8_t *fill_need_place(const struct load_fill *f, const struct fill_need *need);
/* The first such place of needs [first, end) of one piece; and whether one of these wants all of the piece. */
uint8_t *fill_group_place(const struct load_fill *f, size_t first, size_t end);
bool fill_group_is_whole(const struct load_fill *f, size_t first, size_t end);
/* w->room for that many bytes; what was in it is gone. */
int fill_room(struct fill_worker *w, uint64_t len);
/* Opens the pack of that number as w->pack. */
int fill_pack(struct fill_worker *w, uint32_t number);
/* Copies what the boxes of needs [first, end) want of the piece, and counts it. The box whose place this is has it
 * already. */
void fill_place(struct load_fill *f, size_t first, size_t end, const uint8_t *bytes, const uint8_t *place);
/* Ends the fill with this error, even if damage is to be skipped. The first one counts. */
void fill_fatal(struct load_fill *f, int r, const struct base_error *err);
/* Is what failed with r left out? A lack of memory or descriptors is no damage. */
bool fill_skips(const struct load_fill *f, int r);
/* After a run, when nothing is on its way any more: have all bytes that were wanted been placed, but for those listed
 * as lost? Else -BASE_EFORMAT. 0 also if the run ended early, which has an error of its own. */
int fill_check(struct load_fill *f, struct base_error *err);
/* Lists what a box does not get. -ENOMEM. */
int fill_lose(struct load_fill *f, size_t box, const struct tensor_box *part, int code, const char *why);
/* The end of the needs of the same object as need `first`; or of about the first FILL_GROUP_NEEDS of them, if the
 * object is very many pieces (zeros are one object): the others are a group of their own, so that other threads copy
 * them. */
size_t fill_group_end(const struct load_fill *f, size_t first);
/* The box of the piece of a need, and the part that its box wants of it, which is not empty. */
void fill_need_boxes(const struct load_fill *f, const struct fill_need *need, struct tensor_box *ret_piece,
	struct tensor_box *ret_part);

#endif
