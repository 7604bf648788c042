/* SPDX-License-Identifier: Apache-2.0
 *
 * past: which steps of its run a save takes as bases (docs/save.md, Which bases).
 *
 *   the launch's own last step     the state went on from there. It need not be the newest step: a job goes back to an
 *                                  earlier one and replaces what follows; others write to the run, too
 *   the step that was loaded       by this process, since its last save in the run
 *   the step before, by number     what a launch was most likely started from
 *   for what these lack            the newest step that has it: a component that only some saves have; tensors that
 *                                  only some have; thin shards, which another layout cuts into other pieces
 *   the step that is replaced, and, while the launch has no step of its own, the newest one
 *
 * All this follows from the list, the save's step, and what the launch saved and loaded before, which are the same at
 * all ranks.
 *
 * What a step has is known from its manifest. A save reads that of each base anyway, so a saver knows its own steps,
 * however far back the last one with a component is. A new saver looks for it (past_walk) among the nearest steps, the
 * nearest of each size and the nearest of each launch. So what it reads does not grow with the run. It remembers what
 * it read: otherwise each save of a state whose layout changes every time would read the same manifests again. */
#include "core/save/write/write_internal.h"

#include <stdlib.h>

#include "core/base/bisect.h"
#include "core/save/write/base_internal.h"
#include "core/step/manifest.h"

#define PAST_LAUNCH 17u         /* bytes of an attempt's name that give its launch */
#define PAST_NEAREST 8u         /* so many steps, sizes and launches are looked at */
#define PAST_RANKS 65536u       /* of the manifests that one walk reads, 168 bytes each */
#define PAST_SEARCHES 4u        /* by component */
#define PAST_LAYOUTS_MAX 1024u  /* that are remembered of a step */
#define PAST_LOADED 8u          /* runs of which this process remembers what it loaded */

struct past_want { const struct base_digest *layout; const char *component; }; /* one of them is NULL */

struct past {
	struct save_past *p;
	struct save_writer *w;
	struct commit_list *list;
	uint64_t step;                  /* that is saved */
};

/* ---- what was loaded ---- */

static struct {
	pthread_mutex_t lock;           /* protects all below */
	struct past_loaded { uint8_t store[16]; char run[PROTO_RUN_MAX + 1]; uint64_t step, entry; } all[PAST_LOADED];
	size_t n;                       /* so many were added; the oldest give way */
} loaded = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct past_loaded *loaded_find(const struct store *s, const char *run)
{
	for (size_t i = 0; i < base_min(loaded.n, PAST_LOADED); i++)
		if (memcmp(loaded.all[i].store, s->info.id, sizeof loaded.all[i].store) == 0 &&
			strcmp(loaded.all[i].run, run) == 0)
			return &loaded.all[i];
	return NULL;
}

void save_past_loaded(const struct store *s, const char *run, uint64_t step, uint64_t entry)
{
	struct past_loaded *l;

	pthread_mutex_lock(&loaded.lock);
	l = loaded_find(s, run);
	if (!l)
		l = &loaded.all[loaded.n++ % PAST_LOADED];
	*l = (struct past_loaded){.step = step, .entry = entry};
	memcpy(l->store, s->info.id, sizeof l->store);
	memccpy(l->run, run, 0, sizeof l->run - 1);
	pthread_mutex_unlock(&loaded.lock);
}

static int past_loaded_know(const struct past *s, struct base_error *err)
{
	struct past_loaded *l;
	uint64_t step;

	pthread_mutex_lock(&loaded.lock);
	l = loaded_find(s->w->store, s->w->options.run);
	step = l ? l->step : PROTO_NONE;
	pthread_mutex_unlock(&loaded.lock);
	return step == PROTO_NONE ? 0 : commit_list_know_step(s->list, step, err);
}

/* The step, if it is visible. It is returned once: a later save goes on from this save. */
static const struct commit_list_step *past_loaded(const struct past *s)
{
	const struct commit_list_step *step = NULL;
	struct past_loaded *l;

	pthread_mutex_lock(&loaded.lock);
	l = loaded_find(s->w->store, s->w->options.run);
	if (l) {
		step = commit_list_find(s->list, l->step);
		step = step && step->entry == l->entry ? step : NULL;
		*l = (struct past_loaded){0};
	}
	pthread_mutex_unlock(&loaded.lock);
	return step;
}

/* ---- what is remembered ---- */

static void past_release_step(struct save_past_step *k)
{
	free(k->layouts);
	free(k->components);
	*k = (struct save_past_step){0};
}

void save_past_release(struct save_past *p)
{
	while (p->nsteps)
		past_release_step(&p->steps[--p->nsteps]);
	commit_list_close(base_steal(p->list));
	save_last_release(&p->last);
}

static const struct save_past_step *past_known(const struct save_past *p, const struct base_digest *manifest)
{
	for (unsigned i = 0; i < p->nsteps; i++)
		if (base_digest_equal(&p->steps[i].manifest, manifest))
			return &p->steps[i];
	return NULL;
}

/* Is there a later step that has what this one has? */
static bool past_repeated(const struct save_past *p, unsigned i, bool layouts)
{
	const struct save_past_step *k = &p->steps[i];

	for (unsigned j = i + 1; j < p->nsteps; j++) {
		const struct save_past_step *later = &p->steps[j];

		if (layouts ? later->nlayouts == k->nlayouts &&
			memcmp(later->layouts, k->layouts, k->nlayouts * sizeof *k->layouts) == 0
			: later->ncomponents == k->ncomponents &&
			memcmp(later->components, k->components, k->ncomponents * sizeof *k->components) == 0)
			return true;
	}
	return false;
}

/* The step of least use: the earliest whose layouts, or else components, a later one has. */
static unsigned past_least(const struct save_past *p)
{
	for (unsigned pass = 0; pass < 2; pass++)
		for (unsigned i = 0; i < p->nsteps; i++)
			if (past_repeated(p, i, pass == 0))
				return i;
	return 0;
}

/* l: the layout, where m is an excerpt. NULL: no memory. */
static const struct save_past_step *past_put(struct save_past *p, const struct commit_list_step *step,
	const struct proto_manifest *m, const struct store_layout *l)
{
	uint32_t nlayouts = base_min(m->nlayouts, PAST_LAYOUTS_MAX);
	struct save_past_step k = {.manifest = step->commit.manifest, .step = step->step, .entry = step->entry,
		.layouts = calloc(nlayouts + 1, sizeof *k.layouts), .nlayouts = nlayouts};

	int r = l ? save_layout_components(l, &k.components, &k.ncomponents)
		: save_components(m, &k.components, &k.ncomponents);

	if (!k.layouts || r < 0) {
		past_release_step(&k);
		return NULL;
	}
	for (uint32_t i = 0; i < nlayouts; i++)
		k.layouts[i] = m->layouts[i].digest;
	if (p->nsteps == SAVE_PAST_STEPS) {
		unsigned gone = past_least(p);

		past_release_step(&p->steps[gone]);
		memmove(&p->steps[gone], &p->steps[gone + 1], (--p->nsteps - gone) * sizeof k);
	}
	p->steps[p->nsteps] = k;
	return &p->steps[p->nsteps++];
}

static bool past_has(const struct save_past_step *k, const struct past_want *want)
{
	bool has = false;

	if (want->component)
		return save_component_find(k->components, k->ncomponents, want->component) >= 0;
	for (uint32_t i = 0; !has && i < k->nlayouts; i++)
		has = base_digest_equal(&k->layouts[i], want->layout);
	return has;
}

/* ---- looking for a step ---- */

/* Lower numbers come first, the highest of them before all; then higher ones. */
static bool past_nearer(const struct past *s, uint64_t a, uint64_t b)
{
	return (a < s->step) != (b < s->step) ? a < s->step : a > b;
}

static const struct commit_list_step *past_recall(const struct past *s, const struct past_want *want)
{
	const struct commit_list_step *found = NULL;

	for (unsigned i = 0; i < s->p->nsteps; i++) {
		const struct save_past_step *k = &s->p->steps[i];
		const struct commit_list_step *step = past_has(k, want) ? commit_list_find(s->list, k->step) : NULL;

		if (step && step->entry == k->entry && (!found || past_nearer(s, step->step, found->step)))
			found = step;
	}
	return found;
}

struct past_seen { const struct commit_list_step *sizes[PAST_NEAREST], *launches[PAST_NEAREST]; };

static bool past_same_size(const struct commit_list_step *a, const struct commit_list_step *b)
{
	return a->commit.tensors == b->commit.tensors && a->commit.bytes == b->commit.bytes;
}

static bool past_same_launch(const struct commit_list_step *a, const struct commit_list_step *b)
{
	return strncmp(a->commit.attempt, b->commit.attempt, PAST_LAUNCH) == 0;
}

/* Is the step the first of its kind, and is that one of the first few kinds? */
static bool past_new(const struct commit_list_step *seen[static PAST_NEAREST], const struct commit_list_step *step,
	bool (*same)(const struct commit_list_step *, const struct commit_list_step *))
{
	for (unsigned i = 0; i < PAST_NEAREST; i++) {
		if (!seen[i]) {
			seen[i] = step;
			return true;
		}
		if (same(seen[i], step))
			return false;
	}
	return false;
}

/* Where to put why something was not found: the first reason is kept. */
static struct base_error *past_why(const struct past *s)
{
	return s->w->bases.unread.code ? NULL : &s->w->bases.unread;
}

static const struct save_past_step *past_read(struct past *s, const struct commit_list_step *step, uint64_t *ranks)
{
	const struct save_past_step *k = past_known(s->p, &step->commit.manifest);
	struct proto_manifest m;

	if (k || store_manifest_get(s->w->store, s->w->options.run, &step->commit.manifest, &m, past_why(s)) < 0)
		return k;
	*ranks += m.nranks;
	k = past_put(s->p, step, &m, NULL);
	proto_manifest_release(&m);
	return k;
}

/* How many steps have lower numbers. */
static size_t past_before(const struct past *s)
{
	size_t n = commit_list_count(s->list);

	return base_bisect(i, 0, n, commit_list_at(s->list, i)->step < s->step);
}

/* All steps are looked at: pointers to them are void after it. */
static const struct commit_list_step *past_walk(struct past *s, const struct past_want *want)
{
	int r = commit_list_know_all(s->list, past_why(s));
	size_t n = r == 0 ? commit_list_count(s->list) : 0, before = past_before(s);
	struct past_seen seen = {0};
	uint64_t ranks = 0;

	for (size_t i = 0; i < n && ranks < PAST_RANKS; i++) {
		const struct commit_list_step *step = commit_list_at(s->list,
			i < before ? before - 1 - i : n - 1 - (i - before));
		bool size = past_new(seen.sizes, step, past_same_size);
		bool launch = past_new(seen.launches, step, past_same_launch);
		const struct save_past_step *k = i < PAST_NEAREST || size || launch ? past_read(s, step, &ranks)
			: NULL;

		if (k && past_has(k, want))
			return step;
	}
	return NULL;
}

/* ---- the bases ---- */

static int past_add(struct past *s, const struct commit_list_step *step, struct base_error *err)
{
	unsigned n = save_bases_count(&s->w->bases);
	int r = step ? save_bases_add_step(&s->w->bases, s->w->store, s->w->options.run, step) : 0;
	const struct save_base *b;

	if (r < 0)
		return base_no_memory(err);
	if (save_bases_count(&s->w->bases) == n)
		return 0;
	b = s->w->bases.all[n];
	if (b->open && !past_known(s->p, &step->commit.manifest))
		past_put(s->p, step, &b->m, b->excerpt ? b->layouts[0].layout : NULL);
	return 0;
}

static int past_add_all(struct past *s, const struct commit_list_step *const *steps, size_t n, struct base_error *err)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < n; i++)
		r = past_add(s, steps[i], err);
	return r;
}

/* The launch's last step that is visible. */
static const struct commit_list_step *past_own(const struct past *s)
{
	const struct save_past *p = s->p;

	for (unsigned i = 0; i < base_min(p->ntried, SAVE_PAST_TRIED); i++) {
		const struct save_past_tried *own = &p->tried[(p->ntried - 1 - i) % SAVE_PAST_TRIED];
		const struct commit_list_step *step = commit_list_find(s->list, own->step);

		if (step && strcmp(step->commit.attempt, own->attempt) == 0)
			return step;
	}
	return NULL;
}

static int past_search_one(struct past *s, const struct past_want *want, struct base_error *err)
{
	const struct commit_list_step *step = past_recall(s, want);

	return past_add(s, step ? step : past_walk(s, want), err);
}

/* A component that no base has; in the end, if the bases lack some tensors, or have another layout, a step of the
 * save's layout. */
static int past_search(struct past *s, struct base_error *err)
{
	const struct store_layout *l = s->w->planned->layout;
	unsigned searches = 0;
	bool all = true;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < l->m.ncomponents; i++) {
		struct past_want want = {.component = l->m.components[i]};
		enum save_fit fit = save_bases_fit(&s->w->bases, l, i);

		if (fit == SAVE_FIT_NOT && searches++ < PAST_SEARCHES) {
			r = past_search_one(s, &want, err);
			fit = save_bases_fit(&s->w->bases, l, i);
		}
		all = all && fit == SAVE_FIT_ALL;
	}
	return r || all ? r : past_search_one(s, &(struct past_want){.layout = &l->digest}, err);
}

/* What comes first: the launch's own last step and what it went on from. */
static int past_near(struct past *s, struct base_error *err)
{
	size_t n = past_before(s);
	const struct commit_list_step *own = past_own(s), *from = past_loaded(s);
	const struct commit_list_step *before = n ? commit_list_at(s->list, n - 1) : NULL;
	bool back = own && own->step >= s->step; /* the job went back to what it loaded */
	const struct commit_list_step *first[] = {back ? from : own, own, from, before};

	return past_add_all(s, first, BASE_COUNT(first), err);
}

static int past_last(struct past *s, bool replace, struct base_error *err)
{
	const struct commit_list_step *last[] = {replace ? commit_list_find(s->list, s->step) : NULL,
		past_own(s) ? NULL : commit_list_latest(s->list)};

	return past_add_all(s, last, BASE_COUNT(last), err);
}

/* The run's list, read to its end; of the steps that are asked for below, it knows what is visible. */
static int past_list(struct past *s, bool replace)
{
	struct base_error *why = past_why(s);
	struct save_past *p = s->p;
	int r = p->list ? commit_list_refresh(p->list, why)
		: commit_list_open_newest(s->w->store, s->w->options.run, &p->list, why);

	s->list = p->list;
	if (r >= 0)
		r = commit_list_know_below(s->list, s->step, why);
	if (r >= 0 && replace)
		r = commit_list_know_step(s->list, s->step, why);
	if (r >= 0)
		r = past_loaded_know(s, why);
	if (r < 0) {
		commit_list_close(base_steal(p->list));
		base_error_set(past_why(s), r, "the list of run %s: %s", s->w->options.run, base_error_name(r));
	}
	return r;
}

int save_writer_bases(struct save_writer *w, struct save_past *p, bool replace, struct base_error *err)
{
	struct save_past_tried *tried = &p->tried[(p->ntried - 1) % SAVE_PAST_TRIED];
	struct past s = {.p = p, .w = w, .step = w->result.step};
	int r = past_list(&s, replace);

	w->bases.last = &p->last;
	w->bases.layout = w->planned->layout;
	if (!p->ntried || strcmp(tried->attempt, w->result.attempt) != 0) /* else it is a further rank's */
		tried = &p->tried[p->ntried++ % SAVE_PAST_TRIED];
	tried->step = s.step;
	memcpy(tried->attempt, w->result.attempt, sizeof tried->attempt);
	if (r < 0)
		return 0; /* without bases, and bases.unread says why */
	r = past_near(&s, err);
	if (r == 0 && save_bases_count(&w->bases) == 0)
		r = past_last(&s, replace, err);
	if (r == 0)
		r = past_search(&s, err);
	if (r == 0)
		r = past_last(&s, replace, err);
	return r;
}
