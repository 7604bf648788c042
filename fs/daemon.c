/* SPDX-License-Identifier: Apache-2.0
 *
 * Order of things: fork, then everything else (no thread and no open store crosses the fork). The child opens the
 * store and mounts; then three kinds of threads:
 *
 *   main      waits for a signal or the end, then unmounts; keeps its privileges and touches nothing else
 *   prover    looks at the mount point once, raises readahead, tells the parent (or systemd) that it works, ends
 *   session   gives its privileges up, starts the watch, answers requests with the threads that libfuse starts from it
 *
 * The parent waits for one line on a pipe: the exit status and a sentence. A child that dies before it has told is
 * an error too. After a crash the mount stays, dead, so that nobody writes into the empty directory below it; the
 * next mount takes it over. */
#include "fs/daemon.h"

#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "fs/harden.h"
#include "fs/log.h"
#include "fs/session.h"
#include "fs/watch.h"

struct report { int32_t status; char text[1000]; };

struct serving {
	struct fs_mount mount;
	struct fs_watch *watch;
	pthread_t main, session, prover;
	int report_fd;                  /* -1: foreground, or told */
	_Atomic int loop_result;         /* read once SIGUSR1 has come, or the session thread has ended */
	_Atomic bool failed;            /* the first look failed */
	_Atomic bool ending;            /* a signal or umount came: a look that fails now says nothing */
};

static void tell_parent(struct serving *s, int status, const char *text)
{
	struct report report = { .status = status };

	if (s->report_fd < 0)
		return;
	snprintf(report.text, sizeof report.text, "%s", text ? text : "");
	if (write(s->report_fd, &report, sizeof report) < 0)
		base_warning("the parent is gone: %s", strerror(errno));
	close(s->report_fd);
	s->report_fd = -1;
}

/* READY=1 for systemd, where it asked for that. */
static void tell_systemd(void)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un to = { .sun_family = AF_UNIX };

	if (!path || (path[0] != '/' && path[0] != '@') || strlen(path) >= sizeof to.sun_path)
		return;
	memcpy(to.sun_path, path, strlen(path));
	if (path[0] == '@')
		to.sun_path[0] = '\0';
	base_cleanup_close int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
	if (fd < 0 || sendto(fd, "READY=1", 7, MSG_NOSIGNAL, (struct sockaddr *)&to, len) < 0)
		base_warning("systemd cannot be told that the mount is ready: %s", strerror(errno));
}

static void leave_terminal(void)
{
	base_cleanup_close int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	for (int fd = 0; null >= 0 && fd < 3; fd++)
		dup2(null, fd);
}

/* Did the look fail because the mount is gone again? Then the main thread knows, or soon will. */
static bool ends_meanwhile(struct serving *s)
{
	for (int i = 0; i < 500 && !s->ending; i++)
		nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
	return s->ending;
}

static void *prover_main(void *arg)
{
	struct serving *s = arg;
	struct base_error err = {0};

	int r = fs_session_prove(&s->mount, &err);
	if (r && ends_meanwhile(s)) {
		tell_parent(s, FS_EXIT_MOUNT, "ended before the mount had answered once");
		return NULL;
	}
	if (r) {
		s->failed = true;
		base_error_log("%s", err.text);
		tell_parent(s, FS_EXIT_MOUNT, err.text);
		pthread_kill(s->main, SIGTERM);
		return NULL;
	}
	if (s->report_fd >= 0)
		leave_terminal();
	tell_parent(s, 0, NULL);
	tell_systemd();
	base_info("%s is mounted on %s", s->mount.options->store, s->mount.options->mountpoint);
	return NULL;
}

static void *session_main(void *arg)
{
	struct serving *s = arg;
	sigset_t wake;

	sigemptyset(&wake);
	sigaddset(&wake, SIGUSR2);  /* only interrupts the loop's wait */
	pthread_sigmask(SIG_UNBLOCK, &wake, NULL);
	fs_harden_thread(&s->mount);
	int r = fs_watch_start(&s->mount, &s->watch);
	if (r)
		fs_mount_feature(&s->mount, "watch", false, "no thread: %s", strerror(-r));
	s->loop_result = fs_session_loop(&s->mount);
	pthread_kill(s->main, SIGUSR1);
	return NULL;
}

static void nothing(int number) { (void)number; }

static void block_signals(sigset_t *set)
{
	struct sigaction handler = { .sa_handler = nothing };
	sigset_t all;

	sigaction(SIGUSR2, &handler, NULL);
	signal(SIGPIPE, SIG_IGN);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, NULL);
	sigemptyset(set);
	for (size_t i = 0; i < 4; i++)
		sigaddset(set, (int[]){ SIGTERM, SIGINT, SIGHUP, SIGUSR1 }[i]);
}

/* Ends the loop; false when a handler hangs in the storage. */
static bool session_end(struct serving *s)
{
	for (int i = 0; i < 250; i++) {
		struct timespec until;

		fuse_session_exit(s->mount.session);
		pthread_kill(s->session, SIGUSR2);
		until = base_clock_in_ms(CLOCK_REALTIME, 20);
		if (pthread_timedjoin_np(s->session, NULL, &until) == 0)
			return true;
	}
	return false;
}

static int serve_until_end(struct serving *s, const sigset_t *signals)
{
	int number;

	s->main = pthread_self();
	int r = pthread_create(&s->session, NULL, session_main, s);
	if (!r && (r = pthread_create(&s->prover, NULL, prover_main, s)) != 0)
		session_end(s);
	if (r) {
		tell_parent(s, FS_EXIT_SYSTEM, "no threads can be started");
		fs_session_close(&s->mount);
		return FS_EXIT_SYSTEM;
	}
	while (sigwait(signals, &number) != 0)
		;
	s->ending = number != SIGUSR1 || s->loop_result >= 0;
	if (number != SIGUSR1)
		base_info("ended by signal %d", number);
	bool ended = session_end(s), still = s->watch && !fs_watch_stop(s->watch, 500);
	if (!ended) {
		base_warning("a read hangs in the storage: unmounting without waiting for it");
		fuse_session_unmount(s->mount.session);
		_exit(FS_EXIT_SYSTEM);
	}
	fuse_session_unmount(s->mount.session);
	pthread_join(s->prover, NULL);
	if (still)
		still = !fs_watch_stop(s->watch, 5000);
	if (still)
		_exit(0);
	fs_watch_free(s->watch);
	fs_session_close(&s->mount);
	if (s->loop_result < 0)
		base_warning("the connection to the kernel ended: %s", strerror(-s->loop_result));
	return s->failed ? FS_EXIT_MOUNT : 0;
}

static int serve(const struct fs_options *o, int report_fd)
{
	struct serving *s = calloc(1, sizeof *s);
	struct base_error err = {0};
	sigset_t signals;

	if (!s)
		return FS_EXIT_SYSTEM;
	s->report_fd = report_fd;
	block_signals(&signals);
	mallopt(M_ARENA_MAX, 4);  /* memory that threads free is found again by others */
	int r = fs_mount_init(&s->mount, o, &err);
	if (!r) {
		fs_harden_process(&s->mount);
		r = fs_session_open(&s->mount, &err);
	}
	int status = r ? r == -ENOMEM ? FS_EXIT_SYSTEM : FS_EXIT_MOUNT : 0;
	if (r) {
		if (report_fd < 0 || o->log)
			base_error_log("%s", err.text);
		tell_parent(s, status, err.text);
	} else {
		status = serve_until_end(s, &signals);
	}
	fs_mount_release(&s->mount);
	free(s);
	return status;
}

static int parent_wait(int fd, pid_t child)
{
	struct report report;
	int status;
	ssize_t n;

	do
		n = read(fd, &report, sizeof report);
	while (n < 0 && errno == EINTR);
	if (n == (ssize_t)sizeof report) {
		report.text[sizeof report.text - 1] = '\0';
		if (report.status)
			base_error_log("%s", report.text);
		return report.status;
	}
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	if (WIFSIGNALED(status))
		base_error_log("the daemon was ended by signal %d before the mount worked", WTERMSIG(status));
	else
		base_error_log("the daemon ended before the mount worked");
	return FS_EXIT_SYSTEM;
}

int fs_daemon_run(const struct fs_options *o)
{
	struct base_error err = {0};
	int fds[2];

	int r = fs_log_open(o, &err);
	if (r) {
		base_error_log("%s", err.text);
		return FS_EXIT_USAGE;
	}
	if (o->foreground)
		return serve(o, -1);
	fflush(NULL);
	pid_t child = pipe2(fds, O_CLOEXEC) ? -1 : fork();
	if (child < 0) {
		base_error_log("no daemon can be started: %s", strerror(errno));
		return FS_EXIT_SYSTEM;
	}
	if (child) {
		close(fds[1]);
		return parent_wait(fds[0], child);
	}
	close(fds[0]);
	setsid();
	if (chdir("/"))
		base_warning("chdir /: %s", strerror(errno));
	fs_log_detach(o);
	int status = serve(o, fds[1]);
	fflush(NULL);
	exit(status);
}
