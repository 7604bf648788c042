/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_modes: modes and group of the files and directories that this process makes. The store's directory
 * decides; it is looked at once, when it is opened.
 *
 *   its group may not write in it   files 0644, directories 0755, less the umask
 *   its group may                   its group and its permission bits (those to execute for directories alone);
 *                                   directories have its setgid and sticky bits, too; the umask counts for nothing
 *   it has an ACL                   as in the first line: the bits of its group are a mask then, and say nothing of
 *                                   what its group may do
 *
 * A file gets its mode before it gets its name. A directory is made in the store's directory under another name, and is
 * moved to its place once it has its mode: every process that finds it can work in it, also after its maker was killed.
 * A killed maker leaves at most an empty directory, which the collector removes.
 *
 * Where the file system has no such modes, or the user is not in the group, files keep the mode that they have, and the
 * store is written all the same. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "core/base/cleanup.h"
#include "core/storage/storage_posix_internal.h"

static bool has_acl(int fd)
{
	return fgetxattr(fd, "system.posix_acl_access", NULL, 0) > 0;
}

int posix_modes_read(struct posix_storage *p)
{
	struct stat st;

	p->modes = (struct posix_modes){.file = 0644, .dir = 0755};
	if (p->flags & STORAGE_READ_ONLY)
		return 0;
	if (TEMP_FAILURE_RETRY(fstat(p->root, &st)) < 0)
		return -errno;
	if (st.st_mode & S_IWGRP && !has_acl(p->root))
		p->modes = (struct posix_modes){.given = true, .group = st.st_gid, .file = st.st_mode & 0666,
			.dir = st.st_mode & (0777 | S_ISGID | S_ISVTX)};
	return 0;
}

/* It is an error only if the storage fails or is full. */
static int modes_refused(void)
{
	return errno == EIO || errno == EROFS || errno == ENOSPC || errno == EDQUOT ? -errno : 0;
}

int posix_modes_give(const struct posix_storage *p, int fd, mode_t mode)
{
	struct stat st;
	int r = 0;

	if (!p->modes.given)
		return 0;
	if (TEMP_FAILURE_RETRY(fstat(fd, &st)) < 0)
		return -errno;
	/* the group first: a change of group may clear the setgid bit */
	if (st.st_gid != p->modes.group && fchown(fd, (uid_t)-1, p->modes.group) < 0)
		r = modes_refused();
	if (r == 0 && (st.st_mode & 07777) != mode && fchmod(fd, mode) < 0)
		r = modes_refused();
	return r;
}

bool posix_directory_unplaced(const char *name)
{
	return strncmp(name, POSIX_DIRECTORY ".tmp.", sizeof POSIX_DIRECTORY ".tmp." - 1) == 0 &&
		storage_name_temporary(name);
}

/* -EEXIST: another process has put a directory under the name, whose mode must not be changed. */
static int directory_give(const struct posix_storage *p, int at, const char *name)
{
	base_cleanup_close int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	int r = fd < 0 ? -errno : posix_directory_empty(fd);

	return r == -ENOTEMPTY ? -EEXIST : r < 0 ? r : posix_modes_give(p, fd, p->modes.dir);
}

/* -EOPNOTSUPP: it cannot be made elsewhere. */
static int directory_move_in(struct posix_storage *p, int at, const char *part)
{
	char name[POSIX_TEMP_NAME_MAX];
	int r = posix_random_name(POSIX_DIRECTORY, name);

	if (r < 0)
		return r;
	if (mkdirat(p->root, name, p->modes.dir & 0777) < 0)
		return -EOPNOTSUPP;
	r = directory_give(p, p->root, name);
	if (r == 0 && renameat2(p->root, name, at, part, RENAME_NOREPLACE) == 0)
		return 0;
	if (r == 0)
		r = errno == EEXIST ? -EEXIST : -EOPNOTSUPP;
	unlinkat(p->root, name, AT_REMOVEDIR);
	return r;
}

int posix_directory_make(struct posix_storage *p, int at, const char *part)
{
	int r = p->modes.given ? directory_move_in(p, at, part) : -EOPNOTSUPP;

	if (r != -EOPNOTSUPP)
		return r;
	if (mkdirat(at, part, p->modes.dir & 0777) < 0)
		return -errno;
	return p->modes.given ? directory_give(p, at, part) : 0;
}
