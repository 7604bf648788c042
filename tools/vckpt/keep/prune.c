/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt prune: removes the steps of runs that no rule keeps, and drops a component of old ones. Everything is planned
 * and printed before the first step is touched, and nothing happens without --yes or an answer. What goes is decided
 * again when each removal is put (core/upkeep/prune.c). An error that stops one step of a run would stop its others
 * too, so they are not tried. */
#include <inttypes.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/query/value.h"
#include "core/upkeep/thin.h"
#include "tools/vckpt/keep/prune.h"

static json_t *done_json(const struct prune_step *s, uint64_t bytes)
{
	return json_pack("{s:s, s:I, s:I, s:I}", "run", s->run->name, "step", (json_int_t)s->step, "entry",
		(json_int_t)s->entry, "bytes", (json_int_t)bytes);
}

static void say_stays(struct prune *p, const struct prune_step *s, const char *why)
{
	json_t *o = done_json(s, s->bytes);

	json_object_set_new(o, "why", tool_json_text(why, strlen(why)));
	json_array_append_new(p->kept, o);
	if (!p->t->json && !p->t->quiet)
		tool_print(stdout, "%s\n", why);
}

static int say_failed(struct prune *p, const struct prune_step *s, const struct base_error *err)
{
	json_array_append_new(p->failed, json_pack("{s:s, s:I, s:o}", "run", s->run->name, "step", (json_int_t)s->step,
		"error", tool_json_text(err->text, strlen(err->text))));
	return tool_fail(p->t, err);
}

static void say_done(struct prune *p, const struct prune_step *s, uint64_t bytes)
{
	json_array_append_new(s->thinned ? p->thinned : p->removed, done_json(s, bytes));
	if (!p->t->json && !p->t->quiet)
		tool_print(stdout, "%s/step-%08" PRIu64 " %s%s, %s logical\n", s->run->name, s->step,
			s->thinned ? "lost " : "removed", s->thinned ? p->thin : "", TOOL_BYTES(bytes));
	fflush(stdout); /* the line is true, whatever comes next */
}

static int thin_step(struct prune *p, const struct prune_step *s, uint64_t *ret_bytes, struct base_error *err)
{
	struct upkeep_thinned t = {0};
	const struct commit_list_step *now;
	int r = commit_list_refresh(s->run->list, err);

	if (r >= 0)
		r = commit_list_know_step(s->run->list, s->step, err);
	if (r < 0)
		return r;
	now = commit_list_find(s->run->list, s->step);
	if (!now || now->entry != s->entry)
		return base_error_set(err, -ESTALE,
			"%s: step %" PRIu64 " was removed or replaced by another writer just now", s->run->name,
			s->step);
	r = upkeep_thin(p->t->store, s->run->name, now, p->thin, &t, err);
	*ret_bytes = t.bytes;
	return r;
}

/* What another writer removed, replaced, pinned or tagged meanwhile stays as it is. */
static int one_step(struct prune *p, const struct prune_step *s)
{
	struct base_error err = {0};
	uint64_t bytes = s->bytes;
	int r = s->thinned ? thin_step(p, s, &bytes, &err)
		: upkeep_prune_remove(s->run->plan, s->step, s->entry, "prune: no rule keeps it", &err);

	if (r == 1 || r == -ESTALE || r == -BASE_EPINNED)
		say_stays(p, s, err.text);
	else if (r == 0)
		say_done(p, s, bytes);
	return r < 0 && r != -ESTALE && r != -BASE_EPINNED ? say_failed(p, s, &err) : 0;
}

static int all_steps(struct prune *p)
{
	const struct prune_run *stuck = NULL;
	int worst = 0;

	for (size_t i = 0; i < p->nsteps; i++) {
		int code = p->steps[i].run == stuck ? 0 : one_step(p, &p->steps[i]);

		if (code)
			stuck = p->steps[i].run;
		worst = code > worst ? code : worst;
	}
	return worst;
}

/* 0: go on */
static int ask(struct prune *p)
{
	if (p->yes)
		return 0;
	if (!isatty(STDIN_FILENO) || !isatty(STDERR_FILENO))
		return tool_usage(p->t, "there is no terminal to ask on: give --yes to do this, or --dry-run");
	return tool_confirm(p->nremove ? "Remove them?" : "Thin them?") ? 0 : tool_failed(p->t, "nothing was changed");
}

static int print_json(struct prune *p)
{
	return tool_print_json(json_pack("{s:b, s:O, s:O, s:o, s:O, s:O, s:O, s:O}", "dry_run", p->dry_run, "runs",
		p->runs_json, "steps", p->steps_json, "freed_bytes", p->frees ? json_integer((json_int_t)p->freed_bytes)
		: json_null(), "removed", p->removed, "thinned", p->thinned, "kept", p->kept, "failed", p->failed));
}

static void say_end(const struct prune *p)
{
	const size_t removed = json_array_size(p->removed), thinned = json_array_size(p->thinned);

	if (p->dry_run)
		puts("nothing was changed");
	else if (!removed && !thinned)
		puts(json_array_size(p->failed) ? "nothing was removed" : "nothing to remove");
	else
		printf("%s removed, %zu thinned; vckpt gc %s gives the space back\n",
			TOOL_COUNT(removed, "step was", "steps were"), thinned, TOOL_WORD(p->t->arguments[0]));
}

static int act(struct prune *p)
{
	int code = 0, printed;

	if (!p->dry_run && p->nsteps && (code = ask(p)) == 0) {
		tool_interrupt_ends(p->t, "what was removed or thinned so far stays so; run it again for the rest");
		code = all_steps(p);
		tool_index_follow(p->t);
	} else if (code == TOOL_FAILED || (code && !p->t->json)) {
		return code;
	}
	if (p->t->json) {
		printed = print_json(p);
		return code ? code : printed;
	}
	if (!p->t->quiet)
		say_end(p);
	return code;
}

/* ---- arguments ---- */

static int parse(struct prune *p, const char *older)
{
	if (!p->thin != !older)
		return tool_usage(p->t, "--thin COMPONENT and --older-than AGE go together");
	if (p->thin && !proto_component_valid(p->thin))
		return tool_usage(p->t, "--thin %s: that is not the name of a component", p->thin);
	if (older && !query_duration_parse(older, &p->older_ns))
		return tool_usage(p->t, "--older-than %s: give a duration, such as 7d or 12h", older);
	return 0;
}

static void release(struct prune *p)
{
	for (size_t i = 0; i < p->nsteps; i++)
		prune_step_release(&p->steps[i]);
	for (size_t i = 0; i < p->nnames && p->runs; i++) {
		upkeep_prune_free(p->runs[i].plan);
		commit_list_close(p->runs[i].list);
		upkeep_retain_free(p->runs[i].policy);
	}
	commit_runs_free(p->names, p->nnames);
	free(p->runs);
	free(p->steps);
	free(p->thins);
	keep_release(&p->keep);
	json_decref(p->steps_json);
	json_decref(p->runs_json);
	json_decref(p->removed);
	json_decref(p->thinned);
	json_decref(p->kept);
	json_decref(p->failed);
}

static int prune_run(struct tool *t, int argc, char **argv)
{
	struct prune p = {.t = t, .now_ns = base_realtime_ns(), .steps_json = json_array(), .runs_json = json_array(),
		.removed = json_array(), .thinned = json_array(), .kept = json_array(), .failed = json_array()};
	const char *older = NULL;
	const struct tool_option options[] = {KEEP_OPTIONS(&p.keep), {"thin", .text = &p.thin},
		{"older-than", .text = &older}, {"dry-run", 'n', .flag = &p.dry_run}, {"yes", 'y', .flag = &p.yes},
		{0}};
	int code = tool_parse(t, argc, argv, options);

	if (code == 0 && (code = parse(&p, older)) == 0)
		code = tool_open_store(t, p.dry_run ? STORE_OPEN_READ_ONLY : 0);
	if (code == 0 && p.thin && !t->store->info.list_4)
		code = tool_failed(t, "%s was made by an older vckpt: its steps cannot be thinned; "
			STORE_COPY_ADVICE, t->store->path);
	if (code == 0 && (code = prune_plan(&p)) == 0 && (code = prune_print_plan(&p)) == 0)
		code = act(&p);
	release(&p);
	return code;
}

const struct tool_command tool_prune = {"prune", "remove the steps that no rule keeps",
	"usage: vckpt prune STORE [RUN] [OPTION...]\n\n"
	"Removes the steps of a run, or of each run by itself, that no rule keeps. Without rules the policy of each\n"
	"run applies (vckpt policy). A step stays if any rule keeps it; pinned and tagged steps, the highest, the\n"
	"newest and the one that was saved last stay in any case. Prints what stays and by which rules, what goes,\n"
	"and what that frees; does nothing without --yes or an answer on a terminal.\n\n"
	KEEP_HELP
	"  --thin COMPONENT    drop a component, such as optimizer, of steps that stay\n"
	"  --older-than AGE    ... and are older than 7d, 12h, ...; not of those that a job may go on from\n"
	"  -n, --dry-run       change nothing\n"
	"  -y, --yes           ask nothing\n"
	"  --json -q -v        print JSON; print nothing but errors; say more\n",
	prune_run};
