/* SPDX-License-Identifier: Apache-2.0
 *
 * shared_meet: how the ranks of one host find each other's segments.
 *
 * Each rank puts a file RANK into the folder, with its process, the time at which this began, and the number of its
 * memfd; the others open that through /proc. A file may be an old one: of a process that is gone, or of an earlier
 * meeting of the same ranks under this name, whose owner is not yet so far as to take it away. So each segment has a
 * nonce, and says which nonces its rank has seen. Two ranks have met when each has seen the other's; a segment that has
 * seen another nonce of this rank is an old one, and its file is looked at again.
 *
 * The file of a rank that was killed stays, and with it the folder. Ranks that met no one there take the files of the
 * dead away, and the first meeting of a process does so in all folders of this user. A rank holds a lock (flock) on its
 * file from before it has its name, until it takes it away; the kernel drops the lock of a process that ends, in
 * whatever pid namespace it was. So a file with a name that ranks make, and that no one holds, is a leftover, and so is
 * an empty folder: a rank that has just made one makes it again. A rank whose file is gone (its leftover of the same
 * name was taken away just as it was replaced) shows it again. */
#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/digest.h"
#include "core/base/le.h"
#include "core/comm/shared_internal.h"

#define SHARED_NAME "vckpt-comm"
#define MEET_PAUSE_US_MIN 200u
#define MEET_PAUSE_US_MAX 50000u
#define SHARED_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* ---- processes and bells ---- */

/* 0: there is no such process, or it is a zombie. */
static uint64_t process_start(int32_t pid)
{
	char path[64], text[1024], state;
	unsigned long long start;
	ssize_t n;
	int fd;

	snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = 0;
	/* the name, in brackets, may have anything in it */
	if (!strrchr(text, ')') || sscanf(strrchr(text, ')') + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
			"%*s %*s %*s %*s %*s %*s %*s %llu", &state, &start) != 2)
		return 0;
	return state == 'Z' || state == 'X' ? 0 : start;
}

bool shared_dead(int32_t pid, uint64_t start)
{
	return process_start(pid) != start;
}

static uint64_t pid_space(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
}

void shared_ring(struct shared_head *own)
{
	atomic_fetch_add(&own->bell, 1);
	syscall(SYS_futex, &own->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void shared_sleep(struct shared_head *head, uint32_t bell, uint32_t ms)
{
	const struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};

	syscall(SYS_futex, &head->bell, FUTEX_WAIT, bell, &t, NULL, 0);
}

/* ---- the own segment ---- */

int shared_have(const struct shared *s, size_t from, size_t len)
{
	int r;

	do
		r = posix_fallocate(s->fd, (off_t)from, (off_t)len);
	while (r == EINTR);
	return -r;
}

static int segment_make(struct shared *s, struct base_error *err)
{
	struct shared_head *head;
	int r;

	s->fd = memfd_create(SHARED_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (s->fd < 0)
		return base_error_set(err, -errno, "no shared memory can be made: %s", base_error_name(-errno));
	r = ftruncate(s->fd, (off_t)s->bytes) < 0 ? -errno : shared_have(s, 0, s->rooms_at);
	if (r < 0 || fcntl(s->fd, F_ADD_SEALS, SHARED_SEALS) < 0) {
		r = r < 0 ? r : -errno;
		return base_error_set(err, r, "%zu bytes of shared memory cannot be had: %s", s->rooms_at,
			base_error_name(r));
	}
	head = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
	if (head == MAP_FAILED)
		return base_error_set(err, -errno, "shared memory cannot be mapped: %s", base_error_name(-errno));
	s->peers[s->comm.rank].head = head;
	head->magic = SHARED_MAGIC;
	head->rank = s->comm.rank;
	head->size = s->comm.size;
	head->pid = getpid();
	head->start = process_start(head->pid);
	do
		r = base_random(&head->nonce, sizeof head->nonce);
	while (r == 0 && head->nonce == 0);
	return r < 0 ? base_error_set(err, r, "no random number can be had: %s", base_error_name(r)) : 0;
}

static void seat_path(const struct shared *s, uint32_t rank, char *path, size_t room)
{
	snprintf(path, room, "%s/%u", s->folder, rank);
}

static bool folder_own(const struct stat *st)
{
	return S_ISDIR(st->st_mode) && st->st_uid == geteuid() && !(st->st_mode & 077);
}

static int folder_make(struct shared *s, struct base_error *err)
{
	struct stat st;

	if (mkdir(s->folder, 0700) < 0 && errno != EEXIST)
		return base_error_set(err, -errno, "%s cannot be made: %s", s->folder, base_error_name(-errno));
	if (lstat(s->folder, &st) < 0)
		return -errno;
	if (!folder_own(&st))
		return base_error_set(err, -EACCES, "%s must be a directory that this user alone may enter (mode 0700)",
			s->folder);
	return 0;
}

static int file_show(struct shared *s, const struct shared_head *own)
{
	char path[200], fresh[220], text[160];
	int n, r = 0;

	seat_path(s, own->rank, path, sizeof path);
	snprintf(fresh, sizeof fresh, "%s.%016llx", path, (unsigned long long)own->nonce);
	n = snprintf(text, sizeof text, "%d %llu %d %llu %llu held\n", own->pid, (unsigned long long)own->start, s->fd,
		(unsigned long long)own->nonce, (unsigned long long)pid_space());
	s->seat = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (s->seat < 0)
		return -errno;
	if (flock(s->seat, LOCK_EX | LOCK_NB) < 0) /* another one sweeps: it is taken away */
		r = errno == EWOULDBLOCK ? -ENOENT : -errno;
	else if (write(s->seat, text, (size_t)n) != n)
		r = -EIO;
	else if (rename(fresh, path) < 0)
		r = -errno; /* -ENOENT: it was taken away before it was locked */
	s->shown = r == 0;
	if (r < 0) {
		unlink(fresh);
		close(s->seat);
		s->seat = -1;
	}
	return r;
}

/* A rank that has met them all may take the folder away just as another one has found it. */
static int segment_show(struct shared *s, struct base_error *err)
{
	int r = -ENOENT;

	for (unsigned i = 0; i < 100 && r == -ENOENT; i++) {
		r = folder_make(s, err);
		if (r == 0)
			r = file_show(s, s->peers[s->comm.rank].head);
	}
	return r < 0 && !(err && err->code) ? base_error_set(err, r, "%s: %s", s->folder, base_error_name(r)) : r;
}

/* One that took the leftover of this name away may have taken this rank's file for it. */
static int segment_show_again(struct shared *s, struct base_error *err)
{
	char path[200];

	seat_path(s, s->comm.rank, path, sizeof path);
	if (faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT)
		return 0;
	close(s->seat);
	s->shown = false;
	return segment_show(s, err);
}

struct seat_text { int pid, fd; unsigned long long start, nonce, space; bool held; };

static bool seat_read_at(int dir, const char *path, struct seat_text *ret_t)
{
	char text[160];
	ssize_t n;
	int fd = openat(dir, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);

	if (fd < 0)
		return false;
	n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = 0;
	ret_t->space = 0;
	ret_t->held = strstr(text, " held\n");
	return sscanf(text, "%d %llu %d %llu %llu", &ret_t->pid, &ret_t->start, &ret_t->fd, &ret_t->nonce,
		&ret_t->space) >= 4;
}

static bool seat_read(const struct shared *s, uint32_t rank, struct seat_text *ret_t)
{
	char path[200];

	seat_path(s, rank, path, sizeof path);
	return seat_read_at(AT_FDCWD, path, ret_t);
}

/* ---- what the dead left ---- */

/* RANK, or RANK.NONCE before it has its name. Nothing else in a folder is touched: its name may be a user's choice. */
static bool seat_named(const char *name)
{
	size_t rank = strspn(name, "0123456789");

	return rank && (name[rank] == '\0' || (name[rank] == '.' && strlen(name + rank + 1) == 16
		&& strspn(name + rank + 1, "0123456789abcdef") == 16));
}

/* No one holds the file. One without "held" may be of an older vckpt, which holds none: then its process has to be
 * dead, and a process of another pid namespace only looks dead. */
static bool seat_left(int dir, const char *name)
{
	int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	struct seat_text t = {0};
	struct stat held, named;
	bool left = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;

	/* a rank may have put its own under the name meanwhile */
	left = left && fstat(fd, &held) == 0 && fstatat(dir, name, &named, AT_SYMLINK_NOFOLLOW) == 0
		&& held.st_ino == named.st_ino;
	if (left && seat_read_at(dir, name, &t) && !t.held)
		left = t.space == pid_space() && shared_dead(t.pid, t.start);
	if (left)
		left = unlinkat(dir, name, 0) == 0;
	if (fd >= 0)
		close(fd);
	return left;
}

/* In a folder; it goes, too, if nothing else was in it. */
static void folder_sweep(const char *folder)
{
	int fd = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	DIR *d = fd < 0 ? NULL : fdopendir(fd);
	struct stat st;

	if (!d) {
		if (fd >= 0)
			close(fd);
		return;
	}
	if (fstat(fd, &st) < 0 || !folder_own(&st)) {
		closedir(d);
		return;
	}
	for (struct dirent *e; (e = readdir(d));)
		if (seat_named(e->d_name))
			(void)seat_left(fd, e->d_name);
	closedir(d);
	rmdir(folder);
}

/* In all folders of this user. */
static void folders_sweep(void)
{
	DIR *d = opendir(SHARED_ROOT);
	char begin[64], path[sizeof SHARED_ROOT + 257];
	int len = snprintf(begin, sizeof begin, "vckpt-%u-", (unsigned)geteuid());

	for (struct dirent *e; d && (e = readdir(d));)
		if (strncmp(e->d_name, begin, (size_t)len) == 0) {
			snprintf(path, sizeof path, SHARED_ROOT "/%s", e->d_name);
			folder_sweep(path);
		}
	if (d)
		closedir(d);
}

void shared_hide(struct shared *s)
{
	struct shared_head *own = s->peers ? s->peers[s->comm.rank].head : NULL;
	struct seat_text t;
	char path[200];

	if (!own || !s->shown)
		return;
	s->shown = false;
	seat_path(s, s->comm.rank, path, sizeof path);
	if (seat_read(s, s->comm.rank, &t) && t.nonce == own->nonce)
		unlink(path);
	close(s->seat);
	s->seat = -1;
	rmdir(s->folder);
}

/* ---- those of the others ---- */

static bool segment_good(const struct shared_head *head, uint32_t rank, const struct seat_text *t)
{
	return head->magic == SHARED_MAGIC && head->rank == rank && head->nonce == t->nonce && head->pid == t->pid &&
		head->start == t->start;
}

static bool path_is_memfd(const char *path)
{
	char to[64];
	ssize_t n = readlink(path, to, sizeof to - 1);

	to[n < 0 ? 0 : n] = 0;
	return n < 0 ? errno == EACCES : strncmp(to, "/memfd:" SHARED_NAME, strlen("/memfd:" SHARED_NAME)) == 0;
}

/* Maps the segment that the file of a rank names, if it is one and its process lives. */
static int segment_find(struct shared *s, uint32_t rank, struct base_error *err)
{
	struct seat_text t;
	struct shared_head *head = MAP_FAILED;
	struct stat st;
	char path[64];
	uint32_t size;
	int fd;

	if (!seat_read(s, rank, &t) || shared_dead(t.pid, t.start))
		return 0;
	snprintf(path, sizeof path, "/proc/%d/fd/%d", t.pid, t.fd);
	if (!path_is_memfd(path)) /* closed by now, and the number is another file's */
		return 0;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return errno == EACCES ? base_error_set(err, -EACCES, "rank %u is process %d, whose shared memory this "
			"process may not open: %s", rank, t.pid, base_error_name(-errno)) : 0;
	if (fstat(fd, &st) == 0 && (size_t)st.st_size >= sizeof *head &&
		(fcntl(fd, F_GET_SEALS) & SHARED_SEALS) == SHARED_SEALS)
		head = mmap(NULL, (size_t)base_min((uint64_t)st.st_size, s->bytes), PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (head == MAP_FAILED)
		return 0;
	size = head->size;
	if (segment_good(head, rank, &t) && size == s->comm.size && (size_t)st.st_size == s->bytes) {
		s->peers[rank].head = head;
		return 0;
	}
	if (segment_good(head, rank, &t) && size != s->comm.size)
		base_error_set(err, -EINVAL, "rank %u was started with %u ranks, this one with %u",
			rank, size, s->comm.size);
	munmap(head, (size_t)base_min((uint64_t)st.st_size, s->bytes));
	return err->code;
}

/* What this rank and that one know of each other. */
static int peer_meet(struct shared *s, uint32_t rank, struct base_error *err)
{
	struct shared_head *own = s->peers[s->comm.rank].head;
	struct shared_peer *p = &s->peers[rank];
	uint64_t seen;
	bool lives;
	int r = p->head ? 0 : segment_find(s, rank, err);

	if (r < 0 || !p->head)
		return r;
	atomic_store(&shared_seats(s, own)[rank].met, p->head->nonce);
	/* first this: a rank may have met this one, and be at its end already */
	lives = atomic_load(&p->head->state) == SHARED_LIVES && !shared_dead(p->head->pid, p->head->start);
	seen = atomic_load(&shared_seats(s, p->head)[s->comm.rank].met);
	if (seen == own->nonce)
		p->agreed = true;
	else if (seen || !lives)
		munmap(base_steal(p->head), s->bytes);
	return 0;
}

static int meet_late(const struct shared *s, struct base_error *err)
{
	char names[300] = "";
	size_t at = 0;
	uint32_t n = 0;

	for (uint32_t i = 0; i < s->comm.size; i++)
		if (i != s->comm.rank && !s->peers[i].agreed && ++n <= 20)
			at += (size_t)snprintf(names + at, sizeof names - at, "%s%u", n > 1 ? ", " : "", i);
	return base_error_set(err, -ETIMEDOUT, "%u of %u ranks have not come to %s within %u ms: rank %s%s", n,
		s->comm.size, s->folder, s->comm.timeout_ms, names, n > 20 ? ", ..." : "");
}

/* So that no rank notices the others later than after 9/8 of the time that they took. */
static unsigned meet_pause_us(uint64_t waited_ns)
{
	return (unsigned)base_min(base_max(waited_ns / 8000, MEET_PAUSE_US_MIN), MEET_PAUSE_US_MAX);
}

int shared_meet(struct shared *s, struct base_error *err)
{
	const uint64_t begin = base_monotonic_ns(), until = begin + (uint64_t)s->comm.timeout_ms * 1000000;
	static pthread_once_t swept = PTHREAD_ONCE_INIT;
	int r = segment_make(s, err);

	pthread_once(&swept, folders_sweep);
	if (r == 0)
		r = segment_show(s, err);
	while (r == 0) {
		uint64_t now = base_monotonic_ns();
		uint32_t missing = 0;

		for (uint32_t i = 0; r == 0 && i < s->comm.size; i++)
			if (i != s->comm.rank && !s->peers[i].agreed) {
				r = peer_meet(s, i, err);
				missing += !s->peers[i].agreed;
			}
		if (r < 0 || !missing)
			break;
		r = now > until ? meet_late(s, err) : segment_show_again(s, err);
		if (r == 0)
			usleep(meet_pause_us(now - begin));
	}
	/* Agreed: each of them has this rank's segment. It may have others still to meet, but not through this file. */
	shared_hide(s);
	if (r < 0)
		folder_sweep(s->folder);
	return r;
}
