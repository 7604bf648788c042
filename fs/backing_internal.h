/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of backings share: a file's record, all records, and what is done with them (backing.c has the states
 * and the invariants). Every function here is called with the lock; those that release it meanwhile say so. */
#ifndef FS_BACKING_INTERNAL_H
#define FS_BACKING_INTERNAL_H

#include "fs/backing.h"

#include <pthread.h>

#include "fs/broker.h"
#include "fs/loader.h"
#include "fs/memfd.h"
#include "fs/mount.h"
#include "fs/reserve.h"

#define BACKING_NOW_BYTES (UINT64_C(16) << 20) /* up to this size a file is assembled during the open */
#define BACKING_MEMORY_SHARE 2           /* a file takes at most half of what could be allocated */
#define BACKING_BUCKETS 4096u
#define BACKING_USES_MOST 4u             /* uses of which the times are kept */
#define BACKING_RESERVE_MS 120000        /* how long memory is kept at hand after the last file was assembled */

enum backing_state { COUNTING, QUEUED, FILLING, READY, REFUSED };

struct fs_backing {
	uint64_t node;
	uint64_t size;
	const struct fs_commit *commit;  /* of its step */
	LIST_ENTRY(fs_backing) by_node;
	struct backing_list *list;       /* the one that it is in while it is not open, or NULL */
	TAILQ_ENTRY(fs_backing) by_use;
	bool wanted;                     /* COUNTING: it was opened again */
	uint64_t uses[BACKING_USES_MOST]; /* times of opens while it was not open, the newest first; 0: none */
	uint64_t left;                   /* time of the last close */
	uint64_t owed;                   /* in memory: bytes that it must still serve to be worth what it cost */
	bool replaced;                   /* another file has taken its place once */
	enum backing_state state;
	_Atomic uint64_t served;
	uint64_t served_before;          /* this use of it */
	_Atomic bool watched;            /* COUNTING: its reads are shown to `loader` */
	struct fs_loader loader;
	bool early;                      /* QUEUED, FILLING: for a loader */
	_Atomic bool stop;               /* its loader is gone */
	bool pages;                      /* the kernel may have pages of it */
	unsigned opening, cached_opens, passthrough_opens;
	unsigned held;                   /* descriptors that the kernel has; requests in progress keep others open */
	int id;                          /* READY */
	_Atomic int fd;                  /* FILLING, or READY and the server has readers of it: its memory; else -1 */
	struct fs_memfd_map map;         /* of fd. The thread that assembles owns it, apart from the bytes */
	/* `ready` bytes are there, and `filling` will be soon: from `from` to the end of the file, then from its
	 * beginning */
	_Atomic uint64_t from, ready, filling;
	unsigned reading;                /* reads from it that are under way, without the lock */
	bool sealing;                    /* no read begins: the kernel seals no memory while a mapping of it is used */
	bool small, collapsing;          /* its memory has small pages, and is kept until they are huge */
};

struct backing_list { TAILQ_HEAD(fs_backing_list, fs_backing) items; unsigned n; }; /* the oldest first */

struct fs_backings {
	struct fs_mount *m;
	enum fs_tier tier;
	struct fs_broker *broker;        /* NULL: nothing is passed through */
	pthread_t thread;
	bool running;
	_Atomic bool ending;
	pthread_mutex_t lock;            /* protects what follows */
	pthread_cond_t changed;          /* the queue, or a record left FILLING */
	LIST_HEAD(bucket, fs_backing) buckets[BACKING_BUCKETS];
	struct backing_list idle, ready; /* records that are not open: COUNTING and REFUSED; READY */
	struct fs_handle **queue; size_t nqueue, queue_room; /* references */
	uint64_t *stale; size_t nstale, stale_room; /* nodes whose pages the kernel is to drop */
	uint64_t *small; size_t nsmall, small_room; /* nodes whose pages are to be made huge */
	uint64_t collapsed;              /* bytes of the first of these that are done */
	uint64_t reserve_most;           /* bytes to keep at hand, if there is room */
	uint64_t reserve_until_ms;
	struct fs_memfd_map closing[8]; unsigned nclosing; /* backing_unlock gives it back */
	bool gave_up;                    /* the keeper did not answer, and this was reported */
	uint64_t clock;                  /* counts uses of files */
	uint64_t quiet_until_ms;         /* nothing is assembled before */
	uint64_t floor_bytes;            /* of free memory, never taken; set by start */
	struct fs_backings_stats stats;
	struct fs_reserve reserve;       /* has a lock of its own */
};

/* ---- backing_records.c ---- */

struct fs_backing *backing_find(struct fs_backings *all, uint64_t node); /* NULL: there is no record */
struct fs_backing *backing_make(struct fs_backings *all, uint64_t node, const struct fs_handle *h); /* or NULL */
/* To be called after each change of its descriptors or of its state. It may be freed: it is not to be used any more
 * unless invariant 2 keeps it. */
void backing_settle(struct fs_backings *all, struct fs_backing *b);
/* Closes memory that no one uses any more; the part of backing_settle that a read needs at its end. */
void backing_settle_memory(struct fs_backings *all, struct fs_backing *b);
/* Makes room for the file by dropping files that it may replace, those unused for longest first. Drops none if that
 * does not suffice. */
bool backing_room(struct fs_backings *all, const struct fs_backing *b);
/* Releases the lock, and gives memory back that was closed meanwhile, which may take long. */
void backing_unlock(struct fs_backings *all);

/* ---- backing_assemble.c ---- */

/* Assembles a file that is COUNTING or QUEUED, if there is room; releases the lock meanwhile. It is READY, REFUSED or
 * COUNTING then. */
void backing_assemble(struct fs_backings *all, struct fs_backing *b, struct view_file *file);

/* ---- backing_thread.c ---- */

/* A keeper that once failed to answer is not asked again. */
bool backing_can_assemble(struct fs_backings *all);
/* Gives the file to the thread; early: before all others. false: it will not be assembled. */
bool backing_queue(struct fs_backings *all, struct fs_backing *b, struct fs_handle *h, bool early);

#endif
