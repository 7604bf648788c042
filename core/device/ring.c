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
 * taken; when nothing is used both stand at 0, so that an empty ring has room for a slot as large as itself.
 *
 * Memory is pinned by registering it, if possible: then it stays ours, in huge pages, and outlives its context. Some
 * drivers refuse that (or take long, about which the saver warns). The other way is memory that the driver allocates.
 *
 * The memory is resident before the first slot is taken: faulting it in during a save would cost more than the copy.
 * A fork does not hand it to the child (the child may not save anyway), so that the parent's next writes to it copy no
 * pages and device copies never land in pages that only the child still sees. Core dumps leave it out. */
#include "core/device/ring.h"

#include <pthread.h>
#include <signal.h>
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
	int rc;
	pthread_t thread;
};

/* In small steps, because a call holds the lock of the address space, and threads that map memory (the heartbeat's,
 * too) wait for it: in one call, that would be minutes for a large ring on a busy machine. */
static void *ring_fault_main(void *arg)
{
	struct ring_fault *f = arg;

	for (uint64_t at = 0, n; at < f->bytes && f->rc == 0; at += n) {
		n = f->bytes - at < RING_FAULT_STEP_BYTES ? f->bytes - at : RING_FAULT_STEP_BYTES;
		f->rc = madvise(f->memory + at, n, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
	}
	if (f->rc != -EINVAL)
		return NULL;
	f->rc = 0;                       /* Linux before 5.14 */
	for (uint64_t at = 0; at < f->bytes; at += f->page_bytes)
		*(volatile char *)(f->memory + at) = 0;
	return NULL;
}

/* Huge pages are cleared by the thread that touches them, at a few GB/s: several do it. */
static int ring_fault_in(const struct device_ring *r, uint64_t bytes)
{
	struct ring_fault faults[RING_FAULT_THREADS];
	uint64_t want = bytes / RING_FAULT_BYTES + 1, cpus = base_cpu_count(), step, at = 0;
	unsigned n = 0, started = 0;
	sigset_t all, before;
	int rc = 0;

	want = want < cpus ? want : cpus;
	want = want < RING_FAULT_THREADS ? want : RING_FAULT_THREADS;
	step = (bytes / want + RING_HUGE_BYTES) & ~(RING_HUGE_BYTES - 1);
	for (; at < bytes; at += step)
		faults[n++] = (struct ring_fault){.memory = r->memory + at, .page_bytes = r->page_bytes,
			.bytes = bytes - at < step ? bytes - at : step};
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited: the program's signals are for its own threads */
	while (started + 1 < n &&
	       pthread_create(&faults[started].thread, NULL, ring_fault_main, &faults[started]) == 0)
		started++;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	for (unsigned i = started; i < n; i++)
		ring_fault_main(&faults[i]);
	for (unsigned i = 0; i < started; i++)
		pthread_join(faults[i].thread, NULL);
	for (unsigned i = 0; i < n; i++)
		if (faults[i].rc < 0)
			rc = faults[i].rc;
	return rc;
}

static int ring_lock(struct device_ring *r, uint64_t bytes, struct base_error *err)
{
	struct rlimit limit = {0};
	int rc;

	if (mlock(r->memory, bytes) == 0) {
		r->kind = DEVICE_MEMORY_LOCKED;
		return 0;
	}
	rc = -errno;
	getrlimit(RLIMIT_MEMLOCK, &limit);
	return base_error_set(err, rc == -EAGAIN ? -ENOMEM : rc,
		"%llu bytes cannot be locked in memory (RLIMIT_MEMLOCK is %llu): %s", (unsigned long long)bytes,
		(unsigned long long)limit.rlim_cur, base_error_name(rc));
}

/* ---- pinning ---- */

static void ring_pinned(struct device_ring *r)
{
	r->why = (struct base_error){0};
	pthread_mutex_lock(&r->lock);
	r->kind = DEVICE_MEMORY_PINNED;
	pthread_mutex_unlock(&r->lock);
}

/* The answers of all that was tried. */
static int ring_refused(struct device_ring *r, int rc, const struct base_error *why)
{
	struct base_error before = r->why;

	return base_error_set(&r->why, rc, "%.400s%s%.400s", before.text, before.text[0] ? "; " : "", why->text);
}

/* Memory that is locked already may be registered as well. */
static int ring_register(struct device_ring *r, const struct device_fence *fence)
{
	uint64_t begin = base_monotonic_ns();
	struct base_error why = {0};
	int rc;

	rc = device_registration_new(fence, r->memory, r->pages * r->page_bytes, &r->registration, &why);
	if (rc < 0)
		return ring_refused(r, rc, &why);
	r->register_ns = base_monotonic_ns() - begin;
	ring_pinned(r);
	return 0;
}

static int ring_allocate(struct device_ring *r, uint64_t bytes, const struct device_fence *fence)
{
	struct base_error why = {0};
	void *memory;
	int rc = device_registration_allocate(fence, bytes, &memory, &r->registration, &why);

	if (rc < 0)
		return ring_refused(r, rc, &why);
	r->memory = memory;
	r->allocated = true;
	ring_pinned(r);
	return 0;
}

int device_ring_register(struct device_ring *r, const struct device_fence *fence)
{
	if (r->pin == DEVICE_PIN_NO || r->registration || r->asked)
		return 0;
	if (r->pin != DEVICE_PIN_ALLOCATE && !r->why.text[0])
		ring_register(r, fence);
	return !r->registration;
}

const char *device_ring_why(const struct device_ring *r) { return r->why.text; }
uint64_t device_ring_register_ns(const struct device_ring *r) { return r->register_ns; }

/* ---- making ---- */

static int ring_resident(struct device_ring *r, uint64_t bytes, struct base_error *err)
{
	int rc;

	r->memory = ring_map(bytes);
	if (r->memory == MAP_FAILED)
		return base_no_memory_for(err, "a staging ring of %llu bytes", (unsigned long long)bytes);
	madvise(r->memory, bytes, MADV_HUGEPAGE); /* hints: without them it is only slower */
	madvise(r->memory, bytes, MADV_DONTFORK);
	madvise(r->memory, bytes, MADV_DONTDUMP);
	rc = ring_fault_in(r, bytes);
	if (rc == -EFAULT || rc == -ENOMEM)
		return base_no_memory_for(err, "a staging ring of %llu bytes", (unsigned long long)bytes);
	return rc == 0 ? 0 : base_error_set(err, rc, "a staging ring of %llu bytes: %s", (unsigned long long)bytes,
		base_error_name(rc));
}

static void ring_unmap(struct device_ring *r, uint64_t bytes)
{
	if (r->memory != MAP_FAILED && !r->allocated)
		munmap(r->memory, bytes);
	r->memory = MAP_FAILED;
}

/* The first way, the second one: there is memory at return, pinned or not. */
static int ring_pin(struct device_ring *r, uint64_t bytes, const struct device_fence *fence, struct base_error *err)
{
	int rc;

	r->asked = true;
	if (r->pin == DEVICE_PIN_ALLOCATE && ring_allocate(r, bytes, fence) == 0)
		return 0;
	rc = ring_resident(r, bytes, err);
	if (rc < 0 || ring_register(r, fence) == 0 || r->pin == DEVICE_PIN_ALLOCATE)
		return rc;
	ring_unmap(r, bytes); /* both at one time may be more than there is */
	if (ring_allocate(r, bytes, fence) == 0)
		return 0;
	if (r->pin == DEVICE_PIN_YES)
		return base_error_set(err, r->why.code, "%s", r->why.text);
	return ring_resident(r, bytes, err);
}

static int ring_prepare(struct device_ring *r, uint64_t bytes, const struct device_fence *fence,
	struct base_error *err)
{
	struct base_error why = {0};
	int rc;

	r->slots = calloc(r->pages, sizeof *r->slots);
	if (!r->slots)
		return base_no_memory_for(err, "a staging ring of %llu bytes", (unsigned long long)bytes);
	rc = fence && r->pin != DEVICE_PIN_NO ? ring_pin(r, bytes, fence, err) : ring_resident(r, bytes, err);
	if (rc < 0 || r->pin == DEVICE_PIN_NO || r->registration)
		return rc;
	rc = ring_lock(r, bytes, &why);
	if (rc < 0 && r->pin == DEVICE_PIN_YES)
		return base_error_set(err, rc, "%s", why.text);
	if (rc < 0)
		base_debug("staging memory is not locked: %s", why.text);
	return 0;
}

int device_ring_new(uint64_t bytes, enum device_pin pin, const struct device_fence *fence, struct device_ring **ret_r,
	struct base_error *err)
{
	base_cleanup(device_ring_free_p) struct device_ring *r = NULL;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	int rc;

	if (bytes == 0 || bytes > RING_PAGES_MAX * page || bytes > SIZE_MAX - page - RING_HUGE_BYTES)
		return base_error_set(err, -EINVAL, "a staging ring of %llu bytes is not possible",
			(unsigned long long)bytes);
	r = calloc(1, sizeof *r);
	if (!r)
		return base_no_memory(err);
	pthread_mutex_init(&r->lock, NULL);
	r->memory = MAP_FAILED;
	r->pin = pin;
	r->page_bytes = page;
	r->pages = (uint32_t)((bytes + page - 1) / page);
	rc = ring_prepare(r, r->pages * page, fence, err);
	if (rc < 0)
		return rc;
	ring_forbid(r->memory, r->pages * page);
	*ret_r = base_steal(r);
	return 0;
}

void device_ring_free(struct device_ring *r)
{
	if (!r)
		return;
	if (r->memory != MAP_FAILED) {
		ring_allow(r->memory, r->pages * r->page_bytes);
		device_registration_free(r->registration);
		ring_unmap(r, r->pages * r->page_bytes);
	}
	pthread_mutex_destroy(&r->lock);
	free(r->slots);
	free(r);
}

uint64_t device_ring_bytes(const struct device_ring *r)
{
	return r->pages * r->page_bytes;
}

enum device_memory device_ring_memory(const struct device_ring *r)
{
	struct device_ring *ring = (struct device_ring *)r; /* the lock is no part of what is promised to stay */
	enum device_memory kind;

	pthread_mutex_lock(&ring->lock);
	kind = r->kind;
	pthread_mutex_unlock(&ring->lock);
	return kind;
}

/* ---- slots ---- */

static uint32_t ring_take_at_head(struct device_ring *r, uint32_t pages, uint32_t state)
{
	uint32_t at = r->head;

	r->slots[at] = pages | state;
	r->used += pages;
	r->head = at + pages == r->pages ? 0 : at + pages;
	return at;
}

/* Called with the lock held. The page where the slot begins, or r->pages: no room. */
static uint32_t ring_take(struct device_ring *r, uint32_t pages)
{
	uint32_t at_end = r->head >= r->tail ? r->pages - r->head : r->tail - r->head;

	if (r->used == r->pages)
		return r->pages;
	if (pages > at_end) {
		if (r->head < r->tail || pages > r->tail)
			return r->pages;
		ring_take_at_head(r, at_end, RING_SLOT_GIVEN);
	}
	return ring_take_at_head(r, pages, 0);
}

void *device_ring_take(struct device_ring *r, uint64_t bytes)
{
	uint64_t pages = bytes / r->page_bytes + (bytes % r->page_bytes != 0);
	uint32_t at;
	char *slot;

	if (pages > r->pages)
		return NULL;
	pages = pages ? pages : 1;
	pthread_mutex_lock(&r->lock);
	at = ring_take(r, (uint32_t)pages);
	pthread_mutex_unlock(&r->lock);
	if (at == r->pages)
		return NULL;
	slot = r->memory + at * r->page_bytes;
	ring_allow(slot, bytes);
	return slot;
}

/* Called with the lock held. Everything given back at the tail becomes free. */
static void ring_advance(struct device_ring *r)
{
	while (r->used > 0 && (r->slots[r->tail] & RING_SLOT_GIVEN)) {
		uint32_t pages = r->slots[r->tail] & ~RING_SLOT_GIVEN;

		r->slots[r->tail] = 0;
		r->used -= pages;
		r->tail = r->tail + pages == r->pages ? 0 : r->tail + pages;
	}
	if (r->used == 0)
		r->head = r->tail = 0;
}

int device_ring_give(struct device_ring *r, void *slot)
{
	uintptr_t offset = (uintptr_t)slot - (uintptr_t)r->memory;
	uint64_t at = offset / r->page_bytes;
	int rc = 0;

	if ((uintptr_t)slot < (uintptr_t)r->memory || at >= r->pages || offset % r->page_bytes)
		return -EINVAL;
	pthread_mutex_lock(&r->lock);
	if (r->slots[at] == 0 || (r->slots[at] & RING_SLOT_GIVEN)) {
		rc = -EINVAL;
	} else {
		ring_forbid(slot, r->slots[at] * r->page_bytes);
		r->slots[at] |= RING_SLOT_GIVEN;
		ring_advance(r);
	}
	pthread_mutex_unlock(&r->lock);
	return rc;
}

uint64_t device_ring_used(const struct device_ring *r)
{
	struct device_ring *ring = (struct device_ring *)r;
	uint64_t used;

	pthread_mutex_lock(&ring->lock);
	used = r->used * r->page_bytes;
	pthread_mutex_unlock(&ring->lock);
	return used;
}
