/* SPDX-License-Identifier: Apache-2.0
 *
 * Keeping up with the store. On a local store, inotify on `runs` and on each run in use (one that was looked up)
 * reports new entries at once; their lists are then read on, and the thread sleeps until the next event. Without
 * inotify, every run in use is polled each refresh interval, at the cost of one failed look-up. The cost grows with the
 * runs in use, not with steps, and is nothing for other runs.
 *
 * The kernel need not be notified of new names: it never remembers a failed look-up in the root or in a run. Names that
 * have gone, `latest`, and a run's attributes are invalidated; they would also time out by themselves. The names of
 * tags need none of it: the kernel looks them up each time, and what each node links to stays as it is. */
#include "fs/watch.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include "core/base/clock.h"
#include "core/base/log.h"

#define WATCHED_POLL_MS 5000  /* with inotify: for runs beyond WATCHED_RUNS, and after which a request has lists read */
#define SCAN_MS 800           /* without it: between scans for new runs */
#define WATCHED_RUNS 4000u    /* the rest is polled: inotify has a limit per user */

struct fs_watch {
	struct fs_mount *m;
	pthread_t thread;
	int wake_fd, watch_fd;
	uint32_t watched_runs;       /* directories that watch_fd has; UINT32_MAX: it is to be made */
	bool refused;                /* the storage has no watch */
	bool all;                    /* every run in use is watched */
	int64_t scanned_ns;
	_Atomic bool stop;
};

static void wake(void *arg)
{
	struct fs_watch *w = arg;
	uint64_t one = 1;

	if (write(w->wake_fd, &one, sizeof one) < 0)
		return;  /* EAGAIN: it is awake */
}

static bool run_in_use(struct fs_run *run)
{
	bool used;

	pthread_rwlock_rdlock(&run->lock);
	used = run->list;
	pthread_rwlock_unlock(&run->lock);
	return used;
}

static void forget_name(struct fs_mount *m, fuse_ino_t parent, const char *name)
{
	if (fuse_lowlevel_notify_inval_entry(m->session, parent, name, strlen(name)) == 0)
		atomic_fetch_add(&m->stats.invalidations, 1);
}

static void commit_gone(void *arg, struct fs_commit *commit)
{
	struct fs_mount *m = arg;
	char name[FS_STEP_NAME];

	fs_step_name(commit->step, name);
	forget_name(m, FS_NODE_RUN + commit->run->number, name);
	fs_backings_gone(m->backings, commit);
}

static void mesh_dropped(void *arg, const struct fs_mesh *mesh)
{
	struct fs_node directory = {.kind = FS_MESHES, .commit = mesh->commit};

	forget_name(arg, fs_node_id(&directory), mesh->name);
}

static void refresh_run(struct fs_mount *m, struct fs_run *run)
{
	uint64_t before = 0, after = 0;
	int64_t time_ns;
	bool has;

	bool had = fs_run_latest(run, &before, &time_ns);
	int n = fs_run_refresh(run);
	atomic_fetch_add(&m->stats.refreshes, 1);
	if (n < 0)
		atomic_fetch_add(&m->stats.refresh_errors, 1);
	if (n <= 0)
		return;
	atomic_fetch_add(&m->stats.new_entries, (uint64_t)n);
	has = fs_run_latest(run, &after, &time_ns);
	fs_run_gone(run, commit_gone, m);
	if (had && (!has || before != after))
		forget_name(m, FS_NODE_RUN + run->number, "latest");
	if (had && !has)
		forget_name(m, FUSE_ROOT_ID, run->name);
	fuse_lowlevel_notify_inval_inode(m->session, FS_NODE_RUN + run->number, -1, 0);  /* attributes only */
}

/* Watches `runs` and the runs in use, with a new descriptor when their number has changed. */
static void rewatch(struct fs_watch *w)
{
	struct storage *storage = w->m->store->storage;
	struct storage_stat stat = {0};
	uint32_t n = fs_runs_count(w->m->runs), used = 0;

	base_cleanup_free const char **dirs = calloc(n + 1, sizeof *dirs);
	if (!dirs || w->refused)
		return;
	dirs[used++] = "runs";
	w->all = true;
	for (uint32_t i = 0; i < n; i++) {
		struct fs_run *run = fs_runs_at(w->m->runs, i);
		char *dir = NULL;
		if (!run_in_use(run))
			continue;
		if (used < WATCHED_RUNS && asprintf(&dir, "runs/%s", run->name) >= 0)
			dirs[used++] = dir;
		else
			w->all = false;
	}
	if (used != w->watched_runs) {
		int fd = -1, r = -EOPNOTSUPP;
		if (!storage->ops->stat || storage->ops->stat(storage, &stat) || stat.local)
			r = storage->ops->watch ? storage->ops->watch(storage, dirs, used, &fd) : -EOPNOTSUPP;
		if (w->watch_fd >= 0)
			close(w->watch_fd);
		w->watch_fd = r ? -1 : fd;
		w->watched_runs = used;
		w->refused = r == -EOPNOTSUPP;
		if (r)
			fs_mount_feature(w->m, "watch", false, "%s: polled every %u ms",
				w->refused ? "not a local filesystem" : strerror(-r), w->m->options->refresh_ms);
		else
			fs_mount_feature(w->m, "watch", true, "inotify on %u directories", used);
	}
	for (uint32_t i = 1; i < used; i++)
		free((char *)dirs[i]);
}

static void keep_up(struct fs_watch *w, bool changed)
{
	struct base_error err = {0};
	int64_t now = (int64_t)base_monotonic_ns();
	uint32_t n;

	if (changed || now - w->scanned_ns >= INT64_C(1000000) * SCAN_MS) {
		w->scanned_ns = now;
		if (fs_runs_scan(w->m->runs, &err) < 0) {
			atomic_fetch_add(&w->m->stats.refresh_errors, 1);
			if (err.text[0])
				fs_mount_log_once(w->m, err.text);
		}
	}
	rewatch(w);  /* before the lists are read, so that no entry between the two is missed */
	n = fs_runs_count(w->m->runs);
	for (uint32_t i = 0; i < n && !w->stop; i++) {
		struct fs_run *run = fs_runs_at(w->m->runs, i);
		if (run_in_use(run))
			refresh_run(w->m, run);
	}
}

static void drain(int fd)
{
	char events[8192];

	while (fd >= 0) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		if (poll(&p, 1, 0) <= 0 || !(p.revents & POLLIN) || read(fd, events, sizeof events) <= 0)
			return;
	}
}

/* Milliseconds to the next round, if nothing happens; -1: none. inotify loses no event, but some file systems make
 * none: changes below an overlay, for instance. So a request long after the last round causes one. */
static int pause_ms(struct fs_watch *w)
{
	bool sleeps = w->watch_fd >= 0 && w->all;

	atomic_store(&w->m->runs->stale_ns,
		sleeps ? base_monotonic_ns() + WATCHED_POLL_MS * UINT64_C(1000000) : UINT64_MAX);
	if (w->watch_fd < 0)
		return (int)w->m->options->refresh_ms;
	return sleeps ? -1 : WATCHED_POLL_MS;
}

static void *watch_main(void *arg)
{
	struct fs_watch *w = arg;

	rewatch(w);
	while (!w->stop) {
		struct pollfd p[2] = {
			{.fd = w->wake_fd, .events = POLLIN}, {.fd = w->watch_fd, .events = POLLIN},
		};
		int n = poll(p, 2, pause_ms(w));
		if (w->stop)
			break;
		if (p[1].revents) {
			/* entries that come together are read together */
			nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
			if (!(p[1].revents & POLLIN))
				w->watched_runs = UINT32_MAX;  /* the watch has failed */
		}
		drain(w->wake_fd);
		drain(w->watch_fd);
		fs_meshes_drop(w->m->meshes, mesh_dropped, w->m);
		keep_up(w, n > 0 && p[1].revents);
	}
	return NULL;
}

int fs_watch_start(struct fs_mount *m, struct fs_watch **ret_w)
{
	struct fs_watch *w = calloc(1, sizeof *w);
	sigset_t all, old;
	int r;

	if (!w)
		return -ENOMEM;
	*w = (struct fs_watch){.m = m, .watch_fd = -1, .watched_runs = UINT32_MAX,
		.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = w->wake_fd < 0 ? errno : pthread_create(&w->thread, NULL, watch_main, w);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r) {
		if (w->wake_fd >= 0)
			close(w->wake_fd);
		free(w);
		return -r;
	}
	m->runs->wake_arg = w;
	m->runs->wake = wake;
	*ret_w = w;
	return 0;
}

bool fs_watch_stop(struct fs_watch *w, unsigned timeout_ms)
{
	struct timespec until;

	w->m->runs->wake = NULL;
	w->stop = true;
	wake(w);
	until = base_clock_in_ms(CLOCK_MONOTONIC, timeout_ms);
	return pthread_clockjoin_np(w->thread, NULL, CLOCK_MONOTONIC, &until) == 0;
}

void fs_watch_free(struct fs_watch *w)
{
	if (!w)
		return;
	if (w->watch_fd >= 0)
		close(w->watch_fd);
	close(w->wake_fd);
	free(w);
}
