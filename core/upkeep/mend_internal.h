/* SPDX-License-Identifier: Apache-2.0
 *
 * mend_internal: what the files of mend share.
 *
 *   mend.c          the order: look, plan, say, do; and again
 *   mend_act.c      actions, which are gathered first and then done in order
 *   mend_list.c     entries of lists: the good copy, a copy of the store, or acceptance
 *   mend_step.c     steps that would be lost with a lost entry: committed again, or removed again
 *   mend_record.c   other records: the good copy, a copy of the store, what it was made of, or deletion
 *   mend_pack.c     packs, with the files that mend_pack.h names
 *
 * An action may be interrupted anywhere, and the store stays valid: a file is replaced in one moment by a better one,
 * an entry is appended by the list's own rules, and only meaningless files are deleted. The next mend goes on where an
 * interrupted one ended. One thread. */
#ifndef CORE_UPKEEP_MEND_INTERNAL_H
#define CORE_UPKEEP_MEND_INTERNAL_H

#include "core/base/cleanup.h"
#include "core/commit/incoming/incoming.h"
#include "core/upkeep/file_name.h"
#include "core/upkeep/mend.h"

/* What a fault touches. */
struct mend_touch { char *run; uint64_t step; char *component, *tensor; };
struct mend_fault {
	char *file, *what;
	uint64_t offset, len;
	struct mend_touch *touches; size_t ntouches;
	bool treated;                   /* an action makes it good */
};

enum mend_kind { MEND_PUT, MEND_ACCEPT, MEND_COMMIT, MEND_REMOVE, MEND_ABORT, MEND_DELETE, MEND_PACK };
struct mend_pack;
struct mend_action {
	enum mend_kind kind;
	char *file;                     /* PUT, DELETE; ABORT: the attempt */
	char *run;
	struct base_buf bytes;          /* PUT */
	uint64_t *numbers; size_t n;    /* ACCEPT: ascending */
	uint64_t step;                  /* COMMIT, REMOVE */
	struct base_digest manifest;    /* COMMIT */
	int64_t time_ns;                /* COMMIT; 0: not known */
	uint64_t entry, said;           /* COMMIT: the lost one, the newest that says facts of it; or PROTO_NONE */
	struct mend_pack *pack;         /* PACK: owned */
};

struct mend {
	struct store *store, *from;
	const struct upkeep_mend_options *o;
	struct upkeep_mend_result result;
	struct base_error *err;
	struct mend_fault *faults; size_t nfaults, faults_size;
	struct mend_action *actions; size_t nactions;
	bool again;                     /* not the first round: what earlier rounds found and lost was reported then */
	uint64_t before;                /* a hash of what the last round found and did */
};

/* mend.c */
void mend_line(struct mend *m, enum upkeep_mend_what what, const char *file, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
void mend_lost(struct mend *m, const char *file, const char *run, uint64_t step, const char *component,
	const char *tensor, const char *why);

void mend_treat(struct mend *m, const char *file); /* all faults of that file */

/* mend_act.c. A new action, which the caller fills in; NULL: out of memory. */
struct mend_action *mend_act(struct mend *m, enum mend_kind kind, const char *file, const char *run);
/* PUT of a record of this store. */
int mend_act_record(struct mend *m, const char *file, enum store_record_kind kind, const void *body, size_t len);
int mend_apply(struct mend *m);
void mend_actions_release(struct mend *m);

/* mend_list.c */
int mend_lists(struct mend *m);
/* Reads an entry of that store as it is. An error is not tried again. */
int mend_entry_read(struct store *s, const char *run, uint64_t n, struct proto_entry *ret_e);

/* mend_step.c: the steps of a list that lacks the entries in `lost` (ascending). */
int mend_steps(struct mend *m, struct commit_list *l, const uint64_t *lost, size_t n);
bool mend_end_traced(const struct mend *m, const struct commit_list *l);

/* mend_record.c */
int mend_records(struct mend *m);
/* mend_pack.c */
int mend_packs(struct mend *m);
/* -EINVAL: the store holds packs of another store. */
int mend_packs_own(struct mend *m);

#endif
