/* SPDX-License-Identifier: Apache-2.0
 *
 * verify: reads and hashes everything, and reports for each fault which steps and tensors it touches (vckpt verify).
 * Uses all cores; any thread. */
#ifndef CORE_UPKEEP_VERIFY_H
#define CORE_UPKEEP_VERIFY_H

#include "core/commit/attempt/attempt.h"
#include "core/step/part.h"

/* Does a view header agree with its layout? 0; -ENOMEM, which ends verify; or another error: err says what is wrong.
 * Unknown views are not checked. */
typedef int (*upkeep_verify_header_func)(const struct store_layout *l, const char *component, const char *view,
	const void *header, size_t len, uint64_t data_bytes, struct base_error *err);

/* Opens files of a step as the mount shows them. read: opens all of them, reads them to their ends, and compares what
 * it reads with the digests of the pieces. Calls wrong(arg, r, text) for a file that cannot be opened or is wrong, and
 * read_bytes(arg, n) as it goes on, from any thread. 0 or -ENOMEM. */
typedef int (*upkeep_verify_files_func)(struct store *s, const char *run, const struct commit_list_step *step,
	bool read,
	void (*wrong)(void *arg, int r, const char *text), void (*read_bytes)(void *arg, uint64_t bytes), void *arg);

#define UPKEEP_VERIFY_FOREIGN "not a file that vckpt makes" /* `what` of such files */
struct upkeep_damage {
	size_t fault;                   /* number of the fault, from 0: the same in all calls for one fault */
	const char *file;               /* name in the store */
	uint64_t offset, len;           /* bytes hit; len 0: the whole file (missing, foreign, unreadable) */
	bool newer;                     /* no damage: a newer vckpt wrote it, and this one cannot read it */
	const char *what;               /* part of a sentence: "block 3 does not match its check" */
	const char *run; uint64_t step; /* NULL, PROTO_NONE: no visible step is touched */
	/* NULL: not a tensor's piece; a blob has component NULL and its name in `tensor` */
	const char *component, *tensor;
};
struct upkeep_verify_options {
	const char *run; uint64_t step;  /* NULL: the whole store; PROTO_NONE: all steps of the run */
	unsigned threads;                /* 0: all */
	bool note;                       /* leave notes of damaged packs for writers (note.h); best effort */
	/* Called for damage, and for what a newer vckpt wrote: once for each step, tensor or blob that a fault touches,
	 * or once if it touches no visible step. Calls are serialised. */
	void (*damage)(void *arg, const struct upkeep_damage *d);
	void (*progress)(void *arg, uint64_t done_bytes, uint64_t total_bytes); /* may be NULL */
	/* A pack was read to its end, damaged or not; only where the whole store is verified. May be NULL; calls are
	 * serialised, also with those of damage and progress. */
	void (*pack)(void *arg, const char *file, uint64_t bytes);
	/* Of the whole store: a run that cannot be read, and why; the other runs are verified. NULL: such a run ends
	 * verify. */
	void (*unread)(void *arg, const char *run, const char *why);
	/* A list begins at this entry, because those before it were collected. May be NULL. */
	void (*begins)(void *arg, const char *run, uint64_t entry);
	void *arg;
	/* Checks view headers, of which this layer knows nothing (view_header_check). NULL: only their bytes are
	 * checked. Called from any thread. */
	upkeep_verify_header_func header;
	upkeep_verify_files_func files;         /* likewise (view_step_check). NULL: no file is opened */
	/* The store is a stranger's: every reference is hashed by itself, whatever the footers say; the files of steps
	 * are read; unknown fields and unfinished files are reported. */
	bool paranoid;
};
struct upkeep_verify_result { uint64_t files, objects, bytes, steps, faults, newer, unread; }; /* no fault is newer */
/* 0: it looked at everything but unread runs, and found damage or not (see faults). Of a whole store it looks at every
 * file outside index/, padding and unreferenced files included, and reports files that no vckpt makes as foreign. */
int upkeep_verify(struct store *s, const struct upkeep_verify_options *o, struct upkeep_verify_result *ret_r,
	struct base_error *err);

/* Reads the records of one visible step in one pass, with all checks that verify makes of records but for the cover of
 * tensors (check_manifest_cover), and hands them on. No piece or blob is read, and no list. */
struct upkeep_records {
	upkeep_verify_header_func header;       /* as above */
	/* Each row of a rank, to be read and not kept; then the rank. packs: by number in the part. A fault found so
	 * far ends the walk before the rank. Anything but 0 ends it, too. */
	int (*row)(void *arg, const struct store_layout *l, const struct store_row *row);
	int (*rank)(void *arg, uint32_t line, const struct store_layout *l, const struct proto_part *part,
		const char *const *packs);
	void *arg;
};
/* 0; what a call returned; -BASE_EDAMAGED, or -BASE_EVERSION (a newer vckpt's): err has the first fault; -ENOMEM. */
int upkeep_records_walk(struct store *s, const char *run, const struct commit_list_step *step,
	const struct upkeep_records *calls, struct base_error *err);

#endif
