/* SPDX-License-Identifier: Apache-2.0
 *
 * lanes: streams that a saver's workers copy device memory on, one for each context that they have used (lanes.c).
 * A worker's lanes are its thread's own. */
#ifndef CORE_SAVE_SAVER_LANES_INTERNAL_H
#define CORE_SAVE_SAVER_LANES_INTERNAL_H

#include "core/device/cuda.h"

#define SAVER_LANES 16u                  /* CUDA contexts that a worker has streams in at one time */

struct save_flight;
struct saver_worker;
struct saver_lane {
	struct device_stream *stream; struct device_event *event;
	uint64_t waited;                /* 1 + number of the flight whose fence is before the stream's next copy */
	bool used;                      /* since the last arrival */
};

/* At submit, in the caller's thread: what the device tensors wait for, and where they are. May be tried again. */
int saver_fence_make(struct save_flight *f, struct base_error *err);
/* Out of memory of that context of the flight's fence; `to` is filled after the next arrival. */
int saver_lane_gather(struct save_flight *f, struct saver_worker *w, unsigned context, void *to,
	const struct device_gather *g, struct base_error *err);
int saver_lanes_arrive(struct saver_worker *w, struct base_error *err); /* waits for all that was given */
void saver_lanes_drop(struct saver_worker *w); /* likewise, whatever they say */

#endif
