/* SPDX-License-Identifier: Apache-2.0
 *
 * cache: decoded, checked pieces (and 1 MiB windows of blobs) in bounded memory, addressed by digest, so that steps,
 * tensors and readers share them. Not a cache of stored bytes: the kernel's page cache is that. Buffers are kept and
 * reused by size class, never handed back and forth to the kernel. Any thread: one lock for the table (never held
 * across a read); an entry being filled is waited for, and filled once. A pinned entry is never evicted; when all is
 * pinned the bound is exceeded rather than a reader blocked. */
#ifndef CORE_LOAD_CACHE_H
#define CORE_LOAD_CACHE_H

#include <sys/uio.h>

#include "core/load/step.h"

struct load_cache;
struct load_cache *load_cache_new(uint64_t max_bytes);
/* Errors of reads are told by who reads: damage is not logged besides. Before the first read. */
void load_cache_quiet(struct load_cache *c);
void load_cache_free(struct load_cache *c); /* nothing may be pinned; NULL-safe */
struct load_cache_stats { uint64_t hits, misses, waits, bytes, max_bytes, evictions, decoded_bytes, stored_bytes; };
void load_cache_stat(struct load_cache *c, struct load_cache_stats *ret_s);

struct load_pin; /* a reference to bytes in the cache */
void load_unpin(struct load_pin *pin); /* NULL-safe */

/* Bytes [offset, offset + len) of the object's row-major (or blob) bytes as extents that stay valid until their pins
 * are released. Fragments of under LOAD_GATHER_BYTES are gathered into `scratch` (room for len bytes), larger ones
 * point into the cache. All or an error (-EIO's cause in err: it names pack, offset, tensor, step). Neighbouring
 * pieces of one read are filled in file order. */
#define LOAD_GATHER_BYTES 2048u
struct load_extents {
	struct iovec *iov; unsigned niov;           /* in order, total len */
	struct load_pin **pins; unsigned npins;
	void *memory;
};
int load_object_extents(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *scratch,
	struct load_extents *ret_e, struct base_error *err);
void load_extents_release(struct load_extents *e);
/* The same, copied to `out`. */
int load_object_read(struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *out,
	struct base_error *err);

#endif
