/* SPDX-License-Identifier: Apache-2.0
 *
 * codec: encodes the blocks of an object before they are stored. A codec word pairs a codec with the transform that
 * runs before it; transforms are in a table by id, so that a better one is one more line.
 *
 * Choice. A few blocks spread over the object are tried with the transform of the word and with none, the middle one
 * first; while nothing is gained, the next one is tried only if a quick search for runs and repeats finds something.
 * (This misses bit planes that gain beside a middle that gains nothing; no tensor of one kind of numbers has them.)
 * If neither gains 3 % on these, the object is stored raw and the rest is never looked at, so that data which does not
 * compress costs little. Else everything is encoded with the better one, and the gain is measured again at the end. A
 * block that LZ4 does not make smaller is stored as it is, untransformed, and says so in its stored length. */
#include "core/pack/codec.h"

#include <errno.h>
#include <lz4.h>

#include "core/base/le.h"
#include "core/pack/transform.h"

enum {
	CODEC_SAMPLE_BLOCKS = 3,
	CODEC_LZ4_ACCELERATION = 1,
	CODEC_LOOK_ACCELERATION = 32, /* of the quick search: it skips what does not compress */
};

static const struct transform {
	const char *name;    /* with lz4 */
	unsigned word_bytes; /* bit planes of words of so many bytes; 0: none */
} transforms[] = {
	[PACK_TRANSFORM_NONE] = {"lz4", 0},
	[PACK_TRANSFORM_BITPLANE8] = {"lz4+bitplane8", 1},
	[PACK_TRANSFORM_BITPLANE16] = {"lz4+bitplane16", 2},
	[PACK_TRANSFORM_BITPLANE32] = {"lz4+bitplane32", 4},
	[PACK_TRANSFORM_BITPLANE64] = {"lz4+bitplane64", 8},
};

/* What `scratch` is cut into: two blocks and the state of LZ4. */
struct codec_scratch {
	uint8_t planes[BASE_BLOCK_BYTES], temp[BASE_BLOCK_BYTES];
	union { LZ4_stream_t lz4; uint8_t decoded[BASE_BLOCK_BYTES]; } u;
};
_Static_assert(sizeof(struct codec_scratch) + 63 <= PACK_CODEC_SCRATCH, "scratch");

static struct codec_scratch *scratch_of(void *scratch)
{
	return (struct codec_scratch *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
}

bool pack_codec_valid(uint16_t word)
{
	unsigned codec = word & 0xff, transform = word >> 8;
	if (codec == PACK_CODEC_RAW)
		return transform == PACK_TRANSFORM_NONE;
	return codec == PACK_CODEC_LZ4 && transform < BASE_COUNT(transforms);
}

const char *pack_codec_name(uint16_t word)
{
	if (!pack_codec_valid(word))
		return "unknown";
	return (word & 0xff) == PACK_CODEC_RAW ? "raw" : transforms[word >> 8].name;
}

static enum pack_transform transform_of_word(unsigned word_bytes)
{
	for (unsigned id = 0; id < BASE_COUNT(transforms); id++)
		if (transforms[id].word_bytes == word_bytes)
			return (enum pack_transform)id;
	return PACK_TRANSFORM_NONE;
}

/* Encodes one block to `out` (room for len bytes) and returns its stored length, or 0 when it would not get smaller. */
static size_t encode_block(
	const struct transform *t, const uint8_t *in, size_t len, uint8_t *out, struct codec_scratch *s)
{
	const uint8_t *source = t->word_bytes ? s->planes : in;
	int n;

	if (t->word_bytes)
		transform_bitplane_encode(t->word_bytes, in, len, s->planes, s->temp);
	n = LZ4_compress_fast_extState(
		&s->u.lz4, (const char *)source, (char *)out, (int)len, (int)len - 1, CODEC_LZ4_ACCELERATION);
	return n > 0 ? (size_t)n : 0;
}

static size_t block_len(size_t len, uint64_t i)
{
	return base_min(len - i * BASE_BLOCK_BYTES, BASE_BLOCK_BYTES);
}

static bool gains(uint64_t stored, uint64_t blocks, uint64_t raw)
{
	return (stored + 4 * blocks) * 100 < raw * 97; /* each block's stored length costs 4 bytes */
}

static bool looks_worth_it(const uint8_t *in, size_t len, uint8_t *out, struct codec_scratch *s)
{
	return LZ4_compress_fast_extState(
		&s->u.lz4, (const char *)in, (char *)out, (int)len, (int)len - 1, CODEC_LOOK_ACCELERATION) > 0;
}

/* The sampled blocks that were encoded with the transform of the word. They are in `out` where they are in the object,
 * which no block before them reaches, so they need not be encoded again. */
struct sampled { uint64_t blocks[CODEC_SAMPLE_BLOCKS]; size_t stored[CODEC_SAMPLE_BLOCKS]; unsigned n; };

/* The better transform for the sampled blocks. */
static enum pack_transform choose(unsigned word_bytes, const uint8_t *bytes, size_t len, uint8_t *out,
	struct codec_scratch *s, struct sampled *ret_sampled, bool *ret_gain)
{
	uint64_t blocks = base_block_count(len), samples = base_min(blocks, CODEC_SAMPLE_BLOCKS);
	uint64_t raw = 0, plain = 0, planes = 0; /* bytes of the sampled blocks: as they are, and stored */
	enum pack_transform best = transform_of_word(word_bytes);

	ret_sampled->n = 0;
	for (uint64_t k = 0; k < samples; k++) {
		uint64_t i = (2 * ((k + (samples - 1) / 2) % samples) + 1) * blocks / (2 * samples);
		const uint8_t *in = bytes + i * BASE_BLOCK_BYTES;
		uint8_t *to = out + i * BASE_BLOCK_BYTES;
		size_t n = block_len(len, i), by_plain = n, by_planes = n;
		if (plain < raw || planes < raw || k == 0 || looks_worth_it(in, n, to, s)) {
			by_plain = encode_block(&transforms[PACK_TRANSFORM_NONE], in, n, to, s);
			by_planes = encode_block(&transforms[best], in, n, to, s);
			ret_sampled->blocks[ret_sampled->n] = i;
			ret_sampled->stored[ret_sampled->n++] = by_planes;
		}
		raw += n;
		plain += by_plain ? by_plain : n;
		planes += by_planes ? by_planes : n;
	}
	*ret_gain = gains(base_min(plain, planes), samples, raw);
	if (plain > planes)
		return best;
	if (best != PACK_TRANSFORM_NONE)
		ret_sampled->n = 0; /* what is in `out` is not wanted */
	return PACK_TRANSFORM_NONE;
}

/* Block i of the object, to out + at. Its stored length, or 0 when it would not get smaller. */
static size_t encode_at(enum pack_transform id, const struct sampled *sampled, const uint8_t *bytes, size_t len,
	uint64_t i, uint8_t *out, uint64_t at, struct codec_scratch *s)
{
	for (unsigned k = 0; k < sampled->n; k++)
		if (sampled->blocks[k] == i) {
			memmove(out + at, out + i * BASE_BLOCK_BYTES, sampled->stored[k]);
			return sampled->stored[k];
		}
	return encode_block(&transforms[id], bytes + i * BASE_BLOCK_BYTES, block_len(len, i), out + at, s);
}

uint16_t pack_codec_encode(unsigned word_bytes, const uint8_t *bytes, size_t len, uint8_t *out, uint32_t *ret_lens,
	uint64_t *ret_stored_len, void *scratch)
{
	struct codec_scratch *s = scratch_of(scratch);
	uint64_t blocks = base_block_count(len), stored = 0;
	struct sampled sampled;
	enum pack_transform id;
	bool gain = false;

	*ret_stored_len = len;
	if (len == 0 || len > STORE_ENCODED_MAX_BYTES)
		return PACK_CODEC_RAW;
	id = choose(word_bytes, bytes, len, out, s, &sampled, &gain);
	if (!gain)
		return PACK_CODEC_RAW;
	for (uint64_t i = 0; i < blocks; i++) {
		size_t raw = block_len(len, i), n = encode_at(id, &sampled, bytes, len, i, out, stored, s);
		if (n == 0) {
			memcpy(out + stored, bytes + i * BASE_BLOCK_BYTES, raw);
			ret_lens[i] = (uint32_t)raw | PACK_BLOCK_RAW;
			stored += raw;
		} else {
			ret_lens[i] = (uint32_t)n;
			stored += n;
		}
	}
	if (!gains(stored, blocks, len))
		return PACK_CODEC_RAW;
	*ret_stored_len = stored;
	return PACK_CODEC_WORD(PACK_CODEC_LZ4, id);
}

int pack_codec_decode_block(
	uint16_t word, const uint8_t *stored, uint32_t stored_len_word, uint8_t *out, size_t raw_len, void *scratch)
{
	struct codec_scratch *s = scratch_of(scratch);
	uint32_t len = stored_len_word & ~PACK_BLOCK_RAW;
	unsigned word_bytes;
	uint8_t *to;

	if (!pack_codec_valid(word) || raw_len == 0 || raw_len > BASE_BLOCK_BYTES)
		return -EBADMSG;
	if ((word & 0xff) == PACK_CODEC_RAW || stored_len_word & PACK_BLOCK_RAW) {
		if (len != raw_len)
			return -EBADMSG;
		memcpy(out, stored, raw_len);
		return 0;
	}
	if (len == 0 || len >= raw_len)
		return -EBADMSG;
	word_bytes = transforms[word >> 8].word_bytes;
	to = word_bytes ? s->u.decoded : out;
	if (LZ4_decompress_safe((const char *)stored, (char *)to, (int)len, (int)raw_len) != (int)raw_len)
		return -EBADMSG;
	if (word_bytes)
		transform_bitplane_decode(word_bytes, to, raw_len, out, s->temp);
	return 0;
}
