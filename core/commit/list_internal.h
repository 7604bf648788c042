/* SPDX-License-Identifier: Apache-2.0
 *
 * list_internal: what list.c (reading), list_put.c (putting) and list_replay.c (the rules) share. */
#ifndef CORE_COMMIT_LIST_INTERNAL_H
#define CORE_COMMIT_LIST_INTERNAL_H

#include "core/base/table.h"
#include "core/commit/list.h"

/* A decoded entry, kept while a visible step's strings lie in it. */
struct list_hold {
	struct proto_entry entry;
	size_t users;
};

struct list_attempt {
	char name[PROTO_ATTEMPT_MAX];
	enum store_attempt_state state;  /* never UNDECIDED */
	uint64_t entry;                  /* the one that decided it */
	char *reason;                    /* of an abort; may be NULL */
};

struct list_launch {
	char launch[17];
	uint64_t entry, newest_step;
	uint8_t nonce[PROTO_NONCE_BYTES];
};

/* An entry that decides nothing here. */
struct list_skip {
	uint64_t number;
	bool accepted;                   /* an accept entry names it; else it is damage */
	bool told;                       /* a warning named it */
	char why[160];                   /* of damage: what is wrong with it */
};

struct list_commit_key { uint64_t entry, step; };

#define LIST_PATIENCE_MS 3000u           /* of a command or a mount */

struct list_how {
	bool whole;                      /* from entry 0, not from a snapshot */
	unsigned skip;                   /* newest snapshots that are left out: 1: knows the 64 to 127 newest entries */
	uint64_t patience_ms;            /* for which an error of reading is tried again */
};

struct store_list {
	struct store *store;
	char run[PROTO_RUN_MAX + 1];
	uint64_t next;                   /* entries below it were read (or stood for by a snapshot) */
	uint64_t synced;                 /* entries below it are known to be durable */
	uint64_t first;                  /* the first entry that was read: 0, or the snapshot that reading began at */
	struct base_digest tail;         /* SHA-256 of the body of entry next - 1; zeros if next is 0 */
	bool tail_known;                 /* that entry was taken: else the next one cannot be checked against it */
	uint32_t newer_kind; uint64_t newer; /* an entry of a kind that is not known was read: the first; 0: none */
	bool again;                      /* an entry that was taken is accepted as damaged: read without it */
	struct list_skip *skips;         /* in no order */
	size_t nskips, skips_size;
	struct base_table by_number;     /* skips by number */
	uint64_t damaged;                /* skips that no accept entry names */
	struct list_how how;             /* it was opened */
	bool unread; uint64_t hole;      /* a reader's: an entry is left out that cannot be read; the first of them */
	uint64_t failing_ms;             /* monotonic: since when nothing could be read of it; 0: it could */
	bool told;                       /* of that failure */
	bool open;                       /* the entry of the last put may have landed, although the put failed */
	bool untold;                     /* an entry was skipped and nobody told yet */
	bool gap;                        /* an entry was skipped since the last snapshot: what is visible is not sure */

	struct store_list_step *steps;   /* visible, by ascending step */
	struct list_hold **holds;        /* holds[i] owns the strings of steps[i] */
	size_t nsteps, steps_size;

	struct list_commit_key *commits; /* every commit that ever counted here, by ascending entry */
	size_t ncommits, commits_size;

	struct list_attempt *attempts;   /* decided ones, in order of decision */
	size_t nattempts, attempts_size;
	struct base_table by_name;       /* attempts by name */

	struct list_launch *launches;    /* in order of first entry */
	size_t nlaunches, launches_size;
};

/* ---- list.c ---- */

void list_entry_name(const struct store_list *l, uint64_t n, char name[static STORE_NAME_MAX]);
/* What the rules rely on, beyond what decoding checks. */
bool list_entry_sane(const struct proto_entry *e, uint64_t n);
/* Applies e as entry l->next, and takes it over. 1, or -ENOMEM. */
int list_take(struct store_list *l, struct proto_entry *e);
int store_list_open_how(struct store *s, const char *run, const struct list_how *how, struct store_list **ret_l,
	struct base_error *err);

/* ---- list_put.c ---- */

/* After a put that failed with r and left it open whether the entry landed: does the list tell? It is read again for
 * that. false: the storage still fails, or is shared with other hosts, where what was sent may land yet. */
bool list_put_told(struct store_list *l);
/* Did it fail so? */
bool list_put_open(const struct store_list *l, int r);

/* ---- list_replay.c ---- */

/* The rules. Takes `e` over (its arena, too), whatever it returns: 0 or -ENOMEM. */
int list_apply(struct store_list *l, uint64_t n, struct proto_entry *e);
/* Starts from a snapshot: nothing was applied before. Takes `e` over. */
int list_adopt(struct store_list *l, struct proto_entry *e);
void list_state_release(struct store_list *l);
/* Entry n decides nothing here from now on: as damage (why), or accepted (NULL). -ENOMEM. */
int list_skip_add(struct store_list *l, uint64_t n, const char *why);
const struct list_skip *list_skip_find(const struct store_list *l, uint64_t n); /* NULL: it is none */
/* Fills the body of a snapshot of what is visible. *ret_live is malloc'ed; commits are borrowed. */
int list_snapshot(const struct store_list *l, struct proto_live **ret_live, size_t *ret_n);

#endif
