/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/vckpt/tool.h"

int tool_file_put(const char *path, const char *bytes, size_t len, struct base_error *err)
{
	base_cleanup_free char *true_path = realpath(path, NULL); /* a link stays one */
	const char *name = true_path ? true_path : path;
	base_cleanup_free char *temporary = tool_string("%s.XXXXXX", name);
	base_cleanup_close int fd = -1;
	struct stat st;
	bool there = stat(name, &st) == 0, direct = there && !S_ISREG(st.st_mode);
	mode_t mask = umask(0);
	sigset_t all, before;
	int r;

	umask(mask);
	if (!temporary)
		return base_no_memory(err);
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, direct ? NULL : &all, &before); /* no signal leaves the temporary behind */
	fd = direct ? open(name, O_WRONLY | O_CLOEXEC) : mkostemp(temporary, O_CLOEXEC);
	r = fd < 0 ? base_error_set(err, -errno, "%s: %s", path, strerror(errno))
		: tool_write(fd, path, bytes, len, err);
	if (r == 0 && !direct && (fchmod(fd, there ? st.st_mode & 07777 : 0666 & ~mask) < 0 || fsync(fd) < 0 ||
			rename(temporary, name) < 0))
		r = base_error_set(err, -errno, "%s: %s", path, strerror(errno));
	if (r < 0 && fd >= 0 && !direct)
		unlink(temporary);
	sigprocmask(SIG_SETMASK, &before, NULL);
	return r;
}
