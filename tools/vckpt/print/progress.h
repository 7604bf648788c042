/* SPDX-License-Identifier: Apache-2.0
 *
 * progress: a bar on standard error, with the time that is left. Only on a terminal that can write over a line, only
 * after a second, never with -q. The caller sees to it that one thread updates it at a time. */
#ifndef TOOLS_VCKPT_PRINT_PROGRESS_H
#define TOOLS_VCKPT_PRINT_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct tool_progress {
	const char *what;
	bool shown;
	bool enabled;
	bool counts; /* things, not bytes: set it after the start */
	int64_t start_ns, last_ns; /* last: when it was drawn or the rate was taken */
	uint64_t last_done;
	double rate; /* a second, smoothed; 0: not known yet */
};
void tool_progress_start(struct tool_progress *p, bool quiet, const char *what);
void tool_progress_update(void *p, uint64_t done, uint64_t total); /* fits the library's callbacks */
/* The same at a time of the monotonic clock: what the one above does now. */
void tool_progress_at(struct tool_progress *p, int64_t now_ns, uint64_t done, uint64_t total);
void tool_progress_clear(struct tool_progress *p); /* before another line is printed; the next update draws it again */
void tool_progress_end(struct tool_progress *p);

#endif
