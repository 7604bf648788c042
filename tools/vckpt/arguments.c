/* SPDX-License-Identifier: Apache-2.0
 *
 * The positional arguments of a command are read from the first line of its help, so that both agree: they are the
 * words after the command's name, up to the first option. "[RUN]" may be left out, "SOURCE..." may be given again.
 *
 * Where VCKPT_STORE is set and the first argument is no store, STORE was left out: the variable's value is put before
 * the arguments, and the commands see what they would see if it had been typed. An argument that cannot be looked at is
 * taken to be a store, so that the error names it. */
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include "tools/vckpt/tool.h"

struct word { const char *text; size_t len; };

static const char *usage_words(const struct tool *t)
{
	return t->command->help + strlen("usage: vckpt ") + strlen(t->command->name);
}

static bool next_word(const char **at, struct word *ret_word)
{
	const char *word = *at + strspn(*at, " ");

	*ret_word = (struct word){word, strcspn(word, " \n")};
	*at = word + ret_word->len;
	return ret_word->len && word[0] != '-' && strncmp(word, "[-", 2) && strncmp(word, "[OPTION", 7);
}

static bool takes_store(const struct tool *t)
{
	const char *at = usage_words(t);
	struct word first;

	return next_word(&at, &first) && first.len == 5 && memcmp(first.text, "STORE", 5) == 0;
}

static bool missing(int error)
{
	return error == ENOENT || error == ENOTDIR || error == ENAMETOOLONG;
}

/* otherwise: the answer when access(2) cannot look at the path */
static bool is_store(const char *path, bool otherwise)
{
	char file[4200];

	if (snprintf(file, sizeof file, "%s/vckpt.store", path) >= (int)sizeof file)
		return false;
	return access(file, F_OK) == 0 || (otherwise && !missing(errno));
}

/* vckpt mount accepts a mount point whose daemon died; nothing in it can be read, and it is no store. */
static bool is_dead_mount_point(const struct tool *t, const char *path)
{
	return memmem(usage_words(t), strcspn(usage_words(t), "\n"), "MOUNTPOINT", 10) && !is_store(path, false) &&
		errno == ENOTCONN;
}

void tool_argument_add(struct tool *t, const char *text)
{
	const char *store = getenv("VCKPT_STORE");

	if (t->narguments == 0 && store && *store && takes_store(t) && !t->command->makes_store &&
		(!is_store(text, true) || is_dead_mount_point(t, text))) {
		t->arguments[t->narguments++] = store;
		t->from_environment = true;
	}
	t->arguments[t->narguments++] = text;
}

int tool_arguments_wrong(const struct tool *t, const char *format, ...)
{
	char text[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	tool_usage(t, "%s", text);
	fprintf(stderr, "%.*s\n", (int)strcspn(t->command->help, "\n"), t->command->help);
	return TOOL_USAGE;
}

int tool_arguments_order(const struct tool *t)
{
	const char *const *typed = t->arguments + t->from_environment;

	if (t->narguments - t->from_environment < 2 || is_store(typed[0], true) || !is_store(typed[1], false))
		return 0;
	return tool_usage(t, "%s is not a store, and %s is: give STORE first", typed[0], typed[1]);
}

bool tool_takes_run(const struct tool *t)
{
	return memmem(t->command->help, strcspn(t->command->help, "\n"), "RUN", 3) != NULL;
}

bool tool_arguments_apart(const struct tool *t, char *text, size_t size)
{
	const char *path = t->arguments[0];
	char store[4096];

	if (snprintf(store, sizeof store, "%s", path) >= (int)sizeof store)
		return false;
	for (char *slash; (slash = strrchr(store, '/')) && slash > store;) {
		const char *rest;

		slash[0] = 0;
		if (!is_store(store, false))
			continue;
		rest = path + (slash - store) + 1;
		if (tool_takes_run(t))
			snprintf(text, size, "%s is in the store %s: give the two apart: %s %s", path, store, store,
				rest + (strncmp(rest, "runs/", 5) == 0 ? 5 : 0));
		else
			snprintf(text, size, "%s is in the store %s: give that, for the command is for a whole store",
				path, store);
		return true;
	}
	return false;
}

int tool_arguments_no_store(const struct tool *t)
{
	char text[1024];

	if (!takes_store(t) || t->command->makes_store || t->from_environment || !t->narguments ||
		is_store(t->arguments[0], true))
		return 0;
	if (tool_arguments_apart(t, text, sizeof text))
		return tool_arguments_wrong(t, "%s", text);
	return tool_arguments_wrong(t, "%s is not a store: STORE comes first, unless VCKPT_STORE names it",
		t->arguments[0]);
}

static bool repeated(struct word word)
{
	return word.len > 3 && memcmp(word.text + word.len - 3, "...", 3) == 0;
}

static int too_few(const struct tool *t, struct word word)
{
	int code = tool_arguments_no_store(t);

	if (code)
		return code;
	if (repeated(word))
		word.len -= 3;
	return tool_arguments_wrong(t, "%.*s is missing%s", (int)word.len, word.text,
		t->narguments == 0 && takes_store(t) ? ", and VCKPT_STORE is not set" : "");
}

/* as an unset "$VARIABLE" gives it */
static int is_empty(const struct tool *t, struct word word)
{
	if (repeated(word))
		word.len -= 3;
	if (word.text[0] == '[')
		word = (struct word){word.text + 1, word.len - 2};
	return tool_arguments_wrong(t, "an empty argument is given where %.*s is expected", (int)word.len, word.text);
}

static int too_many(const struct tool *t, const char *argument)
{
	if (!t->from_environment)
		return tool_arguments_wrong(t, "\"%s\" is one argument too many", argument);
	return tool_arguments_wrong(t, "\"%s\" is one argument too many; the first one, \"%s\", is not a store",
		argument, t->arguments[1]);
}

/* In any place: no command reads or writes a URL. */
static int urls(const struct tool *t)
{
	struct base_error err = {0};

	for (int i = 0; i < t->narguments; i++)
		if (store_path_check(t->arguments[i], &err) < 0)
			return tool_usage(t, "%s", err.text);
	return 0;
}

int tool_arguments_end(struct tool *t)
{
	const char *store = getenv("VCKPT_STORE"), *at = usage_words(t);
	struct word word;
	bool again = false;
	int n = 0, code;

	if (t->narguments == 0 && store && *store && takes_store(t)) {
		t->arguments[t->narguments++] = store;
		t->from_environment = true;
	}
	if ((code = urls(t)) || (code = tool_arguments_order(t)))
		return code;
	for (; next_word(&at, &word); n++) {
		if (n == t->narguments && word.text[0] != '[')
			return too_few(t, word);
		if (n < t->narguments && !t->arguments[n][0])
			return is_empty(t, word);
		again |= repeated(word);
	}
	if (again || t->narguments <= n)
		return 0;
	return n ? too_many(t, t->arguments[n]) : tool_usage(t, "unexpected argument \"%s\"", t->arguments[0]);
}

/* ---- ranges of steps ---- */

/* One end, written as RUN/STEP. */
static int parse_end(const struct tool *t, const char *run_step, const char *whole, struct tool_target *ret_target)
{
	int code = tool_target_parse(t, run_step, ret_target);

	if (code == 0 && (ret_target->latest || ret_target->tag[0] || ret_target->rest))
		return tool_usage(t, "%s: the ends of a range are numbers", whole);
	return code;
}

int tool_steps_parse(const struct tool *t, const char *text, struct tool_target *ret_target,
	struct tool_range *ret_range)
{
	const char *slash = strchr(text, '/'), *dots = slash ? strstr(slash, "..") : NULL;
	base_cleanup_free char *first = NULL, *last = NULL;
	struct tool_target end;
	int code;

	*ret_range = (struct tool_range){.given = dots};
	if (!dots)
		return tool_target_parse(t, text, ret_target);
	first = strndup(text, (size_t)(dots - text));
	last = tool_string("%.*s/%s", (int)(slash - text), text, dots + 2);
	if (!first || !last)
		return TOOL_FAILED;
	if ((code = parse_end(t, first, text, ret_target)) || (code = parse_end(t, last, text, &end)))
		return code;
	if (!ret_target->has_step && !end.has_step)
		return tool_usage(t, "%s: a range has a first step, a last one, or both", text);
	ret_range->first = ret_target->step; /* 0 if it was left out */
	ret_range->last = end.has_step ? end.step : INT64_MAX;
	ret_target->has_step = false;
	ret_target->step = 0;
	if (ret_range->first > ret_range->last)
		return tool_usage(t, "%s: the first step is above the last one", text);
	return 0;
}

bool tool_range_has(const struct tool_range *range, uint64_t step)
{
	return !range->given || (step >= range->first && step <= range->last);
}

int tool_no_range(const struct tool *t, const struct commit_list *l, const struct tool_range *range)
{
	char which[64];

	snprintf(which, sizeof which, "from %" PRIu64 " to %" PRIu64, range->first, range->last);
	return tool_no_step(t, l, which);
}
