/* SPDX-License-Identifier: Apache-2.0
 *
 * backing_assemble: a file is put into memory, sealed, and given to the kernel. The server answers reads from what is
 * there already; a loader's file begins where the loader reads. */
#include "fs/backing_internal.h"

#include <string.h>

#include "core/base/array.h"
#include "core/base/clock.h"
#include "core/base/log.h"

#define HUGE_NS UINT64_C(700000)         /* processor time for 1 MiB when the kernel has huge pages at hand */
#define RESERVE_SHARE 4                  /* at most a quarter of the memory for files is kept at hand, ... */

/* ---- with the lock ---- */

/* The file's bytes count from here on. */
static bool fill_begin(struct fs_backings *all, struct fs_backing *b)
{
	if (b->fd >= 0 || !backing_room(all, b)) { /* fd: reads of an earlier attempt may still be under way */
		all->stats.refused++;
		b->state = COUNTING;
		return false;
	}
	b->state = FILLING;
	b->owed = b->size;
	all->stats.files++;
	all->stats.bytes += b->size;
	return true;
}

/* Not the file's fault: it may be assembled another time. */
static bool is_passing(int r)
{
	return r == -ENOMEM || r == -ENOSPC || r == -EMFILE || r == -ENFILE || r == -EPIPE || r == -ETIMEDOUT
		|| r == -EBUSY || r == -ECANCELED;
}

/* r: the id, or a negative errno. */
static void fill_end(struct fs_backings *all, struct fs_backing *b, int r, uint64_t ns)
{
	if (r > 0) {
		b->state = READY;
		b->id = r;
		b->small = b->small && base_array_room(all->small, all->small_room, all->nsmall + 1) == 0;
		if (b->small)
			all->small[all->nsmall++] = b->node;
		all->stats.assembled++;
		all->stats.assembled_bytes += b->size;
		all->stats.assembled_ns += ns;
		all->reserve_most = base_min(b->size, all->stats.max_bytes / RESERVE_SHARE);
		all->reserve_until_ms = base_monotonic_ms() + BACKING_RESERVE_MS;
	} else {
		b->state = is_passing(r) ? COUNTING : REFUSED;
		b->served = 0;
		all->stats.files--;
		all->stats.bytes -= b->size;
		*(r == -ECANCELED ? &all->stats.given_up : &all->stats.failed) += 1;
	}
	backing_settle(all, b);
	pthread_cond_broadcast(&all->changed);
}

/* ---- without the lock ---- */

struct assembly {
	struct fs_backings *all;
	struct fs_backing *b;
	bool slow;                       /* the kernel has no huge pages at hand: the rest has small ones */
};

static int no_memory(const struct fs_backing *b, int r, struct base_error *err)
{
	return base_error_set(err, r, "no memory for a file of %llu bytes: %s", (unsigned long long)b->size,
		strerror(-r));
}

static bool is_given_up(const struct assembly *a) { return a->b->stop || a->all->ending; }

/* Huge pages, unless a loader would have to wait until the kernel has made them. */
static int take_memory(struct assembly *a, uint64_t at, uint64_t end)
{
	uint64_t start = base_thread_cpu_ns();
	int64_t taken = fs_memfd_take(&a->b->map, at, end, !a->slow);

	if (taken > 0 && a->b->early && !a->slow)
		a->slow = base_thread_cpu_ns() - start > ((uint64_t)taken >> 20) * HUGE_NS;
	return taken < 0 ? (int)taken : 0;
}

/* Wakes readers that wait for what is there now. `more`: bytes that come next, which others may wait for. */
static void fill_reaches(struct assembly *a, uint64_t more)
{
	pthread_mutex_lock(&a->all->lock);
	a->b->filling = a->b->ready + more;
	pthread_cond_broadcast(&a->all->changed);
	backing_unlock(a->all);
}

static int fill_stretch(void *arg, uint64_t at, uint64_t end, struct base_error *err)
{
	struct assembly *a = arg;
	int r;

	if (is_given_up(a))
		return base_error_set(err, -ECANCELED, "no one reads it any more");
	fill_reaches(a, end - at);
	r = take_memory(a, at, end);
	return r < 0 ? no_memory(a->b, r, err) : 0;
}

static int fill(struct fs_backings *all, struct fs_backing *b, int fd, struct view_file *file, struct base_error *err)
{
	struct assembly a = {.all = all, .b = b};
	int r = fs_memfd_map(fd, b->size, true, &b->map);

	if (r < 0)
		return no_memory(b, r, err);
	r = view_file_fill(file, all->m->cache, &(struct view_filling){.to = b->map.bytes, .from = b->from,
		.ready = &b->ready, .begin = fill_stretch, .arg = &a}, err);
	if (r == 0)
		fill_reaches(&a, 0);
	b->small = a.slow;
	return r;
}

/* Readers go on with a mapping that cannot be written to. */
static int seal(struct fs_backings *all, struct fs_backing *b, int fd)
{
	int r;

	pthread_mutex_lock(&all->lock);
	b->sealing = true;
	while (b->reading)
		pthread_cond_wait(&all->changed, &all->lock);
	backing_unlock(all);
	fs_memfd_unmap(&b->map);
	r = fs_memfd_seal(fd);
	if (r == 0)
		r = fs_memfd_map(fd, b->size, false, &b->map);
	pthread_mutex_lock(&all->lock);
	b->sealing = false;
	backing_unlock(all);
	return r;
}

/* The id of a backing file with all bytes of the file, or a negative errno. */
static int assemble(struct fs_backings *all, struct fs_backing *b, struct view_file *file, struct base_error *err)
{
	uint64_t free_bytes = fs_broker_memory(all->broker);
	bool large = b->size > BACKING_NOW_BYTES; /* only large files use the reserve */
	int fd, r;

	if (large && free_bytes)
		free_bytes += all->reserve.bytes;
	if (view_file_size(file) != b->size)
		return base_error_set(err, -BASE_EFORMAT, "its size has changed since it was first opened");
	if (!fs_broker_works(all->broker))
		return base_error_set(err, -EPIPE, "the keeper did not answer");
	if (free_bytes && (b->size > free_bytes / BACKING_MEMORY_SHARE || free_bytes - b->size < all->floor_bytes))
		return base_error_set(err, -ENOMEM, "it has %llu bytes, and %llu bytes of memory are available",
			(unsigned long long)b->size, (unsigned long long)free_bytes);
	fd = large ? fs_reserve_memfd(&all->reserve, b->size) : fs_memfd_new(b->size);
	if (fd < 0)
		return base_error_set(err, fd, "no memory file of %llu bytes: %s", (unsigned long long)b->size,
			strerror(-fd));
	b->from = b->early ? b->from : 0;
	b->map = (struct fs_memfd_map){.fd = fd};
	b->fd = fd;              /* backing_settle_memory closes it, after b has left FILLING */
	r = fill(all, b, fd, file, err);
	if (r < 0)
		return r;
	r = seal(all, b, fd);
	if (r < 0)
		return base_error_set(err, r, "the memory file cannot be sealed: %s", strerror(-r));
	r = fs_broker_open(all->broker, fuse_session_fd(all->m->session), fd);
	return r < 0 ? base_error_set(err, r, "no backing file: %s", strerror(-r)) : r;
}

void backing_assemble(struct fs_backings *all, struct fs_backing *b, struct view_file *file)
{
	struct base_error err = {0};
	uint64_t start = base_monotonic_ns();
	int id;

	if (!fill_begin(all, b))
		return;
	all->stats.early += b->early;
	backing_unlock(all);
	id = assemble(all, b, file, &err);
	if (id < 0)
		base_info("a file is not assembled: %s", err.text);
	pthread_mutex_lock(&all->lock);
	fill_end(all, b, id, base_monotonic_ns() - start);
}
