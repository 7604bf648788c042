/* SPDX-License-Identifier: Apache-2.0
 *
 * list_internal: what list.c (reading), list_put.c (putting) and list_replay.c (the rules) share. */
#ifndef CORE_COMMIT_LIST_LIST_INTERNAL_H
#define CORE_COMMIT_LIST_LIST_INTERNAL_H

#include "core/base/table.h"
#include "core/commit/list/list_compare.h"
#include "core/commit/list/list_facts.h"
#include "core/commit/list/list_facts_internal.h"
#include "core/commit/list/list_head_internal.h"
#include "core/commit/list/list_numbers_internal.h"
#include "core/commit/list/list_snapshot_internal.h"
#include "core/commit/list/list_writer.h"

/* A decoded entry, kept while a visible step's strings lie in it. */
struct list_hold {
	struct proto_entry entry;
	size_t users;
};

struct list_attempt {
	char name[PROTO_ATTEMPT_MAX];
	enum commit_attempt_state state; /* never UNDECIDED */
	uint64_t entry;                  /* the one that decided it */
	char *reason;                    /* of an abort; may be NULL */
};

/* Entries that decide nothing here, as damage: one, or several that are missing. */
struct list_skip {
	uint64_t first, count;
	uint64_t accepted;               /* how many of them accept entries name */
	char *why;                       /* what is wrong with it; NULL: missing */
	bool warned;                     /* a warning named it */
};

struct list_commit_key { uint64_t entry, step; };

struct commit_list {
	struct store *store;
	char run[PROTO_RUN_MAX + 1];
	uint64_t next;                   /* entries below it were read (or are covered by a snapshot) */
	uint64_t synced;                 /* entries below it are known to be durable */
	uint64_t first;                  /* the first entry that was read: 0, or the snapshot that reading began at */
	struct list_head head;           /* `first`, if the entries before it were collected (list_head.c) */
	struct list_head seen;           /* the highest that a collected record was seen to name */
	uint64_t lost;                   /* what was visible at this head cannot be read; 0: none */
	struct base_digest tail;         /* SHA-256 of the body of entry next - 1; zeros if next is 0 */
	bool tail_known;                 /* that entry was taken: else the next one cannot be checked against it */
	uint32_t newer_kind; uint64_t newer; /* an entry of a kind that is not known was read: the first; 0: none */
	bool again;                      /* an entry that was taken is accepted as damaged: to be read without it */
	struct list_skip *skips;         /* by ascending number, apart */
	size_t nskips, skips_size;
	uint64_t damaged;                /* entries in them that no accept entry names */
	uint64_t *accepts;               /* entries that accept entries name, in no order */
	size_t naccepts, accepts_size;
	struct base_table by_number;     /* accepts by number */
	struct list_numbers numbers;
	unsigned missing;                /* how many entries right before `next` are missing or damaged */
	struct commit_list_how how;      /* it was opened so */
	bool unread; uint64_t hole;      /* a reader left out entries that it could not read; the first of them */
	uint64_t failing_ms;             /* monotonic: since when reading only fails; 0: it does not */
	bool warned;                     /* of that failure */
	bool open;                       /* the entry of the last put may have landed, although the put failed */
	uint64_t open_at;                /* its number */
	bool unwarned;                   /* an entry was skipped, and no warning named it yet */
	uint64_t lie;                    /* how.compare: the first snapshot that says something else; 0: none */
	bool gap;                        /* an entry was skipped since the last snapshot: what is visible is not sure */

	/* list_snapshot.c */
	struct list_node *nodes;         /* by ascending number */
	size_t nnodes, nodes_size;
	struct list_dropped *dropped;    /* in no order */
	size_t ndropped, dropped_size;
	uint64_t rest;                   /* of the commits before this snapshot only `older` is known; 0: all is */
	uint64_t broken;                 /* the snapshot that a chain could not be read on from */
	uint64_t older;                  /* none of these has a visible step above it; PROTO_NONE: none is visible */

	struct commit_list_step *steps;   /* visible, by ascending step (list_steps.c) */
	struct list_hold **holds;        /* holds[i] owns the strings of steps[i]; NULL: not visible any more */
	size_t nsteps, steps_size, ngone;
	/* visible, too: they do not belong at the end of `steps`; by ascending step */
	struct commit_list_step *late;
	struct list_hold **late_holds;
	size_t nlate, late_size;

	struct list_facts facts;         /* list_facts.c */

	struct list_commit_key *commits; /* every commit that ever counted here, by ascending entry */
	size_t ncommits, commits_size;

	struct list_attempt *attempts;   /* decided ones, in order of decision */
	size_t nattempts, attempts_size;
	struct base_table by_name;       /* attempts by name */

	struct commit_list_launch *launches; /* in order of first entry */
	size_t nlaunches, launches_size;
	struct base_table by_launch;     /* launches by id */
	/* list_launches.c: those from before `first` */
	uint64_t launch_before;          /* the newest of them; PROTO_NONE: none */
	struct list_id *before;          /* by ascending entry */
	size_t nbefore, before_size;
	bool before_known;
};

/* ---- list.c ---- */

void list_entry_name(const struct commit_list *l, uint64_t n, char name[static STORAGE_NAME_MAX]);
/* Reads entry n with the list's patience. 0, -ENOENT, or an error that `err` explains: -BASE_EDAMAGED for every kind of
 * damage. proto_entry_release. */
int list_entry_read(struct commit_list *l, uint64_t n, struct proto_entry *ret_e, struct base_error *err);
/* What the rules rely on, beyond what decoding checks. */
bool list_entry_sane(const struct proto_entry *e, uint64_t n);
/* Applies e as entry l->next, and takes it over. 1, or -ENOMEM. */
int list_take(struct commit_list *l, struct proto_entry *e);
/* After a look at entry n that ended with r: whether to look again, which waits a little. */
bool list_again(struct commit_list *l, uint64_t n, int r);

/* Is r an error of reading for which a reader leaves an entry out until it can be read? A writer waits for it. */
bool list_leaves_out(const struct commit_list *l, int r);

/* ---- list_put.c ---- */

/* Puts the next number. 1: this entry (and it was applied); 0: another writer's; or an error, after which the outcome
 * is not known. */
int list_put_number(struct commit_list *l, const struct proto_entry *entry, struct base_error *err);

/* As commit_list_put; a full disk is met with the reserve. */
int64_t list_put_reserved(struct commit_list *l, const struct proto_entry *entry,
	int (*check)(void *arg, struct commit_list *l), void *arg, struct base_error *err);

/* ---- list_replay.c ---- */

/* The rules. Takes `e` over (its arena, too), whatever it returns: 0 or -ENOMEM. */
int list_apply(struct commit_list *l, uint64_t n, struct proto_entry *e);
/* Starts from snapshot n, as list_adopt does: nothing was applied before. Takes `e` over. */
int list_start(struct commit_list *l, uint64_t n, struct proto_entry *e, struct base_error *err);
int list_attempts_reserve(struct commit_list *l, size_t more);
/* What is visible by that commit entry; NULL. */
const struct commit_list_step *list_step_of_entry(const struct commit_list *l, uint64_t entry);
/* As a snapshot says. There is room. */
void list_attempt_committed(struct commit_list *l, const char *name, uint64_t entry);
void list_state_release(struct commit_list *l);

/* ---- list_steps.c: what is visible ---- */

void list_hold_drop(struct list_hold *h);                        /* NULL-safe */
/* Room for n commits. back: they come by ascending step, behind all others or in the place of the last. -ENOMEM. */
int list_steps_reserve(struct commit_list *l, size_t n, bool back);
/* The commit entry n becomes what is visible under its step. The hold gains a user. There is room. */
void list_step_set(struct commit_list *l, uint64_t n, const struct proto_commit *c, struct list_hold *h);
void list_step_remove(struct commit_list *l, uint64_t step);      /* a visible one */
void list_steps_clear(struct commit_list *l);
/* Before others see the steps: all of them in one array. */
void list_steps_settle(struct commit_list *l);

/* ---- list_skips.c: entries that decide nothing ---- */

/* As damage; none of them is accepted, and none is damage already. why: of one entry; NULL: missing. -ENOMEM. */
int list_skip_add(struct commit_list *l, uint64_t first, uint64_t count, const char *why);
const struct list_skip *list_skip_find(const struct commit_list *l, uint64_t n); /* NULL: it is no damage */
int list_accepts_reserve(struct commit_list *l, size_t more);
/* An accept entry names entry n; there is room. true: nothing was known against it. */
bool list_accept_add(struct commit_list *l, uint64_t n);
bool list_accepted(const struct commit_list *l, uint64_t n);
void list_accepts_move(struct commit_list *to, struct commit_list *from); /* to none */
void list_skips_release(struct commit_list *l);
void list_skips_warn(struct commit_list *l);                      /* of what was skipped, once */

/* Returns r, of a look at an entry or at the run's directory; err says what is wrong. */
int list_unreadable(const struct commit_list *l, int r, struct base_error *err);

#endif
