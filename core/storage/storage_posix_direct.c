/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_posix_direct: reads past the page cache.
 *
 * Bytes that a load reads once need no place in the page cache: copying them there and from there costs as much
 * processor time as everything else, and pushes out what others will read again. So a large read goes to the disk with
 * O_DIRECT, if the file system says that it can (STATX_DIOALIGN: local ones) and the bytes are not in the cache
 * (cachestat, Linux 6.5). In all other cases it is an ordinary read, which is always right.
 *
 * A second descriptor of the same file has O_DIRECT, since the first one is shared with ordinary reads. It is opened by
 * the first thread that needs it. From then on ordinary reads of the file are of checks, or in a mount of single whole
 * pieces: so the kernel is advised not to read ahead. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/le.h"
#include "core/storage/storage_posix_internal.h"

#ifndef SYS_cachestat
#define SYS_cachestat 451 /* one number on all processors */
#endif

enum { DIRECT_UNKNOWN = -1, DIRECT_NONE = -2 }; /* in place of a descriptor */

/* struct cachestat_range and struct cachestat of Linux 6.5 and later */
struct cache_range { uint64_t offset, len; };
struct cache_pages { uint64_t cached, dirty, writeback, evicted, recently_evicted; };

void posix_direct_init(struct posix_direct *d)
{
	atomic_init(&d->fd, DIRECT_UNKNOWN);
	atomic_init(&d->advised, false);
}

void posix_direct_release(struct posix_direct *d)
{
	int fd = atomic_load(&d->fd);

	if (fd >= 0)
		close(fd);
}

size_t posix_direct_align(int fd)
{
#ifdef STATX_DIOALIGN
	struct statx st;

	if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && st.stx_mask & STATX_DIOALIGN
		&& st.stx_dio_mem_align > 0 && STORAGE_PAST_ALIGN % st.stx_dio_mem_align == 0
		&& st.stx_dio_offset_align > 0 && STORAGE_PAST_ALIGN % st.stx_dio_offset_align == 0)
		return st.stx_dio_mem_align;
#else
	(void)fd;
#endif
	return 0;
}

/* A descriptor of the same file, or DIRECT_NONE. */
static int direct_reopen(int fd)
{
	char path[64];
	int again = -1;

	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	if (posix_direct_align(fd))
		again = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
	return again < 0 ? DIRECT_NONE : again;
}

static int direct_open(struct posix_direct *d, int fd)
{
	int found = atomic_load(&d->fd), unknown = DIRECT_UNKNOWN;

	if (found != DIRECT_UNKNOWN)
		return found;
	found = direct_reopen(fd);
	if (atomic_compare_exchange_strong(&d->fd, &unknown, found))
		return found;
	if (found >= 0)
		close(found);
	return unknown;
}

/* Does the kernel know, and are less than half of these bytes in the page cache? */
static bool direct_pays(int fd, uint64_t offset, uint64_t len)
{
	struct cache_range range = {offset, len};
	struct cache_pages pages;
	long page = sysconf(_SC_PAGESIZE);

	return syscall(SYS_cachestat, fd, &range, &pages, 0) == 0 && pages.cached < len / 2 / (uint64_t)page;
}

/* Reads [offset, offset + len), which are aligned, or up to the end of the file: at least `need` bytes. */
static bool direct_read(int fd, uint64_t offset, uint8_t *room, size_t len, size_t need)
{
	size_t got = 0;

	while (got < need) {
		ssize_t n = pread(fd, room + got, len - got, (off_t)(offset + got));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0 || (n % STORAGE_PAST_ALIGN != 0 && got + (size_t)n < need))
			return false;
		got += (size_t)n;
	}
	return true;
}

int posix_read_past(struct posix_direct *d, int fd, uint64_t offset, size_t len, void *room, const uint8_t **ret_bytes)
{
	uint64_t from = offset / STORAGE_PAST_ALIGN * STORAGE_PAST_ALIGN, end;
	size_t before = offset - from;
	int direct;

	if (base_add_overflows(offset, len + STORAGE_PAST_ALIGN, &end) || end > INT64_MAX)
		return -ENODATA;
	*ret_bytes = (uint8_t *)room + before;
	direct = direct_open(d, fd);
	if (direct >= 0 && direct_pays(fd, offset, len)
		&& direct_read(direct, from, room, base_align(before + len, STORAGE_PAST_ALIGN), before + len)) {
		if (!atomic_exchange(&d->advised, true))
			(void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
		return STORAGE_PAST_CACHE;
	}
	return posix_read_at(fd, offset, (uint8_t *)room + before, len); /* also to learn the error */
}
