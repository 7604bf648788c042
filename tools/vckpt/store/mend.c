/* SPDX-License-Identifier: Apache-2.0 */
#include "core/upkeep/mend.h"

#include <inttypes.h>
#include <string.h>

#include "core/view/check.h"
#include "core/view/safetensors.h"
#include "tools/vckpt/tool.h"

static const char *const words[] = {[UPKEEP_MEND_FOUND] = "found", [UPKEEP_MEND_MEND] = "mend",
	[UPKEEP_MEND_ACCEPT] = "accept", [UPKEEP_MEND_DELETE] = "delete", [UPKEEP_MEND_LOST] = "lost",
	[UPKEEP_MEND_LEFT] = "left"};

static const enum tool_style styles[] = {[UPKEEP_MEND_FOUND] = TOOL_BAD, [UPKEEP_MEND_MEND] = TOOL_GOOD,
	[UPKEEP_MEND_ACCEPT] = TOOL_PLAIN, [UPKEEP_MEND_DELETE] = TOOL_PLAIN, [UPKEEP_MEND_LOST] = TOOL_BAD,
	[UPKEEP_MEND_LEFT] = TOOL_BAD};

struct mend {
	struct tool_progress progress; /* first: gets the library's calls, too */
	struct tool *t;
	struct upkeep_mend_options options;
	json_t *lines;
};

static json_t *line_json(const struct upkeep_mend_line *l)
{
	json_t *o = json_pack("{s:s, s:s, s:o}", "what", words[l->what], "file", l->file, "text",
		tool_json_text(l->text, strlen(l->text)));

	if (l->len) {
		json_object_set_new(o, "offset", json_integer((json_int_t)l->offset));
		json_object_set_new(o, "length", json_integer((json_int_t)l->len));
	}
	tool_json_touched(o, l->run, l->step, l->component, l->tensor);
	return o;
}

static void line(void *arg, const struct upkeep_mend_line *l)
{
	struct mend *m = arg;

	if (m->t->json) {
		json_array_append_new(m->lines, line_json(l));
		return;
	}
	if (m->t->quiet)
		return;
	tool_progress_clear(&m->progress);
	tool_print_styled(stdout, styles[l->what], words[l->what]);
	printf("%*s", (int)(8 - strlen(words[l->what])), "");
	if (l->run && l->step != PROTO_NONE)
		printf("%s/step-%08" PRIu64 " ", l->run, l->step);
	if (l->run && l->step != PROTO_NONE && l->tensor)
		tool_print(stdout, "%s %s%s%s ", l->component ? "tensor" : "blob", l->component ? l->component : "",
			l->component ? "/" : "", l->tensor);
	tool_print_text(stdout, l->file, strlen(l->file));
	if (l->len)
		printf(" bytes %" PRIu64 "-%" PRIu64, l->offset, l->offset + l->len - 1);
	tool_print(stdout, ": %s\n", l->text);
	fflush(stdout); /* so that each line is there before its action */
}

static int say(struct mend *m, const struct upkeep_mend_result *result)
{
	int code = result->left || result->lost ? TOOL_DAMAGE : TOOL_DONE;

	if (m->t->json) {
		int printed = tool_print_json(json_pack("{s:b, s:I, s:I, s:I, s:I, s:O}", "dry_run", m->options.dry_run,
			"found", (json_int_t)result->found, "done", (json_int_t)result->done, "lost",
			(json_int_t)result->lost, "left", (json_int_t)result->left, "lines", m->lines));

		return printed ? printed : code;
	}
	if (m->t->quiet)
		return code;
	if (!result->found && !result->done) {
		puts("sound: nothing to mend");
		return code;
	}
	printf("%s found; %s %s; %s lost; %s left\n", TOOL_COUNT(result->found, "fault", "faults"),
		TOOL_COUNT(result->done, "thing", "things"), m->options.dry_run ? "would be done" : "done",
		TOOL_COUNT(result->lost, "step, tensor or blob", "steps, tensors or blobs"),
		TOOL_COUNT(result->left, "fault", "faults"));
	return code;
}

static int mend_run(struct tool *t, int argc, char **argv)
{
	struct mend m = {.t = t, .options = {
		.heartbeat_s = 20, .line = line, .progress = tool_progress_update, .header = view_header_check,
		.files = view_step_check, .arg = &m}};
	const char *from = NULL;
	const struct tool_option options[] = {
		{"dry-run", 'n', .flag = &m.options.dry_run}, {"from", .text = &from}, {0}};
	struct upkeep_mend_result result = {0};
	struct base_error err = {0};
	int code = tool_parse(t, argc, argv, options);
	int r;

	if (code || (code = tool_open_store(t, m.options.dry_run ? STORE_OPEN_READ_ONLY : 0)))
		return code;
	if (from && store_open(from, STORE_OPEN_READ_ONLY, &m.options.from, &err) < 0)
		return tool_fail(t, &err);
	m.lines = json_array();
	tool_interrupt_ends(t, m.options.dry_run ? "nothing was changed"
		: "what was mended so far stays so; run vckpt mend again");
	tool_progress_start(&m.progress, t->quiet, "mend");
	r = upkeep_mend(t->store, &m.options, &result, &err);
	tool_progress_end(&m.progress);
	code = r < 0 ? tool_fail(t, &err) : say(&m, &result);
	json_decref(m.lines);
	store_close(m.options.from);
	return code;
}

const struct tool_command tool_mend = {"mend", "make a damaged store sound again",
	"usage: vckpt mend STORE [--from STORE2] [-n] [--json] [-q] [-v]\n\n"
	"Verifies everything, says what is damaged, what mend does about it and what is lost, then does it. Good\n"
	"data comes from the second copy of a record, from other steps and runs of the store, and from STORE2.\n"
	"A list entry that cannot be restored is accepted as damaged, so that saves and vckpt gc go on.\n"
	"Refused while a writer is alive. Exit code 3 if something is lost or stays damaged.\n\n"
	"  --from STORE2       take data from this store, too: a copy, or any store with the same content\n"
	"  -n, --dry-run       change nothing; only say what would be done\n",
	mend_run};
