/* SPDX-License-Identifier: Apache-2.0
 *
 * The keeper has CAP_SYS_ADMIN, and a backing file is read with its rights. So a server that a hostile piece has taken
 * over must not get one of any file that it can name: Linux lets it open files outside of its sandbox by O_PATH. Only
 * memfds have seals, and a descriptor of O_PATH does not tell them; a memfd that is sealed can be changed by nobody. */
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
#define ANSWER_MS 2000
#define FUSE_MISC_MAJOR 10
#define FUSE_MISC_MINOR 229

/* As <linux/fuse.h> has them since 6.9; Debian 12's is older. */
struct backing_map { int32_t fd; uint32_t flags; uint64_t padding; };
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

enum op { OP_OPEN, OP_CLOSE, OP_MEMORY };
struct request { uint32_t op; int32_t id; };              /* OPEN: with fuse_fd and memfd; CLOSE: with fuse_fd */
struct answer { int32_t result; uint64_t memory; };

union control { struct cmsghdr head; char room[CMSG_SPACE(2 * sizeof(int))]; };

/* ---- the keeper ---- */

/* It asks no filesystem: one of the server's own would let the keeper wait for ever. */
static bool is_fuse(int fd)
{
	struct statx st;
	int flags = fcntl(fd, F_GETFL);

	return flags >= 0 && !(flags & O_PATH) &&
		statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &st) == 0 && S_ISCHR(st.stx_mode) &&
		st.stx_rdev_major == FUSE_MISC_MAJOR && st.stx_rdev_minor == FUSE_MISC_MINOR;
}

/* Huge pages of hugetlbfs have seals, too, but whoever maps the mounted file does not know of their alignment. */
static bool is_sealed_memory(int fd)
{
	int seals = fcntl(fd, F_GET_SEALS);
	struct statfs st;

	return seals >= 0 && (seals & SEALS) == SEALS && fstatfs(fd, &st) == 0 && st.f_type == TMPFS_MAGIC;
}

static int do_open(int fuse_fd, int memfd)
{
	struct backing_map map = { .fd = memfd };

	if (!is_sealed_memory(memfd) || !is_fuse(fuse_fd))
		return -EINVAL;
	int id = ioctl(fuse_fd, BACKING_OPEN, &map);
	return id < 0 ? -errno : id > 0 ? id : -EINVAL;
}

static int do_close(int fuse_fd, int32_t id)
{
	uint32_t number = (uint32_t)id;

	if (!is_fuse(fuse_fd))
		return -EINVAL;
	return ioctl(fuse_fd, BACKING_CLOSE, &number) ? -errno : 0;
}

bool fs_broker_serve(int channel)
{
	struct request request;
	struct answer answer = { .result = -EINVAL };
	union control control;
	struct msghdr message = { .msg_iov = &(struct iovec){ &request, sizeof request }, .msg_iovlen = 1,
		.msg_control = &control, .msg_controllen = sizeof control };
	int fds[2] = { -1, -1 };

	ssize_t n = recvmsg(channel, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
		return false;
	const struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len <= CMSG_LEN(sizeof fds))
		memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
	if (n == (ssize_t)sizeof request && request.op == OP_OPEN)
		answer.result = do_open(fds[0], fds[1]);
	else if (n == (ssize_t)sizeof request && request.op == OP_CLOSE)
		answer.result = do_close(fds[0], request.id);
	else if (n == (ssize_t)sizeof request && request.op == OP_MEMORY)
		answer = (struct answer){ .memory = base_machine_memory("") };
	for (int i = 0; i < 2; i++)
		if (fds[i] >= 0)
			close(fds[i]);
	return n < 0 || send(channel, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno == EAGAIN;
}

/* ---- the server ---- */

struct fs_broker { pthread_mutex_t lock; int channel; }; /* the lock: one request at a time. channel -1: it failed */

struct fs_broker *fs_broker_new(int channel)
{
	struct fs_broker *b = malloc(sizeof *b);

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
	if (b->channel >= 0)
		close(b->channel);
	pthread_mutex_destroy(&b->lock);
	free(b);
}

static int ask_locked(int channel, const struct request *request, const int *fds, size_t nfds,
	struct answer *ret_answer)
{
	union control control = {0};
	struct msghdr message = { .msg_iov = &(struct iovec){ (void *)request, sizeof *request }, .msg_iovlen = 1 };

	if (nfds) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(nfds * sizeof *fds);
		control.head = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
			.cmsg_len = CMSG_LEN(nfds * sizeof *fds) };
		memcpy(CMSG_DATA(&control.head), fds, nfds * sizeof *fds);
	}
	if (sendmsg(channel, &message, MSG_NOSIGNAL) < 0)
		return -errno;
	struct pollfd p = { .fd = channel, .events = POLLIN };
	int n = poll(&p, 1, ANSWER_MS);
	if (n <= 0)
		return n < 0 ? -errno : -ETIMEDOUT;
	return recv(channel, ret_answer, sizeof *ret_answer, 0) == (ssize_t)sizeof *ret_answer ? 0 : -EPIPE;
}

/* An answer that does not come would be taken for that of the next request: nothing is asked then any more. */
static int ask(struct fs_broker *b, const struct request *request, const int *fds, size_t nfds,
	struct answer *ret_answer)
{
	pthread_mutex_lock(&b->lock);
	int r = b->channel < 0 ? -EPIPE : ask_locked(b->channel, request, fds, nfds, ret_answer);
	if (r < 0 && b->channel >= 0)
		close(base_steal_fd(&b->channel));
	pthread_mutex_unlock(&b->lock);
	return r;
}

int fs_broker_open(struct fs_broker *b, int fuse_fd, int memfd)
{
	struct answer answer;
	int r = ask(b, &(struct request){ .op = OP_OPEN }, (int[]){ fuse_fd, memfd }, 2, &answer);

	return r < 0 ? r : answer.result;
}

int fs_broker_close(struct fs_broker *b, int fuse_fd, int id)
{
	struct answer answer;
	int r = ask(b, &(struct request){ .op = OP_CLOSE, .id = id }, &fuse_fd, 1, &answer);

	return r < 0 ? r : answer.result;
}

bool fs_broker_works(struct fs_broker *b)
{
	pthread_mutex_lock(&b->lock);
	bool works = b->channel >= 0;
	pthread_mutex_unlock(&b->lock);
	return works;
}

uint64_t fs_broker_memory(struct fs_broker *b)
{
	struct answer answer;

	return ask(b, &(struct request){ .op = OP_MEMORY }, NULL, 0, &answer) < 0 ? 0 : answer.memory;
}
