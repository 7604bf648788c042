/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_denied: remembers the directory in which an access was refused last, or that turned out to be no
 * directory. The errno that a caller gets does not name it; the sentence that the user reads has to. */
#include <stdio.h>
#include <string.h>

#include "core/storage/storage_posix_internal.h"

int posix_denied_in(struct posix_storage *p, const char *dir, size_t len, int r)
{
	if ((r != -EACCES && r != -EPERM && r != -ENOTDIR) || len >= sizeof p->denied)
		return r;
	pthread_mutex_lock(&p->lock);
	memcpy(p->denied, dir, len);
	p->denied[len] = '\0';
	p->was_denied = true;
	pthread_mutex_unlock(&p->lock);
	return r;
}

int posix_denied(struct posix_storage *p, const char *name, int r)
{
	const char *slash = strrchr(name, '/');

	return posix_denied_in(p, name, slash ? (size_t)(slash - name) : 0, r);
}

int posix_denied_where(struct storage *s, char dir[static STORAGE_NAME_MAX], struct storage_owner *ret_owner)
{
	struct posix_storage *p = posix_of(s);
	bool was;

	pthread_mutex_lock(&p->lock);
	was = p->was_denied;
	memcpy(dir, p->denied, sizeof p->denied);
	pthread_mutex_unlock(&p->lock);
	if (!was)
		return -ENOENT;
	/* the one above, if it is missing or cannot be looked at */
	while (dir[0] != '\0' && posix_owner(s, dir, ret_owner) < 0) {
		char *slash = strrchr(dir, '/');

		*(slash ? slash : dir) = '\0';
	}
	return dir[0] != '\0' ? 0 : posix_owner(s, dir, ret_owner);
}
