/* SPDX-License-Identifier: Apache-2.0 */
#include "core/find/find_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/cleanup.h"
#include "core/commit/list/list_facts.h"

struct failure { const char *run; uint64_t entry; struct base_error why; };

struct find {
	struct store *store;
	const struct find_options *o;
	struct query_expr *expr;
	char **runs; size_t nruns;
	struct commit_list **lists;     /* by run; NULL: it cannot be read */
	uint64_t visible;               /* steps */
	struct find_step *found; size_t nfound;
	const char **unknown; size_t nunknown;
	struct failure *failures; size_t nfailures;
	struct find_known known;
};

/* entry: of a step, or PROTO_NONE. -ENOMEM. */
static int add_failure(struct find *f, const char *run, uint64_t entry, const struct base_error *why)
{
	if (base_array_more(f->failures, f->nfailures) < 0)
		return -ENOMEM;
	f->failures[f->nfailures++] = (struct failure){.run = run, .entry = entry, .why = *why};
	return 0;
}

static int open_lists(struct find *f, struct base_error *err)
{
	int r = commit_runs(f->store, &f->runs, &f->nruns, err);

	if (r < 0)
		return r;
	f->lists = calloc(f->nruns + 1, sizeof *f->lists);
	if (!f->lists)
		return base_no_memory(err);
	for (size_t i = 0; i < f->nruns; i++) {
		struct base_error why = {0};

		if (commit_list_open(f->store, f->runs[i], false, &f->lists[i], &why) < 0) {
			f->lists[i] = NULL;
			if (add_failure(f, f->runs[i], PROTO_NONE, &why) < 0)
				return base_no_memory(err);
			continue;
		}
		f->visible += commit_list_count(f->lists[i]);
	}
	return 0;
}

static int list_manifests(struct find *f, struct base_error *err)
{
	struct find_known *k = &f->known;

	k->visible = calloc(f->visible + 1, sizeof *k->visible);
	if (!k->visible)
		return base_no_memory(err);
	for (size_t i = 0; i < f->nruns; i++)
		for (size_t n = 0; f->lists[i] && n < commit_list_count(f->lists[i]); n++)
			k->visible[k->nvisible++] = &commit_list_at(f->lists[i], n)->commit.manifest;
	return 0;
}

/* ---- attributes that are asked for ---- */

static int list_attributes(struct find *f, struct base_error *err)
{
	const char *name;

	while ((name = query_expr_attribute(f->expr, f->nunknown))) {
		if (base_array_more(f->unknown, f->nunknown) < 0)
			return base_no_memory(err);
		f->unknown[f->nunknown++] = name;
	}
	return 0;
}

static void strike_attributes(struct find *f, const struct query_step *step)
{
	for (size_t i = 0; i < f->nunknown;)
		if (query_step_attribute(step, f->unknown[i]))
			f->unknown[i] = f->unknown[--f->nunknown];
		else
			i++;
}

/* ---- steps ---- */

/* ret_own: what of the attributes was set later, to be freed. */
static int subject_of(const struct find *f, const struct commit_list *l, const struct commit_list_step *s,
	struct query_step *ret_step, struct proto_attribute **ret_own)
{
	const struct proto_step_facts *facts = commit_list_facts(l, s->entry);
	int r = 0;

	*ret_step = (struct query_step){.run = commit_list_run(l), .step = s->step, .bytes = s->commit.bytes,
		.time_ns = s->commit.time_ns, .now_ns = f->o->now_ns, .attributes = s->commit.attributes,
		.nattributes = s->commit.nattributes};
	if (!facts)
		return 0;
	ret_step->pinned = facts->pinned;
	ret_step->tags = facts->tags;
	ret_step->ntags = facts->ntags;
	if (facts->nattributes)
		r = commit_list_attributes(l, s, ret_own, &ret_step->nattributes);
	if (*ret_own)
		ret_step->attributes = *ret_own;
	return r;
}

/* 1: something was read from the store; 0; -ENOMEM. */
static int ask_step(struct find *f, const char *run, const struct commit_list *l, const struct commit_list_step *s)
{
	base_cleanup_free struct proto_attribute *own = NULL;
	struct base_error why = {0};
	struct find_asking a = {.known = &f->known, .expr = f->expr, .run = run, .entry = s, .err = &why};
	const struct query_subject subject = {.value = find_groups_value, .arg = &a, .one = find_groups_one};
	bool holds;

	if (subject_of(f, l, s, &a.step, &own) < 0)
		return -ENOMEM;
	strike_attributes(f, &a.step);
	holds = query_expr_holds(f->expr, &subject);
	if (a.r < 0) {
		base_error_prefix(&why, a.r, "%s/%" PRIu64, run, s->step);
		f->known.all = false;
		return a.r == -ENOMEM ? -ENOMEM : add_failure(f, run, s->entry, &why);
	}
	if (!holds)
		return a.read;
	if (base_array_more(f->found, f->nfound) < 0)
		return -ENOMEM;
	f->found[f->nfound++] = (struct find_step){.run = run, .list = l, .step = s};
	return a.read;
}

static int ask_all(struct find *f, struct base_error *err)
{
	uint64_t done = 0;

	for (size_t i = 0; i < f->nruns; i++) {
		for (size_t n = 0; f->lists[i] && n < commit_list_count(f->lists[i]); n++) {
			int r = ask_step(f, f->runs[i], f->lists[i], commit_list_at(f->lists[i], n));

			if (r < 0)
				return base_no_memory(err);
			done++;
			if (r > 0 && f->o->progress)
				f->o->progress(f->o->arg, done, f->visible);
		}
	}
	return 0;
}

static int newest_first(const void *a, const void *b)
{
	const struct find_step *x = a, *y = b;

	if (x->step->commit.time_ns != y->step->commit.time_ns)
		return x->step->commit.time_ns > y->step->commit.time_ns ? -1 : 1;
	return strcmp(x->run, y->run) ? strcmp(x->run, y->run)
		: (x->step->step < y->step->step) - (x->step->step > y->step->step);
}

/* ---- what cannot be read ---- */

/* Was the step removed or replaced while it was read? */
static bool is_gone(const struct find *f, const struct failure *failure)
{
	struct commit_list *l;
	bool gone;

	if (failure->entry == PROTO_NONE || commit_list_open_newest(f->store, failure->run, &l, NULL) < 0)
		return false;
	gone = commit_list_know_entry(l, failure->entry, NULL) == 0 && !commit_list_entry_live(l, failure->entry);
	commit_list_close(l);
	return gone;
}

static int report(struct find *f, struct base_error *err)
{
	for (size_t i = 0; i < f->nfailures; i++) {
		if (is_gone(f, &f->failures[i]))
			continue;
		if (!f->o->failed)
			return base_error_set(err, f->failures[i].why.code, "%s", f->failures[i].why.text);
		f->o->failed(f->o->arg, &f->failures[i].why);
	}
	return 0;
}

/* ---- the whole ---- */

static int answer(struct find *f, struct base_error *err)
{
	int r = query_expr_parse(f->o->expression, find_names, FIND_NAMES, &f->expr, err);

	if (r < 0 || (r = open_lists(f, err)) < 0 || (r = list_attributes(f, err)) < 0)
		return r;
	f->known.groups = query_expr_groups(f->expr);
	f->known.all = f->known.groups > 0;
	if (f->known.groups && (r = list_manifests(f, err)) < 0)
		return r;
	r = ask_all(f, err);
	if (r < 0)
		return r;
	find_keep_end(&f->known);
	if (f->nfound)
		qsort(f->found, f->nfound, sizeof *f->found, newest_first);
	if (f->o->limit && f->nfound > f->o->limit)
		f->nfound = (size_t)f->o->limit;
	if (!f->visible)
		f->nunknown = 0;
	return report(f, err);
}

int find_open(struct store *s, const struct find_options *o, struct find **ret_f, struct base_error *err)
{
	struct find *f = calloc(1, sizeof *f);
	int r;

	if (!f)
		return base_no_memory(err);
	f->store = s;
	f->o = o;
	f->known = (struct find_known){.store = s, .no_index = o->no_index, .steps.flag = INDEX_STEPS,
		.digests.flag = INDEX_DIGESTS};
	r = answer(f, err);
	if (r < 0)
		find_close(f);
	else
		*ret_f = f;
	return r < 0 ? r : 0;
}

void find_close(struct find *f)
{
	if (!f)
		return;
	find_known_release(&f->known);
	for (size_t i = 0; f->lists && i < f->nruns; i++)
		commit_list_close(f->lists[i]);
	free(f->lists);
	commit_runs_free(f->runs, f->nruns);
	query_expr_free(f->expr);
	free(f->found);
	free(f->unknown);
	free(f->failures);
	free(f);
}

size_t find_count(const struct find *f)
{
	return f->nfound;
}

const struct find_step *find_at(const struct find *f, size_t i)
{
	return &f->found[i];
}

const char *find_unknown(const struct find *f, size_t i)
{
	return i < f->nunknown ? f->unknown[i] : NULL;
}
