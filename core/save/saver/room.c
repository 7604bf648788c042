/* SPDX-License-Identifier: Apache-2.0
 *
 * room: how much of the machine a saver takes: the size of its ring, and its workers.
 *
 * The ring has room for one whole save. Its size is decided before a save's first copy, and again for as long as that
 * save has something to copy, whenever no slot is in use: a ring that is too small is then replaced by a larger one,
 * which costs what a first one costs. It never shrinks. Without a size in the options it takes at most half of the
 * memory that is free, divided by the ranks of this node, and where that is not to be had it stays as it is: the save
 * waits for slots, as it would with a ring of a given size. A saver warns once of a save that waited long.
 *
 * Ranks of one node: what the launcher says in the environment; else the launch's heartbeats that show this machine's
 * boot id, as far as they are there when the first save begins. Workers are the processors divided by them; those
 * that were started before this was known, and are too many, end. */
#include <stdio.h>

#include "core/base/log.h"
#include "core/base/machine.h"
#include "core/base/pool.h"
#include "core/save/saver/saver_internal.h"

#define ROOM_SLACK_BYTES (SAVER_RING_MIN_BYTES / 2)
#define ROOM_WARN_NS UINT64_C(100000000)

/* ---- the ranks of this node ---- */

unsigned saver_node_threads(unsigned given, unsigned ranks)
{
	return given ? given : (unsigned)base_max(base_cpu_count() / base_max(ranks, 1), 1);
}

/* Called once, by the thread that prepares the first flight; asks the store. */
void saver_node_count(struct save_saver *s)
{
	unsigned ranks, threads;

	if (s->node_known)
		return;
	ranks = s->node_ranks ? s->node_ranks : commit_launch_neighbours(s->launch);
	threads = saver_node_threads(s->options.threads, ranks);
	pthread_mutex_lock(&s->lock);
	s->node_ranks = ranks;
	s->node_known = true;
	for (unsigned i = 0; i < s->nworkers; i++)
		s->workers[i].surplus = i % s->threads >= threads;
	pthread_cond_broadcast(&s->work);
	pthread_mutex_unlock(&s->lock);
}

/* ---- the ring ---- */

/* Of one whole save, with what slots and bands are rounded up by. */
static uint64_t room_needed(const struct save_flight *f)
{
	return f->plan->bytes + 64 * f->plan->nboxes + f->plan->bytes / SAVER_BATCH_BYTES * 4096;
}

/* A ring of `have` bytes is given up when the larger one is there; one that is hardly larger is not worth it. */
uint64_t saver_room_size(uint64_t needed, uint64_t have, uint64_t memory, unsigned ranks)
{
	uint64_t wanted = needed + ROOM_SLACK_BYTES;
	uint64_t allowed = base_min(memory / 2 + have / 2, memory) / base_max(ranks, 1);

	if (have >= needed)
		return base_max(have, SAVER_RING_MIN_BYTES);
	if (wanted > allowed && allowed < have + have / 8)
		return base_max(have, SAVER_RING_MIN_BYTES);
	return base_max(base_min(wanted, allowed), SAVER_RING_MIN_BYTES);
}

static uint64_t room_wanted(const struct save_flight *f, uint64_t have)
{
	if (f->s->options.ring_bytes)
		return f->s->options.ring_bytes;
	return saver_room_size(room_needed(f), have, base_machine_memory(""), f->s->node_ranks);
}

static int room_make(struct save_flight *f, uint64_t bytes, struct base_error *err)
{
	struct save_saver *s = f->s;
	struct device_ring *ring, *old = s->ring; /* changed only by the thread that has `sizing` */
	struct base_error why = {0};
	int r = device_ring_new(bytes, s->options.pin, f->fence, &ring, &why);
	bool must = f->fence && s->options.pin == DEVICE_PIN_YES;

	if (r < 0 && old && !(must && device_ring_memory(old) != DEVICE_MEMORY_PINNED)) {
		base_debug("run %s: the staging ring stays at %llu bytes: %s", s->run,
			(unsigned long long)device_ring_bytes(old), why.text);
		return 0;
	}
	if (r < 0) {
		if (err)
			*err = why;
		return base_error_prefix(err, r, "the staging ring of %llu bytes", (unsigned long long)bytes);
	}
	pthread_mutex_lock(&s->lock);
	s->ring = ring;
	pthread_mutex_unlock(&s->lock);
	device_ring_free(old);
	return 0;
}

static unsigned long long room_mib(uint64_t bytes) { return (unsigned long long)((bytes + (1 << 20) - 1) >> 20); }

/* Says once what makes saves of device memory slow, and what to do. */
static void room_warn_pin(struct save_saver *s)
{
	uint64_t ns = device_ring_register_ns(s->ring), bytes = device_ring_bytes(s->ring);
	bool pinned = device_ring_memory(s->ring) == DEVICE_MEMORY_PINNED;

	if (s->pin_warned || (pinned ? ns < ROOM_WARN_NS || ns < bytes : !device_ring_why(s->ring)[0]))
		return;
	s->pin_warned = true;
	if (pinned)
		base_warning("run %s: registering the staging ring of %llu MiB with the CUDA driver took %.1f s; "
			"pin=\"allocate\" lets the driver allocate it, which may be quicker (said once)", s->run,
			room_mib(bytes), (double)ns / 1e9);
	else
		base_warning("run %s: the staging ring of %llu MiB is not pinned, which makes copies from device "
			"memory slow: %s (said once)", s->run, room_mib(bytes), device_ring_why(s->ring));
}

int saver_room_fit(struct save_flight *f, bool empty, struct base_error *err)
{
	struct save_saver *s = f->s;
	uint64_t have = s->ring ? device_ring_bytes(s->ring) : 0, wanted = empty ? room_wanted(f, have) : have;
	int r = wanted > have ? room_make(f, wanted, err) : 0;

	if (r < 0 || !f->fence)
		return r;
	if (device_ring_register(s->ring, f->fence) == 1 && empty)
		r = room_make(f, base_max(have, wanted), err);
	else if (s->options.pin == DEVICE_PIN_YES && device_ring_memory(s->ring) != DEVICE_MEMORY_PINNED)
		r = base_error_set(err, -ENOMEM, "the staging ring: %s", device_ring_why(s->ring));
	if (r == 0)
		room_warn_pin(s);
	return r;
}

/* By the persister; the flight is staged. */
void saver_room_warn(struct save_flight *f)
{
	struct save_saver *s = f->s;
	uint64_t waited = f->info.phase[SAVE_ROOM].busy_ns, needed = room_needed(f), have;
	char why[200];

	if (waited < ROOM_WARN_NS || s->room_warned)
		return;
	s->room_warned = true;
	pthread_mutex_lock(&s->lock);
	have = device_ring_bytes(s->ring);
	pthread_mutex_unlock(&s->lock);
	if (have >= needed)
		snprintf(why, sizeof why, "the saves before it were still being written: fewer saves, or ring_bytes of "
			"%llu MiB for two of them", room_mib(2 * needed));
	else if (s->options.ring_bytes)
		snprintf(why, sizeof why, "ring_bytes of %llu MiB would hold all of it", room_mib(needed));
	else
		snprintf(why, sizeof why, "half of the free memory, shared by the node's ranks (%u), allows no more; "
			"ring_bytes takes what it says", s->node_ranks);
	base_warning("run %s step %llu: copying its %llu MiB waited %.1f s for room in the staging ring of %llu MiB, "
		"and writing %.1f s for the disk: %s (said once)", s->run, (unsigned long long)f->step,
		room_mib(f->plan->bytes), (double)waited / 1e9, room_mib(have), (double)saver_disk_ns(f) / 1e9, why);
}
