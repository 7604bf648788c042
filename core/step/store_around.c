/* SPDX-License-Identifier: Apache-2.0
 *
 * store_around: which store a path is in. The path need not exist: its names are followed one by one, as they will be
 * once the missing directories are made, so "new/../x" is x, whether `new` is there or not. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/step/store.h"

static bool has_identity(const char *dir)
{
	char file[PATH_MAX + 16];

	snprintf(file, sizeof file, "%s/" STORE_FILE, dir);
	return access(file, F_OK) == 0;
}

/* `full` has no links and no end slash, but for "/". */
static void path_up(char *full)
{
	char *slash = strrchr(full, '/');

	slash[slash == full] = 0;
}

/* false: the path is too long */
static bool path_down(char full[static PATH_MAX], const char *name, size_t len)
{
	char more[PATH_MAX];

	if (len == 0 || (len == 1 && name[0] == '.'))
		return true;
	if (len == 2 && memcmp(name, "..", 2) == 0) {
		path_up(full);
		return true;
	}
	if (snprintf(more, sizeof more, "%s%s%.*s", full, full[1] ? "/" : "", (int)len, name) >= (int)sizeof more)
		return false;
	if (!realpath(more, full))
		strcpy(full, more); /* it is not there yet */
	return true;
}

char *store_around(const char *path)
{
	char full[PATH_MAX] = "/";

	if (path[0] != '/' && !getcwd(full, sizeof full))
		return NULL;
	for (size_t len; *path; path += len + (path[len] == '/')) {
		len = strcspn(path, "/");
		if (!path_down(full, path, len))
			return NULL;
	}
	while (!has_identity(full)) {
		if (!full[1])
			return NULL;
		path_up(full);
	}
	return strdup(full);
}
