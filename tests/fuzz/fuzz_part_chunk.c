/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_part_chunk: u32 length | layout object | chunk object (docs/format/part.md). Tried as it is, then with the rows'
 * digests made good, so that mutations of pieces get past them. What decodes hands out rows whose pieces have the
 * digest of the row. */
#include <stdlib.h>
#include <string.h>

#include "core/step/chunk_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

static void try_chunk(const struct store_layout *l, const uint8_t *bytes, size_t len)
{
	struct store_chunk *c;
	if (store_chunk_decode(bytes, len, l, 4, &c, NULL) < 0)
		return;
	for (uint32_t i = 0; i < store_chunk_rows(c); i++) {
		struct store_row row;
		struct base_digest digest;
		if (store_chunk_row(c, i, &row) < 0)
			continue;
		if (store_row_digest(row.pieces, row.npieces, &digest) == 0 && !base_digest_equal(&digest, &row.digest))
			abort();
		if (store_chunk_find(c, row.tensor) != i)
			abort();
		store_row_release(&row);
	}
	store_chunk_free(c);
}

/* Computes the digest of every row whose pieces are there. */
static void digests_mend(uint8_t *bytes, size_t len)
{
	uint64_t nrows = base_get32(bytes + 16), nruns = base_get32(bytes + 20), npieces = base_get64(bytes + 24),
		 at = 0;
	uint64_t first = CHUNK_HEAD_BYTES + nrows * CHUNK_ROW_BYTES + nruns * CHUNK_EXTENT_BYTES;
	if (npieces > len / CHUNK_PIECE_BYTES || first > len || npieces * CHUNK_PIECE_BYTES > len - first)
		return;
	for (uint64_t i = 0; i < nrows; i++) {
		uint8_t *row = bytes + CHUNK_HEAD_BYTES + i * CHUNK_ROW_BYTES;
		uint64_t n = base_get64(row + 16);
		struct base_digest digest;
		struct store_piece *pieces;

		if (n > npieces - at)
			return;
		pieces = calloc(n + 1, sizeof *pieces);
		if (!pieces)
			abort();
		for (uint64_t j = 0; j < n; j++)
			memcpy(&pieces[j].ref.digest, bytes + first + (at + j) * CHUNK_PIECE_BYTES, sizeof digest);
		if (store_row_digest(pieces, n, &digest) == 0)
			memcpy(row + 32, &digest, sizeof digest);
		free(pieces);
		at += n;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
	struct store_layout *l;
	size_t n;
	const uint8_t *chunk;
	uint8_t *good;

	if (len < 4 || base_get32(bytes) > len - 4 || store_layout_decode(bytes + 4, base_get32(bytes), &l, NULL) < 0)
		return 0;
	n = len - 4 - base_get32(bytes);
	chunk = bytes + 4 + base_get32(bytes);
	try_chunk(l, chunk, n);
	good = malloc(n + 1);
	if (!good)
		abort();
	memcpy(good, chunk, n);
	if (n >= CHUNK_HEAD_BYTES) {
		digests_mend(good, n);
		try_chunk(l, good, n);
	}
	free(good);
	store_layout_free(l);
	return 0;
}
