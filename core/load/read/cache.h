/* SPDX-License-Identifier: Apache-2.0
 *
 * cache: decoded, checked pieces (and 1 MiB segments of blobs) in bounded memory, addressed by their place in a pack,
 * so that steps, tensors and readers share them. Not a cache of stored bytes: the kernel's page cache is that. Buffers
 * are kept by size class and reused, rather than given back to the kernel and fetched again. Any thread. One lock
 * protects the table and is never held across a read; readers wait for an entry that is being filled, and it is filled
 * once. A pinned entry is never evicted. If all entries are pinned, the cache exceeds its bound rather than block a
 * reader. */
#ifndef CORE_LOAD_READ_CACHE_H
#define CORE_LOAD_READ_CACHE_H

#include <sys/uio.h>

#include "core/load/open/step.h"

struct load_cache;
struct load_cache *load_cache_new(uint64_t max_bytes);
/* Damage is not logged, because the caller reports errors of reads. To be called before the first read. */
void load_cache_quiet(struct load_cache *c);
void load_cache_free(struct load_cache *c); /* nothing may be pinned; NULL-safe */
void load_cache_shrink(struct load_cache *c); /* gives back all that is not pinned */
struct load_cache_stats { uint64_t hits, misses, waits, bytes, max_bytes, evictions, decoded_bytes, stored_bytes; };
void load_cache_stat(struct load_cache *c, struct load_cache_stats *ret_s);

struct load_pin; /* a reference to bytes in the cache */
void load_unpin(struct load_pin *pin); /* NULL-safe */

/* Bytes [offset, offset + len) of the object's row-major (or blob) bytes as slices that stay valid until their pins
 * are released. Fragments of under LOAD_GATHER_BYTES are gathered into `scratch` (room for len bytes), larger ones
 * point into the cache. All bytes or an error; err names pack, offset, tensor and step. Neighbouring pieces of one read
 * are filled in file order. */
#define LOAD_GATHER_BYTES 2048u
struct load_slices {
	struct iovec *iov; unsigned niov;           /* in order, total len */
	struct load_pin **pins; unsigned npins;
	void *memory;
};
int load_object_slices(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *scratch,
	struct load_slices *ret_e, struct base_error *err);
void load_slices_release(struct load_slices *e);
/* The same, copied to `out`. */
int load_object_read(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *out,
	struct base_error *err);
/* The items of a box of a tensor to `out`: the first one there, neighbours `stride` bytes apart in each dimension. A
 * few pieces at a time are pinned, whatever the box. -EINVAL: the box is not inside the tensor. */
int load_object_read_box(struct load_object *o, struct load_cache *c, const struct tensor_box *box, void *out,
	const uint64_t *stride, struct base_error *err);

/* Blocks [first, first + n) of a piece, which has them, past the cache: for a caller that passes through a piece once,
 * with a buffer that stays in the processor's cache. *pack: NULL, or as an earlier call for a piece in the same pack
 * left it; the caller gives it to store_pack_put, after an error, too. */
int load_piece_read(const struct load_object *o, uint64_t piece, uint64_t first, uint64_t n, struct pack **pack,
	void *out, struct base_error *err);

#endif
