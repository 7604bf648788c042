/* SPDX-License-Identifier: Apache-2.0
 *
 * fill: boxes of many tensors of a step into the caller's memory, in one go: what a rank's load does.
 *
 *   new -> add, add, ... -> run -> free
 *
 * run opens the tensors as far as the boxes want them (wanted.c), finds by search which pieces meet which box, sorts
 * them by pack and offset, and lets threads read, check, decode and place them (fill_plan.c, fill_read.c,
 * fill_burst.c). Only the wanted blocks of a piece are read, each once, however many boxes want it, and the blocks
 * between them if that costs less than another request (burst.c).
 *
 * new, add, run and free come from one thread; progress and stop from any. */
#ifndef CORE_LOAD_FILL_FILL_H
#define CORE_LOAD_FILL_FILL_H

#include "core/load/open/step.h"

enum load_fill_flag {
	LOAD_FILL_REHASH = 1 << 0,       /* reads whole pieces, and compares their SHA-256 with the digest as well */
	LOAD_FILL_SKIP_DAMAGED = 1 << 1, /* what cannot be read is listed, and the rest arrives */
};
struct load_fill;
/* `step`: a reference is kept. threads 0: one for each usable processor. NULL: out of memory. */
struct load_fill *load_fill_new(struct load_step *step, unsigned threads, unsigned flags);
void load_fill_free(struct load_fill *f); /* NULL-safe */

/* Before run: large reads go past the page cache, if the medium can and the page cache does not have the bytes. */
void load_fill_past_cache(struct load_fill *f);

/* The items of `box` of a tensor are to go to `data`, the first one there, with `stride` bytes between neighbours in
 * each dimension; both are copied. A box without items is nothing. The memory is the caller's, writable until run has
 * returned, and no two boxes share a byte of it. -EINVAL: the box is not inside the tensor; -ENOENT: no such tensor. */
int load_fill_add(struct load_fill *f, uint32_t tensor, const struct tensor_box *box, void *data,
	const uint64_t *stride, struct base_error *err);

/* The same with other memory: of another dtype, to which the items are converted (core/tensor/convert.h; 0: the
 * step's), or of a CUDA device. -EINVAL: there is no such conversion; the sentence names both dtypes. Boxes that are
 * added one after another with the same number are of one destination, and known to share no byte. */
struct load_fill_memory {
	void *data;
	const uint64_t *stride;
	enum tensor_dtype dtype;
	bool device;
	uint32_t destination;
};
int load_fill_add_to(struct load_fill *f, uint32_t tensor, const struct tensor_box *box,
	const struct load_fill_memory *memory, struct base_error *err);
/* Memory for `size` items in each dimension is to be zero, as a part of that tensor (for messages). run zeroes it
 * first: it may overlap boxes. -ENOMEM. */
int load_fill_zero(struct load_fill *f, uint32_t tensor, const struct tensor_shape *size,
	const struct load_fill_memory *memory);
/* Takes back what was added after the mark. */
struct load_fill_mark { size_t nboxes, nzeros; uint64_t wanted, device_bytes; };
struct load_fill_mark load_fill_mark(const struct load_fill *f);
void load_fill_cut(struct load_fill *f, const struct load_fill_mark *mark);
/* Do two destinations share a byte? -EINVAL names the tensors. The search ends without an answer after 2^24 steps,
 * which only strides that nearly agree make up. */
int load_fill_overlap(const struct load_fill *f, struct base_error *err);
/* After all boxes were added, if any is device memory: in a thread of the program, before run. What these streams
 * (CUstream; none: the default streams) do now is finished before the memory is written. -ENOENT: no CUDA driver;
 * -EBUSY: a stream is being captured into a graph. */
int load_fill_devices(struct load_fill *f, void *const *streams, size_t n, struct base_error *err);

/* Fills all of them, once. Blocks. After an error the boxes hold anything; err names step, tensor, piece, pack and
 * offset of the first piece, by pack and offset, that fails. -ECANCELED: load_fill_stop was called. */
int load_fill_run(struct load_fill *f, struct base_error *err);
void load_fill_stop(struct load_fill *f); /* run ends soon */

/* With LOAD_FILL_SKIP_DAMAGED, after run: what did not arrive. `box` holds anything there. */
struct load_fill_lost {
	size_t added;                    /* number of the box that was added: 0 for the first */
	uint32_t tensor;
	struct tensor_box box;
	int code;
	const char *why;
};
size_t load_fill_lost_count(const struct load_fill *f);
const struct load_fill_lost *load_fill_lost(const struct load_fill *f, size_t i);

/* Bytes. wanted: of the boxes; placed: of them, what has arrived, counted while run is under way; read: from packs,
 * checks included. */
struct load_fill_progress { uint64_t wanted, placed, read, pieces; };
void load_fill_progress(const struct load_fill *f, struct load_fill_progress *ret_progress);
struct load_fill_times { uint64_t open_ns, plan_ns, read_ns; unsigned threads; };
void load_fill_times(const struct load_fill *f, struct load_fill_times *ret_times); /* after run */

#endif
