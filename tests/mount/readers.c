/* SPDX-License-Identifier: Apache-2.0
 *
 * readers FILE SAME FAULTERS SEQUENTIAL SECONDS: threads that touch mapped pages of FILE at random, and threads that
 * read it from end to end, while its pages are taken away from the kernel's page cache again and again. Every byte is
 * compared with SAME, a local file of the same bytes. Prints JSON: pages and bytes of each thread, and the longest
 * that anyone waited. Exit 1: a wrong byte or an error; 3: a thread that never ended. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Pages stay for longer than a thread waits for a processor among the others: else nobody ever gets his. */
#define DROP_NS 400000000
enum { THREADS_MAX = 256, PAGE = 4096, PIECE = 1 << 20, WINDOW = 4 << 20, TOUCHES = 32, LATE_S = 120 };

static const char *path;
static const uint8_t *same;
static uint64_t size;
static atomic_bool stop, failed;
static atomic_uint running;

struct reader { pthread_t thread; unsigned number; uint64_t seed, done, longest_ns; };

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t random_below(struct reader *me, uint64_t n)
{
	me->seed = me->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (me->seed >> 16) % n;
}

static void fail(const char *what, uint64_t at)
{
	fprintf(stderr, "%s at %" PRIu64 "\n", what, at);
	failed = stop = true;
}

static void waited(struct reader *me, uint64_t since)
{
	uint64_t ns = now_ns() - since;

	if (ns > me->longest_ns)
		me->longest_ns = ns;
}

/* Each window is mapped anew, so that its pages may be taken away once it is unmapped. */
static void touch_window(struct reader *me, int fd)
{
	uint64_t start = random_below(me, size / PAGE) * PAGE, len = size - start < WINDOW ? size - start : WINDOW;
	const uint8_t *mapped = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, (off_t)start);

	if (mapped == MAP_FAILED) {
		fail(strerror(errno), start);
		return;
	}
	if (me->number % 2)
		madvise((void *)mapped, len, MADV_RANDOM);
	for (int i = 0; i < TOUCHES && !stop; i++) {
		uint64_t at = random_below(me, len), n = len - at < 64 ? len - at : 64, since = now_ns();

		if (memcmp(mapped + at, same + start + at, n) != 0)
			fail("a wrong byte in a mapped page", start + at);
		waited(me, since);
		me->done++;
	}
	munmap((void *)mapped, len);
}

static void *fault(void *arg)
{
	struct reader *me = arg;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		fail(strerror(errno), 0);
	while (!stop)
		touch_window(me, fd);
	if (fd >= 0)
		close(fd);
	running--;
	return NULL;
}

static void *sequence(void *arg)
{
	struct reader *me = arg;
	uint8_t *piece = malloc(PIECE);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t at = random_below(me, size);

	if (fd < 0 || !piece)
		fail("no file or no memory", 0);
	else
		memset(piece, 1, PIECE); /* new memory is not to be had while the others map and unmap all the time */
	while (!stop) {
		uint64_t since = now_ns();
		ssize_t n = pread(fd, piece, PIECE, (off_t)at);

		waited(me, since);
		if (n <= 0)
			fail(n < 0 ? strerror(errno) : "an early end", at);
		else if (memcmp(piece, same + at, (size_t)n) != 0)
			fail("a wrong byte", at);
		me->done += n > 0 ? (uint64_t)n : 0;
		at = n > 0 && at + (uint64_t)n < size ? at + (uint64_t)n : 0;
	}
	if (fd >= 0)
		close(fd);
	free(piece);
	running--;
	return NULL;
}

static void map_same(const char *name)
{
	struct stat st;
	int fd = open(name, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &st) < 0 || st.st_size == 0)
		exit(2);
	size = (uint64_t)st.st_size;
	same = mmap(NULL, size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
	if (same == MAP_FAILED)
		exit(2);
	close(fd);
}

/* Takes the pages that nobody has mapped away, so that they are asked for again. */
static void drop_pages(uint64_t seconds)
{
	uint64_t end = now_ns() + seconds * 1000000000u;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	while (!stop && now_ns() < end) {
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		nanosleep(&(struct timespec){.tv_nsec = DROP_NS}, NULL);
	}
	close(fd);
	stop = true;
}

static void print(const char *name, const struct reader *readers, unsigned n)
{
	uint64_t longest = 0;

	printf("\"%s\": [", name);
	for (unsigned i = 0; i < n; i++) {
		printf("%s%" PRIu64, i ? ", " : "", readers[i].done);
		if (readers[i].longest_ns > longest)
			longest = readers[i].longest_ns;
	}
	printf("], \"%s_longest_ms\": %.1f", name, (double)longest / 1e6);
}

int main(int argc, char **argv)
{
	static struct reader readers[THREADS_MAX];
	unsigned faulters, n;

	if (argc != 6)
		return 2;
	faulters = (unsigned)atoi(argv[3]);
	n = faulters + (unsigned)atoi(argv[4]);
	if (n > THREADS_MAX)
		return 2;
	path = argv[1];
	map_same(argv[2]);
	running = n;
	for (unsigned i = 0; i < n; i++) {
		readers[i] = (struct reader){.number = i, .seed = i + 1};
		if (pthread_create(&readers[i].thread, NULL, i < faulters ? fault : sequence, &readers[i]) != 0)
			return 2;
	}
	drop_pages((uint64_t)atoi(argv[5]));
	for (unsigned i = 0; running && i < LATE_S * 10; i++)
		nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
	if (running) {
		fprintf(stderr, "%u threads never ended\n", running);
		fflush(NULL);
		_exit(3);
	}
	printf("{");
	print("pages", readers, faulters);
	printf(", ");
	print("bytes", readers + faulters, n - faulters);
	printf("}\n");
	return failed;
}
