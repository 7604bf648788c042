/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/standard.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>

#include "core/base/le.h"

void base_standard_open(void)
{
	static const int modes[] = {O_WRONLY, O_RDONLY, O_RDONLY};

	for (int fd = 0; fd < (int)BASE_COUNT(modes); fd++)
		if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", modes[fd]) < 0)
			return; /* no /dev/null: it is as it was */
}

void base_descriptors_allow(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur >= limit.rlim_max)
		return;
	limit.rlim_cur = limit.rlim_max;
	(void)setrlimit(RLIMIT_NOFILE, &limit); /* else it stays as it was */
}
