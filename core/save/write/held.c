/* SPDX-License-Identifier: Apache-2.0
 *
 * held: small tensors of a component, kept in memory until the extent ends or HELD_BYTES of them are there.
 *
 * A raw object of 64 KiB and more begins at a multiple of 4096 (docs/format/objects.md). After a bias of some hundred
 * bytes each matrix would waste nearly a page, which for one of a quarter of a megabyte is more than all its checks and
 * entries. So what is small comes behind what is large: beside its checks, too, so one request reads all of it. */
#include "core/save/write/write_internal.h"

#define HELD_PIECE_BYTES (64u << 10)
#define HELD_BYTES (1u << 20)
#define HELD_BLOCKS (HELD_PIECE_BYTES / BASE_BLOCK_BYTES)

struct held_piece {
	struct save_known *known;       /* has the digest; all else once it is appended */
	size_t at;                      /* in the bytes */
	uint64_t stored_len, len;
	uint16_t codec;
	uint64_t checks[HELD_BLOCKS];
	uint32_t lens[HELD_BLOCKS];
};

bool save_held_takes(const struct save_piece *p) { return p->len <= HELD_PIECE_BYTES; }

uint64_t save_held_bytes(const struct save_held *h)
{
	return h->bytes.len + h->pieces.len / sizeof(struct held_piece) * 64;
}

int save_held_add(struct save_held *h, const struct save_band *b, const struct save_piece *p, struct save_known *k)
{
	bool raw = p->codec == PACK_CODEC_RAW;
	struct held_piece held = {.known = k, .at = h->bytes.len, .stored_len = p->stored_len, .len = p->len,
		.codec = p->codec};
	size_t blocks = base_block_count(p->len);

	memcpy(held.checks, b->checks + p->first_block, blocks * sizeof held.checks[0]);
	if (!raw)
		memcpy(held.lens, b->lens + p->first_block, blocks * sizeof held.lens[0]);
	base_buf_append(&h->bytes, (raw ? b->raw : b->out) + p->offset, p->stored_len);
	base_buf_append(&h->pieces, &held, sizeof held);
	return h->bytes.error || h->pieces.error ? -ENOMEM : h->bytes.len >= HELD_BYTES;
}

int save_held_append(struct save_appender *a)
{
	const struct held_piece *piece = (const struct held_piece *)(const void *)a->held.pieces.data;
	size_t n = a->held.pieces.len / sizeof *piece;
	int r = 0;

	for (; r == 0 && n > 0; n--, piece++) {
		const struct base_digest digest = piece->known->ref.digest;

		r = pack_append(a->pack, &digest, PACK_OBJECT_PIECE, piece->codec,
			a->held.bytes.data + piece->at, piece->stored_len, piece->len, piece->checks,
			piece->codec == PACK_CODEC_RAW ? NULL : piece->lens, &piece->known->ref);
		if (r == 0)
			save_appender_count(a, a->pack_number, piece->known);
	}
	a->held.bytes.len = a->held.pieces.len = 0;
	return r;
}

void save_held_release(struct save_held *h)
{
	base_buf_release(&h->bytes);
	base_buf_release(&h->pieces);
}
