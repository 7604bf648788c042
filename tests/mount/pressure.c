/* SPDX-License-Identifier: Apache-2.0
 *
 * pressure: a library for LD_PRELOAD that lets memory be short, for whoever asks the kernel for that (POLLPRI), as long
 * as there is a file VCKPT_PRESSURE. */
#include <dlfcn.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

int poll(struct pollfd *fds, nfds_t n, int timeout)
{
	static int (*real)(struct pollfd *, nfds_t, int);
	const char *path = getenv("VCKPT_PRESSURE");

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "poll");
	for (nfds_t i = 0; i < n; i++) {
		if (fds[i].events != POLLPRI || fds[i].fd < 0 || timeout >= 0)
			continue;
		for (;;) {
			int r = real(fds, n, 20);

			if (r != 0 || access(path, F_OK) == 0) {
				fds[i].revents |= r ? 0 : POLLPRI;
				return r ? r : 1;
			}
		}
	}
	return real(fds, n, timeout);
}
