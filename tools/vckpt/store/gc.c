/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/save/write/catalog.h"
#include "core/upkeep/gc.h"
#include "tools/vckpt/print/progress.h"
#include "tools/vckpt/print/table.h"
#include "tools/vckpt/store/repack.h"
#include "tools/vckpt/tool.h"

struct gc {
	struct tool_progress progress; /* first: gets the library's calls, too */
	struct tool *t;
	struct upkeep_gc_options options;
	uint64_t below; /* per cent; 0: nothing is written anew */
	json_t *actions, *repack;
};

/* "36", "90s", "45m", "24h", "7d"; NULL changes nothing. 0 or TOOL_USAGE */
static int parse_duration(const struct tool *t, const char *option, const char *text, const char *example,
	uint64_t *ret_s)
{
	char *end;
	unsigned long long n;
	uint64_t unit;

	if (!text)
		return 0;
	errno = 0;
	n = strtoull(text, &end, 10);
	unit = !*end || !strcmp(end, "s") ? 1
		: !strcmp(end, "m") ? 60 : !strcmp(end, "h") ? 3600 : !strcmp(end, "d") ? 86400 : 0;
	if (end == text || *text == '-' || errno || !unit || base_mul_overflows(n, unit, ret_s))
		return tool_usage(t, "%s %s: give a number with s, m, h or d, such as %s", option, text, example);
	return 0;
}

static void report(void *arg, const char *what, const char *name, uint64_t bytes, const char *detail)
{
	struct gc *g = arg;

	if (g->t->json) {
		json_array_append_new(g->actions,
			json_pack("{s:s, s:s, s:I, s:s*}", "action", what, "name", name, "bytes", (json_int_t)bytes,
				"detail", detail));
		return;
	}
	if (g->t->quiet || (!g->t->verbose && !g->options.dry_run && !strcmp(what, "keep")))
		return;
	tool_progress_clear(&g->progress);
	tool_print(stdout, "%-7s %9s  %s%s%s\n", what, TOOL_BYTES(bytes), name, detail ? ": " : "",
		detail ? detail : "");
	fflush(stdout); /* so that the lines about what was done are there if the command is interrupted */
}

/* ---- what is done, by reason ---- */

/* Seconds from now on; 0: now; -1: when a writer has ended. */
static int64_t due_s(const struct gc *g, const struct upkeep_gc_reason *x)
{
	if (strcmp(x->what, "delete") == 0 || strcmp(x->what, "collect") == 0)
		return 0;
	if (strcmp(x->what, "mark") == 0)
		return (int64_t)base_min(g->options.grace_s, INT64_MAX / 1000000000);
	return x->due_ns ? base_max(x->due_ns - base_min(x->due_ns, base_realtime_ns()), 1000000000) / 1000000000 : -1;
}

/* What is freed now comes first. */
static json_t *reasons_json(const struct gc *g, const struct upkeep_gc_result *result, bool text)
{
	json_t *rows = json_array();

	for (unsigned i = 0; i < 2 * result->nreasons; i++) {
		const struct upkeep_gc_reason *x = &result->reasons[i % result->nreasons];
		int64_t s = due_s(g, x);
		json_t *o;

		if ((s == 0) != (i < result->nreasons))
			continue;
		o = json_pack("{s:s, s:s, s:I, s:I}", "action", x->what, "why", x->why, "files", (json_int_t)x->files,
			"bytes", (json_int_t)x->bytes);
		if (text)
			json_object_set_new(o, "when", json_string(s == 0 ? "now" : s < 0 ? "later"
				: TOOL_DURATION((uint64_t)s * 1000000000)));
		else
			json_object_set_new(o, "after_s", s < 0 ? json_null() : json_integer(s));
		json_array_append_new(rows, o);
	}
	return rows;
}

/* Before it begins: what is freed now, and what by a later collection, from when on. */
static void plan(void *arg, const struct upkeep_gc_result *would)
{
	static const struct tool_column columns[] = {{"AFTER", "when"}, {"FILES", "files", .right = true},
		{"SIZE", "bytes", TOOL_AS_BYTES, .right = true}, {"WHY", "why", .shorten = true}};
	struct gc *g = arg;
	struct tool_table *table = tool_table_new(columns, BASE_COUNT(columns), false, false);
	json_t *rows = reasons_json(g, would, true), *row;
	size_t i;

	json_array_foreach(rows, i, row)
		tool_table_add(table, json_incref(row));
	tool_progress_clear(&g->progress);
	if (would->nreasons == 0)
		puts("there is nothing to free");
	else if (tool_table_print(table, stdout, false, tool_terminal_width(STDOUT_FILENO)) == 0)
		printf("%s now, %s by a later vckpt gc\n\n", TOOL_BYTES(would->deleted_bytes + would->entries_bytes),
			TOOL_BYTES(would->marked_bytes + would->waiting_bytes));
	fflush(stdout);
	tool_table_free(table);
	json_decref(rows);
}

/* ---- packs that are written anew ---- */

static int parse_below(const struct tool *t, const char *text, uint64_t *ret_below)
{
	char *end;

	if (!text)
		return 0;
	*ret_below = strtoull(text, &end, 10);
	if (*text < '1' || *text > '9' || (*end && strcmp(end, "%") != 0) || *ret_below > 100)
		return tool_usage(t, "--repack-below %s: give a share from 1%% to 100%%, such as 50%%", text);
	return 0;
}

static void print_found(const struct gc *g, const struct upkeep_repack_found *f)
{
	if (g->t->json || g->t->quiet)
		return;
	for (size_t i = 0; g->options.dry_run && i < f->n; i++)
		tool_print(stdout, "repack             %s/step-%08" PRIu64 "\n", f->steps[i].run, f->steps[i].step);
	if (f->n == 0)
		printf("less than %" PRIu64 " %% lives of no pack\n", g->below);
	else
		printf("less than %" PRIu64 " %% lives of %s, %s; %s use what lives, %s, which %s written anew\n",
			g->below, TOOL_COUNT(f->packs, "pack", "packs"), TOOL_BYTES(f->pack_bytes),
			TOOL_COUNT(f->n, "step", "steps"), TOOL_BYTES(f->live_bytes),
			g->options.dry_run ? "would be" : "is");
	fflush(stdout);
}

static json_t *found_rows(const struct upkeep_repack_found *f)
{
	json_t *rows = json_array();

	for (size_t i = 0; i < f->n; i++)
		json_array_append_new(rows, json_pack("{s:s, s:I, s:I}", "run", f->steps[i].run, "step",
			(json_int_t)f->steps[i].step, "entry", (json_int_t)f->steps[i].entry));
	return rows;
}

/* Before the collection, so that it marks what is not needed any more. */
static int repack_below(struct gc *g)
{
	struct upkeep_repack_found found = {0};
	struct base_error err = {0};
	struct tool_repack x = {0};
	int code = tool_repack_open(&x, g->t);

	tool_interrupt_waits(g->t, "steps that were repacked so far stay so; nothing was marked or deleted");
	if (code == 0 && upkeep_repack_find(x.session, (unsigned)g->below, &found, &err) < 0)
		code = tool_fail(g->t, &err);
	if (code == 0) {
		print_found(g, &found);
		if (!g->options.dry_run && found.n) {
			code = tool_repack_steps(&x, found.steps, found.n);
			tool_index_follow(g->t);
		}
		g->repack = json_pack("{s:I, s:I, s:I, s:o, s:O, s:O}", "packs", (json_int_t)found.packs, "bytes",
			(json_int_t)found.pack_bytes, "live_bytes", (json_int_t)found.live_bytes, "steps",
			g->options.dry_run ? found_rows(&found) : json_incref(x.steps), "kept", x.kept, "failed",
			x.failed);
	}
	tool_progress_end(&x.progress);
	tool_repack_close(&x);
	tool_interrupt_die();
	return code;
}

static json_t *result_json(const struct gc *g, const struct upkeep_gc_result *result)
{
	return json_pack("{s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:O?, s:O}", "dry_run",
		g->options.dry_run, "aborted", (json_int_t)result->aborted, "marked",
		(json_int_t)result->marked, "marked_bytes",
		(json_int_t)result->marked_bytes, "deleted", (json_int_t)result->deleted, "deleted_bytes",
		(json_int_t)result->deleted_bytes, "waiting",
		(json_int_t)result->waiting, "waiting_bytes", (json_int_t)result->waiting_bytes,
		"entries", (json_int_t)result->entries, "entries_bytes", (json_int_t)result->entries_bytes,
		"reasons", reasons_json(g, result, false), "repack", g->repack, "actions", g->actions);
}

static void print_grace(uint64_t grace_s)
{
	if (grace_s % 3600 == 0)
		printf("%" PRIu64 " h", grace_s / 3600);
	else if (grace_s % 60 == 0)
		printf("%" PRIu64 " min", grace_s / 60);
	else
		printf("%" PRIu64 " s", grace_s);
}

static void print_result(const struct upkeep_gc_options *o, const struct upkeep_gc_result *result)
{
	bool one = result->marked + result->waiting == 1;

	printf("%s%s deleted, %s", o->dry_run ? "would be: " : "", TOOL_COUNT(result->deleted, "file", "files"),
		TOOL_BYTES(result->deleted_bytes));
	if (result->entries)
		printf("; %s of lists collected, %s", TOOL_COUNT(result->entries, "entry", "entries"),
			TOOL_BYTES(result->entries_bytes));
	if (result->marked)
		printf("; %s marked", TOOL_COUNT(result->marked, "file", "files"));
	if (result->waiting)
		printf("; %s, %s, marked before", TOOL_COUNT(result->waiting, "file", "files"),
			TOOL_BYTES(result->waiting_bytes));
	if ((result->marked || result->waiting) && o->grace_s) {
		printf(": a later vckpt gc deletes %s, after ", one ? "it" : "them");
		print_grace(o->grace_s);
		fputs("; --grace 0: now", stdout);
	} else if (result->waiting) {
		fputs(one ? ": it waits (-v says for what)" : ": they wait (-v says for what)", stdout);
	}
	putchar('\n');
}

static int gc_run(struct tool *t, int argc, char **argv)
{
	struct gc g = {.t = t, .options = {.grace_s = 86400, .heartbeat_s = 20, .report = report,
		.progress = tool_progress_update, .arg = &g}};
	const char *grace = NULL, *heartbeat = NULL, *below = NULL;
	const struct tool_option options[] = {{"dry-run", 'n', .flag = &g.options.dry_run}, {"grace", .text = &grace},
		{"heartbeat", .text = &heartbeat}, {"repack-below", .text = &below}, {0}};
	struct upkeep_gc_result result = {0};
	struct base_error err = {0};
	int r, code = tool_parse(t, argc, argv, options), repacked = 0;

	if (code || (code = parse_below(t, below, &g.below)) ||
		(code = parse_duration(t, "--grace", grace, "24h", &g.options.grace_s)) ||
		(code = parse_duration(t, "--heartbeat", heartbeat, "20s", &g.options.heartbeat_s)) ||
		(code = tool_open_store(t, g.options.dry_run ? STORE_OPEN_READ_ONLY : 0)))
		return code;
	repacked = g.below ? repack_below(&g) : 0;
	if (repacked && !g.repack)
		return repacked;
	g.actions = json_array();
	if (!t->json && !t->quiet && (g.options.dry_run || isatty(STDOUT_FILENO)))
		g.options.plan = plan;
	tool_interrupt_ends(t, g.options.dry_run ? "nothing was changed"
		: "what was marked or deleted so far stays so; the next vckpt gc does the rest");
	tool_progress_start(&g.progress, t->quiet, "gc");
	g.progress.counts = true;
	r = upkeep_gc(t->store, &g.options, &result, &err);
	if (r == 0 && !g.options.dry_run)
		save_index_tidy(t->store);
	tool_progress_end(&g.progress);
	if (r < 0)
		code = tool_fail(t, &err);
	else if (t->json)
		code = tool_print_json(result_json(&g, &result));
	else if (!t->quiet)
		print_result(&g.options, &result);
	json_decref(g.actions);
	json_decref(g.repack);
	return code > repacked ? code : repacked;
}

const struct tool_command tool_gc = {"gc", "delete what nothing reaches",
	"usage: vckpt gc STORE [OPTION...]\n\n"
	"Ends attempts whose writer is dead, marks packs and other files that no step, no save under way and\n"
	"no base of one reaches, and deletes what an earlier collection marked at least a grace period ago.\n"
	"Whole files only. On a terminal, and with -n, it says first what it frees now, what a later vckpt gc\n"
	"can free, after how long, and why no one needs it.\n\n"
	"  -n, --dry-run       change nothing; list what would be done\n"
	"  --grace TIME        time between mark and deletion: 24h by default; with 0 both at once, refused while a\n"
	"                      writer is alive\n"
	"  --heartbeat TIME    how long a writer on another host may be silent: 20s\n"
	"  --repack-below N%   first write anew what lives of packs of which less than that lives, so that they can\n"
	"                      go: the steps that use them are replaced by equal ones; needs space meanwhile\n"
	"  --json -q -v        print JSON; print nothing but errors; list what is kept for now, too\n",
	gc_run};
