/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_copy: an object as it is stored, for a writer that puts it elsewhere: nothing is encoded anew. */
#include "core/base/cleanup.h"
#include "core/base/le.h"
#include "core/pack/pack_format.h"

static void checks_apart(const struct pack_object_ref *ref, const uint8_t *from, uint64_t *checks, uint32_t *lens)
{
	uint64_t blocks = base_block_count(ref->raw_len);

	for (uint64_t i = 0; i < blocks; i++)
		checks[i] = base_get64(from + 8 * i);
	for (uint64_t i = 0; ref->codec != PACK_CODEC_RAW && i < blocks; i++)
		lens[i] = base_get32(from + 8 * blocks + 4 * i);
}

/* The stored lengths have to be those of all the stored bytes, as a writer's are. */
static int stored_whole(const struct pack_object_ref *ref, const uint8_t *checks, struct base_error *err)
{
	uint64_t from, len;

	if (pack_object_stored_of(ref, 0, base_block_count(ref->raw_len), checks, &from, &len) == 0 &&
		len == ref->stored_len)
		return 0;
	return base_error_set(err, -BASE_EDAMAGED, "the stored lengths of its blocks are wrong");
}

int pack_object_take_whole(struct pack *p, const struct pack_object_ref *ref, const void *stored, const void *read,
	void *out, uint64_t *checks, uint32_t *lens, struct base_error *err)
{
	int r = stored_whole(ref, read, err);

	if (r == 0)
		r = pack_object_take(p, ref, 0, base_block_count(ref->raw_len), stored, read, out, err);
	if (r == 0)
		checks_apart(ref, read, checks, lens);
	return r;
}

int pack_object_copy(struct pack *p, const struct pack_object_ref *ref, void *stored, void *out, uint64_t *checks,
	uint32_t *lens, struct base_error *err)
{
	uint64_t blocks = base_block_count(ref->raw_len), at, len;
	base_cleanup_free uint8_t *read = NULL;
	struct iovec iov[1];
	int r = pack_object_ref_check(ref, pack_size(p) - PACK_TAIL_BYTES);

	if (r < 0)
		return base_error_set(err, r, "pack %s: no such object at offset %llu", pack_name(p),
			(unsigned long long)ref->offset);
	pack_object_checks_of(ref, 0, blocks, &at, &len);
	read = malloc(len + 1);
	if (!read)
		return base_no_memory(err);
	iov[0] = (struct iovec){read, len};
	r = pack_readv(p, at, iov, 1, err);
	iov[0] = (struct iovec){stored, ref->stored_len};
	if (r == 0)
		r = pack_readv(p, ref->offset, iov, 1, err);
	return r < 0 ? r : pack_object_take_whole(p, ref, stored, read, out, checks, lens, err);
}
