/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of core/load share: the opened object, and pins on windows of pieces.
 *
 * A window is LOAD_WINDOW_BYTES of an object's raw bytes (the last one shorter): the unit of the cache. Pieces of
 * the default grid are at most that long, so a piece is one window; blobs, and pieces of a grid with larger tiles,
 * have several. */
#ifndef CORE_LOAD_LOAD_INTERNAL_H
#define CORE_LOAD_LOAD_INTERNAL_H

#include <stdatomic.h>

#include "core/load/cache.h"

#define LOAD_WINDOW_BYTES (1u << 20)

struct load_object {
	atomic_uint refs;
	struct load_step *step;          /* a reference */
	char *label;                     /* "tensor model/x": for messages */
	bool blob;
	uint64_t bytes;
	struct base_digest digest;
	struct tensor_grid grid;         /* of a tensor */
	struct tensor_box whole;
	uint64_t stride[TENSOR_MAX_DIMS]; /* bytes between neighbours of the row-major tensor */
	uint64_t run_bytes;              /* longest contiguous run of a grid cell in the row-major tensor */
	uint64_t max_piece;              /* bytes of the longest piece */
	struct store_row row;            /* owns the pieces of a tensor */
	struct store_piece one;          /* a blob's */
	const struct store_piece *pieces; uint64_t npieces;
	const char *const *packs; uint32_t npacks; /* the step's */
};

/* One window that a request needs; `pin` is NULL for an inline piece. */
struct load_want { uint64_t piece, window; struct load_pin *pin; bool mine; };

/* Pins all of them, filling those that are missing, in file order. On an error nothing is pinned. */
int load_cache_pin(struct load_cache *c, const struct load_object *o, struct load_want *wants, size_t n,
	struct base_error *err);
const uint8_t *load_pin_bytes(const struct load_pin *pin);

/* A step's private side: pack names by number of the part of rank line `r`. */
struct load_tensor_place { uint32_t layout, tensor; };
const struct store_layout *load_step_layout(const struct load_step *step, uint32_t tensor, uint32_t *ret_index);
/* The row of a tensor that is held whole, from the lowest rank that has it. */
int load_step_row(const struct load_step *step, uint32_t tensor, struct store_row *ret_row,
	const char *const **ret_packs, uint32_t *ret_npacks,
	struct base_error *err);
int load_step_blob_ref(const struct load_step *step, uint32_t blob, struct store_object_ref *ret_ref,
	const char *const **ret_packs, uint32_t *ret_npacks,
	struct base_error *err);

#endif
