/* SPDX-License-Identifier: Apache-2.0
 *
 * attempt: a save by one writer alone, and what it shares with a job's ranks.
 *
 * Order, each durable before the next (invariants 2, 5 and 6), with the words of the model (tests/model) in brackets:
 *
 *     heartbeat                       store_heartbeat_start
 *     list read; begin [begin]        store_attempt_begin_alone
 *     base.<n>, list again [begin]    store_attempt_base            before any byte of that commit is reused
 *     packs                           the caller
 *     part.0, manifest [part, com]    store_attempt_commit
 *     packs and cover checked [com]   store_attempt_commit          invariants 2 and 4
 *     check, commit entry [chk, PUT]  store_list_put, commit_check
 *     success told [yes]              once the entry, mine or found, is durable
 *     abort entry [fail]              store_attempt_abort_put       before `failed` is told [no] or anything announced
 *                                                                   is deleted
 *     folder deleted                  best effort; the collector does it otherwise
 *
 * The list of the attempt's own run is opened before `begin` and only refreshed afterwards, so that it knows every
 * entry since the position that `begin` records: a snapshot never stands in for these (list.c). Base lists are separate
 * and may start from a snapshot: they are asked only what is live now.
 *
 * A failed put of the commit entry leaves its outcome open: the entry may have landed, or may land yet. It is decided
 * by appending `abort`: whichever of the two comes first in the list is what happened. Where not even that can be
 * written the error says "undecided", nothing is deleted, and the collector decides later.
 *
 * What a job's ranks do otherwise stands in attempt_ranks.c. */
#include "core/commit/attempt.h"

#include <pthread.h>
#include <stdio.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/attempt_internal.h"
#include "core/commit/launch_internal.h"
#include "core/commit/manifest_check.h"

const char *store_attempt_name(const struct store_attempt *a) { return a->name; }
uint64_t store_attempt_step(const struct store_attempt *a) { return a->step; }

/* ---- begin ---- */

static int attempt_alone_in_run(struct store *s, const char *run, struct base_error *err)
{
	struct store_launch_info *infos;
	size_t n;
	int r = store_launches(s, &infos, &n, err);

	if (r < 0)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++)
		if (infos[i].state != STORE_DEAD && strcmp(infos[i].run, run) == 0)
			r = base_error_set(err, -BASE_EBUSY,
				"run %s: another writer%s on %s: give the step's number (what is left of a dead "
				"writer goes with vckpt gc)",
				run, infos[i].state == STORE_ALIVE ? " is at work" : " may be at work", infos[i].host);
	free(infos);
	return r;
}

static int attempt_take_step(struct store_attempt *a, uint64_t wanted, struct base_error *err)
{
	const struct store_list_step *latest = store_list_latest(a->list), *now;

	if (wanted == PROTO_NONE) {
		if (latest && latest->step >= INT64_MAX)
			return base_error_set(err, -EOVERFLOW, "run %s: there is no step after %llu", a->run,
				(unsigned long long)latest->step);
		wanted = latest ? latest->step + 1 : 0;
	}
	if (wanted > INT64_MAX)
		return base_error_set(err, -EINVAL, "steps go from 0 to 2^63-1");
	now = store_list_find(a->list, wanted);
	if (now && !a->replace)
		return base_error_set(err, -EEXIST, "%s has a step %llu already, and replace was not asked for",
			a->run, (unsigned long long)wanted);
	a->step = wanted;
	a->replaces = now ? now->entry : PROTO_NONE;
	return 0;
}

int store_attempt_put(struct store_attempt *a, const char *last, enum store_record_kind kind,
	const struct base_buf *body, struct base_error *err)
{
	char name[STORE_NAME_MAX];
	int r = body->error;

	snprintf(name, sizeof name, "incoming/%s/%s/%s", a->run, a->name, last);
	if (r == 0)
		r = store_record_put(a->store->storage, name, kind, a->store->info.id, body->data, body->len);
	if (r == STORE_PUT_OTHER)
		r = -EEXIST;
	return r < 0 ? base_error_set(err, r, "%s: %s", name, base_error_name(r)) : 0;
}

/* model: begin */
static int attempt_put_begin(struct store_attempt *a, struct base_error *err)
{
	struct proto_begin begin = {.run = a->run, .attempt = a->name, .step = a->step, .world = 1, .alone = true,
		.position = store_list_next(a->list)};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r = proto_begin_encode(&begin, &body);

	if (r < 0)
		return base_error_set(err, r, "run %s: begin: %s", a->run, base_error_name(r));
	r = store_attempt_put(a, "begin", STORE_RECORD_BEGIN, &body, err);
	a->begun = r != -EEXIST; /* also when the put fails: it may have landed; but then it is another's */
	return r;
}

/* model: come */
static int attempt_start(struct store_attempt *a, uint64_t step, struct base_error *err)
{
	struct store_heartbeat_options beat = {.launch = a->launch, .run = a->run};
	int r = step == PROTO_NONE ? attempt_alone_in_run(a->store, a->run, err) : 0;

	if (r == 0)
		r = store_heartbeat_start(a->store, &beat, &a->heartbeat, err);
	if (r == 0)
		r = store_list_open(a->store, a->run, false, &a->list, err);
	if (r == 0 && store_list_damaged(a->list))
		r = base_error_set(err, -BASE_EDAMAGED,
			"run %s: its list is damaged, so nothing may be written to it (vckpt verify says where, "
			"vckpt mend says what can be done)",
			a->run);
	if (r == 0)
		r = store_list_newer(a->list, NULL, err);
	if (r == 0)
		r = store_list_sync(a->list, err);
	if (r == 0)
		r = attempt_take_step(a, step, err);
	return r == 0 ? attempt_put_begin(a, err) : r;
}

int store_attempt_begin_alone(struct store *s, const struct store_attempt_options *o, struct store_attempt **ret_a,
	struct base_error *err)
{
	struct store_attempt *a;
	uint8_t id[8] = {0};
	int r;

	if (!o->run || !proto_run_valid(o->run))
		return base_error_set(err, -EINVAL, "\"%s\" is not the name of a run", o->run ? o->run : "");
	a = calloc(1, sizeof *a);
	if (!a)
		return base_error_set(err, -ENOMEM, "run %s: out of memory", o->run);
	pthread_mutex_init(&a->lock, NULL);
	a->store = s;
	a->replace = o->replace;
	r = base_random(id, sizeof id);
	snprintf(a->launch, sizeof a->launch, "%016llx", (unsigned long long)base_get64(id));
	snprintf(a->name, sizeof a->name, "%s-0", a->launch);
	snprintf(a->run, sizeof a->run, "%s", o->run);
	r = r < 0 ? base_error_set(err, r, "run %s: no random number for its attempt: %s", o->run, base_error_name(r))
		  : attempt_start(a, o->step, err);
	if (r < 0) {
		if (a->begun)
			store_folder_delete(s, a->run, a->name, NULL);
		store_attempt_free(a);
		return r;
	}
	*ret_a = a;
	return 0;
}

void store_attempt_free(struct store_attempt *a)
{
	if (!a)
		return;
	if (a->job) {
		store_attempt_job_free(a);
	} else {
		store_heartbeat_stop(a->heartbeat);
		store_list_close(a->list);
	}
	for (size_t i = 0; i < a->nlists; i++)
		store_list_close(a->lists[i]);
	free(a->lists);
	free(a->bases);
	free(a->packs);
	pthread_mutex_destroy(&a->lock);
	free(a);
}

/* ---- bases ---- */

/* The list of a base's run, read to its end after the base was named. */
int store_attempt_base_list(struct store_attempt *a, const char *run, struct store_list **ret_l,
	struct base_error *err)
{
	struct store_list **more;
	int r;

	for (size_t i = 0; i < a->nlists; i++)
		if (strcmp(store_list_run(a->lists[i]), run) == 0) {
			*ret_l = a->lists[i];
			r = store_list_refresh(*ret_l, err);
			return r < 0 ? r : 0;
		}
	more = reallocarray(a->lists, a->nlists + 1, sizeof *more);
	if (!more)
		return base_error_set(err, -ENOMEM, "run %s: out of memory", run);
	a->lists = more;
	r = store_list_open(a->store, run, false, &more[a->nlists], err);
	if (r == 0)
		*ret_l = more[a->nlists++];
	return r;
}

bool store_attempt_base_live(const struct store_list *l, uint64_t entry, const struct base_digest *manifest)
{
	for (size_t i = 0; i < store_list_count(l); i++) {
		const struct store_list_step *step = store_list_at(l, i);

		if (step->entry == entry)
			return base_digest_equal(&step->commit.manifest, manifest);
	}
	return false;
}

/* model: begin. Its two halves: named first, then looked at again (rule BASE). */
static int base_name(struct store_attempt *a, struct attempt_base *b, struct base_error *err)
{
	struct proto_base m = {.run = b->run, .entry = b->entry, .manifest = b->manifest};
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct store_list *l = NULL;
	char last[32];
	int r;

	snprintf(last, sizeof last, "base.%zu", a->nbases);
	r = proto_base_encode(&m, &body);
	if (r < 0)
		return base_error_set(err, r, "run %s: base: %s", a->run, base_error_name(r));
	r = store_attempt_put(a, last, STORE_RECORD_BASE, &body, err);
	if (r == 0)
		r = store_attempt_base_list(a, b->run, &l, err);
	if (r == 0)
		r = store_list_sync(l, err);
	b->gone = r == 0 && !store_attempt_base_live(l, b->entry, &b->manifest);
	return r;
}

int store_attempt_base(struct store_attempt *a, const char *run, uint64_t entry, const struct base_digest *manifest,
	struct base_error *err)
{
	struct attempt_base b = {.entry = entry, .manifest = *manifest}, *more;
	bool known = false;
	int r = 0;

	if (!proto_run_valid(run))
		return base_error_set(err, -EINVAL, "\"%s\" is not the name of a run", run);
	if (a->job && (r = store_launch_check(a->job, err)) < 0)
		return r;
	snprintf(b.run, sizeof b.run, "%s", run);
	pthread_mutex_lock(&a->lock);
	for (size_t i = 0; !known && i < a->nbases; i++)
		if (a->bases[i].entry == entry && strcmp(a->bases[i].run, run) == 0 &&
			base_digest_equal(&a->bases[i].manifest, manifest)) {
			b.gone = a->bases[i].gone;
			known = true;
		}
	if (!known) {
		more = reallocarray(a->bases, a->nbases + 1, sizeof *more);
		r = more ? a->job ? store_attempt_job_base(a, &b, &b.gone, err) : base_name(a, &b, err)
			 : base_error_set(err, -ENOMEM, "run %s: out of memory", a->run);
		if (more) {
			a->bases = more;
			b.gone |= r < 0; /* base.<n> may stand: its number is used up, its data is not used */
			a->bases[a->nbases++] = b;
		}
	}
	pthread_mutex_unlock(&a->lock);
	if (r < 0)
		return r;
	return b.gone
		? base_error_set(err, -ESTALE, "%s: entry %llu is not live any more", run, (unsigned long long)entry)
		: 0;
}

/* ---- packs ---- */

/* model: pack. Remembered once the writer is open: a name alone says nothing about whose pack stands under it. */
int store_attempt_pack_open(struct store_attempt *a, const char *class, char name[static STORE_PACK_NAME_MAX],
	struct store_pack_writer **ret_w)
{
	int r = store_pack_name_make(a->name, a->job ? store_launch_rank(a->job) : 0, class, name);
	struct attempt_pack *more;

	if (r < 0)
		return r;
	more = reallocarray(a->packs, a->npacks + 1, sizeof *more);
	if (!more)
		return -ENOMEM;
	a->packs = more;
	r = store_pack_writer_open(a->store->storage, a->store->info.id, name, ret_w);
	if (r < 0)
		return r;
	memcpy(more[a->npacks].name, name, STORE_PACK_NAME_MAX);
	more[a->npacks++].w = *ret_w;
	return 0;
}

/* -EEXIST: somebody else's came to stand there meanwhile. After any other error it may be this one that stands. */
int store_attempt_pack_seal(struct store_attempt *a, struct store_pack_writer *w, uint64_t *ret_size)
{
	size_t i = a->npacks;
	int r;

	while (i > 0 && a->packs[i - 1].w != w) /* an older one, given up, may have lain at the same place */
		i--;
	r = store_pack_seal(w, ret_size);
	if (i == 0)
		return r;
	a->packs[i - 1].w = NULL;
	if (r == -EEXIST)
		a->packs[i - 1] = a->packs[--a->npacks];
	return r;
}

/* Once the attempt is aborted, or nobody was told of them: nobody will ever name them. One that was not sealed stands
 * nowhere: what has its name is another's. */
void store_attempt_packs_delete(struct store_attempt *a)
{
	char path[STORE_NAME_MAX];

	for (size_t i = 0; i < a->npacks; i++)
		if (!a->packs[i].w && store_pack_path(a->packs[i].name, path) == 0)
			store_remove(a->store->storage, path);
	a->npacks = 0;
}

/* ---- deciding ---- */

/* model: fail */
static int abort_check(void *arg, struct store_list *l)
{
	switch (store_list_attempt(l, arg, NULL, NULL)) {
	case STORE_ATTEMPT_COMMITTED: return -EALREADY;
	case STORE_ATTEMPT_ABORTED: return -BASE_EABORTED;
	case STORE_ATTEMPT_UNDECIDED: break;
	}
	return 0;
}

/* A full disk is met with the reserve. */
int store_attempt_abort_put_rank(struct store_list *l, const char *attempt, uint32_t rank, const char *reason,
	struct base_error *err)
{
	char text[PROTO_REASON_MAX];
	struct proto_entry e = {.kind = PROTO_ENTRY_ABORT, .time_ns = base_realtime_ns(), .host = store_hostname(),
		.attempt = attempt, .reason = text, .rank = rank};
	int64_t n;

	snprintf(text, sizeof text, "%s", reason ? reason : "");
	for (size_t len = strlen(text); len && !proto_utf8_valid(text, len);)
		text[--len] = 0;
	n = store_list_put(l, &e, abort_check, (void *)attempt, err);
	if (n == -ENOSPC || n == -EDQUOT) {
		store_reserve_release(l->store);
		n = store_list_put(l, &e, abort_check, (void *)attempt, err);
	}
	return n >= 0 ? 0 : n == -BASE_EABORTED ? 1 : (int)n;
}

/* model: fail */
int store_attempt_abort_put(struct store_list *l, const char *attempt, const char *reason, struct base_error *err)
{
	int r = store_attempt_abort_put_rank(l, attempt, 0, reason, err);

	return r < 0 ? r : 0;
}

struct commit_state { struct store_attempt *a; struct proto_entry *e; struct base_error *err; };

/* model: chk. Decided already? then whether the step is free, or still what this attempt set out to replace. */
static int commit_check(void *arg, struct store_list *l)
{
	struct commit_state *c = arg;
	const struct store_list_step *now = store_list_find(l, c->a->step);
	const char *reason;

	switch (store_list_attempt(l, c->a->name, &reason, NULL)) {
	case STORE_ATTEMPT_COMMITTED:
		return -EALREADY;
	case STORE_ATTEMPT_ABORTED:
		return base_error_set(c->err, -BASE_EABORTED, "%s: step %llu: the attempt was aborted: %s", c->a->run,
			(unsigned long long)c->a->step, reason ? reason : "no reason given");
	case STORE_ATTEMPT_UNDECIDED:
		break;
	}
	if (now && (!c->a->replace || now->entry != c->a->replaces))
		return base_error_set(c->err, -EEXIST,
			"%s has a step %llu already: somebody else committed it meanwhile", c->a->run,
			(unsigned long long)c->a->step);
	c->e->commit.replaces = now ? now->entry : PROTO_NONE;
	return 0;
}

/* model: open. After a put whose outcome is open. 0: committed. -EAGAIN: undecided. Otherwise `r`: aborted. */
static int commit_settle(struct store_attempt *a, int r, const char *reason, struct base_error *err)
{
	uint32_t rank = a->job ? store_launch_rank(a->job) : 0;
	char who[PROTO_REASON_MAX] = "";
	int s;

	if (a->job)
		snprintf(who, sizeof who, "rank %u on %s: ", rank, store_hostname());
	snprintf(who + strlen(who), sizeof who - strlen(who), "%s (%s)", reason, base_error_name(r));
	s = store_attempt_abort_put_rank(a->list, a->name, rank, a->job ? who : reason, NULL);

	if (s == -EALREADY)
		return 0;
	a->open = s < 0;
	if (s < 0)
		return base_error_prefix(err, r, "undecided (%s)", base_error_name(s));
	a->decided = true;
	return r;
}

int store_attempt_commit_entry(struct store_attempt *a, const struct proto_commit *what, uint64_t *ret_entry,
	struct base_error *err)
{
	struct proto_entry e = {.kind = PROTO_ENTRY_COMMIT,
		.time_ns = base_realtime_ns(),
		.host = store_hostname(),
		.commit = *what};
	struct commit_state c = {a, &e, err};
	int64_t n;
	int r;

	e.commit.step = a->step;
	e.commit.attempt = a->name;
	e.commit.time_ns = base_realtime_ns();
	e.commit.replaces = PROTO_NONE;
	n = store_list_put(a->list, &e, commit_check, &c, err);
	r = n < 0 ? (int)n : 0;
	if (r < 0 && r != -EALREADY && r != -EEXIST && r != -BASE_EABORTED && r != -BASE_EDAMAGED)
		r = commit_settle(a, r, "the commit entry could not be written", err);
	if (r == -BASE_EDAMAGED) /* nothing can be put, so nothing is decided by this writer */
		return base_error_prefix(err, r, "undecided");
	if (r < 0 && r != -EALREADY)
		return r;
	a->decided = true;
	if (store_list_attempt(a->list, a->name, NULL, ret_entry) != STORE_ATTEMPT_COMMITTED)
		return base_error_set(err, -EIO, "%s: step %llu: the commit entry does not count", a->run,
			(unsigned long long)a->step);
	return 0;
}

/* ---- commit ---- */

/* model: part */
static int commit_announce(struct store_attempt *a, struct proto_announcement *ann, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	int r;

	ann->run = a->run;
	ann->attempt = a->name;
	ann->step = a->step;
	ann->rank = 0;
	ann->world = 1;
	ann->host = store_hostname();
	r = proto_announcement_encode(ann, &body);
	if (r < 0)
		return base_error_set(err, r, "run %s: announcement: %s", a->run, base_error_name(r));
	a->announced = true; /* also when the put fails: it may have landed */
	return store_attempt_put(a, "part.0", STORE_RECORD_PART, &body, err);
}

/* model: com. Manifest durable, then every pack that it names looked at again, then the cover. */
static int commit_manifest(struct store_attempt *a, const struct proto_announcement *ann,
	struct base_digest *ret_digest, struct base_error *err)
{
	base_cleanup_buf struct base_buf body = BASE_BUF_INIT;
	struct proto_manifest m = {0};
	int r = store_manifest_make(&ann, 1, &body, ret_digest, err);

	if (r == 0)
		r = store_manifest_put(a->store, a->run, &body, ret_digest, err);
	if (r < 0)
		return r;
	r = proto_manifest_decode(body.data, body.len, &m);
	if (r < 0)
		return base_error_set(err, r, "run %s: manifest: %s", a->run, base_error_name(r));
	r = store_manifest_check_packs(a->store, &m, err);
	if (r == 0)
		r = store_manifest_check_cover(a->store, &m, NULL, err);
	proto_manifest_release(&m);
	return r;
}

/* model: yes */
int store_attempt_commit(struct store_attempt *a, struct proto_announcement *announcement, uint64_t *ret_entry,
	struct base_error *err)
{
	struct proto_commit what = {0};
	uint64_t entry = PROTO_NONE;
	int r;

	if (a->job)
		return base_error_set(err, -EINVAL, "%s: a job's rank announces and waits", a->name);
	pthread_mutex_lock(&a->lock);
	r = a->decided ? base_error_set(err, -EALREADY, "%s: the attempt is decided already", a->name)
		       : commit_announce(a, announcement, err);
	if (r == 0)
		r = commit_manifest(a, announcement, &what.manifest, err);
	if (r == 0) {
		what.tensors = announcement->tensors;
		what.bytes = announcement->bytes;
		what.new_bytes = announcement->new_bytes;
		what.attributes = announcement->attributes;
		what.nattributes = announcement->nattributes;
		r = store_attempt_commit_entry(a, &what, &entry, err);
		if (r < 0 && a->open)
			r = base_error_set(err, -BASE_EUNDECIDED, "%s", err ? err->text : "");
	}
	if (r == 0)
		store_folder_delete(a->store, a->run, a->name, NULL);
	pthread_mutex_unlock(&a->lock);
	if (r == 0 && ret_entry)
		*ret_entry = entry;
	return r;
}

/* ---- abort ---- */

/* model: no */
void store_attempt_abort(struct store_attempt *a, const char *reason)
{
	struct base_error err = {0};
	enum store_attempt_state state;
	int r = 0;

	if (a->job) {
		store_attempt_job_abort(a, reason);
		return;
	}
	pthread_mutex_lock(&a->lock);
	state = store_list_attempt(a->list, a->name, NULL, NULL);
	if (state == STORE_ATTEMPT_UNDECIDED && a->announced) {
		r = store_attempt_abort_put(a->list, a->name, reason, &err);
		state = store_list_attempt(a->list, a->name, NULL, NULL);
	}
	/* Invariant 6: nothing is deleted on the strength of an entry that may not last. */
	if (a->announced && store_list_sync(a->list, r < 0 ? NULL : &err) < 0) {
		state = STORE_ATTEMPT_UNDECIDED;
		r = r < 0 ? r : -EIO;
	}
	if (r < 0 && r != -EALREADY)
		base_warning("%s: %s: the attempt could not be aborted (%s); vckpt gc will", a->store->path, a->name,
			err.code ? err.text : base_error_name(r));
	if (state == STORE_ATTEMPT_ABORTED || (state == STORE_ATTEMPT_UNDECIDED && !a->announced))
		store_attempt_packs_delete(a);
	if (state != STORE_ATTEMPT_UNDECIDED || !a->announced)
		store_folder_delete(a->store, a->run, a->name, NULL);
	if (r == 0)
		store_reserve_restore(a->store);
	a->decided = true;
	pthread_mutex_unlock(&a->lock);
}
