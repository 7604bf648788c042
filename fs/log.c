/* SPDX-License-Identifier: Apache-2.0
 *
 * The log file is opened once, before privileges and paths are given up; a line is one write, so that a rotated
 * file (copied and truncated) is no trouble. */
#include "fs/log.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

#include "core/base/log.h"

static int log_fd = -1;

static void to_file(enum base_log_level level, const char *text)
{
	static const char *const names[] = { "error", "warning", "info", "debug" };
	char line[4096 + 100], stamp[32] = "";
	time_t now = time(NULL);
	struct tm tm;

	if (gmtime_r(&now, &tm))
		strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &tm);
	int n = snprintf(line, sizeof line, "%s mount.vckpt[%d] %s: %s\n", stamp, (int)getpid(), names[level], text);
	if (n > 0 && write(log_fd, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1) < 0)
		return;  /* nowhere to report it */
}

static void to_syslog(enum base_log_level level, const char *text)
{
	static const int levels[] = { LOG_ERR, LOG_WARNING, LOG_INFO, LOG_DEBUG };

	syslog(levels[level], "%s", text);
}

int fs_log_open(const struct fs_options *o, struct base_error *err)
{
	base_log_set_program("mount.vckpt");
	base_log_set_level(o->debug ? BASE_LOG_DEBUG : o->verbose ? BASE_LOG_INFO : BASE_LOG_WARNING);
	if (!o->log)
		return 0;
	log_fd = open(o->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0640);
	if (log_fd < 0)
		return base_error_set(err, -errno, "the log file %s cannot be opened: %s", o->log, strerror(errno));
	if (o->foreground)
		base_log_set_sink(to_file);
	return 0;
}

void fs_log_detach(const struct fs_options *o)
{
	if (!o->log)
		openlog("mount.vckpt", LOG_PID | LOG_NDELAY, LOG_DAEMON);
	base_log_set_sink(o->log ? to_file : to_syslog);
}
