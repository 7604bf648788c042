/* SPDX-License-Identifier: Apache-2.0
 *
 * mend: the order. A round is
 *
 *     look     verifies everything; gathers each fault with what it touches   look
 *     plan     for each fault, what makes it good, if anything does           mend_lists, mend_records, mend_packs
 *     say      what was found, what is done, what is lost                     mend_line
 *     do       the actions, in order                                          mend_apply
 *
 * The next round sees what damage had hidden: a part that is whole again names chunks, and these name pieces. Mending
 * ends when a round finds nothing to do; the faults of that round are what is left. Each round opens the store again,
 * because open packs are the old files. */
#include "core/upkeep/mend_internal.h"

#include <stdarg.h>
#include <stdio.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/commit/incoming/heartbeat.h"
#include "core/upkeep/gc_internal.h"
#include "core/upkeep/verify.h"

enum { ROUNDS_MAX = 16 };

/* ---- saying ---- */

void mend_line(struct mend *m, enum upkeep_mend_what what, const char *file, const char *format, ...)
{
	struct upkeep_mend_line line = {.what = what, .file = file, .step = PROTO_NONE};
	char text[1000];
	va_list list;

	va_start(list, format);
	vsnprintf(text, sizeof text, format, list);
	va_end(list);
	line.text = text;
	if (m->o->line)
		m->o->line(m->o->arg, &line);
}

void mend_lost(struct mend *m, const char *file, const char *run, uint64_t step, const char *component,
	const char *tensor, const char *why)
{
	struct upkeep_mend_line line = {UPKEEP_MEND_LOST, file, 0, 0, why, run, step, component, tensor};

	m->result.lost++;
	if (m->o->line)
		m->o->line(m->o->arg, &line);
}

static void say_found(struct mend *m)
{
	for (size_t i = 0; i < m->nfaults; i++) {
		const struct mend_fault *f = &m->faults[i];
		struct upkeep_mend_line line = {UPKEEP_MEND_FOUND, f->file, f->offset, f->len, f->what, NULL,
			PROTO_NONE,
			NULL, NULL};

		if (m->o->line && !m->again)
			m->o->line(m->o->arg, &line);
	}
}

static bool unneeded(const struct mend_fault *f)
{
	return strncmp(f->file, "packs/", 6) == 0 && strcmp(f->what, UPKEEP_VERIFY_FOREIGN) != 0;
}

/* Several faults may touch one tensor, which is lost once. */
static bool touch_new(struct gc_names *said, const struct mend_touch *t)
{
	base_cleanup_buf struct base_buf b = BASE_BUF_INIT;
	base_cleanup_free char *text = NULL;

	base_buf_printf(&b, "%s/%llu/%s/%s", t->run, (unsigned long long)t->step, t->component ? t->component : "",
		t->tensor ? t->tensor : "");
	text = base_buf_steal_text(&b);
	if (!text || gc_names_has(said, text))
		return !text;
	gc_names_add(said, text);
	return true;
}

/* The faults that are left at the end, and what is lost by them. */
static void say_left(struct mend *m)
{
	struct gc_names said = {0};

	for (size_t i = 0; i < m->nfaults; i++) {
		const struct mend_fault *f = &m->faults[i];

		if (f->treated)
			continue;
		m->result.left++;
		for (size_t k = 0; k < f->ntouches; k++)
			if (touch_new(&said, &f->touches[k]))
				mend_lost(m, f->file, f->touches[k].run, f->touches[k].step, f->touches[k].component,
					f->touches[k].tensor, f->what);
		if (f->ntouches == 0)
			mend_line(m, UPKEEP_MEND_LEFT, f->file, "%s%s", f->what, unneeded(f)
				? "; no visible step reaches it" : "");
	}
	gc_names_release(&said);
}

void mend_treat(struct mend *m, const char *file)
{
	for (size_t i = 0; i < m->nfaults; i++)
		if (strcmp(m->faults[i].file, file) == 0)
			m->faults[i].treated = true;
}

/* ---- looking ---- */

static void faults_release(struct mend *m)
{
	for (size_t i = 0; i < m->nfaults; i++) {
		struct mend_fault *f = &m->faults[i];

		for (size_t k = 0; k < f->ntouches; k++) {
			free(f->touches[k].run);
			free(f->touches[k].component);
			free(f->touches[k].tensor);
		}
		free(f->touches);
		free(f->file);
		free(f->what);
	}
	free(m->faults);
	m->faults = NULL;
	m->nfaults = m->faults_size = 0;
}

struct look {
	struct mend *m;
	int error;
	struct base_error newer;
};

/* The fault with verify's number, which is the same in all calls for one fault. */
static struct mend_fault *fault_of(struct mend *m, const struct upkeep_damage *d)
{
	struct mend_fault *f;

	if (base_array_room(m->faults, m->faults_size, d->fault + 1) < 0)
		return NULL;
	for (; m->nfaults <= d->fault; m->nfaults++)
		m->faults[m->nfaults] = (struct mend_fault){0};
	f = &m->faults[d->fault];
	if (!f->file)
		*f = (struct mend_fault){
			.file = strdup(d->file), .what = strdup(d->what), .offset = d->offset, .len = d->len};
	return f->file && f->what ? f : NULL;
}

/* Drops numbers that verify did not report, because what they were about was removed meanwhile. */
static void faults_close_up(struct mend *m)
{
	size_t n = 0;

	for (size_t i = 0; i < m->nfaults; i++)
		if (m->faults[i].file)
			m->faults[n++] = m->faults[i];
		else
			free(m->faults[i].what);
	m->nfaults = n;
}

static int touch_add(struct mend_fault *f, const struct upkeep_damage *d)
{
	struct mend_touch *t;

	if (base_array_more(f->touches, f->ntouches) < 0)
		return -ENOMEM;
	t = &f->touches[f->ntouches++];
	*t = (struct mend_touch){.run = strdup(d->run), .step = d->step,
		.component = d->component ? strdup(d->component) : NULL,
		.tensor = d->tensor ? strdup(d->tensor) : NULL};
	return t->run && (!d->component || t->component) && (!d->tensor || t->tensor) ? 0 : -ENOMEM;
}

static void on_damage(void *arg, const struct upkeep_damage *d)
{
	struct look *k = arg;
	struct mend_fault *f;

	if (d->newer) {
		base_error_set(&k->newer, -BASE_EVERSION, "nothing is mended: %.200s: %.400s", d->file, d->what);
		return;
	}
	f = fault_of(k->m, d);
	if (!f || (d->run && d->step != PROTO_NONE && touch_add(f, d) < 0))
		k->error = -ENOMEM;
}

/* Verifies the store. Verify also writes the notes of damage: those of mended damage are deleted, the others stay. */
static int look(struct mend *m)
{
	struct look k = {.m = m};
	const struct upkeep_verify_options o = {.step = PROTO_NONE, .note = !m->o->dry_run, .damage = on_damage,
		.progress = m->o->progress, .arg = &k, .header = m->o->header, .files = m->o->files};
	struct upkeep_verify_result result;
	int r;

	faults_release(m);
	r = upkeep_verify(m->store, &o, &result, m->err);
	faults_close_up(m);
	if (r == 0 && k.newer.code)
		r = base_error_set(m->err, k.newer.code, "%s", k.newer.text);
	return r < 0 ? r : k.error ? base_no_memory(m->err) : 0;
}

/* ---- writers ---- */

/* A heartbeat of another host has heartbeat_s to move; one of this machine is judged at once. */
static int writers_none(struct mend *m)
{
	uint64_t end = base_monotonic_ms() + m->o->heartbeat_s * 1000;
	struct gc_launches l = {0};
	bool unknown = false;
	int r = gc_launches_look(m->store, false, &l, &unknown, m->err);

	while (r == 0) {
		for (size_t i = 0; r == 0 && i < l.n; i++)
			if (l.all[i].state == COMMIT_ALIVE)
				r = base_error_set(m->err, -BASE_EBUSY,
					"mend refused: host %s is saving run %s. Try again when it has ended",
					l.all[i].host, l.all[i].run[0] ? l.all[i].run : "?");
		if (r < 0 || !unknown || base_monotonic_ms() >= end)
			break;
		usleep(100000);
		r = gc_launches_look(m->store, true, &l, &unknown, m->err);
	}
	free(l.all);
	return r;
}

/* ---- all ---- */

static int plan(struct mend *m)
{
	int r = mend_lists(m);

	if (r == 0)
		r = mend_records(m);
	return r < 0 ? r : mend_packs(m);
}

static uint64_t text_hash(uint64_t seed, const char *text)
{
	return text ? base_xxh64_of(seed, text, strlen(text)) : seed;
}

/* A hash of what a round found and does, in any order. */
static uint64_t round_hash(const struct mend *m)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < m->nfaults; i++)
		sum += text_hash(text_hash(m->faults[i].offset, m->faults[i].file), m->faults[i].what);
	for (size_t i = 0; i < m->nactions; i++)
		sum += text_hash(text_hash(m->actions[i].kind, m->actions[i].file), m->actions[i].run)
			+ m->actions[i].step;
	return sum;
}

/* 1: something was done, and another look may find more to do. */
static int mend_round(struct mend *m, bool last)
{
	int r = look(m);
	uint64_t hash;
	bool idle; /* the last round did the same, to no effect */

	if (r < 0)
		return r;
	say_found(m);
	if (!m->again)
		m->result.found = m->nfaults;
	r = mend_packs_own(m);
	if (r == 0)
		r = plan(m);
	if (r < 0)
		return r;
	hash = round_hash(m);
	idle = m->again && (hash == m->before || last);
	m->before = hash;
	if (idle)
		for (size_t i = 0; i < m->nfaults; i++)
			m->faults[i].treated = false;
	else
		m->result.done += m->nactions;
	if (idle || m->nactions == 0 || m->o->dry_run) {
		say_left(m);
		return 0;
	}
	r = mend_apply(m);
	return r < 0 ? r : 1;
}

static int round_open(struct mend *m, const char *path)
{
	return store_open(path, m->o->dry_run ? STORE_OPEN_READ_ONLY : 0, &m->store, m->err);
}

int upkeep_mend(struct store *s, const struct upkeep_mend_options *o, struct upkeep_mend_result *ret_r,
	struct base_error *err)
{
	struct base_error own = {0};
	struct mend m = {.store = s, .from = o->from, .o = o, .err = err ? err : &own};
	int r = writers_none(&m);

	for (unsigned n = 0; r == 0 && n < ROUNDS_MAX; n++) {
		r = round_open(&m, s->path);
		if (r < 0)
			break;
		r = mend_round(&m, n + 1 == ROUNDS_MAX);
		mend_actions_release(&m);
		faults_release(&m);
		store_close(m.store);
		m.again = true;
		if (r == 0)
			break;
		r = r > 0 ? 0 : r;
	}
	*ret_r = m.result;
	if (r < 0 && !m.err->code)
		base_error_set(m.err, r, "%s: mending stopped: %s", s->path, base_error_name(r));
	return r;
}
