/* SPDX-License-Identifier: Apache-2.0
 *
 * report: what the files of `vckpt report` share: the numbers of a run, the page, and its charts. One thread.
 *
 * Markup goes through report_put, whose arguments are numbers and texts of this program. Whatever comes from a store
 * goes through report_say or report_tag, which escape it. Elements are closed and attributes quoted, as in XML. */
#ifndef TOOLS_VCKPT_REPORT_REPORT_H
#define TOOLS_VCKPT_REPORT_REPORT_H

#include <math.h>

#include "tools/vckpt/list/sums.h"
#include "tools/vckpt/stalls/stalls.h"

#define REPORT_POINTS 200u      /* of a chart; more steps are taken together */
#define REPORT_ROWS 48u         /* of a heat map */
#define REPORT_COLUMNS 16u
#define REPORT_TEXT 96u

/* ---- report_page.c ---- */
struct report_page { FILE *to; unsigned tables; };
void report_put(struct report_page *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
void report_say(struct report_page *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The text in an element; `tag` may have attributes. */
void report_tag(struct report_page *p, const char *tag, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The text in a picture; anchor: start, middle or end of it is at x. */
void report_label(struct report_page *p, double x, double y, const char *anchor, const char *text);
enum report_unit { REPORT_NS, REPORT_BYTES, REPORT_COUNT };
char *report_value(enum report_unit unit, double value, char text[static 32]); /* NAN: "-" */
#define REPORT_VALUE(unit, value) report_value(unit, value, (char[32]){0})
/* A cell of a table: the value for people, and the exact one for scripts. */
void report_number(struct report_page *p, enum report_unit unit, double value);
/* Its begin; the caller puts heads, "</tr></thead><tbody>" and rows. id NULL: it has a number, and is folded. */
void report_table(struct report_page *p, const char *id);
void report_table_end(struct report_page *p, bool folded);
/* The text, or its first `most` bytes and an ellipsis. Whole characters. */
char *report_short(const char *text, size_t most, char out[static REPORT_TEXT]);
void report_begin(struct report_page *p, const char *title);
void report_end(struct report_page *p);
extern const char report_style[], report_script[], report_script_hash[]; /* report_style.c */
static inline double report_most(double a, double b) { return a > b ? a : b; }
static inline double report_least(double a, double b) { return a < b ? a : b; }

/* ---- report_chart.c ---- */
/* Items [first, end) of what a chart shows, taken together. */
struct report_point { char label[48], tick[20]; size_t first, end; };
enum report_of { REPORT_LARGEST, REPORT_SUM, REPORT_MEAN }; /* of a point's items */
struct report_series {
	const char *name;
	double (*get)(const void *of, size_t i, unsigned what); /* of item i; NAN: none */
	unsigned what;
	enum report_of items;
};
struct report_chart {
	const char *title, *about;      /* about: sentences of this program */
	enum report_unit unit;
	const struct report_point *points; unsigned npoints;
	const void *of;
	struct report_series series[3]; unsigned nseries;
	bool bars;                      /* stacked */
	bool small; unsigned column;    /* one of many: its numbers are in the table after them, from that column on */
};
void report_chart(struct report_page *p, const struct report_chart *c);
void report_chart_table(struct report_page *p, const struct report_chart *all, unsigned n); /* of several small ones */
double report_step(enum report_unit unit, double max); /* distance of marks on an axis from 0 to `max` */

/* hot: 0 to 1; value NAN: none. text: in the cell; more: what a reader who looks closer gets. */
struct report_cell { double hot, value; char text[32], more[REPORT_TEXT]; };
struct report_heat {
	const char *title, *about, *scale;      /* scale: what the colour means */
	enum report_unit unit;
	unsigned nrows, ncolumns, apart;        /* apart: that many rows first, then a gap */
	char rows[REPORT_ROWS][REPORT_TEXT], columns[REPORT_COLUMNS][REPORT_TEXT];
	struct report_cell cells[REPORT_ROWS][REPORT_COLUMNS];
};
void report_heat(struct report_page *p, const struct report_heat *h);

/* ---- report_data.c ---- */
struct report_commit { int64_t time_ns; uint64_t step; double bytes, added, all_bytes, all_added; }; /* all: so far */
#define REPORT_SUMS (STALLS_MILESTONES + REPORT_COLUMNS)
/* sums: of the milestones, then of the run's phases; slowest: a rank. raw, written: NAN: not measured */
struct report_save { uint64_t step; uint32_t nranks; struct stalls_sum sums[REPORT_SUMS]; double raw, written; };
struct report_run {
	const char *name;
	struct commit_list *list;
	struct report_commit *commits; size_t ncommits; /* by ascending step */
	struct report_save *saves; size_t nsaves;       /* the newest ones, by ascending step */
	char *phases[REPORT_COLUMNS]; unsigned nphases;
	bool phases_left_out;
	struct stalls newest;                           /* of the newest one that could be read */
	uint32_t damaged, unread;                       /* files of measures; steps */
	struct tool_progress progress;
};
/* Of a list that knows all visible steps. NULL: no memory. */
struct report_commit *report_commits(const struct commit_list *l, size_t *ret_n);
void report_commits_sum(struct report_commit *c, size_t n);
/* Opens the list and reads the measures of the newest steps: of `most`, or of 0: as many as are quickly read.
 * Release it whatever this returns. */
int report_run_read(struct report_run *run, struct store *s, const char *name, uint64_t most, struct base_error *err);
void report_run_release(struct report_run *run);

/* ---- report_ranks.c, report_changed.c, report_growth.c, report_run.c: sections; 0 or a negative errno ---- */
int report_ranks(struct report_page *p, const struct stalls *st); /* of one save: heat map, timeline, sums */
/* Which bytes changed, and how they are stored: of the newest step, against the one before. Reads what `info` reads. */
int report_changed(struct report_page *p, struct report_run *run, struct store *s, struct base_error *err);
int report_growth(struct report_page *p, struct report_commit *c, size_t n); /* over time; sorts them so */
int report_run_growth(struct report_page *p, const struct report_run *run);  /* by step; and which steps there are */
/* `n` items in at most REPORT_POINTS stretches. NULL: no memory. */
struct report_point *report_points(size_t n, unsigned *ret_n);
void report_point_steps(struct report_point *p, uint64_t first, uint64_t last);
int report_run_show(struct report_page *p, struct report_run *run, struct store *s, struct base_error *err);

#endif
