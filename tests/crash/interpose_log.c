/* SPDX-License-Identifier: Apache-2.0
 *
 * The log: records one after another, little-endian:
 *
 *   u32 bytes of the record | u32 kind | u64 inode | u64 offset | u32 len of path | u32 len of second path |
 *   u32 len of data | u32 pid | path | second path | data
 *
 * Several processes append to it, under a lock of the file; threads of one under a mutex. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "interpose.h"

struct head { uint32_t bytes, kind; uint64_t ino, offset; uint32_t path, to, data, pid; };

static int log_fd = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void interpose_log_open(const char *file)
{
	log_fd = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (log_fd < 0) {
		perror(file);
		abort();
	}
}

void interpose_log_lock(void)
{
	pthread_mutex_lock(&mutex);
	while (log_fd >= 0 && flock(log_fd, LOCK_EX) < 0)
		;
}

void interpose_log_unlock(void)
{
	if (log_fd >= 0)
		flock(log_fd, LOCK_UN);
	pthread_mutex_unlock(&mutex);
}

void interpose_log_put(const struct interpose_event *e)
{
	struct head h = {.kind = e->kind, .ino = e->ino, .offset = e->offset, .pid = (uint32_t)getpid(),
		.path = e->path ? (uint32_t)strlen(e->path) : 0, .to = e->to ? (uint32_t)strlen(e->to) : 0,
		.data = (uint32_t)e->len};
	size_t at = sizeof h, left = e->len;
	char *record;

	if (log_fd < 0)
		return;
	h.bytes = (uint32_t)(sizeof h + h.path + h.to + h.data);
	record = malloc(h.bytes);
	if (!record)
		abort();
	memcpy(record, &h, sizeof h);
	memcpy(record + at, e->path ? e->path : "", h.path);
	memcpy(record + at + h.path, e->to ? e->to : "", h.to);
	at += h.path + h.to;
	for (int i = 0; i < e->niov && left; i++) {
		size_t n = e->iov[i].iov_len < left ? e->iov[i].iov_len : left;

		memcpy(record + at, e->iov[i].iov_base, n);
		at += n;
		left -= n;
	}
	if (syscall(SYS_write, log_fd, record, (size_t)h.bytes) != (long)h.bytes)
		abort();
	free(record);
}

void interpose_mark(const char *text)
{
	interpose_said(text);
	interpose_log_lock();
	interpose_log_put(&(struct interpose_event){.kind = INTERPOSE_MARK, .path = text});
	interpose_log_unlock();
}
