/* SPDX-License-Identifier: Apache-2.0
 *
 * How bytes grow, and which steps there are: of commit entries alone. */
#include <inttypes.h>
#include <string.h>

#include "tools/vckpt/report/report.h"

#define TIME_SPANS 100u
#define UNIQUE_SHARED "Unique: what the saves added. Shared: the rest of the logical bytes, which earlier steps have " \
	"or encoding saved."

struct report_point *report_points(size_t n, unsigned *ret_n)
{
	unsigned k = n < REPORT_POINTS ? (unsigned)n : REPORT_POINTS;
	struct report_point *points = calloc(k + 1, sizeof *points);

	for (uint64_t i = 0; points && i < k; i++) {
		points[i].first = (size_t)(i * n / k);
		points[i].end = (size_t)((i + 1) * n / k);
	}
	*ret_n = k;
	return points;
}

void report_point_steps(struct report_point *p, uint64_t first, uint64_t last)
{
	snprintf(p->tick, sizeof p->tick, "%" PRIu64, first);
	if (first == last)
		snprintf(p->label, sizeof p->label, "step %" PRIu64, first);
	else
		snprintf(p->label, sizeof p->label, "%" PRIu64 " to %" PRIu64, first, last);
}

/* On its axis the day; of a range of less than two days the time of day. */
static void point_times(struct report_point *p, double first, double last, double range_ns)
{
	const char *from = TOOL_TIME((int64_t)report_most(-9.2e18, report_least(first, 9.2e18)));
	const char *to = TOOL_TIME((int64_t)report_most(-9.2e18, report_least(last, 9.2e18)));
	bool days = range_ns > 2 * 86400e9;

	snprintf(p->tick, sizeof p->tick, "%.*s", days ? 10 : 8, days || strlen(from) < 19 ? from : from + 11);
	snprintf(p->label, sizeof p->label, "%.20s to %.20s", from, to);
}

static int commit_order(const void *a, const void *b)
{
	const struct report_commit *x = a, *y = b;

	return (x->time_ns > y->time_ns) - (x->time_ns < y->time_ns);
}

/* Equal spans of time, from the first commit to the last; sorts these by time. NULL: no memory. */
static struct report_point *points_spans(struct report_commit *c, size_t n, unsigned *ret_n)
{
	struct report_point *points = calloc(TIME_SPANS, sizeof *points);
	double from, range;
	size_t at = 0;

	qsort(c, n, sizeof *c, commit_order);
	from = (double)c[0].time_ns;
	range = (double)c[n - 1].time_ns - from;
	*ret_n = range > 0 ? TIME_SPANS : 1;
	for (unsigned i = 0; points && i < *ret_n; i++) {
		double end = from + range / *ret_n * (i + 1);

		points[i].first = at;
		while (at < n && (i == *ret_n - 1 || (double)c[at].time_ns < end))
			at++;
		points[i].end = at;
		point_times(&points[i], from + range / *ret_n * i, end, range);
	}
	return points;
}

enum { GROWTH_STORED, GROWTH_FULL, GROWTH_ADDED, GROWTH_SHARED, GROWTH_ONE };

static double growth_get(const void *of, size_t i, unsigned what)
{
	const struct report_commit *c = &((const struct report_commit *)of)[i];
	const double all[] = {c->all_added, c->all_bytes, c->added, report_most(c->bytes - c->added, 0), 1};

	return all[what];
}

/* The sums up to the end of each point, and the bytes of each. `points` becomes void. */
static void growth_charts(struct report_page *p, struct report_chart *c, struct report_point *points,
	enum report_of items)
{
	c->unit = REPORT_BYTES;
	c->points = points;
	c->nseries = 2;
	c->bars = true;
	c->series[0] = (struct report_series){"unique", growth_get, GROWTH_ADDED, items};
	c->series[1] = (struct report_series){"shared", growth_get, GROWTH_SHARED, items};
	report_chart(p, c);
	for (unsigned i = 0; i < c->npoints; i++)
		points[i].first = points[i].end - 1;
	c->title = "Growth";
	c->about = "Summed over the steps that are there: what their saves added, and what copies without sharing and "
		"encoding would take.";
	c->bars = false;
	c->series[0] = (struct report_series){"added to the store", growth_get, GROWTH_STORED, REPORT_LARGEST};
	c->series[1] = (struct report_series){"logical bytes", growth_get, GROWTH_FULL, REPORT_LARGEST};
	report_chart(p, c);
}

int report_growth(struct report_page *p, struct report_commit *c, size_t n)
{
	struct report_chart chart = {.title = "Bytes committed", .about = UNIQUE_SHARED, .of = c};
	base_cleanup_free struct report_point *points = points_spans(c, n, &chart.npoints);

	if (!points)
		return -ENOMEM;
	report_commits_sum(c, n);
	growth_charts(p, &chart, points, REPORT_SUM);
	return 0;
}

int report_run_growth(struct report_page *p, const struct report_run *run)
{
	size_t n = run->ncommits;
	struct report_chart chart = {.title = "Bytes of each step", .of = run->commits, .about = n <= REPORT_POINTS
		? UNIQUE_SHARED : UNIQUE_SHARED " Each bar is the mean of neighbouring steps."};
	struct report_chart kept = {.title = "Which steps there are", .about = "Steps that were committed in each span "
		"of time and have not been "
		"removed.", .unit = REPORT_COUNT, .bars = true, .of = run->commits, .nseries = 1,
		.series = {{"steps", growth_get, GROWTH_ONE, REPORT_SUM}}};
	base_cleanup_free struct report_point *points = report_points(n, &chart.npoints), *spans = NULL;

	for (unsigned i = 0; points && i < chart.npoints; i++)
		report_point_steps(&points[i], run->commits[points[i].first].step,
			run->commits[points[i].end - 1].step);
	if (points)
		growth_charts(p, &chart, points, REPORT_MEAN);
	kept.points = spans = points_spans(run->commits, n, &kept.npoints);
	if (points && spans)
		report_chart(p, &kept);
	return points && spans ? 0 : -ENOMEM;
}
