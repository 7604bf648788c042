/* SPDX-License-Identifier: Apache-2.0
 *
 * list: a run's numbered entries, the one source of truth of what is visible (docs/format/list.md).
 *
 * A `commit_list` is what one reader or writer knows: it replays entries in order, from entry 0 or from the newest
 * snapshot; where the first entries were collected, from the snapshot that replaces them, the head. Entry n*64 (n >= 1)
 * is always a snapshot (unless that would exceed an entry's maximum or the disk is full: then it is left out): a writer
 * that comes to that number puts the snapshot first. Numbers are dense, so the end is found by doubling and bisection
 * over storage_size, not by listing. Not thread-safe: one owner.
 *
 * Rules of replay (invariants 1 and 3; core/commit/list/list.c names each):
 *   commit   counts only while its attempt is undecided (neither aborted nor committed before, by what this list
 *            knows), and `replaces` is exactly what is live under its step: an entry number, or none
 *   abort    counts only while its attempt has not committed
 *   launch   aborts the undecided attempts of all earlier launches of the run
 *   remove   takes away the live commit with that entry number
 *   snapshot with those that it goes on from, shows what all entries before it made visible, to readers that start
 *            there; it decides nothing about attempts
 *   accept   the entries that it names decide nothing, whether they can be read or not
 *   collected  has taken the place of an entry before the head that it names: reading goes on from there
 *   facts    what it says of visible commits takes the place of what was said before (list_facts.h)
 *   others   of a later version: decide nothing, but a writer that has read one refuses to write */
#ifndef CORE_COMMIT_LIST_LIST_H
#define CORE_COMMIT_LIST_LIST_H

#include "core/step/store.h"

#define COMMIT_SNAPSHOT_EVERY 64u

/* commit's strings live as long as the list's entry */
struct commit_list_step { uint64_t step, entry; struct proto_commit commit; };
enum commit_attempt_state { COMMIT_ATTEMPT_UNDECIDED, COMMIT_ATTEMPT_COMMITTED, COMMIT_ATTEMPT_ABORTED };

struct commit_list;
/* Reads to the end. whole: from the head or entry 0 (collector, verify); else from the newest snapshot. A run without
 * entries is an empty list. */
int commit_list_open(struct store *s, const char *run, bool whole, struct commit_list **ret_l, struct base_error *err);
/* For the newest steps: costs what these cost, however many are visible. Of the visible steps it knows the highest, and
 * those that the 64 to 127 newest entries committed; other visible steps are not found, counted or gone through until a
 * commit_list_know_* has read them. Pointers into the list are void after these. 0, or an error. */
int commit_list_open_newest(struct store *s, const char *run, struct commit_list **ret_l, struct base_error *err);
/* what is visible under it */
int commit_list_know_step(struct commit_list *l, uint64_t step, struct base_error *err);
int commit_list_know_entry(struct commit_list *l, uint64_t entry, struct base_error *err); /* whether it is visible */
int commit_list_know_below(struct commit_list *l, uint64_t step, struct base_error *err);  /* the nearest lower step */
int commit_list_know_all(struct commit_list *l, struct base_error *err);
void commit_list_close(struct commit_list *l); /* NULL-safe */
/* Reads what came since. Returns the number of new entries; pointers into the list (steps, reasons) are then void.
 * Cheap when there is none: one failed look-up. */
int commit_list_refresh(struct commit_list *l, struct base_error *err);

/* The file of entry n, and whether an entry that was read from there belongs there: 0, or -BASE_EFORMAT, and `err` says
 * what it is instead. */
void commit_list_entry_name(const char *run, uint64_t n, char name[static STORAGE_NAME_MAX]);
int commit_list_entry_placed(const struct store *s, const char *run, uint64_t n, const struct proto_entry *e,
	struct base_error *err);

const char *commit_list_run(const struct commit_list *l);
uint64_t commit_list_next(const struct commit_list *l);          /* number of the next entry */
/* All entries from this one on were read. Of those before it only the visible steps and the launches are known. */
uint64_t commit_list_first(const struct commit_list *l);
/* Where it began because the entries before were collected; 0: it began otherwise, or has not come to such an entry. */
uint64_t commit_list_head(const struct commit_list *l);
/* The highest head that collected records name, whether its state can be read or not; 0: none was seen. */
uint64_t commit_list_head_named(const struct commit_list *l);
/* The SHA-256 of entry n's body, by a collected record that names it as the head, or by a snapshot that goes on from it
 * (what the entry after it says is not asked). false: neither was read. */
bool commit_list_digest_named(const struct commit_list *l, uint64_t n, struct base_digest *ret_d);
/* entries that were skipped as damaged, without those that an accept entry names */
uint64_t commit_list_damaged(const struct commit_list *l);
/* Goes through these entries by ascending number, from number *at on. Returns the entry's number; *ret_why says what is
 * wrong with it (borrowed). PROTO_NONE: no more. A file far behind the end makes a million of them and more, or 2^60:
 * check commit_list_damaged before going through all, or take stretches. */
uint64_t commit_list_damaged_next(const struct commit_list *l, uint64_t *at, const char **ret_why);
/* A stretch of them: of `count` entries from `first` on, `damaged` are. why: what is wrong with them. */
#define COMMIT_LIST_WHY_BYTES 200
struct commit_list_damage { uint64_t first, count, damaged; char why[COMMIT_LIST_WHY_BYTES]; };
/* Goes through these by ascending number, starting with *at = 0; there are no more than files. false: no more. */
bool commit_list_damage_next(const struct commit_list *l, size_t *at, struct commit_list_damage *ret_d);
/* Was an entry of an unknown kind read, which a newer vckpt wrote? Readers pass over it, writers and the collector
 * stop. -BASE_EVERSION with a sentence, and the entry's number in *ret_entry (may be NULL); 0: none was read. */
int commit_list_newer(const struct commit_list *l, uint64_t *ret_entry, struct base_error *err);
bool commit_list_skipped(const struct commit_list *l, uint64_t n); /* damaged, or accepted as damaged */
bool commit_list_skips(const struct commit_list *l);             /* any at all */
/* Goes through the numbers from *at on and below `end` that no accept entry names and of which the directory has no
 * name (its listing may be older than some). 1: *ret_count of them from *ret_first on; 0: no more; or an error. */
int commit_list_unlisted_next(struct commit_list *l, uint64_t end, uint64_t *at, uint64_t *ret_first,
	uint64_t *ret_count, struct base_error *err);
/* Can what was visible at this snapshot be reconstructed from it and those that it goes on from? */
bool commit_list_snapshot_whole(const struct commit_list *l, uint64_t n);
size_t commit_list_count(const struct commit_list *l);           /* visible steps */
const struct commit_list_step *commit_list_at(const struct commit_list *l, size_t i);      /* by ascending step */
const struct commit_list_step *commit_list_find(const struct commit_list *l, uint64_t step); /* NULL: not visible */
const struct commit_list_step *commit_list_latest(const struct commit_list *l);            /* highest step; NULL */
/* is this commit entry visible? */
bool commit_list_entry_live(const struct commit_list *l, uint64_t entry);
/* The step of a commit entry that counted here, still visible or not; PROTO_NONE: no such commit. */
uint64_t commit_list_commit_step(const struct commit_list *l, uint64_t entry);
/* Calls f with every commit that counted here from entry `from` on, removed or replaced since or not, until it returns
 * another number than 0. Entries of those that are not visible any more are read again. */
int commit_list_each_commit(const struct commit_list *l, uint64_t from,
	int (*f)(void *arg, uint64_t entry, const struct base_digest *manifest), void *arg, struct base_error *err);
/* The commit entry of that number, whether what it made is still visible or not. Nothing else of the list is read: that
 * it counted is known to a caller that saw its step. proto_entry_release. -ENOENT: there is no such entry, it was
 * collected, or it is no commit; -BASE_EDAMAGED. */
int commit_list_commit_read(struct store *s, const char *run, uint64_t entry, struct proto_entry *ret_e,
	struct base_error *err);
/* What the list says of an attempt. reason (may be NULL): text of the abort, or NULL. ret_entry: number of the
 * deciding entry. */
enum commit_attempt_state commit_list_attempt(const struct commit_list *l, const char *attempt, const char **ret_reason,
	uint64_t *ret_entry);
/* Of a whole list that knows what became of the attempt: readers that begin at this entry or before it know it, too.
 * PROTO_NONE: wherever they begin. */
uint64_t commit_list_attempt_from(const struct commit_list *l, const char *attempt);

/* The first entry that aborted an attempt of that launch (16 digits) since its last commit; PROTO_NONE: none. */
uint64_t commit_list_aborts_from(const struct commit_list *l, const char *launch);

/* Puts `entry` as the next number, after check(arg, l) said 0 against the newest state; on "exists" reads on and checks
 * again. `entry` is encoded after each check, which may still change it. Makes the list's directory durable before
 * putting (invariant 6). Refuses while an entry is damaged (-BASE_EDAMAGED, by run). Returns the number, or check's or
 * another error. */
int64_t commit_list_put(struct commit_list *l, const struct proto_entry *entry,
	int (*check)(void *arg, struct commit_list *l), void *arg, struct base_error *err);

/* Appends `abort` if the attempt is undecided by all entries that were read; on a full disk the reserve is given up for
 * that. rank: which is at fault. 0: it is aborted by this entry. 1: it was aborted before. -EALREADY: it has
 * committed. */
int commit_list_abort(struct commit_list *l, const char *attempt, uint32_t rank, const char *reason,
	struct base_error *err);

/* vckpt mend: puts an entry that accepts entries as damaged: from then on they decide nothing for any reader, and block
 * neither writers nor the collector. `numbers`, ascending, at most PROTO_ACCEPTS_MAX: each must be damaged here
 * (-EINVAL) and not accepted yet (-EALREADY). The number of the entry, or an error. */
int64_t commit_list_accept(struct commit_list *l, const uint64_t *numbers, size_t n, struct base_error *err);

/* list_mark.c: the collection of the entries before a snapshot of a whole list, which becomes the head. */
struct commit_list_mark;
/* Reads the state at the head as a reader that begins there does. -ENOENT: it cannot be had from the entries; or
 * -BASE_EDAMAGED: it is not what the entries before the head say. */
int commit_list_mark_make(struct commit_list *l, uint64_t head, struct commit_list_mark **ret_k,
	struct base_error *err);
/* Of the head that the list has, for a reader that knows which entries are accepted as damaged. It is not for
 * collecting: others do not know that, and what they read has to stay. -ENOENT: the list has none. */
int commit_list_mark_own(struct commit_list *l, struct commit_list_mark **ret_k, struct base_error *err);
void commit_list_mark_free(struct commit_list_mark *k); /* NULL-safe */
bool commit_list_mark_keeps(const struct commit_list_mark *k, uint64_t n); /* readers that begin there read entry n */
bool commit_list_mark_collected(struct commit_list_mark *k, uint64_t n); /* or it cannot be read now */
/* Makes durable the file that says what is visible at the head, and the record for the places of entries before it, and
 * reads the first again. -BASE_ELIMIT: more is visible than it can say. */
int commit_list_mark_put(struct commit_list_mark *k, struct base_error *err);
/* The record takes the place of entry n. -EOPNOTSUPP, -EPERM, -EMLINK: the file system gives no file several names. */
int commit_list_mark_collect(struct commit_list_mark *k, uint64_t n);
/* The file head.<number> or collected.<number> of a run? base: its name behind the last slash. */
enum commit_list_mark_file { COMMIT_LIST_NO_MARK, COMMIT_LIST_HEAD, COMMIT_LIST_COLLECTED };
enum commit_list_mark_file commit_list_mark_parse(const char *base, uint64_t *ret_head);
void commit_list_mark_name(const char *run, enum commit_list_mark_file file, uint64_t head,
	char name[static STORAGE_NAME_MAX]);
/* The bodies of the two files. */
int commit_list_mark_body(const struct commit_list_mark *k, enum commit_list_mark_file file, struct base_buf *ret_body);
/* May this collected record, read from a place before its head, be one of the list? Any thread. */
bool commit_list_head_right(const struct commit_list *l, const struct proto_entry *e);
/* Does the file head.<number> of the list's head say what the snapshot there says? 0: it does, or the list began
 * elsewhere, or says already that the snapshot cannot be used; -ENOENT; -BASE_EDAMAGED: err says why. */
int commit_list_mark_check(struct commit_list *l, struct base_error *err);

/* Reads on to the last entry in a row that the run's directory lists. On a file system that hosts share, looks may not
 * find it until a cache ends: waits for that for 3 s, then -ESTALE. */
int commit_list_catch_up(struct commit_list *l, struct base_error *err);

/* Is r an error of the storage, or of memory or descriptors, at this moment (-EIO, -ESTALE, -ENOMEM, ...), and not of
 * the bytes in it? Then another try may succeed. */
bool commit_error_passes(int r);

/* Makes durable what was read (invariant 6). */
int commit_list_sync(struct commit_list *l, struct base_error *err);

/* All runs of a store, sorted, malloc'ed array of malloc'ed names. */
int commit_runs(struct store *s, char ***ret_runs, size_t *ret_n, struct base_error *err);
void commit_runs_free(char **runs, size_t n);

/* vckpt rm: removes the step that this entry made; of many steps, by one list. reason: for people who read the list, at
 * most PROTO_REASON_MAX bytes; NULL: none. -ESTALE: it was removed or replaced since. -BASE_EPINNED: it is pinned
 * (core/commit/list/list_facts.h). -BASE_EUNDECIDED: the removal could not be put, but it may have landed, or may land
 * yet. */
int commit_list_remove(struct commit_list *l, uint64_t step, uint64_t entry, const char *reason,
	struct base_error *err);
/* The same, if goes(arg, l) allows it by the newest state: an error of it, which sets `err`, is returned. */
int commit_list_remove_if(struct commit_list *l, uint64_t step, uint64_t entry, const char *reason,
	int (*goes)(void *arg, struct commit_list *l), void *arg, struct base_error *err);

/* The same for the visible step, whatever its entry is. */
int commit_step_remove(struct store *s, const char *run, uint64_t step, const char *reason, struct base_error *err);

#endif
