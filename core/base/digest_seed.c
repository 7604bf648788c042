/* SPDX-License-Identifier: Apache-2.0
 *
 * digest_seed: seeds under which XXH3-128 cannot see that one bit moved.
 *
 * Inputs of more than 240 bytes are hashed in blocks of 16 stripes of 64 bytes. Lane i (0 to 7) of stripe n is the u64
 * d at byte 64 n + 8 i of the block; its key is a u64 K of the secret. Each lane adds to two of eight accumulators:
 *
 *   acc[i]     += low32( d ^ K ) * high32( d ^ K )
 *   acc[i ^ 1] += d
 *
 * The secret is 192 constant bytes, 24 words; the seed is added to the words with an even number and subtracted from
 * those with an odd one. The key of lane i in stripe n is word n + i; the last 64 bytes of the input are hashed as one
 * more stripe, with keys that begin at byte 121 of the secret.
 *
 * Where d is 0 a bit in the low half of d changes the product by that bit times high32(K), plus or minus; a bit in the
 * high half by that bit times low32(K). Its sum in acc[i ^ 1] does not know the stripe. So a bit that moves over zeros
 * from one stripe to another of a block, in the same lane, leaves all accumulators as they were if the two keys have
 * the same high (low) half, and the same bit in the other half, which gives the sign. Between lanes i and i ^ 1 it does
 * so if both halves are powers of two; between other lanes never, for no half is 0. Nothing else is possible: two
 * products below 2^64 are equal or opposite modulo 2^64 only so.
 *
 * Two keys of equal parity keep their distance under all seeds, and none of the constants are alike. Of different
 * parity, one half is alike for one seed in 2^32 each: about 2^-23 of all seeds, the last stripe's keys included. */
#include "core/base/digest.h"

#define SEED_WORDS 24u
#define SEED_LANES 8u
#define SEED_STRIPES 16u
#define SEED_LAST_BYTE 121u /* of the secret: where the keys of the last stripe begin */

static const uint64_t seed_secret[SEED_WORDS] = {
	UINT64_C(0xbe4ba423396cfeb8), UINT64_C(0x1cad21f72c81017c), UINT64_C(0xdb979083e96dd4de),
	UINT64_C(0x1f67b3b7a4a44072), UINT64_C(0x78e5c0cc4ee679cb), UINT64_C(0x2172ffcc7dd05a82),
	UINT64_C(0x8e2443f7744608b8), UINT64_C(0x4c263a81e69035e0), UINT64_C(0xcb00c391bb52283c),
	UINT64_C(0xa32e531b8b65d088), UINT64_C(0x4ef90da297486471), UINT64_C(0xd8acdea946ef1938),
	UINT64_C(0x3f349ce33f76faa8), UINT64_C(0x1d4f0bc7c7bbdcf9), UINT64_C(0x3159b4cd4be0518a),
	UINT64_C(0x647378d9c97e9fc8), UINT64_C(0xc3ebd33483acc5ea), UINT64_C(0xeb6313faffa081c5),
	UINT64_C(0x49daf0b751dd0d17), UINT64_C(0x9e68d429265516d3), UINT64_C(0xfca1477d58be162b),
	UINT64_C(0xce31d07ad1b8f88f), UINT64_C(0x280416958f3acb45), UINT64_C(0x7e404bbbcafbd7af),
};

/* All keys that lane `lane` is ever hashed with: one a stripe, and that of the last 64 bytes. */
static void seed_keys(const uint64_t words[static SEED_WORDS], unsigned lane, uint64_t keys[static SEED_STRIPES + 1])
{
	unsigned word = SEED_LAST_BYTE / 8 + lane, bits = SEED_LAST_BYTE % 8 * 8;

	for (unsigned n = 0; n < SEED_STRIPES; n++)
		keys[n] = words[n + lane];
	keys[SEED_STRIPES] = words[word] >> bits | words[word + 1] << (64 - bits);
}

/* 0, or a single bit. */
static bool seed_half_bad(uint32_t half) { return (half & (half - 1)) == 0; }

bool base_xxh128_seed_weak(uint64_t seed)
{
	uint64_t words[SEED_WORDS], keys[SEED_STRIPES + 1];

	for (unsigned i = 0; i < SEED_WORDS; i++)
		words[i] = i % 2 ? seed_secret[i] - seed : seed_secret[i] + seed;
	for (unsigned lane = 0; lane < SEED_LANES; lane++) {
		seed_keys(words, lane, keys);
		for (unsigned a = 0; a <= SEED_STRIPES; a++) {
			if (seed_half_bad((uint32_t)keys[a]) || seed_half_bad((uint32_t)(keys[a] >> 32)))
				return true;
			for (unsigned b = 0; b < a; b++)
				if ((uint32_t)keys[a] == (uint32_t)keys[b] || keys[a] >> 32 == keys[b] >> 32)
					return true;
		}
	}
	return false;
}
