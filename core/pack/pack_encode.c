/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_encode: small things of many numbers (part chunks, layouts, view headers) go in encoded where that gains: half
 * of a row is indices and offsets that repeat. 184 bytes a piece of a thin shard (one piece a row) become 101. */
#include "core/base/cleanup.h"
#include "core/pack/codec.h"
#include "core/pack/pack.h"

struct encoded { uint8_t *bytes; uint32_t *lens; uint64_t *checks; uint64_t stored_len; uint16_t codec; };

static int encode(const struct base_digest *d, const void *bytes, uint64_t len, struct encoded *e)
{
	uint64_t blocks = base_block_count(len), at = 0;
	base_cleanup_free void *scratch = malloc(PACK_CODEC_SCRATCH);

	e->bytes = malloc(len);
	e->lens = malloc(blocks * sizeof *e->lens);
	e->checks = malloc(blocks * sizeof *e->checks);
	if (!scratch || !e->bytes || !e->lens || !e->checks)
		return -ENOMEM;
	e->codec = pack_codec_encode(1, bytes, len, e->bytes, e->lens, &e->stored_len, scratch);
	if (e->codec == PACK_CODEC_RAW)
		return 0;
	for (uint64_t i = 0; i < blocks; i++) {
		uint32_t stored = e->lens[i] & ~PACK_BLOCK_RAW;

		e->checks[i] = base_block_check(d, i, e->bytes + at, stored);
		at += stored;
	}
	return 0;
}

int pack_append_encoded(struct pack_writer *w, enum pack_object_kind kind, const void *bytes, uint64_t len,
	struct pack_object_ref *ret_ref)
{
	struct encoded e = {.codec = PACK_CODEC_RAW};
	struct base_digest d;
	int r = 0;

	if (len > 0 && len <= STORE_ENCODED_MAX_BYTES) {
		base_digest_of(bytes, len, &d);
		r = encode(&d, bytes, len, &e);
	}
	if (r == 0 && e.codec == PACK_CODEC_RAW)
		r = pack_append_raw(w, kind, bytes, len, ret_ref);
	else if (r == 0)
		r = pack_append(w, &d, kind, e.codec, e.bytes, e.stored_len, len, e.checks, e.lens, ret_ref);
	free(e.bytes);
	free(e.lens);
	free(e.checks);
	return r;
}
