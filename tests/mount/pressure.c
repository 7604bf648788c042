/* SPDX-License-Identifier: Apache-2.0
 *
 * pressure: a library for LD_PRELOAD that takes the kernel's place where it tells that memory is short (POLLPRI). It is
 * short as long as there is a file VCKPT_PRESSURE, and at no other time, whatever other programs of the machine do. */
#include <dlfcn.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FDS_MAX = 8 };

int poll(struct pollfd *fds, nfds_t n, int timeout)
{
	static int (*real)(struct pollfd *, nfds_t, int);
	const char *path = getenv("VCKPT_PRESSURE");
	struct pollfd others[FDS_MAX];
	int told = -1, r = 0;

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "poll");
	for (nfds_t i = 0; i < n && i < FDS_MAX; i++) {
		others[i] = fds[i];
		if (fds[i].events == POLLPRI) {
			told = fds[i].fd >= 0 ? (int)i : told;
			others[i].fd = -1;
		}
	}
	if (!path || told < 0 || timeout >= 0 || n > FDS_MAX)
		return real(fds, n, timeout);
	while (r == 0) {
		r = real(others, n, 20);
		if (r == 0 && access(path, F_OK) == 0)
			break;
	}
	for (nfds_t i = 0; i < n; i++)
		fds[i].revents = r > 0 ? others[i].revents : 0;
	if (r == 0)
		fds[told].revents = POLLPRI;
	return r ? r : 1;
}
