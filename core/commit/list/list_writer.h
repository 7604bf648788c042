/* SPDX-License-Identifier: Apache-2.0
 *
 * list_writer: what launches and attempts need of their run's list beyond reading it and putting entries: how it is
 * opened, which launches it has, and what became of a put that failed. One thread at a time. */
#ifndef CORE_COMMIT_LIST_LIST_WRITER_H
#define CORE_COMMIT_LIST_LIST_WRITER_H

#include "core/commit/list/list.h"

#define COMMIT_LIST_PATIENCE_MS 3000u     /* of a command or a mount */

struct commit_list_how {
	bool whole;                      /* from entry 0 (or the head), not from the newest snapshot */
	bool newest;                     /* without `whole`: the newest steps only (commit_list_open_newest) */
	bool compare;                    /* with `whole`: each snapshot with what was visible before it */
	unsigned skip;                   /* newest snapshots that are left out: 1: knows the 64 to 127 newest entries */
	uint64_t patience_ms;            /* for which an error of reading is tried again */
};
int commit_list_open_how(struct store *s, const char *run, const struct commit_list_how *how,
	struct commit_list **ret_l,
	struct base_error *err);
/* Reads everything anew as a whole. Pointers into the list are void; the next number may be another one. */
int commit_list_reopen(struct commit_list *l, struct base_error *err);
/* Changes how.patience_ms; returns what it was. */
uint64_t commit_list_patience(struct commit_list *l, uint64_t ms);

/* A launch whose entry was read. */
struct commit_list_launch {
	char launch[17];
	uint64_t entry, newest_step;
	uint8_t nonce[PROTO_NONCE_BYTES];
};
/* By its id, of 16 digits; NULL: there is none from the list's first entry on. */
const struct commit_list_launch *commit_list_launch(const struct commit_list *l, const char id[static 16]);
/* Is the newest launch of that id, as far as that is known? */
bool commit_list_launch_newest(const struct commit_list *l, const char *launch);
/* Has the run had a launch of that id before the list's first entry? Known while a launch entry is being put. */
bool commit_list_launch_used(const struct commit_list *l, const char *launch);
/* Was it a launch that aborted an attempt, as `entry` of commit_list_attempt says? */
bool commit_list_launch_decided(const struct commit_list *l, uint64_t entry);

/* A put failed with r: may the entry have landed all the same? Where r itself does not leave that open (-ENOSPC, say),
 * it may come from the sync after the entry got its name, so the list is read on. */
bool commit_list_put_open(struct commit_list *l, int r);
/* After such a put: reads the list again. true: it shows now what became of the entry. false: the storage still fails,
 * or is shared with other hosts, where what was sent may land yet. */
bool commit_list_put_known(struct commit_list *l);

#endif
