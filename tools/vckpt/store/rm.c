/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt rm: removes steps. First everything that was asked for is found, then, where a step was not named by its
 * number (but by latest, a tag or its run), the user is asked, and only then the first step is removed: what was
 * found, not what may have its number by then. If a step cannot be removed, those of other runs still are. A whole run
 * that does not exist is an error with --missing-ok, too: "vckpt rm STORE RUN 5" would remove all of RUN, where RUN/5
 * was meant. */
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/commit/list/list_facts.h"
#include "core/commit/attempt/attempt.h"
#include "core/upkeep/usage.h"
#include "tools/vckpt/tool.h"

enum wanted_kind { WANTED_STEP, WANTED_NAMED, WANTED_RANGE, WANTED_RUN }; /* NAMED: latest or a tag */

struct wanted {
	enum wanted_kind kind;
	struct tool_target target;
	struct tool_range range;
	uint64_t steps, bytes, lowest, highest; /* found */
	struct base_buf tags; /* of these: "best, sent" */
};

struct victim {
	const char *run;
	uint64_t step, entry, bytes;
	json_t *tags; /* an array of texts */
};

struct rm {
	struct tool *t;
	bool dry_run, yes, missing_ok;
	uint64_t keep_last, keep_every; /* 0: not given */
	const char *reason;             /* NULL: none */
	struct wanted *wanted;
	size_t nwanted;
	struct victim *victims;
	size_t nvictims;
	bool frees;             /* dry_run: freed_bytes is known, what the collector could delete then */
	uint64_t freed_bytes;
	json_t *removed, *failed;
};

/* ---- arguments ---- */

static int parse_wanted(const struct tool *t, const char *text, struct wanted *w)
{
	const char *slash = strchr(text, '/');
	int code;

	if (slash && !slash[1])
		return tool_usage(t, "%s: the step is missing: give RUN/STEP, or RUN for all its steps", text);
	if ((code = tool_steps_parse(t, text, &w->target, &w->range)))
		return code;
	if (w->range.given) {
		w->kind = WANTED_RANGE;
		return 0;
	}
	if (!slash) { /* never a step, even if it looks like one: what is removed is named in full */
		w->kind = WANTED_RUN;
		w->target = (struct tool_target){0};
		snprintf(w->target.run, sizeof w->target.run, "%s", text);
		return 0;
	}
	if (w->target.rest)
		return tool_usage(t, "%s: only whole steps can be removed: RUN/STEP", text);
	w->kind = w->target.latest || w->target.tag[0] ? WANTED_NAMED : WANTED_STEP;
	return 0;
}

static int parse_all(struct rm *rm)
{
	struct tool *t = rm->t;
	bool several = false;
	int code = 0;

	rm->wanted = calloc((size_t)t->narguments, sizeof *rm->wanted);
	if (!rm->wanted)
		return TOOL_FAILED;
	for (int i = 1; i < t->narguments && code == 0; i++) {
		struct wanted *w = &rm->wanted[rm->nwanted++];

		code = parse_wanted(t, t->arguments[i], w);
		several |= w->kind == WANTED_RANGE || w->kind == WANTED_RUN;
	}
	if (code == 0 && (rm->keep_last || rm->keep_every) && !several)
		code = tool_usage(t, "--keep-last and --keep-every are for a whole RUN or a range of its steps");
	return code;
}

/* ---- finding the steps ---- */

static json_t *victim_tags(struct wanted *w, const struct proto_step_facts *facts)
{
	json_t *tags = json_array();

	for (size_t i = 0; facts && i < facts->ntags; i++) {
		json_array_append_new(tags, json_string(facts->tags[i]));
		base_buf_printf(&w->tags, "%s%s", w->tags.len ? ", " : "", facts->tags[i]);
	}
	return tags;
}

/* A step that is pinned stops the command before anything is removed. */
static int add_victim(struct rm *rm, struct wanted *w, const struct commit_list *l, const struct commit_list_step *step)
{
	struct base_error err = {0};

	if (commit_list_unpinned(l, step, "removed", &err) < 0)
		return tool_fail(rm->t, &err);
	if (base_array_more(rm->victims, rm->nvictims) < 0)
		return TOOL_FAILED;
	rm->victims[rm->nvictims++] = (struct victim){w->target.run, step->step, step->entry, step->commit.bytes,
		victim_tags(w, commit_list_facts(l, step->entry))};
	if (w->steps++ == 0)
		w->lowest = step->step;
	w->highest = step->step;
	w->bytes += step->commit.bytes;
	return 0;
}

/* When it was saved, in the order of the list; 0: its entry is no save, but took the place of one. */
static uint64_t saved_at(const struct commit_list_step *s)
{
	return commit_attempt_rewritten(s->commit.attempt) ? 0 : s->entry + 1;
}

/* Number of the step that was saved last. It is not the one with the highest number where a job went back. */
static size_t saved_last(const struct commit_list *l)
{
	size_t last = 0;

	for (size_t i = 1; i < commit_list_count(l); i++)
		if (saved_at(commit_list_at(l, i)) >= saved_at(commit_list_at(l, last)))
			last = i;
	return last;
}

/* last: the step that a job goes on from; --keep-last always keeps it. Both options keep what is pinned, too. */
static bool kept(const struct rm *rm, const struct commit_list *l, size_t i, size_t last)
{
	const struct proto_step_facts *facts = commit_list_facts(l, commit_list_at(l, i)->entry);

	if (facts && facts->pinned && (rm->keep_last || rm->keep_every))
		return true;
	return (rm->keep_last && (commit_list_count(l) - i <= rm->keep_last || i == last)) ||
		(rm->keep_every && commit_list_at(l, i)->step % rm->keep_every == 0);
}

static int none_there(struct rm *rm, const struct wanted *w, const struct commit_list *l)
{
	char which[64];

	if (w->kind == WANTED_RUN && commit_list_next(l) == 0)
		return tool_no_run(rm->t, w->target.run);
	if (rm->missing_ok)
		return 0;
	if (w->target.tag[0])
		return tool_no_tag(rm->t, l, w->target.tag);
	if (w->kind == WANTED_RANGE)
		return tool_no_range(rm->t, l, &w->range);
	snprintf(which, sizeof which, "%" PRIu64, w->target.step);
	return tool_no_step(rm->t, l, which);
}

static void say_order(const struct rm *rm, const struct wanted *w, const struct commit_list *l, size_t last)
{
	size_t n = commit_list_count(l);
	uint64_t step = n ? commit_list_at(l, last)->step : 0;

	if (rm->keep_last && !rm->t->quiet && n && last != n - 1)
		base_warning("run %s: step %" PRIu64 " was saved last, but steps up to %" PRIu64 " are there: "
			"--keep-last counts by number, and keeps step %" PRIu64 " as well (vckpt rm %s "
			"%s/%" PRIu64 ".. removes what a job left behind that went back)", w->target.run, step,
			commit_list_at(l, n - 1)->step, step, TOOL_WORD(rm->t->arguments[0]), w->target.run, step + 1);
}

static int find_several(struct rm *rm, struct wanted *w, const struct commit_list *l)
{
	size_t last = saved_last(l);
	bool any = false;
	int code = 0;

	say_order(rm, w, l, last);

	for (size_t i = 0; i < commit_list_count(l) && code == 0; i++) {
		const struct commit_list_step *step = commit_list_at(l, i);

		if (!tool_range_has(&w->range, step->step))
			continue;
		any = true;
		if (!kept(rm, l, i, last))
			code = add_victim(rm, w, l, step);
	}
	return any ? code : none_there(rm, w, l);
}

static int find_wanted(struct rm *rm, struct wanted *w)
{
	const struct commit_list_step *step = NULL;
	struct base_error err = {0};
	struct commit_list *l;
	int code;

	if (tool_list_open(rm->t, w->target.run, &err) < 0 || commit_list_know_all(rm->t->list, &err) < 0)
		return tool_fail(rm->t, &err);
	l = rm->t->list;
	if (w->kind == WANTED_STEP || w->kind == WANTED_NAMED)
		step = tool_target_in(l, &w->target);
	if (w->kind == WANTED_RANGE || w->kind == WANTED_RUN)
		code = find_several(rm, w, l);
	else
		code = step ? add_victim(rm, w, l, step) : none_there(rm, w, l);
	return code;
}

static int compare(const void *a, const void *b)
{
	const struct victim *x = a, *y = b;
	int order = strcmp(x->run, y->run);

	return order ? order : (x->step > y->step) - (x->step < y->step);
}

/* Nothing is removed unless all that was asked for is there. */
static int find_all(struct rm *rm)
{
	size_t n = 0;
	int code = 0, worst = 0;

	for (size_t i = 0; i < rm->nwanted; i++)
		if ((code = find_wanted(rm, &rm->wanted[i])) > worst)
			worst = code;
	if (rm->nvictims)
		qsort(rm->victims, rm->nvictims, sizeof *rm->victims, compare);
	for (size_t i = 0; i < rm->nvictims; i++) /* named twice: once */
		if (n == 0 || compare(&rm->victims[n - 1], &rm->victims[i]))
			rm->victims[n++] = rm->victims[i];
		else
			json_decref(rm->victims[i].tags);
	rm->nvictims = n;
	return worst;
}

static bool goes(void *arg, const char *run, const struct commit_list_step *step)
{
	const struct rm *rm = arg;
	const struct victim key = {.run = run, .step = step->step},
		*v = bsearch(&key, rm->victims, rm->nvictims, sizeof key, compare);

	return v && v->entry == step->entry;
}

/* The size of a step is no measure: most of it may be other steps', too. To know, the manifests of all steps of
 * the store are read, which a removal does not otherwise need: so it is done for --dry-run only. */
static void find_freed(struct rm *rm)
{
	const struct upkeep_usage_question q = {.store = rm->t->store, .goes = goes, .arg = rm};
	struct base_error err = {0};
	struct upkeep_usage u;

	if (!rm->dry_run || rm->nvictims == 0 || rm->t->quiet)
		return;
	rm->frees = upkeep_usage_read(&q, &u, &err) == 0;
	rm->freed_bytes = rm->frees ? u.freed_bytes : 0;
	upkeep_usage_release(&u);
	if (!rm->frees)
		base_warning("what the removal frees is not known: %s", err.text);
}

/* ---- the question ---- */

/* "run a: 3 steps from 0 to 9, 23 KiB logical; their tags: best, sent" */
static void describe(const struct wanted *w, struct base_buf *text)
{
	const char *bytes = TOOL_BYTES(w->bytes);

	if (w->kind == WANTED_NAMED)
		base_buf_printf(text, "%s/%s is step %" PRIu64 ", %s logical", w->target.run,
			w->target.latest ? "latest" : w->target.tag, w->highest, bytes);
	else if (w->steps == 1)
		base_buf_printf(text, "run %s: 1 step, %" PRIu64 ", %s logical", w->target.run, w->lowest, bytes);
	else
		base_buf_printf(text, "run %s: %" PRIu64 " steps from %" PRIu64 " to %" PRIu64 ", %s logical",
			w->target.run, w->steps, w->lowest, w->highest, bytes);
	if (w->tags.len)
		base_buf_printf(text, "; %s tags: %.*s", w->steps == 1 ? "its" : "their", (int)w->tags.len,
			(const char *)w->tags.data);
	base_buf_append_zero(text, 1);
}

/* 0: go on */
static int ask(struct rm *rm)
{
	bool terminal = isatty(STDIN_FILENO) && isatty(STDERR_FILENO), asked = false;

	for (size_t i = 0; i < rm->nwanted && !rm->yes; i++) {
		base_cleanup_buf struct base_buf text = BASE_BUF_INIT;
		const struct wanted *w = &rm->wanted[i];

		if (!w->steps || (w->kind != WANTED_NAMED && w->kind != WANTED_RUN))
			continue;
		describe(w, &text);
		if (text.error)
			return tool_fail(rm->t, &(struct base_error){.code = -ENOMEM});
		if (!terminal)
			return tool_usage(rm->t, "%.800s: there is no terminal to ask on: give --yes to remove it",
				(const char *)text.data);
		fprintf(stderr, "%s\n", (const char *)text.data);
		asked = true;
	}
	return !asked || tool_confirm("Remove them?") ? 0 : tool_failed(rm->t, "nothing was removed");
}

/* ---- removing ---- */

static void say_one(struct rm *rm, const struct victim *v)
{
	if (rm->t->json) {
		json_array_append_new(rm->removed, json_pack("{s:s, s:I, s:I, s:I, s:O}", "run", v->run, "step",
			(json_int_t)v->step, "entry", (json_int_t)v->entry, "bytes", (json_int_t)v->bytes, "tags",
			v->tags));
		return;
	}
	if (rm->t->quiet)
		return;
	printf("%s/step-%08" PRIu64 " %s, %s logical", v->run, v->step, rm->dry_run ? "would be removed" : "removed",
		TOOL_BYTES(v->bytes));
	for (size_t i = 0; i < json_array_size(v->tags); i++)
		printf("%s%s", i ? ", " : "; its tags: ", json_string_value(json_array_get(v->tags, i)));
	putchar('\n');
	fflush(stdout); /* the line is true, whatever comes next */
}

/* The list of the run at hand stays open: each removal reads on in it. */
static int remove_entry(struct tool *t, const struct victim *v, const char *reason, struct base_error *err)
{
	int r = tool_list_open(t, v->run, err);

	return r < 0 ? r : commit_list_remove(t->list, v->step, v->entry, reason, err);
}

/* ret_stuck: the step is there, but could not be removed */
static int remove_one(struct rm *rm, const struct victim *v, size_t *ret_removed, bool *ret_stuck)
{
	struct base_error err = {0};
	int r = rm->dry_run ? 0 : remove_entry(rm->t, v, rm->reason, &err);
	bool gone = r == -ENOENT || r == -ESTALE; /* another process removed it first */

	*ret_stuck = r < 0 && !gone;
	if (gone && rm->missing_ok)
		return 0;
	if (r < 0) {
		json_array_append_new(rm->failed, json_pack("{s:s, s:I, s:o}", "run", v->run, "step",
			(json_int_t)v->step, "error", tool_json_text(err.text, strlen(err.text))));
		return tool_fail(rm->t, &err);
	}
	++*ret_removed;
	say_one(rm, v);
	return 0;
}

/* An error that stops one step of a run would stop the run's others too, so they are not tried. Returns the worst exit
 * code. */
static int remove_all(struct rm *rm, size_t *ret_removed)
{
	const char *stuck_run = NULL;
	int worst = 0;

	for (size_t i = 0; i < rm->nvictims; i++) {
		const struct victim *v = &rm->victims[i];
		bool stuck;
		int code;

		if (stuck_run && strcmp(stuck_run, v->run) == 0)
			continue;
		code = remove_one(rm, v, ret_removed, &stuck);
		if (stuck)
			stuck_run = v->run;
		worst = code > worst ? code : worst;
	}
	commit_list_close(base_steal(rm->t->list));
	return worst;
}

static void say_space(const struct rm *rm, size_t removed)
{
	if (rm->dry_run)
		printf("%zu of %s would be removed; nothing was changed\n", removed,
			TOOL_COUNT(rm->nvictims, "step", "steps"));
	else if (rm->nvictims == 0)
		puts("nothing to remove");
	if (removed && rm->dry_run && rm->frees)
		printf("vckpt gc could then give %s back\n", TOOL_BYTES(rm->freed_bytes));
	else if (removed && !rm->dry_run)
		printf("vckpt gc %s gives the space back: it marks what nothing else needs, and a later one deletes it "
			"after 24 h (--grace 0: at once)\n", TOOL_WORD(rm->t->arguments[0]));
}

static int remove_and_say(struct rm *rm)
{
	size_t removed = 0;
	int worst;

	tool_interrupt_ends(rm->t, rm->dry_run ? "nothing was changed"
		: "steps removed so far stay removed; vckpt ls lists the others");
	worst = remove_all(rm, &removed);

	if (removed && !rm->dry_run)
		tool_index_follow(rm->t);
	if (worst && rm->nvictims > 1)
		tool_failed(rm->t, "%zu of %zu steps were removed", removed, rm->nvictims);
	if (rm->t->json) {
		int code = tool_print_json(json_pack("{s:b, s:o, s:O, s:O}", "dry_run", rm->dry_run, "freed_bytes",
			rm->frees ? json_integer((json_int_t)rm->freed_bytes) : json_null(), "removed", rm->removed,
			"failed", rm->failed));

		return worst ? worst : code;
	}
	if (!rm->t->quiet)
		say_space(rm, removed);
	return worst;
}

static void rm_release(struct rm *rm)
{
	for (size_t i = 0; i < rm->nvictims; i++)
		json_decref(rm->victims[i].tags);
	for (size_t i = 0; i < rm->nwanted; i++)
		base_buf_release(&rm->wanted[i].tags);
	free(rm->victims);
	free(rm->wanted);
}

static int rm_run(struct tool *t, int argc, char **argv)
{
	struct rm rm = {.t = t};
	const char *last = NULL, *every = NULL;
	const struct tool_option options[] = {{"dry-run", 'n', .flag = &rm.dry_run}, {"yes", 'y', .flag = &rm.yes},
		{"missing-ok", .flag = &rm.missing_ok}, {"keep-last", .text = &last}, {"keep-every", .text = &every},
		{"reason", .text = &rm.reason},
		{0}};
	int code = tool_parse(t, argc, argv, options);

	if (code || (code = tool_count_parse(t, "--keep-last", last, &rm.keep_last)) ||
		(code = tool_count_parse(t, "--keep-every", every, &rm.keep_every)))
		return code;
	if (rm.reason && strlen(rm.reason) > PROTO_REASON_MAX)
		return tool_usage(t, "--reason: give at most %d bytes", PROTO_REASON_MAX);
	rm.removed = json_array();
	rm.failed = json_array();
	if ((code = parse_all(&rm)) == 0)
		code = tool_open_store(t, rm.dry_run ? STORE_OPEN_READ_ONLY : 0);
	if (code == 0 && (code = find_all(&rm)) == 0 && (rm.dry_run || (code = ask(&rm)) == 0)) {
		find_freed(&rm);
		code = remove_and_say(&rm);
	}
	json_decref(rm.removed);
	json_decref(rm.failed);
	rm_release(&rm);
	return code;
}

const struct tool_command tool_rm = {"rm", "remove steps",
	"usage: vckpt rm STORE RUN[/STEP]... [OPTION...]\n\n"
	"Removes steps: they vanish from ls and from mounts. What they share with other steps stays; what only\n"
	"they used is given back by vckpt gc, which marks it, and a later vckpt gc deletes it after 24 hours\n"
	"(vckpt gc --grace 0: at once).\n\n"
	"  RUN/STEP            one step\n"
	"  RUN/FIRST..LAST     the steps of a run from FIRST to LAST; one of both may be left out\n"
	"  RUN/latest, RUN/TAG the latest step, or the one that has the tag, after a question\n"
	"  RUN                 all steps of a run, after a question\n\n"
	"Everything that is named must be there, and none of it pinned, before anything is removed. Where a\n"
	"question would be asked and there is no terminal, --yes is needed. Tags go with their steps.\n\n"
	"  -n, --dry-run       change nothing; list what would be removed, and say what that would free\n"
	"  -y, --yes           ask nothing\n"
	"  --missing-ok        pass over steps that are not there; a RUN without STEP must exist\n"
	"  --keep-last N       of a whole RUN or a range, keep steps that are among the last N of the run\n"
	"  --keep-every N      of a whole RUN or a range, keep steps whose number is a multiple of N\n"
	"  --reason TEXT       why, for those who read vckpt log later\n"
	"                      (with these two, pinned steps of the run stay as well)\n"
	"  --json -q -v        print JSON; print nothing but errors; say more\n",
	rm_run};
