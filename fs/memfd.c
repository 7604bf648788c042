/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/le.h"
#include "core/storage/spread.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23           /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25                 /* Linux 6.1 */
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u               /* Linux 6.3 */
#endif

#define HUGE_BYTES (UINT64_C(2) << 20)
#define TAKE_LEAST_BYTES (UINT64_C(16) << 20)
#define TAKE_MOST_BYTES (UINT64_C(128) << 20)

int fs_memfd_new(uint64_t size)
{
	int fd = (int)syscall(SYS_memfd_create, "vckpt", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	int r;

	if (fd < 0 && errno == EINVAL)
		fd = (int)syscall(SYS_memfd_create, "vckpt", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	r = ftruncate(fd, (off_t)size) ? -errno : 0;
	if (r < 0)
		close(fd);
	return r < 0 ? r : fd;
}

int fs_memfd_seal(int fd)
{
	return fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) ? -errno : 0;
}

int fs_memfd_map(int fd, uint64_t size, bool writable, struct fs_memfd_map *ret_m)
{
	size_t area_bytes = base_align(size, HUGE_BYTES) + HUGE_BYTES;
	void *area = mmap(NULL, area_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	uint8_t *at, *bytes;

	if (area == MAP_FAILED)
		return -errno;
	at = (uint8_t *)base_align((uintptr_t)area, HUGE_BYTES);
	bytes = mmap(at, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED, fd, 0);
	if (bytes == MAP_FAILED) {
		int error = errno;
		munmap(area, area_bytes);
		return -error;
	}
	*ret_m = (struct fs_memfd_map){bytes, area, area_bytes, fd, size, 0, 0};
	return 0;
}

/* Whatever the kernel gives to others unasked: MADV_COLLAPSE asks. With small pages the file reads slower than one on a
 * disk, whose pages are large, and where the kernel has huge ones at hand its memory takes half as long to be had. */
void fs_memfd_collapse(const struct fs_memfd_map *m, uint64_t from, uint64_t to)
{
	if (to > from)
		(void)madvise(m->bytes + from, to - from, MADV_COLLAPSE);
}

struct pages { uint8_t *at; uint64_t len; };

static int map_some(void *arg, uint32_t i, struct base_error *err)
{
	const struct pages *p = arg;
	uint64_t from = i * HUGE_BYTES;

	(void)err;
	(void)madvise(p->at + from, base_min(HUGE_BYTES, p->len - from), MADV_POPULATE_WRITE);
	return 0;
}

/* Small pages that are there: to map 512 by one call costs half as much as by a fault each, when they are written. */
static void map_pages(const struct fs_memfd_map *m, uint64_t from, uint64_t to)
{
	struct pages p = {m->bytes + from, to - from};

	(void)storage_spread((uint32_t)base_div_up(p.len, HUGE_BYTES), map_some, &p, NULL);
}

/* Only extents with a page are collapsed, and one call costs much more than one extent: so each call takes as much as
 * there is already, within bounds. */
int64_t fs_memfd_take(struct fs_memfd_map *m, uint64_t at, uint64_t end, bool huge)
{
	uint64_t from, to;

	if (at < m->from || at > m->taken)
		m->from = m->taken = at / HUGE_BYTES * HUGE_BYTES;
	from = m->taken;
	to = from;

	if (end <= from)
		return 0;
	end = base_max(end, from + base_min(base_max(from - m->from, TAKE_LEAST_BYTES), TAKE_MOST_BYTES));
	end = base_min(base_align(end, HUGE_BYTES), m->size);
	while (huge && end - to >= HUGE_BYTES && fallocate(m->fd, 0, (off_t)to, 1) == 0)
		to += HUGE_BYTES;
	fs_memfd_collapse(m, from, to);
	if (fallocate(m->fd, 0, (off_t)from, (off_t)(end - from)))
		return -errno;
	map_pages(m, to, end);
	m->taken = end;
	return (int64_t)(end - from);
}

void fs_memfd_unmap(struct fs_memfd_map *m)
{
	if (m->bytes)
		munmap(m->area, m->area_bytes);
	m->bytes = NULL;
}
