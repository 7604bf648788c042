/* SPDX-License-Identifier: Apache-2.0
 *
 * copy: steps of one store into another (docs/copy.md). A step arrives as it was saved: the same layouts, and of each
 * rank the same boxes, pieces, blobs and view headers, by one writer, who announces the parts of all ranks. So digests
 * of tensors, meshes and files are the same on both sides. What the other store has is not fetched, and what is fetched
 * is hashed (core/save/write/given.c). The source is read as a stranger's.
 *
 * One thread calls these functions, for one step after another. Each step that is done stays, whatever comes after. */
#ifndef CORE_COPY_COPY_H
#define CORE_COPY_COPY_H

#include "core/commit/list/list.h"
#include "core/upkeep/verify.h"

struct copy_options {
	bool plain;                     /* copies do not say where they came from */
	unsigned threads;               /* 0: all cores */
	uint64_t rate;                  /* bytes of the source that are read in a second, at most; 0: any number */
	uint64_t pack_bytes;            /* what a killed copy loses of a rank and component, about; 0: 4 GiB */
	uint64_t total_bytes;           /* of all steps, for progress; may change between two of them */
	void (*progress)(void *arg, uint64_t done_bytes, uint64_t total_bytes); /* calls are serialised; may be NULL */
	void *arg;
	bool (*cancelled)(void);        /* any thread; may be NULL. true: -EINTR, and nothing of the step stays */
	/* Asked when that has happened; may be NULL. true: what was written of the step stays, for the next copy. */
	bool (*leaves)(void);
	upkeep_verify_header_func header; /* view_header_check; NULL: headers are not looked into */
};

enum copy_outcome { COPY_DONE, COPY_EQUAL };
struct copy_result {
	enum copy_outcome outcome;      /* EQUAL: the step is there already, and nothing was written */
	uint64_t step, entry;           /* in the other store */
	char attempt[PROTO_ATTEMPT_MAX];
	uint64_t bytes;                 /* logical */
	/* compared: those of the other store that were hashed there */
	uint64_t pieces_new, pieces_reused, pieces_duplicate, pieces_compared;
	uint64_t read_bytes;            /* of the source's pieces and blobs */
	uint64_t stored_bytes;          /* of pieces and blobs that were written */
	const struct base_digest *parts; uint32_t nparts; /* that were written: the copy's, until the next step */
};

struct copy;
/* The stores and the options are borrowed until copy_close. */
int copy_open(struct store *from, struct store *to, const struct copy_options *o, struct copy **ret_c,
	struct base_error *err);
/* Copies a visible step of a list of the source, with its facts, as step of the same number of run `as`.
 * -EEXIST: that is there, with other content, and it is not to be replaced; -BASE_EPINNED. -BASE_EDAMAGED,
 * -BASE_EFORMAT: the source's records or bytes are wrong; nothing stays of it. -BASE_EUNDECIDED: the step may become
 * visible. */
int copy_step(struct copy *c, const struct commit_list *list, const struct commit_list_step *step, const char *as,
	bool replace, struct copy_result *ret_r, struct base_error *err);
void copy_close(struct copy *c); /* NULL-safe */
/* Makes the other store say of an equal step what is said here: pins, tags, attributes that were set later. mirror:
 * takes away those that are not said here, pins excepted. 1: it put an entry; 0. `there`: a list of the other store;
 * the step is void after it. */
int copy_facts(struct copy *c, const struct commit_list *list, const struct commit_list_step *step,
	struct commit_list *there, const struct commit_list_step *step_there, bool mirror, struct base_error *err);
/* The run's policy, to a run `as` that has only copies of it and no newer policy. */
int copy_policy(struct copy *c, const struct commit_list *list, const char *as, struct base_error *err);

/* copy_same.c: have these steps of two stores the same tensors, blobs and attributes, by what their records say? 1, 0,
 * or an error. */
int copy_same(struct store *a, const char *run_a, const struct commit_list_step *step_a, struct store *b,
	const char *run_b, const struct commit_list_step *step_b, struct base_error *err);

/* Where a step came from is in the name of its attempt (docs/copy.md): is it a copy of that run; and of that very
 * manifest (NULL: of any)? It is for recognising copies, and proves nothing. */
bool copy_is_from(const char *attempt, const struct store *from, const char *run, const struct base_digest *manifest);

#endif
