/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_list: listings. Everything is listed: unfinished files are marked temporary, and what no vckpt makes
 * (links, devices, names outside the rule, directories too deep) is marked foreign and not entered. What vanishes while
 * the listing goes on is left out. The callback may remove what it is shown. */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/cleanup.h"
#include "core/store/storage_posix_internal.h"

enum { LIST_DEPTH_MAX = 16 };

struct listing {
	store_storage_list_func f;
	void *arg;
	bool dirs;                        /* immediate sub-directories instead of files */
	char name[STORE_NAME_MAX + 256 + 2]; /* of the entry at hand; a foreign one may be over the rule's length */
};

static int list_directory(struct listing *l, int fd, size_t prefix, unsigned depth);

static int list_entry(struct listing *l, int dir, const char *last, size_t prefix, unsigned depth)
{
	struct stat st;
	if (fstatat(dir, last, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT ? 0 : -errno;
	size_t len = strlen(last);
	memcpy(l->name + prefix, last, len + 1);
	bool valid = store_name_valid(l->name);
	struct store_storage_entry entry = { .name = l->name, .size = S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0 };
	if (l->dirs) {
		if (!S_ISDIR(st.st_mode))
			return 0;
		entry.foreign = !valid;
		return l->f(l->arg, &entry);
	}
	if (S_ISDIR(st.st_mode) && valid && depth < LIST_DEPTH_MAX) {
		int fd = openat(dir, last, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (fd < 0)
			return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? 0 : -errno;
		return list_directory(l, fd, prefix + len, depth + 1);
	}
	entry.foreign = !valid || !S_ISREG(st.st_mode);
	entry.temporary = !entry.foreign && store_name_temporary(l->name);
	return l->f(l->arg, &entry);
}

/* Lists an open directory, which it closes; the first `prefix` bytes of l->name are its name. */
static int list_directory(struct listing *l, int fd, size_t prefix, unsigned depth)
{
	DIR *d = fdopendir(fd);
	if (!d) {
		int r = -errno;
		close(fd);
		return r;
	}
	if (prefix > 0)
		l->name[prefix++] = '/';
	int r = 0;
	while (r == 0) {
		errno = 0;
		struct dirent *e = readdir(d);
		if (!e) {
			r = errno == ENOENT ? 0 : -errno;
			break;
		}
		if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
			continue;
		r = list_entry(l, dirfd(d), e->d_name, prefix, depth);
	}
	closedir(d);
	return r;
}

static int list_any(struct store_storage *s, const char *dir, store_storage_list_func f, void *arg, bool dirs)
{
	int fd = posix_open_beneath(posix_of(s), dir, O_RDONLY | O_DIRECTORY);
	if (fd < 0)
		return fd == -ENOENT ? 0 : fd;
	struct listing l = { .f = f, .arg = arg, .dirs = dirs };
	size_t prefix = strlen(dir); /* below STORE_NAME_MAX: it was opened */
	memcpy(l.name, dir, prefix + 1);
	return list_directory(&l, fd, prefix, 0);
}

int posix_list(struct store_storage *s, const char *dir, store_storage_list_func f, void *arg)
{
	return list_any(s, dir, f, arg, false);
}

int posix_list_dirs(struct store_storage *s, const char *dir, store_storage_list_func f, void *arg)
{
	return list_any(s, dir, f, arg, true);
}
