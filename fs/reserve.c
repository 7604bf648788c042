/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/reserve.h"

#include <errno.h>
#include <unistd.h>

#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "fs/memfd.h"

#define STEP_BYTES (UINT64_C(32) << 20) /* taken at a time; a thread that needs the reserve meanwhile waits for it */

void fs_reserve_init(struct fs_reserve *v)
{
	pthread_mutex_init(&v->lock, NULL);
	v->fd = -1;
}

void fs_reserve_release(struct fs_reserve *v)
{
	fs_reserve_drop(v);
	pthread_mutex_destroy(&v->lock);
}

static int take_out(struct fs_reserve *v)
{
	int fd;

	pthread_mutex_lock(&v->lock);
	fd = base_steal_fd(&v->fd);
	v->bytes = 0;
	pthread_mutex_unlock(&v->lock);
	return fd;
}

int fs_reserve_memfd(struct fs_reserve *v, uint64_t size)
{
	int fd = take_out(v);
	int error;

	if (fd < 0)
		return fs_memfd_new(size);
	if (ftruncate(fd, (off_t)size) == 0)
		return fd;
	error = errno;
	close(fd);
	return -error;
}

void fs_reserve_drop(struct fs_reserve *v)
{
	int fd = take_out(v);

	if (fd >= 0)
		close(fd);
}

static int grow(struct fs_reserve *v, uint64_t bytes)
{
	struct fs_memfd_map map;
	int r;
	int64_t taken;

	if (v->fd < 0 && (v->fd = fs_memfd_new(bytes)) < 0)
		return v->fd;
	if (ftruncate(v->fd, (off_t)bytes))
		return -errno;
	r = fs_memfd_map(v->fd, bytes, true, &map);
	if (r < 0)
		return r;
	map.taken = v->bytes;
	taken = fs_memfd_take(&map, v->bytes, bytes, true);
	fs_memfd_unmap(&map);
	if (taken >= 0)
		v->bytes = bytes;
	return taken < 0 ? (int)taken : 0;
}

bool fs_reserve_grow(struct fs_reserve *v, uint64_t most)
{
	bool more;

	pthread_mutex_lock(&v->lock);
	more = v->bytes < most && grow(v, base_min(most, v->bytes + STEP_BYTES)) == 0;
	pthread_mutex_unlock(&v->lock);
	return more;
}
