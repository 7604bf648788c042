/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_replace: a file that takes the place of another one: mended files, and notes of damage. It is written
 * and fsynced beside the name as `<name>.tmp.<16 hex>`, then renamed over it, then the directory is fsynced. So the
 * name is that of the old file or of the new one, each whole, at whatever moment the writer is killed; a killed writer
 * leaves at most a temporary, which the collector deletes. A process that has the old file open keeps it.
 *
 * A file that has a name already can take the place, too, and gets a further name: linked beside the name, and renamed
 * over it. If both names are already of one file, rename(2) does nothing and leaves both.
 *
 * A file that is taken (a pack that no one needs) leaves its name before a byte of it is changed: of two processes that
 * want it one gets it, and no name ever has a half-changed file. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/cleanup.h"
#include "core/base/digest.h"
#include "core/storage/storage_posix_internal.h"

int posix_temp_name(int dir, struct posix_temp *t, const char *last)
{
	char path[64];

	snprintf(path, sizeof path, "/proc/self/fd/%d", t->fd);
	while (t->name[0] == '\0') {
		int r = posix_random_name(last, t->name);

		if (r < 0)
			return r;
		if (linkat(AT_FDCWD, path, dir, t->name, AT_SYMLINK_FOLLOW) < 0) {
			t->name[0] = '\0';
			if (errno != EEXIST)
				return -errno;
		}
	}
	return 0;
}

int posix_temp_replace(int dir, struct posix_temp *t, const char *last)
{
	if (renameat(dir, t->name, dir, last) < 0)
		return -errno;
	t->name[0] = '\0';
	return 0;
}

int posix_replace(struct storage *s, const char *name, const void *bytes, size_t len)
{
	struct posix_storage *p = posix_of(s);
	struct posix_temp t;
	const char *last;
	base_cleanup_close int dir = -1;
	int r;

	if (p->flags & STORAGE_READ_ONLY)
		return -EROFS;
	if (!storage_name_valid(name) || storage_name_temporary(name))
		return -EINVAL;
	dir = posix_open_parent(p, name, POSIX_DURABLE, &last);
	if (dir < 0)
		return posix_denied(p, name, dir);
	r = posix_temp_open(p, dir, last, &t);
	if (r < 0)
		return posix_denied(p, name, r);
	r = posix_write_at(t.fd, 0, bytes, len);
	if (r == 0)
		r = posix_sync(t.fd);
	if (r == 0)
		r = posix_temp_name(dir, &t, last);
	if (r == 0)
		r = posix_temp_replace(dir, &t, last);
	posix_temp_drop(dir, &t);
	return r < 0 ? posix_denied(p, name, r) : posix_sync_names(p, dir);
}

/* The parent directories of a file and of the name that it gets. */
struct parents { int of, name; const char *of_last, *name_last; };

static void parents_close(struct parents *d)
{
	if (d->of >= 0)
		close(d->of);
	if (d->name >= 0)
		close(d->name);
}

/* make: of the name's. */
static int parents_open(struct posix_storage *p, const char *of, const char *name, enum posix_make make,
	struct parents *d)
{
	if (p->flags & STORAGE_READ_ONLY)
		return -EROFS;
	if (!storage_name_valid(name) || storage_name_temporary(name) || !storage_name_valid(of))
		return -EINVAL;
	d->of = posix_open_parent(p, of, POSIX_FIND, &d->of_last);
	if (d->of < 0)
		return posix_denied(p, of, d->of);
	d->name = posix_open_parent(p, name, make, &d->name_last);
	return d->name < 0 ? posix_denied(p, name, d->name) : 0;
}

int posix_replace_by_name(struct storage *s, const char *name, const char *of)
{
	struct posix_storage *p = posix_of(s);
	base_cleanup(parents_close) struct parents d = {-1, -1, NULL, NULL};
	char temp[POSIX_TEMP_NAME_MAX];
	int r = parents_open(p, of, name, POSIX_FIND, &d);

	if (r < 0)
		return r;
	r = posix_random_name(d.name_last, temp);
	if (r == 0 && linkat(d.of, d.of_last, d.name, temp, 0) < 0)
		r = errno == ENOSYS ? -EOPNOTSUPP : -errno;
	if (r < 0)
		return posix_denied(p, name, r);
	if (renameat(d.name, temp, d.name, d.name_last) < 0)
		r = -errno;
	unlinkat(d.name, temp, 0);
	return posix_denied(p, name, r);
}

/* -EPERM: it is another user's, or has a second name, which a backup of hard links (cp -l) may have given it. */
static int take_check(const struct stat *st)
{
	return S_ISREG(st->st_mode) && st->st_nlink == 1 && st->st_uid == geteuid() ? 0 : -EPERM;
}

/* Into the temporary, which then has the only name: one that it was given while it was looked at is seen now. */
static int take_out(const struct parents *d, struct posix_temp *t)
{
	struct stat st;
	int r;

	if (fstatat(d->of, d->of_last, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	r = take_check(&st);
	if (r == 0)
		r = posix_random_name(d->name_last, t->name);
	if (r == 0 && renameat(d->of, d->of_last, d->name, t->name) < 0) {
		r = -errno;
		t->name[0] = '\0';
	}
	if (r == 0)
		t->fd = openat(d->name, t->name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
	if (r < 0)
		return r;
	return t->fd < 0 || fstat(t->fd, &st) < 0 ? -errno : take_check(&st);
}

int posix_take(struct storage *s, const char *name, const char *of, const void *bytes, size_t len)
{
	struct posix_storage *p = posix_of(s);
	base_cleanup(parents_close) struct parents d = {-1, -1, NULL, NULL};
	struct posix_temp t = {.fd = -1};
	int r = parents_open(p, of, name, POSIX_DURABLE, &d);

	if (r < 0)
		return r;
	r = take_out(&d, &t);
	if (r == 0)
		r = posix_write_at(t.fd, 0, bytes, len);
	if (r == 0)
		r = posix_sync(t.fd);
	if (r == 0)
		r = posix_temp_publish(p, d.name, &t, d.name_last);
	posix_temp_drop(d.name, &t);
	return r < 0 ? r : posix_sync_names(p, d.name);
}
