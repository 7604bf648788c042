/* SPDX-License-Identifier: Apache-2.0 */
#include "core/upkeep/verify.h"
#include "core/view/check.h"
#include "core/view/safetensors.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "tools/vckpt/tool.h"

#define UNREAD_SAID 20u /* runs that are named, each by a sentence */

struct verify {
	struct tool_progress progress; /* first: gets the library's calls, too */
	struct tool *t;
	json_t *damage, *newer, *unread, *begins;
};

static json_t *damage_json(const struct upkeep_damage *d)
{
	json_t *o = json_pack("{s:s, s:I, s:I, s:s}", "file", d->file, "offset", (json_int_t)d->offset, "length",
		(json_int_t)d->len, "what", d->what);

	tool_json_touched(o, d->run, d->step, d->component, d->tensor);
	return o;
}

static void damage(void *arg, const struct upkeep_damage *d)
{
	struct verify *v = arg;

	if (v->t->json) {
		json_array_append_new(d->newer ? v->newer : v->damage, damage_json(d));
		return;
	}
	if (v->t->quiet)
		return;
	tool_progress_clear(&v->progress);
	tool_print_styled(stdout, d->newer ? TOOL_PLAIN : TOOL_BAD, d->newer ? "newer:" : "damage:");
	putchar(' ');
	tool_print_text(stdout, d->file, strlen(d->file));
	if (d->len)
		printf(" bytes %" PRIu64 "-%" PRIu64, d->offset, d->offset + d->len - 1);
	fputs(": ", stdout);
	tool_print_text(stdout, d->what, strlen(d->what));
	if (d->run && d->step != PROTO_NONE)
		printf("; touches %s/step-%08" PRIu64, d->run, d->step);
	else if (d->run)
		printf("; touches run %s", d->run);
	else
		printf("; touches no step%s", json_array_size(v->unread) ? " of the runs that could be read" : "");
	if (d->tensor)
		tool_print(stdout, " %s %s%s%s\n", d->component ? "tensor" : "blob", d->component ? d->component : "",
			d->component ? "/" : "", d->tensor);
	else
		putchar('\n');
	fflush(stdout); /* so that the lines about faults are there if the command is interrupted */
}

static void unread(void *arg, const char *run, const char *why)
{
	struct verify *v = arg;

	json_array_append_new(v->unread, json_pack("{s:s, s:s}", "run", run, "why", why));
	if (json_array_size(v->unread) > UNREAD_SAID)
		return;
	tool_progress_clear(&v->progress);
	tool_print(stderr, "vckpt verify: %s\n", why);
}

static void begins(void *arg, const char *run, uint64_t entry)
{
	struct verify *v = arg;

	json_array_append_new(v->begins, json_pack("{s:s, s:I}", "run", run, "entry", (json_int_t)entry));
	if (v->t->json || v->t->quiet)
		return;
	tool_progress_clear(&v->progress);
	printf("run %s: its list begins at entry %" PRIu64 ": those before it were collected\n", run, entry);
}

/* -v */
static void pack_read(void *arg, const char *file, uint64_t bytes)
{
	struct verify *v = arg;

	if (!v->t->verbose || v->t->json || v->t->quiet)
		return;
	tool_progress_clear(&v->progress);
	tool_print(stdout, "read: %s %s\n", file, TOOL_BYTES(bytes));
	fflush(stdout);
}

static json_t *result_json(const struct verify *v, const struct upkeep_verify_result *result)
{
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:O, s:O, s:O, s:O}", "files", (json_int_t)result->files, "objects",
		(json_int_t)result->objects, "bytes", (json_int_t)result->bytes, "steps", (json_int_t)result->steps,
		"faults", (json_int_t)result->faults, "damage", v->damage, "newer", v->newer,
		"unread", v->unread, "begins", v->begins);
}

static void print_result(const struct upkeep_verify_result *result)
{
	bool all = !result->newer && !result->unread;

	printf("%s, %s, %s, %s read: ", TOOL_COUNT(result->steps, "step", "steps"),
		TOOL_COUNT(result->files, "file", "files"), TOOL_COUNT(result->objects, "object", "objects"),
		TOOL_BYTES(result->bytes));
	tool_print_styled(stdout, result->faults ? TOOL_BAD : all ? TOOL_GOOD : TOOL_PLAIN,
		result->faults ? TOOL_COUNT(result->faults, "fault", "faults") : all ? "sound" : "no faults");
	if (result->newer)
		printf(", %s of a newer vckpt could not be looked at", TOOL_COUNT(result->newer, "thing", "things"));
	if (result->unread)
		printf(", %s could not be read", TOOL_COUNT(result->unread, "run", "runs"));
	putchar('\n');
}

static int say(struct verify *v, const struct upkeep_verify_result *result)
{
	int code = result->faults ? TOOL_DAMAGE : result->unread ? TOOL_FAILED : result->newer ? TOOL_NEWER : TOOL_DONE;
	int printed;

	if (result->unread > UNREAD_SAID)
		fprintf(stderr, "vckpt verify: and %" PRIu64 " runs more\n", result->unread - UNREAD_SAID);
	printed = v->t->json ? tool_print_json(result_json(v, result)) : 0;

	if (!v->t->json && !v->t->quiet)
		print_result(result);
	return printed ? printed : code;
}

/* For writing, so that damage can be noted for later saves, where that is allowed. */
static int open_store(struct tool *t, struct upkeep_verify_options *options)
{
	const char *path = t->arguments[0];

	if (options->note && access(path, W_OK) == 0 && store_open(path, 0, &t->store, NULL) == 0)
		return 0;
	options->note = false;
	return tool_open_store(t, STORE_OPEN_READ_ONLY);
}

static int verify_run(struct tool *t, int argc, char **argv)
{
	struct verify v = {.t = t};
	struct upkeep_verify_options options = {
		.step = PROTO_NONE, .damage = damage, .progress = tool_progress_update, .pack = pack_read,
		.unread = unread, .begins = begins, .arg = &v, .header = view_header_check, .files = view_step_check};
	bool no_notes = false;
	const struct tool_option own[] = {
		{"no-notes", .flag = &no_notes}, {"paranoid", .flag = &options.paranoid}, {0}};
	struct upkeep_verify_result result = {0};
	struct tool_target target = {0};
	const struct commit_list_step *step;
	struct base_error err = {0};
	int code = tool_parse(t, argc, argv, own);
	int r;

	if (code || (t->narguments == 2 && (code = tool_target_parse(t, t->arguments[1], &target))))
		return code;
	if (target.rest)
		return tool_usage(t, "%s is not a run or a step: give RUN or RUN/STEP", t->arguments[1]);
	options.note = !no_notes && !options.paranoid;
	if ((code = open_store(t, &options)))
		return code;
	if (t->narguments == 2) {
		if ((code = tool_target_find(t, &target, &step)))
			return code;
		options.run = target.run;
		options.step = target.has_step ? step->step : PROTO_NONE;
		commit_list_close(base_steal(t->list));
	}
	v.damage = json_array();
	v.newer = json_array();
	v.unread = json_array();
	v.begins = json_array();
	tool_interrupt_ends(t, t->json || t->quiet ? "not everything was read, so there is no result"
		: "not everything was read; faults found so far are listed above");
	tool_progress_start(&v.progress, t->quiet, "verify");
	r = upkeep_verify(t->store, &options, &result, &err);
	tool_progress_end(&v.progress);
	code = r < 0 ? tool_fail(t, &err) : say(&v, &result);
	json_decref(v.damage);
	json_decref(v.newer);
	json_decref(v.unread);
	json_decref(v.begins);
	return code;
}

const struct tool_command tool_verify = {"verify", "re-hash everything and list all damage",
	"usage: vckpt verify STORE [RUN[/STEP]] [--no-notes] [--paranoid] [--json] [-q] [-v]\n\n"
	"Reads everything, or everything that a run or a step reaches, hashes it anew, and lists each fault\n"
	"with its file, offset, tensor and every step that it touches. Exit code 3 when there is any; then\n"
	"vckpt mend --dry-run says what can be restored. What a newer vckpt wrote is listed apart; it is no\n"
	"damage, and without damage the exit code is then 4. Damage of packs is noted in the store, so that\n"
	"later saves store anew what they would have shared with it. A run that cannot be read is named, and the\n"
	"others are verified; without damage the exit code is then 1.\n\n"
	"  --no-notes          write no notes of damage: nothing in the store changes\n"
	"  --paranoid          the store is a stranger's: believe nothing in it, read every file as the mount\n"
	"                      does, list what is unknown or unfinished; writes no notes\n"
	"  -v                  name each pack of the store when it has been read\n",
	verify_run};
