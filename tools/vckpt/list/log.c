/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt log: what happened to a run, newest first: saves, removals, failed saves. Reads the list's entries backwards,
 * as many as are shown. */
#include <inttypes.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/commit/list/list_facts.h"
#include "core/commit/list/list_history.h"
#include "tools/vckpt/print/table.h"
#include "tools/vckpt/tool.h"

struct log {
	struct tool *t;
	uint64_t most, shown;
	bool bytes, time, bare, more;
	int64_t now_ns;
	json_t *rows;           /* with --json */
	struct tool_table *table;
};

static const char *what_of(const struct commit_list_event *e)
{
	switch (e->kind) {
	case COMMIT_LIST_SAVED: return "saved";
	case COMMIT_LIST_REMOVED: return "removed";
	case COMMIT_LIST_ABORTED: return "failed";
	case COMMIT_LIST_UNREADABLE: break;
	}
	return "unreadable";
}

static void add_attributes(json_t *row, const struct log *log, const struct commit_list_event *e)
{
	const struct proto_commit *c = e->commit;
	const struct commit_list_step *s = commit_list_find(log->t->list, c->step);
	base_cleanup_free struct proto_attribute *merged = NULL;
	size_t n = 0;

	if (!s || s->entry != e->entry || commit_list_attributes(log->t->list, s, &merged, &n) < 0)
		n = 0; /* it is gone: as it was committed */
	if (log->t->json || n || c->nattributes)
		json_object_set_new(row, "attributes", n ? tool_json_attributes(merged, n)
			: tool_json_attributes(c->attributes, c->nattributes));
}

static void add_commit(json_t *row, const struct log *log, const struct commit_list_event *e)
{
	const struct proto_commit *c = e->commit;

	json_object_set_new(row, "step", json_integer((json_int_t)c->step));
	json_object_set_new(row, "bytes", json_integer((json_int_t)c->bytes));
	json_object_set_new(row, "new_bytes", json_integer((json_int_t)c->new_bytes));
	add_attributes(row, log, e);
}

/* Of a visible step: its tags, and why it is pinned. */
static void add_facts(json_t *row, const struct log *log, const struct commit_list_event *e)
{
	const struct proto_step_facts *f = commit_list_facts(log->t->list, e->entry);
	base_cleanup_buf struct base_buf note = BASE_BUF_INIT;

	if (!f || e->kind != COMMIT_LIST_SAVED || e->gone != PROTO_NONE)
		return;
	if (log->t->json)
		tool_json_facts(row, f);
	else
		tool_facts_note(f, &note);
	if (note.len)
		json_object_set_new(row, "note", tool_json_text((const char *)note.data, note.len));
}

/* The columns that are for people: texts put together of several members. */
static void add_columns(json_t *row, const struct log *log, const struct commit_list_event *e, const char *attempt)
{
	char when[40], by[PROTO_HOST_MAX + 20], note[PROTO_REASON_MAX + 100] = "";

	if (e->time_ns)
		json_object_set_new(row, "when", json_string(log->time ? tool_format_time(e->time_ns, when)
			: tool_format_age(e->time_ns, log->now_ns, when)));
	if (e->host || attempt)
		snprintf(by, sizeof by, "%s%s%.*s", e->host ? e->host : "", e->host && attempt ? " " : "",
			log->more ? PROTO_ATTEMPT_MAX : 8, attempt ? attempt : "");
	if (e->host || attempt)
		json_object_set_new(row, "by", tool_json_text(by, strlen(by)));
	if (e->kind == COMMIT_LIST_SAVED && e->gone != PROTO_NONE)
		snprintf(note, sizeof note, "%s since", e->replaced ? "replaced" : "removed");
	else if (e->kind == COMMIT_LIST_ABORTED && e->rank)
		snprintf(note, sizeof note, "rank %" PRIu32 ": %s", e->rank, e->reason ? e->reason : "");
	else if (e->reason)
		snprintf(note, sizeof note, "%s", e->reason);
	if (note[0])
		json_object_set_new(row, "note", tool_json_text(note, strlen(note)));
}

static void add_json(json_t *row, const struct commit_list_event *e, const char *attempt)
{
	json_object_set_new(row, "time", e->time_ns ? json_string(TOOL_TIME(e->time_ns)) : json_null());
	json_object_set_new(row, "host", e->host ? tool_json_text(e->host, strlen(e->host)) : json_null());
	if (attempt) {
		json_object_set_new(row, "attempt", json_string(attempt));
		json_object_set_new(row, "launch", json_stringn(attempt, strcspn(attempt, "-")));
	}
	if (e->kind == COMMIT_LIST_SAVED)
		json_object_set_new(row, "visible", json_boolean(e->gone == PROTO_NONE));
	if (e->kind == COMMIT_LIST_SAVED && e->gone != PROTO_NONE)
		json_object_set_new(row, e->replaced ? "replaced_by" : "removed_by", json_integer((json_int_t)e->gone));
	if (e->kind == COMMIT_LIST_ABORTED)
		json_object_set_new(row, "rank", json_integer(e->rank));
	if (e->reason)
		json_object_set_new(row, "reason", tool_json_text(e->reason, strlen(e->reason)));
}

static int add(void *arg, const struct commit_list_event *e)
{
	struct log *log = arg;
	/* a removal is no save's: who asked for it is on the host */
	const char *attempt = e->kind == COMMIT_LIST_SAVED ? e->commit->attempt : e->attempt;
	json_t *row = json_pack("{s:s, s:I}", "what", what_of(e), "entry", (json_int_t)e->entry);

	if (e->commit)
		add_commit(row, log, e);
	if (log->t->json)
		add_json(row, e, attempt);
	else
		add_columns(row, log, e, attempt);
	add_facts(row, log, e);
	if (log->t->json)
		json_array_append_new(log->rows, row);
	else
		tool_table_add(log->table, row);
	return ++log->shown == log->most;
}

static int print(struct log *log, const char *run, const struct commit_list_history *h)
{
	if (log->t->json)
		return tool_print_json(json_pack("{s:s, s:o, s:O}", "run", run, "collected_before",
			h->collected ? json_integer((json_int_t)h->collected) : json_null(), "log", log->rows));
	if (tool_table_print(log->table, stdout, log->bare, tool_terminal_width(STDOUT_FILENO)) < 0)
		return tool_fail(log->t, &(struct base_error){.code = -ENOMEM});
	if (h->collected && !log->bare && !log->t->quiet)
		printf("entries before %" PRIu64 " were collected: of what was before, only steps that are still there "
			"are known, without their hosts\n", h->collected);
	return TOOL_DONE;
}

static int show(struct log *log, const char *run)
{
	const struct tool_column columns[] = {{"STEP", "step", TOOL_AS_STEP}, {log->time ? "TIME" : "AGE", "when"},
		{"WHAT", "what"}, {"SIZE", "bytes", TOOL_AS_BYTES, .right = true},
		{"ADDED", "new_bytes", TOOL_AS_BYTES, .right = true}, {"BY", "by", .shorten = true},
		{"ATTRIBUTES", "attributes", .shorten = true}, {"NOTE", "note", .shorten = true}};
	struct commit_list_history h;
	struct base_error err = {0};
	int code = tool_open_store(log->t, STORE_OPEN_READ_ONLY), r;

	if (code)
		return code;
	if (commit_list_open_newest(log->t->store, run, &log->t->list, &err) < 0)
		return tool_fail(log->t, &err);
	if (commit_list_next(log->t->list) == 0)
		return tool_no_run(log->t, run);
	if (log->t->json)
		log->rows = json_array();
	else
		log->table = tool_table_new(columns, BASE_COUNT(columns), false, log->bytes);
	r = commit_list_history_each(log->t->list, 0, add, log, &h, &err);
	code = r < 0 ? tool_fail(log->t, &err) : print(log, run, &h);
	tool_table_free(log->table);
	json_decref(log->rows);
	return code;
}

static int log_run(struct tool *t, int argc, char **argv)
{
	struct log log = {.t = t, .now_ns = base_realtime_ns()};
	struct tool_target target;
	const char *most = NULL;
	const struct tool_option options[] = {{"number", 'n', .text = &most}, {"bytes", .flag = &log.bytes},
		{"time", .flag = &log.time}, {"long", 'l', .flag = &log.more}, {"no-header", 'H', .flag = &log.bare},
		{0}};
	int code = tool_parse(t, argc, argv, options);

	log.more |= t->verbose > 0;
	if (code || (code = tool_count_parse(t, "--number", most, &log.most)) ||
		(code = tool_run_parse(t, t->arguments[1], "give a RUN without a step", &target)))
		return code;
	return show(&log, target.run);
}

const struct tool_command tool_log = {"log", "say what happened to a run: saves, removals, failed saves",
	"usage: vckpt log STORE RUN [OPTION...]\n\n"
	"Lists what happened to a run, newest first: steps that were saved, with the host and the launch that\n"
	"wrote them, their tags and pins; steps that were removed, and saves that failed, with the reason. Where\n"
	"older entries of the run's list were collected (vckpt gc), only steps that are still there are known,\n"
	"and it says so.\n\n"
	"  -n, --number N      the newest N only, which cost what these cost\n"
	"  -l, -v, --long      whole names of attempts: the launch (16 digits), and which of its saves\n"
	"  --bytes             exact numbers of bytes\n"
	"  --time              times instead of ages\n"
	"  -H, --no-header     for scripts: no header and no remarks, a tab between fields\n"
	"  --json -q           print JSON; leave out remarks\n",
	log_run};
