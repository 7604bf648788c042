/* SPDX-License-Identifier: Apache-2.0
 *
 * Links in a SOURCE that is a directory. The directory's maker chose where they lead, so what they lead to is read only
 * where it is inside, or where --follow asks for it. Inside is
 *
 *   the directory itself, its own links followed, because the user named it
 *   models--*, for a snapshot of it in a cache of Hugging Face: its files are links to those below blobs/, beside it
 *
 * A chain of links counts by its end. A file is opened by the path that was checked, which has no links: if a part
 * of it becomes a link meanwhile, it is not opened. */
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tools/vckpt/import/import.h"

/* The length of the part of `real` that names a repository of a cache whose snapshot it is, or is in; 0: there is none.
 */
static size_t repository(const char *real)
{
	static const char *const kinds[] = {"/models--", "/datasets--", "/spaces--"};

	for (const char *at = real; (at = strstr(at, "/snapshots/")); at++)
		for (size_t i = 0; i < BASE_COUNT(kinds); i++) {
			const char *from = memrchr(real, '/', (size_t)(at - real));

			if (from && !strncmp(from, kinds[i], strlen(kinds[i])))
				return (size_t)(at - real);
		}
	return 0;
}

int import_links_bound(const char *directory, char **ret_bound, struct base_error *err)
{
	char *real = realpath(directory, NULL);
	size_t len;

	if (!real)
		return base_error_set(err, -errno, "%s: %s", directory, strerror(errno));
	len = repository(real);
	if (len)
		real[len] = 0;
	*ret_bound = real;
	return 0;
}

static bool is_inside(const char *bound, const char *real)
{
	size_t len = strlen(bound);

	return !strncmp(bound, real, len) && (real[len] == '/' || len == 1);
}

/* No part of the path is a link. */
static int open_real(const char *real)
{
	struct open_how how = {.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK, .resolve = RESOLVE_NO_SYMLINKS};
	long fd = syscall(SYS_openat2, AT_FDCWD, real, &how, sizeof how);

	/* an old kernel, or a container that does not know the call */
	if (fd < 0 && (errno == ENOSYS || errno == EPERM))
		fd = open(real, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
	return fd < 0 ? -errno : (int)fd;
}

int import_links_open(const char *bound, const char *path, struct base_error *err)
{
	base_cleanup_free char *real = realpath(path, NULL);
	int fd;

	if (!real)
		return base_error_set(err, -errno, "%s: %s", path, strerror(errno));
	if (!is_inside(bound, real))
		return base_error_set(err, -EINVAL,
			"%s: it is a link, or is behind one, that leads out of the directory, to %s: nothing outside "
			"of %s is read for it; --follow imports what such links lead to", path, real, bound);
	fd = open_real(real);
	if (fd == -ELOOP)
		return base_error_set(err, fd, "%s: it became a link while it was opened", path);
	return fd < 0 ? base_error_set(err, fd, "%s: %s", path, strerror(-fd)) : fd;
}
