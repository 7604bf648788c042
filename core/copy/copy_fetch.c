/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_fetch: bytes of the source's packs, no faster than asked for. Stored bytes are taken as they are, so nothing is
 * encoded anew; they are decoded once, because the digest is that of the decoded bytes. */
#include <time.h>

#include "core/base/clock.h"
#include "core/base/le.h"
#include "core/copy/copy_internal.h"
#include "core/pack/codec.h"

#define FETCH_WAIT_NS UINT64_C(200000000) /* at most, until the next look whether it is cancelled */

/* Waits until so many bytes may be read. -EINTR */
static int fetch_pace(struct copy *c, uint64_t bytes, struct base_error *err)
{
	uint64_t now = base_monotonic_ns(), begin;

	atomic_fetch_add_explicit(&c->read_bytes, bytes, memory_order_relaxed);
	if (c->options->rate) {
		pthread_mutex_lock(&c->pace_lock);
		begin = c->pace_ns = base_max(c->pace_ns, now);
		c->pace_ns += (uint64_t)((double)bytes * 1e9 / (double)c->options->rate);
		pthread_mutex_unlock(&c->pace_lock);
	} else {
		begin = now;
	}
	for (;;) {
		uint64_t left = begin > now ? base_min(begin - now, FETCH_WAIT_NS) : 0;
		struct timespec t = {.tv_nsec = (long)left};

		if (c->options->cancelled && c->options->cancelled())
			return base_error_set(err, -EINTR, "interrupted");
		if (!left)
			return 0;
		nanosleep(&t, NULL);
		now = base_monotonic_ns();
	}
}

static void fetch_checks(const struct pack_object_ref *ref, const uint8_t *from, uint64_t *checks, uint32_t *lens)
{
	uint64_t blocks = base_block_count(ref->raw_len);

	for (uint64_t i = 0; i < blocks; i++)
		checks[i] = base_get64(from + 8 * i);
	for (uint64_t i = 0; ref->codec != PACK_CODEC_RAW && i < blocks; i++)
		lens[i] = base_get32(from + 8 * blocks + 4 * i);
}

/* The stored lengths have to be those of all the stored bytes, as a writer's are. */
static int fetch_whole(const struct pack_object_ref *ref, const uint8_t *checks, struct base_error *err)
{
	uint64_t from, len;

	if (pack_object_stored_of(ref, 0, base_block_count(ref->raw_len), checks, &from, &len) == 0 &&
		len == ref->stored_len)
		return 0;
	return base_error_set(err, -BASE_EDAMAGED, "the stored lengths of its blocks are wrong");
}

static int fetch_from(struct copy *c, struct pack *pack, const struct pack_object_ref *ref, struct save_band *b,
	struct save_piece *p)
{
	bool raw = ref->codec == PACK_CODEC_RAW;
	uint8_t *to = b->raw + p->offset, *stored = raw ? to : b->out + p->offset;
	uint64_t blocks = base_block_count(ref->raw_len), at, len;
	base_cleanup_free uint8_t *checks = NULL;
	struct iovec iov[1];
	int r = pack_object_ref_check(ref, pack_size(pack) - PACK_TAIL_BYTES);

	if (r < 0 || ref->raw_len != p->len)
		return base_error_set(&b->err, r == -BASE_EVERSION ? r : -BASE_EDAMAGED,
			"pack %s: no such object at offset %llu", pack_name(pack), (unsigned long long)ref->offset);
	pack_object_checks_of(ref, 0, blocks, &at, &len);
	checks = malloc(len + 1);
	if (!checks)
		return base_no_memory(&b->err);
	r = fetch_pace(c, len + ref->stored_len, &b->err);
	iov[0] = (struct iovec){checks, len};
	if (r == 0)
		r = pack_readv(pack, at, iov, 1, &b->err);
	if (r == 0)
		r = fetch_whole(ref, checks, &b->err);
	iov[0] = (struct iovec){stored, ref->stored_len};
	if (r == 0)
		r = pack_readv(pack, ref->offset, iov, 1, &b->err);
	if (r == 0)
		r = pack_object_take(pack, ref, 0, blocks, stored, checks, to, &b->err);
	if (r < 0)
		return r;
	fetch_checks(ref, checks, b->checks + p->first_block, b->lens + p->first_block);
	p->codec = ref->codec;
	p->stored_len = ref->stored_len;
	return 0;
}

int copy_fetch(struct copy *c, const char *name, const struct pack_object_ref *ref, struct save_band *b,
	struct save_piece *p)
{
	struct pack *pack;
	int r = store_pack_get(c->from, name, &pack, &b->err);

	if (r < 0)
		return r;
	r = fetch_from(c, pack, ref, b, p);
	store_pack_put(c->from, pack);
	return r;
}

int copy_fetch_blob(struct copy *c, const char *name, const struct pack_object_ref *ref, uint64_t offset, void *bytes,
	size_t len, struct base_error *err)
{
	struct pack *pack;
	int r = fetch_pace(c, len, err);

	if (r == 0)
		r = store_pack_get(c->from, name, &pack, err);
	if (r < 0)
		return r;
	r = pack_object_read_blocks(pack, ref, offset / BASE_BLOCK_BYTES, base_block_count(len), bytes, err);
	store_pack_put(c->from, pack);
	return r;
}
