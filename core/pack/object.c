/* SPDX-License-Identifier: Apache-2.0
 *
 * object: the arithmetic of places in a pack (docs/format/objects.md). Pure functions. All sums stay far below 2^63: an
 * object has at most 2^46 bytes and a reference is checked against the file's size before anything is added to it. */
#include <string.h>

#include "core/pack/pack_format.h"
#include "proto/message.h"

enum { OBJECT_ALIGN = 64, OBJECT_ALIGN_RAW = 4096, OBJECT_RAW_LARGE = 64 << 10 };

struct pack_object_ref pack_object_ref_from(const struct proto_ref *ref)
{
	return (struct pack_object_ref){.digest = ref->digest, .offset = ref->offset, .checks = ref->checks,
		.raw_len = ref->raw_len, .stored_len = ref->stored_len, .codec = ref->codec, .kind = ref->kind,
		.pack = ref->pack};
}

uint64_t pack_object_align(uint16_t codec, uint64_t stored_len)
{
	return codec == PACK_CODEC_RAW && stored_len >= OBJECT_RAW_LARGE ? OBJECT_ALIGN_RAW : OBJECT_ALIGN;
}

uint64_t pack_object_checks_bytes(uint16_t codec, uint64_t raw_len)
{
	return base_block_count(raw_len) * (codec == PACK_CODEC_RAW ? 8 : 12);
}

static bool range_within(uint64_t offset, uint64_t len, uint64_t from, uint64_t end)
{
	uint64_t stop;
	return offset >= from && !base_add_overflows(offset, len, &stop) && stop <= end;
}

int pack_object_ref_check(const struct pack_object_ref *ref, uint64_t end)
{
	bool raw = ref->codec == PACK_CODEC_RAW;
	if (!pack_codec_valid(ref->codec) || ref->kind > PACK_OBJECT_VIEW_HEADER)
		return -BASE_EVERSION; /* the caller has verified the bytes that this comes from */
	if (ref->kind < PACK_OBJECT_PIECE)
		return -BASE_EDAMAGED;
	if (ref->raw_len > (raw ? STORE_OBJECT_MAX_BYTES : STORE_ENCODED_MAX_BYTES))
		return -BASE_EDAMAGED;
	if (raw ? ref->stored_len != ref->raw_len
		: ref->stored_len >= ref->raw_len || ref->stored_len < base_block_count(ref->raw_len))
		return -BASE_EDAMAGED;
	if (ref->offset % pack_object_align(ref->codec, ref->stored_len) != 0)
		return -BASE_EDAMAGED;
	if (!range_within(ref->offset, ref->stored_len, PACK_HEAD_BYTES, end) ||
	    !range_within(ref->checks, pack_object_checks_bytes(ref->codec, ref->raw_len), PACK_HEAD_BYTES, end))
		return -BASE_EDAMAGED;
	return ref->checks < ref->offset + ref->stored_len ? -BASE_EDAMAGED : 0;
}

static uint64_t checks_end(const struct pack_object_ref *ref)
{
	return ref->checks + pack_object_checks_bytes(ref->codec, ref->raw_len);
}

/* Does `next` follow `ref` in the extent that `first` begins? The last condition matters for empty objects only: one
 * that opens an extent may be where the extent before it could have continued. */
static bool same_extent(
	const struct pack_object_ref *first, const struct pack_object_ref *ref, const struct pack_object_ref *next)
{
	uint64_t at = base_align(ref->offset + ref->stored_len, pack_object_align(next->codec, next->stored_len));
	return next->offset == at && next->checks == checks_end(ref) && at + next->stored_len <= first->checks;
}

int pack_extent_bounds(
	const struct pack_object_ref *objects, uint64_t count, uint64_t first, uint64_t *ret_next, uint64_t *ret_end)
{
	uint64_t next = first + 1, stored_end;
	const struct pack_object_ref *last;

	while (next < count && same_extent(&objects[first], &objects[next - 1], &objects[next]))
		next++;
	last = &objects[next - 1];
	stored_end = last->offset + last->stored_len;
	if (objects[first].checks != base_align(stored_end, PACK_CHECKS_ALIGN))
		return -BASE_EDAMAGED;
	if (next - first > 1 && stored_end - objects[first].offset > STORE_EXTENT_MAX_BYTES)
		return -BASE_EDAMAGED;
	*ret_next = next;
	*ret_end = checks_end(last);
	return 0;
}
