/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt abort: ends a save that is stuck, by an `abort` entry in its run's list. The folders in incoming/ say
 * which attempts there are; the list, read after them, says which of these are undecided. Their writers find the entry
 * as if another rank had given up. */
#include <inttypes.h>
#include <string.h>

#include "core/commit/attempt/attempt.h"
#include "core/commit/incoming/incoming.h"
#include "tools/vckpt/tool.h"

struct stop {
	struct tool *t;
	const char *reason;
	const char *run, *attempt; /* arguments; attempt NULL: the only one */
	struct commit_incoming *all;
	size_t n;
};

static bool undecided(const struct stop *a, const struct commit_incoming *in)
{
	return strcmp(in->run, a->run) == 0 &&
		commit_list_attempt(a->t->list, in->attempt, NULL, NULL) == COMMIT_ATTEMPT_UNDECIDED;
}

static size_t count_undecided(const struct stop *a, const struct commit_incoming **ret_one)
{
	size_t n = 0;

	for (size_t i = 0; i < a->n; i++)
		if (undecided(a, &a->all[i])) {
			*ret_one = &a->all[i];
			n++;
		}
	return n;
}

static const struct commit_incoming *named(const struct stop *a)
{
	for (size_t i = 0; i < a->n; i++)
		if (strcmp(a->all[i].run, a->run) == 0 && strcmp(a->all[i].attempt, a->attempt) == 0)
			return &a->all[i];
	return NULL;
}

static json_t *undecided_json(const struct stop *a)
{
	json_t *names = json_array();

	for (size_t i = 0; i < a->n; i++)
		if (undecided(a, &a->all[i]))
			json_array_append_new(names, json_string(a->all[i].attempt));
	return names;
}

/* Several, and none was named. */
static int say_several(const struct stop *a, size_t n)
{
	if (a->t->json)
		tool_print_json(json_pack("{s:s, s:n, s:n, s:n, s:n, s:n, s:o}", "run", a->run, "attempt", "step",
			"entry", "state", "reason", "undecided", undecided_json(a)));
	for (size_t i = 0; !a->t->json && i < a->n; i++)
		if (undecided(a, &a->all[i]))
			tool_print_incoming(&a->all[i]);
	return tool_failed(a->t, "run %s has %zu saves under way: name the attempt that is to be aborted", a->run, n);
}

/* A writer is at work there, or may be. */
static void warn_alive(struct store *s, const struct commit_incoming *in)
{
	struct commit_launch_info *infos = NULL;
	struct base_error err = {0};
	size_t n = 0;

	if (in->state == COMMIT_DEAD || commit_launches(s, &infos, &n, &err) < 0)
		return;
	for (size_t i = 0; i < n; i++)
		if (strncmp(infos[i].launch, in->attempt, 16) == 0 && infos[i].state != COMMIT_DEAD) {
			base_warning("a writer of this save %s on %s; it will find its save aborted and go on",
				infos[i].state == COMMIT_ALIVE ? "is alive" : "may be alive", infos[i].host);
			break;
		}
	free(infos);
}

static int say_done(const struct stop *a, const struct commit_incoming *in, const char *attempt, bool again,
	uint64_t entry)
{
	const char *reason = NULL;

	commit_list_attempt(a->t->list, attempt, &reason, NULL);
	if (!reason)
		reason = "";
	if (a->t->json)
		return tool_print_json(json_pack("{s:s, s:s, s:o, s:I, s:s, s:o, s:o}", "run", a->run, "attempt",
			attempt, "step", in && in->begun ? json_integer((json_int_t)in->begin.step) : json_null(),
			"entry", (json_int_t)entry, "state", tool_liveness[in ? in->state : COMMIT_DEAD], "reason",
			tool_json_text(reason, strlen(reason)), "undecided", undecided_json(a)));
	if (a->t->quiet)
		return TOOL_DONE;
	printf("%s: attempt %s", a->run, attempt);
	if (in && in->begun)
		printf(" at step %" PRIu64, in->begin.step);
	tool_print(stdout, "%s: %s\n", again ? " was aborted before" : " aborted", reason);
	return TOOL_DONE;
}

static int stop_one(struct stop *a)
{
	struct commit_list *list = a->t->list;
	const struct commit_incoming *in = NULL;
	size_t n = count_undecided(a, &in);
	const char *attempt = a->attempt;
	char text[1000];
	struct base_error err = {0};
	uint64_t entry = 0;
	int r;

	if (!attempt && n > 1)
		return say_several(a, n);
	if (attempt)
		in = named(a);
	else if (in)
		attempt = in->attempt;
	if (!attempt || (!in && commit_list_attempt(list, attempt, NULL, NULL) == COMMIT_ATTEMPT_UNDECIDED)) {
		if (!in && commit_list_next(list) == 0)
			return tool_no_run(a->t, a->run);
		return tool_failed(a->t, attempt ? "run %s has no save under way whose attempt is %.64s"
			: "run %s has no save under way", a->run, attempt);
	}
	if (in && undecided(a, in))
		warn_alive(a->t->store, in);
	snprintf(text, sizeof text, "%s, says vckpt abort on %s", a->reason ? a->reason : "it was given up by hand",
		store_hostname());
	r = commit_attempt_stop(a->t->store, list, attempt, text, &entry, &err);
	return r < 0 ? tool_fail(a->t, &err) : say_done(a, in, attempt, r == 1, entry);
}

static int abort_run(struct tool *t, int argc, char **argv)
{
	struct stop a = {.t = t};
	const struct tool_option options[] = {{"reason", .text = &a.reason}, {0}};
	struct base_error err = {0};
	int code = tool_parse(t, argc, argv, options), r;

	if (code)
		return code;
	if (a.reason && (strlen(a.reason) > 800 || !proto_utf8_valid(a.reason, strlen(a.reason))))
		return tool_usage(t, "--reason: give a text of at most 800 bytes");
	a.run = t->arguments[1];
	a.attempt = t->narguments == 3 ? t->arguments[2] : NULL;
	if ((code = tool_open_store(t, 0)))
		return code;
	r = commit_incoming_read(t->store, &a.all, &a.n, &err);
	if (r == 0) /* after them, so that what was decided since is known */
		r = commit_list_open(t->store, a.run, true, &t->list, &err);
	code = r < 0 ? tool_fail(t, &err) : stop_one(&a);
	commit_incoming_free(a.all, a.n);
	return code;
}

const struct tool_command tool_abort = {"abort", "end a save that is stuck",
	"usage: vckpt abort STORE RUN [ATTEMPT] [--reason TEXT] [--json] [-q] [-v]\n\n"
	"Ends a save that is under way, or that a dead writer left, by an entry in the run's list. The step\n"
	"does not appear. Writers of the save that are alive see it and go on. vckpt ls --incoming shows\n"
	"ATTEMPT; it may be left out where the run has one save. The writers, or vckpt gc, delete what the\n"
	"save has stored.\n\n"
	"  --reason TEXT       the reason that its writers and later readers see\n",
	abort_run};
