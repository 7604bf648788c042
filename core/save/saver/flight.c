/* SPDX-License-Identifier: Apache-2.0
 *
 * flight: one save under way, as its caller sees it: begun, declared (declare.c), submitted, waited for by any thread.
 * What a caller is answered comes from the fields under the saver's lock. */
#include <stdio.h>

#include "core/base/clock.h"
#include "core/save/saver/saver_internal.h"

static const char *const phase_names[SAVE_PHASES] = {"plan", "room", "copy", "digest", "encode", "write", "seal",
	"wait", "commit"};

const char *save_phase_name(enum save_phase phase) { return phase_names[phase]; }

void saver_phase_note(struct save_flight *f, enum save_phase phase, uint64_t start_ns, uint64_t busy_ns, uint64_t bytes)
{
	struct save_phase_time *p = &f->info.phase[phase];
	uint64_t end = start_ns + busy_ns;

	if (!p->start_ns || start_ns < p->start_ns)
		p->start_ns = start_ns;
	p->end_ns = base_max(p->end_ns, end);
	p->busy_ns += busy_ns;
	p->bytes += bytes;
}

struct saver_name saver_name(const struct save_flight *f)
{
	struct saver_name name;

	if (f->options.step == PROTO_NONE)
		snprintf(name.text, sizeof name.text, "the next step of %.*s", PROTO_RUN_MAX, f->s->run);
	else
		snprintf(name.text, sizeof name.text, "%.*s/%llu", PROTO_RUN_MAX, f->s->run,
			(unsigned long long)f->options.step);
	return name;
}

int saver_check(const struct save_saver *s, struct base_error *err)
{
	if (!save_saver_is_child(s))
		return 0;
	return base_error_set(err, -BASE_EFORKED,
		"the saver of run %s belongs to process %d: a child of it has to open one of its own", s->run,
		(int)s->pid);
}

void saver_flight_release(struct save_flight *f)
{
	pthread_mutex_lock(&f->s->lock);
	saver_pieces_give(f->pieces);
	saver_pieces_give(f->before);
	pthread_mutex_unlock(&f->s->lock);
	save_writer_close(f->w);
	save_plan_cache_give(f->s->plans, f->planned);
	save_replicas_release(&f->replicas);
	device_fence_free(f->fence);
	saver_declared_release(f);
	for (size_t i = 0; i < f->nbases; i++)
		free(f->bases[i]);
	free(f->bases);
	free(f->sample_hashes);
	free(f);
}

/* A wait answers -ETIMEDOUT when its time is over and the save goes on. So a save that failed because the storage
 * answered -ETIMEDOUT fails with -EIO: its caller would wait again for ever. */
void saver_flight_fail(struct save_flight *f, int r, const struct base_error *err)
{
	if (!f->failed) {
		f->failed = true;
		f->r = r == -ETIMEDOUT ? -EIO : r;
		if (err && err->code)
			f->err = *err;
		else
			base_error_set(&f->err, r, "the save of %s failed: %s", saver_name(f).text, base_error_name(r));
		f->err.code = f->r;
	}
	pthread_cond_broadcast(&f->s->work);
	pthread_cond_broadcast(&f->s->ready);
	pthread_cond_broadcast(&f->s->callers);
}

/* ---- begin ---- */

static int flight_set_bases(struct save_flight *f, const struct save_flight_options *o, struct base_error *err)
{
	f->bases = calloc(o->nbases + 1, sizeof *f->bases);
	if (!f->bases)
		return base_no_memory(err);
	for (size_t i = 0; i < o->nbases; i++) {
		const char *slash = strchr(o->bases[i], '/');
		char *end = NULL;

		errno = 0;
		if (slash && slash - o->bases[i] <= PROTO_RUN_MAX && slash[1] >= '0' && slash[1] <= '9')
			strtoull(slash + 1, &end, 10);
		if (!end || *end || errno)
			return base_error_set(err, -EINVAL, "base \"%.200s\" is not RUN/STEP", o->bases[i]);
		f->bases[f->nbases] = strdup(o->bases[i]);
		if (!f->bases[f->nbases++])
			return base_no_memory(err);
	}
	return 0;
}

static int flight_new(struct save_saver *s, const struct save_flight_options *o, struct save_flight **ret_f,
	struct base_error *err)
{
	struct save_flight *f = calloc(1, sizeof *f);
	int r;

	if (!f)
		return base_no_memory(err);
	f->s = s;
	f->refs = 2; /* the caller's and the queue's */
	f->options = *o;
	r = save_writer_new(s->store, s->run, o->attributes, o->nattributes, s->options.rank, s->options.world,
		&f->w, err);
	if (r == 0)
		r = flight_set_bases(f, o, err);
	if (r < 0) {
		saver_flight_release(f);
		return r;
	}
	f->options.attributes = NULL; /* the writer has copies */
	f->options.bases = NULL;
	*ret_f = f;
	return 0;
}

static int flight_enqueue(struct save_saver *s, struct save_flight *f, struct base_error *err)
{
	pthread_mutex_lock(&s->lock);
	if (s->closing) {
		pthread_mutex_unlock(&s->lock);
		saver_flight_release(f);
		return base_error_set(err, -ESHUTDOWN, "the saver of run %s is closed", s->run);
	}
	f->number = s->count++;
	*(s->last ? &s->last->next : &s->first) = f;
	s->last = f;
	if (f->given_up)
		pthread_cond_signal(&s->ready);
	pthread_mutex_unlock(&s->lock);
	return 0;
}

/* Other ranks may have accepted this save, and would wait for this rank's part. So a save that is refused is queued
 * all the same, as one that was given up. */
static int flight_refuse(struct save_saver *s, uint64_t step, int r, const struct base_error *why)
{
	const struct save_flight_options none = {.step = step};
	struct save_flight *f;

	if (flight_new(s, &none, &f, NULL) < 0)
		return r;
	f->refs = 1; /* the queue's */
	f->given_up = f->failed = true;
	f->r = r;
	f->err = *why;
	flight_enqueue(s, f, NULL);
	return r;
}

int save_flight_begin(struct save_saver *s, const struct save_flight_options *o, struct save_flight **ret_f,
	struct base_error *err)
{
	struct base_error why = {0};
	struct save_flight *f = NULL;
	int r = saver_check(s, err);

	if (r < 0)
		return r;
	if (o->step == PROTO_NONE && s->options.world > 1)
		return base_error_set(err, -EINVAL,
			"run %s: a save of %u ranks needs the number of its step (the trainer's count of iterations, "
			"the same on all ranks)", s->run, s->options.world);
	if (o->step != PROTO_NONE && o->step >> 44)
		return base_error_set(err, -EINVAL, "run %s: a job's steps go from 0 to 2^44-1", s->run);
	r = flight_new(s, o, &f, &why);
	if (r < 0) {
		if (err)
			*err = why;
		return flight_refuse(s, o->step, r, &why);
	}
	r = flight_enqueue(s, f, err);
	if (r == 0)
		*ret_f = f;
	return r;
}

/* ---- submitting and waiting ---- */

int save_flight_submit(struct save_flight *f, struct base_error *err)
{
	struct save_saver *s = f->s;
	int r = saver_check(s, err);

	if (r < 0)
		return r;
	if (f->submitted)
		return base_error_set(err, -EINVAL, "the save of %s was submitted before", saver_name(f).text);
	r = check_commons_finish(&f->commons, err);
	if (r < 0)
		return r;
	r = f->device ? saver_fence_make(f, err) : 0;
	if (r < 0)
		return r;
	pthread_mutex_lock(&s->lock);
	if (f->given_up) {
		r = base_error_set(err, -ESHUTDOWN, "the saver of run %s was closed before this save was submitted",
			s->run);
	} else {
		f->submitted = true;
		f->state = SAVE_QUEUED;
		f->info.stats.submitted_ns = base_realtime_ns();
		pthread_cond_broadcast(&s->work);
		pthread_cond_signal(&s->ready);
	}
	pthread_mutex_unlock(&s->lock);
	return r;
}

/* A caller has now seen the flight's error, so close does not return it again. The lock is held. */
static void flight_was_seen(struct save_flight *f)
{
	struct save_flight **at = &f->s->unseen;

	f->seen = true;
	while (*at && *at != f)
		at = &(*at)->next;
	if (*at)
		*at = f->next;
}

/* Keeps a failed flight whose error no caller has seen, so that close can report it. Once its handle is freed, only the
 * earliest such error is kept. */
static void flight_keep_unseen(struct save_flight *f)
{
	struct save_saver *s = f->s;
	struct save_flight **at = &s->unseen;

	if (!f->failed || f->seen || f->given_up)
		return;
	if (f->refs) {
		while (*at)
			at = &(*at)->next;
		f->next = NULL;
		*at = f;
		return;
	}
	if (!s->first_r || f->number < s->first_failed) {
		s->first_r = f->r;
		s->first_err = f->err;
		s->first_failed = f->number;
	}
	flight_was_seen(f);
}

/* Drops the reference and updates `unseen` under one hold of the lock. Between two holds the other holder would think
 * that this one is still there, leave the flight in the list for it, and never look again. */
bool saver_flight_drop(struct save_flight *f)
{
	f->refs--;
	if (f->over)
		flight_keep_unseen(f);
	return f->refs == 0;
}

int saver_flight_error(const struct save_flight *f, struct base_error *err)
{
	if (f->failed && err)
		*err = f->err;
	return f->failed ? f->r : 0;
}

/* 1: yes; 0: not yet; -1: never, it has failed. */
static int flight_is_staged(const struct save_flight *f)
{
	return f->staged ? 1 : f->failed && f->copying == 0 && f->s->preparing != f ? -1 : 0;
}

static int flight_is_decided(const struct save_flight *f) { return !f->over ? 0 : f->failed ? -1 : 1; }

/* Waits for one of these; what: its name. */
static int flight_wait(struct save_flight *f, int64_t timeout_ms, int (*ask)(const struct save_flight *f),
	const char *what, struct base_error *err)
{
	struct timespec end = base_clock_in_ms(CLOCK_MONOTONIC, timeout_ms);
	struct save_saver *s = f->s;
	int r = saver_check(s, err), is = 0;

	if (r < 0)
		return r;
	pthread_mutex_lock(&s->lock);
	if (!f->submitted)
		r = base_error_set(err, -EINVAL, "the save of %s was not submitted: there is nothing to wait for "
			"before vckpt_save_submit", saver_name(f).text);
	while (r == 0 && (is = ask(f)) == 0)
		if ((timeout_ms < 0 ? pthread_cond_wait(&s->callers, &s->lock)
			: pthread_cond_timedwait(&s->callers, &s->lock, &end)) != 0)
			r = base_error_set(err, -ETIMEDOUT, "the save of %s is not %s yet", saver_name(f).text, what);
	if (is < 0) {
		flight_was_seen(f);
		r = saver_flight_error(f, err);
	}
	pthread_mutex_unlock(&s->lock);
	return r;
}

int save_flight_wait_staged(struct save_flight *f, int64_t timeout_ms, struct base_error *err)
{
	return flight_wait(f, timeout_ms, flight_is_staged, "staged", err);
}

int save_flight_wait_committed(struct save_flight *f, int64_t timeout_ms, uint64_t *ret_step, uint64_t *ret_entry,
	struct base_error *err)
{
	int r = flight_wait(f, timeout_ms, flight_is_decided, "decided", err);

	if (r == 0 && ret_step)
		*ret_step = f->step;
	if (r == 0 && ret_entry)
		*ret_entry = f->entry;
	return r;
}

int save_flight_info(struct save_flight *f, struct save_flight_info *ret_info)
{
	struct save_plan_cache_stats plans;

	if (save_saver_is_child(f->s))
		return -BASE_EFORKED;
	save_plan_cache_stats(f->s->plans, &plans);
	pthread_mutex_lock(&f->s->lock);
	*ret_info = f->info;
	ret_info->state = f->state;
	ret_info->error = f->state == SAVE_FAILED ? f->r : 0;
	ret_info->plan_hits = plans.hits;
	ret_info->plan_misses = plans.misses;
	pthread_mutex_unlock(&f->s->lock);
	return 0;
}

void save_flight_give_up(struct save_flight *f, const char *reason)
{
	if (save_saver_is_child(f->s))
		return;
	pthread_mutex_lock(&f->s->lock);
	if (!f->submitted && !f->given_up && !f->failed) {
		f->failed = true;
		f->r = base_error_set(&f->err, -BASE_EABORTED, "its caller gave it up before it was submitted: %.800s",
			reason);
	}
	pthread_mutex_unlock(&f->s->lock);
}

void save_flight_free(struct save_flight *f)
{
	struct save_saver *s;
	bool last;

	if (!f || save_saver_is_child(f->s))
		return;
	s = f->s;
	pthread_mutex_lock(&s->lock);
	if (!f->submitted && !f->given_up) {
		f->given_up = true;
		pthread_cond_signal(&s->ready);
		pthread_cond_broadcast(&s->work); /* those behind it may be staged now */
	}
	last = saver_flight_drop(f);
	pthread_mutex_unlock(&s->lock);
	if (last)
		saver_flight_release(f);
}
