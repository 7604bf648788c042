/* SPDX-License-Identifier: Apache-2.0
 *
 * list_put: puts a list's next entry. It reads everything and makes it durable, calls the writer's check, puts the
 * snapshot if one is due, and then puts the entry if absent; if the number is taken, it reads on and checks again. This
 * file also has the entries that anyone may put: aborts, removals, and acceptance of damaged entries. The rules are in
 * list.c. */
#include "core/commit/list/list_internal.h"

#include <stdio.h>

#include "core/base/clock.h"
#include "core/base/plural.h"

#define PUT_IDLE_MAX 100u /* "exists" without anything to read, so often: the storage contradicts itself */

/* ---- checks and puts ---- */

/* model: sync. Invariant 6. */
int commit_list_sync(struct commit_list *l, struct base_error *err)
{
	char dir[STORAGE_NAME_MAX];
	int r;

	if (l->synced == l->next)
		return 0;
	snprintf(dir, sizeof dir, "runs/%s", l->run);
	r = l->store->storage->ops->sync_dir(l->store->storage, dir);
	if (r < 0 && store_denied(l->store, r, err))
		return r;
	if (r < 0)
		return base_error_set(err, r, "run %s: its list cannot be made durable: %s", l->run,
			base_error_name(r));
	l->synced = l->next;
	return 0;
}

/* Reads everything; nothing may be skipped, and all of it is durable then. accepting: skipped entries are allowed,
 * because the entry is about them. */
static int list_settle(struct commit_list *l, bool accepting, struct base_error *err)
{
	int r = commit_list_refresh(l, err);

	if (r < 0)
		return r;
	if (l->damaged && !accepting)
		return base_error_set(err, -BASE_EDAMAGED,
			"run %s: %llu %s of its list %s damaged, so nothing may be written to it "
			"(vckpt verify names %s, vckpt mend says what can be done)",
			l->run, (unsigned long long)l->damaged, base_plural(l->damaged, "entry", "entries"),
			base_plural(l->damaged, "is", "are"), base_plural(l->damaged, "it", "them"));
	r = commit_list_newer(l, NULL, err);
	return r < 0 ? r : commit_list_sync(l, err);
}

/* A launch entry names those of before it. */
static int put_launches(struct commit_list *l, struct proto_entry *placed, proto_launch_id **ret_ids)
{
	if (placed->kind != PROTO_ENTRY_LAUNCH || !l->store->info.list_2)
		return 0;
	return list_launch_fill(l, placed, ret_ids);
}

/* model: PUT */
int list_put_number(struct commit_list *l, const struct proto_entry *entry, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	base_cleanup_free proto_launch_id *ids = NULL;
	struct proto_entry mine = {0}, placed = *entry;
	char name[STORAGE_NAME_MAX];
	int r;

	list_entry_name(l, l->next, name);
	placed.run = l->run;
	placed.number = l->next;
	placed.before = l->tail_known ? l->tail : (struct base_digest){0};
	r = put_launches(l, &placed, &ids);
	if (r == 0)
		r = proto_entry_encode(&placed, &body);
	if (r == 0 && body.len > store_record_max(STORE_RECORD_ENTRY))
		r = -BASE_ELIMIT;
	if (r == 0)
		r = proto_entry_decode(body.data, body.len, &mine); /* nothing is put that could not be read */
	if (r == 0 && !list_entry_sane(&mine, l->next)) {
		proto_entry_release(&mine);
		r = -EINVAL;
	}
	if (r < 0)
		return base_error_set(err, r, "%s: the entry cannot be written: %s", name, base_error_name(r));
	r = store_record_put(l->store->storage, name, STORE_RECORD_ENTRY, l->store->info.id, body.data, body.len);
	l->open = r < 0;
	l->open_at = l->next;
	if (r != STORAGE_PUT_MINE) {
		proto_entry_release(&mine);
		if (r == STORAGE_PUT_OTHER || store_denied(l->store, r, err))
			return r == STORAGE_PUT_OTHER ? 0 : r;
		return base_error_set(err, r, "%s: %s", name, base_error_name(r));
	}
	r = list_take(l, &mine);
	list_steps_settle(l);
	if (r < 0)
		return base_no_memory_for(err, "%s", name);
	l->synced = l->next; /* put answers when its directory is durable */
	return 1;
}

/* model: sn. 1: the next number needs no snapshot (any more). */
static int put_snapshot(struct commit_list *l, struct base_error *err)
{
	int r = list_snapshot_put(l, err);

	/* Left out where it has no room: on a full disk the reserve may do for a removal and not for ten thousand
	 * steps. And where no one could read it: it says of very many steps that they have no facts any more. */
	return r == -BASE_ELIMIT || r == -BASE_EFORMAT || r == -ENOSPC || r == -EDQUOT ? 1 : r;
}

/* What the entry, or the snapshot that is due before it, has to say of what is not known. -EAGAIN: the list was read
 * anew for that. */
static int put_know(struct commit_list *l, const struct proto_entry *entry, bool snapshot, struct base_error *err)
{
	uint64_t before = l->next;
	int r = entry->kind == PROTO_ENTRY_LAUNCH ? list_launches_know(l, err) : 0;

	if (r == 0 && snapshot)
		r = list_snapshot_know(l, err);
	return r == 0 && (l->next != before || l->synced != before) ? -EAGAIN : r;
}

/* One round: check against everything read, then the next number. -EAGAIN: another writer has it. */
static int64_t put_once(struct commit_list *l, const struct proto_entry *entry,
	int (*check)(void *arg, struct commit_list *l), void *arg, struct base_error *err)
{
	bool accepting = entry->kind == PROTO_ENTRY_ACCEPT, snapshot;
	uint64_t n;
	int r;

	l->open = false;
	r = list_settle(l, accepting, err);
	/* a snapshot of a list that lacks an entry is left to the writer after the acceptance */
	snapshot = l->next > 0 && l->next % COMMIT_SNAPSHOT_EVERY == 0 && !accepting;
	if (r == 0)
		r = put_know(l, entry, snapshot, err);
	if (r < 0)
		return r;
	r = check ? check(arg, l) : 0;
	if (l->synced != l->next)
		return -EAGAIN; /* the check had to know more, and the list was read anew for that */
	if (r < 0)
		return r;
	if (snapshot) {
		r = put_snapshot(l, err);
		l->open = false;
		if (r <= 0)
			return r < 0 ? r : -EAGAIN;
		/* state and check are what they were: the snapshot was put, or left out */
	}
	l->open = false;
	n = l->next;
	r = list_put_number(l, entry, err);
	return r < 0 ? r : r ? (int64_t)n : -EAGAIN;
}

/* model: chk */
int64_t commit_list_put(struct commit_list *l, const struct proto_entry *entry,
	int (*check)(void *arg, struct commit_list *l), void *arg, struct base_error *err)
{
	unsigned idle = 0;

	for (;;) {
		uint64_t before = l->next;
		int64_t n = put_once(l, entry, check, arg, err);

		if (n != -EAGAIN)
			return n;
		idle = l->next == before ? idle + 1 : 0;
		if (idle > PUT_IDLE_MAX)
			return base_error_set(err, -EIO, "run %s: entry %llu exists and cannot be read", l->run,
				(unsigned long long)l->next);
		if (idle > 1)
			usleep(10000);
	}
}

bool commit_list_put_open(struct commit_list *l, int r)
{
	if (l->open && !commit_error_passes(r))
		l->open = commit_list_refresh(l, NULL) < 0 || l->next != l->open_at;
	return l->open;
}

bool commit_list_put_known(struct commit_list *l)
{
	struct storage_stat stat;

	if (commit_list_refresh(l, NULL) < 0 || l->damaged || commit_list_sync(l, NULL) < 0)
		return false;
	l->open = l->next == l->open_at && (l->store->storage->ops->stat(l->store->storage, &stat) < 0 || !stat.local);
	return !l->open;
}

int64_t list_put_reserved(struct commit_list *l, const struct proto_entry *entry,
	int (*check)(void *arg, struct commit_list *l), void *arg, struct base_error *err)
{
	int64_t n = commit_list_put(l, entry, check, arg, err);
	bool open;

	if (n != -ENOSPC && n != -EDQUOT)
		return n;
	store_reserve_release(l->store);
	open = commit_list_put_open(l, (int)n);
	n = commit_list_put(l, entry, check, arg, err);
	l->open |= open && n < 0; /* what landed stopped the second: its check, or that it cannot be made durable */
	return n;
}

/* ---- aborts ---- */

/* model: fail */
static int abort_check(void *arg, struct commit_list *l)
{
	switch (commit_list_attempt(l, arg, NULL, NULL)) {
	case COMMIT_ATTEMPT_COMMITTED: return -EALREADY;
	case COMMIT_ATTEMPT_ABORTED: return -BASE_EABORTED;
	case COMMIT_ATTEMPT_UNDECIDED: break;
	}
	return 0;
}

/* model: fail */
int commit_list_abort(struct commit_list *l, const char *attempt, uint32_t rank, const char *reason,
	struct base_error *err)
{
	char text[PROTO_REASON_MAX];
	struct proto_entry e = {.kind = PROTO_ENTRY_ABORT, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.attempt = attempt, .reason = text, .rank = rank};
	int64_t n;

	snprintf(text, sizeof text, "%s", reason ? reason : "");
	for (size_t len = strlen(text); len && !proto_utf8_valid(text, len);)
		text[--len] = 0;
	n = list_put_reserved(l, &e, abort_check, (void *)attempt, err);
	return n >= 0 ? 0 : n == -BASE_EABORTED ? 1 : (int)n;
}

/* ---- entries accepted as damaged ---- */

struct accept_check { const uint64_t *numbers; size_t n; uint64_t wrong; };

static int accept_allowed(void *arg, struct commit_list *l)
{
	struct accept_check *c = arg;

	for (size_t i = 0; i < c->n; i++) {
		c->wrong = c->numbers[i];
		if (list_accepted(l, c->numbers[i]))
			return -EALREADY;
		if (!list_skip_find(l, c->numbers[i]))
			return -EINVAL;
	}
	return 0;
}

int64_t commit_list_accept(struct commit_list *l, const uint64_t *numbers, size_t n, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_ACCEPT, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.accepts = numbers, .naccepts = n};
	struct accept_check check = {numbers, n, 0};
	int64_t r = commit_list_put(l, &e, accept_allowed, &check, err);

	if (r < 0 && commit_list_put_open(l, (int)r)) {
		if (commit_list_put_known(l))
			return list_accepted(l, numbers[0]) ? (int64_t)l->open_at : r;
		base_error_prefix(err, (int)r, "run %s: undecided whether they are accepted (see vckpt verify)",
			l->run);
		return err ? err->code = -BASE_EUNDECIDED : -BASE_EUNDECIDED;
	}
	if (r == -EINVAL || r == -EALREADY)
		return base_error_set(err, (int)r, "run %s: entry %llu %s", l->run, (unsigned long long)check.wrong,
			r == -EINVAL ? "is not damaged" : "is accepted as damaged already");
	return r;
}

/* ---- removal ---- */

struct removal {
	uint64_t entry;
	int (*goes)(void *arg, struct commit_list *l); void *arg; /* NULL: it does */
	struct base_error *err;
};

/* model: rm */
static int remove_allowed(void *arg, struct commit_list *l)
{
	const struct removal *x = arg;
	const struct commit_list_step *s;
	int r = commit_list_know_entry(l, x->entry, x->err);

	if (r < 0)
		return r;
	s = list_step_of_entry(l, x->entry);
	r = s ? commit_list_unpinned(l, s, "removed", x->err) : -ESTALE;
	return r < 0 || !x->goes ? r : x->goes(x->arg, l);
}

/* model: rm. Removes the entry that it saw, not the one that the step may have by then. Where the put fails the list is
 * asked what became of it. */
static int64_t remove_seen(struct commit_list *l, const struct removal *x, const char *reason, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_REMOVE, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.removes = x->entry, .reason = reason};
	int64_t n = list_put_reserved(l, &e, remove_allowed, (void *)x, err);

	if (n >= 0 || !commit_list_put_open(l, (int)n))
		return n;
	if (!commit_list_put_known(l) || commit_list_know_entry(l, x->entry, NULL) < 0)
		return err->code = -BASE_EUNDECIDED;
	return commit_list_entry_live(l, x->entry) ? n : 0;
}

int commit_list_remove(struct commit_list *l, uint64_t step, uint64_t entry, const char *reason,
	struct base_error *err)
{
	return commit_list_remove_if(l, step, entry, reason, NULL, NULL, err);
}

int commit_list_remove_if(struct commit_list *l, uint64_t step, uint64_t entry, const char *reason,
	int (*goes)(void *arg, struct commit_list *l), void *arg, struct base_error *err)
{
	const struct removal x = {entry, goes, arg, err};
	int64_t n = remove_seen(l, &x, reason, err);

	if (n == -ESTALE)
		return base_error_set(err, -ESTALE, "%s: step %llu was removed or replaced by another writer just now",
			l->run, (unsigned long long)step);
	store_reserve_restore(l->store);
	if (n == -BASE_EUNDECIDED)
		return base_error_prefix(err, (int)n, "%s: undecided whether step %llu is removed (see vckpt ls)",
			l->run, (unsigned long long)step);
	return n < 0 ? (int)n : 0;
}

int commit_step_remove(struct store *s, const char *run, uint64_t step, const char *reason, struct base_error *err)
{
	const struct commit_list_step *seen;
	struct commit_list *l;
	int r = commit_list_open_newest(s, run, &l, err);

	if (r < 0)
		return r;
	r = commit_list_know_step(l, step, err);
	seen = r == 0 ? commit_list_find(l, step) : NULL;
	if (seen)
		r = commit_list_remove(l, step, seen->entry, reason, err);
	else if (r == 0)
		r = base_error_set(err, -ENOENT, "%s has no step %llu", run, (unsigned long long)step);
	commit_list_close(l);
	return r;
}
