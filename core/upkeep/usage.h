/* SPDX-License-Identifier: Apache-2.0
 *
 * usage: where the bytes of a store are, and what a removal of steps gives back: the one count behind `du`, `info` and
 * `rm -n`. It counts files as the collector deletes them: packs whole, and the records of a step (its manifest, its
 * measures) with the notes of damage in its packs. Entries of lists are not counted: a removal puts one, and others
 * are collected at another time.
 *
 * Reads the list of each run and one manifest for each visible step, no parts; lists packs, manifests and measures
 * once. Memory: some 150 bytes a file and step. Changes nothing. One thread; blocks. */
#ifndef CORE_UPKEEP_USAGE_H
#define CORE_UPKEEP_USAGE_H

#include "core/base/table.h"
#include "core/commit/list/list.h"

/* logical: of tensors and blobs. stored: of the files that it needs, whole. unique: of those that nothing else needs,
 * which is what its removal frees; the rest of them is shared. Sums stop at 2^64-1. */
struct upkeep_bytes { uint64_t logical, stored, unique; };

/* A pack, or a manifest. */
struct upkeep_usage_file {
	char *name;             /* a pack's; of a manifest its path */
	uint64_t size;          /* on disk, as listed, whatever manifests say; 0: it is not there */
	uint64_t note_bytes;    /* of a pack's note of damage */
	uint64_t live_bytes;    /* of a pack: what the step that uses most of it refers to; at most `size` */
	uint32_t steps, going;  /* visible steps that name it; those among them that go */
	uint32_t run, step;     /* the last of these steps: numbers in `runs` and `steps` */
	bool pack, runs;        /* runs: steps of several runs name it */
	bool base;              /* a save under way may refer to it: the collector keeps it */
};
struct upkeep_usage_step {
	uint64_t step, entry;
	struct base_digest manifest;
	uint32_t run;
	bool goes, rewritten;
	struct upkeep_bytes bytes;
	uint64_t live_bytes;    /* what it refers to in its packs */
	uint64_t measures;      /* bytes; in `stored` and `unique`, too */
};
struct upkeep_usage_run {
	char *name;
	uint64_t next;          /* entries of its list that were read */
	uint32_t first, n;      /* its steps, by ascending number */
	struct upkeep_bytes bytes;
};
struct upkeep_usage {
	struct upkeep_usage_run *runs; uint32_t nruns;          /* by name; also those without a visible step */
	struct upkeep_usage_step *steps; uint32_t nsteps;
	struct upkeep_usage_file *files; uint32_t nfiles;       /* in no order */
	struct base_table by_name;
	uint64_t visible_runs, logical_bytes;   /* runs with a visible step */
	uint64_t packs, pack_bytes;             /* in the store */
	uint64_t needed_packs, needed_bytes;    /* packs that visible steps name */
	uint64_t stored_bytes;                  /* all that visible steps need: these packs, and records */
	uint64_t spare_bytes;                   /* of packs and records that neither they nor saves under way need */
	uint64_t freed_packs, freed_bytes;      /* that steps which go need, and nothing else */
};

struct upkeep_usage_question {
	struct store *store;
	/* Would this step be removed? NULL: none would. */
	bool (*goes)(void *arg, const char *run, const struct commit_list_step *step);
	/* Of a step that stays, would it be written anew, and not need this pack any more? pack NULL: would it be
	 * written anew at all? Its manifest and measures go then. NULL: none would. */
	bool (*drops)(void *arg, const char *run, uint64_t entry, const char *pack);
	void *arg;
	/* Its steps are read last: `run` of a file is that run if one of its steps names the file. NULL: any order */
	const char *last;
	void (*progress)(void *arg, uint64_t done, uint64_t total);     /* manifests; may be NULL */
	void *progress_arg;
};
/* A manifest or list that cannot be read is an error. Release it whatever it returns. */
int upkeep_usage_read(const struct upkeep_usage_question *q, struct upkeep_usage *ret_u, struct base_error *err);
void upkeep_usage_release(struct upkeep_usage *u);
const struct upkeep_usage_file *upkeep_usage_pack(const struct upkeep_usage *u, const char *pack); /* NULL: none */
uint64_t upkeep_bytes_add(uint64_t a, uint64_t b); /* at most 2^64-1 */

#endif
