/* SPDX-License-Identifier: Apache-2.0
 *
 * place: how a part of a piece comes into a destination that is not simply host memory in the step's dtype: memory of
 * another dtype (place.c), memory of a CUDA device (place_device.c), or both. And zeros, where the step has nothing for
 * a destination.
 *
 * Any thread of the fill calls place_part, for parts that share no byte of the destination. Errors (memory, the CUDA
 * driver) end the fill by fill_fatal, so that they are never taken for damage. */
#ifndef CORE_LOAD_FILL_PLACE_H
#define CORE_LOAD_FILL_PLACE_H

#include "core/device/gather.h"
#include "core/load/fill/fill_work.h"

/* Is the box of host memory in the step's dtype? Then the fill itself writes there. */
static inline bool place_is_plain(const struct fill_box *b) { return b->dtype == 0 && !b->device; }

/* Converts `part` of the piece at `bytes`, which is in stored order, and writes it to its place in the box. On return a
 * copy to a device is still on its way, and `bytes` are not used any more. */
void place_part(struct load_fill *f, const struct fill_box *b, const struct tensor_grid *g,
	const struct tensor_box *piece, const struct tensor_box *part, const uint8_t *bytes);
/* Where all of a box goes: dimensions by descending stride, folded. */
void place_box(const struct load_fill *f, const struct fill_box *b, struct device_gather *ret_g);
/* Writes the zeros, before anything is read. They are there on return, on devices as well, since other streams copy
 * what is read. */
void place_zeros(struct load_fill *f);

/* ---- place_device.c ---- */
/* Makes the staging memory, when needs are known; in any thread. -errno: err says why. */
int place_device_begin(struct load_fill *f, struct base_error *err);
/* Waits for all copies so far, while no thread begins one. An error is the fill's. */
void place_device_wait(struct load_fill *f);
/* Waits for all copies and frees staging memory, streams and fence. All threads have ended before. */
void place_device_end(struct load_fill *f);

/* ---- what both share ---- */
/* One part of one piece under way, or zeros. */
struct place_job {
	struct load_fill *f;
	const struct tensor_grid *grid;  /* NULL: zeros */
	const struct tensor_box *piece;
	const uint8_t *bytes;
	struct tensor_box box;           /* the destination's: its first item is at `data` */
	uint32_t ndim, tensor;
	uint8_t *data;
	const uint64_t *stride;
	enum tensor_dtype from, to;
	unsigned item_bytes;             /* of the destination */
	uint32_t order[TENSOR_MAX_DIMS]; /* the dimensions, the destination's largest stride first */
};
/* Calls put for boxes of at most `most` items that together are the part, in the row-major order of j->order. */
void place_cut(const struct place_job *j, const struct tensor_box *part, uint64_t most,
	void (*put)(void *arg, const struct tensor_box *some), void *arg);
/* The items of a box, converted, one after another in that order; `out` has room for them. */
void place_line_up(const struct place_job *j, const struct tensor_box *some, uint8_t *out);
/* Where the box is in the destination: dimensions in j->order, folded; g->from is the address of its first item. */
void place_describe(const struct place_job *j, const struct tensor_box *some, struct device_gather *ret_g);
/* All of a job in device memory. */
void place_device_job(const struct place_job *j, const struct tensor_box *part, unsigned place);

#endif
