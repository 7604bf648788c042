/* SPDX-License-Identifier: Apache-2.0
 *
 * vckpt report: a page that shows how saving goes and what a store holds. Of a whole store: its runs, its growth, and
 * the run with the newest commit in full. The page is made in memory (a few hundred KB at most, whatever the store has)
 * and becomes a file at once, or not. */
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/text.h"
#include "tools/vckpt/report/report.h"

#define RUNS_SHOWN 100u

struct report {
	struct tool *t;
	const char *html;
	uint64_t most;
	struct report_page page;
	struct report_run run;
	struct summary { char *name; size_t steps; struct report_commit last; } *runs; /* last: time_ns of the newest */
	size_t nruns;
	struct report_commit *commits; size_t ncommits, room; /* of all runs */
	struct base_error err;
};

/* ---- the runs of a store ---- */

static int newest_first(const void *a, const void *b)
{
	const struct summary *x = a, *y = b;

	if (x->last.time_ns != y->last.time_ns)
		return x->last.time_ns < y->last.time_ns ? 1 : -1;
	return strcmp(x->name, y->name);
}

static int add_run(struct report *rp, const char *name)
{
	base_cleanup_free struct report_commit *c = NULL;
	struct summary *run = &rp->runs[rp->nruns];
	struct commit_list *l = NULL;
	size_t n;
	int r = commit_list_open(rp->t->store, name, false, &l, &rp->err);

	if (r < 0)
		return r;
	c = report_commits(l, &n);
	commit_list_close(l);
	if (!c || base_array_room(rp->commits, rp->room, rp->ncommits + n) < 0 || (n && !(run->name = strdup(name))))
		return base_no_memory(&rp->err);
	if (n) {
		memcpy(rp->commits + rp->ncommits, c, n * sizeof *c);
		rp->ncommits += n;
		rp->nruns++;
		run->steps = n;
		run->last = c[n - 1];
	}
	for (size_t i = 0; i < n; i++)
		if (c[i].time_ns > run->last.time_ns)
			run->last.time_ns = c[i].time_ns;
	return 0;
}

/* A run that cannot be read fails the command, for the page would be wrong without it. */
static int read_runs(struct report *rp)
{
	char **names;
	size_t n;
	int r = commit_runs(rp->t->store, &names, &n, &rp->err);

	if (r < 0)
		return r;
	rp->runs = calloc(n + 1, sizeof *rp->runs);
	if (!rp->runs)
		r = base_no_memory(&rp->err);
	for (size_t i = 0; r == 0 && i < n; i++)
		r = add_run(rp, names[i]);
	commit_runs_free(names, n);
	if (rp->nruns)
		qsort(rp->runs, rp->nruns, sizeof *rp->runs, newest_first);
	return r;
}

static int show_runs(struct report *rp)
{
	struct report_page *p = &rp->page;

	report_tag(p, "h1", "Store %s", rp->t->store->path);
	report_put(p, "<p class=\"soft\">%s", rp->nruns ? "" : "The store has no step.");
	report_put(p, rp->nruns > 1 ? "Below, the run with the newest commit; vckpt report STORE RUN shows "
		"another.</p>\n"
		: "</p>\n");
	if (!rp->nruns)
		return 0;
	report_table(p, "runs");
	report_put(p, "<th>run</th><th>steps</th><th>latest</th><th>newest "
		"commit</th><th>logical</th><th>added</th></tr></thead><tbody>\n");
	for (const struct summary *run = rp->runs; run < rp->runs + base_min(rp->nruns, RUNS_SHOWN); run++) {
		report_put(p, "<tr>");
		report_tag(p, "td", "%s", run->name);
		report_put(p, "<td>%zu</td><td>%" PRIu64 "</td><td>%s</td>", run->steps, run->last.step,
			TOOL_TIME(run->last.time_ns));
		report_number(p, REPORT_BYTES, run->last.all_bytes);
		report_number(p, REPORT_BYTES, run->last.all_added);
		report_put(p, "</tr>\n");
	}
	report_table_end(p, false);
	if (rp->nruns > RUNS_SHOWN)
		report_put(p, "<p class=\"soft\">and %zu runs more.</p>\n", rp->nruns - RUNS_SHOWN);
	return rp->nruns > 1 ? report_growth(p, rp->commits, rp->ncommits) : 0; /* else it is the run's */
}

/* ---- the page ---- */

/* 1: there is no such run. */
static int make_page(struct report *rp, const char *run)
{
	struct tool *t = rp->t;
	base_cleanup_free char *title = tool_string("%s%s%s: vckpt report", run ? run : "", run ? " in " : "",
		t->store->path);
	int r = run ? 0 : read_runs(rp);

	if (r == 0 && (run || rp->nruns)) {
		tool_progress_start(&rp->run.progress, t->quiet, "reading measures");
		rp->run.progress.counts = true;
		r = report_run_read(&rp->run, t->store, run ? run : rp->runs[0].name, rp->most, &rp->err);
		tool_progress_end(&rp->run.progress);
	}
	if (r == 0 && run && commit_list_next(rp->run.list) == 0)
		return 1;
	report_begin(&rp->page, title ? title : "vckpt report");
	if (r == 0 && !run)
		r = show_runs(rp);
	if (r == 0 && rp->run.list)
		r = report_run_show(&rp->page, &rp->run, t->store, &rp->err);
	report_end(&rp->page);
	return r;
}

static int report_store(struct report *rp, const char *run)
{
	base_cleanup_free char *bytes = NULL;
	size_t len = 0;
	int r = -ENOMEM;

	rp->page.to = open_memstream(&bytes, &len);
	if (rp->page.to)
		r = make_page(rp, run);
	if (rp->page.to && (ferror(rp->page.to) | fclose(rp->page.to)) && r == 0)
		r = -ENOMEM;
	if (r > 0)
		return tool_no_run(rp->t, run);
	if (r == 0 && strcmp(rp->html, "-") == 0)
		r = fwrite(bytes, 1, len, stdout) == len && fflush(stdout) == 0 ? 0 : base_error_set(&rp->err, -errno,
			"standard output: %s", strerror(errno));
	else if (r == 0)
		r = tool_file_put(rp->html, bytes, len, &rp->err);
	rp->err.code = r;
	if (r < 0)
		return tool_fail(rp->t, &rp->err);
	if (!rp->t->quiet && strcmp(rp->html, "-"))
		tool_print(stdout, "%s: %s, %s, the measures of %zu\n", rp->html, TOOL_BYTES(len),
			TOOL_COUNT(rp->runs ? rp->ncommits : rp->run.ncommits, "step", "steps"), rp->run.nsaves);
	if (rp->run.damaged)
		tool_failed(rp->t, "run %s has damage, and what it hides is not on the page (vckpt verify says more)",
			rp->run.name);
	return rp->run.damaged ? TOOL_DAMAGE : TOOL_DONE;
}

static int report_run(struct tool *t, int argc, char **argv)
{
	struct report rp = {.t = t};
	struct tool_target target = {0};
	const char *steps = NULL;
	int code = tool_parse(t, argc, argv, (const struct tool_option[]){{"html", .text = &rp.html},
		{"steps", 'n', .text = &steps}, {0}});

	if (code == 0 && t->json)
		code = tool_usage(t, "the command writes an HTML page and has no --json");
	if (code || (t->narguments == 2 && (code = tool_run_parse(t, t->arguments[1],
		"a report is of a RUN, or of all", &target))))
		return code;
	if (!rp.html || !rp.html[0])
		return tool_usage(t, "--html FILE is missing: where the page is to go");
	if (steps && (!base_decimal(steps, 0, 1000000000, &rp.most) || !rp.most))
		return tool_usage(t, "-n %s is not a number of steps, 1 or more", steps);
	if ((code = tool_open_store(t, STORE_OPEN_READ_ONLY)) == 0)
		code = report_store(&rp, target.run[0] ? target.run : NULL);
	report_run_release(&rp.run);
	for (size_t i = 0; i < rp.nruns; i++)
		free(rp.runs[i].name);
	free(rp.runs);
	free(rp.commits);
	return code;
}

const struct tool_command tool_report = {"report", "a page of pictures: saves, ranks, growth, what changed",
	"usage: vckpt report STORE [RUN] --html FILE [-n STEPS] [-q] [-v]\n\n"
	"Writes one HTML page that needs nothing else: stall and phases of the newest saves, which rank was slow\n"
	"at what, the timeline of the newest save, what changed by layer, compression, growth, and which steps\n"
	"there are. Without RUN: of all runs, and in full of the one with the newest commit.\n\n"
	"  --html FILE         where the page goes; - is standard output\n"
	"  -n, --steps STEPS   the measures of that many steps, the newest ones; by default of 100, and of fewer\n"
	"                      where that would be more than 20,000 files\n",
	report_run};
