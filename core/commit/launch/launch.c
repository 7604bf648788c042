/* SPDX-License-Identifier: Apache-2.0
 *
 * launch: how the ranks of a job come together without a message.
 *
 *     heartbeat                        every rank, so that others see that it has come; rank 0's shows a nonce
 *     launch entry                     rank 0, with the newest step and the nonce: launch_append
 *     ... is there                     the others, by reading on: launch_await
 *     ... is of this start             the others, by looking for the rank 0 that shows its nonce: launch_meet.c
 *
 * The launch entry decides two things for good. It aborts the undecided attempts of all launches before it
 * (list_replay.c, apply_launch), so that a job that was started twice has one writer; and it says from which step the
 * unnumbered saves of a job of one rank count on. An id that was used before would make its attempts those
 * of an old launch, aborted to some readers and not to others: so rank 0 looks at all launches that the run has had
 * (list_launches.c), and refuses it; it says so in the list, for the others. These start from the snapshot before the
 * newest one: the entry that they wait for is new. If it does not come in time they read everything before they say so.
 *
 * The list is opened before the launch entry is put (or seen) and only refreshed afterwards: so it knows every entry
 * since then, which is what attempts of this launch are judged by. Lock order: none; `lock` and the watch's are never
 * held together. */
#include "core/commit/launch/launch.h"

#include <stdio.h>

#include "core/base/clock.h"
#include "core/commit/launch/launch_work.h"

#define LAUNCH_POLL_MAX_MS 100u

const char *commit_launch_name(const struct commit_launch *l) { return l->name; }

int commit_launch_check(const struct commit_launch *l, struct base_error *err)
{
	if (getpid() == l->pid)
		return 0;
	return base_error_set(err, -BASE_EFORKED,
		"run %s: launch %s belongs to process %d: a child process has to open one of its own", l->run, l->name,
		(int)l->pid);
}

unsigned commit_launch_leaders(uint32_t world, uint32_t ranks[static COMMIT_LAUNCH_LEADERS])
{
	unsigned n = 0;

	for (uint64_t k = 0; k < COMMIT_LAUNCH_LEADERS; k++) {
		uint32_t rank = (uint32_t)(k * world / COMMIT_LAUNCH_LEADERS);

		if (n == 0 || ranks[n - 1] != rank)
			ranks[n++] = rank;
	}
	return n;
}

/* ---- rank 0 ---- */

/* The attempt whose abort says that the launch's id was used again. */
static void refusal_name(const struct commit_launch *l, char name[static PROTO_ATTEMPT_MAX])
{
	snprintf(name, PROTO_ATTEMPT_MAX, "%s-%llu", l->name, (unsigned long long)UINT64_MAX);
}

/* Has rank 0 refused the id? By an entry of its own: a newer launch's aborts every attempt. */
static bool launch_refused(const struct commit_launch *l, const char **ret_why)
{
	char name[PROTO_ATTEMPT_MAX];
	uint64_t entry;

	refusal_name(l, name);
	if (commit_list_attempt(l->list, name, ret_why, &entry) != COMMIT_ATTEMPT_ABORTED)
		return false;
	return !commit_list_launch_decided(l->list, entry);
}

struct launch_put { struct commit_launch *l; struct proto_entry *e; struct base_error *err; };

static int launch_put_check(void *arg, struct commit_list *list)
{
	const struct commit_list_step *latest = commit_list_latest(list);
	struct launch_put *p = arg;

	if (commit_list_launch(list, p->l->name) || commit_list_launch_used(list, p->l->name))
		return base_error_set(p->err, -EEXIST,
			"run %s: the launch id was used before: it has to be new at every start (%s)", p->l->run,
			p->l->name);
	p->e->newest_step = latest ? latest->step : PROTO_NONE;
	return 0;
}

static int refusal_check(void *arg, struct commit_list *list)
{
	(void)list;
	return launch_refused(arg, NULL) ? -EALREADY : 0;
}

/* model: Again. Best effort: without it the others wait for as long as they may, and say the same then. */
static void launch_refuse(struct commit_launch *l)
{
	char name[PROTO_ATTEMPT_MAX], why[200];
	struct proto_entry e = {.kind = PROTO_ENTRY_ABORT, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.attempt = name, .reason = why};

	refusal_name(l, name);
	snprintf(why, sizeof why, "rank 0 on %.64s was started with a launch id that was used before",
		store_hostname());
	commit_list_put(l->list, &e, refusal_check, l, NULL);
}

/* model: lau */
static int launch_append(struct commit_launch *l, struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_LAUNCH, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.launch = l->name};
	struct launch_put p = {l, &e, err};
	int64_t n;
	int r = commit_list_open_how(l->store, l->run,
		&(struct commit_list_how){.newest = true, .patience_ms = l->start_ms}, &l->list, err);

	if (r < 0)
		return r;
	memcpy(e.nonce, l->nonce, sizeof e.nonce);
	n = commit_list_put(l->list, &e, launch_put_check, &p, err);
	if (n == -EEXIST && l->world > 1)
		launch_refuse(l);
	return n < 0 ? (int)n : 0;
}

/* ---- the others ---- */

static int launch_sought(struct commit_launch *l, struct base_error *err)
{
	int r = commit_list_refresh(l->list, err);
	const char *why;

	if (r < 0)
		return r;
	if (commit_list_launch(l->list, l->name))
		return 1;
	if (launch_refused(l, &why))
		return base_error_set(err, -EEXIST,
			"run %s: the launch id was used before: it has to be new at every start (%s: %s)", l->run,
			l->name, why ? why : "");
	return 0;
}

/* model: lau. 1: there it is. */
static int launch_poll(struct commit_launch *l, struct base_error *err)
{
	uint64_t end = base_monotonic_ms() + l->start_ms, wait = 1;
	int r;

	while ((r = launch_sought(l, err)) == 0 && base_monotonic_ms() < end) {
		usleep((useconds_t)wait * 1000);
		wait = base_min(2 * wait, LAUNCH_POLL_MAX_MS);
	}
	return r;
}

static int launch_await(struct commit_launch *l, struct base_error *err)
{
	const struct commit_list_launch *entry;
	int r = commit_list_open_how(l->store, l->run,
		&(struct commit_list_how){.newest = true, .skip = 1, .patience_ms = l->start_ms},
		&l->list, err);
	uint64_t next = r == 0 ? commit_list_next(l->list) : 0;

	if (r == 0)
		r = launch_poll(l, err);
	if (r == 0) { /* is it before the snapshot that the list started from? */
		commit_list_close(l->list);
		l->list = NULL;
		r = commit_list_open_how(l->store, l->run,
			&(struct commit_list_how){.whole = true, .patience_ms = l->start_ms}, &l->list, err);
		if (r == 0)
			r = launch_sought(l, err);
	}
	if (r < 0)
		return r;
	if (r == 0)
		return base_error_set(err, -ETIMEDOUT,
			"run %s: rank %u has waited %g s for rank 0, which has not appended the entry of launch %s: "
			"have all ranks been given the same launch id, and the same run?",
			l->run, l->rank, (double)l->start_ms / 1000, l->name);
	r = commit_list_sync(l->list, err);
	entry = commit_list_launch(l->list, l->name);
	return r < 0 ? r : commit_launch_meet(l, entry->nonce, entry->entry >= next, err);
}

/* ---- open, close ---- */

static int options_check(const struct commit_launch_options *o, struct base_error *err)
{
	if (!o->run || !proto_run_valid(o->run))
		return base_error_set(err, -EINVAL, "\"%s\" is not the name of a run", o->run ? o->run : "");
	if (o->world == 0 || o->rank >= o->world)
		return base_error_set(err, -EINVAL, "rank %u is not in a world of %u ranks, which are counted from 0",
			o->rank, o->world);
	if (o->world > 1 && (!o->id || !o->id[0]))
		return base_error_set(err, -EINVAL,
			"a job of %u ranks needs a launch id: text that all ranks share and that is new at every "
			"start, such as 16 random bytes of rank 0 that were broadcast once (a scheduler's job number "
			"alone repeats at a restart)",
			o->world);
	if (o->heartbeat_ms && o->heartbeat_ms < 400)
		return base_error_set(err, -EINVAL,
			"a heartbeat time-out of %llu ms is too short: it has to be 400 ms at least",
			(unsigned long long)o->heartbeat_ms);
	return 0;
}

/* The name is a hash of run and id: pack names have to be unique in the store, and one id may serve several runs.
 * Without an id it is random. */
static int launch_name_set(struct commit_launch *l, const char *id, struct base_error *err)
{
	base_cleanup_buf struct base_buf text = BASE_BUF_INIT;
	struct base_digest d;
	int r;

	base_buf_append(&text, l->run, strlen(l->run) + 1);
	base_buf_append_text(&text, id ? id : "");
	r = text.error;
	if (r == 0 && id && id[0])
		base_sha256(text.data, text.len, &d);
	else if (r == 0)
		r = base_random(d.bytes, 8);
	if (r < 0)
		return base_error_set(err, r, "run %s: no name for its launch can be made: %s", l->run,
			base_error_name(r));
	for (unsigned i = 0; i < 8; i++)
		snprintf(l->name + 2 * i, 3, "%02x", d.bytes[i]);
	return 0;
}

uint64_t commit_launch_every_ms(const struct commit_launch *l)
{
	return base_min(l->heartbeat_ms / 4, COMMIT_HEARTBEAT_EVERY_S * 1000);
}

static int heartbeat_show(struct commit_launch *l, struct base_error *err)
{
	struct commit_heartbeat_options beat = {.launch = l->name, .run = l->run, .job = !l->alone, .rank = l->rank,
		.every_ms = commit_launch_every_ms(l),
		.tend = commit_launch_tend, .tend_arg = l};
	int r = 0;

	if (!l->alone && l->rank == 0) {
		r = base_random(l->nonce, sizeof l->nonce);
		beat.nonce = l->nonce;
		beat.quick_ms = l->world > 1 ? COMMIT_LAUNCH_QUICK_MS : 0;
	}
	if (r < 0)
		return base_error_set(err, r, "run %s: no random number for its launch: %s", l->run,
			base_error_name(r));
	return commit_heartbeat_start(l->store, &beat, &l->heartbeat, err);
}

/* The list, and the launch entry in it. */
static int job_list_open(struct commit_launch *l, struct base_error *err)
{
	int r = l->rank == 0 ? launch_append(l, err) : launch_await(l, err);

	if (r == 0)
		l->last_step = commit_list_launch(l->list, l->name)->newest_step;
	return r;
}

static int launch_start(struct commit_launch *l, const char *id, struct base_error *err)
{
	int r = launch_name_set(l, id, err);

	if (r == 0 && (r = launch_watch_new(l, &l->watch)) < 0)
		base_error_set(err, r, "run %s: %s", l->run, base_error_name(r));
	if (r == 0)
		r = heartbeat_show(l, err);
	if (r == 0)
		r = !l->alone ? job_list_open(l, err) : l->lent ? 0 :
			commit_list_open_newest(l->store, l->run, &l->list, err);
	if (r == 0 && commit_list_damaged(l->list))
		r = base_error_set(err, -BASE_EDAMAGED,
			"run %s: its list is damaged, so nothing may be written to it (vckpt verify says where, "
			"vckpt mend says what can be done)",
			l->run);
	return r == 0 ? commit_list_newer(l->list, NULL, err) : r;
}

static int launch_open(struct store *s, const struct commit_launch_options *o, bool alone, struct commit_list *lent,
	struct commit_launch **ret_l, struct base_error *err)
{
	struct commit_launch *l = calloc(1, sizeof *l);
	int r;

	if (!l)
		return base_no_memory_for(err, "run %s", o->run);
	pthread_mutex_init(&l->lock, NULL);
	l->alone = alone;
	l->list = lent;
	l->lent = lent != NULL;
	l->store = s;
	l->pid = getpid();
	snprintf(l->run, sizeof l->run, "%s", o->run);
	l->rank = o->rank;
	l->world = o->world;
	l->heartbeat_ms = o->heartbeat_ms ? o->heartbeat_ms : COMMIT_LAUNCH_HEARTBEAT_MS;
	l->start_ms = o->start_ms ? o->start_ms : COMMIT_LAUNCH_START_MS;
	l->deadline_ms = o->deadline_ms;
	l->idle_ms = base_monotonic_ms();
	r = launch_start(l, o->id, err);
	if (r < 0) {
		commit_launch_close(l);
		return r;
	}
	*ret_l = l;
	return 0;
}

int commit_launch_open(struct store *s, const struct commit_launch_options *o, struct commit_launch **ret_l,
	struct base_error *err)
{
	int r = options_check(o, err);

	return r < 0 ? r : launch_open(s, o, false, NULL, ret_l, err);
}

/* Its begin is tried again for as long as the reading of a list. */
int commit_launch_open_alone(struct store *s, const char *run, struct commit_list *lent, struct commit_launch **ret_l,
	struct base_error *err)
{
	struct commit_launch_options o = {.run = run, .world = 1, .start_ms = COMMIT_LIST_PATIENCE_MS};

	return launch_open(s, &o, true, lent, ret_l, err);
}

void commit_launch_close(struct commit_launch *l)
{
	if (!l)
		return;
	if (getpid() == l->pid) /* else the thread and the file are the parent's */
		commit_heartbeat_stop(l->heartbeat);
	commit_launch_aborts_drop(l);
	if (!l->lent)
		commit_list_close(l->list);
	launch_watch_free(l->watch);
	pthread_mutex_destroy(&l->lock);
	free(l->begun);
	free(l->tries);
	free(l);
}
