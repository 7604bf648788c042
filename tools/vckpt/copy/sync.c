/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt sync: another store follows the runs of this one. A pass over a run compares its list with that of the run of
 * the same name there:
 *
 *   not there                                copied
 *   there, a copy of this very manifest      nothing (no record but the lists is read)
 *   there, thinned there                     nothing but its facts
 *   there, a copy of what was here before    replaced: the step was saved again, thinned or packed anew here
 *   there, another writer's                  compared, as vckpt copy does: an error if it differs
 *   not here, a copy of this run's           removed there, with --delete; also if it was thinned there
 *
 * --follow looks for new entries of the lists once a second; a later pass looks only at steps whose commits are new. */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "core/base/array.h"
#include "core/base/text.h"
#include "tools/vckpt/copy/copy_steps.h"

#define REWRITTEN_MAX 64u       /* so often a step is thinned and repacked, at most */

struct run {
	char name[PROTO_RUN_MAX + 1];
	struct commit_list *list;
	uint64_t seen;                  /* steps of entries below it were looked at */
	bool looked;
};

struct sync {
	struct copy_steps steps;        /* first: gets the library's calls, too */
	struct tool *t;
	bool follow, removes, all;      /* all: of the store, new ones too */
	struct run *runs; size_t nruns;
	json_t *removed;
	size_t facts;                   /* entries that were put for the facts of steps */
	char reason[PROTO_REASON_MAX];  /* of removals */
};

/* ---- the runs ---- */

static struct run *add_run(struct sync *s, const char *name)
{
	for (size_t i = 0; i < s->nruns; i++)
		if (strcmp(s->runs[i].name, name) == 0)
			return &s->runs[i];
	if (base_array_more(s->runs, s->nruns) < 0)
		return NULL;
	s->runs[s->nruns] = (struct run){0};
	snprintf(s->runs[s->nruns].name, sizeof s->runs[0].name, "%s", name);
	return &s->runs[s->nruns++];
}

static int find_runs(struct sync *s, struct base_error *err)
{
	char **names;
	size_t n;
	int r = s->all ? commit_runs(s->t->store, &names, &n, err) : 0;

	if (r < 0 || !s->all)
		return r;
	for (size_t i = 0; r == 0 && i < n; i++)
		r = add_run(s, names[i]) ? 0 : base_no_memory(err);
	commit_runs_free(names, n);
	return r;
}

/* ---- removing ---- */

/* Of a run that cannot be read whole, or has no step, it is not known what was removed. */
static bool may_remove(struct sync *s, const struct run *run)
{
	struct base_error err = {0};

	if (commit_list_damaged(run->list) || commit_list_count(run->list) == 0)
		base_error_set(&err, -EINVAL, "run %s %s: nothing is removed from %s", run->name,
			commit_list_count(run->list) ? "has damaged entries (vckpt verify lists them)" : "has no step",
			s->steps.to->path);
	else if (commit_list_newer(run->list, NULL, &err) == 0)
		return true;
	copy_steps_failed(&s->steps, &err);
	return false;
}

static void remove_one(struct sync *s, struct commit_list *there, const char *run, uint64_t step, uint64_t entry)
{
	struct base_error err = {0};
	int r = commit_list_remove(there, step, entry, s->reason, &err);

	if (r == -ENOENT || r == -ESTALE || r == -BASE_EPINNED) /* another process was faster; or it is pinned there */
		return;
	if (r < 0) {
		copy_steps_failed(&s->steps, &err);
		return;
	}
	json_array_append_new(s->removed, json_pack("{s:s, s:I, s:I}", "run", run, "step", (json_int_t)step, "entry",
		(json_int_t)entry));
	copy_steps_say(&s->steps, "%s/step-%08" PRIu64 ": removed, as in %s", run, step, s->t->store->path);
}

/* Is it a copy of the run, or was it one before it was thinned or repacked there? Where the list there does not have
 * the entry of the copy any more (docs/gc.md), that is not known, and it stays. */
static bool is_of_run(const struct sync *s, const char *run, const struct commit_list_step *step)
{
	bool of = copy_is_from(step->commit.attempt, s->t->store, run, NULL);
	bool rewritten = commit_attempt_rewritten(step->commit.attempt);
	uint64_t entry = step->commit.replaces;

	for (unsigned i = 0; rewritten && entry != PROTO_NONE && i < REWRITTEN_MAX; i++) {
		struct proto_entry e = {0};

		if (commit_list_commit_read(s->steps.to, run, entry, &e, NULL) < 0 || e.commit.step != step->step) {
			proto_entry_release(&e);
			break;
		}
		of = copy_is_from(e.commit.attempt, s->t->store, run, NULL);
		rewritten = commit_attempt_rewritten(e.commit.attempt);
		entry = e.commit.replaces;
		proto_entry_release(&e);
	}
	return of;
}

/* Of both lists as they were read last, first that of the other store: another process may have copied a step that is
 * newer than this pass. */
static void remove_gone(struct sync *s, const struct run *run, struct commit_list *there)
{
	struct victim { uint64_t step, entry; } *victims = NULL;
	size_t n = 0;

	for (size_t i = 0; i < commit_list_count(there); i++) {
		const struct commit_list_step *step = commit_list_at(there, i);

		if (commit_list_find(run->list, step->step) || !is_of_run(s, run->name, step))
			continue;
		if (base_array_more(victims, n) < 0)
			break; /* the next pass goes on */
		victims[n++] = (struct victim){step->step, step->entry};
	}
	if (n && may_remove(s, run))
		for (size_t i = 0; i < n && !tool_interrupted(); i++)
			remove_one(s, there, run->name, victims[i].step, victims[i].entry);
	free(victims);
}

/* ---- a pass ---- */

/* A step that was written anew there, because it was thinned there, has its time still. */
static bool is_there(const struct sync *s, const struct run *run, const struct commit_list_step *step,
	const struct commit_list_step *there)
{
	return there && (copy_is_from(there->commit.attempt, s->t->store, run->name, &step->commit.manifest) ||
		(commit_attempt_rewritten(there->commit.attempt) && there->commit.time_ns == step->commit.time_ns));
}

static void sync_step(struct sync *s, const struct run *run, const struct commit_list_step *step,
	const struct commit_list_step *there)
{
	const char *attempt = there ? there->commit.attempt : "";

	if (is_there(s, run, step, there))
		s->steps.equal++;
	else
		copy_steps_one(&s->steps, run->list, step, run->name, s->steps.replace ||
			copy_is_from(attempt, s->t->store, run->name, NULL));
}

/* The facts of steps may change without a new commit. They are looked at in memory alone. */
static void sync_facts(struct sync *s, const struct run *run, struct commit_list *there)
{
	struct base_error err = {0};
	int r = 0;

	for (size_t i = 0; r >= 0 && i < commit_list_count(run->list) && !tool_interrupted(); i++) {
		const struct commit_list_step *step = commit_list_at(run->list, i),
			*copy = commit_list_find(there, step->step);

		if (is_there(s, run, step, copy))
			r = copy_facts(s->steps.copy, run->list, step, there, copy, true, &err);
		s->facts += r == 1;
	}
	if (r < 0)
		copy_steps_failed(&s->steps, &err);
}

static void sync_run(struct sync *s, struct run *run)
{
	struct commit_list *there = NULL;
	struct base_error err = {0};
	size_t n = commit_list_count(run->list);
	uint64_t next = commit_list_next(run->list);

	if (commit_list_open(s->steps.to, run->name, false, &there, &err) < 0) {
		copy_steps_failed(&s->steps, &err);
		s->steps.stop = true;
		return;
	}
	for (size_t i = 0; i < n; i++) {
		const struct commit_list_step *step = commit_list_at(run->list, i);

		if (step->entry >= run->seen && !is_there(s, run, step, commit_list_find(there, step->step)))
			s->steps.options.total_bytes += step->commit.bytes;
	}
	for (size_t i = 0; i < n && !s->steps.stop && !tool_interrupted(); i++) {
		const struct commit_list_step *step = commit_list_at(run->list, i);

		if (step->entry >= run->seen)
			sync_step(s, run, step, commit_list_find(there, step->step));
	}
	/* The list here is read on behind the one there: what another process has made of the mirror meanwhile is not
	 * undone by what is old here. Steps that are new in it are the next pass's. */
	if (commit_list_refresh(there, &err) < 0 || commit_list_refresh(run->list, &err) < 0) {
		copy_steps_failed(&s->steps, &err);
		s->steps.stop = true;
	}
	if (!s->steps.stop && !tool_interrupted()) {
		sync_facts(s, run, there);
		copy_steps_policy(&s->steps, run->list, run->name);
	}
	if (s->removes && !s->steps.stop && !tool_interrupted())
		remove_gone(s, run, there);
	commit_list_close(there);
	run->seen = next;
	run->looked = true;
}

/* Reads a run's list on. true: there is something to do. */
static bool has_news(struct sync *s, struct run *run)
{
	struct base_error err = {0};
	int r = run->list ? commit_list_refresh(run->list, &err)
		: commit_list_open(s->t->store, run->name, false, &run->list, &err);

	if (r < 0) {
		copy_steps_failed(&s->steps, &err);
		s->steps.stop = true;
		return false;
	}
	if (!s->all && !run->looked && commit_list_next(run->list) == 0 && !s->follow) {
		s->steps.worst = tool_no_run(s->t, run->name);
		return false;
	}
	return r > 0 || !run->looked || run->seen < commit_list_next(run->list);
}

static void pass(struct sync *s)
{
	struct base_error err = {0};

	if (find_runs(s, &err) < 0) {
		copy_steps_failed(&s->steps, &err);
		s->steps.stop = true;
	}
	for (size_t i = 0; i < s->nruns && !s->steps.stop && !tool_interrupted(); i++)
		if (has_news(s, &s->runs[i]))
			sync_run(s, &s->runs[i]);
	copy_steps_index(&s->steps);
}

static int sync_all(struct sync *s, const char *to)
{
	const struct timespec second = {.tv_sec = 1};
	int code = copy_steps_open(&s->steps, s->t, to);

	if (code)
		return code;
	if (s->follow)
		tool_interrupt_is_end();
	s->steps.is_end = s->follow;
	s->removed = json_array();
	snprintf(s->reason, sizeof s->reason, "removed in %.900s, from where it was copied", s->t->store->path);
	base_text_clean(s->reason);
	tool_progress_start(&s->steps.progress, s->t->quiet || s->follow, "sync");
	do
		pass(s);
	while (s->follow && !s->steps.stop && !tool_interrupted() && (nanosleep(&second, NULL), !tool_interrupted()));
	tool_progress_end(&s->steps.progress);
	return copy_steps_report(&s->steps, json_pack("{s:o, s:I}", "removed", s->removed, "facts",
		(json_int_t)s->facts), s->steps.worst);
}

static int parse_runs(struct sync *s)
{
	struct tool_target target;
	int code = 0;

	s->all = s->t->narguments == 1;
	for (int i = 1; i < s->t->narguments && code == 0; i++) {
		code = tool_target_parse(s->t, s->t->arguments[i], &target);
		if (code == 0 && strchr(s->t->arguments[i], '/'))
			code = tool_usage(s->t, "%s: whole runs are followed; vckpt copy takes single steps",
				s->t->arguments[i]);
		if (code == 0 && !add_run(s, s->t->arguments[i]))
			code = TOOL_FAILED;
	}
	return code;
}

static int sync_main(struct tool *t, int argc, char **argv)
{
	struct sync s = {.t = t, .steps.changes = true};
	const char *to = NULL;
	const struct tool_option options[] = {{"to", .text = &to}, {"follow", 'f', .flag = &s.follow},
		{"delete", .flag = &s.removes}, {"replace", .flag = &s.steps.replace},
		{"limit-rate", .call = copy_steps_rate, .arg = &s.steps},
		{"threads", .call = copy_steps_threads, .arg = &s.steps}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code == 0 && !to)
		code = tool_usage(t, "--to STORE2 is missing: the store that follows");
	if (code == 0 && (code = parse_runs(&s)) == 0)
		code = sync_all(&s, to);
	copy_steps_close(&s.steps);
	for (size_t i = 0; i < s.nruns; i++)
		commit_list_close(s.runs[i].list);
	free(s.runs);
	return code;
}

const struct tool_command tool_sync = {"sync", "let another store follow runs of this one",
	"usage: vckpt sync STORE [RUN]... --to STORE2 [OPTION...]\n\n"
	"Copies the steps that STORE2 lacks, as vckpt copy does, and those that were saved again since they were\n"
	"copied. Without RUN all runs are followed.\n\n"
	"  --to STORE2         the store that follows\n"
	"  -f, --follow        go on: look for new steps once a second, until SIGINT or SIGTERM\n"
	"  --delete            remove steps in STORE2 that were copied from here, and were removed here since;\n"
	"                      not of a run that has no step, or whose list is damaged\n"
	"  --replace           replace steps there that come from elsewhere and differ\n"
	"  --limit-rate RATE   read at most so many bytes a second from STORE: 512K, 20M, 1G\n"
	"  --threads N         threads to work with; by default all cores\n"
	"  --json -q -v        print JSON; print nothing but errors; say more\n",
	sync_main};
