/* SPDX-License-Identifier: Apache-2.0
 *
 * part_excerpt: the row of one tensor in a part, read by ranges: for a load that needs some pieces of a long row.
 *
 * It reads the chunk's head and rows, the row's boxes and extents, and of its pieces those that are asked for and those
 * before them in the same extent, because their places follow from these. Each block that is read is checked; the
 * digests of chunk and row are not, because they need all of it. The cost grows with the row only by its extents, 24
 * bytes for up to 64 MiB of data. Every function may also return -ENOMEM. An excerpt belongs to one thread, and its
 * store, layout and part outlive it. */
#ifndef CORE_STEP_PART_EXCERPT_H
#define CORE_STEP_PART_EXCERPT_H

#include "core/step/part.h"
#include "core/tensor/boxes.h"

struct store_part_excerpt {              /* read-only */
	uint32_t tensor, rank;
	bool whole;                     /* boxes: one, of the whole tensor */
	struct tensor_grid grid;
	struct tensor_boxes boxes;
	const uint64_t *first_piece;    /* boxes.n + 1: number of each box's first piece among the row's; npieces */
	uint64_t npieces;
	struct base_digest digest;      /* of the row, as it says */
};
/* Is the tensor's row alone in a chunk that is longer than STORE_CHUNK_TARGET_BYTES? */
bool store_part_excerpt_pays(const struct proto_part *part, uint32_t tensor);
/* `packs`: as for store_part_read_row_cached. -ENODATA: this part has no row for the tensor. -BASE_EDAMAGED,
 * -BASE_EFORMAT, -BASE_EVERSION: err names the pack or the part. */
int store_part_excerpt_open(struct store *s, const struct store_layout *l, const struct proto_part *part,
	const char *const *packs, uint32_t npacks, uint32_t tensor, struct store_part_excerpt **ret_e,
	struct base_error *err);
void store_part_excerpt_close(struct store_part_excerpt *e); /* NULL-safe */
/* Pieces [first, first + n) of the row into ret_pieces, as store_part_read_row_cached gives them; inline bytes stay
 * until the next call. In ascending order nothing is read twice. -EINVAL: past the last piece. */
int store_part_excerpt_pieces(struct store_part_excerpt *e, uint64_t first, uint64_t n, struct store_piece *ret_pieces,
	struct base_error *err);

#endif
