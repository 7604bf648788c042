/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt set, pin, unpin, tag: the facts of steps after their saves. All steps are found before the first is changed;
 * each change is one entry of its run's list, made on what others have said by then. Where another step has the number
 * meanwhile, nothing is changed. */
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/commit/list/list_facts.h"
#include "tools/vckpt/print/table.h"
#include "tools/vckpt/tool.h"

struct target {
	char run[PROTO_RUN_MAX + 1];
	uint64_t step, entry;
	const char *untag; /* of this one; NULL: c.untags */
};

struct facts {
	struct tool *t;
	struct commit_facts_change c;   /* the same for all targets */
	struct proto_attribute *set;    /* keys and values are ours */
	size_t nset;
	const char *same;               /* the message for a step that is so already */
	struct target *targets;
	size_t ntargets;
	json_t *rows;
};

/* ---- finding the steps ---- */

/* tag NULL: as it was parsed; else the step of this run that has it. */
static int find(struct facts *f, const char *text, const char *tag)
{
	struct tool *t = f->t;
	const struct commit_list_step *s = NULL;
	struct tool_target is;
	int code = tool_target_parse(t, text, &is);

	if (code)
		return code;
	if (is.rest || is.has_step != !tag)
		return tool_usage(t, "%s is not a %s", text, tag ? "run: RUN" : "step: RUN/STEP");
	if (tag && strlen(tag) >= sizeof is.tag)
		return tool_usage(t, "\"%.100s\" cannot be a tag: it has more than %d bytes", tag, PROTO_TAG_MAX);
	if (tag) {
		snprintf(is.tag, sizeof is.tag, "%s", tag);
		is.has_step = true;
	}
	if (!t->store)
		code = tool_open_store(t, 0);
	if (code == 0)
		code = tool_target_find(t, &is, &s);
	if (code)
		return code;
	if (base_array_more(f->targets, f->ntargets) < 0)
		return tool_fail(t, &(struct base_error){.code = -ENOMEM});
	f->targets[f->ntargets] = (struct target){.step = s->step, .entry = s->entry, .untag = tag};
	memcpy(f->targets[f->ntargets++].run, is.run, sizeof is.run);
	return 0;
}

/* ---- changing them ---- */

static void put_word(struct base_buf *b, const char *before, const char *word)
{
	base_buf_printf(b, "%s%s%s", b->len ? ", " : "", before, word);
}

/* Where the tag was, if it moves. */
static void put_tag(struct base_buf *b, const struct commit_list *l, const char *tag, const struct target *to)
{
	const struct commit_list_step *was = commit_list_tagged(l, tag);

	put_word(b, b->len ? "" : "tagged ", tag);
	if (was && was->entry != to->entry)
		base_buf_printf(b, " (was %" PRIu64 ")", was->step);
}

/* What the change will have done: "pinned (best so far)", "tagged best (was 90)", "loss=2.1, unset acc". */
static void describe(const struct facts *f, const struct target *to, struct base_buf *b)
{
	const struct commit_facts_change *c = &f->c;

	if (c->pin)
		put_word(b, "", c->pin > 0 ? "pinned" : "unpinned");
	if (c->pin && c->reason && *c->reason)
		base_buf_printf(b, " (%s)", c->reason);
	for (size_t i = 0; i < c->ntags; i++)
		put_tag(b, f->t->list, c->tags[i], to);
	for (size_t i = 0; i < c->nuntags; i++)
		put_word(b, i ? "" : "no longer ", c->untags[i]);
	for (size_t i = 0; i < c->nset; i++) {
		put_word(b, c->set[i].value ? "" : "unset ", c->set[i].key);
		if (c->set[i].value)
			base_buf_printf(b, "=%s", c->set[i].value);
	}
}

static int say(struct facts *f, const struct target *to, bool changed, const struct base_buf *what)
{
	struct tool *t = f->t;
	const struct commit_list_step *s = commit_list_find(t->list, to->step);
	base_cleanup_free struct proto_attribute *attributes = NULL;
	size_t n = 0;
	json_t *row;

	if (!t->json && !t->quiet && changed)
		tool_print(stdout, "%s/%" PRIu64 ": %.*s\n", to->run, to->step, (int)what->len, (char *)what->data);
	else if (!t->json && !t->quiet)
		printf("%s/%" PRIu64 ": %s; nothing was changed\n", to->run, to->step, f->same);
	if (!t->json)
		return 0;
	if (s && commit_list_attributes(t->list, s, &attributes, &n) < 0)
		return tool_fail(t, &(struct base_error){.code = -ENOMEM});
	row = json_pack("{s:s, s:I, s:I, s:b, s:o}", "run", to->run, "step", (json_int_t)to->step, "entry",
		(json_int_t)to->entry, "changed", changed, "attributes", tool_json_attributes(attributes, n));
	tool_json_facts(row, s ? commit_list_facts(t->list, s->entry) : NULL);
	json_array_append_new(f->rows, row);
	return 0;
}

static int change(struct facts *f, const struct target *to)
{
	base_cleanup_buf struct base_buf what = BASE_BUF_INIT;
	struct base_error err = {0};
	int r = tool_list_open(f->t, to->run, &err);

	if (r == 0 && f->c.ntags)
		r = commit_list_know_all(f->t->list, &err); /* which step has them */
	if (r < 0)
		return tool_fail(f->t, &err);
	if (to->untag) {
		f->c.untags = &to->untag;
		f->c.nuntags = 1;
	}
	describe(f, to, &what);
	f->c.step = to->step;
	f->c.entry = to->entry;
	r = commit_list_facts_change(f->t->list, &f->c, &err);
	if (r >= 0)
		return say(f, to, r == 0, &what);
	if (r == -BASE_EUNDECIDED)
		snprintf(err.text + strlen(err.text), sizeof err.text - strlen(err.text),
			"; look with vckpt ls %.100s %s/%" PRIu64, f->t->arguments[0], to->run, to->step);
	return r == -EINVAL ? tool_usage(f->t, "%s", err.text) : tool_fail(f->t, &err);
}

/* Ends at the first that cannot be changed: what stops one stops the others, mostly. */
static int change_all(struct facts *f)
{
	size_t done = 0;
	int code = 0, printed;

	commit_list_close(base_steal(f->t->list));
	f->c.set = f->set;
	f->c.nset = f->nset;
	f->rows = json_array();
	while (done < f->ntargets && (code = change(f, &f->targets[done])) == 0)
		done++;
	if (code && f->ntargets > 1)
		tool_failed(f->t, "%zu of %zu steps were changed", done, f->ntargets);
	printed = f->t->json ? tool_print_json(json_pack("{s:O}", "changes", f->rows)) : 0;
	json_decref(f->rows);
	return code ? code : printed;
}

static void facts_release(struct facts *f)
{
	for (size_t i = 0; i < f->nset; i++) {
		free((char *)f->set[i].key);
		free((char *)f->set[i].value);
	}
	free(f->set);
	free(f->targets);
}

/* ---- set ---- */

static int add_unset(struct tool *t, void *arg, const char *key)
{
	struct facts *f = arg;
	char *copy;

	if (!proto_attribute_key_valid(key))
		return tool_usage(t, "--unset %s: a key is [A-Za-z_][A-Za-z0-9_.-]{0,63}", key);
	for (size_t i = 0; i < f->nset; i++)
		if (strcmp(f->set[i].key, key) == 0)
			return tool_usage(t, "--unset %s: the key is given twice", key);
	copy = strdup(key);
	if (!copy || base_array_more(f->set, f->nset) < 0) {
		free(copy);
		return tool_fail(t, &(struct base_error){.code = -ENOMEM});
	}
	f->set[f->nset++] = (struct proto_attribute){copy, NULL};
	return 0;
}

static int set_run(struct tool *t, int argc, char **argv)
{
	struct facts f = {.t = t, .same = "it has these attributes already"};
	const struct tool_option options[] = {{"unset", .call = add_unset, .arg = &f}, {0}};
	int code = tool_parse(t, argc, argv, options);

	for (int i = 2; i < t->narguments && code == 0; i++)
		code = tool_attribute_add(t, "", t->arguments[i], &f.set, &f.nset);
	if (code == 0 && f.nset == 0)
		code = tool_usage(t, "which attribute? Give KEY=VALUE or --unset KEY");
	if (code == 0 && (code = find(&f, t->arguments[1], NULL)) == 0)
		code = change_all(&f);
	facts_release(&f);
	return code;
}

const struct tool_command tool_set = {"set", "set attributes of a step after its save",
	"usage: vckpt set STORE RUN/STEP [KEY=VALUE]... [--unset KEY]... [--json] [-q] [-v]\n\n"
	"Adds attributes to a step, or gives those that it has other values, all in one moment. The save's own\n"
	"values are kept beneath. STEP is a number, latest or a tag.\n\n"
	"  --unset KEY         take away what was set so; the save's own value shows again\n",
	set_run};

/* ---- pin, unpin ---- */

static int pin_steps(struct facts *f)
{
	int code = 0;

	for (int i = 1; i < f->t->narguments && code == 0; i++)
		code = find(f, f->t->arguments[i], NULL);
	if (code == 0)
		code = change_all(f);
	facts_release(f);
	return code;
}

static int pin_run(struct tool *t, int argc, char **argv)
{
	struct facts f = {.t = t, .c.pin = 1, .same = "it is pinned already"};
	const struct tool_option options[] = {{"reason", .text = &f.c.reason}, {0}};
	int code = tool_parse(t, argc, argv, options);

	return code ? code : pin_steps(&f);
}

static int unpin_run(struct tool *t, int argc, char **argv)
{
	struct facts f = {.t = t, .c.pin = -1, .same = "it is not pinned"};
	int code = tool_parse(t, argc, argv, (const struct tool_option[]){{0}});

	return code ? code : pin_steps(&f);
}

const struct tool_command tool_pin = {"pin", "keep steps from being removed",
	"usage: vckpt pin STORE RUN/STEP... [--reason TEXT] [--json] [-q] [-v]\n\n"
	"Pins steps: no command and no program removes or replaces them until they are unpinned. STEP is a\n"
	"number, latest or a tag. A step that is pinned already gets the new reason, if one is given.\n\n"
	"  --reason TEXT       why, for people; a removal that is refused says it\n",
	pin_run};

const struct tool_command tool_unpin = {"unpin", "let steps be removed again",
	"usage: vckpt unpin STORE RUN/STEP... [--json] [-q] [-v]\n\n"
	"Takes away what vckpt pin has set. Nothing is removed by that.\n",
	unpin_run};

/* ---- tag ---- */

/* What RUN/NAME would not mean is refused, beyond what no tag can be. */
static int check_names(const struct tool *t)
{
	uint64_t step;

	for (int i = 2; i < t->narguments; i++) {
		const char *name = t->arguments[i];

		if (strcmp(name, "latest") == 0 || tool_step_parse(name, strlen(name), &step) || strstr(name, ".."))
			return tool_usage(t, "\"%s\" cannot be a tag: where a STEP is expected, it means %s", name,
				strstr(name, "..") ? "a range" : "another step");
		if (!proto_tag_valid(name))
			return tool_usage(t, "\"%s\" cannot be a tag: it is [A-Za-z0-9_][A-Za-z0-9._-]{0,63}, and does "
				"not begin with step-", name);
	}
	return 0;
}

/* RUN/STEP NAME...: of this step; RUN NAME...: whichever step has each. */
static int delete(struct facts *f)
{
	struct tool *t = f->t;
	struct tool_target of;
	int code;

	if (t->narguments < 3)
		return tool_usage(t, "--delete: give RUN or RUN/STEP, and the NAME");
	if ((code = tool_target_parse(t, t->arguments[1], &of)))
		return code;
	f->same = "it has no such tag";
	f->c.untags = &t->arguments[2];
	f->c.nuntags = (size_t)t->narguments - 2;
	if (of.has_step)
		return (code = find(f, t->arguments[1], NULL)) ? code : change_all(f);
	for (int i = 2; i < t->narguments && code == 0; i++)
		code = find(f, t->arguments[1], t->arguments[i]);
	return code ? code : change_all(f);
}

static int list_run(struct facts *f, struct tool_table *table, const char *run, const struct tool_target *of)
{
	base_cleanup_free struct commit_list_tag *tags = NULL;
	struct base_error err = {0};
	struct tool *t = f->t;
	size_t n;
	int r = tool_list_open(t, run, &err);

	if (r == 0)
		r = commit_list_know_all(t->list, &err);
	if (r == 0 && of && commit_list_next(t->list) == 0)
		return tool_no_run(t, run);
	if (r < 0 || (r = commit_list_tags(t->list, &tags, &n)) < 0)
		return tool_fail(t, err.code ? &err : &(struct base_error){.code = r});
	for (size_t i = 0; i < n; i++) {
		base_cleanup_free struct proto_attribute *attributes = NULL;
		const struct commit_list_step *s = tags[i].step;
		size_t nattributes = 0;
		json_t *row;

		if (of && of->has_step && of->step != s->step)
			continue;
		if (commit_list_attributes(t->list, s, &attributes, &nattributes) < 0)
			return tool_fail(t, &(struct base_error){.code = -ENOMEM});
		row = json_pack("{s:s, s:s, s:I, s:I, s:o}", "run", run, "tag", tags[i].tag, "step",
			(json_int_t)s->step, "entry", (json_int_t)s->entry, "attributes",
			tool_json_attributes(attributes, nattributes));
		if (t->json)
			json_array_append_new(f->rows, row);
		else
			tool_table_add(table, row);
	}
	return 0;
}

/* A run that cannot be read hides no other. */
static int list_store(struct facts *f, struct tool_table *table)
{
	struct base_error err = {0};
	char **runs;
	size_t n;
	int worst = 0;

	if (commit_runs(f->t->store, &runs, &n, &err) < 0)
		return tool_fail(f->t, &err);
	for (size_t i = 0; i < n; i++) {
		int code = list_run(f, table, runs[i], NULL);

		worst = code > worst ? code : worst;
	}
	commit_runs_free(runs, n);
	return worst;
}

static int list(struct facts *f)
{
	static const struct tool_column columns[] = {{"RUN", "run", .shorten = true, .style = TOOL_RUN},
		{"TAG", "tag"}, {"STEP", "step", TOOL_AS_STEP}, {"ATTRIBUTES", "attributes", .shorten = true}};
	struct tool *t = f->t;
	struct tool_table *table;
	struct tool_target of;
	const struct commit_list_step *s;
	int code = t->narguments == 1 ? 0 : tool_target_parse(t, t->arguments[1], &of), printed;

	if (code == 0 && t->narguments > 1 && of.rest)
		code = tool_usage(t, "%s is not a run or a step: give RUN or RUN/STEP", t->arguments[1]);
	if (code || (code = tool_open_store(t, STORE_OPEN_READ_ONLY)))
		return code;
	if (t->narguments > 1 && of.has_step) {
		if ((code = tool_target_find(t, &of, &s)))
			return code;
		of.step = s->step;
	}
	f->rows = json_array();
	table = tool_table_new(columns, BASE_COUNT(columns), false, false);
	code = t->narguments == 1 ? list_store(f, table) : list_run(f, table, of.run, &of);
	if (t->json)
		printed = tool_print_json(json_pack("{s:O}", "tags", f->rows));
	else
		printed = tool_table_print(table, stdout, false, tool_terminal_width(STDOUT_FILENO)) < 0
			? tool_fail(t, &(struct base_error){.code = -ENOMEM}) : 0;
	tool_table_free(table);
	json_decref(f->rows);
	return code ? code : printed;
}

static int tag_run(struct tool *t, int argc, char **argv)
{
	struct facts f = {.t = t, .same = "it has this already"};
	bool deletes = false;
	const struct tool_option options[] = {{"delete", 'd', .flag = &deletes}, {0}};
	int code = tool_parse(t, argc, argv, options);

	if (code == 0 && t->narguments < 3 && !deletes)
		return list(&f);
	if (code == 0 && deletes)
		code = delete(&f);
	else if (code == 0 && (code = check_names(t)) == 0) {
		f.c.tags = &t->arguments[2];
		f.c.ntags = (size_t)t->narguments - 2;
		if ((code = find(&f, t->arguments[1], NULL)) == 0)
			code = change_all(&f);
	}
	facts_release(&f);
	return code;
}

const struct tool_command tool_tag = {"tag", "name steps, list and delete such names",
	"usage: vckpt tag STORE [RUN[/STEP]] [NAME]... [--delete] [--json] [-q] [-v]\n\n"
	"Names a step: RUN/NAME means it wherever a STEP is expected, and a mount shows NAME beside latest.\n"
	"Another step of the run that has the name loses it in the same moment. Without NAME, lists the tags of\n"
	"the store, the run or the step.\n\n"
	"  -d, --delete        take NAME away: from RUN/STEP, or of RUN from the step that has it\n",
	tag_run};
