/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/load/read share: pins on segments of pieces.
 *
 * A segment is LOAD_SEGMENT_BYTES of an object's raw bytes (the last one shorter): the unit of the cache. Pieces of
 * the default grid are at most that long, so a piece is one segment; blobs, and pieces of a grid with larger tiles,
 * have several. */
#ifndef CORE_LOAD_READ_READ_INTERNAL_H
#define CORE_LOAD_READ_READ_INTERNAL_H

#include "core/load/open/object.h"
#include "core/load/read/cache.h"

#define LOAD_SEGMENT_BYTES (1u << 20)

/* One segment that a request needs; `pin` is NULL for an inline piece. */
struct load_want { uint64_t piece, segment; struct load_pin *pin; bool mine; };

/* Pins all of them, filling those that are missing, in file order. On an error nothing is pinned. */
int load_cache_pin(struct load_cache *c, const struct load_object *o, struct load_want *wants, size_t n,
	struct base_error *err);
/* Is one of these segments in the cache, or was it marked by an earlier call? Marks all of them. */
bool load_cache_mark(struct load_cache *c, const struct load_object *o, const struct load_want *wants, size_t n);
void load_cache_count(struct load_cache *c, uint64_t decoded, uint64_t stored); /* bytes read past the cache */
const uint8_t *load_pin_bytes(const struct load_pin *pin);
/* The same, for a reader that takes `len` of the bytes. A segment whose bytes were all taken is not kept. */
const uint8_t *load_pin_give(struct load_pin *pin, uint64_t len);
#define LOAD_STREAM_BYTES (UINT64_C(256) << 10) /* shorter reads are not counted: they may come again */
/* By which the cache finds a segment; different in every process. Public for the tests. */
uint32_t load_cache_hash(const struct pack_object_ref *ref, const char *pack, uint64_t segment);

/* A few bytes past the cache (peek.c). False: they were not read, and `out` has anything. */
#define LOAD_PEEK_BYTES (64u << 10)
bool load_object_peek(const struct load_object *o, struct load_cache *c, uint64_t offset, size_t len, void *out);

#endif
