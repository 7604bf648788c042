/* SPDX-License-Identifier: Apache-2.0
 *
 * prune_plan: see prune.h. A step is thinned if it stays, is old enough, is not pinned, and no job goes on from it: the
 * highest, the newest and the last saved one keep all that they have. */
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/upkeep/thin.h"
#include "core/upkeep/usage.h"
#include "tools/vckpt/keep/prune.h"

#define LATEST (UPKEEP_RETAIN_HIGHEST | UPKEEP_RETAIN_NEWEST | UPKEEP_RETAIN_LAST)

static int step_add(struct prune *p, const struct prune_step *s)
{
	if (base_array_more(p->steps, p->nsteps) < 0)
		return tool_failed(p->t, "out of memory");
	p->steps[p->nsteps++] = *s;
	*(s->thinned ? &p->nthin : &p->nremove) += 1;
	return 0;
}

/* ---- what is thinned ---- */

static int keep_pack(void *arg, const char *pack)
{
	struct prune_step *s = arg;

	if (base_array_more(s->packs, s->npacks) < 0 || !(s->packs[s->npacks] = strdup(pack)))
		return -ENOMEM;
	s->npacks++;
	return 0;
}

static int compare_names(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* It would have nothing left: it stays as it is, and the others are thinned. */
static int thin_left(struct prune *p, const struct commit_list_step *step, const char *run, const char *why)
{
	json_t *o = json_pack("{s:s, s:I, s:I, s:I, s:o}", "run", run, "step", (json_int_t)step->step, "entry",
		(json_int_t)step->entry, "bytes", (json_int_t)step->commit.bytes, "why",
		tool_json_text(why, strlen(why)));

	return json_array_append_new(p->kept, o) < 0 ? tool_failed(p->t, "out of memory") : 0;
}

/* *ret_has: a step has the component, or has lost it before. */
static int thin_look(struct prune *p, const struct prune_run *run, const struct commit_list_step *step, bool *ret_has)
{
	struct prune_step s = {.run = run, .step = step->step, .entry = step->entry, .thinned = true};
	struct upkeep_thinned t;
	struct base_error err = {0};
	int r = upkeep_thin_look(p->t->store, run->name, step, p->thin, keep_pack, &s, &t, &err), code;

	*ret_has |= r == 0 || t.before || t.only;
	s.bytes = t.bytes;
	if (s.npacks)
		qsort(s.packs, s.npacks, sizeof *s.packs, compare_names);
	code = r < 0 && t.only ? thin_left(p, step, run->name, err.text)
		: r < 0 ? tool_fail(p->t, &err) : r == 0 ? step_add(p, &s) : 0;
	if (r != 0 || code)
		prune_step_release(&s);
	return code;
}

static int thin_plan(struct prune *p, const struct prune_run *run, bool *ret_has)
{
	size_t n;
	const struct upkeep_retain_row *rows = upkeep_prune_rows(run->plan, &n);
	int code = 0;

	for (size_t i = 0; code == 0 && i < n; i++) {
		const struct query_step *s = &rows[i].step;

		if ((rows[i].always & LATEST) || s->pinned || (run->removes && upkeep_prune_goes(&rows[i])) ||
			query_step_age(s->time_ns, s->now_ns) <= p->older_ns)
			continue;
		code = thin_look(p, run, commit_list_find(run->list, s->step), ret_has);
	}
	return code;
}

/* Has a step of the run the component, or has one lost it before? The newest ones are looked at first. */
static bool run_has(const struct prune *p, const struct prune_run *run)
{
	bool has = false;

	for (size_t i = commit_list_count(run->list); !has && i-- > 0;) {
		struct upkeep_thinned t = {0};
		struct base_error err = {0};

		has = upkeep_thin_look(p->t->store, run->name, commit_list_at(run->list, i), p->thin, NULL, NULL, &t,
			&err) != 1 || t.before;
	}
	return has;
}

/* A name that no step has is a mistake; not one that only steps have that are not thinned. */
static int thin_named(struct prune *p, bool has)
{
	for (size_t i = 0; !has && i < p->nruns; i++)
		has = run_has(p, &p->runs[i]);
	return has ? 0 : tool_failed(p->t, "--thin %s: no step has a component of that name (vckpt ls STORE RUN/STEP "
		"shows them)", p->thin);
}

/* ---- what is removed ---- */

static int remove_plan(struct prune *p, const struct prune_run *run)
{
	size_t n;
	const struct upkeep_retain_row *rows = upkeep_prune_rows(run->plan, &n);
	int code = 0;

	for (size_t i = 0; code == 0 && run->removes && i < n; i++) {
		const struct prune_step s = {.run = run, .step = rows[i].step.step, .entry = rows[i].entry,
			.bytes = rows[i].step.bytes};

		code = upkeep_prune_goes(&rows[i]) ? step_add(p, &s) : 0;
	}
	return code;
}

/* ---- runs ---- */

/* The command's rules, or the run's policy; a run without any loses no step. */
static int run_rules(struct prune *p, struct prune_run *run, struct base_error *err)
{
	int r = 0;

	run->rules = p->keep.rules;
	if (!run->rules) {
		run->rules = run->policy = upkeep_retain_new();
		r = run->policy ? upkeep_policy_add(run->list, run->policy, err) : base_no_memory(err);
	}
	run->removes = r >= 0 && upkeep_retain_count(run->rules) > 0;
	return r < 0 ? r : 0;
}

/* As a name that no step has: a mistyped number must not remove everything. A policy may go on naming a step that was
 * removed by hand. */
static int steps_named(const struct prune *p, const struct prune_run *run)
{
	size_t n;
	const struct upkeep_retain_row *rows = upkeep_prune_rows(run->plan, &n);
	const uint64_t missing = n && !run->policy ? upkeep_retain_missing(run->rules, rows, n) : PROTO_NONE;

	return missing == PROTO_NONE ? 0 : tool_failed(p->t, "--keep-step: %s has no step %" PRIu64 ": nothing is "
		"removed (vckpt ls %s %s shows them)", run->name, missing, TOOL_WORD(p->t->arguments[0]), run->name);
}

static int run_plan(struct prune *p, struct prune_run *run)
{
	struct base_error err = {0};
	int code, r = commit_list_open(p->t->store, run->name, false, &run->list, &err);

	if (r == 0)
		r = run_rules(p, run, &err);
	if (r == 0)
		r = upkeep_prune_new(run->list, run->rules, p->now_ns, &run->plan, &err);
	code = r < 0 ? tool_fail(p->t, &err) : steps_named(p, run);
	return code ? code : remove_plan(p, run);
}

static int runs_find(struct prune *p)
{
	struct tool_target target;
	struct base_error err = {0};
	int code;

	if (p->t->narguments < 2) {
		if (commit_runs(p->t->store, &p->names, &p->nnames, &err) < 0)
			return tool_fail(p->t, &err);
	} else {
		if ((code = tool_run_parse(p->t, p->t->arguments[1], "rules are for a whole RUN", &target)))
			return code;
		p->names = calloc(1, sizeof *p->names);
		if (!p->names || !(p->names[0] = strdup(target.run)))
			return tool_failed(p->t, "out of memory");
		p->nnames = 1;
	}
	p->runs = calloc(p->nnames + 1, sizeof *p->runs);
	return p->runs ? 0 : tool_failed(p->t, "out of memory");
}

/* ---- what that frees ---- */

static int compare_steps(const void *a, const void *b)
{
	const struct prune_step *x = a, *y = b;
	int order = strcmp(x->run->name, y->run->name);

	return order ? order : (x->step > y->step) - (x->step < y->step);
}

const struct prune_step *prune_step_find(const struct prune *p, const char *run, uint64_t step)
{
	const struct prune_run named = {.name = run};
	const struct prune_step key = {.run = &named, .step = step};

	return p->nsteps ? bsearch(&key, p->steps, p->nsteps, sizeof key, compare_steps) : NULL;
}

static bool goes(void *arg, const char *run, const struct commit_list_step *step)
{
	const struct prune_step *s = prune_step_find(arg, run, step->step);

	return s && s->entry == step->entry && !s->thinned;
}

/* Those that are thinned, by entry: a manifest names many packs. */
static int compare_entries(const void *a, const void *b)
{
	const struct prune_step *const *x = a, *const *y = b;
	int order = strcmp((*x)->run->name, (*y)->run->name);

	return order ? order : ((*x)->entry > (*y)->entry) - ((*x)->entry < (*y)->entry);
}

static bool drops(void *arg, const char *run, uint64_t entry, const char *pack)
{
	const struct prune *p = arg;
	const struct prune_run named = {.name = run};
	const struct prune_step key = {.run = &named, .entry = entry}, *pointer = &key,
		**s = bsearch(&pointer, p->thins, p->nthin, sizeof *p->thins, compare_entries);

	return s && (!pack || !bsearch(&pack, (*s)->packs, (*s)->npacks, sizeof *(*s)->packs, compare_names));
}

static int find_freed(struct prune *p)
{
	const struct upkeep_usage_question q = {.store = p->t->store, .goes = goes, .drops = p->nthin ? drops : NULL,
		.arg = p};
	struct base_error err = {0};
	struct upkeep_usage u;
	size_t n = 0;

	if (!p->nsteps)
		return 0;
	p->thins = calloc(p->nthin + 1, sizeof *p->thins);
	if (!p->thins)
		return tool_failed(p->t, "out of memory");
	for (size_t i = 0; i < p->nsteps; i++)
		if (p->steps[i].thinned)
			p->thins[n++] = &p->steps[i];
	qsort(p->thins, n, sizeof *p->thins, compare_entries);
	p->frees = upkeep_usage_read(&q, &u, &err) == 0;
	p->freed_bytes = p->frees ? u.freed_bytes : 0;
	upkeep_usage_release(&u);
	if (!p->frees)
		base_warning("what this frees is not known: %s", err.text);
	return 0;
}

int prune_plan(struct prune *p)
{
	bool has = false, any = false;
	int code = runs_find(p);

	for (; code == 0 && p->nruns < p->nnames; p->nruns++) {
		struct prune_run *run = &p->runs[p->nruns];

		run->name = p->names[p->nruns];
		code = run_plan(p, run);
		any |= run->removes;
		if (code == 0 && p->t->narguments > 1 && commit_list_next(run->list) == 0)
			code = tool_no_run(p->t, run->name);
		if (code == 0 && p->thin)
			code = thin_plan(p, run, &has);
	}
	if (code == 0 && !any && !p->thin)
		code = tool_usage(p->t, "give rules, such as --keep-last 3: %s with a rule that keeps "
			"steps", p->t->narguments > 1 ? "the run has no policy" : "no run has a policy");
	if (code == 0 && p->thin)
		code = thin_named(p, has);
	if (code)
		return code;
	if (p->nsteps)
		qsort(p->steps, p->nsteps, sizeof *p->steps, compare_steps);
	return find_freed(p);
}

void prune_step_release(struct prune_step *s)
{
	for (size_t i = 0; i < s->npacks; i++)
		free(s->packs[i]);
	free(s->packs);
}
