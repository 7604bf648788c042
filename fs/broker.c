/* SPDX-License-Identifier: Apache-2.0
 *
 * The keeper has CAP_SYS_ADMIN, and a backing file is read with the keeper's rights. So a server that was taken over by
 * hostile data must not get a backing file of whatever it can name: Linux lets it open files outside its sandbox with
 * O_PATH. Only memfds have seals, F_GET_SEALS fails on a descriptor of O_PATH, and a sealed memfd no longer changes.
 */
#include "fs/broker.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "core/base/cleanup.h"
#include "core/base/machine.h"

#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
#define ANSWER_MS 5000
#define FUSE_MISC_MAJOR 10
#define FUSE_MISC_MINOR 229

/* As in <linux/fuse.h> since Linux 6.9; Debian 12's is older. */
struct backing_map { int32_t fd; uint32_t flags; uint64_t padding; };
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

enum op { OP_OPEN, OP_CLOSE, OP_MEMORY };
struct request { uint32_t op; int32_t id; };              /* OPEN: with fuse_fd and memfd; CLOSE: with fuse_fd */
struct answer { int32_t result; uint64_t memory; };

union control { struct cmsghdr head; char room[CMSG_SPACE(2 * sizeof(int))]; };

/* ---- the keeper ---- */

/* With these flags statx does not ask the filesystem: one of the server's own could keep the keeper waiting forever. */
static bool is_fuse(int fd)
{
	struct statx st;
	int flags = fcntl(fd, F_GETFL);

	return flags >= 0 && !(flags & O_PATH) &&
		statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &st) == 0 && S_ISCHR(st.stx_mode) &&
		st.stx_rdev_major == FUSE_MISC_MAJOR && st.stx_rdev_minor == FUSE_MISC_MINOR;
}

/* Memfds of hugetlbfs can be sealed, too, but programs that map the mounted file do not know their alignment. */
static bool is_sealed_memory(int fd)
{
	int seals = fcntl(fd, F_GET_SEALS);
	struct statfs st;

	return seals >= 0 && (seals & SEALS) == SEALS && fstatfs(fd, &st) == 0 && st.f_type == TMPFS_MAGIC;
}

static int do_open(int fuse_fd, int memfd)
{
	struct backing_map map = {.fd = memfd};

	int id = ioctl(fuse_fd, BACKING_OPEN, &map);
	return id < 0 ? -errno : id > 0 ? id : -EINVAL;
}

static void do_close(int fuse_fd, int32_t id)
{
	uint32_t number = (uint32_t)id;

	(void)ioctl(fuse_fd, BACKING_CLOSE, &number);
}

/* false: our server never asks for this. */
static bool do_request(int channel, const struct request *request, const int *fds)
{
	struct answer answer = {0};

	switch (request->op) {
	case OP_CLOSE:
		if (!is_fuse(fds[0]))
			return false;
		do_close(fds[0], request->id);  /* without an answer: it may free many GiB */
		return true;
	case OP_OPEN:
		if (!is_sealed_memory(fds[1]) || !is_fuse(fds[0]))
			return false;
		answer.result = do_open(fds[0], fds[1]);
		break;
	case OP_MEMORY:
		answer.memory = base_machine_memory("");
		break;
	default:
		return false;
	}
	if (send(channel, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
		return true;
	if (answer.result > 0)
		do_close(fds[0], answer.result);
	return errno == EAGAIN;
}

/* Descriptors of a refused request are not closed: closing a file of the server's own mount could wait forever. */
bool fs_broker_serve(int channel)
{
	struct request request;
	union control control;
	struct msghdr message = {.msg_iov = &(struct iovec){&request, sizeof request}, .msg_iovlen = 1,
		.msg_control = &control, .msg_controllen = sizeof control};
	int fds[2] = {-1, -1};
	const struct cmsghdr *c;

	ssize_t n = recvmsg(channel, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	if (n <= 0)
		return n < 0 && (errno == EAGAIN || errno == EINTR);
	c = CMSG_FIRSTHDR(&message);
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len <= CMSG_LEN(sizeof fds))
		memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
	if (n != (ssize_t)sizeof request || !do_request(channel, &request, fds))
		return false;
	for (int i = 0; i < 2; i++)
		if (fds[i] >= 0)
			close(fds[i]);
	return true;
}

/* ---- the server ---- */

/* A late answer would be taken for that of the next request, so after a timeout nothing more is asked. What the keeper
 * made too late, at most one backing file, goes when the mount ends. */
struct fs_broker {
	pthread_mutex_t lock;           /* one question at a time */
	int channel;
	_Atomic bool failed;
};

struct fs_broker *fs_broker_new(int channel)
{
	struct fs_broker *b = calloc(1, sizeof *b);

	if (!b)
		return NULL;
	b->channel = channel;
	pthread_mutex_init(&b->lock, NULL);
	return b;
}

void fs_broker_free(struct fs_broker *b)
{
	if (!b)
		return;
	close(b->channel);
	pthread_mutex_destroy(&b->lock);
	free(b);
}

static int send_request(struct fs_broker *b, const struct request *request, const int *fds, size_t nfds)
{
	union control control = {0};
	struct msghdr message = {.msg_iov = &(struct iovec){(void *)request, sizeof *request}, .msg_iovlen = 1};

	if (nfds) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(nfds * sizeof *fds);
		control.head = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
			.cmsg_len = CMSG_LEN(nfds * sizeof *fds)};
		memcpy(CMSG_DATA(&control.head), fds, nfds * sizeof *fds);
	}
	if (b->failed)
		return -EPIPE;
	if (sendmsg(b->channel, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
		return 0;
	b->failed = true;
	return errno == EAGAIN ? -ETIMEDOUT : -errno;
}

static int wait_answer(const struct fs_broker *b, struct answer *ret_answer)
{
	struct pollfd p = {.fd = b->channel, .events = POLLIN};
	int n = poll(&p, 1, ANSWER_MS);

	if (n <= 0)
		return n < 0 ? -errno : -ETIMEDOUT;
	return recv(b->channel, ret_answer, sizeof *ret_answer, 0) == (ssize_t)sizeof *ret_answer ? 0 : -EPIPE;
}

static int ask(struct fs_broker *b, const struct request *request, const int *fds, size_t nfds,
	struct answer *ret_answer)
{
	int r;

	pthread_mutex_lock(&b->lock);
	r = send_request(b, request, fds, nfds);
	if (r == 0)
		r = wait_answer(b, ret_answer);
	if (r < 0)
		b->failed = true;
	pthread_mutex_unlock(&b->lock);
	return r;
}

int fs_broker_open(struct fs_broker *b, int fuse_fd, int memfd)
{
	struct answer answer;
	int r = ask(b, &(struct request){.op = OP_OPEN}, (int[]){fuse_fd, memfd}, 2, &answer);

	return r < 0 ? r : answer.result;
}

int fs_broker_close(struct fs_broker *b, int fuse_fd, int id)
{
	return send_request(b, &(struct request){.op = OP_CLOSE, .id = id}, &fuse_fd, 1);
}

bool fs_broker_works(const struct fs_broker *b) { return !b->failed; }

uint64_t fs_broker_memory(struct fs_broker *b)
{
	struct answer answer;

	return ask(b, &(struct request){.op = OP_MEMORY}, NULL, 0, &answer) < 0 ? 0 : answer.memory;
}
