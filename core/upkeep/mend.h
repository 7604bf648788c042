/* SPDX-License-Identifier: Apache-2.0
 *
 * mend: makes a damaged store sound again, from what is left of it and from another store (docs/mend.md). It verifies
 * everything, says what it found, what it will do and what is lost, and does it. Then it verifies again, because damage
 * may have hidden other faults. One thread; no writer may be at work in the store. */
#ifndef CORE_UPKEEP_MEND_H
#define CORE_UPKEEP_MEND_H

#include "core/upkeep/verify.h"

enum upkeep_mend_what {
	UPKEEP_MEND_FOUND,     /* a fault, as verify says it */
	UPKEEP_MEND_MEND,      /* what is done about it, or would be */
	UPKEEP_MEND_ACCEPT,    /* an entry of a list: from now on it decides nothing */
	UPKEEP_MEND_DELETE,    /* a file that is useless as it is */
	UPKEEP_MEND_LOST,      /* a step, or a tensor or blob of one */
	UPKEEP_MEND_LEFT,      /* a fault that stays as it is */
};
struct upkeep_mend_line {
	enum upkeep_mend_what what;
	const char *file;               /* name in the store; of LOST: where it was */
	uint64_t offset, len;           /* FOUND: len 0: the whole file */
	const char *text;               /* part of a sentence */
	const char *run; uint64_t step; /* LOST; NULL, PROTO_NONE */
	const char *component, *tensor; /* LOST; as of struct upkeep_damage */
};
struct upkeep_mend_options {
	struct store *from;             /* another store, open for reading, or a copy of this one; NULL */
	bool dry_run;                   /* changes nothing; faults that damage hides are not found */
	uint64_t heartbeat_s;           /* a heartbeat of another host is dead after so long without a move: 20 s */
	void (*line)(void *arg, const struct upkeep_mend_line *line);
	/* of verifying, in every round; may be NULL */
	void (*progress)(void *arg, uint64_t done_bytes, uint64_t total_bytes);
	void *arg;
	/* as in upkeep_verify_options; without it, view headers are not checked */
	upkeep_verify_header_func header;
	upkeep_verify_files_func files;        /* likewise, and no file is opened */
};
struct upkeep_mend_result {
	uint64_t found;                 /* faults */
	uint64_t done;                  /* what was mended, accepted or deleted (dry run: would be) */
	uint64_t lost;                  /* steps, tensors and blobs that are lost */
	uint64_t left;                  /* faults that remain at the end */
};
/* 0: it looked at everything and did what it said, even if something is lost. -BASE_EBUSY: a writer is alive. */
int upkeep_mend(struct store *s, const struct upkeep_mend_options *o, struct upkeep_mend_result *ret_r,
	struct base_error *err);

#endif
