/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_codec_block: u16 codec word | u16 raw length | u8 mode | bytes. Mode bit 0: the block claims to be raw. Mode bit
 * 1: the bytes are encoded instead, and must come back. */
#include <stdlib.h>
#include <string.h>

#include "core/base/le.h"
#include "core/pack/codec.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

static void round_trip(unsigned word_bytes, const uint8_t *bytes, size_t len)
{
	static uint8_t scratch[PACK_CODEC_SCRATCH], back[BASE_BLOCK_BYTES];
	uint64_t blocks = base_block_count(len), stored_len;
	uint8_t *out = malloc(len + 1);
	uint32_t *lens = calloc(blocks + 1, sizeof *lens);
	uint16_t word;
	const uint8_t *at;

	if (!out || !lens)
		abort();
	word = pack_codec_encode(word_bytes, bytes, len, out, lens, &stored_len, scratch);
	at = out;
	for (uint64_t i = 0; word != PACK_CODEC_RAW && i < blocks; i++) {
		size_t raw_len = base_min(len - i * BASE_BLOCK_BYTES, BASE_BLOCK_BYTES);
		if (pack_codec_decode_block(word, at, lens[i], back, raw_len, scratch) < 0)
			abort();
		if (memcmp(back, bytes + i * BASE_BLOCK_BYTES, raw_len) != 0)
			abort();
		at += lens[i] & ~PACK_BLOCK_RAW;
	}
	if (word != PACK_CODEC_RAW && at != out + stored_len)
		abort();
	free(out);
	free(lens);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
	static uint8_t scratch[PACK_CODEC_SCRATCH];
	uint16_t word, raw_len;
	uint8_t mode, *out;

	if (len < 5)
		return 0;
	word = base_get16(bytes);
	raw_len = base_get16(bytes + 2);
	mode = bytes[4];
	bytes += 5, len -= 5;
	if (mode & 2) {
		round_trip(1u << (word & 3), bytes, len);
		return 0;
	}
	out = malloc(raw_len + 1u); /* exactly, for the sanitizer */
	if (!out)
		abort();
	out[raw_len] = 0x5a;
	/* The stored bytes must be as many as the length says: that is the caller's duty. */
	(void)pack_codec_decode_block(
		word, bytes, (uint32_t)len | (mode & 1 ? PACK_BLOCK_RAW : 0), out, raw_len, scratch);
	if (out[raw_len] != 0x5a)
		abort();
	free(out);
	return 0;
}
