/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt_ranks: one rank's share in a save of many, without a coordinator.
 *
 * An attempt of a launch is called after its step (attempt_tries.c), so all ranks that save the step name it alike.
 * Where some of them save other steps than the rest attempt_passed.c ends the attempt in which they part. In order,
 * each durable before the next; what the model (tests/model) calls it in brackets:
 *
 *     begin put, or read and compared [come]   store_launch_begin          the first rank to come puts it
 *     base.<n>, list again [come]              store_attempt_job_base      the next number that is free
 *     packs                                    the caller
 *     part.<rank>                              store_attempt_announce
 *     list's next entry polled [wait]          store_attempt_wait
 *     all parts seen; manifest [com]           job_commit                  rank 0, or who takes over
 *     check, commit entry [chk, PUT]           store_attempt_commit_entry
 *     outcome told, abort entry [yes, no, fail] attempt_outcome.c
 *
 * Who commits: rank 0; and if nothing has decided the attempt, ranks floor(k N / 8), k = 1 ... 7, those that fall
 * together counted once, each 2 s later than the one before, from its own announcement; at once when it can see that
 * the processes of all before it are gone. Any number of ranks may commit at the same time: they write the same
 * manifest, one entry gets in, and to the others it is their own success. So no rank has to know whether another is
 * slow or dead.
 *
 * Who commits also judges those that are missing (launch_watch.c) and aborts in their name. A rank that was wrongly
 * given up finds the abort as the list's next entry, and nothing that it does afterwards counts.
 *
 * Requests: every rank one look-up of the list's next entry a poll, at 1 ms first and at 100 ms in the end; of more
 * than 1,000 ranks those who do not commit at as many times 0.1 ms. Who commits reads each announcement once, several
 * at a time (spread.c), and asks for about 16 a poll that are not there yet.
 *
 * The list is the launch's, used under the launch's lock by all of its attempts. Lock order: attempt, launch. */
#include <stdio.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/plural.h"
#include "core/commit/launch_internal.h"
#include "core/commit/manifest_check.h"
#include "core/storage/spread.h"

#define TAKEOVER_MS 2000u
#define TAKEOVER_PARTS 8u
#define POLL_MIN_US 1000u
#define POLL_MAX_US 100000u
#define POLL_EACH_US 100u       /* one look at the list, by any rank, in so long: 8,192 look every 0.8 s */
#define LOOK_AHEAD 16u          /* announcements asked for in vain, a poll, about */
#define PARTS_BATCH 256u        /* announcements asked for at once */
#define JUDGE_MAX_MS 500u        /* but twice a second they are judged, and often enough for the watch to stay awake */
#define MISSING_NAMED 5u        /* ranks, in a warning */
#define JUDGE_SHARE 20u         /* one part in so many of the time goes into judging those that are missing */
#define BASE_TRIES 8192u
#define MEET_TRIES 16u
#define FAILING_TELL_MS 1000u   /* a storage that fails for so long is told of */

/* ---- begin ---- */

static uint64_t step_after(uint64_t step) { return step == PROTO_NONE ? 0 : base_min(step, STORE_JOB_STEP_MAX) + 1; }

/* Of a job of one rank, the last step taken, in the order of the saves: by a commit, by an unnumbered save that was
 * aborted (maybe because somebody else has its step), and by one that is not decided. */
static uint64_t last_step(struct store_launch *l)
{
	uint64_t last = l->last_step;
	bool settled = true;
	size_t left = 0;

	for (size_t i = 0; i < l->nbegun; i++) {
		struct launch_begun b = l->begun[i];
		char name[PROTO_ATTEMPT_MAX];
		enum store_attempt_state state;

		attempt_name_make(l->name, b.step, b.try, name);
		state = store_list_attempt(l->list, name, NULL, NULL);
		if (state != STORE_ATTEMPT_ABORTED || b.unnumbered)
			last = last == PROTO_NONE ? b.step : base_max(last, b.step);
		settled &= state != STORE_ATTEMPT_UNDECIDED;
		if (settled)
			l->last_step = last;
		else
			l->begun[left++] = b;
	}
	l->nbegun = left;
	return last;
}

/* Its step, its name and its place among this rank's saves. */
static int begin_name(struct store_attempt *a, uint64_t wanted, struct base_error *err)
{
	struct store_launch *l = a->job;
	int r;

	a->unnumbered = wanted == PROTO_NONE;
	a->step = a->unnumbered ? step_after(last_step(l)) : wanted;
	if (a->step > STORE_JOB_STEP_MAX)
		return base_error_set(err, -EINVAL, "run %s: a job's steps go from 0 to 2^44-1", a->run);
	if (l->world == 1 && l->nbegun == l->begun_room) {
		size_t room = 2 * l->begun_room + 4;
		struct launch_begun *grown = reallocarray(l->begun, room, sizeof *grown);

		if (!grown)
			return base_error_set(err, -ENOMEM, "run %s: out of memory", a->run);
		l->begun = grown;
		l->begun_room = room;
	}
	r = attempt_try_take(a, err);
	if (l->world == 1 && a->name[0])
		l->begun[l->nbegun++] = (struct launch_begun){a->step, a->try, a->unnumbered};
	return r;
}

/* Against the newest state: not aborted yet, and the step free or to be replaced. */
static int begin_check(struct store_attempt *a, uint64_t wanted, struct base_error *err)
{
	const struct store_list_step *now;
	int read = store_list_refresh(a->list, err), r;

	r = begin_name(a, wanted, read < 0 ? NULL : err); /* also where it cannot be read: it is a try */
	if (read < 0)
		return read;
	if (r == 0)
		r = attempt_outcome_known(a, NULL, err);
	if (r == 0)
		r = store_list_sync(a->list, err);
	if (r)
		return r < 0 ? r : base_error_set(err, -EEXIST, "%s: attempt %s is committed already", a->run, a->name);
	now = store_list_find(a->list, a->step);
	if (now && !a->replace)
		return base_error_set(err, -EEXIST, "%s has a step %llu already, and replace was not asked for", a->run,
			(unsigned long long)a->step);
	a->replaces = now ? now->entry : PROTO_NONE;
	return 0;
}

static int begin_put(struct store_attempt *a, const struct base_digest *mesh, struct base_error *err)
{
	uint32_t ncommons = a->commons ? a->commons->ngroups : 0;
	base_cleanup_free struct proto_common *commons = calloc(ncommons + 1, sizeof *commons);
	struct proto_begin begin = {.run = a->run, .attempt = a->name, .step = a->step, .world = a->job->world,
		.mesh = *mesh, .replace = a->replace, .replaces = a->replaces, .rank = a->job->rank,
		.host = store_hostname(), .time_ns = base_realtime_ns(), .commons = commons, .ncommons = ncommons};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r = commons ? 0 : -ENOMEM;

	if (r == 0 && ncommons)
		store_commons_bounded(a->commons, commons);
	if (r == 0)
		r = proto_begin_encode(&begin, &body);
	if (r < 0)
		return base_error_set(err, r, "run %s: begin: %s", a->run, base_error_name(r));
	return store_attempt_put(a, "begin", STORE_RECORD_BEGIN, &body, err);
}

/* Who found something else than its own says who said what. */
static int begin_compare(struct store_attempt *a, const struct proto_begin *m, const struct base_digest *mesh,
	struct base_error *err)
{
	const char *host = m->host && m->host[0] ? m->host : "?";

	if (m->world != a->job->world)
		return base_error_set(err, -EINVAL,
			"this rank was started with world size %u, rank %u on %s with %u", a->job->world, m->rank, host,
			m->world);
	if (m->step != a->step)
		return base_error_set(err, -EINVAL, "this rank saves step %llu, rank %u on %s saves step %llu",
			(unsigned long long)a->step, m->rank, host, (unsigned long long)m->step);
	if (!base_digest_equal(&m->mesh, mesh))
		return base_error_set(err, -EINVAL, "this rank's mesh differs from that of rank %u on %s", m->rank,
			host);
	if (m->alone)
		return base_error_set(err, -EINVAL, "a writer alone on %s has begun an attempt of this name", host);
	if (m->replace != a->replace)
		return base_error_set(err, -EINVAL,
			m->replace ? "rank %u on %s asked to replace an existing step, this rank did not"
				   : "this rank asked to replace an existing step, rank %u on %s did not",
			m->rank, host);
	a->replaces = m->replaces; /* what the first to come saw counts for all */
	return store_commons_compare(a->commons, m->commons, m->ncommons, m->rank, host, err);
}

/* Durable before anything of ours stands on it. */
static int folder_sync(struct store_attempt *a, struct base_error *err)
{
	char dir[STORE_NAME_MAX];
	int r;

	snprintf(dir, sizeof dir, "incoming/%s/%s", a->run, a->name);
	r = a->store->storage->ops->sync_dir(a->store->storage, dir);
	return r < 0 ? base_error_set(err, r, "%s: %s", dir, base_error_name(r)) : 0;
}

/* 1: read and the same. 0: there is none. */
static int begin_read(struct store_attempt *a, const struct base_digest *mesh, struct base_error *err)
{
	struct store_record record = {0};
	struct proto_begin begin = {0};
	char name[STORE_NAME_MAX];
	int r;

	snprintf(name, sizeof name, "incoming/%s/%s/begin", a->run, a->name);
	r = store_record_get(a->store->storage, name, STORE_RECORD_BEGIN, a->store->info.id, &record, NULL, NULL);
	if (r == -ENOENT)
		return 0;
	if (r == 0)
		r = proto_begin_decode(record.body, record.len, &begin);
	if (r == -BASE_EVERSION)
		store_newer(err, name, record.body, record.len);
	else if (r < 0)
		base_error_set(err, r, "%s: %s", name, base_error_name(r));
	if (r == 0)
		r = begin_compare(a, &begin, mesh, err);
	if (r == 0)
		r = folder_sync(a, err);
	proto_begin_release(&begin);
	store_record_release(&record);
	return r < 0 ? r : 1;
}

/* model: begin. The first to come puts, all others read; a folder that goes meanwhile was of a decided attempt. */
static int begin_meet(struct store_attempt *a, const struct base_digest *mesh, struct base_error *err)
{
	for (unsigned i = 0; i < MEET_TRIES; i++) {
		int r = begin_read(a, mesh, err);

		if (r)
			return r < 0 ? r : 0;
		r = begin_put(a, mesh, err);
		if (r != -EEXIST)
			return r;
	}
	return base_error_set(err, -EIO, "incoming/%s/%s/begin exists and cannot be read", a->run, a->name);
}

/* model: come */
static int job_begin(struct store_attempt *a, const struct store_launch_save *o, struct base_error *err)
{
	struct store_launch *l = a->job;
	int r;

	pthread_mutex_lock(&l->lock);
	store_launch_aborts_put(l); /* what cannot be written yet is kept on */
	r = begin_check(a, o->step, err);
	pthread_mutex_unlock(&l->lock);
	a->begun = a->name[0] != 0;
	return r == 0 ? begin_meet(a, &o->mesh, err) : r;
}

int store_launch_begin(struct store_launch *l, const struct store_launch_save *o, struct store_attempt **ret_a,
	struct base_error *err)
{
	struct base_error why = {0};
	struct store_attempt *a;
	int r = store_launch_check(l, err);

	if (r < 0)
		return r;
	if (o->step == PROTO_NONE && l->world > 1)
		return base_error_set(err, -EINVAL,
			"run %s: a save of %u ranks needs the number of its step (the trainer's count of iterations), "
			"so that all ranks mean the same one", l->run, l->world);
	a = store_launch_abort_room(l) < 0 ? NULL : calloc(1, sizeof *a);
	if (!a)
		return base_error_set(err, -ENOMEM, "run %s: out of memory", l->run);
	pthread_mutex_init(&a->lock, NULL);
	a->store = l->store;
	a->job = l;
	a->list = l->list;
	a->replace = o->replace;
	a->commons = l->world > 1 ? o->commons : NULL;
	snprintf(a->launch, sizeof a->launch, "%s", l->name);
	snprintf(a->run, sizeof a->run, "%s", l->run);
	r = job_begin(a, o, &why);
	if (r < 0) {
		int told = r == -BASE_EABORTED || !a->begun ? 1 : attempt_give_up_own(a, r, why.text, NULL, err);

		r = told < 0 ? told : base_error_set(err, r, "%s", why.text); /* somebody was first */
		a->decided = true; /* as far as this rank can */
		store_attempt_free(a);
		return r;
	}
	*ret_a = a;
	return 0;
}

/* ---- bases, packs, announcement ---- */

/* The body that stands under base.<n>: 1 the same, 0 another, -ENOENT. */
static int base_same(struct store_attempt *a, const char *last, const struct base_buf *body)
{
	struct store_record record = {0};
	char name[STORE_NAME_MAX];
	int r;

	snprintf(name, sizeof name, "incoming/%s/%s/%s", a->run, a->name, last);
	r = store_record_get(a->store->storage, name, STORE_RECORD_BASE, a->store->info.id, &record, NULL, NULL);
	if (r == 0)
		r = record.len == body->len && memcmp(record.body, body->data, body->len) == 0;
	store_record_release(&record);
	return r;
}

/* Another rank may have named it: then that will do, once it is durable. */
static int base_put(struct store_attempt *a, const struct base_buf *body, struct base_error *err)
{
	for (unsigned i = 0; i < BASE_TRIES; i++) {
		char last[32];
		int r;

		snprintf(last, sizeof last, "base.%u", a->next_base);
		r = base_same(a, last, body);
		if (r == 1)
			return folder_sync(a, err);
		if (r == -ENOENT) {
			r = store_attempt_put(a, last, STORE_RECORD_BASE, body, err);
			if (r == 0)
				a->next_base++;
			if (r != -EEXIST)
				return r;
			continue; /* somebody was faster: look at what it says */
		}
		if (r < 0 && store_error_passes(r)) /* the next number would not answer either */
			return base_error_set(err, r, "%s: %s cannot be read: %s", a->name, last, base_error_name(r));
		a->next_base++; /* another base, or one that cannot be read: the collector will say so */
	}
	return base_error_set(err, -BASE_ELIMIT, "%s: too many bases", a->name);
}

/* model: begin. As base_name in attempt.c: named first, then looked at again. The attempt's lock is held. */
int store_attempt_job_base(struct store_attempt *a, const struct attempt_base *b, bool *ret_gone,
	struct base_error *err)
{
	struct proto_base m = {.run = (char *)b->run, .entry = b->entry, .manifest = b->manifest};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	bool same = strcmp(b->run, a->run) == 0;
	struct store_list *l = a->list;
	int r = proto_base_encode(&m, &body);

	if (r < 0)
		return base_error_set(err, r, "run %s: base: %s", a->run, base_error_name(r));
	a->next_base = 0; /* a rank that named it earlier stands at any number */
	r = base_put(a, &body, err);
	if (r < 0)
		return r;
	if (same)
		pthread_mutex_lock(&a->job->lock);
	r = same ? store_list_refresh(l, err) : store_attempt_base_list(a, b->run, &l, err);
	if (r >= 0)
		r = store_list_sync(l, err);
	*ret_gone = r == 0 && !store_attempt_base_live(l, b->entry, &b->manifest);
	if (same)
		pthread_mutex_unlock(&a->job->lock);
	return r;
}

/* model: part */
int store_attempt_announce(struct store_attempt *a, struct proto_announcement *announcement, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct base_error why = {0};
	char last[32];
	int r;

	if (!a->job || a->announced || a->decided)
		return base_error_set(err, -EINVAL, "%s: %s", a->name,
			!a->job ? "a writer alone commits" : "it was announced or decided before");
	r = store_launch_check(a->job, err);
	if (r < 0)
		return r;
	announcement->run = a->run;
	announcement->attempt = a->name;
	announcement->step = a->step;
	announcement->rank = a->job->rank;
	announcement->world = a->job->world;
	announcement->host = store_hostname();
	announcement->commons = a->commons ? a->commons->groups : NULL;
	announcement->ncommons = a->commons ? a->commons->ngroups : 0;
	r = proto_announcement_encode(announcement, &body);
	if (r < 0)
		return base_error_set(err, r, "run %s: announcement: %s", a->run, base_error_name(r));
	a->announced = true; /* also when the put fails: it may have landed */
	snprintf(last, sizeof last, "part.%u", a->job->rank);
	r = store_attempt_put(a, last, STORE_RECORD_PART, &body, &why);
	a->announced_ms = base_monotonic_ms();
	if (r < 0) /* it may land yet, and be committed: the list decides before anybody is told */
		r = attempt_give_up_own(a, r, why.text, NULL, err);
	return r < 0 ? r : 0;
}

/* ---- who commits: announcements ---- */

/* 1: read. 0: not there. */
int attempt_part_read(struct store_attempt *a, uint32_t rank, struct base_error *err)
{
	struct store_record record = {0};
	struct proto_announcement m = {0};
	char name[STORE_NAME_MAX];
	int r;

	snprintf(name, sizeof name, "incoming/%s/%s/part.%u", a->run, a->name, rank);
	r = store_record_get(a->store->storage, name, STORE_RECORD_PART, a->store->info.id, &record, NULL, NULL);
	if (r == -ENOENT)
		return 0;
	if (r == 0)
		r = proto_announcement_decode(record.body, record.len, &m);
	if (r == -BASE_EVERSION)
		store_newer(err, "its announcement", record.body, record.len);
	store_record_release(&record);
	if (r == -BASE_EVERSION)
		return r;
	if (r < 0)
		return base_error_set(err, r, "its announcement cannot be read: %s", base_error_name(r));
	a->parts[rank] = m;
	return 1;
}

struct parts_batch { struct store_attempt *a; uint32_t ranks[PARTS_BATCH]; uint32_t n; int found[PARTS_BATCH]; };

/* Never fails: what an announcement's error means is told by its rank. */
static int batch_read(void *arg, uint32_t i, struct base_error *err)
{
	struct parts_batch *b = arg;

	b->found[i] = attempt_part_read(b->a, b->ranks[i], err);
	return b->found[i];
}

/* The next that were not read yet, from where the last batch ended; `left` of the ranks are still to be looked at. */
static void batch_fill(struct parts_batch *b, uint32_t most, uint32_t *left)
{
	uint32_t world = b->a->job->world;

	for (b->n = 0; *left && b->n < most; --*left) {
		uint32_t rank = b->a->cursor;

		b->a->cursor = rank + 1 < world ? rank + 1 : 0;
		if (!b->a->parts[rank].arena) {
			b->found[b->n] = 0;
			b->ranks[b->n++] = rank;
		}
	}
}

/* Those that were not read yet, several at once; ends where 16 of a batch are not there. A batch of those that may all
 * be missing has 16, one after a batch that was all there PARTS_BATCH. */
static int parts_read(struct store_attempt *a, bool *ret_new, uint32_t *ret_rank, struct base_error *err)
{
	uint32_t left = a->job->world, most = LOOK_AHEAD, missing = 0;
	struct parts_batch b = {.a = a};

	if (!a->parts && !(a->parts = calloc(left, sizeof *a->parts)))
		return base_error_set(err, -ENOMEM, "out of memory");
	while (left && a->nparts < a->job->world && missing < LOOK_AHEAD) {
		uint32_t before = missing;
		int r;

		batch_fill(&b, most, &left);
		r = store_spread(b.n, batch_read, &b, err);
		for (uint32_t i = b.n; i-- > 0;) { /* of those that failed the first is told */
			a->nparts += b.found[i] == 1;
			*ret_new |= b.found[i] == 1;
			missing += b.found[i] == 0;
			*ret_rank = b.found[i] < 0 ? b.ranks[i] : *ret_rank;
		}
		if (r < 0)
			return r;
		most = missing == before ? PARTS_BATCH : LOOK_AHEAD;
	}
	return 0;
}

static void missing_why(const struct store_attempt *a, enum store_rank_state state, char why[static 200])
{
	const struct store_launch *l = a->job;

	switch (state) {
	case STORE_RANK_FINE:
	case STORE_RANK_AWAITED: why[0] = 0; return;
	case STORE_RANK_LATE:
		snprintf(why, 200, "it lives, but has not announced its part %g s after rank %u on %.64s did",
			(double)l->deadline_ms / 1000, l->rank, store_hostname());
		return;
	case STORE_RANK_NEVER:
		snprintf(why, 200, "it did not come within %g s, says rank %u on %.64s", (double)l->start_ms / 1000,
			l->rank, store_hostname());
		return;
	case STORE_RANK_DIED:
		snprintf(why, 200, "its process is gone, says rank %u on %.64s", l->rank, store_hostname());
		return;
	case STORE_RANK_STOPPED:
		snprintf(why, 200, "its heartbeat stood still for %g s, says rank %u on %.64s",
			(double)l->heartbeat_ms / 1000, l->rank, store_hostname());
		return;
	}
}

/* The ranks that commit, in the order of their turns; how many. */
static unsigned leaders(uint32_t world, uint32_t ranks[static TAKEOVER_PARTS])
{
	unsigned n = 0;

	for (uint64_t k = 0; k < TAKEOVER_PARTS; k++) {
		uint32_t rank = (uint32_t)(k * world / TAKEOVER_PARTS);

		if (n == 0 || ranks[n - 1] != rank)
			ranks[n++] = rank;
	}
	return n;
}

/* Of those that commit and wait, the first in turn says so. */
static bool missing_warner(const struct store_attempt *a)
{
	uint32_t ranks[TAKEOVER_PARTS];
	unsigned n = leaders(a->job->world, ranks);

	for (unsigned i = 0; i < n && ranks[i] != a->job->rank; i++)
		if (a->parts[ranks[i]].arena)
			return false;
	return true;
}

/* Nothing ends a wait for a rank that lives and never saves, and nobody would see why: once for each attempt. */
static void missing_warn(struct store_attempt *a)
{
	char names[MISSING_NAMED * (PROTO_HOST_MAX + 24)] = "", host[PROTO_HOST_MAX];
	uint32_t n = 0;
	size_t len = 0;

	if (a->warned || base_monotonic_ms() - a->announced_ms < a->job->start_ms || !missing_warner(a))
		return;
	for (uint32_t rank = 0; rank < a->job->world; rank++) {
		if (a->parts[rank].arena
			|| store_watch_judge(a->job->watch, rank, a->announced_ms, host) != STORE_RANK_FINE
			|| n++ >= MISSING_NAMED)
			continue;
		len += (size_t)snprintf(names + len, sizeof names - len, "%srank %u%s%s", len ? ", " : "", rank,
			host[0] ? " on " : "", host);
	}
	if (n > MISSING_NAMED)
		snprintf(names + len, sizeof names - len, " and %u more", n - MISSING_NAMED);
	a->warned = n > 0;
	if (n)
		base_warning("%s: step %llu: waiting for %g s for the part of %s: %s, and %s not announced it. "
			     "Every rank of a job has to save; with a deadline the wait would end",
			a->run, (unsigned long long)a->step, (double)a->job->start_ms / 1000, names,
			n > 1 ? "they live" : "it lives", n > 1 ? "have" : "has");
}

/* Can what failed be asked for once more? An error of the storage says nothing of the rank whose file was asked for;
 * half of the time that a rank may be missing at the start it is waited out. */
static bool try_again(const struct store_attempt *a, int r)
{
	return store_error_passes(r) && r != -ENOMEM
		&& (!a->failing_ms || base_monotonic_ms() - a->failing_ms < a->job->start_ms / 2);
}

/* A rank that is missing and will not come, or is later than may be, ends the attempt: 0 none does. */
static int missing_judge(struct store_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	char host[PROTO_HOST_MAX], why[200];
	uint64_t most_ms = base_min(JUDGE_MAX_MS, a->job->heartbeat_ms / 8), begin, took;
	int passed;

	if (base_monotonic_ns() < a->judge_ns)
		return 0;
	store_watch_look(a->job->watch); /* which takes care of its own share */
	begin = base_monotonic_ns();
	for (uint32_t rank = 0; rank < a->job->world; rank++) {
		enum store_rank_state state;
		int r;

		if (a->parts[rank].arena)
			continue;
		state = store_watch_judge(a->job->watch, rank, a->announced_ms, host);
		if (state == STORE_RANK_FINE || state == STORE_RANK_AWAITED)
			continue;
		r = attempt_part_read(a, rank, err); /* it may have announced before it went */
		if (r == 1) {
			a->nparts++;
			continue;
		}
		if (try_again(a, r))
			return base_error_prefix(err, r, "%s: step %llu: undecided", a->run,
				(unsigned long long)a->step);
		missing_why(a, state, why);
		return attempt_give_up(a, rank, host, r < 0 ? err->text : why, ret_entry, err);
	}
	missing_warn(a);
	passed = attempt_passed(a, ret_entry, err);
	took = base_monotonic_ns() - begin;
	a->judge_ns = begin + base_min(took * JUDGE_SHARE, most_ms * 1000000);
	return passed;
}

/* ---- who commits: the commit ---- */

/* What ranks hold alike; replicas and cover (invariant 4), which counts the tensors. Where ranks differ in what a
 * tensor is, their replicas differ, too: the former says more. */
static int job_check(struct store_attempt *a, const struct proto_announcement **all, struct proto_manifest *m,
	struct base_error *err)
{
	struct base_error why = {0};
	int r = store_commons_check(all, a->nparts, err);

	if (r < 0)
		return r;
	r = store_manifest_check_replicas(a->store, all, a->nparts, err);
	if (r == 0)
		return store_manifest_check_cover(a->store, m, &m->tensors, err);
	if (store_manifest_check_layouts(a->store, m, &why) == -BASE_EFORMAT)
		return base_error_set(err, -BASE_EFORMAT, "%s", why.text);
	return r;
}

/* model: com. Checked, then the manifest durable, then every pack that it names looked at again (invariant 2). The
 * same for all who commit: the manifest that is checked has a count of tensors that is only about right. */
static int job_manifest(struct store_attempt *a, struct proto_manifest *ret_m, struct base_digest *ret_digest,
	struct base_error *err)
{
	base_cleanup_free const struct proto_announcement **all = calloc(a->nparts, sizeof *all);
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r = all ? 0 : base_error_set(err, -ENOMEM, "out of memory");

	for (uint32_t i = 0; all && i < a->nparts; i++)
		all[i] = &a->parts[i];
	if (r == 0)
		r = store_manifest_make(all, a->nparts, &body, ret_digest, err);
	if (r < 0)
		return r;
	r = proto_manifest_decode(body.data, body.len, ret_m);
	if (r < 0)
		return base_error_set(err, r, "manifest: %s", base_error_name(r));
	r = job_check(a, all, ret_m, err);
	if (r < 0)
		return r;
	base_buf_release(&body);
	r = proto_manifest_encode(ret_m, &body);
	if (r < 0)
		return base_error_set(err, r, "manifest: %s", base_error_name(r));
	base_digest_of(body.data, body.len, ret_digest);
	r = store_manifest_put(a->store, a->run, &body, ret_digest, err);
	return r < 0 ? r : store_manifest_check_packs(a->store, ret_m, err);
}

/* 1: committed, by us or somebody else. */
static int job_commit_entry(struct store_attempt *a, const struct proto_commit *what, uint64_t *ret_entry,
	struct base_error *err)
{
	int r;

	pthread_mutex_lock(&a->job->lock);
	r = store_attempt_commit_entry(a, what, ret_entry, err);
	pthread_mutex_unlock(&a->job->lock);
	if (r == -EEXIST) { /* the step was taken meanwhile */
		struct base_error why = *err;

		return attempt_give_up_own(a, r, why.text, ret_entry, err);
	}
	if (r == -BASE_EABORTED)
		return attempt_outcome(a, ret_entry, err);
	if (r == 0)
		store_folder_delete(a->store, a->run, a->name, NULL);
	return r < 0 ? r : 1;
}

static int job_commit(struct store_attempt *a, uint64_t *ret_entry, struct base_error *err)
{
	struct proto_manifest m = {0};
	struct proto_commit what = {0};
	struct base_error why = {0};
	int r = job_manifest(a, &m, &what.manifest, &why);

	if (r == 0) {
		what.tensors = m.tensors;
		what.bytes = m.bytes;
		what.new_bytes = m.new_bytes;
		what.attributes = m.attributes;
		what.nattributes = m.nattributes;
		r = job_commit_entry(a, &what, ret_entry, err);
	} else {
		/* Another committer may have been done, and the data removed and collected since. */
		r = attempt_give_up_own(a, r, why.text, ret_entry, err);
	}
	proto_manifest_release(&m);
	return r;
}

/* Commits, or gives up, or nothing yet: 0. */
static int job_lead(struct store_attempt *a, bool *ret_new, uint64_t *ret_entry, struct base_error *err)
{
	uint32_t rank = a->job->rank;
	struct base_error why = {0};
	int r = parts_read(a, ret_new, &rank, &why);

	if (r == -ENOMEM)
		return attempt_give_up_own(a, r, why.text, ret_entry, err);
	if (try_again(a, r))
		return base_error_set(err, r, "%s: step %llu: undecided: %s", a->run, (unsigned long long)a->step,
			why.text);
	if (r < 0)
		return attempt_give_up(a, rank, "", why.text, ret_entry, err);
	if (a->nparts == a->job->world) {
		uint64_t begin = base_monotonic_ns();

		r = job_commit(a, ret_entry, err);
		a->commit_ns += base_monotonic_ns() - begin;
		return r;
	}
	return missing_judge(a, ret_entry, err);
}

bool store_attempt_announced(const struct store_attempt *a) { return a->announced; }
bool store_attempt_undecided(const struct store_attempt *a) { return !a->decided; }
uint64_t store_attempt_commit_ns(const struct store_attempt *a) { return a->commit_ns; }

/* ---- waiting ---- */

/* Is it this rank's turn to commit? */
static bool job_turn(struct store_attempt *a)
{
	uint32_t ranks[TAKEOVER_PARTS];
	unsigned n = leaders(a->job->world, ranks), place = 0;
	char host[PROTO_HOST_MAX];

	while (place < n && ranks[place] != a->job->rank)
		place++;
	if (place == n)
		return false;
	if (base_monotonic_ms() - a->announced_ms >= (uint64_t)place * TAKEOVER_MS)
		return true;
	store_watch_look(a->job->watch);
	for (unsigned i = 0; i < place; i++)
		if (store_watch_judge(a->job->watch, ranks[i], a->announced_ms, host) != STORE_RANK_DIED)
			return false;
	return true;
}

static int wait_over(struct store_attempt *a, struct base_error *err)
{
	char missing[200] = "";
	size_t len = 0;

	for (uint32_t i = 0; a->parts && i < a->job->world && len + 20 < sizeof missing; i++)
		if (!a->parts[i].arena)
			len += (size_t)snprintf(missing + len, sizeof missing - len, "%s%u", len ? ", " : "", i);
	return base_error_set(err, -ETIMEDOUT, "%s: step %llu: undecided%s%s", a->run, (unsigned long long)a->step,
		len ? "; not announced: rank " : "", missing);
}

/* While nothing is decided and the storage fails: is it to be asked again? What failed once is asked for again until it
 * has failed for as long as a rank may be missing at the start. */
static bool wait_on(struct store_attempt *a, int r, uint64_t now, const struct base_error *err)
{
	if (r == 0) {
		a->failing_ms = 0;
		a->failing_told = false;
	}
	if (r == 0 || a->decided || r == -BASE_EDAMAGED || r == -BASE_EVERSION || r == -BASE_EFORMAT)
		return r == 0;
	if (!a->failing_ms)
		a->failing_ms = now;
	if (now - a->failing_ms >= FAILING_TELL_MS && !a->failing_told) {
		base_warning("%s; it is tried again for %g s", err->text, (double)a->job->start_ms / 1000);
		a->failing_told = true;
	}
	return now - a->failing_ms < a->job->start_ms;
}

/* model: wait */
static int job_wait(struct store_attempt *a, uint64_t end, uint64_t *ret_entry, struct base_error *err)
{
	uint64_t sleep_us = POLL_MIN_US, most_us = base_max(POLL_MAX_US, (uint64_t)a->job->world * POLL_EACH_US);

	for (;;) {
		uint64_t now;
		bool new = false, lead;
		int r = attempt_outcome(a, ret_entry, err);

		if (r == 0)
			r = attempt_give_up_again(a, ret_entry, err);
		lead = r == 0 && job_turn(a);
		if (lead)
			r = job_lead(a, &new, ret_entry, err);
		if (r == -ETIMEDOUT) /* of the storage: here it would say that only this call's time is over */
			r = err->code = -EIO;
		now = base_monotonic_ms();
		if (r > 0 || !wait_on(a, r, now, err))
			return r < 0 ? r : 0;
		if (now >= end)
			return r < 0 ? r : wait_over(a, err);
		sleep_us = new ? POLL_MIN_US : base_min(sleep_us * 3 / 2, lead ? POLL_MAX_US : most_us);
		usleep((useconds_t)base_min(sleep_us, (end - now) * 1000));
	}
}

int store_attempt_wait(struct store_attempt *a, int64_t timeout_ms, uint64_t *ret_entry, struct base_error *err)
{
	struct base_error own = {0};
	uint64_t entry = PROTO_NONE;
	int r;

	if (!err)
		err = &own;
	if (!a->job || !(a->announced || a->decided))
		return base_error_set(err, -EINVAL, "%s: nothing was announced", a->name);
	r = store_launch_check(a->job, err);
	if (r < 0)
		return r;
	r = job_wait(a, timeout_ms < 0 ? UINT64_MAX : base_monotonic_ms() + (uint64_t)timeout_ms, &entry, err);
	if (r == -BASE_EABORTED)
		store_attempt_packs_delete(a);
	if (r == 0 && ret_entry)
		*ret_entry = entry;
	return r;
}
