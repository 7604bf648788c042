/* SPDX-License-Identifier: Apache-2.0
 *
 * The log file is opened once, before privileges and paths are given up. A line is one write, so a rotation that copies
 * and truncates the file does no harm. */
#include "fs/log.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

#include "core/base/log.h"

static int log_fd = -1;
static pid_t command; /* in the foreground: what the user started */

static void to_file(enum base_log_level level, const char *text)
{
	static const char *const names[] = {"error", "warning", "info", "debug"};
	char line[4096 + 100], stamp[32] = "";
	time_t now = time(NULL);
	struct tm tm;
	int n;

	if (gmtime_r(&now, &tm))
		strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &tm);
	n = snprintf(line, sizeof line, "%s mount.vckpt[%d] %s: %s\n", stamp, (int)getpid(), names[level], text);
	if (n > 0 && write(log_fd, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1) < 0)
		return;  /* nowhere to report it */
}

/* In the foreground: an error that ends the command also goes to standard error. The server reports its own to the
 * keeper. */
static void to_file_and_user(enum base_log_level level, const char *text)
{
	to_file(level, text);
	if (level == BASE_LOG_ERROR && getpid() == command)
		base_log_to_stderr(level, text);
}

static void to_syslog(enum base_log_level level, const char *text)
{
	static const int levels[] = {LOG_ERR, LOG_WARNING, LOG_INFO, LOG_DEBUG};

	syslog(levels[level], "%s", text);
}

static bool is_fifo(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && S_ISFIFO(st.st_mode);
}

/* Opening a pipe without a reader would block the mount until it has one. */
static int file_open(const char *path, struct base_error *err)
{
	log_fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0640);
	if (log_fd < 0 && errno == ENXIO && is_fifo(path))
		return base_error_set(err, -ENXIO, "the log file %s is a named pipe without a reader: start its "
			"reader first, or give a regular file", path);
	if (log_fd < 0 || fcntl(log_fd, F_SETFL, O_APPEND) < 0)
		return base_error_set(err, -errno, "the log file %s cannot be opened: %s", path, strerror(errno));
	return 0;
}

int fs_log_open(const struct fs_options *o, struct base_error *err)
{
	int r;

	base_log_set_program("mount.vckpt");
	base_log_set_level(o->debug ? BASE_LOG_DEBUG : o->verbose ? BASE_LOG_INFO : BASE_LOG_WARNING);
	if (!o->log)
		return 0;
	r = file_open(o->log, err);
	if (r == 0 && o->foreground) {
		command = getpid();
		base_log_set_sink(to_file_and_user);
	}
	return r;
}

void fs_log_detach(const struct fs_options *o)
{
	if (!o->log)
		openlog("mount.vckpt", LOG_PID | LOG_NDELAY, LOG_DAEMON);
	base_log_set_sink(o->log ? to_file : to_syslog);
}
