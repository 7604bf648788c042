/* SPDX-License-Identifier: Apache-2.0
 *
 * Three kinds of threads, none of them with privileges:
 *
 *   main      waits for a signal or the end of the loop
 *   prover    stats the mount point once, raises readahead, reports to the keeper that the mount works, and ends
 *   session   starts the watch and answers requests, with the threads that libfuse starts from it */
#include "fs/serve.h"

#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "fs/broker.h"
#include "fs/harden.h"
#include "fs/pressure.h"
#include "fs/session.h"
#include "fs/watch.h"

struct serving {
	struct fs_mount mount;
	struct fs_watch *watch;
	pthread_t main, session, prover;
	int channel, broker, fuse_fd, readahead_fd; /* broker, fuse_fd: -1 once others have them */
	struct fs_handed handed;
	_Atomic int loop_result;        /* valid once loop_ended */
	_Atomic bool loop_ended;        /* SIGUSR1 then wakes the main thread; without it the signal is ignored */
	_Atomic bool failed;            /* the prover's stat failed */
	_Atomic bool proved;            /* the mount has answered */
	_Atomic bool ending;            /* a signal or umount came: a failure of the prover no longer matters */
};

static void report_to_keeper(const struct serving *s, int status, const char *text)
{
	struct fs_report report = {.status = status};

	snprintf(report.text, sizeof report.text, "%s", text ? text : "");
	if (send(s->channel, &report, sizeof report, MSG_NOSIGNAL) < 0)
		base_debug("the keeper is gone: %s", strerror(errno));
}

/* Did the stat fail because the mount is gone again? Then the main thread knows, or soon will. */
static bool ends_meanwhile(struct serving *s)
{
	for (int i = 0; i < 500 && !s->ending; i++)
		nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
	return s->ending;
}

static void *prover_main(void *arg)
{
	struct serving *s = arg;
	struct base_error err = {0};
	struct fs_broker *broker;

	int r = fs_session_prove(&s->mount, &err);
	if (r && ends_meanwhile(s))
		return NULL;
	if (r) {
		s->failed = true;
		base_error_log("%s", err.text);
		report_to_keeper(s, FS_EXIT_MOUNT, err.text);
		pthread_kill(s->main, SIGTERM);
		return NULL;
	}
	s->proved = true;
	fs_session_raise_readahead(&s->mount, s->readahead_fd, s->handed.readahead_error);
	if (s->readahead_fd >= 0)
		close(base_steal_fd(&s->readahead_fd));
	broker = fs_broker_new(s->broker);
	if (broker)
		s->broker = -1;
	fs_backings_start(s->mount.backings, broker);
	if (!s->mount.options->foreground)
		setsid();  /* not earlier: see daemon.c */
	report_to_keeper(s, 0, NULL);
	return NULL;
}

static void *session_main(void *arg)
{
	struct serving *s = arg;
	sigset_t wake;
	int r;

	sigemptyset(&wake);
	sigaddset(&wake, SIGUSR2);  /* only interrupts the loop's wait */
	pthread_sigmask(SIG_UNBLOCK, &wake, NULL);
	r = fs_watch_start(&s->mount, &s->watch);
	if (r)
		fs_mount_feature(&s->mount, "watch", false, "no thread: %s", strerror(-r));
	fs_interrupts_start(&s->mount);
	fs_pressure_start(&s->mount);
	s->loop_result = fs_session_loop(&s->mount);
	s->loop_ended = true;
	pthread_kill(s->main, SIGUSR1);
	return NULL;
}

static void nothing(int number) { (void)number; }

/* ^C ends a mount in the foreground. Both processes get the signal; the keeper acts on it. */
static void block_signals(sigset_t *set)
{
	struct sigaction handler = {.sa_handler = nothing};
	sigset_t all;

	sigaction(SIGUSR2, &handler, NULL);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, NULL);
	sigemptyset(set);
	sigaddset(set, SIGTERM);
	sigaddset(set, SIGUSR1);
}

/* Ends the loop. false: a handler hangs in the storage. */
static bool session_end(struct serving *s)
{
	for (int i = 0; i < 250; i++) {
		struct timespec until;

		fuse_session_exit(s->mount.session);
		pthread_kill(s->session, SIGUSR2);
		until = base_clock_in_ms(CLOCK_MONOTONIC, 20);
		if (pthread_clockjoin_np(s->session, NULL, CLOCK_MONOTONIC, &until) == 0)
			return true;
	}
	return false;
}

/* Ends the connection, so that nothing waits for an answer any more, the prover included. The session, which the watch
 * may still use, keeps a valid descriptor. */
static void hang_up(struct serving *s)
{
	base_cleanup_close int other = eventfd(0, EFD_CLOEXEC);

	if (other < 0 || dup2(other, fuse_session_fd(s->mount.session)) < 0)
		_exit(FS_EXIT_SYSTEM);
}

static int serve_until_end(struct serving *s, const sigset_t *signals)
{
	int number, r;
	bool alone, ended, still;

	s->main = pthread_self();
	r = pthread_create(&s->session, NULL, session_main, s);
	alone = r;
	if (!r)
		r = pthread_create(&s->prover, NULL, prover_main, s);
	if (r) {
		report_to_keeper(s, FS_EXIT_SYSTEM, "no threads can be started");
		if (!alone)  /* the session thread uses *s */
			_exit(FS_EXIT_SYSTEM);
		return FS_EXIT_SYSTEM;
	}
	do
		r = sigwait(signals, &number);
	while (r || (number == SIGUSR1 && !s->loop_ended));
	/* when it is unmounted before the first answer, the loop ends with ECONNABORTED */
	s->ending = number != SIGUSR1 || s->loop_result >= 0 || (s->loop_result == -ECONNABORTED && !s->proved);
	if (number != SIGUSR1 || s->loop_result < 0)
		report_to_keeper(s, FS_SERVE_UNMOUNT, NULL);
	ended = session_end(s);
	still = s->watch && !fs_watch_stop(s->watch, 500);
	if (!ended) {
		base_warning("a read hangs in the storage: ending without waiting for it");
		_exit(FS_EXIT_SYSTEM);
	}
	fs_interrupts_stop(&s->mount);
	hang_up(s);
	pthread_join(s->prover, NULL);
	if (!fs_backings_stop(s->mount.backings))
		_exit(0);
	fs_pressure_stop(&s->mount);
	if (still)
		still = !fs_watch_stop(s->watch, 5000);
	if (still)
		_exit(0);
	fs_watch_free(s->watch);
	if (s->loop_result < 0 && !(s->ending && !s->proved))
		base_warning("the connection to the kernel ended: %s", strerror(-s->loop_result));
	return s->failed ? FS_EXIT_MOUNT : 0;
}

/* Waits until the keeper has mounted. -EPIPE: it could not mount, and reports that itself. */
static int take_handed(struct serving *s)
{
	union { struct cmsghdr head; char room[CMSG_SPACE(2 * sizeof(int))]; } control;
	struct iovec iov = {&s->handed, sizeof s->handed};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
		.msg_controllen = sizeof control};
	int fds[2] = {-1, -1};

	ssize_t n = recvmsg(s->channel, &message, MSG_CMSG_CLOEXEC);
	const struct cmsghdr *c = n == (ssize_t)sizeof s->handed ? CMSG_FIRSTHDR(&message) : NULL;
	if (!c || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len > CMSG_LEN(sizeof fds))
		return -EPIPE;
	memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
	s->fuse_fd = fds[0];
	s->readahead_fd = fds[1];
	return 0;
}

static int serve(struct serving *s, const struct fs_options *o, const sigset_t *signals)
{
	struct base_error err = {0};
	int status;

	int r = fs_mount_init(&s->mount, o, &err);
	if (!r) {
		fs_harden(&s->mount);
		r = fs_mount_open(&s->mount, &err);
	}
	status = r ? r == -ENOMEM ? FS_EXIT_SYSTEM : FS_EXIT_MOUNT : 0;
	report_to_keeper(s, status, err.text);
	if (r)
		return status;
	if (take_handed(s))
		return FS_EXIT_MOUNT;
	r = fs_session_open(&s->mount, base_steal_fd(&s->fuse_fd), &err);
	if (r) {
		report_to_keeper(s, FS_EXIT_SYSTEM, err.text);
		return FS_EXIT_SYSTEM;
	}
	return serve_until_end(s, signals);
}

int fs_serve(const struct fs_options *o, int channel, int broker)
{
	struct serving *s = calloc(1, sizeof *s);
	sigset_t signals;
	int status;

	if (!s)
		return FS_EXIT_SYSTEM;
	s->channel = channel;
	s->broker = broker;
	s->fuse_fd = s->readahead_fd = -1;
	block_signals(&signals);
	mallopt(M_ARENA_MAX, 4);  /* so that threads reuse memory that others have freed */
	status = serve(s, o, &signals);
	fs_session_close(&s->mount);
	fs_mount_release(&s->mount);
	free(s);
	return status;
}
