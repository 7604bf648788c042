/* SPDX-License-Identifier: Apache-2.0
 *
 * lanes: device memory of one save may be of several devices, or contexts. At submit, in the caller's thread, the
 * flight's fence learns the context of every tensor (saver_fence_make). A worker has a lane, a stream and its event,
 * for each context that it has used. It copies a batch along the lanes of the tensors' contexts, and waits for all of
 * these before the batch has arrived. Lanes are kept from save to save, and dropped after an error, once their copies
 * have ended. */
#include "core/save/saver/saver_internal.h"

/* 1: some tensor has something to copy; 0: none has. */
static int fence_fill(struct save_flight *f, struct device_fence *fence, struct base_error *err)
{
	int r = 0, n = 0;

	for (uint32_t i = 0; i < f->ntensors && r == 0; i++) {
		struct save_tensor *t = &f->tensors[i];

		if (!t->device || tensor_shape_empty(&t->local))
			continue;
		n = 1;
		r = device_fence_context(fence, t->data, &t->context, err);
		if (r < 0)
			r = base_error_prefix(err, r, "tensor %s/%.*s", t->component,
				store_layout_shown(t->name, t->name_len), t->name);
	}
	if (r == 0 && n)
		r = device_fence_set(fence, &f->options.stream, 1, err);
	return r < 0 ? r : n;
}

int saver_fence_make(struct save_flight *f, struct base_error *err)
{
	struct device_fence *fence;
	int r;

	device_fence_free(base_steal(f->fence)); /* of a submit that was refused */
	r = device_fence_new(&fence, err);
	if (r < 0)
		return r;
	r = fence_fill(f, fence, err);
	if (r == 1)
		f->fence = fence;
	else
		device_fence_free(fence);
	return r < 0 ? r : 0;
}

/* ---- a worker's ---- */

/* Waits for the stream's copies, whatever became of its event. */
static void lane_drop(struct saver_lane *l)
{
	device_event_free(l->event);
	device_stream_free(l->stream);
	*l = (struct saver_lane){0};
}

void saver_lanes_drop(struct saver_worker *w)
{
	while (w->nlanes)
		lane_drop(&w->lanes[--w->nlanes]);
}

static int lane_open(struct save_flight *f, struct saver_worker *w, unsigned context, struct base_error *err)
{
	struct saver_lane *l;
	int r;

	if (w->nlanes == SAVER_LANES) {
		r = saver_lanes_arrive(w, err);
		if (r < 0)
			return r;
		saver_lanes_drop(w);
	}
	l = &w->lanes[w->nlanes];
	*l = (struct saver_lane){0};
	r = device_stream_new(f->fence, context, f->s->options.pin, &l->stream, err);
	if (r == 0)
		r = device_event_new(l->stream, &l->event, err);
	if (r < 0)
		lane_drop(l);
	else
		w->nlanes++;
	return r;
}

int saver_lane_gather(struct save_flight *f, struct saver_worker *w, unsigned context, void *to,
	const struct device_gather *g, struct base_error *err)
{
	unsigned i = 0;
	int r = 0;

	while (i < w->nlanes && !device_stream_fits(w->lanes[i].stream, f->fence, context))
		i++;
	if (i == w->nlanes) {
		r = lane_open(f, w, context, err);
		i = w->nlanes - 1;
	}
	if (r == 0 && w->lanes[i].waited != f->number + 1)
		r = device_stream_wait(w->lanes[i].stream, f->fence, err);
	if (r < 0)
		return r;
	w->lanes[i].waited = f->number + 1;
	w->lanes[i].used = true;
	return device_stream_gather(w->lanes[i].stream, to, g, err);
}

int saver_lanes_arrive(struct saver_worker *w, struct base_error *err)
{
	int r = 0;

	for (unsigned i = 0; i < w->nlanes && r == 0; i++)
		if (w->lanes[i].used)
			r = device_event_set(w->lanes[i].event, err);
	for (unsigned i = 0; i < w->nlanes && r == 0; i++)
		if (w->lanes[i].used) {
			r = device_event_wait(w->lanes[i].event, err);
			w->lanes[i].used = false;
		}
	return r;
}
