/* SPDX-License-Identifier: Apache-2.0
 *
 * ring: one mapping, used as a queue of slots. `head` is where the next slot begins, `tail` where the oldest one that
 * is not free begins; both in pages. A slot that does not fit before the end of the mapping begins at its start, and
 * the pages skipped become a slot that is given back already.
 *
 * A table with one word for each page describes the slots; the word of a slot's first page says how many pages it has
 * and whether it was given back. Take and give allocate nothing, give costs O(1) amortised in any order, and a pointer
 * that is not the start of a taken slot (foreign, inside a slot, given before) is recognised.
 *
 * Invariants (under lock): pages between tail and head, `used` of them, are slots one behind another; the oldest is
 * taken; when nothing is used both are 0, so that an empty ring has room for a slot as large as itself.
 *
 * Memory is pinned by registering it, if possible: then it stays ours, in huge pages, and outlives its context. Some
 * drivers refuse that (or take long, about which the saver warns). The other way is memory that the driver allocates.
 *
 * The memory is resident before the first slot is taken: faulting it in during a save would cost more than the copy.
 * A fork does not hand it to the child (the child may not save anyway), so that the parent's next writes to it copy no
 * pages and device copies never land in pages that only the child still sees. Core dumps leave it out. */
#include "core/device/ring.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "core/base/cleanup.h"
#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/base/log.h"
#include "core/base/pool.h"
#include "core/device/cuda.h"

#define RING_HUGE_BYTES (UINT64_C(2) << 20)
#define RING_FAULT_BYTES (UINT64_C(32) << 20)  /* less than this is not worth a thread */
#define RING_FAULT_STEP_BYTES (UINT64_C(2) << 20)
#define RING_FAULT_THREADS 16u
#define RING_SLOT_GIVEN (UINT32_C(1) << 31)    /* in a word of the table; the rest counts pages, 0: no slot begins */
#define RING_PAGES_MAX (RING_SLOT_GIVEN - 1)

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define ring_forbid(p, bytes) __asan_poison_memory_region(p, bytes)
#define ring_allow(p, bytes) __asan_unpoison_memory_region(p, bytes)
#else
#define ring_forbid(p, bytes) ((void)(p), (void)(bytes))
#define ring_allow(p, bytes) ((void)(p), (void)(bytes))
#endif

struct device_ring {
	char *memory;                    /* constant after new, as are the next three */
	uint64_t page_bytes;
	uint32_t pages;
	enum device_pin pin;
	struct device_registration *registration; /* used by the thread that registers, as are the next three */
	bool asked;                      /* the driver was asked for all that pin allows */
	struct base_error why;           /* what it answered */
	uint64_t register_ns;
	bool allocated;                  /* the memory is the driver's; constant after new */
	pthread_mutex_t lock;            /* protects what follows */
	enum device_memory kind;
	uint32_t head, tail, used;
	uint32_t *slots;
};

BASE_CLEANUP_DEFINE(struct device_ring *, device_ring_free)

/* ---- memory ---- */

/* Begins at a huge page where it holds some. MAP_FAILED like mmap. */
static char *ring_map(uint64_t bytes)
{
	uint64_t extra = bytes >= RING_HUGE_BYTES ? RING_HUGE_BYTES : 0, before;
	char *memory;

	memory = mmap(NULL, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED || !extra)
		return memory;
	before = -(uintptr_t)memory & (RING_HUGE_BYTES - 1);
	if (before)
		munmap(memory, before);
	munmap(memory + before + bytes, extra - before);
	return memory + before;
}

struct ring_fault {
	char *memory;
	uint64_t bytes, page_bytes;
	int r;
	pthread_t thread;
};

/* In small steps, because a call holds the lock of the address space, and threads that map memory (the heartbeat's,
 * too) wait for it: in one call, that would be minutes for a large ring on a busy machine. */
static void *ring_fault_main(void *arg)
{
	struct ring_fault *f = arg;

	for (uint64_t at = 0, n; at < f->bytes && f->r == 0; at += n) {
		n = base_min(f->bytes - at, RING_FAULT_STEP_BYTES);
		f->r = madvise(f->memory + at, n, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
	}
	if (f->r != -EINVAL)
		return NULL;
	f->r = 0;                       /* Linux before 5.14 */
	for (uint64_t at = 0; at < f->bytes; at += f->page_bytes)
		*(volatile char *)(f->memory + at) = 0;
	return NULL;
}

/* Huge pages are cleared by the thread that touches them, at a few GB/s: several do it. */
static int ring_fault_in(const struct device_ring *ring, uint64_t bytes)
{
	struct ring_fault faults[RING_FAULT_THREADS];
	uint64_t want = bytes / RING_FAULT_BYTES + 1, cpus = base_cpu_count(), step, at = 0;
	unsigned n = 0, started = 0;
	int r = 0;

	want = base_min(base_min(want, cpus), RING_FAULT_THREADS);
	step = (bytes / want + RING_HUGE_BYTES) & ~(RING_HUGE_BYTES - 1);
	for (; at < bytes; at += step)
		faults[n++] = (struct ring_fault){.memory = ring->memory + at, .page_bytes = ring->page_bytes,
			.bytes = base_min(bytes - at, step)};
	while (started + 1 < n && base_thread_start(&faults[started].thread, ring_fault_main, &faults[started]) == 0)
		started++;
	for (unsigned i = started; i < n; i++)
		ring_fault_main(&faults[i]);
	for (unsigned i = 0; i < started; i++)
		pthread_join(faults[i].thread, NULL);
	for (unsigned i = 0; i < n; i++)
		if (faults[i].r < 0)
			r = faults[i].r;
	return r;
}

static int ring_lock(struct device_ring *ring, uint64_t bytes, struct base_error *err)
{
	struct rlimit limit = {0};
	int r;

	if (mlock(ring->memory, bytes) == 0) {
		ring->kind = DEVICE_MEMORY_LOCKED;
		return 0;
	}
	r = -errno;
	getrlimit(RLIMIT_MEMLOCK, &limit);
	return base_error_set(err, r == -EAGAIN ? -ENOMEM : r,
		"%llu bytes cannot be locked in memory (RLIMIT_MEMLOCK is %llu): %s", (unsigned long long)bytes,
		(unsigned long long)limit.rlim_cur, base_error_name(r));
}

/* ---- pinning ---- */

static void ring_pinned(struct device_ring *ring)
{
	ring->why = (struct base_error){0};
	pthread_mutex_lock(&ring->lock);
	ring->kind = DEVICE_MEMORY_PINNED;
	pthread_mutex_unlock(&ring->lock);
}

/* The answers of all that was tried. */
static int ring_refused(struct device_ring *ring, int r, const struct base_error *why)
{
	struct base_error before = ring->why;

	return base_error_set(&ring->why, r, "%.400s%s%.400s", before.text, before.text[0] ? "; " : "", why->text);
}

/* Memory that is locked already may be registered as well. */
static int ring_register(struct device_ring *ring, const struct device_fence *fence)
{
	uint64_t begin = base_monotonic_ns();
	struct base_error why = {0};
	void *memory = ring->memory;
	int r = device_registration_new(fence, &memory, ring->pages * ring->page_bytes, &ring->registration, &why);

	if (r < 0)
		return ring_refused(ring, r, &why);
	ring->register_ns = base_monotonic_ns() - begin;
	ring_pinned(ring);
	return 0;
}

static int ring_allocate(struct device_ring *ring, uint64_t bytes, const struct device_fence *fence)
{
	struct base_error why = {0};
	void *memory = NULL;
	int r = device_registration_new(fence, &memory, bytes, &ring->registration, &why);

	if (r < 0)
		return ring_refused(ring, r, &why);
	ring->memory = memory;
	ring->allocated = true;
	ring_pinned(ring);
	return 0;
}

int device_ring_register(struct device_ring *ring, const struct device_fence *fence)
{
	if (ring->pin == DEVICE_PIN_NO || ring->registration || ring->asked)
		return 0;
	if (ring->pin != DEVICE_PIN_ALLOCATE && !ring->why.text[0])
		ring_register(ring, fence);
	return !ring->registration;
}

const char *device_ring_why(const struct device_ring *ring) { return ring->why.text; }
uint64_t device_ring_register_ns(const struct device_ring *ring) { return ring->register_ns; }

/* ---- making ---- */

static int ring_resident(struct device_ring *ring, uint64_t bytes, struct base_error *err)
{
	int r;

	ring->memory = ring_map(bytes);
	if (ring->memory == MAP_FAILED)
		return base_no_memory_for(err, "a staging ring of %llu bytes", (unsigned long long)bytes);
	madvise(ring->memory, bytes, MADV_HUGEPAGE); /* hints: without them it is only slower */
	madvise(ring->memory, bytes, MADV_DONTFORK);
	madvise(ring->memory, bytes, MADV_DONTDUMP);
	r = ring_fault_in(ring, bytes);
	if (r == -EFAULT || r == -ENOMEM)
		return base_no_memory_for(err, "a staging ring of %llu bytes", (unsigned long long)bytes);
	return r == 0 ? 0 : base_error_set(err, r, "a staging ring of %llu bytes: %s", (unsigned long long)bytes,
		base_error_name(r));
}

static void ring_unmap(struct device_ring *ring, uint64_t bytes)
{
	if (ring->memory != MAP_FAILED && !ring->allocated)
		munmap(ring->memory, bytes);
	ring->memory = MAP_FAILED;
}

/* The first way, the second one: there is memory at return, pinned or not. */
static int ring_pin(struct device_ring *ring, uint64_t bytes, const struct device_fence *fence, struct base_error *err)
{
	int r;

	ring->asked = true;
	if (ring->pin == DEVICE_PIN_ALLOCATE && ring_allocate(ring, bytes, fence) == 0)
		return 0;
	r = ring_resident(ring, bytes, err);
	if (r < 0 || ring_register(ring, fence) == 0 || ring->pin == DEVICE_PIN_ALLOCATE)
		return r;
	ring_unmap(ring, bytes); /* both at one time may be more than there is */
	if (ring_allocate(ring, bytes, fence) == 0)
		return 0;
	if (ring->pin == DEVICE_PIN_YES)
		return base_error_set(err, ring->why.code, "%s", ring->why.text);
	return ring_resident(ring, bytes, err);
}

static int ring_prepare(struct device_ring *ring, uint64_t bytes, const struct device_fence *fence,
	struct base_error *err)
{
	struct base_error why = {0};
	int r;

	ring->slots = calloc(ring->pages, sizeof *ring->slots);
	if (!ring->slots)
		return base_no_memory_for(err, "a staging ring of %llu bytes", (unsigned long long)bytes);
	r = fence && ring->pin != DEVICE_PIN_NO ? ring_pin(ring, bytes, fence, err) : ring_resident(ring, bytes, err);
	if (r < 0 || ring->pin == DEVICE_PIN_NO || ring->registration)
		return r;
	r = ring_lock(ring, bytes, &why);
	if (r < 0 && ring->pin == DEVICE_PIN_YES)
		return base_error_set(err, r, "%s", why.text);
	if (r < 0)
		base_debug("staging memory is not locked: %s", why.text);
	return 0;
}

int device_ring_new(uint64_t bytes, enum device_pin pin, const struct device_fence *fence, struct device_ring **ret_r,
	struct base_error *err)
{
	base_cleanup(device_ring_free_p) struct device_ring *ring = NULL;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	int r;

	if (bytes == 0 || bytes > RING_PAGES_MAX * page || bytes > SIZE_MAX - page - RING_HUGE_BYTES)
		return base_error_set(err, -EINVAL, "a staging ring of %llu bytes is not possible",
			(unsigned long long)bytes);
	ring = calloc(1, sizeof *ring);
	if (!ring)
		return base_no_memory(err);
	pthread_mutex_init(&ring->lock, NULL);
	ring->memory = MAP_FAILED;
	ring->pin = pin;
	ring->page_bytes = page;
	ring->pages = (uint32_t)base_div_up(bytes, page);
	r = ring_prepare(ring, ring->pages * page, fence, err);
	if (r < 0)
		return r;
	ring_forbid(ring->memory, ring->pages * page);
	*ret_r = base_steal(ring);
	return 0;
}

void device_ring_free(struct device_ring *ring)
{
	if (!ring)
		return;
	if (ring->memory != MAP_FAILED) {
		ring_allow(ring->memory, ring->pages * ring->page_bytes);
		device_registration_free(ring->registration);
		ring_unmap(ring, ring->pages * ring->page_bytes);
	}
	pthread_mutex_destroy(&ring->lock);
	free(ring->slots);
	free(ring);
}

uint64_t device_ring_bytes(const struct device_ring *ring)
{
	return ring->pages * ring->page_bytes;
}

enum device_memory device_ring_memory(const struct device_ring *promised)
{
	struct device_ring *ring = (struct device_ring *)promised; /* the lock is no part of what is promised to stay */
	enum device_memory kind;

	pthread_mutex_lock(&ring->lock);
	kind = ring->kind;
	pthread_mutex_unlock(&ring->lock);
	return kind;
}

/* ---- slots ---- */

static uint32_t ring_take_at_head(struct device_ring *ring, uint32_t pages, uint32_t state)
{
	uint32_t at = ring->head;

	ring->slots[at] = pages | state;
	ring->used += pages;
	ring->head = at + pages == ring->pages ? 0 : at + pages;
	return at;
}

/* Called with the lock held. The page where the slot begins, or ring->pages: no room. */
static uint32_t ring_take(struct device_ring *ring, uint32_t pages)
{
	uint32_t at_end = ring->head >= ring->tail ? ring->pages - ring->head : ring->tail - ring->head;

	if (ring->used == ring->pages)
		return ring->pages;
	if (pages > at_end) {
		if (ring->head < ring->tail || pages > ring->tail)
			return ring->pages;
		ring_take_at_head(ring, at_end, RING_SLOT_GIVEN);
	}
	return ring_take_at_head(ring, pages, 0);
}

void *device_ring_take(struct device_ring *ring, uint64_t bytes)
{
	uint64_t pages = base_max(base_div_up(bytes, ring->page_bytes), 1);
	uint32_t at;
	char *slot;

	if (pages > ring->pages)
		return NULL;
	pthread_mutex_lock(&ring->lock);
	at = ring_take(ring, (uint32_t)pages);
	pthread_mutex_unlock(&ring->lock);
	if (at == ring->pages)
		return NULL;
	slot = ring->memory + at * ring->page_bytes;
	ring_allow(slot, bytes);
	return slot;
}

/* Called with the lock held. Everything given back at the tail becomes free. */
static void ring_advance(struct device_ring *ring)
{
	while (ring->used > 0 && (ring->slots[ring->tail] & RING_SLOT_GIVEN)) {
		uint32_t pages = ring->slots[ring->tail] & ~RING_SLOT_GIVEN;

		ring->slots[ring->tail] = 0;
		ring->used -= pages;
		ring->tail = ring->tail + pages == ring->pages ? 0 : ring->tail + pages;
	}
	if (ring->used == 0)
		ring->head = ring->tail = 0;
}

int device_ring_give(struct device_ring *ring, void *slot)
{
	uintptr_t offset = (uintptr_t)slot - (uintptr_t)ring->memory;
	uint64_t at = offset / ring->page_bytes;
	int r = 0;

	if ((uintptr_t)slot < (uintptr_t)ring->memory || at >= ring->pages || offset % ring->page_bytes)
		return -EINVAL;
	pthread_mutex_lock(&ring->lock);
	if (ring->slots[at] == 0 || (ring->slots[at] & RING_SLOT_GIVEN)) {
		r = -EINVAL;
	} else {
		ring_forbid(slot, ring->slots[at] * ring->page_bytes);
		ring->slots[at] |= RING_SLOT_GIVEN;
		ring_advance(ring);
	}
	pthread_mutex_unlock(&ring->lock);
	return r;
}

uint64_t device_ring_used(const struct device_ring *promised)
{
	struct device_ring *ring = (struct device_ring *)promised;
	uint64_t used;

	pthread_mutex_lock(&ring->lock);
	used = ring->used * ring->page_bytes;
	pthread_mutex_unlock(&ring->lock);
	return used;
}
