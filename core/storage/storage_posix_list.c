/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_list: listings. Everything is listed: unfinished files are marked temporary; links, devices, names
 * outside the rule and directories too deep, which no vckpt makes, are marked foreign and not entered. A file that
 * vanishes during the listing is left out; any other error ends the listing, so that one that succeeds is whole. The
 * callback may remove what it is shown. */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/cleanup.h"
#include "core/storage/storage_posix_internal.h"

enum { LIST_DEPTH_MAX = 16 };

struct listing {
	struct posix_storage *storage;
	storage_list_func f;
	void *arg;
	bool dirs;                        /* immediate sub-directories instead of files */
	char name[STORAGE_NAME_MAX + 256 + 2]; /* of the entry at hand; a foreign one may be over the rule's length */
};

struct list_page { _Alignas(struct dirent64) char bytes[32 << 10]; };

static int list_directory(struct listing *l, int fd, size_t prefix, unsigned depth);

static int list_open(struct listing *l, int dir, const char *last)
{
	const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
	int fd = openat(dir, last, flags);

	return fd < 0 && posix_relieved(l->storage, -errno) ? openat(dir, last, flags) : fd;
}

/* type: as the directory says. A listing of files asks for sizes anyway. */
static int list_entry(struct listing *l, int dir, const char *last, unsigned type, size_t prefix, unsigned depth)
{
	struct stat st = {.st_mode = DTTOIF(type)};
	size_t len;
	bool valid;
	struct storage_entry entry;

	if ((!l->dirs || type == DT_UNKNOWN) && TEMP_FAILURE_RETRY(fstatat(dir, last, &st, AT_SYMLINK_NOFOLLOW)) < 0)
		return errno == ENOENT ? 0 : -errno;
	len = strlen(last);
	memcpy(l->name + prefix, last, len + 1);
	valid = storage_name_valid(l->name);
	entry = (struct storage_entry){.name = l->name, .size = S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0,
		.names = st.st_nlink, .device = st.st_dev, .number = st.st_ino};
	if (l->dirs) {
		entry.foreign = !valid || !S_ISDIR(st.st_mode);
		entry.temporary = !entry.foreign && posix_directory_unplaced(l->name);
		return l->f(l->arg, &entry);
	}
	if (S_ISDIR(st.st_mode) && posix_directory_unplaced(l->name))
		return 0; /* empty; it may not have its mode yet */
	if (S_ISDIR(st.st_mode) && valid && depth < LIST_DEPTH_MAX) {
		int fd = list_open(l, dir, last);
		if (fd < 0 && errno != ENOENT && errno != ENOTDIR && errno != ELOOP)
			return posix_denied_in(l->storage, l->name, prefix + len, -errno);
		if (fd < 0)
			return 0;
		return list_directory(l, fd, prefix + len, depth + 1);
	}
	entry.foreign = !valid || !S_ISREG(st.st_mode);
	entry.temporary = !entry.foreign && storage_name_temporary(l->name);
	return l->f(l->arg, &entry);
}

/* Reads the next entries of an open directory: returns their bytes, 0 at its end. A directory that was removed has no
 * entries. -ENOENT from one that still exists is a fault of the storage, which readdir(3) would take for the end; but a
 * caller that deletes what a listing does not show must never get half of a listing. */
static ssize_t read_entries(int fd, struct list_page *page)
{
	struct stat st;
	ssize_t n;

	do
		n = getdents64(fd, page->bytes, sizeof page->bytes);
	while (n < 0 && errno == EINTR);
	if (n >= 0)
		return n;
	if (errno != ENOENT)
		return -errno;
	return fstat(fd, &st) == 0 && st.st_nlink == 0 ? 0 : -EIO;
}

bool posix_name_passed(const char *name, bool root)
{
	return !strcmp(name, ".") || !strcmp(name, "..") || (root && !strcmp(name, "lost+found"));
}

static int list_page(struct listing *l, int fd, const struct list_page *page, size_t len, size_t prefix, unsigned depth)
{
	int r = 0;

	for (size_t at = 0; r == 0 && at < len;) {
		const struct dirent64 *e = (const void *)(page->bytes + at);

		at += e->d_reclen;
		if (!posix_name_passed(e->d_name, prefix == 0))
			r = list_entry(l, fd, e->d_name, e->d_type, prefix, depth);
	}
	return r;
}

/* Lists an open directory, which it closes; the first `prefix` bytes of l->name are its name. */
static int list_directory(struct listing *l, int fd, size_t prefix, unsigned depth)
{
	base_cleanup_close int closes = fd;
	base_cleanup_free struct list_page *page = malloc(sizeof *page);
	ssize_t n = page ? 1 : -ENOMEM;
	int r = 0;

	if (prefix > 0)
		l->name[prefix++] = '/';
	while (r == 0 && n > 0) {
		n = read_entries(fd, page);
		if (n > 0)
			r = list_page(l, fd, page, (size_t)n, prefix, depth);
	}
	return r == 0 && n < 0 ? (int)n : r;
}

static int list_any(struct storage *s, const char *dir, storage_list_func f, void *arg, bool dirs)
{
	int fd = posix_open_beneath(posix_of(s), dir, O_RDONLY | O_DIRECTORY);
	struct listing l;
	size_t prefix;

	if (fd < 0)
		return fd == -ENOENT ? 0 : posix_denied_in(posix_of(s), dir, strlen(dir), fd);
	l = (struct listing){.storage = posix_of(s), .f = f, .arg = arg, .dirs = dirs};
	prefix = strlen(dir); /* below STORAGE_NAME_MAX: it was opened */
	memcpy(l.name, dir, prefix + 1);
	return list_directory(&l, fd, prefix, 0);
}

int posix_list(struct storage *s, const char *dir, storage_list_func f, void *arg)
{
	return list_any(s, dir, f, arg, false);
}

int posix_list_dirs(struct storage *s, const char *dir, storage_list_func f, void *arg)
{
	return list_any(s, dir, f, arg, true);
}
