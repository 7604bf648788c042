/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt wait: until a run has a new step, and a command for each (docs/watching.md).
 *
 * The list is looked at four times a second: one failed look-up, on every file system. Steps come in the order in which
 * they were committed. Only what is visible when its turn comes is reported, so a step that was removed meanwhile is
 * passed over. Signals are blocked, and taken while there is nothing to do or a command runs: a step is reported whole
 * or not at all. */
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/base/text.h"
#include "core/query/value.h"
#include "tools/vckpt/tool.h"

#define LOOK_NS INT64_C(250000000)

struct wait {
	struct tool *t;
	struct tool_target target;
	bool follow, has_after;
	uint64_t after;
	uint64_t from, start;           /* entries: not reported yet; that came after this command */
	uint64_t timeout_ns;            /* 0: none; 1: looks once */
	char **command;                 /* NULL: none */
	sigset_t stops, before;         /* signals that end the command; the mask of its children */
	int stopped;                    /* by this signal */
	bool failed;                    /* a command did */
};

/* ---- signals ---- */

static void take_signals(struct wait *w)
{
	static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
	sigset_t all;
	struct sigaction old;

	sigemptyset(&w->stops);
	for (size_t i = 0; i < BASE_COUNT(numbers); i++)
		if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
			sigaddset(&w->stops, numbers[i]);
	all = w->stops;
	sigaddset(&all, SIGCHLD);
	sigprocmask(SIG_BLOCK, &all, &w->before);
}

/* Waits for a signal. A child gets those that were sent to this process alone; the terminal sends to both. */
static void rest(struct wait *w, int64_t ns, pid_t child)
{
	const struct timespec time = {ns / 1000000000, ns % 1000000000};
	sigset_t all = w->stops;
	siginfo_t info;
	int number;

	sigaddset(&all, SIGCHLD);
	number = sigtimedwait(&all, &info, &time);
	if (number <= 0 || number == SIGCHLD)
		return;
	w->stopped = number;
	if (child > 0 && info.si_code <= 0)
		kill(child, number);
}

/* ---- the command ---- */

/* The word with its marks ({}, {run}, ...) replaced, in fresh memory; NULL: no memory. */
static char *substituted(const struct wait *w, const char *word, uint64_t step)
{
	const char *store = w->t->store->path, *run = w->target.run;
	char number[24], target[PROTO_RUN_MAX + 30];
	base_cleanup_free char *path = NULL;
	struct base_buf b = {0};
	const struct { const char *mark, *text; } all[] = {{"{}", target}, {"{run}", run}, {"{step}", number},
		{"{store}", store}, {"{path}", NULL}};

	snprintf(number, sizeof number, "%" PRIu64, step);
	snprintf(target, sizeof target, "%s/%s", run, number);
	if (!(path = tool_string("%s/%s", store, target)))
		return NULL;
	while (*word) {
		size_t i = 0;

		while (i < BASE_COUNT(all) && strncmp(word, all[i].mark, strlen(all[i].mark)) != 0)
			i++;
		if (i < BASE_COUNT(all))
			base_buf_append_text(&b, all[i].text ? all[i].text : path);
		else
			base_buf_append(&b, word, 1);
		word += i < BASE_COUNT(all) ? strlen(all[i].mark) : 1;
	}
	base_buf_append(&b, "", 1);
	if (b.error)
		base_buf_release(&b);
	return (char *)b.data;
}

static void set_environment(const struct wait *w, uint64_t step)
{
	char number[24];
	base_cleanup_free char *path = tool_string("%s/%s/%" PRIu64, w->t->store->path, w->target.run, step);

	snprintf(number, sizeof number, "%" PRIu64, step);
	setenv("VCKPT_STORE", w->t->store->path, 1);
	setenv("VCKPT_RUN", w->target.run, 1);
	setenv("VCKPT_STEP", number, 1);
	setenv("VCKPT_PATH", path ? path : "", 1);
}

static int spawn(const struct wait *w, char **words, pid_t *ret_child)
{
	extern char **environ;
	posix_spawnattr_t attributes;
	int r = posix_spawnattr_init(&attributes);

	if (r)
		return r;
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
	posix_spawnattr_setsigmask(&attributes, &w->before);
	r = posix_spawnp(ret_child, words[0], NULL, &attributes, words, environ);
	posix_spawnattr_destroy(&attributes);
	return r;
}

/* What a shell would say of the status. */
static int finish(struct wait *w, pid_t child, uint64_t step)
{
	int status = 0;

	while (waitpid(child, &status, WNOHANG) == 0)
		rest(w, INT64_C(1000000000), child);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
		return 0;
	w->failed = true;
	if (WIFSIGNALED(status) && !w->t->quiet)
		tool_print(stderr, "vckpt wait: %s was ended by signal %d (%s) for %s/%" PRIu64 "\n", w->command[0],
			WTERMSIG(status), strsignal(WTERMSIG(status)), w->target.run, step);
	else if (!w->t->quiet)
		tool_print(stderr, "vckpt wait: %s exited with %d for %s/%" PRIu64 "\n", w->command[0],
			WEXITSTATUS(status), w->target.run, step);
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static int execute(struct wait *w, uint64_t step, int *ret_status)
{
	base_cleanup_free char **words = NULL;
	size_t n = 0;
	pid_t child;
	int r = 0;

	while (w->command[n])
		n++;
	words = calloc(n + 1, sizeof *words);
	for (size_t i = 0; words && i < n && r == 0; i++)
		r = (words[i] = substituted(w, w->command[i], step)) ? 0 : ENOMEM;
	set_environment(w, step);
	if (words && r == 0 && (r = spawn(w, words, &child)) == 0)
		*ret_status = finish(w, child, step);
	for (size_t i = 0; words && i < n; i++)
		free(words[i]);
	return words && r == 0 ? 0 : tool_failed(w->t, "%s cannot be run: %s", w->command[0],
		strerror(words ? r : ENOMEM));
}

/* ---- steps ---- */

static int report(struct wait *w, const struct commit_list_step *s)
{
	const uint64_t step = s->step;
	json_t *line = json_pack("{s:s, s:I, s:I, s:s}", "run", w->target.run, "step", (json_int_t)step, "entry",
		(json_int_t)s->entry, "time", TOOL_TIME(s->commit.time_ns));
	int status = 0, code = w->command ? execute(w, step, &status) : 0;

	if (w->command)
		json_object_set_new(line, "status", json_integer(status));
	if (code == 0 && w->t->json) {
		json_dumpf(line, stdout, JSON_COMPACT | JSON_ENSURE_ASCII);
		putchar('\n');
	} else if (code == 0 && !w->command && !w->t->quiet) {
		printf("%s/%" PRIu64 "\n", w->target.run, step);
	}
	json_decref(line);
	if (code == 0 && fflush(stdout) == EOF)
		return tool_failed(w->t, "standard output: %s", strerror(errno));
	return code;
}

/* The next step that is to be reported, by the list as it is; NULL. */
static const struct commit_list_step *next_step(const struct wait *w, const struct commit_list *l)
{
	const struct commit_list_step *next = NULL;

	if (w->target.has_step)
		return tool_target_in(l, &w->target);
	for (size_t i = 0; i < commit_list_count(l); i++) {
		const struct commit_list_step *s = commit_list_at(l, i);

		if (s->entry >= w->from && (s->entry >= w->start || s->step > w->after) &&
			(!next || s->entry < next->entry))
			next = s;
	}
	return next;
}

static int look(const struct wait *w, bool first, struct base_error *err)
{
	struct commit_list *l = w->t->list;
	int r = commit_list_refresh(l, err);

	if ((r > 0 || (r == 0 && first)) && w->target.has_step)
		r = tool_target_know(l, &w->target, err);
	return r < 0 && !commit_error_passes(r) ? r : 0;
}

static int timed_out(const struct wait *w)
{
	char step[PROTO_TAG_MAX + 30] = "no new step", text[32];

	if (w->target.tag[0])
		snprintf(step, sizeof step, "no step with the tag %s", w->target.tag);
	else if (w->target.has_step && !w->target.latest)
		snprintf(step, sizeof step, "no step %" PRIu64, w->target.step);
	return w->timeout_ns == 1 ? tool_failed(w->t, "%s has %s", w->target.run, step)
		: tool_failed(w->t, "%s has %s after %s", w->target.run, step,
			tool_format_duration(w->timeout_ns, text));
}

static int watch(struct wait *w)
{
	int64_t since = (int64_t)base_monotonic_ns();
	bool first = true;
	int code = 0;

	for (; code == 0 && !w->stopped; first = false) {
		struct base_error err = {0};
		const struct commit_list_step *s;
		int64_t left = LOOK_NS;

		if (look(w, first, &err) < 0)
			return tool_fail(w->t, &err);
		if ((s = next_step(w, w->t->list))) {
			w->from = s->entry + 1;
			code = report(w, s);
			if (!w->follow)
				return code;
			since = (int64_t)base_monotonic_ns();
			rest(w, 0, 0);
			continue;
		}
		if (w->timeout_ns)
			left = since + (int64_t)w->timeout_ns - (int64_t)base_monotonic_ns();
		if (left <= 0)
			return timed_out(w);
		rest(w, left < LOOK_NS ? left : LOOK_NS, 0);
	}
	return code;
}

static int begin(struct wait *w)
{
	struct tool *t = w->t;
	struct base_error err = {0};
	int code = tool_open_store(t, STORE_OPEN_READ_ONLY);
	int r = 0;

	if (code)
		return code;
	if (w->has_after)
		r = commit_list_open(t->store, w->target.run, false, &t->list, &err);
	else
		r = commit_list_open_newest(t->store, w->target.run, &t->list, &err);
	if (r < 0)
		return tool_fail(t, &err);
	w->start = commit_list_next(t->list);
	w->from = w->has_after ? 0 : w->start;
	take_signals(w);
	base_info("waiting for %s, entry %" PRIu64 " and later", w->target.run, w->from);
	code = watch(w);
	sigprocmask(SIG_SETMASK, &w->before, NULL);
	return code ? code : w->failed ? TOOL_FAILED : TOOL_DONE;
}

/* ---- arguments ---- */

static int parse_numbers(struct wait *w, const char *after, const char *timeout)
{
	uint64_t seconds;

	w->has_after = after != NULL;
	if (after && !base_decimal(after, 0, INT64_MAX, &w->after))
		return tool_usage(w->t, "--after %s: give the number of a step", after);
	if (timeout && base_decimal(timeout, 0, INT64_MAX / 1000000000, &seconds))
		w->timeout_ns = seconds * 1000000000;
	else if (timeout && !query_duration_parse(timeout, &w->timeout_ns))
		return tool_usage(w->t, "--timeout %s: give seconds, or a duration such as 10m or 2h", timeout);
	if (timeout && !w->timeout_ns)
		w->timeout_ns = 1; /* looks once */
	if (w->target.has_step && (w->has_after || w->follow))
		return tool_usage(w->t, "%s is one step: --after and --follow are for a RUN", w->t->arguments[1]);
	return 0;
}

static int wait_run(struct tool *t, int argc, char **argv)
{
	struct wait w = {.t = t};
	const char *after = NULL, *timeout = NULL;
	const struct tool_option options[] = {{"follow", 'f', .flag = &w.follow}, {"after", .text = &after},
		{"timeout", .text = &timeout}, {0}};
	int end = 1, code;

	while (end < argc && strcmp(argv[end], "--exec") != 0)
		end++;
	if (end + 1 < argc)
		w.command = argv + end + 1;
	code = tool_parse(t, end, argv, options);
	if (code)
		return code;
	if (end + 1 == argc)
		return tool_usage(t, "--exec needs a command behind it");
	if ((code = tool_target_parse(t, t->arguments[1], &w.target)) || (code = parse_numbers(&w, after, timeout)))
		return code;
	code = begin(&w);
	fflush(stdout);
	if (w.stopped) {
		signal(w.stopped, SIG_DFL);
		raise(w.stopped);
	}
	return code;
}

const struct tool_command tool_wait = {"wait", "wait for new steps, and run a command for each",
	"usage: vckpt wait STORE RUN[/STEP] [OPTION...] [--exec CMD [ARG...]]\n\n"
	"Waits until the run has a new step, or has STEP, prints RUN/STEP, and ends. The run need not be there\n"
	"yet. RUN/latest is any step, one that is there included, RUN/TAG the step that has or gets the tag.\n\n"
	"  -f, --follow       go on: each new step, in the order in which they were committed\n"
	"  --after N          steps above N count, too, although they are there already\n"
	"  --timeout TIME     fail if no step came for so long: seconds, or 10m, 2h; 0 looks once\n"
	"  --exec CMD ARG...  run this for each step, without a shell, and wait for it; the rest of the line. {} is\n"
	"                     RUN/STEP, {run}, {step}, {store} and {path} (STORE/RUN/STEP) are these; so are\n"
	"                     VCKPT_RUN, VCKPT_STEP, VCKPT_STORE and VCKPT_PATH in its environment. Exit code 1 if\n"
	"                     it failed for a step\n"
	"  --json -q          a line of JSON for each step; print nothing\n",
	wait_run};
