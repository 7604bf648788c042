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
 *   since=TEXT    only those after the process said something that contains it (rank_main: "open", "saved")
 *   reads=1       calls that only look count, too: open (without making anything), openat2, pread, preadv, getdents,
 *                 fstat, fstatat, statx
 *   at=N          the call to act on, from 1; 0: none
 *   do=WHAT       kill, killall (the process group), term (SIGTERM to the process), stop, fail, short (less is written
 *                 or read than asked for), abort: the file system gives up its journal: from then on, in every process
 *                 that names the same file `aborted`, all that would change or sync something fails; what was not
 *                 synced by then never will be
 *   when=after    act when the call is done
 *   errno=N       of do=fail
 *   last=M        do=fail, short: up to the M-th call (by default N)
 *   memory=FILE   three u64 in it, which are mapped, are the number of calls so far, N and M: whoever maps it, too, can
 *                 change them at any time; a fourth: see wait
 *   for=MS        do=fail: all calls for so long from the N-th on
 *   wait=US       each call that counts, but one that only looks, takes so many microseconds longer; the fourth u64 in
 *                 `memory` is how many did so at once
 *   turns=1       of these, one after the other
 *   aborted=FILE  is made by do=abort
 *   believe=1     an fsync that fails with EROFS answers 0, and so does fremovexattr, which asks whether that was true:
 *                 how a store would lose what it told (the tests' own test)
 *   fs=MAGIC      the file system says that it is that one (hexadecimal)
 *   list=FILE     a line for each call that counted: its name and path
 *   log=FILE      see interpose_log.c
 *
 * Later heartbeats, which a thread puts, do not count: they are spoiled where a span of calls or of time is.
 *
 * An unnamed file's path is that of its directory. Where a call goes by a descriptor, its path is asked of /proc. */
#undef _FILE_OFFSET_BITS /* both names of each call are defined here */
#include "interpose.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

enum action { ACT_NONE, ACT_KILL, ACT_KILL_ALL, ACT_STOP, ACT_FAIL, ACT_SHORT, ACT_ABORT, ACT_TERM };

static struct {
	char root[PATH_MAX], calls[256], path[256], since[64], aborted[PATH_MAX];
	size_t root_len;
	enum action act;
	uint64_t for_ms, wait_us;
	int error, list;
	bool after, reads, believe, turns, on;
	unsigned long fs;
} want = {.list = -1};
static struct numbers { _Atomic uint64_t count, at, last, most; } own, *numbers = &own; /* count: calls so far */
static _Atomic uint64_t waiting;               /* calls that take longer now */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint_fast64_t failing_ms;        /* since when for_ms runs */
static atomic_bool counting;                   /* what want.since waits for was said */

static uint64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- what is wanted ---- */

static void numbers_map(const char *name)
{
	int fd = open(name, O_RDWR | O_CLOEXEC);
	void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (at == MAP_FAILED)
		abort();
	close(fd);
	numbers = at;
}

static void want_word(const char *key, const char *value)
{
	static const char *const acts[] = {"", "kill", "killall", "stop", "fail", "short", "abort", "term"};

	if (!strcmp(key, "root"))
		want.root_len = (size_t)snprintf(want.root, sizeof want.root, "%s", value);
	else if (!strcmp(key, "calls"))
		snprintf(want.calls, sizeof want.calls, "+%s+", value);
	else if (!strcmp(key, "path"))
		snprintf(want.path, sizeof want.path, "%s", value);
	else if (!strcmp(key, "since"))
		snprintf(want.since, sizeof want.since, "%s", value);
	else if (!strcmp(key, "at"))
		numbers->at = strtoull(value, NULL, 10);
	else if (!strcmp(key, "last"))
		numbers->last = strtoull(value, NULL, 10);
	else if (!strcmp(key, "memory"))
		numbers_map(value);
	else if (!strcmp(key, "for"))
		want.for_ms = strtoull(value, NULL, 10);
	else if (!strcmp(key, "wait"))
		want.wait_us = strtoull(value, NULL, 10);
	else if (!strcmp(key, "turns"))
		want.turns = atoi(value);
	else if (!strcmp(key, "aborted"))
		snprintf(want.aborted, sizeof want.aborted, "%s", value);
	else if (!strcmp(key, "errno"))
		want.error = atoi(value);
	else if (!strcmp(key, "fs"))
		want.fs = strtoul(value, NULL, 16);
	else if (!strcmp(key, "when"))
		want.after = !strcmp(value, "after");
	else if (!strcmp(key, "reads"))
		want.reads = atoi(value);
	else if (!strcmp(key, "believe"))
		want.believe = atoi(value);
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
	atomic_store(&counting, !want.since[0]);
	if (numbers->last < numbers->at)
		atomic_store(&numbers->last, numbers->at);
}

void interpose_said(const char *text)
{
	if (want.since[0] && strstr(text, want.since))
		atomic_store(&counting, true);
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

struct call { const char *path; char memory[PATH_MAX]; bool mine, hit, locked, longer; int spoiled; };

static void act(void)
{
	switch (want.act) {
	case ACT_KILL: kill(getpid(), SIGKILL); break;
	case ACT_KILL_ALL: kill(0, SIGKILL); break;
	case ACT_TERM: kill(getpid(), SIGTERM); break;
	case ACT_STOP: raise(SIGSTOP); break; /* of this thread: it goes no step further */
	case ACT_ABORT: close((int)syscall(SYS_openat, AT_FDCWD, want.aborted, O_CREAT | O_WRONLY, 0600)); break;
	default: return;
	}
}

/* All but the first heartbeat come from a thread, by the clock: they would number the calls anew at every run. They
 * fail where many calls do. */
static bool beats(const char *path)
{
	return strncmp(path, "hosts", 5) == 0 && syscall(SYS_gettid) != getpid();
}

static void longer_begin(void)
{
	uint64_t now = atomic_fetch_add(&waiting, 1) + 1, most = atomic_load(&numbers->most);

	while (now > most && !atomic_compare_exchange_weak(&numbers->most, &most, now))
		;
	if (want.turns)
		pthread_mutex_lock(&turn);
	usleep((useconds_t)want.wait_us);
}

static void longer_end(struct call *c)
{
	if (c->longer && want.turns)
		pthread_mutex_unlock(&turn);
	if (c->longer)
		atomic_fetch_sub(&waiting, 1);
	c->longer = false;
}

static void call_count(struct call *c, const char *name)
{
	char part[64];
	uint64_t n, at;

	snprintf(part, sizeof part, "+%s+", name);
	if (!atomic_load(&counting) || (want.calls[0] && !strstr(want.calls, part)) ||
		(want.path[0] && !strstr(c->path, want.path)))
		return;
	if (beats(c->path)) {
		if (numbers->last == numbers->at && !want.for_ms)
			return;
		n = atomic_load(&numbers->count);
	} else {
		n = atomic_fetch_add(&numbers->count, 1) + 1;
	}
	at = numbers->at;

	c->hit = want.act != ACT_NONE && n >= at && n <= numbers->last && at > 0;
	if (want.for_ms && at > 0 && n >= at) {
		uint64_t none = 0, now = now_ms();

		atomic_compare_exchange_strong(&failing_ms, &none, now);
		c->hit = now - atomic_load(&failing_ms) < want.for_ms;
	}
	if (want.list >= 0)
		dprintf(want.list, "%s %s\n", name, c->path);
	c->longer = want.wait_us > 0;
	if (c->hit && !want.after)
		act();
	if (c->hit && want.act == ACT_FAIL)
		c->spoiled = want.error;
}

/* c->memory has the path, if it is known. */
static void call_begin(struct call *c, const char *name, bool known)
{
	c->hit = c->locked = c->longer = false;
	c->spoiled = 0;
	c->path = want.on && known ? below(c->memory) : NULL;
	c->mine = c->path != NULL;
	if (!c->mine)
		return;
	call_count(c, name);
	if (c->longer)
		longer_begin();
	if (c->spoiled)
		longer_end(c);
	if (!c->spoiled) {
		interpose_log_lock();
		c->locked = true;
		if (want.aborted[0] && syscall(SYS_access, want.aborted, F_OK) == 0)
			c->spoiled = EROFS;
	}
	if (c->spoiled && c->locked)
		interpose_log_unlock();
	errno = c->spoiled;
}

/* The call is to fail and not to be made. */
static bool call_spoiled(const struct call *c)
{
	return c->spoiled != 0;
}

/* e NULL: the call failed. */
static void call_end(struct call *c, const struct interpose_event *e)
{
	int saved = errno;

	if (e)
		interpose_log_put(e);
	if (c->locked)
		interpose_log_unlock();
	longer_end(c);
	if (c->hit && want.after)
		act();
	errno = saved;
}

#define REAL(name) \
	({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

/* A call that changes nothing: what becomes of it. */
enum reads { READ_REAL, READ_FAILS, READ_SHORT };

static enum reads read_hit(const char *name, int fd, const char *below_fd)
{
	struct call c = {0};

	if (!want.on || !want.reads || !(below_fd ? path_at(fd, below_fd, c.memory) : path_of(fd, c.memory)))
		return READ_REAL;
	c.path = below(c.memory);
	if (c.path)
		call_count(&c, name);
	if (c.path && c.hit && want.after)
		act();
	if (c.spoiled)
		errno = c.spoiled;
	return c.spoiled ? READ_FAILS : c.path && c.hit && want.act == ACT_SHORT ? READ_SHORT : READ_REAL;
}

static bool read_spoiled(const char *name, int fd, const char *below_fd)
{
	return read_hit(name, fd, below_fd) == READ_FAILS;
}

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

	if (!creates(flags) && read_spoiled("open", dir, name))
		return -1;
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

/* flags: of renameat2; -1: renameat. */
static int rename_any(const char *call, int from, const char *old, int dir, const char *name, int64_t flags)
{
	char source[PATH_MAX];
	const char *was;
	struct call c;
	int r;

	call_begin(&c, call, want.on && path_at(dir, name, c.memory));
	if (call_spoiled(&c))
		return -1;
	was = c.mine && path_at(from, old, source) ? below(source) : NULL;
	r = flags < 0 ? REAL(renameat)(from, old, dir, name) : REAL(renameat2)(from, old, dir, name, (unsigned)flags);
	call_end(&c, r == 0 && was ? &(struct interpose_event){.kind = INTERPOSE_RENAME, .path = was,
		.to = c.path} : NULL);
	return r;
}

int renameat2(int from, const char *old, int dir, const char *name, unsigned flags)
{
	return rename_any("renameat2", from, old, dir, name, flags);
}

int renameat(int from, const char *old, int dir, const char *name)
{
	return rename_any("renameat", from, old, dir, name, -1);
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

/* The first len bytes of them. */
static int iov_first(const struct iovec *iov, int n, size_t len, struct iovec *ret_iov)
{
	int i = 0;

	for (; i < n && len > 0; len -= ret_iov[i++].iov_len)
		ret_iov[i] = (struct iovec){iov[i].iov_base, iov[i].iov_len < len ? iov[i].iov_len : len};
	return i;
}

/* Counts as pwrite: what writes packs is that. */
static ssize_t writev_any(ssize_t (*real)(int, const struct iovec *, int, off_t), int fd, const struct iovec *iov,
	int n, off_t offset)
{
	struct iovec first[IOV_MAX];
	size_t len = 0;
	struct call c;
	ssize_t done;

	for (int i = 0; i < n; i++)
		len += iov[i].iov_len;
	call_begin(&c, "pwrite", want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return -1;
	if (c.hit && want.act == ACT_SHORT)
		n = iov_first(iov, n, (len + 1) / 2, first);
	done = real(fd, c.hit && want.act == ACT_SHORT ? first : iov, n, offset);
	if (done > 1 && c.hit && want.act == ACT_SHORT)
		done--; /* an odd rest, also where only whole blocks can be written */
	call_end(&c, done > 0 && c.mine ? &(struct interpose_event){.kind = INTERPOSE_WRITE, .path = c.path,
		.ino = inode_of(fd), .offset = (uint64_t)offset, .iov = iov, .niov = n, .len = (size_t)done} : NULL);
	return done;
}

ssize_t pwritev(int fd, const struct iovec *iov, int n, off_t offset)
{
	return writev_any(REAL(pwritev), fd, iov, n, offset);
}

ssize_t pwritev64(int fd, const struct iovec *iov, int n, off64_t offset)
{
	return writev_any(REAL(pwritev64), fd, iov, n, offset);
}

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

static int sync_failed(void)
{
	return want.believe && errno == EROFS ? 0 : -1;
}

static int sync_any(const char *name, int (*real)(int), int fd)
{
	struct call c;
	struct stat st = {0};
	int r;

	call_begin(&c, name, want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return sync_failed();
	r = real(fd);
	if (c.mine)
		fstat(fd, &st);
	call_end(&c, r == 0 && c.mine ? &(struct interpose_event){
		.kind = S_ISDIR(st.st_mode) ? INTERPOSE_SYNC_DIR : INTERPOSE_SYNC, .path = c.path,
		.ino = st.st_ino} : NULL);
	return r < 0 ? sync_failed() : r;
}

int fsync(int fd) { return sync_any("fsync", REAL(fsync), fd); }
int fdatasync(int fd) { return sync_any("fdatasync", REAL(fdatasync), fd); }

/* It takes away what is not there: no event. */
int fremovexattr(int fd, const char *name)
{
	struct call c;
	int r;

	call_begin(&c, "fremovexattr", want.on && path_of(fd, c.memory));
	if (call_spoiled(&c))
		return sync_failed();
	r = REAL(fremovexattr)(fd, name);
	call_end(&c, NULL);
	return r < 0 ? sync_failed() : r;
}

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

/* ---- reads ---- */

ssize_t pread64(int fd, void *bytes, size_t len, off64_t offset)
{
	enum reads hit = read_hit("pread", fd, NULL);

	return hit == READ_FAILS ? -1 : REAL(pread64)(fd, bytes, hit == READ_SHORT ? (len + 1) / 2 : len, offset);
}

ssize_t preadv64(int fd, const struct iovec *iov, int n, off64_t offset)
{
	enum reads hit = read_hit("preadv", fd, NULL);

	if (hit == READ_SHORT)
		return REAL(pread64)(fd, iov->iov_base, (iov->iov_len + 1) / 2, offset);
	return hit == READ_FAILS ? -1 : REAL(preadv64)(fd, iov, n, offset);
}

ssize_t getdents64(int fd, void *bytes, size_t len)
{
	return read_spoiled("getdents", fd, NULL) ? -1 : REAL(getdents64)(fd, bytes, len);
}

int fstat64(int fd, struct stat64 *st)
{
	return read_spoiled("fstat", fd, NULL) ? -1 : REAL(fstat64)(fd, st);
}

int fstatat64(int dir, const char *name, struct stat64 *st, int flags)
{
	return read_spoiled("fstatat", dir, name) ? -1 : REAL(fstatat64)(dir, name, st, flags);
}

int statx(int dir, const char *name, int flags, unsigned mask, struct statx *st)
{
	return read_spoiled("statx", dir, name) ? -1 : REAL(statx)(dir, name, flags, mask, st);
}

int fstatfs64(int fd, struct statfs64 *st)
{
	int r = REAL(fstatfs64)(fd, st);

	if (r == 0 && want.fs)
		st->f_type = (__typeof__(st->f_type))want.fs;
	return r;
}

long syscall(long number, ...)
{
	long a[6];
	va_list ap;

	va_start(ap, number);
	for (unsigned i = 0; i < 6; i++)
		a[i] = va_arg(ap, long);
	va_end(ap);
	if (number == SYS_openat2 && read_spoiled("openat2", (int)a[0], (const char *)a[1]))
		return -1;
	return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
