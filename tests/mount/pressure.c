/* SPDX-License-Identifier: Apache-2.0
 *
 * pressure: a library for LD_PRELOAD that takes the kernel's place where it tells that memory is short (POLLPRI). It is
 * short as long as there is a file VCKPT_PRESSURE, and at no other time, whatever other programs of the machine do: on
 * the machine, or if the file is not empty in the control group (the first descriptor of such a poll, and the last). If
 * there is a file of that name with .meminfo behind it, it is read instead of /proc/meminfo. With .huge behind it: the
 * kernel has no huge pages at hand; it takes long to make the first ones, and the others are made once the file is
 * gone. */
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FDS_MAX = 8, COLLAPSE = 25, COLLAPSE_NS = 500000000 };

static void spend_ns(long ns)
{
	struct timespec t;

	do
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	while (t.tv_sec == 0 && t.tv_nsec < ns);
}

int madvise(void *at, size_t len, int advice)
{
	static int (*real)(void *, size_t, int);
	static _Atomic int calls;
	const char *pressure = getenv("VCKPT_PRESSURE");
	char huge[4096];

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "madvise");
	snprintf(huge, sizeof huge, "%s.huge", pressure ? pressure : "");
	if (advice == COLLAPSE && pressure && access(huge, F_OK) == 0) {
		if (calls++ == 0)
			spend_ns(COLLAPSE_NS);
		else
			while (access(huge, F_OK) == 0)
				usleep(10000);
	}
	return real(at, len, advice);
}

int open64(const char *path, int flags, ...)
{
	static int (*real)(const char *, int, ...);
	const char *pressure = getenv("VCKPT_PRESSURE");
	char other[4096];
	va_list more;
	int mode;

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "open64");
	va_start(more, flags);
	mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
	va_end(more);
	if (pressure && strcmp(path, "/proc/meminfo") == 0) {
		snprintf(other, sizeof other, "%s.meminfo", pressure);
		if (access(other, F_OK) == 0)
			path = other;
	}
	return real(path, flags, mode);
}

int poll(struct pollfd *fds, nfds_t n, int timeout)
{
	static int (*real)(struct pollfd *, nfds_t, int);
	const char *path = getenv("VCKPT_PRESSURE");
	struct pollfd others[FDS_MAX];
	int machine = -1, group = -1, r = 0;
	struct stat st = {0};

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "poll");
	for (nfds_t i = 0; i < n && i < FDS_MAX; i++) {
		others[i] = fds[i];
		if (fds[i].events == POLLPRI) {
			group = fds[i].fd >= 0 ? (int)i : group;
			machine = machine < 0 ? group : machine;
			others[i].fd = -1;
		}
	}
	if (!path || group < 0 || timeout >= 0 || n > FDS_MAX)
		return real(fds, n, timeout);
	while (r == 0) {
		r = real(others, n, 20);
		if (r == 0 && stat(path, &st) == 0)
			break;
	}
	for (nfds_t i = 0; i < n; i++)
		fds[i].revents = r > 0 ? others[i].revents : 0;
	if (r == 0)
		fds[st.st_size ? group : machine].revents = POLLPRI;
	return r ? r : 1;
}
