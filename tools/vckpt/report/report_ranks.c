/* SPDX-License-Identifier: Apache-2.0
 *
 * One save, rank by rank: a heat map of ranks and phases, a timeline, the sums of `vckpt stalls`. In the map the colour
 * is the time that a rank needed more than the median rank: how long a phase takes by its nature does not hide who is
 * slow at it. Of many ranks neighbours share a row, which shows the slowest of them; the slowest of all have rows of
 * their own above. */
#include <inttypes.h>
#include <string.h>

#include "core/base/array.h"
#include "tools/vckpt/report/report.h"

#define TIMELINE_ROWS 12u

/* A rank's value in a row of the sums; NAN: none. */
static double rank_value(const struct stalls *st, uint32_t rank, unsigned row)
{
	uint64_t ns;

	return stalls_row_value(st, rank, row, &ns) ? (double)ns : NAN;
}

/* ---- the heat map ---- */

struct ranks_heat {
	struct report_heat h;
	unsigned rows[REPORT_COLUMNS];          /* of each column: the row of the sums */
	double median[REPORT_COLUMNS], worst;   /* worst: the most that any is above its median */
};

/* Who waits long is not slow. */
static bool is_wait(const struct stalls *st, unsigned row)
{
	return row >= STALLS_MILESTONES && strcmp(stalls_row_name(st, row), "wait") == 0;
}

/* The columns: what any rank has. committed is left out: all wait for the last. */
static int heat_columns(struct ranks_heat *rh, const struct stalls *st)
{
	double longest = 0;

	for (unsigned row = 0; row < STALLS_MILESTONES + st->nphases; row++) {
		unsigned column = rh->h.ncolumns;
		struct stalls_sum s;
		int r = stalls_sum(st, row, &s);

		if (r < 0)
			return r;
		if (!s.n || row == STALLS_COMMITTED || column == REPORT_COLUMNS)
			continue;
		rh->rows[column] = row;
		rh->median[column] = (double)s.median;
		report_short(row == STALLS_STAGED ? "stall" : stalls_row_name(st, row), 40, rh->h.columns[column]);
		rh->h.ncolumns++;
		if (is_wait(st, row))
			continue;
		longest = report_most(longest, (double)s.median);
		rh->worst = report_most(rh->worst, (double)s.max - (double)s.median);
	}
	rh->worst = report_most(rh->worst, longest / 10); /* so that equal ranks look equal */
	return 0;
}

static void heat_row(struct ranks_heat *rh, const struct stalls *st, unsigned row, uint32_t first, uint32_t end)
{
	if (end - first == 1)
		snprintf(rh->h.rows[row], REPORT_TEXT, "rank %" PRIu32 " on %.40s", st->ranks[first].rank,
			st->ranks[first].host);
	else
		snprintf(rh->h.rows[row], REPORT_TEXT, "ranks %" PRIu32 " to %" PRIu32, st->ranks[first].rank,
			st->ranks[end - 1].rank);
	for (unsigned k = 0; k < rh->h.ncolumns; k++) {
		struct report_cell *cell = &rh->h.cells[row][k];
		uint32_t which = first;

		cell->value = NAN;
		for (uint32_t i = first; i < end; i++) {
			double value = rank_value(st, i, rh->rows[k]);

			if (isnan(value) || value <= cell->value)
				continue;
			cell->value = value;
			which = i;
		}
		if (cell->value > rh->median[k] && !is_wait(st, rh->rows[k]))
			cell->hot = (cell->value - rh->median[k]) / rh->worst;
		if (!isnan(cell->value))
			report_value(REPORT_NS, cell->value, cell->text);
		snprintf(cell->more, REPORT_TEXT, "%s, rank %" PRIu32 "; the median is %s",
			REPORT_VALUE(REPORT_NS, cell->value), st->ranks[which].rank,
			REPORT_VALUE(REPORT_NS, rh->median[k]));
	}
}

#define HEAT_ABOUT "Work of each rank in each phase; stall and announced are counted from submit. The colour leaves " \
	"out wait: it is the fast ranks that wait."

static int ranks_heat(struct report_page *p, const struct stalls *st, const struct stalls_value *slowest,
	unsigned nslowest)
{
	base_cleanup_free struct ranks_heat *rh = calloc(1, sizeof *rh);
	uint64_t n = st->nranks, bins;
	int r = rh ? heat_columns(rh, st) : -ENOMEM;

	if (r < 0 || !rh->h.ncolumns)
		return r;
	rh->h.title = "Which rank was slow at what";
	rh->h.unit = REPORT_NS;
	rh->h.scale = "longer than the median rank";
	rh->h.apart = n > REPORT_ROWS ? nslowest : 0;
	rh->h.nrows = n > REPORT_ROWS ? REPORT_ROWS : (unsigned)n;
	rh->h.about = !rh->h.apart ? HEAT_ABOUT : HEAT_ABOUT " Above, the slowest ranks; below, neighbours share a "
		"row, which shows the slowest of them.";
	for (unsigned i = 0; i < rh->h.apart; i++)
		heat_row(rh, st, i, slowest[i].rank, slowest[i].rank + 1);
	bins = rh->h.nrows - rh->h.apart;
	for (uint64_t i = 0; i < bins; i++)
		heat_row(rh, st, rh->h.apart + (unsigned)i, (uint32_t)(i * n / bins), (uint32_t)((i + 1) * n / bins));
	report_heat(p, &rh->h);
	return 0;
}

/* ---- the timeline ---- */

struct timeline {
	const struct stalls *st;
	uint32_t rows[TIMELINE_ROWS]; unsigned nrows;
	unsigned lanes[STALLS_PHASES_MAX], nlanes;      /* of each phase: 1 and more, in the order of the legend */
	uint64_t origin_ns;
	double end_ns, lane;                            /* since the origin; height of a lane */
};

static double timeline_at(const struct timeline *t, uint64_t ns)
{
	return ns > t->origin_ns ? (double)(ns - t->origin_ns) : 0;
}

static double timeline_x(const struct timeline *t, uint64_t ns)
{
	return 150 + timeline_at(t, ns) / t->end_ns * 742;
}

static bool timeline_shows(const struct stalls_time *time)
{
	return time->start_ns && time->end_ns >= time->start_ns;
}

/* All ranks, or the slowest and some from everywhere; which phases they have; when the last one ends. */
static void timeline_measure(struct timeline *t, const struct stalls_value *slowest, unsigned nslowest)
{
	uint64_t n = t->st->nranks;

	for (; n > TIMELINE_ROWS && t->nrows < nslowest; t->nrows++)
		t->rows[t->nrows] = slowest[t->nrows].rank;
	for (uint64_t k = t->nrows, of = base_min(n, TIMELINE_ROWS) - k, i = 0; i < of; i++)
		t->rows[t->nrows++] = (uint32_t)(i * n / of);
	t->nrows = (unsigned)base_array_unique(t->rows, t->nrows, sizeof *t->rows, base_compare_32);
	for (unsigned i = 0; i < t->nrows; i++) {
		const struct stalls_rank *rank = &t->st->ranks[t->rows[i]];
		uint64_t ns;

		for (unsigned k = 0; k < rank->ntimes; k++)
			if (timeline_shows(&rank->times[k])) {
				t->lanes[rank->times[k].phase] = 1;
				t->end_ns = report_most(t->end_ns, timeline_at(t, rank->times[k].end_ns));
			}
		for (unsigned m = STALLS_STAGED; m < STALLS_MILESTONES; m++)
			if (stalls_since(rank, (enum stalls_milestone)m, &ns))
				t->end_ns = report_most(t->end_ns, timeline_at(t, rank->at_ns[m]));
	}
	for (unsigned i = 0; i < t->st->nphases; i++)
		t->lanes[i] = t->lanes[i] ? ++t->nlanes : 0;
	t->lane = t->nrows <= 2 ? 12 : t->nrows <= 4 ? 8 : t->nrows <= 8 ? 6 : 5;
}

static void timeline_rank(struct report_page *p, const struct timeline *t, const struct stalls_rank *rank, double y)
{
	char name[REPORT_TEXT], whole[PROTO_HOST_MAX + 32];
	double height = t->nlanes * t->lane, from = timeline_x(t, rank->submitted_ns);
	uint64_t ns;

	snprintf(whole, sizeof whole, "rank %" PRIu32 " on %s", rank->rank, rank->host);
	report_label(p, 142, y + height / 2 + 4, "end", report_short(whole, 20, name));
	if (stalls_since(rank, STALLS_STAGED, &ns)) {
		report_put(p, "<g><rect class=\"stall\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" "
			"height=\"%.1f\"/>", from, y - 2, timeline_x(t, rank->at_ns[STALLS_STAGED]) - from, height + 3);
		report_tag(p, "title", "%s: the trainer waited %s", whole, TOOL_DURATION(ns));
		report_put(p, "</g>");
	}
	for (unsigned k = 0; k < rank->ntimes; k++) {
		const struct stalls_time *time = &rank->times[k];
		unsigned lane = t->lanes[time->phase] - 1;
		double x = timeline_x(t, time->start_ns);

		if (!timeline_shows(time))
			continue;
		report_put(p, "<g><rect class=\"k%u%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" "
			"height=\"%.1f\"/>", lane % 8,
			lane < 8 ? "" : " more", x, y + lane * t->lane,
			report_most(timeline_x(t, time->end_ns) - x, 1.2), t->lane - 1);
		report_tag(p, "title", "rank %" PRIu32 ", %s: %s from start to end, %s of work, %s", rank->rank,
			t->st->phases[time->phase], TOOL_DURATION(time->end_ns - time->start_ns),
			TOOL_DURATION(time->busy_ns), TOOL_BYTES(time->bytes));
		report_put(p, "</g>");
	}
	if (stalls_since(rank, STALLS_COMMITTED, &ns))
		report_put(p, "<path class=\"done\" d=\"M%.1f %.1fv%.1f\"/>",
			timeline_x(t, rank->at_ns[STALLS_COMMITTED]), y - 2, height + 3);
	report_put(p, "\n");
}

#define KEY "<li><svg viewBox=\"0 0 26 12\" aria-hidden=\"true\">"

static void timeline_legend(struct report_page *p, const struct timeline *t)
{
	report_put(p, "<figure><figcaption><h3>Timeline</h3><p>A row a rank, a lane a phase, in the order of the "
		"legend. Times are of the ranks' own clocks, since the first submit.");
	if (t->st->nranks > TIMELINE_ROWS)
		report_put(p, " Of %" PRIu32 " ranks, the slowest and some others.", t->st->nranks);
	report_put(p, "</p></figcaption>\n<ul class=\"legend\">");
	for (unsigned i = 0; i < t->st->nphases; i++)
		if (t->lanes[i]) {
			report_put(p, KEY "<rect class=\"k%u%s\" y=\"1\" width=\"26\" height=\"10\"/></svg>",
				(t->lanes[i] - 1) % 8, t->lanes[i] <= 8 ? "" : " more");
			report_say(p, "%s", t->st->phases[i]);
			report_put(p, "</li>");
		}
	report_put(p, KEY "<rect class=\"stall\" width=\"26\" height=\"12\"/></svg>the trainer waits</li>" KEY
		"<path class=\"done\" d=\"M13 0v12\"/></svg>committed</li></ul>\n");
}

static void ranks_timeline(struct report_page *p, const struct stalls *st, const struct stalls_value *slowest,
	unsigned nslowest)
{
	struct timeline t = {.st = st, .origin_ns = stalls_origin(st)};
	double each, bottom, step;

	timeline_measure(&t, slowest, nslowest);
	if (!(t.end_ns > 0)) {
		report_put(p, "<p class=\"soft\">No timeline: no rank recorded when its phases began and ended.</p>\n");
		return;
	}
	each = t.nlanes * t.lane + 9;
	bottom = 6 + t.nrows * each;
	step = report_step(REPORT_NS, t.end_ns);
	timeline_legend(p, &t);
	report_put(p, "<svg viewBox=\"0 0 900 %.0f\" role=\"img\"><title>Timeline of the save</title><desc>A row a "
		"rank, and in it a lane a phase, from its first work to its last. The table below has the "
		"sums.</desc>", bottom + 24);
	for (unsigned k = 0; k * step <= t.end_ns; k++) {
		double x = 150 + k * step / t.end_ns * 742;

		report_put(p, "<path class=\"grid\" d=\"M%.1f 0V%.0f\"/>", x, bottom);
		report_label(p, report_least(x, 872), bottom + 16, "middle",
			k ? REPORT_VALUE(REPORT_NS, k * step) : "0");
	}
	for (unsigned i = 0; i < t.nrows; i++)
		timeline_rank(p, &t, &st->ranks[t.rows[i]], 6 + i * each);
	report_put(p, "</svg>\n</figure>\n");
}

/* ---- the sums ---- */

static int ranks_table(struct report_page *p, const struct stalls *st)
{
	report_table(p, "sums");
	report_put(p, "<th></th><th>median</th><th>longest</th><th>shortest</th><th>ranks</th><th>slowest rank</th>"
		"<th>on host</th></tr></thead><tbody>\n");
	for (unsigned row = 0; row < STALLS_MILESTONES + st->nphases; row++) {
		struct stalls_sum s;
		int r = stalls_sum(st, row, &s);

		if (r < 0)
			return r;
		if (!s.n)
			continue;
		report_put(p, "<tr>");
		report_tag(p, "td", "%s%s", row < STALLS_MILESTONES ? "until " : "busy in ", stalls_row_name(st, row));
		report_number(p, REPORT_NS, (double)s.median);
		report_number(p, REPORT_NS, (double)s.max);
		report_number(p, REPORT_NS, (double)s.min);
		report_number(p, REPORT_COUNT, s.n);
		report_number(p, REPORT_COUNT, st->ranks[s.slowest].rank);
		report_tag(p, "td", "%s", st->ranks[s.slowest].host);
		report_put(p, "</tr>\n");
	}
	report_table_end(p, false);
	return 0;
}

int report_ranks(struct report_page *p, const struct stalls *st)
{
	struct stalls_value slowest[STALLS_SLOWEST];
	int n = stalls_slowest(st, STALLS_ANNOUNCED, slowest), r = n;

	if (n >= 0 && st->nranks > 1)
		r = ranks_heat(p, st, slowest, (unsigned)n);
	if (r < 0)
		return r;
	ranks_timeline(p, st, slowest, (unsigned)n);
	return ranks_table(p, st);
}
