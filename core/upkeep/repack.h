/* SPDX-License-Identifier: Apache-2.0
 *
 * repack: a step's objects written anew by one writer (docs/gc.md, "Repacking"). The step is replaced by an equal one:
 * the same layouts, boxes, digests, blobs and view headers of all ranks, its time, and its facts. What was
 * stored by the ranks in packs of their own is in one pack for each component then, tensor by tensor, and nothing else
 * is in these packs. Each object is read once, compared with its digest, and appended as it is stored. With `whole` a
 * step that several ranks stored is cut anew: rank 0 has whole tensors then, and the other ranks no rows.
 *
 * A session does several steps, one after another, in one thread; a step refers to what an earlier one wrote. Memory:
 * some 250 bytes for each object that was written, and 64 MiB. */
#ifndef CORE_UPKEEP_REPACK_H
#define CORE_UPKEEP_REPACK_H

#include "core/commit/list/list.h"

/* A step whose tensors are to be written whole, as rank 0 of an attempt, which it announces. */
struct upkeep_whole {
	struct store *store;
	const char *run;
	const struct commit_list_step *step;
	const struct proto_manifest *m;         /* the step's */
	struct commit_attempt *attempt;
	const struct upkeep_whole_base { const char *run; uint64_t entry; struct base_digest manifest; } *bases;
	unsigned nbases;                        /* steps that were written so, whose pieces may be used */
	unsigned threads;
	void (*progress)(void *arg, uint64_t done, uint64_t total);
	void *arg;
	bool (*cancelled)(void);
	uint64_t objects, bytes;                /* result: that were written, as stored */
};

struct upkeep_repack_options {
	unsigned threads;               /* 0: all cores */
	void (*progress)(void *arg, uint64_t done, uint64_t total); /* bytes of the step under way; may be NULL */
	void *arg;
	bool (*cancelled)(void);        /* may be NULL. true: -EINTR, and the step is as it was */
	/* copy_whole (core/copy/whole.h), which is above this folder; NULL: parts stay as they are */
	int (*whole)(struct upkeep_whole *w, struct base_error *err);
};
struct upkeep_repacked {
	bool before;                    /* nothing of it is to be written anew, and nothing was */
	uint64_t entry;                 /* of the step, as it is now */
	uint64_t objects, bytes;        /* that were written anew, as stored */
	uint32_t packs, packs_before;   /* that the step needs, and needed */
};
struct upkeep_repack_found {
	const struct upkeep_repack_step { char *run; uint64_t step, entry; } *steps; size_t n; /* the session's */
	uint64_t packs, pack_bytes, live_bytes; /* packs that go; bytes of their objects that are written anew */
};

struct upkeep_repack;
/* Store and options are borrowed until close. */
int upkeep_repack_open(struct store *s, const struct upkeep_repack_options *o, struct upkeep_repack **ret_p,
	struct base_error *err);
void upkeep_repack_close(struct upkeep_repack *p); /* NULL-safe */
/* From now on the session writes anew only what is in packs of which less than `percent` lives: of the bytes of their
 * objects, those that any visible step refers to. Finds these packs, and the steps that use them: reads the manifests
 * of all visible steps, and the parts of those that use a pack of which little lives. A pack that a step uses which
 * cannot be read stays, and so does one that a save under way may refer to. Changes nothing. */
int upkeep_repack_find(struct upkeep_repack *p, unsigned percent, struct upkeep_repack_found *ret_f,
	struct base_error *err);
/* -ESTALE: the step of that entry was removed or replaced. -BASE_EBUSY: a launch that is alive in the run may go on
 * from it. -ENOTSUP: the store lacks the word list-4. -BASE_EDAMAGED: an object is not what its digest says. After any
 * error the step is as it was, or (-BASE_EUNDECIDED) it may be repacked. */
int upkeep_repack_step(struct upkeep_repack *p, const char *run, uint64_t step, uint64_t entry,
	struct upkeep_repacked *ret_r, struct base_error *err);

#endif
