/* SPDX-License-Identifier: Apache-2.0
 *
 * interpose: a library for LD_PRELOAD that counts the calls by which a process changes a store, and at one of them
 * kills the process, stops it, or spoils the call; or writes all of them down for the replay of power losses.
 *
 * VCKPT_INTERPOSE holds words `key=value`, separated by commas:
 *
 *   root=DIR      calls on files below it count (as the kernel names it)
 *   calls=NAMES   only these, joined by `+` (fsync+linkat); by default all that change something
 *   path=TEXT     only those whose path below the root contains it
 *   reads=1       openat2 and pread count too
 *   at=N          the call to act on, from 1; 0: none
 *   do=WHAT       kill, killall (the process group), stop, fail, short (a write of less than asked for)
 *   when=after    act when the call is done
 *   errno=N       of do=fail
 *   last=M        do=fail, short: up to the M-th call (by default N)
 *   list=FILE     a line for each call that counted: its name and path
 *   log=FILE      see interpose_log.c
 *
 * An unnamed file's path is that of its directory. Where a call goes by a descriptor, its path is asked of /proc. */
#undef _FILE_OFFSET_BITS /* both names of each call are defined here */
#include "interpose.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum action { ACT_NONE, ACT_KILL, ACT_KILL_ALL, ACT_STOP, ACT_FAIL, ACT_SHORT };

static struct {
	char root[PATH_MAX], calls[256], path[256];
	size_t root_len;
	enum action act;
	uint64_t at, last;
	int error, list;
	bool after, reads, on;
} want = {.list = -1};
static atomic_uint_fast64_t count;

/* ---- what is wanted ---- */

static void want_word(const char *key, const char *value)
{
	static const char *const acts[] = {"", "kill", "killall", "stop", "fail", "short"};

	if (!strcmp(key, "root"))
		want.root_len = (size_t)snprintf(want.root, sizeof want.root, "%s", value);
	else if (!strcmp(key, "calls"))
		snprintf(want.calls, sizeof want.calls, "+%s+", value);
	else if (!strcmp(key, "path"))
		snprintf(want.path, sizeof want.path, "%s", value);
	else if (!strcmp(key, "at"))
		want.at = strtoull(value, NULL, 10);
	else if (!strcmp(key, "last"))
		want.last = strtoull(value, NULL, 10);
	else if (!strcmp(key, "errno"))
		want.error = atoi(value);
	else if (!strcmp(key, "when"))
		want.after = !strcmp(value, "after");
	else if (!strcmp(key, "reads"))
		want.reads = atoi(value);
	else if (!strcmp(key, "list"))
		want.list = open(value, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	else if (!strcmp(key, "log"))
		interpose_log_open(value);
	else if (!strcmp(key, "do"))
		for (unsigned i = 1; i < sizeof acts / sizeof *acts; i++)
			want.act = !strcmp(value, acts[i]) ? (enum action)i : want.act;
}

__attribute__((constructor)) static void want_read(void)
{
	const char *text = getenv("VCKPT_INTERPOSE");
	char *copy = text ? strdup(text) : NULL, *state = NULL;

	for (char *word = copy ? strtok_r(copy, ",", &state) : NULL; word; word = strtok_r(NULL, ",", &state)) {
		char *value = strchr(word, '=');

		if (!value)
			continue;
		*value++ = 0;
		want_word(word, value);
	}
	free(copy);
	want.on = want.root_len > 0;
	if (want.last < want.at)
		want.last = want.at;
}

/* ---- paths ---- */

/* Below the root: what follows it; NULL: elsewhere. */
static const char *below(const char *path)
{
	if (strncmp(path, want.root, want.root_len) != 0 || (path[want.root_len] && path[want.root_len] != '/'))
		return NULL;
	return path + want.root_len + (path[want.root_len] == '/');
}

static bool path_of(int fd, char path[static PATH_MAX])
{
	char link[64], *number;
	ssize_t n;

	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = syscall(SYS_readlink, link, path, (size_t)PATH_MAX - 1);
	if (n <= 0)
		return false;
	path[n] = 0;
	number = strstr(path, "/#"); /* "/dir/#123 (deleted)" */
	if (number && strstr(number, " (deleted)"))
		*number = 0;
	return true;
}

static bool path_at(int dir, const char *name, char path[static PATH_MAX])
{
	size_t len;

	if (name[0] == '/' || dir == AT_FDCWD) {
		if (name[0] == '/')
			return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX;
		return getcwd(path, PATH_MAX) && strlen(path) + strlen(name) + 2 < PATH_MAX &&
			strcat(strcat(path, "/"), name);
	}
	if (!path_of(dir, path))
		return false;
	if (!strcmp(name, ".") || !name[0])
		return true;
	len = strlen(path);
	return (size_t)snprintf(path + len, PATH_MAX - len, "/%s", name) < PATH_MAX - len;
}

static uint64_t inode_of(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0 ? st.st_ino : 0;
}

/* ---- a call ---- */

struct call { const char *path; char memory[PATH_MAX]; bool mine, hit, locked; };

static void act(void)
{
	switch (want.act) {
	case ACT_KILL: kill(getpid(), SIGKILL); break;
	case ACT_KILL_ALL: kill(0, SIGKILL); break;
	case ACT_STOP: kill(getpid(), SIGSTOP); break;
	default: return;
	}
}

static void call_count(struct call *c, const char *name)
{
	char part[64];
	uint64_t n;

	snprintf(part, sizeof part, "+%s+", name);
	if ((want.calls[0] && !strstr(want.calls, part)) || (want.path[0] && !strstr(c->path, want.path)))
		return;
	n = atomic_fetch_add(&count, 1) + 1;
	c->hit = want.act != ACT_NONE && n >= want.at && n <= want.last && want.at > 0;
	if (want.list >= 0)
		dprintf(want.list, "%s %s\n", name, c->path);
	if (c->hit && !want.after)
		act();
}

/* c->memory has the path, if it is known. */
static void call_begin(struct call *c, const char *name, bool known)
{
	c->hit = c->locked = false;
	c->path = want.on && known ? below(c->memory) : NULL;
	c->mine = c->path != NULL;
	if (!c->mine)
		return;
	call_count(c, name);
	if (c->hit && want.act == ACT_FAIL) {
		errno = want.error;
		return;
	}
	interpose_log_lock();
	c->locked = true;
}

/* The call is to fail and not to be made. */
static bool call_spoiled(const struct call *c)
{
	return c->hit && want.act == ACT_FAIL;
}

/* e NULL: the call failed. */
static void call_end(struct call *c, const struct interpose_event *e)
{
	int saved = errno;

	if (e)
		interpose_log_put(e);
	if (c->locked)
		interpose_log_unlock();
	if (c->hit && want.after)
		act();
	errno = saved;
}

#define REAL(name) \
	({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

static bool creates(int flags)
{
	return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
}

static int open_any(int (*real)(int, const char *, int, ...), int dir, const char *name, int flags, mode_t mode)
{
	struct call c;
	struct stat st;
	bool known = want.on && creates(flags) && path_at(dir, name, c.memory), made;
	int fd;

	call_begin(&c, "openat", known);
	if (call_spoiled(&c))
		return -1;
	made = (flags & O_TMPFILE) == O_TMPFILE || !c.mine || fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0;
	fd = real(dir, name, flags, mode);
	call_end(&c, c.mine && fd >= 0 && made ? &(struct interpose_event){.kind = INTERPOSE_CREATE,
		.ino = inode_of(fd), .path = c.path, .offset = (flags & O_TMPFILE) != O_TMPFILE} : NULL);
	return fd;
}

int openat(int dir, const char *name, int flags, ...)
{
	va_list ap;
	mode_t mode;

	va_start(ap, flags);
	mode = creates(flags) ? va_arg(ap, mode_t) : 0;
	va_end(ap);
	return open_any(REAL(openat), dir, name, flags, mode);
}

int openat64(int dir, const char *name, int flags, ...)
{
	va_list ap;
	mode_t mode;

	va_start(ap, flags);
	mode = creates(flags) ? va_arg(ap, mode_t) : 0;
	va_end(ap);
	return open_any(REAL(openat64), dir, name, flags, mode);
}

/* ---- names ---- */

int mkdirat(int dir, const char *name, mode_t mode)
{
	struct call c;
	int r;

	call_begin(&c, "mkdirat", want.on && path_at(dir, name, c.memory));
	if (call_spoiled(&c))
		return -1;
	r = REAL(mkdirat)(dir, name, mode);
	call_end(&c, r == 0 && c.mine ? &(struct interpose_event){.kind = INTERPOSE_MKDIR, .path = c.path} : NULL);
	return r;
}

int linkat(int from, const char *old, int dir, const char *name, int flags)
{
	struct call c;
	struct stat st = {0};
	int r;

	call_begin(&c, "linkat", want.on && path_at(dir, name, c.memory));
	if (call_spoiled(&c))
		return -1;
	r = REAL(linkat)(from, old, dir, name, flags);
	if (r == 0 && c.mine)
		fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW);
	call_end(&c, r == 0 && c.mine ? &(struct interpose_event){.kind = INTERPOSE_LINK, .path = c.path,
		.ino = st.st_ino} : NULL);
	return r;
}

int renameat2(int from, const char *old, int dir, const char *name, unsigned flags)
{
	char source[PATH_MAX];
	const char *was;
	struct call c;
	int r;

	call_begin(&c, "renameat2", want.on && path_at(dir, name, c.memory));
	if (call_spoiled(&c))
		return -1;
	was = c.mine && path_at(from, old, source) ? below(source) : NULL;
	r = REAL(renameat2)(from, old, dir, name, flags);
	call_end(&c, r == 0 && was ? &(struct interpose_event){.kind = INTERPOSE_RENAME, .path = was,
		.to = c.path} : NULL);
	return r;
}

int unlinkat(int dir, const char *name, int flags)
{
	struct call c;
	int r;

	call_begin(&c, "unlinkat", want.on && path_at(dir, name, c.memory));
	if (call_spoiled(&c))
		return -1;
	r = REAL(unlinkat)(dir, name, flags);
	call_end(&c, r == 0 && c.mine ? &(struct interpose_event){
		.kind = flags & AT_REMOVEDIR ? INTERPOSE_RMDIR : INTERPOSE_UNLINK, .path = c.path} : NULL);
	return r;
}

/* ---- data ---- */

static ssize_t write_any(ssize_t (*real)(int, const void *, size_t, off_t), int fd, const void *bytes, size_t len,
	off_t offset)
{
	struct iovec iov = {(void *)bytes, len};
	struct call c;
	ssize_t done;

	call_begin(&c, "pwrite", want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return -1;
	if (c.hit && want.act == ACT_SHORT)
		iov.iov_len = (len + 1) / 2;
	done = real(fd, bytes, iov.iov_len, offset);
	if (done > 1 && c.hit && want.act == ACT_SHORT)
		done--; /* an odd rest, also where only whole blocks can be written */
	call_end(&c, done > 0 && c.mine ? &(struct interpose_event){.kind = INTERPOSE_WRITE, .path = c.path,
		.ino = inode_of(fd), .offset = (uint64_t)offset, .iov = &iov, .niov = 1, .len = (size_t)done} : NULL);
	return done;
}

ssize_t pwrite(int fd, const void *bytes, size_t len, off_t offset)
{
	return write_any(REAL(pwrite), fd, bytes, len, offset);
}

ssize_t pwrite64(int fd, const void *bytes, size_t len, off64_t offset)
{
	return write_any(REAL(pwrite64), fd, bytes, len, offset);
}

static int sync_any(const char *name, int (*real)(int), int fd)
{
	struct call c;
	struct stat st = {0};
	int r;

	call_begin(&c, name, want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return -1;
	r = real(fd);
	if (c.mine)
		fstat(fd, &st);
	call_end(&c, r == 0 && c.mine ? &(struct interpose_event){
		.kind = S_ISDIR(st.st_mode) ? INTERPOSE_SYNC_DIR : INTERPOSE_SYNC, .path = c.path,
		.ino = st.st_ino} : NULL);
	return r;
}

int fsync(int fd) { return sync_any("fsync", REAL(fsync), fd); }
int fdatasync(int fd) { return sync_any("fdatasync", REAL(fdatasync), fd); }

/* Starts writing, or waits for it; makes nothing durable. */
int sync_file_range(int fd, off64_t offset, off64_t len, unsigned flags)
{
	struct call c;
	int r;

	call_begin(&c, "sync_file_range", want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return -1;
	r = REAL(sync_file_range)(fd, offset, len, flags);
	call_end(&c, NULL);
	return r;
}

int syncfs(int fd)
{
	struct call c;
	int r;

	call_begin(&c, "syncfs", want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return -1;
	r = REAL(syncfs)(fd);
	call_end(&c, r == 0 && c.mine ? &(struct interpose_event){.kind = INTERPOSE_SYNC_ALL, .path = c.path} : NULL);
	return r;
}

static int truncate_any(const char *name, int (*real)(int, off_t), int fd, off_t len)
{
	struct call c;
	int r;

	call_begin(&c, name, want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return -1;
	r = real(fd, len);
	call_end(&c, r == 0 && c.mine ? &(struct interpose_event){.kind = INTERPOSE_TRUNCATE, .path = c.path,
		.ino = inode_of(fd), .offset = (uint64_t)len} : NULL);
	return r;
}

int ftruncate(int fd, off_t len) { return truncate_any("ftruncate", REAL(ftruncate), fd, len); }
int ftruncate64(int fd, off64_t len) { return truncate_any("ftruncate", REAL(ftruncate64), fd, len); }

/* ---- reads: only counted ---- */

static void read_any(const char *name, int fd, const char *below_fd)
{
	struct call c;

	if (!want.on || !want.reads || !(below_fd ? path_at(fd, below_fd, c.memory) : path_of(fd, c.memory)))
		return;
	c.path = below(c.memory);
	c.hit = false;
	if (c.path)
		call_count(&c, name);
	if (c.path && c.hit && want.after)
		act();
}

ssize_t pread64(int fd, void *bytes, size_t len, off64_t offset)
{
	read_any("pread", fd, NULL);
	return REAL(pread64)(fd, bytes, len, offset);
}

long syscall(long number, ...)
{
	long a[6];
	va_list ap;

	va_start(ap, number);
	for (unsigned i = 0; i < 6; i++)
		a[i] = va_arg(ap, long);
	va_end(ap);
	if (number == SYS_openat2)
		read_any("openat2", (int)a[0], (const char *)a[1]);
	return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
