/* SPDX-License-Identifier: Apache-2.0
 *
 * Two directories overlap when one is the other or is inside it. It takes three checks, since each misses something:
 * the names (after links are resolved); device and inode of every parent, which finds a bind mount of the store or of a
 * directory above it; and the name within the filesystem, from mountinfo (root of the mount, rest of the name), which
 * finds a bind mount of a directory inside the store. A mount over its own store would wait for itself. */
#include "fs/mountpoint.h"

#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include "core/base/cleanup.h"
#include "core/base/log.h"
#include "core/step/store.h"

extern char **environ;

/* 13 KiB, on the stack of a process that has one thread. */
struct mount_line { char device[32], root[PATH_MAX], point[PATH_MAX], type[64], source[PATH_MAX]; };

static void unescape_octal(char *s)
{
	char *d = s;

	for (; *s; s++)
		if (s[0] == '\\' && s[1] >= '0' && s[1] <= '3' && s[2] >= '0' && s[2] <= '7' &&
				s[3] >= '0' && s[3] <= '7') {
			*d++ = (char)((s[1] - '0') << 6 | (s[2] - '0') << 3 | (s[3] - '0'));
			s += 3;
		} else {
			*d++ = *s;
		}
	*d = '\0';
}

/* "ID PARENT MAJ:MIN ROOT POINT OPTIONS [TAGS] - TYPE SOURCE SUPER" */
static bool mount_line_parse(const char *line, struct mount_line *m)
{
	const char *dash = strstr(line, " - ");

	if (!dash || sscanf(line, "%*s %*s %31s %4095s %4095s", m->device, m->root, m->point) != 3 ||
			sscanf(dash + 3, "%63s %4095s", m->type, m->source) != 2)
		return false;
	unescape_octal(m->root);
	unescape_octal(m->point);
	unescape_octal(m->source);
	return true;
}

static bool path_contains(const char *outer, const char *inner)
{
	size_t n = strlen(outer);

	while (n > 1 && outer[n - 1] == '/')
		n--;
	if (n == 1 && outer[0] == '/')
		return true;
	return strncmp(outer, inner, n) == 0 && (inner[n] == '\0' || inner[n] == '/');
}

enum sought {
	SOUGHT_AROUND,          /* the mount that `path` is in: the deepest, of these the newest */
	SOUGHT_ON,              /* the newest mount exactly on `path` */
	SOUGHT_DEVICE,          /* that of `device`: on `path`, or where it was moved with a directory above it */
};

/* Is m at least as good a match as `best`, an earlier line or all zeros? */
static bool mount_better(const struct mount_line *m, enum sought what, const char *path, const char *device,
	const struct mount_line *best)
{
	switch (what) {
	case SOUGHT_AROUND:
		return path_contains(m->point, path) && strlen(m->point) >= strlen(best->point);
	case SOUGHT_ON:
		return strcmp(m->point, path) == 0;
	default:
		return strcmp(m->device, device) == 0 && (!best->point[0] || strcmp(m->point, path) == 0);
	}
}

static int mount_seek(enum sought what, const char *path, const char *device, struct mount_line *ret_m,
	struct base_error *err)
{
	base_cleanup_free char *line = NULL;
	struct mount_line m;
	size_t size = 0;
	FILE *f = fopen("/proc/self/mountinfo", "re");

	if (!f)
		return base_error_set(err, -errno, "/proc/self/mountinfo: %s", strerror(errno));
	*ret_m = (struct mount_line){0};
	while (getline(&line, &size, f) > 0)
		if (mount_line_parse(line, &m) && mount_better(&m, what, path, device, ret_m))
			*ret_m = m;
	fclose(f);
	return ret_m->point[0] != '\0';
}

/* Finds the mount that `path` is in (deepest and newest), or, if `exact`, the one on it, where autofs does not count.
 * Returns 1, or 0: none. */
static int mount_find(const char *path, bool exact, struct mount_line *ret_m, struct base_error *err)
{
	int r = mount_seek(exact ? SOUGHT_ON : SOUGHT_AROUND, path, NULL, ret_m, err);

	return exact && r > 0 && strcmp(ret_m->type, "autofs") == 0 ? 0 : r;
}

static int run_fusermount(const char *path, bool lazy)
{
	const char *argv[] = {"fusermount3", "-u", "-q", lazy ? "-z" : "--", lazy ? "--" : path, lazy ? path : NULL,
		NULL};
	pid_t pid;
	int status;

	int r = posix_spawnp(&pid, argv[0], NULL, NULL, (char *const *)argv, environ);
	if (r == ENOENT)  /* not in PATH, which libfuse did not need to mount */
		r = posix_spawn(&pid, "/usr/bin/fusermount3", NULL, NULL, (char *const *)argv, environ);
	if (r)
		return -r;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -errno;
	return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -EPERM;
}

/* `path` is a mount point without links. lazy: it vanishes at once, and ends after its last use. */
static int mountpoint_umount(const char *path, bool lazy)
{
	if (geteuid() != 0)
		return run_fusermount(path, lazy);
	return umount2(path, UMOUNT_NOFOLLOW | (lazy ? MNT_DETACH : 0)) ? -errno : 0;
}

const char *fs_mountpoint_stuck(void)
{
	if (geteuid() == 0 || access("/etc/mtab", R_OK) == 0)
		return NULL;
	return "there is no /etc/mtab, without which fusermount3 cannot unmount, also when the daemon ends; "
		"as root, once: ln -s /proc/self/mounts /etc/mtab";
}

/* Has a dead vckpt daemon left a mount on `path`? 1: yes, *ret_m; 0: no; an error, also for another daemon's mount. */
static int mountpoint_dead(const char *path, struct mount_line *ret_m, struct base_error *err)
{
	for (int i = 0; i < 16; i++) {
		struct statvfs v;
		int r = mount_find(path, true, ret_m, err);
		if (r <= 0 || strncmp(ret_m->type, "fuse", 4) != 0)
			return r < 0 ? r : 0;
		/* unlike stat this is never answered from the kernel's caches */
		if (statvfs(path, &v) == 0 || (errno != ENOTCONN && errno != ECONNABORTED))
			return 0;
		if (errno == ENOTCONN)
			break;  /* else it is just dying: the next call gives ENOTCONN */
	}
	if (strcmp(ret_m->type, "fuse.vckpt") != 0)
		return base_error_set(err, -ENOTCONN, "%s: left behind by a dead daemon that is not vckpt's (%s); "
			"unmount it first", path, ret_m->type);
	return 1;
}

/* Detaches what a dead vckpt daemon left on `path`, if anything. */
static int mountpoint_detach(const char *path, struct base_error *err)
{
	struct mount_line m;

	for (int i = 0; i < 16; i++) {  /* several may be stacked on one another */
		int r = mountpoint_dead(path, &m, err);
		if (r <= 0)
			return r;
		r = mountpoint_umount(path, true);
		if (r)
			return base_error_set(err, r, "%s: left behind by a dead vckpt daemon, and cannot be "
				"detached: %s", path, fs_mountpoint_stuck() ? fs_mountpoint_stuck() : strerror(-r));
		base_info("%s: detached what a dead daemon left behind (store %s)", path, m.source);
	}
	return base_error_set(err, -EBUSY, "%s: more dead mounts than are plausible", path);
}

/* Absolute, without links except in the last part, which is taken as it is; malloc'ed, or NULL. */
static char *resolve_above(const char *path)
{
	base_cleanup_free char *one = strdup(path), *two = strdup(path);
	base_cleanup_free char *parent = one ? realpath(dirname(one), NULL) : NULL;
	char *full = NULL;

	if (parent && two && asprintf(&full, "%s/%s", strcmp(parent, "/") ? parent : "", basename(two)) < 0)
		full = NULL;
	return full;
}

/* Makes *path absolute, without links. Of a dead mount only the last part cannot be resolved. */
static int resolve(char **path, const char *what, struct base_error *err)
{
	char *full = realpath(*path, NULL);

	if (!full && errno == ENOTCONN)
		full = resolve_above(*path);
	if (!full)
		return base_error_set(err, -errno, "%s %s: %s", what, *path, strerror(errno));
	free(*path);
	*path = full;
	return 0;
}

static int check_directory(const char *path, const char *what, struct stat *ret_st, struct base_error *err)
{
	if (stat(path, ret_st))
		return base_error_set(err, -errno, "%s %s: %s", what, path, strerror(errno));
	if (!S_ISDIR(ret_st->st_mode))
		return base_error_set(err, -ENOTDIR, "%s %s: not a directory", what, path);
	return 0;
}

/* Is `inner`, or a directory above it, the directory `outer`? (O_DIRECTORY would trigger an automount, which waits for
 * this very program.) */
static bool above(const char *inner, const struct stat *outer)
{
	base_cleanup_close int fd = open(inner, O_PATH | O_CLOEXEC);
	struct stat st, last = {0};

	while (fd >= 0 && fstat(fd, &st) == 0) {
		int up;

		if (st.st_dev == outer->st_dev && st.st_ino == outer->st_ino)
			return true;
		if (st.st_dev == last.st_dev && st.st_ino == last.st_ino)
			return false;
		last = st;
		up = openat(fd, "..", O_PATH | O_CLOEXEC);
		close(fd);
		fd = up;
	}
	return false;
}

/* Is `inner` a directory below `outer` although a bind mount hides the way up from it? Then its name within their
 * filesystem, which mountinfo gives, ends in its name below `outer`. The name of `outer` there is not needed and not
 * always known: in a chroot mountinfo lacks the mount of the root directory. (On another device `outer` may be an
 * automount that waits for this very program.) */
static bool hidden_below(const char *inner, const struct stat *inner_st, const char *outer, const struct stat *outer_st)
{
	base_cleanup_free char *place = NULL;
	struct mount_line m;
	struct stat st;

	if (inner_st->st_dev != outer_st->st_dev || mount_find(inner, false, &m, NULL) <= 0 ||
			asprintf(&place, "%s%s", strcmp(m.root, "/") ? m.root : "",
				inner + (strcmp(m.point, "/") ? strlen(m.point) : 0)) < 0)
		return false;
	for (const char *tail = place; tail && *tail; tail = strchr(tail + 1, '/')) {
		base_cleanup_free char *name = NULL;

		if (asprintf(&name, "%s%s", outer, tail) >= 0 && lstat(name, &st) == 0 &&
				st.st_dev == inner_st->st_dev && st.st_ino == inner_st->st_ino)
			return true;
	}
	return false;
}

static int overlap_refuse(const struct fs_options *o, bool in, bool out, struct base_error *err)
{
	if (in)
		return base_error_set(err, -EINVAL, "the mount point %s is inside the store %s", o->mountpoint,
			o->store);
	if (out)
		return base_error_set(err, -EINVAL, "the store %s is inside the mount point %s", o->store,
			o->mountpoint);
	return 0;
}

static int check_overlap(const struct fs_options *o, const struct stat *store, const struct stat *point,
	struct base_error *err)
{
	const char *s = o->store, *m = o->mountpoint;

	return overlap_refuse(o, path_contains(s, m) || above(m, store) || hidden_below(m, point, s, store),
		path_contains(m, s) || above(s, point) || hidden_below(s, store, m, point), err);
}

/* Both are absolute, and the mount point is not dead. */
static int check_places(const struct fs_options *o, struct base_error *err)
{
	struct mount_line m;
	struct stat store, point;
	int r = check_directory(o->store, "store", &store, err);

	if (!r)
		r = check_directory(o->mountpoint, "mount point", &point, err);
	if (!r)
		r = check_overlap(o, &store, &point, err);
	if (!r)
		r = mount_find(o->mountpoint, true, &m, err);
	if (r <= 0)
		return r;
	if (strcmp(m.type, "fuse.vckpt") == 0)
		return base_error_set(err, -EBUSY, "%s: the store %s is mounted there already; unmount it first",
			o->mountpoint, m.source);
	return base_error_set(err, -EBUSY, "%s: %s (%s) is mounted there already; take another directory",
		o->mountpoint, m.source, m.type);
}

int fs_mountpoint_check(struct fs_options *o, struct base_error *err)
{
	struct mount_line m;
	int r = store_path_check(o->store, err);

	if (!r)
		r = resolve(&o->store, "store", err);
	if (!r)
		r = resolve(&o->mountpoint, "mount point", err);
	if (!r)
		r = mountpoint_dead(o->mountpoint, &m, err);
	o->takes_over = r == 1;
	if (o->takes_over) /* by name alone: a dead mount hides the directory */
		return overlap_refuse(o, path_contains(o->store, o->mountpoint),
			path_contains(o->mountpoint, o->store), err);
	return r ? r : check_places(o, err);
}

int fs_mountpoint_take_over(const struct fs_options *o, struct base_error *err)
{
	int r = mountpoint_detach(o->mountpoint, err);

	return r ? r : check_places(o, err);
}

/* Finds what is mounted on `path`; *ret_full: its mount point (malloc'ed). It sends no request to a daemon, which may
 * hang, unless the path ends in a link. Returns 1, or 0: nothing. */
static int mount_named(const char *path, struct mount_line *ret_m, char **ret_full, struct base_error *err)
{
	char *full = resolve_above(path);
	int r = full ? mount_find(full, true, ret_m, err) : 0;

	if (r == 0) {
		free(full);
		full = strdup(path);
		r = full ? resolve(&full, "mount point", err) : base_no_memory(err);
		if (r == 0)
			r = mount_find(full, true, ret_m, err);
	}
	if (r < 0)
		free(full);
	else
		*ret_full = full;
	return r;
}

/* The error for a `path` without a vckpt mount: says what is there. */
static int not_ours(const char *path, bool mounted, struct mount_line *m, struct base_error *err)
{
	if (mounted)
		return base_error_set(err, -EINVAL, "%s: not a vckpt mount: %s (%s) is mounted there", path, m->source,
			m->type);
	if (mount_find(path, false, m, err) > 0 && strcmp(m->type, "fuse.vckpt") == 0)
		return base_error_set(err, -EINVAL, "%s: not a mount point; it is in the vckpt mount %s", path,
			m->point);
	return base_error_set(err, -EINVAL, "%s: nothing is mounted there", path);
}

int fs_mountpoint_unmount(const char *path, bool lazy, char **ret_point, struct base_error *err)
{
	base_cleanup_free char *full = NULL;
	struct mount_line m;
	int r;

	*ret_point = NULL;
	r = mount_named(path, &m, &full, err);
	if (r < 0)
		return r;
	if (r == 0 || strcmp(m.type, "fuse.vckpt") != 0)
		return not_ours(full, r > 0, &m, err);
	r = mountpoint_umount(full, lazy);
	if (r == -EBUSY)
		base_error_set(err, r, "%s: in use", full);
	else if (r == -EPERM && geteuid() != 0)
		base_error_set(err, r, "%s: fusermount3 cannot unmount it: %s", full, fs_mountpoint_stuck()
			? fs_mountpoint_stuck() : "it is in use, or another user mounted it");
	else if (r)
		base_error_set(err, r, "%s: cannot be unmounted: %s", full, strerror(-r));
	*ret_point = base_steal(full);
	return r;
}

int fs_mountpoint_device(const char *path, char ret_device[static 32], struct base_error *err)
{
	struct mount_line m;
	int r = mount_find(path, true, &m, err);

	if (r > 0)
		memcpy(ret_device, m.device, 32);
	return r;
}

int fs_mountpoint_release(const char *path, const char *device, struct base_error *err)
{
	struct mount_line m;
	char top[32] = "";
	int r = mount_seek(SOUGHT_DEVICE, path, device, &m, err);

	if (r <= 0)
		return r;
	r = fs_mountpoint_device(m.point, top, err);
	if (r < 0)
		return r;
	if (strcmp(top, device) != 0)
		return base_error_set(err, -EBUSY, "%s: another mount is on top of this one, which stays, dead: "
			"unmount both", m.point);
	r = mountpoint_umount(m.point, true);
	if (r)
		return base_error_set(err, r, "%s: cannot be unmounted: %s", m.point,
			fs_mountpoint_stuck() ? fs_mountpoint_stuck() : strerror(-r));
	return 0;
}
