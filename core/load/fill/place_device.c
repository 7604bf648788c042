/* SPDX-License-Identifier: Apache-2.0
 *
 * place_device: destinations in the memory of CUDA devices. Items are put into staging memory, pinned if the driver
 * can, in the order of the destination; from there copies of one, two or three dimensions take them to their places
 * (cuda_copy.c), while the threads go on reading.
 *
 * A lane is a stream of one context and LANE_SLOTS slots of staging memory. A thread takes an idle lane for a part of a
 * piece and gives it back. It fills a slot with as many parts as fit, small tensors together, and then sets the slot's
 * event behind their copies; a slot is filled again after a wait for its event. So memory is bounded by the number of
 * lanes, and a thread waits only when all slots of its lane are on their way.
 *
 * The fence makes the streams wait for what the program's streams still do with the destinations. It is set in the
 * program's thread (load_fill_devices), since the default stream is that of a context.
 *
 * An error of a copy is known only when its slot is waited for: the sentence names the tensor that begins the slot, and
 * the number of others in it. */
#include <stdlib.h>

#include "core/base/cleanup.h"
#include "core/device/cuda.h"
#include "core/device/ring.h"
#include "core/load/fill/place.h"

#define LANE_SLOTS 4u
#define LANE_SLOT_BYTES (UINT64_C(1) << 20)
#define LANE_BYTES (LANE_SLOTS * LANE_SLOT_BYTES)
#define LANES_MAX 16u                    /* of one context */
#define LANES_ALL 32u                    /* of all, but one for each */
#define LANE_ALIGN 64u

struct place_slot {
	uint8_t *memory;
	struct device_event *event;
	uint64_t used;
	bool flying;                     /* its event is set */
	uint32_t tensor, others;         /* the first one whose items are in it; parts of others after it */
};

struct place_lane {
	struct place_lane *next;         /* of all */
	bool idle;                       /* protected by the lock */
	unsigned place;
	uint8_t *memory;
	struct device_stream *stream;
	struct place_slot slot[LANE_SLOTS];
	unsigned at;                     /* the slot that is being filled */
};

struct place_device {
	struct device_fence *fence;
	struct device_ring *ring;
	unsigned nplaces, most;          /* lanes of each place */
	pthread_mutex_t lock;            /* protects what follows */
	pthread_cond_t given;            /* a lane is idle */
	struct place_lane *lanes;
	unsigned *made;                  /* lanes, by place */
};

/* ---- the fence ---- */

static int devices_find(struct place_device *d, struct fill_box *boxes, size_t n, struct base_error *err)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < n; i++)
		if (boxes[i].device) {
			r = device_fence_context(d->fence, boxes[i].data, &boxes[i].place, err);
			d->nplaces = base_max(d->nplaces, boxes[i].place + 1);
		}
	return r;
}

int load_fill_devices(struct load_fill *f, void *const *streams, size_t n, struct base_error *err)
{
	static void *const standard[] = {NULL};
	struct place_device *d;
	int r;

	place_device_end(f); /* of a call before */
	if (!f->device_bytes)
		return 0;
	d = calloc(1, sizeof *d);
	if (!d)
		return base_no_memory(err);
	pthread_mutex_init(&d->lock, NULL);
	pthread_cond_init(&d->given, NULL);
	f->device = d; /* ended with the fill */
	r = device_fence_new(&d->fence, err);
	if (r == 0)
		r = devices_find(d, f->boxes, f->nboxes, err);
	if (r == 0)
		r = devices_find(d, f->zeros, f->nzeros, err);
	if (r == 0)
		r = device_fence_set(d->fence, n ? streams : standard, n ? n : 1, err);
	return r;
}

/* ---- lanes ---- */

static void lane_free(struct place_lane *lane)
{
	if (!lane)
		return;
	for (unsigned i = 0; i < LANE_SLOTS; i++)
		device_event_free(lane->slot[i].event);
	device_stream_free(lane->stream); /* waits for what is still under way */
	free(lane);
}

BASE_CLEANUP_DEFINE(struct place_lane *, lane_free)

static int lane_new(struct place_device *d, unsigned place, struct place_lane **ret_lane, struct base_error *err)
{
	base_cleanup(lane_free_p) struct place_lane *lane = calloc(1, sizeof *lane);
	int r;

	if (!lane)
		return base_no_memory(err);
	lane->place = place;
	lane->memory = device_ring_take(d->ring, LANE_BYTES);
	if (!lane->memory)
		return base_no_memory_for(err, "a lane of copies");
	r = device_stream_new(d->fence, place, DEVICE_PIN_NO, &lane->stream, err);
	if (r == 0)
		r = device_stream_wait(lane->stream, d->fence, err);
	for (unsigned i = 0; i < LANE_SLOTS && r == 0; i++) {
		lane->slot[i].memory = lane->memory + i * LANE_SLOT_BYTES;
		r = device_event_new(lane->stream, &lane->slot[i].event, err);
	}
	if (r == 0)
		*ret_lane = base_steal(lane);
	return r;
}

/* With the lock. NULL: none is idle. */
static struct place_lane *lane_idle(struct place_device *d, unsigned place)
{
	struct place_lane *lane = d->lanes;

	while (lane && !(lane->idle && lane->place == place))
		lane = lane->next;
	if (lane)
		lane->idle = false;
	return lane;
}

/* Waits for one that is idle, if there are as many as there may be. */
static int lane_take(struct place_device *d, unsigned place, struct place_lane **ret_lane, struct base_error *err)
{
	int r;

	pthread_mutex_lock(&d->lock);
	while (!(*ret_lane = lane_idle(d, place)) && d->made[place] == d->most)
		pthread_cond_wait(&d->given, &d->lock);
	d->made[place] += !*ret_lane;
	pthread_mutex_unlock(&d->lock);
	if (*ret_lane)
		return 0;
	r = lane_new(d, place, ret_lane, err);
	pthread_mutex_lock(&d->lock);
	if (r < 0) {
		d->made[place]--;
		pthread_cond_broadcast(&d->given); /* a thread that waits for it fails, too */
	} else {
		(*ret_lane)->next = d->lanes;
		d->lanes = *ret_lane;
	}
	pthread_mutex_unlock(&d->lock);
	return r;
}

/* A lane on which something failed is never idle again: copies may still read its memory. A thread that waits for a
 * lane then makes another one, or fails likewise. */
static void lane_give(struct place_device *d, struct place_lane *lane, bool failed)
{
	pthread_mutex_lock(&d->lock);
	lane->idle = !failed;
	d->made[lane->place] -= failed;
	pthread_cond_broadcast(&d->given);
	pthread_mutex_unlock(&d->lock);
}

/* ---- slots ---- */

static int copy_failed(struct load_fill *f, uint32_t tensor, uint32_t others, int r, struct base_error *err)
{
	if (others)
		base_error_prefix(err, r, "a copy of it, or of one of %u tensors that were copied with it", others);
	return load_step_tensor_failed(f->step, tensor, r, err);
}

static int slot_wait(struct load_fill *f, struct place_slot *slot, struct base_error *err)
{
	int r = slot->flying ? device_event_wait(slot->event, err) : 0;

	slot->flying = false;
	slot->used = 0;
	return r < 0 ? copy_failed(f, slot->tensor, slot->others, r, err) : 0;
}

static int slot_seal(struct load_fill *f, struct place_slot *slot, struct base_error *err)
{
	int r;

	if (slot->used == 0 || slot->flying)
		return 0;
	r = device_event_set(slot->event, err);
	slot->flying = r == 0;
	return r < 0 ? copy_failed(f, slot->tensor, slot->others, r, err) : 0;
}

/* Room for so many bytes of a tensor, at most a slot of them. */
static int lane_room(struct load_fill *f, struct place_lane *lane, uint32_t tensor, uint64_t bytes, uint8_t **ret_room,
	struct base_error *err)
{
	struct place_slot *slot = &lane->slot[lane->at];

	if (slot->used + bytes > LANE_SLOT_BYTES) {
		int r = slot_seal(f, slot, err);

		lane->at = (lane->at + 1) % LANE_SLOTS;
		slot = &lane->slot[lane->at];
		if (r == 0)
			r = slot_wait(f, slot, err);
		if (r < 0)
			return r;
	}
	if (slot->used == 0) {
		slot->tensor = tensor;
		slot->others = 0;
	} else if (slot->tensor != tensor) {
		slot->others++;
	}
	*ret_room = slot->memory + slot->used;
	slot->used += base_align(bytes, LANE_ALIGN);
	return 0;
}

/* ---- parts ---- */

struct device_put { const struct place_job *j; struct place_lane *lane; int r; struct base_error err; };

static void device_put(void *arg, const struct tensor_box *some)
{
	struct device_put *p = arg;
	const struct place_job *j = p->j;
	uint64_t bytes = j->item_bytes;
	struct device_gather g;
	uint8_t *room;

	if (p->r < 0)
		return;
	for (uint32_t d = 0; d < j->ndim; d++)
		bytes *= some->size[d];
	p->r = lane_room(j->f, p->lane, j->tensor, bytes, &room, &p->err);
	if (p->r < 0)
		return;
	place_line_up(j, some, room);
	place_describe(j, some, &g);
	p->r = device_stream_scatter(p->lane->stream, room, &g, &p->err);
	if (p->r < 0)
		copy_failed(j->f, j->tensor, 0, p->r, &p->err);
}

void place_device_job(const struct place_job *j, const struct tensor_box *part, unsigned place)
{
	struct device_put p = {.j = j};

	if (atomic_load(&j->f->failed) == 0)
		return; /* nothing will be used */
	p.r = lane_take(j->f->device, place, &p.lane, &p.err);
	if (p.r < 0) {
		copy_failed(j->f, j->tensor, 0, p.r, &p.err);
	} else {
		place_cut(j, part, LANE_SLOT_BYTES / j->item_bytes, device_put, &p);
		lane_give(j->f->device, p.lane, p.r < 0);
	}
	if (p.r < 0)
		fill_fatal(j->f, p.r, &p.err);
}

/* ---- begin and end ---- */

int place_device_begin(struct load_fill *f, struct base_error *err)
{
	struct place_device *d = f->device;
	uint64_t lanes;

	if (!d)
		return f->device_bytes ? base_error_set(err, -EINVAL, "device memory without a fence") : 0;
	d->made = calloc(d->nplaces, sizeof *d->made);
	if (!d->made)
		return base_no_memory(err);
	lanes = base_min(base_min(f->threads, LANES_MAX), f->device_bytes / LANE_BYTES + 1);
	lanes = base_max(base_min(lanes, LANES_ALL / d->nplaces), 1);
	d->most = (unsigned)lanes;
	return device_ring_new(lanes * d->nplaces * LANE_BYTES, DEVICE_PIN_AUTO, d->fence, &d->ring, err);
}

/* A lane on which something failed is left out: its stream waits when it is freed. */
static void lane_wait(struct load_fill *f, struct place_lane *lane)
{
	for (unsigned i = 1; i <= LANE_SLOTS && lane->idle; i++) { /* the oldest first */
		struct place_slot *slot = &lane->slot[(lane->at + i) % LANE_SLOTS];
		struct base_error err = {0};
		int r = slot_seal(f, slot, &err);

		if (r == 0)
			r = slot_wait(f, slot, &err);
		if (r < 0)
			fill_fatal(f, r, &err);
	}
}

void place_device_wait(struct load_fill *f)
{
	for (struct place_lane *lane = f->device ? f->device->lanes : NULL; lane; lane = lane->next)
		lane_wait(f, lane);
}

void place_device_end(struct load_fill *f)
{
	struct place_device *d = f->device;

	if (!d)
		return;
	place_device_wait(f);
	for (struct place_lane *lane = d->lanes, *next; lane; lane = next) {
		next = lane->next;
		lane_free(lane);
	}
	device_ring_free(d->ring);
	device_fence_free(d->fence);
	pthread_cond_destroy(&d->given);
	pthread_mutex_destroy(&d->lock);
	free(d->made);
	free(d);
	f->device = NULL;
}
