/* SPDX-License-Identifier: Apache-2.0 */
#include "core/storage/mount.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

int storage_posix_mount(const char *path, char *ret_mount, size_t size)
{
	struct stat st, above;
	char *slash;

	if (snprintf(ret_mount, size, "%s", path) >= (int)size)
		return -ENAMETOOLONG;
	if (stat(path, &st) < 0)
		return -errno;
	while ((slash = strrchr(ret_mount, '/')) && ret_mount[1]) {
		char *end = slash == ret_mount ? slash + 1 : slash, kept = *end;

		*end = 0;
		if (stat(ret_mount, &above) == 0 && above.st_dev == st.st_dev)
			continue;
		*end = kept;
		break;
	}
	return 0;
}
