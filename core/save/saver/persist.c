/* SPDX-License-Identifier: Apache-2.0
 *
 * persist: the saver's own thread: one flight after another, in the order in which they were begun, from `begin` to the
 * decision. It waits for the decision before it begins the next one: so that the next may use this step as a base, and
 * so that attempts are decided in order. Copying does not wait for it: later flights fill the ring meanwhile.
 *
 * With several ranks every flight begins one attempt, even if it failed before or was never submitted: the other ranks
 * may wait for this rank there, and have to learn why it does not come. A job of one rank begins no attempt for a
 * flight that was never submitted. A flight that fails aborts its attempt, with its reason, before any caller hears.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/commit/list/list.h"
#include "core/commit/notes/stats.h"
#include "core/save/saver/saver_internal.h"

#define PERSIST_WAIT_MS 1000

/* ---- bases ---- */

/* A base that the caller names. It is an error if there is no such step. add false: it is only looked for. */
static int persist_named_base(struct save_flight *f, const char *name, bool add, struct base_error *err)
{
	const char *slash = strrchr(name, '/');
	uint64_t number = strtoull(slash + 1, NULL, 10);
	char run[PROTO_RUN_MAX + 1];
	const struct commit_list_step *step;
	struct commit_list *list;
	int r;

	snprintf(run, sizeof run, "%.*s", (int)base_min(slash - name, PROTO_RUN_MAX), name);
	r = commit_list_open_newest(f->s->store, run, &list, err);
	if (r < 0)
		return base_error_prefix(err, r, "base %s", name);
	r = commit_list_know_step(list, number, err);
	step = r == 0 ? commit_list_find(list, number) : NULL;
	if (r < 0)
		base_error_prefix(err, r, "base %s", name);
	else if (!step)
		r = base_error_set(err, -ENOENT, "base %s: there is no such step", name);
	else if (add)
		r = save_writer_base(f->w, run, step->entry, &step->commit.manifest, err);
	commit_list_close(list);
	return r;
}

static int persist_named_bases(struct save_flight *f, bool add, struct base_error *err)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < f->nbases; i++)
		r = persist_named_base(f, f->bases[i], add, err);
	return r;
}

static int persist_bases(struct save_flight *f, struct base_error *err)
{
	int r = f->s->options.no_bases ? 0 : save_writer_bases(f->w, &f->s->past, f->options.replace, err);

	return r < 0 ? r : persist_named_bases(f, true, err);
}

/* ---- what was measured ---- */

#define PERSIST_TIMINGS (SAVE_PHASES + 3)

/* How long the save has waited for the disk: in `write`, in `seal`, and at the end of the pack of metadata. */
uint64_t saver_disk_ns(const struct save_flight *f)
{
	return atomic_load(&f->s->store->storage->write_wait_ns) - f->disk_before_ns;
}

static uint32_t persist_timings(struct save_flight *f, struct proto_timing timings[PERSIST_TIMINGS])
{
	const struct save_result *result = save_writer_result(f->w);
	uint32_t n = 0;

	pthread_mutex_lock(&f->s->lock);
	for (unsigned i = 0; i < SAVE_PHASES; i++) {
		const struct save_phase_time *p = &f->info.phase[i];

		if (p->start_ns)
			timings[n++] = (struct proto_timing){save_phase_name(i), p->busy_ns, p->bytes, p->start_ns,
				p->end_ns};
	}
	timings[n++] = (struct proto_timing){"disk", saver_disk_ns(f), result->piece_bytes_new,
		f->info.phase[f->info.phase[SAVE_WRITE].start_ns ? SAVE_WRITE : SAVE_SEAL].start_ns,
		f->info.phase[SAVE_SEAL].end_ns};
	pthread_mutex_unlock(&f->s->lock);
	if (result->bytes_again)
		timings[n++] = (struct proto_timing){.phase = PROTO_TIMING_AGAIN, .bytes = result->bytes_again};
	if (result->bytes_no_base)
		timings[n++] = (struct proto_timing){.phase = PROTO_TIMING_NO_BASE, .bytes = result->bytes_no_base};
	return n;
}

/* Of the pieces: what was appended, and what was not because it is known. */
static void persist_count(struct save_flight *f)
{
	const struct save_result *result = save_writer_result(f->w);
	struct proto_stats *m = &f->info.stats;

	pthread_mutex_lock(&f->s->lock);
	m->pieces = result->pieces;
	m->pieces_new = result->pieces_new;
	m->bytes_unchanged = result->bytes_reused;
	m->bytes_deduplicated = result->bytes_duplicate;
	m->bytes_encoded = result->bytes_encoded;
	m->bytes_written = result->piece_bytes_new + result->meta_bytes;
	f->info.bytes_again = result->bytes_again;
	f->info.bytes_no_base = result->bytes_no_base;
	pthread_mutex_unlock(&f->s->lock);
}

static void persist_stats(struct save_flight *f)
{
	struct proto_timing timings[PERSIST_TIMINGS];
	struct proto_stats m = f->info.stats;
	struct base_error err = {0};

	m.run = f->s->run;
	m.attempt = commit_attempt_name(f->attempt);
	m.step = f->step;
	m.rank = f->s->options.rank;
	m.world = f->s->options.world;
	m.host = store_hostname();
	m.timings = timings;
	m.ntimings = persist_timings(f, timings);
	if (commit_stats_put(f->s->store, &m, f->entry, &err) < 0)
		base_debug("%s step %llu: its timings are not kept: %s", f->s->run, (unsigned long long)f->step,
			err.text);
}

/* ---- one flight ---- */

/* After the last band: blobs, the last packs sealed, part, announcement. */
static int persist_finish(struct save_flight *f, struct base_error *err)
{
	struct proto_timing timings[PERSIST_TIMINGS];
	struct save_replicas_rows rows = {0};
	struct save_measured m = {.timings = timings};
	uint64_t begin = base_realtime_ns();
	int r = save_writer_seal(f->w, err);

	saver_room_warn(f);
	f->s->again_warned = f->s->again_warned || save_writer_again_warn(f->w);
	f->s->no_base_warned = f->s->no_base_warned || save_writer_no_base_warn(f->w);
	pthread_mutex_lock(&f->s->lock);
	f->info.bytes_done += r == 0 ? save_writer_blob_bytes(f->w) : 0;
	saver_phase_note(f, SAVE_SEAL, begin, base_realtime_ns() - begin, 0);
	pthread_mutex_unlock(&f->s->lock);
	if (r == 0 && save_replicas_finish(&f->replicas, f->tensors, f->planned->numbers, f->sample_hashes,
		f->s->store->info.seed, &rows) < 0) /* samples are hashed by now */
		r = base_no_memory(err);
	m.ntimings = persist_timings(f, timings);
	m.samples = rows.samples;
	m.nsamples = rows.nsamples;
	m.replicas = rows.replicas;
	m.nreplicas = rows.nreplicas;
	if (r == 0)
		r = save_writer_finish(f->w, &m, NULL, err);
	save_replicas_rows_release(&rows);
	return r;
}

/* The layout's object and digest, once for all saves of equal declarations. Copying goes on meanwhile. */
static int persist_layout(struct save_flight *f, struct base_error *err)
{
	uint64_t begin = base_realtime_ns();
	int r;

	if (f->planned->layout_object.len)
		return 0;
	r = store_layout_encode(f->planned->layout, &f->planned->layout_object, err);
	if (r < 0)
		base_buf_release(&f->planned->layout_object);
	pthread_mutex_lock(&f->s->lock);
	saver_phase_note(f, SAVE_SEAL, begin, base_realtime_ns() - begin, 0);
	pthread_mutex_unlock(&f->s->lock);
	return r;
}

static int persist_write(struct save_flight *f, struct base_error *err)
{
	int r = persist_layout(f, err);

	f->disk_before_ns = atomic_load(&f->s->store->storage->write_wait_ns);
	if (r == 0)
		r = save_writer_begin(f->w, f->attempt, err);
	if (r == 0)
		r = persist_bases(f, err);
	if (r == 0)
		r = saver_same_answer(f, err);
	if (r == 0)
		r = saver_bands_append(f, err);
	if (r == 0)
		r = persist_finish(f, err);
	save_writer_end(f->w);
	persist_count(f);
	return r;
}

/* The list decides. A store that cannot be read is asked again for as long as a rank may be missing at the start. */
static int persist_wait(struct save_flight *f, struct base_error *err)
{
	uint64_t limit_ms = f->s->options.start_ms ? f->s->options.start_ms : COMMIT_LAUNCH_START_MS;
	uint64_t begin = base_realtime_ns(), since = base_monotonic_ns(), commit_ns, now;
	int r;

	pthread_mutex_lock(&f->s->lock);
	f->state = SAVE_ANNOUNCED;
	pthread_mutex_unlock(&f->s->lock);
	for (;;) {
		*err = (struct base_error){0};
		r = commit_attempt_wait(f->attempt, PERSIST_WAIT_MS, &f->entry, err);
		if (r == -ETIMEDOUT)
			since = base_monotonic_ns();
		else if (r == 0 || r == -BASE_EABORTED || !commit_attempt_undecided(f->attempt)
			|| base_monotonic_ns() - since > limit_ms * UINT64_C(1000000))
			break;
		else
			usleep(100000);
	}
	now = base_realtime_ns();
	commit_ns = base_min(commit_attempt_commit_ns(f->attempt), now - begin);
	pthread_mutex_lock(&f->s->lock);
	saver_phase_note(f, SAVE_WAIT, begin, now - begin - commit_ns, 0);
	if (commit_ns)
		saver_phase_note(f, SAVE_COMMIT, now - commit_ns, commit_ns, 0);
	pthread_mutex_unlock(&f->s->lock);
	return r;
}

/* The flight is prepared, or it failed. */
static int persist_prepared(struct save_flight *f, struct base_error *err)
{
	int r;

	pthread_mutex_lock(&f->s->lock);
	while (!f->prepared && !f->failed)
		pthread_cond_wait(&f->s->ready, &f->s->lock);
	r = saver_flight_error(f, err);
	pthread_mutex_unlock(&f->s->lock);
	return r;
}

/* The announcement failed, but it may have landed all the same. Then others may commit, and the result is what the list
 * says (invariant 5), with its reason. If the save was given up, the first error's code stays. */
static int persist_outcome(struct save_flight *f, int r, struct base_error *err)
{
	struct base_error why;
	int decided = persist_wait(f, &why);

	if (decided < 0 && !commit_attempt_undecided(f->attempt) && r != -BASE_EUNDECIDED)
		return base_error_set(err, r, "%s", why.text);
	*err = why;
	return decided;
}

/* Why a flight was given up before it was submitted. */
static int persist_given_up(struct save_flight *f, struct base_error *err)
{
	int r;

	pthread_mutex_lock(&f->s->lock);
	r = saver_flight_error(f, err);
	pthread_mutex_unlock(&f->s->lock);
	return r ? r : base_error_set(err, -ECANCELED, "its caller gave it up before it was submitted");
}

/* A job of one rank has no others that wait, so a refused save never begins and takes no number. */
static int persist_refused(struct save_flight *f, struct base_error *err)
{
	int r = f->given_up ? persist_given_up(f, err) : persist_named_bases(f, false, err);

	return r < 0 ? r : save_space_check(f->s->store, &f->s->space, f->s->run, 0, err);
}

/* What the last save added is the best guess of what this one will; before the first, all that is to be stored. */
static int persist_space(struct save_flight *f, struct base_error *err)
{
	struct save_saver *s = f->s;
	uint64_t expect = s->added;

	if (!expect && base_mul_overflows(f->plan->bytes, s->options.world, &expect))
		expect = UINT64_MAX;
	return save_space_check(s->store, &s->space, s->run, s->options.rank == 0 ? expect : 0, err);
}

/* All ranks together; rank 0 speaks for them. */
static void persist_space_warn(struct save_flight *f)
{
	struct save_saver *s = f->s;
	struct proto_entry e = {0};

	if (s->options.rank != 0)
		return;
	s->added = f->info.stats.bytes_written;
	if (s->options.world > 1 && commit_list_commit_read(s->store, s->run, f->entry, &e, NULL) == 0)
		s->added = e.commit.new_bytes;
	proto_entry_release(&e);
	s->space.warn_free = saver_keep_warn_free(s);
	save_space_warn(s->store, &s->space, s->run, s->added);
}

static int persist_attempt(struct save_flight *f, struct base_error *err)
{
	struct commit_attempt_save o = {.step = f->options.step, .replace = f->options.replace,
		.commons = f->submitted ? &f->commons : NULL};
	int r = f->s->options.world == 1 ? persist_refused(f, err) : 0;

	if (r < 0)
		return r;
	r = commit_attempt_begin(f->s->launch, &o, &f->attempt, err);
	if (r == 0) {
		f->step = commit_attempt_step(f->attempt);
		r = f->given_up ? persist_given_up(f, err) : persist_prepared(f, err);
	}
	if (r == 0)
		r = persist_space(f, err);
	if (r == 0)
		r = persist_write(f, err);
	if (r == 0)
		return persist_wait(f, err);
	return f->attempt && commit_attempt_announced(f->attempt) ? persist_outcome(f, r, err) : r;
}

/* The others learn why, and what this rank wrote is deleted. Of an announced save the result is what the list says,
 * which may be a commit (0), and undecided while it says nothing, whatever failed. */
static int persist_abort(struct save_flight *f, int r, struct base_error *err)
{
	bool undecided = f->attempt && commit_attempt_announced(f->attempt)
		&& commit_attempt_undecided(f->attempt);
	struct base_error outcome = {0};
	int decided;

	if ((r == -ENOSPC || r == -EDQUOT) && !undecided)
		save_space_full(f->s->store, r, f->plan ? f->plan->bytes : 0, err);
	else if (!err->code)
		base_error_set(err, r, "the save of %s failed: %s", saver_name(f).text, base_error_name(r));
	if (!f->attempt)
		return r;
	decided = commit_attempt_abort(f->attempt, undecided ? NULL : err->text, &f->entry, &outcome);
	if (decided < 0 && !undecided)
		return r;
	*err = outcome;
	return decided;
}

/* 0: the step is visible and durable. */
static int persist_flight(struct save_flight *f)
{
	struct save_saver *s = f->s;
	struct base_error err = {0};
	int r;

	f->persisted_ns = base_monotonic_ns();
	r = persist_attempt(f, &err);
	if (r < 0)
		r = persist_abort(f, r, &err);
	pthread_mutex_lock(&s->lock);
	if (r < 0)
		saver_flight_fail(f, r, &err);
	else
		f->info.stats.committed_ns = base_realtime_ns();
	if (r == 0 && f->pieces)
		saver_same_keep(f);
	pthread_mutex_unlock(&s->lock);
	if (r == 0) {
		persist_space_warn(f);
		persist_stats(f);
		save_writer_leave(f->w, &s->past);
	}
	commit_attempt_free(base_steal(f->attempt));
	saver_bands_drop(f);
	return r;
}

/* Callers are woken last, when nothing works for the flight any more. */
static void persist_over(struct save_flight *f)
{
	struct save_saver *s = f->s;
	bool last;

	pthread_mutex_lock(&s->lock);
	f->state = f->failed ? SAVE_FAILED : SAVE_COMMITTED;
	f->over = true;
	s->first = f->next;
	if (!s->first)
		s->last = NULL;
	last = saver_flight_drop(f);
	pthread_cond_broadcast(&s->callers);
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
	if (last)
		saver_flight_release(f);
}

/* The next flight that is submitted or given up; NULL: the saver closes, and there is none. */
static struct save_flight *persist_next(struct save_saver *s)
{
	struct save_flight *f;

	pthread_mutex_lock(&s->lock);
	for (;;) {
		f = s->first;
		if (f && (f->submitted || f->given_up || s->closing))
			break;
		if (!f && s->closing)
			break;
		pthread_cond_wait(&s->ready, &s->lock);
	}
	if (f && !f->submitted)
		f->given_up = true; /* closed before it was submitted */
	pthread_mutex_unlock(&s->lock);
	return f;
}

void *saver_persister_main(void *arg)
{
	struct save_saver *s = arg;
	struct save_flight *f;

	if (s->options.low_priority)
		saver_yield_to_others();
	while ((f = persist_next(s)) != NULL) {
		const bool committed = persist_flight(f) == 0;

		persist_over(f);
		if (committed && s->options.rank == 0)
			saver_keep_apply(s);
	}
	return NULL;
}
