/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_format: head, entries and tail of a pack to and from bytes. Pure functions. Decoders take nothing that the
 * encoders do not make: whatever is reserved must be zero. */
#include <string.h>

#include "core/pack/pack_format.h"

void pack_head_encode(const uint8_t store_id[16], const char *name, uint8_t head[static PACK_HEAD_BYTES])
{
	size_t len = strlen(name);
	memset(head, 0, PACK_HEAD_BYTES);
	memcpy(head, PACK_MAGIC_HEAD, 8);
	base_put16(head + 8, PACK_VERSION);
	memcpy(head + 16, store_id, 16);
	base_put16(head + 32, (uint16_t)len);
	memcpy(head + 34, name, len);
	base_put64(head + PACK_HEAD_CHECK_AT, base_xxh64_of(0, head, PACK_HEAD_CHECK_AT));
}

void pack_tail_encode(const struct pack_tail *t, uint8_t tail[static PACK_TAIL_BYTES])
{
	memset(tail, 0, PACK_TAIL_BYTES);
	memcpy(tail, PACK_MAGIC_TAIL, 8);
	base_put64(tail + 8, t->footer_offset);
	base_put64(tail + 16, t->footer_len);
	base_put64(tail + 24, t->count);
	base_put64(tail + 32, t->file_size);
	memcpy(tail + 40, &t->footer_digest, sizeof t->footer_digest);
	base_put64(tail + PACK_TAIL_CHECK_AT, base_xxh64_of(0, tail, PACK_TAIL_CHECK_AT));
}

int pack_tail_decode(const uint8_t tail[static PACK_TAIL_BYTES], uint64_t file_size, struct pack_tail *ret_t)
{
	struct pack_tail t = { base_get64(tail + 8), base_get64(tail + 16), base_get64(tail + 24),
		base_get64(tail + 32), { { 0 } } };
	uint8_t again[PACK_TAIL_BYTES];
	uint64_t end, len;

	memcpy(&t.footer_digest, tail + 40, sizeof t.footer_digest);
	pack_tail_encode(&t, again);
	if (memcmp(tail, again, sizeof again) != 0) /* magic, zeros and check at once */
		return -BASE_EDAMAGED;
	if (t.file_size != file_size || t.footer_offset < PACK_HEAD_BYTES ||
		t.footer_offset % PACK_FOOTER_ALIGN != 0)
		return -BASE_EDAMAGED;
	if (base_mul_overflows(t.count, PACK_ENTRY_BYTES, &len) || len != t.footer_len)
		return -BASE_EDAMAGED;
	if (base_add_overflows(t.footer_offset, t.footer_len, &end) ||
		base_add_overflows(end, PACK_TAIL_BYTES, &end) || end != file_size)
		return -BASE_EDAMAGED;
	*ret_t = t;
	return 0;
}

void pack_entry_encode(const struct pack_object_ref *ref, uint8_t entry[static PACK_ENTRY_BYTES])
{
	memset(entry, 0, PACK_ENTRY_BYTES);
	memcpy(entry, &ref->digest, sizeof ref->digest);
	base_put64(entry + 32, ref->offset);
	base_put64(entry + 40, ref->checks);
	base_put64(entry + 48, ref->raw_len);
	base_put64(entry + 56, ref->stored_len);
	base_put16(entry + 64, ref->codec);
	entry[66] = ref->kind;
}

int pack_entry_decode(const uint8_t entry[static PACK_ENTRY_BYTES], uint64_t end, struct pack_object_ref *ret_ref)
{
	struct pack_object_ref ref = {
		.offset = base_get64(entry + 32), .checks = base_get64(entry + 40), .raw_len = base_get64(entry + 48),
		.stored_len = base_get64(entry + 56), .codec = base_get16(entry + 64), .kind = entry[66],
	};
	int r;

	memcpy(&ref.digest, entry, sizeof ref.digest);
	for (size_t i = 67; i < PACK_ENTRY_BYTES; i++)
		if (entry[i] != 0)
			return -BASE_EDAMAGED;
	r = pack_object_ref_check(&ref, end);
	if (r == 0)
		*ret_ref = ref;
	return r;
}

int pack_footer_decode(const uint8_t *footer, const struct pack_tail *t, struct pack_object_ref *out)
{
	uint64_t end = PACK_HEAD_BYTES;
	int r;

	for (uint64_t i = 0; i < t->count; i++) {
		r = pack_entry_decode(footer + i * PACK_ENTRY_BYTES, t->footer_offset, &out[i]);
		if (r < 0)
			return r;
	}
	for (uint64_t i = 0; i < t->count;) {
		if (out[i].offset != base_align(end, pack_object_align(out[i].codec, out[i].stored_len)))
			return -BASE_EDAMAGED;
		r = pack_extent_bounds(out, t->count, i, &i, &end);
		if (r < 0)
			return r;
	}
	return base_align(end, PACK_FOOTER_ALIGN) == t->footer_offset ? 0 : -BASE_EDAMAGED;
}
