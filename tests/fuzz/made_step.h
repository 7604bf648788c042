/* SPDX-License-Identifier: Apache-2.0
 *
 * made_step: a small store with one step, made of a few bytes that describe it. Every digest, check, size and reference
 * in it is right, whatever the bytes are: the project's own writers make each structure of those that it names, and
 * lies are put into a structure before its digest is taken.
 *
 * Input: records, each u8 kind | u8 length | bytes; bytes that are missing are 0.
 *
 *   0 head     ranks - 1 | layout of each rank (bits) | flags (enum made_flag): view headers, an extent for
 *              each row, many pieces | u16 M, u16 T, u16 R of the grid | shift of all three
 *   1 tensor   layouts (bits) | component | name | dtype | dimensions | how it is shared out (enum made_how)
 *              | argument of that | content: bits 0-1, 4: encoded | u16 sizes
 *   2 box      tensor | rank | for each dimension u16 offset, u16 size: of a tensor that is shared out by such boxes
 *   3 blob     rank | of the rank alone? | name | u16 length | content
 *   4 swap     rank | u16 piece | u16 piece: each has the place and the digest of the other one then
 *   5 lie      structure (enum made_structure; bit 7: digests of rows stay as they were) | its number | u24 offset
 *              | how many bytes go | the bytes that come in their place
 *   6 damage   pack | u24 offset | a byte to be changed by */
#ifndef MADE_STEP_H
#define MADE_STEP_H

#include "core/step/part.h"
#include "core/tensor/shard.h"
#include "tests/fuzz/fuzz_packs.h"

#define MADE_RUN "r"
#define MADE_STEP 3u
#define MADE_SEED 12345u
#define MADE_RANKS 4u
#define MADE_LAYOUTS 2u
#define MADE_TENSORS 12u
#define MADE_BLOBS 6u
#define MADE_RECORDS 96u
#define MADE_BYTES 262144u              /* of a tensor */
#define MADE_ALL_BYTES 73728u           /* of all tensors; with MADE_MANY: */
#define MADE_MANY_BYTES 270336u
#define MADE_BOXES 4096u                /* of a rank's row */
#define MADE_PIECES 256u                /* of a rank; with MADE_MANY: */
#define MADE_MANY_PIECES 6000u

/* Most inputs are to be quick. Those with MADE_MANY may have rows so long that loads read them by ranges. */
enum made_flag { MADE_HEADERS = 1, MADE_EXTENTS = 2, MADE_MANY = 4 };

/* The edges that count are those of the library, and loops over bytes are slow where each comparison is traced. */
#ifdef __clang__
#define MADE_NOT_COVERED \
	_Pragma("clang attribute push(__attribute__((no_sanitize(\"coverage\"))), apply_to = function)")
#define MADE_COVERED _Pragma("clang attribute pop")
#else
#define MADE_NOT_COVERED
#define MADE_COVERED
#endif

enum made_how { MADE_WHOLE, MADE_SPLIT, MADE_MESH, MADE_LISTED, MADE_HOWS };
enum made_structure { MADE_LIE_LAYOUT, MADE_LIE_CHUNK, MADE_LIE_PART, MADE_LIE_HEADER, MADE_LIE_MANIFEST,
	MADE_LIE_ENTRY, MADE_LIES };

struct made_tensor {
	char component[4], name[8];
	uint8_t layouts, how, arg, content;     /* layouts 0: left out */
	enum tensor_dtype dtype;
	struct tensor_shape shape;
	uint64_t len;
	uint8_t *bytes;                         /* of all of it, row-major: what whoever stores it stores */
	struct tensor_mesh *mesh[MADE_LAYOUTS];
	struct tensor_placements *placements[MADE_LAYOUTS];
};
struct made_blob { char name[8]; bool per_rank; uint8_t rank; uint64_t len; uint8_t *bytes; };
struct made_record { uint8_t kind, len; const uint8_t *at; };

struct made {
	struct memory m;
	struct made_record records[MADE_RECORDS]; size_t nrecords;
	uint32_t nranks;
	uint64_t room;                          /* bytes that further tensors may have */
	uint8_t layout_of[MADE_RANKS], flags;
	struct tensor_grid_params params;
	struct made_tensor tensors[MADE_TENSORS]; uint32_t ntensors;
	struct made_blob blobs[MADE_BLOBS]; uint32_t nblobs;
	struct store_layout *layouts[MADE_LAYOUTS];
	uint32_t *tags[MADE_LAYOUTS];
	struct base_buf objects[MADE_LAYOUTS];  /* the layouts' bytes, lies included */
	struct base_digest digests[MADE_LAYOUTS];
	bool honest;                            /* what can be read is what the description says */
	bool sound;                             /* honest, and no byte was changed: all that is complete can be read */
	bool complete;                          /* each tensor is stored, each item once */
	bool long_rows;                         /* which loads read by ranges, with fewer checks than a whole chunk */
};

/* Zeroes first. false: it describes nothing that can be written; to be released all the same. */
bool made_step(struct made *made, const uint8_t *data, size_t size);
void made_release(struct made *made);
/* NULL: it is not in the description. */
const struct made_tensor *made_tensor_find(const struct made *made, const char *component, const char *name,
	size_t name_len);
const struct made_blob *made_blob_find(const struct made *made, const char *name, bool per_rank, uint32_t rank);

/* ---- made_rows.c: what a rank stores ---- */

struct made_row { uint32_t tensor, number; struct tensor_box *boxes; uint32_t nboxes; size_t first, n; };
struct made_rank {
	struct made *made;
	uint32_t rank, layout;
	struct made_row rows[MADE_TENSORS]; uint32_t nrows;
	struct store_piece *pieces; uint32_t *same_as; size_t npieces; /* same_as: number of the piece that is equal */
	uint8_t *room;                          /* bytes of all of them */
};
/* Which boxes the rank stores of each tensor of its layout, and their pieces, which are appended to the pack. */
void made_rows_plan(struct made_rank *k);
void made_rows_append(struct made_rank *k, struct pack_writer *w);
/* After the pack has ended: pieces that are equal have the same place; then the swaps. */
void made_rows_settle(struct made_rank *k);
void made_rank_release(struct made_rank *k);

uint8_t made_byte(const struct made_record *record, size_t i);
uint32_t made_u16(const struct made_record *record, size_t i);
/* The records that lie about this structure, applied. true: there were any. */
bool made_lie(const struct made *made, enum made_structure what, unsigned number, struct base_buf *b);
/* The meshes and placements of tensors that are shared out so in a layout; its ranks, ascending. */
uint32_t made_ranks(const struct made *made, uint32_t layout, uint32_t ranks[static MADE_RANKS]);

#endif
