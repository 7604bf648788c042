/* SPDX-License-Identifier: Apache-2.0
 *
 * log: one line, one write(2), so that lines of several threads and processes do not mix. What a terminal might obey
 * in the text (names come from files) becomes '?' (text.h). Settings are atomics: they may change while others log. */
#include "core/base/log.h"
#include "core/base/text.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef void (*log_sink)(enum base_log_level level, const char *text);

static _Atomic int log_most = BASE_LOG_WARNING;
static _Atomic(const char *) log_program = "vckpt";
static _Atomic(log_sink) log_to;

void base_log_to_stderr(enum base_log_level level, const char *text)
{
	char line[4096 + 200];
	int n = snprintf(line, sizeof line, "%.100s: %s\n", atomic_load(&log_program), text);
	size_t left, at = 0;

	(void)level;
	if (n < 0)
		return;
	left = (size_t)n < sizeof line ? (size_t)n : sizeof line - 1;
	while (left > 0) {
		ssize_t done = write(STDERR_FILENO, line + at, left);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return; /* nowhere to report it */
		at += done;
		left -= done;
	}
}

void base_log(enum base_log_level level, const char *format, ...)
{
	char text[4096];
	int saved = errno;
	log_sink sink;
	va_list args;

	if ((int)level > atomic_load_explicit(&log_most, memory_order_relaxed))
		return;
	va_start(args, format);
	if (vsnprintf(text, sizeof text, format, args) < 0)
		text[0] = 0;
	va_end(args);
	base_text_clean(text);
	sink = atomic_load(&log_to);
	if (sink)
		sink(level, text);
	else
		base_log_to_stderr(level, text);
	errno = saved;
}

void base_log_set_level(enum base_log_level most)
{
	atomic_store(&log_most, (int)most);
}

void base_log_set_program(const char *name)
{
	atomic_store(&log_program, name ? name : "vckpt");
}

void base_log_set_sink(void (*sink)(enum base_log_level level, const char *text))
{
	atomic_store(&log_to, sink);
}
