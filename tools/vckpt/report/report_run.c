/* SPDX-License-Identifier: Apache-2.0
 *
 * A run's report. A chart without data is left out, and a sentence says why. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/report/report.h"

enum { SAVE_RAW, SAVE_WRITTEN, SAVE_MEDIAN = 1000, SAVE_MAX = 2000 }; /* the latter two: and a row of the sums */

static double save_get(const void *of, size_t i, unsigned what)
{
	const struct report_save *s = &((const struct report_save *)of)[i];
	const struct stalls_sum *sum = &s->sums[what % 1000];

	if (what < SAVE_MEDIAN)
		return what == SAVE_RAW ? s->raw : s->written;
	return !sum->n ? NAN : what < SAVE_MAX ? (double)sum->median : (double)sum->max;
}

/* Does any save have a value? */
static bool saves_have(const struct report_run *run, unsigned what)
{
	for (size_t i = 0; i < run->nsaves; i++)
		if (!isnan(save_get(run->saves, i, what)))
			return true;
	return false;
}

/* How many times the slowest rank of this save was the slowest of several. */
static size_t saves_slowest(const struct report_run *run, const struct report_save *of)
{
	size_t n = 0;

	for (const struct report_save *s = run->saves; s < run->saves + run->nsaves; s++)
		n += s->sums[STALLS_STAGED].n > 1 && s->sums[STALLS_STAGED].slowest == of->sums[STALLS_STAGED].slowest;
	return n;
}

static void run_stall(struct report_page *p, const struct report_run *run, struct report_chart c)
{
	size_t most = 0, n;
	uint32_t rank = 0;

	if (!saves_have(run, SAVE_MAX + STALLS_STAGED)) {
		report_put(p, "<p class=\"soft\">No stall is shown: no rank measured how long a trainer waited. Steps "
			"that were imported have no such measures.</p>\n");
		return;
	}
	c.title = "What the trainer waits for";
	c.about = "From submit until a rank was staged, when training goes on, and until the step was committed.";
	c.series[0] = (struct report_series){"stall, median rank", save_get, SAVE_MEDIAN + STALLS_STAGED,
		REPORT_LARGEST};
	c.series[1] = (struct report_series){"stall, slowest rank", save_get, SAVE_MAX + STALLS_STAGED, REPORT_LARGEST};
	c.series[2] = (struct report_series){"committed, slowest rank", save_get, SAVE_MAX + STALLS_COMMITTED,
		REPORT_LARGEST};
	c.nseries = 3;
	report_chart(p, &c);
	for (size_t i = 0; i < run->nsaves && most <= run->nsaves / 2; i++)
		if ((n = saves_slowest(run, &run->saves[i])) > most) {
			most = n;
			rank = run->saves[i].sums[STALLS_STAGED].slowest;
		}
	if (most > 2 && most * 3 > run->nsaves)
		report_put(p, "<p class=\"warn\">Rank %" PRIu32 " was the last to be staged in %zu of %zu saves.</p>\n",
			rank, most, run->nsaves);
}

static void run_phases(struct report_page *p, const struct report_run *run, const struct report_chart *like)
{
	struct report_chart all[REPORT_COLUMNS];

	if (!run->nphases) {
		report_put(p, "<p class=\"soft\">No phases are shown: no rank recorded any.</p>\n");
		return;
	}
	report_put(p, "<h3>Work in each phase</h3><p class=\"soft\">The median rank (solid line) and the slowest one "
		"(dashed) of each save, summed over a rank's threads%s.</p>\n<div class=\"small\">\n",
		run->phases_left_out ? "; further phases are left out" : "");
	for (unsigned i = 0; i < run->nphases; i++) {
		unsigned row = STALLS_MILESTONES + i;

		all[i] = *like;
		all[i].title = run->phases[i];
		all[i].about = "The median and the slowest rank of each save.";
		all[i].small = true;
		all[i].column = 2 * i;
		all[i].series[0] = (struct report_series){"median", save_get, SAVE_MEDIAN + row, REPORT_LARGEST};
		all[i].series[1] = (struct report_series){"slowest", save_get, SAVE_MAX + row, REPORT_LARGEST};
		report_chart(p, &all[i]);
	}
	report_put(p, "</div>\n");
	report_chart_table(p, all, run->nphases);
}

static void run_compression(struct report_page *p, const struct report_run *run, struct report_chart c)
{
	if (!saves_have(run, SAVE_WRITTEN)) {
		report_put(p, "<p class=\"soft\">Raw and written bytes by save are not shown: no rank measured "
			"them.</p>\n");
		return;
	}
	c.title = "Compression";
	c.about = "New bytes of each save before encoding, and all that its ranks wrote for them, tables included.";
	c.unit = REPORT_BYTES;
	c.series[0] = (struct report_series){"new bytes, raw", save_get, SAVE_RAW, REPORT_LARGEST};
	c.series[1] = (struct report_series){"written", save_get, SAVE_WRITTEN, REPORT_LARGEST};
	report_chart(p, &c);
}

static void run_head(struct report_page *p, const struct report_run *run)
{
	const struct report_commit *last = &run->commits[run->ncommits - 1];

	report_put(p, "<ul class=\"tiles\"><li><b>%zu</b>steps</li><li><b>%" PRIu64 "</b>newest, of "
		"%s</li><li><b>%s</b>in it</li><li><b>%s</b>added by "
		"all</li>", run->ncommits, last->step, TOOL_TIME(last->time_ns),
		REPORT_VALUE(REPORT_BYTES, last->bytes), REPORT_VALUE(REPORT_BYTES, last->all_added));
	if (run->nsaves && run->saves[run->nsaves - 1].sums[STALLS_STAGED].n)
		report_put(p, "<li><b>%s</b>longest stall of the newest</li>",
			TOOL_DURATION(run->saves[run->nsaves - 1].sums[STALLS_STAGED].max));
	report_put(p, "</ul>\n");
	if (run->unread || run->damaged)
		report_put(p, "<p class=\"warn\">%s and %s of measures cannot be read: vckpt verify says more.</p>\n",
			TOOL_COUNT(run->unread, "step", "steps"), TOOL_COUNT(run->damaged, "file", "files"));
}

static int run_measured(struct report_page *p, const struct report_run *run)
{
	struct report_chart chart = {.unit = REPORT_NS, .of = run->saves, .nseries = 2};
	base_cleanup_free struct report_point *points = report_points(run->nsaves, &chart.npoints);
	int r;

	if (!points)
		return -ENOMEM;
	for (unsigned i = 0; i < chart.npoints; i++)
		report_point_steps(&points[i], run->saves[points[i].first].step, run->saves[points[i].end - 1].step);
	chart.points = points;
	report_put(p, "<h2>Saves</h2>\n<p class=\"soft\">What the ranks measured of the newest %s%s.</p>\n",
		TOOL_COUNT(run->nsaves, "step", "steps"), run->nsaves > REPORT_POINTS
		? "; each point is the largest value of several" : "");
	run_stall(p, run, chart);
	run_phases(p, run, &chart);
	report_put(p, "<h2>The save of step %" PRIu64 "</h2>\n", run->newest.step);
	r = report_ranks(p, &run->newest);
	report_put(p, "<h2>Bytes</h2>\n");
	run_compression(p, run, chart);
	return r;
}

int report_run_show(struct report_page *p, struct report_run *run, struct store *s, struct base_error *err)
{
	int r = 0;

	report_tag(p, "h1", "Run %s", run->name);
	if (!run->ncommits) {
		report_put(p, "<p>The run has no step.</p>\n");
		return 0;
	}
	run_head(p, run);
	if (run->nsaves)
		r = run_measured(p, run);
	if (r == 0)
		r = report_changed(p, run, s, err);
	if (r == -BASE_EDAMAGED || r == -BASE_EFORMAT || r == -ENOENT || r == -ESTALE || r == -BASE_EVERSION) {
		report_tag(p, "p class=\"warn\"", "What changed is not shown: %s.", err->text);
		run->damaged += r == -BASE_EDAMAGED || r == -BASE_EFORMAT;
		*err = (struct base_error){0};
		r = 0;
	}
	return r < 0 ? r : report_run_growth(p, run);
}
