/* SPDX-License-Identifier: Apache-2.0
 *
 * A mount is two processes, and a third that waits until the mount works:
 *
 *   mount.vckpt   the command: waits for one report on a pipe, an exit status and a sentence, and ends with it.
 *                 In the foreground it is the keeper
 *   keeper        mounts, waits for a signal or the end of the server, unmounts; keeps the privileges that this takes
 *                 and reads nothing of the store
 *   server        opens the store and answers requests, without privileges (fs/serve.c)
 *
 * The server starts before the keeper mounts, so that a store which cannot be opened is never mounted. It has the only
 * descriptor of the connection to the kernel: when it dies, the mount is dead (ENOTCONN) but stays, so that no program
 * writes into the empty directory below it; the next mount takes it over. The server dies with its keeper.
 *
 * All of them stay in the caller's process group until the mount works: autofs lets only its own group through a mount
 * point that is being mounted, and a process that had left the group would wait for itself. */
#include "fs/daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "core/base/clock.h"
#include "core/base/log.h"
#include "fs/broker.h"
#include "fs/harden.h"
#include "fs/log.h"
#include "fs/mountpoint.h"
#include "fs/serve.h"
#include "fs/session.h"

#define ENDED_EARLY "ended before the mount had answered once"
#define END_MS 7000                     /* for the server to end; it waits 5 s for reads that hang in the storage */

struct keeper {
	const struct fs_options *options;
	pid_t server;
	int channel, signals;           /* the server's; a signalfd */
	int broker;                     /* requests of the server (fs/broker.h); -1: closed */
	int report_fd;                  /* of the command; -1: foreground, or already reported */
	char device[32];                /* of the mount, "MAJ:MIN"; empty: nothing is mounted */
};

/* What the keeper waits for. */
enum event { EVENT_REPORT, EVENT_SERVER_ENDED, EVENT_SIGNAL, EVENT_LATE };

static void report_to_command(struct keeper *k, int status, const char *text)
{
	struct fs_report report = {.status = status};

	if (k->report_fd < 0)
		return;
	snprintf(report.text, sizeof report.text, "%s", text ? text : "");
	if (write(k->report_fd, &report, sizeof report) < 0)
		base_warning("the command that started the mount is gone: %s", strerror(errno));
	close(base_steal_fd(&k->report_fd));
}

/* In the foreground nothing else reports it, and a log file is to have it in any case. */
static int refuse(struct keeper *k, int status, const char *text)
{
	if (k->report_fd < 0 || k->options->log)
		base_error_log("%s", text);
	report_to_command(k, status, text);
	return status;
}

/* READY=1 for systemd, where it asked for that. */
static void report_to_systemd(void)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	base_cleanup_close int fd = -1;
	socklen_t len;

	if (!path || (path[0] != '/' && path[0] != '@') || strlen(path) >= sizeof to.sun_path)
		return;
	memcpy(to.sun_path, path, strlen(path));
	if (path[0] == '@')
		to.sun_path[0] = '\0';
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
	if (fd < 0 || sendto(fd, "READY=1", 7, MSG_NOSIGNAL, (struct sockaddr *)&to, len) < 0)
		base_warning("cannot report to systemd that the mount is ready: %s", strerror(errno));
}

static void leave_terminal(void)
{
	base_cleanup_close int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	for (int fd = 0; null >= 0 && fd < 3; fd++)
		dup2(null, fd);
}

/* ---- the server ---- */

/* From here on the keeper reads signals: those that end the mount, and SIGCHLD. */
static int take_signals(void)
{
	struct sigaction hup;
	sigset_t all, mine;

	signal(SIGPIPE, SIG_IGN);
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	sigemptyset(&mine);
	for (size_t i = 0; i < 3; i++)
		sigaddset(&mine, (int[]){SIGTERM, SIGINT, SIGCHLD}[i]);
	if (sigaction(SIGHUP, NULL, &hup) == 0 && hup.sa_handler != SIG_IGN)  /* nohup */
		sigaddset(&mine, SIGHUP);
	return signalfd(-1, &mine, SFD_CLOEXEC);
}

static _Noreturn void server_main(const struct keeper *k, int channel, int broker, pid_t keeper)
{
	int status;

	if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) || getppid() != keeper)
		_exit(FS_EXIT_SYSTEM);
	close(k->signals);
	close(k->channel);
	close(k->broker);
	if (k->report_fd >= 0) {
		close(k->report_fd);
		leave_terminal();
	}
	status = fs_serve(k->options, channel, broker);
	fflush(NULL);
	_exit(status);
}

static int start_server(struct keeper *k, struct base_error *err)
{
	pid_t keeper = getpid();
	int pair[2], broker[2];

	k->signals = take_signals();
	if (k->signals < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) ||
			socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, broker))
		return base_error_set(err, -errno, "no daemon can be started: %s", strerror(errno));
	k->channel = pair[0];
	k->broker = broker[0];
	fflush(NULL);
	k->server = fork();
	if (k->server == 0)
		server_main(k, pair[1], broker[1], keeper);
	close(pair[1]);
	close(broker[1]);
	if (k->server < 0)
		return base_error_set(err, -errno, "no daemon can be started: %s", strerror(errno));
	return 0;
}

/* *ret_report is set for EVENT_REPORT; do not trust its text and status more than a process that reads strangers'
 * files. *ret_number: the signal, or the server's wait status. */
static enum event wait_event(struct keeper *k, int timeout_ms, struct fs_report *ret_report, int *ret_number)
{
	uint64_t end = base_monotonic_ms() + (uint64_t)(timeout_ms < 0 ? 0 : timeout_ms);

	for (;;) {
		struct pollfd p[3] = {{.fd = k->channel, .events = POLLIN}, {.fd = k->signals, .events = POLLIN},
			{.fd = k->broker, .events = POLLIN}};
		struct signalfd_siginfo s;
		uint64_t now = base_monotonic_ms();
		int n = poll(p, 3, timeout_ms < 0 ? -1 : (int)(end - base_min(now, end)));

		if (n == 0)
			return EVENT_LATE;
		if (n > 0 && p[0].revents && recv(k->channel, ret_report, sizeof *ret_report, 0) ==
				(ssize_t)sizeof *ret_report) {
			ret_report->text[sizeof ret_report->text - 1] = '\0';
			return EVENT_REPORT;
		}
		if (n > 0 && p[0].revents)  /* the server has ended, or is about to be ended */
			close(base_steal_fd(&k->channel));
		if (n > 0 && p[2].revents && !fs_broker_serve(k->broker))
			close(base_steal_fd(&k->broker));
		if (n <= 0 || !(p[1].revents & POLLIN) || read(k->signals, &s, sizeof s) != (ssize_t)sizeof s)
			continue;
		*ret_number = (int)s.ssi_signo;
		if (s.ssi_signo != SIGCHLD)
			return EVENT_SIGNAL;
		if (waitpid(k->server, ret_number, WNOHANG) == k->server)
			return EVENT_SERVER_ENDED;
	}
}

/* Ends the server, by force if need be. Returns its exit status, or FS_EXIT_SYSTEM. */
static int end_server(struct keeper *k)
{
	struct fs_report report;
	int number;

	if (k->channel >= 0)  /* the server may be waiting there for the mount */
		close(base_steal_fd(&k->channel));
	if (k->broker >= 0)   /* or keep asking here */
		close(base_steal_fd(&k->broker));
	kill(k->server, SIGTERM);
	for (;;) {
		enum event e = wait_event(k, END_MS, &report, &number);

		if (e == EVENT_SERVER_ENDED)
			return WIFEXITED(number) ? WEXITSTATUS(number) : FS_EXIT_SYSTEM;
		if (e != EVENT_LATE)
			continue;
		kill(k->server, SIGKILL);  /* a thread that hangs in the kernel does not end now: do not wait for it */
		return FS_EXIT_SYSTEM;
	}
}

/* ---- the mount ---- */

/* Sends the connection to the server; the caller closes its copy. */
static int hand_over(struct keeper *k, int fuse_fd, struct base_error *err)
{
	union { struct cmsghdr head; char room[CMSG_SPACE(2 * sizeof(int))]; } control = {0};
	base_cleanup_close int readahead = fs_session_open_readahead(k->device);
	struct fs_handed handed = {.readahead_error = readahead < 0 ? -readahead : 0};
	int fds[2] = {fuse_fd, readahead};
	size_t size = readahead < 0 ? sizeof fds[0] : sizeof fds;
	struct msghdr message = {.msg_iov = &(struct iovec){&handed, sizeof handed}, .msg_iovlen = 1,
		.msg_control = &control, .msg_controllen = CMSG_SPACE(size)};

	control.head = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
		.cmsg_len = CMSG_LEN(size)};
	memcpy(CMSG_DATA(&control.head), fds, size);
	if (sendmsg(k->channel, &message, MSG_NOSIGNAL) < 0)
		return base_error_set(err, -errno, "the mount cannot be handed to the process that serves it: %s",
			strerror(errno));
	return 0;
}

static int keeper_mount(struct keeper *k, struct base_error *err)
{
	base_cleanup_close int fd = -1;

	int r = k->options->takes_over ? fs_mountpoint_take_over(k->options, err) : 0;
	if (!r)
		r = fs_session_mount(k->options, &fd, err);
	if (r)
		return r;
	r = fs_mountpoint_device(k->options->mountpoint, k->device, err); /* 0: gone already; the server will notice */
	return r < 0 ? r : hand_over(k, fd, err);
}

/* While the server still has the connection: so that no program finds a dead mount, and because the kernel may give the
 * device of a mount that is gone to the next one. */
static void keeper_unmount(struct keeper *k)
{
	struct base_error err = {0};

	if (k->device[0] && fs_mountpoint_release(k->options->mountpoint, k->device, &err) < 0)
		base_warning("%s", err.text);
}

/* ---- the keeper ---- */

/* The server has ended by itself, after it asked for the unmount or after someone else unmounted. */
static int server_ended(struct keeper *k, int status)
{
	char text[200];

	if (WIFEXITED(status)) {
		report_to_command(k, WEXITSTATUS(status) ? WEXITSTATUS(status) : FS_EXIT_MOUNT, ENDED_EARLY);
		return WEXITSTATUS(status);
	}
	snprintf(text, sizeof text, "%s: the process that serves it was ended by signal %d%s", k->options->mountpoint,
		WTERMSIG(status),
		k->device[0] ? "; the mount stays, dead, until it is unmounted or mounted again" : "");
	base_error_log("%s", text);
	report_to_command(k, FS_EXIT_SYSTEM, text);
	return FS_EXIT_SYSTEM;
}

/* Waits for the server's next report. 0: all is well; else *ret_status is the exit status. */
static int await_report(struct keeper *k, int *ret_status)
{
	struct fs_report report;
	enum event e;
	int number;

	while ((e = wait_event(k, -1, &report, &number)) == EVENT_REPORT && report.status == FS_SERVE_UNMOUNT)
		keeper_unmount(k);
	switch (e) {
	case EVENT_REPORT:
		if (report.status == 0)
			return 0;
		*ret_status = refuse(k, report.status == FS_EXIT_MOUNT ? FS_EXIT_MOUNT : FS_EXIT_SYSTEM, report.text);
		break;
	case EVENT_SERVER_ENDED:
		*ret_status = server_ended(k, number);
		return -1;
	default:
		*ret_status = 0;  /* an ordinary end, except for a command that waits for the mount */
		report_to_command(k, FS_EXIT_MOUNT, ENDED_EARLY);
	}
	keeper_unmount(k);
	end_server(k);
	return -1;
}

static int keep(struct keeper *k)
{
	struct fs_report report;
	enum event e;
	int number;

	e = wait_event(k, -1, &report, &number);
	if (e == EVENT_REPORT) {  /* its last one: if the server goes on, it is ended */
		keeper_unmount(k);
		return end_server(k);
	}
	if (e == EVENT_SERVER_ENDED)
		return server_ended(k, number);
	base_info("ended by signal %d", number);
	keeper_unmount(k);
	return end_server(k);
}

static int keeper_run(struct keeper *k)
{
	struct base_error err = {0};
	int status = 0;

	int r = start_server(k, &err);
	if (r)
		return refuse(k, FS_EXIT_SYSTEM, err.text);
	if (await_report(k, &status))
		return status;
	r = keeper_mount(k, &err);
	if (r) {
		keeper_unmount(k);
		end_server(k);
		return refuse(k, FS_EXIT_MOUNT, err.text);
	}
	fs_harden_keeper();
	if (await_report(k, &status))
		return status;
	if (k->report_fd >= 0) {
		leave_terminal();
		setsid();
	}
	report_to_command(k, 0, NULL);
	report_to_systemd();
	base_info("%s is mounted on %s", k->options->store, k->options->mountpoint);
	return keep(k);
}

/* ---- the command ---- */

static int parent_wait(int fd, pid_t child)
{
	struct fs_report report;
	int status = 0;
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
	pid_t child;

	int r = fs_log_open(o, &err);
	if (r) {
		base_error_log("%s", err.text);
		return FS_EXIT_USAGE;
	}
	if (o->foreground)
		return keeper_run(&(struct keeper){.options = o, .channel = -1, .signals = -1, .broker = -1,
			.report_fd = -1});
	fflush(NULL);
	child = pipe2(fds, O_CLOEXEC) ? -1 : fork();
	if (child < 0) {
		base_error_log("no daemon can be started: %s", strerror(errno));
		return FS_EXIT_SYSTEM;
	}
	if (child) {
		close(fds[1]);
		return parent_wait(fds[0], child);
	}
	close(fds[0]);
	if (chdir("/"))
		base_warning("chdir /: %s", strerror(errno));
	fs_log_detach(o);
	exit(keeper_run(&(struct keeper){.options = o, .channel = -1, .signals = -1, .broker = -1,
		.report_fd = fds[1]}));
}
