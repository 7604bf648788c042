/* SPDX-License-Identifier: Apache-2.0
 *
 * codec: how the blocks of an object are stored (docs/format/codec.md). A codec word is u16: low byte the codec,
 * high byte the transform that runs before it. Bit-exact for every input. Each 16 KiB block is encoded by itself.
 * Pure functions, any thread; scratch memory is the caller's. */
#ifndef CORE_PACK_CODEC_H
#define CORE_PACK_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/digest.h"
#include "proto/limits.h"

enum pack_codec { PACK_CODEC_RAW = 0, PACK_CODEC_LZ4 = 1 };
/* Transforms: table in codec.c. Ids are never reused. */
enum pack_transform { PACK_TRANSFORM_NONE = 0, PACK_TRANSFORM_BITPLANE8 = 1, PACK_TRANSFORM_BITPLANE16 = 2,
	PACK_TRANSFORM_BITPLANE32 = 3, PACK_TRANSFORM_BITPLANE64 = 4 };
#define PACK_CODEC_WORD(codec, transform) ((uint16_t)((codec) | (transform) << 8))
#define PACK_BLOCK_RAW 0x80000000u /* in a stored block length: this block is stored as it is */

bool pack_codec_valid(uint16_t word);         /* known codec and transform, and a pair that is allowed */
const char *pack_codec_name(uint16_t word);   /* "raw", "lz4+bitplane16", ...; static */

/* Encodes an object for items whose word is word_bytes wide (tensor_dtype_word_bytes; 1 for blobs). Writes the stored
 * blocks one after another to `out` (room for `len` bytes) and the stored length of each, PACK_BLOCK_RAW included, to
 * `ret_lens` (base_block_count(len) entries). Returns the codec word. It is raw when the gain is under 3 %: the caller
 * then stores the input itself. A sample of blocks may decide for raw without trying the rest.
 * `scratch`: PACK_CODEC_SCRATCH bytes. */
#define PACK_CODEC_SCRATCH (3 * BASE_BLOCK_BYTES + 1024)
uint16_t pack_codec_encode(unsigned word_bytes, const uint8_t *bytes, size_t len, uint8_t *out, uint32_t *ret_lens,
	uint64_t *ret_stored_len, void *scratch);

/* Decodes one block into exactly raw_len bytes. -EBADMSG when it does not decode to that; never writes past raw_len. */
int pack_codec_decode_block(uint16_t word, const uint8_t *stored, uint32_t stored_len_word, uint8_t *out,
	size_t raw_len, void *scratch);

#endif
