/* SPDX-License-Identifier: Apache-2.0
 *
 * slow_reads: to be preloaded: counts what is read of packs, and lets it take as long as a store of a given rate would
 * need that serves one read after another. VCKPT_SLOW_READS names a file of struct control, which all processes that
 * share the store map; its owner sets the rate (tests/bench/load_ranks.py).
 *
 * A read is made, and then waits until the store would have served it: what it costs is added to the time at which the
 * store has served all reads before it, or to now if it had nothing to do. So no rate is saved up. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
	_Atomic uint64_t bytes_per_s; /* 0: as fast as the store is */
	_Atomic uint64_t busy_ns;     /* CLOCK_MONOTONIC: then all reads so far are served */
	_Atomic uint64_t read_bytes;  /* of packs, since it was last set to 0 */
};

static struct control *control;

__attribute__((constructor)) static void control_map(void)
{
	const char *name = getenv("VCKPT_SLOW_READS");
	int fd = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
	struct stat st;
	void *at = MAP_FAILED;

	if (fd >= 0 && fstat(fd, &st) == 0 && (uint64_t)st.st_size >= sizeof *control)
		at = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	if (at != MAP_FAILED)
		control = at;
	else if (name)
		fprintf(stderr, "slow_reads: %s cannot be mapped: nothing is counted or slow\n", name);
}

static bool is_pack(int fd)
{
	char name[64], path[4096];
	ssize_t n;

	snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
	n = readlink(name, path, sizeof path);
	return n >= 5 && n < (ssize_t)sizeof path && memcmp(path + n - 5, ".pack", 5) == 0;
}

/* When a read of so many bytes is served that is asked for now. */
static uint64_t served_ns(uint64_t bytes, uint64_t rate)
{
	struct timespec t;
	uint64_t now, busy = atomic_load(&control->busy_ns), served;

	clock_gettime(CLOCK_MONOTONIC, &t);
	now = (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
	do
		served = (busy > now ? busy : now) + (uint64_t)((double)bytes * 1e9 / (double)rate);
	while (!atomic_compare_exchange_weak(&control->busy_ns, &busy, served));
	return served;
}

static ssize_t pay(int fd, ssize_t got)
{
	int saved = errno;

	if (control && got > 0 && is_pack(fd)) {
		uint64_t rate = atomic_load(&control->bytes_per_s);

		atomic_fetch_add(&control->read_bytes, (uint64_t)got);
		if (rate > 0) {
			uint64_t until = served_ns((uint64_t)got, rate);
			struct timespec t = {(time_t)(until / 1000000000), (long)(until % 1000000000)};

			while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
				continue;
		}
	}
	errno = saved;
	return got;
}

ssize_t pread64(int fd, void *bytes, size_t len, off_t offset)
{
	static ssize_t (*real)(int, void *, size_t, off_t);

	if (!real)
		real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
	return pay(fd, real(fd, bytes, len, offset));
}

ssize_t preadv64(int fd, const struct iovec *iov, int n, off_t offset)
{
	static ssize_t (*real)(int, const struct iovec *, int, off_t);

	if (!real)
		real = (ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, "preadv64");
	return pay(fd, real(fd, iov, n, offset));
}
