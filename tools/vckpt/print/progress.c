/* SPDX-License-Identifier: Apache-2.0
 *
 * The rate behind the time left follows the last ten seconds or so: each new measure weighs as its time does against
 * SMOOTH_NS. */
#include "tools/vckpt/print/progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "tools/vckpt/print/format.h"
#include "tools/vckpt/print/terminal.h"

#define FIRST_NS INT64_C(1000000000) /* until then nothing is shown */
#define DRAW_NS INT64_C(100000000)
#define SMOOTH_NS 10e9
#define BAR_MAX 30

static int64_t now_ns(void) { return (int64_t)base_monotonic_ns(); }

void tool_progress_start(struct tool_progress *p, bool quiet, const char *what)
{
	int64_t now = now_ns();

	*p = (struct tool_progress){.what = what, .enabled = !quiet && tool_terminal_rewrites(STDERR_FILENO),
		.start_ns = now, .last_ns = now};
}

static void measure(struct tool_progress *p, int64_t now, uint64_t done)
{
	double ns = (double)(now - p->last_ns);
	double rate = done > p->last_done ? (double)(done - p->last_done) * 1e9 / ns : 0;

	p->rate = p->rate > 0 ? p->rate + ns / (ns + SMOOTH_NS) * (rate - p->rate) : rate;
	p->last_ns = now;
	p->last_done = done;
}

static void format(const struct tool_progress *p, uint64_t n, char text[static 32])
{
	if (p->counts)
		snprintf(text, 32, "%" PRIu64, n);
	else
		tool_format_bytes(n, text);
}

static void draw(const struct tool_progress *p, uint64_t done, uint64_t total)
{
	char a[32], b[32], rate[32], left[40] = "", text[200], bar[BAR_MAX + 1];
	double part = total ? (double)done / (double)total : 1;
	unsigned width = tool_terminal_width(STDERR_FILENO), room, filled;

	format(p, done, a);
	format(p, total, b);
	format(p, (uint64_t)p->rate, rate);
	if (p->rate > 0 && done < total)
		tool_format_left((double)(total - done) / p->rate, left);
	snprintf(text, sizeof text, "%3.0f%%  %s of %s, %s/s%s%s", part * 100, a, b, rate, *left ? ", " : "", left);
	room = (unsigned)(strlen(p->what) + strlen(text)) + 5; /* blanks, brackets, and the last column stays free */
	room = width > room + 3 ? width - room : 0;
	room = room > BAR_MAX ? BAR_MAX : room;
	filled = (unsigned)(part * room > room ? room : part * room);
	memset(bar, '.', room);
	memset(bar, '#', filled);
	bar[room] = 0;
	if (room)
		fprintf(stderr, "\r%s [%s] %s\033[K", p->what, bar, text);
	else
		fprintf(stderr, "\r%.*s\033[K", (int)(width - 1), text);
	fflush(stderr);
}

void tool_progress_at(struct tool_progress *p, int64_t now, uint64_t done, uint64_t total)
{
	if (!p->enabled || now - p->start_ns < FIRST_NS || now - p->last_ns < DRAW_NS)
		return;
	measure(p, now, done);
	draw(p, done, total);
	p->shown = true;
}

void tool_progress_update(void *arg, uint64_t done, uint64_t total)
{
	tool_progress_at(arg, now_ns(), done, total);
}

void tool_progress_clear(struct tool_progress *p)
{
	if (p->shown) {
		fputs("\r\033[K", stderr);
		fflush(stderr);
	}
	p->shown = false;
}

void tool_progress_end(struct tool_progress *p)
{
	tool_progress_clear(p);
	p->enabled = false;
}
